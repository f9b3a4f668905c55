"""The price of releasing only the best of several runs, from the privacy profile of one run.

A run releases (configuration, model, score); `Q` and `Q'` are the laws of that output on two
neighbors. The number K of runs has the generating function f (`trials`). docs/tuning-price.md
proves, for every epsilon >= 0 and every score,

    delta_best(epsilon)  <=  E_Q'[ h(L) ] + f'(1) Q(L = inf),      L = dQ / dQ',
    h(l) = max over sizes a of ( l f'(G(a)) - exp(epsilon) f'(a) )_+ ,

where G(a) is the largest power of a test of size a. Here l / exp(epsilon) enters as one variable:
h(l) = exp(epsilon) H(l / exp(epsilon)) with H(x) = max over a of (x f'(G(a)) - f'(a))_+. H is a
maximum of lines. If A_k are the slopes and x_k the corners of its graph, then

    delta_best(epsilon)  <=  sum over k of (A_k - A_(k-1)) delta(epsilon + log x_k),

so the corners are computed once, for all epsilon, and only the profile delta(t) is needed.

**Certainty.** The maximum over a is taken over cells of a grid, f'(G) at the upper end of a cell
and f' at its lower end; slopes are rounded up and corners down.

**Lower bound.** For one score the released law is known exactly. Outcomes of a pair that the run
dominates are ranked by increasing likelihood ratio from a threshold on, and those below the
threshold are ranked above all others. An outcome of mass p above a share F of all outcomes is
released with probability f(F + p) - f(F), which lies between p f'(F + p / 2) and
p (f'(F) + f'(F + p)) / 2 because f' is convex.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from tacit._arrays import Floats
from tacit.accounting.brackets import Bracket, invert
from tacit.accounting.one_event import ROUND
from tacit.accounting.profile import FARTHEST, Pair, Profile, lower_hull
from tacit.accounting.trials import RunLaw, TruncatedRuns

_CELLS = 16_000
_MOST_WORK = 4e7  # cells times terms of a truncated law
_UP = 1 + 1e-10  # more than the rounding of f'
_PARTS = 500  # parts into which the lower bound may split an outcome of probability 1
_STARTS, _ROUNDS = 96, 8
"""Thresholds of the score that the lower bound tries, and how often it tries them again."""


class BestProfile:
    """Bounds of delta_best(epsilon) for epsilon >= 0, in one direction of comparison.

    `profile` is that of one run, `law` that of the number of runs. The bounds are tight for deltas
    down to about `delta`.
    """

    def __init__(self, profile: Profile, law: RunLaw, *, delta: float) -> None:
        self.profile = profile.hull()
        self.law = law
        self.corners = _corners(profile, law, math.log(max(delta, 1e-290)) - 12.0)
        self.pair = _split(profile.dominated())

    def upper(self, epsilon: float) -> float:
        """Return an upper bound of delta_best at `epsilon`, for every score."""
        weight, log_x = self.corners
        return min(float(weight @ self.profile.above(epsilon + log_x)) * (1 + 1e-11), 1.0)

    def lower(self, epsilon: float) -> float:
        """Return a lower bound of delta_best at `epsilon` for the worst score."""
        return self._ranked(epsilon, self._best_start(epsilon))

    def upper_epsilon(self, delta: float) -> float:
        """Return an epsilon at which delta_best is at most `delta`, for every score."""
        if self.upper(FARTHEST) > delta:
            return math.inf
        return invert(_FallingDelta(self.upper), delta, guess=1.0, ceiling=FARTHEST).upper

    def epsilon(self, delta: float) -> Bracket:
        """Return proved bounds of the smallest epsilon at `delta`; the worst score needs it."""
        upper = self.upper_epsilon(delta)
        if upper == math.inf:
            return Bracket(0.0, upper)
        lower, near = 0.0, 0.95 * upper
        for _ in range(_ROUNDS):  # any threshold of the score gives a valid bound
            curve = _FallingDelta(partial(self._ranked, start=self._best_start(near)))
            found = invert(curve, delta, guess=near, ceiling=math.inf).lower
            if found == 0:  # this epsilon is too high: no threshold is better than another
                near *= 0.8
                continue
            gained, lower = found - lower, max(found, lower)
            if gained <= 1e-5 * upper:
                break
            near = lower
        return Bracket(min(lower, upper), upper)

    def _best_start(self, epsilon: float) -> int:
        """Return the threshold of the score, as an index of outcomes, of the best lower bound."""
        mass = np.cumsum(self.pair.p + self.pair.q)
        even = np.searchsorted(mass, np.linspace(0.0, 2.0, _STARTS))
        tails = np.geomspace(1e-9, 0.02, _STARTS // 4)
        starts = np.concatenate(
            (even, np.searchsorted(mass, tails), np.searchsorted(mass, 2 - tails))
        )
        known = {int(start): self._ranked(epsilon, int(start)) for start in np.unique(starts)}
        best = max(known, key=known.__getitem__)
        order = sorted(known)
        around = order[max(order.index(best) - 1, 0) : order.index(best) + 2]
        stride = max(around[-1] - best, best - around[0])
        while stride > 0:
            for start in (best - stride, best + stride):
                if 0 <= start < len(mass) and start not in known:
                    known[start] = self._ranked(epsilon, start)
            best = max(known, key=known.__getitem__)
            stride //= 2
        return best

    def _ranked(self, epsilon: float, start: int) -> float:
        p, q = (mass[start:] for mass in self.pair)
        if not len(p):
            return 0.0
        above_p, above_q = (np.minimum(np.cumsum(mass), 1.0) for mass in (p, q))
        below_q = np.maximum(above_q - q, 0.0)
        slope = self.law.log_slope
        released = p * np.exp(slope(np.clip(above_p - 0.5 * p - 1e-12, 0.0, 1.0)))
        other = 0.5 * q * (np.exp(slope(below_q)) + np.exp(slope(above_q)))
        gain = released * (1 - 1e-9) - math.exp(min(epsilon, 700.0)) * other * (1 + 1e-9)
        return float(gain[gain > 0].sum())


def _split(pair: Pair) -> Pair:
    """Return `pair` with likely outcomes split into parts of equal ratio, which a score may rank.

    The parts differ by randomness of the run itself, so they tell nothing about the data.
    """
    parts = np.ceil(_PARTS * np.maximum(pair.p, pair.q)).astype(int)
    parts = np.maximum(parts, 1)
    return Pair(*(np.repeat(mass / parts, parts) for mass in pair))


class _FallingDelta(NamedTuple):
    """A falling function of epsilon, in the form that `invert` takes."""

    value: Callable[[float], float]

    def delta(self, epsilon: float) -> Bracket:
        found = self.value(epsilon)
        return Bracket(found, found)


class _Corners(NamedTuple):
    """Corners of the graph of H: how much its slope grows, and the log of where, rounded down."""

    weight: Floats
    log_x: Floats


def _corners(profile: Profile, law: RunLaw, log_least: float) -> _Corners:
    """Return the corners of a piecewise linear upper bound of H in the module docstring.

    Slopes of H below exp(log_least) are not resolved.
    """
    size, power = profile.power()
    a = _sizes(size, power, law, log_least)
    g = np.interp(a, size, power) * (1 + 16 * ROUND)  # G is concave: a chord of corners is exact
    slope = np.exp(law.log_slope(np.minimum(g[1:], 1.0))) * _UP + 1e-300
    height = np.exp(law.log_slope(a[:-1])) / _UP
    slope, height = np.append(0.0, slope), np.append(0.0, height)
    keep = lower_hull(slope, height)
    slope, height = slope[keep], height[keep]
    rise, run = np.diff(height), np.diff(slope)
    # Both differences have lost digits: lower each corner by what they may have lost.
    error = 4 * ROUND * (height[1:] / np.maximum(rise, 1e-300) + slope[1:] / run + 2)
    with np.errstate(divide="ignore"):
        log_x = np.log(rise / run) + np.log1p(-np.minimum(error, 1.0))
    return _Corners(run, log_x)


def _sizes(size: Floats, power: Floats, law: RunLaw, log_least: float) -> Floats:
    """Return a grid of sizes a of tests, from 0 to 1, on which f'(a) and f'(G(a)) rise evenly."""
    cells = _CELLS
    if isinstance(law, TruncatedRuns):
        cells = int(min(cells, max(_MOST_WORK / law.most, 200)))
    x = np.concatenate(([0.0], np.geomspace(1e-12, 0.5, 500), 1 - np.geomspace(0.5, 1e-9, 500)))
    x = np.append(np.unique(x), 1.0)
    logs = np.maximum(law.log_slope(x), log_least)
    levels = np.linspace(float(logs[0]), float(logs[-1]), cells)
    even = np.array(np.interp(levels, logs, x), dtype=float)
    even[0], even[-1] = 0.0, 1.0
    inverse = np.array(np.interp(even, power, size), dtype=float)  # the size of such a test
    small = np.geomspace(1e-300, 1e-3, 100)
    return np.unique(np.concatenate((even, inverse[inverse < 1], small, [0.0, 1.0])))
