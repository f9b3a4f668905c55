"""Rényi prices: one rule per type of event, each for ONE occurrence.

A rule returns the divergence at each order, the worse of both directions, and the probability with
which that bound fails outright (0 but for approximate DP). Rules never see a count. A rule that
is not proved under the relation asked for raises `UnsupportedEvent`.
"""

import math
from functools import lru_cache, singledispatch
from typing import NamedTuple

import numpy as np
from scipy import special

from tacit.accounting.compose import flatten
from tacit.accounting.rdp.allocation import (
    addition_divergence,
    allocation_divergence,
    removal_divergence,
)
from tacit.accounting.rdp.divergence import (
    FloatArray,
    Nodes,
    fixed_size_sampled,
    laplace_nodes,
    log_moments,
    log_sum_exp,
    poisson_sampled,
    pure_nodes,
    response_nodes,
    reverse,
)
from tacit.accounting.rdp.sampled_gaussian import (
    fixed_size_divergence,
    opposed_divergence,
    poisson_divergence,
)
from tacit.accounting.rdp.selection import GRID, selection_divergence
from tacit.errors import UnsupportedEvent
from tacit.events import (
    ApproximateDP,
    BestOf,
    Event,
    Exponential,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    NonPrivate,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    RandomizedResponse,
    Relation,
    RenyiCurve,
    TruncatedPoissonSampled,
)

BoundedLoss = Laplace | PureDP | Exponential | RandomizedResponse
"""Releases whose privacy loss is bounded, so that they are pure DP."""


class Price(NamedTuple):
    """Divergence of one occurrence at each order, and the chance that it does not hold."""

    values: FloatArray
    delta_mass: float = 0.0


@singledispatch
def price(event: Event, orders: FloatArray, relation: Relation) -> Price:  # noqa: ARG001  # the form of every rule
    """Rényi price of one occurrence of `event` at `orders`."""
    raise UnsupportedEvent(f"no Rényi curve is known for {type(event).__name__} ({relation}).")


@price.register
def _(event: NonPrivate, orders: FloatArray, relation: Relation) -> Price:  # noqa: ARG001  # same for all
    return Price(np.full(len(orders), np.inf))


@price.register
def _(event: Gaussian, orders: FloatArray, relation: Relation) -> Price:
    # Mironov 2017, Prop. 7 (arXiv:1702.07476).
    return Price(orders * gaussian_shift(event, relation) ** 2 / 2)


@price.register
def _(event: Laplace, orders: FloatArray, relation: Relation) -> Price:
    """Mironov 2017, Prop. 6; never above that of any epsilon-DP mechanism, order epsilon^2 / 2."""
    epsilon = bounded_epsilon(event, relation)
    inner = (orders - 1) * np.expm1((1 - 2 * orders) * epsilon) / (2 * orders - 1)
    exact = epsilon + np.log1p(inner) / (orders - 1)
    square = orders * epsilon**2 / 2
    return Price(np.where(orders * epsilon < 1e-4, square, np.minimum(exact, square)))


@price.register
def _(event: PureDP, orders: FloatArray, relation: Relation) -> Price:
    return Price(_pure(bounded_epsilon(event, relation), orders))


@price.register
def _(event: ApproximateDP, orders: FloatArray, relation: Relation) -> Price:
    """Pure DP but for a failure of probability delta: Kairouz, Oh & Viswanath 2015, Thm. 3.2."""
    epsilon, delta = approximate_pair(event, relation)
    return Price(_pure(epsilon, orders), delta)


@price.register
def _(event: RandomizedResponse, orders: FloatArray, relation: Relation) -> Price:  # noqa: ARG001  # same for all
    nodes = response_nodes(event.random_probability, event.n_options)
    return Price(log_moments(nodes, orders) / (orders - 1))


