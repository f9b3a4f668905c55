"""How many examples fit at once: an estimate to start from, halved whenever it was too much."""

import math
import os
from collections.abc import Callable
from typing import TypeVar

import torch

from tacit.training.records import Micro, n_rows, split_rows

_CPU_BUDGET = 2**30  # activations on a CPU: more rows at once are no faster there
_COPIES = 4  # activations, their gradients, and what the norms need, with room to spare

T = TypeVar("T")


def starting_limit(bytes_per_example: int, device: torch.device, *, largest_lot: int) -> int:
    """Rows to try at once, given the activations of one example; at most the largest lot."""
    if device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] // 2
    else:
        budget = min(_CPU_BUDGET, _available_memory() // 4)
    fits = max(1, budget // (_COPIES * bytes_per_example))
    return min(fits, largest_lot)


def usual_lot(expected: float, *, deviations: float) -> int:
    """A lot size that is passed rarely: `deviations` above the expected one, a multiple of 8.

    Only sizes memory and padding: a larger lot is cut, never truncated.
    """
    return 8 * math.ceil((expected + deviations * math.sqrt(expected)) / 8)


def in_pieces(
    compute: Callable[[Micro], T], micro: Micro, *, on_halved: Callable[[int], None]
) -> list[T]:
    """`compute` on the whole of `micro`, or on halves of it for as long as memory runs out.

    `on_halved` hears the size that is tried next. A single example that does not fit raises.
    """
    try:
        return [compute(micro)]
    except (RuntimeError, MemoryError) as error:
        rows = n_rows(micro.batch)
        if not is_out_of_memory(error) or rows <= 1:
            raise
    # Outside the except block, whose traceback would keep the failed attempt's tensors alive.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    on_halved(-(-rows // 2))
    halves = split_rows(micro)
    return [part for half in halves for part in in_pieces(compute, half, on_halved=on_halved)]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch would have helped, on a GPU or a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "can't allocate memory" in str(error) or "out of memory" in str(error)


def _available_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system says
        return 4 * _CPU_BUDGET
