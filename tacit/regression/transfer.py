"""Private transfer regression: a linear model of one data set with the help of others.

Each data set is fitted once by `LinearRegression(method="auto")` with its own budget. Everything
else is computed from what these fits release, so it costs nothing more: which sources agree with
the target, a model of the target and these sources together, and how far the target's own fit moves
towards that model. So the target spends what it would spend alone, and a target whose sources all
disagree gets exactly the model that it would have got without them.

A data set is trusted in a direction only as far as its released Gram matrix is above its noise
there (`precision`). In other directions the target keeps its own fit.

The scheme is that of Li, Cai & Li 2022 (Trans-Lasso) and Tian & Feng 2023 (TransGLM): keep the
sources that do not raise the target's loss, combine them, and correct the result on the target. How
far the target's fit then moves follows James & Stein 1961 from its own released loss.
"""

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeAlias, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.distance import cosine
from scipy.stats import chi2
from sklearn.utils import check_X_y

from tacit._arrays import Floats
from tacit._check import non_negative, positive, whole
from tacit.accounting import GDP
from tacit.events import Event, Gaussian, Relation, Sequence
from tacit.ledger import Ledger
from tacit.mechanisms import GaussianMechanism, Rng, SecureGenerator
from tacit.regression import linear
from tacit.regression.bounds import Box
from tacit.regression.estimator import (
    BudgetTerms,
    PrivateRegressor,
    gaussian_shares,
    public_size,
)
from tacit.regression.ledger_file import LedgerFile
from tacit.regression.linear import LinearPlan, LinearRegression
from tacit.regression.newton import NewtonFit
from tacit.regression.normal_equations import NormalEquations
from tacit.regression.penalty import Penalty
from tacit.regression.rows import PrivateRows, triangle_noise

