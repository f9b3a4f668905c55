"""The page of a ledger: its budget, what was spent over time, and by which run."""

import math
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from tacit import accounting
from tacit.events import Event, Repeated
from tacit.events import Sequence as EventSequence
from tacit.ledger import Entry, Ledger
from tacit.report.figures import Figure, Role, Series
from tacit.report.page import Number, Page, Section, render

_DAY = 86_400.0
_MOST_POINTS = 200
_MOST_RUNS = 100


def write_ledger_page(ledger: Ledger, file: Path, *, delta: float | None = None) -> None:
    """Write the page of a ledger; what is spent is stated at `delta`, default the budget's.

    Raises `LedgerError` if the ledger does not verify.
    """
    ledger.verify(ask_witness=False)
    at = delta or (ledger.budget.delta if ledger.budget else 0.0) or 1e-6
    file.write_text(render(_page(ledger, at)), encoding="utf-8")


def _page(ledger: Ledger, delta: float) -> Page:
    history, budget = ledger.history(), ledger.budget
    spent = ledger.epsilon(delta=delta)
    left = "no limit" if budget is None else f"{100 * ledger.remaining().fraction:.3g} %"
    return Page(
        title=f"Ledger of {ledger.path.name if ledger.path else 'a data set'}",
        lead=(
            f"The privacy budget of one data set. Unit of privacy: one {ledger.unit}; neighbors: "
            f"{ledger.relation}."
        ),
        numbers=(
            Number(
                "budget", "none" if budget is None else f"{budget.epsilon:g}", str(budget or "")
            ),
            Number("spent", f"{spent:.4g}", f"epsilon at delta {delta:g}, whatever comes next"),
            Number("left", left, "of the room that the budget gives, for all records"),
            Number("entries", f"{len(history):,}", "payments: spends and plans"),
        ),
        figures=(_over_time(ledger, history, delta),) if history else (),
        sections=(_by_run(ledger, history, delta),) if history else (),
        footer=f"Written by tacit from ledger {ledger.id}, {len(history):,} entries.",
    )


def _over_time(ledger: Ledger, history: Sequence[Entry], delta: float) -> Figure:
    """Return what was spent after each entry, or after some of them if there are many."""
    first = _seconds(history[0])
    every = max(1, len(history) // _MOST_POINTS)
    chosen = [e for k, e in enumerate(history, 1) if k % every == 0 or k == len(history)]
    points = [(0.0, 0.0)]
    for entry in chosen:
        found = ledger.epsilons(delta=delta, head=entry.hash)
        epsilon = min(found.odometer, math.inf if found.budget is None else found.budget)
        days = (_seconds(entry) - first) / _DAY
        points += [(days, points[-1][1]), (days, epsilon)]
    series = [Series.of("spent", points)]
    if ledger.budget is not None:
        limit = ledger.budget.epsilon
        series.append(Series.of("budget", [(0.0, limit), (points[-1][0], limit)], Role.BOUND))
    return Figure(
        name="spent",
        title="Spent over time",
        caption=f"Epsilon at delta {delta:g}; it holds however the entries were chosen.",
        x_label="days since the first entry",
        y_label="epsilon",
        series=tuple(series),
    )


def _by_run(ledger: Ledger, history: Sequence[Entry], delta: float) -> Section:
    """Return what each run cost, priced as if it were alone; entries of a run share their note."""
    runs: dict[str, list[Entry]] = {}
    for entry in history:
        runs.setdefault(re.sub(r" \[[^\]]*\]$", "", entry.note) or "(no note)", []).append(entry)
    rows = []
    for name, entries in list(runs.items())[-_MOST_RUNS:]:
        counts: dict[Event, int] = {}
        for entry in entries:
            counts[entry.event] = counts.get(entry.event, 0) + 1
        parts = tuple(Repeated(e, n) if n > 1 else e for e, n in counts.items())
        event = parts[0] if len(parts) == 1 else EventSequence(parts)
        epsilon = accounting.epsilon(event, delta=delta, relation=ledger.relation)
        when = entries[-1].time[:16].replace("T", " ")
        rows.append((name, f"epsilon {epsilon:.4g} in {len(entries):,} entries, last {when} UTC"))
    return Section(
        name="runs",
        title="By run",
        text=(
            f"What each would cost alone at delta {delta:g}, newest last. Costs of several runs "
            "do not simply add up: the number above is that of all of them."
        ),
        rows=tuple(rows),
    )


def _seconds(entry: Entry) -> float:
    return datetime.fromisoformat(entry.time).timestamp()
