"""Rényi moments of a pair of distributions, from nodes and weights.

A pair (P, Q) is held as `Nodes`: the Q-mass of each node and the log-likelihood ratio log(P/Q)
there. Sampling, reversing and symmetrizing a pair are operations on its nodes; `log_moments` then
gives log E_Q[(P/Q)^order] for many orders at once.

What makes it accurate: E_Q[P/Q] = 1, so with L = log(P/Q) and m(x) = exp(x) - 1 - x,

    E_Q[(P/Q)^order] - 1  =  E_Q[ m(order * L) - order * m(L) ],

whose terms are second order in L. Nothing of order one cancels, so a divergence of 1e-20 keeps its
digits. Every divergence below is relative to one occurrence of an event.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating]

TAIL = 13.0
"""Standard deviations of normal mass kept on each side: the rest, 1e-38, is below rounding."""

_STRIP_NATS = 75.0
"""Trapezoid sums below have error at most exp(-75) relative to terms of order one."""

_SERIES_BELOW = 0.02
_LARGEST_EXPONENT = 500.0


class Nodes(NamedTuple):
    """A pair (P, Q) on finitely many nodes; mass not listed sits where P = Q."""

    log_weight: FloatArray
    """log of the Q-mass of each node."""
    log_ratio: FloatArray
    """log(P/Q) at each node."""


def log_moments(nodes: Nodes, orders: FloatArray) -> FloatArray:
    """log E_Q[(P/Q)^order] for every order above 1."""
    weight = np.exp(nodes.log_weight)
    linear = _weighted_excess(nodes)  # (nodes,)
    exponent = np.multiply.outer(orders, nodes.log_ratio)  # (orders, nodes)
    logs = exponent + nodes.log_weight
    huge = logs.max(axis=1) > _LARGEST_EXPONENT
    result = np.empty(len(orders))
    if huge.any():
        result[huge] = log_sum_exp(logs[huge])
    small = ~huge
    if small.any():
        exponent, logs, some = exponent[small], logs[small], orders[small]
        far = exponent > _LARGEST_EXPONENT  # the weight must join the exponent before exp
        terms = weight * excess_exp(np.where(far, 0.0, exponent))
        if far.any():
            terms[far] = np.exp(logs[far])
        result[small] = np.log1p(np.maximum(terms.sum(axis=1) - some * linear.sum(), 0.0))
    return result


def poisson_sampled(nodes: Nodes, rate: float) -> Nodes:
    """The pair ((1 - rate) Q + rate P, Q): what Poisson sampling makes of a removal.

    Zhu, Dong & Wang 2022 (arXiv:2106.08567); `reverse` it for an addition when (P, Q)
    and (Q, P) are equally hard to tell apart, which holds for every pair in this file.
    """
    return Nodes(nodes.log_weight, _diluted(nodes.log_ratio, rate))


def reverse(nodes: Nodes) -> Nodes:
    """The pair (Q, P)."""
    return Nodes(nodes.log_weight + nodes.log_ratio, -nodes.log_ratio)


def fixed_size_sampled(nodes: Nodes, fraction: float) -> Nodes:
    """A symmetric pair dominating `fraction` of the records drawn without replacement.

    Balle, Barthe & Gaboardi 2018, Section 4 (arXiv:1807.01647): with (P, Q) dominating the
    mechanism when a record is replaced, the hockey-stick divergence at a >= 1 is at most that of
    ((1 - fraction) Q + fraction P, Q), in both directions. Those values for a >= 1, mirrored for
    a < 1, are the profile of the pair below: mass w at ratio r >= 1, mass w r at ratio 1 / r.
    """
    above = nodes.log_ratio > 0
    half = poisson_sampled(Nodes(nodes.log_weight[above], nodes.log_ratio[above]), fraction)
    return join(half, reverse(half))


def join(first: Nodes, second: Nodes) -> Nodes:
    """One pair on the nodes of both."""
    return Nodes(*(np.concatenate(parts) for parts in zip(first, second, strict=True)))


def pure_nodes(epsilon: float) -> Nodes:
    """Randomized response at `epsilon`: dominates every epsilon-DP mechanism.

    Kairouz, Oh & Viswanath 2015, Thm. 3.2 (arXiv:1311.0776).
    """
    log_rare = -np.logaddexp(0.0, epsilon)
    return Nodes(np.array([log_rare, log_rare + epsilon]), np.array([epsilon, -epsilon]))


def response_nodes(random_probability: float, n_options: int) -> Nodes:
    """Randomized response among `n_options` between two different true answers, exactly."""
    other = random_probability / n_options
    true = 1 - random_probability + other
    ratio = math.log1p((1 - random_probability) / other)
    return Nodes(np.log([other, true]), np.array([ratio, -ratio]))


def laplace_nodes(epsilon: float) -> Nodes:
    """A discrete pair dominating Laplace noise of scale 1 / epsilon and shift 1.

    The log-ratio is +-epsilon outside [0, 1] and linear inside. Each of the cells inside gives its
    mass to its two ends so that P- and Q-mass are kept: a mean-preserving spread of P/Q, which
    can only raise a convex divergence (the connect-the-dots idea of Doroshenko et al. 2022).
    """
    cells = int(np.clip(epsilon / 0.01, 400, 20_000))
    step = epsilon / cells
    left = np.arange(cells) * step  # epsilon times the left end of each cell
    log_mass = -left + math.log(-math.expm1(-step) / 2)
    to_left = log_mass - np.logaddexp(0.0, -step)
    to_right = log_mass - np.logaddexp(0.0, step)
    return Nodes(
        np.concatenate(([-math.log(2)], to_left, to_right, [-epsilon - math.log(2)])),
        np.concatenate(
            ([-epsilon], 2 * left - epsilon, 2 * (left + step) - epsilon, [epsilon]),
        ),
    )


def gaussian_nodes(shift: float, low: float, high: float, step: float) -> Nodes:
    """N(shift, 1) against N(0, 1) on a uniform grid of z from `low` to `high`."""
    z = np.arange(math.floor(low / step), math.ceil(high / step) + 1) * step
    return Nodes(_log_normal(z) + math.log(step), shift * z - shift * shift / 2)


def gaussian_half_nodes(shift: float, high: float) -> Nodes:
    """N(shift, 1) against N(0, 1) where the first is likelier, by Gauss-Legendre panels.

    The half line has an edge, where a plain trapezoid sum would lose its accuracy.
    """
    width = min(1.0, 2.0 / shift)
    panels = math.ceil((high - shift / 2) / width)
    x, w = np.polynomial.legendre.leggauss(16)
    starts = shift / 2 + width * np.arange(panels)[:, None]
    z = (starts + width * (x + 1) / 2).ravel()
    log_weight = _log_normal(z) + np.tile(np.log(w * width / 2), panels)
    return Nodes(log_weight, shift * z - shift * shift / 2)


def opposed_nodes(shift: float, rate: float, low: float, high: float, step: float) -> Nodes:
    """(1 - rate) N(0) + rate N(shift) against (1 - rate) N(0) + rate N(-shift)."""
    base = gaussian_nodes(shift, low, high, step)
    z = (base.log_ratio + shift * shift / 2) / shift
    first = _diluted(base.log_ratio, rate)
    second = _diluted(-shift * z - shift * shift / 2, rate)
    return Nodes(base.log_weight + second, first - second)


def trapezoid_step(shift: float, negative_power: float = 0.0) -> float:
    """Step at which the trapezoid sum in z is exact to rounding.

    The integrand is analytic where rate * exp(shift * z) is not a negative real, so for
    |Im z| = a < pi / shift. There the modulus grows by at most exp(a^2 / 2) and, for each negative
    power of a mixture, by 1 / cos(shift * a / 2); the error is exp(-2 pi a / step) times that
    (Trefethen & Weideman 2014, Thm. 5.1).
    """
    angle = min(0.95 * math.pi, math.sqrt(80 / max(negative_power, 1e-9)))
    a = min(4 * math.pi, angle / shift)
    growth = a * a / 2 - negative_power * math.log(math.cos(min(angle, shift * a) / 2))
    return 2 * math.pi * a / (_STRIP_NATS + growth)


def _diluted(log_ratio: FloatArray, rate: float) -> FloatArray:
    """log(1 - rate + rate * exp(log_ratio)), to full relative accuracy."""
    if rate == 1:
        return log_ratio
    near = np.log1p(rate * np.expm1(np.minimum(log_ratio, 30.0)))
    return np.where(
        log_ratio > 30.0, np.logaddexp(math.log1p(-rate), math.log(rate) + log_ratio), near
    )


def log_sum_exp(logs: FloatArray) -> FloatArray:
    """log of the sum of exp(logs) over the last axis."""
    top = logs.max(axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):  # a sum of nothing has log -inf
        return top[..., 0] + np.log(np.exp(logs - top).sum(axis=-1))


def excess_exp(x: FloatArray) -> FloatArray:
    """exp(x) - 1 - x without cancellation."""
    with np.errstate(over="ignore"):  # callers mask or drop what is infinite
        result = np.expm1(x) - x
    small = np.abs(x) < _SERIES_BELOW
    s = x[small]
    series = 1 + s / 3 * (1 + s / 4 * (1 + s / 5 * (1 + s / 6 * (1 + s / 7))))
    result[small] = s * s / 2 * series
    return result


def _weighted_excess(nodes: Nodes) -> FloatArray:
    """Q-mass times m(log_ratio); a far node has its weight in the exponent, against overflow."""
    weight, ratio = np.exp(nodes.log_weight), nodes.log_ratio
    far = ratio > 30.0
    near = weight * excess_exp(np.where(far, 0.0, ratio))
    beyond = np.exp(np.minimum(nodes.log_weight + ratio, 0.0)) - weight * (1 + ratio)
    return np.where(far, beyond, near)


def _log_normal(z: FloatArray) -> FloatArray:
    return -z * z / 2 - math.log(2 * math.pi) / 2
