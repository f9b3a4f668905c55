"""The dominating pair of one epoch of random allocation (balls and bins) with Gaussian noise.

Random allocation of Gaussian noise has no pair in closed form. `allocation_pair` bounds it, by a
law on finitely many losses. One epoch (see `rdp.allocation`) has the likelihood ratio
A = mean of X_1, ..., X_steps, where the X_i are lognormal of mean 1 under Q, so every divergence of
the pair is E_Q of a convex function of A. Three steps, each of which can only raise such
expectations, lead to few losses:

1. X above a cut counts as infinite loss, with the P-mass of that event.
2. X below it moves to the ends of its cell on a uniform grid, so that its mean is kept: the law of
   X spreads out, and with it that of A.
3. The ratio A, now a sum on that grid, moves to the ends of its cell on a grid of losses, so that
   its P- and Q-mass are kept: the law of A spreads out.

Step 2 turns the law of A into one convolution power, by a Fourier transform of a tilted law. What
the transform may have lost to rounding and to its finite window is added to the infinite loss.
Feldman & Shenfeld 2026 (arXiv:2602.17284) compute the same pair by repeated convolution in logs.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import special

from tacit._arrays import Floats
from tacit.accounting.one_event import ROUND, Complexes, log_sum_exp
from tacit.accounting.pld.loss_laws import Discrete
from tacit.errors import UnsupportedEvent

_TAIL = 1e-15
"""P-mass of one epoch of random allocation that is cut off and counted as infinite loss."""
_FINEST, _COARSEST = 1 / 24, 1 / 3  # smallest and largest grid step, in standard deviations of X
_FEW = 30  # number of steps up to which the grid is as fine as the number of points allows
_BELOW = 12.0  # standard deviations of the sum that the window covers below and above the mean
_MOST_POINTS = 1 << 20


@lru_cache(maxsize=16)
def allocation_pair(steps: int, shift: float) -> tuple[Discrete, Discrete]:
    """Return laws that dominate the loss of one epoch of random allocation with Gaussian noise.

    The first is for a removed, the second for an added record. `shift` is how far one record moves
    the mean of its step, in standard deviations of the noise.
    """
    grid = _grid(steps, shift)
    z = _z(grid.cut, shift)
    outer_q, outer_p = float(special.ndtr(-z)), float(special.ndtr(shift - z))  # X above the cut
    norm = np.linalg.norm  # of an error: bounds its sum times a vector of 2-norm 1
    one = _epoch(grid, steps, shift, 1)
    p, error = one.mass * one.ratio, one.error * one.ratio
    # Mass hidden by rounding may have any loss, but at most 0 if its ratio is at most 1.
    infinite = one.beyond + outer_p + (steps - 1) * outer_q + float(norm(error[one.ratio > 1]))
    rest = max(one.mean - float(p.sum()), 0.0) + float(norm(error))
    kept = one.ratio > 0
    removal = _on_losses(np.log(one.ratio[kept]), p[kept], infinite=infinite, at_zero=rest)

    one = _epoch(grid, steps, shift, -1)
    kept = one.ratio > 0  # a ratio of 0 is impossible under the mixture: an infinite loss
    infinite = one.beyond + steps * outer_q + float(norm(one.error[one.ratio < 1]))
    infinite += float(one.mass[~kept].sum())
    rest = max(one.total - float(one.mass.sum()), 0.0) + float(norm(one.error))
    losses, p = -np.log(one.ratio[kept]), one.mass[kept]
    return removal, _on_losses(losses[::-1], p[::-1], infinite=infinite, at_zero=rest)


class _RatioLaw(NamedTuple):
    """Law under Q of the likelihood ratio P / Q of one epoch; see `_epoch` for the range kept."""

    ratio: Floats
    mass: Floats
    error: Floats  # the error of `mass` is this times a vector of 2-norm at most 1
    total: float  # Q-mass of all ratios, kept or not
    mean: float  # P-mass of all ratios, kept or not
    beyond: float  # bound on the mass outside the window of the transform, under P and under Q


def _epoch(grid: "_SumGrid", steps: int, shift: float, side: int) -> _RatioLaw:
    """Return likelihood ratios P / Q of one epoch of random allocation, and their Q-mass.

    A ratio is the mean of `steps` numbers X (see the module docstring) on a grid. With `side` 1,
    for removal, large ratios count: those from six standard deviations below the mean upwards are
    kept, X is rounded up, and the law is weighted so that its rounding errors are relative to what
    large ratios add to delta. With `side` -1, for addition, the same holds for small ratios.
    """
    mass = _cell_ends(shift, grid.step, grid.cut, side)
    x = grid.step * np.arange(len(mass), dtype=float)
    theta = side * min(30 / grid.cut, math.sqrt(2) / grid.spread)
    tilted = mass * np.exp(theta * (x - 1))
    scale = tilted.sum()
    folded = np.pad(tilted / scale, (0, -len(mass) % grid.size)).reshape(-1, grid.size).sum(axis=0)
    spectrum = np.fft.rfft(folded)
    logs = steps * np.log(np.where(spectrum == 0, 1e-300, spectrum))
    power = np.exp(logs)
    law = np.roll(np.fft.irfft(power, grid.size), -(grid.first % grid.size))
    total = grid.step * (grid.first + np.arange(grid.size))
    kept = side * (total - steps) > -6 * grid.spread  # farther out only rounding noise is left
    total = total[kept]
    weight = np.exp(steps * math.log(scale) - theta * (total - steps))
    whole = math.exp(steps * math.log(mass.sum()))
    return _RatioLaw(
        ratio=total / steps,
        mass=np.maximum(law[kept], 0.0) * weight,
        error=_transform_error(spectrum, power, logs, law, steps) * weight,
        total=whole * (1 + 1e-12),
        mean=whole * float(mass @ x / mass.sum()) * (1 + 1e-12),
        beyond=_outside(mass, x, steps, grid),
    )


class _SumGrid(NamedTuple):
    """Grid for the sum of the X of the module docstring: first * step, (first + 1) * step, ..."""

    step: float
    first: int
    size: int
    cut: float  # largest X; above it, X counts as infinite loss
    spread: float  # standard deviation of the sum


def _grid(steps: int, shift: float) -> _SumGrid:
    z = -float(special.ndtri_exp(math.log(_TAIL / 2))) + shift
    cut = math.exp(min(shift * z - shift**2 / 2, 700.0))
    one = math.sqrt(math.expm1(min(shift**2, 400.0)))
    spread = math.sqrt(steps) * one
    start = max(steps - _BELOW * spread, 0.0)
    window = steps - start + _BELOW * spread + 2 * cut
    # Few steps need a grid that is fine near 0, because a sum of few X may be near 0.
    step = max(one * _FINEST if steps > _FEW else 0.0, window / _MOST_POINTS)
    if not step <= one * _COARSEST:  # the noise is so small that no grid can represent X
        raise UnsupportedEvent(
            f"random allocation with noise multiplier {1 / shift:g} is out of reach of a grid. "
            "Use the RDP accountant."
        )
    # The transform is fast for a power of two, times 1, 3 or 5.
    least = math.ceil(window / step) + 2
    size = min(odd << max((-(-least // odd) - 1).bit_length(), 1) for odd in (1, 3, 5))
    return _SumGrid(step, math.floor(start / step), size, cut, spread)


def _cell_ends(shift: float, step: float, cut: float, side: int) -> Floats:
    """Return the Q-mass of X at the points of a grid from 0 to `cut`, with distance `step`.

    The mass between two grid points is moved to them such that the mean of X is kept. Rounding
    errors of this split raise X if `side` is 1 and lower it if `side` is -1.
    """
    edges = step * np.arange(math.ceil(cut / step) + 1, dtype=float)
    z = _z(edges, shift)
    q, p = _cells(z), _cells(z - shift)  # X q = p
    # A difference of tails errs by a few roundings of the tail; edge * (tail of Q) <= tail of P.
    slack = 32 * ROUND * np.minimum(special.ndtr(shift - z[:-1]), special.ndtr(z[1:] - shift))
    slack = slack + 32 * ROUND * edges[:-1] * np.minimum(special.ndtr(-z[:-1]), special.ndtr(z[1:]))
    right = np.clip((p - edges[:-1] * q + side * slack) / step, 0.0, q)
    mass = np.zeros(len(edges))
    mass[1:] += right
    mass[:-1] += q - right
    return mass * (1 + 1e-13)


def _z(x: Floats | float, shift: float) -> Floats:
    with np.errstate(divide="ignore"):  # x = 0 is z = -inf
        return np.log(x) / shift + shift / 2


def _cells(z: Floats) -> Floats:
    """Return the standard normal mass between neighbors in z, computed from the nearer tail."""
    low: Floats = special.ndtr(z)
    high: Floats = special.ndtr(-z)
    return np.where(z[1:] > 0, high[:-1] - high[1:], low[1:] - low[:-1])


def _transform_error(
    spectrum: Complexes, power: Complexes, logs: Complexes, law: Floats, steps: int
) -> float:
    """Bound the 2-norm of the rounding error of `law`, the inverse Fourier transform of `power`.

    `power` is spectrum^steps, computed as exp(logs). A transform of n numbers of sum 1 errs by at
    most a constant times log2(n) roundings in each coefficient, and in relative 2-norm (Higham
    2002, Section 24.1). The power multiplies an error of its base f by steps |f|^(steps - 1), and
    exp and log add their own errors.
    """
    size = len(law)
    stage = 8 * math.log2(size)
    base = steps * np.abs(power) / np.maximum(np.abs(spectrum), 1e-300)
    each = stage * base + (8 + 4 * np.abs(logs)) * np.abs(power)
    inverse = stage * float(np.linalg.norm(law))
    return 2 * ROUND * (float(np.linalg.norm(each)) * math.sqrt(2 / size) + inverse)


def _outside(mass: Floats, x: Floats, steps: int, grid: _SumGrid) -> float:
    """Return a Chernoff bound on the mass, under P and under Q, of sums outside the window.

    Each of `steps` terms has mass `mass` at `x`; `grid` is the window. The P-mass of a sum s is
    s / steps times its Q-mass. Above the window, s exp(-order s) falls with s, because the window
    ends far beyond 1 / order. Below it, sums are below their mean, so the P-mass is the smaller.
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


def _on_losses(losses: Floats, p: Floats, *, infinite: float, at_zero: float) -> Discrete:
    """Return a law on a grid of losses that dominates atoms of P-mass `p` at `losses`.

    Each atom is moved to the two grid points around it, such that its P- and Q-mass are kept.
    `infinite` and `at_zero` are additional P-masses with an infinite loss and with loss 0.
    """
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
    mass[-first] += min(at_zero, 1.0)  # no probability exceeds 1
    infinite = min(infinite, 1.0)
    # Remove the lowest losses until all sums to 1: only high losses change a price.
    excess = max(float(mass.sum()) - (1.0 - infinite), 0.0)
    mass = np.clip(np.cumsum(mass) - excess, 0.0, mass)
    at = step * np.arange(first, first + size)
    at, mass = at[mass > 0], mass[mass > 0]
    q = mass * np.exp(-at)
    return Discrete(tuple(at.tolist()), tuple(mass.tolist()), tuple(q.tolist()), infinite)