Source: TypeAlias = tuple[ArrayLike, ArrayLike]
_SCREEN_SHARE = 0.3
_LIKE_MINDED = 0.5  # cosine of two screens from which a source takes part in the choice of features
_REFUSED = 0.99
"""Quantile of the misfit of an informative source above which a source is refused."""
_ROUNDS = 4
_DAMPING = 0.1  # see `Precision`
_ROUNDING = 1e-12  # eigenvalues below this share of the largest one count as 0
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
        `h` declares that a source is informative if its coefficients are within `h` of the target's
        in the q-norm, 1 or 2; the model relies on that where the target itself says little, as
        beyond the range of its records. None relies on nothing: a source must not differ from the
        target by more than noise, and must be seen to lower the target's loss.
    penalty
        lambda of the correction: the coefficients may differ from those of the sources by d, at a
        price of `penalty` times the sum of |d_j|^q, beside half of the target's mean squared error
        in units in which bounds are -1 and 1. q = 1 makes differences sparse. None follows the
        noise.
    max_features
        For sparse models of many features: each data set first releases noisy correlations, and
        only this many features enter the model. None keeps all.
    n_records
        Public number of records: one for all data sets, or one per data set, the target first. None
        takes the numbers of rows, which are then assumed to be public.
    disjoint
        True if no person is in two data sets. With a `ledger`, each data set is then one of its
        partitions (parallel composition), and the target's partition pays the costliest event.
    ledger
        A `tacit.Ledger` that pays for all data sets. Sources may have their own, see `fit`.

    Attributes
    ----------
    informative_
        Numbers of the sources that were used, from 0.
    alone_, weight_
        The target's own fit, coefficients and intercept, which is that of `LinearRegression`; and
        how far the model moved from it towards the model of all data sets, from 0 to 1. It is 1
        for a declared `h`.
    misfits_
        Disagreement of each source with the target, relative to the most that noise explains.
    events_, event_
        Event of each data set (target first), and of all of them for one person.

    Examples
    --------
    The target covers only values near 0; two other regions, which are declared to follow the same
    line, show how it continues.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> def region(low, high):
    ...     X = rng.uniform(low, high, (5000, 1))
    ...     return X, 2 * X[:, 0] + 1
    >>> model = TransferRegression(
    ...     epsilon=1.0, delta=1e-6, bounds=(0, 10), target_bounds=(0, 25), h=0, random_state=0
    ... ).fit(*region(0, 1), sources=[region(4, 6), region(9, 10)])
    >>> model.informative_, model.predict([[10.0]]).round(0).tolist()
    ([0, 1], [21.0])
    """

    source_epsilon: float | Many[float] | None = None
    h: float | None = None
    q: int = 2
    penalty: float | None = None
    max_features: int | None = None
    n_records: int | Many[int] | None = None
    disjoint: bool = True
    informative_: list[int] = field(init=False)
    misfits_: list[float] = field(init=False)
    alone_: tuple[Floats, float] = field(init=False)
    weight_: float = field(init=False)
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
        least = 1 if self.n_records is None else 0  # see `_fit_table`
        tables += [_checked_source(k, source, d, names, least) for k, source in enumerate(sources)]
        box, target_box = self._box(d), self._target_box()
        data = [(table, target_box.scale_target(targets)) for table, targets in tables]
        terms = self._correction_terms(box, target_box)
        rng = self._generator()
        plans = self._plans(box, self._sizes([len(table) for table, _ in tables]))

        self._pay_all(plans, source_ledgers)
        features, fits = _release(data, plans, box, rng, is_exact=self.n_records is None)
        found = combine(fits[0], fits[1:], **terms)

        def unscaled(theta: Floats) -> tuple[Floats, float]:
            coef = np.zeros(d)
            coef[features], intercept = box.take(features).unscale(theta, target_box)
            return coef, float(intercept)

        self.coef_, self.intercept_ = unscaled(found.theta)
        self.alone_, self.weight_ = unscaled(fits[0].theta), found.weight
        self.informative_, self.misfits_ = found.informative, found.misfits
        self.events_ = tuple(plan.event for plan in plans)
        self.event_ = self._whole(self.events_)
        return self

    def _sizes(self, n_rows: Many[int]) -> list[int]:
        """Return the public number of records of each data set."""
        if self.n_records is None:
            return list(n_rows)
        given = self.n_records
        each = list(given) if isinstance(given, Many) else [given] * len(n_rows)
        if len(each) != len(n_rows):
            raise ValueError(
                f"n_records must be one number or one per data set: got {len(each)} "
                f"for {len(n_rows)} data sets."
            )
        return [public_size(n, rows) for n, rows in zip(each, n_rows, strict=True)]

    def _correction_terms(self, box: Box, target_box: Box) -> "CorrectionTerms":
        """Return the checked settings of the correction.

        The user states `h` in the q-norm of coefficients in the original units. The allowance is
        for features and targets scaled to [-1, 1].
        """
        if self.q not in (1, 2):
            raise ValueError(f"q must be 1 or 2, got {self.q!r}.")
        allowance = None
        if self.h is not None:
            # Scaled, w_j becomes w_j half_j / half_y; the 2-norm is at most the q-norm for q <= 2.
            allowance = float(non_negative(h=self.h) * box.half.max() / target_box.half[0])
        penalty = None if self.penalty is None else non_negative(penalty=self.penalty)
        return {"q": self.q, "penalty": penalty, "allowance": allowance}

    def _plans(self, box: Box, sizes: Many[int]) -> list["DataSetPlan"]:
        terms = self._terms()
        n_sources = len(sizes) - 1
        given = terms["epsilon"] if self.source_epsilon is None else self.source_epsilon
        each = list(given) if isinstance(given, Many) else [given] * n_sources
        if len(each) != n_sources:
            raise ValueError(
                f"source_epsilon must be one number or one per source: got {len(each)} "
                f"for {n_sources} sources."
            )
        epsilons = (terms["epsilon"], *(positive(epsilon=one) for one in each))
        n_kept = len(box.half)
        if self.max_features is not None:
            n_kept = min(n_kept, whole(max_features=self.max_features, least=1))
        budgets: list[BudgetTerms] = [{**terms, "epsilon": epsilon} for epsilon in epsilons]
        return [
            plan_data_set(box, n_kept=n_kept, n_records=n, **budget)
            for n, budget in zip(sizes, budgets, strict=True)
        ]

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
        for ledger in (self.ledger, *ledgers):
            if isinstance(ledger, Ledger | LedgerFile):
                ledger.require_unit(is_user=False)
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
    """Plan of the releases of one data set: a screen if only some features are kept, then a fit.

    The screen, from which the features are chosen, is the sum of y z over records z = (1, x) with
    targets y in [-1, 1], shrunk to a bounded norm. One record adds a vector of norm |y| |z|, at
    most the norm to which rows are shrunk (`screen.l2_sensitivity`). A replaced record changes the
    sum by at most twice as much.
    """

    screen: GaussianMechanism | None
    fit: LinearPlan
    n_kept: int
    n_records: int

    @property
    def event(self) -> Event:
        """Event of all releases of the data set, for the accountant."""
        return (
            self.fit.event if self.screen is None else Sequence((self.screen.event, self.fit.event))
        )


class CorrectionTerms(TypedDict):
    """Settings of the correction: keyword arguments of `combine`."""

    q: int
    penalty: float | None
    allowance: float | None


class Combined(NamedTuple):
    """Coefficients `theta` of the target's model, and how they came about."""

    theta: Floats
    informative: list[int]
    misfits: list[float]
    weight: float


