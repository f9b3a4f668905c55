"""Time and memory of private fits against scikit-learn, and fits of tables larger than memory.

    OMP_NUM_THREADS=1 python benchmarks/regression_speed.py [--rows-streamed 10000000]

CPU seconds in one process, interleaved runs, median. Bars: at most 1.5 times scikit-learn at
200,000 x 40; memory above that of the table at most 0.2 times it; ten million rows fit with bounded
memory.
"""

import argparse
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import _results as results
import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression as OrdinaryLinear
from sklearn.linear_model import LogisticRegression as OrdinaryLogistic

from tacit.regression import Bounds, LinearRegression, LogisticRegression

ROWS, COLUMNS, STREAMED_COLUMNS = 200_000, 40, 20
REPEATS = 7
BUDGET = {"epsilon": 1.0, "delta": 1e-6}
Floats = NDArray[np.float64]


def table(rows: int, columns: int, out: Floats | None = None) -> tuple[Floats, Floats]:
    """Fill features, uniform on (0, 100), and a linear target on about (-100, 100), in blocks."""
    rng = np.random.default_rng(0)
    X = np.empty((rows, columns)) if out is None else out
    weights = rng.normal(size=columns) / np.sqrt(columns)
    y = np.empty(rows)
    for start in range(0, rows, 100_000):
        part = X[start : start + 100_000]
        part[:] = rng.uniform(0, 100, part.shape)
        y[start : start + len(part)] = (part - 50) @ weights + rng.normal(0, 20, len(part))
    return X, y


def race(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median CPU seconds of each call; runs are interleaved for a fair comparison."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def peak(call: Callable[[], object]) -> int:
    """Return the peak of the bytes that `call` allocates."""
    tracemalloc.start()
    call()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def contests(X: Floats, y: Floats) -> dict[str, dict[str, Callable[[], object]]]:
    """Return the fits to compare, scikit-learn first, for each kind of model and table."""
    labels = (y > 0).astype(int)
    scaled = (X - 50) / 50
    target = {"target_bounds": Bounds(-150, 150)}
    found: dict[str, dict[str, Callable[[], object]]] = {}
    for name, rows, bounds in (
        ("features in (0, 100)", X, Bounds(0, 100)),
        ("features in (-1, 1)", scaled, Bounds(-1, 1)),
    ):
        linear = {"bounds": bounds} | target | BUDGET
        found[f"linear, {name}"] = {
            "scikit-learn": lambda rows=rows: OrdinaryLinear().fit(rows, y),
            "adassp": lambda rows=rows, o=linear: LinearRegression(**o, method="adassp").fit(
                rows, y
            ),
            "functional": lambda rows=rows, o=linear: LinearRegression(**o | {"delta": 0.0}).fit(
                rows, y
            ),
            "auto": lambda rows=rows, o=linear: LinearRegression(**o).fit(rows, y),
        }
        logistic = {"bounds": bounds} | BUDGET
        found[f"logistic, {name}"] = {
            "scikit-learn": lambda rows=rows: OrdinaryLogistic(max_iter=1000).fit(rows, labels),
            "gradient (default)": lambda rows=rows, o=logistic: LogisticRegression(**o).fit(
                rows, labels
            ),
        }
    return found


def compare() -> str:
    """Return the table of times and memory at 200,000 x 40."""
    X, y = table(ROWS, COLUMNS)
    rows = []
    for kind, calls in contests(X, y).items():
        times = race(calls)
        reference = times["scikit-learn"]
        for name, call in calls.items():
            extra = peak(call) / X.nbytes
            rows.append(
                [kind, name, f"{times[name]:.3f}", f"{times[name] / reference:.2f}", f"{extra:.2f}"]
            )
    return results.table(
        ["fit", "method", "CPU s", "over scikit-learn", "extra memory / table"], rows
    )


def stream(rows: int) -> str:
    """Return the table of fits of a memory-mapped file."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        on_disk = np.memmap(Path(folder) / "x", np.float64, "w+", shape=(rows, STREAMED_COLUMNS))
        _, y = table(rows, STREAMED_COLUMNS, on_disk)
        labels = (y > 0).astype(np.int8)
        bounds = {"bounds": Bounds(0, 100)} | BUDGET
        linear = LinearRegression(**bounds, target_bounds=Bounds(-150, 150))
        for name, model, target in (
            ("linear", linear, y),
            ("logistic", LogisticRegression(**bounds), labels),
        ):
            start = time.process_time()
            most = peak(lambda model=model, target=target: model.fit(on_disk, target))
            seconds = time.process_time() - start
            score = model.score(on_disk[:100_000], target[:100_000])
            found.append(
                [name, f"{seconds:.1f}", f"{most / 2**20:,.0f} MiB",
                 f"{most / on_disk.nbytes:.2f}", f"{score:.3f}"]
            )  # fmt: skip
    size = rows * STREAMED_COLUMNS * 8 / 2**30
    head = (
        f"{rows:,} x {STREAMED_COLUMNS} float64 in a file of {size:.2f} GiB (`numpy.memmap`).\n\n"
    )
    return head + results.table(
        ["fit", "CPU s", "memory allocated, peak", "over the file", "score on 100,000 rows"], found
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows-streamed", type=int, default=10_000_000)
    rows = parser.parse_args().rows_streamed
    results.write(
        "regression_speed",
        "Speed and memory of private regression",
        ["numpy", "scipy", "scikit-learn"],
        f"## {ROWS:,} x {COLUMNS}\n\nCPU seconds, median of {REPEATS} interleaved runs, one "
        "process, one thread; epsilon 1, delta 1e-6. Extra memory is the peak that the fit "
        f"allocates beside the table.\n\n{compare()}",
        f"## Streaming\n\n{stream(rows)}",
    )


if __name__ == "__main__":
    main()
