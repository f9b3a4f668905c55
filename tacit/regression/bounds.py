"""Declared bounds of features and targets, and the scaling to [-1, 1] that they define.

Bounds are public: they come from the user and never from the data. Private values outside are
clipped, so that the contribution of one record has a known limit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array, issparse

from tacit._arrays import Floats
from tacit._check import positive

Bound: TypeAlias = float | Sequence[float]
ROW_SHARE = 0.4
"""Share of the largest possible squared norm of a scaled row that the Gaussian methods keep. For
comparison, a feature spread evenly over its bounds has mean square 1/3."""


@dataclass(frozen=True)
class Bounds:
    """Declared range of each feature, or of the target: public, and never learned from the data.

    `lower` and `upper` are one number for all features or one number per feature. Instead of both,
    a dictionary gives the pair (lower, upper) of each feature by its name; the estimator is then
    fitted to a table with column names. Values outside are clipped, and the range is scaled to
    [-1, 1].

    `norm` suits indicators and counts. With it, zero stays zero: each feature is divided by its
    largest magnitude, and `norm` declares the largest L2 norm of a row after that; longer rows get
    less weight. For example, twelve one-hot encoded questions have norm sqrt(12), no matter how
    many columns they fill.

    `labels` names the features of a table without column names. `groups` lists the positions of the
    indicators that encode one column of categories, the reference category first: their sum is 1,
    so `summary` compares each category with the reference. `tacit.datasets.Schema` sets all three.

    >>> Bounds(0, 100)
    Bounds(lower=0.0, upper=100.0, norm=None)
    >>> Bounds([0, -1], [100, 1]).box(2).half.tolist()
    [50.0, 1.0]
    >>> Bounds({"age": (0, 100), "balance": (-1, 1)}).box(2, ["balance", "age"]).half.tolist()
    [1.0, 50.0]
    """

    lower: Bound | Mapping[str, Sequence[float]]
    upper: Bound | None = None
    norm: float | None = None
    labels: tuple[str, ...] = field(default=(), repr=False)
    groups: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    names: tuple[str, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.lower, Mapping):
            self._take_names(self.lower)
        if self.upper is None:
            raise TypeError("bounds must have lower and upper, or a pair for each feature by name.")
        assert not isinstance(self.lower, Mapping)  # names and numbers were taken apart
        object.__setattr__(self, "lower", _plain(self.lower))
        object.__setattr__(self, "upper", _plain(self.upper))
        low, high = np.broadcast_arrays(np.asarray(self.lower), np.asarray(self.upper))
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError("bounds must be finite.")
        if not (low < high).all():
            raise ValueError("bounds must have lower < upper for every feature. Drop constants.")
        if not (np.maximum(np.abs(low), np.abs(high)) < 1e150).all():
            raise ValueError("bounds must be below 1e150 in magnitude. Rescale that column first.")
        if not (high - low > 1e-150).all():
            raise ValueError("bounds must be more than 1e-150 apart. Rescale that column first.")
        # `PrivateRows.weighted_sum` subtracts the center from sums; its rounding must be harmless.
        if not (np.abs(high + low) <= 1e4 * (high - low)).all():
            raise ValueError(
                "bounds must not be narrower than 1e-4 of their distance from 0. "
                "Subtract a public constant from that column first."
            )
        if self.norm is not None:
            object.__setattr__(self, "norm", positive(norm=self.norm))
        object.__setattr__(self, "groups", tuple(tuple(map(int, group)) for group in self.groups))
        listed = [place for group in self.groups for place in group]
        if len(set(listed)) < len(listed) or min(listed, default=0) < 0:
            raise ValueError("groups must list positions of features, none of them twice.")

    def _take_names(self, pairs: Mapping[str, Sequence[float]]) -> None:
        if self.upper is not None or not pairs or any(len(pair) != 2 for pair in pairs.values()):
            raise ValueError("bounds by name must be {'age': (18, 93), ...}, without upper.")
        lower, upper = zip(*pairs.values(), strict=True)
        for name, value in (("names", tuple(pairs)), ("lower", lower), ("upper", upper)):
            object.__setattr__(self, name, value)

    def in_order(self, names: Sequence[str] | None) -> "Bounds":
        """Return these bounds with one entry for each of `names`, the features of a table."""
        if names is None:
            raise ValueError("bounds by name need a table with column names, such as a data frame.")
        listed = {str(name) for name in names}
        for here, there, where in ((names, self.names, "bounds"), (self.names, listed, "X")):
            for name in here:
                if name not in there:
                    raise ValueError(f"{where} must have an entry for the feature {str(name)!r}.")
        assert isinstance(self.lower, tuple)  # set by _take_names, like the next one
        assert isinstance(self.upper, tuple)
        places = [self.names.index(name) for name in names]
        lower, upper = ([bound[k] for k in places] for bound in (self.lower, self.upper))
        return Bounds(lower, upper, self.norm, groups=self.groups)

    def box(
        self, n_features: int, names: Sequence[str] | None = None, *, is_centered: bool = True
    ) -> "Box":
        """Return the bounds as arrays with one entry per feature; `names` are those of a table.

        Unless `is_centered`, zero stays zero, as with `norm`.
        """
        if self.names:
            return self.in_order(names).box(n_features, is_centered=is_centered)
        for name, bound in (("lower", self.lower), ("upper", self.upper)):
            if isinstance(bound, tuple) and len(bound) != n_features:
                raise ValueError(
                    f"bounds.{name} must be one number or one per feature: "
                    f"got {len(bound)} for {n_features} features."
                )
        lower = np.broadcast_to(np.asarray(self.lower, np.float64), n_features)
        upper = np.broadcast_to(np.asarray(self.upper, np.float64), n_features)
        if self.norm is None and is_centered:
            center, half = (lower + upper) / 2, (upper - lower) / 2
        else:
            center, half = np.zeros(n_features), np.maximum(np.abs(lower), np.abs(upper))
        if self.norm is None:
            row_norm = math.sqrt(1 + ROW_SHARE * n_features)
            full_norm = math.sqrt(1 + n_features)
        else:
            row_norm = full_norm = math.sqrt(1 + min(self.norm**2, n_features))
        last = max((place for group in self.groups for place in group), default=0)
        if last >= n_features or len(self.labels) not in (0, n_features):
            raise ValueError(f"bounds.labels and groups must be those of {n_features} features.")
        return Box(lower, upper, center, half, row_norm, full_norm, self.groups)


DeclaredBounds: TypeAlias = Bounds | tuple[Any, ...] | Mapping[str, Any] | None
"""What a user may pass as bounds. Any: a number or a list of numbers."""


@dataclass(frozen=True, eq=False)
class Box:
    """Declared bounds as arrays with one entry per feature, and the scaling that they define.

    A feature value x is clipped to [lower, upper] and scaled to (x - center) / half, in [-1, 1].
    """

    lower: Floats
    upper: Floats
    center: Floats
    half: Floats
    row_norm: float
    """Largest norm of a scaled record (1, x) that the Gaussian methods leave unchanged."""
    full_norm: float
    """Largest norm that a scaled record (1, x) within the declared bounds can have."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Positions of indicators that encode one column of categories, its reference first."""

    def undetermined(self) -> Floats:
        """Return the models (d + 1, k) that are 0 on every record, one for each of k groups.

        The indicators of a group sum to 1, so a constant can be moved between the group and the
        intercept.
        """
        models = np.zeros((len(self.half) + 1, len(self.groups)))
        for model, group in zip(models.T, map(list, self.groups), strict=True):
            model[1:][group] = self.half[group]
            model[0] = self.center[group].sum() - 1
        return models

    def take(self, features: NDArray[np.intp] | slice) -> "Box":
        """Return the bounds of the selected features without groups; norms are unchanged."""
        names = ("lower", "upper", "center", "half")
        return replace(self, groups=(), **{name: getattr(self, name)[features] for name in names})

    def clip(self, X: Any) -> Any:  # Any: an array, or sparse rows of scipy, as given
        """Return a copy of `X` with every value clipped to the bounds of its feature."""
        if not issparse(X):
            return np.clip(X, self.lower, self.upper)
        if (self.lower > 0).any() or (self.upper < 0).any():
            raise ValueError("bounds must include 0 for a sparse X, where most entries are 0.")
        clipped = csr_array(X, dtype=np.float64, copy=True)
        # Entries stored twice add up, so they must be summed before they are clipped.
        clipped.sum_duplicates()
        if not np.isfinite(clipped.data).all():
            raise ValueError("X must be finite where entries stored twice are added up.")
        features = clipped.indices
        np.clip(clipped.data, self.lower[features], self.upper[features], out=clipped.data)
        return clipped

    def scale_target(self, y: NDArray[np.floating]) -> Floats:
        """Return the private targets, clipped to these one-column bounds and scaled to [-1, 1]."""
        clipped = np.clip(np.asarray(y, np.float64), self.lower[0], self.upper[0])
        return (clipped - self.center[0]) / self.half[0]

    def unscale(self, theta: Floats, target: "Box | None" = None) -> tuple[Floats, Floats]:
        """Return the coefficients and the intercept of a fitted model in the user's units.

        `theta` is the model of the scaled data, intercept first: (d + 1,) for d features, or
        (d + 1, k) for k outputs. `target` holds the bounds that scaled the target; None if the
        target was not scaled.
        """
        if target is not None:
            theta = theta * target.half[0]
        coef = (theta[1:].T / self.half).T
        intercept = theta[0] - self.center @ coef
        return coef, intercept if target is None else intercept + target.center[0]

    def unscaling(self, target: "Box | None" = None) -> Floats:
        """Return the matrix of `unscale` for one output: (intercept, coefficients) from theta.

        The center of the target's bounds, which `unscale` adds to the intercept, is left out.
        """
        unit = 1.0 if target is None else float(target.half[0])
        matrix = np.diag(unit / np.append(1.0, self.half))
        matrix[0, 1:] = -unit * self.center / self.half
        return matrix


