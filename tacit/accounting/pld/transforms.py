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

from tacit._arrays import Floats
from tacit.accounting.one_event import ROUND, Complexes, Numbers, dot, expm1, log1p, product
from tacit.errors import NotCertified

ORDERS = 2.0 ** np.arange(-14.0, 30.5, 0.5)
ALL_ORDERS = slice(0, len(ORDERS))
NEAREST, FARTHEST = 2.0**-7, 64.0
"""Orders outside this range, divided by the deviation of the total, do not help."""
_FEW_TURNS = 8  # rows of exp(i t loss) up to which each is evaluated
_MUCH_GAIN = 30.0  # log of integrand over target from which rounding becomes visible
LOG_CONSTANT = ORDERS * np.log(ORDERS / (1 + ORDERS)) - np.log1p(ORDERS)
"""log c(m) at each order m, with c = m^m / (m + 1)^(m + 1): delta(e) <= c M exp(-m e), by
maximizing (1 - exp(e - l)) / exp(m (l - e)) over the loss l."""

_INVERSE_GAPS = np.full((len(ORDERS), len(ORDERS)), math.inf)
"""1 / (other order - order) for each order (rows) and other order, infinite if it is not higher."""
_upper = np.triu_indices(len(ORDERS), 1)
_INVERSE_GAPS[_upper] = 1 / (ORDERS[_upper[1]] - ORDERS[_upper[0]])
_NOTHING_KNOWN = np.full((4, len(ORDERS)), math.inf)  # columns of `Cumulants`
_NOTHING_KNOWN[3] = 1e-100


class Cumulants(NamedTuple):
    """Bounds on the log moments of a loss, log M(order) = log E_P[exp(order * loss)], at `ORDERS`.

    `mean` and `variance` are those of the loss under the law weighted by exp(order * loss).
    """

    upper: Floats  # proved upper bound of log M, M = E_P[exp(order * loss)]
    error: Floats  # `upper - error` is a proved lower bound
    mean: Floats
    variance: Floats

    @staticmethod
    def on(
        orders: slice, upper: Floats, error: Floats, mean: Floats, variance: Floats
    ) -> "Cumulants":
        """Return the table with these columns at a range of `ORDERS`, and no bound elsewhere."""
        table = _NOTHING_KNOWN.copy()
        table[:, orders] = upper, error, mean, np.maximum(variance, 1e-100)
        table[2, : orders.start], table[2, orders.stop :] = mean[0], mean[-1]
        return Cumulants(*table)

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
        self, epsilon: float, log_target: float, *, is_smoothed: bool = False
    ) -> tuple[int, float]:
        """Return the index of an order and the length w of a window, for an integral or a grid.

        They keep aliases, the values of delta at epsilon + k w that a periodic transform adds,
        below exp(log_target), with few nodes. Aliases from below shrink like exp(-order * w), those
        from above by Chernoff bounds at higher orders. The number of nodes grows with w and, unless
        a smoothing limits it, falls with the standard deviation of the weighted loss. An integrand
        far above the result is avoided, because it amplifies rounding.
        """
        finite = np.isfinite(self.upper)
        first = int(finite.argmax())
        known = slice(first, len(finite) - int(finite[::-1].argmax()))
        if not finite[first]:
            raise NotCertified("no moment of the loss is known.")
        orders = ORDERS[known]
        excess = self.upper[known] - orders * epsilon - log_target
        if not finite[known].all():
            excess[~finite[known]] = math.inf
        above = np.maximum(excess + LOG_CONSTANT[known] + 1, 1.0)
        needed = (above * _INVERSE_GAPS[known, known]).min(axis=1)
        window = np.maximum(max(1 - log_target, 1.0) / orders, needed)
        log_gain = np.maximum(excess, 1.0)
        extra = 0.25 * (log_gain - log_gain.min())
        extra += 0.75 * np.maximum(log_gain - _MUCH_GAIN, 0.0)
        cost = np.log(window * np.sqrt(log_gain)) + extra
        if not is_smoothed:
            cost -= 0.5 * np.log(self.variance[known])
        index = int(cost.argmin())
        return first + index, float(window[index])


def useful_orders(spread: float) -> slice:
    """Return the range of `ORDERS` that helps if a total loss has standard deviation `spread`."""
    low, high = np.searchsorted(ORDERS, (NEAREST / spread, FARTHEST / spread))
    return slice(min(int(low), len(ORDERS) - 1), max(int(high), int(low) + 1))


