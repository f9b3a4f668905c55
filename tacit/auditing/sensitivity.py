"""Tests of sensitivity: data sets with and without one record, the record being extreme.

The releases of two neighboring data sets, with every record in the lot and almost no noise, differ
by what one record adds. That must be at most the billed contribution, whatever the record is: with
a huge or tiny loss, with huge inputs, or with inputs that are not numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tacit.auditing.canaries import stored_tensors
from tacit.auditing.p_values import Finding, deterministic

_ROWS = 6  # records of a data set; one of them is left out
_ROUNDING = 1e-2  # a norm above 1 by this is rounding: sums in bfloat16 have two digits

TINY, TINY_LOSSES = 1e-4, "tiny losses"
_SCALES = {  # factors of all losses
    "records as they are": 1.0,
    "huge losses": 1e6,
    "gradients whose squares overflow": 1e25,
    TINY_LOSSES: TINY,
}

Loss = Callable[..., Any]


class Neighbors(NamedTuple):
    """Two data sets, one of which has a record more, and the loss under which they are compared."""

    with_it: Any
    without: Any
    loss_fn: Loss
    size: int
    place: int  # of the record that only the first set has


def contribution_finding(name: str, longest: float) -> Finding:
    """Return the finding for the largest measured contribution, in units of the billed one."""
    is_bounded = bool(longest <= 1 + _ROUNDING)
    who = "" if name.startswith("a user") else "a record: "
    return Finding("sensitivity", f"contribution of {who}{name}", deterministic(is_bounded))


def extreme_sets(dataset: Any, loss_fn: Loss) -> Iterator[tuple[str, list[Neighbors]]]:
    """Yield kinds of extreme records, each with pairs of neighboring data sets that have them."""
    for name, factor in _SCALES.items():
        sets = _pairs(dataset, 1.0)
        yield name, [Neighbors(a, b, times(loss_fn, factor), n, i) for a, b, n, i in sets]
    for name, factor in (("huge inputs", 1e4), ("inputs that are not numbers", np.nan)):
        if sets := _pairs(dataset, factor):
            yield name, [Neighbors(a, b, loss_fn, n, i) for a, b, n, i in sets]


def _pairs(dataset: Any, factor: float) -> list[tuple[Any, Any, int, int]]:
    """Return data sets of a few records, one of them scaled, each beside the set without it."""
    tensors = stored_tensors(dataset)
    n = len(dataset) if tensors is None else len(tensors[0])
    rows = np.linspace(0, n - 1, min(n, _ROWS)).astype(int)
    if len(rows) < 2:
        return []
    found = []
    for place in sorted({0, len(rows) // 2, len(rows) - 1}):
        if tensors is None:
            items = [dataset[int(i)] for i in rows]
            items[place] = _scaled(items[place], factor)
            found.append((items, items[:place] + items[place + 1 :], len(rows), place))
            continue
        few = tuple(t[rows].clone() for t in tensors)
        for tensor in few:
            tensor[place] = _scaled(tensor[place], factor)
        kept = np.delete(np.arange(len(rows)), place)
        both = few, tuple(t[kept] for t in few)
        if not isinstance(dataset, tuple | list) and len(few) == 1 and hasattr(dataset, "shape"):
            both = both[0][0], both[1][0]  # a single tensor stays one
        found.append((*both, len(rows), place))
    return found


def _scaled(value: Any, factor: float) -> Any:
    """Return a record with all its floating-point numbers multiplied by `factor`."""
    if isinstance(value, Mapping):
        return {name: _scaled(one, factor) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_scaled(one, factor) for one in value)
    is_array = hasattr(value, "dtype") and "float" in str(value.dtype) and hasattr(value, "shape")
    return value * factor if is_array or isinstance(value, float) else value


def times(loss_fn: Loss, factor: float) -> Loss:
    """Return the loss multiplied by `factor`."""
    return lambda model, batch: loss_fn(model, batch) * factor
