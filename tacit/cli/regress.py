"""`tacit regress`: a private linear or logistic model of a table, in a run folder."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables


def regress(
    table: Annotated[
        Path,
        typer.Argument(help="CSV or Parquet file of private records; or a run folder, to resume."),
    ],
    *,
    schema: tables.MaybeSchema = None,
    epsilon: shared.MaybeEpsilon = None,
    delta: Annotated[
        float, typer.Option("--delta", help="0 asks for pure differential privacy (linear only).")
    ] = 1e-6,
    method: Annotated[
        str,
        typer.Option(
            help="Linear: auto, functional, adassp, gradient. Logistic: gradient, sgd, objective."
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
    from tacit.datasets import Schema
    from tacit.experiments import RECIPE, Recipe, run_regression

    if (table / RECIPE).is_file():
        recipe, folder = Recipe.read(table / RECIPE), table
        if recipe.method != "regression":
            raise ValueError(f"{table} holds no regression. Resume it with: tacit train {table}")
    else:
        if schema is None or epsilon is None:
            raise ValueError("regress needs --schema FILE and --epsilon NUMBER.")
        declared = Schema.read(schema)
        declared.target_column  # noqa: B018  # raises if the schema names none
        settings = tables.table_settings(
            table,
            declared,
            public_test=public_test,
            public_sample=public_sample,
            evaluation=evaluation,
            ledger=ledger,
            relation=relation,
        )
        settings["privacy"] |= {"epsilon": epsilon, "delta": delta}
        settings |= {
            "regression": {"method": method},
            "run": {} if seed is None else {"seed": seed},
        }
        recipe = Recipe.from_dict(settings, method="regression")
        folder = tables.run_folder(out, f"{recipe.name}-regression-epsilon-{epsilon:g}")
    facts = run_regression(recipe, folder)
    written = shared.write_page(folder) if page else None
    fitted = json.loads((folder / facts.model_file).read_text(encoding="utf-8"))
    stated = recipe.privacy.delta
    if as_json:
        named = {name: fitted[name] for name in ("coefficients", "references")}
        shared.print_json(
            {"method": f"{fitted['kind']} regression, {fitted['method']}", **named}
            | {"delta": stated}
            | shared.outcome(facts, folder, written)
        )
        return
    tables.print_coefficients(fitted["coefficients"], fitted["references"])
    cost = facts.epsilon if stated else recipe.privacy.epsilon  # the facts hold at their delta
    typer.echo(
        f"{fitted['kind']} regression, {fitted['method']}: epsilon = "
        f"{shared.round_up(cost or facts.epsilon, 4)} at delta = {stated:g}, {facts.relation}"
    )
    typer.echo(shared.utility_line(facts))
    typer.echo(f"run       {folder}")
