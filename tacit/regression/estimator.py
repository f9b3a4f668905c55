"""Common base of the private estimators: settings, checks, payment, and the division of a budget.

An estimator follows scikit-learn: the constructor only stores settings; `fit` checks them, makes a
*plan*, pays for the plan's event and only then releases values. A plan is made from public facts
alone (number of features, declared number of records, budget, relation). It holds the mechanisms,
so the event that is paid and the noise that is drawn come from one object.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from tacit._arrays import Floats
from tacit._check import in_open_unit, positive, whole
from tacit.accounting import GDP, calibrate
from tacit.errors import UnsupportedEvent, WeakGuarantee
from tacit.events import Event, Gaussian, Relation
from tacit.ledger import Ledger, PlannedPayment, PlanningLedger, agreed_relation
from tacit.mechanisms import GaussianMechanism, Rng, generator
from tacit.regression.bounds import Box, DeclaredBounds, as_bounds
from tacit.regression.ledger_file import LedgerFile
from tacit.regression.sklearn_callers import refuse_learning_steps, warn_of_repeated_fits

MAX_DENSE_FEATURES = 10_000
SLACK = 1 + 1e-9
"""Factor on every noise multiplier, so that rounding in a sum of prices cannot exceed a budget."""


class BudgetTerms(TypedDict):
    """The budget of one fit: keyword arguments that every function which plans a fit accepts."""

    epsilon: float
    delta: float
    relation: Relation


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateEstimator(BaseEstimator):
    """Base class of the private estimators, with the settings that they share.

    Guarantee: the fitted model is (`epsilon`, `delta`)-DP under `relation`, for any data, provided
    that no setting depends on the private values.

    Parameters
    ----------
    bounds, target_bounds
        Declared ranges of the features and of a numeric target: `Bounds(lower, upper)` or a pair
        (lower, upper). Values outside are clipped.
    n_records, classes
        Public number of records, and public list of the labels that may occur. None takes the
        number of rows or the labels found in `y`, which are then assumed to be public.
    relation
        Which data sets are neighbors: `"add_remove"` or `"replace_one"`, for example.
    ledger
        A `tacit.Ledger` that pays before anything is released. Without one, `event_` must be
        accounted for by the caller.
    clip
        Whether predictions clip the features to `bounds` first, as `fit` does. Without clipping,
        one value far outside of the bounds can move a prediction without limit.
    random_state
        None draws noise from fresh entropy. Use a seed or a numpy Generator for tests only: who
        knows the seed can remove the noise, and `clone` copies a Generator, so that two models have
        the same noise and reveal the difference of their exact values.

    Attributes
    ----------
    event_
        The event of the fit, which `tacit.epsilon` prices.
    """

    epsilon: float = 1.0
    delta: float | None = 1e-6
    bounds: DeclaredBounds = None
    clip: bool = True
    relation: Relation | str = "add_remove"
    ledger: Ledger | LedgerFile | None = None
    random_state: Any = None  # Any: whatever scikit-learn accepts as a seed
    event_: Event = field(init=False)

    def _fit_table(
        self, X: ArrayLike, y: ArrayLike, *, y_numeric: bool = False, accept_sparse: bool = False
    ) -> tuple[Any, NDArray[Any]]:  # Any: an array of floats, or sparse rows where accepted
        """Return the private training data as checked arrays; store the number of features.

        If the public number of records is declared, the table may have no rows: all of them may
        have been left out, and an error would reveal that.
        """
        refuse_learning_steps()
        declared = getattr(self, "n_records", None)
        least = 1 if declared is None else 0
        table, targets = _validated(
            self, X, y=y, y_numeric=y_numeric, accept_sparse=accept_sparse, ensure_min_samples=least
        )
        n_records = table.shape[0] if declared is None else declared  # public: see `public_size`
        WeakGuarantee.issue(epsilon=self.epsilon, delta=self.delta, n_records=n_records)
        if not accept_sparse and table.shape[1] > MAX_DENSE_FEATURES:
            raise ValueError(
                f"X must have at most {MAX_DENSE_FEATURES} features for dense statistics, "
                f"got {table.shape[1]}. Use tacit.regression.FrankWolfe for wide or sparse data."
            )
        return _as_array(table), as_numbers(targets, name="y") if y_numeric else np.asarray(targets)

    def _predict_table(self, X: ArrayLike, *, accept_sparse: bool = False) -> Any:  # Any: as above
        """Return `X` as a checked array with the features of the fitted table, clipped like it."""
        check_is_fitted(self)
        table = _as_array(_validated(self, X, reset=False, accept_sparse=accept_sparse))
        return self._box(table.shape[1]).clip(table) if self.clip else table

    def _box(self, n_features: int, *, is_centered: bool = True) -> Box:
        names = getattr(self, "feature_names_in_", None)  # set by scikit-learn for a data frame
        declared = as_bounds(self.bounds, name="bounds")
        return declared.box(n_features, names, is_centered=is_centered)

    def _terms(self, *, allow_pure: bool = False) -> BudgetTerms:
        """Return the checked budget; delta may be None or 0 (pure DP) only if `allow_pure`."""
        epsilon = positive(epsilon=self.epsilon)
        delta = 0.0
        is_pure = self.delta is None or (isinstance(self.delta, int | float) and self.delta == 0)
        if not (allow_pure and is_pure):
            advice = "Choose it well below 1 / number of records, such as 1e-6."
            delta = in_open_unit(delta=self.delta, advice=advice)
        return {"epsilon": epsilon, "delta": delta, "relation": self._relation(self.ledger)}

    def _relation(self, ledger: Ledger | LedgerFile | None) -> Relation:
        """Return the neighboring relation; raise if `ledger`, which pays, uses another relation."""
        return agreed_relation(Relation(self.relation), ledger and ledger.relation)

    def _pay(self, event: Event, detail: str, *, is_user: bool = False) -> None:
        """Spend `event` on the ledger, if there is one; call this before any release.

        `is_user` says that one record of each user was kept, so that the event protects a user.
        """
        if isinstance(self.ledger, Ledger | LedgerFile):
            self.ledger.require_unit(is_user=is_user)
        if self.ledger is not None:
            self.ledger.spend(event, note=f"{type(self).__name__}, {detail}")

    def _generator(self) -> Rng:
        seed = self.random_state
        if isinstance(seed, np.random.RandomState):
            seed = int(seed.randint(2**31 - 1))
        return generator(seed)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        return tags

    def __sklearn_clone__(self) -> Self:
        if self.ledger is None:
            warn_of_repeated_fits(self.epsilon, self.delta)
        return super().__sklearn_clone__()  # type: ignore[return-value]  # scikit-learn: no types

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle: a ledger becomes its path, into which the copy pays."""
        state: Any = super().__getstate__()  # Any: scikit-learn has no types
        if state.get("ledger") is not None:
            state = {**state, "ledger": LedgerFile.of(state["ledger"])}
        return state


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateRegressor(RegressorMixin, PrivateEstimator):
    """Base class of the linear models with one numeric target."""

    target_bounds: DeclaredBounds = None
    coef_: Floats = field(init=False)
    intercept_: float = field(init=False)

    def predict(self, X: ArrayLike) -> Floats:
        """Return the predicted target of each row of `X`."""
        return self._predict_table(X) @ self.coef_ + self.intercept_

    def _target_box(self, *, is_centered: bool = True) -> Box:
        return as_bounds(self.target_bounds, name="target_bounds").box(1, is_centered=is_centered)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        assert tags.regressor_tags is not None
        tags.regressor_tags.poor_score = True
        return tags


