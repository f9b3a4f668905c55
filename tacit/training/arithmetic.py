"""How far rounding can move a clipped sum: the sensitivity of the sum as it is computed.

The price of a step assumes that one example moves the sum by at most the clip norm C. A computed
sum is rounded, and every addition depends on the examples that were added before. This module
proves a number eta such that one example moves the computed sum by at most C (1 + eta); the noise
of a run is multiplied by 1 + eta, and its price stays.

Notation: u is the unit roundoff, 2^-53 in float64 and 2^-24 in float32; gamma(k) = k u / (1 - k u).

**Sums.** A sum of numbers x_j, computed in any order in which no number passes through more than k
roundings, has an error of at most gamma(k) sum_j |x_j|. The same holds for a sum of products, with
the roundings of the products counted (Higham 2002, Accuracy and Stability of Numerical Algorithms,
2nd edition, sections 3.1 and 4.2). k is at most the number of terms, whatever the order, whether
lanes, threads, matrix units or atomic additions choose it.

**Two lots.** Let v_i be the clipped contribution of example i, which depends on no other example,
with |v_i| <= C. Let A_i be a bound on the norm of the sum of absolute values of the terms that
example i adds, so that an exact sum over examples is computed with an error of at most
gamma(k) sum_i A_i. Take two lots that differ by one example, each of at most B examples, with
A_i <= C / rho. The exact sums differ by at most C, and each computed sum is within gamma(k) B C /
rho of its exact sum. So the computed sums differ by at most C (1 + 2 gamma(k) B / rho), that is

    eta = 2 gamma(k) B / rho.

A replaced example is one removed and one added, so it moves the computed sum by at most
2 C + 2 gamma(k) B C / rho <= 2 C (1 + eta). Several groups of parameters with their own clip norms
C_g: the same holds for each group with its C_g, so the noise of every group is multiplied by the
same 1 + eta.

**rho.** The loop over records forms each example's gradient and adds c_i g_i, one term for each
example and coordinate, whose product is exact in float64: A_i = |v_i|, so rho = 1. The traced
program adds c_i left_it right_it' over the positions t of an example, which may cancel: the terms
of an example can be far longer than its contribution. Its bounded mode therefore clips by
norm + CANCELLATION * L_i, where L_i = sum_t |left_it| |right_it| is the length of the terms:
c_i L_i <= C / CANCELLATION, so rho = CANCELLATION. (Over several layers, take the norm over the
layers of the bounds of each layer.) It contracts in float64, so that the products of float32
numbers and factors need one rounding each; or, where that is faster, it forms and keeps each
example's gradient, in any precision, since the norm is that of the very numbers that are added.

**k.** In one contraction of the bounded mode, at most ROWS rows are contracted at a time, and at
most ROWS such parts are added, so a term passes through at most 2 ROWS additions and three
roundings of its own. At most B microbatches and then all ranks are added.

**The last term.** On a GPU, and for formed gradients, the finished sum, whose norm is at most
B C (1 + eta), is rounded to float32 before its release, at 2^-24 of its norm, which adds 2^-23 B to
eta. On a CPU the bounded mode rounds nothing; it has the same eta, so that the noise of a run does
not depend on where it is computed.

**B** bounds every lot, not the drawn one; `largest_lot` derives it from the sampler.

What is taken for granted: matrix products are sums of products in some order, rounded to nearest or
toward zero (u is doubled below, to cover truncation), not computed by Strassen's method or by an
emulation of float64 in fewer bits; and the gradient that an example has before it is clipped does
not depend on the other examples. Kernels may round an example's activations differently in a batch
of another size. Only the loop over records excludes that.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tacit import sampling
from tacit.training.clip import Clip, group_of

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
"""Unit roundoff: largest relative error of one operation that rounds to nearest."""

BLOCK = 128
"""Most numbers that are added in float32 before their sum goes on in float64."""

LONG = 2**14
"""Length of rows from which a GPU takes their squares in a kernel of its own."""

ROWS = 2**13
"""Most rows of one matrix product of the bounded mode, and most of its products in one sum."""

CANCELLATION = 2.0**-12
"""Share of the length of an example's terms by which the bounded mode raises the norm."""

TAIL = 2.0**-128
"""Largest probability that a drawn lot is larger than `largest_lot` says."""

NOT_BOUNDED = (
    "arithmetic of the contraction not bounded: the price holds for exact sums, and sums over the "
    "examples are computed in float32 or less; arithmetic='bounded' proves a bound"
)


