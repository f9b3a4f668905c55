"""Sums of a fit where the rows are: tacit by DuckDB against SQL for the same sums, by size.

    python benchmarks/engines.py --rows 1e6 1e7 2e8 [--folder DIR] [--repeats 3]

20 columns of Parquet: 19 features and a target, with nulls and NaN. Both sides clip, round and sum
all products of two columns as integers, and must agree exactly; a third query sums products of
doubles without clipping or rounding. Each measurement is a process of its own, interleaved; medians
of CPU seconds and of wall time. A table of more than 10^7 rows is one file of 10^7 rows under many
names (hard links), so that it needs 1 GB of disk. Bars: at most 1.2 times the SQL; below 2 GiB.
"""

import argparse
import hashlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _results as results

COLUMNS, PART = 20, 10_000_000
STEPS = 2**15
SIDES = ("tacit", "SQL, same sums", "SQL, doubles")


def write_table(folder: Path, rows: int) -> Path:
    """Write a table as Parquet files, and return their pattern."""
    import duckdb

    folder.mkdir(parents=True, exist_ok=True)
    size = min(rows, PART)
    cells = [
        f"CASE WHEN hash(i, {k}) % 1000 = 0 THEN NULL WHEN hash(i, {k}) % 1000 = 1 THEN 'nan' "
        f"ELSE (hash(i, {k}) >> 32) / 2.0**32 * 120 - 10 END::FLOAT AS x{k}"
        for k in range(COLUMNS)
    ]
    first = folder / "0.parquet"
    with duckdb.connect() as connection:
        query = f"SELECT {', '.join(cells)} FROM range({size}) AS t(i)"
        connection.execute(f"COPY ({query}) TO '{first}' (FORMAT parquet)")
    for k in range(1, math.ceil(rows / PART)):
        os.link(first, folder / f"{k}.parquet")
    return folder / "*.parquet"


def by_tacit(pattern: Path) -> bytes:
    """Return the matrix of sums as bytes, by tacit."""
    from tacit.datasets import Schema
    from tacit.sources import moments

    names = [f"x{k}" for k in range(COLUMNS)]
    schema = Schema({name: [0, 100] for name in names}, target=names[-1])
    return moments(pattern, schema).gram.tobytes()


def by_sql(pattern: Path, *, is_float: bool = False) -> bytes:
    """Return the same matrix by one query, written by hand, or sums of products of doubles."""
    import duckdb
    import numpy as np

    target = f"x{COLUMNS - 1}"  # a row without a target is left out
    source = f"read_parquet('{pattern}', can_have_nan => true)"
    source += f" WHERE {target} IS NOT NULL AND NOT isnan({target})"
    if is_float:
        cells = [f"x{k}::DOUBLE AS z{k}" for k in range(COLUMNS)]
    else:
        # Null and NaN become the middle of the range, as a schema does by default.
        cells = [
            f"floor((CASE WHEN x{k} >= 0 AND x{k} <= 100 THEN x{k}::DOUBLE WHEN x{k} < 0 THEN 0.0 "
            f"WHEN x{k} > 100 AND NOT isnan(x{k}) THEN 100.0 ELSE 50.0 END)"
            f" * {2 * STEPS / 100}::DOUBLE + 0.5)::BIGINT - {STEPS} AS z{k}"
            for k in range(COLUMNS)
        ]
    pairs = [(i, j) for i in range(COLUMNS) for j in range(i, COLUMNS)]
    sums = [f"sum(z{i} * z{j})" for i, j in pairs] + [f"sum(z{i})" for i in range(COLUMNS)]
    with duckdb.connect() as connection:
        connection.execute("SET preserve_insertion_order = false")
        query = f"SELECT {', '.join(sums)}, count(*) FROM (SELECT {', '.join(cells)} FROM {source})"
        found = connection.execute(query).fetchall()[0]
    if is_float:
        return b""
    gram = np.zeros((COLUMNS + 1, COLUMNS + 1), np.int64)
    gram[0, 0] = STEPS**2 * found[-1]
    gram[0, 1:] = gram[1:, 0] = STEPS * np.array(found[len(pairs) : -1], np.int64)
    for (i, j), value in zip(pairs, found, strict=False):
        gram[i + 1, j + 1] = gram[j + 1, i + 1] = value
    return gram.tobytes()


def measure(side: str, pattern: Path) -> dict[str, float | str]:
    """Return seconds, memory and a digest of the sums of one side, from a process of its own."""
    call = [sys.executable, __file__, "--side", side, "--pattern", str(pattern)]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def run_side(side: str, pattern: Path) -> None:
    """Compute the sums of one side and print what that took, without the time of imports."""
    import duckdb  # noqa: F401
    import narwhals.stable.v2  # noqa: F401

    from tacit.datasets import Schema  # noqa: F401
    from tacit.sources import moments  # noqa: F401

    started, cpu = time.perf_counter(), time.process_time()
    found = by_tacit(pattern) if side == SIDES[0] else by_sql(pattern, is_float=side == SIDES[2])
    taken = {"wall": time.perf_counter() - started, "cpu": time.process_time() - cpu}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({**taken, "memory": memory, "sums": hashlib.sha256(found).hexdigest()}))


def main() -> None:
    """Measure all sizes and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=float, nargs="+", default=[1e6, 1e7])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--pattern", type=Path)
    asked = parser.parse_args()
    if asked.side:
        run_side(asked.side, asked.pattern)
        return
    lines: list[list[str]] = []
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        for rows in map(int, asked.rows):
            pattern = write_table(Path(folder) / str(rows), rows)
            runs = [{side: measure(side, pattern) for side in SIDES} for _ in range(asked.repeats)]
            assert len({run[side]["sums"] for run in runs for side in SIDES[:2]}) == 1
            for side in SIDES:
                lines.append(
                    [f"{rows:,}", side, *_columns([(run[side], run[SIDES[1]]) for run in runs])]
                )
                print(lines[-1], flush=True)
    header = ["rows", "side", "CPU s", "wall s", "CPU ratio", "wall ratio", "GiB"]
    note = (
        f"{asked.repeats} interleaved runs each, medians; ratios are to the SQL for the same sums."
    )
    results.write("engines", "Sums where the rows are", ["tacit", "duckdb", "narwhals"],
                  results.table(header, lines), note)  # fmt: skip


def _columns(pairs: list[tuple[dict, dict]]) -> list[str]:
    middle = {name: statistics.median(own[name] for own, _ in pairs) for name in ("cpu", "wall")}
    ratio = {name: statistics.median(own[name] / same[name] for own, same in pairs)
             for name in ("cpu", "wall")}  # fmt: skip
    memory = max(own["memory"] for own, _ in pairs)
    return [f"{middle['cpu']:.1f}", f"{middle['wall']:.1f}", f"{ratio['cpu']:.2f}",
            f"{ratio['wall']:.2f}", f"{memory:.2f}"]  # fmt: skip


if __name__ == "__main__":
    main()
