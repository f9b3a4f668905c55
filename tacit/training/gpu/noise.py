"""Gaussian noise on a grid, added to many tensors in place, in one launch (Triton).

Noise that is drawn into a buffer and then added takes two passes over memory and a copy of the
model; here each number is drawn in registers. What is released is the integer round(x / step) +
round(noise / step), as on a CPU (`noise.grid_noise` has the argument); all arithmetic on
it is in float64, whose integers are exact.

Random bits come from ChaCha (Bernstein 2008) under a 256-bit key, with a nonce for each step and a
block counter that runs through all tensors: 12 rounds, or the 20 of ChaCha20. A block of 16 words
gives four pairs of 64-bit uniform numbers, and the Box-Muller transform makes each pair two normal
numbers (a sampler that rejects, as on the CPU, would leave most threads of a warp waiting). For
u = m 2^(e - 63) with sqrt(1/2) <= m < sqrt(2):

    r^2 = -2 ln u = (63 - e) 2 ln 2 - 2 ln((1 + s) / (1 - s)),  s = (m - 1) / (m + 1),

and the angle is 45 degrees plus a, |a| <= 45 degrees, in one of four quadrants given by two bits.
Taylor polynomials leave out terms below 2^-57. Each operation on numbers of size 1 errs by 2^-53 at
most; u is rounded once, and near 1 the difference 1 - u is taken in integers, so that small r are
right too. Together the error of a number is below 2^-49 for r < 6, and one grid step is 2^-29
standard deviations or more: the probability of a cell is right to a factor 1 + 2^-19. A u below
2^-15 gets 64 further bits, so that the noise reaches 13.2 standard deviations.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from torch import Tensor
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]  # as above

from tacit.training.clipping.clip import is_dense
from tacit.training.noise.grid_noise import NoiseGrid

# An eighth of the numbers of one program: few enough that small models have many programs.
LANES = 256
WARPS = 4


@triton.jit
def _quarter_round(a, b, c, d):
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def chacha(key, nonce, counter, ROUNDS: tl.constexpr):
    """Return the 16 words of the ChaCha block with this 64-bit counter, for each lane.

    `key` points to eight 32-bit words; `nonce` and `counter` are 64-bit integers. The layout is
    that of Bernstein 2008: constants, key, counter, nonce.
    """
    zero = (counter * 0).to(tl.uint32)
    k0, k1 = zero + tl.load(key).to(tl.uint32), zero + tl.load(key + 1).to(tl.uint32)
    k2, k3 = zero + tl.load(key + 2).to(tl.uint32), zero + tl.load(key + 3).to(tl.uint32)
    k4, k5 = zero + tl.load(key + 4).to(tl.uint32), zero + tl.load(key + 5).to(tl.uint32)
    k6, k7 = zero + tl.load(key + 6).to(tl.uint32), zero + tl.load(key + 7).to(tl.uint32)
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    n0, n1 = zero + nonce.to(tl.uint32), zero + (nonce >> 32).to(tl.uint32)
    # A loop, not unrolled here: Triton's passes take half a minute over all rounds in a row.
    x0, x1 = (zero + 0x61707865).to(tl.uint32), (zero + 0x3320646E).to(tl.uint32)
    x2, x3 = (zero + 0x79622D32).to(tl.uint32), (zero + 0x6B206574).to(tl.uint32)
    x4, x5, x6, x7, x8, x9, x10, x11 = k0, k1, k2, k3, k4, k5, k6, k7
    x12, x13, x14, x15 = c0, c1, n0, n1
    for _ in range(ROUNDS // 2):
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    return (
        x0 + 0x61707865, x1 + 0x3320646E, x2 + 0x79622D32, x3 + 0x6B206574,
        x4 + k0, x5 + k1, x6 + k2, x7 + k3, x8 + k4, x9 + k5, x10 + k6, x11 + k7,
        x12 + c0, x13 + c1, x14 + n0, x15 + n1,
    )  # fmt: skip


@triton.jit
def _long(high, low):
    """Return the 64-bit integer of two 32-bit words."""
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


@triton.jit
def _constant(value: tl.constexpr):
    """Return a float64 constant; a literal in a formula might be rounded to float32."""
    return tl.full((), value, tl.float64)


@triton.jit
def _step(sum_so_far, x, coefficient: tl.constexpr):
    """Return sum_so_far * x + coefficient: one step of Horner's rule."""
    return sum_so_far * x + _constant(coefficient)


