"""Code that the verbs for tables share: options, a recipe from a table, reading, printing."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit import events as ev
from tacit.cli import _shared as shared
from tacit.sources import as_place, is_database, name_of, require_rows

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
    bool | None,
    typer.Option(
        "--evaluation/--no-evaluation",
        help="Spend a tenth of epsilon on noisy scores [unless they would say nothing].",
    ),
]
Public = Annotated[
    bool,
    typer.Option("--public", help="The records are public: measure on them without noise."),
]
RecordsPerPerson = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Most records of each person that are used, if the schema names persons; default 1.",
    ),
]
_ALMOST = 0.99  # a bill below this part of the asked epsilon is explained
_TABLES = (".csv", ".tsv", ".txt", ".data", ".parquet", ".pq", ".gz", ".xz", ".bz2")


def is_table(name: str | Path) -> bool:
    """Return whether an argument names a table, and no recipe or run folder."""
    return is_database(as_place(name)) or Path(name).suffix.lower() in _TABLES


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options of the verbs that make releases of a table."""

    schema: MaybeSchema = None
    public_sample: PublicSample = None
    records_per_person: RecordsPerPerson = None
    relation: shared.MaybeRelation = None
    ledger: shared.LedgerFile = None
    seed: shared.Seed = None
    out: shared.Out = None
    page: shared.WithPage = True
    as_json: shared.AsJson = False


@dataclass(frozen=True, kw_only=True)
class FitOptions(TableOptions):
    """Options of the verbs that fit a model to a table and measure it."""

    public_test: PublicTest = None
    evaluation: Evaluation = None


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(FitOptions):
    """Options of the verbs that train a recipe, or a model of a table."""

    public: Public = False
    data: shared.Root = None
    settings: shared.Settings = None
    trust_code: shared.TrustCode = None

    def recipe(
        self, name: str, *, epsilon: float | None = None, delta: float | None = None
    ) -> "Recipe":
        """Return the DP-SGD recipe `name`, or that of the table `name`, with these options.

        For a table, `tacit advise` chooses the settings that `--set` does not give. Nothing has
        been paid yet.
        """
        from tacit.experiments import Recipe

        changes: dict[str, Any] = {"run__seed": self.seed, "privacy__epsilon": epsilon}
        changes["privacy__delta"] = delta
        require_rows(as_place(name))
        if is_table(name) or self.schema is not None:
            if self.schema is None or epsilon is None:
                raise ValueError("a table needs --schema FILE and --epsilon NUMBER.")
            settings = table_settings(Path(name), self)
            settings["privacy"] |= {"epsilon": epsilon} | (
                {} if delta is None else {"delta": delta}
            )
            chosen = shared.with_settings(
                advised(Recipe.from_dict(settings)), self.settings, **changes
            )
        else:
            if self.ledger is not None:
                shared.require_ledger(self.ledger)
                changes["privacy__ledger"] = str(self.ledger.resolve())
            changes["privacy__relation"] = None if self.relation is None else str(self.relation)
            changes["data__is_public"] = self.public or None
            changes["data__records_per_person"] = self.records_per_person
            chosen = shared.recipe_of(name, self.settings, trust_code=self.trust_code, **changes)
        if chosen.method != "dp-sgd":
            raise ValueError(f"{name} is of method {chosen.method}, which is not trained.")
        return chosen


def table_settings(table: Path, given: "TableOptions") -> dict[str, Any]:  # Any: values of a recipe
    """Return the sections of a recipe that a table, its schema and the options declare.

    Paths are stored whole, so that a run can be resumed from any folder. The default relation is
    the ledger's.
    """
    from tacit.datasets import Schema

    assert given.schema is not None  # callers have checked
    schema = Schema.read(given.schema)
    note_weights(schema)
    place = str(as_place(table))
    place = place if is_database(place) else str(table.resolve())
    is_fit = isinstance(given, FitOptions)
    data: dict[str, Any] = {
        "name": "table",
        "path": place,
        "schema": schema.to_dict(),
        "evaluation": "paid" if is_fit and given.evaluation is not False else "none",
    }
    if given.records_per_person is not None:
        data["records_per_person"] = given.records_per_person
    if isinstance(given, RecipeOptions) and given.public:
        data["is_public"] = True
    public_test = given.public_test if is_fit else None
    for name, path in (("public_test", public_test), ("public_sample", given.public_sample)):
        if path is not None:
            data[name] = str(path.resolve())
    privacy: dict[str, Any] = {"unit": schema.unit}
    if given.ledger is not None:
        relation = relation_of(given.ledger)
        privacy |= {"ledger": str(given.ledger.resolve()), "relation": str(relation)}
    if given.relation is not None:
        privacy["relation"] = str(given.relation)
    name = name_of(place) if is_database(place) else table.name.split(".")[0]
    return {"name": name, "data": data, "privacy": privacy}


