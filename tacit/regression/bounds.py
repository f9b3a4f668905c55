"""Declared bounds of features and targets, and the scaling to [-1, 1] that they define.

Bounds are public: they come from the user and never from the data. Private values outside are
clipped, so that the contribution of one record has a known limit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit._arrays import Floats
from tacit._check import positive

Bound: TypeAlias = float | Sequence[float]
ROW_SHARE = 0.4
"""Share of the largest possible squared norm of a scaled row that the Gaussian methods keep. For
comparison, a feature spread evenly over its bounds has mean square 1/3."""


@dataclass(frozen=True)
class Bounds:
    """Declared range of each feature, or of the target: public, and never learned from the data.

    `lower` and `upper` are one number for all features or one number per feature. Values outside
    are clipped, and the range is scaled to [-1, 1].

    `norm` suits indicators and counts. With it, zero stays zero: each feature is divided by its
    largest magnitude, and `norm` declares the largest L2 norm of a row after that; longer rows get
    less weight. For example, twelve one-hot encoded questions have norm sqrt(12), no matter how
    many columns they fill.

    >>> Bounds(0, 100)
    Bounds(lower=0.0, upper=100.0, norm=None)
    >>> Bounds([0, -1], [100, 1]).box(2).half.tolist()
    [50.0, 1.0]
    """

    lower: Bound
    upper: Bound
    norm: float | None = None

    def __post_init__(self) -> None:
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

    def box(self, n_features: int) -> "Box":
        """Return the bounds as arrays with one entry per feature."""
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


DeclaredBounds: TypeAlias = Bounds | tuple[Any, Any] | None
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

    def take(self, features: NDArray[np.intp] | slice) -> "Box":
        """Return the bounds of the selected features; `row_norm` and `full_norm` are unchanged."""
        names = ("lower", "upper", "center", "half")
        return replace(self, **{name: getattr(self, name)[features] for name in names})

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


def as_bounds(declared: object, *, name: str) -> Bounds:
    """Return the user's argument `declared`, `Bounds` or a pair (lower, upper), as `Bounds`.

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
    if isinstance(declared, tuple | list) and len(declared) == 2:
        return Bounds(declared[0], declared[1])
    raise TypeError(f"{name} must be tacit.regression.Bounds(lower, upper) or a pair.")


def _plain(bound: ArrayLike) -> Bound:
    """Return `bound` as a float or a tuple of floats, so that `Bounds` can be hashed."""
    array = np.asarray(bound, np.float64)
    if array.ndim > 1:
        raise ValueError(f"bounds must be numbers or one-dimensional, got {array.ndim} dimensions.")
    return float(array) if array.ndim == 0 else tuple(array.tolist())