@dataclass(frozen=True)
class Arithmetic:
    """What is proved about the rounding of the sums of a run. Public.

    Attributes
    ----------
    eta
        One example moves the computed sum by at most clip norm times (1 + eta). None if nothing is
        proved.
    text
        The same in words, for the certificate.
    mode
        How sums over examples are computed. "formed": each example's gradient is formed, and they
        are added in float64. "bounded": by the traced program's bounded mode. "fast": as fast
        as possible; nothing is proved.
    largest_lot
        The bound holds for lots of up to this many examples.
    """

    eta: float | None
    text: str
    mode: Literal["formed", "bounded", "fast"]
    largest_lot: int = 0

    @property
    def noise_factor(self) -> float:
        """Factor on the scale of the noise: 1 + eta, or 1 if nothing is proved."""
        return 1.0 if self.eta is None else 1.0 + self.eta

    def noise_scales(self, clip: Clip, names: Sequence[str]) -> list[float]:
        """Return the noise scale of each named parameter: that of the clip rule, times 1 + eta."""
        group, scales = group_of(clip, names), clip.noise_scales
        return [scales[group[name]] * self.noise_factor for name in names]

    def require_covered(self, drawn: float) -> None:
        """Raise `ValueError` if a lot of `drawn` examples is larger than the bound allows.

        If no more than `n_records` records exist, that has probability `TAIL`, so the error reveals
        nothing.
        """
        if self.eta is not None and drawn > self.largest_lot:
            raise ValueError(
                "n_records must be at least the number of records: a lot was drawn that is too "
                f"large for n_records, for which at most {self.largest_lot:,} records are expected "
                "in one lot. Nothing was released."
            )

    def finished(
        self, sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor], drawn: float = 0
    ) -> list[Tensor]:
        """Return the finished sums for their release, rounded to float32 or the parameter's dtype.

        Those of the bounded mode on a CPU are not rounded. The noise does not depend on the dtype.
        Raises `ValueError` if the lot, of `drawn` examples, is larger than the bound allows.
        """
        self.require_covered(drawn)
        if self.mode == "bounded" and all(p.device.type == "cpu" for p in parameters.values()):
            return [sums[name] for name in parameters]
        pairs = [(sums[name], p.dtype) for name, p in parameters.items()]
        if all(total.dtype == dtype == torch.float32 for total, dtype in pairs):
            return [total for total, _ in pairs]
        return [total.to(torch.promote_types(dtype, torch.float32)) for total, dtype in pairs]

    def __str__(self) -> str:
        return self.text


def gamma(roundings: int, dtype: torch.dtype = torch.float64) -> float:
    """Return k u / (1 - k u), the relative error after k roundings; truncation is allowed for."""
    error = roundings * 2 * UNIT[dtype]
    if error >= 0.5:
        return math.inf
    return error / (1 - error)


def sum_error(largest_lot: int, *, forms_gradients: bool, ranks: int = 1) -> float:
    """Return eta: one example moves the computed sum by at most C (1 + eta).

    Parameters
    ----------
    largest_lot
        B: no lot holds more examples.
    forms_gradients
        Whether each example's gradient is formed, as in the loop over records. If not, it is the
        bounded mode of the traced program.
    ranks
        Number of processes whose sums are added.

    Examples
    --------
    >>> sum_error(4096, forms_gradients=True) < 5e-4
    True
    >>> sum_error(5000, forms_gradients=False) < 1e-3
    True
    """
    # Example by example or chunk by chunk, then microbatch by microbatch, then rank by rank.
    additions = 2 * largest_lot + ranks + 8
    share = 1.0
    if not forms_gradients:
        additions, share = additions + 2 * ROWS, CANCELLATION
    eta = 2 * gamma(additions) * largest_lot / share
    # Each of the two sums, of norm at most B C (1 + eta), is rounded to float32.
    return eta + 2 * UNIT[torch.float32] * largest_lot * (1 + eta)


