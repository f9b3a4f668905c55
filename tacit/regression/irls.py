"""Private logistic regression by iteratively reweighted least squares (IRLS), with noise.

It carries the steps of `newton` over to the logistic loss. A fit makes these releases, all with
Gaussian noise:

1. a Gram matrix and a histogram of norms, which whiten the rows (`whitening`);
2. some early gradients, which lead near the solution;
3. the Hessian of the loss at that point;
4. some more gradients. After each of them the model is solved for again, from the Hessian and from
   all of these gradients. If noise allows it, the number of records that models with a larger ridge
   penalty predict right is released on the way, and decides how large the penalty is;
5. for intervals, the Hessian at the last model and the sum of r^2 u u' over residuals r and rows u.

The residual of a record is w (p - y), where p is the predicted probability and y the label, 0 or 1.
The weight w = min(1, c / max(p, 1 - p)) bounds it by c, between 1/2 and 1. This weight does not
depend on the label. So the expected residual is zero at the true probability, and a smaller c costs
some efficiency, but no bias. The weighted residual is the derivative of a convex loss. A row that
is longer than the limit is multiplied by a factor that depends on its features only, with the same
effect.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Unpack

import numpy as np
from scipy.linalg import null_space
from scipy.special import expit, softmax

from tacit._arrays import Floats, Indices
from tacit.events import Event, Repeated, Sequence
from tacit.mechanisms import GaussianMechanism, Rng
from tacit.regression.estimator import BudgetTerms, gaussian_mechanisms, gaussian_shares
from tacit.regression.logit_equations import Curvature, LogitEquations, NormalRows
from tacit.regression.newton import hides_intervals, undetermined
from tacit.regression.normal_equations import Solver, Uncertainty, uncertainty_of
from tacit.regression.penalty import Penalty
from tacit.regression.rows import (
    PrivateRows,
    combine_squares,
    from_triangle,
    triangle,
    triangle_noise,
)
from tacit.regression.whitening import ROUNDING, WhitenedRows, draw, whiten

# Chosen on the tables of benchmarks/regression_logistic.py.
_EARLY_STEPS, _STEPS = 4, 5
_FEW_STEPS = 3  # instead of _STEPS if noise is so small that early releases take a sample
_GRAM_SHARE, _NORMS_SHARE, _EARLY_SHARE, _HESSIAN_SHARE = 0.15, 0.015, 0.05, 0.16
_ERRORS_SHARE, _GRADIENT_SHARE = 0.08, 0.545
_TOTAL_SHARE = 0.03  # only with weights
_CHOICES, _CHOICE_SHARE, _CHOICE_NOISE, _CHOICE_GAIN = 3, 0.04, 0.01, 0.001
"""For the choices of a ridge: their largest number, the last before the last gradient; their share
of the budget; the largest noise, as a share of the records, with which one is made; and the least
gain in the share of right predictions."""
_RIDGES = (1e-3, 3e-3, 1e-2, 3e-2)
_MATRIX_NOISE, _EARLY_NOISE, _ROWS_PER_COLUMN = 0.08, 0.01, 500
_FEWEST_ROWS = 25_000
_TIGHTEST_ROWS = 0.6
_HOPELESS = 0.6
_HESSIAN_DOUBT, _SQUARES_DOUBT = 0.25, 0.2  # as in `newton`
_MOVING_DOUBT = 0.1  # relative error of a Hessian that is moved to another model
_SQUARES = 0.7  # weight of residuals in the last release, relative to that of the Hessian
_MARGIN = 1.05  # on sampling variances, for what the approximations leave out
_LEAST_CURVATURE = 0.02  # of an early step; the largest is 1 / 4
_NOISE_EXCESS = 1e-4  # mean log-loss that noise may add before rows and residuals are clipped more


@dataclass(frozen=True)
class IRLSPlan:
    """Plan of one fit: noise of each release; `early` and `gradient` are repeated.

    Each mechanism has sensitivity 1; what it releases is divided by its bound before and multiplied
    by it afterwards. The bounds may depend on earlier releases, which does not change the price.
    One record changes

    * the sum of weights by at most 1, and by at most 1 if it is replaced;
    * the Gram matrix and the histogram as in `newton.NewtonPlan`;
    * a gradient, the sum of r u' with |r| <= c and |u| <= R, by at most R c, and by twice that if
      the record is replaced;
    * the Hessians of all k outputs, sums of h u u', by at most R^2 |h|, and by sqrt(2) times that
      if the record is replaced, because all h are >= 0 (see `newton.NewtonPlan`). h is at most
      p (1 - p) for each class, so |h| <= 1 / 4 for one output, and for k outputs
      |h|^2 <= sum p * p (1 - p)^2 <= 4 / 27, as the p sum to 1 and x (1 - x)^2 <= 4 / 27;
    * each of the counts by which a ridge is chosen, how many more records it predicts right, by at
      most 1, and by at most 2 if the record is replaced;
    * the last release, sums of a u u' and b u u' with 0 <= a <= 1 and 0 <= b <= _SQUARES^2, by at
      most R^2 sqrt(1 + _SQUARES^4), and by sqrt(2) times that if the record is replaced.
    """

    total: GaussianMechanism | None
    """Noise of the sum of weights; None without weights."""
    first_gram: GaussianMechanism
    norms: GaussianMechanism
    early: GaussianMechanism
    hessian: GaussianMechanism
    gradient: GaussianMechanism
    choice: GaussianMechanism | None
    """Noise of the counts by which a ridge is chosen; None if noise would hide them."""
    errors: GaussianMechanism | None
    """Noise of the last release, which intervals need; None if there are none."""
    sample_rate: float
    """Probability with which a record is used for matrices and for early gradients. The price
    ignores the sampling, which could only lower it."""
    early_steps: int
    steps: int
    choices: int
    """Number of choices of a ridge, one before each of the last gradients."""
    row_norm: float
    whitened_clip: float
    """Largest norm of whitened rows, relative to the root of their mean square."""
    residual_clip: float
    n_classes: int
    method: ClassVar[str] = "gradient"

    @property
    def event(self) -> Event:
        """Event of one fit, for the accountant."""
        total = () if self.total is None else (self.total.event,)
        choice = () if self.choice is None else (Repeated(self.choice.event, self.choices),)
        errors = () if self.errors is None else (self.errors.event,)
        return Sequence((
            *total,
            self.first_gram.event,
            self.norms.event,
            Repeated(self.early.event, self.early_steps),
            self.hessian.event,
            Repeated(self.gradient.event, self.steps),
            *choice,
            *errors,
        ))  # fmt: skip


class IRLSFit(NamedTuple):
    """Released result of one fit, in scaled units, with the intercept first."""

    theta: Floats
    unshrunk: Floats
    """Coefficients without a penalty, for intervals; of the first output."""
    uncertainty: Uncertainty | None
    """Of `unshrunk`; None if noise hides all coefficients, and for more than two classes."""


def plan_irls(
    n_features: int,
    *,
    n_classes: int,
    row_norm: float,
    n_records: int,
    is_weighted: bool = False,
    is_penalized: bool = False,
    **budget: Unpack[BudgetTerms],
) -> IRLSPlan:
    """Return a plan that costs the budget; `is_penalized` says that the user gives the penalty.

    With m coefficients, whitened rows clipped to k times their root mean square, and residuals to
    c, noise adds about 2 (m k c / (n_records mu))^2 to the mean loss. k and c make this as large as
    allowed.
    """
    (whole,) = gaussian_shares((1.0,), (1.0,), **budget)
    root = math.sqrt(2.0)
    has_errors = n_classes == 2 and not hides_intervals(n_features, whole, n_records)

    def mechanisms(steps: int, choices: int) -> list[GaussianMechanism]:
        return gaussian_mechanisms(
            *[(_TOTAL_SHARE, 1.0, 1)] * is_weighted,
            (_GRAM_SHARE, root, 1),
            (_NORMS_SHARE, root, 1),
            (_EARLY_SHARE, 2.0, _EARLY_STEPS),
            (_HESSIAN_SHARE, root, 1),
            (_GRADIENT_SHARE, 2.0, steps),
            *[(_CHOICE_SHARE, 2.0, choices)] * (choices > 0),
            *[(_ERRORS_SHARE, root, 1)] * has_errors,
            **budget,
        )

    least, most = residual_bounds(n_classes)
    size = (n_features + 1) * (1 if n_classes == 2 else n_classes)
    square = math.sqrt(_NOISE_EXCESS / 2) * n_records / (whole * size)
    clip = float(np.clip(math.sqrt(square), least, most))
    early, hessian = mechanisms(_STEPS, 0)[2 + is_weighted : 4 + is_weighted]
    enough = max(
        triangle_noise(hessian.noise_std * (n_features + 1), size) / _MATRIX_NOISE,
        early.noise_std * clip * math.sqrt(n_features + 1) / _EARLY_NOISE,
    )
    sample_rate = _rate(enough, size, n_records)
    steps = _STEPS if sample_rate == 1 else _FEW_STEPS
    choices = 0
    if n_classes == 2 and not is_penalized:
        # Choices share their part of the budget: n of them have sqrt(n) times the noise of one.
        noise = whole * math.sqrt(len(_RIDGES) / _CHOICE_SHARE) / (sample_rate * n_records)
        most = min(_CHOICES, steps - 1)  # each needs a gradient before it
        choices = int(min(most, (_CHOICE_NOISE / noise) ** 2))
    made = mechanisms(steps, choices)
    total = made.pop(0) if is_weighted else None
    errors = made.pop() if has_errors else None
    choice = made.pop() if choices else None
    return IRLSPlan(
        total,
        *made,
        choice=choice,
        errors=errors,
        sample_rate=sample_rate,
        early_steps=_EARLY_STEPS,
        steps=steps,
        choices=choices,
        row_norm=row_norm,
        whitened_clip=max(square / clip, _TIGHTEST_ROWS),
        residual_clip=clip,
        n_classes=n_classes,
    )


def is_hopeless(n_features: int, *, n_records: int, **budget: Unpack[BudgetTerms]) -> bool:
    """Return whether the noise is so large that matrices of second moments are not worth a release.

    This is decided by public facts: noise of one release, times coefficients, over records.
    """
    (whole,) = gaussian_shares((1.0,), (1.0,), **budget)
    return whole * (n_features + 1) > _HOPELESS * n_records


def _rate(enough: float, size: int, n_records: int) -> float:
    """Return the share of records that early releases use: what keeps their noise small.

    `enough` is the number of records which that takes. There are at least _ROWS_PER_COLUMN records
    per column, and _FEWEST_ROWS, because sampling saves nothing on small tables.
    """
    return min(1.0, max(enough, _ROWS_PER_COLUMN * size, _FEWEST_ROWS) / n_records)


def residual_bounds(n_classes: int) -> tuple[float, float]:
    """Return the norm of a residual of the zero model, and the largest norm of any residual.

    >>> residual_bounds(2)
    (0.5, 1.0)
    """
    if n_classes == 2:
        return 0.5, 1.0
    return math.sqrt(1 - 1 / n_classes), math.sqrt(2.0)


def fit_irls(
    rows: PrivateRows,
    labels: Floats,
    plan: IRLSPlan,
    *,
    n_records: int,
    rng: Rng,
    weights: Floats | None = None,
    fit_intercept: bool = True,
    penalty: Penalty | None = None,
) -> IRLSFit:
    """Release what `plan` says and return the model.

    The model is (d + 1, 1) for d features and two classes, or (d + 1, k) for k > 2 classes.
    `weights` are in [0, 1], as in `newton.fit_newton`; `rows` have no factors.
    """
    total = float(n_records)
    if weights is not None:
        assert plan.total is not None
        total = release_total(weights, plan.total, n_records, rng)
    chosen, drawn = _draw(rows, plan, rng)
    shrunk = PrivateRows(drawn.X, drawn.box, row_norm=plan.row_norm)
    if weights is not None:
        shrunk.factors *= np.sqrt(weights[chosen])
    records = whiten(
        rows,
        shrunk,
        labels,
        plan.first_gram,
        plan.norms,
        weights=weights,
        widest=plan.whitened_clip,
        total=total,
        n_records=n_records,
        fit_intercept=fit_intercept,
        rng=rng,
        rate=plan.sample_rate,
    )
    sample = records.take(drawn, chosen, plan.sample_rate)
    clip, whitening = plan.residual_clip, records.whitening
    outputs = 1 if plan.n_classes == 2 else plan.n_classes
    theta = np.zeros((records.size, outputs))
    constant = np.eye(len(whitening))[0] if fit_intercept else np.zeros(len(whitening))
    mean = records.model(constant)
    for _ in range(plan.early_steps):
        gradient, noise_std = _release_gradient(sample, theta, clip, plan.early, rng)
        least = float(np.clip(2 * noise_std, _LEAST_CURVATURE, 0.25))
        inverse = np.linalg.inv(_expected_hessian(theta, mean, clip, least))
        theta = theta - inverse @ gradient
        # Stein's shrinking takes off the length that noise adds, which would hide the curvature.
        noise = outputs * noise_std**2 * float(np.sum(inverse**2))
        theta = theta * max(0.0, 1 - noise / max(float(np.sum(theta**2)), noise))
    solvers = _solvers(sample, theta, plan, penalty, rng)
    for step in range(plan.steps):
        if plan.choice is not None and step >= plan.steps - plan.choices:
            _choose_ridge(sample, solvers[0], plan.choice, rng)
        theta = np.column_stack([solver.theta for solver in solvers])
        released, noise_std = _release_gradient(records, theta, clip, plan.gradient, rng)
        for solver, column in zip(solvers, released.T, strict=True):
            solver.add(column, noise_std)
    uncertainty, unshrunk = None, solvers[0].unshrunk()
    if plan.errors is not None:
        solved = _release_errors(sample, solvers[0], clip, plan.errors, total, rng)
        if solved is not None:
            free, unshrunk = undetermined(rows, fit_intercept=fit_intercept), solved.theta
            uncertainty = uncertainty_of(unshrunk, solved.covariance, solved.lost, whitening, free)
    return IRLSFit(
        whitening @ np.column_stack([solver.theta for solver in solvers]),
        whitening @ unshrunk,
        uncertainty,
    )


def _draw(rows: PrivateRows, plan: IRLSPlan, rng: Rng) -> tuple[Indices | slice, PrivateRows]:
    """Return each row with probability `plan.sample_rate`, and their private places."""
    if plan.sample_rate == 1:
        return slice(None), rows
    chosen = draw(plan.sample_rate, rows.n_rows, rng)
    return chosen, rows.take(chosen)


def release_total(weights: Floats, mechanism: GaussianMechanism, n_records: int, rng: Rng) -> float:
    """Return the noisy sum of private weights in [0, 1], within public limits."""
    noisy = float(mechanism.release(np.array([weights.sum()]), rng)[0])
    return float(np.clip(noisy, max(1.0, 1e-3 * n_records), n_records))


def _release_gradient(
    records: WhitenedRows, theta: Floats, clip: float, mechanism: GaussianMechanism, rng: Rng
) -> tuple[Floats, float]:
    """Release the mean gradient at `theta`, and return it with the std of its noise."""

    def residuals(span: slice, margins: Floats) -> Floats:
        return residuals_of(margins, records.targets[span], clip)

    bound = ROUNDING * records.limit * clip  # of r u' for one record
    noisy = mechanism.release(records.gradient(theta, residuals) / bound, rng)
    return bound * noisy / records.total, bound * mechanism.noise_std / records.total


def _solvers(
    records: WhitenedRows, theta: Floats, plan: IRLSPlan, penalty: Penalty | None, rng: Rng
) -> list[Solver]:
    """Release the Hessian at `theta`, and return a solver for each output.

    Rows count with the square of their factor, which makes the Hessian too small by at least the
    mean factor. For k > 2 classes, the Hessian is at most k / (k - 1) times the matrices released
    here, if the classes are about equally probable.
    """
    size, outputs = theta.shape

    def curvatures(_: slice, margins: Floats) -> Floats:
        p, weights = _probabilities(margins, plan.residual_clip)
        return weights * p * (1 - p)

    exact = records.hessians(theta, curvatures)
    bound = ROUNDING * records.limit**2 * (0.25 if outputs == 1 else math.sqrt(4 / 27))
    vector = np.concatenate([triangle(matrix) for matrix in exact])
    scale = bound / records.total / records.mean_factor
    scale *= outputs / (outputs - 1) if outputs > 1 else 1
    noisy = scale * plan.hessian.release(vector / bound, rng)
    solvers = []
    for part, column in zip(np.split(noisy, outputs), theta.T, strict=True):
        hessian, noise_std = from_triangle(part, size), scale * plan.hessian.noise_std
        solver = Solver(hessian, noise_std, records, np.zeros(size), penalty)
        solver.theta = column
        solvers.append(solver)
    return solvers


def _choose_ridge(
    records: WhitenedRows, solver: Solver, mechanism: GaussianMechanism, rng: Rng
) -> None:
    """Let the solver use the ridge with which clearly more records are predicted right, if any.

    Shrinking as much as noise requires minimizes the loss. Where the logit model is wrong, more
    shrinking may predict more labels right, which only the records can show.
    """
    models = np.column_stack([solver.theta, *map(solver.ridge, _RIDGES)])
    right = records.count_right(models)
    bound = math.sqrt(len(_RIDGES))  # one record adds -1, 0 or 1, times its weight, to each gain
    gains = bound * mechanism.release((right[1:] - right[0]) / bound, rng)
    best = int(np.argmax(gains))
    if gains[best] > max(2 * bound * mechanism.noise_std, _CHOICE_GAIN * records.total):
        solver.set_least_ridge(_RIDGES[best])


class _Solved(NamedTuple):
    """Unshrunk model for two classes and its covariance, in whitened units."""

    theta: Floats
    covariance: Floats
    lost: Floats
    """Directions that noise hides, as columns."""


def _release_errors(
    records: WhitenedRows,
    solver: Solver,
    clip: float,
    mechanism: GaussianMechanism,
    total: float,
    rng: Rng,
) -> _Solved | None:
    """Release the Hessian and the mean of r^2 u u' near the solution, for two classes.

    The result is None if noise is so large that the equations have no solution.

    The first Hessian leads to the point of this release. `solver` takes the second one, which is
    better, for its shrunk model. `total` counts all records, of which `records` may be a sample.
    """
    size = records.size
    rows = normal_rows(records, clip)
    equations = LogitEquations(*solver.released(), rows)
    at, found = equations.models[0], solver.hessian
    # The Gram matrix that whitened the rows is known up to the noise added to its eigenvalues.
    values, vectors = np.linalg.eigh(records.expected)
    noise = (1 / np.maximum(values, 1e-3) - 1) / math.sqrt(2 * size)
    # Few long rows, such as those of a rare category, may have a curvature of their own.
    doubts = (vectors * (_HESSIAN_DOUBT**2 * records.tails + noise**2)) @ vectors.T
    expected = Curvature(rows.hessian(at), doubts).rescaled(found, solver.hessian_std, 1.0)
    first = expected.updated(found, solver.hessian_std)
    scaling = equations.scaling(first.hessian, at)
    root = equations.root(first, at, solver.theta)
    theta = solver.theta if root is None else root.theta

    def weigh(span: slice, margins: Floats) -> Floats:
        p, weights = _probabilities(margins, clip)
        residuals = residuals_of(margins, records.targets[span], clip)
        curvatures = 4 * (weights * p * (1 - p))[:, 0] * records.counted_once(span)
        squares = (_SQUARES * residuals[:, 0] / clip) ** 2 * records.weights_of(span)
        return np.column_stack([curvatures, squares])

    matrices = records.hessians(theta[:, None], weigh)
    bound = ROUNDING * math.hypot(1.0, _SQUARES**2) * records.limit**2
    vector = np.concatenate([triangle(matrix) for matrix in matrices]) / bound
    scale = bound / records.total
    second, squares = (
        from_triangle(part, size) for part in np.split(scale * mechanism.release(vector, rng), 2)
    )
    curvature, noise_std = 0.25 * records.reach, scale * mechanism.noise_std
    doubt = math.hypot(_HESSIAN_DOUBT, 1 - records.mean_factor)
    solver.refine(curvature * second, curvature * noise_std, doubt)
    # Rows count with the square of their factors in the first Hessian, which the mean factor
    # corrects on the whole only.
    moved = Curvature(scaling @ rows.hessian(theta) @ scaling, first.doubts)
    moved = moved.doubted(_MOVING_DOUBT * math.sqrt(records.tails))
    moved = moved.rescaled(curvature * second, curvature * noise_std, 1 - records.mean_factor)
    last = moved.updated(curvature * second, curvature * noise_std)
    root = equations.root(last, theta, theta)
    if root is None:
        return None
    # Residuals of a true model have squares of mean p (1 - p), so that the gradient has the
    # covariance of its derivative, but with the square of the factor of each row.
    square = (clip / _SQUARES) ** 2
    meat = combine_squares(
        records.mean_factor * last.hessian,
        square * squares,
        square * noise_std,
        _SQUARES_DOUBT,
        scale_doubt=0.0 if records.weights is None else 1.0,
    )
    middle = _MARGIN * meat / total + root.variance * np.eye(size)
    middle = middle + np.outer(root.doubt, root.doubt)
    middle += Curvature(root.hessian, last.doubts).error(root.inverse @ root.gradient)
    return _Solved(root.theta, root.inverse @ middle @ root.inverse, null_space(last.known().T))


def normal_rows(records: WhitenedRows, clip: float) -> NormalRows:
    """Return normal rows with the mean and the Gram matrix that the whitening leads to expect."""
    values, vectors = np.linalg.eigh(records.expected)
    gram = (vectors * np.maximum(values, 1e-3)) @ vectors.T
    return NormalRows(gram, gram @ records.constant, clip)


def _expected_hessian(theta: Floats, mean: Floats, clip: float, least: float) -> Floats:
    """Return the Hessian at `theta` that normal rows with this mean and Gram matrix 1 would have.

    It sets the early steps, and it costs nothing. For more than two classes it is the bound of
    Böhning & Lindsay 1988, half of the Gram matrix.
    """
    size, outputs = theta.shape
    if outputs > 1:
        return 0.5 * np.eye(size)
    return NormalRows(np.eye(size), mean, clip).hessian(theta[:, 0], least)


def _probabilities(margins: Floats, clip: float) -> tuple[Floats, Floats]:
    """Return the probabilities, (m, 1) or (m, k), and the weights, (m, 1), that bound residuals."""
    if margins.shape[1] == 1:
        p = expit(margins)
        return p, np.ones((1, 1)) if clip == 1 else np.minimum(1.0, clip / np.maximum(p, 1 - p))
    p = softmax(margins, axis=1)
    # |p - e_j|^2 = |p|^2 - 2 p_j + 1 is largest for the label j with the smallest probability.
    worst = np.sum(p**2, axis=1) - 2 * p.min(axis=1) + 1
    return p, np.minimum(1.0, clip / np.sqrt(worst))[:, None]


def residuals_of(margins: Floats, labels: Floats, clip: float) -> Floats:
    """Return the private residuals, (m, 1) or (m, k), whose norm is at most `clip`.

    `labels` are the numbers of the classes of m records.
    """
    p, weights = _probabilities(margins, clip)
    if margins.shape[1] == 1:
        return weights * (p - labels[:, None])
    p[np.arange(len(p)), labels.astype(np.intp)] -= 1.0
    return weights * p
