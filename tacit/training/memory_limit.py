"""How many rows fit in memory at once, before the run and from what its tests have needed."""

import math
import os
from typing import NamedTuple

import torch

_CPU_BUDGET = 2**30  # bytes of activations on a CPU: more rows at once are no faster there
_COPIES = 4  # activations, their gradients, and what the norms need, with room to spare


def starting_limit(bytes_per_example: int, device: torch.device, *, largest_lot: int) -> int:
    """Return the rows that fit in free memory with their activations, at most `largest_lot`."""
    if device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] // 2
    else:
        budget = min(_CPU_BUDGET, _available_memory() // 4)
    fits = max(1, budget // (_COPIES * bytes_per_example))
    return min(fits, largest_lot)


def usual_lot(expected: float, *, deviations: float) -> int:
    """Return a lot size that is rarely exceeded, rounded up to a multiple of 8.

    It is `deviations` standard deviations of a Poisson draw above `expected`. It only sets memory
    and padding: a larger lot comes in several microbatches.
    """
    return 8 * math.ceil((expected + deviations * math.sqrt(expected)) / 8)


def _available_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system reports it
        return 4 * _CPU_BUDGET


class GPUBytes(NamedTuple):
    """Bytes of a GPU: in use by tensors, kept by torch, and free."""

    used: int
    kept: int
    free: int


def gpu_bytes(device: torch.device) -> GPUBytes:
    """Return the bytes of a GPU; zeros for another device."""
    if device.type != "cuda":
        return GPUBytes(0, 0, 0)
    cuda = torch.cuda
    used, kept = cuda.memory_allocated(device), cuda.memory_reserved(device)
    return GPUBytes(used, kept, cuda.mem_get_info(device)[0])


def measured_limit(rows: int, before: int, device: torch.device, *, largest_lot: int) -> int:
    """Return the rows that fit, from what tests of `rows` rows have needed.

    `before` is what tensors used before the tests, which run uncompiled steps. torch keeps the
    memory that they freed, so what it keeps bounds what they needed. A fifth stays free.
    """
    now = gpu_bytes(device)
    each = max(1, now.kept - before) / rows
    return max(1, min(largest_lot, int(0.8 * (now.free + now.kept - now.used) / each)))
