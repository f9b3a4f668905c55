"""Dominating pairs: for each event, the two output laws (P, Q) that are hardest to tell apart.

An accountant needs nothing else of an event. With the privacy loss l = log(dP/dQ),

    delta(epsilon)  =  E_P[ (1 - exp(epsilon - l))_+ ],

and the pair of a composition is the product of the pairs (Zhu, Dong & Wang 2022,
arXiv:2106.08567, Theorem 10). `directions` turns an event into one `Direction` per order in which
two neighboring data sets can be compared; the guarantee is the worse of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch

import numpy as np

from tacit.accounting.compose import flatten
from tacit.accounting.numerics import log_mixture
from tacit.accounting.pld.loss_laws import (
    Discrete,
    DoubleExponential,
    Law,
    Normal,
    Sampled,
    Shifted,
)
from tacit.errors import UnsupportedEvent
from tacit.events import (
    ApproximateDP,
    Event,
    Exponential,
    Gaussian,
    Laplace,
    NonPrivate,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    Relation,
)

PairRule = Callable[[Event, Relation], tuple[Law, Law]]


@dataclass(frozen=True)
class Direction:
    """One order of comparing two neighbors: independent laws with their counts.

    With probability `infinite` under P (known to lie between `infinite_lower` and
    `infinite_upper`) the loss is infinite; otherwise it is the sum of the losses of `parts`.
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
    """The comparisons whose worst is the guarantee of `event` under `relation`.

    `pair_of` may give pairs that only bound an event from above; `pair`, the default, is exact.
    """
    counts = flatten(event)
    pairs = {part: (pair_of or pair)(part, relation) for part in counts}
    both = tuple(_direction([(pairs[part][i], n) for part, n in counts.items()]) for i in (0, 1))
    return both[:1] if both[0] == both[1] else both


def _direction(parts: list[tuple[Law, int]]) -> Direction:
    """Merge what merges exactly: Gaussians into one, equal laws, masses of infinite loss."""
    squared = math.fsum(n * law.mu**2 for law, n in parts if isinstance(law, Shifted))
    merged: dict[Law, int] = {Shifted(math.sqrt(squared)): 1} if squared else {}
    infinite = [(law.infinite, n) for law, n in parts if isinstance(law, Discrete) and law.infinite]
    for law, n in parts:
        finite = law.given_finite() if isinstance(law, Discrete) else law
        # Losses that are never positive are raised to 0: exact alone, an over-charge among others.
        free = isinstance(finite, Discrete) and finite.largest_loss <= 0
        if not free and not isinstance(finite, Shifted):
            merged[finite] = merged.get(finite, 0) + n
    return Direction(tuple(merged.items()), *_any_infinite(infinite))


def _any_infinite(masses: list[tuple[float, int]]) -> tuple[float, float]:
    """Bounds on 1 - prod (1 - mass)^n; exact for one mass, so that its delta is usable in full."""
    if not masses:
        return 0.0, 0.0
    if len(masses) == 1 and masses[0][1] == 1:
        return masses[0][0], masses[0][0]
    if any(mass >= 1 for mass, _ in masses):
        return 1.0, 1.0
    total = -math.expm1(math.fsum(n * math.log1p(-mass) for mass, n in masses))
    return total * (1 - 1e-14), min(total * (1 + 1e-14), 1.0)


@singledispatch
def pair(event: Event, relation: Relation) -> tuple[Law, Law]:
    """The dominating pair of ONE occurrence, in both orders."""
    raise UnsupportedEvent(
        f"PLD has no dominating pair for {type(event).__name__} under {relation}. "
        "Use the RDP accountant."
    )


@pair.register
def _(_event: NonPrivate, _relation: Relation) -> tuple[Law, Law]:
    return _same(_two_point(0.0, 1.0))


@pair.register
def _(event: Gaussian, relation: Relation) -> tuple[Law, Law]:
    return _same(Shifted(_stretch(event, relation) / event.noise_multiplier))


@pair.register
def _(event: Laplace, relation: Relation) -> tuple[Law, Law]:
    # The overlap of f(x - s) and alpha f(x), f log-concave, is log-concave in the shift s
    # (Prékopa), so over the L1 ball of shifts it is least at a corner: one coordinate moves.
    noise = DoubleExponential(_stretch(event, relation) / event.noise_multiplier)
    return _same(Sampled(noise, 1.0, 1, 0))


@pair.register(PureDP)
@pair.register(Exponential)
def _(event: PureDP | Exponential, relation: Relation) -> tuple[Law, Law]:
    return _same(_two_point(event.epsilon * _stretch(event, relation), 0.0))


@pair.register
def _(event: ApproximateDP, relation: Relation) -> tuple[Law, Law]:
    epsilon, delta = event.epsilon, event.delta
    if _stretch(event, relation) == 2.0:  # group privacy: two steps of one record each
        epsilon, delta = 2 * epsilon, min(delta * (1 + math.exp(min(epsilon, 700.0))), 1.0)
    return _same(_two_point(epsilon, delta))


