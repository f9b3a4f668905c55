"""Private least squares by noisy Newton steps in whitened coordinates: the method behind `auto`.

A fit makes five kinds of releases, all with Gaussian noise:

1. the mean of the target, from which the model starts;
2. the Gram matrix in the scaled units of `Bounds`. Its inverse square root *whitens* the rows: it
   makes all directions about equally long, so that noise of one size fits all of them. Iterated
   whitening is due to CoinPress (Biswas et al. 2020, arXiv:2006.06618);
3. a histogram of the norms of whitened rows, from which the norm is chosen to which longer rows are
   clipped;
4. the Gram matrix of the whitened rows, which has a small relative error in every direction;
5. some gradients. After each of them the model is solved for again, from all of the last gradients
   and from the second Gram matrix (iterative refinement, as in Lev & Shenfeld 2026,
   arXiv:2601.07545, and in BoostedAdaSSP, Tang et al. 2023, arXiv:2303.03451). So the noise of the
   Gram matrix multiplies only the distance to the last models, not the coefficients themselves.

Long rows and large residuals are clipped. How much is decided by public facts (number of records,
budget) and by earlier releases: the less noise there is, the less is clipped. The ridge penalty of
the solve minimizes Mallows' estimate of the error, which is a function of released values alone.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Unpack

import numpy as np
from scipy.linalg import eigh
from scipy.special import ndtr

from tacit._arrays import Floats
from tacit.events import Event, Repeated, Sequence
from tacit.mechanisms import GaussianMechanism, Rng
from tacit.regression.estimator import BudgetTerms, gaussian_shares
from tacit.regression.penalty import Penalty
from tacit.regression.rows import PrivateRows, from_triangle, triangle, triangle_noise

# Chosen on the tables of benchmarks/regression_linear.py.
_STEPS = 8
_FIRST_GRAM, _SECOND_GRAM = 0.1, 0.2  # shares of the budget
_LEAST_MEAN, _MOST_MEAN, _MEAN_NOISE = 0.03, 0.3, 0.1
"""Share of the budget for the mean: within limits, what makes the noise of the mean 0.1."""
_NOISE_EXCESS = 3e-4
"""Share of the residual variance that noise may add before rows and residuals are clipped more."""
_ROW_CLIP, TIGHTEST_ROWS = 0.7, 0.8
_RESIDUAL_CLIP, _TIGHTEST_RESIDUALS, _WIDEST_RESIDUALS = 1.7, 1.36, 5.0
_NORMS_SHARE = 0.015  # share of the budget for the histogram of the norms of rows
_LONG_ROWS = 2e-4  # share of rows that may be clipped, if noise lets it be known
_NORM_LEVELS = 2.0 ** np.arange(-1, 6.5, 0.5)  # relative to the root mean square
_SPREAD_SHARE = 0.45  # norm of the coordinate for the squared residuals, relative to the others
_LEAST_INSIDE = 0.8  # least share of residuals assumed to be within the clip
_DROPPED = 0.2  # share of the gradients that is left out of the next solve: the oldest ones
_RESOLVED = 1.25
_DAMPING = 0.5  # in units of the noise of the Gram matrix
ROUNDING = 1 + 1e-6
"""Factor on bounds in whitened units: covers rounding, which whitening may enlarge."""
_PENALTIES = np.append(0.0, 10.0 ** np.arange(-5, 2.1, 0.5))


@dataclass(frozen=True)
class NewtonPlan:
    """Plan of one fit: noise of each release, the last of which is repeated `steps` times.

    Each mechanism has sensitivity 1; what it releases is divided by its bound before and multiplied
    by it afterwards. The bounds may depend on earlier releases, which does not change the price. A
    record z has norm at most R after weighting, and |y| <= 1. One record changes

    * the sum of targets by at most 1, and by at most 2 if it is replaced;
    * a Gram matrix, the sum of z z', by at most R^2 in Frobenius norm; if z is replaced by w, by at
      most sqrt(|z|^4 + |w|^4 - 2 (z'w)^2) <= sqrt(2) R^2;
    * a histogram of norms by 1 in one entry, and by 1 in two entries if it is replaced: sqrt(2);
    * a gradient, the sum of r z with |r| <= c, by at most R c, and the sum of b (r^2 / c - c / 2),
      released with it, by at most b c / 2. With b = R s together at most R c sqrt(1 + s^2 / 4), and
      twice that if the record is replaced.
    """

    mean: GaussianMechanism
    first_gram: GaussianMechanism
    norms: GaussianMechanism
    second_gram: GaussianMechanism
    gradient: GaussianMechanism
    steps: int
    row_norm: float
    whitened_clip: float
    """Largest norm of whitened rows, relative to the root of their mean square."""
    residual_clip: float
    """Limit of the residuals, relative to their standard deviation."""
    widest_clip: float
    """Upper end of that limit. Residuals are in [-2, 2], but noise may overstate their spread."""
    method: ClassVar[str] = "gradient"

    @property
    def event(self) -> Event:
        """Event of one fit, for the accountant."""
        single = (self.mean, self.first_gram, self.norms, self.second_gram)
        steps = Repeated(self.gradient.event, self.steps)
        return Sequence((*(mechanism.event for mechanism in single), steps))


class NormalEquations(NamedTuple):
    """Released equations gram (theta - model) + gradient = 0 of a fit, with their noise.

    In scaled units and per record. They also hold what the data say of directions in which a fit
    alone is mostly noise, so that the fits of several data sets can be combined.
    """

    gram: Floats
    model: Floats
    """Mean of the models at which gradients were released."""
    gradient: Floats
    """Mean of these gradients. Its noise has the covariance `gradient_variance` * `metric`."""
    metric: Floats
    gradient_variance: float
    gram_std: float
    """Standard deviation of the diagonal of the noise in the Gram matrix, in whitened units."""
    sampling: float
    """By sampling, the gradient has the covariance `sampling` * `gram`."""
    optimism: float
    """Mallows' estimate of how much lower the loss of the fit seems than it is."""
    fitted: float
    """Influence of the data on the fit, relative to that without a penalty: from 0 to 1."""


class NewtonFit(NamedTuple):
    """Released result of one fit, in scaled units, with the intercept first."""

    theta: Floats
    """Coefficients, shrunk by a ridge penalty where noise asks for it."""
    unshrunk: Floats
    """Coefficients without a penalty, for intervals."""
    covariance: Floats
    """Covariance of `unshrunk`: noise and sampling. Infinite if the Gram matrix is mostly noise."""
    residual_std: float
    equations: NormalEquations


def plan_newton(
    n_features: int, *, row_norm: float, n_records: int, **budget: Unpack[BudgetTerms]
) -> NewtonPlan:
    """Return a plan that costs the budget.

    With m coefficients, k times the standard deviation of a residual as its limit, and k times the
    root mean square of a row, the noise of an ideal fit adds the share (m k^2 / (n_records mu))^2
    to the residual variance. k makes this as large as allowed.
    """
    size = n_features + 1
    (whole,) = gaussian_shares((1.0,), (1.0,), **budget)
    mean = float(np.clip((whole / n_records / _MEAN_NOISE) ** 2, _LEAST_MEAN, _MOST_MEAN))
    shares = (mean, _FIRST_GRAM, _NORMS_SHARE, _SECOND_GRAM)
    factors = (2.0, math.sqrt(2.0), math.sqrt(2.0), math.sqrt(2.0), 2.0)
    noise = gaussian_shares((*shares, 1 - math.fsum(shares)), factors, **budget)
    multipliers = (*noise[:4], noise[4] * math.sqrt(_STEPS))
    mechanisms = [
        GaussianMechanism(multiplier, l2_sensitivity=1.0, replace_factor=factor)
        for multiplier, factor in zip(multipliers, factors, strict=True)
    ]
    square = math.sqrt(_NOISE_EXCESS) * n_records / (whole * size)
    residual_clip = float(
        np.clip(_RESIDUAL_CLIP * math.sqrt(square), _TIGHTEST_RESIDUALS, _WIDEST_RESIDUALS)
    )
    return NewtonPlan(
        *mechanisms,
        steps=_STEPS,
        row_norm=row_norm,
        whitened_clip=max(_ROW_CLIP * _RESIDUAL_CLIP * square / residual_clip, TIGHTEST_ROWS),
        residual_clip=residual_clip,
        widest_clip=1.0 if residual_clip == _TIGHTEST_RESIDUALS else 2.0,
    )


def fit_newton(
    rows: PrivateRows,
    y: Floats,
    plan: NewtonPlan,
    *,
    n_records: int,
    rng: Rng,
    weights: Floats | None = None,
    fit_intercept: bool = True,
    penalty: Penalty | None = None,
) -> NewtonFit:
    """Release what `plan` says and return the model; `rows` must be shrunk to `plan.row_norm`.

    `weights` are in [0, 1], one per row. A row of weight v counts as v rows, so that no sum changes
    by more than without weights. The sum of the weights is private and takes the place of
    `n_records` after its release. `rows.factors` must have been multiplied by their square roots.
    """
    mean, total = _release_mean(y, weights, plan, n_records, rng)
    whitening, typical = release_whitening(
        rows, plan.first_gram, total, rng, fit_intercept=fit_intercept
    )
    norms = rows.norms(whitening)
    level, mean_factor = release_limit(
        norms / typical, plan.norms, plan.whitened_clip, n_records, rng
    )
    limit = level * typical
    factors = limit / np.maximum(norms, limit)
    roots = factors if weights is None else factors * np.sqrt(weights)
    gram = rows.whitened_gram(whitening, roots)
    bound = ROUNDING * limit**2  # of |u u'| for a whitened row u, clipped to `limit`
    noisy = bound * plan.second_gram.release(triangle(gram) / bound, rng) / total
    noise_std = bound * plan.second_gram.noise_std / total
    hessian = from_triangle(noisy, whitening.shape[1])
    constant = np.append(mean if fit_intercept else 0.0, np.zeros(rows.n_features))
    start = whitened(constant, whitening)
    solver, spread = Solver(hessian, noise_std, whitening, start, penalty), ResidualSpread()
    clip = clipped_square = 1.0
    for _ in range(plan.steps):
        private = _gradient(rows, y, factors, weights, whitening @ solver.theta, clip)
        # One record adds r u with |r| <= clip and |u| <= limit, and scale (r^2 / clip - clip / 2).
        scale = limit * _SPREAD_SHARE
        value = np.append(
            whitening.T @ private.gradient,
            scale * (private.squares / clip - private.total * clip / 2),
        )
        bound = ROUNDING * clip * limit * math.sqrt(1 + _SPREAD_SHARE**2 / 4)
        released = bound * plan.gradient.release(value / bound, rng) / total
        noise_std = bound * plan.gradient.noise_std / total
        squares = spread.add(
            clip * (released[-1] / scale + clip / 2), clip * noise_std / scale, clip
        )
        # A clipped row has its factor once in the gradient and twice in the Gram matrix, so that
        # the Gram matrix is too small, at least by the mean factor.
        share = spread.inside(clip) / mean_factor
        clipped_square = squares / share**2
        solver.add(released[:-1] / share, noise_std / share)
        clip = min(plan.residual_clip * spread.std, plan.widest_clip)
    # Residuals r that do not depend on the features have gradients of covariance E[r^2] gram / n;
    # with weights in [0, 1] it is at most that with their sum for n.
    covariance = solver.covariance(clipped_square / total)
    return NewtonFit(
        whitening @ solver.theta,
        whitening @ solver.unshrunk(),
        whitening @ covariance @ whitening.T,
        spread.pooled(),
        solver.equations(clipped_square / total),
    )


def _release_mean(
    y: Floats, weights: Floats | None, plan: NewtonPlan, n_records: int, rng: Rng
) -> tuple[float, float]:
    """Return the mean of the targets, and the sum of weights: `n_records` if there are none."""
    if weights is None:
        total = float(n_records)
        noisy = plan.mean.release(np.array([y.sum()]), rng)[0]  # one target is in [-1, 1]
    else:
        # One record adds (v y, v), of norm at most sqrt(2). Replaced, it changes this by at most 2
        # in norm, which is less than twice that.
        bound = math.sqrt(2)
        exact = np.array([weights @ y, weights.sum()])
        noisy, total = (bound * plan.mean.release(exact / bound, rng)).tolist()
        total = float(np.clip(total, max(1.0, 1e-3 * n_records), n_records))
    return float(np.clip(noisy / total, -1, 1)), total


def release_whitening(
    rows: PrivateRows,
    mechanism: GaussianMechanism,
    total: float,
    rng: Rng,
    *,
    fit_intercept: bool = True,
) -> tuple[Floats, float]:
    """Return a matrix that whitens the rows, and the root mean square of their norms after that.

    The matrix is the inverse square root of the released Gram matrix, to whose eigenvalues the size
    of the noise is added. `total` is the public number of records. Without an intercept the first
    row of the matrix is 0, and it has one column less.
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
    mean_square = max(float((values / raised).sum()), 1.0)
    whitening = (vectors / np.sqrt(raised)) @ vectors.T
    return np.pad(whitening, ((first, 0), (0, 0))), math.sqrt(mean_square)


def whitened(theta: Floats, whitening: Floats) -> Floats:
    """Return the model in whitened units: the inverse of `whitening @ model`."""
    return np.asarray(np.linalg.pinv(whitening) @ theta, np.float64)


def release_limit(
    norms: Floats, mechanism: GaussianMechanism, widest: float, n_records: int, rng: Rng
) -> tuple[float, float]:
    """Return the norm to which rows are clipped, and the mean factor of clipping, from `norms`.

    The norm is the smallest level that few rows exceed, as far as noise shows it, or `widest` if
    that is smaller.
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
    return limit, float(np.clip(mean_factor, 0.5, 1.0))


class _PrivateGradient(NamedTuple):
    gradient: Floats
    squares: float
    total: float


def _gradient(
    rows: PrivateRows,
    y: Floats,
    factors: Floats,
    weights: Floats | None,
    theta: Floats,
    clip: float,
) -> _PrivateGradient:
    """Return the private gradient of Huber's loss, the sum of squared residuals, and of weights.

    Residuals are clipped, and every record is multiplied by its weight.
    """
    squares = 0.0

    def residuals(span: slice, margins: Floats) -> Floats:
        nonlocal squares
        clipped = np.clip(margins - y[span], -clip, clip)
        weighted = clipped if weights is None else clipped * weights[span]
        squares += float(clipped @ weighted)
        return weighted * factors[span]

    total = float(rows.n_rows) if weights is None else float(weights.sum())
    return _PrivateGradient(rows.weighted_sum(theta, residuals), squares, total)


class ResidualSpread:
    """Standard deviation of the residuals, from released sums of their clipped squares."""

    def __init__(self) -> None:
        self.std = 1.0
        """Current estimate, raised by half of the noise: too much clipping would do more harm."""
        self._squares: list[float] = []
        self._precisions: list[float] = []

    def add(self, squares: float, noise_std: float, clip: float) -> float:
        """Take a released mean square of residuals that were clipped at `clip`, with its noise.

        Return the mean square of clipped residuals that corresponds to `std`.
        """
        self._squares.append(_std_before_clipping(min(max(squares, 0.0), clip**2), clip) ** 2)
        self._precisions.append(1 / noise_std**2)
        raised = min(max(squares, 0.0) + noise_std / 2, clip**2)
        self.std = _std_before_clipping(raised, clip)
        return raised

    def inside(self, clip: float) -> float:
        """Return the share of residuals assumed to be within `clip`.

        Clipping lowers a gradient as if the Gram matrix were multiplied by this share.
        """
        return max(2 * float(ndtr(clip / self.std)) - 1, _LEAST_INSIDE)

    def pooled(self) -> float:
        """Return the std from all but the first release, weighted by their precision."""
        return math.sqrt(np.average(self._squares[1:], weights=self._precisions[1:]))


class Solver:
    """Solution of gradient(t) = 0 from released values: noisy gradients, and a noisy Hessian.

    For least squares the Hessian is the Gram matrix. Everything is in whitened units. Each gradient
    g at a model t satisfies hessian t - cross = g up to noise, so the mean of several gradients and
    the mean of their models do so with less noise. The model is shrunk towards `start` by a ridge
    penalty on the coefficients in scaled units, without the intercept; or it has the `penalty` that
    is given.
    """

    def __init__(
        self,
        hessian: Floats,
        noise_std: float,
        whitening: Floats,
        start: Floats,
        penalty: Penalty | None = None,
        resolved: float = _RESOLVED,
    ) -> None:
        size = len(hessian)
        values, vectors = np.linalg.eigh(hessian)
        self._values, self._vectors = np.maximum(values, 0.0), vectors
        self._hessian = (vectors * self._values) @ vectors.T
        self._hessian_std = noise_std
        noise = triangle_noise(noise_std, size)
        self._resolved = self._values > resolved * noise
        self._damping = _DAMPING * noise
        # basis' (hessian + damping) basis = 1, and basis' penalty basis is diagonal.
        self._penalties, self._basis = eigh(
            whitening[1:].T @ whitening[1:], self._hessian + self._damping * np.eye(size)
        )
        self._start, self._penalty, self._whitening = start, penalty, whitening
        self._models: list[Floats] = []
        self._gradients: list[Floats] = []
        self._variances: list[float] = []
        self.theta: Floats = start
        """Current model; it may be set to a better one before the first gradient."""
        self._optimism, self._fitted = 0.0, 1.0

    def add(self, gradient: Floats, noise_std: float) -> None:
        """Take one released gradient at `theta`, and solve for the next `theta`."""
        self._models.append(self.theta)
        self._gradients.append(gradient)
        self._variances.append(noise_std**2)
        self.theta = self._shrunk() if self._penalty is None else self._penalized(self._penalty)

    def _means(self) -> tuple[Floats, Floats, float]:
        """Return mean model, mean gradient and its noise variance; weights follow the precision."""
        count = len(self._models)
        first = 0 if count == 1 else max(1, int(_DROPPED * (count - 1)))
        variances = np.array(self._variances[first:])
        weights = 1 / variances / (1 / variances).sum()
        model = weights @ np.array(self._models[first:])
        return model, weights @ np.array(self._gradients[first:]), float(weights**2 @ variances)

    def _shrunk(self) -> Floats:
        """Return the ridge solution whose penalty minimizes Mallows' estimate of the error.

        Mallows 1973: a linear estimate A c of the solution of hessian t = c, with noise of variance
        v in c, has the error t' hessian t - 2 c' t + 2 v trace(A), up to a constant. v contains the
        noise of the Hessian, which acts on the distance to the mean model. The solve is damped
        towards the mean model by half of the size of this noise.
        """
        model, gradient, variance = self._means()
        base = model - self._start
        cross = self._hessian @ base - gradient
        pull = self._basis.T @ (cross + self._damping * base)
        squares = np.sum(self._basis**2, axis=0)
        best, least = self.theta, math.inf
        for penalty in _PENALTIES:
            weights = 1 / (1 + penalty * np.maximum(self._penalties, 0.0))
            found = self._basis @ (weights * pull)
            total = variance + self._hessian_std**2 * float(np.sum((found - base) ** 2)) / 2
            error = (
                found @ self._hessian @ found - 2 * cross @ found + 2 * total * (squares @ weights)
            )
            if error < least:
                best, least = self._start + found, error
                self._optimism = total * float(squares @ weights)
                self._fitted = float(squares @ weights / squares.sum())
        return best

    def _penalized(self, penalty: Penalty) -> Floats:
        """Return the solution with the given penalty, damped as in `_shrunk`."""
        model, gradient, _ = self._means()
        first = int(not self._whitening[0].any())  # 1 if there is no intercept
        whitening = self._whitening[first:]
        back = np.linalg.inv(whitening)
        damped = self._hessian + self._damping * np.eye(len(model))
        hessian, cross = back.T @ damped @ back, back.T @ (damped @ model - gradient)
        found = penalty.minimize(hessian, cross, 1 - first, whitening @ self.theta)
        return back @ found

    def equations(self, sampling: float) -> NormalEquations:
        """Return what was released as equations in scaled units; `sampling`: see `covariance`."""
        model, gradient, variance = self._means()
        back = np.linalg.pinv(self._whitening)
        return NormalEquations(
            gram=back.T @ self._hessian @ back,
            model=self._whitening @ model,
            gradient=back.T @ gradient,
            metric=back.T @ back,
            gradient_variance=variance,
            gram_std=self._hessian_std,
            sampling=sampling,
            optimism=self._optimism,
            fitted=self._fitted,
        )

    def unshrunk(self) -> Floats:
        """Return the solution without penalty and damping, in the directions above the noise."""
        model, gradient, _ = self._means()
        return model - self._inverse() @ gradient

    def covariance(self, sampling: float, *, bend: float = 0.0) -> Floats:
        """Return the covariance of `unshrunk` in whitened units.

        The error is inverse(hessian) times the sum of gradient noise, of the noise of the Hessian
        times the distance to the mean model, and of the sampling error of the gradient. The latter
        has the covariance `sampling` * hessian. The directions in which the Hessian is not above
        its noise have an infinite variance. `bend` is the relative change of the Hessian per unit
        of that distance, which makes the distance uncertain; it is 0 for least squares.
        """
        _, gradient, variance = self._means()
        inverse = self._inverse()
        step = inverse @ gradient
        length = float(np.sum(step**2))
        noise = variance + self._hessian_std**2 * length / 2
        middle = noise * np.eye(len(gradient)) + sampling * self._hessian
        covariance = inverse @ middle @ inverse + bend**2 * length * np.outer(step, step)
        if not self._resolved.all():
            lost = self._vectors[:, ~self._resolved]
            covariance = covariance + 1e300 * (lost @ lost.T)
        return covariance

    def _inverse(self) -> Floats:
        vectors = self._vectors[:, self._resolved]
        return (vectors / self._values[self._resolved]) @ vectors.T


def _std_before_clipping(mean_square: float, clip: float) -> float:
    """Return the std of normal residuals whose squares, clipped at `clip`^2, have this mean.

    It lies between 1e-3 `clip` and 10 `clip`.

    >>> round(_std_before_clipping(0.9**2, 100.0), 6)
    0.9
    """

    def clipped_mean(std: float) -> float:
        ratio = clip / std
        density = math.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
        inside = 2 * float(ndtr(ratio)) - 1
        return std**2 * (inside - 2 * ratio * density) + clip**2 * (1 - inside)

    low, high = 1e-3 * clip, 10 * clip
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if clipped_mean(middle) > mean_square else (middle, high)
    return high
