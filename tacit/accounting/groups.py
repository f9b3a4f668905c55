"""The price of a run for a person who has several records.

A guarantee for one record says less about a person with k of them. Most releases say exactly how
much less: k records move a sum k times as far, and a random sample holds a random number of them.
`for_group` states that as an event, and accountants price it exactly. For other events the chain
of k neighbors gives (k e, d (e^(k e) - 1) / (e^e - 1)) from (e, d), which is far looser.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from scipy import special

from tacit import events as ev
from tacit._check import in_open_unit, whole
from tacit.accounting.one_event import ADD_REMOVE
from tacit.accounting.rdp import RDP
from tacit.accounting.tightest import Tightest
from tacit.errors import UnsupportedEvent
from tacit.events import Relation

_LARGEST = 700.0  # epsilons beyond this say nothing, and their exponentials overflow
_GROWTH = 1.5  # between the epsilons tried first
_MOST_QUERIES = 6  # between the last two of them
_CLOSE = 1.005  # ratio of two epsilons between which it is no longer searched
_LEAST_DELTA = 1e-200  # at which epsilons are computed
_MOST_ALLOCATED = 12  # records of a group whose ways to be allocated together are listed
_MOST_MIXED = 1000  # records of a group whose number in a sample is counted
_RARE = 1e-6  # probability of a cut sample that may be bounded loosely
_SAMPLES = (
    ev.PoissonSampled,
    ev.TruncatedPoissonSampled,
    ev.FixedSizeSampled,
    ev.RandomAllocation,
)


class GroupPrice(NamedTuple):
    """Epsilon for a person with several records, and whether it is more than an upper bound.

    `is_exact` says that every release is priced as what the records do to it (`for_group`); if not,
    epsilon is bounded by other means, such as a chain of neighbors.
    """

    epsilon: float
    is_exact: bool


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
    return group_price(event, records=records, delta=delta, relation=relation).epsilon


def group_price(
    event: ev.Event, *, records: int, delta: float, relation: Relation = ADD_REMOVE
) -> GroupPrice:
    """Return `group_epsilon`, and whether it is exact."""
    records, delta = whole(records=records, least=1), in_open_unit(delta=delta)
    relation = Relation(relation)
    if records == 1:
        return GroupPrice(Tightest().epsilon(event, delta=delta, relation=relation), is_exact=True)
    found = _by_release(event, records, delta, relation)
    if found < math.inf and _is_exact(event, records):
        return GroupPrice(found, is_exact=True)
    found = min(found, _by_chain(event, records, delta, relation))
    return GroupPrice(found, is_exact=False)


def _by_release(event: ev.Event, records: int, delta: float, relation: Relation) -> float:
    """Return the epsilon of `for_group`; infinite if it has none."""
    # How much it costs to replace several records of one sample is not proved: a chain bounds it.
    if relation is Relation.REPLACE_ONE and _is_sampled(event):
        return math.inf
    try:
        of_group = for_group(event, records)
        # Many kinds of allocation, each with its own profile, would take PLD minutes.
        is_allocated = ev.RandomAllocation.__name__ in of_group.to_json()
        accountant = RDP() if is_allocated else Tightest()
        return accountant.epsilon(of_group, delta=delta, relation=relation)
    except UnsupportedEvent:
        return math.inf


def for_group(event: ev.Event, records: int) -> ev.Event:
    """Return the event for `records` records that are added or removed together.

    Raises `UnsupportedEvent` for an event whose part in a group's price is not known; a chain of
    neighbors, `group_epsilon`, bounds those too.

    - Sums: k records move them by at most k times what one does.
    - Pure DP and the ranges of exponential mechanisms: k times as large along a chain of neighbors.
    - zCDP: k^2 times as large (Bun & Steinke 2016, Proposition 27).
    - Approximate DP: along a chain, as in the description of this module.
    - A Rényi curve: 3^c times as large at 2^c times smaller orders, for up to 2^c records (Mironov
      2017, arXiv:1702.07476, Proposition 2).
    - Randomized response: each record gives a report of its own.
    - The best of several runs, or one of several releases: what is known about the price of one of
      them holds for any two data sets, so also for two that differ in k records.
    - A Poisson sample of Gaussian releases holds j of the k records with the binomial probability,
      which is a mixture (Charles et al. 2024, arXiv:2407.07737). A sample of other releases holds
      none of them with probability (1 - q)^k, and else at most k.
    - A sample of fixed size of Gaussian releases holds j of the k records with the hypergeometric
      probability, in the place of j other ones: the same samples with j others there are uniform
      over those without any of the k. So it is a mixture too.
    - A truncated Poisson sample is a Poisson sample if the others leave room for all k. If not,
      each of the k that is kept may take the place of another record, which is a move twice as
      long. Whether there is room is decided by the others alone, so it may be revealed.
    - Random allocation: see `_allocated`.
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
        case ev.ApproximateDP():
            epsilon, steps = event.epsilon * records, _steps_of_chain(event.epsilon, records)
            return replace(event, epsilon=epsilon, delta=min(1.0, event.delta * steps))
        case ev.RenyiCurve():
            return _curve(event, records)
        case ev.RandomizedResponse():
            return ev.Repeated(event, records)
        case ev.Repeated() | ev.BestOf():
            return replace(event, event=for_group(event.event, records))
        case ev.Sequence() | ev.OneOf() | ev.ChosenOf():
            return replace(event, parts=tuple(for_group(part, records) for part in event.parts))
        case ev.PoissonSampled():
            return _sampled(event, records)
        case ev.TruncatedPoissonSampled():
            return _truncated(event, records)
        case ev.FixedSizeSampled():
            return _in_fixed_size(event, records)
        case ev.RandomAllocation() if _precision(event.event):
            return _allocated(event, records)
        case _:
            raise UnsupportedEvent(f"the price for groups of records is not known for [{event}].")


