"""Laws of the runs of a search: how many there are, with which configurations, and their event.

`RandomRuns` stops at random: the number of runs is drawn from a public law, the configuration of
each run uniformly and with replacement, and only the best run is paid for (`events.BestOf`).
`EveryConfiguration` tries each configuration once and pays for all runs, as if all were released.
Both draw everything before the first run, independently of the data.
"""

import math
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tacit._check import whole
from tacit.accounting import GDP, calibrate, gaussian_epsilon, run_law
from tacit.accounting import epsilon as price_of
from tacit.events import BestOf, Event, Gaussian, OneOf, Sequence, Trials
from tacit.mechanisms import Rng

_BLOCK = 1024  # numbers of runs whose probabilities are computed at once
_HALVING = 0.1
"""Ranks, as a share of all configurations, that are worth one halving of the budget of a run."""
_MEANS = {1.0: (3.0, 10.0, 30.0), 3.0: (10.0, 20.0)}  # mean numbers of runs tried, by shape
_MOST_COMPOSED = 64


class Runs(Protocol):
    """Protocol of the laws of the runs of a search."""

    def event(self, parts: SequenceOf[Event]) -> Event:
        """Return the event of the search; `parts` are those of a run with each configuration."""
        ...

    def draw(self, n_configurations: int, rng: Rng) -> list[int]:
        """Draw the configuration of every run, as indices; there may be no run."""
        ...

    def describe(self) -> str:
        """Return the law in words, for reports."""
        ...


@dataclass(frozen=True, kw_only=True)
class RandomRuns:
    """A random number of runs, of which the best is released; see `events.BestOf` for the laws.

    `most` truncates the law, which limits computing time; the truncated law is the one that is
    priced. Poisson and binomial laws may give no run: then nothing is released.

    >>> RandomRuns(mean=10.0).describe()
    'best of a random number of runs (geometric, mean 10)'
    """

    mean: float = 30.0
    trials: Trials | str = Trials.GEOMETRIC
    shape: float | None = None
    most: int | None = None

    def event(self, parts: SequenceOf[Event]) -> BestOf:
        """Return the event of the best run.

        A run draws one of the configurations uniformly, so its event is one of `parts` at random.
        """
        trials = Trials(self.trials)
        return BestOf(_one_of(parts), self.mean, trials, shape=self.shape, most=self.most)

    def draw(self, n_configurations: int, rng: Rng) -> list[int]:
        """Draw the number of runs, then a configuration for each, uniformly with replacement."""
        count = self._count(float(rng.random()))
        return [int(i) for i in rng.integers(0, n_configurations, count)]

    def expected_rank(self) -> float:
        """Return the mean share of configurations that are better than the best one drawn.

        Of k uniform draws, the best leaves a share of 1 / (k + 1) above it on average.
        """
        total, left, start = 0.0, 1.0, 0
        while left > 1e-9 and start < 1e6:
            k, p = self._probabilities(start)
            total, left, start = (
                total + float(p @ (1 / (k + 1))),
                left - float(p.sum()),
                start + len(k),
            )
        return total + max(left, 0.0) / (start + 1)

    def describe(self) -> str:
        """Return the law in words, for reports."""
        name = str(Trials(self.trials)).replace("_", " ")
        shape = "" if self.shape is None else f" of shape {self.shape:g}"
        most = "" if self.most is None else f", at most {self.most:,}"
        return f"best of a random number of runs ({name}{shape}, mean {self.mean:g}{most})"

    def _count(self, uniform: float) -> int:
        """Return the number of runs at the share `uniform` of the law: its quantile function."""
        start, below, last = 0, 0.0, 0
        while True:
            k, p = self._probabilities(start)
            cumulative = below + np.cumsum(p)
            if cumulative[-1] > uniform:
                return int(k[int(np.searchsorted(cumulative, uniform, "right"))])
            if below == cumulative[-1] > 0:  # the rest of the law is below the rounding of floats
                return last
            last = int(k[p > 0][-1]) if (p > 0).any() else last
            start, below = start + len(k), float(cumulative[-1])

    def _probabilities(self, start: int) -> tuple[Any, Any]:  # Any: arrays of floats
        law = run_law(self.event((Gaussian(1.0),)))
        k = np.arange(start, start + _BLOCK, dtype=float)
        with np.errstate(divide="ignore", invalid="ignore"):
            p = np.exp(law.log_probability(np.minimum(k, law.most)))
        return k, np.where(k <= law.most, p, 0.0)


@dataclass(frozen=True)
class EveryConfiguration:
    """One run for each configuration, all of them paid for: cheap for few configurations.

    >>> EveryConfiguration().describe()
    'every configuration once, all runs paid for'
    """

    def event(self, parts: SequenceOf[Event]) -> Event:
        """Return the sequence of all runs."""
        return Sequence(tuple(parts))

    def draw(self, n_configurations: int, rng: Rng) -> list[int]:  # noqa: ARG002  # of the protocol
        """Return every configuration once."""
        return list(range(n_configurations))

    def describe(self) -> str:
        """Return the law in words, for reports."""
        return "every configuration once, all runs paid for"


def choose_runs(
    n_configurations: int,
    *,
    epsilon: float,
    delta: float,
    most: int | None = None,
) -> Runs:
    """Return the law of runs for a search, from public facts alone.

    Each law is judged by two numbers: the expected share of configurations that are better than the
    chosen one, and how often the budget has to be halved to leave one run's share of it. One
    halving counts as much as a tenth of the configurations. Prices are those of Gaussian runs.
    `most` limits the number of runs.

    >>> choose_runs(3, epsilon=1.0, delta=1e-6)
    EveryConfiguration()
    >>> choose_runs(48, epsilon=1.0, delta=1e-6).mean
    20.0
    """
    n_configurations = whole(n_configurations=n_configurations, least=1)
    regrets: list[tuple[float, int, Runs]] = []
    if n_configurations <= min(_MOST_COMPOSED, math.inf if most is None else most):
        alone = calibrate(Gaussian, epsilon=epsilon, delta=delta, accountant=GDP(), relative=1e-4)
        one = gaussian_epsilon(1 / (alone * math.sqrt(n_configurations)), delta=delta)
        regrets.append((_HALVING * math.log2(epsilon / one), 0, EveryConfiguration()))
    near = 0.6 * epsilon  # about what a run may cost: ratios of prices hardly depend on it
    run = Gaussian(calibrate(Gaussian, epsilon=near, delta=delta, accountant=GDP(), relative=1e-4))
    for law in _candidates(most):
        ratio = price_of(law.event((run,)), delta=delta) / near
        regret = law.expected_rank() + _HALVING * math.log2(ratio)
        regrets.append((regret, len(regrets), law))
    return min(regrets)[2]


def _candidates(most: int | None) -> list[RandomRuns]:
    found = []
    for shape, means in _MEANS.items():
        for mean in means:
            trials = Trials.GEOMETRIC if shape == 1 else Trials.NEGATIVE_BINOMIAL
            given = None if shape == 1 else shape
            found.append(RandomRuns(mean=mean, trials=trials, shape=given, most=most))
    return found


def _one_of(parts: SequenceOf[Event]) -> Event:
    """Return the event of one part drawn uniformly; equal parts are joined."""
    counts = Counter(parts)
    if len(counts) == 1:
        return parts[0]
    weights = tuple(count / len(parts) for count in counts.values())
    return OneOf(tuple(counts), weights)
