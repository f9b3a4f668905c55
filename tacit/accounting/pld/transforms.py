"""What the contour engine asks of a law, and the laws that answer in closed form.

A `Model` gives its cumulants and, tilted to one order, how fast its transform decays and what the
transform is at equally spaced t (`Factor`). A law that is no closed form becomes `Atoms` first:
finitely many losses whose transform is right up to proved errors.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from scipy.special import log_ndtr

from tacit._arrays import Floats
from tacit.accounting.one_event import ROUND, Complexes, Numbers, expm1, log1p

ORDERS = 2.0 ** np.arange(-14.0, 30.5, 0.5)
LOG_CONSTANT = ORDERS * np.log(ORDERS / (1 + ORDERS)) - np.log1p(ORDERS)
"""log c(order) with c = m^m / (m + 1)^(m + 1): delta(e) <= c M exp(-m e), by maximizing
(1 - exp(e - l)) / exp(m (l - e)) over the loss l."""


class Cumulants(NamedTuple):
    """Cumulants of a loss at `ORDERS`."""

    upper: Floats
    """Proved upper bound of log M, M = E_P[exp(order * loss)]."""
    error: Floats
    """`upper - error` is a proved lower bound."""
    mean: Floats
    variance: Floats

    def epsilon_bound(self, delta: float) -> float:
        """The moment bound: epsilon is at most this (Chernoff at each order)."""
        if delta <= 0:
            return math.inf
        logs = (self.upper + LOG_CONSTANT - math.log(delta)) / ORDERS
        return max(float(np.min(logs)), 0.0) * (1 + 1e-14)

    def log_delta_bound(self, epsilon: float) -> float:
        """The moment bound the other way round."""
        return min(float(np.min(self.upper + LOG_CONSTANT - ORDERS * epsilon)) + 1e-12, 0.0)

    def guess_epsilon(self, delta: float) -> float:
        """About where delta(epsilon) = delta."""
        epsilon, log_delta = self._saddle_points()
        guess = np.interp(math.log(delta), log_delta[::-1], epsilon[::-1])
        return float(min(max(guess, 0.0), self.epsilon_bound(delta)))

    def guess_log_delta(self, epsilon: float) -> float:
        """About log delta(epsilon)."""
        points, log_delta = self._saddle_points()
        return min(float(np.interp(epsilon, points, log_delta)), -1e-3)

    def _saddle_points(self) -> tuple[Floats, Floats]:
        """Pairs (epsilon, log delta) near the curve, by the saddle-point approximation."""
        epsilon = self.mean - 1 / ORDERS - 1 / (1 + ORDERS)
        curvature = self.variance + 1 / ORDERS**2 + 1 / (1 + ORDERS) ** 2
        log_delta = self.upper - ORDERS * epsilon - np.log(ORDERS * (1 + ORDERS))
        log_delta -= 0.5 * np.log(2 * math.pi * curvature)
        return epsilon, np.minimum.accumulate(log_delta)

    def choose_line(
        self, epsilon: float, log_target: float, log_mass: float | None = None
    ) -> tuple[int, float]:
        """Index of an order, and a window, for which aliases are below target and nodes are few.

        Aliases from below shrink like exp(-order * window) from the mass of the law, those from
        above like Chernoff at any higher order. The number of nodes grows with the window over the
        standard deviation of the tilted loss; for part of a law, whose mass is given, that says
        nothing. What is integrated should not exceed the result too much: rounding is amplified.
        """
        above = np.maximum(self.upper + LOG_CONSTANT - ORDERS * epsilon - log_target + 1, 1.0)
        gap = ORDERS[None, :] - ORDERS[:, None]
        needed = np.where(gap > 0, above / np.where(gap > 0, gap, 1.0), math.inf).min(axis=1)
        window = np.maximum(max((log_mass or 0.0) - log_target + 1, 1.0) / ORDERS, needed)
        log_gain = np.maximum(self.upper - ORDERS * epsilon - log_target, 1.0)
        spread = np.sqrt(self.variance) if log_mass is None else 1.0
        extra = np.minimum(log_gain - log_gain.min(), 400.0)
        index = int(np.argmin(window * np.sqrt(log_gain) / spread * np.exp(0.25 * extra)))
        return index, float(window[index])


def total(moments: list[Cumulants], counts: list[int]) -> Cumulants:
    """Cumulants of a sum of independent losses."""
    if len(moments) == 1:
        return Cumulants(*(counts[0] * column for column in moments[0]))
    columns = zip(*moments, strict=True)
    return Cumulants(*(np.array(counts, float) @ np.array(column) for column in columns))


def grid_moments(
    loss: Floats,
    log_mass: Floats,
    *,
    loss_error: Floats,
    mass_error: Floats,
    removed: float = 0.0,
    largest_order: float = math.inf,
) -> Cumulants:
    """Cumulants of atoms whose losses increase and whose masses sum to 1 - `removed`.

    M - 1 is formed from exp(order * loss) - 1, which keeps its digits where M is close to 1.
    `mass_error` is the relative error of each mass. Above `largest_order` nothing is claimed.
    """
    used = max(int(np.searchsorted(ORDERS, largest_order)), 1)
    orders = ORDERS[:used]
    fits = int(np.searchsorted(orders * loss[-1], 500.0))
    ones = np.ones(len(loss))
    columns = np.stack((ones, loss, loss * loss, loss_error), axis=1)  # (atoms, 4)
    mass, mass_error = np.exp(log_mass), mass_error + (8 + len(loss)) * ROUND
    growth = np.expm1(np.multiply.outer(orders[:fits], loss))  # (orders, atoms)
    weighted = columns * mass[:, None]
    sums = growth @ weighted  # of weight - mass, first without the masses, for their digits
    log_m, shaken = np.log1p(sums[:, 0] - removed), np.abs(growth) @ (mass * mass_error)
    sums = sums + weighted.sum(axis=0)
    if fits < used:
        logs = np.multiply.outer(orders[fits:], loss) + log_mass
        peak = logs.max(axis=1)
        weight = np.exp(logs - peak[:, None])
        far = weight @ columns
        log_m = np.concatenate((log_m, peak + np.log(far[:, 0])))
        shaken = np.concatenate((shaken, weight @ mass_error))
        sums = np.concatenate((sums, far))
    scale = sums[:, 0]
    error = (shaken + orders * sums[:, 3]) / scale + ROUND * (removed + 4 * np.abs(log_m))
    mean = sums[:, 1] / scale
    table = np.full((4, len(ORDERS)), math.inf)
    table[0, :used], table[1, :used] = log_m + error, 2 * error
    table[2], table[2, :used] = mean[-1], mean
    table[3], table[3, :used] = 1e-100, np.maximum(sums[:, 2] / scale - mean**2, 1e-100)
    return Cumulants(*table)


class Split(NamedTuple):
    """A smooth partition of outputs y: psi(y) = Phi((y - at) / width) belongs to the high part."""

    at: float
    width: float

    def log_high(self, y: Numbers) -> Numbers:
        """log psi."""
        return log_ndtr((y - self.at) / self.width)


class Tilt(NamedTuple):
    """The weight exp(order * loss) / M(order)."""

    order: float
    log_moment: float
    """log M(order), right up to `error`."""
    error: float


class HighPart(NamedTuple):
    """Of a step that is split, M = A + B with A the low and B the high part."""

    log_low: Complexes
    """log of A(order + i t) / M(order)."""
    log_rise: Complexes
    """log(M / A) = log(1 + B / A), relatively accurate where B is small."""
    error: Floats
    """Error of B(order + i t) / M(order)."""


class Factor(NamedTuple):
    """The transform of one step at the nodes in t, relative to M(order)."""

    log: Complexes
    """log of M(order + i t) / M(order)."""
    error: Floats
    """Relative error of that ratio."""
    high: HighPart | None = None


class Tilted(Protocol):
    """A law weighted by exp(order * loss) / M(order)."""

    def log_decay(self, t: float, count: int, /) -> float:
        """Bound of log |M(order + i t')| / M(order) for all t' >= t; sharp for `count` steps."""
        ...

    def lay_nodes(self, t: float, log_error: float, split: Split | None, /) -> int:
        """Choose nodes good for all frequencies up to t; returns how many."""
        ...

    def factor(self, step: float, size: int, split: Split | None, /) -> Factor:
        """The transform at t = 0, step, ..., (size - 1) step."""
        ...


class Model(Protocol):
    """A law as the contour engine sees it."""

    removed: float
    """Mass cut from its tail of high losses."""

    def moments(self, steps: int, /) -> Cumulants:
        """Cumulants at `ORDERS`, as far as they help where `steps` such losses are added."""
        ...

    def tilt(self, tilt: Tilt, /) -> Tilted:
        """The law, tilted."""
        ...


class Atoms(NamedTuple):
    """A tilted law as finitely many atoms; losses and weights are complex off the real line."""

    loss: Numbers
    loss_error: Floats
    weight: Numbers
    """Tilted masses, summing to 1 up to `error`."""
    weight_error: Floats
    """Relative error of each weight by rounding."""
    error: float
    """Largest error of the transform relative to M(order), from all but rounding."""

    def factor(self, share: Numbers | None, step: float, size: int) -> Factor:
        """Their transform; `share` of each atom belongs to the high part."""
        t = step * np.arange(size)
        if share is None:
            excess, high = _transform(self.loss, self.weight, step, size), None
        else:
            weight = self.weight * share
            sizes, mass = np.abs(weight), complex(weight.sum())
            low = _transform(self.loss, self.weight - weight, step, size) - mass
            added = _transform(self.loss, weight, step, size) + mass
            excess = low + added
            shares = 2 - np.log(np.maximum(np.abs(share), 1e-300))
            relative = self.weight_error + ROUND * (128 * shares + 16 + 3 * len(weight))
            error = self.error + float(sizes @ relative) + t * float(sizes @ self.loss_error)
            log_low = log1p(low)
            high = HighPart(log_low, log1p(added * np.exp(-log_low)), error)
        log = log1p(excess)
        # |exp(i t l) - 1| is at most t |l|, and the errors of its sum over atoms are in proportion.
        summing = self.weight_error + (8 + 3 * len(self.loss)) * ROUND
        blur = float(np.abs(self.weight) @ (self.loss_error + summing * np.abs(self.loss)))
        absolute = self.error + t * blur + 8 * ROUND * (t > 0) + (high.error if high else 0.0)
        error = absolute * np.exp(-log.real) + 4 * ROUND * np.abs(log)
        return Factor(log, error, high)


def _transform(loss: Numbers, weight: Numbers, step: float, size: int) -> Complexes:
    """Sum of weight * (exp(i t loss) - 1) at t = 0, step, ..., (size - 1) step.

    exp(i t l) - 1 is formed without cancellation at few t, and with exp(i (t + s) l) - 1 =
    x y + x + y all others follow from one matrix product; so rounding is relative to t |loss|.
    """
    inner = math.isqrt(size - 1) + 1
    fine = _turns(step * np.arange(inner), loss)  # (inner, atoms)
    coarse = _turns(step * inner * np.arange(-(-size // inner)), loss) * weight
    both = coarse @ fine.T + coarse.sum(axis=1)[:, None] + fine @ weight
    return both.ravel()[:size]


def _turns(t: Floats, loss: Numbers) -> Complexes:
    """exp(i t loss) - 1."""
    if np.iscomplexobj(loss):
        return expm1(np.multiply.outer(1j * t, loss))
    angle = np.multiply.outer(t, loss)
    turns = np.empty(angle.shape, np.complex128)
    turns.real = -2 * np.sin(0.5 * angle) ** 2
    turns.imag = np.sin(angle)
    return turns


@dataclass(frozen=True)
class PlainModel:
    """Plain Gaussian releases: log M(z) = mu^2 z (z + 1) / 2, `square` being mu^2."""

    square: float
    order: float = 0.0

    removed = 0.0

    def moments(self, _steps: int) -> Cumulants:
        """Exact cumulants."""
        log_m = 0.5 * self.square * ORDERS * (ORDERS + 1) * (1 + 8 * ROUND)
        variance = np.full(len(ORDERS), self.square)
        return Cumulants(log_m, 16 * ROUND * log_m, self.square * (ORDERS + 0.5), variance)

    def tilt(self, tilt: Tilt) -> "PlainModel":
        """This law at one order."""
        return replace(self, order=tilt.order)

    def log_decay(self, t: float, _count: int) -> float:
        """As `Tilted.log_decay`: here it is exact."""
        return -0.5 * self.square * t * t

    def lay_nodes(self, _t: float, _log_error: float, _split: Split | None) -> int:
        """A closed form needs no nodes."""
        return 0

    def factor(self, step: float, size: int, _split: Split | None) -> Factor:
        """The exact transform."""
        t = step * np.arange(size)
        log = self.square * (t * (1j * (self.order + 0.5) - 0.5 * t))
        return Factor(log, 8 * ROUND * np.abs(log))


class AtomicModel:
    """Finitely many losses as they are, increasing; their transform need not decay at all."""

    removed = 0.0

    def __init__(self, loss: Floats, mass: Floats) -> None:
        self.loss, self.loss_error = loss, 4 * ROUND * np.abs(loss)
        self.log_mass = np.log(mass)
        self.mass_error = 8 * ROUND * (1 + np.abs(self.log_mass))

    def moments(self, _steps: int) -> Cumulants:
        """Cumulants of the finite sum."""
        return grid_moments(
            self.loss, self.log_mass, loss_error=self.loss_error, mass_error=self.mass_error
        )

    def tilt(self, tilt: Tilt) -> "TiltedAtoms":
        """This law, tilted."""
        return TiltedAtoms(self, tilt)


class TiltedAtoms:
    """An `AtomicModel` at one order."""

    def __init__(self, base: AtomicModel, tilt: Tilt) -> None:
        self.atoms = tilted_atoms(
            base.loss, base.loss_error, base.log_mass, base.mass_error, tilt, 0.0
        )

    def log_decay(self, _t: float, _count: int) -> float:
        """As `Tilted.log_decay`: nothing can be said."""
        return 0.0

    def lay_nodes(self, _t: float, _log_error: float, _split: Split | None) -> int:
        """The atoms are the nodes."""
        return len(self.atoms.loss)

    def factor(self, step: float, size: int, _split: Split | None) -> Factor:
        """The transform of the atoms."""
        return self.atoms.factor(None, step, size)


def tilted_atoms(
    loss: Numbers,
    loss_error: Floats,
    log_mass: Numbers,
    mass_error: Floats,
    tilt: Tilt,
    error: float,
) -> Atoms:
    """Atoms weighted by exp(order * loss) / M(order); `error` is that of their quadrature.

    The transform minus 1 is a difference of two sums, so it errs twice by quadrature; an error of
    M(order) scales it, as if all weights were wrong together.
    """
    exponent = tilt.order * loss
    weight = np.exp(log_mass + exponent - tilt.log_moment)
    sizes = 2 + np.abs(log_mass) + np.abs(exponent) + abs(tilt.log_moment)
    weight_error = mass_error + 4 * ROUND * sizes + tilt.order * loss_error + tilt.error
    return Atoms(loss, loss_error, weight, weight_error, 2 * error)
