"""Rényi divergences of pairs of distributions, for many real orders at once.

A pair (P, Q) is represented by `Nodes`: the Q-mass of each node and the log-likelihood ratio
log(P/Q) there. Sampling, reversing and symmetrizing a pair are operations on its nodes;
`log_moments` then gives log E_Q[(P/Q)^order].

It is accurate because E_Q[P/Q] = 1. With L = log(P/Q) and m(x) = exp(x) - 1 - x,

    E_Q[(P/Q)^order] - 1  =  E_Q[ m(order * L) - order * m(L) ],

whose terms are second order in L. Nothing of order one cancels, so a divergence of 1e-20 keeps its
digits.

**Gaussian noise on a random sample.** The functions `*_divergence` return the divergence of ONE
release, for noise of standard deviation 1 and a record that shifts the mean by `shift`. There are
three regimes of the order, with shift s and rate q:

* order * s small: one trapezoid grid shared by all orders, exact to rounding;
* order * s large, sampling still helps: the same sum on the few windows that carry mass;
* beyond, exp((order - 1) s^2 / 2) outgrows 1 / q and Minkowski's inequality is exact to rounding.

The integer-order sum and the fractional series of Mironov, Talwar & Zhang 2019 (arXiv:1908.10530)
give the same values; the grid needs no case distinction and prices 60 orders in a millisecond.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tacit._arrays import Floats, Indices
from tacit.accounting.one_event import ResponseLaw, log_mixture, log_sum_exp

TAIL = 13.0
"""Standard deviations of normal mass kept on each side: the rest, 1e-38, is below rounding."""
_STRIP_NATS = 75.0
"""Trapezoid sums below have error at most exp(-75) relative to terms of order one."""
_SERIES_BELOW = 0.02
_LARGEST_EXPONENT = 500.0

_SHARED_REACH = 120.0
"""Orders whose mass reaches at most this many standard deviations share one grid."""
_LONGEST_REACH = 3000.0
"""Farthest reach for which an order gets a grid of its own; beyond it, closed bounds are used."""
_LARGEST_SHIFT = 30.0
"""Shift above which closed bounds lose nothing of note and a grid would be too fine."""
_EXPLODED = 40.0  # nats above the threshold from which Minkowski's bound is exact to rounding


class Nodes(NamedTuple):
    """A pair of laws (P, Q) on finitely many nodes; mass that no node has is equal under both."""

    log_weight: Floats  # log of the Q-mass of each node
    log_ratio: Floats  # log(P/Q) at each node


def log_moments(nodes: Nodes, orders: Floats) -> Floats:
    """Return log E_Q[(P/Q)^order], which is (order - 1) times the Rényi divergence, at `orders`."""
    weight = np.exp(nodes.log_weight)
    # Q-mass times m(log_ratio), without overflow at far nodes.
    ratio, far = nodes.log_ratio, nodes.log_ratio > 30.0
    beyond = np.exp(np.minimum(nodes.log_weight + ratio, 0.0)) - weight * (1 + ratio)
    linear = np.where(far, beyond, weight * excess_exp(np.where(far, 0.0, ratio)))  # (nodes,)
    exponent = np.multiply.outer(orders, nodes.log_ratio)  # (orders, nodes)
    logs = exponent + nodes.log_weight
    small = logs.max(axis=1, initial=-math.inf) <= _LARGEST_EXPONENT
    result = np.empty(len(orders))
    if not small.all():
        result[~small] = log_sum_exp(logs[~small])
    if small.any():
        exponent, logs, some = exponent[small], logs[small], orders[small]
        far = exponent > _LARGEST_EXPONENT  # add the log weight before exp, against overflow
        terms = weight * excess_exp(np.where(far, 0.0, exponent))
        terms[far] = np.exp(logs[far])
        result[small] = np.log1p(np.maximum(terms.sum(axis=1) - some * linear.sum(), 0.0))
    return result


def poisson_sampled(nodes: Nodes, rate: float) -> Nodes:
    """Return the pair ((1 - rate) Q + rate P, Q), for a record removed from a Poisson sample.

    See Zhu, Dong & Wang 2022 (arXiv:2106.08567). `reverse` of the result is for an added record if
    (P, Q) and (Q, P) have equal divergences, which holds for every pair in this file.
    """
    return Nodes(nodes.log_weight, log_mixture(rate, nodes.log_ratio))


def reverse(nodes: Nodes) -> Nodes:
    """Return the pair (Q, P) of a pair (P, Q), to compare in the opposite direction."""
    return Nodes(nodes.log_weight + nodes.log_ratio, -nodes.log_ratio)


def fixed_size_sampled(nodes: Nodes, fraction: float) -> Nodes:
    """Return a symmetric pair that dominates a mechanism on a sample of `fraction` of the records.

    The sample is drawn without replacement, and one record is replaced. `nodes` is a pair (P, Q)
    that dominates the mechanism without sampling. On the sample, the hockey-stick divergence at
    a >= 1 is at most that of ((1 - fraction) Q + fraction P, Q), in both directions: Balle, Barthe
    & Gaboardi 2018, Section 4 (arXiv:1807.01647). The pair returned has these values at a >= 1 and
    their mirror image at a < 1: for each mass w at ratio r >= 1, a mass w r at ratio 1 / r.
    """
    above = nodes.log_ratio > 0
    half = poisson_sampled(Nodes(nodes.log_weight[above], nodes.log_ratio[above]), fraction)
    return Nodes(*(np.concatenate(parts) for parts in zip(half, reverse(half), strict=True)))


def pure_nodes(epsilon: float) -> Nodes:
    """Return the pair of randomized response, which dominates every epsilon-DP mechanism."""
    # Kairouz, Oh & Viswanath 2015, Thm. 3.2 (arXiv:1311.0776).
    log_rare = -np.logaddexp(0.0, epsilon)
    return Nodes(np.array([log_rare, log_rare + epsilon]), np.array([epsilon, -epsilon]))


def response_nodes(law: ResponseLaw) -> Nodes:
    """Return the exact output laws (P, Q) of randomized response for two different true answers."""
    return Nodes(np.log([law.other, law.truth]), np.array([law.loss, -law.loss]))


def laplace_nodes(epsilon: float) -> Nodes:
    """Return a discrete pair that dominates Laplace noise of scale 1 / epsilon and shift 1.

    log(P/Q) is -epsilon below 0, epsilon above 1 and linear between. The range [0, 1] is cut into
    cells, and the mass of a cell is moved to its two ends so that its P- and Q-mass are kept. This
    spreads the law of P/Q and keeps its mean, which can only raise a convex divergence ("connecting
    the dots", Doroshenko et al. 2022).
    """
    cells = int(np.clip(epsilon / 0.01, 400, 20_000))
    step = epsilon / cells
    left = np.arange(cells) * step  # epsilon times the left end of each cell
    log_mass = -left + math.log(-math.expm1(-step) / 2)
    to_left = log_mass - np.logaddexp(0.0, -step)
    to_right = log_mass - np.logaddexp(0.0, step)
    return Nodes(
        np.concatenate(([-math.log(2)], to_left, to_right, [-epsilon - math.log(2)])),
        np.concatenate(([-epsilon], 2 * left - epsilon, 2 * (left + step) - epsilon, [epsilon])),
    )


def gaussian_nodes(shift: float, low: float, high: float, step: float) -> Nodes:
    """Return the pair N(shift, 1), N(0, 1) on outputs from `low` to `high`, `step` apart."""
    z = np.arange(math.floor(low / step), math.ceil(high / step) + 1, dtype=float) * step
    return Nodes(_log_normal(z) + math.log(step), shift * z - shift * shift / 2)


def gaussian_half_nodes(shift: float, high: float) -> Nodes:
    """Return the pair N(shift, 1), N(0, 1) on quadrature nodes where the first is the likelier."""
    # The half line has an edge, where a plain trapezoid sum would lose its accuracy.
    width = min(1.0, 2.0 / shift)
    panels = math.ceil((high - shift / 2) / width)
    x, w = np.polynomial.legendre.leggauss(16)
    starts = shift / 2 + width * np.arange(panels)[:, None]
    z = (starts + width * (x + 1) / 2).ravel()
    log_weight = _log_normal(z) + np.tile(np.log(w * width / 2), panels)
    return Nodes(log_weight, shift * z - shift * shift / 2)


def trapezoid_step(shift: float, negative_power: float = 0.0) -> float:
    """Return a step at which the trapezoid rule over outputs z is exact to rounding.

    The integrand may contain the power -`negative_power` of a mixture 1 - rate + rate P/Q. It is
    analytic where rate * exp(shift * z) is not a negative real number, so for |Im z| = a < pi /
    shift. There its modulus grows by at most exp(a^2 / 2) times 1 / cos(shift * a / 2) to that
    power. The error is exp(-2 pi a / step) times this growth (Trefethen & Weideman 2014, Thm. 5.1).
    """
    angle = min(0.95 * math.pi, math.sqrt(80 / max(negative_power, 1e-9)))
    a = min(4 * math.pi, angle / shift)
    growth = a * a / 2 - negative_power * math.log(math.cos(min(angle, shift * a) / 2))
    return 2 * math.pi * a / (_STRIP_NATS + growth)


def poisson_divergence(orders: Floats, *, rate: float, shift: float) -> Floats:
    """Return the Rényi divergence of Gaussian noise on a Poisson sample, a record added or removed.

    It is D((1 - rate) N(0, 1) + rate N(shift, 1) || N(0, 1)), that of a removed record, which is
    the larger one by Mironov, Talwar & Zhang 2019, Theorem 5.
    """
    # Minkowski: ||1 - q + q X||_order <= 1 - q + q ||X||_order, with X = dN(shift)/dN(0).
    growth = (orders - 1) * shift**2 / 2
    bound = orders / (orders - 1) * log_mixture(rate, growth)
    excess = growth + math.log(rate)
    shared = (orders * shift <= _SHARED_REACH) & (excess <= _EXPLODED) & (shift <= _LARGEST_SHIFT)
    if shared.any():
        some = orders[shared]
        base = gaussian_nodes(shift, -TAIL, some.max() * shift + TAIL, trapezoid_step(shift))
        bound[shared] = log_moments(poisson_sampled(base, rate), some) / (some - 1)
    for i in np.flatnonzero(~shared & (excess <= 1.0) & (shift <= _LARGEST_SHIFT)):
        base = _windows(float(orders[i]), rate, shift)
        value = log_moments(poisson_sampled(base, rate), orders[i : i + 1])[0] / (orders[i] - 1)
        bound[i] = min(bound[i], value)
    return bound


def opposed_divergence(orders: Floats, *, rate: float, shift: float) -> Floats:
    """Return the Rényi divergence of Gaussian noise on a Poisson sample, with a record replaced.

    With N(m) normal of mean m and variance 1, it is D((1 - rate) N(0) + rate N(shift) ||
    (1 - rate) N(0) + rate N(-shift)), the same in both directions. Where it is not integrated, the
    smaller of two bounds is used: the divergence without sampling and, as the second mixture is at
    least (1 - rate) N(0), the divergence of the first from N(0) minus log(1 - rate).
    """
    from_noise = poisson_divergence(orders, rate=rate, shift=shift) - math.log1p(-rate)
    bound = np.minimum(2 * orders * shift**2, from_noise)

    def exact(some: Floats) -> Floats:
        high = 2 * some.max() * shift + TAIL
        step = trapezoid_step(shift, negative_power=float(some.max()))
        base = gaussian_nodes(shift, -TAIL - shift, high, step)
        z = (base.log_ratio + shift * shift / 2) / shift
        second = log_mixture(rate, -shift * z - shift * shift / 2)
        nodes = Nodes(base.log_weight + second, log_mixture(rate, base.log_ratio) - second)
        return log_moments(nodes, some) / (some - 1)

    excess = (orders - 1) * shift**2 / 2 + math.log(rate)
    for some in _groups(2 * orders * shift, excess, shift):
        bound[some] = np.minimum(bound[some], exact(orders[some]))
    return bound


def fixed_size_divergence(orders: Floats, *, fraction: float, shift: float) -> Floats:
    """Return a bound on the Rényi divergence of Gaussian noise on a sample of fixed size.

    One record is replaced; `shift` is how far that moves the mean if the record is in the sample,
    in standard deviations. The bound is the same in both directions; see `fixed_size_sampled`.
    """
    growth = (orders - 1) * shift**2 / 2
    # The mirrored half adds at most one to the moment of the removal pair.
    moment = orders * log_mixture(fraction, growth)
    bound = np.minimum(np.logaddexp(moment, 0.0) / (orders - 1), orders * shift**2 / 2)

    def exact(some: Floats) -> Floats:
        base = gaussian_half_nodes(shift, some.max() * shift + TAIL)
        return log_moments(fixed_size_sampled(base, fraction), some) / (some - 1)

    for some in _groups(orders * shift, growth + math.log(fraction), shift):
        bound[some] = np.minimum(bound[some], exact(orders[some]))
    return bound


def excess_exp(x: Floats) -> Floats:
    """Return exp(x) - 1 - x with full relative precision also for small x."""
    with np.errstate(over="ignore"):  # callers mask infinite values
        result = np.expm1(x) - x
    small = np.abs(x) < _SERIES_BELOW
    s = x[small]
    series = 1 + s / 3 * (1 + s / 4 * (1 + s / 5 * (1 + s / 6 * (1 + s / 7))))
    result[small] = s * s / 2 * series
    return result


def _log_normal(z: Floats) -> Floats:
    return -z * z / 2 - math.log(2 * math.pi) / 2


def _groups(reach: Floats, excess: Floats, shift: float) -> Iterator[Indices]:
    """Yield indices of orders whose divergence is to be integrated, in groups that share nodes.

    Orders share one grid if their grids would have a short `reach`. An order of longer reach gets
    its own grid if its `excess` is small, which means that sampling lowers its divergence.
    """
    if shift > _LARGEST_SHIFT:
        return
    shared = (reach <= _SHARED_REACH) & (excess <= _EXPLODED)
    if shared.any():
        yield np.flatnonzero(shared)
    yield from np.flatnonzero(~shared & (reach <= _LONGEST_REACH) & (excess <= 1.0))[:, None]


def _windows(order: float, rate: float, shift: float) -> Nodes:
    """Return nodes only where the integrand of the divergence is at least e^-60 times its peak.

    It is the normal density of z times (1 - rate + rate P/Q)^order. Its log has at most two peaks
    and a second derivative of at least -1, so if it is 61 below its maximum at both ends of a cell
    of width 2, it is at least 60.5 below it inside. All such cells together contain at most
    (order * shift) exp(-60) of the integral, far below rounding; they get no nodes.
    """
    edges = np.arange(-TAIL - 1, order * shift + TAIL + 2, 2.0)
    log_ratio = poisson_sampled(Nodes(edges, shift * edges - shift**2 / 2), rate).log_ratio
    height = order * log_ratio - edges**2 / 2
    keep = (height > height.max() - 61) | (np.abs(edges) <= TAIL)
    cells = keep[:-1] | keep[1:]
    step = 2.0 / math.ceil(2.0 / trapezoid_step(shift))
    inside = np.arange(0.0, 2.0 - step / 2, step)
    z = (edges[:-1][cells][:, None] + inside).ravel()
    base = gaussian_nodes(shift, 0.0, 0.0, step)  # one node, for its constant
    return Nodes(base.log_weight[0] - z * z / 2, shift * z - shift**2 / 2)
