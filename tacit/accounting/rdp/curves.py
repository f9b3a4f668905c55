"""Rényi curves: one rule per type of event, each for ONE occurrence.

A rule returns the divergence at each order, in the worse of both directions of comparison, and the
probability that this bound does not hold (0 except for approximate DP). Rules never see a count. A
rule that is not proved under the requested relation raises `UnsupportedEvent`.
"""

import math
from functools import lru_cache, partial, singledispatch
from typing import NamedTuple

import numpy as np
from scipy import special

from tacit import events as ev
from tacit._arrays import Floats
from tacit.accounting.compose import flatten
from tacit.accounting.one_event import (
    BoundedLoss,
    epsilon_and_delta,
    gaussian_shift,
    log_sum_exp,
    response_law,
    rounded_epsilon,
    sampled_epsilon,
    whole_shift,
)
from tacit.accounting.rdp import divergence as renyi
from tacit.accounting.rdp.allocation import addition_divergence, removal_divergence
from tacit.accounting.shuffle import local_guarantee, shuffled_atoms
from tacit.accounting.trials import (
    BinomialRuns,
    NegativeBinomialRuns,
    TruncatedRuns,
    binomial_weights,
    run_law,
)
from tacit.errors import UnsupportedEvent
from tacit.events import Event, Relation

_GRID: Floats = 1 + 2.0 ** (np.arange(-24, 81) / 4)
"""Orders at which the curve of one run of a selection is evaluated: 1 + 2^-6 to 1 + 2^20."""


class Charge(NamedTuple):
    """Price of an event: a Rényi curve that holds except with probability `delta_mass`."""

    values: Floats
    """Bound on the Rényi divergence at each requested order."""
    delta_mass: float = 0.0
    """Probability that the curve does not hold; 0 unless the event contains `ApproximateDP`."""


def log_deltas(orders: Floats, values: Floats, epsilon: Floats | float) -> Floats:
    """Return the log deltas at `epsilon` that Rényi divergences `values` at `orders` imply."""
    # Canonne, Kamath & Steinke 2020, Prop. 12 (arXiv:2004.00010v4).
    return (orders - 1) * (values - epsilon + np.log1p(-1 / orders)) - np.log(orders)


@singledispatch
def price(event: Event, orders: Floats, relation: Relation) -> Charge:  # noqa: ARG001  # the form of every rule
    """Return bounds on the Rényi divergence of one occurrence of `event` at each of `orders`."""
    raise UnsupportedEvent(f"no Rényi curve is known for {type(event).__name__} ({relation}).")


@price.register
def _(event: ev.NonPrivate, orders: Floats, relation: Relation) -> Charge:  # noqa: ARG001  # same for all
    return Charge(np.full(len(orders), np.inf))


@price.register
def _(event: ev.Gaussian, orders: Floats, relation: Relation) -> Charge:
    # Mironov 2017, Prop. 7 (arXiv:1702.07476).
    return Charge(orders * gaussian_shift(event, relation) ** 2 / 2)


@price.register
def _(event: ev.Laplace, orders: Floats, relation: Relation) -> Charge:
    # Mironov 2017, Prop. 6, and at most order * epsilon^2 / 2, which holds for every epsilon-DP
    # mechanism (Bun & Steinke 2016, Prop. 3.3).
    epsilon = rounded_epsilon(event, relation)
    inner = (orders - 1) * np.expm1((1 - 2 * orders) * epsilon) / (2 * orders - 1)
    exact = epsilon + np.log1p(inner) / (orders - 1)
    square = orders * epsilon**2 / 2
    return Charge(np.where(orders * epsilon < 1e-4, square, np.minimum(exact, square)))


@price.register
def _(event: ev.PureDP, orders: Floats, relation: Relation) -> Charge:
    return Charge(_pure(rounded_epsilon(event, relation), orders))


@price.register
def _(event: ev.ApproximateDP, orders: Floats, relation: Relation) -> Charge:
    # Pure DP that fails with probability delta: Kairouz, Oh & Viswanath 2015, Thm. 3.2.
    epsilon, delta = epsilon_and_delta(event, relation)
    return Charge(_pure(epsilon, orders), delta)