def _sampled(event: ev.PoissonSampled, records: int, moved: int = 1) -> ev.Event:
    """Return the event of a Poisson sample, where a record that is in it counts as `moved`."""
    precision = _precision(event.event)
    if precision and records <= _MOST_MIXED:
        multiplier = (1 - 1e-12) / math.sqrt(precision) / moved
        return ev.GaussianMixture.of_sample(multiplier, event.rate, records)
    rate = -math.expm1(records * math.log1p(-event.rate)) if event.rate < 1 else 1.0
    inner = for_group(event.event, records * moved)
    return ev.PoissonSampled(min(1.0, rate * (1 + 1e-12)), inner)


def _truncated(event: ev.TruncatedPoissonSampled, records: int) -> ev.Event:
    whole_sample = ev.PoissonSampled(event.rate, event.event)
    cut = _cut(event, records)
    parts = _sampled(whole_sample, records), _sampled(whole_sample, records, moved=2)
    return ev.OneOf(parts, (1 - cut, cut)) if cut else parts[0]


def _cut(event: ev.TruncatedPoissonSampled, records: int) -> float:
    """Return the probability that the others leave no room for all `records`, rounded up."""
    room = event.max_batch - records
    if room < 0 or room >= event.n_records:
        return float(room < 0)
    return min(1.0, float(special.bdtrc(room, event.n_records, event.rate)) * (1 + 1e-9))


def _in_fixed_size(event: ev.FixedSizeSampled, records: int) -> ev.Event:
    inner, n, size = event.event, event.n_records, event.batch_size
    if not isinstance(inner, ev.Gaussian) or records > n:
        raise UnsupportedEvent(f"the price for groups of records is not known for [{event}].")
    weights = [
        math.comb(records, j) * math.perm(size, j) * math.perm(n - size, records - j)
        / math.perm(n, records)  # whole numbers: each weight is rounded once
        for j in range(records + 1)
    ]  # fmt: skip
    multiplier = inner.noise_multiplier / inner.replace_factor * (1 - 1e-12)
    shifts = tuple(map(float, range(records + 1)))
    return ev.GaussianMixture(
        multiplier, shifts, tuple(weight / sum(weights) for weight in weights)
    )


def _allocated(event: ev.RandomAllocation, records: int) -> ev.Event:
    """Return an event that bounds what a group costs in one epoch of random allocation.

    The records are in m different steps, c_1, ..., c_m of them together. These counts may be
    revealed: they do not depend on the data. Given them, the steps are a uniform choice of m, which
    is also made by first choosing m disjoint blocks of equal size and then one step in each. The
    blocks may be revealed too, and then each is a random allocation by itself. Their ratios of
    likelihoods are independent without the group, whatever the directions of the moves: the noise
    of a step along any direction is a normal number that is independent of all earlier ones.
    """
    steps, multiplier = event.steps, (1 - 1e-12) / math.sqrt(_precision(event.event))
    if records > _MOST_ALLOCATED:  # too many ways; in any of them a release moves by k at most
        return ev.Gaussian(multiplier / records)
    parts: list[ev.Event] = []
    weights: list[float] = []
    for counts in _partitions(records, records):
        repeats = Counter(counts)
        if len(counts) > steps:
            continue
        orders = [math.factorial(count) for count in (*counts, *repeats.values())]
        ways = math.factorial(records) // math.prod(orders) * math.perm(steps, len(counts))
        block = steps // len(counts)
        together = (
            ev.Repeated(ev.RandomAllocation(block, ev.Gaussian(multiplier / count)), times)
            for count, times in repeats.items()
        )
        parts.append(ev.Sequence(tuple(together)))
        weights.append(ways / steps**records)  # whole numbers: each weight is rounded once
    return ev.OneOf(tuple(parts), tuple(weights))


