"""Frank–Wolfe over the l1 ball on sparse rows, with work that follows the non-zeros touched.

The law of the vertices drawn is that of the exponential mechanism on the exact gradient, vertex by
vertex, as in `polytope.descend`; only the work differs. Three ideas (the first and the last after
Raff, Khanna & Lu 2023, arXiv:2310.19978; the second makes the law exact, not nearly so):

1. *Scale apart.* With steps 2 / (t + 2) the model after t steps is scale * sums, where
   scale = 2 / (t (t + 1)) and sums = s_1 + 2 s_2 + ... + t s_t. A step adds to one entry of `sums`,
   and to the margins X @ sums of those rows that have that feature.
2. *Gradient at a nearby scale.* The shrinking scale moves every residual a little, hence the whole
   gradient. So the gradient is kept at a *reference* scale, where a step changes only the rows it
   touches, and with it a bound on how far the true gradient can be: at most `drift` times the sum
   of |x_ij| over the rows i. Features are proposed by the bound's weight, and a proposal is
   accepted with the ratio of the exact weight, from that one column, to the bound's: rejection
   sampling, whose law is the exact one. Once the scale has left the reference's window, or a step
   touches most of the data, all is computed afresh.
3. *Two-level draws*, see `_sparse_sampler`.

Everything in here is **private** but the vertices drawn. The time taken depends on the data, as it
does for every method that skips zeros.
"""

import math
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.mechanisms import Rng
from tacit.regression._base import Floats
from tacit.regression._loss import Loss
from tacit.regression._sparse_sampler import BlockSampler

_ROUNDING = 1e-9
"""Added to the drift, relative to the residual bound: covers rounding in the kept gradient."""
_MOST_TOUCHED = 0.25
"""Share of the non-zeros from which computing all afresh is cheaper."""
_NARROWEST, _WIDEST = 1e-9, 2.0
"""Logarithm of the reference over the smallest scale of its window."""
_FEW_PROPOSALS, _MANY_PROPOSALS = math.log(1.25), math.log(2.0)
"""Expected proposals for a draw, in log: the window widens below and halves above."""
_MOST_TRIALS = 64
_EXACT_MARGINS = 64
"""Number of refreshes after which the margins are multiplied out again."""


