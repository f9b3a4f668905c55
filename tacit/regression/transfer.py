"""Private transfer regression: a linear model of one data set with the help of others.

Each data set releases noisy moments once, under its own budget. Which sources are informative, the
pooled fit and the correction on the target are computed from released values only, so they are
post-processing and cost nothing more.

The scheme is that of Li, Cai & Li 2022 (Trans-Lasso) and Tian & Feng 2023 (TransGLM): keep the
sources that do not raise the target's loss, fit the pool of them and the target, and correct the
fit on the target. Losses are quadratic forms in the released moments, and the size of the noise in
them is known.

What the target releases does not depend on sources that disagree with it. So a target whose sources
all disagree gets exactly the model that it would have got without them.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeAlias, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.distance import cosine
from scipy.stats import chi2
from sklearn.utils import check_X_y

from tacit._arrays import Floats
from tacit._check import non_negative, positive, whole
from tacit.accounting import GDP
from tacit.events import Event, Relation, Sequence
from tacit.ledger import Ledger
from tacit.mechanisms import GaussianMechanism, Rng, SecureGenerator
from tacit.regression.bounds import Box
from tacit.regression.estimator import BudgetTerms, PrivateRegressor, gaussian_shares
from tacit.regression.rows import (
    PrivateRows,
    SecondMoments,
    from_triangle,
    solve_moments,
    triangle,
    triangle_noise,
)

Source: TypeAlias = tuple[ArrayLike, ArrayLike]
_SCREEN_SHARE = 0.3
_LIKE_MINDED = 0.5  # cosine of two screens from which a source takes part in the choice of features
_TRUSTED, _REFUSED = 0.9, 0.99
"""Quantiles of the misfit of an informative source between which its trust falls from 1 to 0."""
_ROUNDS = 4
_WIDE = 100.0
"""Variance of a prior on scaled coefficients, so wide that it only keeps equations solvable."""


@dataclass(kw_only=True, eq=False, repr=False)
class TransferRegression(PrivateRegressor):
    """A linear model of one private data set, learned with the help of other private data sets.

    Guarantee: the releases of each data set are (`epsilon`, `delta`)-DP under `relation`. If the
    data sets hold different people (`disjoint=True`), each person is in one of them, and all
    releases together are as private as those of the costliest data set. If they may share people,
    the costs add up, and `event_` is the sequence of all events. `PrivateEstimator` describes the
    settings common to all estimators.

    Parameters
    ----------
    epsilon, delta
        Budget of the target data set, and of each source.
    source_epsilon
        Another epsilon for the sources: one number, or one per source.
    bounds, target_bounds
        The same bounds for all data sets.
    h, q
        A source is informative if its coefficients are within `h` of the target's in the q-norm,
        1 or 2. None keeps the sources whose difference from the target could be noise. `q` is also
        the norm of the penalty: 1 gives sparse models, 2 shrinks collinear features together.
    max_features
        With more features than this, each data set first releases noisy correlations, and only
        this many features enter the model.
    disjoint
        True if no person is in two data sets. With a `ledger`, each data set is then one of its
        partitions (parallel composition), and the target's partition pays the costliest event.
    ledger
        A `tacit.Ledger` that pays for all data sets. Sources may have their own, see `fit`.

    Attributes
    ----------
    informative_
        Numbers of the sources that were used, from 0.
    events_, event_
        Event of each data set (target first), and of all of them for one person.

    Examples
    --------
    The target covers only values near 0; two other regions show how the line continues.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> def region(low, high):
    ...     X = rng.uniform(low, high, (5000, 1))
    ...     return X, 2 * X[:, 0] + 1
    >>> model = TransferRegression(
    ...     epsilon=1.0, delta=1e-6, bounds=(0, 10), target_bounds=(0, 25), random_state=0
    ... ).fit(*region(0, 1), sources=[region(4, 6), region(9, 10)])
    >>> model.informative_, model.predict([[10.0]]).round(0).tolist()
    ([0, 1], [21.0])
    """

    source_epsilon: float | Many[float] | None = None
    h: float | None = None
    q: int = 2
    max_features: int = 32
    disjoint: bool = True
    informative_: list[int] = field(init=False)
    events_: tuple[Event, ...] = field(init=False)

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sources: Iterable[Source] = (),
        source_ledgers: Many[Ledger | None] | None = None,
    ) -> Self:
        """Fit the model to the private target (`X`, `y`) and `sources`; pay before any release.

        Each source is a private pair (X, y) with the same features. If given, `source_ledgers`
        (one per source) pay for the sources, and `ledger` pays for the target only.
        """
        tables = [self._fit_table(X, y, y_numeric=True)]
        d = tables[0][0].shape[1]
        names = getattr(self, "feature_names_in_", None)
        tables += [_checked_source(k, source, d, names) for k, source in enumerate(sources)]
        box, target_box = self._box(d), self._target_box()
        data = [(table, target_box.scale_target(targets)) for table, targets in tables]
        allowance = self._allowance(box, target_box)
        rng = self._generator()
        plans = self._plans(d, len(tables) - 1, box.row_norm)

        self._pay_all(plans, source_ledgers)
        features, released = _release(data, plans, box, rng)
        fitted = fit_with_sources(released[0], released[1:], q=self.q, allowance=allowance)
        coef, intercept = box.take(features).unscale(fitted.theta, target_box)
        self.coef_ = np.zeros(d)
        self.coef_[features] = coef
        self.intercept_ = float(intercept)
        self.informative_ = fitted.informative
        self.events_ = tuple(plan.event for plan in plans)
        self.event_ = self._whole(self.events_)
        return self

    def _allowance(self, box: Box, target_box: Box) -> float:
        """Return how far a source's model may be from the target's: a squared L2 distance.

        The user states the distance as `h`, in the q-norm of coefficients in the original units.
        The result is for features and targets scaled to [-1, 1]. It is 0 if `h` is None.
        """
        if self.q not in (1, 2):
            raise ValueError(f"q must be 1 or 2, got {self.q!r}.")
        if self.h is None:
            return 0.0
        # Scaled, w_j becomes w_j half_j / half_y; the 2-norm is at most the q-norm for q <= 2.
        return float(non_negative(h=self.h) * box.half.max() / target_box.half[0]) ** 2

    def _plans(self, n_features: int, n_sources: int, row_norm: float) -> list["DataSetPlan"]:
        terms = self._terms()
        n_kept = whole(max_features=self.max_features, least=1)
        given = terms["epsilon"] if self.source_epsilon is None else self.source_epsilon
        each = list(given) if isinstance(given, Many) else [given] * n_sources
        if len(each) != n_sources:
            raise ValueError(
                f"source_epsilon must be one number or one per source: got {len(each)} "
                f"for {n_sources} sources."
            )
        epsilons = (terms["epsilon"], *(positive(epsilon=one) for one in each))
        budgets: list[BudgetTerms] = [{**terms, "epsilon": epsilon} for epsilon in epsilons]
        return [plan_data_set(n_features, row_norm=row_norm, n_kept=n_kept, **b) for b in budgets]

    def _pay_all(
        self, plans: Many["DataSetPlan"], source_ledgers: Many[Ledger | None] | None
    ) -> None:
        """Spend one event per data set (target first) on its ledger, before any release."""
        shared = source_ledgers is None
        ledgers = [self.ledger] * (len(plans) - 1) if shared else list(source_ledgers)
        if len(ledgers) != len(plans) - 1:
            raise ValueError(
                f"source_ledgers must be one per source: got {len(ledgers)} "
                f"for {len(plans) - 1} sources."
            )
        for ledger in ledgers:
            self._relation(ledger)
        apart = self.disjoint and shared and len(plans) > 1
        names = ["target", *(f"source {k}" for k in range(len(ledgers)))]
        events = [plan.event for plan in plans]
        if apart:
            # Partitions are named by position, and the next fit may put the same people into
            # another. The target's partition is in every fit, so the costliest event, charged
            # there, bounds what any person took part in.
            events[0] = self._whole(tuple(events))
        for name, ledger, event in zip(names, [self.ledger, *ledgers], events, strict=True):
            if ledger is not None:
                partition = name if apart else None
                ledger.spend(event, note=f"TransferRegression, {name}", partition=partition)

    def _whole(self, events: tuple[Event, ...]) -> Event:
        """Return the event that bounds the privacy loss of one person over all data sets.

        If data sets are disjoint, it is their costliest event; otherwise the sequence of all.
        """
        if not self.disjoint and len(events) > 1:
            return Sequence(events)
        relation = Relation(self.relation)
        return max(events, key=lambda event: GDP().mu(event, relation=relation))


@dataclass(frozen=True)
class DataSetPlan:
    """Plan of the releases of one data set: a screen, if there are many features, then moments.

    A record is z = (1, x) with target y in [-1, 1], shrunk to a bounded norm.

    * The screen, from which `n_kept` features are chosen, is the sum of y z. One record adds a
      vector of norm |y| |z|, at most the norm to which rows are shrunk (`screen.l2_sensitivity`).
      A replaced record changes the sum by at most twice as much.
    * The moments are the sum of v v' over v = (1, x, scale y), with x the chosen features. One
      record adds |v|^2 <= row_norm^2 + scale^2 in Frobenius norm. If v is replaced by w, the change
      is at most sqrt(2) times that, because the inner product of v v' and w w' is >= 0.
    """

    screen: GaussianMechanism | None
    moments: GaussianMechanism
    row_norm: float
    scale: float
    n_kept: int

    @property
    def event(self) -> Event:
        """Event of all releases of the data set, for the accountant."""
        if self.screen is None:
            return self.moments.event
        return Sequence((self.screen.event, self.moments.event))


class NoisyMoments(NamedTuple):
    """Released moments of one data set or of several together, with the size of their noise.

    `gram_std` and `cross_std` are standard deviations of the noise in the entries.
    """

    moments: SecondMoments
    gram_std: float
    """Of the diagonal of the Gram matrix; entries off the diagonal have 1/sqrt(2) of it."""
    cross_std: float

    @property
    def spread(self) -> float:
        """Largest eigenvalue, approximately, of the noise in the Gram matrix."""
        return triangle_noise(self.gram_std, len(self.moments.cross))

    def covariance(self, theta: Floats) -> Floats:
        """Return the covariance of the residual moments cross - gram theta if theta is the truth.

        It comes from the privacy noise in the moments, and from the random errors of the targets.
        """
        m, identity = self.moments, np.eye(len(theta))
        # The noise matrix E has variance s^2 on and s^2 / 2 off the diagonal, so E theta has
        # covariance s^2 (|theta|^2 I + theta theta') / 2.
        released = self.gram_std**2 / 2 * (theta @ theta * identity + np.outer(theta, theta))
        released += self.cross_std**2 * identity
        rest = m.square - 2 * m.cross @ theta + theta @ m.gram @ theta
        variance = np.clip(rest / max(m.gram[0, 0], 1.0), 0.0, 4.0)  # |y| <= 1: at most 4
        return released + variance * _repaired(m.gram, 0.0)

    def misfit(self, theta: Floats) -> float:
        """Return how badly the model theta fits: r' C^-1 r for r = cross - gram theta.

        C is the covariance of the residuals r. At the true theta the result is chi-square.
        """
        rest = self.moments.cross - self.moments.gram @ theta
        return float(rest @ np.linalg.solve(self.covariance(theta), rest))


class TransferResult(NamedTuple):
    """Coefficients `theta` of the target's model, and the indices of the sources that were used."""

    theta: Floats
    informative: list[int]


