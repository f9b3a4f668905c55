"""A dominating pair for random allocation, from above: one epoch as a law of finitely many losses.

One epoch (see `_allocation`) has the likelihood ratio A = mean of X_1, ..., X_steps, X lognormal of
mean 1 under Q, so every divergence of the pair is E_Q of a convex function of A. Three steps, each
of which can only raise such expectations, lead to a law on few losses:

1. X above a cut counts as infinite loss, with the P-mass of that event.
2. X below it moves to the ends of its cell on a uniform grid, mean kept: a spread of X, hence of A.
3. The ratio A, now a sum on that grid, moves to the ends of its cell on a grid of losses, P- and
   Q-mass kept: a spread of A.

Step 2 turns the law of A into one convolution power, by a Fourier transform of a tilted law. What
the transform may have lost to rounding and to its finite window is added to the infinite loss.
Feldman & Shenfeld 2026 (arXiv:2602.17284) compute the same pair by repeated convolution in logs.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from tacit.accounting.pld.loss_laws import Discrete
from tacit.accounting.rdp.divergence import FloatArray, log_sum_exp
from tacit.errors import UnsupportedEvent

_TAIL = 1e-15
"""P-mass of one epoch that is cut off and counted as infinite loss."""

_FINEST, _COARSEST = 1 / 24, 1 / 3
"""Grid steps, in standard deviations of X, between which a grid is chosen."""

_FEW = 30
_BELOW = 12.0
"""Standard deviations of the sum that the window covers below and above the mean."""

_MOST_POINTS = 1 << 20
_ROUND = float(np.finfo(float).eps)


@lru_cache(maxsize=16)
def allocation_pair(steps: int, shift: float) -> tuple[Discrete, Discrete]:
    """Laws of the loss of one epoch, removal and addition, each dominating the true one.

    Raises `UnsupportedEvent` where the noise is so small that no grid can hold X.
    """
    return _removal(steps, shift), _addition(steps, shift)


class _Epoch(NamedTuple):
    """Law of the ratio under Q, where it matters; see `_epoch`."""

    ratio: FloatArray
    mass: FloatArray
    error: FloatArray
    """The error of `mass` is this times a vector of 2-norm at most 1."""
    total: float
    """Q-mass of all ratios, kept or not."""
    mean: float
    """P-mass of all ratios, kept or not."""
    beyond: float
    """Bound on the mass of ratios outside the window of the transform, under P and under Q."""


def _removal(steps: int, shift: float) -> Discrete:
    one = _epoch(steps, shift, 1)
    outer_q, outer_p = _outer(steps, shift)
    p, error = one.mass * one.ratio, one.error * one.ratio
    # A mass that rounding hid may have any loss, but at most 0 if its ratio is at most 1.
    infinite = one.beyond + outer_p + (steps - 1) * outer_q + _norm(error[one.ratio > 1])
    rest = max(one.mean - float(p.sum()), 0.0) + _norm(error)
    positive = one.ratio > 0
    return _on_losses(np.log(one.ratio[positive]), p[positive], infinite=infinite, at_zero=rest)


def _addition(steps: int, shift: float) -> Discrete:
    one = _epoch(steps, shift, -1)
    outer_q, _ = _outer(steps, shift)
    never = one.ratio == 0  # what the mixture never gives: an infinite loss
    infinite = one.beyond + steps * outer_q + _norm(one.error[one.ratio < 1])
    infinite += float(one.mass[never].sum())
    rest = max(one.total - float(one.mass.sum()), 0.0) + _norm(one.error)
    losses, p = -np.log(one.ratio[~never]), one.mass[~never]
    return _on_losses(losses[::-1], p[::-1], infinite=infinite, at_zero=rest)


def _epoch(steps: int, shift: float, side: int) -> _Epoch:
    """Ratios k h / steps and their Q-mass, on the side that counts and six deviations beyond.

    `side` 1 serves removal, where large ratios count: X is rounded up, and the law tilted so that
    rounding is relative to what a large ratio is worth. -1 serves addition, the other way.
    """
    grid = _grid(steps, shift)
    mass = _cell_ends(shift, grid.step, grid.cut, side)
    x = grid.step * np.arange(len(mass))
    theta = side * min(30 / grid.cut, math.sqrt(2) / grid.spread)
    tilted = mass * np.exp(theta * (x - 1))
    scale = tilted.sum()
    folded = np.pad(tilted / scale, (0, -len(mass) % grid.size)).reshape(-1, grid.size).sum(axis=0)
    spectrum = np.fft.rfft(folded)
    logs = steps * np.log(np.where(spectrum == 0, 1e-300, spectrum))
    power = np.exp(logs)
    law = np.roll(np.fft.irfft(power, grid.size), -(grid.first % grid.size))
    total = grid.step * (grid.first + np.arange(grid.size))
    kept = side * (total - steps) > -6 * grid.spread  # farther out the tilt would leave only noise
    total = total[kept]
    weight = np.exp(steps * math.log(scale) - theta * (total - steps))
    whole = math.exp(steps * math.log(mass.sum()))
    return _Epoch(
        ratio=total / steps,
        mass=np.maximum(law[kept], 0.0) * weight,
        error=_transform_error(spectrum, power, logs, law, steps) * weight,
        total=whole * (1 + 1e-12),
        mean=whole * float(mass @ x / mass.sum()) * (1 + 1e-12),
        beyond=_outside(mass, x, steps, grid),
    )


def _outer(steps: int, shift: float) -> tuple[float, float]:
    """Q- and P-mass of X above the cut."""
    z = _z(_grid(steps, shift).cut, shift)
    return float(special.ndtr(-z)), float(special.ndtr(shift - z))


def _norm(error: FloatArray) -> float:
    """Cauchy-Schwarz: the sum of errors that are `error` times a vector of 2-norm 1."""
    return float(np.linalg.norm(error))


class _Grid(NamedTuple):
    """Points first * step, ..., for the sum of the X, and the largest X."""

    step: float
    first: int
    size: int
    cut: float
    spread: float
    """Standard deviation of the sum."""


def _grid(steps: int, shift: float) -> _Grid:
    z = -float(special.ndtri_exp(math.log(_TAIL / 2))) + shift
    cut = math.exp(min(shift * z - shift**2 / 2, 700.0))
    one = math.sqrt(math.expm1(min(shift**2, 400.0)))
    spread = math.sqrt(steps) * one
    start = max(steps - _BELOW * spread, 0.0)
    window = steps - start + _BELOW * spread + 2 * cut
    # Few steps need a grid that is fine near 0, where a sum may lie.
    step = max(one * _FINEST if steps > _FEW else 0.0, window / _MOST_POINTS)
    if not step <= one * _COARSEST:
        raise UnsupportedEvent(
            f"random allocation with noise multiplier {1 / shift:g} is out of reach of a grid. "
            "Use the RDP accountant."
        )
    size = _fast_size(math.ceil(window / step) + 2)
    return _Grid(step, math.floor(start / step), size, cut, spread)


def _fast_size(least: int) -> int:
    """A size of at least `least` whose transform is fast: a power of two, times 1, 3 or 5."""
    return min(odd << max((-(-least // odd) - 1).bit_length(), 1) for odd in (1, 3, 5))


def _cell_ends(shift: float, step: float, cut: float, side: int) -> FloatArray:
    """Q-mass at the grid points when each cell gives its mass to its ends, the mean of X kept."""
    edges = step * np.arange(math.ceil(cut / step) + 1)
    z = _z(edges, shift)
    q, p = _cells(z), _cells(z - shift)  # X q = p
    # A difference of tails errs by a few roundings of the tail; edge * (tail of Q) <= tail of P.
    slack = 16 * _ROUND * np.minimum(special.ndtr(shift - z[:-1]), special.ndtr(z[1:] - shift))
    slack = slack + 16 * _ROUND * edges[:-1] * np.minimum(
        special.ndtr(-z[:-1]), special.ndtr(z[1:])
    )
    right = np.clip((p - edges[:-1] * q + side * slack) / step, 0.0, q)
    mass = np.zeros(len(edges))
    mass[1:] += right
    mass[:-1] += q - right
    return mass * (1 + 1e-13)


def _z(x: FloatArray | float, shift: float) -> FloatArray:
    with np.errstate(divide="ignore"):  # x = 0 is z = -inf
        return np.log(x) / shift + shift / 2


def _cells(z: FloatArray) -> FloatArray:
    """Normal mass between neighbors, from the tail on whose side they lie."""
    low, high = special.ndtr(z), special.ndtr(-z)
    return np.where(z[1:] > 0, high[:-1] - high[1:], low[1:] - low[:-1])


def _transform_error(
    spectrum: NDArray[np.complex128],
    power: NDArray[np.complex128],
    logs: NDArray[np.complex128],
    law: FloatArray,
    steps: int,
) -> float:
    """Bound on the 2-norm of the error of `law`.

    A transform of n numbers of sum 1 errs by at most c u log2(n) in each coefficient, and by as
    much in relative 2-norm (Higham 2002, Section 24.1); a power multiplies the error of its base
    f by steps |f|^(steps - 1), and exp and log add theirs.
    """
    size = len(law)
    stage = 8 * math.log2(size)
    base = steps * np.abs(power) / np.maximum(np.abs(spectrum), 1e-300)
    each = stage * base + (8 + 4 * np.abs(logs)) * np.abs(power)
    inverse = stage * float(np.linalg.norm(law))
    return _ROUND * (float(np.linalg.norm(each)) * math.sqrt(2 / size) + inverse)


def _outside(mass: FloatArray, x: FloatArray, steps: int, grid: _Grid) -> float:
    """Bound on the P- and Q-mass of sums outside the window: Chernoff at the best of a few orders.

    Above, s exp(-order s) falls with s, as the window ends far beyond 1 / order; below, the P-mass
    is at most the Q-mass, as sums there are below the mean.
    """
    low, high = grid.step * grid.first, grid.step * (grid.first + grid.size)

    x, log_mass = x[mass > 0], np.log(mass[mass > 0])

    def log_bound(order: float, end: float) -> float:
        log_moment = float(log_sum_exp(log_mass + order * (x - 1)))
        return steps * log_moment - order * (end - steps)

    normal = np.array([4.0, 8.0, 12.0]) / grid.spread
    heavy = np.array([10.0, 20.0, 30.0, 35.0]) / x[-1]
    above = min(log_bound(order, high) for order in (*normal, *heavy))
    above += math.log(max(high / steps, 1.0))
    below = -math.inf
    if grid.first > 0:
        below = min(log_bound(-order, low) for order in normal)
    return math.exp(min(above, 0.0)) + math.exp(min(below, 0.0))


def _on_losses(losses: FloatArray, p: FloatArray, *, infinite: float, at_zero: float) -> Discrete:
    """Atoms of P-mass p moved to the ends of their cell on a grid of losses, Q-mass kept too."""
    spread = math.sqrt(max(float(p @ (losses - float(p @ losses)) ** 2), 1e-30))
    step = max(spread / 48, (losses[-1] - losses[0]) / 20_000)
    cell = np.floor(losses / step).astype(int)
    first = min(int(cell[0]), 0)
    # The Q-mass is p exp(-loss), so the share of the upper end needs no difference of masses.
    upper = p * np.expm1(step * cell - losses) / math.expm1(-step)
    upper = np.clip(upper * (1 + 1e-12), 0.0, p)
    size = max(int(cell[-1]), 0) - first + 2
    mass = np.zeros(size)
    np.add.at(mass, cell - first + 1, upper)
    np.add.at(mass, cell - first, p - upper)
    mass[-first] += min(at_zero, 1.0)  # there is no more than that
    infinite = min(infinite, 1.0)
    mass = _trimmed(mass, 1.0 - infinite)
    at = step * np.arange(first, first + size)
    at, mass = at[mass > 0], mass[mass > 0]
    q = mass * np.exp(-at)
    return Discrete(tuple(at.tolist()), tuple(mass.tolist()), tuple(q.tolist()), infinite)


def _trimmed(mass: FloatArray, total: float) -> FloatArray:
    """`mass` cut from below to sum to `total`: a price depends on the tails of the loss alone."""
    excess = max(float(mass.sum()) - total, 0.0)
    cumulative = np.cumsum(mass)
    return np.clip(cumulative - excess, 0.0, mass)
