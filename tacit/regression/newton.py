"""Private least squares by noisy Newton steps in whitened coordinates: the method behind `auto`.

A fit makes these releases, all with Gaussian noise:

1. the mean of the target, from which the model starts;
2. a Gram matrix and a histogram of norms, which whiten the rows (`whitening`);
3. the Gram matrix of the whitened rows, which has a small relative error in every direction;
4. twice, before a gradient, a histogram of the sizes of residuals (`residual_tails`);
5. some gradients. After each of them the model is solved for again, from all of the last gradients
   and from the second Gram matrix (iterative refinement, as in Lev & Shenfeld 2026,
   arXiv:2601.07545, and in BoostedAdaSSP, Tang et al. 2023, arXiv:2303.03451). So the noise of the
   Gram matrix multiplies only the distance to the last models, not the coefficients themselves;
6. what intervals need to know of the residuals: the derivative of the gradient, the sum of
   r^2 u u' over residuals r and rows u (a sandwich estimate, White 1980, which holds for errors of
   any variance), and on which side residuals are clipped.

Long rows and large residuals are clipped. How much is decided by public facts (number of records,
budget) and by earlier releases: the less noise there is, the less is clipped. The ridge penalty of
the solve minimizes Mallows' estimate of the error, which is a function of released values alone. It
shrinks towards the constant model that the released mean gives. The mean also counts as one more
equation of every solve, so that noise in the gradients cannot move predictions far from it.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Unpack

import numpy as np
from scipy.special import ndtr

from tacit._arrays import Floats
from tacit.events import Event, Relation, Repeated, Sequence
from tacit.mechanisms import GaussianMechanism, Rng
from tacit.regression.estimator import BudgetTerms, gaussian_mechanisms, gaussian_shares
from tacit.regression.normal_equations import Anchor, NormalEquations, Solver, Uncertainty
from tacit.regression.penalty import Penalty
from tacit.regression.residual_tails import LOOKS, ResidualTails, hides_tails
from tacit.regression.rows import (
    PrivateRows,
    combine_squares,
    from_triangle,
    shrink,
    triangle,
    triangle_noise,
)
from tacit.regression.whitening import ROUNDING, TIGHTEST_ROWS, WhitenedRows, whiten

# Chosen on the tables of benchmarks/regression_linear.py.
_STEPS = 8
_FIRST_GRAM, _SECOND_GRAM, _ERRORS = 0.1, 0.15, 0.08  # shares of the budget
_LEAST_MEAN, _MOST_MEAN, _MEAN_NOISE = 0.03, 0.5, 0.1
"""Share of the budget for the mean: within limits, what makes the noise of the mean 0.1."""
_NOISE_EXCESS = 3e-4
"""Share of the residual variance that noise may add before rows and residuals are clipped more."""
_ROW_CLIP = 0.7
_RESIDUAL_CLIP, _TIGHTEST_RESIDUALS, _WIDEST_RESIDUALS = 1.7, 1.36, 5.0
_NORMS_SHARE = 0.015  # share of the budget for the histogram of the norms of rows
_TAILS_SHARE = 0.03  # share of the budget for histograms of residuals
_SPREAD_SHARE = 0.45  # norm of the coordinate for the squared residuals, relative to the others
_LEAST_INSIDE = 0.8  # least share of residuals assumed to be within the clip
_TAILS = 0.2  # share of `NewtonPlan.outside` for the tails by features; the rest is for their mean
_TAIL_RISE, _TAIL_FALL = 0.35, 0.75
"""Exponential errors, clipped at k standard deviations of normal ones with the same clipped
squares, have a larger standard deviation, by about the factor 1 + 0.35 exp(-0.75 (k - 1.36))."""
_TAIL_DOUBT = 0.35  # relative error of what is assumed of the tails, see `_release_errors`
_HIDDEN = 0.6  # largest relative error of second moments with which intervals are tried
_HESSIAN_DOUBT, _SQUARES_DOUBT = 0.1, 0.6
"""How far matrices are assumed to be off, relative to them, if residuals depend on features."""
_NOISY = 0.3  # share of noise from which shrinking is more cautious, see `NewtonPlan.caution`


@dataclass(frozen=True)
class NewtonPlan:
    """Plan of one fit: noise of each release. Gradients are released `steps` times.

    Each mechanism has sensitivity 1; what it releases is divided by its bound before and multiplied
    by it afterwards. The bounds may depend on earlier releases, which does not change the price. A
    record z has norm at most R after weighting, and |y| <= 1. One record changes

    * the sum of targets by at most 1, and by at most 2 if it is replaced. Together with the sum of
      weights or the number of rows, if that is private, by at most sqrt(2) and by at most 2;
    * a Gram matrix, the sum of z z', by at most R^2 in Frobenius norm; if z is replaced by w, by at
      most sqrt(|z|^4 + |w|^4 - 2 (z'w)^2) <= sqrt(2) R^2;
    * a histogram of norms or of residuals by at most 1 in one entry, and if it is replaced by at
      most 1 in two entries: sqrt(2);
    * a gradient, the sum of r z with |r| <= c, by at most R c, and the sum of b (r^2 / c - c / 2),
      released with it, by at most b c / 2. With b = R s together at most R c sqrt(1 + s^2 / 4), and
      twice that if the record is replaced;
    * the last release by sqrt(2) R^2. A record with |r| < c adds a u u' with 0 <= a <= 1 to one
      matrix, and (r / c)^2 u u' to the other one. A clipped record adds nothing to the first
      matrix, u u' to the second one, and a vector of squared norm at most `outside` R^4, where
      `outside` is 1, or 1 / 2 if records are replaced. Replaced, matrices change by at most sqrt(2)
      times as much, because their inner product is not negative; two clipped records change the
      vector by at most sqrt(2) R^2 and the matrix by at most sqrt(2) R^2: together 2 R^2, which is
      sqrt(2) times the bound.
    """

    mean: GaussianMechanism
    first_gram: GaussianMechanism
    norms: GaussianMechanism
    second_gram: GaussianMechanism
    gradient: GaussianMechanism
    tails: GaussianMechanism | None
    """Noise of the histograms of residuals; None if noise would hide a tenth of the records."""
    errors: GaussianMechanism | None
    """Noise of the last release, which intervals need; None if noise hides all coefficients."""
    outside: float
    """Largest squared norm of what a clipped record adds to the last release besides matrices."""
    steps: int
    row_norm: float
    whitened_clip: float
    """Largest norm of whitened rows, relative to the root of their mean square."""
    residual_clip: float
    """Limit of the residuals, relative to their standard deviation."""
    widest_clip: float
    """Upper end of that limit. Residuals are in [-2, 2], but noise may overstate their spread."""
    caution: float
    """What the variance of a model counts for, relative to its error, in the choice of a ridge. It
    is 2 by Mallows' rule, and up to 4 if noise hides most of the model: the ridge that seems best
    is then often one that fits the noise."""
    method: ClassVar[str] = "gradient"

    @property
    def event(self) -> Event:
        """Event of one fit, for the accountant."""
        single = (self.mean, self.first_gram, self.norms, self.second_gram)
        tails = () if self.tails is None else (Repeated(self.tails.event, len(LOOKS)),)
        steps = Repeated(self.gradient.event, self.steps)
        errors = () if self.errors is None else (self.errors.event,)
        return Sequence((*(mechanism.event for mechanism in single), *tails, steps, *errors))


class NewtonFit(NamedTuple):
    """Released result of one fit, in scaled units, with the intercept first."""

    theta: Floats
    """Coefficients, shrunk by a ridge penalty where noise asks for it."""
    unshrunk: Floats
    """Coefficients without a penalty, for intervals."""
    uncertainty: Uncertainty | None
    """Of `unshrunk`; None if noise hides all coefficients."""
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
    has_errors = not hides_intervals(n_features, whole, n_records)
    has_tails = not hides_tails(whole / math.sqrt(_TAILS_SHARE), n_records)
    optional = (_TAILS_SHARE * has_tails, _ERRORS * has_errors)
    others = math.fsum((mean, _FIRST_GRAM, _NORMS_SHARE, _SECOND_GRAM, *optional))
    root = math.sqrt(2.0)
    mechanisms = gaussian_mechanisms(
        (mean, 2.0, 1),
        (_FIRST_GRAM, root, 1),
        (_NORMS_SHARE, root, 1),
        (_SECOND_GRAM, root, 1),
        (1 - others, 2.0, _STEPS),
        *[(_TAILS_SHARE, root, len(LOOKS))] * has_tails,
        *[(_ERRORS, root, 1)] * has_errors,
        **budget,
    )
    square = math.sqrt(_NOISE_EXCESS) * n_records / (whole * size)
    residual_clip = float(
        np.clip(_RESIDUAL_CLIP * math.sqrt(square), _TIGHTEST_RESIDUALS, _WIDEST_RESIDUALS)
    )
    return NewtonPlan(
        *mechanisms[:5],
        tails=mechanisms[5] if has_tails else None,
        errors=mechanisms[-1] if has_errors else None,
        outside=0.5 if budget["relation"] is Relation.REPLACE_ONE else 1.0,
        steps=_STEPS,
        row_norm=row_norm,
        whitened_clip=max(_ROW_CLIP * _RESIDUAL_CLIP * square / residual_clip, TIGHTEST_ROWS),
        residual_clip=residual_clip,
        widest_clip=1.0 if residual_clip == _TIGHTEST_RESIDUALS else 2.0,
        caution=2 + 2 * float(np.clip(whole * size / n_records - _NOISY, 0, 1)),
    )


def fit_newton(
    rows: PrivateRows,
    y: Floats,
    plan: NewtonPlan,
    *,
    n_records: int,
    rng: Rng,
    is_exact: bool = True,
    weights: Floats | None = None,
    fit_intercept: bool = True,
    penalty: Penalty | None = None,
) -> NewtonFit:
    """Release what `plan` says and return the model; `rows` must be shrunk to `plan.row_norm`.

    `weights` are in [0, 1], one per row. A row of weight v counts as v rows, so that no sum changes
    by more than without weights. The sum of the weights is private and takes the place of
    `n_records` after its release. `rows.factors` must have been multiplied by their square roots.
    Without weights the same is done with the number of rows, unless `is_exact` says that it is
    public and equal to `n_records`.
    """
    mean, mean_variance, total = _release_mean(y, weights, plan, n_records, rng, is_exact=is_exact)
    records = whiten(
        rows,
        rows,
        y,
        plan.first_gram,
        plan.norms,
        weights=weights,
        widest=plan.whitened_clip,
        total=total,
        n_records=n_records,
        fit_intercept=fit_intercept,
        rng=rng,
    )
    limit, whitening = records.limit, records.whitening
    bound = ROUNDING * limit**2  # of |u u'| for a whitened row u, clipped to `limit`
    noisy = bound * plan.second_gram.release(triangle(records.gram()) / bound, rng) / total
    noise_std = bound * plan.second_gram.noise_std / total
    constant = np.append(mean if fit_intercept else 0.0, np.zeros(rows.n_features))
    start, hessian = records.model(constant), from_triangle(noisy, records.size)
    solver = Solver(*shrink(hessian, noise_std, records.expected), records, start, penalty)
    solver.caution, spread = plan.caution, ResidualSpread()
    if fit_intercept:
        solver.anchor = Anchor(records.constant, mean_variance)
    tails, scale = ResidualTails(total), limit * _SPREAD_SHARE
    # One record adds r u with |r| <= clip and |u| <= limit, and scale (r^2 / clip - clip / 2).
    bound = ROUNDING * limit * math.sqrt(1 + _SPREAD_SHARE**2 / 4)
    slope = bound * plan.gradient.noise_std / total
    tight = clip = clipped_square = share = 1.0
    clips: list[float] = []
    widest = 0.0  # what the tails of residuals ask for
    for step in range(plan.steps):
        if plan.tails is not None and step in LOOKS:
            tails.look(records, solver.theta, plan.tails, rng)
            clip = tails.widened(tight, slope * math.sqrt(records.size / plan.steps))
            widest = clip if clip > tight else 0.0
            solver.biases = tails.bias(np.array(clips)) ** 2 / records.size
        clips.append(clip)
        gradient, squares = _gradient(records, solver.theta, clip)
        value = np.append(gradient, scale * squares)
        released = bound * clip * plan.gradient.release(value / (bound * clip), rng) / total
        noise_std = slope * clip
        squares = spread.add(
            clip * (released[-1] / scale + clip / 2), clip * noise_std / scale, clip
        )
        # A clipped row has its factor once in the gradient and twice in the Gram matrix, so that
        # the Gram matrix is too small, at least by the mean factor.
        share = spread.inside(clip) / records.mean_factor
        clipped_square = squares / share**2
        solver.slack = (1 - records.mean_factor) * clip
        solver.add(released[:-1] / share, noise_std / share)
        tight = min(plan.residual_clip * spread.std, plan.widest_clip)
        clip = max(tight, widest)
    uncertainty, unshrunk = None, whitening @ solver.unshrunk()
    if plan.errors is not None:
        unshrunk, uncertainty = _infer(
            records,
            solver,
            _release_errors(records, solver.theta, clip, spread.std, plan, rng),
            inside=spread.inside(clip),
            clip=clip,
            mean_square=clipped_square,
            total=total,
            is_weighted=weights is not None,
            fit_intercept=fit_intercept,
            free=undetermined(rows, fit_intercept=fit_intercept),
        )
    return NewtonFit(
        whitening @ solver.theta,
        unshrunk,
        uncertainty,
        spread.pooled(LOOKS[-1] if widest else 1),
        solver.equations(clipped_square / total),
    )


def _infer(
    records: WhitenedRows,
    solver: Solver,
    errors: "_Errors",
    *,
    inside: float,
    clip: float,
    mean_square: float,
    total: float,
    is_weighted: bool,
    fit_intercept: bool,
    free: Floats,
) -> tuple[Floats, Uncertainty]:
    """Return coefficients without a penalty and their uncertainty, from released values alone.

    `inside` is the share of residuals within the `clip`, and `mean_square` their mean square.
    """
    share, whitening = inside / records.mean_factor, records.whitening
    gram, reach = solver.hessian, records.reach
    doubt = math.hypot(_HESSIAN_DOUBT, 1 - records.mean_factor)
    # Long rows have smaller factors than most, and weigh more in the Gram matrix.
    rise = 1 / records.mean_factor
    solver.refine(reach * errors.hessian / share, reach * errors.noise_std / share, doubt, rise)
    # Residuals r that do not depend on the features have gradients of covariance E[r^2] gram / n.
    meat = combine_squares(
        mean_square * gram,
        (clip / share) ** 2 * errors.squares,
        (clip / share) ** 2 * errors.noise_std,
        _SQUARES_DOUBT,
        scale_doubt=1.0 if is_weighted else 0.0,
    )
    meat = meat / total + errors.bias / share**2 + solver.clip_bias * np.eye(records.size)
    uncertainty, unshrunk = solver.uncertainty(meat, free=free), whitening @ solver.unshrunk()
    if not fit_intercept:
        return unshrunk, uncertainty
    # An error of the mean prediction moves the mean of clipped residuals by the share inside the
    # clip, so the excess shows the rest of it, at least.
    mean_row = np.linalg.pinv(whitening).T @ records.expected @ records.constant
    kept = np.eye(len(whitening))
    kept[0] -= (1 - inside) * mean_row
    unshrunk[0] -= errors.excess
    covariance = kept @ uncertainty.covariance @ kept.T
    covariance[0, 0] += errors.excess_variance
    return unshrunk, uncertainty._replace(covariance=covariance)


def undetermined(rows: PrivateRows, *, fit_intercept: bool) -> Floats:
    """Return the models that are 0 on every record because of declared groups of indicators."""
    found = rows.box.undetermined()
    return found if fit_intercept else found[:, :0]


def hides_intervals(n_features: int, noise: float, n_records: int) -> bool:
    """Return whether public facts show that noise hides every coefficient from its interval.

    `noise` is the noise multiplier of a release that takes the whole budget. Matrices of second
    moments, which take a third of it together, then have errors as large as their eigenvalues.
    """
    size, share = n_features + 1, _FIRST_GRAM + _SECOND_GRAM + _ERRORS
    return triangle_noise(noise * size, size) / math.sqrt(share) > _HIDDEN * n_records


def _release_mean(
    y: Floats,
    weights: Floats | None,
    plan: NewtonPlan,
    n_records: int,
    rng: Rng,
    *,
    is_exact: bool,
) -> tuple[float, float, float]:
    """Return the mean of the targets, its noise variance, and the number of rows, or their weight.

    The number is `n_records` if that is exact and there are no weights.
    """
    if weights is None and is_exact:
        total, bound = float(n_records), 1.0
        noisy = plan.mean.release(np.array([y.sum()]), rng)[0]  # one target is in [-1, 1]
    else:
        # One record adds (v y, v), of norm at most sqrt(2). Replaced, it changes this by at most 2
        # in norm, which is less than twice that.
        bound = math.sqrt(2)
        sums = (y.sum(), len(y)) if weights is None else (weights @ y, weights.sum())
        noisy, total = (bound * plan.mean.release(np.array(sums) / bound, rng)).tolist()
        most = n_records if is_exact else 2 * n_records  # see `public_size`
        total = float(np.clip(total, max(1.0, 1e-3 * n_records), most))
    variance = (bound * plan.mean.noise_std / total) ** 2
    return float(np.clip(noisy / total, -1, 1)), variance, total


def _gradient(records: WhitenedRows, theta: Floats, clip: float) -> tuple[Floats, float]:
    """Return the private gradient of Huber's loss, and the sum of r^2 / clip - clip / 2.

    Residuals r are clipped, and every record is multiplied by its weight.
    """
    clipped = np.empty(records.rows.n_rows)

    def residuals(span: slice, margins: Floats) -> Floats:
        part = clipped[span]
        return np.clip(margins - records.targets[span], -clip, clip, out=part)

    gradient = records.gradient(theta, residuals)
    counted = clipped**2 / clip - clip / 2
    return gradient, float(counted.sum() if records.weights is None else counted @ records.weights)


class _Errors(NamedTuple):
    """Released facts about the residuals of the last model, in whitened units, as means."""

    hessian: Floats
    """Derivative of the gradient, divided by `WhitenedRows.reach`: the mean of z u' over whole rows
    z of the records whose residual is not clipped."""
    squares: Floats
    """Mean of (r / clip)^2 u u'."""
    noise_std: float
    excess: float
    """Mean of what clipping takes off the residuals: too much in the intercept."""
    excess_variance: float
    bias: Floats
    """Squared bias of the gradient, if the mean excess depends on the features."""


def _release_errors(
    records: WhitenedRows, theta: Floats, clip: float, std: float, plan: NewtonPlan, rng: Rng
) -> _Errors:
    """Release what the covariance of the estimates needs besides the noise (`NewtonPlan.errors`).

    If clipping cuts off more on one side than on the other, the mean of clipped residuals is 0 but
    that of whole ones is not. What is cut off is released up to a reach, which is 0 with the
    tightest clip: then only the side is. What lies beyond is assumed to be that of exponential
    tails. Their standard deviation is larger than `std`, that of normal residuals with the same
    clipped squares.
    """
    assert plan.errors is not None
    size, limit, total = records.size, records.limit, records.total
    reach = max(clip - _TIGHTEST_RESIDUALS * std, 1e-6 * std)
    tail_std = std * (1 + _TAIL_RISE * math.exp(-_TAIL_FALL * (clip / std - _TIGHTEST_RESIDUALS)))
    whole = reach / -math.expm1(-reach / tail_std)  # of an excess whose mean up to `reach` is 1

    def weigh(span: slice, margins: Floats) -> Floats:
        ratio = (margins[:, 0] - records.targets[span]) / clip
        is_inside = (np.abs(ratio) < 1).astype(np.float64)
        inside = is_inside * records.counted_once(span)
        return np.column_stack([inside, np.minimum(ratio**2, 1.0) * records.weights_of(span)])

    cut = np.empty(records.rows.n_rows)

    def outside(span: slice, margins: Floats) -> Floats:
        residuals = margins - records.targets[span]
        part = cut[span]
        part[:] = np.clip((np.abs(residuals) - clip) / reach, 0.0, 1.0) * np.sign(residuals)
        return part

    matrices = records.hessians(theta[:, None], weigh)
    tails = records.gradient(theta, outside)
    count = float(cut.sum() if records.weights is None else cut @ records.weights)
    far, near = (limit * math.sqrt(plan.outside * part) for part in (_TAILS, 1 - _TAILS))
    parts = [*(triangle(matrix) for matrix in matrices), far * tails, [near * limit * count]]
    bound = ROUNDING * math.sqrt(2) * limit**2
    noisy = bound * plan.errors.release(np.concatenate(parts) / bound, rng) / total
    noise_std = bound * plan.errors.noise_std / total
    length = size * (size + 1) // 2
    hessian, squares = (from_triangle(noisy[k * length : (k + 1) * length], size) for k in range(2))
    tails, mean_cut = noisy[2 * length : -1] / far, float(noisy[-1]) / (near * limit)
    # If errors do not depend on the features, the tails are `mean_cut` times the mean row, which
    # the latter alone shows with less noise.
    rest = tails - mean_cut * records.constant
    # Two deviations above the mean of what noise alone would be.
    noise = (size + 2 * math.sqrt(2 * size)) * (noise_std / far) ** 2
    shown = max(float(rest @ rest) - noise, 0.0) / max(float(rest @ rest), 1e-300)
    excess = whole * mean_cut
    variance = (whole * noise_std / (near * limit)) ** 2
    return _Errors(
        hessian,
        squares,
        noise_std,
        excess,
        variance + _TAIL_DOUBT**2 * max(excess**2 - variance, 0.0),
        shown * whole**2 * np.outer(rest, rest),
    )


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

    def pooled(self, first: int) -> float:
        """Return the std from the releases of step `first` and later, weighted by precision."""
        return math.sqrt(np.average(self._squares[first:], weights=self._precisions[first:]))


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
