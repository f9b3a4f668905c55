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
    made.add_argument("--seeds", type=int, default=9)
    made.add_argument("--tables", default=";".join(names), help="separated by semicolons")
    made.add_argument("--processes", type=int, default=os.cpu_count())
    made.add_argument("--store", type=Path, help="file of finished splits, one JSON line each")
    return made


def over_splits(
    one_split: Callable[[tuple[str, int]], Split], given: argparse.Namespace
) -> dict[str, Splits]:
    """Return the splits of every table that was asked for."""
    tasks = [(name, seed) for name in given.tables.split(";") for seed in range(given.seeds)]
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
    return {
        name: Splits(
            np.array([found[name, seed].ordinary for seed in range(given.seeds)]),
            {
                method: np.array([found[name, seed].methods[method] for seed in range(given.seeds)])
                for method in found[name, 0].methods
            },
        )
        for name in given.tables.split(";")
    }


HEADER = ["table", "method", *(f"epsilon {epsilon:g}" for epsilon in EPSILONS)]


def lines_of(name: str, medians: dict[str, np.ndarray], met: Sequence[bool]) -> list[list[str]]:
    """Return a line for each method; the cells of `auto` say whether they are within the bar."""
    lines = []
    for method, values in medians.items():
        cells = [f"{value:.2f}" for value in values]
        if method == "auto":
            cells = [f"**{c}**" if m else f"{c} (missed)" for c, m in zip(cells, met, strict=True)]
        lines.append([name, method, *cells])
    return lines
