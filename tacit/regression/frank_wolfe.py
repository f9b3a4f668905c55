"""Private Frank–Wolfe over a polytope, in the manner of scikit-learn; `polytope` has the method."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from scipy.special import expit
from sklearn.base import BaseEstimator
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import ClassifierTags, RegressorTags, Tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from tacit._check import positive, whole
from tacit.events import Event, Relation
from tacit.regression import _base, polytope
from tacit.regression._base import Bounds, Box, Floats, Pays
from tacit.regression._loss import LOSSES, Loss
from tacit.regression.logistic import _numbered


def _is_logistic(estimator: "FrankWolfe") -> bool:
    return estimator.loss == "logistic"


class FrankWolfe(BaseEstimator):
    """Sparse linear or logistic regression under differential privacy, over a polytope.

    Each of T steps privately picks a vertex along which the loss falls, and moves the model
    towards it by 2 / (t + 2) of the way (Talwar, Thakurta & Zhang 2015). The model has at most T
    non-zero coefficients over the l1 ball, and the error grows with the logarithm of the number of
    features only: for wide tables, dense or `scipy.sparse`. For sparse tables the work of a step
    follows the non-zeros it touches, not the width.

    Guarantee: the fitted model is (`epsilon`, `delta`)-DP under `relation`, for any data, provided
    `bounds`, `target_bounds`, `classes`, `radius`, `vertices`, `steps` and `n_records` do not
    depend on the private values. Labels found in `y` and the number of rows stand in for `classes`
    and `n_records` if they are not given, and are then assumed public.

    Units. Features are divided by their largest declared magnitude, so that |x_j| <= 1 and zero
    stays zero, and so is the target of the squared loss (with an intercept, after subtracting the
    middle of its bounds). `radius` and `vertices` are in these units: with bounds of -1 and 1, in
    the data's own.

    Parameters
    ----------
    loss
        `"squared"` makes a regressor, `"logistic"` a classifier of two classes.
    radius, fit_intercept
        The polytope is the l1 ball of this radius; the intercept is one more coordinate of it.
    vertices
        Another polytope instead: its vertices, one a row, (k, d). It has no intercept.
    steps
        T; None lets `polytope.choose_steps` follow the budget and `n_records`.
    residual_clip
        Bound on one record's residual, in the target's scaled units; None is 1/2 (logistic) or 1
        (squared), where the zero model's residuals are just not clipped. See `_loss.Loss`.
    analysis
        `"tight"`: exponential mechanism, priced by its bounded range. `"published"`: Laplace noise
        as in the paper. See `polytope.plan_descent`.
    bounds, target_bounds
        `Bounds(lower, upper)` or a pair, of the features and, for the squared loss, of the target.
        Values are clipped.
    classes
        The two labels that may occur, for the logistic loss: a public list.
    ledger
        A `tacit.Ledger` that is asked to pay before anything is released.
    random_state
        A seed makes the noise reproducible, and so removable by who knows it: for tests only. So
        does a numpy Generator: `clone` copies it, and clones that share noise cancel it.

    Attributes
    ----------
    coef_, intercept_
        The released model, shaped as scikit-learn does for regressors or classifiers.
    event_
        What the fit cost, for `tacit.epsilon` and friends.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.sparse import random_array
    >>> rng = np.random.default_rng(0)
    >>> X = random_array((5_000, 1_000), density=0.02, rng=rng).tocsr()
    >>> y = X @ np.repeat([3.0, -3.0, 0.0], [2, 2, 996]) > 0.01
    >>> model = FrankWolfe(loss="logistic", radius=5.0, bounds=(0, 1), epsilon=2.0, random_state=0)
    >>> model.fit(X, y).coef_.shape
    (1, 1000)
    """

    coef_: Floats
    intercept_: Any  # Any: a float or (1,), as scikit-learn does
    event_: Event
    classes_: NDArray[Any]

    def __init__(
        self,
        *,
        loss: str = "squared",
        radius: float = 1.0,
        fit_intercept: bool = True,
        vertices: ArrayLike | None = None,
        steps: int | None = None,
        residual_clip: float | None = None,
        analysis: str = "tight",
        epsilon: float = 1.0,
        delta: float = 1e-6,
        bounds: Bounds | tuple[Any, Any] | None = None,
        target_bounds: Bounds | tuple[Any, Any] | None = None,
        classes: Sequence[Any] | None = None,  # Any: labels are numbers, strings, booleans
        n_records: int | None = None,
        relation: Relation | str = "add_remove",
        ledger: Pays | None = None,
        random_state: Any = None,  # Any: what scikit-learn takes for a seed
    ) -> None:
        self.loss = loss
        self.radius = radius
        self.fit_intercept = fit_intercept
        self.vertices = vertices
        self.steps = steps
        self.residual_clip = residual_clip
        self.analysis = analysis
        self.epsilon = epsilon
        self.delta = delta
        self.bounds = bounds
        self.target_bounds = target_bounds
        self.classes = classes
        self.n_records = n_records
        self.relation = relation
        self.ledger = ledger
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """The private model of `X` (n, d), dense or sparse, and `y` (n,); pays before release."""
        _base.one_of(LOSSES, loss=self.loss)
        is_squared = self.loss == "squared"
        table, given = _base.check_table(self, X, y, y_numeric=is_squared, accept_sparse=True)
        n_rows, d = table.shape
        box = self._box(self.bounds, "bounds", "the features", d, is_centered=False)
        has_constant = self.vertices is None and bool(self.fit_intercept)
        if is_squared:
            unit = self._box(
                self.target_bounds, "target_bounds", "the target", 1, is_centered=has_constant
            )
            classes, targets = None, unit.target(given)
        else:
            unit = Bounds(-1, 1).box(1)
            classes, targets = _two_classes(given, self.classes)
        plan = self._plan(d + has_constant, _base.public_size(self.n_records, n_rows))
        rng = _base.random_generator(self.random_state)
        make_rows = polytope.SparseRows if issparse(table) else polytope.DenseRows
        rows = make_rows(table, box, has_constant=has_constant)

        _base.pay(self.ledger, plan.event, note=f"FrankWolfe, {self.loss}, {self.analysis}")
        theta = polytope.fit(rows, targets, plan, rng=rng)
        if not has_constant:
            theta = np.append(0.0, theta)
        coef, intercept = box.unscale(theta * unit.half[0])
        intercept = intercept + unit.center[0]
        self.event_ = plan.event
        if classes is None:
            self.coef_, self.intercept_ = coef, float(intercept)
        else:
            self.coef_, self.intercept_, self.classes_ = coef[None], np.array([intercept]), classes
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Predicted target, or the more probable class, of each row."""
        margins = self._margins(X)
        return self.classes_[(margins > 0).astype(np.intp)] if _is_logistic(self) else margins

    @available_if(_is_logistic)
    def decision_function(self, X: ArrayLike) -> Floats:
        """Margins (n,), positive for `classes_[1]`."""
        return self._margins(X)

    @available_if(_is_logistic)
    def predict_proba(self, X: ArrayLike) -> Floats:
        """Probability of each class, (n, 2)."""
        margins = self._margins(X)
        return np.column_stack([expit(-margins), expit(margins)])

    @available_if(_is_logistic)
    def predict_log_proba(self, X: ArrayLike) -> Floats:
        """Log probability of each class, (n, 2)."""
        margins = self._margins(X)
        return -np.column_stack([np.logaddexp(0, margins), np.logaddexp(0, -margins)])

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Accuracy of a classifier, R^2 of a regressor, on the rows given."""
        metric = accuracy_score if _is_logistic(self) else r2_score
        return float(metric(y, self.predict(X), sample_weight=sample_weight))

    def _margins(self, X: ArrayLike) -> Floats:
        check_is_fitted(self)
        table, _ = _base.check_table(self, X, reset=False, accept_sparse=True)
        return table @ self.coef_.reshape(-1) + self.intercept_

    def _box(
        self, bounds: object, name: str, of: str, n_features: int, *, is_centered: bool
    ) -> Box:
        """Declared bounds; unless centered, zero stays zero (which `norm` asks for)."""
        advice = f"Pass Bounds(lower, upper) for {of}."
        declared = _base.as_bounds(bounds, name=name, advice=advice)
        return replace(declared, norm=None if is_centered else 1.0).box(n_features)

    def _plan(self, n_coordinates: int, n_records: int) -> polytope.Plan:
        epsilon, delta = _base.check_budget(self.epsilon, self.delta, pure=False)
        relation = _base.check_relation(self.relation, self.ledger)
        _base.one_of(polytope.ANALYSES, analysis=self.analysis)
        budget = {"epsilon": epsilon, "delta": delta, "relation": relation}
        domain = self._domain(n_coordinates)
        clip = None if self.residual_clip is None else positive(residual_clip=self.residual_clip)
        loss = Loss.make(self.loss, reach=domain.reach, clip=clip)
        if self.steps is None:
            steps = polytope.choose_steps(n_records, **budget)
        else:
            steps = whole(steps=self.steps, least=1)
        return polytope.plan_descent(domain, loss, steps=steps, analysis=self.analysis, **budget)

    def _domain(self, n_coordinates: int) -> polytope.Domain:
        if self.vertices is None:
            return polytope.Ball(positive(radius=self.radius), n_coordinates)
        vertices = np.asarray(self.vertices, np.float64)
        if vertices.ndim != 2 or vertices.shape[1] != n_coordinates or not len(vertices):
            raise ValueError(
                f"vertices must be of shape (k, {n_coordinates}), one a row, got {vertices.shape}."
            )
        if not np.isfinite(vertices).all():
            raise ValueError("vertices must be finite.")
        return polytope.Hull(vertices)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.input_tags.sparse = True
        tags.non_deterministic = True
        if _is_logistic(self):
            tags.estimator_type = "classifier"
            tags.classifier_tags = ClassifierTags(poor_score=True, multi_class=False)
        else:
            tags.estimator_type = "regressor"
            tags.regressor_tags = RegressorTags(poor_score=True)
        return tags


def _two_classes(
    labels: NDArray[Any], classes: Sequence[Any] | None
) -> tuple[NDArray[Any], Floats]:
    """The two public classes, and the private number, 0 or 1, of each label's class."""
    check_classification_targets(labels)
    known, numbers = _numbered(labels, classes)
    if len(known) != 2:
        raise ValueError(
            f"Only binary classification is supported by FrankWolfe, got {len(known)} classes. "
            "Use LogisticRegression."
        )
    return known, numbers