class LazyGradient:
    """Gradient of the loss at scale * sums on private sparse rows, and draws from it.

    `slope` is what the exponential mechanism multiplies a gradient's entries by: a feature j is
    drawn with weight exp(slope g_j) + exp(-slope g_j), and the sign that lowers the loss with
    probability 1 / (1 + exp(-2 slope |g_j|)).
    """

    def __init__(
        self,
        X: Any,  # Any: scipy's sparse types are not annotated
        targets: Floats,
        loss: Loss,
        *,
        slope: float,
        radius: float,
    ) -> None:
        self._rows, self._columns = X.tocsr(), X.tocsc()
        self._features = self._rows.indices.astype(np.intp)  # numpy gathers these fastest
        self._targets, self._loss = targets, loss
        self._slope, self._radius = slope, radius
        n_rows, n_features = X.shape
        self.sums = np.zeros(n_features)
        self._margins = np.zeros(n_rows)
        self._weights = np.asarray(abs(self._columns).sum(axis=0)).reshape(-1)
        self._stamps = np.zeros(n_features, np.intp)
        self._span = _WIDEST
        self._refreshes = 0
        self._sampler: BlockSampler | None = None
        self.refresh(1.0)

    def refresh(self, scale: float) -> None:
        """Compute all afresh at `scale`, with as wide a window below it as proposals allow."""
        self._refreshes += 1
        if self._refreshes % _EXACT_MARGINS == 0:
            self._margins = self._rows @ self.sums
        self._reference = scale
        self._residuals = self._residuals_at(scale)
        self._gradient = self._columns.T @ self._residuals
        exact = _log_sum_exp(_log_two_cosh(self._slope * np.abs(self._gradient)))
        while True:
            drift = self._loss.bound_drift(self._span, reach=self._radius)
            self._drift = drift + _ROUNDING * self._loss.clip
            bounds = self._log_bounds(slice(None))
            proposals = _log_sum_exp(bounds) - exact
            if proposals <= _MANY_PROPOSALS or self._span < _NARROWEST:
                break
            self._span /= 2
        self._lowest = scale * math.exp(-self._span)
        if proposals < _FEW_PROPOSALS:
            self._span = min(2 * self._span, _WIDEST)
        if self._sampler is None:
            self._sampler = BlockSampler(bounds)
        else:
            self._sampler.reset(bounds)

    def draw(self, scale: float, rng: Rng) -> tuple[int, float]:
        """Feature and sign of the vertex drawn at the model scale * sums: released."""
        assert self._sampler is not None
        for trial in count(1):
            if trial % _MOST_TRIALS == 0:
                self.refresh(scale)  # tightens the bounds; every trial has the exact law by itself
            first, second, third, fourth = rng.random(4).tolist()
            feature = self._sampler.draw(first, second)
            gradient = self._exact(feature, scale)
            weight = float(_log_two_cosh(self._slope * abs(gradient)))
            if third < math.exp(min(weight - float(self._sampler.log_weights[feature]), 0.0)):
                lowers = fourth < 1 / (1 + math.exp(-2 * self._slope * abs(gradient)))
                return feature, -1.0 if lowers == (gradient > 0) else 1.0
        raise AssertionError  # count does not end

    def add(self, feature: int, amount: float, scale: float) -> None:
        """Add `amount` to one entry of `sums`; draws at `scale` come next."""
        self.sums[feature] += amount
        rows, values = self._column(feature)
        self._margins[rows] += amount * values
        if scale < self._lowest:
            self.refresh(scale)
            return
        residuals = self._residuals_at(self._reference, rows)
        changes = residuals - self._residuals[rows]
        self._residuals[rows] = residuals
        moved = np.flatnonzero(changes)
        self._spread(rows[moved], changes[moved], scale)

    def probabilities(self, scale: float) -> Floats:
        """Private probability of each feature at the model scale * sums: O(nnz), for tests.

        The law of `draw`: proposed, times accepted, over the sum.
        """
        assert self._sampler is not None
        gradient = self._residuals_at(scale) @ self._rows
        accepted = _log_two_cosh(self._slope * np.abs(gradient)) - self._sampler.log_weights
        assert (accepted <= 0).all()  # else the bound would be none
        weights = self._sampler.probabilities() * np.exp(accepted)
        return weights / weights.sum()

    def _residuals_at(
        self, scale: float, rows: NDArray[np.integer] | slice = slice(None)
    ) -> Floats:
        return self._loss.residuals(scale * self._margins[rows], self._targets[rows])

    def _column(self, feature: int) -> tuple[NDArray[np.integer], Floats]:
        start, stop = self._columns.indptr[feature : feature + 2].tolist()
        return self._columns.indices[start:stop], self._columns.data[start:stop]

    def _exact(self, feature: int, scale: float) -> float:
        """Entry of the gradient at scale * sums, from the rows that have the feature."""
        rows, values = self._column(feature)
        return float(values @ self._residuals_at(scale, rows))

    def _log_bounds(self, features: NDArray[np.integer] | slice) -> Floats:
        """Logarithm of the largest weight that a feature can have within the window."""
        largest = np.abs(self._gradient[features]) + self._drift * self._weights[features]
        return _log_two_cosh(self._slope * largest)

    def _spread(self, rows: NDArray[np.integer], changes: Floats, scale: float) -> None:
        """Carry changes of residuals into the gradient and the sampler."""
        assert self._sampler is not None
        starts = self._rows.indptr[rows]
        lengths = self._rows.indptr[rows + 1] - starts
        ends = lengths.cumsum()
        touched = int(ends[-1]) if len(ends) else 0
        if touched > _MOST_TOUCHED * self._rows.nnz:
            self.refresh(scale)
            return
        places = np.arange(touched)
        entries = places + np.repeat(starts - ends + lengths, lengths)
        features = self._features[entries]
        np.add.at(self._gradient, features, self._rows.data[entries] * np.repeat(changes, lengths))
        self._stamps[features] = places  # one place of each feature survives
        distinct = features[self._stamps[features] == places]
        self._sampler.update(distinct, self._log_bounds(distinct))


def _log_two_cosh(x: Any) -> Any:  # Any: a float or an array, as given
    """log(exp(x) + exp(-x)) for x >= 0."""
    return x + np.log1p(np.exp(-2 * x))


def _log_sum_exp(x: Floats) -> float:
    largest = float(x.max())
    return largest + math.log(float(np.exp(x - largest).sum()))
