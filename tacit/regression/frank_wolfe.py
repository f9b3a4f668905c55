"""Private Frank–Wolfe over a polytope: a scikit-learn estimator and its method.

Features are scaled to |x_j| <= 1. Each step scores every vertex s by -<s, gradient>, where the
gradient is the sum over records of (residual) x. A private selection picks a vertex, only its index
is released, and the model moves towards it: theta <- (1 - mu) theta + mu s with mu = 2 / (t + 2).
Everything else is post-processing of the released vertices.

Sensitivity. A record changes the gradient by r x with |r| <= clip, so it changes the score of s by
-r <s, x>: by at most clip * |s|_1. The changes of two scores differ by at most clip * |s - s'|_1,
which bounds the range of the exponential mechanism. clip and the largest |s|_1 are L1 and ||C||_1
of Talwar, Thakurta & Zhang 2015, Algorithm 2. A replaced record changes the gradient by
r x - r' x', so twice as much.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self, TypeAlias, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array, hstack, issparse
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import ClassifierTags, RegressorTags, Tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets

from tacit._arrays import Floats
from tacit._check import one_of, positive, whole
from tacit.accounting import RDP, calibrate
from tacit.accounting import epsilon as epsilon_of
from tacit.events import Event, Exponential, Relation, Repeated
from tacit.mechanisms import ExponentialMechanism, LaplaceNoisyMax, Rng
from tacit.regression.bounds import Bounds, Box, DeclaredBounds, as_bounds
from tacit.regression.estimator import (
    BudgetTerms,
    PrivateEstimator,
    gaussian_shares,
    number_classes,
    public_size,
)
from tacit.regression.logistic import binary_log_probabilities, binary_probabilities
from tacit.regression.rows import PrivateRows
from tacit.regression.sparse_gradient import LOSSES, ClippedLoss, SparseGradient

ANALYSES = ("tight", "published")
_SIGNAL_PER_STEP, _FEWEST_STEPS = 25, 4


class ConstantModel(UserWarning):
    """A fitted model predicts the same for every row within the bounds."""


def _is_logistic(estimator: "FrankWolfe") -> bool:
    return estimator.loss == "logistic"


@dataclass(kw_only=True, eq=False, repr=False)
class FrankWolfe(PrivateEstimator):
    """Sparse linear or logistic regression under differential privacy, over a polytope.

    Each of T steps privately picks a vertex along which the loss falls, and moves the model by
    2 / (t + 2) of the way towards it (Talwar, Thakurta & Zhang 2015). Over the l1 ball the model
    has at most T non-zero coefficients, and the error grows only with the logarithm of the number
    of features. So it suits wide tables, dense or `scipy.sparse`; for sparse tables the work of a
    step depends on the non-zeros it touches, not on the width.

    `PrivateEstimator` describes the guarantee and the settings common to all estimators.

    Units: features are divided by their largest declared magnitude, so that |x_j| <= 1 and zero
    stays zero. So is the target of the squared loss; with an intercept, the middle of its bounds is
    subtracted first. `radius` and `vertices` are in these units, which for bounds of -1 and 1 are
    those of the data.

    Parameters
    ----------
    loss
        `"squared"` gives a regressor, `"logistic"` a classifier of two classes.
    radius, fit_intercept
        The polytope is the l1 ball of this radius; the intercept is one more coordinate of it. None
        follows the budget and `n_records` (`choose_radius`).
    vertices
        The vertices of another polytope, one per row, (k, d). The model then has no intercept.
    steps
        T; None lets `choose_steps` follow the budget and `n_records`.
    residual_clip
        Bound on one record's residual, in the scaled units of the target. None is 1/2 (logistic) or
        1 (squared), the smallest bounds that change no residual of the zero model.
    analysis
        `"tight"`: exponential mechanism, priced by its bounded range. `"published"`: Laplace noise
        as in the paper. See `plan_frank_wolfe`.
    target_bounds, classes
        Only `target_bounds` is used with the squared loss, only `classes` with the logistic loss.

    Attributes
    ----------
    is_constant_
        Whether the model predicts the same for every row within the bounds; a warning,
        `ConstantModel`, says so too.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.sparse import random_array
    >>> rng = np.random.default_rng(0)
    >>> X = random_array((5_000, 1_000), density=0.02, rng=rng).tocsr()
    >>> y = X @ np.repeat([3.0, -3.0, 0.0], [2, 2, 996]) > 0.01
    >>> model = FrankWolfe(loss="logistic", radius=50.0, bounds=(0, 1), epsilon=8.0, random_state=0)
    >>> model.fit(X, y).coef_.shape
    (1, 1000)
    """

    loss: str = "squared"
    radius: float | None = None
    fit_intercept: bool = True
    vertices: ArrayLike | None = None
    steps: int | None = None
    residual_clip: float | None = None
    analysis: str = "tight"
    target_bounds: DeclaredBounds = None
    classes: Sequence[Any] | None = None  # Any: labels are numbers, strings or booleans
    n_records: int | None = None
    coef_: Floats = field(init=False)
    intercept_: Any = field(init=False)  # Any: a float or (1,), as in scikit-learn
    classes_: NDArray[Any] = field(init=False)
    is_constant_: bool = field(init=False)

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit the model to private `X` (n, d), dense or sparse, and `y` (n,), paying first."""
        one_of(LOSSES, loss=self.loss)
        is_squared = self.loss == "squared"
        table, given = self._fit_table(X, y, y_numeric=is_squared, accept_sparse=True)
        n_rows, d = table.shape
        names = getattr(self, "feature_names_in_", None)
        box = _box_of(self.bounds, "bounds", d, is_centered=False, names=names)
        has_constant = self.vertices is None and bool(self.fit_intercept)
        if is_squared:
            unit = _box_of(self.target_bounds, "target_bounds", 1, is_centered=has_constant)
            classes, targets = None, unit.scale_target(given)
        else:
            unit = Bounds(-1, 1).box(1)
            check_classification_targets(given)
            classes, targets = number_classes(given, self.classes)
            if len(classes) != 2:
                raise ValueError(
                    f"Only binary classification is supported by FrankWolfe, got {len(classes)} "
                    "classes. Use LogisticRegression."
                )
        plan = self._plan(d + has_constant, public_size(self.n_records, n_rows))
        rng = self._generator()
        make_rows = SparseRows if issparse(table) else DenseRows
        rows = make_rows(table, box, has_constant=has_constant)

        self._pay(plan.event, f"{self.loss}, {self.analysis}")
        theta = fit(rows, targets, plan, rng=rng)
        if not has_constant:
            theta = np.append(0.0, theta)
        coef, intercept = box.unscale(theta, unit)
        self.event_ = plan.event
        self.coef_ = coef if classes is None else coef[None]
        self.intercept_ = float(intercept) if classes is None else np.array([intercept])
        if classes is not None:
            self.classes_ = classes
        self._warn_if_constant(box)
        return self

    def _warn_if_constant(self, box: Box) -> None:
        """Issue a warning if the released model gives one answer everywhere in the bounds."""
        coef = self.coef_.reshape(-1)
        ends = np.stack([coef * box.lower, coef * box.upper])
        start = float(np.ravel(self.intercept_)[0])
        lowest, highest = start + ends.min(axis=0).sum(), start + ends.max(axis=0).sum()
        is_one_class = _is_logistic(self) and (lowest > 0 or highest <= 0)
        self.is_constant_ = bool(not coef.any() or is_one_class)
        if self.is_constant_:
            other = "LogisticRegression" if _is_logistic(self) else "LinearRegression"
            warnings.warn(
                "the fitted model is constant: it predicts the same for every row within the "
                f"bounds. Use a larger radius, a larger epsilon, or {other}.",
                ConstantModel,
                stacklevel=3,
            )

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the predicted target, or the more probable class, of each row."""
        margins = self._margins(X)
        return self.classes_[(margins > 0).astype(np.intp)] if _is_logistic(self) else margins

    @available_if(_is_logistic)
    def decision_function(self, X: ArrayLike) -> Floats:
        """Return the linear score of each row, (n,); positive scores predict `classes_[1]`."""
        return self._margins(X)

    @available_if(_is_logistic)
    def predict_proba(self, X: ArrayLike) -> Floats:
        """Return the probability of each of the two classes for each of the n rows, (n, 2)."""
        return binary_probabilities(self._margins(X))

    @available_if(_is_logistic)
    def predict_log_proba(self, X: ArrayLike) -> Floats:
        """Return the log probability of each of the two classes for each of the n rows, (n, 2)."""
        return binary_log_probabilities(self._margins(X))

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the accuracy (logistic loss) or R^2 (squared loss) of the predictions for `X`."""
        metric = accuracy_score if _is_logistic(self) else r2_score
        return float(metric(y, self.predict(X), sample_weight=sample_weight))

    def _margins(self, X: ArrayLike) -> Floats:
        table = self._predict_table(X, accept_sparse=True)
        return table @ self.coef_.reshape(-1) + self.intercept_

    def _plan(self, n_coordinates: int, n_records: int) -> "FrankWolfePlan":
        terms = self._terms()
        one_of(ANALYSES, analysis=self.analysis)
        radius = choose_radius(self.loss, n_records, **terms)
        domain = self._domain(n_coordinates, radius if self.radius is None else self.radius)
        clip = None if self.residual_clip is None else positive(residual_clip=self.residual_clip)
        loss = ClippedLoss.make(self.loss, reach=domain.reach, clip=clip)
        given = choose_steps(n_records, **terms) if self.steps is None else self.steps
        steps = whole(steps=given, least=1)
        return plan_frank_wolfe(domain, loss, steps=steps, analysis=self.analysis, **terms)

    def _domain(self, n_coordinates: int, radius: float) -> "Domain":
        if self.vertices is None:
            return Ball(positive(radius=radius), n_coordinates)
        vertices = np.asarray(self.vertices, np.float64)
        if vertices.ndim != 2 or vertices.shape[1] != n_coordinates or not len(vertices):
            shape = f"(k, {n_coordinates}), one per row, got {vertices.shape}"
            raise ValueError(f"vertices must be of shape {shape}.")
        if not np.isfinite(vertices).all():
            raise ValueError("vertices must be finite.")
        return Hull(vertices)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.input_tags.sparse = True
        if _is_logistic(self):
            tags.estimator_type = "classifier"
            tags.classifier_tags = ClassifierTags(poor_score=True, multi_class=False)
        else:
            tags.estimator_type = "regressor"
            tags.regressor_tags = RegressorTags(poor_score=True)
        return tags


