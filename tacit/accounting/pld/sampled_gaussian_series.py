"""Gaussian noise on a Poisson sample, with moments as a short series: for many steps of small loss.

Let Q be the law of the output without the record and X = exp(u) the ratio of the shifted noise to
the noise, so that E_Q[X] = 1. With x = q (X - 1), q the rate, the loss is log(1 + x) if the record
is removed and -log(1 + x) if it is added, and both have the moments

    M(z) = E_Q[(1 + x)^w],     w = 1 + z (removed), or w = -z (added).

`sampled_gaussian_contour` integrates them over a grid of outputs. Here (1 + x)^w is expanded in
powers of x, so that M(z) is a polynomial in z and no grid has to be laid.

**Moments of X - 1.** Let y be the standard normal number with u = (y - 1 / (2 sigma)) / sigma, and
h = exp(1 / sigma^2) - 1. Then E[X^i] = (1 + h)^(i (i - 1) / 2), so that E[(X - 1)^k] is the sum
over m of N(k, m) h^m, where N(k, m) counts the graphs with m edges on k labeled vertices, none of
them isolated (inclusion and exclusion over the isolated ones). All terms are positive, hence
nothing cancels.

**Cut.** Outputs y above a cut c, of negligible mass, are left out, because high moments do not
exist in practice without a cut. This lowers E[x^k] by at most q^k E[X^k; y > c] =
q^k (1 + h)^(k (k - 1) / 2) Phi(k / sigma - c).

**Remainder.** By Taylor's theorem with integral remainder, the sum up to x^(K - 1) errs by at most

    |binomial(w, K)| |x|^K max(1, (1 + x)^(Re w - K)),

whose mean is bounded cell by cell: x is monotone in y, so each factor is largest at an end.

**Decay.** On the line y + i s (y - i s if the record is added), with angle s / sigma < pi / 2,
|phi| grows by exp(s^2 / 2). Let p = q X / (1 + x). The argument of 1 + x is at least p atan(sin
angle), because its tangent is at least p sin(angle) and atan is concave. Its modulus falls, and its
negative power of order m grows by at most exp(2 m p tan^2(angle / 2)). So with tau = t atan(sin
angle), less 2 order tan^2(angle / 2) if the record is added,

    |M(order + i t)| / M(order) <= exp(s^2 / 2) E[exp(-tau p)] + edge
                                <= exp(s^2 / 2) (1 - tau E[p] + tau^2 E[p^2] / 2) + edge

where E is the mean under the law weighted by (1 + x)^Re(w), and `edge` is the integral over the
segment from c to c + i s. As p >= 0, the first line falls with t: its bound holds for larger t too.
"""

import math
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from tacit._arrays import Floats
from tacit.accounting.one_event import ROUND, Complexes, log1p, log_sum_exp
from tacit.accounting.pld.loss_laws import Normal, Sampled
from tacit.accounting.pld.transforms import ORDERS, Cumulants, Factor, Tilt

_MOST_TERMS = 20
_LEAST_NOISE = 0.7  # noise below which no series is tried
_REACH = 13.0  # about the largest |z| that matters, times the deviation of the total loss
_LOG_SMALL = -24.0  # log of a remainder of all steps with which a series is tried
_STEP, _LEFT = 0.125, -10.0
"""Width of the cells of y, and the end of those that are not in the first one."""
_UNITS = 2000  # relative rounding error of a term of the series, in units of ROUND
_NUDGE = 1e-2  # relative distance of the orders from which mean and variance are estimated
_TOO_MANY = 1_000_000  # number of nodes that stands for a series that is not precise enough


class Cells(NamedTuple):
    """Cells of the normal number y up to the cut, with x and p at both ends of each."""

    log_mass: Floats
    log_left: Floats  # log(1 + x) at the left end
    log_right: Floats
    p_left: Floats
    p_right: Floats
    log_size: Floats  # log of the largest |x|


