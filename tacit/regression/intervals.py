"""Standard errors, confidence intervals and p-values of released coefficients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri
from sklearn.utils.validation import check_is_fitted

from tacit._arrays import Floats
from tacit._check import in_open_unit
from tacit.events import Relation
from tacit.regression.bounds import Box

_UNKNOWN = 1e100  # standard errors above this are infinite: the direction is hidden by noise


class Ends(NamedTuple):
    """Lower and upper ends, one entry per coefficient or per row."""

    lower: Floats
    upper: Floats


@dataclass(frozen=True, eq=False)
class Inference:
    """Estimates with their uncertainty, which includes both privacy noise and sampling.

    Everything here is a function of released values, so it costs nothing more. The first entry of
    each array is the intercept, if the model has one. Estimates are not shrunk, so they may differ
    from `coef_`, which is: shrinking lowers the error of predictions but would void the intervals.

    Intervals are normal approximations. They assume what classical least squares assumes, errors of
    one variance that do not depend on the features, and errors with a symmetric distribution if
    noise is so large that residuals are clipped. A coefficient that noise hides completely has an
    infinite standard error.
    """

    names: tuple[str, ...]
    estimates: Floats
    covariance: Floats
    residual_std: float | None = None
    """Estimated standard deviation of a target around its prediction; None for class labels."""

    @property
    def standard_errors(self) -> Floats:
        """Standard error of each estimate."""
        errors = np.sqrt(np.diag(self.covariance))
        return np.where(errors < _UNKNOWN, errors, np.inf)

    @property
    def z_values(self) -> Floats:
        """Estimates divided by their standard errors."""
        return self.estimates / self.standard_errors

    @property
    def p_values(self) -> Floats:
        """Two-sided p-values of the hypotheses that the coefficients are 0."""
        return 2 * ndtr(-np.abs(self.z_values))

    def interval(self, confidence: float = 0.95) -> Ends:
        """Return a confidence interval for each coefficient."""
        half = _quantile(confidence) * self.standard_errors
        return Ends(self.estimates - half, self.estimates + half)

    def prediction_interval(self, rows: Floats, confidence: float = 0.95) -> Ends:
        """Return intervals for new targets at `rows`, whose first column is 1 for an intercept."""
        assert self.residual_std is not None
        center = rows @ self.estimates
        variance = np.einsum("ij,jk,ik->i", rows, self.covariance, rows) + self.residual_std**2
        deviation = np.sqrt(variance)
        half = _quantile(confidence) * np.where(deviation < _UNKNOWN, deviation, np.inf)
        return Ends(center - half, center + half)

    def table(self, title: str, facts: Sequence[tuple[str, str]], confidence: float = 0.95) -> str:
        """Return a table of all coefficients as text, below `title` and lines of `facts`."""
        interval = self.interval(confidence)
        tail = (1 - confidence) / 2
        width = max(9, *(len(name) for name in self.names))
        header = f"{'':{width}} {'coef':>11} {'std err':>11} {'z':>9} {'P>|z|':>7} "
        header += f"{f'[{tail:.3g}':>11} {f'{1 - tail:.3g}]':>11}"
        rule = "=" * len(header)
        columns = (self.estimates, self.standard_errors, self.z_values, self.p_values, *interval)
        lines = [title.center(len(header)).rstrip(), rule]
        lines += [f"{name}: {value}" for name, value in facts]
        lines += [rule, header, "-" * len(header)]
        for name, estimate, error, z, p, lower, upper in zip(self.names, *columns, strict=True):
            numbers = f"{estimate:>11.4g} {error:>11.4g} {z:>9.3f} {p:>7.3f}"
            lines.append(f"{name:{width}} {numbers} {lower:>11.4g} {upper:>11.4g}")
        return "\n".join([*lines, rule])


class InferenceMixin:
    """What estimators with standard errors share."""

    inference_: Inference | None
    epsilon: float
    delta: float | None
    relation: Relation | str

    def summary(self, confidence: float = 0.95) -> str:
        """Return a table of coefficients, standard errors, p-values and intervals, as text."""
        inference = self._inference()
        facts = [("Privacy", f"epsilon {self.epsilon:g}, delta {self.delta:g}, {self.relation}")]
        if inference.residual_std is not None:
            facts.append(("Residual std", f"{inference.residual_std:.4g}"))
        facts.append(("Uncertainty", "sampling and privacy noise"))
        is_linear = inference.residual_std is not None
        title = "Private least squares" if is_linear else "Private logistic regression"
        return inference.table(title, facts, confidence)

    def _inference(self) -> Inference:
        check_is_fitted(self)
        if self.inference_ is None:
            raise ValueError(
                "this fit has no intervals. They need method 'auto' or 'gradient' with delta above "
                "0, a dense table, at most two classes, and neither l1 nor l2."
            )
        return self.inference_


def infer(
    estimates: Floats,
    covariance: Floats,
    *,
    names: Sequence[str] | None,
    box: Box,
    target_box: Box | None = None,
    residual_std: float | None = None,
    fit_intercept: bool = True,
) -> Inference:
    """Return the uncertainty of a fit in the user's units, from that in scaled units."""
    coef, intercept = box.unscale(estimates, target_box)
    labels = [f"x{k}" for k in range(len(coef))] if names is None else map(str, names)
    matrix = box.unscaling(target_box)
    half = 1.0 if target_box is None else float(target_box.half[0])
    first = 0 if fit_intercept else 1
    return Inference(
        names=("intercept", *labels)[first:],
        estimates=np.append(intercept, coef)[first:],
        covariance=(matrix @ covariance @ matrix.T)[first:, first:],
        residual_std=None if residual_std is None else residual_std * half,
    )


def _quantile(confidence: float) -> float:
    return float(ndtri((1 + in_open_unit(confidence=confidence)) / 2))
