"""Private linear regression, in the manner of scikit-learn; `least_squares` has the methods."""

from typing import Any, Self

from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from tacit._check import in_open_unit
from tacit.events import Event, Relation
from tacit.regression import _base, least_squares
from tacit.regression._base import Bounds, Box, Floats, Pays
from tacit.regression.statistics import PrivateRows


class LinearRegression(RegressorMixin, BaseEstimator):
    """Least squares under differential privacy, in the manner of scikit-learn.

    Guarantee: the fitted model is (`epsilon`, `delta`)-DP under `relation`, for any data, provided
    `bounds`, `target_bounds` and `n_records` do not depend on the private values. The number of
    rows stands in for `n_records` if that is not given, and is then assumed public.

    Parameters
    ----------
    epsilon, delta
        The budget. `delta=0` asks for pure DP, which the functional mechanism gives.
    bounds, target_bounds
        `Bounds(lower, upper)` or a pair, of the features and of the target. Values are clipped.
    method
        `"functional"` (Zhang et al. 2012), `"adassp"` (Wang 2018), `"gradient"`, or `"auto"`:
        `choose_method` picks from public facts. See `plan_functional`, `plan_adassp` and
        `plan_gradient` for the sensitivities.
    analysis, split
        Of the functional mechanism: `"tight"` or `"published"` sensitivities, and the share of
        epsilon for the quadratic coefficients.
    ledger
        A `tacit.Ledger` that is asked to pay before anything is released.
    random_state
        A seed makes the noise reproducible, and so removable by who knows it: for tests only. So
        does a numpy Generator: `clone` copies it, and clones that share noise cancel it.

    Attributes
    ----------
    coef_, intercept_
        The released model.
    event_
        What the fit cost, for `tacit.epsilon` and friends.
    method_
        The method used.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(0, 10, (20_000, 2))
    >>> y = X @ [1.0, -2.0] + 3
    >>> model = LinearRegression(epsilon=1.0, delta=1e-6, bounds=Bounds(0, 10),
    ...                          target_bounds=Bounds(-20, 20), random_state=0).fit(X, y)
    >>> model.coef_.round(1).tolist()
    [1.0, -2.0]
    """

    coef_: Floats
    intercept_: float
    event_: Event
    method_: str

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 0.0,
        bounds: Bounds | tuple[Any, Any] | None = None,
        target_bounds: Bounds | tuple[Any, Any] | None = None,
        method: str = "auto",
        analysis: str = "tight",
        split: float | None = None,
        n_records: int | None = None,
        relation: Relation | str = "add_remove",
        ledger: Pays | None = None,
        random_state: Any = None,  # Any: what scikit-learn takes for a seed
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.bounds = bounds
        self.target_bounds = target_bounds
        self.method = method
        self.analysis = analysis
        self.split = split
        self.n_records = n_records
        self.relation = relation
        self.ledger = ledger
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """The private model of `X` (n, d) and `y` (n,); pays before it releases."""
        table, targets = _base.check_table(self, X, y, y_numeric=True)
        n_rows, d = table.shape
        _base.check_width(d)
        box = _base.as_bounds(
            self.bounds, name="bounds", advice="Pass Bounds(lower, upper) for the features."
        ).box(d)
        target_box = _base.as_bounds(
            self.target_bounds,
            name="target_bounds",
            advice="Pass Bounds(lower, upper) for the target.",
        ).box(1)
        n_records = _base.public_size(self.n_records, n_rows)
        rng = _base.random_generator(self.random_state)
        plan = self._plan(box, n_records)
        rows = PrivateRows(table, box, row_norm=plan.row_norm)
        scaled = target_box.target(targets)

        _base.pay(self.ledger, plan.event, note=f"LinearRegression, {plan.method}")
        theta = least_squares.fit(rows, scaled, plan, n_records=n_records, rng=rng)
        coef, intercept = box.unscale(theta * target_box.half[0])
        self.coef_ = coef
        self.intercept_ = float(intercept + target_box.center[0])
        self.event_ = plan.event
        self.method_ = plan.method
        return self

    def predict(self, X: ArrayLike) -> Floats:
        """Predicted targets of the rows of `X`."""
        check_is_fitted(self)
        table, _ = _base.check_table(self, X, reset=False)
        return table @ self.coef_ + self.intercept_

    def _plan(self, box: Box, n_records: int) -> least_squares.Plan:
        n_features, row_norm = len(box.half), box.row_norm
        epsilon, delta = _base.check_budget(self.epsilon, self.delta, pure=True)
        relation = _base.check_relation(self.relation, self.ledger)
        _base.one_of(("auto", *least_squares.METHODS), method=self.method)
        _base.one_of(("tight", "published"), analysis=self.analysis)
        split = None if self.split is None else in_open_unit(split=self.split)
        budget = {"epsilon": epsilon, "delta": delta, "relation": relation}
        method = self.method
        if method == "auto":
            method = least_squares.choose_method(
                n_features, row_norm=row_norm, n_records=n_records, **budget
            )
        if method == "functional":
            return least_squares.plan_functional(
                n_features, epsilon=epsilon, relation=relation, analysis=self.analysis, split=split
            )
        if delta == 0:
            raise ValueError(
                f"delta must be in (0, 1) for method {method!r}, got 0. Pass delta, "
                "or use method='functional' for pure DP."
            )
        if method == "adassp":
            row_norm = least_squares.choose_row_norm(
                n_features,
                row_norm=row_norm,
                full_norm=box.full_norm,
                n_records=n_records,
                **budget,
            )
            return least_squares.plan_adassp(row_norm=row_norm, **budget)
        return least_squares.plan_gradient(
            n_features, row_norm=row_norm, n_records=n_records, **budget
        )

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        assert tags.regressor_tags is not None
        tags.regressor_tags.poor_score = True
        return tags
