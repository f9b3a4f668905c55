"""`tacit summarize`: private statistics of a table, each with a confidence interval."""

import json
from typing import Annotated, Any

import typer

from tacit import events as ev
from tacit.cli import _shared as shared
from tacit.cli import _tables as tables
from tacit.cli._options import expanded


@expanded
def summarize(
    table: tables.Table,
    *,
    given: tables.TableOptions,
    epsilon: shared.MaybeEpsilon = None,
    delta: Annotated[float, typer.Option(help="0 asks for pure differential privacy.")] = 0.0,
    quantiles: Annotated[
        str, typer.Option(help="Probabilities of the quantiles, separated by commas.")
    ] = "0.25,0.5,0.75",
    about: Annotated[
        str, typer.Option(help="What intervals are about: population or records.")
    ] = "population",
    confidence: Annotated[float, typer.Option(help="Confidence of each interval.")] = 0.95,
) -> None:
    """Print counts, means, deviations, quantiles and shares of the declared columns.

    A twentieth of epsilon first pays for a noisy count of values outside the declared domains: a
    wrong schema is refused before the rest is spent. A finished run is printed again for free.

    \b
    Example:
      tacit summarize census.csv --schema census.toml --epsilon 1 --ledger census.ledger
    """
    from tacit.experiments import SUMMARY, run_summary

    asked = {"about": about, "confidence": confidence}
    own = {"summary": asked | {"quantiles": shared.numbers(quantiles, "--quantiles")}}
    recipe, folder = tables.recipe_and_folder(
        table, given, method="summary", epsilon=epsilon, delta=delta, own=own
    )
    run_summary(recipe, folder)
    written = shared.write_results(folder, page=given.page)
    stored = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    if given.as_json:
        shared.print_json(
            stored | {"run": str(folder), "page": None if written is None else str(written)}
        )
    else:
        _show(stored)
        typer.echo(f"run       {folder}")


def _show(stored: dict[str, Any]) -> None:  # Any: JSON values
    from tacit.summaries import Statistic, StatisticTable

    rows = tuple(Statistic.from_dict(row) for row in stored["rows"])
    event, relation = ev.from_dict(stored["event"]), ev.Relation(stored["relation"])
    table = StatisticTable(rows, event, stored["epsilon"], stored["delta"], relation)
    typer.echo(str(table))
