"""Whitened rows: what the Newton steps of linear and of logistic regression start with.

A noisy Gram matrix in the scaled units of `Bounds` is released. Its inverse square root *whitens*
the rows: it makes all directions about equally long, so that noise of one size fits all of them
(iterated whitening is due to CoinPress, Biswas et al. 2020, arXiv:2006.06618). A histogram of the
norms of whitened rows is released next, from which the norm is chosen to which longer rows are
clipped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tacit._arrays import Floats, Indices
from tacit.mechanisms import GaussianMechanism, Rng, SecureGenerator
from tacit.regression.rows import PrivateRows, from_triangle, triangle, triangle_noise
from tacit.sampling import Poisson

TIGHTEST_ROWS = 0.8
ROUNDING = 1 + 1e-6
"""Factor on bounds in whitened units: covers rounding, which whitening may enlarge."""
_LONG_ROWS = 2e-4  # share of rows that may be clipped, if noise lets it be known
_REACHES, _WHOLE = np.arange(1.0, 2.6, 0.1), 0.9  # see `_release_limit`
_NORM_LEVELS = 2.0 ** np.arange(-1, 6.5, 0.5)  # relative to the root mean square


@dataclass(frozen=True)
class WhitenedRows:
    """Private records in whitened coordinates: rows u = z `whitening`, clipped to norm `limit`."""

    rows: PrivateRows
    targets: Floats
    weights: Floats | None
    """Weight of each record, in [0, 1]; None if all are 1."""
    factors: Floats
    """By what a row is multiplied to clip it."""
    whitening: Floats
    expected: Floats
    """Mean of u u' over whole rows u, as the Gram matrix that whitens them says."""
    limit: float
    mean_factor: float
    """Released estimate of the mean of `factors`, rather too large."""
    reach: float
    """Norm up to which `counted_once` is exact, relative to `limit`."""
    total: float
    """Public number of records or sum of weights, or the expected number if they were drawn."""

    @property
    def size(self) -> int:
        """Number of coefficients of one output."""
        return self.whitening.shape[1]

    @property
    def constant(self) -> Floats:
        """The model that predicts 1 for every record, in whitened units; 0 without an intercept."""
        return self.model(np.eye(len(self.whitening))[0])

    def take(self, rows: PrivateRows, chosen: Indices | slice, rate: float) -> "WhitenedRows":
        """Return the `chosen` records, a share `rate` of all; `rows` are their rows."""
        return replace(
            self,
            rows=rows,
            targets=self.targets[chosen],
            weights=None if self.weights is None else self.weights[chosen],
            factors=self.factors[chosen],
            total=rate * self.total,
        )

    def gradient(self, theta: Floats, residuals: Callable[[slice, Floats], Floats]) -> Floats:
        """Return the private sum of r u' over the records; a row counts with its weight.

        `theta`, (size,) or (size, k), is in whitened units. `residuals` takes a slice of m records
        and their margins, (m,) or (m, k), and returns r of the same shape.
        """
        factors = self.factors if self.weights is None else self.factors * self.weights

        def weigh(span: slice, margins: Floats) -> Floats:
            return (residuals(span, margins).T * factors[span]).T

        return self.whitening.T @ self.rows.weighted_sum(self.whitening @ theta, weigh)

    def hessians(
        self, theta: Floats, curvatures: Callable[[slice, Floats], Floats]
    ) -> list[Floats]:
        """Return the private sums of h u u' over the records, one for each column of h.

        `theta`, (size, k), is in whitened units. `curvatures` takes a slice of m records and their
        margins, (m, k), and returns h >= 0 of shape (m, j).
        """
        roots = self.factors if self.weights is None else self.factors * np.sqrt(self.weights)
        return self.rows.whitened_hessians(self.whitening, roots, theta, curvatures)

    def counted_once(self, span: slice) -> Floats:
        """Return by what u u' is multiplied so that a row counts with its factor once.

        A gradient has the factor of a row once, so its derivative is the sum of z u' over the whole
        rows z, and that of u u' is too small. The result is divided by `reach`, so that it is at
        most 1. Rows longer than `reach` times `limit` count for less.
        """
        return np.minimum(1 / self.factors[span], self.reach) / self.reach

    def weights_of(self, span: slice) -> Floats | float:
        """Return the private weights of some records; 1 if all are 1."""
        return 1.0 if self.weights is None else self.weights[span]

    def gram(self) -> Floats:
        """Return the private sum of u u' over the records."""
        roots = self.factors if self.weights is None else self.factors * np.sqrt(self.weights)
        return self.rows.whitened_gram(self.whitening, roots)

    def count_right(self, models: Floats) -> Floats:
        """Return the private sums of weights of the records whose target, 0 or 1, is predicted.

        `models`, (size, k), are in whitened units. A margin above 0 predicts 1.
        """
        theta, counts = self.whitening @ models, np.zeros(models.shape[1])
        for span, rows in self.rows.scaled():
            is_right = (rows @ theta[1:] + theta[0] > 0) == (self.targets[span, None] > 0)
            weights = np.ones(len(is_right)) if self.weights is None else self.weights[span]
            counts += weights @ is_right
        return counts

    def model(self, theta: Floats) -> Floats:
        """Return `theta`, given in scaled units, in whitened units."""
        return np.asarray(np.linalg.pinv(self.whitening) @ theta, np.float64)


