"""Private linear regression; its three methods are in `functional`, `adassp` and `newton`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Floats
from tacit._check import boolean, in_open_unit, one_of
from tacit.mechanisms import Rng
from tacit.regression import adassp, functional, newton
from tacit.regression.adassp import AdaSSPPlan
from tacit.regression.bounds import Box
from tacit.regression.estimator import PrivateRegressor, public_size, relative_weights
from tacit.regression.functional import FunctionalPlan
from tacit.regression.intervals import Ends, Inference, InferenceMixin
from tacit.regression.newton import NewtonFit, NewtonPlan
from tacit.regression.penalty import Penalty, public_penalty
from tacit.regression.rows import PrivateRows, SecondMoments

METHODS = ("functional", "adassp", "gradient")
LinearPlan: TypeAlias = FunctionalPlan | AdaSSPPlan | NewtonPlan


class PointFit(NamedTuple):
    """Released coefficients, intercept first, of a method that has no standard errors."""

    theta: Floats


@dataclass(kw_only=True, eq=False, repr=False)
class LinearRegression(InferenceMixin, PrivateRegressor):
    """Least squares under differential privacy, as a scikit-learn regressor.

    `PrivateEstimator` describes the guarantee and the settings common to all estimators.

    Parameters
    ----------
    delta
        0 asks for pure DP, which only the functional mechanism gives; so does None with
        `method="functional"`. Other methods need a delta above 0.
    method
        `"functional"` (Zhang et al. 2012), `"adassp"` (Wang 2018), `"gradient"` (noisy gradients,
        each followed by a Newton step), or `"auto"`: the functional mechanism for delta 0, which
        no other method offers, and else `"gradient"`.
    analysis, split
        Options of the functional mechanism: `"tight"` or `"published"` sensitivities, and the share
        of epsilon for the quadratic coefficients.
    max_weight
        Largest weight of a record, public; needed to fit with `sample_weight`. A record of this
        weight has the influence that every record has without weights, so a bound far above most
        weights costs accuracy.
    fit_intercept, l2, l1
        For `"gradient"`: whether the model has an intercept, and weights of a ridge and of a lasso
        penalty, l2 |b|^2 / 2 + l1 |b|_1, beside half of the mean squared error. b are coefficients
        without the intercept for features and targets scaled to [-1, 1] by their bounds. Penalties
        are applied to released values and cost nothing. None for both shrinks as noise requires.

    Attributes
    ----------
    method_, reason_
        The method that was used, and a sentence that says why.
    inference_
        Estimates, standard errors, intervals and p-values (`Inference`); None for `"functional"`,
        for `"adassp"` and with penalties. `summary` prints it.

    Examples
    --------
    >>> import numpy as np
    >>> from tacit.regression import Bounds
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(0, 10, (20_000, 2))
    >>> y = X @ [1.0, -2.0] + 3
    >>> model = LinearRegression(epsilon=1.0, delta=1e-6, bounds=Bounds(0, 10),
    ...                          target_bounds=Bounds(-20, 20), random_state=0).fit(X, y)
    >>> model.coef_.round(1).tolist()
    [1.0, -2.0]
    """

    delta: float | None = None
    method: str = "auto"
    analysis: str = "tight"
    split: float | None = None
    max_weight: float | None = None
    fit_intercept: bool = True
    l2: float | None = None
    l1: float | None = None
    n_records: int | None = None
    method_: str = field(init=False)
    reason_: str = field(init=False)
    inference_: Inference | None = field(init=False)

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the model to private `X` (n, d) and `y` (n,); pay before any value is released.

        `sample_weight` holds private weights of the records, such as those of a survey. They are
        clipped to [0, `max_weight`].
        """
        table, targets = self._fit_table(X, y, y_numeric=True)
        n_rows, n_features = table.shape
        is_centered = boolean(fit_intercept=self.fit_intercept)
        box = self._box(n_features, is_centered=is_centered)
        target_box = self._target_box(is_centered=is_centered)
        n_records = public_size(self.n_records, n_rows)
        rng = self._generator()
        plan = self._plan(box, n_records)
        rows = PrivateRows(table, box, row_norm=plan.row_norm)
        scaled = target_box.scale_target(targets)
        is_newton = isinstance(plan, NewtonPlan)
        weights = relative_weights(sample_weight, self.max_weight, n_rows, is_possible=is_newton)
        if weights is not None:
            rows.factors *= np.sqrt(weights)
        penalty = public_penalty(self.l2, self.l1)
        if not is_newton and not (is_centered and penalty is None):
            raise ValueError(f"method {plan.method!r} has none of l1, l2, fit_intercept=False.")

        self._pay(plan.event, plan.method)
        fitted = fit(
            rows,
            scaled,
            plan,
            n_records=n_records,
            rng=rng,
            is_exact=self.n_records is None,
            weights=weights,
            fit_intercept=is_centered,
            penalty=penalty,
        )
        self._store(fitted.theta, box, target_box, plan)
        if isinstance(fitted, NewtonFit) and penalty is None:
            self.inference_ = self._infer(fitted, box, target_box, fitted.residual_std)
        return self

    def fit_moments(
        self,
        moments: Callable[[float], SecondMoments],
        *,
        n_features: int,
        n_records: int,
        is_user: bool = False,
    ) -> Self:
        """Fit the model to second moments of rows that stay where they are, and pay for it.

        `moments(row_norm)` returns the exact sums over rows that are scaled by `bounds` and
        `target_bounds` and shrunk to `row_norm`, as `tacit.sources` computes them. The methods are
        `"functional"` and `"adassp"`; `"auto"` is the first for delta 0 and else the second.
        `is_user` says that each user has one row at most, so that a ledger of users can pay.
        """
        method = "adassp" if self.method == "auto" and self.delta else self.method
        if method == "gradient":
            raise ValueError("method 'gradient' reads rows several times. Use method='adassp'.")
        if not self.fit_intercept or self.l1 is not None or self.l2 is not None:
            raise ValueError("a fit from moments has none of l1, l2, fit_intercept=False.")
        box, target_box = self._box(n_features), self._target_box()
        plan = self._plan(box, n_records, method)
        assert not isinstance(plan, NewtonPlan)  # refused above
        private = moments(plan.row_norm)
        self._pay(plan.event, plan.method, is_user=is_user)
        theta = fit_moments(private, plan, n_records=n_records, rng=self._generator())
        self._store(theta, box, target_box, plan)
        self.n_features_in_ = n_features
        return self

    def predict_interval(self, X: ArrayLike, confidence: float = 0.95) -> Ends:
        """Return an interval for the target of each row of `X`, with errors taken as normal."""
        table = self._predict_table(X)
        rows = np.column_stack([np.ones(len(table)), table]) if self.fit_intercept else table
        return self._inference().prediction_interval(rows, confidence)

    def _store(self, theta: Floats, box: Box, target_box: Box, plan: LinearPlan) -> None:
        self.coef_, intercept = box.unscale(theta, target_box)
        self.intercept_ = float(intercept)
        self.inference_ = None
        self.event_ = plan.event
        self.method_ = plan.method
        self.reason_ = self._reason(plan)

    def _reason(self, plan: LinearPlan) -> str:
        """Return why the method was used: as asked for, or the public facts that decided."""
        if self.method != "auto":
            return "as asked for"
        if isinstance(plan, FunctionalPlan):
            return "chosen by auto, because delta is 0 and no other method is pure"
        if isinstance(plan, AdaSSPPlan):
            return "chosen by auto, because delta is above 0 and the rows are read once"
        return "chosen by auto, because delta is above 0"

    def _plan(self, box: Box, n_records: int, method: str | None = None) -> LinearPlan:
        n_features, row_norm = len(box.half), box.row_norm
        terms = self._terms(allow_pure=True)
        one_of(("auto", *METHODS), method=self.method)
        one_of(("tight", "published"), analysis=self.analysis)
        split = None if self.split is None else in_open_unit(split=self.split)
        method = method or self.method
        if method == "auto":
            if self.delta is None:
                raise ValueError(
                    f"delta must be given for method 'auto', got None. Pass delta="
                    f"{suggest_delta(n_records):g}, or method='functional' for pure DP."
                )
            method = "gradient" if terms["delta"] else "functional"
        if method == "functional":
            return functional.plan_functional(
                n_features,
                epsilon=terms["epsilon"],
                relation=terms["relation"],
                analysis=self.analysis,
                split=split,
            )
        if terms["delta"] == 0:
            raise ValueError(
                f"delta must be in (0, 1) for method {method!r}, got 0. Pass delta, "
                "or use method='functional' for pure DP."
            )
        if method == "adassp":
            row_norm = adassp.choose_row_norm(
                n_features,
                row_norm=row_norm,
                full_norm=box.full_norm,
                n_records=n_records,
                **terms,
            )
            return adassp.plan_adassp(row_norm=row_norm, **terms)
        return newton.plan_newton(n_features, row_norm=row_norm, n_records=n_records, **terms)


