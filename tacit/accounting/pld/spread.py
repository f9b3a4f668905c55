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
from tacit.accounting.pld.transforms import Cumulants, WeightedLosses, total


def spread(law: Law, points: Floats) -> tuple[Floats, float]:
    """Return the masses at `points`, and the mass above them, of a law that dominates `law`.

    The points are losses in increasing order. The mass between two of them moves to both, so that
    its P- and Q-mass are kept; losses below all points are raised to the first.
    """
    p, q = law.cells(points)
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
        return _search(tables, delta, low, high)


def _search(
    tables: list[tuple[Floats, Floats, int]], delta: float, low: float, high: float
) -> float:
    for _ in range(24):
        x = math.sqrt(low * high)
        alone = 0.0
        each: list[Cumulants] = []
        for loss, mass, count in tables:
            is_large = loss > x
            alone += count * float(mass[is_large] @ -np.expm1(x - loss[is_large]))
            is_large[0] = False  # one loss must be left
            loss, mass = loss[~is_large], mass[~is_large]
            none = np.zeros(len(loss))
            atoms = WeightedLosses(loss, np.log(mass), none, none)
            each.append(atoms.cumulants(removed=max(1 - float(mass.sum()), 0.0)))
        found = alone + math.exp(total(each, [n for _, _, n in tables]).guess_log_delta(x))
        low, high = (x, high) if found > delta else (low, x)
        if high < 1.02 * low:
            break
    return math.sqrt(low * high)


def _coarse_law(law: Law, log_removed: float) -> tuple[Floats, Floats]:
    """Return few losses and their masses, about those of `law`."""
    low, high = law.span(log_removed)
    size = max(-low, high)
    points = np.geomspace(1e-9 * size, size, 400)
    points = np.concatenate((-points[::-1], [0.0], points))
    mass, _ = spread(law, points[(points >= low * 1.2) & (points <= high * 1.2)])
    kept = points[(points >= low * 1.2) & (points <= high * 1.2)]
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
