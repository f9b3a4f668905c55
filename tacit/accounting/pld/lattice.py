"""The lattice method: losses on a grid, composed by a tilted Fourier transform.

It shares no numerics with the contour method and needs nothing of a law but the masses that P and
Q give to ranges of losses, so it serves laws with atoms, and as a check of the other method.

**Upper bound.** The masses (P_k, Q_k) of a cell (g, g + h] are replaced by two atoms at its ends
that keep both: g + h gets (P_k - exp(g) Q_k) / (1 - exp(-h)) of the P-mass and g the rest. This is
the least pessimistic law on the grid (Doroshenko et al. 2022, arXiv:2207.04380). Losses below the
grid are raised to its first point, losses above it count as infinite.

**Lower bound.** An attack. Each output is reported only as the index k of the grid point nearest
to its loss, and the attacker sees the sum S of the reported indices. Post-processing never helps an
attacker, so for every threshold s

    delta(epsilon)  >=  P(S >= s) - exp(epsilon) Q(S >= s),

with both tails composed from exact cell masses. Both bounds are second order in h.

**Composition.** The masses are tilted by exp(order * loss) and normalized before the transform, so
that the tilted law is large where delta is decided, and rounding is relative to it. The window of
N points wraps around. Mass from k windows below arrives with its weight times exp(-order k N h),
together at most r / (1 - r); mass from above is bounded by Chernoff at higher orders. Rounding: a
transform of length N errs by at most c u log2(N) in relative 2-norm (Higham 2002, Theorem 24.2), a
power of count n multiplies this by n, and a tail sum with weights exp(-order (x - s)) adds at most
its 2-norm over sqrt(1 - exp(-2 order h)) by Cauchy-Schwarz.
"""

import math
from typing import NamedTuple

import numpy as np

from tacit._arrays import Floats
from tacit.accounting.brackets import Bracket
from tacit.accounting.one_event import ROUND, Numbers, dot
from tacit.accounting.pld.loss_laws import Discrete, Law
from tacit.accounting.pld.pairs import Direction
from tacit.accounting.pld.spread import spread
from tacit.accounting.pld.transforms import ORDERS, Cumulants, WeightedLosses, total
from tacit.errors import NotCertified

_MOST_POINTS = 1 << 21
_MOST_STEPS = 10**14
_HIGHER = np.array([1.15, 1.4, 1.8, 2.5, 4.0, 8.0, 20.0, 100.0])
"""Multiples of the order at which Chernoff bounds what lies above the window."""


class Grid(NamedTuple):
    """Law of one loss on a grid: `mass[i]` is at the loss (first + i) * step."""

    first: int
    mass: Floats
    above: float = 0.0
    """Mass above the last point, which counts as infinite loss."""


def dots(law: Law, step: float, low: float, high: float) -> Grid:
    """Return the cheapest law on the grid that dominates `law`, for the upper bound on delta.

    The grid has the distance `step` and covers the losses from `low` to `high`.
    """
    first, points = _points(step, low, high)
    return Grid(first, *spread(law, points))


def reports(law: Law, step: float, low: float, high: float) -> tuple[Grid, Grid]:
    """Return the laws, under P and under Q, of the index of the grid point nearest to the loss."""
    first, points = _points(step, low, high)
    p, q = law.cells(points[:-1] + 0.5 * step)
    return Grid(first, p), Grid(first, q)


def _points(step: float, low: float, high: float) -> tuple[int, Floats]:
    first, last = math.floor(low / step) - 1, math.ceil(high / step) + 1  # room for rounding
    if last - first > _MOST_POINTS:
        raise NotCertified("the losses span too many grid points.")
    if max(abs(first), abs(last)) > 2**52:
        raise NotCertified("the losses are too large for floats to tell grid points apart.")
    return first, step * np.arange(first, last + 1, dtype=float)


