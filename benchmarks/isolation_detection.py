"""How often are programs that mix examples refused, and those that do not accepted?

    python benchmarks/isolation_detection.py [NAME ...] [--seeds 50] [--processes 1] [--parts FILE]

The programs are those of tests/training: `mixing_cases`, `random_mixing_cases`, `clean_programs`.
Mixing of most rows must be refused before the first release, on every seed. Rare and late mixing is
run for 600 steps on 12 seeds. Clean programs are built on every seed and take three steps. What was
measured is appended to the file in `--parts`, and the table holds all of it: so it can be run in
pieces, some names at a time.
"""

import argparse
import importlib
import json
import multiprocessing
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _results import table, write

import tacit

TESTS = Path(__file__).parents[1] / "tests" / "training"
STEPS = {"most": 0, "faint": 0, "few": 600, "late": 600, "none": 3}
LONG_SEEDS = 12


class Found(NamedTuple):
    """How many seeds of one program were refused, and the seconds of all of them."""

    name: str
    reach: str
    refused: int
    seeds: int
    seconds: float


def programs() -> dict[str, Any]:
    """Return every program by name, as a function that builds it."""
    sys.path.insert(0, str(TESTS))
    mixing, clean = map(importlib.import_module, ("random_mixing_cases", "clean_programs"))
    return mixing.CASES | clean.PROGRAMS


def is_refused(case: Any, seed: int) -> bool:
    """Return whether one fresh run of a program is refused."""
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    try:
        private = tacit.make_private(
            case.model,
            optimizer,
            case.dataset,
            case.loss_fn,
            batch_size=64,
            steps=STEPS[case.reach] or 2,
            clip_norm=1.0,
            noise_multiplier=1.0,
            seed=seed,
            collate_fn=case.collate_fn,
            augment=case.augment,
        )
        for lot, _ in zip(private, range(STEPS[case.reach]), strict=False):
            private.step(lot)
    except tacit.errors.IncompatibleModel:
        return True
    return False


def measure(job: tuple[str, range]) -> Found:
    """Run one program on some seeds."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    name, seeds = job
    build = programs()[name]
    start = time.perf_counter()
    refused = sum(is_refused(build(), seed) for seed in seeds)
    return Found(name, build().reach, refused, len(seeds), time.perf_counter() - start)


def jobs(names: list[str], seeds: int) -> list[tuple[str, range]]:
    """Return programs with parts of their seeds: long runs first, one seed at a time."""
    found = programs()
    long = [n for n in names if STEPS[found[n]().reach] > 3]
    short = [n for n in names if n not in long]
    parts = [(n, range(seed, seed + 1)) for n in long for seed in range(LONG_SEEDS)]
    return parts + [(n, range(i, min(i + 10, seeds))) for n in short for i in range(0, seeds, 10)]


def _added(parts: list[Found]) -> Found:
    """Return the sums over all parts of the seeds of one program."""
    refused, seeds = sum(p.refused for p in parts), sum(p.seeds for p in parts)
    return Found(*parts[0][:2], refused, seeds, sum(p.seconds for p in parts))


def main() -> None:
    """Run all programs and write results/isolation-detection.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--parts", type=Path)
    options = parser.parse_args()
    names = options.names or list(programs())
    found: dict[str, list[Found]] = {}
    if options.parts is not None and options.parts.exists():
        for line in options.parts.read_text().splitlines():
            one = Found(*json.loads(line))
            found.setdefault(one.name, []).append(one)
    todo = [name for name in names if name not in found]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for one in pool.imap_unordered(measure, jobs(todo, options.seeds)):
            print(*one, flush=True)
            found.setdefault(one.name, []).append(one)
            if options.parts is not None:
                with options.parts.open("a") as file:
                    file.write(json.dumps(one) + "\n")
    totals = [_added(parts) for parts in found.values()]
    reaches = list(STEPS)
    totals.sort(key=lambda total: (reaches.index(total.reach), total.name))
    rows = [
        (t.name, t.reach, f"{t.refused} of {t.seeds}", f"{t.seconds / t.seeds:.2f}") for t in totals
    ]
    write(
        "isolation-detection",
        'Programs refused by isolation="checked"',
        ("tacit", "torch"),
        table(["program", "rows that mix", "refused", "seconds a seed"], rows),
    )


if __name__ == "__main__":
    main()
