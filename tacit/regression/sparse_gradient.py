"""Clipped losses, and their gradient on sparse rows with work proportional to the entries touched.

Frank–Wolfe over the l1 ball draws a vertex by the exponential mechanism on the exact gradient. On
sparse rows `SparseGradient` draws from the same law with less work. It combines three ideas, the
first and the last after Raff, Khanna & Lu 2023 (arXiv:2310.19978); the second makes the law exact
instead of approximate.

1. *Separate scale.* With steps 2 / (t + 2) the model after t steps is scale * sums, where
   scale = 2 / (t (t + 1)) and sums = s_1 + 2 s_2 + ... + t s_t. A step changes one entry of `sums`,
   and the margins X @ sums of the rows that have that feature.
2. *Gradient at a nearby scale.* A smaller scale changes every residual a little, hence the whole
   gradient. So the gradient is kept at a *reference* scale, where a step changes only the rows it
   touches. The true gradient differs from it by at most `drift` times the sum of |x_ij| over the
   rows i. Features are proposed by an upper bound on their weight, and a proposal is accepted with
   probability (exact weight, computed from that one column) / bound. This is rejection sampling,
   whose law is the exact one. Everything is recomputed once the scale has left the window of the
   reference, or when a step touches most of the data.
3. *Two-level draws*, see `BlockSampler`.

Everything here is **private** except the vertices drawn. The time taken depends on the data, as it
does for every method that skips zeros.

Only an index and a sign are released, so no low bit can leak. But the probabilities are those of
double-precision weights and of uniform numbers with 53 bits, unlike in `ExponentialMechanism`,
which is exact. For D features and weights of relative error r (`BlockSampler`: below 1e-10) the
log probabilities of a draw are off by at most 2 r, except for outcomes that 53 bits cannot reach:
a draw compares four uniform numbers with at most 2 sqrt(D) + 2 edges, each off by at most 2^-52, so
these outcomes have a probability below (2 sqrt(D) + 2) 2^-52: 5e-13 a draw for a million features.
"""

import math
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from tacit._arrays import Floats
from tacit.mechanisms import Rng

LOSSES = ("squared", "logistic")
_LOGISTIC_DRIFT = 0.22388
"""More than the largest |d sigmoid(m) / d log m| = max |m| sigmoid(m) sigmoid(-m) = 0.223870..."""
_ROUNDING = 1e-9
"""Added to the drift, relative to the residual bound: covers rounding in the stored gradient."""
_MOST_TOUCHED = 0.25  # share of the non-zeros above which recomputing everything is cheaper
_NARROWEST, _WIDEST = 1e-9, 2.0
"""Range of the logarithm of the reference over the smallest scale in its window."""
_FEW_PROPOSALS, _MANY_PROPOSALS = math.log(1.25), math.log(2.0)
"""Logarithms of the expected proposals per draw: the window widens below and is halved above."""
_MOST_TRIALS = 64
_EXACT_MARGINS = 64  # number of refreshes after which the margins are computed again from `sums`
_FRESH = 2_000  # number of updates after which a `BlockSampler` computes its sums again
_SHRUNK = 1e-2
_HIGHEST, _LOWEST = 300.0, -300.0
"""Logarithms of weights, relative to the reference, at which a new reference is taken."""


@dataclass(frozen=True)
class ClippedLoss:
    """A loss of margin m and target y, given by its derivative in m, the *residual*.

    Squared: (m - y)^2 / 2 with residual m - y. Logistic: log(1 + exp(m)) - y m, y in {0, 1}, with
    residual sigmoid(m) - y. Residuals are clipped to [-clip, clip]. The clipped residual is the
    derivative of another convex loss, which grows linearly where the original grows faster.
    """

    name: str
    clip: float

    @classmethod
    def make(cls, name: str, *, reach: float, clip: float | None = None) -> "ClippedLoss":
        """Return the loss for models with |theta|_1 <= `reach` and targets with |y| <= 1.

        Residuals are below 1 (logistic) or at most `reach` + 1 (squared, as |<theta, x>| <= reach),
        so a `clip` above these is reduced to them without effect. If `clip` is None, residuals are
        clipped at the largest residual that the model theta = 0 can have.
        """
        most = 1.0 if name == "logistic" else reach + 1.0
        at_zero = 0.5 if name == "logistic" else 1.0
        return cls(name, min(at_zero if clip is None else clip, most))

    def residuals(self, margins: Floats, targets: Floats) -> Floats:
        """Return the private residuals, clipped to [-clip, clip], for margins and their targets."""
        predicted = expit(margins) if self.name == "logistic" else margins
        return np.clip(predicted - targets, -self.clip, self.clip)

    def bound_drift(self, log_ratio: float, *, reach: float) -> float:
        """Return a bound on the change of a residual when its margin is multiplied by a factor.

        The factor lies between exp(-log_ratio) and exp(log_ratio), and margins are at most `reach`
        in magnitude. Clipping does not increase the change.
        """
        if self.name == "logistic":
            return min(_LOGISTIC_DRIFT * log_ratio, 2 * self.clip)
        return min(reach * math.expm1(log_ratio), 2 * self.clip)


