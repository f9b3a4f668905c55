"""`tacit regress`: a private linear or logistic model of a table, in a run folder."""

from typing import Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables
from tacit.cli._options import expanded


@expanded
def regress(
    table: tables.Table,
    *,
    given: tables.FitOptions,
    epsilon: shared.MaybeEpsilon = None,
    delta: Annotated[
        float, typer.Option("--delta", help="0 asks for pure differential privacy (linear only).")
    ] = 1e-6,
    method: Annotated[
        str,
        typer.Option(
            help="auto. Linear: functional, adassp, gradient. Logistic: gradient, descent, "
            "objective. Wide tables: frank-wolfe."
        ),
    ] = "auto",
) -> None:
    """Fit a linear model if the target is a number, and a logistic model if it has categories.

    The schema names the target, and declares the bounds or the categories of every column. Of
    EPSILON, 5 % check that the schema fits the table, 10 % measure the model, the rest fits it.

    \b
    Example:
      tacit regress census.csv --schema census.toml --epsilon 1 --ledger census.ledger
      tacit regress runs/census-regression          resumes an interrupted run
    """
    from tacit.experiments import run_regression

    own = {"regression": {"method": method}}
    recipe, folder = tables.recipe_and_folder(
        table, given, method="regression", epsilon=epsilon, delta=delta, own=own
    )
    tables.print_fit(run_regression(recipe, folder), folder, recipe, given)
