"""Laws on finitely many losses that dominate a given law, and bounds of moments from them.

The mass of losses between two points moves to both points, such that its P- and Q-mass are kept.
That is the least pessimistic law on these points (Doroshenko et al. 2022, arXiv:2207.04380).
"""

import math
from collections.abc import Sequence

import numpy as np

from tacit._arrays import Floats
from tacit.accounting.one_event import ROUND
from tacit.accounting.pld.loss_laws import Law
from tacit.accounting.pld.transforms import Cumulants, WeightedLosses

_LOW_SHARE = 0.6  # losses below this share of epsilon matter by their sum only
_TRIED = np.geomspace(0.1, 100.0, 16)  # orders that an estimate of delta tries, times epsilon


def spread(law: Law, points: Floats) -> tuple[Floats, float]:
    """Return the masses at `points`, and the mass above them, of a law that dominates `law`.

    The points are losses in increasing order. The mass between two of them moves to both, so that
    its P- and Q-mass are kept; losses below all points are raised to the first.
    """
    return spread_masses(*law.cells(points), points)


def spread_masses(p: Floats, q: Floats, points: Floats) -> tuple[Floats, float]:
    """Return what `spread` does, given the P- and Q-mass of each cell between the points."""
    tail = np.cumsum(p[::-1])[::-1]  # P-mass from each cell up
    gap = -np.expm1(-np.diff(points))
    # A tail is exact to a few roundings, so P and exp(g) Q <= P of a cell err by as much of it.
    with np.errstate(divide="ignore"):
        other = np.exp(points[:-1] + np.log(q[1:-1]))  # exp(g) Q
    raised = (p[1:-1] - other + 16 * ROUND * tail[1:-1]) / gap
    raised = np.clip(raised, 0.0, p[1:-1])
    mass = np.zeros(len(points))
    mass[1:] += raised
    mass[:-1] += p[1:-1] - raised
    mass[0] += p[0]
    return mass, float(p[-1])


def guess_epsilon(parts: Sequence[tuple[Law, int]], delta: float, most: float) -> float:
    """Return an estimate, without proof, of epsilon at `delta`; it is at most `most`.

    Losses above the epsilon tried add their own share of delta, because one of them is
    enough; the others add what a saddle-point approximation of their sum gives.
    """
    steps = sum(count for _, count in parts)
    tables = [(*_coarse_law(law, math.log(delta / steps) - 7), count) for law, count in parts]
    low, high = 1e-9 * most, most
    with np.errstate(all="ignore"):  # an estimate that is not a number only narrows the search
        while high > 1.03 * low:
            x = math.sqrt(low * high)
            low, high = (x, high) if _likely_delta(tables, x) > delta else (low, x)
    return math.sqrt(low * high)


def _likely_delta(tables: list[tuple[Floats, Floats, int]], x: float) -> float:
    """Return an estimate of delta at epsilon = x, from losses, masses and counts of laws."""
    orders = _TRIED / x
    alone, log_m, variance = 0.0, np.zeros(len(orders)), np.zeros(len(orders))
    for loss, mass, count in tables:
        above, split = np.searchsorted(loss, (x, _LOW_SHARE * x))
        alone += count * float(mass[above:] @ -np.expm1(x - loss[above:]))
        below, weight = loss[: max(split, 1)], mass[: max(split, 1)]  # one loss must be left
        growth = np.expm1(np.multiply.outer(orders, below))
        columns = np.stack((weight, weight * below, weight * below**2), axis=1)
        total = growth @ columns + columns.sum(axis=0)
        log_m += count * np.log1p(growth @ weight - max(1 - float(weight.sum()), 0.0))
        mean = total[:, 1] / total[:, 0]
        variance += count * (total[:, 2] / total[:, 0] - mean**2)
    logs = log_m - orders * x - np.log(orders * (1 + orders))
    # Variances of large losses may be rounded to less than 0.
    curvature = np.maximum(variance, 0.0) + 1 / orders**2 + 1 / (1 + orders) ** 2
    best = int(np.nanargmin(logs))
    return alone + math.exp(min(logs[best] - 0.5 * math.log(2 * math.pi * curvature[best]), 0.0))


def _coarse_law(law: Law, log_removed: float) -> tuple[Floats, Floats]:
    """Return few losses and their masses, about those of `law`."""
    low, high = law.span(log_removed)
    size = max(-low, high)
    points = np.concatenate((np.geomspace(1e-9, 0.05, 60), np.linspace(0.06, 1.0, 48))) * size
    points = np.concatenate((-points[::-1], [0.0], points))
    kept = points[(points >= low - 0.2 * abs(low)) & (points <= high + 0.2 * abs(high))]
    mass, _ = spread(law, kept)
    return kept[mass > 0], mass[mass > 0]


def bounded_moments(law: Law, lowest: float, log_removed: float) -> tuple[Cumulants, float]:
    """Return upper bounds of the log moments of `law`, and the mass of losses that they leave out.

    They are those of a dominating law on a grid that is fine near 0. Losses below `lowest` < 0 are
    raised to it; those of mass about exp(log_removed) at the top are left out.
    """
    low, high = law.span(log_removed)
    bottom, top = min(max(low, lowest), -1e-290), max(high, 1e-290)
    small = 1e-7 * max(min(-bottom, top), 1e-6 * max(-bottom, top))
    below = -np.geomspace(small, -bottom, 1500)[::-1]
    points = np.concatenate((below, [0.0], np.geomspace(small, top * (1 + 1e-12), 1500)))
    mass, above = spread(law, np.unique(points))
    loss, mass = np.unique(points)[mass > 0], mass[mass > 0]
    error = np.full(len(loss), 64 * ROUND)
    atoms = WeightedLosses(loss, np.log(mass), 4 * ROUND * np.abs(loss), error)
    return atoms.cumulants(), above