@dataclass(frozen=True)
class Ball:
    """The l1 ball of radius `reach`, a polytope with two vertices for each feature j.

    Vertex j is reach * e_j and vertex n_features + j is -reach * e_j, where e_j is a unit vector.
    """

    reach: float
    n_features: int

    @property
    def diameter(self) -> float:
        """Largest l1 distance between two vertices."""
        return 2 * self.reach

    def start(self) -> Floats:
        """Return the public coefficients from which Frank–Wolfe starts."""
        return np.zeros(self.n_features)

    def scores(self, gradient: Floats) -> Floats:
        """Return -<s, gradient> for each vertex s: high if a step towards s lowers the loss."""
        return self.reach * np.concatenate([-gradient, gradient])

    def move(self, theta: Floats, vertex: int, mu: float) -> None:
        """Move theta, in place, by the fraction `mu` of the way towards the numbered vertex."""
        theta *= 1 - mu
        sign = 1 if vertex < self.n_features else -1
        theta[vertex % self.n_features] += mu * sign * self.reach


@dataclass(frozen=True, eq=False)
class Hull:
    """The convex hull of given public vertices, one per row."""

    vertices: Floats

    @property
    def reach(self) -> float:
        """Largest l1 norm of a vertex, hence of a model."""
        return float(np.abs(self.vertices).sum(axis=1).max())

    @property
    def diameter(self) -> float:
        """Upper bound on the l1 distance between two vertices: the smallest of three bounds.

        These are twice the largest distance of a vertex from the origin, twice the largest distance
        from the mean of the vertices, and the sum of the edges of the box around all vertices.
        """
        from_mean = np.abs(self.vertices - self.vertices.mean(axis=0)).sum(axis=1).max()
        return min(2 * self.reach, 2 * float(from_mean), float(np.ptp(self.vertices, axis=0).sum()))

    def start(self) -> Floats:
        """Return the public coefficients from which Frank–Wolfe starts."""
        return self.vertices.mean(axis=0)

    def scores(self, gradient: Floats) -> Floats:
        """Return -<s, gradient> for each vertex s: high if a step towards s lowers the loss."""
        return -(self.vertices @ gradient)

    def move(self, theta: Floats, vertex: int, mu: float) -> None:
        """Move theta, in place, by the fraction `mu` of the way towards the numbered vertex."""
        theta *= 1 - mu
        theta += mu * self.vertices[vertex]


