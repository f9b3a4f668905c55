"""Laws of the random number of runs in `BestOf`: probabilities, means and generating functions.

Of a number K of runs, the price of releasing the best one depends only on f'(x) = E[K x^(K-1)], the
derivative of the generating function f(x) = E[x^K]: a run with a better score than a share x of
all runs is released with density f'(x). f' never falls, and f'(1) = E[K].
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from scipy import special

from tacit import events as ev
from tacit._arrays import Floats
from tacit._check import MOST
from tacit.errors import UnsupportedEvent
from tacit.events import Trials

_MOST_TERMS = 100_000  # longest sum of a truncated law


class RunLaw(Protocol):
    """Protocol of the laws of a number K of runs, drawn independently of the data."""

    @property
    def mean(self) -> float:
        """Mean number of runs, E[K] = f'(1)."""
        ...

    @property
    def most(self) -> float:
        """Largest possible number of runs; infinity if there is none."""
        ...

    def log_slope(self, x: Floats) -> Floats:
        """Return log f'(x) for shares x in [0, 1], with a relative error of f' below 1e-11."""
        ...

    def log_probability(self, k: Floats) -> Floats:
        """Return log P(K = k) for whole numbers k >= 0."""
        ...


@dataclass(frozen=True)
class PoissonRuns:
    """Poisson number of runs; it may be 0."""

    mean: float

    most = math.inf

    def log_slope(self, x: Floats) -> Floats:
        return math.log(self.mean) - self.mean * (1 - x)

    def log_probability(self, k: Floats) -> Floats:
        return k * math.log(self.mean) - self.mean - special.gammaln(k + 1)


@dataclass(frozen=True)
class NegativeBinomialRuns:
    """Negative binomial number of runs given that it is at least 1, with shape > -1.

    P(K = k) is proportional to (1 - halting)^k Gamma(k + shape) / k! for k >= 1. Shape 1 is the
    geometric law, shape 0 the logarithmic one (Papernot & Steinke 2022, arXiv:2110.03620, Def. 1).
    """

    mean: float
    shape: float
    halting: float

    most = math.inf

    def log_slope(self, x: Floats) -> Floats:
        g = self.halting
        stay = np.log(g + (1 - g) * (1 - x))  # 1 - (1 - g) x
        return math.log(self.mean) + (self.shape + 1) * (math.log(g) - stay)

    def log_probability(self, k: Floats) -> Floats:
        g, h = self.halting, self.shape
        if h == 0:
            log_scale = -math.log(-math.log(g))
        else:
            y = -h * math.log(g)  # log |exp(y) - 1|, without overflow
            log_scale = -special.gammaln(h) - max(y, 0.0) - math.log(-math.expm1(-abs(y)))
        logs = special.gammaln(k + h) - special.gammaln(k + 1) + k * math.log1p(-g) + log_scale
        return np.where(k >= 1, logs, -math.inf)


@dataclass(frozen=True)
class BinomialRuns:
    """Number of successes in `most` tries; with probability 1 it is the fixed number `most`."""

    most: int
    probability: float

    @property
    def mean(self) -> float:
        return self.most * self.probability

    def log_slope(self, x: Floats) -> Floats:
        p = self.probability
        with np.errstate(divide="ignore"):  # no run: log 0
            hit = np.log1p(-p * (1 - x)) if p < 1 else np.log(x)
        rest = np.zeros(len(hit)) if self.most == 1 else (self.most - 1) * hit
        return math.log(self.mean) + rest

    def log_probability(self, k: Floats) -> Floats:
        n, p = self.most, self.probability
        choose = special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
        return choose + special.xlogy(k, p) + special.xlog1py(n - k, -p)


