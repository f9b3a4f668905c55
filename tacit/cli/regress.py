"""`tacit regress`: a private linear or logistic model of a table."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tacit import events as ev
from tacit.cli import _shared as shared
from tacit.cli import _tables as tables


def regress(
    table: Annotated[Path, typer.Argument(help="CSV or Parquet file of private records.")],
    *,
    schema: tables.SchemaFile,
    epsilon: shared.Epsilon,
    delta: Annotated[
        float, typer.Option("--delta", help="0 asks for pure differential privacy (linear only).")
    ] = 1e-6,
    method: Annotated[
        str | None,
        typer.Option(
            help="Linear: auto, functional, adassp, gradient. Logistic: gradient, sgd, objective."
        ),
    ] = None,
    relation: shared.Relation = ev.Relation.ADD_REMOVE,
    ledger: shared.LedgerFile = None,
    seed: shared.Seed = None,
    out: tables.ModelFile = None,
    as_json: shared.AsJson = False,
) -> None:
    """Fit a linear model if the target is a number, and a logistic model if it has categories.

    The schema names the target, and declares the bounds or the categories of every column. Values
    outside the bounds are clipped to them.

    \b
    Example:
      tacit regress census.csv --schema census.toml --epsilon 1 --ledger census.ledger
    """
    from tacit.datasets import Schema
    from tacit.regression import Bounds, LinearRegression, LogisticRegression

    declared = Schema.read(schema)
    x, y = tables.read(table, declared)
    options: dict[str, Any] = {  # Any: settings of several types
        "epsilon": epsilon,
        "delta": delta,
        "bounds": tables.bounds_of(declared),
        "relation": str(relation),
    } | ({} if method is None else {"method": method})
    asked = (epsilon, delta, str(relation), method, seed)
    with shared.paying(ledger, seed, files=[table, schema], settings=asked) as (paid, noise):
        options |= {"ledger": paid, "random_state": noise}
        if declared.n_classes is None:
            model = LinearRegression(target_bounds=Bounds(-1, 1), **options).fit(x, y)
            used = f"linear regression, {model.method_}"
        else:
            model = LogisticRegression(classes=range(declared.n_classes), **options).fit(x, y)
            used = f"logistic regression, {model.method}"
        about = {"method": used, "epsilon": epsilon, "delta": delta, "relation": str(relation)}
        tables.show(declared, model, about, out=out, as_json=as_json)