def plan_data_set(
    n_features: int, *, row_norm: float, n_kept: int, **budget: Unpack[BudgetTerms]
) -> DataSetPlan:
    """Return the plan of one data set's releases, which together cost the budget.

    With more than `n_kept` features, part of the budget pays for a screen that chooses `n_kept`.
    """
    screen, factor = None, math.sqrt(2.0)
    if n_features > n_kept:
        shares = (_SCREEN_SHARE, 1 - _SCREEN_SHARE)
        first, rest = gaussian_shares(shares, (2.0, factor), **budget)
        screen = GaussianMechanism(first, l2_sensitivity=row_norm)
    else:
        (rest,) = gaussian_shares((1.0,), (factor,), **budget)
    # A row of fewer features is shorter in proportion.
    inner = math.sqrt(1 + (row_norm**2 - 1) * min(1.0, n_kept / n_features))
    scale = inner / math.sqrt(2.0)
    moments = GaussianMechanism(rest, l2_sensitivity=inner**2 + scale**2, replace_factor=factor)
    return DataSetPlan(screen, moments, inner, scale, n_kept)


def release_screen(rows: PrivateRows, y: Floats, screen: GaussianMechanism, rng: Rng) -> Floats:
    """Return one noisy score per feature, which is large if the feature correlates with the target.

    The scores are the sum of y x over records, plus noise, divided by the noise standard deviation.
    `rows` must be shrunk to the norm `screen.l2_sensitivity`.
    """
    private = rows.weighted_sum(
        np.zeros(rows.n_features + 1), lambda span, _: rows.factors[span] * y[span]
    )
    return screen.release(private, rng)[1:] / screen.noise_std


