"""Gaussian differential privacy: exact for Gaussian noise, and a central limit approximation.

Any composition of Gaussian releases is one Gaussian release with shift mu (in standard deviations),
mu^2 = sum of 1 / noise_multiplier^2, and its (epsilon, delta) curve is a closed form: Balle & Wang
2018, Thm. 8 (arXiv:1805.06530); Dong, Roth & Su 2022, Cor. 1 (arXiv:1905.02383).
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from tacit._check import in_open_unit, non_negative
from tacit.accounting.compose import flatten
from tacit.accounting.one_event import ADD_REMOVE, gaussian_shift
from tacit.errors import UnsupportedEvent
from tacit.events import Event, Gaussian, PoissonSampled, Relation

_ULP = 3e-16
_SMALL = 0.5
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)


@dataclass(frozen=True)
class GDP:
    """Exact accountant for compositions of Gaussian releases; other events are unsupported.

    >>> from tacit.events import Repeated
    >>> round(GDP().epsilon(Repeated(Gaussian(4.0), 16), delta=1e-5), 4)
    4.3772
    """

    def mu(self, event: Event, *, relation: Relation = ADD_REMOVE) -> float:
        """Return mu such that `event` is equivalent to N(mu, 1) against N(0, 1)."""
        relation = Relation(relation)
        squares: list[float] = []
        for part, count in flatten(event).items():
            if not isinstance(part, Gaussian):
                raise UnsupportedEvent(
                    f"GDP is exact for Gaussian noise only, not for {type(part).__name__}. Use PLD."
                )
            squares.append(count * gaussian_shift(part, relation) ** 2)
        return _root_of_sum(squares)

    def epsilon(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> float:
        """Return the epsilon of `event` at `delta`: the exact value, rounded up."""
        return gaussian_epsilon(self.mu(event, relation=relation), delta)

    def delta(self, event: Event, *, epsilon: float, relation: Relation = ADD_REMOVE) -> float:
        """Return the delta of `event` at `epsilon`: the exact value, rounded up."""
        return gaussian_delta(self.mu(event, relation=relation), epsilon)


@dataclass(frozen=True)
class CentralLimitGDP:
    """Approximate value for many Poisson-sampled Gaussian steps. NOT a guarantee.

    In the limit of many steps at small rates, the steps together are mu-GDP with
    mu = rate sqrt(steps (exp(1 / noise^2) - 1)): Bu, Dong, Long & Su 2020 (arXiv:1911.11607).
    For finitely many steps the value is often *below* the truth (0.9424
    instead of 0.9469 in the example of Abadi et al. 2016), so it must never be stated as a privacy
    price.

    >>> from tacit.events import Repeated
    >>> run = Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000)
    >>> round(CentralLimitGDP().epsilon(run, delta=1e-5), 4)
    0.9424
    """

    def mu(self, event: Event, *, relation: Relation = ADD_REMOVE) -> float:
        """Return mu such that the steps of `event` are approximately N(mu, 1) against N(0, 1)."""
        if Relation(relation) is Relation.REPLACE_ONE:
            raise UnsupportedEvent("the central limit is known here for add_remove and zero_out.")
        squares: list[float] = []
        for part, count in flatten(event).items():
            if isinstance(part, Gaussian):
                squares.append(count / part.noise_multiplier**2)
            elif isinstance(part, PoissonSampled) and isinstance(part.event, Gaussian):
                exponent = part.event.noise_multiplier**-2
                square = math.expm1(exponent) if exponent < 700 else math.inf
                squares.append(count * part.rate**2 * square)
            else:
                raise UnsupportedEvent(
                    f"the central limit is known for Gaussian steps, not {type(part).__name__}."
                )
        return _root_of_sum(squares)

    def epsilon(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> float:
        """Return an approximate epsilon at `delta`: neither an upper nor a lower bound."""
        mu = self.mu(event, relation=relation)
        return math.inf if math.isinf(mu) else gaussian_epsilon(mu, delta)

    def delta(self, event: Event, *, epsilon: float, relation: Relation = ADD_REMOVE) -> float:
        """Return an approximate delta at `epsilon`: neither an upper nor a lower bound."""
        mu = self.mu(event, relation=relation)
        return 1.0 if math.isinf(mu) else gaussian_delta(mu, epsilon)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the delta at `epsilon` between N(mu, 1) and N(0, 1), rounded up.

    The result is accurate also where it is tiny.

    >>> round(gaussian_delta(1.0, 1.0), 6)
    0.126937
    """
    return _delta(non_negative(mu=mu), non_negative(epsilon=epsilon))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon at `delta` between N(mu, 1) and N(0, 1), rounded up.

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    mu, delta = non_negative(mu=mu), in_open_unit(delta=delta)
    if _delta(mu, 0.0) <= delta:
        return 0.0
    high = mu * (mu / 2 + math.sqrt(-2 * math.log(delta)))
    if math.isinf(high):
        return math.inf
    while _delta(mu, high) > delta:  # only where rounding exceeds the slack of the tail bound
        high *= 1 + 1e-9
    return _least_within(mu, delta, high)


