"""Private maximum likelihood for the logit model as functions: descent and objective perturbation.

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
from tacit.mechanisms import GaussianMechanism
from tacit.mechanisms.rng import Rng
from tacit.regression import _base
from tacit.regression._base import Floats
from tacit.regression.statistics import PrivateRows
from tacit.sampling import Poisson

_MOMENTUM = 0.9
_STEPS_PER_SIGNAL, _FEWEST_STEPS, _MOST_STEPS = 12, 10, 80
_CROWDED = 0.05
"""Noise of a step, over its largest signal, above which residuals are clipped to half."""
_SGD_EPOCHS = 10
_CURVATURE_SHARE = 0.1
"""Part of epsilon that objective perturbation gives to the change of curvature."""
_OUTPUT_SHARE = 0.01
_TOLERANCE = 1e-5
_MOST_NEWTON_STEPS = 100

METHODS = ("gradient", "sgd", "objective")


@dataclass(frozen=True)
class DescentPlan:
    """`steps` noisy gradients of the log-likelihood, of all records or of Poisson lots at `rate`.

    One record pushes with a residual p - y of norm at most `residual_clip` along a weighted row of
    norm at most `row_norm`, so it moves the sum by at most their product; replaced, by at most
    twice that. Unclipped, |p - y| < 1 for two classes, |p - e_y|_2 < sqrt(2) for more.
    """

    gradient: GaussianMechanism
    steps: int
    residual_clip: float
    row_norm: float
    rate: float = 1.0

    @property
    def method(self) -> str:
        """Name of the method in `METHODS`."""
        return "gradient" if self.rate == 1.0 else "sgd"

    @property
    def event(self) -> Event:
        """What one fit costs."""
        step = self.gradient.event
        return Repeated(step if self.rate == 1.0 else Poisson(self.rate).amplify(step), self.steps)


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


Plan: TypeAlias = DescentPlan | ObjectivePlan


def plan_gradient(
    n_features: int,
    *,
    n_classes: int,
    row_norm: float,
    n_records: int,
    epsilon: float,
    delta: float,
    relation: Relation,
) -> DescentPlan:
    """Full-batch descent; steps and clip follow from the noise.

    n mu / 12 steps, in [10, 80]. If the noise of a step, over all coordinates, passes 5 % of the
    largest signal, residuals are clipped at half their range: less noise for a small bias.
    """
    (whole,) = _base.gaussian_shares(
        epsilon, delta, shares=(1.0,), replace_factors=(2.0,), relation=relation
    )
    signal = n_records / whole
    steps = int(np.clip(signal / _STEPS_PER_SIGNAL, _FEWEST_STEPS, _MOST_STEPS))
    size = (n_features + 1) * (1 if n_classes == 2 else n_classes)
    residual_clip = 1.0 if n_classes == 2 else math.sqrt(2.0)
    if math.sqrt(steps * size) > _CROWDED * signal:
        residual_clip /= 2
    gradient = GaussianMechanism(whole * math.sqrt(steps), l2_sensitivity=residual_clip * row_norm)
    return DescentPlan(gradient, steps, residual_clip, row_norm)


def plan_sgd(
    *,
    n_classes: int,
    row_norm: float,
    rate: float,
    epsilon: float,
    delta: float,
    relation: Relation,
) -> DescentPlan:
    """DP-SGD (Abadi et al. 2016): Poisson lots at `rate`, ten epochs, priced by the accountant."""
    steps = math.ceil(_SGD_EPOCHS / rate)
    sampler = Poisson(rate)
    noise = calibrate(
        lambda multiplier: Repeated(sampler.amplify(Gaussian(multiplier)), steps),
        epsilon=epsilon,
        delta=delta,
        relation=relation,
    )
    residual_clip = 1.0 if n_classes == 2 else math.sqrt(2.0)
    gradient = GaussianMechanism(noise, l2_sensitivity=residual_clip * row_norm)
    return DescentPlan(gradient, steps, residual_clip, row_norm, rate)


def plan_objective(
    n_features: int, *, row_norm: float, epsilon: float, delta: float, relation: Relation
) -> ObjectivePlan:
    """Objective perturbation whose curvature term takes a tenth of epsilon."""
    part = 1 - _OUTPUT_SHARE
    claimed_epsilon, claimed_delta = part * epsilon, part * delta
    if relation is Relation.REPLACE_ONE:
        # (e, d) for one record is (2 e, d (1 + exp(e))) for two.
        claimed_epsilon /= 2
        claimed_delta /= 1 + math.exp(claimed_epsilon)
    curvature = _CURVATURE_SHARE * claimed_epsilon
    # A weighted record adds at most w |z|^2 / 4 = row_norm |z| / 4 to the Hessian, |z|^2 <= 1 + d.
    ridge = row_norm * math.sqrt(1 + n_features) / 4 / math.expm1(curvature)
    multiplier = _base.gaussian_noise_multiplier(claimed_epsilon - curvature, claimed_delta)
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
    if isinstance(plan, ObjectivePlan):
        return fit_objective(rows, labels, plan, rng=rng)
    return fit_descent(rows, labels, plan, n_classes=n_classes, n_records=n_records, rng=rng)


def fit_descent(
    rows: PrivateRows,
    labels: Floats,
    plan: DescentPlan,
    *,
    n_classes: int,
    n_records: int,
    rng: Rng,
) -> Floats:
    """theta after `plan.steps` noisy steps with momentum, averaged over the second half.

    The curvature of the mean loss is at most R^2 / 4 (two classes) or R^2 / 2 (more) where rows are
    not shrunk, and momentum 0.9 is stable up to 3.8 over that; the step is 2 over it.
    """
    shape = (rows.n_features + 1,) if n_classes == 2 else (rows.n_features + 1, n_classes)
    step_size = (8.0 if n_classes == 2 else 4.0) / plan.row_norm**2
    theta = np.zeros(shape)
    velocity, average = np.zeros(shape), np.zeros(shape)
    first_kept = plan.steps // 2
    for step in range(plan.steps):
        private = _private_gradient(rows, labels, plan, theta, n_classes, rng)
        # One record adds a vector of norm at most residual_clip * row_norm.
        gradient = plan.gradient.release(private, rng) / (plan.rate * n_records)
        velocity = _MOMENTUM * velocity + gradient
        theta = theta - step_size * velocity
        if step >= first_kept:
            average += theta / (plan.steps - first_kept)
    return average


def fit_objective(rows: PrivateRows, labels: Floats, plan: ObjectivePlan, *, rng: Rng) -> Floats:
    """theta at the minimum of the perturbed objective, by damped Newton steps, two classes."""
    size = rows.n_features + 1
    b = rng.normal(0.0, plan.noise_std, size)
    theta = np.zeros(size)
    for _ in range(_MOST_NEWTON_STEPS):
        value, gradient, hessian = _objective(rows, labels, theta, b, plan.ridge)
        if np.linalg.norm(gradient) <= plan.tolerance:
            return plan.output.release(theta, rng)
        step = np.asarray(np.linalg.solve(hessian, gradient), np.float64)
        theta = _descend(rows, labels, theta, step, b, plan.ridge, value, float(gradient @ step))
    # Nothing has been released: the guarantee holds only at a minimum.
    raise RuntimeError("the perturbed objective was not minimized. Use method='gradient'.")


def _private_gradient(
    rows: PrivateRows,
    labels: Floats,
    plan: DescentPlan,
    theta: Floats,
    n_classes: int,
    rng: Rng,
) -> Floats:
    """Private sum of clipped, weighted gradients over all rows or one Poisson lot."""
    if plan.rate < 1.0:
        lot = Poisson(plan.rate).indices(rows.n_rows, rng)  # type: ignore[arg-type]  # estimators pass numpy generators
        rows, labels = rows.take(lot), labels[lot]

    def push(span: slice, margins: Floats) -> Floats:
        if n_classes == 2:
            residuals = expit(margins)
            residuals -= labels[span]
            np.clip(residuals, -plan.residual_clip, plan.residual_clip, out=residuals)
            residuals *= rows.factors[span]
            return residuals
        residuals = softmax(margins, axis=1)
        residuals[np.arange(len(residuals)), labels[span].astype(np.intp)] -= 1.0
        norms = np.maximum(np.linalg.norm(residuals, axis=1), plan.residual_clip)
        return residuals * (rows.factors[span] * plan.residual_clip / norms)[:, None]

    return rows.pull(theta, push)


def _objective(
    rows: PrivateRows, labels: Floats, theta: Floats, b: Floats, ridge: float
) -> tuple[float, Floats, Floats]:
    """Private value, gradient and Hessian of the perturbed objective."""
    value = ridge * theta @ theta / 2 + b @ theta
    gradient = ridge * theta + b
    hessian = ridge * np.eye(len(theta))
    for span, block in rows.scaled():
        margins, weights = block @ theta, rows.factors[span]
        p = expit(margins)
        value += weights @ (np.logaddexp(0.0, margins) - labels[span] * margins)
        gradient = gradient + block.T @ (weights * (p - labels[span]))
        hessian += block.T @ (block * (weights * p * (1 - p))[:, None])
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
        for span, block in rows.scaled():
            margins = block @ trial
            reached += rows.factors[span] @ (np.logaddexp(0.0, margins) - labels[span] * margins)
        # Near the minimum rounding hides the decrease: a full step is then right.
        if reached <= value - 0.25 * decrease / 2**halving + 1e-12 * abs(value):
            return trial
    return theta - step