@price.register
def _(event: Exponential, orders: FloatArray, relation: Relation) -> Price:
    """Worst curve of a loss whose values span at most epsilon ("bounded range").

    The worst such loss takes two values, s and s - epsilon (Dong, Durfee & Rogers 2020,
    arXiv:1909.13830); with weights that make P and Q sum to one, the moment is
    exp((a - 1) s) (1 - exp(-a e)) / (a (1 - exp(-e))) at the worst s, which is below. It never
    exceeds epsilon^2 / 8-zCDP (Cesar & Rogers 2021, arXiv:2004.07223).
    """
    epsilon = bounded_epsilon(event, relation)
    concentrated = orders * epsilon**2 / 8
    if epsilon == 0:
        return Price(concentrated)
    log_all = np.log(-np.expm1(-orders * epsilon))
    log_rest = -epsilon + np.log(-np.expm1(-(orders - 1) * epsilon))
    worst = np.log1p(-1 / orders) + log_all - log_rest
    log_part = math.log(-math.expm1(-epsilon))
    exact = worst + (log_all - np.log(orders) - log_part) / (orders - 1)
    # Near zero the exact form cancels, and the two agree.
    return Price(
        np.where((orders - 1) * epsilon < 1e-3, concentrated, np.minimum(exact, concentrated))
    )


@price.register
def _(event: RenyiCurve, orders: FloatArray, relation: Relation) -> Price:
    """(order - 1) times the divergence is convex and 0 at order 1: chords bound it."""
    if relation is Relation.REPLACE_ONE and event.replace_factor != 1:
        raise UnsupportedEvent(
            "this Rényi curve is known only for records added or removed, not replaced. "
            "Declare replace_factor=1 if it is proved for replacement, or price add_remove."
        )
    known = np.array((1.0, *event.orders))
    # A divergence never falls with the order, so a smaller value further on holds here too.
    values = np.minimum.accumulate(np.array(event.values)[::-1])[::-1]
    height = np.append(0.0, values * (known[1:] - 1))
    return Price(np.interp(orders, known, height, right=np.inf) / (orders - 1))


@price.register
def _(event: PoissonSampled, orders: FloatArray, relation: Relation) -> Price:
    return _poisson(event.event, event.rate, orders, relation)


@price.register
def _(event: TruncatedPoissonSampled, orders: FloatArray, relation: Relation) -> Price:
    """A mixture over the number of other records drawn; moments are jointly convex.

    If fewer than `max_batch` others are drawn, nothing is cut and the step is Poisson's. Else the
    record joins with a smaller probability, in the place of another record, so it costs no more
    than a replacement at `rate`. The others number at most `n_records`.
    """
    whole = _poisson(event.event, event.rate, orders, relation)
    cut = _replaced(event.event, event.rate, orders)
    if whole.delta_mass or cut.delta_mass:
        raise UnsupportedEvent("truncated Poisson sampling of approximate DP has no known price.")
    full = float(special.bdtrc(event.max_batch - 1, event.n_records, event.rate))
    full = min(max(full * (1 + 1e-9), float(np.finfo(float).tiny)), 1.0)
    # `full` is rounded up, which must not lower the price where a replacement costs less.
    logs = np.stack([whole.values, np.maximum(whole.values, cut.values)]) * (orders - 1)
    weight = np.array([[1 - full], [full]])
    return Price(_log_mean(logs, weight) / (orders - 1))


@price.register
def _(event: FixedSizeSampled, orders: FloatArray, relation: Relation) -> Price:
    """Holds when a record is replaced, or blanked in its place: the number of records is public.

    Tighter than Wang, Balle & Kasiviswanathan 2019 (arXiv:1808.00087) on the same moment.
    """
    if relation is Relation.ADD_REMOVE:
        raise UnsupportedEvent(
            "sampling a fixed number of records is priced for replace_one and zero_out only: "
            "adding a record changes the fraction drawn. Ask for another relation, or use Poisson."
        )
    return _replaced(event.event, event.batch_size / event.n_records, orders)