@price.register
def _(event: ev.RandomizedResponse, orders: Floats, relation: Relation) -> Charge:  # noqa: ARG001  # same for all
    nodes = renyi.response_nodes(response_law(event))
    return Charge(renyi.log_moments(nodes, orders) / (orders - 1))


@price.register
def _(event: ev.Shuffled, orders: Floats, relation: Relation) -> Charge:  # noqa: ARG001  # same for all
    """Price shuffled reports by the pair of laws that dominates them (see `accounting.shuffle`)."""
    epsilon, clones = local_guarantee(event)
    if epsilon == 0:
        return Charge(np.zeros(len(orders)))
    losses, _, q = shuffled_atoms(epsilon, event.n_reports, clones)
    kept = (q > 0) & (losses != 0)
    values = renyi.log_moments(renyi.Nodes(np.log(q[kept]), losses[kept]), orders) / (orders - 1)
    return Charge(np.minimum(values, _pure(epsilon, orders)))


@price.register
def _(event: ev.Exponential, orders: Floats, relation: Relation) -> Charge:
    """Price the exponential mechanism by the worst privacy loss whose values span at most epsilon.

    The worst such loss takes two values, s and s - epsilon (Dong, Durfee & Rogers 2020,
    arXiv:1909.13830), whose probabilities follow from P and Q summing to one. With order a and
    e = epsilon, the moment E_Q[(P/Q)^a] is exp((a - 1) s) (1 - exp(-a e)) / (a (1 - exp(-e))) at
    the worst s. It never exceeds epsilon^2 / 8-zCDP (Cesar & Rogers 2021, arXiv:2004.07223).
    """
    epsilon = rounded_epsilon(event, relation)
    concentrated = orders * epsilon**2 / 8
    if epsilon == 0:
        return Charge(concentrated)
    log_all = np.log(-np.expm1(-orders * epsilon))
    log_rest = -epsilon + np.log(-np.expm1(-(orders - 1) * epsilon))
    worst = np.log1p(-1 / orders) + log_all - log_rest
    log_part = math.log(-math.expm1(-epsilon))
    exact = worst + (log_all - np.log(orders) - log_part) / (orders - 1)
    cancels = (orders - 1) * epsilon < 1e-3  # near zero the two agree
    return Charge(np.where(cancels, concentrated, np.minimum(exact, concentrated)))


@price.register
def _(event: ev.RenyiCurve, orders: Floats, relation: Relation) -> Charge:
    # Chords bound a curve between its orders: (order - 1) times the divergence is convex, and 0 at
    # order 1.
    if relation is Relation.REPLACE_ONE and event.replace_factor != 1:
        raise UnsupportedEvent(
            "this Rényi curve is known only for records added or removed, not replaced. "
            "Declare replace_factor=1 if it is proved for replacement, or price add_remove."
        )
    known = np.array((1.0, *event.orders))
    # A divergence never falls with the order, so a smaller value at a higher order holds here too.
    values = np.minimum.accumulate(np.array(event.values)[::-1])[::-1]
    height = np.append(0.0, values * (known[1:] - 1))
    return Charge(np.interp(orders, known, height, right=np.inf) / (orders - 1))


@price.register
def _(event: ev.ZeroConcentratedDP, orders: Floats, relation: Relation) -> Charge:
    rho, mass = event.rho, event.delta
    if relation is Relation.REPLACE_ONE and event.replace_factor != 1:
        if mass:
            raise UnsupportedEvent("approximate zCDP has no price for replacement. Use add_remove.")
        rho = 4 * rho  # group privacy for two records: Bun & Steinke 2016, Prop. 1.9
    return Charge(orders * rho, mass)


@price.register
def _(event: ev.DiscreteGaussian, orders: Floats, relation: Relation) -> Charge:
    # Canonne, Kamath & Steinke 2020, Thm. 4 (arXiv:2004.00010).
    return Charge(orders * (whole_shift(event, relation) / event.noise_std) ** 2 / 2)


