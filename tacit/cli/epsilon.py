"""`tacit epsilon`: the epsilon of a run of DP-SGD, by one accountant or by all of them."""

import time
from collections.abc import Callable
from typing import Annotated, NamedTuple

import typer

from tacit import events as ev
from tacit.cli import _shared as shared
from tacit.errors import NotCertified, UnsupportedEvent

app = typer.Typer(add_completion=False, rich_markup_mode=None)

# Names of classes in tacit.accounting, tightest first, each with its description.
ACCOUNTANTS = {
    "PLD": "privacy loss distribution, certified; the default",
    "RDP": "Rényi differential privacy (Mironov 2017)",
    "Moments": "moments accountant (Abadi et al. 2016)",
    "GDP": "Gaussian DP, exact where it applies",
    "StrongComposition": "strong composition, as published in 2016",
    "BasicComposition": "sum of the prices of all steps",
    "CentralLimitGDP": "approximation, NOT a guarantee",
}


class Quote(NamedTuple):
    """The epsilon by one accountant, or None with the reason in `note`."""

    accountant: str
    epsilon: float | None
    seconds: float
    note: str


@app.command()
def epsilon(
    *,
    rate: shared.Rate,
    noise_multiplier: shared.NoiseMultiplier,
    steps: shared.Steps,
    delta: shared.Delta,
    relation: shared.Relation = ev.Relation.ADD_REMOVE,
    compare: Annotated[
        bool, typer.Option(help="Also list every accountant, with its computing time.")
    ] = False,
    as_json: shared.AsJson = False,
) -> None:
    """Print the epsilon of a DP-SGD run at DELTA, rounded up, with certified bounds.

    \b
    Example:
      tacit epsilon --rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5
    """
    import tacit

    event = shared.sgd(rate, noise_multiplier, steps)
    bracket = tacit.bracket(event, delta=delta, relation=relation)
    rows = compare_accountants(event, delta=delta, relation=relation) if compare else []
    if as_json:
        shared.print_json(
            {
                "epsilon": bracket.upper,
                "lower": bracket.lower,
                "upper": bracket.upper,
                "delta": delta,
                "relation": str(relation),
                "event": event.to_dict(),
            }
            | ({"accountants": [row._asdict() for row in rows]} if compare else {})
        )
        return
    typer.echo(f"epsilon = {shared.round_up(bracket.upper)}")
    typer.echo(
        f"certified: {shared.round_down(bracket.lower, 8)} <= epsilon "
        f"<= {shared.round_up(bracket.upper, 8)} at delta = {delta:g}, {relation}"
    )
    typer.echo(f"for {event}")
    if compare:
        _print_table(rows)


def compare_accountants(event: ev.Event, *, delta: float, relation: ev.Relation) -> list[Quote]:
    """Return the price of `event` by every accountant, with the time that one query takes."""
    from tacit import accounting

    rows = []
    for name, note in ACCOUNTANTS.items():
        accountant = getattr(accounting, name)()
        value, seconds, why = _timed(
            lambda accountant=accountant: accountant.epsilon(event, delta=delta, relation=relation)
        )
        rows.append(Quote(name, value, seconds, why or note))
    return rows


def _timed(query: Callable[[], float]) -> tuple[float | None, float, str]:
    """Return the result, the seconds of a second query, and the reason if there is no result."""
    try:
        query()  # the first query may include imports and the making of tables
        start = time.perf_counter()
        return query(), time.perf_counter() - start, ""
    except (UnsupportedEvent, NotCertified) as refusal:
        return None, 0.0, str(refusal)


def _print_table(rows: list[Quote]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("accountant", "epsilon", "time", "what it is", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    for row in rows:
        shown = "-" if row.epsilon is None else shared.round_up(row.epsilon)
        time_taken = "-" if row.epsilon is None else f"{row.seconds * 1e3:.1f} ms"
        table.add_row(row.accountant, shown, time_taken, row.note)
    typer.echo()
    Console().print(table)