def _partitions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write `total` as a sum of falling whole numbers from 1 to `most`."""
    if total == 0:
        yield ()
    for first in range(min(total, most), 0, -1):
        for rest in _partitions(total - first, first):
            yield (first, *rest)


def _curve(event: ev.RenyiCurve, records: int) -> ev.Event:
    """Return the curve of `records` records: at orders / 2^c, if they are at least 2, times 3^c."""
    halvings = (records - 1).bit_length()
    kept = [k for k, order in enumerate(event.orders) if order >= 2 ** (halvings + 1)]
    if not kept:
        raise UnsupportedEvent(
            f"a Rényi curve of such low orders has no price for {records} records."
        )
    orders = tuple(event.orders[k] / 2**halvings for k in kept)
    return replace(event, orders=orders, values=tuple(event.values[k] * 3**halvings for k in kept))


def _inner(event: ev.Event) -> tuple[ev.Event, ...]:
    """Return the events that `event` is made of, if a group's part in it is its part in those."""
    match event:
        case ev.Repeated() | ev.BestOf():
            return (event.event,)
        case ev.Sequence() | ev.OneOf() | ev.ChosenOf():
            return event.parts
        case _:
            return ()


def _is_exact(event: ev.Event, records: int) -> bool:
    """Return whether `for_group` states what `records` records do, so that no chain is better.

    It only bounds that for a sample of releases that are not Gaussian, a sample that is often cut,
    random allocation, and a Rényi curve.
    """
    if parts := _inner(event):
        return all(_is_exact(part, records) for part in parts)
    match event:
        case ev.PoissonSampled() | ev.TruncatedPoissonSampled():
            is_mixture = _precision(event.event) > 0 and records <= _MOST_MIXED
            is_cut = isinstance(event, ev.TruncatedPoissonSampled) and _cut(event, records) > _RARE
            return is_mixture and not is_cut
        case _:
            return not isinstance(event, ev.RenyiCurve | ev.RandomAllocation)


def _is_sampled(event: ev.Event) -> bool:
    """Return whether some release is on a random sample of the records."""
    return isinstance(event, _SAMPLES) or any(_is_sampled(part) for part in _inner(event))


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

    Any (e, d) of one step with d * steps(e) <= delta gives a valid result; the smallest e is
    searched for. Let g(e) be the epsilon at delta / steps(e), which grows with e. If g(e) <= e,
    then g(e) is valid, too, because steps(g(e)) <= steps(e). If not, then e and all numbers up to
    g(e) are too small.
    """

    def price(epsilon: float) -> float:
        share = delta / (_steps_of_chain(epsilon, records) * (1 + 1e-9))
        if share > _LEAST_DELTA:
            return Tightest().epsilon(event, delta=share, relation=relation)
        is_valid = Tightest().delta(event, epsilon=epsilon, relation=relation) <= share
        return epsilon if is_valid else math.nextafter(epsilon, math.inf)

    low = high = max(Tightest().epsilon(event, delta=delta, relation=relation), 1e-3)
    found = math.inf
    while records * high <= _LARGEST and (found := price(high)) > high:
        low, high = found, max(found, high * _GROWTH)
    if records * high > _LARGEST:
        return math.inf
    high = found
    for _ in range(_MOST_QUERIES):  # each may take a second
        if high <= low * _CLOSE:
            break
        middle = (low + high) / 2
        found = price(middle)
        low, high = (low, found) if found <= middle else (min(found, high), high)
    return records * high


def _steps_of_chain(epsilon: float, records: int) -> float:
    """Return what a chain multiplies delta by: (e^(k epsilon) - 1) / (e^epsilon - 1), at least."""
    if epsilon == 0:
        return float(records)
    if records * epsilon > _LARGEST:
        return math.inf
    return math.expm1(records * epsilon) / math.expm1(epsilon) * (1 + 1e-12)