@triton.jit
def _cosine(x):
    """Compute cos(pi t / 4) / sqrt(2) for x = t^2 <= 1."""
    y = _constant(7.084407110020032e-16) * x + _constant(-2.756353972959065e-13)
    y = _step(y, x, 8.132547610896006e-11)
    y = _step(y, x, -1.7402866271232282e-08)
    y = _step(y, x, 2.5391217734936238e-06)
    y = _step(y, x, -0.00023051107385815565)
    y = _step(y, x, 0.011210714326067845)
    y = _step(y, x, -0.21808950623871495)
    return _step(y, x, 0.7071067811865475)


@triton.jit
def _sine(t, x):
    """Compute sin(pi t / 4) / sqrt(2) for x = t^2 <= 1."""
    y = _constant(3.272988431158564e-17) * x + _constant(-1.443223565356873e-14)
    y = _step(y, x, 4.9132984287230995e-12)
    y = _step(y, x, -1.242561746116112e-09)
    y = _step(y, x, 2.2158017528270707e-07)
    y = _step(y, x, -2.5863282007281283e-05)
    y = _step(y, x, 0.0017609748884134294)
    y = _step(y, x, -0.05709569921871435)
    return t * _step(y, x, 0.5553603672697958)


@triton.jit
def _logarithm(s, x):
    """Compute 2 ln((1 + s) / (1 - s)) for x = s^2 <= 0.0295."""
    y = _constant(0.19047619047619047) * x + _constant(0.21052631578947367)
    y = _step(y, x, 0.23529411764705882)
    y = _step(y, x, 0.26666666666666666)
    y = _step(y, x, 0.3076923076923077)
    y = _step(y, x, 0.36363636363636365)
    y = _step(y, x, 0.4444444444444444)
    y = _step(y, x, 0.5714285714285714)
    y = _step(y, x, 0.8)
    y = _step(y, x, 1.3333333333333333)
    return s * _step(y, x, 4.0)


