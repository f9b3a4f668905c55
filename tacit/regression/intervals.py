"""Standard errors, confidence intervals and p-values of released coefficients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri
from sklearn.utils.validation import check_is_fitted

from tacit._arrays import Floats
from tacit._check import in_open_unit
from tacit.events import Relation
from tacit.regression.bounds import Box, DeclaredBounds, as_bounds
from tacit.regression.irls import IRLSFit
from tacit.regression.newton import NewtonFit
from tacit.regression.normal_equations import Uncertainty

_ENCODED = (
    "one unit of a feature that a Schema scaled to [-1, 1] is half of its\ndeclared range; "
    "tacit regress prints the units of the file"
)


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

    Intervals are normal approximations. The variance of errors may depend on the features: it is
    released (a sandwich estimate). If noise is so large that residuals are clipped, what is cut off
    on one side is released, taken off the intercept, and added to its uncertainty. A coefficient
    that noise hides, or that collinear columns leave undetermined, has an infinite standard error;
    differences of such coefficients may have a finite one (`contrast`).
    """

    names: tuple[str, ...]
    estimates: Floats
    covariance: Floats
    hidden: Floats
    """The part of the covariance that is assumed, because noise hides these directions."""
    residual_std: float | None = None
    """Estimated standard deviation of a target around its prediction; None for class labels."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Positions of coefficients of one column of categories, the reference first."""

    def compared(self) -> "Inference":
        """Return the same with categories compared to the reference, as `summary` prints them.

        The reference of each group is left out; its coefficient is added to the intercept. The
        intercept is then that of a record in all reference categories.
        """
        if not self.groups:
            return self
        matrix = np.eye(len(self.names))
        for reference, *others in self.groups:
            matrix[others, reference] = -1
            matrix[0, reference] = 1
        kept = np.delete(np.arange(len(matrix)), [group[0] for group in self.groups])
        return self.mapped([self.names[place] for place in kept], matrix[kept])

    def mapped(
        self, names: Sequence[str], matrix: Floats, *, offset: ArrayLike = 0.0, unit: float = 1.0
    ) -> "Inference":
        """Return the same about the quantities `matrix` @ coefficients + `offset`.

        `unit` is what a difference of 1 between targets becomes.
        """
        std = self.residual_std
        return Inference(
            names=tuple(names),
            estimates=matrix @ self.estimates + np.asarray(offset, np.float64),
            covariance=matrix @ self.covariance @ matrix.T,
            hidden=matrix @ self.hidden @ matrix.T,
            residual_std=None if std is None else unit * std,
        )

    @property
    def standard_errors(self) -> Floats:
        """Standard error of each estimate."""
        return self._deviations(np.eye(len(self.names)))

    def contrast(self, weights: ArrayLike, confidence: float = 0.95) -> Ends:
        """Return the interval of sums of coefficients: `weights` has one row per sum.

        A difference of two categories may be known even if noise hides each of the two.
        """
        rows = np.atleast_2d(np.asarray(weights, np.float64))
        if rows.shape[1] != len(self.names):
            raise ValueError(
                f"weights must have {len(self.names)} columns, one for each of `names`, "
                f"got {rows.shape[1]}."
            )
        half = _quantile(confidence) * self._deviations(rows)
        return Ends(rows @ self.estimates - half, rows @ self.estimates + half)

    def _deviations(self, rows: Floats, extra: float = 0.0) -> Floats:
        """Return standard deviations of `rows` @ estimates, with `extra` variance.

        If more than half of a variance is assumed rather than known, it is infinite.
        """
        known = _forms(rows, self.covariance) + extra
        return np.sqrt(np.where(_forms(rows, self.hidden) <= known / 2, known, np.inf))

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
        return self.contrast(np.eye(len(self.names)), confidence)

    def prediction_interval(self, rows: Floats, confidence: float = 0.95) -> Ends:
        """Return intervals for new targets at `rows`, whose first column is 1 for an intercept."""
        assert self.residual_std is not None
        center = rows @ self.estimates
        half = _quantile(confidence) * self._deviations(rows, self.residual_std**2)
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
        lines.append(rule)
        is_hidden = np.isinf(self.standard_errors)
        if is_hidden.all():
            lines.append(
                "inf: noise is as large as all that the records say about the coefficients, so no\n"
                "finite interval is valid. More records, more budget or fewer columns help."
            )
        elif is_hidden.any():
            lines.append(
                "inf: noise hides this coefficient, or other columns determine this one. More\n"
                "records, more budget or fewer columns help."
            )
        return "\n".join(lines)