def total(moments: list[Cumulants], counts: list[int]) -> Cumulants:
    """Return the log moments of a sum of independent losses; loss i occurs `counts[i]` times."""
    if len(moments) == 1:
        return Cumulants(*(counts[0] * column for column in moments[0]))
    columns = zip(*moments, strict=True)
    return Cumulants(*(np.array(counts, float) @ np.array(column) for column in columns))


class Tilt(NamedTuple):
    """The weight exp(order * loss) / M(order), where M(order) is the mean of exp(order * loss)."""

    order: float
    log_moment: float  # log M(order), exact up to `error`
    error: float


class Factor(NamedTuple):
    """The transform M(order + i t) / M(order) of the loss of one step, at equally spaced t."""

    log: Complexes  # log of M(order + i t) / M(order)
    error: Floats  # relative error of the ratio M(order + i t) / M(order)


class Tilted(Protocol):
    """Protocol of a loss law weighted by exp(order * loss) / M(order).

    M(z) is the mean of exp(z * loss) before weighting; M(order + i t) is the "transform".
    """

    def log_decay(self, t: float, count: int, /) -> float:
        """Bound log(|M(order + i t')| / M(order)) for all t' >= t; tight for a power of `count`."""
        ...

    def lay_nodes(self, t: float, log_error: float, /) -> int:
        """Choose quadrature nodes for the transform, and return how many there are.

        The error of the transform is about exp(log_error) at all frequencies up to t.
        """
        ...

    def factor(self, step: float, size: int, /) -> Factor:
        """Return the transform at t = 0, step, ..., (size - 1) step."""
        ...


class LossModel(Protocol):
    """Protocol of a loss law that the contour method can integrate."""

    removed: float  # mass cut from its tail of high losses

    @property
    def variance(self) -> float:
        """About the variance of the loss; 0 if all orders have moments."""
        ...

    def moments(self, used: slice, /) -> Cumulants:
        """Return the log moments at `ORDERS`; only those of the range `used` need be finite."""
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

    def cumulants(self, *, removed: float = 0.0, orders: slice = ALL_ORDERS) -> Cumulants:
        """Return bounds on the log moments of the losses, which must be in increasing order.

        `removed` is the mass that was cut off, so that all masses sum to 1 - `removed`. M - 1 is
        computed from exp(order * loss) - 1, which keeps its digits where the moment M is close to
        1. Outside the range `orders` of `ORDERS` the bounds are infinite.
        """
        loss, log_mass, used = self.loss, self.log_mass, ORDERS[orders]
        fits = int(np.searchsorted(used * loss[-1], 500.0))
        mass_error = self.mass_error + (8 + len(loss)) * ROUND
        # growth has the sign of the loss, so that the last column gives sums of |growth|.
        columns = np.empty((len(loss), 5))
        columns[:, 0] = 1.0
        columns[:, 1], columns[:, 2] = loss, loss * loss
        columns[:, 3], columns[:, 4] = self.loss_error, np.sign(loss) * mass_error
        growth = np.expm1(np.multiply.outer(used[:fits], loss))  # (orders, atoms)
        weighted = columns * np.exp(log_mass)[:, None]
        sums = product(growth, weighted)  # of weight - mass; adding the masses later keeps digits
        shaken = sums[:, 4]
        # Where a quadrature failed, its sum may not even be positive; its error is large then.
        log_m = np.log1p(np.maximum(sums[:, 0] - removed, 1e-15 - 1.0))
        sums = sums + weighted.sum(axis=0)
        if fits < len(used):
            logs = np.multiply.outer(used[fits:], loss) + log_mass
            peak = logs.max(axis=1)
            weight = np.exp(logs - peak[:, None])
            far = product(weight, np.column_stack((columns, mass_error)))
            log_m = np.concatenate((log_m, peak + np.log(far[:, 0])))
            shaken = np.concatenate((shaken, far[:, 5]))
            sums = np.concatenate((sums, far[:, :5]))
        scale = sums[:, 0]
        error = (shaken + used * sums[:, 3]) / scale + ROUND * (removed + 4 * np.abs(log_m))
        mean = sums[:, 1] / scale
        variance = sums[:, 2] / scale - mean**2
        return Cumulants.on(orders, log_m + error, 2 * error, mean, variance)

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

    def lay_nodes(self, _t: float, _log_error: float) -> int:
        return len(self.loss)

    def factor(self, step: float, size: int) -> Factor:
        """Return the transform at t = 0, step, ..., (size - 1) step."""
        t = step * np.arange(size, dtype=float)
        excess = _transform(self.loss, self.weight, step, size)
        log = log1p(excess)
        # |exp(i t l) - 1| is at most t |l|, and the errors of its sum over atoms are in proportion.
        summing = self.weight_error + (128 + 3 * len(self.loss)) * ROUND
        blur = dot(np.abs(self.weight), self.loss_error + summing * np.abs(self.loss))
        absolute = self.error + t * blur + 8 * ROUND * np.abs(excess)
        return Factor(log, absolute * np.exp(-log.real) + 4 * ROUND * np.abs(log))


