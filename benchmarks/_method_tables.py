"""Compare methods on many tables, over random splits: what both tables of methods share.

A benchmark gives `one_split((table, seed))`, which returns one number for the model without privacy
and, for each method, one number per epsilon. With `--store FILE`, every finished split is appended
to that file and is not run again, so that a long table can be measured in parts.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import numpy as np

EPSILONS, DELTA = (0.1, 0.3, 1.0, 3.0, 8.0), 1e-6
TESTED, MOST_SPLITS = 30_000, 101


class Split(NamedTuple):
    """What one split of one table gave."""

    ordinary: float
    methods: dict[str, list[float]]


class Splits(NamedTuple):
    """All splits of one table."""

    ordinary: np.ndarray
    """(splits,)"""
    methods: dict[str, np.ndarray]
    """(splits, epsilons) for each method."""


def parser(names: Iterable[str]) -> argparse.ArgumentParser:
    """Return the options that the benchmarks share."""
    made = argparse.ArgumentParser()
    made.add_argument("--seeds", type=int, default=9, help="fewest splits of a table")
    made.add_argument("--tables", default=";".join(names), help="separated by semicolons")
    made.add_argument("--processes", type=int, default=os.cpu_count())
    made.add_argument("--store", type=Path, help="file of finished splits, one JSON line each")
    return made


def splits_of(n_records: int, fewest: int) -> int:
    """Return the number of splits of a table: those that test TESTED records, within limits.

    On a table of a few hundred records a median of 9 splits is itself uncertain, and the best of
    several such medians is better than any method.
    """
    return max(fewest, min(MOST_SPLITS, -(-TESTED // max(n_records // 5, 1))))


def splits_in_words(fewest: int) -> str:
    """Return the rule of `splits_of` for the head of a table."""
    return (
        f"median of at least {fewest} splits, the same for all methods: on small tables as many as "
        f"test {TESTED:,} records, up to {MOST_SPLITS} (column `splits`)"
    )


def over_splits(
    one_split: Callable[[tuple[str, int]], Split],
    n_records: Callable[[str], int],
    given: argparse.Namespace,
) -> dict[str, Splits]:
    """Return the splits of every table that was asked for; `n_records` gives the size of one."""
    names = given.tables.split(";")
    counts = {name: splits_of(n_records(name), given.seeds) for name in names}
    tasks = [(name, seed) for name in names for seed in range(counts[name])]
    found: dict[tuple[str, int], Split] = {}
    if given.store is not None and given.store.exists():
        for name, seed, *split in map(json.loads, given.store.read_text().splitlines()):
            found[name, seed] = Split(*split)
    with ProcessPoolExecutor(given.processes) as pool:
        waiting = {pool.submit(one_split, task): task for task in tasks if task not in found}
        for done in as_completed(waiting):
            name, seed = waiting[done]
            found[name, seed] = done.result()
            print(name, seed, flush=True)
            if given.store is not None:
                with given.store.open("a") as file:
                    print(json.dumps([name, seed, *found[name, seed]]), file=file)
    return {name: _joined([found[name, seed] for seed in range(counts[name])]) for name in names}


def _joined(splits: Sequence[Split]) -> Splits:
    return Splits(
        np.array([split.ordinary for split in splits]),
        {m: np.array([split.methods[m] for split in splits]) for m in splits[0].methods},
    )


HEADER = ["table", "splits", "method", *(f"epsilon {epsilon:g}" for epsilon in EPSILONS)]


def lines_of(
    name: str, splits: int, medians: dict[str, np.ndarray], met: Sequence[bool]
) -> list[list[str]]:
    """Return a line for each method; the cells of `auto` say whether they are within the bar."""
    lines = []
    for method, values in medians.items():
        cells = [f"{value:.2f}" for value in values]
        if method == "auto":
            cells = [f"**{c}**" if m else f"{c} (missed)" for c, m in zip(cells, met, strict=True)]
        lines.append([name, str(splits), method, *cells])
    return lines