class InferenceMixin:
    """What estimators with standard errors share."""

    inference_: Inference | None
    epsilon: float
    delta: float | None
    relation: Relation | str
    bounds: DeclaredBounds
    fit_intercept: bool
    method_: str
    reason_: str

    def summary(self, confidence: float = 0.95) -> str:
        """Return a table of coefficients, standard errors, p-values and intervals, as text.

        Categories are compared with their reference if `bounds` declares `groups`.
        """
        inference = self._inference()
        facts = [
            ("Method", f"{self.method_}, {self.reason_}"),
            ("Privacy", f"epsilon {self.epsilon:g}, delta {self.delta:g}, {self.relation}"),
        ]
        if inference.residual_std is not None:
            facts.append(("Residual std", f"{inference.residual_std:.4g}"))
        facts.append(("Uncertainty", "sampling and privacy noise"))
        if as_bounds(self.bounds, name="bounds").labels:
            facts.append(("Units", _ENCODED))
        if inference.groups:
            names = ", ".join(inference.names[group[0]] for group in inference.groups)
            facts.append(("Compared with", names))
        is_linear = inference.residual_std is not None
        title = "Private least squares" if is_linear else "Private logistic regression"
        return inference.compared().table(title, facts, confidence)

    def _inference(self) -> Inference:
        check_is_fitted(self)
        if self.inference_ is None:
            raise ValueError(
                "this fit has no intervals. They need method 'auto' or 'gradient' with delta above "
                "0, a dense table, at most two classes, and neither l1 nor l2."
            )
        return self.inference_

    def _infer(
        self,
        fitted: NewtonFit | IRLSFit,
        box: Box,
        target_box: Box | None = None,
        residual_std: float | None = None,
    ) -> Inference:
        """Return the uncertainty of a fit in the user's units, from that in scaled units.

        Without a released uncertainty, everything is hidden.
        """
        coef, intercept = box.unscale(fitted.unshrunk, target_box)
        labels = getattr(self, "feature_names_in_", None)  # set by scikit-learn for a data frame
        if labels is None:
            declared = as_bounds(self.bounds, name="bounds").labels
            labels = declared or [f"x{k}" for k in range(len(coef))]
        matrix = box.unscaling(target_box)
        half = 1.0 if target_box is None else float(target_box.half[0])
        first = 0 if self.fit_intercept else 1
        nothing = Uncertainty(np.eye(len(matrix)), np.eye(len(matrix)))
        covariance, hidden = (
            (matrix @ part @ matrix.T)[first:, first:] for part in fitted.uncertainty or nothing
        )
        return Inference(
            names=("intercept", *map(str, labels))[first:],
            estimates=np.append(intercept, coef)[first:],
            covariance=covariance,
            hidden=hidden,
            residual_std=None if residual_std is None else residual_std * half,
            groups=() if first else tuple(tuple(k + 1 for k in group) for group in box.groups),
        )


def _forms(rows: Floats, matrix: Floats) -> Floats:
    """Return r' `matrix` r for every row r."""
    return np.einsum("ij,ij->i", rows @ matrix, rows)


def _quantile(confidence: float) -> float:
    return float(ndtri((1 + in_open_unit(confidence=confidence)) / 2))
