"""Correlated noise on a GPU: earlier residuals, noise and the new residual in one pass (Triton).

One step of `noise.banded_noise`, which has the formulas and the proof: the sum is mixed
with the residuals of earlier steps in float64 registers, released on its grid in place, and its own
residual takes the place of the oldest one. `update` does the same and takes the optimizer's step.
Each residual is read once, 4 bytes; memory bandwidth is the limit. Noise is that of `noise.Blocks`.
"""

from collections.abc import Sequence

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from torch import Tensor
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]  # as above

from tacit.training.gpu.noise import LANES, WARPS, Blocks, aligned, grid_of, normals
from tacit.training.noise.grid_noise import NoiseGrid


@triton.jit
def mixed_past(residuals, rows, size, begin, count, column, now, LANES: tl.constexpr):
    """Return sum_k c_k e_{t-k} in units, for each eighth of a block.

    `begin` is the place of the block in a row, and `now` is t modulo `rows`. Each row is read for
    all eighths at once: eight loads on their way hide the time that one takes.
    """
    lane = tl.arange(0, LANES)
    none = (lane * 0).to(tl.float64)
    p0, p1, p2, p3, p4, p5, p6, p7 = none, none, none, none, none, none, none, none
    kept = residuals + begin  # a pointer: the rows may have more than 2^31 numbers together
    for row in range(rows):
        weight = tl.load(column + tl.where(row < now, now - row, now - row + rows))
        p0 += weight * _eighth_of(kept, lane, count)
        p1 += weight * _eighth_of(kept, lane + LANES, count)
        p2 += weight * _eighth_of(kept, lane + 2 * LANES, count)
        p3 += weight * _eighth_of(kept, lane + 3 * LANES, count)
        p4 += weight * _eighth_of(kept, lane + 4 * LANES, count)
        p5 += weight * _eighth_of(kept, lane + 5 * LANES, count)
        p6 += weight * _eighth_of(kept, lane + 6 * LANES, count)
        p7 += weight * _eighth_of(kept, lane + 7 * LANES, count)
        kept += size
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit
def _eighth_of(kept, at, count):
    return tl.load(kept + at, mask=at < count, other=0).to(tl.float64)


@triton.jit
def released_with_residual(x, past, z, grid, first, unit, expected):
    """Return the noisy mean of a sum as float32, and its residual in units as int32.

    `past` are the earlier residuals, mixed, in units; `first` is c_0 and `expected` the batch size.
    """
    g = x.to(tl.float64)
    mixed = first * g + unit * past
    whole = libdevice.rint(mixed * grid[0]) + libdevice.rint(z * grid[1])
    mean = (whole * grid[2]).to(tl.float32)
    residual = (g - expected * mean.to(tl.float64)) / unit
    limited = tl.minimum(tl.maximum(residual, -2147483647.0), 2147483647.0)
    return mean, limited.to(tl.int32)


@triton.jit(do_not_specialize=["rows", "size"])
def _banded_kernel(
    places, counts, counters, grids, key, nonce,
    residuals, rows, size, begins, units, column, phase, expected,
    LANES: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Release one block of up to 8 LANES numbers in place, and keep their residuals."""
    block = tl.program_id(0)
    x, count, grid = aligned(places, block), tl.load(counts + block), grid_of(grids, block)
    begin, unit, now = tl.load(begins + block), tl.load(units + block), tl.load(phase)
    batch, first = tl.load(expected), tl.load(column)
    pasts = mixed_past(residuals, rows, size, begin, count, column, now, LANES)
    lane = tl.arange(0, LANES)
    zs = normals(key, tl.load(nonce), tl.load(counters + block) + lane, ROUNDS)
    newest = residuals + (begin + now * size)
    for i in tl.static_range(8):
        at = lane + i * LANES
        inside = at < count
        total = tl.load(x + at, mask=inside, other=0.0)
        mean, e = released_with_residual(total, pasts[i], zs[i], grid, first, unit, batch)
        tl.store(x + at, mean, mask=inside)
        tl.store(newest + at, e, mask=inside)


class BandedBlocks(Blocks):
    """Blocks whose noise is correlated over time; see `noise.Blocks`.

    Call `set_nonce` and `set_step` before each launch, which also writes to `residuals`.

    Parameters
    ----------
    column
        The strategy, c_0 first.
    units
        For each tensor, the step to which residuals are rounded.
    expected_batch
        The divisor of the sums.
    residuals
        Of shape (bands - 1, numbers of all tensors), int32: what is kept between steps. Private.
    """

    is_banded = True

    def __init__(
        self,
        tensors: Sequence[Tensor],
        grids: Sequence[NoiseGrid],
        factor: float,
        rounds: int,
        *,
        column: Sequence[float],
        units: Sequence[float],
        expected_batch: float,
        residuals: Tensor,
    ) -> None:
        super().__init__(tensors, grids, factor, rounds)
        device = tensors[0].device
        sizes = torch.tensor([0, *(t.numel() for t in tensors)], dtype=torch.int64).cumsum(0)
        begins = self.spread(sizes[:-1].tolist(), torch.int64) + torch.cat(self._starts)
        doubles = {"dtype": torch.float64, "device": device}
        self._phase = torch.zeros(1, dtype=torch.int64, device=device)
        self._rows, size = residuals.shape
        self.past = (
            residuals, self._rows, size, begins.to(device),
            self.spread(units, torch.float64).to(device), torch.tensor(column, **doubles),
            self._phase, torch.tensor([expected_batch], **doubles),
        )  # fmt: skip

    def set_step(self, step: int) -> None:
        """Set the number of the step, on which the places of residuals depend."""
        self._phase.fill_(step % self._rows)

    def launch(self) -> None:
        """Release all tensors with the noise of the nonce, and keep their residuals."""
        _banded_kernel[(len(self.places),)](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
            self.places, self.counts, self.counters, self.grids, self.key, self.nonce, *self.past,
            LANES=LANES, ROUNDS=self.rounds, num_warps=WARPS,
        )  # fmt: skip
