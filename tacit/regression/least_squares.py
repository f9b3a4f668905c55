"""Private least squares as functions: functional mechanism, AdaSSP, noisy gradient descent.

Each method is a *plan*, made from public facts alone (number of features, declared number of
records, budget, relation), and a function that carries it out. The plan holds the mechanisms, so
the event that is paid and the noise that is drawn come from one object. Throughout, a record is
z = (1, x) with features x and target y scaled to [-1, 1] by declared bounds.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np

from tacit.events import Event, Relation, Sequence
from tacit.mechanisms import GaussianMechanism, LaplaceMechanism, Rng
from tacit.regression import _base
from tacit.regression._base import Floats
from tacit.regression.descent import GradientPlan, descend, plan_descent, spread
from tacit.regression.statistics import Moments, PrivateRows, from_triangle, triangle

# Constants of schedules and rules below: benchmarks/regression_tuning.py shows what others cost, on
# data sets that no other benchmark reports.
_ADASSP_SHARES = (0.05, 0.475, 0.475)
_SURE = 1.645
"""Normal quantile at 0.95: how sure AdaSSP is that its bound on the smallest eigenvalue holds."""
_AVERAGED = 6
"""Last steps of a descent that are averaged."""
_TIGHTEST_CLIP, _WIDEST_CLIP = 0.5, 1.5
_CLIP_NOISE = 0.003
"""Noise of a step, over its largest signal, at which residuals are clipped at 1."""
_ONE_SHOT_NOISE = 0.005
"""Relative noise of the Gram matrix below which one release of it beats descent."""
_NO_SHRINK_NOISE = 0.002
"""Relative noise below which AdaSSP does not shrink long rows: nothing is left to gain."""


@dataclass(frozen=True)
class FunctionalPlan:
    """Laplace noise for the coefficients of J = theta' A theta + b' theta + c; c is dropped.

    A = sum z z', b = -2 sum y z. What one record contributes in L1 norm, and twice that if it is
    replaced, except where it says less:

    * tight, A: sum over j of |x_j| + |x_j^2 - 1/2|, and over i < j of |x_i x_j|, is at most
      d + d/2 + d(d-1)/2 = d(d+2)/2. One triangle is released because A is symmetric; the entry
      x_0 x_0 is the public number of records; x_j^2 lies in [0, 1], so it is released around 1/2.
      Replaced, x by w: (d+2)/(d+1) times that. With a = |x - w| and b = |x + w|, a_j + b_j <= 2, an
      entry x_i x_j - w_i w_j is at most (a_i b_j + b_i a_j) / 2 and x_j^2 - w_j^2 is a_j b_j. These
      sum, with a_j for x_j - w_j, to at most A + AB/2 + sum a_j b_j / 2, A and B the sums of a and
      b; at b = 2 - a, and with sum a_j^2 >= A^2 / d, to (d+2) A - A^2 (d+1) / 2d, whose largest
      value is d(d+2)^2 / 2(d+1).
    * tight, b: 2 |y| (1 + sum |x_j|) <= 2(d+1).
    * published (Zhang et al. 2012, VLDB 5(11), section 4.2): (d+1)^2 and 2(d+1), counting every
      entry of A twice and the constant one as well.
    """

    quadratic: LaplaceMechanism
    linear: LaplaceMechanism
    analysis: str
    row_norm: float = math.inf
    method: ClassVar[str] = "functional"

    @property
    def event(self) -> Event:
        """What one fit costs: pure DP."""
        return Sequence((self.quadratic.event, self.linear.event))


@dataclass(frozen=True)
class AdaSSPPlan:
    """Gaussian noise for the smallest eigenvalue, the Gram matrix and the cross moments.

    With rows of norm at most R = `row_norm` (constant included) and |y| <= 1, one record moves

    * the smallest eigenvalue by at most R^2 whether added or replaced (Weyl): factor 1;
    * the Gram matrix by |z z'|_F = |z|^2 <= R^2 in Frobenius norm; replaced, by at most
      sqrt(|z|^4 + |w|^4 - 2 (z'w)^2) <= sqrt(2) R^2: factor sqrt(2);
    * the cross moments by |y z| <= R; replaced, by at most 2R: factor 2.
    """

    eigenvalue: GaussianMechanism
    gram: GaussianMechanism
    cross: GaussianMechanism
    row_norm: float
    method: ClassVar[str] = "adassp"

    @property
    def event(self) -> Event:
        """What one fit costs."""
        return Sequence((self.eigenvalue.event, self.gram.event, self.cross.event))


Plan: TypeAlias = FunctionalPlan | AdaSSPPlan | GradientPlan
METHODS = ("functional", "adassp", "gradient")


def plan_functional(
    n_features: int,
    *,
    epsilon: float,
    relation: Relation,
    analysis: str = "tight",
    split: float | None = None,
) -> FunctionalPlan:
    """The functional mechanism at `epsilon`, of which the share `split` goes to A.

    Without `split`, the share that makes the total variance of the noise smallest: the variance of
    m coefficients of sensitivity S at budget e is 2 m S^2 / e^2, least for e ~ (m S^2)^(1/3).
    """
    d = n_features
    if analysis == "tight":
        size_a, sensitivity_a, factor_a = d + d * (d + 1) // 2, d * (d + 2) / 2, (d + 2) / (d + 1)
    else:
        size_a, sensitivity_a, factor_a = (d + 1) * (d + 2) // 2, float((d + 1) ** 2), 2.0
    size_b, sensitivity_b, factor_b = d + 1, 2.0 * (d + 1), 2.0
    moves_a, moves_b = (factor_a, factor_b) if relation is Relation.REPLACE_ONE else (1.0, 1.0)
    weight_a = (size_a * (moves_a * sensitivity_a) ** 2) ** (1 / 3)
    weight_b = (size_b * (moves_b * sensitivity_b) ** 2) ** (1 / 3)
    share = weight_a / (weight_a + weight_b) if split is None else split
    return FunctionalPlan(
        quadratic=LaplaceMechanism(
            _base.SLACK * moves_a / (epsilon * share),
            l1_sensitivity=sensitivity_a,
            replace_factor=factor_a,
        ),
        linear=LaplaceMechanism(
            _base.SLACK * moves_b / (epsilon * (1 - share)),
            l1_sensitivity=sensitivity_b,
            replace_factor=factor_b,
        ),
        analysis=analysis,
    )


def plan_adassp(*, row_norm: float, epsilon: float, delta: float, relation: Relation) -> AdaSSPPlan:
    """AdaSSP (Wang 2018, arXiv:1803.02596, Algorithm 2), its releases priced together.

    Wang gives each of three releases a third of epsilon; as Gaussians they compose exactly, which
    leaves 1.6 to 1.9 times less noise at equal thirds. The eigenvalue, one number against a whole
    matrix, needs less than a third.
    """
    factors = (1.0, math.sqrt(2.0), 2.0)
    noise = _base.gaussian_shares(
        epsilon, delta, shares=_ADASSP_SHARES, replace_factors=factors, relation=relation
    )
    sensitivities = (row_norm**2, row_norm**2, row_norm)
    eigenvalue, gram, cross = (
        GaussianMechanism(multiplier, l2_sensitivity=sensitivity, replace_factor=factor)
        for multiplier, sensitivity, factor in zip(noise, sensitivities, factors, strict=True)
    )
    return AdaSSPPlan(eigenvalue, gram, cross, row_norm)


def plan_gradient(
    n_features: int,
    *,
    row_norm: float,
    n_records: int,
    epsilon: float,
    delta: float,
    relation: Relation,
) -> GradientPlan:
    """Full-batch descent on clipped residuals.

    Residuals lie in [-2, 2]; the more noise a step has, over all coordinates, the closer they are
    clipped, from 1.5 to 0.5: a clipped residual is a bias, an unclipped one is noise.
    """
    size = math.sqrt(n_features + 1)
    return plan_descent(
        n_features,
        clip_for=lambda noise, _: float(
            np.clip(math.sqrt(_CLIP_NOISE / (noise * size)), _TIGHTEST_CLIP, _WIDEST_CLIP)
        ),
        row_norm=row_norm,
        n_records=n_records,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
    )


def choose_method(
    n_features: int,
    *,
    row_norm: float,
    n_records: int,
    epsilon: float,
    delta: float,
    relation: Relation,
) -> str:
    """The method expected to do best, from public facts only.

    Pure DP leaves the functional mechanism. Otherwise one release of the Gram matrix is enough
    when its noise is below 0.5 % of the number of records; when there is more noise, descent wins,
    because it spends nothing on curvature that it cannot see.
    """
    if delta == 0:
        return "functional"
    plan = plan_adassp(row_norm=row_norm, epsilon=epsilon, delta=delta, relation=relation)
    return "adassp" if spread(plan.gram, n_features) <= _ONE_SHOT_NOISE * n_records else "gradient"


def choose_row_norm(
    n_features: int,
    *,
    row_norm: float,
    full_norm: float,
    n_records: int,
    epsilon: float,
    delta: float,
    relation: Relation,
) -> float:
    """`full_norm`, at which no row is shrunk, if AdaSSP's noise is negligible even so.

    Shrinking long rows weights them less, which moves the answer if the model is not linear.
    """
    plan = plan_adassp(row_norm=full_norm, epsilon=epsilon, delta=delta, relation=relation)
    is_small = spread(plan.gram, n_features) <= _NO_SHRINK_NOISE * n_records
    return full_norm if is_small else row_norm


def fit(rows: PrivateRows, y: Floats, plan: Plan, *, n_records: int, rng: Rng) -> Floats:
    """theta by the method that `plan` is of; pay for `plan.event` first."""
    match plan:
        case FunctionalPlan():
            return fit_functional(rows, y, plan, n_records=n_records, rng=rng)
        case AdaSSPPlan():
            return fit_adassp(rows, y, plan, rng=rng)
        case GradientPlan():
            return fit_gradient(rows, y, plan, n_records=n_records, rng=rng)


def fit_functional(
    rows: PrivateRows, y: Floats, plan: FunctionalPlan, *, n_records: int, rng: Rng
) -> Floats:
    """theta that minimizes the noisy objective; `rows` must not be shrunk."""
    released = release_functional(rows.moments(y), plan, n_records=n_records, rng=rng)
    size = rows.n_features + 1
    noise_std = math.sqrt(2.0) * plan.quadratic.noise_scale
    # The largest eigenvalue of a symmetric noise matrix is about 2 std sqrt(size) (Wigner).
    return minimize_quadratic(released, noise=2 * noise_std * math.sqrt(size))


def release_functional(
    private: Moments, plan: FunctionalPlan, *, n_records: int, rng: Rng
) -> Moments:
    """Noisy A and -b/2. Every coefficient carries noise except, if tight, the constant A_00."""
    size = len(private.cross)
    upper = np.triu_indices(size)
    exact = private.gram[upper]
    if plan.analysis == "tight":
        diagonal = (upper[0] == upper[1]).astype(np.float64)
        # Sums of x_j, x_j^2 - 1/2 and x_i x_j: one record contributes at most d(d+2)/2. The true
        # count A_00 is private and goes out with the noise; the declared one comes back in.
        centered = exact - diagonal * private.gram[0, 0] / 2
        noisy = np.append(n_records / 2, plan.quadratic.release(centered[1:], rng))
        noisy += diagonal * n_records / 2
    else:
        noisy = plan.quadratic.release(exact, rng)  # one record contributes at most (d+1)^2
    gram = np.empty((size, size))
    gram[upper] = noisy
    gram.T[upper] = noisy
    b = plan.linear.release(-2 * private.cross, rng)  # one record contributes at most 2(d+1)
    return Moments(gram, -b / 2)


def fit_adassp(rows: PrivateRows, y: Floats, plan: AdaSSPPlan, *, rng: Rng) -> Floats:
    """theta of ridge regression on noisy moments, the ridge as small as the spectrum allows.

    `rows` must be shrunk to `plan.row_norm`. See `minimize_quadratic` (Wang 2018, Algorithm 2).
    """
    private = rows.moments(y)
    size = rows.n_features + 1
    smallest = plan.eigenvalue.release(np.linalg.eigvalsh(private.gram)[:1], rng)[0]
    gram = from_triangle(plan.gram.release(triangle(private.gram), rng), size)
    cross = plan.cross.release(private.cross, rng)
    floor = max(0.0, float(smallest) - _SURE * plan.eigenvalue.noise_std)
    noise = spread(plan.gram, rows.n_features)
    return minimize_quadratic(Moments(gram, cross), noise=noise, floor=floor)


def fit_gradient(
    rows: PrivateRows, y: Floats, plan: GradientPlan, *, n_records: int, rng: Rng
) -> Floats:
    """theta by descent; `rows` must be shrunk to `plan.row_norm`.

    Clipping residuals is Huber's loss: its Hessian is at most the Gram matrix.
    """

    def push(span: slice, margins: Floats) -> Floats:
        clipped = np.clip(margins - y[span], -plan.residual_clip, plan.residual_clip)
        return clipped * rows.factors[span]

    return descend(
        rows,
        plan,
        lambda theta: rows.pull(theta, push),
        start=np.zeros(rows.n_features + 1),
        curvature=1.0,
        averaged=_AVERAGED,
        n_records=n_records,
        rng=rng,
    )


def minimize_quadratic(moments: Moments, *, noise: float, floor: float = 0.0) -> Floats:
    """theta that minimizes theta' A theta - 2 cross' theta + ridge |features|^2, always finite.

    Post-processing of released moments. The intercept is solved for first and not penalized. What
    remains of A is off by a matrix of eigenvalues up to about `noise`, and may be indefinite: its
    true eigenvalues are at least `floor` (if that is known) and the smallest seen less `noise`.
    They are raised to that bound, then by the ridge, max(0, noise - bound): where the bound alone
    keeps the solution stable nothing is added.
    """
    gram, cross = moments.gram, moments.cross
    count = max(gram[0, 0], noise, 1.0)
    means = gram[1:, 0] / count
    values, vectors = np.linalg.eigh(gram[1:, 1:] - count * np.outer(means, means))
    bound = max(floor, float(values[0]) - noise, 0.0)
    curvature = np.maximum(values, bound) + max(0.0, noise - bound)
    pull = vectors.T @ (cross[1:] - means * cross[0])
    usable = curvature > 0  # without any noise a constant column has none: its coefficient is 0
    slope = vectors[:, usable] @ (pull[usable] / curvature[usable])
    return np.append(cross[0] / count - means @ slope, slope)
