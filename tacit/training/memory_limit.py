"""How many rows are on a device at once: measured, and never more than a lot usually has.

On a GPU, steps on a few rows of zeros, which have the shape of a record, are measured, and the rows
that fit follow. A CPU has no such measure; there the limit follows from what autograd saves.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from tacit.training.clip import ClippedSum
from tacit.training.distributed import gathered
from tacit.training.key import randomness
from tacit.training.tree import (
    Batch,
    is_out_of_memory,
    map_rows,
)

_CPU_BUDGET = 2**30  # bytes of activations on a CPU: more rows at once are no faster there
_COPIES = 4  # activations, their gradients, and what the norms need, with room to spare
_SMALL = 2**30  # bytes of a lot that is not worth cutting
_ROOM = 7 / 8  # of the memory that can be had
_FEW = (2, 6)  # rows whose steps are measured first


def starting_limit(bytes_per_example: int, device: torch.device, *, largest_lot: int) -> int:
    """Return the rows that fit in free memory with their activations, at most `largest_lot`."""
    available = available_memory(device)
    budget = available // 2 if device.type == "cuda" else min(_CPU_BUDGET, available // 4)
    fits = max(1, budget // (_COPIES * bytes_per_example))
    return min(fits, largest_lot)


def largest_microbatch(expected: float, bytes_per_example: int) -> int:
    """Return the rows above which a lot is cut, however much memory there is.

    A lot that takes little memory is hardly ever cut. Others are cut above 1.25 standard
    deviations, once in ten steps: the memory of a run is that of its largest microbatch.
    """
    most = _usual_lot(expected, deviations=6.0)
    if most * bytes_per_example * _COPIES <= _SMALL:
        return most
    return _usual_lot(expected, deviations=1.25)


def _usual_lot(expected: float, *, deviations: float) -> int:
    """Return a lot size that is rarely exceeded, rounded up to a multiple of 4.

    It is `deviations` standard deviations of a Poisson draw above `expected`. It only sets memory
    and padding: a larger lot comes in several microbatches.
    """
    return 4 * math.ceil((expected + deviations * math.sqrt(expected)) / 4)


def available_memory(device: torch.device) -> int:
    """Return the bytes of memory that are free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system reports it
        return 4 * _CPU_BUDGET


class Meter(Protocol):
    """Measures the memory of a device."""

    def available(self) -> int:
        """Return the bytes that can be allocated now."""
        ...

    def peak(self, run: Callable[[], object]) -> float:
        """Return the bytes that `run` needs at most, above those in use; inf if they run out."""
        ...


class GPUMeter:
    """Measures the memory of a GPU by torch's own count, whose peak starts anew."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def available(self) -> int:
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + kept

    def peak(self, run: Callable[[], object]) -> float:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        try:
            run()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        else:
            return max(0, torch.cuda.max_memory_allocated(self._device) - before)
        torch.cuda.empty_cache()  # outside the except block, whose traceback holds tensors
        return math.inf


def fitting_rows(
    run: Callable[[int], object], meter: Meter, *, most: int, reserved: int = 0
) -> int:
    """Return how many rows a step `run(rows)` can have in the memory there is, at most `most`.

    Steps of a few rows are measured, then one of half the rows that these promise, unless they
    promise more than twice of what is needed. Memory grows in proportion to the rows, but for a
    part that is fixed. An eighth stays free, beside `reserved`.
    """
    budget = _ROOM * meter.available() - reserved
    fits, found = most, {}
    while True:
        rows = _next_size(found, fits)
        if rows is None:
            return max(1, min(fits, most))
        found[rows] = meter.peak(lambda rows=rows: run(rows))
        if math.isinf(found[rows]):
            most = min(most, max(1, rows // 2))
            if rows == 1:
                return 1
        fits = _fitting(found, budget, most)
        if len(found) >= len(_FEW) and _fitting(found, budget, 2 * most) == 2 * most:
            return most


def _next_size(found: dict[int, float], fits: int) -> int | None:
    """Return the rows to measure next: few, then half of what fits; None if that is known."""
    few = [rows for rows in _FEW if rows not in found and rows <= fits]
    if few and not any(math.isinf(needed) for needed in found.values()):
        return few[0]
    if not found:
        return 1
    half = fits // 2
    is_known = any(3 * rows >= fits or math.isinf(found[rows]) for rows in found)
    return None if is_known else half


def _fitting(found: dict[int, float], budget: float, most: int) -> int:
    """Return the rows that fit, on the line through the two largest sizes that were measured."""
    known = sorted((rows, needed) for rows, needed in found.items() if math.isfinite(needed))
    if len(known) < 2 and len(found) < 2:
        return most
    (fewer, little), (more, much) = [(0, 0.0), *known][-2:]
    each = max(1.0, (much - little) / (more - fewer))
    return max(1, min(most, int(more + (budget - much) // each)))


@contextmanager
def zero_step(
    model: nn.Module, blank: Batch, step: Callable[[Batch], ClippedSum]
) -> Iterator[Callable[[int], ClippedSum]]:
    """Give a function that sums some copies of the example in `blank` by `step`, to be measured."""
    device = next(model.parameters()).device

    def run(rows: int) -> ClippedSum:
        return step(map_rows(lambda t: t.repeat(rows, *[1] * (t.dim() - 1)), blank))

    with gathered(model), randomness(0, device):
        yield run
