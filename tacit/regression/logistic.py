"""Private logistic regression; its methods are in `irls`, `objective` and `gradient`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils import Tags

from tacit._arrays import Floats
from tacit._check import boolean, one_of
from tacit.regression import gradient, irls, objective
from tacit.regression.bounds import Box
from tacit.regression.estimator import (
    PrivateEstimator,
    number_classes,
    public_size,
    relative_weights,
)
from tacit.regression.gradient import DescentPlan, DescentRows, WideRows
from tacit.regression.intervals import Inference, InferenceMixin
from tacit.regression.irls import IRLSPlan
from tacit.regression.objective import ObjectivePlan
from tacit.regression.penalty import public_penalty
from tacit.regression.rows import PrivateRows

METHODS = ("gradient", "objective", "descent")
MOST_COLUMNS = 2000
NO_SGD = "method 'sgd' is gone: write 'gradient', or 'descent' for a sparse or wide table."
LogisticPlan: TypeAlias = IRLSPlan | ObjectivePlan | DescentPlan


@dataclass(kw_only=True, eq=False, repr=False)
class LogisticRegression(InferenceMixin, ClassifierMixin, PrivateEstimator):
    """The logit model under differential privacy, as a scikit-learn classifier.

    It maximizes sum y log p + (1 - y) log(1 - p) for two classes, and the multinomial form for
    more. `PrivateEstimator` describes the guarantee and the settings common to all estimators.

    Parameters
    ----------
    bounds
        For indicators also set `norm`, which reduces the noise; see `Bounds`.
    method
        `"gradient"`, noisy gradients with Newton steps (`irls`); `"objective"`, objective
        perturbation, for two classes only; `"descent"`, noisy descent without second moments, for
        sparse or wide tables. `"auto"` is
        `"descent"` for sparse tables and above 2,000 columns, `"objective"` if public facts (number
        of records and of features, budget) show that noise hides the second moments, and else
        `"gradient"`.
    max_weight, fit_intercept, l2, l1
        As in `LinearRegression`, for `"gradient"`. Penalties are added to the mean log-loss.

    Attributes
    ----------
    method_, reason_
        The method that was used, and a sentence that says why.
    inference_
        Estimates, standard errors, intervals and p-values (`Inference`) for two classes, by
        `"gradient"` without penalties; else None. `summary` prints it.

    Examples
    --------
    >>> import numpy as np
    >>> from tacit.regression import Bounds
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(0, 10, (5_000, 2))
    >>> y = X[:, 0] > X[:, 1]
    >>> model = LogisticRegression(epsilon=1.0, delta=1e-6, bounds=Bounds(0, 10), random_state=0)
    >>> bool(model.fit(X, y).score(X, y) > 0.95)
    True
    """

    method: str = "auto"
    max_weight: float | None = None
    fit_intercept: bool = True
    l2: float | None = None
    l1: float | None = None
    classes: Sequence[Any] | None = None  # Any: labels are numbers, strings or booleans
    n_records: int | None = None
    coef_: Floats = field(init=False)
    intercept_: Floats = field(init=False)
    classes_: NDArray[Any] = field(init=False)
    method_: str = field(init=False)
    reason_: str = field(init=False)
    inference_: Inference | None = field(init=False)

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the model to private `X` (n, d) and labels `y` (n,); pay before any release.

        `sample_weight` holds private weights of the records, such as those of a survey. They are
        clipped to [0, `max_weight`].
        """
        accept_sparse = self.method in ("auto", "descent")
        table, labels = self._fit_table(X, y, accept_sparse=accept_sparse)
        n_rows, n_features = table.shape
        fit_intercept, is_sparse = boolean(fit_intercept=self.fit_intercept), issparse(table)
        box = self._box(n_features, is_centered=fit_intercept and not is_sparse)
        classes, numbers = number_classes(labels, self.classes)
        n_records = public_size(self.n_records, n_rows)
        rng = self._generator()
        plan = self._plan(
            n_features,
            len(classes),
            box.row_norm,
            n_records,
            is_weighted=sample_weight is not None,
            is_sparse=is_sparse,
        )
        is_irls = isinstance(plan, IRLSPlan)
        weights = relative_weights(sample_weight, self.max_weight, n_rows, is_possible=is_irls)
        penalty = public_penalty(self.l2, self.l1)
        is_plain = penalty is None and (fit_intercept or isinstance(plan, DescentPlan))
        if not is_irls and not is_plain:
            raise ValueError(f"method {plan.method!r} has none of l1, l2, fit_intercept=False.")
        self.inference_ = None
        if isinstance(plan, DescentPlan):
            wide = WideRows(table, box, numbers)
            largest_norm = math.sqrt(box.full_norm**2 - 1)
            self._pay(plan.event, plan.method)
            theta = gradient.fit_descent(
                wide,
                plan,
                largest_norm=largest_norm,
                n_records=n_records,
                rng=rng,
                fit_intercept=fit_intercept,
            )
            return self._store(theta, box, classes, plan)
        rows = PrivateRows(table, box, row_norm=math.inf if is_irls else plan.row_norm)

        self._pay(plan.event, plan.method)
        if isinstance(plan, ObjectivePlan):
            theta = objective.fit_objective(rows, numbers, plan, rng=rng)[:, None]
        else:
            fitted = irls.fit_irls(
                rows,
                numbers,
                plan,
                n_records=n_records,
                rng=rng,
                weights=weights,
                fit_intercept=fit_intercept,
                penalty=penalty,
            )
            theta = fitted.theta
            if len(classes) == 2 and penalty is None:
                self.inference_ = self._infer(fitted, box)
        return self._store(theta, box, classes, plan)

    def fit_rows(
        self,
        rows: DescentRows,
        *,
        classes: Sequence[Any],  # Any: as `classes` of the estimator
        n_records: int,
        is_user: bool = False,
    ) -> Self:
        """Fit the model to rows that stay where they are, in rounds, by `"descent"`.

        `rows` are scaled by `bounds` with zero at zero, as `tacit.sources` gives them; `classes`
        are the two labels. `is_user` says that each user has one row at most, so that a ledger of
        users can pay.
        """
        if self.method not in ("auto", "descent"):
            raise ValueError(f"method {self.method!r} needs the table. Use method='descent'.")
        if len(classes) != 2:
            raise ValueError(f"a fit in rounds needs two classes, got {len(classes)}.")
        if self.l1 is not None or self.l2 is not None:
            raise ValueError("method 'descent' has none of l1, l2.")
        box = self._box(rows.n_features, is_centered=False)
        plan = gradient.plan_descent(n_classes=2, n_records=n_records, **self._terms())
        self._pay(plan.event, plan.method, is_user=is_user)
        theta = gradient.fit_descent(
            rows,
            plan,
            largest_norm=math.sqrt(box.full_norm**2 - 1),
            n_records=n_records,
            rng=self._generator(),
            fit_intercept=boolean(fit_intercept=self.fit_intercept),
        )
        self.inference_, self.n_features_in_ = None, rows.n_features
        self._store(theta, box, np.asarray(classes), plan)
        if self.method == "auto":
            self.reason_ = "chosen by auto, because the rows stay where they are"
        return self

    def _store(self, theta: Floats, box: Box, classes: NDArray[Any], plan: LogisticPlan) -> Self:
        coef, intercept = box.unscale(theta)
        self.coef_ = coef.T
        self.intercept_ = intercept
        self.classes_ = classes
        self.event_ = plan.event
        self.method_ = plan.method
        self.reason_ = self._reason(plan, len(box.half))
        return self

    def _reason(self, plan: LogisticPlan, n_features: int) -> str:
        """Return why the method was used: as asked for, or the public facts that decided."""
        if self.method != "auto":
            return "as asked for"
        if isinstance(plan, DescentPlan):
            wide = n_features > MOST_COLUMNS
            why = f"the table has more than {MOST_COLUMNS} columns" if wide else "it is sparse"
        elif isinstance(plan, ObjectivePlan):
            why = "noise hides second moments of so many columns at this budget"
        else:
            why = "the table is dense and not too wide for its noise"
        return f"chosen by auto, because {why}"

    def decision_function(self, X: ArrayLike) -> Floats:
        """Return linear scores of the n rows; higher scores mean more probable classes.

        For two classes, (n,): positive scores predict `classes_[1]`. For k > 2 classes, (n, k).
        """
        margins = self._predict_table(X, accept_sparse=True) @ self.coef_.T + self.intercept_
        return margins[:, 0] if len(self.classes_) == 2 else margins

    def predict_proba(self, X: ArrayLike) -> Floats:
        """Return the probability of each of the k classes for each of the n rows, (n, k)."""
        margins = self.decision_function(X)
        return binary_probabilities(margins) if margins.ndim == 1 else softmax(margins, axis=1)

    def predict_log_proba(self, X: ArrayLike) -> Floats:
        """Return the log probability of each of the k classes for each of the n rows, (n, k)."""
        margins = self.decision_function(X)
        if margins.ndim == 1:
            return binary_log_probabilities(margins)
        return margins - np.logaddexp.reduce(margins, axis=1, keepdims=True)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the most probable class of each row."""
        margins = self.decision_function(X)
        chosen = margins > 0 if margins.ndim == 1 else margins.argmax(axis=1)
        return self.classes_[chosen.astype(np.intp)]

    def _plan(
        self,
        n_features: int,
        n_classes: int,
        row_norm: float,
        n_records: int,
        *,
        is_weighted: bool,
        is_sparse: bool,
    ) -> LogisticPlan:
        terms = self._terms()
        if self.method == "sgd":
            raise ValueError(NO_SGD)
        one_of(("auto", *METHODS), method=self.method)
        is_wide = is_sparse or n_features > MOST_COLUMNS
        if is_wide and self.method not in ("auto", "descent"):
            raise ValueError(
                f"method {self.method!r} needs a dense table of at most {MOST_COLUMNS} columns. "
                "Use method='auto'."
            )
        if is_wide or self.method == "descent":
            return gradient.plan_descent(n_classes=n_classes, n_records=n_records, **terms)
        needs_gradient = is_weighted or not self.fit_intercept or n_classes != 2
        needs_gradient = needs_gradient or self.l1 is not None or self.l2 is not None
        is_hopeless = irls.is_hopeless(n_features, n_records=n_records, **terms)
        is_auto = self.method == "auto"
        if self.method == "objective" or (is_auto and is_hopeless and not needs_gradient):
            if n_classes != 2:
                raise ValueError(
                    "Only binary classification is supported by method 'objective', got "
                    f"{n_classes} classes. Use method='gradient'."
                )
            return objective.plan_objective(
                n_features, row_norm=row_norm, n_records=n_records, **terms
            )
        return irls.plan_irls(
            n_features,
            n_classes=n_classes,
            row_norm=row_norm,
            n_records=n_records,
            is_weighted=is_weighted,
            is_penalized=self.l1 is not None or self.l2 is not None,
            **terms,
        )

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        assert tags.classifier_tags is not None
        tags.classifier_tags.poor_score = True
        tags.classifier_tags.multi_class = self.method != "objective"
        tags.input_tags.sparse = self.method in ("auto", "descent")
        return tags


def binary_probabilities(margins: Floats) -> Floats:
    """Return probabilities of two classes, (n, 2), from the log-odds `margins` of the second."""
    return np.column_stack([expit(-margins), expit(margins)])


def binary_log_probabilities(margins: Floats) -> Floats:
    """Return log probabilities of two classes, (n, 2), from log-odds `margins` of the second."""
    return -np.column_stack([np.logaddexp(0, margins), np.logaddexp(0, -margins)])
