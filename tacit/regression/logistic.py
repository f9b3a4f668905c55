"""Private logistic regression, in the manner of scikit-learn; `likelihood` has the methods."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from tacit._check import in_closed_unit
from tacit.events import Event, Relation
from tacit.regression import _base, likelihood
from tacit.regression._base import Bounds, Floats, Pays
from tacit.regression.statistics import PrivateRows


class LogisticRegression(ClassifierMixin, BaseEstimator):
    """The logit model under differential privacy, in the manner of scikit-learn.

    Maximizes sum y log p + (1 - y) log(1 - p) for two classes, its multinomial form for more.

    Guarantee: the fitted model is (`epsilon`, `delta`)-DP under `relation`, for any data, provided
    `bounds`, `classes` and `n_records` do not depend on the private values. Labels found in `y`
    and the number of rows stand in for the last two if they are not given, and are then assumed
    public.

    Parameters
    ----------
    bounds
        `Bounds(lower, upper)` or a pair. For indicators add `norm`: it pays, see `Bounds`.
    method
        `"gradient"`, full-batch noisy descent; `"sgd"`, Poisson lots at `rate`; `"objective"`,
        objective perturbation, two classes only. See `likelihood` for the proofs.
    classes
        Labels that may occur, a public list.
    ledger
        A `tacit.Ledger` that is asked to pay before anything is released.
    random_state
        A seed makes the noise reproducible, and so removable by who knows it: for tests only. So
        does a numpy Generator: `clone` copies it, and clones that share noise cancel it.

    Attributes
    ----------
    coef_, intercept_
        The released model, shaped as scikit-learn does: one row for two classes, else one a class.
    event_
        What the fit cost, for `tacit.epsilon` and friends.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(0, 10, (5_000, 2))
    >>> y = X[:, 0] > X[:, 1]
    >>> model = LogisticRegression(epsilon=1.0, delta=1e-6, bounds=Bounds(0, 10), random_state=0)
    >>> bool(model.fit(X, y).score(X, y) > 0.95)
    True
    """

    coef_: Floats
    intercept_: Floats
    event_: Event
    classes_: NDArray[Any]

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-6,
        bounds: Bounds | tuple[Any, Any] | None = None,
        method: str = "gradient",
        rate: float = 0.05,
        classes: Sequence[Any] | None = None,  # Any: labels are numbers, strings, booleans
        n_records: int | None = None,
        relation: Relation | str = "add_remove",
        ledger: Pays | None = None,
        random_state: Any = None,  # Any: what scikit-learn takes for a seed
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.bounds = bounds
        self.method = method
        self.rate = rate
        self.classes = classes
        self.n_records = n_records
        self.relation = relation
        self.ledger = ledger
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """The private model of `X` (n, d) and labels `y` (n,); pays before it releases."""
        table, labels = _base.check_table(self, X, y)
        n_rows, d = table.shape
        _base.check_width(d)
        box = _base.as_bounds(
            self.bounds, name="bounds", advice="Pass Bounds(lower, upper) for the features."
        ).box(d)
        classes, numbers = _numbered(labels, self.classes)
        n_records = _base.public_size(self.n_records, n_rows)
        rng = _base.random_generator(self.random_state)
        plan = self._plan(d, len(classes), box.row_norm, n_records)
        rows = PrivateRows(table, box, row_norm=plan.row_norm)

        _base.pay(self.ledger, plan.event, note=f"LogisticRegression, {plan.method}")
        theta = likelihood.fit(
            rows, numbers, plan, n_classes=len(classes), n_records=n_records, rng=rng
        )
        coef, intercept = box.unscale(theta)
        self.coef_ = np.atleast_2d(coef.T)
        self.intercept_ = np.atleast_1d(intercept)
        self.classes_ = classes
        self.event_ = plan.event
        return self

    def decision_function(self, X: ArrayLike) -> Floats:
        """Margins: (n,) for two classes, positive for `classes_[1]`; (n, k) for more."""
        check_is_fitted(self)
        table, _ = _base.check_table(self, X, reset=False)
        margins = table @ self.coef_.T + self.intercept_
        return margins[:, 0] if len(self.classes_) == 2 else margins

    def predict_proba(self, X: ArrayLike) -> Floats:
        """Probability of each class, (n, k)."""
        margins = self.decision_function(X)
        if margins.ndim == 1:
            return np.column_stack([expit(-margins), expit(margins)])
        return softmax(margins, axis=1)

    def predict_log_proba(self, X: ArrayLike) -> Floats:
        """Log probability of each class, (n, k)."""
        margins = self.decision_function(X)
        if margins.ndim == 1:
            return -np.column_stack([np.logaddexp(0, margins), np.logaddexp(0, -margins)])
        return margins - np.logaddexp.reduce(margins, axis=1, keepdims=True)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable class of each row."""
        margins = self.decision_function(X)
        chosen = margins > 0 if margins.ndim == 1 else margins.argmax(axis=1)
        return self.classes_[chosen.astype(np.intp)]

    def _plan(
        self, n_features: int, n_classes: int, row_norm: float, n_records: int
    ) -> likelihood.Plan:
        epsilon, delta = _base.check_budget(self.epsilon, self.delta, pure=False)
        relation = _base.check_relation(self.relation, self.ledger)
        _base.one_of(likelihood.METHODS, method=self.method)
        budget = {"epsilon": epsilon, "delta": delta, "relation": relation}
        if self.method == "gradient":
            return likelihood.plan_gradient(
                n_features, n_classes=n_classes, row_norm=row_norm, n_records=n_records, **budget
            )
        if self.method == "sgd":
            rate = in_closed_unit(rate=self.rate)
            if rate == 0:
                raise ValueError("rate must be above 0, got 0.")
            return likelihood.plan_sgd(n_classes=n_classes, row_norm=row_norm, rate=rate, **budget)
        if n_classes != 2:
            raise ValueError(
                "Only binary classification is supported by method 'objective', got "
                f"{n_classes} classes. Use method='gradient'."
            )
        return likelihood.plan_objective(
            n_features, row_norm=row_norm, n_records=n_records, **budget
        )

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        assert tags.classifier_tags is not None
        tags.classifier_tags.poor_score = True
        tags.classifier_tags.multi_class = self.method != "objective"
        return tags


def _numbered(labels: NDArray[Any], classes: Sequence[Any] | None) -> tuple[NDArray[Any], Floats]:
    """Sorted classes, and the private number of each label's class."""
    known = np.unique(labels if classes is None else np.asarray(classes))
    if known.dtype.kind == "f" and not (known == np.floor(known)).all():
        raise ValueError("Unknown label type: continuous. Labels must be classes, not quantities.")
    if len(known) < 2:
        raise ValueError(
            f"y must have at least two classes, got {len(known)} class. "
            "Declare classes=... if others may occur."
        )
    if len(known) == 2 and classes is None:
        return known, (labels == known[1]).astype(np.float64)
    numbers = np.searchsorted(known, labels)
    if (known[np.minimum(numbers, len(known) - 1)] != labels).any():
        raise ValueError("y holds labels that are not in classes. Declare all that may occur.")
    return known, numbers.astype(np.float64)