Domain: TypeAlias = Ball | Hull
Pick: TypeAlias = ExponentialMechanism | LaplaceNoisyMax


@dataclass(frozen=True)
class FrankWolfePlan:
    """Plan of one fit: the mechanism `pick` selects a vertex of `domain` in each step."""

    domain: Domain
    loss: ClippedLoss
    pick: Pick
    steps: int

    @property
    def event(self) -> Event:
        """Event of one fit, for the accountant."""
        return Repeated(self.pick.event, self.steps)


class DenseRows:
    """Private rows z of a dense table, clipped to the bounds and scaled each time they are read.

    With `has_constant`, each z begins with a constant 1 for the intercept.
    """

    def __init__(self, X: NDArray[np.floating], box: Box, *, has_constant: bool) -> None:
        self._rows = PrivateRows(X, box)
        self._has_constant = has_constant

    def weighted_sum(self, theta: Floats, weigh: Callable[[slice, Floats], Floats]) -> Floats:
        """Return the private sum over rows z of weigh(theta' z) z; the time is that of all entries.

        `weigh` maps a span of rows and their products theta' z to one weight for each row.
        """
        if self._has_constant:
            return self._rows.weighted_sum(theta, weigh)
        return self._rows.weighted_sum(np.append(0.0, theta), weigh)[1:]