def planned_event(estimator: Any, fit: Callable[[Any], Any]) -> Event:
    """Return the event that `fit` would pay for, given a copy of the estimator.

    Nothing is paid or released. Raises what the fit would raise before its payment. Any: the
    estimators share no type.
    """
    ledger = PlanningLedger(relation=Relation(estimator.relation), unit="user")
    ledger.declare_one_record_each()  # so that it takes fits for records and fits for users
    copy = type(estimator)(**{**estimator.get_params(deep=False), "ledger": ledger})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fit itself will warn
        try:
            fit(copy)
        except PlannedPayment as planned:
            return planned.event
    raise UnsupportedEvent("the estimator pays nothing, so its price is not known.")


def public_size(n_records: int | None, n_rows: int) -> int:
    """Return the public number of records: `n_records` if declared, else the number of rows.

    A declared number is never compared with the rows: how many there are is private then. Records
    without a target may have been left out, for example.
    """
    return n_rows if n_records is None else whole(n_records=n_records, least=1)


def relative_weights(
    sample_weight: ArrayLike | None, max_weight: float | None, n_rows: int, *, is_possible: bool
) -> Floats | None:
    """Return private weights in [0, 1], relative to the declared largest weight, or None.

    `is_possible` says whether the method can use weights.
    """
    if sample_weight is None:
        return None
    if not is_possible:
        raise ValueError("This method has no weights. Use method='gradient' on a dense table.")
    if max_weight is None:
        raise ValueError(
            "max_weight must be declared for sample_weight, got None. It bounds what one "
            "record can change. Take it from public knowledge, such as the survey's design."
        )
    largest = positive(max_weight=max_weight)
    weights = as_numbers(sample_weight, name="sample_weight")
    if weights.shape != (n_rows,):
        raise ValueError(f"sample_weight must be of shape ({n_rows},), got {weights.shape}.")
    if not np.isfinite(weights).all():
        raise ValueError("sample_weight must be finite.")
    return np.clip(weights, 0.0, largest) / largest


