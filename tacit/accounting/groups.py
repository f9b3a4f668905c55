"""The price of a run for a person who has several records.

A guarantee for one record says less about a person with k of them. Most releases say exactly how
much less: k records move a sum k times as far, and a random sample holds a random number of them.
`for_group` states that as an event, and accountants price it exactly. For other events the chain
of k neighbors gives (k e, d (e^(k e) - 1) / (e^e - 1)) from (e, d), which is far looser.
"""

import math
from dataclasses import replace

from tacit import events as ev
from tacit._check import in_open_unit, whole
from tacit.accounting.one_event import ADD_REMOVE
from tacit.accounting.tightest import Tightest
from tacit.errors import UnsupportedEvent
from tacit.events import Relation

_LARGEST = 700.0  # epsilons beyond this say nothing, and their exponentials overflow
_GROWTH = 1.5  # between the epsilons tried first
_HALVINGS = 6  # of the interval between the last two of them


def group_epsilon(
    event: ev.Event, *, records: int, delta: float, relation: Relation = ADD_REMOVE
) -> float:
    """Return a certified upper bound on the epsilon of `event` for a person with `records` records.

    All of them are added or removed, or replaced under `REPLACE_ONE`.

    >>> from tacit.events import Gaussian, PoissonSampled, Repeated
    >>> run = Repeated(PoissonSampled(0.01, Gaussian(1.0)), 1000)
    >>> [round(group_epsilon(run, records=k, delta=1e-5), 1) for k in (1, 4)]
    [1.8, 8.9]
    """
    records, delta = whole(records=records, least=1), in_open_unit(delta=delta)
    relation = Relation(relation)
    if records == 1:
        return Tightest().epsilon(event, delta=delta, relation=relation)
    found = math.inf
    if relation is ADD_REMOVE:
        try:
            of_group = for_group(event, records)
        except UnsupportedEvent:
            pass
        else:
            found = Tightest().epsilon(of_group, delta=delta, relation=relation)
            if _is_exact(event):
                return found
    return min(found, _by_chain(event, records, delta, relation))


def for_group(event: ev.Event, records: int) -> ev.Event:
    """Return the event for `records` records that are added or removed together.

    Raises `UnsupportedEvent` for an event whose price for groups is not known exactly.

    - Sums: k records move them by at most k times what one does.
    - Pure DP and the ranges of exponential mechanisms: k times as large along a chain of neighbors.
    - zCDP: k^2 times as large (Bun & Steinke 2016, Proposition 27).
    - A Poisson sample of Gaussian releases holds j of the k records with the binomial probability,
      which is a mixture (Charles et al. 2024, arXiv:2407.07737). A sample of other releases holds
      none of them with probability (1 - q)^k, and else at most k.
    """
    match event:
        case ev.NonPrivate():
            return event
        case ev.Gaussian() | ev.Laplace() | ev.TreeAggregation():
            return replace(event, noise_multiplier=event.noise_multiplier / records)
        case ev.BandedGaussian(rate=1.0):
            return for_group(event.equivalent, records)
        case ev.DiscreteGaussian() | ev.DiscreteLaplace():
            return replace(event, sensitivity=event.sensitivity * records)
        case ev.PureDP() | ev.Exponential():
            return replace(event, epsilon=event.epsilon * records)
        case ev.ZeroConcentratedDP(delta=0.0):
            return replace(event, rho=event.rho * records**2)
        case ev.Repeated():
            return replace(event, event=for_group(event.event, records))
        case ev.Sequence():
            return ev.Sequence(tuple(for_group(part, records) for part in event.parts))
        case ev.PoissonSampled():
            return _sampled(event, records)
        case _:
            raise UnsupportedEvent(f"the price for groups of records is not known for [{event}].")


def _sampled(event: ev.PoissonSampled, records: int) -> ev.Event:
    if precision := _precision(event.event):
        multiplier = (1 - 1e-12) / math.sqrt(precision)
        return ev.GaussianMixture.of_sample(multiplier, event.rate, records)
    rate = -math.expm1(records * math.log1p(-event.rate)) if event.rate < 1 else 1.0
    return ev.PoissonSampled(min(1.0, rate * (1 + 1e-12)), for_group(event.event, records))


def _is_exact(event: ev.Event) -> bool:
    """Return whether `for_group` is never worse than a chain: unless it samples other releases."""
    match event:
        case ev.Repeated():
            return _is_exact(event.event)
        case ev.Sequence():
            return all(_is_exact(part) for part in event.parts)
        case ev.PoissonSampled():
            return _precision(event.event) > 0
        case _:
            return True


def _precision(event: ev.Event) -> float:
    """Return 1 / multiplier^2 of the one Gaussian release that `event` amounts to; 0 for others."""
    match event:
        case ev.Gaussian():
            return event.noise_multiplier**-2
        case ev.Repeated():
            return event.count * _precision(event.event)
        case ev.Sequence():
            parts = [_precision(part) for part in event.parts]
            return sum(parts) if all(parts) else 0.0
        case _:
            return 0.0


def _by_chain(event: ev.Event, records: int, delta: float, relation: Relation) -> float:
    """Return the epsilon that a chain of `records` neighbors gives.

    Any epsilon of one step gives a valid result; the smallest that fits `delta` is searched for.
    """

    def fits(epsilon: float) -> bool:
        steps = math.expm1(records * epsilon) / math.expm1(epsilon)
        one = Tightest().delta(event, epsilon=epsilon, relation=relation)
        return one * steps * (1 + 1e-9) <= delta

    high = max(Tightest().epsilon(event, delta=delta, relation=relation), 1e-3)
    while not fits(high):
        high *= _GROWTH
        if records * high > _LARGEST:
            return math.inf
    low = high / _GROWTH
    for _ in range(_HALVINGS):  # each query may take a second
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return records * high
