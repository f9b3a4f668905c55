"""What `isolation="strict"` costs, measured before a run."""

import sys
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from tacit.training.clip import Clip
from tacit.training.engines import TracedLotSum, clipped_sum
from tacit.training.key import randomness
from tacit.training.program_state import ProgramState

_ROWS = 64
_MEASURED: set[Hashable] = set()  # programs whose cost was printed


class StrictCost(NamedTuple):
    """What `isolation="strict"` costs, measured on rows of zeros in the shape of a record."""

    factor: float  # the sum of a lot, relative to the default
    seconds_per_record: float  # of the process that reads a record; 0 if none is needed

    def __str__(self) -> str:
        more = f", and {1e3 * self.seconds_per_record:.1f} ms more for each record"
        return f"isolation='strict' takes {self.factor:.1f} times as long as 'checked'" + (
            f"{more}, which is read in a process of its own." if self.seconds_per_record else "."
        )


def strict_cost(strict: TracedLotSum, clip: Clip, *, rows: int) -> StrictCost:
    """Return what a traced program costs, on at most 64 rows."""
    rows, blank = min(rows, _ROWS), strict.blank()
    everyone = strict.batch([t.repeat(rows, *[1] * (t.dim() - 1)) for t in blank])
    device = blank[0].device

    def default() -> None:
        clipped_sum(strict.model, strict.loss_fn, everyone, clip, augmentations=strict.views)

    def traced() -> None:
        strict.clipped_sum([blank] * rows, clip)

    state = ProgramState(strict.model, strict.loss_fn)
    with randomness(0, device):
        times = [_seconds(run, device) for run in (traced, default)]
    state.restore()
    reader = strict.processes
    process = 0.0 if reader is None else _seconds(reader.start_one, device)
    return StrictCost(times[0] / times[1], process)


def print_cost_once(strict: TracedLotSum, clip: Clip, *, rows: int) -> None:
    """Measure and print what a traced program costs, unless this process has done so before."""
    loss_fn: Any = strict.loss_fn
    name = getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__)
    shapes = tuple((name, p.shape) for name, p in strict.model.named_parameters())
    program = (name, getattr(loss_fn, "__module__", ""), shapes, min(rows, _ROWS))
    if program not in _MEASURED:
        _MEASURED.add(program)
        print(strict_cost(strict, clip, rows=rows), file=sys.stderr)


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """Return the shortest of three times, after a first run."""
    run()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
