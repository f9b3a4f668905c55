"""What all private regressions share: declared bounds, checks, payment.

Nothing here touches private values except `Box.target`, which clips and scales them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from sklearn.utils.validation import validate_data

from tacit._check import in_open_unit, positive, whole
from tacit.accounting import GDP, calibrate
from tacit.events import Event, Gaussian, Relation
from tacit.mechanisms import Rng, SecureGenerator, generator
from tacit.sampling import Poisson

Floats = NDArray[np.float64]
Bound: TypeAlias = float | Sequence[float]

MAX_DENSE_FEATURES = 10_000
SLACK = 1 + 1e-9
"""Factor on every noise multiplier: rounding in a sum of prices must not pass the budget."""
ROW_SHARE = 0.4
"""Share of the largest possible squared length of a scaled row that the Gaussian methods keep: a
feature spread evenly over its bounds has mean square 1/3."""


class Pays(Protocol):
    """The part of `tacit.Ledger` that an estimator needs."""

    @property
    def relation(self) -> Relation:
        """Which data sets are neighbors."""
        ...

    def spend(
        self, event: Event, *, note: str = ..., partition: str | None = ...
    ) -> Any:  # Any: the entry is not used here
        """Pay, or raise `BudgetExceeded`."""
        ...


@dataclass(frozen=True)
class Bounds:
    """Declared range of each feature (or of the target): public, and never learned from the data.

    One number for all features or one per feature. Values outside are clipped to the bounds, and
    the range is taken to [-1, 1].

    With `norm`, which suits indicators and counts, zero stays zero instead: each feature is divided
    by its largest magnitude, and `norm` declares the L2 norm that a row then has at most; longer
    rows count for less. Twelve questions of any number of options each, one-hot, have norm
    sqrt(12) however many columns they fill.

    >>> Bounds(0, 100)
    Bounds(lower=0.0, upper=100.0, norm=None)
    >>> Bounds([0, -1], [100, 1]).box(2).half.tolist()
    [50.0, 1.0]
    """

    lower: Bound
    upper: Bound
    norm: float | None = None

    def __post_init__(self) -> None:
        lower, upper = _plain(self.lower), _plain(self.upper)
        object.__setattr__(self, "lower", lower)
        object.__setattr__(self, "upper", upper)
        low, high = np.broadcast_arrays(np.asarray(lower), np.asarray(upper))
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError("bounds must be finite.")
        if not (low < high).all():
            raise ValueError("bounds must have lower < upper for every feature. Drop constants.")
        if not (np.maximum(np.abs(low), np.abs(high)) < 1e150).all():
            raise ValueError("bounds must be below 1e150 in magnitude. Rescale that column first.")
        if not (high - low > 1e-150).all():
            raise ValueError("bounds must be more than 1e-150 apart. Rescale that column first.")
        # `PrivateRows.pull` subtracts the center from sums: rounding there must stay far below 1.
        if not (np.abs(high + low) <= 1e4 * (high - low)).all():
            raise ValueError(
                "bounds must not be narrower than 1e-4 of their distance from 0. "
                "Subtract a public constant from that column first."
            )
        if self.norm is not None:
            object.__setattr__(self, "norm", positive(norm=self.norm))

    def box(self, n_features: int) -> "Box":
        """The bounds as arrays, one entry per feature."""
        for name, bound in (("lower", self.lower), ("upper", self.upper)):
            if isinstance(bound, tuple) and len(bound) != n_features:
                raise ValueError(
                    f"bounds.{name} must be one number or one per feature: "
                    f"got {len(bound)} for {n_features} features."
                )
        lower = np.broadcast_to(np.asarray(self.lower, np.float64), n_features)
        upper = np.broadcast_to(np.asarray(self.upper, np.float64), n_features)
        if self.norm is None:
            center, half = (lower + upper) / 2, (upper - lower) / 2
            row_norm = math.sqrt(1 + ROW_SHARE * n_features)
            full_norm = math.sqrt(1 + n_features)
        else:
            center, half = np.zeros(n_features), np.maximum(np.abs(lower), np.abs(upper))
            row_norm = full_norm = math.sqrt(1 + min(self.norm**2, n_features))
        return Box(lower, upper, center, half, row_norm, full_norm)


@dataclass(frozen=True, eq=False)
class Box:
    """Bounds of features as arrays; x becomes (x - center) / half, in [-1, 1]."""

    lower: Floats
    upper: Floats
    center: Floats
    half: Floats
    row_norm: float
    """Largest norm of a record (1, x), scaled, that the Gaussian methods leave as it is."""
    full_norm: float
    """Norm that no record within the declared bounds passes."""

    def take(self, features: NDArray[np.intp], row_norm: float) -> "Box":
        """The bounds of some of the features, with the row norm that goes with them."""
        return Box(
            self.lower[features],
            self.upper[features],
            self.center[features],
            self.half[features],
            row_norm,
            self.full_norm,
        )

    def target(self, y: NDArray[np.floating]) -> Floats:
        """Private targets, clipped to these one-column bounds and scaled to [-1, 1]."""
        clipped = np.clip(np.asarray(y, np.float64), self.lower[0], self.upper[0])
        return (clipped - self.center[0]) / self.half[0]

    def unscale(self, theta: Floats) -> tuple[Floats, Floats]:
        """Coefficients and intercept on the original features; theta is (d + 1,) or (d + 1, k)."""
        coef = (theta[1:].T / self.half).T
        return coef, theta[0] - self.center @ coef


def as_bounds(bounds: object, *, name: str, advice: str) -> Bounds:
    """`bounds` as a `Bounds`; a pair (lower, upper) is accepted, a missing one is an error."""
    if isinstance(bounds, Bounds):
        return bounds
    if bounds is None:
        raise ValueError(
            f"{name} must be declared, got None. {advice} They must come from public knowledge "
            "(a codebook, a law, a unit), never from the data."
        )
    if isinstance(bounds, tuple | list) and len(bounds) == 2:
        return Bounds(bounds[0], bounds[1])
    raise TypeError(f"{name} must be tacit.regression.Bounds(lower, upper) or a pair.")


def check_table(
    estimator: Any,  # Any: scikit-learn's estimators have no common type
    X: ArrayLike,
    y: ArrayLike | None = None,
    *,
    y_numeric: bool = False,
    reset: bool = True,
    accept_sparse: bool = False,
) -> tuple[Any, NDArray[Any]]:  # Any: an array of floats, or scipy's sparse rows where accepted
    """`X` and `y` as finite arrays by scikit-learn's rules; float64 is not copied.

    Shape, type and finiteness are public schema. scikit-learn quotes data in some of its errors;
    those are replaced, so that no error shows a value.
    """
    options: dict[str, Any] = {"dtype": (np.float64, np.float32), "reset": reset}
    options["accept_sparse"] = "csr" if accept_sparse else False
    if reset:
        options |= {"y": y, "y_numeric": y_numeric}
    try:
        found = validate_data(estimator, X, **options)  # type: ignore[arg-type]  # annotated as str
    except ValueError as error:
        message = str(error)
        if "could not convert" in message:
            raise ValueError("X and y must hold numbers only. Encode text first.") from None
        if "array=" in message:
            rule = message.partition(":\narray=")[0]
            raise ValueError(f"{rule}. Reshape your data to one row per record.") from None
        if "Complex data" in message:
            raise ValueError("Complex data not supported. Pass real numbers.") from None
        raise error from None  # what it was raised from may quote data
    table, targets = found if reset else (found, np.empty(0))
    return table if issparse(table) else np.asarray(table), np.asarray(targets)


def public_size(n_records: int | None, n_rows: int) -> int:
    """The declared number of records, by default the number of rows, assumed public."""
    if n_records is None:
        return n_rows
    declared = whole(n_records=n_records, least=1)
    if not n_rows / 2 <= declared <= 2 * n_rows:
        raise ValueError(
            f"n_records must be within a factor of 2 of the rows given, got {declared}. "
            "Declare the public size of this table, or leave it None."
        )
    return declared


def check_width(n_features: int) -> None:
    """Dense statistics hold a (d + 1) x (d + 1) matrix: refuse widths that cannot fit."""
    if n_features > MAX_DENSE_FEATURES:
        raise ValueError(
            f"X must have at most {MAX_DENSE_FEATURES} features for dense statistics, "
            f"got {n_features}. Use tacit.regression.FrankWolfe for wide or sparse data."
        )


def check_budget(epsilon: object, delta: object, *, pure: bool) -> tuple[float, float]:
    """(epsilon, delta) as floats; delta may be 0 only where `pure` DP is possible."""
    checked = positive(epsilon=epsilon)
    if pure and isinstance(delta, int | float) and delta == 0:
        return checked, 0.0
    advice = "Choose it well below 1 / number of records."
    return checked, in_open_unit(delta=delta, advice=advice)


def one_of(options: Sequence[str], **named: object) -> None:
    """Refuse a named option that is not in the list."""
    ((name, value),) = named.items()
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(options)}, got {value!r}.")


def check_relation(relation: object, ledger: Pays | None) -> Relation:
    """The neighboring relation; a ledger must price by the same one."""
    try:
        checked = Relation(relation)  # type: ignore[arg-type]  # any value may come from a user
    except ValueError:
        names = ", ".join(str(member) for member in Relation)
        raise ValueError(f"relation must be one of {names}, got {relation!r}.") from None
    if ledger is not None and ledger.relation is not checked:
        raise ValueError(
            f"relation must be that of the ledger, {ledger.relation}, got {checked}. "
            "Pass relation=ledger.relation."
        )
    return checked


def pay(ledger: Pays | None, event: Event, *, note: str, partition: str | None = None) -> None:
    """Spend `event` before anything is released; without a ledger the caller keeps the count."""
    if ledger is not None:
        ledger.spend(event, note=note, partition=partition)


def random_generator(random_state: object) -> Rng:
    """The generator of an estimator's `random_state`: None draws fresh entropy from the system."""
    if isinstance(random_state, np.random.RandomState):
        random_state = int(random_state.randint(2**31 - 1))
    return generator(random_state)  # type: ignore[arg-type]  # checked there


