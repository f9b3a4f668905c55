"""Gaussian noise added to many tensors in place, in one launch (Triton).

Noise that is drawn into a buffer and then added takes two passes over memory and a copy of the
model; here each number is drawn in registers. Numbers come from Philox-4x32-10 (Salmon et al. 2011)
under a 64-bit key, with a counter that runs through all tensors, and the Box-Muller transform makes
them normal. Generator and tails (6.7 standard deviations) are those of torch's own CUDA normals.
"""

from collections.abc import Sequence

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from torch import Tensor

from tacit.training.clip import is_dense

# A quarter of the numbers of one program: few enough that small models have many programs.
QUARTER = 512


@triton.jit
def _uniform(word):
    """Convert a 32-bit integer to a float in (0, 1]."""
    return (word.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def _normal_pair(first, second):
    radius = tl.sqrt(-2.0 * tl.log(_uniform(first)))
    angle = 6.283185307179586 * _uniform(second)
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def normals(key, counter):
    """Draw four normal numbers for each counter."""
    words = tl.randint4x(key, counter)
    a, b = _normal_pair(words[0], words[1])
    c, d = _normal_pair(words[2], words[3])
    return a, b, c, d


@triton.jit
def aligned(places, block):
    """Return the pointer to block `block` of float32 numbers."""
    return tl.multiple_of(tl.load(places + block).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def _add_to(place, z, factor, std, inside):
    tl.store(place, tl.load(place, mask=inside) * factor + z * std, mask=inside)


@triton.jit
def _noise_kernel(places, counts, counters, stds, key, factor, QUARTER: tl.constexpr):
    """Set x <- factor x + std z on one block of up to 4 QUARTER numbers."""
    block = tl.program_id(0)
    x, count, std = aligned(places, block), tl.load(counts + block), tl.load(stds + block)
    lane = tl.arange(0, QUARTER)
    a, b, c, d = normals(tl.load(key), tl.load(counters + block) + lane)
    _add_to(x + lane, a, factor, std, lane < count)
    _add_to(x + lane + QUARTER, b, factor, std, lane + QUARTER < count)
    _add_to(x + lane + 2 * QUARTER, c, factor, std, lane + 2 * QUARTER < count)
    _add_to(x + lane + 3 * QUARTER, d, factor, std, lane + 3 * QUARTER < count)


class Blocks:
    """Tensors cut into blocks for the noise kernel, one block for each program.

    Call `set_key`, then `launch`, which sets x <- factor x + std z for every number x. A launch may
    be recorded in a CUDA graph. The key is in device memory, so a replay uses the last key set.
    """

    def __init__(self, tensors: Sequence[Tensor], stds: Sequence[float], factor: float) -> None:
        self.factor = factor
        self._starts = [torch.arange(0, t.numel(), 4 * QUARTER) for t in tensors]
        left = [t.numel() - starts for t, starts in zip(tensors, self._starts, strict=True)]
        device = tensors[0].device
        self.places = self.begin(tensors)
        self.counts = torch.cat(left).clamp(max=4 * QUARTER).to(torch.int32).to(device)
        self.stds = self.spread(stds, torch.float32).to(device)
        # Blocks have separate ranges of counters, so no two numbers share one. 2^32 counters are
        # enough for 17 billion parameters.
        self.counters = QUARTER * torch.arange(len(self.places), device=device)
        self.key = torch.zeros(1, dtype=torch.int64, device=device)

    def spread(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Return one value per block from one value per tensor."""
        counts = torch.tensor([len(starts) for starts in self._starts])
        return torch.tensor(values, dtype=dtype).repeat_interleave(counts)

    def begin(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the address of each block in tensors of the same sizes."""
        starts = torch.cat(self._starts)
        places = self.spread([t.data_ptr() for t in tensors], torch.int64) + 4 * starts
        return places.to(tensors[0].device)

    def set_key(self, key: int) -> None:
        """Use these 64 bits as the key from now on; the host does not wait for the device."""
        self.key.fill_(key - 2**63)

    def launch(self) -> None:
        """Add the noise of the key that was set. Each key must be used for one launch only."""
        _noise_kernel[(len(self.places),)](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
            self.places, self.counts, self.counters, self.stds, self.key, self.factor,
            QUARTER=QUARTER, num_warps=4,
        )  # fmt: skip


def takes(tensor: Tensor) -> bool:
    """Return True if the kernel can add to this tensor: float32, without gaps, aligned."""
    return tensor.dtype == torch.float32 and tensor.data_ptr() % 64 == 0 and is_dense(tensor)
