"""`tacit transfer`: a private linear model of one table, with the help of related tables."""

from pathlib import Path
from typing import Annotated

import typer

from tacit import events as ev
from tacit.cli import _shared as shared
from tacit.cli import _tables as tables


def transfer(
    target: Annotated[Path, typer.Argument(help="CSV or Parquet file to fit.")],
    sources: Annotated[list[Path], typer.Argument(help="Files of related tables.")],
    *,
    schema: tables.SchemaFile,
    epsilon: shared.Epsilon,
    delta: shared.Delta = 1e-6,
    h: Annotated[
        float | None,
        typer.Option("--h", help="Largest distance of coefficients at which a source still helps."),
    ] = None,
    q: Annotated[
        int, typer.Option("--q", help="Norm of that distance and of the penalty: 1 or 2.")
    ] = 2,
    overlapping: Annotated[
        bool, typer.Option("--overlapping", help="A person may be in several files: costs add up.")
    ] = False,
    relation: shared.Relation = ev.Relation.ADD_REMOVE,
    ledger: shared.LedgerFile = None,
    seed: shared.Seed = None,
    out: tables.ModelFile = None,
    as_json: shared.AsJson = False,
) -> None:
    """Fit a linear model to TARGET, with the help of those SOURCES that agree with it.

    Each file spends EPSILON at DELTA. The distance --h is that of the coefficients when every
    column is scaled to [-1, 1].

    \b
    Example:
      tacit transfer clinic.csv north.csv south.csv --schema clinic.toml --epsilon 1
    """
    from tacit import accounting
    from tacit.datasets import Schema
    from tacit.regression import Bounds, TransferRegression

    if ledger is not None:
        shared.require_ledger(ledger)
    if out is not None:
        shared.require_file(out)
    declared = Schema.read(schema)
    if declared.n_classes is not None:
        raise ValueError("transfer needs a number as target: declare lower and upper for it.")
    files = [tables.read(path, declared) for path in (target, *sources)]
    asked = (epsilon, delta, h, q, overlapping, str(relation), seed)
    read = [target, *sources, schema]
    with shared.paying(ledger, seed, files=read, settings=asked) as (paid, noise):
        model = TransferRegression(
            epsilon=epsilon,
            delta=delta,
            bounds=declared.bounds,
            target_bounds=Bounds(-1, 1),
            h=h,
            q=q,
            disjoint=not overlapping,
            relation=str(relation),
            ledger=paid,
            random_state=noise,
        ).fit(*files[0], sources=files[1:])
        used = [sources[k].name for k in model.informative_]
        about = {
            "method": f"transfer from {', '.join(used) or 'no source'}",
            "informative": used,
            "epsilon_per_file": epsilon,
            "epsilon": accounting.epsilon(model.event_, delta=delta, relation=relation),
            "delta": delta,
            "relation": str(relation),
        }
        tables.show(declared, model, about, out=out, as_json=as_json)
