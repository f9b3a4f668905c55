"""Coins whose probability of heads is an exact multiple of 2^-53.

A generator draws `random()` as a multiple of 2^-53, so "random() < heads" happens with probability
`heads` exactly when `heads` is such a multiple too. Every randomizer of `tacit.local` draws from
such coins and from uniform whole numbers only. Its law is then a list of fractions, and the
largest ratio between two of them is compared with e^epsilon without any rounding.
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.mechanisms import Rng

_UNITS = 2**53


def exp_below(epsilon: float) -> Fraction:
    """Return a fraction that is at most e^epsilon, with relative error at most 10^-15.

    >>> 0 <= math.e - float(exp_below(1.0)) < 1e-14
    True
    """
    # The exponential of the C library is off by less than one unit in the last place, 2^-52.
    return Fraction(math.exp(epsilon)) * (1 - Fraction(1, 2**50))


def round_down(probability: Fraction) -> Fraction:
    """Return the largest multiple of 2^-53 that is at most `probability`."""
    return Fraction(math.floor(probability * _UNITS), _UNITS)


def round_up(probability: Fraction) -> Fraction:
    """Return the smallest multiple of 2^-53 that is at least `probability`."""
    return Fraction(math.ceil(probability * _UNITS), _UNITS)


def flip(heads: Fraction, rng: Rng, size: int | tuple[int, ...]) -> NDArray[np.bool_]:
    """Draw coins that show heads (True) with probability exactly `heads`, a multiple of 2^-53."""
    return np.asarray(rng.random(size) < float(heads))


def subset(rng: Rng, n_draws: int, n_items: int, sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Draw for each row a uniformly random subset of `n_items` items, with `sizes[row]` members.

    This is Floyd's algorithm (Bentley & Floyd 1987), run for all rows at the same time.

    Returns
    -------
    array of bool, shape (n_draws, n_items)
        True where the item belongs to the subset of the row.
    """
    chosen = np.zeros((n_draws, n_items), dtype=bool)
    rows = np.arange(n_draws)
    for last in range(n_items - int(sizes.max(initial=0)), n_items):
        drawn = rng.integers(0, last + 1, size=n_draws)
        taken = chosen[rows, drawn]
        # A row whose subset is smaller than the largest one starts later.
        active = last >= n_items - sizes
        chosen[rows[active], np.where(taken, last, drawn)[active]] = True
    return chosen


def whole_numbers(
    values: Any, n_options: int, name: str = "values", row: int | None = None
) -> NDArray[np.int64]:
    """Return `values` as an array of whole numbers from 0 to `n_options` - 1, or raise.

    The error message calls them `name`. It contains no value, because values are private, and no
    data type of texts, because that type contains their length.

    Parameters
    ----------
    row
        Required length of each row of a two-dimensional array; 0 requires a vector, None accepts
        any shape.
    """
    found = np.asarray(values)
    if not np.issubdtype(found.dtype, np.integer):
        raise TypeError(f"{name} must be whole numbers. Encode the options as 0, 1, 2, ...")
    if row == 0 and found.ndim != 1:
        raise ValueError(f"{name} must be a vector, one whole number per person.")
    if row and (found.ndim != 2 or found.shape[1] != row):
        raise ValueError(f"{name} must be rows of {row} whole numbers, one row per person.")
    if found.size and (found.min() < 0 or found.max() >= n_options):
        raise ValueError(f"{name} must be whole numbers from 0 to {n_options - 1}.")
    return found.astype(np.int64)


def real_numbers(values: Any, name: str = "values") -> NDArray[np.float64]:
    """Return `values` as an array of floats, or raise an error that shows no private value."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        pass  # not chained: the message of numpy quotes the value
    raise TypeError(f"{name} must be numbers, in an array of regular shape.")
