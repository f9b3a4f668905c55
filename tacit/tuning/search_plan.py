"""The plan of a search: what is paid, before the first run, for the choice among configurations.

The budget of the whole search is given; the plan finds what one run may cost. A run is trained on
some records and scored on others (`holdout`), and the law of the runs (`laws`) says what the best
of them costs. Everything here is computed from public facts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tacit.accounting import GDP, calibrate, gaussian_epsilon
from tacit.accounting import epsilon as price_of
from tacit.events import ChosenOf, Event, Gaussian, OneOf, Relation, Repeated
from tacit.tuning.holdout import CoinSplit, Split
from tacit.tuning.laws import CheapTrials, Runs

EventsAt = Callable[[float, Sequence[int]], tuple[Event, ...]]
"""events_at(epsilon, indices): what training costs with each of these configurations, if a run may
cost `epsilon`."""
_PRECISION = 4e-3  # share of the budget that a plan may leave unspent
_TRIES = 20
_SCORE_NOISE = 3.0
"""Noise of a composed score over the noise of a run: it takes a tenth of the run's mu squared."""


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """What a search pays and how it runs; all of it is public."""

    runs: Runs
    split: Split
    run_epsilon: float | None
    """The epsilon of training one run, at the delta of the search; None if its noise was given."""
    training: tuple[Event, ...]
    """Event of training with each configuration."""
    score_noise: float
    """Noise multiplier of a score."""
    event: Event
    """Event of the whole search, which is paid once."""
    epsilon: float
    """Price of `event`: the cost of the search."""
    delta: float
    run_epsilons: tuple[float, ...] = ()
    """The epsilon of each configuration in a trial, if they are not the same."""
    last: tuple[Event, ...] = ()
    """After cheap trials: event of the last run, on all records, with each configuration."""
    last_epsilons: tuple[float, ...] = ()
    """The epsilon of the last run with each configuration."""

    def describe(self) -> str:
        """Return one sentence: how runs are drawn, and what the search costs against one run."""
        one = "the given noise" if self.run_epsilon is None else f"epsilon {self.run_epsilon:.4g}"
        if self.last:
            trial = f"a trial costs {_range(self.run_epsilons)}, " if self.training else ""
            return (
                f"{self.runs.describe()} ({len(self.last)} configurations); {trial}the last run "
                f"{_range(self.last_epsilons)}, the whole search epsilon {self.epsilon:.4g}, at "
                f"delta {self.delta:g}"
            )
        return (
            f"{self.runs.describe()}, of {len(self.training)} configurations; one run alone costs "
            f"{one}, the whole search epsilon {self.epsilon:.4g}, at delta {self.delta:g}"
        )


def plan_search(
    events_at: EventsAt,
    n_configurations: int,
    *,
    runs: Runs,
    split: Split,
    epsilon: float,
    delta: float,
    relation: Relation = Relation.ADD_REMOVE,
    is_noise_given: bool = False,
) -> SearchPlan:
    """Return the plan in which the whole search costs at most (`epsilon`, `delta`).

    `is_noise_given` says that the noise of a run does not follow from an epsilon. Raises
    `ValueError` if the search then costs more than the budget.

    >>> from tacit.tuning.laws import RandomRuns
    >>> def train(epsilon, indices):
    ...     return (Gaussian(4.2 / epsilon),) * len(indices)
    >>> plan = plan_search(train, 8, runs=RandomRuns(mean=10.0), split=CoinSplit(0.2),
    ...                    epsilon=1.0, delta=1e-6)
    >>> round(plan.run_epsilon, 2), plan.epsilon <= 1
    (0.69, True)
    """
    every = range(n_configurations)
    price = partial(price_of, delta=delta, relation=relation)
    scored = lambda noise: runs.event((Gaussian(noise, 1.0),) * n_configurations)  # noqa: E731
    first = events_at(epsilon / 2, every)
    groups = [first.index(event) for event in first]  # configurations that cost the same
    kept = sorted(set(groups))

    def trained(x: float) -> Event:
        """Return what the search costs if a run may cost x, without scores that cost less."""
        found = dict(zip(kept, events_at(x, kept), strict=True))
        training = tuple(found[group] for group in groups)
        if isinstance(split, CoinSplit):
            return runs.event(training)
        return split.event(runs, training, Gaussian(_composed_noise(x, delta), 1.0))

    alone = _gaussian_noise(epsilon, delta)
    target, cost = epsilon, math.inf
    while target > epsilon / 2:
        # A score costs what training costs, so both solutions are near that of a Gaussian run.
        noise = 1 / _scaled(lambda mu: price(scored(1 / mu)), start=0.6 / alone, target=target)
        near = gaussian_epsilon(1 / noise, delta=delta)
        x = epsilon
        if not is_noise_given:
            x = _scaled(lambda x: price(trained(x)), start=near, target=target)
        if not isinstance(split, CoinSplit):
            noise = _composed_noise(x, delta)
        training = events_at(x, every)  # of all configurations, whatever their groups
        event = split.event(runs, training, Gaussian(noise, 1.0))
        cost = price(event)
        if cost <= epsilon:
            return SearchPlan(
                runs=runs,
                split=split,
                run_epsilon=None if is_noise_given else x,
                training=training,
                score_noise=noise,
                event=event,
                epsilon=cost,
                delta=delta,
            )
        if is_noise_given:
            break
        target *= 1 - _PRECISION
    raise ValueError(
        f"this search costs epsilon {cost:.4g} at delta {delta:g}, above epsilon = {epsilon:g}. "
        "Raise the noise of the estimator, or search with fewer runs."
    )