class SparseGradient:
    """Gradient g of a loss on private sparse rows, and private draws of a vertex by g.

    The model is scale * sums, an array of coefficients. `slope` is the factor of the exponential
    mechanism on the entries of g: feature j is drawn with weight exp(slope g_j) + exp(-slope g_j),
    and then the sign that lowers the loss with probability 1 / (1 + exp(-2 slope |g_j|)).
    """

    def __init__(
        self,
        X: Any,  # Any: scipy's sparse types are not annotated
        targets: Floats,
        loss: ClippedLoss,
        *,
        slope: float,
        radius: float,
    ) -> None:
        self._rows, self._columns = X.tocsr(), X.tocsc()
        self._features = self._rows.indices.astype(np.intp)  # numpy gathers by this type fastest
        self._targets = targets
        self._loss = loss
        self._slope = slope
        self._radius = radius
        n_rows, n_features = X.shape
        self.sums = np.zeros(n_features)
        self._margins = np.zeros(n_rows)
        self._weights = np.asarray(abs(self._columns).sum(axis=0)).reshape(-1)
        self._stamps = np.zeros(n_features, np.intp)
        self._span = _WIDEST
        self._refreshes = 0
        self._sampler = BlockSampler(np.zeros(n_features))
        self.refresh(1.0)

    def refresh(self, scale: float) -> None:
        """Recompute residuals, gradient and bounds for the model scale * sums.

        The bounds also cover smaller scales, down to a limit. The limit is chosen such that few
        proposals of `draw` are rejected.
        """
        self._refreshes += 1
        if self._refreshes % _EXACT_MARGINS == 0:
            self._margins = self._rows @ self.sums
        self._reference = scale
        self._residuals = self._residuals_at(scale)
        self._gradient = self._columns.T @ self._residuals
        exact = np.logaddexp.reduce(_log_two_cosh(self._slope * np.abs(self._gradient)))
        while True:
            drift = self._loss.bound_drift(self._span, reach=self._radius)
            self._drift = drift + _ROUNDING * self._loss.clip
            bounds = self._log_bounds(slice(None))
            proposals = np.logaddexp.reduce(bounds) - exact
            if proposals <= _MANY_PROPOSALS or self._span < _NARROWEST:
                break
            self._span /= 2
        self._lowest = scale * math.exp(-self._span)
        if proposals < _FEW_PROPOSALS:
            self._span = min(2 * self._span, _WIDEST)
        self._sampler.reset(bounds)

    def draw(self, scale: float, rng: Rng) -> tuple[int, float]:
        """Return the feature and the sign of a privately drawn vertex; these may be released.

        The exponential mechanism draws them by the gradient at the model scale * sums.
        """
        for trial in count(1):
            if trial % _MOST_TRIALS == 0:
                self.refresh(scale)  # tighter bounds; every trial by itself has the exact law
            first, second, third, fourth = rng.random(4).tolist()
            feature = self._sampler.draw(first, second)
            rows, values = self._column(feature)
            gradient = float(values @ self._residuals_at(scale, rows))
            weight = float(_log_two_cosh(self._slope * abs(gradient)))
            if third < math.exp(min(weight - float(self._sampler.log_weights[feature]), 0.0)):
                lowers = fourth < 1 / (1 + math.exp(-2 * self._slope * abs(gradient)))
                return feature, -1.0 if lowers == (gradient > 0) else 1.0
        raise AssertionError  # count does not end

    def add(self, feature: int, amount: float, scale: float) -> None:
        """Add `amount` to one entry of `sums`; the next draw is for the model scale * sums."""
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

    def _residuals_at(
        self, scale: float, rows: NDArray[np.integer] | slice = slice(None)
    ) -> Floats:
        return self._loss.residuals(scale * self._margins[rows], self._targets[rows])

    def _column(self, feature: int) -> tuple[NDArray[np.integer], Floats]:
        start, stop = self._columns.indptr[feature : feature + 2].tolist()
        return self._columns.indices[start:stop], self._columns.data[start:stop]

    def _log_bounds(self, features: NDArray[np.integer] | slice) -> Floats:
        """Return the log of the largest weight each feature can have at any scale of the window.

        The window is the range of model scales for which the stored gradient is used.
        """
        largest = np.abs(self._gradient[features]) + self._drift * self._weights[features]
        return _log_two_cosh(self._slope * largest)

    def _spread(self, rows: NDArray[np.integer], changes: Floats, scale: float) -> None:
        """Update gradient and sampler after the residuals of `rows` changed by `changes`."""
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
        self._stamps[features] = places  # the last place of each feature remains
        distinct = features[self._stamps[features] == places]
        self._sampler.update(distinct, self._log_bounds(distinct))