def choose_features(screens: Many[Floats], n_kept: int) -> NDArray[np.intp]:
    """Return the indices of the `n_kept` features that enter the model, by their released scores.

    `screens` holds the scores of the target first, then of each source. Half of the features have
    the largest scores of the target alone. The others have the largest sums of the target's scores
    and those of similar sources, whose scores on the first half have a similar direction.
    """
    target, *sources = screens
    first = np.argsort(-np.abs(target), kind="stable")[: (n_kept + 1) // 2]
    like = [s for s in sources if 1 - cosine(s[first], target[first]) >= _LIKE_MINDED]
    pooled = np.abs(np.sum([target, *like], axis=0))
    pooled[first] = np.inf
    return np.sort(np.argsort(-pooled, kind="stable")[:n_kept])


def release_moments(rows: PrivateRows, y: Floats, plan: DataSetPlan, rng: Rng) -> NoisyMoments:
    """Return the sums of z z', y z and y^2 over records z with noise added, as `plan` states.

    `rows` must be shrunk to the norm `plan.row_norm`.
    """
    private = rows.moments(y)
    size = rows.n_features + 1
    cross = plan.scale * private.cross[:, None]
    whole = np.block([[private.gram, cross], [cross.T, plan.scale**2 * private.square]])
    # One record adds v v' with |v|^2 <= row_norm^2 + scale^2, its Frobenius norm.
    noisy = from_triangle(plan.moments.release(triangle(whole), rng), size + 1)
    cross, square = noisy[:size, size] / plan.scale, float(noisy[size, size]) / plan.scale**2
    moments = SecondMoments(noisy[:size, :size], cross, square)
    std = plan.moments.noise_std
    return NoisyMoments(moments, std, std / (math.sqrt(2.0) * plan.scale))


def pool(parts: Many[NoisyMoments]) -> NoisyMoments:
    """Return the moments of several data sets together: moments add, and so do noise variances."""
    return NoisyMoments(
        SecondMoments(
            np.sum([part.moments.gram for part in parts], axis=0),
            np.sum([part.moments.cross for part in parts], axis=0),
            math.fsum(part.moments.square for part in parts),
        ),
        math.hypot(*(part.gram_std for part in parts)),
        math.hypot(*(part.cross_std for part in parts)),
    )


def fit_with_sources(
    target: NoisyMoments, sources: Many[NoisyMoments], *, q: int = 2, allowance: float = 0.0
) -> TransferResult:
    """Return a model of the target, fitted with the help of those sources that agree with it.

    Sources are selected, pooled with the target and fitted; the fit is then corrected on the
    target. The result is a weighted mean of this model and the model of the target alone. The
    weight is the highest trust in a source, so that a source which differs just noticeably is
    neither used in full nor ignored. If no source agrees, the result is the model of the target
    alone. `q` is the norm of the penalty. `allowance` is the squared L2 distance by which a
    source's scaled coefficients may differ from the target's.
    """
    alone = minimize(target, q=q)
    trusts = select(target, sources, allowance=allowance)
    if not trusts:
        return TransferResult(alone, [])
    pooled = minimize(pool([target, *(sources[k] for k in trusts)]), q=q)
    helped = pooled + correct(target, pooled, q=q)
    return TransferResult(alone + max(trusts.values()) * (helped - alone), sorted(trusts))


def select(
    target: NoisyMoments, sources: Many[NoisyMoments], *, allowance: float = 0.0
) -> dict[int, float]:
    """Return the trust in each informative source, in (0, 1], by the index of the source.

    Sources are tested in order of their misfit with the target, smallest first. A source must agree
    with the target, and also with the pool of the target and the sources accepted so far, which has
    less noise. Trust falls from 1 to 0 as the larger of both misfits rises from the 0.9 to the 0.99
    quantile of its distribution for equal models. `allowance`: see `fit_with_sources`.
    """
    least, most = chi2.ppf((_TRUSTED, _REFUSED), len(target.moments.cross)).tolist()
    misfits = [misfit_of_both(target, source, allowance=allowance) for source in sources]
    known, trusts = target, {}
    for k in np.argsort(misfits, kind="stable").tolist():
        worse = max(misfits[k], misfit_of_both(known, sources[k], allowance=allowance))
        if worse < most:
            trusts[k] = min(1.0, (most - worse) / (most - least))
            known = pool([known, sources[k]])
    return trusts


def misfit_of_both(one: NoisyMoments, other: NoisyMoments, *, allowance: float = 0.0) -> float:
    """Return how badly one linear model explains two data sets, compared with their noise.

    At a common true theta, the residual moments r = cross - gram theta of each data set are noise
    of known covariance C. So J, the sum over both of r' C^-1 r at its minimum over theta, is
    chi-square with d + 1 degrees of freedom for d features (Hansen's test of overidentifying
    restrictions, 1982). A difference of the two models by a squared distance of `allowance` is
    permitted: the most that it can add to J is subtracted.
    """
    theta: Floats = np.zeros(len(one.moments.cross))
    for _ in range(_ROUNDS):  # the covariance depends on theta
        normal, pull = np.eye(len(theta)) / _WIDE, np.zeros_like(theta)
        for s in (one, other):
            weighted = s.moments.gram @ np.linalg.inv(s.covariance(theta))
            normal += weighted @ s.moments.gram
            pull += weighted @ s.moments.cross
        theta = np.asarray(np.linalg.solve(normal, pull), np.float64)
    weight = np.linalg.inv(other.covariance(theta))
    reach = np.linalg.eigvalsh(other.moments.gram @ weight @ other.moments.gram)[-1]
    return one.misfit(theta) + other.misfit(theta) - float(reach) * allowance


def correct(target: NoisyMoments, pooled: Floats, *, q: int = 2) -> Floats:
    """Return the correction to add to the coefficients `pooled` so that they fit the target better.

    For q = 2 it is the posterior mean of the difference under a normal prior, whose variance is
    estimated from the misfit of `pooled` on the target. It is large only in directions that the
    target's moments determine well. For q = 1 it is the lasso on the same equations, weighted by
    their noise, with a penalty of sqrt(2 log d) standard deviations for d coefficients.
    """
    gram = target.moments.gram
    rest = target.moments.cross - gram @ pooled
    covariance = target.covariance(pooled)
    weight = np.linalg.inv(covariance)
    normal, pull = gram @ weight @ gram, gram @ weight @ rest
    if q == 1:
        scale = np.sqrt(np.maximum(np.diag(normal), 1e-12))
        lam = math.sqrt(2 * math.log(max(len(rest), 2))) * scale
        return _lasso(normal, pull, lam, start=np.zeros_like(rest))
    excess = float(rest @ rest) - float(np.trace(covariance))
    variance = excess / float(np.trace(gram @ gram))
    if variance <= 0:
        return np.zeros_like(rest)
    step = np.linalg.solve(normal + np.eye(len(rest)) / variance, pull)
    return np.asarray(step, np.float64)


def minimize(released: NoisyMoments, *, q: int = 2) -> Floats:
    """Return the coefficients that minimize the squared loss, by noisy moments, plus a penalty.

    The penalty is lambda times the q-norm of the feature coefficients to the power q. lambda
    follows from the known noise: for q = 2 it is the ridge of `solve_moments`, for q = 1 it is
    sqrt(2 log d) standard deviations of a cross moment, for d features.
    """
    theta = solve_moments(released.moments, noise=released.spread)
    if q == 2:
        return theta
    lam = released.cross_std * math.sqrt(2 * math.log(max(len(theta) - 1, 2)))
    penalties = np.append(0.0, np.full(len(theta) - 1, lam))
    gram = _repaired(released.moments.gram, released.spread)
    return _lasso(gram, released.moments.cross, penalties, start=theta)


def _release(
    data: Many[tuple[NDArray[np.floating], Floats]], plans: Many[DataSetPlan], box: Box, rng: Rng
) -> tuple[NDArray[np.intp] | slice, list[NoisyMoments]]:
    """Screen features if planned, then return the kept features and each data set's noisy moments.

    `data` and `plans` list the target first. Each data set has its own stream of noise, so that the
    noise of the target does not depend on the number of sources.
    """
    streams = [rng] * len(data) if isinstance(rng, SecureGenerator) else rng.spawn(len(data))
    triples = list(zip(data, plans, streams, strict=True))
    screens = [
        release_screen(
            PrivateRows(X, box, row_norm=plan.screen.l2_sensitivity), y, plan.screen, stream
        )
        for (X, y), plan, stream in triples
        if plan.screen is not None
    ]
    # Without screening all features are kept, by a slice that does not copy the tables.
    features = choose_features(screens, plans[0].n_kept) if screens else slice(None)
    inner = box.take(features)
    return features, [
        release_moments(PrivateRows(X[:, features], inner, row_norm=plan.row_norm), y, plan, stream)
        for (X, y), plan, stream in triples
    ]


def _checked_source(
    k: int, source: Source, n_features: int, names: NDArray[Any] | None
) -> tuple[NDArray[np.floating], NDArray[Any]]:
    """Return the private table X and targets y of source number `k`, as checked arrays.

    Raise if X has other features than the target data set: `n_features`, and `names` if known.
    """
    try:
        dtype: Any = (np.float64, np.float32)  # Any: annotated as str in scikit-learn
        X, y = check_X_y(*source, dtype=dtype, y_numeric=True)
    except (TypeError, ValueError):
        raise ValueError(
            f"source {k} must be a pair (X, y) of a finite dense table and as many numbers."
        ) from None
    if X.shape[1] != n_features:
        raise ValueError(
            f"source {k} must have the {n_features} features of the target, got {X.shape[1]}."
        )
    columns = getattr(source[0], "columns", None)
    if columns is not None and names is not None and list(columns) != list(names):
        raise ValueError(f"source {k} must have the columns of the target, in the same order.")
    return X, y


def _repaired(gram: Floats, noise: float) -> Floats:
    """Return the noisy matrix `gram` made positive definite, so that equations in it are solvable.

    `noise` is the largest eigenvalue of its noise. Eigenvalues are raised as in `solve_moments`.
    """
    values, vectors = np.linalg.eigh(gram)
    bound = max(0.0, float(values[0]) - noise)
    least = 1e-9 * max(float(values[-1]), 1.0)
    raised = np.maximum(np.maximum(values, bound) + max(0.0, noise - bound), least)
    return (vectors * raised) @ vectors.T


def _lasso(gram: Floats, cross: Floats, penalties: Floats, *, start: Floats) -> Floats:
    """Return the theta that minimizes theta' gram theta / 2 - cross' theta + penalties' |theta|.

    This is the lasso with one penalty per coefficient, solved by coordinate descent from `start`.
    """
    theta = start.copy()
    for _ in range(1000):
        largest = 0.0
        for j in range(len(theta)):
            pull = cross[j] - gram[j] @ theta + gram[j, j] * theta[j]
            new = math.copysign(max(abs(pull) - penalties[j], 0.0), pull) / gram[j, j]
            largest = max(largest, abs(new - theta[j]))
            theta[j] = new
        if largest <= 1e-10:
            break
    return theta