def plan_trials(
    events_at: EventsAt | None,
    last_at: EventsAt,
    n_configurations: int,
    *,
    runs: CheapTrials,
    split: Split,
    epsilon: float,
    delta: float,
    relation: Relation = Relation.ADD_REMOVE,
) -> SearchPlan:
    """Return the plan of cheap trials and one last run, which cost at most (`epsilon`, `delta`).

    `last_at` is like `events_at` for the last run, on all records. Its configuration follows from
    the scores, so it is priced as a free choice. Without trials there is no `events_at`, and the
    last run has one configuration.

    Configurations with laws of noise of their own compose differently, so each gets its epsilons: a
    trial may cost such a part of the budget that the budget would pay for count / share of them.
    """
    price = partial(price_of, delta=delta, relation=relation)
    count = runs.trials(n_configurations)
    target, noise, training = epsilon, math.inf, _Priced((), ())
    if events_at is not None:
        copies = math.ceil(count / runs.share)
        near = _gaussian_noise(epsilon, delta) * math.sqrt(copies)
        training = _scaled_each(
            events_at,
            n_configurations,
            lambda event: price(Repeated(event, copies)),
            start=gaussian_epsilon(1 / near, delta=delta),
            target=target,
        )
        noise = near
        if not isinstance(split, CoinSplit):
            noise = max(_composed_noise(x, delta) for x in training.epsilons)

    def event_of(last: Event) -> Event:
        if events_at is None:
            return last
        return split.event(runs, training.events, Gaussian(noise, 1.0), last)

    def dearest(last: Event) -> float:
        """Return the price of the dearer of the two parts that a coin decides."""
        event = event_of(last)
        return max(map(price, event.parts if isinstance(event, OneOf) else (event,)))

    while target > epsilon / 2:
        last = _scaled_each(
            last_at,
            n_configurations if count else 1,
            dearest,
            start=epsilon * math.sqrt(1 - runs.share) if count else epsilon,
            target=target,
        )
        different = tuple(dict.fromkeys(last.events))
        event = event_of(different[0] if len(different) == 1 else ChosenOf(different))
        cost = price(event)
        if cost <= epsilon:
            return SearchPlan(
                runs=runs,
                split=split,
                run_epsilon=max(training.epsilons, default=None),
                training=training.events,
                score_noise=noise,
                event=event,
                epsilon=cost,
                delta=delta,
                run_epsilons=training.epsilons,
                last=last.events,
                last_epsilons=last.epsilons,
            )
        target *= (1 - _PRECISION / 2) * min(epsilon / cost, 1 - _PRECISION / 2)
    raise ValueError(f"no last run is cheap enough for a search of epsilon {epsilon:g}.")


class _Priced(NamedTuple):
    """Epsilons given to the configurations, and what each then pays for."""

    epsilons: tuple[float, ...]
    events: tuple[Event, ...]


def _scaled_each(
    events_at: EventsAt,
    n_configurations: int,
    price: Callable[[Event], float],
    *,
    start: float,
    target: float,
) -> _Priced:
    """Return for each configuration an epsilon with which `price` of its event meets `target`."""
    first = events_at(start, range(n_configurations))
    groups = [first.index(event) for event in first]  # configurations that cost the same
    found = {
        i: _scaled(lambda x, i=i: price(events_at(x, [i])[0]), start=start, target=target)
        for i in sorted(set(groups))
    }
    epsilons = tuple(found[group] for group in groups)
    return _Priced(epsilons, tuple(events_at(x, [i])[0] for i, x in enumerate(epsilons)))


def _scaled(price: Callable[[float], float], *, start: float, target: float) -> float:
    """Return an x whose price is at most `target`, and nearly as much if it follows x steadily.

    Prices are nearly proportional to x, so each try scales the last one. The result was priced.
    """
    x, within = start, 0.0
    for _ in range(_TRIES):
        cost = price(x)
        if cost <= target:
            within = max(within, x)
            if cost >= (1 - _PRECISION) * target:
                return x
        if cost in (0.0, math.inf):
            x *= 2.0 if cost == 0 else 0.5
        else:
            x *= (1 - _PRECISION / 2) * target / cost
    if within == 0:
        raise ValueError(
            f"no run is cheap enough for a search of epsilon {target:g}. Search with fewer runs, "
            "or leave out configurations whose price has a delta of its own."
        )
    return within


def _range(epsilons: tuple[float, ...]) -> str:
    low, high = f"{min(epsilons):.4g}", f"{max(epsilons):.4g}"
    return f"epsilon {low}" if low == high else f"epsilon {low} to {high}"


def _gaussian_noise(epsilon: float, delta: float) -> float:
    return calibrate(Gaussian, epsilon=epsilon, delta=delta, accountant=GDP(), relative=1e-4)


def _composed_noise(x: float, delta: float) -> float:
    """Return the noise of a score that is composed with a run of cost x."""
    return _SCORE_NOISE * _gaussian_noise(x, delta)
