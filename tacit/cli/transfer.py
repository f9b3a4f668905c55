"""`tacit transfer`: a private linear model of one table, with the help of related tables."""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables
from tacit.cli._options import expanded


@expanded
def transfer(
    target: tables.Table,
    sources: Annotated[list[Path] | None, typer.Argument(help="Files of related tables.")] = None,
    *,
    given: tables.FitOptions,
    epsilon: shared.MaybeEpsilon = None,
    delta: shared.Delta = 1e-6,
    h: Annotated[
        float | None,
        typer.Option(
            "--h",
            help="Declare that coefficients of related tables are within this distance "
            "[they must be seen to help].",
        ),
    ] = None,
    q: Annotated[
        int, typer.Option("--q", help="Norm of that distance and of the penalty: 1 or 2.")
    ] = 2,
    penalty: Annotated[
        float | None,
        typer.Option("--lambda", help="Penalty of coefficients that differ [by the noise]."),
    ] = None,
    overlapping: Annotated[
        bool, typer.Option("--overlapping", help="A person may be in several files: costs add up.")
    ] = False,
) -> None:
    """Fit a linear model to TARGET, with the help of those SOURCES that agree with it.

    Each file spends EPSILON at DELTA: 5 % check that the schema fits the file, 10 % of the target's
    measure the model, the rest fits it as tacit regress does. Sources and target are combined from
    these fits, which costs nothing more. --h and --lambda are in units in which every column is
    scaled to [-1, 1].

    \b
    Example:
      tacit transfer clinic.csv north.csv south.csv --schema clinic.toml --epsilon 1
    """
    from tacit.experiments import run_transfer

    asked = {"sources": [str(path.resolve()) for path in sources or ()], "q": q}
    asked |= {"overlapping": overlapping}
    asked |= {k: v for k, v in (("h", h), ("penalty", penalty)) if v is not None}
    recipe, folder = tables.recipe_and_folder(
        target, given, method="transfer", epsilon=epsilon, delta=delta, own={"transfer": asked}
    )
    tables.print_fit(run_transfer(recipe, folder), folder, recipe, given)
