"""Durable spends a second, and how much of a budget the adaptive guard can use.

    python benchmarks/ledger.py [FOLDER]

The file is written under FOLDER (default: a temporary one); put it on the disk that matters to you.
"""

import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import _results as results

from tacit import Budget, Ledger, accounting
from tacit.events import (
    ApproximateDP,
    Event,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    Relation,
    Repeated,
)
from tacit.ledger.entry_cost import price
from tacit.ledger.filter import fit

SPENDS = 3_000
SESSIONS, PAUSE = 10, 15.0


def rate(call: Callable[[], object], count: int) -> tuple[str, str, str]:
    """Calls a second on the wall clock, slowest to fastest of ten rounds, and CPU ms for each."""
    cpu = time.process_time()
    walls = sorted(_round(call, count // 10) for _ in range(10))
    cpu = time.process_time() - cpu
    spread = f"{walls[0]:,.0f} .. {walls[-1]:,.0f}"
    return f"{statistics.median(walls):,.0f}", spread, f"{1e3 * cpu / count:.3f}"


def _round(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return count / (time.perf_counter() - start)


def sessions(folder: Path) -> list[tuple[object, ...]]:
    """Spends and bare inserts by turns, in `SESSIONS` sessions `PAUSE` apart; none is left out."""
    rows = []
    with Ledger(folder / "s.ledger", Budget(epsilon=1e3, delta=1e-5)) as ledger:
        ledger.spend(Gaussian(1e3))  # priced once
        insert = _bare(folder / "bare.db")
        for number in range(1, SESSIONS + 1):
            pairs = [
                (_round(lambda: ledger.spend(Gaussian(1e3)), 100), _round(insert, 100))
                for _ in range(10)
            ]
            spend, bare = (statistics.median(side) for side in zip(*pairs, strict=True))
            load = f"{os.getloadavg()[0]:.1f}"
            rows.append((number, load, f"{spend:,.0f}", f"{bare:,.0f}", f"{spend / bare:.2f}"))
            time.sleep(PAUSE)
    return rows


def speeds(folder: Path) -> list[tuple[str, ...]]:
    """One row for each way of paying."""
    budget = Budget(epsilon=1e3, delta=1e-5)
    names = [f"p{number}" for number in range(100)]
    rows = []
    with Ledger(folder / "a.ledger", budget) as ledger:
        rows.append(("spend, file", *rate(lambda: ledger.spend(Gaussian(1e3)), SPENDS)))
        turns = iter(names * SPENDS)
        labeled = rate(lambda: ledger.spend(Gaussian(1e3), partition=next(turns)), SPENDS)
        rows.append(("spend in one of 100 partitions, file", *labeled))
        everyone = rate(lambda: ledger.spend(Gaussian(1e3)), SPENDS // 3)
        rows.append(("spend that concerns all 100 partitions, file", *everyone))
        plan = ledger.plan(Repeated(Gaussian(1e6), 10 * SPENDS))
        rows.append(("step of a plan, file, each written", *rate(plan.step, SPENDS)))
        plan = ledger.resume(plan.id, claim=100)
        rows.append(("step of a plan, file, written by hundreds", *rate(plan.step, SPENDS)))
        start = time.perf_counter()
        found = ledger.verify()
        took = time.perf_counter() - start
        rows.append((f"verify, {found.rows:,} rows: rows a second", f"{found.rows / took:,.0f}"))
    with Ledger(budget=budget) as memory:
        rows.append(("spend, in memory", *rate(lambda: memory.spend(Gaussian(1e3)), SPENDS)))
    rows.append(_together(folder / "b.ledger", budget))
    return [row + ("",) * (4 - len(row)) for row in rows]


def _bare(path: Path) -> Callable[[], object]:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE entry (id INTEGER PRIMARY KEY, note TEXT)")
    insert = "INSERT INTO entry (note) VALUES (?)"
    return lambda: connection.execute(insert, ("x" * 500,))


def _together(path: Path, budget: Budget, processes: int = 4) -> tuple[str, str]:
    Ledger(path, budget).close()
    start, children = time.perf_counter(), []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            ledger = Ledger(path)
            for _ in range(SPENDS // processes):
                ledger.spend(Gaussian(1e3))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    wall = time.perf_counter() - start
    with Ledger(path) as ledger:
        assert ledger.verify().entries == processes * (SPENDS // processes)
    return (f"spend, file, {processes} processes together", f"{SPENDS / wall:,.0f}")


def efficiency() -> list[tuple[object, ...]]:
    """Adaptive spends admitted against what fits if all are known in advance."""
    rows = []
    for budget in (Budget(1.0, 1e-5), Budget(3.0, 1e-5), Budget(8.0, 1e-6)):
        for event in (
            Gaussian(40.0),
            Laplace(50.0),
            PureDP(0.02),
            PoissonSampled(0.01, Gaussian(2.0)),
            PoissonSampled(0.01, Gaussian(1.0)),
            ApproximateDP(0.02, 1e-8),
        ):
            known = _most(_fits_in_advance, event, budget)
            admitted = _most(_fits_adaptively, event, budget)
            share = f"{admitted / known:.1%}" if known else "-"
            rows.append((budget, event, f"{known:,}", f"{admitted:,}", share))
    return rows


def _fits_in_advance(event: Event, count: int, budget: Budget) -> bool:
    return accounting.epsilon(Repeated(event, count), delta=budget.delta) <= budget.epsilon


def _fits_adaptively(event: Event, count: int, budget: Budget) -> bool:
    chosen = fit(budget, event, Relation.ADD_REMOVE)
    cost = price(Repeated(event, count), orders=chosen.orders, relation=Relation.ADD_REMOVE)
    return chosen.admits(cost, budget)


def _most(fits: Callable[[Event, int, Budget], bool], event: Event, budget: Budget) -> int:
    low, high = 0, 1
    while fits(event, high, budget):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(event, middle, budget) else (low, middle)
    return low


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        by_session = sessions(Path(folder))
        rows = speeds(Path(folder))
    results.write(
        "ledger",
        "The ledger",
        ["tacit", "numpy", "scipy"],
        f"SQLite {sqlite3.sqlite_version}. Every spend in a file is durable (WAL, "
        "`synchronous=FULL`) before it returns. Rates are by the wall clock, so they depend on the "
        "disk and on other work on the machine, which was not idle: the load is shown. Every "
        f"session run is listed ({SESSIONS} of them, {PAUSE:g} s apart, number fixed beforehand); "
        "spends and bare SQLite inserts take turns, so their ratio sees the same disk.",
        results.table(
            ["session", "load", "spends a second", "bare inserts a second", "ratio"], by_session
        ),
        "One pass over the other operations, whatever the load then was:",
        results.table(["operation", "a second, median", "of 10 rounds", "CPU ms each"], rows),
        "How often an event is admitted when every spend may depend on the releases before it "
        "(the filter, fitted to the first entry), against what fits if the number is fixed in "
        "advance and priced whole by the tightest accountant:",
        results.table(["budget", "event", "fixed", "adaptive", "share"], efficiency()),
    )


if __name__ == "__main__":
    main()