@triton.jit
def _radius(word, further):
    """Compute sqrt(-2 ln u), u being the 63 upper bits of `word`, and then `further` if u is small.

    A u of 127 zeros is taken as 2^-127.
    """
    whole = word >> 1
    is_small = whole < 281474976710656  # 2^48 of 2^63
    # All factors are powers of two, and `whole` has 48 bits if it is small: one rounding.
    long = whole.to(tl.float64) * _constant(18446744073709551616.0) + further.to(tl.float64)
    u = tl.where(is_small, tl.maximum(long, _constant(1.0)), whole.to(tl.float64))
    bits = u.to(tl.int64, bitcast=True) - 0x3FE6A09E667F3BCD  # less the bits of sqrt(1/2)
    exponent = bits >> 52
    m = ((bits & 0xFFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD).to(tl.float64, bitcast=True)
    halvings = tl.where(is_small, 127, 63) - exponent
    # For m = u the difference to 1 is a small integer over 2^63, which is more exact than m is.
    below = (whole.to(tl.int64) - 9223372036854775807).to(tl.float64) - _constant(1.0)
    gap = tl.where(halvings == 0, below * _constant(1.0842021724855044e-19), m - _constant(1.0))
    s = gap / (m + _constant(1.0))
    square = halvings.to(tl.float64) * _constant(1.3862943611198906) - _logarithm(s, s * s)
    return tl.sqrt(tl.maximum(square, _constant(0.0)))


@triton.jit
def normal_pair(first, second, further):
    """Return two standard normal numbers for each lane, from 64-bit words."""
    radius = _radius(first, further)
    t = (second.to(tl.int64, bitcast=True) >> 2).to(tl.float64) * _constant(
        4.336808689942018e-19  # 2^-61
    )
    x = t * t
    cosine, sine = _cosine(x), _sine(t, x)
    a, b = radius * (cosine + sine), radius * (cosine - sine)
    # The last bits of the words, which are not used above, turn the point by quarters.
    return tl.where((second & 1) == 1, -a, a), tl.where((second & 2) == 2, -b, b)


@triton.jit
def normals(key, nonce, counter, ROUNDS: tl.constexpr):
    """Return eight standard normal numbers for each lane, from the block at its counter."""
    w = chacha(key, nonce, counter, ROUNDS)
    a, b, c, d = _long(w[0], w[1]), _long(w[4], w[5]), _long(w[8], w[9]), _long(w[12], w[13])
    none = a * 0
    a1, b1, c1, d1 = none, none, none, none
    least = tl.minimum(tl.minimum(w[0], w[4]), tl.minimum(w[8], w[12]))
    if tl.min(least) < 131072:  # 2^17: some u may be below 2^-15
        f = chacha(key, nonce, counter + 4611686018427387904, ROUNDS)  # 2^62: unused so far
        a1, b1, c1, d1 = _long(f[0], f[1]), _long(f[2], f[3]), _long(f[4], f[5]), _long(f[6], f[7])
    z0, z1 = normal_pair(a, _long(w[2], w[3]), a1)
    z2, z3 = normal_pair(b, _long(w[6], w[7]), b1)
    z4, z5 = normal_pair(c, _long(w[10], w[11]), c1)
    z6, z7 = normal_pair(d, _long(w[14], w[15]), d1)
    return z0, z1, z2, z3, z4, z5, z6, z7


@triton.jit
def aligned(places, block):
    """Return the pointer to the float32 numbers of one block, whose address is places[block]."""
    return tl.multiple_of(tl.load(places + block).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def grid_of(grids, block):
    """Return a block's numbers: 1 / step, noise in steps, and step * factor."""
    row = grids + 3 * block
    return tl.load(row), tl.load(row + 1), tl.load(row + 2)


@triton.jit
def released(x, z, grid):
    """Return (round(x / step) + round(noise)) * step * factor as float32, for noise z."""
    whole = libdevice.rint(x.to(tl.float64) * grid[0]) + libdevice.rint(z * grid[1])
    return (whole * grid[2]).to(tl.float32)


@triton.jit
def _noise_kernel(
    places, counts, counters, grids, key, nonce, LANES: tl.constexpr, ROUNDS: tl.constexpr
):
    """Release one block of up to 8 LANES numbers in place."""
    block = tl.program_id(0)
    x, count, grid = aligned(places, block), tl.load(counts + block), grid_of(grids, block)
    lane = tl.arange(0, LANES)
    zs = normals(key, tl.load(nonce), tl.load(counters + block) + lane, ROUNDS)
    for i in tl.static_range(8):
        at = lane + i * LANES
        inside = at < count
        tl.store(x + at, released(tl.load(x + at, mask=inside), zs[i], grid), mask=inside)


class Blocks:
    """Tensors cut into blocks for the noise kernel, one block for each program.

    Call `set_nonce`, then `launch`, which releases every number on its tensor's grid, times
    `factor`. A launch may be recorded in a CUDA graph. Key and nonce are in device memory, so a
    replay uses those that were set last.
    """

    is_banded = False  # whether residuals are kept between launches, for correlated noise

    def __init__(
        self, tensors: Sequence[Tensor], grids: Sequence[NoiseGrid], factor: float, rounds: int
    ) -> None:
        self.rounds = rounds
        self._starts = [torch.arange(0, t.numel(), 8 * LANES) for t in tensors]
        left = [t.numel() - starts for t, starts in zip(tensors, self._starts, strict=True)]
        device = tensors[0].device
        self.places = self.begin(tensors)
        self.counts = torch.cat(left).clamp(max=8 * LANES).to(torch.int32).to(device)
        columns = (
            [1.0 / float(grid.step) for grid in grids],
            [float(grid.noise_steps) for grid in grids],
            [float(grid.step) * factor for grid in grids],
        )
        rows = [self.spread(column, torch.float64) for column in columns]
        self.grids = torch.stack(rows, dim=1).contiguous().to(device)
        # Blocks have separate ranges of counters, so no two numbers share one.
        self.counters = LANES * torch.arange(len(self.places), device=device)
        self.key = torch.zeros(8, dtype=torch.int32, device=device)
        self.nonce = torch.zeros(1, dtype=torch.int64, device=device)
        self._secret = b""
        # Arguments of kernels that take residuals too (`banded_blocks`), which none of them reads.
        self.past: tuple[Any, ...] = (self.counts, 0, 0, *[self.counts] * 5)

    def spread(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Return a tensor with one entry per block: the value given for the block's tensor."""
        counts = torch.tensor([len(starts) for starts in self._starts])
        return torch.tensor(values, dtype=dtype).repeat_interleave(counts)

    def begin(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return each block's address in tensors of the sizes for which the blocks were made."""
        starts = torch.cat(self._starts)
        places = self.spread([t.data_ptr() for t in tensors], torch.int64) + 4 * starts
        return places.to(tensors[0].device)

    def set_nonce(self, secret: bytes, nonce: int) -> None:
        """Set the 32-byte key, if it is new, and the nonce, without making the host wait.

        A key is used with each nonce once.
        """
        if secret != self._secret:
            self._secret = secret
            self.key.copy_(torch.frombuffer(bytearray(secret), dtype=torch.int32))
        self.nonce.fill_(nonce)

    def launch(self) -> None:
        """Release all tensors with the noise of the nonce that was set."""
        _noise_kernel[(len(self.places),)](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
            self.places, self.counts, self.counters, self.grids, self.key, self.nonce,
            LANES=LANES, ROUNDS=self.rounds, num_warps=WARPS,
        )  # fmt: skip


def takes(tensor: Tensor) -> bool:
    """Return True if the noise kernel supports this tensor: float32, without gaps, aligned."""
    return tensor.dtype == torch.float32 and tensor.data_ptr() % 64 == 0 and is_dense(tensor)