@price.register
def _(event: RandomAllocation, orders: FloatArray, relation: Relation) -> Price:
    """Amplified for Gaussian noise; else a record's one release at its full price.

    The latter always holds: given the allocation, one release sees the record, and divergences of
    mixtures are at most the worst of their parts.
    """
    inner = event.event
    plain = price(inner, orders, relation)
    if not isinstance(inner, Gaussian):
        return plain
    steps, shift = event.steps, 1 / inner.noise_multiplier
    if relation is not Relation.REPLACE_ONE:
        values = allocation_divergence(orders, steps=steps, shift=shift)
    else:
        # Remove the old record, add the new one: Mironov 2017, Prop. 11 with p = q = 2.
        first = removal_divergence(2 * orders, steps=steps, shift=shift)
        second = addition_divergence(2 * orders - 1, steps=steps, shift=shift)
        values = (orders - 0.5) / (orders - 1) * first + second
    return Price(np.minimum(values, plain.values))


@price.register
def _(event: BestOf, orders: FloatArray, relation: Relation) -> Price:
    """Papernot & Steinke 2022 (arXiv:2110.03620): Thm. 2 and, for Poisson trials, Thm. 6."""
    run = _total(event.event, orders, relation)
    on_grid = _total_on_grid(event.event, relation)
    values = selection_divergence(orders, run, on_grid, mean=event.mean, trials=event.trials)
    return Price(values)


def _poisson(inner: Event, rate: float, orders: FloatArray, relation: Relation) -> Price:
    """`inner` on a Poisson sample; dominating pairs by Zhu, Dong & Wang 2022 (arXiv:2106.08567)."""
    if rate == 1:
        return price(inner, orders, relation)
    replace = relation is Relation.REPLACE_ONE
    if isinstance(inner, Gaussian):
        divergence = opposed_divergence if replace else poisson_divergence
        return Price(divergence(orders, rate=rate, shift=1 / inner.noise_multiplier))
    if isinstance(inner, ApproximateDP):
        # H at 1 + rate (e^epsilon - 1) is at most rate times the larger of the deltas between
        # "not drawn" and "drawn": advanced joint convexity, Balle, Barthe & Gaboardi 2018.
        epsilon, delta = approximate_pair(inner, relation)
        return Price(_pure(diluted_epsilon(epsilon, rate), orders), rate * delta)
    if not isinstance(inner, BoundedLoss):
        raise _no_sampled_price(inner)
    if replace:
        return Price(_pure(_replaced_epsilon(inner, rate), orders))
    sampled = poisson_sampled(_nodes(inner, Relation.ADD_REMOVE), rate)
    worse = np.maximum(log_moments(sampled, orders), log_moments(reverse(sampled), orders))
    return Price(worse / (orders - 1))


def _replaced(inner: Event, fraction: float, orders: FloatArray) -> Price:
    """`inner` on a sample in which a record is drawn with `fraction`, in the place of another."""
    if fraction == 1:
        return price(inner, orders, Relation.REPLACE_ONE)
    if isinstance(inner, Gaussian):
        shift = gaussian_shift(inner, Relation.REPLACE_ONE)
        return Price(fixed_size_divergence(orders, fraction=fraction, shift=shift))
    if isinstance(inner, ApproximateDP):
        epsilon, delta = approximate_pair(inner, Relation.REPLACE_ONE)
        return Price(_pure(diluted_epsilon(epsilon, fraction), orders), fraction * delta)
    if not isinstance(inner, BoundedLoss):
        raise _no_sampled_price(inner)
    nodes = fixed_size_sampled(_nodes(inner, Relation.REPLACE_ONE), fraction)
    return Price(log_moments(nodes, orders) / (orders - 1))


def _no_sampled_price(inner: Event) -> UnsupportedEvent:
    return UnsupportedEvent(
        f"no price is known for {type(inner).__name__} on a random sample. "
        "Sample Gaussian, Laplace, pure or approximate DP releases instead."
    )


