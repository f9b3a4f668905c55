"""Correlated noise on a GPU: earlier residuals, noise and the new residual in one pass (Triton).

One step of `tacit.training.banded_noise`, which has the formulas and the proof: the sum is mixed
with the residuals of earlier steps in float64 registers, released on its grid in place, and its own
residual takes the place of the oldest one. Each residual is read once; memory bandwidth is the
limit. Noise is that of `noise.Blocks`.
"""

from collections.abc import Sequence

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from torch import Tensor
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]  # as above

from tacit.training.gpu.noise import LANES, WARPS, Blocks, aligned, grid_of, normals
from tacit.training.grid_noise import NoiseGrid


@triton.jit
def released_with_residual(g, past, z, grid, first, unit, expected):
    """Return the noisy mean of a sum as float32, and its residual in units as int32.

    `past` are the earlier residuals, mixed, in units; `first` is c_0 and `expected` the batch size.
    """
    mixed = first * g + unit * past
    whole = libdevice.rint(mixed * grid[0]) + libdevice.rint(z * grid[1])
    mean = (whole * grid[2]).to(tl.float32)
    residual = (g - expected * mean.to(tl.float64)) / unit
    limited = tl.minimum(tl.maximum(residual, -2147483647.0), 2147483647.0)
    return mean, limited.to(tl.int32)


@triton.jit
def _banded_kernel(
    places, counts, counters, grids, key, nonce,
    residuals, size, bases, units, column, phase, expected,
    ROWS: tl.constexpr, LANES: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Release one block of up to 8 LANES numbers in place, and keep their residuals."""
    block = tl.program_id(0)
    x, count, grid = aligned(places, block), tl.load(counts + block), grid_of(grids, block)
    base, unit = tl.load(bases + block), tl.load(units + block)
    now, batch, first = tl.load(phase), tl.load(expected), tl.load(column)
    lane = tl.arange(0, LANES)
    zs = normals(key, tl.load(nonce), tl.load(counters + block) + lane, ROUNDS)
    for i in tl.static_range(8):
        at = lane + i * LANES
        inside = at < count
        g = tl.load(x + at, mask=inside, other=0.0).to(tl.float64)
        past = g * 0.0
        for row in range(ROWS):
            lag = (now + ROWS - 1 - row) % ROWS + 1
            kept = tl.load(residuals + row * size + base + at, mask=inside, other=0)
            past += tl.load(column + lag) * kept.to(tl.float64)
        mean, residual = released_with_residual(g, past, zs[i], grid, first, unit, batch)
        tl.store(x + at, mean, mask=inside)
        tl.store(residuals + now * size + base + at, residual, mask=inside)


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

    is_plain = False

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
        begins = self.spread(sizes[:-1].tolist(), torch.int64)
        self._bases = (begins + torch.cat(self._starts)).to(device)
        self._units = self.spread(units, torch.float64).to(device)
        self._column = torch.tensor(column, dtype=torch.float64, device=device)
        self._expected = torch.tensor([expected_batch], dtype=torch.float64, device=device)
        self._phase = torch.zeros(1, dtype=torch.int64, device=device)
        self._residuals = residuals

    def set_step(self, step: int) -> None:
        """Set the number of the step, on which the places of residuals depend."""
        self._phase.fill_(step % len(self._residuals))

    def launch(self) -> None:
        """Release all tensors with the noise of the nonce, and keep their residuals."""
        rows, size = self._residuals.shape
        _banded_kernel[(len(self.places),)](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
            self.places, self.counts, self.counters, self.grids, self.key, self.nonce,
            self._residuals, size, self._bases, self._units, self._column, self._phase,
            self._expected, ROWS=rows, LANES=LANES, ROUNDS=self.rounds, num_warps=WARPS,
        )  # fmt: skip
