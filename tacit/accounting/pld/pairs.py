"""Dominating pairs: for each event, the two output laws (P, Q) that are easiest to distinguish.

A pair is all that an accountant needs of an event. With the privacy loss l = log(dP/dQ),

    delta(epsilon)  =  E_P[ (1 - exp(epsilon - l))_+ ],

and the pair of a composition is the product of the pairs (Zhu, Dong & Wang 2022,
arXiv:2106.08567, Theorem 10). `directions` turns an event into one `Direction` for each order in
which two neighboring data sets can be compared; the guarantee is the worse of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from typing import TypeAlias

import numpy as np
from scipy import special

from tacit import events as ev
from tacit._arrays import Floats
from tacit.accounting.compose import flatten
from tacit.accounting.one_event import (
    ROUND,
    epsilon_and_delta,
    gaussian_shift,
    log_mixture_at,
    pure_epsilon,
    response_law,
    rounded_epsilon,
    whole_shift,
)
from tacit.accounting.pld.balls_and_bins import allocation_pair
from tacit.accounting.pld.loss_laws import (
    Discrete,
    DoubleExponential,
    Folded,
    Law,
    MixedNormals,
    Mixture,
    Normal,
    Sampled,
    Shifted,
)
from tacit.accounting.shuffle import local_guarantee, shuffled_atoms
from tacit.accounting.trials import binomial_weights
from tacit.errors import UnsupportedEvent
from tacit.events import Event, Relation

_MOST_ATOMS = 11_000  # losses of a discrete noise
_MOST_SUMS = 4096  # sums of losses that are listed one by one
_UP, _NO_MASS = 1 + 1e-9, 1e-26

PairRule: TypeAlias = Callable[[Event, Relation], tuple[Law, Law]]
"""Gives the laws of the loss of ONE occurrence of an event, one for each order of comparison."""


@dataclass(frozen=True)
class Direction:
    """One order of comparing two neighbors: the laws of independent losses, with their counts.

    Under P the loss is infinite with a probability between `infinite_lower` and `infinite_upper`;
    otherwise it is the sum of the losses of `parts`.
    """

    parts: tuple[tuple[Law, int], ...]
    infinite_lower: float = 0.0
    infinite_upper: float = 0.0

    @property
    def largest_loss(self) -> float:
        """Largest finite loss: no epsilon beyond it is ever needed."""
        return sum(count * law.largest_loss for law, count in self.parts)

    @property
    def steps(self) -> int:
        """Number of independent losses in the sum."""
        return sum(count for _, count in self.parts)


def directions(
    event: Event, relation: Relation, pair_of: PairRule | None = None
) -> tuple[Direction, ...]:
    """Return the orders of comparing two neighbors; the guarantee of `event` is the worst of them.

    `pair_of` gives the laws of the loss of each part of `event`; they may only bound its price from
    above. The default, `pair`, is exact if it can be.
    """
    found = [both_orders(one, relation, pair_of or pair) for one in neighbors(event, relation)]
    if len(found) == 1:
        return found[0]
    return tuple(dict.fromkeys(order for orders in found for order in orders))


def neighbors(event: Event, relation: Relation) -> tuple[Event, ...]:
    """Return `event` once for each kind of neighbor: those that a record joins, or that it leaves.

    Only truncated samples differ: all records may be there besides one that joins, and all but one
    besides one that leaves. In the result their `n_records` counts these other records.
    """
    counts = flatten(event)
    cut = [part for part in counts if isinstance(part, ev.TruncatedPoissonSampled)]
    if not cut or relation is not Relation.ADD_REMOVE:
        return (event,)
    fewer: dict[Event, Event] = {
        one: replace(one, n_records=one.n_records - 1)
        if one.n_records > one.max_batch
        else ev.PoissonSampled(one.rate, one.event)
        for one in cut
    }
    leaves = tuple(ev.Repeated(fewer.get(part, part), n) for part, n in counts.items())
    return event, ev.Sequence(leaves)


def both_orders(event: Event, relation: Relation, pair_of: PairRule) -> tuple[Direction, ...]:
    """Return the two orders of comparing neighbors of one kind; one if they are equal."""
    pairs = [(pair_of(part, relation), n) for part, n in flatten(event).items()]
    first, second = (_direction([(laws[side], n) for laws, n in pairs]) for side in (0, 1))
    return (first,) if first == second else (first, second)


def pair_from_above(event: Event, relation: Relation) -> tuple[Law, Law]:
    """Return laws of the loss of ONE occurrence, in both orders of comparison.

    For random allocation and shuffled reports, they bound the price from above. For other events
    they are those of `pair`.
    """
    if isinstance(event, ev.Shuffled):
        return shuffled_pair(event)
    if isinstance(event, ev.RandomAllocation) and relation is not Relation.REPLACE_ONE:
        inner = event.event
        if isinstance(inner, ev.Gaussian):
            return allocation_pair(event.steps, gaussian_shift(inner, relation))
    return pair(event, relation)


def pair_from_below(event: Event, relation: Relation) -> tuple[Law, Law]:
    """Return laws of the loss of ONE occurrence that no smaller price can cover.

    They belong to a mechanism that `event` describes. If none is known, raise `UnsupportedEvent`.
    """
    is_sampled = isinstance(
        event, ev.PoissonSampled | ev.TruncatedPoissonSampled | ev.RandomAllocation
    )
    inner = event.event if is_sampled else event
    if isinstance(inner, ev.Exponential) and isinstance(event, ev.Exponential | ev.PoissonSampled):
        # Two options, whose utilities move by the sensitivity in opposite directions: the log odds
        # change by epsilon, from -epsilon / 2 to epsilon / 2.
        half = ev.PureDP(0.5 * float(pure_epsilon(inner, relation)) * (1 - 1e-14), 1.0)
        event = replace(event, event=half) if isinstance(event, ev.PoissonSampled) else half
    elif relation is Relation.REPLACE_ONE and isinstance(event, ev.PoissonSampled):
        is_tight = isinstance(inner, ev.Gaussian | ev.Laplace) and inner.replace_factor == 2
        # Otherwise the new record may be one that contributes nothing.
        relation = relation if is_tight else Relation.ZERO_OUT
    elif isinstance(event, ev.TruncatedPoissonSampled):
        # If the other records contribute nothing, this is a Poisson sample at a lower rate.
        full, kept = _truncation(event, relation)
        rate = (event.rate * (1 - full) + kept * full) * (2 - _UP)
        return pair_from_below(ev.PoissonSampled(rate, inner), relation)
    elif isinstance(event, ev.RandomAllocation) and isinstance(inner, ev.Gaussian):
        # The sum of all releases of an epoch moves by one contribution, whichever step has it.
        shift = gaussian_shift(inner, relation) / math.sqrt(event.steps)
        return _same(Shifted(shift * (1 - 1e-14)))
    elif isinstance(event, ev.FixedSizeSampled) and relation is not Relation.ADD_REMOVE:
        rate = event.batch_size / event.n_records * (1 - 1e-12)
        return pair_from_below(ev.PoissonSampled(rate, event.event), relation)
    laws = pair(event, relation)
    for law in laws:
        if isinstance(law, Discrete) and law.largest_loss <= 0 and any(law.losses):
            raise UnsupportedEvent(f"no lower bound is known for {type(event).__name__}.")
    return laws


def shuffled_pair(event: ev.Shuffled) -> tuple[Law, Law]:
    """Return laws that dominate the loss of shuffled reports: the same law in both orders."""
    epsilon, clones = local_guarantee(event)
    if epsilon == 0:
        return _same(_two_point(0.0, 0.0))
    losses, p, q = shuffled_atoms(epsilon, event.n_reports, clones)
    outcomes = zip(losses.tolist(), p.tolist(), q.tolist(), strict=True)
    return _same(_collect(list(outcomes)))


@singledispatch
def pair(event: Event, relation: Relation) -> tuple[Law, Law]:
    """Return the laws of the loss of ONE occurrence of `event`, in both orders of comparison.

    They are those of its dominating pair: the two output laws that are easiest to distinguish.
    """
    raise UnsupportedEvent(
        f"PLD has no dominating pair for {type(event).__name__} under {relation}. "
        "Use the RDP accountant."
    )


@pair.register
def _(_event: ev.NonPrivate, _relation: Relation) -> tuple[Law, Law]:
    return _same(_two_point(0.0, 1.0))


@pair.register
def _(event: ev.Gaussian, relation: Relation) -> tuple[Law, Law]:
    return _same(Shifted(gaussian_shift(event, relation)))


@pair.register
def _(event: ev.Laplace, relation: Relation) -> tuple[Law, Law]:
    # The overlap of f(x - s) and alpha f(x), f log-concave, is log-concave in the shift s
    # (Prékopa), so over the L1 ball of shifts it is least at a corner: one coordinate moves.
    return _same(Sampled(DoubleExponential(rounded_epsilon(event, relation)), 1.0, 1, 0))


@pair.register
def _(event: ev.PureDP | ev.Exponential, relation: Relation) -> tuple[Law, Law]:
    return _same(_two_point(rounded_epsilon(event, relation), 0.0))


@pair.register
def _(event: ev.ApproximateDP, relation: Relation) -> tuple[Law, Law]:
    return _same(_two_point(*epsilon_and_delta(event, relation)))


@pair.register
def _(event: ev.RandomizedResponse, _relation: Relation) -> tuple[Law, Law]:
    truth, other, loss = response_law(event)
    rest = (event.n_options - 2) * other
    outcomes = [(-loss, other, truth), (0.0, rest, rest), (loss, truth, other)]
    return _same(_collect(outcomes if loss else [(0.0, 1.0, 1.0)]))


@pair.register
def _(event: ev.GaussianMixture, relation: Relation) -> tuple[Law, Law]:
    if relation is Relation.REPLACE_ONE:
        raise UnsupportedEvent(
            "replacing a unit with several contributions has no known price. Use add_remove."
        )
    total = math.fsum(event.weights)
    weights = tuple(weight / total for weight in event.weights)
    if event.shifts == (0.0, 1.0) and 0 < weights[1] < 1:  # one record in a Poisson sample
        noise = Normal(event.noise_multiplier)
        return Sampled(noise, weights[1], 1, 0), Sampled(noise, weights[1], 0, 1)
    mixed = partial(MixedNormals, event.noise_multiplier, event.shifts, weights)
    return mixed(1), mixed(-1)


@pair.register
def _(event: ev.DiscreteGaussian, relation: Relation) -> tuple[Law, Law]:
    # P(k) / Q(k) = exp((2 k d - d^2) / (2 s^2)) if the value moves by d. Beyond 11 deviations there
    # is less than 1e-27 of the mass.
    std, shift = event.noise_std, whole_shift(event, relation)
    far = math.ceil(11 * std) + shift
    if far > _MOST_ATOMS:
        raise UnsupportedEvent("PLD prices discrete Gaussian noise up to 1,000. Use RDP.")
    k = np.arange(-far, far + shift + 1, dtype=float)
    p, q = np.exp(-0.5 * ((k - shift) / std) ** 2), np.exp(-0.5 * (k / std) ** 2)
    scale = 1 / float(np.exp(-0.5 * (np.arange(-far - 40.0, far + 41.0) / std) ** 2).sum())
    loss = (k - 0.5 * shift) * (shift / std**2)
    return _same(_atoms(loss, p * scale, q * scale, _NO_MASS))


@pair.register
def _(event: ev.DiscreteLaplace, relation: Relation) -> tuple[Law, Law]:
    # With r = exp(-1 / scale), noise k has probability (1 - r) / (1 + r) r^|k|.
    shift, ratio = whole_shift(event, relation), math.exp(-1 / event.noise_scale)
    if shift > _MOST_ATOMS:
        raise UnsupportedEvent("PLD prices discrete Laplace noise up to sensitivity 10,000.")
    inner = np.arange(1, shift)
    one = (1 - ratio) / (1 + ratio)
    low, high = ratio**shift / (1 + ratio), 1 / (1 + ratio)
    loss = np.concatenate(([-shift], 2 * inner - shift, [shift])) / event.noise_scale
    p = np.concatenate(([low], one * ratio ** (shift - inner), [high]))
    q = np.concatenate(([high], one * ratio**inner, [low]))
    return _same(_atoms(loss, p, q))


@pair.register
def _(event: ev.FixedSizeSampled, relation: Relation) -> tuple[Law, Law]:
    """Return the pair of a sample of fixed size.

    If a record is added, a sample holds it with probability `rate` at most, in the place of another
    record; the other samples are as before. So the pair is that of a Poisson sample, for a record
    that is replaced. If a record is replaced or blanked, see `_replaced_in_sample`.
    """
    rate, inner = event.batch_size / event.n_records, event.event
    if relation is Relation.ADD_REMOVE:
        return _joins_by_replacing(inner, rate)
    return _replaced_in_sample(inner, rate)


@pair.register
def _(event: ev.TruncatedPoissonSampled, relation: Relation) -> tuple[Law, Law]:
    """Return a pair for a truncated Poisson sample: a mixture over whether others fill it.

    If fewer than `max_batch` others are drawn, nothing is cut. Otherwise a uniformly random subset
    is kept: the record is in it, in the place of another one, with the probability of
    `_truncation`, and who the others are says nothing about how many were drawn. Under add/remove,
    `n_records` counts the others (see `neighbors`).
    """
    inner, rate = event.event, event.rate
    if isinstance(inner, ev.Gaussian):
        inner = replace(inner, replace_factor=2.0)  # as for an uncut sample
    full, kept = _truncation(event, relation)
    cut = _joins_by_replacing if relation is Relation.ADD_REMOVE else _replaced_in_sample
    whole = pair(ev.PoissonSampled(rate, inner) if rate < 1 else inner, relation)
    # The mass that rounding may have moved gets the dearest case: the record replaces another one
    # whenever it is drawn.
    most, least = min(full * _UP, 1.0), full * (2 - _UP)
    cases = whole, cut(inner, rate), cut(inner, min(kept * _UP, rate))
    weights = (1 - most, most - least, least)
    mixed = [Mixture(laws, weights) for laws in zip(*cases, strict=True)]
    return mixed[0], mixed[1]


def _truncation(event: ev.TruncatedPoissonSampled, relation: Relation) -> tuple[float, float]:
    """Return the probability that others fill the sample, and that of the record to be in it then.

    With m others and B = `max_batch`, others fill it with probability P(Bin(m, rate) >= B), and the
    record is in it with probability B / (m + 1) * P(Bin(m + 1, rate) > B) / P(Bin(m, rate) >= B)
    (arXiv:2508.15089, as dp-accounting has it).
    """
    most = event.max_batch
    others = event.n_records - (relation is not Relation.ADD_REMOVE)
    full = float(special.bdtrc(most - 1, others, event.rate)) if others >= most else 0.0
    if full == 0.0:
        return 0.0, event.rate
    joint = float(special.bdtrc(most, others + 1, event.rate))
    return full, min(most / (others + 1) * joint / full, event.rate)


def _atoms(loss: Floats, p: Floats, q: Floats, infinite: float = 0.0) -> Discrete:
    some = p > 0  # other probabilities are below all floats
    losses, p_some, q_some = (tuple(values[some].tolist()) for values in (loss, p, q))
    return Discrete(losses, p_some, q_some, infinite)


def _joins_by_replacing(inner: Event, rate: float) -> tuple[Law, Law]:
    """Return the pair of a sample that one record joins, at `rate`, in the place of another."""
    if isinstance(inner, ev.Gaussian):
        noise = Normal(1 / gaussian_shift(inner, Relation.REPLACE_ONE))
    elif isinstance(inner, ev.Laplace):
        noise = DoubleExponential(rounded_epsilon(inner, Relation.REPLACE_ONE))
    else:
        first, second = pair(inner, Relation.REPLACE_ONE)
        if not isinstance(first, Discrete) or not isinstance(second, Discrete):
            raise _no_sampled_pair(inner)
        return _sampled_remove(first, rate), _sampled_add(second, rate)
    return Sampled(noise, rate, 1, 0), Sampled(noise, rate, 0, 1)


def _replaced_in_sample(inner: Event, rate: float) -> tuple[Law, Law]:
    """Return a pair for a sample in which one record, drawn at `rate`, is replaced by another.

    As in `_sampled_replace`, delta at 1 + rate (alpha - 1) is at most rate times that of the
    release at alpha, in both directions.
    """
    if isinstance(inner, ev.Gaussian):
        noise = Normal(1 / gaussian_shift(inner, Relation.REPLACE_ONE))
        return _same(Folded(Sampled(noise, rate, 1, 0)))
    law, other = pair(inner, Relation.REPLACE_ONE)
    if not isinstance(law, Discrete) or law != other:
        raise _no_sampled_pair(inner)
    return _same(_sampled_replace(law, rate))


def _no_sampled_pair(inner: Event) -> UnsupportedEvent:
    return UnsupportedEvent(
        f"PLD has no dominating pair for a sample of {type(inner).__name__}. "
        "Use the RDP accountant."
    )


@pair.register
def _(event: ev.SampledWithReplacement, relation: Relation) -> tuple[Law, Law]:
    """Return the pair if one record is blanked: it is drawn a binomial number of times."""
    inner, draws = event.event, event.batch_size
    if relation is not Relation.ZERO_OUT or not isinstance(inner, ev.Gaussian):
        raise UnsupportedEvent(
            "PLD prices sampling with replacement for Gaussian noise under zero_out. Use RDP."
        )
    counts, weights = binomial_weights(draws, 1 / event.n_records)
    drawn = ev.GaussianMixture(inner.noise_multiplier, counts, weights)
    return pair(next(iter(flatten(drawn))), relation)


@pair.register
def _(event: ev.PoissonSampled, relation: Relation) -> tuple[Law, Law]:
    rate, inner = event.rate, event.event
    replaced = relation is Relation.REPLACE_ONE
    if isinstance(inner, ev.Gaussian | ev.Laplace):
        # The old record moves the mean by +1, the new one by -1: twice one contribution, which
        # over-charges mechanisms whose replace_factor is below 2.
        if isinstance(inner, ev.Gaussian):
            noise = Normal(inner.noise_multiplier)
        else:
            noise = DoubleExponential(rounded_epsilon(inner, Relation.ADD_REMOVE))
        if replaced:
            return _same(Sampled(noise, rate, 1, 1))
        return Sampled(noise, rate, 1, 0), Sampled(noise, rate, 0, 1)
    law, other = pair(inner, relation)
    if not isinstance(law, Discrete) or not isinstance(other, Discrete):
        raise _no_sampled_pair(inner)
    return sampled_pair(law, other, rate, relation)


def sampled_pair(
    law: Discrete, other: Discrete, rate: float, relation: Relation
) -> tuple[Law, Law]:
    """Return the pair of a Poisson sample, given the pair of a release on finitely many losses."""
    if relation is not Relation.REPLACE_ONE:
        return _sampled_remove(law, rate), _sampled_add(other, rate)
    if law != other:
        raise UnsupportedEvent("replacement in a sample needs a pair that is equal in both orders.")
    return _same(_sampled_replace(law, rate))


def _direction(parts: list[tuple[Law, int]]) -> Direction:
    """Return the `Direction` of laws with their counts, after all merging that is exact.

    Unsampled Gaussians become one, equal laws are counted together, infinite losses are put apart.
    """
    squared = math.fsum(n * law.mu**2 for law, n in parts if isinstance(law, Shifted))
    merged: dict[Law, int] = {Shifted(math.sqrt(squared)): 1} if squared else {}
    infinite = [(law.infinite, n) for law, n in parts if isinstance(law, Discrete) and law.infinite]
    for law, n in parts:
        finite = law.given_finite() if isinstance(law, Discrete) else law
        # Losses that are never positive are raised to 0. For a single law that is exact, in a
        # composition it over-charges.
        free = isinstance(finite, Discrete) and finite.largest_loss <= 0
        if not free and not isinstance(finite, Shifted):
            merged[finite] = merged.get(finite, 0) + n
    parts_of = tuple(merged.items())
    if len(parts_of) == 1 and isinstance(only := parts_of[0][0], Discrete):
        parts_of = (_repeated(only, parts_of[0][1]),)
    return Direction(_enumerated(parts_of), *_any_infinite(infinite))


def _enumerated(parts: tuple[tuple[Law, int], ...]) -> tuple[tuple[Law, int], ...]:
    """Return laws on few losses as one law, that of the sum of all their losses."""
    laws = [law for law, n in parts for _ in range(min(n, 64)) if isinstance(law, Discrete)]
    if not 1 < len(laws) == sum(n for _, n in parts):
        return parts
    if math.prod(len(law.losses) for law in laws) > _MOST_SUMS:
        return parts
    loss, p, q = np.zeros(1), np.ones(1), np.ones(1)
    for law in laws:
        loss = np.add.outer(loss, law.losses).ravel()
        p, q = np.multiply.outer(p, law.p).ravel(), np.multiply.outer(q, law.q).ravel()
    order = np.argsort(loss, kind="stable")
    largest = math.fsum(max(map(abs, law.losses)) for law in laws)
    blur = 4 * ROUND * len(laws) * (2 + largest) + math.fsum(law.blur for law in laws)
    return ((replace(_atoms(loss[order], p[order], q[order]), blur=blur), 1),)


def _repeated(law: Discrete, count: int) -> tuple[Law, int]:
    """Return `count` losses of two values as one law, that of a binomial sum, if it is short."""
    if len(law.losses) != 2 or not 1 < count <= _MOST_ATOMS:
        return law, count
    k = np.arange(count + 1, dtype=float)
    loss = (count - k) * law.losses[0] + k * law.losses[1]
    choose = special.gammaln(count + 1) - special.gammaln(k + 1) - special.gammaln(count - k + 1)
    p, q = (
        np.exp(choose + (count - k) * math.log(mass[0]) + k * math.log(mass[1]))
        for mass in (law.p, law.q)
    )
    blur = 32 * ROUND * count * (2 + math.log(count) + abs(math.log(law.p[0])))
    kept = p > 0
    return replace(_atoms(loss[kept], p[kept], q[kept]), blur=blur), 1


def _any_infinite(masses: list[tuple[float, int]]) -> tuple[float, float]:
    """Return bounds on 1 - prod (1 - mass)^n, the probability that any loss is infinite.

    Each of n losses is infinite with probability `mass`. For a single loss both bounds are exact.
    """
    if not masses:
        return 0.0, 0.0
    if len(masses) == 1 and masses[0][1] == 1:
        return masses[0][0], masses[0][0]
    if any(mass >= 1 for mass, _ in masses):
        return 1.0, 1.0
    total = -math.expm1(math.fsum(n * math.log1p(-mass) for mass, n in masses))
    return total * (1 - 1e-14), min(total * (1 + 1e-14), 1.0)


def _same(law: Law) -> tuple[Law, Law]:
    return law, law


_Outcome: TypeAlias = tuple[float, float, float]  # loss, P-mass, Q-mass


def _collect(outcomes: list[_Outcome], infinite: float = 0.0, vanishing: float = 0.0) -> Discrete:
    """Return the law of outcomes (loss, P-mass, Q-mass); without P-mass they are `vanishing`."""
    kept = sorted(outcome for outcome in outcomes if outcome[1] > 0)
    vanishing += math.fsum(q for _, p, q in outcomes if not p > 0)
    losses, p, q = zip(*kept, strict=True) if kept else ((), (), ())
    return Discrete(losses, p, q, infinite, vanishing)


def _two_point(epsilon: float, delta: float) -> Discrete:
    """Return the law that dominates every (epsilon, delta)-DP release."""
    # Kairouz, Oh & Viswanath 2015 (arXiv:1311.0776).
    high = (1 - delta) / (1 + math.exp(-epsilon))
    low = high * math.exp(-epsilon)
    if epsilon == 0:
        return _collect([(0.0, 1 - delta, 1 - delta)], delta, delta)
    return _collect([(-epsilon, low, high), (epsilon, high, low)], delta, delta)


def _sampled_remove(law: Discrete, rate: float) -> Discrete:
    """Return the loss law of a Poisson sample if a record is removed, given that of a release.

    With (P, Q) the pair of `law` and q the rate, it is the law of the pair ((1 - q) Q + q P, Q):
    Zhu, Dong & Wang 2022, Theorem 11.
    """
    if rate == 1:
        return law
    outcomes = _mixed(law, rate)
    outcomes.append((math.log1p(-rate), (1 - rate) * law.vanishing, law.vanishing))
    return _collect(outcomes, rate * law.infinite)


def _sampled_add(law: Discrete, rate: float) -> Discrete:
    """Return the loss law of a Poisson sample if a record is added, given that of a release.

    With (P, Q) the pair of `law` and q the rate, it is the law of the pair (P, (1 - q) P + q Q):
    Zhu, Dong & Wang 2022, Theorem 11.
    """
    if rate == 1:
        return law
    outcomes = [
        (-log_mixture_at(rate, -loss), p, rate * q + (1 - rate) * p)
        for loss, p, q in zip(law.losses, law.p, law.q, strict=True)
    ]
    outcomes.append((-math.log1p(-rate), law.infinite, (1 - rate) * law.infinite))
    return _collect(outcomes, 0.0, rate * law.vanishing)


def _sampled_replace(law: Discrete, rate: float) -> Discrete:
    """Return a loss law that dominates a Poisson sample if a record is replaced.

    A, B, C are the outputs with the old record, with the new one and without either; q is the rate.
    `law`, of a pair (P, Q), dominates each two of them. The sample compares (1 - q) C + q A with
    (1 - q) C + q B. Its hockey-stick divergence at 1 + q (alpha - 1) is at most q times that of
    (P, Q) at alpha >= 1 (Balle, Barthe & Gaboardi 2018, arXiv:1807.01647, Theorem 2). These are the
    values of `_sampled_remove`; by symmetry, alpha < 1 gives their mirror image. The remaining mass
    has loss 0.
    """
    up = [outcome for outcome in _mixed(law, rate) if outcome[0] > 0]
    down = [(-loss, q, p) for loss, p, q in up]
    infinite = rate * law.infinite
    rest = max(1.0 - infinite - math.fsum(p for _, p, _ in up + down), 0.0)
    return _collect([*up, *down, (0.0, rest, rest)], infinite, infinite)


def _mixed(law: Discrete, rate: float) -> list[_Outcome]:
    """Return the possible outcomes of ((1 - rate) Q + rate P, Q), (P, Q) being that of `law`."""
    return [
        (log_mixture_at(rate, loss), rate * p + (1 - rate) * q, q)
        for loss, p, q in zip(law.losses, law.p, law.q, strict=True)
    ]