class Expansion:
    """What the series of `n_terms` has in common if a record is removed and if it is added."""

    def __init__(self, rate: float, sigma: float, n_terms: int, cut: float) -> None:
        self.rate, self.sigma, self.n_terms, self.cut = rate, sigma, n_terms, cut
        self.k = np.arange(n_terms, dtype=float)
        powers = rate**self.k
        self.variance = rate**2 * math.expm1(1 / sigma**2)
        moments = _central_moments(math.expm1(1 / sigma**2))
        self.coefficients: Floats = (powers * moments[:n_terms])[2:]
        log_moment = 0.5 * self.k * (self.k - 1) / sigma**2
        self.lost: Floats = powers * np.exp(log_moment) * ndtr(self.k / sigma - cut) * (1 + 1e-12)
        self.weights: Floats = self.lost[1:].copy()
        self.weights[1:] += (_UNITS * ROUND) * self.coefficients
        self.cells = self._cells()
        self.log_remainders: Floats = self.cells.log_mass + n_terms * self.cells.log_size
        self.log_remainder = float(log_sum_exp(self.log_remainders))

    def _cells(self) -> Cells:
        y = _STEP * np.arange(_LEFT / _STEP, self.cut / _STEP + 0.5)
        u = (y - 0.5 / self.sigma) / self.sigma
        x = np.concatenate(([-self.rate], self.rate * np.expm1(u)))
        # Differences of the nearer tail keep their digits; 0 is the end of a cell.
        below = np.concatenate(([0.0], ndtr(-np.abs(y))))
        mass = np.abs(below[1:] - below[:-1]) * (1 + 1e-9) + 1e-300
        logs, p = np.log1p(x), (x + self.rate) / (1 + x)
        absolute = np.abs(x)
        size = np.maximum(absolute[1:], absolute[:-1]) * (1 + 1e-12)
        return Cells(np.log(mass), logs[:-1], logs[1:], p[:-1], p[1:], np.log(size))