class SparseRows:
    """Private rows z of a sparse table: a copy, clipped to the bounds and scaled.

    With `has_constant`, each z begins with a constant 1 for the intercept.
    """

    def __init__(self, X: Any, box: Box, *, has_constant: bool) -> None:  # Any: scipy's sparse rows
        scaled = box.clip(X)
        scaled.data /= box.half[scaled.indices]
        scaled.eliminate_zeros()
        ones = csr_array(np.ones((X.shape[0], 1)))
        self.X: Any = csr_array(hstack([ones, scaled], "csr")) if has_constant else scaled

    def weighted_sum(self, theta: Floats, weigh: Callable[[slice, Floats], Floats]) -> Floats:
        """Return the private sum over rows z of weigh(theta' z) z; the time is that of non-zeros.

        `weigh` maps a span of rows and their products theta' z to one weight for each row.
        """
        return weigh(slice(None), self.X @ theta) @ self.X


def choose_radius(loss: str, n_records: int, **budget: Unpack[BudgetTerms]) -> float:
    """Return a radius of the l1 ball that suits the budget.

    A larger ball holds better models, but its vertices have more noise. The radius is
    sqrt(n_records * mu) / 8, from 2 to 30, for the logistic loss and half of that for the squared
    loss, where mu is that of a Gaussian release which costs the budget. The factor was chosen on
    the texts of benchmarks/frank_wolfe.py; at epsilon 0.1, 1 and 8 the squared loss of the census
    tables is then close to that of the best radius.
    """
    (noise,) = gaussian_shares((1.0,), (1.0,), **budget)
    radius = float(np.clip(math.sqrt(n_records / noise) / 8, 2.0, 30.0))
    return radius if loss == "logistic" else radius / 2


def choose_steps(n_records: int, **budget: Unpack[BudgetTerms]) -> int:
    """Return a number of steps that suits the budget: n_records * mu / 25, at least 4.

    mu = 1 / noise multiplier of a Gaussian mechanism with this budget, so n_records * mu compares
    the signal of all records with the noise that hides one of them. Fewer steps underfit, and more
    steps add noise to each choice. The factor 1 / 25 was found on validation rows of two text
    collections, see benchmarks/frank_wolfe.py.
    """
    (noise,) = gaussian_shares((1.0,), (2.0,), **budget)
    return max(_FEWEST_STEPS, int(n_records / noise / _SIGNAL_PER_STEP))