def plan_data_set(
    box: Box, *, n_kept: int, n_records: int, **budget: Unpack[BudgetTerms]
) -> DataSetPlan:
    """Return the plan of one data set's releases, which together cost the budget.

    If fewer features are kept than there are, part of the budget pays for a screen.
    """
    screen, rest = None, {**budget}
    inner, method = box, "auto"
    if n_kept < len(box.half):
        shares = (_SCREEN_SHARE, 1 - _SCREEN_SHARE)
        first, second = gaussian_shares(shares, (2.0, 1.0), **budget)
        screen = GaussianMechanism(first, l2_sensitivity=box.row_norm)
        # All releases are Gaussian, so their costs add up as if they were one (`gaussian_shares`).
        rest["epsilon"] = GDP().epsilon(Gaussian(second), delta=budget["delta"])
        # A row of fewer features is shorter in proportion.
        share = n_kept / len(box.half)
        inner = replace(
            box.take(slice(n_kept)), row_norm=math.sqrt(1 + (box.row_norm**2 - 1) * share)
        )
        method = "gradient"
    model = LinearRegression(method=method, **rest)
    return DataSetPlan(screen, model._plan(inner, n_records), n_kept, n_records)


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


def combine(
    target: linear.PointFit | NewtonFit,
    sources: Many[linear.PointFit | NewtonFit],
    *,
    q: int = 2,
    penalty: float | None = None,
    allowance: float | None = None,
) -> Combined:
    """Return a model of the target, fitted with the help of those sources that agree with it.

    The result lies between the target's own fit and the mean of all agreeing fits, weighted by
    their precision and corrected on the target. `q` and `penalty` are those of the correction.
    `allowance` is the declared L2 distance of the coefficients of informative sources from the
    target's; if it is None, `step_length` says how far to go.
    """
    alone = target.theta
    # Methods other than Newton's release no equations, so their fits cannot be compared.
    solved = {k: fit for k, fit in enumerate(sources) if isinstance(fit, NewtonFit)}
    if not isinstance(target, NewtonFit) or not solved:
        return Combined(alone, [], [math.inf] * len(sources), 0.0)
    equations = {k: fit.equations for k, fit in solved.items()}
    informative, found = select(target.equations, equations, allowance=allowance or 0.0)
    misfits = [found.get(k, math.inf) for k in range(len(sources))]
    if not informative:
        return Combined(alone, [], misfits, 0.0)
    kept = [solved[k] for k in informative]
    own, own_damping = precision(target.equations, alone)
    theirs = [precision(fit.equations, alone) for fit in kept]
    pooled, damping = (np.sum(parts, axis=0) for parts in zip(*theirs, strict=True))
    pull = np.sum(
        [p @ (fit.theta - alone) for (p, _), fit in zip(theirs, kept, strict=True)], axis=0
    )
    inverse = _invert(own + own_damping + pooled + damping)
    # Precision of the difference of the two models: what both of them know.
    shared = own @ _invert(own + pooled) @ pooled
    source = _invert(pooled + damping) @ pull  # relative to the target's own fit
    scale = max(target.equations.sampling, np.finfo(float).tiny)
    difference = correct(-source, (shared + shared.T) / 2, scale, q=q, penalty=penalty)
    helped = alone + inverse @ (pull + pooled @ difference)
    weight = 1.0
    if allowance is None:
        weight = step_length(target, helped, float(np.trace(inverse @ pooled)) / len(alone))
    return Combined(alone + weight * (helped - alone), informative, misfits, weight)


