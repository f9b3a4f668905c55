"""`tacit regress`: a private linear or logistic model of a table, in a run folder."""

from typing import Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables


def regress(
    table: tables.Table,
    *,
    schema: tables.MaybeSchema = None,
    epsilon: shared.MaybeEpsilon = None,
    delta: Annotated[
        float, typer.Option("--delta", help="0 asks for pure differential privacy (linear only).")
    ] = 1e-6,
    method: Annotated[
        str,
        typer.Option(
            help="auto. Linear: functional, adassp, gradient. Logistic: gradient, sgd, objective."
        ),
    ] = "auto",
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
    """Fit a linear model if the target is a number, and a logistic model if it has categories.

    The schema names the target, and declares the bounds or the categories of every column. Of
    EPSILON, 5 % check that the schema fits the table, 10 % measure the model, the rest fits it.

    \b
    Example:
      tacit regress census.csv --schema census.toml --epsilon 1 --ledger census.ledger
      tacit regress runs/census-regression          resumes an interrupted run
    """
    from tacit.experiments import run_regression

    recipe, folder = tables.recipe_and_folder(
        table,
        schema,
        method="regression",
        epsilon=epsilon,
        delta=delta,
        ledger=ledger,
        relation=relation,
        seed=seed,
        out=out,
        evaluation=evaluation,
        public_test=public_test,
        public_sample=public_sample,
        own={"regression": {"method": method}},
    )
    facts = run_regression(recipe, folder)
    tables.print_fit(facts, folder, recipe, page=page, as_json=as_json)