def draw(rate: float, n_rows: int, rng: Rng) -> NDArray[np.int64]:
    """Private: rows of one Poisson draw at `rate`, from any kind of generator."""
    if isinstance(rng, SecureGenerator):
        return np.flatnonzero(rng.random(n_rows) < rate)
    return Poisson(rate).indices(n_rows, rng)


def gaussian_shares(
    epsilon: float,
    delta: float,
    *,
    shares: Sequence[float],
    replace_factors: Sequence[float],
    relation: Relation,
) -> tuple[float, ...]:
    """Noise multipliers of Gaussian releases that together cost exactly (`epsilon`, `delta`).

    Gaussian releases compose exactly: with mu_i = 1 / noise_multiplier_i the whole is mu-GDP with
    mu^2 = sum mu_i^2 (Dong, Roth & Su 2022, Corollary 3.3); `shares` divide mu^2. Under
    REPLACE_ONE a release moves `replace_factors[i]` times further and gets as much more noise.
    """
    mu = 1 / gaussian_noise_multiplier(epsilon, delta)
    replaced = relation is Relation.REPLACE_ONE
    total = math.fsum(shares)
    return tuple(
        (factor if replaced else 1.0) / (mu * math.sqrt(share / total))
        for share, factor in zip(shares, replace_factors, strict=True)
    )


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """Smallest multiplier of one Gaussian release that is (`epsilon`, `delta`)-DP.

    Larger by the factor `SLACK`, so that rounding cannot push parts of it past the budget.
    """
    least = calibrate(Gaussian, epsilon=epsilon, delta=delta, accountant=GDP(), relative=SLACK - 1)
    return SLACK * least


def _plain(bound: ArrayLike) -> Bound:
    """A float or a tuple of floats: hashable, and equal bounds compare equal."""
    array = np.asarray(bound, np.float64)
    if array.ndim > 1:
        raise ValueError(f"bounds must be numbers or one-dimensional, got {array.ndim} dimensions.")
    return float(array) if array.ndim == 0 else tuple(array.tolist())