def _delta(mu: float, epsilon: float) -> float:
    """Return `gaussian_delta` for arguments that were already checked.

    For a large mu, delta is a difference of two normal tails, both computed as logs. For a small
    mu, this difference would lose digits. Then, with R the Mills ratio and phi the normal density,
    delta = phi(x) (R(-x) - R(mu - x)) at x = mu / 2 - epsilon / mu, and the difference is computed
    as the integral of -R'(t) = 1 - t R(t) > 0.
    """
    if mu == 0:
        return 0.0
    if mu < 1e-300:
        return mu  # delta is at most mu / sqrt(2 pi); epsilon / mu could overflow
    if mu < _SMALL:
        return _small_shift_delta(mu, epsilon)
    x = mu / 2 - epsilon / mu
    first = float(special.log_ndtr(x))
    second = epsilon + float(special.log_ndtr(-mu / 2 - epsilon / mu))
    if first == -math.inf:
        return 0.0
    slack = _ULP * (8 + abs(first))  # logs of this size carry this much error
    size = math.exp(first) * (1 + _ULP * (8 + abs(x) * (mu + epsilon / mu)))
    return min(1.0, size * (-math.expm1(min(second - first, 0.0)) + slack))


def _small_shift_delta(mu: float, epsilon: float) -> float:
    start = epsilon / mu - mu / 2
    if start > 40:
        return 0.0 if start > 1e3 else math.exp(-start * start / 2)  # phi(x) R is less than that
    t = start + mu * (_NODES + 1) / 2
    slope = 1 - t * math.sqrt(math.pi / 2) * special.erfcx(t / math.sqrt(2))
    difference = mu / 2 * float(_WEIGHTS @ slope)
    density = math.exp(-start * start / 2) / math.sqrt(2 * math.pi)
    return density * difference * (1 + _ULP * (100 + 8 * start * start))


def _least_within(mu: float, delta: float, high: float) -> float:
    """Return the least epsilon below `high` at which `gaussian_delta` is at most `delta`.

    It is found by secant steps. It is too large by at most 1e-14 mu plus 1e-13 of itself, which is
    less than the effect of rounding delta.
    """

    def excess(epsilon: float) -> float:
        found = _delta(mu, epsilon)
        return math.log(found / delta) if found > 0 else -1e3

    low, at_low, at_high, last, steps = 0.0, excess(0.0), excess(high), 0, 0
    while high - low > 1e-13 * high + 1e-14 * mu:
        steps += 1
        is_noise = steps > 20 or not at_low > at_high  # rounding misleads a secant: halve instead
        share = 0.5 if is_noise else at_low / (at_low - at_high)
        middle = low + (high - low) * min(max(share, 1e-4), 1 - 1e-4)
        found = excess(middle)
        if found > 0:
            # The Illinois rule: an end that stays twice is drawn towards the root.
            at_high = at_high / 2 if last > 0 else at_high
            low, at_low, last = middle, found, 1
        else:
            at_low = at_low / 2 if last < 0 else at_low
            high, at_high, last = middle, found, -1
    return high


def _root_of_sum(squares: list[float]) -> float:
    return math.sqrt(math.fsum(squares)) * (1 + 1e-15)
