"""Mixtures of Gaussians, composed many times: laws on finitely many losses above and below them.

A user with several records in a Poisson sample, and sampling with replacement, give such mixtures
(`MixedNormals`). Their loss rises with the output x, so cells of x are cells of the loss, and no
equation has to be solved. Two laws are made of the P- and Q-masses of the cells:

- *above*: the mass of a cell moves to both its ends (`spread_masses`), which never lowers delta;
- *below*: a cell is one outcome. Merging outputs is post-processing, which never raises delta.

Both are off by second order in the width of the cells. They are composed by the contour method.
"""

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from tacit._arrays import Floats
from tacit.accounting.brackets import Bracket, invert
from tacit.accounting.one_event import ROUND
from tacit.accounting.pld.contour import Family
from tacit.accounting.pld.loss_laws import Discrete, Law, MixedNormals
from tacit.accounting.pld.pairs import Direction
from tacit.accounting.pld.spread import spread_masses
from tacit.errors import NotCertified

_CELLS = 1200
_COARSE = 400  # points from which the cells are planned
_SHARE_OF_DELTA = 1e-8  # P-mass of outputs beyond all cells, in all steps
_ERROR, _SMOOTHING = 1e-5, 4e-6
"""Relative error of delta, and relative width of epsilon that smoothing causes, about."""


def has_mixtures(direction: Direction, *, of_more_than: int = 0) -> bool:
    """Return whether some loss is that of a mixture of more Gaussians than `of_more_than`."""
    return any(
        isinstance(law, MixedNormals) and len(law.shifts) > of_more_than
        for law, _ in direction.parts
    )


def mixture_epsilon(direction: Direction, delta: float, floor: float) -> Bracket:
    """Return bounds on epsilon at `delta`; they may be loose below `floor`.

    Raises `NotCertified` if the losses cannot be composed by the contour method.
    """
    direction = replace(direction, infinite_upper=0.0, infinite_lower=0.0)  # the caller adds them
    upper = _epsilon(on_cells(direction, delta, is_above=True), delta, floor).upper
    if upper <= floor:
        return Bracket(0.0, upper)
    return Bracket(_epsilon(on_cells(direction, delta, is_above=False), delta, 0.0).lower, upper)


def on_cells(direction: Direction, delta: float, *, is_above: bool) -> Direction:
    """Return the composition with each mixture replaced by a law above or below it.

    They are precise for deltas down to about `delta`.
    """
    parts: list[tuple[Law, int]] = []
    log_share = math.log(delta * _SHARE_OF_DELTA / direction.steps)
    lost = 0.0
    for law, count in direction.parts:
        if isinstance(law, MixedNormals):
            law, beyond = _above(law, log_share) if is_above else (_below(law, log_share), 0.0)
            lost += count * beyond
        parts.append((law, count))
    upper = min(direction.infinite_upper + lost, 1.0)
    return replace(direction, parts=tuple(parts), infinite_upper=upper)


def _epsilon(direction: Direction, delta: float, floor: float) -> Bracket:
    """Return bounds on the epsilon of a composition of discrete and other laws."""
    lost = direction.infinite_upper
    family = Family.of(direction, log_removed=math.log(delta * _SHARE_OF_DELTA))
    delta = (delta - lost) * (1 - 4 * ROUND) - family.removed
    if delta <= 0:
        raise NotCertified("losses that were removed take all of delta.")
    most = family.moments.epsilon_bound(delta)
    if most <= floor:
        return Bracket(0.0, most)
    guess = family.moments.guess_epsilon(delta)
    log_target = math.log(delta) + math.log(_ERROR)
    curve = family.smoothed(guess, log_target, None, width=_SMOOTHING)
    found = invert(curve, delta, guess=guess, ceiling=most, slope=curve.order)
    return Bracket(float(found.lower), min(float(found.upper), most))


@lru_cache(maxsize=8)
def _above(law: MixedNormals, log_share: float) -> tuple[Discrete, float]:
    """Return a law above `law` given a finite loss, and the P-mass of infinite losses."""
    cells = _MixtureCells(law, log_share)
    mass, beyond = spread_masses(*cells.masses(), cells.points)
    losses = cells.points
    if law.largest_loss < math.inf:
        losses, mass, beyond = np.append(losses, law.largest_loss), np.append(mass, beyond), 0.0
    beyond *= 1 + 64 * ROUND
    return _law(losses, mass / (1 - beyond)), beyond


@lru_cache(maxsize=8)
def _below(law: MixedNormals, log_share: float) -> Discrete:
    """Return a law below `law`; cells that P or Q gives no mass for certain are left out."""
    p, q = _MixtureCells(law, log_share).masses()
    # A tail is exact to a few roundings, so the mass of a cell errs by as much of it.
    p = p - 16 * ROUND * np.cumsum(p[::-1])[::-1]
    q = q + 16 * ROUND * np.cumsum(q)
    used = (p > 0) & (q > 0)
    losses = np.log(p[used] / q[used])
    order = np.argsort(losses)
    return _law(losses[order] - 64 * ROUND * (1 + np.abs(losses[order])), p[used][order])


def _law(losses: Floats, mass: Floats) -> Discrete:
    used = mass > 0
    q = mass[used] * np.exp(-np.minimum(losses[used], 700.0))
    return Discrete(tuple(losses[used].tolist()), tuple(mass[used].tolist()), tuple(q.tolist()))


def _highest_shift(law: MixedNormals, share: float) -> float:
    """Return the least shift such that all higher shifts have a probability of at most `share`."""
    above = 0.0
    for shift, weight in sorted(zip(law.shifts, law.weights, strict=True), reverse=True):
        above += weight
        if above > share:
            return shift
    return 0.0


class _MixtureCells:
    """Cells of the output x of a mixture, and the losses `points` at their ends, increasing.

    Beyond the cells, on the side of high losses, P has a mass of at most 2 exp(log_share). Cells
    are narrow where the squared width of the loss, weighted by P, would be large: the density of
    their ends is in proportion to the cube root of P times the squared slope of the loss.
    """

    def __init__(self, law: MixedNormals, log_share: float) -> None:
        self.law = law
        reach = law.sigma * math.sqrt(max(-2 * log_share, 1.0))
        top = _highest_shift(law, math.exp(log_share)) if law.sign == 1 else 0.0
        x = np.linspace(-reach, reach + top, _COARSE)
        ratio = law.log_ratio(x)
        log_p = -0.5 * (x / law.sigma) ** 2 + (ratio if law.sign == 1 else 0.0)
        slope = np.maximum(np.gradient(ratio, x), 1e-12)
        weight = np.exp((log_p - log_p.max()) / 3) * slope ** (2 / 3)
        density = weight / weight.sum() + 0.2 / _COARSE
        at = np.interp(
            np.linspace(0.0, 1.0, _CELLS),
            np.concatenate(([0.0], np.cumsum(density) / density.sum())),
            np.concatenate(([x[0]], 0.5 * (x[1:] + x[:-1]), [x[-1]])),
        )
        points = law.log_ratio(at)
        # Where the ratio hardly rises, rounding may keep it level or make it fall.
        rises = np.diff(np.maximum.accumulate(points), prepend=-math.inf) > 64 * ROUND * (
            1 + np.abs(points)
        )
        self.x = at[rises]
        self.points = points[rises] if law.sign == 1 else -points[rises][::-1]

    def masses(self) -> tuple[Floats, Floats]:
        """Return the P- and Q-mass of each cell of the loss, in increasing order."""
        return self.law.masses(self.x)
