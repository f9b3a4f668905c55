"""Noisy gradient descent steered by a noisy bound on the curvature: linear and logit alike.

First the Gram matrix of some of the records is released once; its inverse, noise included, sets the
length of the steps in every direction, so that a dozen steps do what plain descent needs hundreds
for. Then each step releases one noisy gradient. The schedule is fixed beforehand from public facts.

A record is z = (1, x), scaled; one longer than `row_norm` = R is given the weight R / |z| (weights
that depend on features only leave a true model the answer).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tacit.events import Event, Relation, Repeated, Sequence
from tacit.mechanisms import GaussianMechanism, Rng
from tacit.regression import _base
from tacit.regression._base import Floats
from tacit.regression.statistics import PrivateRows, from_triangle, triangle

# What other values cost is in benchmarks/regression_tuning.py.
_GRAM_SHARE = 0.15
_GRAM_NOISE = 0.03
"""Relative noise of the Gram matrix that is good enough to set step lengths by."""
_LEAST_GRAM_RATE = 0.05
_CROWDED = 0.05
"""Relative noise of the Gram matrix above which a plan is called crowded."""
_STEPS, _MOMENTUM = 12, 0.5


@dataclass(frozen=True)
class GradientPlan:
    """A noisy Gram matrix, then one noisy gradient a step.

    * Gram matrix of a share `gram_rate` of the records, chosen by independent coins: one record
      adds at most |z z'|_F <= R^2; replaced, sqrt(2) R^2 at most (inner products are >= 0). The
      coins' amplification is not claimed.
    * Gradient: one record pushes with a residual of norm at most `residual_clip` along a weighted
      row of norm at most R, so it moves the sum by at most their product; replaced, by at most
      twice that.
    """

    gram: GaussianMechanism
    gram_rate: float
    gradient: GaussianMechanism
    steps: int
    residual_clip: float
    row_norm: float
    method: ClassVar[str] = "gradient"

    @property
    def event(self) -> Event:
        """What one fit costs."""
        return Sequence((self.gram.event, Repeated(self.gradient.event, self.steps)))


def plan_descent(
    n_features: int,
    *,
    clip_for: Callable[[float, bool], float],
    row_norm: float,
    n_records: int,
    epsilon: float,
    delta: float,
    relation: Relation,
) -> GradientPlan:
    """The descent that suits the noise; `clip_for` gives the residual clip.

    It is told the relative noise of a step, over one coordinate and for a clip of 1, and whether
    the Gram matrix is crowded by noise; both follow from public facts.
    """
    factors = (math.sqrt(2.0), 2.0)
    first, rest = _base.gaussian_shares(
        epsilon,
        delta,
        shares=(_GRAM_SHARE, 1 - _GRAM_SHARE),
        replace_factors=factors,
        relation=relation,
    )
    gram = GaussianMechanism(first, l2_sensitivity=row_norm**2, replace_factor=factors[0])
    noise = spread(gram, n_features) / n_records
    multiplier = rest * math.sqrt(_STEPS)
    residual_clip = clip_for(multiplier / n_records, noise > _CROWDED)
    return GradientPlan(
        gram=gram,
        gram_rate=float(np.clip(noise / _GRAM_NOISE, _LEAST_GRAM_RATE, 1.0)),
        gradient=GaussianMechanism(multiplier, l2_sensitivity=residual_clip * row_norm),
        steps=_STEPS,
        residual_clip=residual_clip,
        row_norm=row_norm,
    )


def descend(
    rows: PrivateRows,
    plan: GradientPlan,
    private_gradient: Callable[[Floats], Floats],
    *,
    start: Floats,
    curvature: float,
    averaged: int,
    n_records: int,
    rng: Rng,
) -> Floats:
    """theta after the plan's steps from `start`, the last `averaged` of them averaged.

    `private_gradient(theta)` is the sum over records of clipped, weighted gradients; `curvature`
    times the Gram matrix must bound the Hessian of the loss, so that a step by the inverse of that
    bound cannot overshoot (Böhning & Lindsay 1988), and momentum is stable up to twice it.
    """
    chosen = None
    if plan.gram_rate < 1:
        chosen = _base.draw(plan.gram_rate, rows.n_rows, rng)
    # One record adds z z' with |z| <= row_norm, or nothing if its coin kept it out.
    noisy = from_triangle(plan.gram.release(triangle(rows.gram(chosen)), rng), rows.n_features + 1)
    steer = _inverse(noisy / (plan.gram_rate * n_records), plan, n_records) / curvature
    theta, velocity, average = start, np.zeros_like(start), np.zeros_like(start)
    for step in range(plan.steps):
        # One record adds a vector of norm at most residual_clip * row_norm.
        gradient = plan.gradient.release(private_gradient(theta), rng) / n_records
        velocity = _MOMENTUM * velocity - steer @ gradient
        theta = theta + velocity
        if step >= plan.steps - averaged:
            average += theta / averaged
    return average


def spread(gram: GaussianMechanism, n_features: int) -> float:
    """Largest eigenvalue, about, of the noise that `from_triangle` makes of a released triangle.

    Its entries off the diagonal have variance noise_std^2 / 2, so Wigner's 2 sqrt(size variance).
    """
    return gram.noise_std * math.sqrt(2.0 * (n_features + 1))


def _inverse(gram: Floats, plan: GradientPlan, n_records: int) -> Floats:
    """Inverse of a bound on the mean of z z', from its released value: post-processing."""
    values, vectors = np.linalg.eigh(gram)
    noise = spread(plan.gram, len(gram) - 1) / (plan.gram_rate * n_records)
    # No mean of z z' has an eigenvalue above row_norm^2: half of it is as much doubt as helps.
    doubt = min(noise, plan.row_norm**2 / 2)
    return (vectors / (np.maximum(values, 0.0) + doubt)) @ vectors.T
