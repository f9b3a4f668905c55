"""Dominating pairs: for each event, the two output laws (P, Q) that are easiest to distinguish.

A pair is all that an accountant needs of an event. With the privacy loss l = log(dP/dQ),

    delta(epsilon)  =  E_P[ (1 - exp(epsilon - l))_+ ],

and the pair of a composition is the product of the pairs (Zhu, Dong & Wang 2022,
arXiv:2106.08567, Theorem 10). `directions` turns an event into one `Direction` for each order in
which two neighboring data sets can be compared; the guarantee is the worse of them.

Random allocation of Gaussian noise has no pair in closed form. `pair_from_above` bounds it, by a
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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, singledispatch
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy import special

from tacit import events as ev
from tacit._arrays import Floats
from tacit.accounting.compose import flatten
from tacit.accounting.one_event import (
    ROUND,
    Complexes,
    epsilon_and_delta,
    gaussian_shift,
    log_mixture_at,
    pure_epsilon,
    response_law,
    rounded_epsilon,
)
from tacit.accounting.pld.loss_laws import (
    Discrete,
    DoubleExponential,
    Law,
    Normal,
    Sampled,
    Shifted,
)
from tacit.accounting.rdp.divergence import log_sum_exp
from tacit.accounting.shuffle import local_guarantee, shuffled_atoms
from tacit.errors import UnsupportedEvent
from tacit.events import Event, Relation

_TAIL = 1e-15
"""P-mass of one epoch of random allocation that is cut off and counted as infinite loss."""
_FINEST, _COARSEST = 1 / 24, 1 / 3  # smallest and largest grid step, in standard deviations of X
_FEW = 30  # number of steps up to which the grid is as fine as the number of points allows
_BELOW = 12.0  # standard deviations of the sum that the window covers below and above the mean
_MOST_POINTS = 1 << 20

PairRule: TypeAlias = Callable[[Event, Relation], tuple[Law, Law]]
"""Gives the laws of the loss of ONE occurrence of an event, one for each order of comparison."""


@dataclass(frozen=True)
class Direction:
    """One order of comparing two neighbors: the laws of independent losses, with their counts.

    Under P the loss is infinite with a probability between `infinite_lower` and `infinite_upper`;
    otherwise it is the sum of the losses of `parts`.
    """

    parts: tuple[tuple[Law, int], ...]
    infinite_lower: float = 0.0
    infinite_upper: float = 0.0

    @property
    def largest_loss(self) -> float:
        """Largest finite loss: no epsilon beyond it is ever needed."""
        return sum(count * law.largest_loss for law, count in self.parts)

    @property
    def steps(self) -> int:
        """Number of independent losses in the sum."""
        return sum(count for _, count in self.parts)


def directions(
    event: Event, relation: Relation, pair_of: PairRule | None = None
) -> tuple[Direction, ...]:
    """Return the orders of comparing two neighbors; the guarantee of `event` is the worse of them.

    There is only one if both orders are equal. `pair_of` gives the laws of the loss of each part of
    `event`; they may only bound its price from above. The default, `pair`, is exact if it can be.
    """
    pairs = [((pair_of or pair)(part, relation), n) for part, n in flatten(event).items()]
    first, second = (_direction([(laws[side], n) for laws, n in pairs]) for side in (0, 1))
    return (first,) if first == second else (first, second)


def pair_from_above(event: Event, relation: Relation) -> tuple[Law, Law]:
    """Return laws of the loss of ONE occurrence, in both orders of comparison.

    For random allocation and shuffled reports, they bound the price from above. For other events
    they are those of `pair`.
    """
    if isinstance(event, ev.Shuffled):
        return shuffled_pair(event)
    if isinstance(event, ev.RandomAllocation) and relation is not Relation.REPLACE_ONE:
        inner = event.event
        if isinstance(inner, ev.Gaussian):
            return allocation_pair(event.steps, gaussian_shift(inner, relation))
    return pair(event, relation)


def pair_from_below(event: Event, relation: Relation) -> tuple[Law, Law]:
    """Return laws of the loss of ONE occurrence that no smaller price can cover.

    They belong to a mechanism that `event` describes. If none is known, raise `UnsupportedEvent`.
    """
    inner = event.event if isinstance(event, ev.PoissonSampled) else event
    if isinstance(inner, ev.Exponential):
        # Two options, whose utilities move by the sensitivity in opposite directions: the log odds
        # change by epsilon, from -epsilon / 2 to epsilon / 2.
        half = ev.PureDP(0.5 * float(pure_epsilon(inner, relation)) * (1 - 1e-14), 1.0)
        event = replace(event, event=half) if isinstance(event, ev.PoissonSampled) else half
    elif relation is Relation.REPLACE_ONE and isinstance(event, ev.PoissonSampled):
        is_tight = isinstance(inner, ev.Gaussian | ev.Laplace) and inner.replace_factor == 2
        # Otherwise the new record may be one that contributes nothing.
        relation = relation if is_tight else Relation.ZERO_OUT
    laws = pair(event, relation)
    for law in laws:
        if isinstance(law, Discrete) and law.largest_loss <= 0 and any(law.losses):
            raise UnsupportedEvent(f"no lower bound is known for {type(event).__name__}.")
    return laws


def shuffled_pair(event: ev.Shuffled) -> tuple[Law, Law]:
    """Return laws that dominate the loss of shuffled reports: the same law in both orders."""
    epsilon, clones = local_guarantee(event)
    if epsilon == 0:
        return _same(_two_point(0.0, 0.0))
    losses, p, q = shuffled_atoms(epsilon, event.n_reports, clones)
    outcomes = zip(losses.tolist(), p.tolist(), q.tolist(), strict=True)
    return _same(_collect(list(outcomes)))


@singledispatch
def pair(event: Event, relation: Relation) -> tuple[Law, Law]:
    """Return the laws of the loss of ONE occurrence of `event`, in both orders of comparison.

    They are those of its dominating pair: the two output laws that are easiest to distinguish.
    """
    raise UnsupportedEvent(
        f"PLD has no dominating pair for {type(event).__name__} under {relation}. "
        "Use the RDP accountant."
    )


@pair.register
def _(_event: ev.NonPrivate, _relation: Relation) -> tuple[Law, Law]:
    return _same(_two_point(0.0, 1.0))


@pair.register
def _(event: ev.Gaussian, relation: Relation) -> tuple[Law, Law]:
    return _same(Shifted(gaussian_shift(event, relation)))


@pair.register
def _(event: ev.Laplace, relation: Relation) -> tuple[Law, Law]:
    # The overlap of f(x - s) and alpha f(x), f log-concave, is log-concave in the shift s
    # (Prékopa), so over the L1 ball of shifts it is least at a corner: one coordinate moves.
    return _same(Sampled(DoubleExponential(rounded_epsilon(event, relation)), 1.0, 1, 0))


@pair.register
def _(event: ev.PureDP | ev.Exponential, relation: Relation) -> tuple[Law, Law]:
    return _same(_two_point(rounded_epsilon(event, relation), 0.0))


@pair.register
def _(event: ev.ApproximateDP, relation: Relation) -> tuple[Law, Law]:
    return _same(_two_point(*epsilon_and_delta(event, relation)))


@pair.register
def _(event: ev.RandomizedResponse, _relation: Relation) -> tuple[Law, Law]:
    truth, other, loss = response_law(event)
    rest = (event.n_options - 2) * other
    outcomes = [(-loss, other, truth), (0.0, rest, rest), (loss, truth, other)]
    return _same(_collect(outcomes if loss else [(0.0, 1.0, 1.0)]))


@pair.register
def _(event: ev.PoissonSampled, relation: Relation) -> tuple[Law, Law]:
    rate, inner = event.rate, event.event
    replaced = relation is Relation.REPLACE_ONE
    if isinstance(inner, ev.Gaussian | ev.Laplace):
        # The old record moves the mean by +1, the new one by -1: twice one contribution, which
        # over-charges mechanisms whose replace_factor is below 2.
        if isinstance(inner, ev.Gaussian):
            noise = Normal(inner.noise_multiplier)
        else:
            noise = DoubleExponential(rounded_epsilon(inner, Relation.ADD_REMOVE))
        if replaced:
            return _same(Sampled(noise, rate, 1, 1))
        return Sampled(noise, rate, 1, 0), Sampled(noise, rate, 0, 1)
    law, other = pair(inner, relation)
    if not isinstance(law, Discrete) or law != other:
        raise UnsupportedEvent(
            f"PLD has no dominating pair for a Poisson sample of {type(inner).__name__}. "
            "Use the RDP accountant."
        )
    if replaced:
        return _same(_sampled_replace(law, rate))
    return _sampled_remove(law, rate), _sampled_add(law, rate)


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


def _direction(parts: list[tuple[Law, int]]) -> Direction:
    """Return the `Direction` of laws with their counts, after all merging that is exact.

    Unsampled Gaussians become one, equal laws are counted together, infinite losses are put apart.
    """
    squared = math.fsum(n * law.mu**2 for law, n in parts if isinstance(law, Shifted))
    merged: dict[Law, int] = {Shifted(math.sqrt(squared)): 1} if squared else {}
    infinite = [(law.infinite, n) for law, n in parts if isinstance(law, Discrete) and law.infinite]
    for law, n in parts:
        finite = law.given_finite() if isinstance(law, Discrete) else law
        # Losses that are never positive are raised to 0. For a single law that is exact, in a
        # composition it over-charges.
        free = isinstance(finite, Discrete) and finite.largest_loss <= 0
        if not free and not isinstance(finite, Shifted):
            merged[finite] = merged.get(finite, 0) + n
    return Direction(tuple(merged.items()), *_any_infinite(infinite))


def _any_infinite(masses: list[tuple[float, int]]) -> tuple[float, float]:
    """Return bounds on 1 - prod (1 - mass)^n, the probability that any loss is infinite.

    Each of n losses is infinite with probability `mass`. For a single loss both bounds are exact.
    """
    if not masses:
        return 0.0, 0.0
    if len(masses) == 1 and masses[0][1] == 1:
        return masses[0][0], masses[0][0]
    if any(mass >= 1 for mass, _ in masses):
        return 1.0, 1.0
    total = -math.expm1(math.fsum(n * math.log1p(-mass) for mass, n in masses))
    return total * (1 - 1e-14), min(total * (1 + 1e-14), 1.0)


def _same(law: Law) -> tuple[Law, Law]:
    return law, law


_Outcome: TypeAlias = tuple[float, float, float]  # loss, P-mass, Q-mass


def _collect(outcomes: list[_Outcome], infinite: float = 0.0, vanishing: float = 0.0) -> Discrete:
    """Return the law of outcomes (loss, P-mass, Q-mass); without P-mass they are `vanishing`."""
    kept = sorted(outcome for outcome in outcomes if outcome[1] > 0)
    vanishing += math.fsum(q for _, p, q in outcomes if not p > 0)
    losses, p, q = zip(*kept, strict=True) if kept else ((0.0,), (0.0,), (0.0,))
    return Discrete(losses, p, q, infinite, vanishing)


def _two_point(epsilon: float, delta: float) -> Discrete:
    """Return the law that dominates every (epsilon, delta)-DP release."""
    # Kairouz, Oh & Viswanath 2015 (arXiv:1311.0776).
    high = (1 - delta) / (1 + math.exp(-epsilon))
    low = high * math.exp(-epsilon)
    if epsilon == 0:
        return _collect([(0.0, 1 - delta, 1 - delta)], delta, delta)
    return _collect([(-epsilon, low, high), (epsilon, high, low)], delta, delta)


def _sampled_remove(law: Discrete, rate: float) -> Discrete:
    """Return the loss law of a Poisson sample if a record is removed, given that of a release.

    With (P, Q) the pair of `law` and q the rate, it is the law of the pair ((1 - q) Q + q P, Q):
    Zhu, Dong & Wang 2022, Theorem 11.
    """
    outcomes = _mixed(law, rate)
    outcomes.append((math.log1p(-rate), (1 - rate) * law.vanishing, law.vanishing))
    return _collect(outcomes, rate * law.infinite)


def _sampled_add(law: Discrete, rate: float) -> Discrete:
    """Return the loss law of a Poisson sample if a record is added, given that of a release.

    With (P, Q) the pair of `law` and q the rate, it is the law of the pair (P, (1 - q) P + q Q):
    Zhu, Dong & Wang 2022, Theorem 11.
    """
    outcomes = [
        (-log_mixture_at(rate, -loss), p, rate * q + (1 - rate) * p)
        for loss, p, q in zip(law.losses, law.p, law.q, strict=True)
    ]
    outcomes.append((-math.log1p(-rate), law.infinite, (1 - rate) * law.infinite))
    return _collect(outcomes, 0.0, rate * law.vanishing)


def _sampled_replace(law: Discrete, rate: float) -> Discrete:
    """Return a loss law that dominates a Poisson sample if a record is replaced.

    A, B, C are the outputs with the old record, with the new one and without either; q is the rate.
    `law`, of a pair (P, Q), dominates each two of them. The sample compares (1 - q) C + q A with
    (1 - q) C + q B. Its hockey-stick divergence at 1 + q (alpha - 1) is at most q times that of
    (P, Q) at alpha >= 1 (Balle, Barthe & Gaboardi 2018, arXiv:1807.01647, Theorem 2). These are the
    values of `_sampled_remove`; by symmetry, alpha < 1 gives their mirror image. The remaining mass
    has loss 0.
    """
    up = [outcome for outcome in _mixed(law, rate) if outcome[0] > 0]
    down = [(-loss, q, p) for loss, p, q in up]
    infinite = rate * law.infinite
    rest = max(1.0 - infinite - math.fsum(p for _, p, _ in up + down), 0.0)
    return _collect([*up, *down, (0.0, rest, rest)], infinite, infinite)


def _mixed(law: Discrete, rate: float) -> list[_Outcome]:
    """Return the possible outcomes of ((1 - rate) Q + rate P, Q), (P, Q) being that of `law`."""
    return [
        (log_mixture_at(rate, loss), rate * p + (1 - rate) * q, q)
        for loss, p, q in zip(law.losses, law.p, law.q, strict=True)
    ]


class _Epoch(NamedTuple):
    """Law under Q of the likelihood ratio P / Q of one epoch; see `_epoch` for the range kept."""

    ratio: Floats
    mass: Floats
    error: Floats  # the error of `mass` is this times a vector of 2-norm at most 1
    total: float  # Q-mass of all ratios, kept or not
    mean: float  # P-mass of all ratios, kept or not
    beyond: float  # bound on the mass outside the window of the transform, under P and under Q


def _epoch(grid: "_Grid", steps: int, shift: float, side: int) -> _Epoch:
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
    return _Epoch(
        ratio=total / steps,
        mass=np.maximum(law[kept], 0.0) * weight,
        error=_transform_error(spectrum, power, logs, law, steps) * weight,
        total=whole * (1 + 1e-12),
        mean=whole * float(mass @ x / mass.sum()) * (1 + 1e-12),
        beyond=_outside(mass, x, steps, grid),
    )


class _Grid(NamedTuple):
    """Grid for the sum of the X of the module docstring: first * step, (first + 1) * step, ..."""

    step: float
    first: int
    size: int
    cut: float  # largest X; above it, X counts as infinite loss
    spread: float  # standard deviation of the sum


def _grid(steps: int, shift: float) -> _Grid:
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
    return _Grid(step, math.floor(start / step), size, cut, spread)


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


def _outside(mass: Floats, x: Floats, steps: int, grid: _Grid) -> float:
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