def step_length(target: NewtonFit, helped: Floats, share: float) -> float:
    """Return how far the target's own fit should move towards the model `helped`, from 0 to 1.

    Along the way the released loss of the target is a parabola, whose minimum is the answer. Three
    facts about noise enter. The own fit was chosen by this loss, which therefore seems lower there
    than it is, by `optimism`; only the `share` of it counts that `helped` does not have in common
    with the own fit. (If the own fit is not shrunk, the rest is the rule of James & Stein.) As far
    as it is shrunk, the slope at the own fit is noisy, and has to be below 0 by one standard
    deviation. The curvature is raised by one standard deviation of its noise. So in doubt the step
    is short: sources must be seen to help.
    """
    e = target.equations
    way = helped - target.theta
    slope = float(way @ (e.gram @ (target.theta - e.model) + e.gradient))
    doubt = (1 - e.fitted) * math.sqrt(float(way @ noise_covariance(e, target.theta) @ way))
    curvature = float(way @ e.gram @ way) + e.gram_std * float(way @ e.metric @ way)
    if curvature <= 0:
        return 0.0
    return float(np.clip((share * e.optimism - slope - doubt) / curvature, 0.0, 1.0))


def noise_covariance(e: NormalEquations, theta: Floats) -> Floats:
    """Return the covariance of the residuals of the equations if `theta` is the truth."""
    away = theta - e.model
    # The noise matrix E of the Gram matrix has variance s^2 on and s^2 / 2 off the diagonal, so E u
    # has covariance s^2 (|u|^2 I + u u') / 2. The second part is left out: it is of rank 1.
    noise = e.gradient_variance + e.gram_std**2 / 2 * float(away @ e.metric @ away)
    covariance = noise * e.metric + e.sampling * e.gram
    return covariance + _ROUNDING * float(np.trace(covariance)) * np.eye(len(theta))


class Precision(NamedTuple):
    """Inverse covariance of the solution of one data set's equations, and what keeps steps short.

    The Gram matrix has noise, so its eigenvectors are tilted. Data sets that each know one or two
    directions may then seem to determine a further direction, which none of them knows, by a very
    long step. `damping` is the precision with which every step is 0: a part of the mean of
    E C^-1 E, where E is the noise of the Gram matrix and C the covariance of the residuals.
    """

    known: Floats
    damping: Floats


def precision(e: NormalEquations, theta: Floats) -> Precision:
    """Return what the equations of a data set know of its model, if `theta` is close to the truth.

    The noise of the Gram matrix acts on the distance of the truth from the models at which
    gradients were released. This distance may be large although the fit is good: in directions that
    the records hardly show, the model is arbitrary. An eigenvalue of the Gram matrix that is not
    larger than its noise counts as 0, and larger ones are lowered a little.
    """
    lengths, axes = np.linalg.eigh(e.metric)
    lengths = np.maximum(lengths, _ROUNDING * lengths[-1])
    unwhiten, whiten = axes * np.sqrt(lengths), axes / np.sqrt(lengths)
    values, vectors = np.linalg.eigh(whiten.T @ e.gram @ whiten)
    noise = triangle_noise(e.gram_std, len(values))
    seen = np.where(values > noise, values - noise**2 / np.maximum(values, noise), 0.0)
    left = unwhiten @ vectors
    gram = (left * seen) @ left.T
    inverse: Floats = np.asarray(np.linalg.inv(noise_covariance(e, theta)), np.float64)
    damping = _DAMPING * e.gram_std**2 / 2 * float(np.sum(inverse * e.metric))
    return Precision(gram @ inverse @ gram, damping * e.metric)


def select(
    target: NormalEquations, sources: Mapping[int, NormalEquations], *, allowance: float = 0.0
) -> tuple[list[int], dict[int, float]]:
    """Return the keys of the informative sources, and the misfit of each source with the target.

    Sources are tested in order of their misfit, smallest first. A source must agree with the
    target, and also with the target and the sources accepted so far together. Misfits are relative
    to the largest one that is accepted.
    """
    limit = float(chi2.ppf(_REFUSED, len(target.model)))
    misfits = {
        k: misfit([target, source], allowance=allowance) / limit for k, source in sources.items()
    }
    known, found = [target], []
    for k in sorted(misfits, key=misfits.__getitem__):
        together = [*known, sources[k]]
        added = misfit(together, allowance=allowance) - misfit(known)
        if misfits[k] <= 1 and added <= limit:
            known, found = together, [*found, k]
    return sorted(found), misfits