@pair.register
def _(event: RandomizedResponse, _relation: Relation) -> tuple[Law, Law]:
    other = event.random_probability / event.n_options
    truth = 1.0 - event.random_probability + other
    loss = math.log1p((1.0 - event.random_probability) / other)
    rest = (event.n_options - 2) * other
    outcomes = [(-loss, other, truth), (0.0, rest, rest), (loss, truth, other)]
    return _same(_collect(outcomes if loss else [(0.0, 1.0, 1.0)]))


@pair.register
def _(event: PoissonSampled, relation: Relation) -> tuple[Law, Law]:
    rate, inner = event.rate, event.event
    replaced = relation is Relation.REPLACE_ONE
    if isinstance(inner, Gaussian | Laplace):
        # The old record moves the mean by +1, the new one by -1: twice one contribution, which
        # over-charges mechanisms whose replace_factor is below 2.
        scale = inner.noise_multiplier
        noise = Normal(scale) if isinstance(inner, Gaussian) else DoubleExponential(1 / scale)
        if replaced:
            return _same(Sampled(noise, rate, 1, 1))
        return Sampled(noise, rate, 1, 0), Sampled(noise, rate, 0, 1)
    law, other = pair(inner, relation)
    if not isinstance(law, Discrete) or law != other:
        raise UnsupportedEvent(
            f"PLD has no dominating pair for a Poisson sample of {type(inner).__name__}. "
            "Use the RDP accountant."
        )
    if replaced:
        return _same(_sampled_replace(law, rate))
    return _sampled_remove(law, rate), _sampled_add(law, rate)


def _same(law: Law) -> tuple[Law, Law]:
    return law, law


def _stretch(event: Event, relation: Relation) -> float:
    """How much one neighbor's change exceeds one record's contribution."""
    factor: float = getattr(event, "replace_factor", 1.0)
    return factor if relation is Relation.REPLACE_ONE else 1.0


_Outcome = tuple[float, float, float]  # loss, P-mass, Q-mass


def _collect(outcomes: list[_Outcome], infinite: float = 0.0, vanishing: float = 0.0) -> Discrete:
    """The law of these outcomes; an outcome without P-mass only adds to `vanishing`."""
    kept = sorted(outcome for outcome in outcomes if outcome[1] > 0)
    vanishing += math.fsum(q for _, p, q in outcomes if not p > 0)
    losses, p, q = zip(*kept, strict=True) if kept else ((0.0,), (0.0,), (0.0,))
    return Discrete(losses, p, q, infinite, vanishing)


def _two_point(epsilon: float, delta: float) -> Discrete:
    """Dominates all that is (epsilon, delta)-DP (Kairouz, Oh & Viswanath 2015, arXiv:1311.0776)."""
    high = (1 - delta) / (1 + math.exp(-epsilon))
    low = high * math.exp(-epsilon)
    if epsilon == 0:
        return _collect([(0.0, 1 - delta, 1 - delta)], delta, delta)
    return _collect([(-epsilon, low, high), (epsilon, high, low)], delta, delta)


def _sampled_remove(law: Discrete, rate: float) -> Discrete:
    """((1 - q) Q + q P, Q): Zhu, Dong & Wang 2022, Theorem 11."""
    outcomes = [
        (_mixed(rate, loss), rate * p + (1 - rate) * q, q)
        for loss, p, q in zip(law.losses, law.p, law.q, strict=True)
    ]
    outcomes.append((math.log1p(-rate), (1 - rate) * law.vanishing, law.vanishing))
    return _collect(outcomes, rate * law.infinite)


def _sampled_add(law: Discrete, rate: float) -> Discrete:
    """(P, (1 - q) P + q Q): same theorem, the other order."""
    outcomes = [
        (-_mixed(rate, -loss), p, rate * q + (1 - rate) * p)
        for loss, p, q in zip(law.losses, law.p, law.q, strict=True)
    ]
    outcomes.append((-math.log1p(-rate), law.infinite, (1 - rate) * law.infinite))
    return _collect(outcomes, 0.0, rate * law.vanishing)


def _sampled_replace(law: Discrete, rate: float) -> Discrete:
    """Dominates (1 - q) C + q A against (1 - q) C + q B where `law` dominates each pair of them.

    Balle, Barthe & Gaboardi 2018 (arXiv:1807.01647), Theorem 2: with alpha' = 1 + q (alpha - 1),
    H_alpha' <= q H_alpha(P, Q) for alpha >= 1. That is the profile of `_sampled_remove` there, and
    by symmetry its mirror image for alpha < 1; what is left sits at loss 0.
    """
    up = [
        (_mixed(rate, loss), rate * p + (1 - rate) * q, q)
        for loss, p, q in zip(law.losses, law.p, law.q, strict=True)
        if loss > 0
    ]
    down = [(-loss, q, p) for loss, p, q in up]
    infinite = rate * law.infinite
    rest = max(1.0 - infinite - math.fsum(p for _, p, _ in up + down), 0.0)
    return _collect([*up, *down, (0.0, rest, rest)], infinite, infinite)


def _mixed(rate: float, loss: float) -> float:
    return float(log_mixture(rate, np.array(loss)))