def plan_frank_wolfe(
    domain: Domain,
    loss: ClippedLoss,
    *,
    steps: int,
    analysis: str = "tight",
    **budget: Unpack[BudgetTerms],
) -> FrankWolfePlan:
    """Return a plan whose `steps` private selections together cost the budget.

    `"tight"` draws from the exponential mechanism, whose bounded range composes cheaply, with as
    little noise as the accountant allows. `"published"` adds Laplace noise to every score as
    Talwar, Thakurta & Zhang 2015 do. Its scale is `loss.clip` * `domain.reach` (in the paper L1 and
    ||C||_1) * sqrt(8 steps log(1 / delta)) / epsilon. Each selection is then pure DP, with epsilon
    twice the ratio of sensitivity to scale. If records may be replaced, the noise is doubled.
    """
    if domain.diameter == 0:
        raise ValueError("vertices must not all be equal. Pass a polytope with a choice.")
    if analysis == "tight":
        epsilon_step = _epsilon_of_each(steps, **budget)
        pick = ExponentialMechanism(epsilon_step, sensitivity=loss.clip * domain.diameter / 2)
        return FrankWolfePlan(domain, loss, pick, steps)
    epsilon, delta, relation = budget["epsilon"], budget["delta"], budget["relation"]
    replaced = 2 if relation is Relation.REPLACE_ONE else 1
    epsilon_step = 2 * epsilon / math.sqrt(8 * steps * math.log(1 / delta)) / replaced
    pick = LaplaceNoisyMax(epsilon_step, sensitivity=loss.clip * domain.reach)
    found = FrankWolfePlan(domain, loss, pick, steps)
    if epsilon_of(found.event, delta=delta, relation=relation) > epsilon:
        raise ValueError(
            f"epsilon must be smaller for analysis 'published' with delta {delta}, got {epsilon}: "
            "its noise is proved for small epsilon only. Use analysis='tight'."
        )
    return found


def fit(rows: DenseRows | SparseRows, targets: Floats, plan: FrankWolfePlan, *, rng: Rng) -> Floats:
    """Return the released coefficients of a fit; the caller pays for `plan.event` first.

    For sparse rows, the l1 ball and the exponential mechanism, vertices are drawn by
    `SparseGradient`, which has the same distribution and needs less time.
    """
    is_fast = isinstance(plan.domain, Ball) and isinstance(plan.pick, ExponentialMechanism)
    if is_fast and isinstance(rows, SparseRows):
        return _fit_sparse(rows, targets, plan, rng=rng)

    def choose(scores: Floats) -> int:
        return plan.pick.release(scores, rng)

    return descend(rows, targets, plan.domain, plan.loss, steps=plan.steps, choose=choose)


def descend(
    rows: DenseRows | SparseRows,
    targets: Floats,
    domain: Domain,
    loss: ClippedLoss,
    *,
    steps: int,
    choose: Callable[[Floats], int],
) -> Floats:
    """Return the coefficients after `steps` steps, each towards the vertex that `choose` picks.

    `choose` maps the private scores of all vertices to the index of one vertex. With
    `numpy.argmax`, this is Frank–Wolfe without privacy.
    """
    theta = domain.start()

    def residuals(span: slice, margins: Floats) -> Floats:
        return loss.residuals(margins, targets[span])

    for step in range(steps):
        gradient = rows.weighted_sum(theta, residuals)
        # One record changes a score by at most clip * reach, and the difference of two scores by at
        # most clip * diameter.
        domain.move(theta, choose(domain.scores(gradient)), 2 / (step + 2))
    return theta


def _fit_sparse(rows: SparseRows, targets: Floats, plan: FrankWolfePlan, *, rng: Rng) -> Floats:
    radius, noise_scale = plan.domain.reach, plan.pick.noise_scale
    state = SparseGradient(rows.X, targets, plan.loss, slope=radius / noise_scale, radius=radius)
    scale = 1.0  # arbitrary, because the sums are zero
    for step in range(plan.steps):
        feature, sign = state.draw(scale, rng)
        scale = 2 / ((step + 1) * (step + 2))
        state.add(feature, (step + 1) * sign * radius, scale)
    return scale * state.sums


@lru_cache
def _epsilon_of_each(steps: int, **budget: Unpack[BudgetTerms]) -> float:
    """Return the epsilon that each of `steps` exponential mechanisms may have within the budget.

    The Rényi accountant is used because it prices exponential mechanisms; choosing the tightest of
    all accountants would give the same number more slowly.
    """
    return calibrate(lambda each: Repeated(Exponential(each), steps), accountant=RDP(), **budget)


def _box_of(
    bounds: DeclaredBounds,
    name: str,
    n_features: int,
    *,
    is_centered: bool,
    names: Sequence[str] | None = None,
) -> Box:
    """Return the bounds as arrays; scaling subtracts the middle of the range only if `is_centered`.

    Otherwise zero stays zero, as sparse tables require. `name` is the argument's name in errors.
    """
    declared = replace(as_bounds(bounds, name=name), norm=None)
    return declared.box(n_features, names, is_centered=is_centered)
