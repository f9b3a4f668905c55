"""Code that the verbs for tables share: options, a recipe from a table, reading, printing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit import events as ev
from tacit.cli import _shared as shared

if TYPE_CHECKING:
    from tacit.datasets import Schema
    from tacit.experiments import Recipe

_SCHEMA = typer.Option("--schema", help="TOML file of target, bounds and categories.")
MaybeSchema = Annotated[Path | None, _SCHEMA]
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
    data: dict[str, Any] = {
        "name": "table",
        "path": str(table.resolve()),
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
    return {"name": table.name.split(".")[0], "data": data, "privacy": privacy}


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
