"""`tacit transfer`: a private linear model of one table, with the help of related tables."""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables


def transfer(
    target: tables.Table,
    sources: Annotated[list[Path] | None, typer.Argument(help="Files of related tables.")] = None,
    *,
    schema: tables.MaybeSchema = None,
    epsilon: shared.MaybeEpsilon = None,
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
    public_test: tables.PublicTest = None,
    public_sample: tables.PublicSample = None,
    evaluation: tables.Evaluation = True,
    relation: shared.MaybeRelation = None,
    ledger: shared.LedgerFile = None,
    seed: shared.Seed = None,
    out: shared.Out = None,
    page: shared.WithPage = True,
    as_json: shared.AsJson = False,
) -> None:
    """Fit a linear model to TARGET, with the help of those SOURCES that agree with it.

    Each file spends EPSILON at DELTA: 5 % check that the schema fits the file, 10 % of the target's
    measure the model, the rest fits it. The distance --h is that of the coefficients when every
    column is scaled to [-1, 1].

    \b
    Example:
      tacit transfer clinic.csv north.csv south.csv --schema clinic.toml --epsilon 1
    """
    from tacit.experiments import run_transfer

    asked = {"sources": [str(path.resolve()) for path in sources or ()], "q": q}
    asked |= {"overlapping": overlapping} | ({} if h is None else {"h": h})
    recipe, folder = tables.recipe_and_folder(
        target,
        schema,
        method="transfer",
        epsilon=epsilon,
        delta=delta,
        ledger=ledger,
        relation=relation,
        seed=seed,
        out=out,
        evaluation=evaluation,
        public_test=public_test,
        public_sample=public_sample,
        own={"transfer": asked},
    )
    facts = run_transfer(recipe, folder)
    tables.print_fit(facts, folder, recipe, page=page, as_json=as_json)
