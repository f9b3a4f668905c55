"""From a tree of events to `{event: count}`: the only file that multiplies by a repeat count.

Accountants price ONE occurrence of each key and add `count` times that price. Identities that hold
exactly are applied on the way (a sample at rate 1 is no sample; Gaussians that see the same sample
are one Gaussian), so that equal mechanisms written differently get one price.
"""

import math
from collections import Counter
from dataclasses import replace

from tacit._check import MOST
from tacit.errors import UnsupportedEvent
from tacit.events import (
    Event,
    FixedSizeSampled,
    Gaussian,
    PoissonSampled,
    RandomAllocation,
    Repeated,
    Sequence,
    TruncatedPoissonSampled,
)

_SAMPLED = (PoissonSampled, TruncatedPoissonSampled, FixedSizeSampled, RandomAllocation)


def flatten(event: Event) -> dict[Event, int]:
    """Counts of the different elementary releases in `event`, in order of first appearance.

    Neither `Repeated` nor `Sequence` is ever a key, and neither is one inside a sampled key.

    >>> step = PoissonSampled(0.01, Gaussian(4.0))
    >>> flatten(Sequence((Repeated(step, 3), step))) == {step: 4}
    True
    """
    counts: Counter[Event] = Counter()
    stack = [(event, 1)]
    while stack:
        node, count = stack.pop()
        if count == 0:
            continue
        if isinstance(node, Repeated):
            stack.append((node.event, count * node.count))
        elif isinstance(node, Sequence):
            stack.extend((part, count) for part in reversed(node.parts))
        elif isinstance(node, _SAMPLED):
            for simple, times in _simplify_sampled(node).items():
                counts[simple] += count * times
        else:
            counts[node] += count
    if any(count > MOST for count in counts.values()):
        raise UnsupportedEvent("more than 10**18 repetitions have no price.")
    return dict(counts)


def _simplify_sampled(node: Event) -> dict[Event, int]:
    if isinstance(node, PoissonSampled) and node.rate == 0:
        return {}
    if isinstance(node, TruncatedPoissonSampled):
        if node.rate == 0:
            return {}
        # A neighbor may hold one record more than `n_records`, and all of them may be drawn.
        if node.max_batch > node.n_records:
            return _simplify_sampled(PoissonSampled(node.rate, node.event))
    # All of n records is no "all" once a record is added, so a full fixed-size sample stays one.
    takes_all = (isinstance(node, PoissonSampled) and node.rate == 1) or (
        isinstance(node, RandomAllocation) and node.steps == 1
    )
    if takes_all:
        return flatten(node.event)  # type: ignore[attr-defined]  # every sampled event has one
    inside = _one_release(flatten(node.event))  # type: ignore[attr-defined]
    return {} if inside is None else {replace(node, event=inside): 1}  # type: ignore[type-var]


def _one_release(counts: dict[Event, int]) -> Event | None:
    """The single event equal to all of `counts` on one sample, or None if nothing is released."""
    if not counts:
        return None
    if all(isinstance(event, Gaussian) for event in counts):
        # Independent Gaussians on one sample are one Gaussian on the stacked vector, whose squared
        # contribution in units of the noise is the sum of theirs.
        if len(counts) == 1 and set(counts.values()) == {1}:
            return next(iter(counts))
        gaussians = {event: n for event, n in counts.items() if isinstance(event, Gaussian)}
        squared = math.fsum(n / event.noise_multiplier**2 for event, n in gaussians.items())
        # One ulp down, so that rounding can only raise the price.
        multiplier = math.nextafter(1 / math.sqrt(squared), 0.0)
        return Gaussian(multiplier, max(event.replace_factor for event in gaussians))
    if len(counts) == 1 and set(counts.values()) == {1}:
        return next(iter(counts))
    raise UnsupportedEvent(
        "several releases on one sample have a known price only if all are Gaussian. "
        "Sample each of them on its own, or use Gaussian noise."
    )