def recipe_and_folder(
    table: Path,
    given: TableOptions,
    *,
    method: str,
    epsilon: float | None,
    delta: float,
    own: dict[str, Any],  # Any: sections of the method, with values of a recipe
) -> "tuple[Recipe, Path]":
    """Return the recipe of a table by its options and the folder to run it in.

    If `table` is a run folder, the recipe is the one in it. Nothing has been paid yet.
    """
    from tacit.experiments import RECIPE, Recipe

    if (table / RECIPE).is_file():
        recipe = Recipe.read(table / RECIPE)
        if recipe.method != method:
            raise ValueError(f"{table} holds no {method}, but a run of method {recipe.method}.")
        settings = (given.schema, epsilon, given.ledger, given.records_per_person)
        if any(setting is not None for setting in settings):
            raise ValueError(
                f"{table} is a run folder, whose recipe has these settings. Leave them out to "
                "resume it, or give the table for a new run."
            )
        return recipe, table
    if given.schema is None or epsilon is None:
        raise ValueError("a table needs --schema FILE and --epsilon NUMBER.")
    settings = table_settings(table, given)
    settings["privacy"] |= {"epsilon": epsilon, "delta": delta}
    if method == "regression" and isinstance(given, FitOptions) and given.evaluation is None:
        _save_evaluation(settings["data"], epsilon)
    run = {} if given.seed is None else {"seed": given.seed}
    recipe = Recipe.from_dict(settings | own | {"run": run}, method=method)
    return recipe, run_folder(given.out, f"{recipe.name}-{method}-epsilon-{epsilon:g}")


def _save_evaluation(data: dict[str, Any], epsilon: float) -> None:  # Any: values of a recipe
    """Turn off a paid R2 that would say nothing, by public facts, and print a note about it."""
    from tacit.datasets import Schema, count_rows
    from tacit.experiments import R2_NOT_WORTH, DataSettings, is_r2_worth_paying

    schema = Schema.from_dict(data["schema"])
    is_paid = data["evaluation"] == "paid" and "public_test" not in data
    if not is_paid or is_database(data["path"]) or not schema.target or schema.n_classes:
        return
    n_records = count_rows(data["path"], schema.dialect)
    if not is_r2_worth_paying(n_records, epsilon, DataSettings()):
        data["evaluation"] = "none"
        typer.echo(f"note: {R2_NOT_WORTH}", err=True)


def print_fit(facts: "Facts", folder: Path, recipe: "Recipe", given: TableOptions) -> None:
    """Write the page of a run that fitted coefficients, and print them with cost and quality."""
    written = shared.write_results(folder, page=given.page)
    fitted = json.loads((folder / facts.model_file).read_text(encoding="utf-8"))
    stated = recipe.privacy.delta
    if given.as_json:
        names = ("coefficients", "references", "residual_std", "without_target", "informative",
                 "alone", "weight", "misfits")  # fmt: skip
        found = {name: fitted[name] for name in names if name in fitted}
        if "intervals" in fitted:
            found["coefficient_intervals"] = fitted["intervals"]
        if facts.method == "transfer":
            found["epsilon_per_file"] = recipe.privacy.epsilon
        method = f"{fitted['kind']} regression, {fitted['method']}"
        shared.print_json(
            {"method": method, **found, **shared.outcome(facts, folder, written), "delta": stated}
        )
        return
    print_coefficients(fitted)
    if share := fitted.get("without_target"):
        typer.echo(f"about {share['value']:.0%} of the records have no target and were left out")
    if "informative" in fitted:
        typer.echo(f"sources that agree: {', '.join(fitted['informative']) or 'none'}")
    if "weight" in fitted:
        typer.echo(
            f"          {fitted['weight']:.0%} of the way from the target's own fit to that of all"
        )
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


def advised(recipe: "Recipe") -> "Recipe":
    """Return a DP-SGD recipe of a table with the settings that `tacit advise` gives for it."""
    from tacit.datasets import Schema
    from tacit.experiments import advise, count_records

    schema = Schema.from_dict(recipe.data.schema)
    if schema.n_classes is None:
        raise ValueError(
            f"target {schema.target!r} is a number. Use tacit regress, or declare at_least."
        )
    found = advise(
        n_records=count_records(recipe.data),
        n_features=max(1, len(schema.feature_names)),
        epsilon=recipe.privacy.epsilon or 1.0,
        delta=recipe.privacy.delta,
        n_classes=schema.n_classes,
    )
    return recipe.with_settings(found.settings())


def print_coefficients(fitted: dict[str, Any]) -> None:  # Any: JSON values of model.json
    """Print the coefficients in model.json by name, with standard errors and intervals.

    A category is printed with the reference that it is compared with.
    """
    labels, references = {}, fitted["references"]
    for name in fitted["coefficients"]:
        column = name.partition("=")[0]
        labels[name] = f"{name} (vs {references[column]})" if column in references else name
    width = max(map(len, labels.values()))
    intervals = fitted.get("intervals")
    if intervals is not None:
        tail = (1 - intervals["confidence"]) / 2
        ends = (f"[{tail:.3g}", f"{1 - tail:.3g}]")
        titles = " ".join(f"{t:>12}" for t in ("coef", "estimate", "std err", *ends))
        typer.echo(f"{'':<{width}}  {titles}")
    for name, value in fitted["coefficients"].items():
        shown = [*value] if isinstance(value, list) else [value]
        if intervals is not None:
            row = intervals["rows"][name]
            shown += [row[key] for key in ("estimate", "std_error", "lower", "upper")]
        numbers = " ".join(f"{'hidden' if v is None else f'{v:.6g}':>12}" for v in shown)
        typer.echo(f"{labels[name]:<{width}}  {numbers}")
    if fitted.get("residual_std") is not None:
        typer.echo(f"residual standard deviation  {fitted['residual_std']:.6g}")
    if intervals is not None:
        typer.echo(
            "coef predicts, and is shrunk where noise asks for it. The estimate is not shrunk; its "
            "interval covers sampling and privacy noise."
        )
