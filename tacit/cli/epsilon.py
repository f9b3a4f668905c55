"""`tacit epsilon`: the epsilon of a run of DP-SGD, by one accountant or by all of them."""

import time
from functools import partial
from typing import Annotated, Any

import typer

from tacit import events as ev
from tacit.cli import _shared as shared
from tacit.errors import NotCertified, UnsupportedEvent

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


def epsilon(
    *,
    rate: shared.MaybeRate = None,
    noise_multiplier: shared.NoiseMultiplier,
    steps: shared.MaybeSteps = None,
    records: shared.MaybeRecords = None,
    batch_size: shared.MaybeBatch = None,
    epochs: shared.MaybeEpochs = None,
    delta: shared.Delta,
    relation: shared.Relation = ev.Relation.ADD_REMOVE,
    compare: Annotated[
        bool, typer.Option(help="Also list every accountant, with its computing time.")
    ] = False,
    as_json: shared.AsJson = False,
) -> None:
    """Print the epsilon of a DP-SGD run at DELTA, rounded up, with certified bounds.

    Give --rate and --steps, or --records, --batch-size and --epochs.

    \b
    Example:
      tacit epsilon --rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5
      tacit epsilon --records 60000 --batch-size 600 --epochs 100 --noise-multiplier 4 --delta 1e-5
    """
    import tacit

    sizes: dict[str, Any] = {"records": records, "batch_size": batch_size, "epochs": epochs}
    rate, steps = shared.rate_and_steps(rate, steps, **sizes)
    if rate is None or steps is None:
        raise ValueError("give --rate and --steps, or --records, --batch-size and --epochs.")
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
            | ({"accountants": rows} if compare else {})
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


def compare_accountants(
    event: ev.Event, *, delta: float, relation: ev.Relation
) -> list[dict[str, Any]]:  # Any: JSON values
    """Return the epsilon of `event` by every accountant, with the seconds that one query takes.

    If an accountant cannot price the event, `epsilon` is None and `note` gives the reason.
    """
    from tacit import accounting

    rows = []
    for name, note in ACCOUNTANTS.items():
        query = partial(getattr(accounting, name)().epsilon, event, delta=delta, relation=relation)
        seconds = 0.0
        try:
            query()  # the first query may include imports and the making of tables
            start = time.perf_counter()
            value = query()
            seconds = time.perf_counter() - start
        except (UnsupportedEvent, NotCertified) as refusal:
            value, note = None, str(refusal)
        rows.append({"accountant": name, "epsilon": value, "seconds": seconds, "note": note})
    return rows


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("accountant", "epsilon", "time", "description", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    for row in rows:
        shown = "-" if row["epsilon"] is None else shared.round_up(row["epsilon"])
        time_taken = "-" if row["epsilon"] is None else f"{row['seconds'] * 1e3:.1f} ms"
        table.add_row(row["accountant"], shown, time_taken, row["note"])
    typer.echo()
    Console().print(table)