def as_bounds(declared: object, *, name: str) -> Bounds:
    """Return the user's argument `declared` as `Bounds`.

    It may be `Bounds`, a pair (lower, upper), a tuple of its arguments such as the `bounds` of a
    `tacit.datasets.Schema`, or a dictionary of pairs by name.
    None is an error that says what to pass. `name` is the argument's name in error messages.
    """
    if isinstance(declared, Bounds):
        return declared
    if declared is None:
        column = "target" if name == "target_bounds" else "features"
        raise ValueError(
            f"{name} must be declared, got None. Pass Bounds(lower, upper) for the {column}. They "
            "must come from public knowledge (a codebook, a law, a unit), never from the data."
        )
    if isinstance(declared, Mapping):
        return Bounds(declared)
    if isinstance(declared, tuple | list) and _may_be_pairs(declared):
        raise ValueError(
            f"{name} must be Bounds([lower, ...], [upper, ...]), or pairs by name such as "
            "{'age': (18, 93)}: a list of pairs could be read in two ways."
        )
    if isinstance(declared, tuple | list) and 2 <= len(declared) <= 5:
        return Bounds(*declared)
    raise TypeError(f"{name} must be tacit.regression.Bounds(lower, upper) or a pair.")


def _may_be_pairs(declared: Sequence[Any]) -> bool:
    """Return whether `declared` reads as a pair (lower, upper) for each feature."""
    if not all(isinstance(pair, Sequence | np.ndarray) and len(pair) == 2 for pair in declared):
        return False
    try:
        return all(float(lower) < float(upper) for lower, upper in declared)
    except (TypeError, ValueError):
        return False


def _plain(bound: ArrayLike) -> Bound:
    """Return `bound` as a float or a tuple of floats, so that `Bounds` can be hashed."""
    array = np.asarray(bound, np.float64)
    if array.ndim > 1:
        raise ValueError(f"bounds must be numbers or one-dimensional, got {array.ndim} dimensions.")
    return float(array) if array.ndim == 0 else tuple(array.tolist())