def _transform(loss: Numbers, weight: Numbers, step: float, size: int) -> Complexes:
    """Return the sum of weight * (exp(i t loss) - 1) at t = 0, step, ..., (size - 1) step.

    With x = exp(i t loss) - 1 and y = exp(i s loss) - 1, exp(i (t + s) loss) - 1 = x y + x + y. So
    these terms are computed without cancellation at few t, and all others follow from one matrix
    product. Rounding errors are then relative to t |loss|.
    """
    inner = math.isqrt(size - 1) + 1
    fine = _turns(step, loss, inner)  # (inner, atoms)
    coarse = _turns(step * inner, loss, -(-size // inner)) * weight
    found = product(np.concatenate((coarse, weight[None, :])), fine.T)  # the last row is that of t
    both = found[:-1] + coarse.sum(axis=1)[:, None] + found[-1]
    return both.ravel()[:size]


def _turns(step: float, loss: Numbers, size: int) -> Complexes:
    """Return exp(i t loss) - 1 for t = 0, step, ..., (size - 1) step (rows) and losses (columns).

    If there are many, only the powers of two times `step` are evaluated. The other rows follow by
    the identity in `_transform`, in at most log2(size) additions, each of which adds a few
    roundings of t |loss|.
    """
    turns = np.zeros((size, len(loss)), np.complex128)
    if size <= _FEW_TURNS and not np.iscomplexobj(loss):
        angle = np.multiply.outer(step * np.arange(size), loss)
        turns.real, turns.imag = -2 * np.sin(0.5 * angle) ** 2, np.sin(angle)
        return turns
    known = 1
    while known < size:
        angle = (step * known) * loss
        if np.iscomplexobj(loss):
            jump = expm1(np.asarray(1j * angle, np.complex128))
        else:
            jump = np.empty(len(loss), np.complex128)
            jump.real = -2 * np.sin(0.5 * angle) ** 2
            jump.imag = np.sin(angle)
        new = min(known, size - known)
        turns[known : known + new] = turns[:new] * (jump + 1) + jump
        known += new
    return turns


@dataclass(frozen=True)
class PlainModel:
    """Loss of Gaussian noise on all records, as a `LossModel` and, weighted, as `Tilted`."""

    square: float  # mu^2; in closed form, log M(z) = mu^2 z (z + 1) / 2, so nodes are not needed
    order: float = 0.0

    removed = 0.0

    @property
    def variance(self) -> float:
        """Variance of the loss."""
        return self.square

    def moments(self, _used: slice = ALL_ORDERS) -> Cumulants:
        log_m = 0.5 * self.square * ORDERS * (ORDERS + 1) * (1 + 8 * ROUND)
        variance = np.full(len(ORDERS), self.square)
        return Cumulants(log_m, 16 * ROUND * log_m, self.square * (ORDERS + 0.5), variance)

    def tilt(self, tilt: Tilt) -> "PlainModel":
        return replace(self, order=tilt.order)

    def log_decay(self, t: float, _count: int) -> float:
        return -0.5 * self.square * t * t

    def lay_nodes(self, _t: float, _log_error: float) -> int:
        return 0

    def factor(self, step: float, size: int) -> Factor:
        t = step * np.arange(size, dtype=float)
        log = self.square * (t * (1j * (self.order + 0.5) - 0.5 * t))
        return Factor(log, 8 * ROUND * np.abs(log))


class AtomicModel:
    """A law on finitely many losses, in increasing order, in the form of a `LossModel`."""

    removed = variance = 0.0

    def __init__(self, loss: Floats, mass: Floats) -> None:
        log_mass = np.log(mass)
        mass_error = 8 * ROUND * (1 + np.abs(log_mass))
        self.losses = WeightedLosses(loss, log_mass, 4 * ROUND * np.abs(loss), mass_error)

    def moments(self, _used: slice = ALL_ORDERS) -> Cumulants:
        return self.losses.cumulants()

    def tilt(self, tilt: Tilt) -> Atoms:
        return self.losses.tilted(tilt, 0.0)
