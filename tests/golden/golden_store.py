"""Recorded releases: what they are, where they are stored, and when two of them are equal.

A case is a name and a function without arguments; `record.py` stores what the functions return, and
`test_recorded.py` and `test_recorded_prices.py` compare. Each kind of case has a module:
`golden_prices`, `golden_draws`, `golden_fits`, `golden_training`. `CHANGED.md` says which values
may be recorded again, and why.
"""

import fnmatch
import hashlib
import json
import math
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from tacit.errors import WeakGuarantee

HERE = Path(__file__).resolve().parent
VALUES, ARRAYS, CHANGED = HERE / "recorded.json", HERE / "recorded.npz", HERE / "CHANGED.md"
ISSUES = ("restart", "program", "switch", "ledger", "core", "runner", "utility")

# Prices: other versions of numpy and scipy round otherwise in the last bits (1e-15 each, up to
# 1e-12 in a price); a search that ends at another point or another method moves a price by more.
PRICE = 1e-9
ARRAY = 1e-6  # of the norm of each array: sums in another order, and one step of the noise's grid
FAST = 10  # one of so many cases is compared in every run of the tests

Values = dict[str, Any]


@contextmanager
def quiet() -> Iterator[None]:
    """Treat warnings as pytest does here: small runs ask for little privacy, others are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", WeakGuarantee)
        warnings.filterwarnings("ignore", "The program of one example cannot be traced")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        yield


def is_fast(name: str) -> bool:
    """Return True for one of ten names, the same ones forever."""
    return crc32(name.encode()) % FAST == 0


def one_of_ten(names: Iterable[str]) -> list[Any]:
    """Return all names, marked slow except those that are compared in every run of the tests."""
    slow = pytest.mark.slow
    return [name if is_fast(name) else pytest.param(name, marks=slow) for name in names]


def digest(*values: object) -> str:
    """Return a hash of numbers, arrays and texts, whatever their width and container."""
    found = hashlib.sha256()
    for part in values:
        _feed(found, part)
    return found.hexdigest()


def _feed(found: Any, value: object) -> None:
    if isinstance(value, bytes | str | Enum):
        data = value if isinstance(value, bytes) else str(value).encode()
        found.update(b"text %d;" % len(data) + data)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            _feed(found, key)
            _feed(found, value[key])
    elif isinstance(value, list | tuple) and any(np.ndim(part) or _is_odd(part) for part in value):
        found.update(b"parts %d;" % len(value))
        for part in value:
            _feed(found, part)
    else:
        array = np.asarray(value)
        wide = {"b": np.int64, "i": np.int64, "u": np.uint64, "f": np.float64}[array.dtype.kind]
        data = np.ascontiguousarray(array, wide)
        found.update(repr((data.dtype.kind, array.shape)).encode() + data.tobytes())


def _is_odd(value: object) -> bool:
    return isinstance(value, bytes | str | Mapping)


def flat(parts: Sequence[Any]) -> np.ndarray:
    """Return all numbers of the arrays `parts`, one after the other."""
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in parts])


def load() -> tuple[Values, set[str]]:
    """Return all recorded values by name, and the names of those that were recorded again."""
    values, changed = dict[str, Any](), list[str]()
    if VALUES.is_file():
        values = json.loads(VALUES.read_text(encoding="utf-8"))
        changed = values.pop("changed")
    if ARRAYS.is_file():
        with np.load(ARRAYS) as arrays:
            values |= {name: arrays[name] for name in arrays.files}
    return values, set(changed)


def save(values: Values, changed: set[str]) -> None:
    """Write all recorded values: one line of JSON for each price and hash, one array for others."""
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    lines = [json.dumps("changed") + ": " + json.dumps(sorted(changed))]
    lines += [
        f"{json.dumps(name)}: {json.dumps(values[name])}"
        for name in sorted(values.keys() - arrays.keys())
    ]
    VALUES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    with zipfile.ZipFile(ARRAYS, "w", zipfile.ZIP_DEFLATED) as file:
        for name in sorted(arrays):
            with file.open(zipfile.ZipInfo(f"{name}.npy"), "w") as entry:
                np.lib.format.write_array(entry, arrays[name], version=(1, 0))


def check(cases: Mapping[str, Callable[[], Any]]) -> None:
    """Run cases and fail with the names of all whose result is not the recorded one."""
    recorded, wrong = _recorded(), list[str]()
    for name, case in cases.items():
        assert name in recorded, f"{name} is not recorded yet: run tests/golden/record.py."
        with quiet():
            found = case()
        if moved := difference(found, recorded[name]):
            wrong.append(f"{name}: {moved}")
    assert not wrong, (
        "\n".join(wrong) + "\nA recorded release has changed. If an issue that may change it did "
        "so on purpose, add a row to tests/golden/CHANGED.md and run tests/golden/record.py "
        "--changed PATTERN."
    )


@lru_cache(maxsize=1)
def _recorded() -> Values:
    return load()[0]


def stored(found: Any) -> Any:
    """Return what a case returned in the form in which it is stored."""
    return flat(found) if isinstance(found, list) else found


def difference(found: Any, expected: Any) -> str:
    """Return how a case's result differs from the recorded value; "" if it does not.

    A list of arrays is compared array by array, a tuple of prices number by number, and a text (a
    hash, or the type of an exception) exactly.
    """
    if isinstance(found, str) or isinstance(expected, str):
        return "" if found == expected else f"{expected} -> {found}"
    if isinstance(found, tuple):
        same = [math.isclose(a, b, rel_tol=PRICE) for a, b in zip(found, expected, strict=True)]
        return "" if all(same) else f"{tuple(expected)} -> {found}"
    sizes = [np.size(part) for part in found]
    if sum(sizes) != len(expected):
        return f"{len(expected)} numbers -> {sum(sizes)} numbers"
    parts = np.split(expected, np.cumsum(sizes)[:-1])
    worst = max(_relative(new, old) for new, old in zip(found, parts, strict=True))
    return "" if worst <= ARRAY else f"an array moved by {worst:.2g} of its norm"


def _relative(found: Any, expected: np.ndarray) -> float:
    """Return the norm of the difference relative to that of `expected`; what is not finite is."""
    found = np.asarray(found, np.float64).ravel()
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        return math.inf
    moved = np.linalg.norm(found[finite] - expected[finite])
    norm = np.linalg.norm(expected[finite])
    if math.isnan(moved):
        return math.inf
    return float(moved / norm) if norm else (0.0 if moved < 1e-12 else math.inf)


def explained(name: str, text: str) -> bool:
    """Return True if a row of `CHANGED.md` names this value, an issue that may, and a reason."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 4:
            continue
        patterns = re.findall(r"`([^`]+)`", cells[0])
        is_meant = any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        issue = cells[1].partition(",")[0].strip()
        if is_meant and issue in ISSUES and all(cells[2:]):
            return True
    return False