class BlockSampler:
    """Sampler of items 0 to D - 1 with private weights exp(log_weights), of which few change often.

    It has two levels, about sqrt(D) blocks of about sqrt(D) items. A draw picks a block by the sums
    of weights, then an item within it, in O(sqrt(D)) time ("big step, little step", Raff, Khanna
    & Lu 2023, arXiv:2310.19978). An update of k weights takes O(k + sqrt(D)) time.

    Weights are stored relative to a reference near the largest, so logarithms of any size are safe;
    weights below 1e-300 of the largest count as zero. Sums are updated by differences, whose
    rounding errors add up. So a block is summed again once its sum has fallen to a hundredth of its
    largest value since the last summation, and all blocks are summed every `_FRESH` updates.
    Relative errors of the probabilities therefore stay below 1e-10.

    >>> sampler = BlockSampler(np.log([1.0, 3.0]))
    >>> sampler.draw(0.5, 0.24), sampler.draw(0.5, 0.26)
    (0, 1)
    """

    def __init__(self, log_weights: Floats) -> None:
        self._side = math.isqrt(len(log_weights) - 1) + 1
        self._weights = np.zeros((self._side, self._side))
        self._flat = self._weights.reshape(-1)
        self.reset(log_weights)

    def reset(self, log_weights: Floats) -> None:
        """Set the weights of all D items, in O(D) time."""
        self.log_weights = log_weights
        self._reference = float(log_weights.max())
        np.exp(log_weights - self._reference, out=self._flat[: len(log_weights)])
        self._sum_again()

    def update(self, items: NDArray[np.integer], log_weights: Floats) -> None:
        """Set the weights of `items`, which must be distinct."""
        self.log_weights[items] = log_weights
        if log_weights.max(initial=-math.inf) > self._reference + _HIGHEST:
            self.reset(self.log_weights)
            return
        weights = np.exp(log_weights - self._reference)
        changes = weights - self._flat[items]
        self._flat[items] = weights
        self._sums += np.bincount(items // self._side, changes, self._side)
        self._updates += 1
        np.maximum(self._peaks, self._sums, out=self._peaks)
        shrunk = np.flatnonzero(self._sums < _SHRUNK * self._peaks)
        if len(shrunk):
            self._sums[shrunk] = self._peaks[shrunk] = self._weights[shrunk].sum(axis=1)
        if self._updates >= _FRESH:
            self._sum_again()
        if self._sums.sum() < math.exp(_LOWEST):
            self.reset(self.log_weights)

    def draw(self, first: float, second: float) -> int:
        """Return a random item, given two independent uniform random numbers in [0, 1)."""
        block = _pick(self._sums, first)
        return block * self._side + _pick(self._weights[block], second)

    def _sum_again(self) -> None:
        self._sums = self._weights.sum(axis=1)
        self._peaks = self._sums.copy()
        self._updates = 0


def _pick(weights: Floats, uniform: float) -> int:
    """Return the index that a `uniform` number in [0, 1) selects, in proportion to `weights`.

    An index of weight zero is never selected, even by rounding.
    """
    edges = weights.cumsum()
    last = edges.searchsorted(edges[-1])
    return int(min(edges.searchsorted(uniform * edges[-1], side="right"), last))


def _log_two_cosh(x: Any) -> Any:  # Any: a float or an array, as given
    """Return log(exp(x) + exp(-x)) for x >= 0."""
    return x + np.log1p(np.exp(-2 * x))