def suggest_delta(n_records: int) -> float:
    """Return the largest power of ten that is at most 1 / (10 `n_records`), and at most 1e-6.

    >>> suggest_delta(500), suggest_delta(3_000_000)
    (1e-06, 1e-08)
    """
    return 10.0 ** min(-6, math.floor(-math.log10(10 * n_records)))


def fit_moments(
    private: SecondMoments, plan: FunctionalPlan | AdaSSPPlan, *, n_records: int, rng: Rng
) -> Floats:
    """Return coefficients from second moments; the caller has paid for `plan.event`."""
    if isinstance(plan, FunctionalPlan):
        return functional.fit_functional(private, plan, n_records=n_records, rng=rng)
    return adassp.fit_adassp(private, plan, rng=rng)


def fit(
    rows: PrivateRows,
    y: Floats,
    plan: LinearPlan,
    *,
    n_records: int,
    rng: Rng,
    is_exact: bool = True,
    weights: Floats | None = None,
    fit_intercept: bool = True,
    penalty: Penalty | None = None,
) -> NewtonFit | PointFit:
    """Return coefficients fitted by the method of `plan`; the caller has paid for `plan.event`.

    `is_exact`: see `newton.fit_newton`.
    """
    match plan:
        case FunctionalPlan() | AdaSSPPlan():
            return PointFit(fit_moments(rows.moments(y), plan, n_records=n_records, rng=rng))
        case NewtonPlan():
            return newton.fit_newton(
                rows,
                y,
                plan,
                n_records=n_records,
                rng=rng,
                is_exact=is_exact,
                weights=weights,
                fit_intercept=fit_intercept,
                penalty=penalty,
            )
