"""Steps whose loss alone exceeds epsilon: their share of delta is a closed form.

If sampling is rare, the total loss has two scales: hardly any loss if no step drew the record, and
a long tail of single steps with a large loss. Moments of such a tail exist at low orders only. So
outputs with a loss above a `level` > epsilon are *marked*. With P and Q the laws of all steps
together,

    delta(epsilon)  =  delta of unmarked runs  +  sum of (P - exp(epsilon) Q)_+ over marked runs.

The first term is a contour integral over laws without a tail. The second is at least

    D  =  P(some step is marked) - exp(epsilon) Q(some step is marked),

a closed form, because x_+ >= x. It is at most D + exp(epsilon) Q(some step is marked, and the total
loss is below epsilon), because x_+ - x = (-x)_+ <= exp(epsilon) Q where P < exp(epsilon) Q, and is
0 elsewhere. For the last event, let step i be a marked one. Its loss is above `level`, so the
losses of all other steps sum to less than epsilon - level < 0. These are independent of step i, and
by Markov's inequality, for each order m > 0,

    Q(sum of other losses < epsilon - level)  <=  exp(m (epsilon - level)) prod E_Q[exp(-m loss)],

where each factor is at least 1 by Jensen's inequality, since E_Q[exp(loss)] = 1; so the product may
run over all steps. The sum of Q(step i is marked) over all steps bounds the rest.

**The factors.** For a record that is removed, exp(loss) = 1 + x with x = rate (exp(u) - 1) >= -rate
and E_Q[x] = 0. By Taylor's theorem, (1 + x)^-m - 1 + m x is at most m (m + 1) x^2 / 2 for x >= 0,
and also at most m x; for x < 0 it is at most m (m + 1) x^2 / 2 (1 - rate)^(-m - 2). So E_Q[exp(-m
loss)] - 1 is bounded by partial moments of the lognormal variable exp(u).
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from tacit._arrays import Floats
from tacit.accounting.brackets import Bracket
from tacit.accounting.pld.loss_laws import Discrete, Law, Normal, Sampled, Shifted
from tacit.accounting.pld.pairs import Direction
from tacit.accounting.pld.spread import bounded_moments
from tacit.accounting.pld.transforms import LOG_CONSTANT, ORDERS, PlainModel
from tacit.errors import NotCertified

_DEPTHS = np.concatenate((np.linspace(0.1, 4.0, 14), np.linspace(4.5, 90.0, 50)))
"""Negative logs of the bounds on low losses for which levels are tried."""
_MARGIN = 1.15  # what is known at `epsilon` is known up to 0.13 of the way to the level
_CLOSEST = 0.1  # smallest distance of a level from epsilon, as a share of epsilon


class Mark(NamedTuple):
    """A mark on the outputs y above `cut` of a law, and its probabilities in one step."""

    law: Sampled
    times: int
    cut: float
    q: float  # probability of a mark under Q
    gap: float  # probability under P minus that under Q, without cancellation


class LargeLosses:
    """What runs with a loss above `level` add to delta(epsilon), for one direction of comparison.

    `lows` bounds the probability of very low losses.
    """

    def __init__(self, direction: Direction, level: float, lows: "Lows") -> None:
        self.level = level
        self.lows = lows
        laws = [(law, n) for law, n in direction.parts if has_tail(law)]
        self.marks = [_mark(law, n, level) for law, n in laws if isinstance(law, Sampled)]
        if not self.marks or not all(math.isfinite(mark.cut) for mark in self.marks):
            raise NotCertified("no output has such a loss.")

    @property
    def typical_low(self) -> float:
        """About the size of the total loss that is not exceptional."""
        return float(((self.lows.log_moment + 2.0) / ORDERS).min()) / 2

    def delta(self, epsilon: float) -> Bracket:
        """Return bounds on what runs with a mark add to delta(epsilon)."""
        log_none_q = math.fsum(m.times * math.log1p(-m.q) for m in self.marks)
        # P(no mark) / Q(no mark), whose logarithm keeps its digits
        log_ratio = math.fsum(m.times * math.log1p(-m.gap / (1 - m.q)) for m in self.marks)
        some_q = -math.expm1(log_none_q)
        first = -math.exp(log_none_q) * math.expm1(log_ratio)
        second = math.expm1(min(epsilon, 700.0)) * some_q
        error = 1e-12 * (first + second)
        low = float(self.lows.probability(np.array([self.level - epsilon]))[0])
        marked = math.fsum(m.times * m.q for m in self.marks)
        slack = math.exp(min(epsilon, 700.0)) * marked * low * (1 + 1e-9)
        return Bracket(first - second - error, first - second + error + slack)


def mark_losses(direction: Direction, epsilon: float, most: float) -> LargeLosses:
    """Return the lowest marks above `epsilon` whose share of delta is known up to `most`.

    Raises `NotCertified` if there are none.
    """
    if not any(has_tail(law) for law, _ in direction.parts):
        raise NotCertified("no step has losses that could be marked.")
    lows = _lows(direction, 40 * epsilon, math.log(most) - 14)
    # The distances at which low losses have probability exp(-depth) by Markov's inequality.
    distances = ((lows.log_moment[:, None] + _DEPTHS) / ORDERS[:, None]).min(axis=0)
    levels = epsilon + _MARGIN * np.maximum(distances, _CLOSEST * epsilon)
    marked = np.zeros(len(levels))
    for law, count in direction.parts:
        if isinstance(law, Sampled) and has_tail(law):
            marked += count * law.cells(levels)[1][1:][::-1].cumsum()[::-1]
    slack = math.exp(min(epsilon, 700.0)) * lows.probability((levels - epsilon) / _MARGIN) * marked
    fits = np.flatnonzero(slack <= most)
    if len(fits) == 0:
        raise NotCertified("the losses of other steps are not small enough.")
    return LargeLosses(direction, float(levels[fits[0]]), lows)


def has_tail(law: Law) -> bool:
    """Return whether `law` is that of Gaussian noise on a sample with unbounded losses."""
    return isinstance(law, Sampled) and isinstance(law.noise, Normal) and law.a == 1


def _mark(law: Sampled, count: int, level: float) -> Mark:
    """Return a mark on losses above `level`."""
    assert isinstance(law.noise, Normal)
    at, shift = float(law.where_loss(np.array(level))) / law.noise.sigma, 1 / law.noise.sigma
    # Under P, y is normal around 0 or, sampled, around 1 / sigma; under Q around 0 or -1 / sigma.
    more = law.rate * _between(at - shift, at)
    less = law.b * law.rate * _between(at, at + shift)
    return Mark(law, count, at, float(ndtr(-at)) - less, more + less)


def _between(low: float, high: float) -> float:
    return float(Normal(1.0).between(np.array(low), np.array(high)))


class Lows(NamedTuple):
    """Bounds on E_Q[exp(-order * total loss)] at `ORDERS`, as logarithms of at least 0.

    They hold up to a probability of `leak`.
    """

    log_moment: Floats
    leak: float

    def probability(self, distance: Floats) -> Floats:
        """Bound the probability under Q that the total loss is below -distance."""
        logs = (self.log_moment - np.multiply.outer(distance, ORDERS)).min(axis=1)
        return np.exp(np.minimum(logs, 0.0)) + self.leak


def _lows(direction: Direction, lowest: float, log_leak: float) -> Lows:
    """Return bounds on the low losses of `direction`: moments of the reversed pairs.

    A law without a closed form counts losses below -`lowest` as -`lowest`, and leaves out a mass
    of about exp(log_leak).
    """
    log_m, leak = np.zeros(len(ORDERS)), 0.0
    with np.errstate(over="ignore"):
        for law, count in direction.parts:
            if isinstance(law, Shifted):
                log_m += count * PlainModel(law.mu**2).moments().upper
            elif isinstance(law, Sampled) and isinstance(law.noise, Normal) and law.b == 0:
                log_m += count * log_moments_if_added(law.rate, law.noise.sigma)
            elif isinstance(law, Sampled):
                reverse = Sampled(law.noise, law.rate, law.b, law.a)
                log_each = log_leak - math.log(direction.steps)
                found, above = bounded_moments(reverse, -lowest, log_each)
                log_m += count * np.maximum(found.upper, 0.0)
                leak += count * above
            elif isinstance(law, Discrete):
                log_m -= count * ORDERS * min(law.losses)
            else:
                raise NotCertified("how low the losses can be is not known.")
    return Lows(log_m, leak)


def chernoff_if_added(direction: Direction, delta: float) -> float:
    """Return a bound on epsilon at `delta` in closed form, if a record is added; else infinity.

    It is a Chernoff bound, sharp enough to show that adding a record costs less than removing one
    if sampling is rare.
    """
    log_m = np.zeros(len(ORDERS))
    with np.errstate(over="ignore"):
        for law, count in direction.parts:
            if isinstance(law, Shifted):
                log_m += count * PlainModel(law.mu**2).moments().upper
            elif (
                isinstance(law, Sampled)
                and isinstance(law.noise, Normal)
                and law.a == 0
                and law.rate < 1
            ):
                log_m += count * log_moments_if_added(law.rate, law.noise.sigma)
            else:
                return math.inf
    bounds = (log_m + LOG_CONSTANT - math.log(delta)) / ORDERS
    return max(float(bounds.min()), 0.0) * (1 + 1e-12)


def log_moments_if_added(rate: float, sigma: float) -> Floats:
    """Bound log E_Q[exp(-order * loss)] at `ORDERS` if a record is removed (module docstring).

    These are the moments of the loss if a record is added.
    """
    curve = 0.5 * ORDERS * (ORDERS + 1) * rate**2
    steepest = np.exp(-(ORDERS + 2) * math.log1p(-rate))  # infinite if it overflows
    lowest = -ORDERS * math.log1p(-rate)  # no loss is below log(1 - rate)
    if 600 * sigma**2 < 1:
        return lowest * (1 + 1e-12)
    if sigma >= 2:  # all of E[(exp(u) - 1)^2], which has a closed form without cancellation
        growth = curve * steepest * math.expm1(1 / sigma**2)
    else:
        below = _partial(np.zeros(1), sigma)
        small = float(below[2, 0] - 2 * below[1, 0] + below[0, 0]) + 1e-12
        most = np.log1p(2 / ((ORDERS + 1) * rate))  # where m x meets m (m + 1) x^2 / 2
        upto = _partial(most, sigma) - below
        middle = upto[2] - 2 * upto[1] + upto[0] + 1e-12 * (1 + upto[2])
        high = ndtr(1 / sigma - most * sigma - 0.5 / sigma) - ndtr(-most * sigma - 0.5 / sigma)
        growth = curve * (steepest * small + middle) + ORDERS * rate * (high + 1e-15)
    return np.minimum(np.log1p(growth), lowest) * (1 + 1e-12) + 1e-18


def _partial(most: Floats, sigma: float) -> Floats:
    """Return E[exp(k u); u <= most] for k = 0, 1, 2; u is N(-1 / (2 sigma^2), 1 / sigma^2)."""
    at = sigma * most + 0.5 / sigma
    whole = (1.0, 1.0, math.exp(1 / sigma**2))  # without the restriction on u
    return np.array([whole[k] * ndtr(at - k / sigma) for k in range(3)])
