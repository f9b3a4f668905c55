"""Moments and Fourier transforms of privacy losses, as the contour and lattice methods need them.

With M(z) = E_P[exp(z * loss)], `Cumulants` has bounds of log M at many real orders, and guesses of
delta from them. A `LossModel` gives its cumulants and, tilted to one order, a bound on the decay of
its transform and the transform M(order + i t) at equally spaced t (`Factor`). A law without a
closed form becomes `Atoms` first: finitely many losses whose transform has a proved error.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from scipy.special import log_ndtr

from tacit._arrays import Floats
from tacit.accounting.one_event import ROUND, Complexes, Numbers, expm1, log1p

ORDERS = 2.0 ** np.arange(-14.0, 30.5, 0.5)
_MUCH_GAIN = 30.0  # log of integrand over target from which rounding becomes visible
LOG_CONSTANT = ORDERS * np.log(ORDERS / (1 + ORDERS)) - np.log1p(ORDERS)
"""log c(m) at each order m, with c = m^m / (m + 1)^(m + 1): delta(e) <= c M exp(-m e), by
maximizing (1 - exp(e - l)) / exp(m (l - e)) over the loss l."""


class Cumulants(NamedTuple):
    """Bounds on the log moments of a loss, log M(order) = log E_P[exp(order * loss)], at `ORDERS`.

    `mean` and `variance` are those of the loss under the law weighted by exp(order * loss).
    """

    upper: Floats  # proved upper bound of log M, M = E_P[exp(order * loss)]
    error: Floats  # `upper - error` is a proved lower bound
    mean: Floats
    variance: Floats

    def epsilon_bound(self, delta: float) -> float:
        """Return an upper bound on epsilon at `delta`: the Chernoff bound at the best order."""
        if delta <= 0:
            return math.inf
        logs = (self.upper + LOG_CONSTANT - math.log(delta)) / ORDERS
        return max(float(np.min(logs)), 0.0) * (1 + 1e-14)

    def log_delta_bound(self, epsilon: float) -> float:
        """Return an upper bound on log delta(epsilon): the Chernoff bound at the best order."""
        return min(float(np.min(self.upper + LOG_CONSTANT - ORDERS * epsilon)) + 1e-12, 0.0)

    def guess_epsilon(self, delta: float) -> float:
        """Return an estimate, without proof, of the epsilon at which delta(epsilon) = `delta`."""
        epsilon, log_delta = self._saddle_points()
        guess = np.interp(math.log(delta), log_delta[::-1], epsilon[::-1])
        return float(min(max(guess, 0.0), self.epsilon_bound(delta)))

    def guess_log_delta(self, epsilon: float) -> float:
        """Return an estimate, without proof, of log delta(epsilon)."""
        points, log_delta = self._saddle_points()
        return min(float(np.interp(epsilon, points, log_delta)), -1e-3)

    def _saddle_points(self) -> tuple[Floats, Floats]:
        """Return epsilons and their approximate log deltas, by the saddle-point approximation."""
        epsilon = self.mean - 1 / ORDERS - 1 / (1 + ORDERS)
        curvature = self.variance + 1 / ORDERS**2 + 1 / (1 + ORDERS) ** 2
        log_delta = self.upper - ORDERS * epsilon - np.log(ORDERS * (1 + ORDERS))
        log_delta -= 0.5 * np.log(2 * math.pi * curvature)
        return epsilon, np.minimum.accumulate(log_delta)

    def choose_line(
        self, epsilon: float, log_target: float, log_mass: float | None = None
    ) -> tuple[int, float]:
        """Return the index of an order and the length w of a window, for an integral or a grid.

        They keep aliases, the values of delta at epsilon + k w that a periodic transform adds,
        below exp(log_target), with few nodes. Aliases from below shrink like exp(-order * w), those
        from above by Chernoff bounds at higher orders. The number of nodes grows with w over the
        standard deviation of the weighted loss; this is not used if only a part of the law is
        integrated, whose log mass is `log_mass`. An integrand far above the result is avoided,
        because it amplifies rounding.
        """
        above = np.maximum(self.upper + LOG_CONSTANT - ORDERS * epsilon - log_target + 1, 1.0)
        gap = ORDERS[None, :] - ORDERS[:, None]
        needed = np.where(gap > 0, above / np.where(gap > 0, gap, 1.0), math.inf).min(axis=1)
        window = np.maximum(max((log_mass or 0.0) - log_target + 1, 1.0) / ORDERS, needed)
        log_gain = np.maximum(self.upper - ORDERS * epsilon - log_target, 1.0)
        spread = np.sqrt(self.variance) if log_mass is None else 1.0
        extra = 0.25 * (log_gain - log_gain.min()) + 0.75 * np.maximum(log_gain - _MUCH_GAIN, 0.0)
        with np.errstate(over="ignore"):
            cost = window * np.sqrt(log_gain) / spread * np.exp(np.minimum(extra, 400.0))
        index = int(np.argmin(cost))
        return index, float(window[index])


def total(moments: list[Cumulants], counts: list[int]) -> Cumulants:
    """Return the log moments of a sum of independent losses; loss i occurs `counts[i]` times."""
    columns = zip(*moments, strict=True)
    return Cumulants(*(np.array(counts, float) @ np.array(column) for column in columns))


class Split(NamedTuple):
    """A smooth split of a law: the share Phi((y - at) / width) of mass at y is its high part."""

    at: float
    width: float

    def log_high(self, y: Numbers) -> Numbers:
        """Return the log of the share of the mass at y that belongs to the high part."""
        return log_ndtr((y - self.at) / self.width)


class Tilt(NamedTuple):
    """The weight exp(order * loss) / M(order), where M(order) is the mean of exp(order * loss)."""

    order: float
    log_moment: float  # log M(order), exact up to `error`
    error: float


class HighPart(NamedTuple):
    """Transform of one step's privacy loss, with the contribution of high losses kept apart.

    The losses are split at a cut (`Split`): M = A + B, with A from losses below the cut and B from
    those above it.
    """

    log_low: Complexes  # log of A(order + i t) / M(order)
    log_rise: Complexes  # log(M / A) = log(1 + B / A), with relative accuracy where B is small
    error: Floats  # error of B(order + i t) / M(order)


class Factor(NamedTuple):
    """The transform M(order + i t) / M(order) of the loss of one step, at equally spaced t."""

    log: Complexes  # log of M(order + i t) / M(order)
    error: Floats  # relative error of the ratio M(order + i t) / M(order)
    high: HighPart | None = None


class Tilted(Protocol):
    """Protocol of a loss law weighted by exp(order * loss) / M(order).

    M(z) is the mean of exp(z * loss) before weighting; M(order + i t) is the "transform".
    """

    def log_decay(self, t: float, count: int, /) -> float:
        """Bound log(|M(order + i t')| / M(order)) for all t' >= t; tight for a power of `count`."""
        ...

    def lay_nodes(self, t: float, log_error: float, split: Split | None, /) -> int:
        """Choose quadrature nodes for the transform, and return how many there are.

        The error of the transform is about exp(log_error) at all frequencies up to t. With `split`,
        the nodes also serve its low and high part.
        """
        ...

    def factor(self, step: float, size: int, split: Split | None, /) -> Factor:
        """Return the transform, and its high part with `split`, at t = 0, ..., (size - 1) step."""
        ...


class LossModel(Protocol):
    """Protocol of a loss law that the contour method can integrate."""

    removed: float  # mass cut from its tail of high losses

    def moments(self, steps: int, /) -> Cumulants:
        """Return the log moments at `ORDERS`; only orders useful for `steps` losses are finite."""
        ...

    def tilt(self, tilt: Tilt, /) -> Tilted:
        """Return this law weighted by `tilt`, that is, by exp(order * loss) / M(order)."""
        ...


class WeightedLosses(NamedTuple):
    """Finitely many losses with their masses under P, and bounds on the rounding errors of both.

    Both are complex if they belong to quadrature nodes off the real line.
    """

    loss: Numbers
    log_mass: Numbers
    loss_error: Floats
    mass_error: Floats  # relative error of each mass

    def cumulants(self, *, removed: float = 0.0, largest_order: float = math.inf) -> Cumulants:
        """Return bounds on the log moments of the losses, which must be in increasing order.

        `removed` is the mass that was cut off, so that all masses sum to 1 - `removed`. M - 1 is
        computed from exp(order * loss) - 1, which keeps its digits where the moment M is close to
        1. Above `largest_order` the bounds are infinite.
        """
        loss, log_mass = self.loss, self.log_mass
        used = max(int(np.searchsorted(ORDERS, largest_order)), 1)
        orders = ORDERS[:used]
        fits = int(np.searchsorted(orders * loss[-1], 500.0))
        ones = np.ones(len(loss))
        columns = np.stack((ones, loss, loss * loss, self.loss_error), axis=1)  # (atoms, 4)
        mass, mass_error = np.exp(log_mass), self.mass_error + (8 + len(loss)) * ROUND
        growth = np.expm1(np.multiply.outer(orders[:fits], loss))  # (orders, atoms)
        weighted = columns * mass[:, None]
        sums = growth @ weighted  # of weight - mass; adding the masses later keeps digits
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

    def tilted(self, tilt: Tilt, error: float) -> "Atoms":
        """Return the losses weighted by exp(order * loss) / M(order).

        `error` is the quadrature error of M. It counts twice, because the transform minus 1 is a
        difference of two sums. An error of M(order) is a common relative error of all weights.
        """
        exponent = tilt.order * self.loss
        weight = np.exp(self.log_mass + exponent - tilt.log_moment)
        sizes = 2 + np.abs(self.log_mass) + np.abs(exponent) + abs(tilt.log_moment)
        weight_error = self.mass_error + 4 * ROUND * sizes
        weight_error = weight_error + tilt.order * self.loss_error + tilt.error
        return Atoms(self.loss, self.loss_error, weight, weight_error, 2 * error)


class Atoms(NamedTuple):
    """A weighted law on finitely many losses, in the form of the protocol `Tilted`.

    Losses and weights are complex if they belong to quadrature nodes off the real line.
    """

    loss: Numbers
    loss_error: Floats
    weight: Numbers  # tilted masses, summing to 1 up to `error`
    weight_error: Floats  # relative error of each weight by rounding
    error: float  # largest error of the transform relative to M(order), rounding excluded

    def log_decay(self, _t: float, _count: int) -> float:
        return 0.0

    def lay_nodes(self, _t: float, _log_error: float, _split: Split | None) -> int:
        return len(self.loss)

    def factor(self, step: float, size: int, _split: Split | None) -> Factor:
        return self.split_factor(None, step, size)

    def split_factor(self, share: Numbers | None, step: float, size: int) -> Factor:
        """Return the transform at t = 0, step, ..., (size - 1) step.

        `share` is the share of each loss's weight in the high part; None does not split the law.
        """
        t = step * np.arange(size, dtype=float)
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
    """Return the sum of weight * (exp(i t loss) - 1) at t = 0, step, ..., (size - 1) step.

    With x = exp(i t loss) - 1 and y = exp(i s loss) - 1, exp(i (t + s) loss) - 1 = x y + x + y. So
    these terms are computed without cancellation at few t, and all others follow from one matrix
    product. Rounding errors are then relative to t |loss|.
    """
    inner = math.isqrt(size - 1) + 1
    fine = _turns(step * np.arange(inner, dtype=float), loss)  # (inner, atoms)
    coarse = _turns(step * inner * np.arange(-(-size // inner), dtype=float), loss) * weight
    both = coarse @ fine.T + coarse.sum(axis=1)[:, None] + fine @ weight
    return both.ravel()[:size]


def _turns(t: Floats, loss: Numbers) -> Complexes:
    """Return exp(i t loss) - 1 for every t (rows) and loss (columns), without cancellation."""
    if np.iscomplexobj(loss):
        return expm1(np.multiply.outer(1j * t, loss))
    angle = np.multiply.outer(t, loss)
    turns = np.empty(angle.shape, np.complex128)
    turns.real = -2 * np.sin(0.5 * angle) ** 2
    turns.imag = np.sin(angle)
    return turns


@dataclass(frozen=True)
class PlainModel:
    """Loss of Gaussian noise on all records, as a `LossModel` and, weighted, as `Tilted`."""

    square: float  # mu^2; in closed form, log M(z) = mu^2 z (z + 1) / 2, so nodes are not needed
    order: float = 0.0

    removed = 0.0

    def moments(self, _steps: int) -> Cumulants:
        log_m = 0.5 * self.square * ORDERS * (ORDERS + 1) * (1 + 8 * ROUND)
        variance = np.full(len(ORDERS), self.square)
        return Cumulants(log_m, 16 * ROUND * log_m, self.square * (ORDERS + 0.5), variance)

    def tilt(self, tilt: Tilt) -> "PlainModel":
        return replace(self, order=tilt.order)

    def log_decay(self, t: float, _count: int) -> float:
        return -0.5 * self.square * t * t

    def lay_nodes(self, _t: float, _log_error: float, _split: Split | None) -> int:
        return 0

    def factor(self, step: float, size: int, _split: Split | None) -> Factor:
        t = step * np.arange(size, dtype=float)
        log = self.square * (t * (1j * (self.order + 0.5) - 0.5 * t))
        return Factor(log, 8 * ROUND * np.abs(log))


class AtomicModel:
    """A law on finitely many losses, in increasing order, in the form of a `LossModel`."""

    removed = 0.0

    def __init__(self, loss: Floats, mass: Floats) -> None:
        log_mass = np.log(mass)
        mass_error = 8 * ROUND * (1 + np.abs(log_mass))
        self.losses = WeightedLosses(loss, log_mass, 4 * ROUND * np.abs(loss), mass_error)

    def moments(self, _steps: int) -> Cumulants:
        return self.losses.cumulants()

    def tilt(self, tilt: Tilt) -> Atoms:
        return self.losses.tilted(tilt, 0.0)
