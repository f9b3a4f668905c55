"""Private transfer regression, in the manner of scikit-learn; `pooling` has the method."""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import Tags, check_X_y
from sklearn.utils.validation import check_is_fitted

from tacit._check import non_negative, positive, whole
from tacit.accounting import GDP
from tacit.events import Event, Relation, Sequence
from tacit.mechanisms import Rng, SecureGenerator
from tacit.regression import _base, pooling
from tacit.regression._base import Bounds, Box, Floats, Pays
from tacit.regression.pooling import DataSetPlan, Summary
from tacit.regression.statistics import PrivateRows

Source = tuple[ArrayLike, ArrayLike]


class TransferRegression(RegressorMixin, BaseEstimator):
    """A linear model of one data set, learned with the help of others, all of them private.

    Guarantee: each data set's releases are (`epsilon`, `delta`)-DP under `relation` towards
    everyone. If the data sets hold different people (`disjoint=True`), a person is in one of them
    and the whole is as private as the costliest data set; if they may share people, the costs add
    up, and `event_` is their sequence. Which sources were used, the pooled fit and the correction
    are post-processing.

    Parameters
    ----------
    epsilon, delta
        Budget of the target data set, and of each source unless `source_epsilon` (one number, or
        one per source) says otherwise.
    bounds, target_bounds
        `Bounds(lower, upper)` or a pair, common to all data sets.
    h, q
        A source is informative if its coefficients are within `h` of the target's in the q-norm,
        1 or 2; None keeps those that agree with the target as far as noise lets one tell. `q` is
        also the norm of the penalty: 1 gives sparse models, 2 shrinks collinear features together.
    max_features
        With more features than this, each data set first releases noisy correlations, and only
        that many features enter the model.
    disjoint
        Whether no person is in two data sets. With a `ledger`, each data set is then one of its
        partitions: parallel composition. That of the target pays as much as the costliest.
    ledger
        A `tacit.Ledger` that is asked to pay for all data sets; or, for the sources, pass their own
        to `fit`.
    random_state
        A seed makes the noise reproducible, and so removable by who knows it: for tests only. So
        does a numpy Generator: `clone` copies it, and clones that share noise cancel it.

    Attributes
    ----------
    coef_, intercept_
        The released model.
    informative_
        Numbers of the sources that were used, from 0.
    events_, event_
        What each data set paid (target first), and what the whole cost.

    Examples
    --------
    The target is known only near 0; two other regions say how the line goes on.

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

    coef_: Floats
    intercept_: float
    informative_: list[int]
    event_: Event
    events_: tuple[Event, ...]

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-6,
        source_epsilon: float | Many[float] | None = None,
        bounds: Bounds | tuple[Any, Any] | None = None,
        target_bounds: Bounds | tuple[Any, Any] | None = None,
        h: float | None = None,
        q: int = 2,
        max_features: int = 32,
        disjoint: bool = True,
        relation: Relation | str = "add_remove",
        ledger: Pays | None = None,
        random_state: Any = None,  # Any: what scikit-learn takes for a seed
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.source_epsilon = source_epsilon
        self.bounds = bounds
        self.target_bounds = target_bounds
        self.h = h
        self.q = q
        self.max_features = max_features
        self.disjoint = disjoint
        self.relation = relation
        self.ledger = ledger
        self.random_state = random_state

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sources: Iterable[Source] = (),
        source_ledgers: Many[Pays | None] | None = None,
    ) -> Self:
        """The private model of the target (`X`, `y`) and `sources`; pays before it releases.

        `source_ledgers`, one per source, pay instead of the target's `ledger`.
        """
        tables = [_base.check_table(self, X, y, y_numeric=True)]
        d = tables[0][0].shape[1]
        names = getattr(self, "feature_names_in_", None)
        tables += [_source(k, source, d, names) for k, source in enumerate(sources)]
        _base.check_width(d)
        box = _base.as_bounds(
            self.bounds, name="bounds", advice="Pass Bounds(lower, upper) for the features."
        ).box(d)
        target_box = _base.as_bounds(
            self.target_bounds,
            name="target_bounds",
            advice="Pass Bounds(lower, upper) for the target.",
        ).box(1)
        data = [_DataSet(table, target_box.target(targets)) for table, targets in tables]
        allowance = self._allowance(box, target_box)
        rng = _base.random_generator(self.random_state)
        plans = self._plans(d, len(tables) - 1, box.row_norm)

        self._pay(plans, source_ledgers)
        features, summaries = _release(data, plans, box, rng)
        fitted = pooling.transfer(summaries[0], summaries[1:], q=self.q, allowance=allowance)
        kept = box.take(features, box.row_norm)
        coef, intercept = kept.unscale(fitted.theta * target_box.half[0])
        self.coef_ = np.zeros(d)
        self.coef_[features] = coef
        self.intercept_ = float(intercept + target_box.center[0])
        self.informative_ = fitted.informative
        self.events_ = tuple(plan.event for plan in plans)
        self.event_ = self._whole(self.events_)
        return self

    def predict(self, X: ArrayLike) -> Floats:
        """Predicted targets of the rows of `X`."""
        check_is_fitted(self)
        table, _ = _base.check_table(self, X, reset=False)
        return table @ self.coef_ + self.intercept_

    def _allowance(self, box: Box, target_box: Box) -> float:
        """Squared distance in scaled coefficients that a source within `h` can be off by."""
        if self.q not in (1, 2):
            raise ValueError(f"q must be 1 or 2, got {self.q!r}.")
        if self.h is None:
            return 0.0
        # Scaled, w_j becomes w_j half_j / half_y; the 2-norm is at most the q-norm for q <= 2.
        return float(non_negative(h=self.h) * box.half.max() / target_box.half[0]) ** 2

    def _plans(self, n_features: int, n_sources: int, row_norm: float) -> list[DataSetPlan]:
        epsilon, delta = _base.check_budget(self.epsilon, self.delta, pure=False)
        relation = _base.check_relation(self.relation, self.ledger)
        n_kept = whole(max_features=self.max_features, least=1)
        given = epsilon if self.source_epsilon is None else self.source_epsilon
        each = list(given) if isinstance(given, Many) else [given] * n_sources
        if len(each) != n_sources:
            raise ValueError(
                f"source_epsilon must be one number or one per source: got {len(each)} "
                f"for {n_sources} sources."
            )
        return [
            pooling.plan_data_set(
                n_features,
                row_norm=row_norm,
                n_kept=n_kept,
                epsilon=positive(epsilon=one),
                delta=delta,
                relation=relation,
            )
            for one in (epsilon, *each)
        ]

    def _pay(self, plans: Many[DataSetPlan], source_ledgers: Many[Pays | None] | None) -> None:
        """One entry per data set, all before the first release."""
        shared = source_ledgers is None
        ledgers = [self.ledger] * (len(plans) - 1) if shared else list(source_ledgers)
        if len(ledgers) != len(plans) - 1:
            raise ValueError(
                f"source_ledgers must be one per source: got {len(ledgers)} "
                f"for {len(plans) - 1} sources."
            )
        for ledger in ledgers:
            _base.check_relation(self.relation, ledger)
        apart = self.disjoint and shared and len(plans) > 1
        names = ["target", *(f"source {k}" for k in range(len(ledgers)))]
        events = [plan.event for plan in plans]
        if apart:
            # Partitions are named by place, and the next fit may put the same people in another.
            # The target's is in every fit: with the costliest event it bounds what anyone met.
            events[0] = self._whole(tuple(events))
        for name, ledger, event in zip(names, [self.ledger, *ledgers], events, strict=True):
            partition = name if apart else None
            _base.pay(ledger, event, note=f"TransferRegression, {name}", partition=partition)

    def _whole(self, events: tuple[Event, ...]) -> Event:
        """What a person may have met: the costliest data set, or all of them."""
        if not self.disjoint and len(events) > 1:
            return Sequence(events)
        relation = Relation(self.relation)
        return max(events, key=lambda event: GDP().mu(event, relation=relation))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        assert tags.regressor_tags is not None
        tags.regressor_tags.poor_score = True
        return tags


class _DataSet(NamedTuple):
    """One private data set; targets are scaled."""

    X: NDArray[np.floating]
    y: Floats


def _release(
    data: Many[_DataSet], plans: Many[DataSetPlan], box: Box, rng: Rng
) -> tuple[NDArray[np.intp], list[Summary]]:
    """Features kept, and the released moments of each data set.

    Each data set has a stream of noise of its own: that of the target does not depend on how many
    sources there are.
    """
    streams = [rng] * len(data) if isinstance(rng, SecureGenerator) else rng.spawn(len(data))
    triples = list(zip(data, plans, streams, strict=True))
    features = np.arange(len(box.half))
    if plans[0].screen is not None:
        screens = [
            pooling.release_screen(
                PrivateRows(one.X, box, row_norm=plan.screen_norm), one.y, plan, stream
            )
            for one, plan, stream in triples
        ]
        features = pooling.choose_features(screens, plans[0].n_kept)
        triples = [
            (_DataSet(one.X[:, features], one.y), plan, stream) for one, plan, stream in triples
        ]
    inner = box.take(features, plans[0].row_norm)
    return features, [
        pooling.release_moments(
            PrivateRows(one.X, inner, row_norm=plan.row_norm), one.y, plan, stream
        )
        for one, plan, stream in triples
    ]


def _source(
    k: int, source: Source, n_features: int, names: NDArray[Any] | None
) -> tuple[NDArray[np.floating], NDArray[Any]]:
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