def _nodes(event: BoundedLoss, relation: Relation) -> Nodes:
    """A pair that dominates `event`, equally hard to tell apart in both directions."""
    if isinstance(event, RandomizedResponse):
        return response_nodes(event.random_probability, event.n_options)
    epsilon = bounded_epsilon(event, relation)
    return laplace_nodes(epsilon) if isinstance(event, Laplace) else pure_nodes(epsilon)


def gaussian_shift(event: Gaussian, relation: Relation) -> float:
    """Standard deviations that one record moves the mean by."""
    factor = event.replace_factor if relation is Relation.REPLACE_ONE else 1.0
    return factor / event.noise_multiplier


def bounded_epsilon(event: BoundedLoss, relation: Relation) -> float:
    """Pure epsilon of a release of bounded loss."""
    if isinstance(event, RandomizedResponse):
        return math.log1p(event.n_options * (1 / event.random_probability - 1))
    epsilon = 1 / event.noise_multiplier if isinstance(event, Laplace) else event.epsilon
    return epsilon * (event.replace_factor if relation is Relation.REPLACE_ONE else 1.0)


def _replaced_epsilon(event: BoundedLoss, rate: float) -> float:
    """Pure epsilon of a Poisson sample when a record is replaced.

    With a, b, c the densities without the record, with the old, with the new one, the ratio is
    (1 - q + q b/a) / (1 - q + q c/a). Given b <= e^(f epsilon) c it grows with c, and b <=
    e^epsilon a, so it is largest at b/a = e^epsilon, c/a = e^((1 - f) epsilon).
    """
    epsilon = bounded_epsilon(event, Relation.ADD_REMOVE)
    factor = 1.0 if isinstance(event, RandomizedResponse) else event.replace_factor
    return diluted_epsilon(epsilon, rate) - diluted_epsilon((1 - factor) * epsilon, rate)


def diluted_epsilon(epsilon: float, rate: float) -> float:
    """log(1 - rate + rate * exp(epsilon)): pure epsilon on a sample at `rate`."""
    if rate == 1:
        return epsilon
    if epsilon < 30:
        return math.log1p(rate * math.expm1(epsilon))
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + epsilon))


def approximate_pair(event: ApproximateDP, relation: Relation) -> tuple[float, float]:
    """(epsilon, delta) under `relation`."""
    if relation is not Relation.REPLACE_ONE or event.replace_factor == 1:
        return event.epsilon, event.delta
    # Group privacy for two records: remove the old one, add the new one.
    return 2 * event.epsilon, min(1.0, event.delta * (1 + math.exp(min(event.epsilon, 700.0))))


def _pure(epsilon: float, orders: FloatArray) -> FloatArray:
    return log_moments(pure_nodes(epsilon), orders) / (orders - 1)


def _total(event: Event, orders: FloatArray, relation: Relation) -> FloatArray:
    """Curve of everything in `event`, the runs of a selection."""
    total = np.zeros(len(orders))
    for part, count in flatten(event).items():
        one = price(part, orders, relation)
        if one.delta_mass:
            raise UnsupportedEvent("the best of runs with approximate DP in them has no price.")
        total += count * one.values
    return total


@lru_cache(maxsize=64)
def _total_on_grid(event: Event, relation: Relation) -> FloatArray:
    return _total(event, GRID, relation)


def _log_mean(logs: FloatArray, weight: FloatArray) -> FloatArray:
    """log of the weighted mean of exp(logs) over the first axis, exact also near 0."""
    near = np.log1p((weight * np.expm1(np.minimum(logs, 30.0))).sum(axis=0))
    with np.errstate(divide="ignore"):  # a weight of 0 has log -inf
        far = log_sum_exp((logs + np.log(weight)).T)
    return np.where(logs.max(axis=0) < 30, near, far)
