"""Private maximum likelihood for the logit model: descent, lots, objective perturbation.

As in `least_squares`, a *plan* is made from public facts alone and holds the mechanisms, so that
the event paid and the noise drawn come from one object. A record is z = (1, x), scaled; one longer
than `row_norm` = R is given the weight R / |z| in the log-likelihood (weights that depend on
features only leave the true model the answer).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from scipy.special import expit, softmax

from tacit.accounting import calibrate
from tacit.events import ApproximateDP, Event, Gaussian, Relation, Repeated, Sequence
from tacit.mechanisms import GaussianMechanism, Rng
from tacit.regression import _base
from tacit.regression._base import Floats
from tacit.regression.descent import GradientPlan, descend, plan_descent
from tacit.regression.statistics import PrivateRows
from tacit.sampling import Poisson

_AVERAGED = 8
"""Last steps of a descent that are averaged."""
_SGD_EPOCHS = 10
_CURVATURE_SHARE = 0.1
"""Part of epsilon that objective perturbation gives to the change of curvature."""
_OUTPUT_SHARE = 0.01
_TOLERANCE = 1e-5
_MOST_NEWTON_STEPS = 2000
_LEAST_RIDGE, _MOST_NOISE = 1e-10, 1e8
"""Ridge over records * row_norm^2, and noise over row_norm, within which rounding is harmless to
the search for a minimum: 1,282 data sets, many separable, took at most 534 steps there."""

METHODS = ("gradient", "sgd", "objective")


@dataclass(frozen=True)
class SGDPlan:
    """`steps` noisy gradients of Poisson lots at `rate`; sensitivity as in `GradientPlan`.

    Unclipped, the residual |p - y| < 1 for two classes, |p - e_y|_2 < sqrt(2) for more.
    """

    gradient: GaussianMechanism
    steps: int
    residual_clip: float
    row_norm: float
    rate: float
    method: ClassVar[str] = "sgd"

    @property
    def event(self) -> Event:
        """What one fit costs."""
        return Repeated(Poisson(self.rate).amplify(self.gradient.event), self.steps)


@dataclass(frozen=True)
class ObjectivePlan:
    """Normal noise b in the objective: the minimum of loss + ridge |theta|^2 / 2 + b' theta.

    Guarantee of the exact minimum, two classes, a record added or removed. theta and b determine
    each other, so the densities of theta on neighbors compare as those of b, times the ratio of the
    determinants of the Hessians (Chaudhuri et al. 2011; Kifer et al. 2012). With one record of
    gradient s u, |u| <= R, where s in [0, 1] depends on theta but its sign, for a given label, does
    not, the densities of b differ by exp((s^2 |u|^2 + 2 s u'b) / (2 sigma^2)) at most, so by
    exp(a^2/2 + a max(Z, 0)) with a = R / sigma and Z standard normal. The determinants differ by at
    most c = log(1 + B / ridge) in log, B bounding the norm of what one record adds to the Hessian,
    a matrix of rank one. Hence, at every epsilon >= c + a^2 / 2, delta is at most
    that of the Gaussian mechanism with shift a at epsilon - c.

    The approximate minimum differs from the exact one by at most tolerance / ridge, because the
    objective is ridge-strongly convex; `output` adds noise for twice that, under every relation
    (Iyengar et al. 2019). Replacing a record is adding one and removing one: group privacy.
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
        """What one fit costs."""
        return Sequence((self.claim, self.output.event))


Plan: TypeAlias = GradientPlan | SGDPlan | ObjectivePlan


def plan_gradient(
    n_features: int,
    *,
    n_classes: int,
    row_norm: float,
    n_records: int,
    epsilon: float,
    delta: float,
    relation: Relation,
) -> GradientPlan:
    """Full-batch descent; where noise crowds it, residuals are clipped at half their range.

    That is less noise for a small bias: the loss of confident mistakes is cut off.
    """
    bound = _residual_bound(n_classes)
    return plan_descent(
        n_features,
        clip_for=lambda _, crowded: bound / 2 if crowded else bound,
        row_norm=row_norm,
        n_records=n_records,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
    )


def plan_sgd(
    *,
    n_classes: int,
    row_norm: float,
    rate: float,
    epsilon: float,
    delta: float,
    relation: Relation,
) -> SGDPlan:
    """DP-SGD (Abadi et al. 2016): Poisson lots at `rate`, ten epochs, priced by the accountant."""
    steps = math.ceil(_SGD_EPOCHS / rate)
    sampler = Poisson(rate)
    noise = calibrate(
        lambda multiplier: Repeated(sampler.amplify(Gaussian(multiplier)), steps),
        epsilon=epsilon,
        delta=delta,
        relation=relation,
    )
    residual_clip = _residual_bound(n_classes)
    gradient = GaussianMechanism(noise, l2_sensitivity=residual_clip * row_norm)
    return SGDPlan(gradient, steps, residual_clip, row_norm, rate)


def plan_objective(
    n_features: int,
    *,
    row_norm: float,
    n_records: int,
    epsilon: float,
    delta: float,
    relation: Relation,
) -> ObjectivePlan:
    """Objective perturbation whose curvature term takes a tenth of epsilon.

    Refuses budgets whose minimum double precision may not reach, before anything is paid.
    """
    part = 1 - _OUTPUT_SHARE
    is_replaced = relation is Relation.REPLACE_ONE
    claimed_epsilon, claimed_delta = part * epsilon / (2 if is_replaced else 1), part * delta
    curvature = _CURVATURE_SHARE * claimed_epsilon
    # A weighted record adds at most w |z|^2 / 4 = row_norm |z| / 4 to the Hessian, |z|^2 <= 1 + d.
    # Past 100 the ridge is below what the next line accepts, long before expm1 overflows.
    ridge = row_norm * math.sqrt(1 + n_features) / 4 / math.expm1(min(curvature, 100.0))
    if ridge < _LEAST_RIDGE * n_records * row_norm**2:
        raise ValueError(_beyond_precision("smaller", epsilon))
    if is_replaced:
        claimed_delta /= 1 + math.exp(claimed_epsilon)  # (e, d) is (2 e, d (1 + exp(e))) for two
    multiplier = _base.gaussian_noise_multiplier(claimed_epsilon - curvature, claimed_delta)
    if multiplier * math.sqrt(1 + n_features) > _MOST_NOISE:
        raise ValueError(_beyond_precision("larger", epsilon))
    if claimed_epsilon - curvature < 1 / (2 * multiplier**2):
        raise ValueError(
            f"delta must be smaller for method 'objective' at epsilon {epsilon}, got {delta}."
        )
    tolerance = _TOLERANCE * row_norm
    output = GaussianMechanism(
        _base.gaussian_noise_multiplier(_OUTPUT_SHARE * epsilon, _OUTPUT_SHARE * delta),
        l2_sensitivity=2 * tolerance / ridge,
        replace_factor=1.0,
    )
    claim = ApproximateDP(claimed_epsilon, claimed_delta)
    return ObjectivePlan(claim, output, multiplier * row_norm, ridge, tolerance, row_norm)


def fit(
    rows: PrivateRows, labels: Floats, plan: Plan, *, n_classes: int, n_records: int, rng: Rng
) -> Floats:
    """theta, (d + 1,) for two classes or (d + 1, k) for more; pay for `plan.event` first.

    `labels` are class numbers 0, 1, ..., private.
    """
    match plan:
        case ObjectivePlan():
            return fit_objective(rows, labels, plan, rng=rng)
        case GradientPlan():
            return fit_gradient(
                rows, labels, plan, n_classes=n_classes, n_records=n_records, rng=rng
            )
        case SGDPlan():
            return fit_sgd(rows, labels, plan, n_classes=n_classes, n_records=n_records, rng=rng)


def fit_gradient(
    rows: PrivateRows,
    labels: Floats,
    plan: GradientPlan,
    *,
    n_classes: int,
    n_records: int,
    rng: Rng,
) -> Floats:
    """theta by descent: the Hessian is at most 1/4 (two classes) or 1/2 of the Gram matrix."""
    size = rows.n_features + 1
    return descend(
        rows,
        plan,
        lambda theta: _private_gradient(rows, labels, theta, plan.residual_clip, n_classes),
        start=np.zeros(size if n_classes == 2 else (size, n_classes)),
        curvature=0.25 if n_classes == 2 else 0.5,
        averaged=_AVERAGED,
        n_records=n_records,
        rng=rng,
    )


def fit_sgd(
    rows: PrivateRows,
    labels: Floats,
    plan: SGDPlan,
    *,
    n_classes: int,
    n_records: int,
    rng: Rng,
) -> Floats:
    """theta after `plan.steps` noisy steps with momentum 0.9, averaged over the second half.

    The curvature of the mean loss is at most R^2 / 4 (two classes) or R^2 / 2 (more) where rows are
    not shrunk, and momentum 0.9 is stable up to 3.8 over that; the step is 2 over it.
    """
    size = rows.n_features + 1
    step_size = (8.0 if n_classes == 2 else 4.0) / plan.row_norm**2
    theta = np.zeros(size if n_classes == 2 else (size, n_classes))
    velocity, average = np.zeros_like(theta), np.zeros_like(theta)
    first_kept = plan.steps // 2
    for step in range(plan.steps):
        lot = _base.draw(plan.rate, rows.n_rows, rng)
        private = _private_gradient(
            rows.take(lot), labels[lot], theta, plan.residual_clip, n_classes
        )
        # One record adds a vector of norm at most residual_clip * row_norm.
        gradient = plan.gradient.release(private, rng) / (plan.rate * n_records)
        velocity = 0.9 * velocity + gradient
        theta = theta - step_size * velocity
        if step >= first_kept:
            average += theta / (plan.steps - first_kept)
    return average


def fit_objective(rows: PrivateRows, labels: Floats, plan: ObjectivePlan, *, rng: Rng) -> Floats:
    """theta at the minimum of the perturbed objective, by damped Newton steps, two classes.

    They converge on any records; `plan_objective` keeps away from where rounding would stop them.
    """
    size = rows.n_features + 1
    b = rng.normal(0.0, plan.noise_std, size)
    theta = np.zeros(size)
    for _ in range(_MOST_NEWTON_STEPS):
        value, gradient, hessian = _objective(rows, labels, theta, b, plan.ridge)
        if np.linalg.norm(gradient) <= plan.tolerance:
            return plan.output.release(theta, rng)
        try:
            step = np.asarray(np.linalg.solve(hessian, gradient), np.float64)
        except np.linalg.LinAlgError:
            break
        theta = _descend(rows, labels, theta, step, b, plan.ridge, value, float(gradient @ step))
    # The guarantee holds only at a minimum. That there was none may depend on the records, so the
    # payment stands.
    raise RuntimeError(
        "the perturbed objective was not minimized. Nothing was released, but the budget of this "
        "fit was spent. Use method='gradient'."
    )


def _beyond_precision(what: str, epsilon: float) -> str:
    return (
        f"epsilon must be {what} for method 'objective' on so many records and features, got "
        f"{epsilon}: double precision may not reach its minimum. Use method='gradient'."
    )


def _residual_bound(n_classes: int) -> float:
    """Largest norm of a residual: of p - y, or of p - e_y for more than two classes."""
    return 1.0 if n_classes == 2 else math.sqrt(2.0)


def _private_gradient(
    rows: PrivateRows, labels: Floats, theta: Floats, residual_clip: float, n_classes: int
) -> Floats:
    """Private sum of clipped, weighted gradients."""

    def push(span: slice, margins: Floats) -> Floats:
        if n_classes == 2:
            residuals = expit(margins)
            residuals -= labels[span]
            np.clip(residuals, -residual_clip, residual_clip, out=residuals)
            residuals *= rows.factors[span]
            return residuals
        residuals = softmax(margins, axis=1)
        residuals[np.arange(len(residuals)), labels[span].astype(np.intp)] -= 1.0
        norms = np.maximum(np.linalg.norm(residuals, axis=1), residual_clip)
        return residuals * (rows.factors[span] * residual_clip / norms)[:, None]

    return rows.pull(theta, push)


def _objective(
    rows: PrivateRows, labels: Floats, theta: Floats, b: Floats, ridge: float
) -> tuple[float, Floats, Floats]:
    """Private value, gradient and Hessian of the perturbed objective."""
    value = ridge * theta @ theta / 2 + b @ theta
    gradient = ridge * theta + b
    hessian = ridge * np.eye(len(theta))
    for span, features in rows.scaled():
        margins, weights = features @ theta[1:] + theta[0], rows.factors[span]
        p = expit(margins)
        value += weights @ (np.logaddexp(0.0, margins) - labels[span] * margins)
        residuals, bend = weights * (p - labels[span]), weights * p * (1 - p)
        gradient[0] += residuals.sum()
        gradient[1:] += features.T @ residuals
        bent = features.T * bend
        hessian[0, 0] += bend.sum()
        hessian[0, 1:] += bent.sum(axis=1)
        hessian[1:, 0] += bent.sum(axis=1)
        hessian[1:, 1:] += bent @ features
    return float(value), gradient, hessian


def _descend(
    rows: PrivateRows,
    labels: Floats,
    theta: Floats,
    step: Floats,
    b: Floats,
    ridge: float,
    value: float,
    decrease: float,
) -> Floats:
    """`theta` less the longest of step, step/2, step/4, ... that lowers the objective enough."""
    for halving in range(40):
        trial = theta - step / 2**halving
        reached = ridge * trial @ trial / 2 + b @ trial
        for span, features in rows.scaled():
            margins = features @ trial[1:] + trial[0]
            reached += rows.factors[span] @ (np.logaddexp(0.0, margins) - labels[span] * margins)
        # Near the minimum rounding hides the decrease: a full step is then right.
        if reached <= value - 0.25 * decrease / 2**halving + 1e-12 * abs(value):
            return trial
    return theta - step
