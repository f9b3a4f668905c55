"""Steps whose loss alone exceeds epsilon: their share of delta is a closed form.

If sampling is rare, the total loss has two scales: hardly any loss if no step drew the record, and
a long tail of single steps with a large loss. Moments of such a tail exist at low orders only. So
outputs with a large loss are *marked*: an output y is marked with probability
Phi((y - cut) / width). The mark is a random function of the output, so it changes no divergence.
With P and Q the laws of all steps together,

    delta(epsilon)  =  delta of unmarked runs  +  sum of (P - exp(epsilon) Q)_+ over marked runs.

The first term is a contour integral over laws without a tail. The second is at least

    D  =  P(some step is marked) - exp(epsilon) Q(some step is marked),

a closed form, and at most D + exp(epsilon) Q(some step is marked, and the total loss is below
epsilon). That last probability is tiny: a marked loss is almost surely above a `level` well above
epsilon, so the losses of all other steps would have to sum to less than epsilon - level. It is
bounded by Chernoff under Q, from the moments of the reversed pair.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from tacit._arrays import Floats
from tacit.accounting.brackets import Bracket
from tacit.accounting.pld.loss_laws import Capped, Discrete, Law, Normal, Sampled, Shifted
from tacit.accounting.pld.pairs import Direction
from tacit.accounting.pld.sampled_gaussian_contour import WIDE, SmoothModel
from tacit.accounting.pld.spread import bounded_moments
from tacit.accounting.pld.transforms import ORDERS, PlainModel
from tacit.errors import NotCertified

_WIDTH = 1 / 30
"""Width of the mark in units of sigma: narrow, so that the orders of interest have moments."""


class Mark(NamedTuple):
    """A mark on the outputs y above `cut` of a law, and its probabilities in one step."""

    law: Sampled
    times: int
    cut: float
    width: float
    q: float  # probability of a mark under Q
    gap: float  # probability under P minus that under Q, without cancellation


class LargeLosses:
    """What marked runs add to delta(epsilon), for one direction of comparison.

    Marked are losses above `level`, sharply or, if `is_smooth`, with a width such that all but a
    probability of about exp(log_small) of marked losses are above `level`.
    """

    def __init__(
        self, direction: Direction, level: float, log_small: float, *, is_smooth: bool
    ) -> None:
        self.direction = direction
        self.level = level
        if level <= 0 or not any(has_tail(law) for law, _ in direction.parts):
            raise NotCertified("no step has losses that could be marked.")
        far = math.sqrt(max(-2 * (log_small - math.log(direction.steps)), 1.0)) * is_smooth
        laws = [(law, n) for law, n in direction.parts if has_tail(law)]
        self.marks = [_mark(law, n, level, far) for law, n in laws if isinstance(law, Sampled)]
        if not all(math.isfinite(mark.cut) for mark in self.marks):
            raise NotCertified("no output has such a loss.")
        self.stray = float(ndtr(-far)) * sum(mark.times for mark in self.marks) * is_smooth
        self.log_rest, self.leak = _low_sums(direction, level, log_small)

    def models(self) -> dict[Sampled, SmoothModel]:
        """Return the laws of unmarked losses for the contour method; the mark must be smooth."""
        return {mark.law: SmoothModel(mark.law, mark.cut, mark.width) for mark in self.marks}

    def unmarked(self) -> Direction:
        """Return the direction of unmarked losses for the lattice method; the mark is sharp."""
        parts = self.direction.parts
        capped = [
            (Capped(law, self.level) if isinstance(law, Sampled) and has_tail(law) else law, n)
            for law, n in parts
        ]
        return Direction(tuple(capped))

    def delta(self, epsilon: float) -> Bracket:
        """Return bounds on what runs with a mark add to delta(epsilon)."""
        log_none_q = math.fsum(m.times * math.log1p(-m.q) for m in self.marks)
        # P(no mark) / Q(no mark), whose logarithm keeps its digits
        log_ratio = math.fsum(m.times * math.log1p(-m.gap / (1 - m.q)) for m in self.marks)
        some_q = -math.expm1(log_none_q)
        first = -math.exp(log_none_q) * math.expm1(log_ratio)
        second = math.expm1(min(epsilon, 700.0)) * some_q
        error = 1e-12 * (first + second)
        logs = self.log_rest + ORDERS * (epsilon - self.level)
        low = math.exp(min(float(np.min(logs)), 0.0)) + self.leak
        slack = math.exp(min(epsilon, 700.0)) * (some_q * low + self.stray)
        return Bracket(first - second - error, first - second + error + slack)


def has_tail(law: Law) -> bool:
    """Return whether `law` is that of Gaussian noise on a sample with unbounded losses."""
    return isinstance(law, Sampled) and isinstance(law.noise, Normal) and law.a == 1


def _mark(law: Sampled, count: int, level: float, far: float) -> Mark:
    """Return a mark on losses above `level`, smooth over `far` widths if `far` is above 0."""
    assert isinstance(law.noise, Normal)
    sigma = law.noise.sigma
    # Orders of interest are about 45 / level. Far above the cut, where losses exceed 1, the share
    # of unmarked outputs must fall faster than exp(order * loss) grows.
    steep = max(-math.log(level), 1.0) * math.sqrt(level / 400)
    width = min(sigma * min(_WIDTH, steep), WIDE) if far else 0.0
    cut = float(law.where_loss(np.array(level))) / sigma + far * width
    spread = math.hypot(1.0, width)
    at, shift = cut / spread, 1 / (sigma * spread)
    # Under P, y is normal around 0 or, sampled, around 1 / sigma; under Q around 0 or -1 / sigma.
    more = law.rate * _between(at - shift, at)
    less = law.b * law.rate * _between(at, at + shift)
    return Mark(law, count, cut, width, float(ndtr(-at)) - less, more + less)


def _between(low: float, high: float) -> float:
    return float(Normal(1.0).between(np.array(low), np.array(high)))


def _low_sums(direction: Direction, level: float, log_small: float) -> tuple[Floats, float]:
    """Return the logs of bounds of E_Q[exp(-order * total loss)] at `ORDERS`.

    Also return the mass for which they do not hold. They are moments of the reversed pairs.
    """
    log_each = log_small - math.log(direction.steps)
    log_m, leak = np.zeros(len(ORDERS)), 0.0
    for law, count in direction.parts:
        if isinstance(law, Shifted):
            log_m += count * PlainModel(law.mu**2).moments(count).upper
        elif isinstance(law, Sampled):
            reverse = Sampled(law.noise, law.rate, law.b, law.a)
            found, above = bounded_moments(reverse, -4 * level, log_each)
            log_m += count * found.upper
            leak += count * above
        elif isinstance(law, Discrete):
            log_m -= count * ORDERS * min(law.losses)
        else:
            raise NotCertified("how low the losses can be is not known.")
    return log_m, leak
