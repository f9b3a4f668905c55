"""From a tree of events to `{event: count}`: the only file that multiplies by a repeat count.

Accountants price ONE occurrence of each key and add `count` times that price. Identities that hold
exactly are applied here (a sample at rate 1 is no sample; Gaussians that see the same sample are
one Gaussian), so that equal mechanisms written differently get the same price.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from tacit import events as ev
from tacit._check import MOST
from tacit.errors import UnsupportedEvent
from tacit.events import Event

_Sampled: TypeAlias = (
    ev.PoissonSampled
    | ev.TruncatedPoissonSampled
    | ev.FixedSizeSampled
    | ev.SampledWithReplacement
    | ev.RandomAllocation
)


def flatten(event: Event) -> dict[Event, int]:
    """Return how often each different release occurs in the tree `event`, in order of appearance.

    `Repeated` and `Sequence` are resolved into counts: the keys contain neither of them.

    >>> step = ev.PoissonSampled(0.01, ev.Gaussian(4.0))
    >>> flatten(ev.Sequence((ev.Repeated(step, 3), step))) == {step: 4}
    True
    """
    return dict(_flattened(event))


_Counts: TypeAlias = Mapping[Event, int]
_recent: tuple[tuple[Event, _Counts], ...] = ()
"""Trees that were flattened last: a price needs the counts of one tree several times."""


def only_release(event: Event) -> Event | None:
    """Return the only release in the tree `event`, or None if there are several or none."""
    counts = _flattened(event)
    return next(iter(counts)) if sum(counts.values()) == 1 else None


def releases(event: Event) -> Iterable[Event]:
    """Return the different releases in the tree `event`, in order of appearance."""
    return _flattened(event).keys()


def _flattened(event: Event) -> _Counts:
    """Return what `flatten` does, from memory if this very object was flattened just before."""
    global _recent
    for known, found in _recent:
        if known is event:
            return found
    try:
        counts = _counted(event)
    except ValueError as error:  # noise outside the range of an event
        raise UnsupportedEvent(f"an event equal to this one cannot be stated: {error}") from error
    if any(count > MOST for count in counts.values()):
        raise UnsupportedEvent("an event with more than 10**18 repetitions has no price.")
    _recent = ((event, counts), *_recent[:3])
    return counts


def _counted(event: Event) -> _Counts:
    counts: Counter[Event] = Counter()
    stack = [(event, 1)]
    while stack:
        node, count = stack.pop()
        if count == 0:
            continue
        if isinstance(node, ev.Repeated):
            stack.append((node.event, count * node.count))
        elif isinstance(node, ev.Sequence):
            stack.extend((part, count) for part in reversed(node.parts))
        elif isinstance(node, ev.BandedGaussian):
            stack.append((node.equivalent, count))
        elif isinstance(node, ev.OneOf) and (likely := _without_impossible(node)) != node:
            stack.append((likely, count))
        elif isinstance(node, ev.GaussianMixture) and 0 in node.weights:
            sizes = [one for one in zip(node.shifts, node.weights, strict=True) if one[1]]
            shifts, weights = zip(*sizes, strict=True)
            stack.append((replace(node, shifts=shifts, weights=weights), count))
        elif isinstance(node, ev.GaussianMixture) and max(node.shifts) == 0:
            continue  # nothing is contributed
        elif isinstance(node, ev.TreeAggregation):
            counts[_tree_as_gaussian(node)] += count
        elif isinstance(node, _Sampled):
            for simple, times in _simplify_sampled(node).items():
                counts[simple] += count * times
        else:
            counts[node] += count
    return counts


def _simplify_sampled(node: _Sampled) -> dict[Event, int]:
    is_sample = isinstance(node, ev.PoissonSampled) and 0 < node.rate < 1
    if is_sample and isinstance(node.event, ev.Gaussian):  # the most frequent case
        return {node: 1}
    if isinstance(node, ev.PoissonSampled | ev.TruncatedPoissonSampled) and node.rate == 0:
        return {}
    # A neighbor may hold one record more than `n_records`, and all of them may be drawn.
    if isinstance(node, ev.TruncatedPoissonSampled) and node.max_batch > node.n_records:
        return _simplify_sampled(ev.PoissonSampled(node.rate, node.event))
    # A sample of all n records misses one as soon as a record is added, so it stays a sample.
    takes_all = isinstance(node, ev.PoissonSampled) and node.rate == 1
    inside = flatten(node.event)
    only = next(iter(inside)) if sum(inside.values()) == 1 else None
    if isinstance(node, ev.PoissonSampled) and isinstance(only, ev.PoissonSampled):
        # A Poisson sample of a Poisson sample is one; a larger rate can only cost more.
        rate = min(math.nextafter(node.rate * only.rate, 1.0), 1.0)
        return _simplify_sampled(ev.PoissonSampled(rate, only.event))
    if takes_all or (isinstance(node, ev.RandomAllocation) and node.steps == 1):
        return inside
    if only is not None and only == node.event:
        return {node: 1}
    return {replace(node, event=_one_release(inside)): 1} if inside else {}


def _without_impossible(choice: ev.OneOf) -> Event:
    """Return `choice` without parts of probability 0; its only part if one is left."""
    likely = [(part, w) for part, w in zip(choice.parts, choice.weights, strict=True) if w]
    if len(likely) == 1:
        return likely[0][0]
    return ev.OneOf(tuple(part for part, _ in likely), tuple(w for _, w in likely))


def _one_release(counts: dict[Event, int]) -> Event:
    """Return one event equal to all releases of `counts` when they use the same sample."""
    if list(counts.values()) == [1]:
        return next(iter(counts))
    gaussians = {event: n for event, n in counts.items() if isinstance(event, ev.Gaussian)}
    if len(gaussians) == len(counts):
        # Independent Gaussians on one sample are one Gaussian on the stacked vector, whose squared
        # contribution in units of the noise is the sum of theirs.
        squared = math.fsum(n / event.noise_multiplier**2 for event, n in gaussians.items())
        # One ulp down, so that rounding can only raise the price.
        multiplier = math.nextafter(1 / math.sqrt(squared), 0.0)
        return ev.Gaussian(multiplier, max(event.replace_factor for event in gaussians))
    parts = [ev.Repeated(event, n) if n > 1 else event for event, n in counts.items()]
    return ev.Sequence(tuple(parts))


def _tree_as_gaussian(tree: ev.TreeAggregation) -> ev.Gaussian:
    """Return the Gaussian release of the stacked nodes, of which a record is in `depth` at most."""
    depth = tree.steps.bit_length()  # floor(log2(steps)) + 1
    multiplier = math.nextafter(tree.noise_multiplier / math.sqrt(depth), 0.0)
    return ev.Gaussian(multiplier, tree.replace_factor)
