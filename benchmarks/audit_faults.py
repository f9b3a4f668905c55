"""Audits of faulty and of correct code: what they find, how often they are wrong, and their time.

    python benchmarks/audit_faults.py [--audits 200] [--processes 16]

The faults are those of tests/auditing/faults.py, planted in tacit's own engine, mechanisms, PATE
and regression. Writes results/audit_faults.md.
"""

import argparse
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest
import torch
from _results import table, write

FAULTS = Path(__file__).resolve().parents[1] / "tests" / "auditing" / "faults.py"
faults = SimpleNamespace(**run_path(str(FAULTS)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--audits", type=int, default=200)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    names = list(faults.CORRECT)
    listed = [(names[i % len(names)], i) for i in range(options.audits)]
    with ProcessPoolExecutor(options.processes) as pool:
        broken = list(pool.map(faulty, faults.FAULTS))
        correct = list(pool.map(sound, *zip(*listed, strict=True)))
    missed = [
        name for name, (is_found, _) in zip(faults.FAULTS, broken, strict=True) if not is_found
    ]
    kinds = Counter(fault.kind for fault in faults.FAULTS.values())
    alarms = [one for one, (is_flagged, _) in zip(listed, correct, strict=True) if is_flagged]
    seconds = sorted(taken for _, taken in (*broken, *correct))
    slow = [
        f"{name} {taken:.1f} s"
        for (name, _), (_, taken) in zip(listed, correct, strict=True)
        if taken > 5
    ]
    print("above 5 s:", slow)
    write(
        "audit_faults",
        "Audits of faulty and of correct code",
        ["tacit", "torch", "numpy", "scipy"],
        f"{len(broken) - len(missed)} of {len(broken)} planted faults are flagged at a family-wise "
        f"error of 5 % (missed: {', '.join(missed) or 'none'}). {len(alarms)} of {len(listed)} "
        f"audits of correct code raise an alarm ({alarms}). The slowest of all audits took "
        f"{seconds[-1]:.1f} s, the median {seconds[len(seconds) // 2]:.1f} s, on one core.",
        table(["class of fault", "planted"], sorted(kinds.items())),
    )


def faulty(name: str) -> tuple[bool, float]:
    """Return whether the audit flags the fault, and the seconds it took."""
    torch.set_num_threads(1)
    fault = faults.FAULTS[name]
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        start = time.perf_counter()
        is_found = not fault.audit(0).passes
        return is_found, time.perf_counter() - start


def sound(name: str, seed: int) -> tuple[bool, float]:
    """Return whether the audit flags correct code, and the seconds it took."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    is_flagged = not faults.CORRECT[name](seed).passes
    return is_flagged, time.perf_counter() - start


if __name__ == "__main__":
    main()