@price.register
def _(event: ev.DiscreteLaplace, orders: Floats, relation: Relation) -> Charge:
    return Charge(_pure(rounded_epsilon(event, relation), orders))


@price.register
def _(event: ev.GaussianMixture, orders: Floats, relation: Relation) -> Charge:
    """Price a mixture of Gaussians by joint convexity: as if the number drawn were released."""
    if relation is Relation.REPLACE_ONE:
        raise UnsupportedEvent("replacing a unit with several contributions has no known price.")
    return _mixed_gaussians(event.shifts, event.weights, event.noise_multiplier, orders)


@price.register
def _(event: ev.SampledWithReplacement, orders: Floats, relation: Relation) -> Charge:
    """Price sampling with replacement as if the number of times a record is drawn were released."""
    inner = event.event
    if relation is Relation.ADD_REMOVE or not isinstance(inner, ev.Gaussian):
        raise UnsupportedEvent(
            "sampling with replacement is priced for Gaussian noise under replace_one and zero_out."
        )
    counts, weights = binomial_weights(event.batch_size, 1 / event.n_records)
    noise = 1 / gaussian_shift(inner, relation)
    return _mixed_gaussians(counts, weights, noise, orders)


@price.register
def _(event: ev.PoissonSampled, orders: Floats, relation: Relation) -> Charge:
    return _poisson(event.event, event.rate, orders, relation)