def largest_lot(sampler: object, n_records: int) -> int:
    """Return a size that a lot exceeds with probability at most `TAIL`; for many samplers never.

    Poisson sampling and random allocation draw lots whose size has a binomial law. For these the
    bound m solves n KL(m / n, q) >= log(1 / TAIL), with n one more than the declared number of
    records, so that the bound holds for both of two neighboring data sets (Chernoff's bound). In
    a run of T steps, a lot beyond the bound adds at most (1 + e^epsilon) T * 2^-128 to delta.

    >>> largest_lot(sampling.FixedSize(64, n_records=1000), 1000)
    64
    >>> largest_lot(sampling.Poisson(4096 / 60_000), 60_000)
    4944
    """
    if isinstance(sampler, sampling.FixedSize):
        return sampler.batch_size
    if isinstance(sampler, sampling.Shuffle):
        return -(-sampler.n_records // sampler.steps)
    if isinstance(sampler, sampling.RandomAllocation):
        return _binomial_bound(n_records + 1, 1 / sampler.steps)
    if isinstance(sampler, sampling.CyclicPoisson):
        return _binomial_bound(n_records + 1, sampler.rate / sampler.groups)
    if isinstance(sampler, sampling.FixedOrder) and sampler.places is None:
        return _binomial_bound(n_records + 1, 1 / sampler.steps)
    if isinstance(sampler, sampling.TruncatedPoisson):
        return min(sampler.max_batch, _binomial_bound(n_records + 1, sampler.rate))
    if isinstance(sampler, sampling.Poisson):
        return _binomial_bound(n_records + 1, sampler.rate)
    return n_records + 1  # each record is in a lot at most once


def arithmetic_of(
    mode: Literal["formed", "bounded", "fast"], *, largest_lot: int, ranks: int
) -> Arithmetic:
    """Return what is proved for a run; `mode` is that of `Arithmetic`, the rest of `sum_error`."""
    if mode == "fast":
        return Arithmetic(None, NOT_BOUNDED, mode)
    eta = sum_error(largest_lot, forms_gradients=mode == "formed", ranks=ranks)
    text = (
        f"rounding bounded: one example moves the computed sum by at most the clip norm times "
        f"1 + {eta:.1e}, in lots of up to {largest_lot:,} examples; the noise is larger by that "
        "factor"
    )
    return Arithmetic(eta, text, mode, largest_lot)


def block_sums(rows: Tensor) -> Tensor:
    """Return the sum of each row, with an error below (BLOCK + 2) u times the sum of its terms.

    Blocks of `BLOCK` numbers are summed in the rows' dtype, and their sums in float64.
    """
    return _by_blocks(rows, lambda part: part.sum(-1))


def block_squares(rows: Tensor) -> Tensor:
    """Return the sum of squares of each row, with a relative error below (BLOCK + 6) u.

    A plain sum of squares in float32 on a CPU is short by 0.8 percent for 1e7 equal numbers.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    if rows.is_cuda:
        from tacit.training.gpu.available import usable
        from tacit.training.gpu.weighted_rows import row_squares

        if rows.shape[1] >= LONG and usable(rows):  # without a copy in float64
            return row_squares(rows).to(dtype)
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square().to(dtype)
    return _by_blocks(
        rows, lambda part: torch.linalg.vector_norm(part, dim=-1, dtype=dtype).square()
    )


def lost_below_range(terms: float, *squares: Tensor) -> Tensor:
    """Return a bound on what `terms` products of inner products lose below the dtype's range.

    `squares` are the squared norms of all vectors of one factor each, by example. Let t be the
    smallest normal number. A result below t may become zero, which loses at most t; so may an
    operand (on processors that flush), which loses at most t |y| <= t (1 + y^2) in a product with
    y. An inner product of two vectors is then off by at most 4 t times its width times one plus
    their squared norms; a product of two such numbers by at most 8 t times both widths and the
    product of (1 + squared norms). Summed over all pairs of vectors, that is the result, if
    `terms` is the number of pairs times the sum of the widths. It is far below any norm, unless
    a factor is near the end of the range; there it overflows, and the example adds nothing.

    >>> float(lost_below_range(1e6, torch.tensor(1e4), torch.tensor(1e-3))) < 1e-26
    True
    """
    first, *others = squares
    found = 8 * terms * torch.finfo(first.dtype).tiny * (1 + first)
    for square in others:
        found = found * (1 + square)
    return found


def raised_for_range(
    squared: Tensor, lengths: Tensor, traces: Sequence[Tensor], *, positions: int, widths: int
) -> tuple[Tensor, Tensor]:
    """Return norms from Gram matrices, raised by what numbers below the range may have lost.

    These are squared norms and the lengths of their terms. `traces` are those of both matrices,
    `widths` the sum of the widths of their vectors.
    """
    lost = lost_below_range(float(positions) ** 2 * widths, *traces)
    return squared + lost, lengths + lost.sqrt()


def depth_in_blocks(terms: int) -> int:
    """Return the most roundings of a term in a sum of blocks of `BLOCK` terms, block by block."""
    return min(terms, BLOCK) + -(-terms // BLOCK)


def _by_blocks(rows: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    size = rows.shape[1]
    if size <= BLOCK:
        return reduce(rows)
    whole = size - size % BLOCK
    found = reduce(rows[:, :whole].unflatten(1, (-1, BLOCK)))  # (rows, blocks)
    total = found.sum(1, dtype=torch.float64)
    if whole < size:
        total += reduce(rows[:, whole:])
    return total.to(found.dtype)


def _binomial_bound(n: int, rate: float) -> int:
    """Return the least m with n KL(m / n, rate) >= log(1 / TAIL), or n if there is none."""
    if rate >= 1:
        return n
    tried = range(math.ceil(n * rate), n)
    enough = bisect_left(tried, True, key=lambda m: n * _divergence(m / n, rate) >= -math.log(TAIL))
    return tried.start + enough


def _divergence(a: float, q: float) -> float:
    """Return KL(a, q), the divergence of two coins, for a in [0, 1] and q in (0, 1)."""
    if q <= 0:
        return math.inf if a > 0 else 0.0
    heads = a * math.log(a / q) if a > 0 else 0.0
    tails = (1 - a) * math.log((1 - a) / (1 - q)) if a < 1 else 0.0
    return heads + tails
