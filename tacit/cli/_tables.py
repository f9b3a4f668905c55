"""Code that the verbs for tables share: options, a recipe from a table, reading, printing."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit import events as ev
from tacit.cli import _shared as shared
from tacit.sources import as_place, is_database, name_of

if TYPE_CHECKING:
    from tacit.datasets import Schema
    from tacit.experiments import Facts, Recipe

_SCHEMA = typer.Option("--schema", help="TOML file of target, bounds and categories.")
MaybeSchema = Annotated[Path | None, _SCHEMA]
Table = Annotated[
    Path,
    typer.Argument(
        help="CSV or Parquet file of private records; duckdb:FILE#TABLE, duckdb:FILE.parquet or "
        "postgresql://HOST/DB#TABLE; or a run folder, to resume."
    ),
]
PublicTest = Annotated[
    Path | None,
    typer.Option(help="Table that is public, to measure the model exactly and for free."),
]
PublicSample = Annotated[
    Path | None,
    typer.Option(help="Table that is public, to check the schema exactly and for free."),
]
Evaluation = Annotated[
    bool,
    typer.Option("--evaluation/--no-evaluation", help="Spend a tenth of epsilon on noisy scores."),
]
_ALMOST = 0.99  # a bill below this part of the asked epsilon is explained
_TABLES = (".csv", ".tsv", ".txt", ".data", ".parquet", ".pq", ".gz", ".xz", ".bz2")


def is_table(name: str | Path) -> bool:
    """Return whether an argument names the file of a table, and no recipe or run folder."""
    return Path(name).suffix.lower() in _TABLES


def table_settings(
    table: Path,
    schema: "Schema",
    *,
    public_test: Path | None,
    public_sample: Path | None,
    evaluation: bool,
    ledger: Path | None,
    relation: ev.Relation | None = None,
) -> dict[str, Any]:  # Any: values of a recipe
    """Return the sections of a recipe that a table, its schema and the options declare.

    Paths are stored whole, so that a run can be resumed from any folder. The default of `relation`
    is the ledger's.
    """
    note_weights(schema)
    place = str(as_place(table))
    place = place if is_database(place) else str(table.resolve())
    data: dict[str, Any] = {
        "name": "table",
        "path": place,
        "schema": schema.to_dict(),
        "evaluation": "paid" if evaluation else "none",
    }
    for name, path in (("public_test", public_test), ("public_sample", public_sample)):
        if path is not None:
            data[name] = str(path.resolve())
    privacy: dict[str, Any] = {"unit": schema.unit}
    if ledger is not None:
        privacy |= {"ledger": str(ledger.resolve()), "relation": str(relation_of(ledger))}
    if relation is not None:
        privacy["relation"] = str(relation)
    name = name_of(place) if is_database(place) else table.name.split(".")[0]
    return {"name": name, "data": data, "privacy": privacy}


def recipe_and_folder(
    table: Path,
    schema: Path | None,
    *,
    method: str,
    epsilon: float | None,
    delta: float,
    ledger: Path | None,
    relation: ev.Relation | None,
    seed: int | None,
    out: Path | None,
    evaluation: bool = False,
    public_test: Path | None = None,
    public_sample: Path | None = None,
    own: dict[str, Any],  # Any: sections of the method, with values of a recipe
) -> "tuple[Recipe, Path]":
    """Return the recipe of a table by its options and the folder to run it in.

    If `table` is a run folder, the recipe is the one in it. Nothing has been paid yet.
    """
    from tacit.datasets import Schema
    from tacit.experiments import RECIPE, Recipe

    if (table / RECIPE).is_file():
        recipe = Recipe.read(table / RECIPE)
        if recipe.method != method:
            raise ValueError(f"{table} holds no {method}, but a run of method {recipe.method}.")
        if schema is not None or epsilon is not None or ledger is not None:
            raise ValueError(
                f"{table} is a run folder, whose recipe has these settings. Leave them out to "
                "resume it, or give the table for a new run."
            )
        return recipe, table
    if schema is None or epsilon is None:
        raise ValueError("a table needs --schema FILE and --epsilon NUMBER.")
    settings = table_settings(
        table,
        Schema.read(schema),
        public_test=public_test,
        public_sample=public_sample,
        evaluation=evaluation,
        ledger=ledger,
        relation=relation,
    )
    settings["privacy"] |= {"epsilon": epsilon, "delta": delta}
    recipe = Recipe.from_dict(
        settings | own | {"run": {} if seed is None else {"seed": seed}}, method=method
    )
    return recipe, run_folder(out, f"{recipe.name}-{method}-epsilon-{epsilon:g}")


def print_fit(facts: "Facts", folder: Path, recipe: "Recipe", *, page: bool, as_json: bool) -> None:
    """Write the page of a run that fitted coefficients, and print them with cost and quality."""
    written = shared.write_page(folder) if page else None
    fitted = json.loads((folder / facts.model_file).read_text(encoding="utf-8"))
    stated = recipe.privacy.delta
    if as_json:
        names = ("coefficients", "references", "informative")
        found = {name: fitted[name] for name in names if name in fitted}
        if facts.method == "transfer":
            found["epsilon_per_file"] = recipe.privacy.epsilon
        method = f"{fitted['kind']} regression, {fitted['method']}"
        shared.print_json(
            {"method": method, **found, **shared.outcome(facts, folder, written), "delta": stated}
        )
        return
    print_coefficients(fitted["coefficients"], fitted["references"])
    if "informative" in fitted:
        typer.echo(f"sources that agree: {', '.join(fitted['informative']) or 'none'}")
    cost = facts.epsilon if stated else recipe.privacy.epsilon  # the facts hold at their delta
    typer.echo(
        f"{fitted['kind']} regression, {fitted['method']}: epsilon = "
        f"{shared.round_up(cost or facts.epsilon, 4)} at delta = {stated:g}, {facts.relation}"
    )
    if stated and (asked := recipe.privacy.epsilon) and facts.epsilon < _ALMOST * asked:
        typer.echo(
            f"          of the {asked:g} asked for: check, fit and evaluation cost less together "
            "than the sum of their shares"
        )
    typer.echo(shared.utility_line(facts))
    typer.echo(f"run       {folder}")


def note_weights(schema: "Schema") -> None:
    """Print a note if the schema declares weights, which no verb uses yet."""
    if any(column.type == "weight" for column in schema.declared):
        typer.echo("note: weights are not used: every record counts the same.", err=True)


def relation_of(ledger: Path) -> ev.Relation:
    """Return the neighboring relation of an existing ledger."""
    from tacit.ledger import Ledger

    shared.require_ledger(ledger)
    with Ledger(ledger, read_only=True) as opened:
        return opened.relation


def run_folder(out: Path | None, name: str) -> Path:
    """Return the run folder to write to; raise before anything is paid if it cannot be one."""
    folder = out or Path("runs") / name
    shared.require_folder(folder)
    return folder


def advised(recipe: "Recipe", schema: "Schema") -> "Recipe":
    """Return a DP-SGD recipe of a table with the settings that `tacit advise` gives for it."""
    from tacit.experiments import advise, count_records

    n = count_records(recipe.data)
    found = advise(
        n_records=n,
        n_features=max(1, len(schema.feature_names)),
        epsilon=recipe.privacy.epsilon or 1.0,
        delta=recipe.privacy.delta,
        n_classes=schema.n_classes,
    )
    return recipe.with_settings(found.settings())


def print_coefficients(values: dict[str, Any], references: dict[str, str]) -> None:
    """Print coefficients by name; a category with the reference that it is compared with."""
    labels = {}
    for name in values:
        column = name.partition("=")[0]
        labels[name] = f"{name} (vs {references[column]})" if column in references else name
    width = max(map(len, labels.values()))
    for name, value in values.items():
        shown = " ".join(f"{v:>12.6g}" for v in (value if isinstance(value, list) else [value]))
        typer.echo(f"{labels[name]:<{width}}  {shown}")
