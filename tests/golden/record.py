"""Record what everything releases; see `golden_store`.

    python tests/golden/record.py                                  values of new cases
    python tests/golden/record.py --changed 'fits/linear/*'        again, after a row in CHANGED.md

Without `--changed` no recorded value is touched; the command then fails if one differs.
"""

import argparse
import fnmatch
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "benchmarks")]

import golden_draws  # noqa: E402
import golden_fits  # noqa: E402
import golden_prices  # noqa: E402
import golden_store as store  # noqa: E402
import golden_training  # noqa: E402

CASES: dict[str, Callable[[], Any]] = (
    golden_prices.CASES | golden_draws.CASES | golden_fits.CASES | golden_training.CASES
)


def record(given: argparse.Namespace) -> int:
    """Record all cases; return the number of values that differ and may not."""
    values, changed = store.load()
    refused = 0
    for name, case in CASES.items():
        if not fnmatch.fnmatchcase(name, given.only):
            continue
        with store.quiet():
            start = time.perf_counter()
            found = case()
            taken = time.perf_counter() - start
        if taken > given.slower_than:
            print(f"{name}: {taken:.1f} s")
        if name not in values:
            values[name] = store.stored(found)
        elif difference := store.difference(found, values[name]):
            print(f"{name}: {difference}")
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in given.changed):
                values[name] = store.stored(found)
                changed.add(name)
            else:
                refused += 1
    for name in sorted(values.keys() - CASES.keys()):
        print(f"{name}: not recorded any more")
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in given.changed):
            del values[name]
            changed.add(name)
        else:
            refused += 1
    store.save(values, changed)
    return refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--changed", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="record these cases alone")
    parser.add_argument("--slower-than", type=float, default=1.0, metavar="SECONDS")
    if refused := record(parser.parse_args()):
        sys.exit(f"{refused} value(s) differ and were not recorded: see tests/golden/CHANGED.md.")


if __name__ == "__main__":
    main()
