"""`tacit transfer`: a private linear model of one table, with the help of related tables."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables


def transfer(
    target: Annotated[
        Path, typer.Argument(help="CSV or Parquet file to fit; or a run folder, to resume.")
    ],
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
    relation: shared.MaybeRelation = None,
    ledger: shared.LedgerFile = None,
    seed: shared.Seed = None,
    out: shared.Out = None,
    page: shared.WithPage = True,
    as_json: shared.AsJson = False,
) -> None:
    """Fit a linear model to TARGET, with the help of those SOURCES that agree with it.

    Each file spends EPSILON at DELTA. The distance --h is that of the coefficients when every
    column is scaled to [-1, 1].

    \b
    Example:
      tacit transfer clinic.csv north.csv south.csv --schema clinic.toml --epsilon 1
    """
    from tacit.datasets import Schema
    from tacit.experiments import RECIPE, Recipe, run_transfer

    if (target / RECIPE).is_file():
        recipe, folder = Recipe.read(target / RECIPE), target
        if recipe.method != "transfer":
            raise ValueError(f"{target} holds no transfer, but a run of method {recipe.method}.")
    else:
        if schema is None or epsilon is None or not sources:
            raise ValueError("transfer needs SOURCES, --schema FILE and --epsilon NUMBER.")
        settings = tables.table_settings(
            target,
            Schema.read(schema),
            public_test=None,
            public_sample=None,
            evaluation=False,
            ledger=ledger,
            relation=relation,
        )
        settings["privacy"] |= {"epsilon": epsilon, "delta": delta}
        files = [str(path.resolve()) for path in sources]
        asked = {"sources": files, "q": q, "overlapping": overlapping}
        settings |= {
            "transfer": asked | ({} if h is None else {"h": h}),
            "run": {} if seed is None else {"seed": seed},
        }
        recipe = Recipe.from_dict(settings, method="transfer")
        folder = tables.run_folder(out, f"{recipe.name}-transfer-epsilon-{epsilon:g}")
    facts = run_transfer(recipe, folder)
    written = shared.write_page(folder) if page else None
    fitted = json.loads((folder / facts.model_file).read_text(encoding="utf-8"))
    if as_json:
        names = ("coefficients", "references", "informative")
        shared.print_json(
            {name: fitted[name] for name in names}
            | {"epsilon_per_file": recipe.privacy.epsilon}
            | shared.outcome(facts, folder, written)
        )
        return
    tables.print_coefficients(fitted["coefficients"], fitted["references"])
    typer.echo(
        f"transfer from {', '.join(fitted['informative']) or 'no source'}: epsilon = "
        f"{shared.round_up(facts.epsilon, 4)} at delta = {facts.delta:g}, {facts.relation}"
    )
    typer.echo(f"run       {folder}")
