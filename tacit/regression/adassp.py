"""AdaSSP: linear regression from Gaussian-noised second moments with an adaptive ridge.

Adaptive sufficient statistics perturbation, Wang 2018 (arXiv:1803.02596, Algorithm 2). A record is
z = (1, x), with features x and target y scaled to [-1, 1].
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Unpack

import numpy as np

from tacit._arrays import Floats
from tacit.events import Event, Sequence
from tacit.mechanisms import GaussianMechanism, Rng
from tacit.regression.estimator import BudgetTerms, gaussian_shares
from tacit.regression.rows import (
    SecondMoments,
    from_triangle,
    solve_moments,
    triangle,
    triangle_noise,
)

# Chosen on tables of benchmarks/regression_linear.py.
_SHARES = (0.05, 0.475, 0.475)
_NO_SHRINK_NOISE = 0.002
"""Relative noise below which long rows are not shrunk, because nothing is left to gain."""
_SURE = 1.645  # normal quantile at 0.95: confidence in the lower bound on the smallest eigenvalue


@dataclass(frozen=True)
class AdaSSPPlan:
    """Plan of one AdaSSP fit: the noise of the three values that it releases.

    These are the Gram matrix (sum of z z'), its smallest eigenvalue, and the cross moments (sum of
    y z), for records z = (1, x) of norm at most R = `row_norm` and |y| <= 1. One record changes

    * the smallest eigenvalue by at most R^2, whether added or replaced (Weyl): factor 1;
    * the Gram matrix by |z z'|_F = |z|^2 <= R^2 in Frobenius norm; if z is replaced by w, by at
      most sqrt(|z|^4 + |w|^4 - 2 (z'w)^2) <= sqrt(2) R^2: factor sqrt(2);
    * the cross moments by |y z| <= R; if replaced, by at most 2R: factor 2.
    """

    eigenvalue: GaussianMechanism
    gram: GaussianMechanism
    cross: GaussianMechanism
    row_norm: float
    method: ClassVar[str] = "adassp"

    @property
    def event(self) -> Event:
        """Event of one fit, for the accountant."""
        return Sequence((self.eigenvalue.event, self.gram.event, self.cross.event))

    def relative_noise(self, n_features: int, n_records: int) -> float:
        """Return the largest eigenvalue (approximate) of the noise in the Gram matrix, per record.

        The noise is small if this number is small against 1.
        """
        return triangle_noise(self.gram.noise_std, n_features + 1) / n_records


def plan_adassp(*, row_norm: float, **budget: Unpack[BudgetTerms]) -> AdaSSPPlan:
    """Return a plan whose three Gaussian releases together cost the budget.

    Wang 2018 gives each release a third of epsilon. Exact composition of the three Gaussians needs
    1.6 to 1.9 times less noise, at equal thirds. The eigenvalue gets less than a third of the
    budget here, because it is one number and the other two releases are many numbers.
    """
    factors = (1.0, math.sqrt(2.0), 2.0)
    noise = gaussian_shares(_SHARES, factors, **budget)
    sensitivities = (row_norm**2, row_norm**2, row_norm)
    eigenvalue, gram, cross = (
        GaussianMechanism(multiplier, l2_sensitivity=sensitivity, replace_factor=factor)
        for multiplier, sensitivity, factor in zip(noise, sensitivities, factors, strict=True)
    )
    return AdaSSPPlan(eigenvalue, gram, cross, row_norm)


def choose_row_norm(
    n_features: int,
    *,
    row_norm: float,
    full_norm: float,
    n_records: int,
    **budget: Unpack[BudgetTerms],
) -> float:
    """Return the norm to which longer rows are shrunk before a fit: `full_norm` or `row_norm`.

    `full_norm` bounds every row, so it shrinks none but needs more noise; it is returned if its
    noise is negligible. Otherwise return the smaller `row_norm`. Shrinking gives long rows less
    weight, which changes the answer if the true model is not linear.
    """
    plan = plan_adassp(row_norm=full_norm, **budget)
    is_small = plan.relative_noise(n_features, n_records) <= _NO_SHRINK_NOISE
    return full_norm if is_small else row_norm


def fit_adassp(private: SecondMoments, plan: AdaSSPPlan, *, rng: Rng) -> Floats:
    """Release noisy moments and return the coefficients of ridge regression on them.

    `private` are sums over rows that were shrunk to `plan.row_norm`. The released smallest
    eigenvalue of the Gram matrix shows how stable the solution is, so that the ridge penalty can be
    chosen as small as possible.
    """
    size = len(private.cross)
    smallest = plan.eigenvalue.release(np.linalg.eigvalsh(private.gram)[:1], rng)[0]
    gram = from_triangle(plan.gram.release(triangle(private.gram), rng), size)
    cross = plan.cross.release(private.cross, rng)
    floor = max(0.0, float(smallest) - _SURE * plan.eigenvalue.noise_std)
    noise = triangle_noise(plan.gram.noise_std, size)
    return solve_moments(SecondMoments(gram, cross), noise=noise, floor=floor)