def misfit(equations: Many[NormalEquations], *, allowance: float = 0.0) -> float:
    """Return how badly one linear model explains several data sets, compared with their noise.

    At a common true theta, the residuals r of the equations of each data set are noise of known
    covariance C. So J, the sum of r' C^-1 r at its minimum over theta, is chi-square (Hansen's test
    of overidentifying restrictions, 1982), and one data set more adds d + 1 degrees of freedom for
    d features. A difference of the models by a distance of `allowance` is permitted: J is lowered
    by as much as that can explain.
    """
    theta: Floats = np.mean([e.model for e in equations], axis=0)
    for _ in range(_ROUNDS):  # the covariance depends on theta
        normal, pull = np.eye(len(theta)) / _WIDE, np.zeros_like(theta)
        for e in equations:
            weighted = e.gram @ np.linalg.inv(noise_covariance(e, theta))
            normal += weighted @ e.gram
            pull += weighted @ (e.gram @ e.model - e.gradient)
        theta = np.asarray(np.linalg.solve(normal, pull), np.float64)
    total = 0.0
    for e in equations:
        rest = e.gram @ (e.model - theta) - e.gradient
        total += float(rest @ np.linalg.solve(noise_covariance(e, theta), rest))
    reach = np.linalg.eigvalsh(precision(equations[-1], theta).known)[-1]
    return max(0.0, math.sqrt(max(total, 0.0)) - allowance * math.sqrt(max(float(reach), 0.0))) ** 2


def correct(
    difference: Floats, precision: Floats, scale: float, *, q: int, penalty: float | None
) -> Floats:
    """Return the part of the measured `difference` of two models that is not noise.

    It minimizes half of the squared distance to `difference`, weighted by the `precision` of its
    entries, plus a penalty. A `penalty` that the user gives is multiplied by 1 / `scale`. The
    default for q = 2 is that of a normal prior, whose variance is estimated from the excess of the
    difference over its noise; for q = 1 it is sqrt(2 log d) standard deviations of each of the d
    coefficients.
    """
    d = len(difference)
    units = np.ones(d)
    if penalty is not None:
        chosen = Penalty(l1=penalty / scale) if q == 1 else Penalty(l2=2 * penalty / scale)
    elif q == 1:
        units = np.sqrt(np.maximum(np.diag(precision), 1e-12))
        chosen = Penalty(l1=math.sqrt(2 * math.log(max(d, 2))))
    else:
        excess = float(difference @ precision @ difference) - d
        if excess <= 0:
            return np.zeros(d)
        chosen = Penalty(l2=float(np.trace(precision)) / excess)
    hessian = precision / np.outer(units, units)
    start = np.zeros(d)
    return chosen.minimize(hessian, hessian @ (difference * units), 0, start) / units


def _invert(matrix: Floats) -> Floats:
    """Return the pseudo-inverse of a symmetric matrix without negative eigenvalues."""
    return np.asarray(np.linalg.pinv(matrix, rcond=_ROUNDING, hermitian=True), np.float64)


def _release(
    data: Many[tuple[NDArray[np.floating], Floats]],
    plans: Many[DataSetPlan],
    box: Box,
    rng: Rng,
    *,
    is_exact: bool,
) -> tuple[NDArray[np.intp] | slice, list[linear.PointFit | NewtonFit]]:
    """Screen features if planned, then return the kept features and the fit of each data set.

    `data` and `plans` list the target first; `is_exact` says that the plans hold the numbers of
    rows, which are public (see `newton.fit_newton`). Each source has its own stream of noise, so
    that the noise of the target is that of `LinearRegression`.
    """
    n_sources = len(data) - 1
    children = [rng] * n_sources if isinstance(rng, SecureGenerator) else rng.spawn(n_sources)
    triples = list(zip(data, plans, [rng, *children], strict=True))
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
    fits = []
    for (X, y), plan, stream in triples:
        rows = PrivateRows(X[:, features], inner, row_norm=plan.fit.row_norm)
        fit = linear.fit(rows, y, plan.fit, n_records=plan.n_records, rng=stream, is_exact=is_exact)
        fits.append(fit)
    return features, fits


def _checked_source(
    k: int, source: Source, n_features: int, names: NDArray[Any] | None, least: int
) -> tuple[NDArray[np.floating], NDArray[Any]]:
    """Return the private table X and targets y of source number `k`, as checked arrays.

    Raise if X has other features than the target data set (`n_features`, and `names` if known), or
    fewer than `least` rows.
    """
    try:
        dtype: Any = (np.float64, np.float32)  # Any: annotated as str in scikit-learn
        X, y = check_X_y(*source, dtype=dtype, y_numeric=True, ensure_min_samples=least)
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