class Composed:
    """Law of the sum of many independent grid losses inside one window, with proved errors."""

    def __init__(
        self, parts: list[tuple[Grid, int]], step: float, order: float, window: float, start: float
    ) -> None:
        """Compute the law of the sum of `parts`, pairs of a grid and its count.

        Losses are weighted by exp(order * loss) for the Fourier transform, whose window of length
        `window` begins at the loss `start`. All grids have the distance `step`.
        """
        self.step = step
        self.order = order
        self.higher = order * _HIGHER
        self.log_m = 0.0
        self.log_higher = np.zeros(len(self.higher))
        if not window / step < _MOST_POINTS:
            raise NotCertified("the window spans too many grid points.")
        size = 1 << math.ceil(math.log2(window / step + 2))
        log_spectrum = np.zeros(size // 2 + 1, np.complex128)
        norm, first, last = 0.0, 0, 0
        for grid, count in parts:
            x = step * np.arange(grid.first, grid.first + len(grid.mass), dtype=float)
            tilted, log_m = _tilt(grid.mass, order * x)
            self.log_m += count * log_m
            self.log_higher += count * np.array([_tilt(grid.mass, m * x)[1] for m in self.higher])
            first, last = first + count * grid.first, last + count * (grid.first + len(x) - 1)
            norm += count * math.sqrt(dot(tilted, tilted))
            folded = np.pad(tilted, (0, -len(tilted) % size)).reshape(-1, size).sum(axis=0)
            transformed = np.fft.rfft(folded)
            transformed[transformed == 0] = 1e-300
            log_spectrum += count * np.log(transformed)
        self.whole = last - first < size  # nothing wraps around
        self.base = first if self.whole else math.floor(start / step)
        self.overflows = last >= self.base + size
        spectrum = np.exp(log_spectrum)
        law = np.roll(np.fft.irfft(spectrum, size), (first - self.base) % size)
        powers = np.abs(spectrum) * (8 + 4 * np.abs(log_spectrum))
        norm = 16 * math.log2(size) * (norm + math.sqrt(dot(law, law)))
        norm += math.sqrt(dot(powers, powers)) * math.sqrt(2 / size)
        self.error = ROUND * norm / math.sqrt(-math.expm1(-2 * order * step))
        weights = np.exp(-order * step * np.arange(size)) * law
        self.mass = np.cumsum(weights[::-1])[::-1]  # P-mass from each point up, scaled
        inner = weights * np.exp(-step * np.arange(size))
        self.other = np.cumsum(inner[::-1])[::-1]  # and Q-mass

    def tails(self, threshold: Numbers, log_factor: float) -> tuple[Floats, Floats]:
        """Return exp(log_factor) times the mass at or above each grid index, and its error."""
        index = threshold - self.base  # mass that wrapped around is included
        return self._scaled(self.mass[index], index, log_factor)

    def hockey_stick(self, threshold: int, epsilon: float) -> tuple[float, float]:
        """Return the delta at `epsilon` of the summed losses, and its error.

        It is the sum of mass * (1 - exp(epsilon - loss)) over grid indices from `threshold` up.
        """
        index = np.array([threshold - self.base])
        shift = math.exp(min(epsilon - self.step * self.base, 700.0))
        value, error = self._scaled(self.mass[index] - shift * self.other[index], index, 0.0)
        return float(value[0]), 2 * float(error[0])

    def _scaled(self, sums: Floats, index: Numbers, log_factor: float) -> tuple[Floats, Floats]:
        log_scale = self.log_m - self.order * self.step * self.base + log_factor
        log_error = log_scale - self.order * self.step * index + math.log(self.error)
        fits = (log_error < 600.0) & (self.order * self.step * index < 650.0)
        logs = log_scale + np.log(np.maximum(sums, 1e-320))
        value = np.exp(np.minimum(logs, 700.0))
        error = np.exp(np.minimum(log_error, 700.0))
        return value, np.where(fits, error, math.inf)  # infinite where a float would overflow

    def beyond(self) -> float:
        """Return a Chernoff bound on the mass of the sums above the window."""
        if not self.overflows:
            return 0.0
        logs = self.log_higher - self.higher * (self.step * (self.base + len(self.mass)))
        return math.exp(min(float(logs.min()), 0.0))

    def wrapped(self, threshold: Numbers) -> Floats:
        """Bound the error of the mass above each grid index by sums outside the window.

        The Fourier transform is periodic, so it adds their mass at places inside the window.
        """
        if self.whole:
            return np.zeros(len(threshold))
        width = self.step * len(self.mass)
        below = math.exp(-self.order * width)
        if not self.overflows:
            return np.full(len(threshold), below / (1 - below))
        shrink = (self.order - self.higher) * width
        logs = self.log_higher - np.multiply.outer(self.step * threshold, self.higher) + shrink
        above = np.exp(np.minimum(logs, 700.0)) / -np.expm1(shrink)
        return below / (1 - below) + above.min(axis=1)


class Lattice:
    """delta(epsilon) of one direction of comparison, from losses rounded to a grid.

    The bounds are proved for every argument, and tight near the `epsilon` given here. `log_target`
    is the log of the error of delta to aim at, `points` the number of grid points in the window.
    """

    def __init__(
        self,
        direction: Direction,
        moments: Cumulants,
        epsilon: float,
        log_target: float,
        points: int,
    ) -> None:
        if direction.steps > _MOST_STEPS:
            raise NotCertified("rounding errors of so many steps have no useful bound.")
        index, window = moments.choose_line(epsilon, log_target)
        order, start = float(ORDERS[index]), epsilon - 0.25 * window
        self.order = order
        step = _aligned(direction, window / points)
        log_each = log_target - math.log(direction.steps)
        grids: list[tuple[Grid, Grid, Grid, int]] = []
        largest = 0.0
        for law, count in direction.parts:
            low, high = law.span(log_each)
            low = max(low, min(-2 * window, high - step))  # losses far below add little to delta
            p, q = reports(law, step, low, high)
            grids.append((dots(law, step, low, high), p, q, count))
            largest += count * max(abs(low), abs(high))
        self.step = step
        self.upper = Composed([(up, n) for up, _, _, n in grids], step, order, window, start)
        self.p = Composed([(p, n) for _, p, _, n in grids], step, order, window, start)
        self.q = Composed([(q, n) for _, _, q, n in grids], step, order + 1, window, start)
        self.infinite = math.fsum(n * up.above for up, _, _, n in grids)
        self.shift = 64 * ROUND * largest  # grid points and losses are rounded
        self.slack = math.expm1(32 * ROUND * direction.steps)  # each mass has a few roundings

    def delta(self, epsilon: float) -> Bracket:
        """Return certified bounds on delta(epsilon)."""
        if not epsilon / self.step < 1e15:
            return Bracket(0.0, 1.0)
        lower, upper = self._attack(epsilon + self.shift), self._dominate(epsilon - self.shift)
        return Bracket.of_delta(lower, upper)

    def _dominate(self, epsilon: float) -> float:
        """Return an upper bound on delta(epsilon), from grid laws that dominate the true ones."""
        law, fixed = self.upper, self.infinite + self.upper.beyond()
        first = math.floor(epsilon / self.step) + 1  # the first point above epsilon
        if first >= law.base + len(law.mass):
            return min(fixed, 1.0)
        if first < law.base and not law.whole:
            return 1.0  # losses above epsilon, but below the window, are not covered
        value, error = law.hockey_stick(max(first, law.base), epsilon)
        return min(value * (1 + self.slack) + error + fixed, 1.0)

    def _attack(self, epsilon: float) -> float:
        """Return a lower bound on delta(epsilon): the module docstring's attack, best threshold."""
        center = round(epsilon / self.step)
        reach = 64 + int(2 * math.sqrt(len(self.p.mass)))
        low = max(center - reach, self.p.base, self.q.base)
        high = min(center + reach, self.p.base + len(self.p.mass), self.q.base + len(self.q.mass))
        if low >= high or epsilon > 600.0:
            return 0.0
        threshold = np.arange(low, high)
        p, p_error = self.p.tails(threshold, 0.0)
        q, q_error = self.q.tails(threshold, epsilon)
        lost = math.exp(epsilon) * (self.q.beyond() + 1e-290) + 1e-300  # including underflow
        gain = p * (1 - self.slack) - p_error - self.p.wrapped(threshold)
        return max(float(np.max(gain - q * (1 + self.slack) - q_error - lost)), 0.0)


def coarse_moments(direction: Direction, log_removed: float) -> Cumulants:
    """Return rough log moments of the composed loss, from which the window and order are chosen.

    Each law is replaced by one on a coarse grid, without losses of mass about exp(log_removed).
    """
    each: list[Cumulants] = []
    for law, _ in direction.parts:
        low, high = law.span(log_removed)
        step = max(high - low, 1e-9 * abs(high), 1e-290) / 1024
        grid = dots(law, step, low, high)
        loss = step * np.arange(grid.first, grid.first + len(grid.mass), dtype=float)
        loss, mass = loss[grid.mass > 0], grid.mass[grid.mass > 0]
        none = np.zeros(len(loss))
        each.append(WeightedLosses(loss, np.log(mass), none, none).cumulants())
    return total(each, [count for _, count in direction.parts])


def _aligned(direction: Direction, step: float) -> float:
    """Return a grid step <= `step` that divides the largest loss of the first discrete law.

    The atoms of such a law then tend to lie on grid points. Without one, return `step`.
    """
    atoms = [law for law, _ in direction.parts if isinstance(law, Discrete)]
    if not atoms or atoms[0].largest_loss < step:
        return step
    return atoms[0].largest_loss / math.ceil(atoms[0].largest_loss / step)


def _tilt(mass: Floats, exponent: Floats) -> tuple[Floats, float]:
    """Return mass * exp(exponent) divided by its sum, and the log of this sum."""
    if not mass.any():
        raise NotCertified("all masses underflow.")
    with np.errstate(divide="ignore"):
        logs = np.log(mass) + exponent
    peak = float(logs.max())
    tilted = np.exp(logs - peak)
    scale = float(tilted.sum())
    return tilted / scale, peak + math.log(scale)