@price.register
def _(event: ev.TruncatedPoissonSampled, orders: Floats, relation: Relation) -> Charge:
    """Price a truncated Poisson sample as a mixture over the number of other records drawn.

    Moments are jointly convex, so those of the mixture are at most the mean over that number. If
    fewer than `max_batch` others are drawn, nothing is cut and the step is a Poisson sample.
    Otherwise the record joins with a smaller probability, in the place of another record, which
    costs at most as much as a replacement at `rate`. There are at most `n_records` others.
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
    return Charge(_log_mean(logs, weight) / (orders - 1))


@price.register
def _(event: ev.FixedSizeSampled, orders: Floats, relation: Relation) -> Charge:
    """Price a sample of fixed size.

    If one record is replaced, or blanked, both are priced as a replacement. The bound is tighter
    than that of Wang, Balle & Kasiviswanathan 2019 (arXiv:1808.00087).
    """
    fraction, inner = event.batch_size / event.n_records, event.event
    if relation is not Relation.ADD_REMOVE:
        return _replaced(inner, fraction, orders)
    # A sample holds the added record, in the place of another one, with this probability at most.
    if not isinstance(inner, ev.Gaussian):
        raise UnsupportedEvent(
            "a sample of fixed size has a Rényi curve under add_remove for Gaussian noise only. "
            "Use tacit.epsilon, or ask for replace_one or zero_out."
        )
    shift = gaussian_shift(inner, Relation.REPLACE_ONE)
    if fraction == 1:
        return Charge(orders * shift**2 / 2)
    return Charge(renyi.poisson_divergence(orders, rate=fraction, shift=shift))


@price.register
def _(event: ev.RandomAllocation, orders: Floats, relation: Relation) -> Charge:
    """Price one epoch of random allocation: amplified for Gaussian noise, else one full release.

    The price of one full release always holds: given the allocation, one release sees the record,
    and the divergence of a mixture is at most the worst of its parts.
    """
    inner = event.event
    plain = price(inner, orders, relation)
    if not isinstance(inner, ev.Gaussian):
        return plain
    steps, shift = event.steps, gaussian_shift(inner, Relation.ADD_REMOVE)
    removal = partial(removal_divergence, steps=steps, shift=shift)
    addition = partial(addition_divergence, steps=steps, shift=shift)
    if relation is not Relation.REPLACE_ONE:
        values = np.maximum(removal(orders), addition(orders))
    else:
        # Remove the old record, add the new one: Mironov 2017, Prop. 11 with p = q = 2.
        values = (orders - 0.5) / (orders - 1) * removal(2 * orders) + addition(2 * orders - 1)
    return Charge(np.minimum(values, plain.values))


@price.register
def _(event: ev.BestOf, orders: Floats, relation: Relation) -> Charge:
    """Price the release of only the best of a random number of runs (private selection).

    Papernot & Steinke 2022 (arXiv:2110.03620): Theorem 2 for negative binomial numbers of runs
    given at least one (geometric: shape 1, logarithmic: shape 0), Theorem 6 for a Poisson number.
    If the number is bounded, releasing all runs costs its bound times the price of one.
    """
    law = run_law(event)
    run = _total(event.event, orders, relation)
    if isinstance(law, BinomialRuns | TruncatedRuns):
        return Charge(law.most * run)
    on_grid = _total_on_grid(event.event, relation)
    both = np.append(orders, _GRID)
    values = np.append(run, on_grid)
    if isinstance(law, NegativeBinomialRuns):
        # The least (1 + shape) ((1 - 1 / b) run(b) + log(1 / g) / b) over orders b.
        cost = (1 - 1 / _GRID) * on_grid - math.log(law.halting) / _GRID
        values = values + (1 + law.shape) * float(cost.min())
    else:
        # Delta of one run at epsilon = log(1 + 1 / (order - 1)), for every order.
        logs = log_deltas(_GRID, on_grid, -np.log1p(-1 / both)[:, None])  # (orders, grid)
        values = values + event.mean * np.exp(np.minimum(logs.min(axis=1), 0.0))
    values = values + max(math.log(event.mean), 0.0) / (both - 1)
    # A divergence never falls with the order, so a smaller value at a higher order holds here too.
    higher = np.append(np.minimum.accumulate(values[len(orders) :][::-1])[::-1], np.inf)
    return Charge(np.minimum(values[: len(orders)], higher[np.searchsorted(_GRID, orders)]))


@price.register
def _(event: ev.OneOf, orders: Floats, relation: Relation) -> Charge:
    """Price a random choice among events: moments of a released choice are means of moments."""
    logs = [_total(part, orders, relation) * (orders - 1) for part in event.parts]
    weight = np.array(event.weights)[:, None] / math.fsum(event.weights)
    return Charge(_log_mean(np.stack(logs), weight) / (orders - 1))


@price.register
def _(event: ev.ChosenOf, orders: Floats, relation: Relation) -> Charge:
    """Price a free choice among events: a moment is at most the largest of those of all parts."""
    return Charge(np.max([_total(part, orders, relation) for part in event.parts], axis=0))


def _mixed_gaussians(
    shifts: tuple[float, ...], weights: tuple[float, ...], noise: float, orders: Floats
) -> Charge:
    squares = (np.array(shifts) / noise) ** 2 / 2
    logs = np.multiply.outer(squares, orders * (orders - 1))
    weight = np.array(weights)[:, None] / math.fsum(weights)
    return Charge(_log_mean(logs, weight) / (orders - 1))


def _poisson(inner: Event, rate: float, orders: Floats, relation: Relation) -> Charge:
    """Price `inner` on a Poisson sample, by the dominating pairs of Zhu, Dong & Wang 2022."""
    replace = relation is Relation.REPLACE_ONE
    if rate < 1 and isinstance(inner, ev.Gaussian):
        divergence = renyi.opposed_divergence if replace else renyi.poisson_divergence
        shift = gaussian_shift(inner, Relation.ADD_REMOVE)
        return Charge(divergence(orders, rate=rate, shift=shift))
    if rate < 1 and isinstance(inner, BoundedLoss):
        if replace:
            return Charge(_pure(_replaced_epsilon(inner, rate), orders))
        sampled = renyi.poisson_sampled(_nodes(inner, Relation.ADD_REMOVE), rate)
        both = (renyi.log_moments(one, orders) for one in (sampled, renyi.reverse(sampled)))
        return Charge(np.maximum(*both) / (orders - 1))
    return _sampled(inner, rate, orders, relation)


def _replaced(inner: Event, fraction: float, orders: Floats) -> Charge:
    """Price `inner` on a sample that holds `fraction` of the records, with one record replaced."""
    if fraction < 1 and isinstance(inner, ev.Gaussian):
        shift = gaussian_shift(inner, Relation.REPLACE_ONE)
        return Charge(renyi.fixed_size_divergence(orders, fraction=fraction, shift=shift))
    if fraction < 1 and isinstance(inner, BoundedLoss):
        nodes = renyi.fixed_size_sampled(_nodes(inner, Relation.REPLACE_ONE), fraction)
        return Charge(renyi.log_moments(nodes, orders) / (orders - 1))
    return _sampled(inner, fraction, orders, Relation.REPLACE_ONE)


def _sampled(inner: Event, rate: float, orders: Floats, relation: Relation) -> Charge:
    """Price `inner` on a Poisson sample or one of fixed size, where both have the same price.

    They have for (epsilon, delta)-DP: the hockey-stick divergence at 1 + rate (e^epsilon - 1) is at
    most `rate` times the delta between outputs with and without the record in the sample, by
    advanced joint convexity (Balle, Barthe & Gaboardi 2018).
    """
    if rate == 1:
        return price(inner, orders, relation)
    if isinstance(inner, ev.ApproximateDP):
        epsilon, delta = epsilon_and_delta(inner, relation)
        return Charge(_pure(sampled_epsilon(epsilon, rate), orders), rate * delta)
    raise UnsupportedEvent(
        f"no price is known for {type(inner).__name__} on a random sample. "
        "Sample Gaussian, Laplace, pure or approximate DP releases instead."
    )


def _nodes(event: BoundedLoss, relation: Relation) -> renyi.Nodes:
    """Return a pair of laws that dominates `event`; its divergences are equal in both orders."""
    if isinstance(event, ev.RandomizedResponse):
        return renyi.response_nodes(response_law(event))
    epsilon = rounded_epsilon(event, relation)
    nodes = renyi.laplace_nodes if isinstance(event, ev.Laplace) else renyi.pure_nodes
    return nodes(epsilon)


def _replaced_epsilon(event: BoundedLoss, rate: float) -> float:
    """Return the pure epsilon of `event` on a Poisson sample when one record is replaced.

    Let a, b, c be the densities of an output without the record, with the old and with the new one,
    q the rate and f the replace_factor. The densities on the sample have the ratio
    (1 - q + q b/a) / (1 - q + q c/a), where b <= e^epsilon a and b <= e^(f epsilon) c. With
    b = e^(f epsilon) c it grows with c, so it is largest at b/a = e^epsilon and
    c/a = e^((1 - f) epsilon).
    """
    epsilon = rounded_epsilon(event, Relation.ADD_REMOVE)
    factor = 1.0 if isinstance(event, ev.RandomizedResponse) else event.replace_factor
    return sampled_epsilon(epsilon, rate) - sampled_epsilon((1 - factor) * epsilon, rate)


def _pure(epsilon: float, orders: Floats) -> Floats:
    return renyi.log_moments(renyi.pure_nodes(epsilon), orders) / (orders - 1)


def _total(event: Event, orders: Floats, relation: Relation) -> Floats:
    """Return the Rényi curve of all of `event`, which is a part of another event."""
    total = np.zeros(len(orders))
    for part, count in flatten(event).items():
        one = price(part, orders, relation)
        if one.delta_mass:
            raise UnsupportedEvent(
                "approximate DP inside BestOf, OneOf or ChosenOf has no Rényi curve, so it has no "
                "price together with a release that only has one."
            )
        total += count * one.values
    return total


@lru_cache(maxsize=64)
def _total_on_grid(event: Event, relation: Relation) -> Floats:
    return _total(event, _GRID, relation)


def _log_mean(logs: Floats, weight: Floats) -> Floats:
    """Return the log of the weighted mean of exp(logs) over the first axis, precise also near 0."""
    possible = weight[:, 0] > 0
    logs, weight = logs[possible], weight[possible]
    near = np.log1p((weight * np.expm1(np.minimum(logs, 30.0))).sum(axis=0))
    far = log_sum_exp((logs + np.log(weight)).T)
    return np.where(logs.max(axis=0) < 30, near, far)
