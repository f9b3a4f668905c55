"""Private linear regression; its three methods are in `functional`, `adassp` and `newton`."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from tacit._arrays import Floats
from tacit._check import in_open_unit, positive
from tacit.events import Relation
from tacit.mechanisms import Rng
from tacit.regression import adassp, functional, newton
from tacit.regression.adassp import AdaSSPPlan
from tacit.regression.bounds import Box
from tacit.regression.estimator import PrivateRegressor, as_numbers, one_of, public_size
from tacit.regression.functional import FunctionalPlan
from tacit.regression.intervals import Ends, Inference
from tacit.regression.newton import NewtonFit, NewtonPlan
from tacit.regression.rows import PrivateRows

METHODS = ("functional", "adassp", "gradient")
LinearPlan: TypeAlias = FunctionalPlan | AdaSSPPlan | NewtonPlan


class PointFit(NamedTuple):
    """Released coefficients, intercept first, of a method that has no standard errors."""

    theta: Floats


@dataclass(kw_only=True, eq=False, repr=False)
class LinearRegression(PrivateRegressor):
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

    Attributes
    ----------
    inference_
        Estimates, standard errors, intervals and p-values (`Inference`); None for `"functional"`
        and `"adassp"`. `summary` prints it.

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
    n_records: int | None = None
    method_: str = field(init=False)
    inference_: Inference | None = field(init=False)

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the model to private `X` (n, d) and `y` (n,); pay before any value is released.

        `sample_weight` holds private weights of the records, such as those of a survey. They are
        clipped to [0, `max_weight`].
        """
        table, targets = self._fit_table(X, y, y_numeric=True)
        n_rows, n_features = table.shape
        box, target_box = self._box(n_features), self._target_box()
        n_records = public_size(self.n_records, n_rows)
        rng = self._generator()
        plan = self._plan(box, n_records)
        rows = PrivateRows(table, box, row_norm=plan.row_norm)
        scaled = target_box.scale_target(targets)
        weights = self._weights(sample_weight, n_rows, plan)
        if weights is not None:
            rows.factors *= np.sqrt(weights)

        self._pay(plan.event, plan.method)
        fitted = fit(rows, scaled, plan, n_records=n_records, rng=rng, weights=weights)
        self.coef_, intercept = box.unscale(fitted.theta, target_box)
        self.intercept_ = float(intercept)
        self.inference_ = self._infer(fitted, box, target_box)
        self.event_ = plan.event
        self.method_ = plan.method
        return self

    def summary(self, confidence: float = 0.95) -> str:
        """Return a table of coefficients, standard errors, p-values and intervals, as text."""
        check_is_fitted(self)
        inference = self._inference()
        budget = f"epsilon {self.epsilon:g}, delta {self.delta:g}, {Relation(self.relation)}"
        facts = [
            ("Privacy", budget),
            ("Residual std", f"{inference.residual_std:.4g}"),
            ("Uncertainty", "sampling and privacy noise"),
        ]
        return inference.table("Private least squares", facts, confidence)

    def predict_interval(self, X: ArrayLike, confidence: float = 0.95) -> Ends:
        """Return an interval for the target of each row of `X`, with errors taken as normal."""
        table = self._predict_table(X)
        rows = np.column_stack([np.ones(len(table)), table])
        return self._inference().prediction_interval(rows, confidence)

    def _weights(
        self, sample_weight: ArrayLike | None, n_rows: int, plan: LinearPlan
    ) -> Floats | None:
        """Return private weights in [0, 1], relative to the declared largest weight."""
        if sample_weight is None:
            return None
        if not isinstance(plan, NewtonPlan):
            raise ValueError(f"method {plan.method!r} has no weights. Use method='gradient'.")
        if self.max_weight is None:
            raise ValueError(
                "max_weight must be declared for sample_weight, got None. It bounds what one "
                "record can change. Take it from public knowledge, such as the survey's design."
            )
        largest = positive(max_weight=self.max_weight)
        weights = as_numbers(sample_weight, name="sample_weight")
        if weights.shape != (n_rows,):
            raise ValueError(f"sample_weight must be of shape ({n_rows},), got {weights.shape}.")
        if not np.isfinite(weights).all():
            raise ValueError("sample_weight must be finite.")
        return np.clip(weights, 0.0, largest) / largest

    def _inference(self) -> Inference:
        if self.inference_ is None:
            raise ValueError(
                f"method {self.method_!r} has no intervals. Fit with method='gradient' or 'auto' "
                "and delta above 0."
            )
        return self.inference_

    def _infer(self, fitted: NewtonFit | PointFit, box: Box, target_box: Box) -> Inference | None:
        """Return the uncertainty of a fit in the user's units; None if the method has none."""
        if isinstance(fitted, PointFit):
            return None
        coef, intercept = box.unscale(fitted.unshrunk, target_box)
        names = getattr(self, "feature_names_in_", [f"x{k}" for k in range(len(coef))])
        matrix = box.unscaling(target_box)
        return Inference(
            names=("intercept", *map(str, names)),
            estimates=np.append(intercept, coef),
            covariance=matrix @ fitted.covariance @ matrix.T,
            residual_std=fitted.residual_std * float(target_box.half[0]),
        )

    def _plan(self, box: Box, n_records: int) -> LinearPlan:
        n_features, row_norm = len(box.half), box.row_norm
        terms = self._terms(allow_pure=True)
        one_of(("auto", *METHODS), method=self.method)
        one_of(("tight", "published"), analysis=self.analysis)
        split = None if self.split is None else in_open_unit(split=self.split)
        method = self.method
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


def fit(
    rows: PrivateRows,
    y: Floats,
    plan: LinearPlan,
    *,
    n_records: int,
    rng: Rng,
    weights: Floats | None = None,
) -> NewtonFit | PointFit:
    """Return coefficients fitted by the method of `plan`; the caller has paid for `plan.event`."""
    match plan:
        case FunctionalPlan():
            return PointFit(functional.fit_functional(rows, y, plan, n_records=n_records, rng=rng))
        case AdaSSPPlan():
            return PointFit(adassp.fit_adassp(rows, y, plan, rng=rng))
        case NewtonPlan():
            return newton.fit_newton(rows, y, plan, n_records=n_records, rng=rng, weights=weights)