def whiten(
    rows: PrivateRows,
    shrunk: PrivateRows,
    targets: Floats,
    gram: GaussianMechanism,
    norms: GaussianMechanism,
    *,
    weights: Floats | None,
    widest: float,
    total: float,
    n_records: int,
    fit_intercept: bool,
    rng: Rng,
    rate: float = 1.0,
) -> WhitenedRows:
    """Release a Gram matrix and a histogram of norms, and return the records in whitened units.

    `shrunk` are the rows, or a share `rate` of them, shrunk to the norm that bounds the Gram matrix
    and multiplied by the square roots of their weights. `total` is the public number of records, or
    the released sum of weights. `widest` limits the norm of clipped rows, relative to their root
    mean square.
    """
    whitening, expected = _release_whitening(
        shrunk, gram, rate * total, rng, fit_intercept=fit_intercept
    )
    typical = math.sqrt(max(float(np.trace(expected)), 1.0))
    lengths = rows.norms(whitening)
    level, mean_factor, reach = _release_limit(lengths / typical, norms, widest, n_records, rng)
    limit = level * typical
    return WhitenedRows(
        rows=rows,
        targets=targets,
        weights=weights,
        factors=limit / np.maximum(lengths, limit),
        whitening=whitening,
        expected=expected,
        limit=limit,
        mean_factor=mean_factor,
        reach=reach,
        total=total,
    )


def draw(rate: float, n_rows: int, rng: Rng) -> Indices:
    """Return private indices of rows, each drawn independently with probability `rate`."""
    if isinstance(rng, SecureGenerator):
        return np.flatnonzero(rng.random(n_rows) < rate)
    return Poisson(rate).indices(n_rows, rng)


def _release_whitening(
    rows: PrivateRows,
    mechanism: GaussianMechanism,
    total: float,
    rng: Rng,
    *,
    fit_intercept: bool,
) -> tuple[Floats, Floats]:
    """Return a matrix that whitens the rows, and the mean of u u' over rows u after that.

    The matrix is the inverse square root of the released Gram matrix, to whose eigenvalues the size
    of the noise is added. Without an intercept the first row of the matrix is 0, and it has one
    column less.
    """
    size, bound = rows.n_features + 1, rows.row_norm**2
    # One record adds z z' with |z| <= row_norm.
    noisy = bound * mechanism.release(triangle(rows.gram()) / bound, rng) / total
    first = 0 if fit_intercept else 1
    values, vectors = np.linalg.eigh(from_triangle(noisy, size)[first:, first:])
    values = np.maximum(values, 0.0)
    noise = triangle_noise(bound * mechanism.noise_std, size) / total
    # No mean of z z' has an eigenvalue above row_norm^2, so more than half of it would not help.
    raised = values + min(noise, bound / 2)
    whitening = (vectors / np.sqrt(raised)) @ vectors.T
    expected = (vectors * (values / raised)) @ vectors.T
    return np.pad(whitening, ((first, 0), (0, 0))), expected


def _release_limit(
    norms: Floats, mechanism: GaussianMechanism, widest: float, n_records: int, rng: Rng
) -> tuple[float, float, float]:
    """Return the norm to which rows are clipped, the mean factor of clipping, and the reach.

    The norm is the smallest level of `norms` that few rows exceed, as far as noise shows it, or
    `widest` if that is smaller. The reach, relative to this norm, is where the trace of the sum of
    z u' is nearly whole (see `WhitenedRows.counted_once`): more would only add noise.
    """
    bins = np.searchsorted(_NORM_LEVELS, norms)
    counts = np.bincount(bins, minlength=len(_NORM_LEVELS) + 1).astype(np.float64)
    noisy = mechanism.release(counts, rng)  # one record is counted once
    above = noisy[::-1].cumsum()[::-1][1:]  # number of rows above each level
    doubt = 3 * mechanism.noise_std * np.sqrt(np.arange(len(above), 0, -1))
    few = np.flatnonzero(above <= np.maximum(_LONG_ROWS * n_records, doubt))
    level = float(_NORM_LEVELS[few[0]]) if len(few) else math.inf
    limit = min(max(level, TIGHTEST_ROWS), widest)
    # A norm below the middle of each bin, so that the mean factor is rather too large.
    inner = np.append(0.0, _NORM_LEVELS * 2**0.12)
    mean_factor = float(noisy @ (limit / np.maximum(inner, limit)) / max(noisy.sum(), 1.0))
    middle = _NORM_LEVELS / 2**0.25 / limit  # of each bin but the last
    traces = np.minimum(middle, _REACHES[:, None]) @ (
        np.minimum(middle, 1.0) * np.maximum(noisy[:-1], 0.0)
    )
    enough = np.flatnonzero(traces >= _WHOLE * traces[-1])
    return limit, float(np.clip(mean_factor, 0.5, 1.0)), float(_REACHES[enough[0]])
