"""Objective perturbation: logistic regression as the minimum of a loss plus a random linear term.

Chaudhuri, Monteleoni & Sarwate 2011; Kifer, Smith & Thakurta 2012; Iyengar et al. 2019. Two classes
only. A record is z = (1, x), scaled; a record longer than `row_norm` = R gets the weight R / |z| in
the log-likelihood, which does not change the answer if the model is right.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Unpack

import numpy as np
from scipy.special import expit

from tacit._arrays import Floats
from tacit.events import ApproximateDP, Event, Relation, Sequence
from tacit.mechanisms import GaussianMechanism, Rng, rounded_normal
from tacit.regression.estimator import BudgetTerms, gaussian_noise_multiplier
from tacit.regression.rows import PrivateRows

_CURVATURE_SHARE = 0.1  # share of epsilon that pays for the change of the Hessian
_OUTPUT_SHARE = 0.01
_TOLERANCE = 1e-5
_ROUNDING_SHARE = 2.0**-6  # share of the tolerance that is set aside for rounding of the noise
_MOST_NEWTON_STEPS = 2000
_LEAST_RIDGE, _MOST_NOISE = 1e-10, 1e8
"""Limits on ridge / (records * row_norm^2) and on noise / row_norm within which rounding does not
prevent the minimization: 1,282 data sets, many of them separable, took at most 534 steps there."""


@dataclass(frozen=True)
class ObjectivePlan:
    """Plan of one fit: release the theta that minimizes loss + ridge |theta|^2 / 2 + b' theta.

    b is normal noise with standard deviation sigma = `noise_std` in each coordinate, and
    R = `row_norm` bounds the norm of a weighted record.

    Proof for the exact minimum, two classes, one record added or removed. theta and b determine
    each other. So the density of theta on two neighbors differs by the ratio of the densities of b
    times the ratio of the determinants of the Hessians (Chaudhuri et al. 2011; Kifer et al. 2012).

    The gradient of the one record is s u with |u| <= R and 0 <= |s| <= 1. s depends on theta, but
    for a given label its sign does not. Hence the densities of b differ by a factor of at most
    exp((s^2 |u|^2 + 2 s u'b) / (2 sigma^2)), which is at most exp(a^2/2 + a max(Z, 0)) with
    a = R / sigma and Z standard normal. The record adds a matrix of rank one and of norm at most B
    to the Hessian, so the log determinants differ by at most c = log(1 + B / ridge). Together, at
    every epsilon >= c + a^2 / 2, delta is at most that of the Gaussian mechanism with shift a at
    epsilon - c.

    The computed minimum differs from the exact one by at most tolerance / ridge, because the
    objective is ridge-strongly convex. `output` adds noise for twice that distance, which covers
    every relation (Iyengar et al. 2019). A replaced record is one added and one removed, so group
    privacy applies.

    The proof takes b as a vector of real numbers. The program uses b rounded to a grid so fine that
    the gradient changes by at most _ROUNDING_SHARE of the tolerance; the search stops at what is
    left of the tolerance, so the gradient with the real b is within it as well.
    """

    claim: ApproximateDP
    output: GaussianMechanism
    noise_std: float
    ridge: float
    tolerance: float
    row_norm: float
    method: ClassVar[str] = "objective"

    @property
    def event(self) -> Event:
        """Event of one fit, for the accountant."""
        return Sequence((self.claim, self.output.event))


def plan_objective(
    n_features: int, *, row_norm: float, n_records: int, **budget: Unpack[BudgetTerms]
) -> ObjectivePlan:
    """Return a plan that costs the budget; a tenth of epsilon pays for the change of the Hessian.

    This tenth sets the ridge. An error is raised for budgets at which double precision may not
    reach the minimum; nothing has been paid at that point.
    """
    epsilon, delta = budget["epsilon"], budget["delta"]
    part = 1 - _OUTPUT_SHARE
    is_replaced = budget["relation"] is Relation.REPLACE_ONE
    claimed_epsilon, claimed_delta = part * epsilon / (2 if is_replaced else 1), part * delta
    curvature = _CURVATURE_SHARE * claimed_epsilon
    # A weighted record adds at most w |z|^2 / 4 = row_norm |z| / 4 to the Hessian, |z|^2 <= 1 + d.
    # Above 100 the ridge is less than the next line accepts, and expm1 must not overflow.
    ridge = row_norm * math.sqrt(1 + n_features) / 4 / math.expm1(min(curvature, 100.0))
    if ridge < _LEAST_RIDGE * n_records * row_norm**2:
        raise ValueError(_beyond_precision("smaller", epsilon))
    if is_replaced:
        # Group privacy: (e, d)-DP is (2 e, d (1 + exp(e)))-DP for two records.
        claimed_delta /= 1 + math.exp(claimed_epsilon)
    multiplier = gaussian_noise_multiplier(claimed_epsilon - curvature, claimed_delta)
    if multiplier * math.sqrt(1 + n_features) > _MOST_NOISE:
        raise ValueError(_beyond_precision("larger", epsilon))
    if claimed_epsilon - curvature < 1 / (2 * multiplier**2):
        raise ValueError(
            f"delta must be smaller for method 'objective' at epsilon {epsilon}, got {delta}."
        )
    tolerance = _TOLERANCE * row_norm
    output = GaussianMechanism(
        gaussian_noise_multiplier(_OUTPUT_SHARE * epsilon, _OUTPUT_SHARE * delta),
        l2_sensitivity=2 * tolerance / ridge,
        replace_factor=1.0,
    )
    claim = ApproximateDP(claimed_epsilon, claimed_delta)
    return ObjectivePlan(claim, output, multiplier * row_norm, ridge, tolerance, row_norm)


def fit_objective(rows: PrivateRows, labels: Floats, plan: ObjectivePlan, *, rng: Rng) -> Floats:
    """Return the coefficients that minimize the perturbed objective, found by damped Newton steps.

    Damped Newton steps converge for any records, except for rounding. `plan_objective` rejects
    settings where rounding could prevent convergence.
    """
    size = rows.n_features + 1
    b = _draw_linear_term(plan, size, rng)
    theta = np.zeros(size)
    for _ in range(_MOST_NEWTON_STEPS):
        value, gradient, hessian = _objective(rows, labels, theta, b, plan.ridge)
        if np.linalg.norm(gradient) <= (1 - _ROUNDING_SHARE) * plan.tolerance:
            return plan.output.release(theta, rng)
        try:
            step = np.asarray(np.linalg.solve(hessian, gradient), np.float64)
        except np.linalg.LinAlgError:
            break
        decrease = float(gradient @ step)
        for halving in range(40):
            trial = theta - step / 2**halving
            reached = _objective_value(rows, labels, trial, b, plan.ridge)
            # Near the minimum, rounding hides the decrease, and a full step is right.
            if reached <= value - 0.25 * decrease / 2**halving + 1e-12 * abs(value):
                break
        else:
            trial = theta - step  # no length lowers the objective enough
        theta = trial
    # The guarantee holds only at a minimum. Whether it was found may depend on the records, so the
    # payment is not taken back.
    raise RuntimeError(
        "the perturbed objective was not minimized. Nothing was released, but the budget of this "
        "fit was spent. Use method='gradient'."
    )


def _draw_linear_term(plan: ObjectivePlan, size: int, rng: Rng) -> Floats:
    """Return the normal vector b, rounded to multiples of a step: off by at most step / 2 each."""
    coarsest = _ROUNDING_SHARE * plan.tolerance / math.sqrt(size)
    step = math.ldexp(1.0, math.frexp(coarsest)[1] - 1)
    return rounded_normal(plan.noise_std, step=step, size=size, rng=rng)


def _beyond_precision(what: str, epsilon: float) -> str:
    return (
        f"epsilon must be {what} for method 'objective' on so many records and features, got "
        f"{epsilon}: double precision may not reach its minimum. Use method='gradient'."
    )


def _objective(
    rows: PrivateRows, labels: Floats, theta: Floats, b: Floats, ridge: float
) -> tuple[float, Floats, Floats]:
    """Return the private value, gradient and Hessian in theta of the objective perturbed by `b`."""
    gradient = ridge * theta + b
    hessian = ridge * np.eye(len(theta))
    for span, features in rows.scaled():
        p, weights = expit(features @ theta[1:] + theta[0]), rows.factors[span]
        residuals, bend = weights * (p - labels[span]), weights * p * (1 - p)
        gradient[0] += residuals.sum()
        gradient[1:] += features.T @ residuals
        bent = features.T * bend
        hessian[0, 0] += bend.sum()
        hessian[0, 1:] += bent.sum(axis=1)
        hessian[1:, 0] += bent.sum(axis=1)
        hessian[1:, 1:] += bent @ features
    return _objective_value(rows, labels, theta, b, ridge), gradient, hessian


def _objective_value(
    rows: PrivateRows, labels: Floats, theta: Floats, b: Floats, ridge: float
) -> float:
    """Return the private value at theta of the objective perturbed by the linear term `b`."""
    value = ridge * theta @ theta / 2 + b @ theta
    for span, features in rows.scaled():
        margins = features @ theta[1:] + theta[0]
        value += rows.factors[span] @ (np.logaddexp(0.0, margins) - labels[span] * margins)
    return float(value)