class SeriesModel:
    """Loss of normal noise on a Poisson sample (protocol `LossModel`), by a series."""

    def __init__(self, law: Sampled, expansion: Expansion) -> None:
        self.law, self.expansion = law, expansion
        self.variance = expansion.variance
        weight, cut = law.a * law.rate, expansion.cut
        above = (1 - weight) * ndtr(-cut) + weight * ndtr(1 / expansion.sigma - cut)
        self.removed = float(above) * (1 + 1e-12)
        self.known_weights: dict[float, float] = {}  # of orders

    @staticmethod
    def fitting(
        law: Sampled, *, spread: float, steps: int, log_removed: float
    ) -> "SeriesModel | None":
        """Return the model of `law` if a series promises to be precise, else None.

        `spread` is about the standard deviation of the total loss of all steps.
        """
        if not isinstance(law.noise, Normal) or law.a + law.b != 1 or law.rate > 0.5:
            return None
        sigma = law.noise.sigma
        if sigma < _LEAST_NOISE or spread == 0.0:
            return None
        n_terms, log_size = _best_number(law.rate * (_REACH / spread + 1), sigma)
        if log_size + math.log(steps) > _LOG_SMALL:
            return None
        cut = 1 / sigma + math.sqrt(max(-2 * log_removed, 1.0))
        return _series_model(law, n_terms, _STEP * math.ceil(cut / _STEP))

    def power(self, order: Floats | float) -> Floats | float:
        """Return the real part of w, the power of 1 + x whose mean is the moment M(order + i t)."""
        return 1 + order if self.law.a else -order

    def series(self, z: Complexes) -> tuple[Complexes, Floats, Floats]:
        """Return M(z) - 1, a bound on its errors, and |binomial(w, n_terms)|.

        The errors are those of rounding and of the cut, without the remainder.
        """
        expansion = self.expansion
        k = expansion.k[:, None]
        factors = z - (k - 1) if self.law.a else -z - k  # w - k, rounded once
        factors /= k + 1
        binomials = np.multiply.accumulate(factors, axis=0)  # (terms, orders)
        sizes = np.abs(binomials)
        # As real numbers: a product of complex ones would start threads (see `product`).
        excess = (expansion.coefficients @ binomials[1:-1].view(np.float64)).view(np.complex128)
        return excess, self.error(sizes), sizes[-1]

    def error(self, sizes: Floats) -> Floats:
        """Bound the errors of rounding and of the cut, given all |binomial(w, k)|, k >= 1."""
        return self.expansion.lost[0] + self.expansion.weights @ sizes[:-1]

    def moments(self, used: slice) -> Cumulants:
        orders, size = ORDERS[used], used.stop - used.start
        points = np.empty(2 * size, np.complex128)
        points[:size], points[size:] = orders, orders * (1 + _NUDGE * 1j)
        excess, error, last = self.series(points)
        growth = excess.real[:size]
        moment = np.maximum(1 + growth, 1e-300)
        log_weights = self._log_weights(orders)
        self.known_weights.update(zip(orders.tolist(), log_weights.tolist(), strict=True))
        error = error[:size] + last[:size] * np.exp(np.minimum(log_weights, 600.0))
        log_m = np.log1p(np.maximum(growth, 1e-15 - 1.0))
        error = error / moment + 4 * ROUND * np.abs(log_m)
        near, nudge = log1p(excess[size:]), _NUDGE * orders
        mean, variance = near.imag / nudge, 2 * (log_m - near.real) / nudge**2
        return Cumulants.on(used, log_m + error, 2 * error, mean, variance)

    def log_weight(self, order: float) -> float:
        """Bound the log of E[|x|^K max(1, (1 + x)^(Re w - K))]."""
        if order not in self.known_weights:
            self.known_weights[order] = float(self._log_weights(np.array([order]))[0])
        return self.known_weights[order]

    def _log_weights(self, orders: Floats) -> Floats:
        """Bound the same at each order; `orders` increase.

        A negative power of 1 + x is largest where x is least, at -q.
        """
        expansion = self.expansion
        power = np.asarray(self.power(orders) - expansion.n_terms)
        lowest = expansion.log_remainder + np.minimum(power, 0.0) * math.log1p(-expansion.rate)
        if power[-1] > 0:
            first = int(np.searchsorted(power, 0.0, "right"))
            rise = np.multiply.outer(power[first:], np.maximum(expansion.cells.log_right, 0.0))
            lowest[first:] = log_sum_exp(rise + expansion.log_remainders)
        return lowest + 1e-9

    def along(self, z: Complexes) -> tuple[Complexes, Floats]:
        """Return log M(z) and its error at nodes z on a line Re z = order; the first is real."""
        excess, error, last = self.series(z)
        error += last * math.exp(min(self.log_weight(float(z[0].real)), 600.0))
        log = log1p(excess)
        return log, error * np.exp(-log.real) + 4 * ROUND * np.abs(log)

    def tilt(self, tilt: Tilt) -> "TiltedSeries":
        return TiltedSeries(self, tilt)


