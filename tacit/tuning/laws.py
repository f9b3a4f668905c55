"""Laws of the runs of a search: how many there are, with which configurations, and their event.

`RandomRuns` stops at random: the number of runs is drawn from a public law, the configuration of
each run uniformly and with replacement, and only the best run is paid for (`events.BestOf`).
`EveryConfiguration` tries each configuration once and pays for all runs, as if all were released.
`CheapTrials` pays for trials on a small share of the budget in the same way, and then for one run
of the best configuration, on all records and with the rest of the budget. All laws draw everything
before the first run, independently of the data.
"""

import math
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tacit._check import in_open_unit, positive, whole
from tacit.accounting import GDP, calibrate, gaussian_epsilon, run_law
from tacit.accounting import epsilon as price_of
from tacit.events import BestOf, Event, Gaussian, OneOf, Repeated, Sequence, Trials
from tacit.mechanisms import Rng

_BLOCK = 1024  # numbers of runs whose probabilities are computed at once
_HALVING = 0.01
"""Accuracy that one halving of the budget costs where records abound: one point, as for DP-SGD on
Adult or on images."""
_SCARCE = 170.0
"""Few records lose (this / (records * epsilon))^2 more to noise: linear regression on eight tables
of 250 to 14,000 records, at epsilons from 0.25 to 2."""
_RANK = 0.1
"""Accuracy per rank, as a share of all configurations: the mean one is five points below the best
(Adult, 48 configurations)."""
_UNTUNED, _AUTOMATIC = 0.03, 0.01
"""Accuracy that is lost, at a guess, by the settings of the estimator as given, and if these let it
choose from public facts itself."""
_SHARE = 0.2
"""Share of the squared budget for cheap trials: the best one, given `_ORDER`."""
_ORDER = 0.2
"""What a trial loses by having less budget than the run that follows, as a share of what the run
would lose: the order of configurations changes slowly."""
_MEANS = {1.0: (3.0, 10.0, 30.0), 3.0: (10.0, 20.0)}  # mean numbers of runs tried, by shape
_MOST_COMPOSED = 64
_TRIALS = (4, 8, 16)  # numbers of cheap trials tried, besides one for each configuration


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


@dataclass(frozen=True, kw_only=True)
class CheapTrials:
    """Trials on a small budget, then one run of the best configuration on all records.

    All trials are paid for, and so is the run. There are `count` trials, whose configurations are
    drawn uniformly with replacement; None tries each configuration once. Without trials (0), the
    estimator is run with the settings it was given. `share` is the part of the squared budget,
    mu squared of a Gaussian release, that trials spend.

    >>> CheapTrials(count=8).describe()
    '8 cheap trials, then one run of the best on all records'
    """

    count: int | None = None
    share: float = _SHARE

    def __post_init__(self) -> None:
        if self.count is not None:
            whole(count=self.count)
        in_open_unit(share=self.share)

    def trials(self, n_configurations: int) -> int:
        """Return the number of trials."""
        return n_configurations if self.count is None else self.count

    def event(self, parts: SequenceOf[Event]) -> Event:
        """Return the event of all trials, without the run that follows."""
        if self.count is None:
            return Sequence(tuple(parts))
        return Repeated(_one_of(parts), self.count)

    def draw(self, n_configurations: int, rng: Rng) -> list[int]:
        """Draw the configuration of every trial."""
        if self.count is None:
            return list(range(n_configurations))
        return [int(i) for i in np.atleast_1d(rng.integers(0, n_configurations, self.count))]

    def describe(self) -> str:
        """Return the law in words, for reports."""
        if self.count == 0:
            return "no trials, for lack of records or runs; one run with the settings as given"
        trials = (
            "a cheap trial of each configuration"
            if self.count is None
            else (f"{self.count} cheap trials")
        )
        return f"{trials}, then one run of the best on all records"


def choose_runs(
    n_configurations: int,
    *,
    epsilon: float,
    delta: float,
    most: int | None = None,
    n_scoring: float = math.inf,
    holdout: float = 0.0,
    has_budget: bool = True,
    is_automatic: bool = False,
) -> Runs:
    """Return the law of runs for a search, from public facts alone.

    Each law is judged by the accuracy it is expected to lose: for configurations that are better
    than the chosen one and were not tried, for what is left of the budget in the run that is
    released, for the share `holdout` of the records on which it is not trained, for cheap trials,
    and for the noise of a score on `n_scoring` records. If all lose more than a run of the
    estimator as it was given, there are no trials. Prices are those of Gaussian runs. `most` limits
    the number of runs. `has_budget` says that the noise of a run follows from an epsilon, so that
    trials can be cheap. `is_automatic` says that the estimator, as it was given, chooses all
    settings in question itself, from public facts.

    >>> choose_runs(7, epsilon=3.0, delta=1e-5, n_scoring=6_000).describe()
    'a cheap trial of each configuration, then one run of the best on all records'
    >>> choose_runs(48, epsilon=0.3, delta=1e-6, n_scoring=4_000).mean
    20.0
    """
    n_configurations = whole(n_configurations=n_configurations, least=1)
    n_scoring = math.inf if n_scoring == math.inf else positive(n_scoring=n_scoring)
    limit = math.inf if most is None else most
    noise = calibrate(Gaussian, epsilon=epsilon, delta=delta, accountant=GDP(), relative=1e-4)
    n_records = n_scoring / holdout if holdout else math.inf
    scarcity = (_SCARCE / (n_records * epsilon)) ** 2
    losses: list[tuple[float, int, Runs]] = []

    def lost(budget: float) -> float:
        """Return the accuracy lost by a run with this share of the budget, or of the records."""
        return -_HALVING * math.log2(budget) + scarcity * (1 / budget**2 - 1)

    def add(law: Runs, loss: float, score_noise: float) -> None:
        losses.append((loss + score_noise / n_scoring, len(losses), law))

    if n_configurations <= min(_MOST_COMPOSED, limit):
        factor = math.sqrt(n_configurations)
        one = gaussian_epsilon(1 / (noise * factor), delta=delta)
        add(EveryConfiguration(), lost((1 - holdout) * one / epsilon), noise * factor)
    if has_budget:
        add(CheapTrials(count=0), _AUTOMATIC if is_automatic else _UNTUNED, 0.0)
        for count in (*_TRIALS, None):
            law = CheapTrials(count=count)
            trials = law.trials(n_configurations)
            if trials + 1 <= limit and trials <= _MOST_COMPOSED:
                missed = 0.0 if count is None else 1 / (count + 1)
                last, trial = math.sqrt(1 - law.share), math.sqrt(law.share / trials)
                loss = _RANK * missed + lost(last)
                loss += _ORDER * (lost((1 - holdout) * trial) - lost(last))
                add(law, loss, noise / trial)
    near = 0.6 * epsilon  # about what a run may cost: ratios of prices hardly depend on it
    run = Gaussian(calibrate(Gaussian, epsilon=near, delta=delta, accountant=GDP(), relative=1e-4))
    for law in _candidates(most):
        ratio = price_of(law.event((run,)), delta=delta) / near
        add(law, _RANK * law.expected_rank() + lost((1 - holdout) / ratio), noise * ratio)
    return min(losses)[2]


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