class TruncatedRuns:
    """The law `whole` given that there are at most `most` runs."""

    def __init__(self, whole: RunLaw, most: int) -> None:
        if most > _MOST_TERMS:
            raise UnsupportedEvent(f"a truncated law has a price up to most = {_MOST_TERMS:,}.")
        k = np.arange(most + 1, dtype=float)
        logs = whole.log_probability(k)
        self.log_p: Floats = logs - np.logaddexp.reduce(logs)
        self.most = most
        self._terms = k * np.exp(self.log_p)  # k P(K = k)
        self.mean = math.fsum(self._terms)

    def log_slope(self, x: Floats) -> Floats:
        total = np.zeros(len(x))
        for term in self._terms[:0:-1]:  # all terms are >= 0, so no digits are lost
            total = total * x + term
        with np.errstate(divide="ignore"):
            return np.log(total)

    def log_probability(self, k: Floats) -> Floats:
        inside = (k >= 0) & (k <= self.most)
        return np.where(inside, self.log_p[np.where(inside, k, 0).astype(int)], -math.inf)


@lru_cache(maxsize=64)
def run_law(event: ev.BestOf) -> RunLaw:
    """Return the law of the number of runs of `event`, from which a tuner must draw.

    >>> law = run_law(ev.BestOf(ev.PureDP(0.1), 10.0, Trials.GEOMETRIC))
    >>> float(np.exp(law.log_probability(np.array(1.0))).round(12))
    0.1
    """
    law = _whole_law(event)
    is_finite = event.trials in (Trials.BINOMIAL, Trials.FIXED)
    return law if event.most is None or is_finite else TruncatedRuns(law, event.most)


def _whole_law(event: ev.BestOf) -> RunLaw:
    match event.trials:
        case Trials.POISSON:
            return PoissonRuns(event.mean)
        case Trials.FIXED:
            return BinomialRuns(round(event.mean), 1.0)
        case Trials.BINOMIAL:
            most = event.most or MOST
            return BinomialRuns(most, event.mean / most)
        case _:
            shape = shape_of(event)
            return NegativeBinomialRuns(event.mean, shape, halting_probability(event.mean, shape))


def shape_of(event: ev.BestOf) -> float:
    """Return the shape of a negative binomial number of runs: geometric 1, logarithmic 0."""
    if event.trials is Trials.NEGATIVE_BINOMIAL:
        return event.shape or 0.0
    return 1.0 if event.trials is Trials.GEOMETRIC else 0.0


def halting_probability(mean: float, shape: float) -> float:
    """Return the parameter g of a negative binomial number of runs of this `mean` and `shape`.

    With y = log(1 / g), mean = shape (exp(y) - 1) / (1 - exp(-shape y)), or (exp(y) - 1) / y for
    shape 0, and both grow with y. A smaller g costs more, so g is rounded down.

    >>> halting_probability(10.0, 1.0)
    0.1
    """
    if shape == 1.0:
        return 1 / mean
    low, high = 1e-300, 690.0
    if math.expm1(high) / high / float(special.exprel(-shape * high)) < mean:
        raise UnsupportedEvent(
            f"a negative binomial number of runs of mean {mean:g} and shape {shape:g} has no price,"
            " since its tail is too heavy. Choose a larger shape."
        )
    while high - low > 1e-13 * high:
        y = (low + high) / 2
        # exprel(x) = (exp(x) - 1) / x keeps its digits at small shapes and small y.
        found = math.expm1(y) / y / float(special.exprel(-shape * y))
        low, high = (y, high) if found < mean else (low, y)
    return math.exp(-high)


def binomial_weights(n: int, p: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return numbers of successes in `n` tries and their probabilities, which sum to 1.

    Numbers above the one beyond which less than 1e-30 is left count as `n`.

    >>> binomial_weights(2, 0.5)
    ((0.0, 1.0, 2.0), (0.25, 0.5, 0.25))
    """
    k = np.arange(min(n, _MOST_TERMS) + 1, dtype=float)
    logs = BinomialRuns(n, p).log_probability(k)
    kept = int(np.flatnonzero(logs > math.log(1e-30) - math.log(_MOST_TERMS))[-1]) + 1
    counts, weights = k[:kept].tolist(), np.exp(logs[:kept]).tolist()
    if kept <= n:
        counts, weights = [*counts, float(n)], [*weights, 1e-30]
    total = math.fsum(weights)
    return tuple(counts), tuple(weight / total for weight in weights)