class TiltedSeries:
    """A `SeriesModel` weighted by exp(order * loss) divided by its mean (protocol `Tilted`)."""

    def __init__(self, base: SeriesModel, tilt: Tilt) -> None:
        self.base = base
        self.order = tilt.order
        cells, power = base.expansion.cells, float(base.power(tilt.order))
        # (1 + x)^power is least at the left end of a cell if it rises.
        low, high = (cells.log_left, cells.log_right)[:: 1 if base.law.a else -1]
        log_mass = cells.log_mass - tilt.log_moment
        least = np.exp(log_mass + power * low)
        most = np.exp(log_mass + (power * high + tilt.error))
        self.mean_p = float(least @ cells.p_left) * (1 - 1e-8)
        self.square_p = float(most @ cells.p_right**2) * (1 + 1e-8)
        last = power * float(cells.log_right[-1]) - 0.5 * base.expansion.cut**2
        self.log_edge = last - tilt.log_moment + tilt.error

    def log_decay(self, t: float, _count: int) -> float:
        sigma, order = self.base.expansion.sigma, self.order * self.base.law.b
        # The best s, if tau were t s / sigma.
        s = t * self.mean_p / sigma / (1 + t * t * self.square_p / sigma**2 + order * self.mean_p)
        s = min(s, 0.5 * sigma)
        angle = s / sigma
        bend = 2 * order * math.tan(0.5 * angle) ** 2
        tau = t * math.atan(math.sin(angle)) - bend
        if not (s > 0 and tau > 0):
            return 0.0
        edge = s * math.exp(min(self.log_edge + 0.5 * s * s + bend, 600.0))
        mean = -tau * self.mean_p + 0.5 * tau * tau * self.square_p
        return min(0.5 * s * s + math.log1p(max(mean, 1e-15 - 1.0) + edge), 0.0)

    def lay_nodes(self, t: float, log_error: float) -> int:
        k = self.base.expansion.k
        power = float(self.base.power(self.order))
        sizes = np.multiply.accumulate(np.hypot(power - k, t) / (k + 1))
        error = float(self.base.error(sizes))
        error += float(sizes[-1]) * math.exp(min(self.base.log_weight(self.order), 600.0))
        return 0 if error <= math.exp(log_error) else _TOO_MANY

    def factor(self, step: float, size: int) -> Factor:
        z = np.empty(size, np.complex128)
        z.real, z.imag = self.order, step * np.arange(size, dtype=float)
        log, relative = self.base.along(z)
        first = min(float(relative[0]), 0.5)  # a larger one certifies nothing: see below
        wrong = (relative + first) / (1 - first)
        return Factor(log - log[0], wrong if first < 0.5 else np.full(size, math.inf))


@lru_cache(maxsize=16)
def _series_model(law: Sampled, n_terms: int, cut: float) -> SeriesModel:
    """Return a model that other numbers of steps may share; its moments are computed once."""
    assert isinstance(law.noise, Normal)
    return SeriesModel(law, _expansion(law.rate, law.noise.sigma, n_terms, cut))


_expansion = lru_cache(maxsize=16)(Expansion)


@lru_cache(maxsize=16)
def _best_number(size: float, sigma: float) -> tuple[int, float]:
    """Return a number of terms, and about the log of the remainder if |w| times the rate is `size`.

    It is the same in both directions of comparison.
    """
    moments = np.maximum(_central_moments(math.expm1(1 / sigma**2))[_NUMBERS], 1e-300)
    logs = _NUMBERS * math.log(size) + np.log(moments) - _LOG_FACTORIAL[_NUMBERS]
    best = int(np.argmin(logs))
    return int(_NUMBERS[best]), float(logs[best])


_NUMBERS = np.arange(4, _MOST_TERMS + 1, 2)  # of terms
_LOG_FACTORIAL: Floats = np.array([math.lgamma(k + 1) for k in range(_MOST_TERMS + 1)])


@lru_cache(maxsize=16)
def _central_moments(h: float) -> Floats:
    """Return E[(X - 1)^k] for k up to the largest number of terms, X lognormal of variance h."""
    table = _graph_counts()
    powers: Floats = h ** np.arange(table.shape[1], dtype=float)
    return table @ powers


@cache
def _graph_counts() -> Floats:
    """Return N(k, m), the number of graphs with m edges on k labeled vertices, none isolated.

    A graph on k vertices is one without isolated vertices on some of them, so the numbers
    binomial(k (k - 1) / 2, m) of all graphs are the sums over i of binomial(k, i) N(i, m).
    """
    edges = _MOST_TERMS * (_MOST_TERMS - 1) // 2
    counts: list[list[int]] = []
    for k in range(_MOST_TERMS + 1):
        pairs = k * (k - 1) // 2
        row = [math.comb(pairs, m) for m in range(pairs + 1)]
        for i, fewer in enumerate(counts):
            times = math.comb(k, i)
            for m, count in enumerate(fewer):
                row[m] -= times * count
        counts.append(row)
    table = np.zeros((len(counts), edges + 1))
    for k, row in enumerate(counts):
        table[k, : len(row)] = row
    return table
