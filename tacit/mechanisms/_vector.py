"""What every mechanism does to its input: check the public schema, never the private values."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def real_array(value: ArrayLike, *, ndim: int | None = None) -> NDArray[np.float64]:
    """`value` as finite float64; shape, type and finiteness are public, the numbers are not."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"value must be real numbers, got dtype {array.dtype}.")
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"value must have {ndim} dimension(s), got {array.ndim}.")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError("value must be finite. Clip or fill what is not before release.")
    return array


def centered_scores(scores: ArrayLike) -> NDArray[np.float64]:
    """`scores` as a vector of at least one option, less their maximum.

    A common shift changes no choice, and small numbers lose no noise to rounding.
    """
    array = real_array(scores, ndim=1)
    if not array.size:
        raise ValueError("scores must hold at least one option, got none.")
    with np.errstate(over="ignore"):
        return np.maximum(array - array.max(), -np.finfo(np.float64).max)


def integer_array(value: ArrayLike) -> NDArray[np.int64]:
    """`value` as int64, clipped to +-2^61 so that adding noise cannot overflow.

    Clipping moves no two values apart, so it raises no sensitivity; it does not raise an error,
    because whether it happened is private.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"value must be whole numbers, got dtype {array.dtype}.")
    if array.dtype.kind == "u":
        return np.minimum(array, array.dtype.type(min(2**61, np.iinfo(array.dtype).max))).astype(
            np.int64
        )
    return np.clip(array.astype(np.int64), -(2**61), 2**61)