def number_classes(
    labels: NDArray[Any], classes: Sequence[Any] | None
) -> tuple[NDArray[Any], Floats]:
    """Return the sorted public classes, and for each private label its index among the classes.

    `classes` is the list that the user declared. None takes the labels that occur in the data.
    """
    known = np.unique(labels if classes is None else np.asarray(classes))
    if known.dtype.kind == "f" and not (known == np.floor(known)).all():
        raise ValueError("Unknown label type: continuous. Labels must be classes, not quantities.")
    if len(known) < 2:
        raise ValueError(
            f"y must have at least two classes, got {len(known)} class. "
            "Declare classes=... if others may occur."
        )
    if len(known) == 2 and classes is None:
        return known, (labels == known[1]).astype(np.float64)
    numbers = np.searchsorted(known, labels)
    if (known[np.minimum(numbers, len(known) - 1)] != labels).any():
        raise ValueError("y holds labels that are not in classes. Declare all that may occur.")
    return known, numbers.astype(np.float64)


def gaussian_shares(
    shares: Sequence[float], replace_factors: Sequence[float], **budget: Unpack[BudgetTerms]
) -> tuple[float, ...]:
    """Return the noise multipliers of several Gaussian releases that together cost the budget.

    Gaussian releases compose exactly: with mu_i = 1 / noise_multiplier_i, all of them together are
    mu-GDP with mu^2 = sum mu_i^2 (Dong, Roth & Su 2022, Corollary 3.3). `shares` divide mu^2. A
    replaced record can change release i `replace_factors[i]` times as much as an added record, so
    under REPLACE_ONE the noise of release i is multiplied by that factor.
    """
    mu = 1 / gaussian_noise_multiplier(budget["epsilon"], budget["delta"])
    replaced = budget["relation"] is Relation.REPLACE_ONE
    total = math.fsum(shares)
    return tuple(
        (factor if replaced else 1.0) / (mu * math.sqrt(share / total))
        for share, factor in zip(shares, replace_factors, strict=True)
    )


def gaussian_mechanisms(
    *releases: tuple[float, float, int], **budget: Unpack[BudgetTerms]
) -> list[GaussianMechanism]:
    """Return mechanisms of sensitivity 1 whose releases together cost the budget.

    Each of `releases` is its share of the budget, its replace factor (see `gaussian_shares`), and
    how often the release is made.
    """
    shares, factors, repeats = zip(*releases, strict=True)
    return [
        GaussianMechanism(noise * math.sqrt(n), l2_sensitivity=1.0, replace_factor=factor)
        for noise, factor, n in zip(
            gaussian_shares(shares, factors, **budget), factors, repeats, strict=True
        )
    ]


@lru_cache(maxsize=64)
def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier at which a Gaussian release is (`epsilon`, `delta`)-DP.

    It is enlarged by the factor `SLACK`, so that releases which divide this budget cannot exceed it
    by rounding.
    """
    least = calibrate(Gaussian, epsilon=epsilon, delta=delta, accountant=GDP(), relative=SLACK - 1)
    return SLACK * least


def as_numbers(values: ArrayLike, *, name: str) -> Floats:
    """Return private values as float64; the error for text does not quote it."""
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must hold numbers only. Encode text first.") from None


def _validated(
    estimator: PrivateEstimator, X: ArrayLike, *, accept_sparse: bool, **options: Any
) -> Any:  # Any: options and results of scikit-learn, which has no types for them
    """Return the tables checked by scikit-learn's `validate_data`; float64 arrays are not copied.

    Shape, type and finiteness are public schema and may be checked. scikit-learn quotes data in
    some of its errors. Those errors are replaced, so that no error shows a private value.
    """
    options["accept_sparse"] = "csr" if accept_sparse else False
    options["dtype"] = (np.float64, np.float32)
    try:
        return validate_data(estimator, X, **options)  # type: ignore[arg-type]  # annotated as str
    except ValueError as error:
        message = str(error)
        if "could not convert" in message:
            raise ValueError("X and y must hold numbers only. Encode text first.") from None
        if "array=" in message:
            rule = message.partition(":\narray=")[0]
            raise ValueError(f"{rule}. Reshape your data to one row per record.") from None
        if "contains NaN" in message or "contains infinity" in message:
            what = message.partition("\n")[0].rstrip(".")
            raise ValueError(
                f"{what}. Replace missing values by a public constant, or declare the table by a "
                "tacit.datasets.Schema; an imputer that learns from the table is not private."
            ) from None
        if "Complex data" in message:
            raise ValueError("Complex data not supported. Pass real numbers.") from None
        raise error from None  # the error that caused it may quote data


def _as_array(table: Any) -> Any:  # Any: an array, a memory map or sparse rows
    return table if issparse(table) else np.asarray(table)
