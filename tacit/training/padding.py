"""The sizes to which microbatches are padded, so that a few compiled graphs serve every lot.

A Poisson lot of 32 expected records has 26 to 38 in two of three steps. Padded to one size that is
rarely exceeded, each record drawn costs the work of 1.4 rows. With two sizes, a large one a little
below the expected lot and a small one of about half a standard deviation, a lot is the large
microbatch and some small ones, and the work is that of 1.04 rows for each record.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

# Candidates for the large size, in deviations from the expected lot, and for the small size.
_LARGE = tuple(np.arange(-2.0, 3.01, 0.25))
_SMALL = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4)
_REACH = 5.0  # deviations of a lot's size that the choice takes into account
_WASTE = 1.07  # rows computed for each record drawn, at most, where some sizes allow it
_SECOND_GRAPH = 1.02  # a second size must save this much, since it takes another compilation


@dataclass(frozen=True)
class Padding:
    """Sizes of padded microbatches, the larger one first, and how lots are covered by them.

    Attributes
    ----------
    sizes
        One or two numbers of rows.
    overhead
        What a microbatch costs beside its rows, in rows. A tenth of the expected lot is a fair
        guess for what a GPU is not filled by.

    Examples
    --------
    >>> Padding((28, 4), overhead=0.5).cover(33)
    [28, 4, 4]
    """

    sizes: tuple[int, ...]
    overhead: float = 0.0

    def cover(self, n: int) -> list[int]:
        """Return the sizes of the microbatches for `n` records, at the least cost."""
        large, small = self.sizes[0], self.sizes[-1]
        whole = n // large
        rest = -(-(n - whole * large) // small)
        is_one_more_cheaper = rest * (small + self.overhead) >= large + self.overhead
        if is_one_more_cheaper and n > whole * large:
            return [large] * (whole + 1)
        return [large] * whole + [small] * rest

    def within(self, limit: int) -> "Padding":
        """Return the padding with microbatches of at most `limit` rows."""
        if self.sizes[0] <= limit:
            return self
        return replace(self, sizes=(limit, *(size for size in self.sizes[1:] if size < limit)))


def choose_padding(
    expected: float, deviation: float, *, limit: int, overhead: float, most_sizes: int = 2
) -> Padding:
    """Return the padding whose expected cost is least, for lots of about `expected` records.

    Sizes that would pad more than 7 % are taken only where all do. `deviation` is the standard
    deviation of a lot's size, 0 if all have the same; `limit` is the most rows that fit in memory;
    `overhead` is in rows, as in `Padding`. Only public facts enter.
    """
    reach = np.arange(
        max(1, math.floor(expected - _REACH * deviation)),
        math.ceil(expected + _REACH * deviation) + 1,
    )
    chances = _chances(reach, expected, deviation)

    def cost(sizes: tuple[int, ...]) -> tuple[bool, float]:
        rows, microbatches = _rows_and_microbatches(reach, Padding(sizes, overhead))
        total = float(chances @ (rows + overhead * microbatches))
        is_wasteful = float(chances @ rows) > _WASTE * expected
        return is_wasteful, total * _SECOND_GRAPH ** (len(sizes) - 1)

    return Padding(min(_candidates(expected, deviation, limit, most_sizes), key=cost), overhead)


def _chances(sizes: NDArray[np.int64], expected: float, deviation: float) -> NDArray[np.float64]:
    """Return the chances of a lot's sizes, by the normal approximation."""
    if deviation == 0:
        return np.full(len(sizes), 1 / len(sizes))
    weights = np.exp(-0.5 * ((sizes - expected) / deviation) ** 2)
    return weights / weights.sum()


def _rows_and_microbatches(
    n: NDArray[np.int64], padding: Padding
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows computed and the number of microbatches of `Padding.cover`, for many lots."""
    large, small, overhead = padding.sizes[0], padding.sizes[-1], padding.overhead
    whole, rest = np.divmod(n, large)
    pieces = -(-rest // small)
    is_one_more = (pieces * (small + overhead) >= large + overhead) & (rest > 0)
    rows = whole * large + np.where(is_one_more, large, pieces * small)
    return rows, whole + np.where(is_one_more, 1, pieces)


def _candidates(
    expected: float, deviation: float, limit: int, most_sizes: int
) -> list[tuple[int, ...]]:
    """Return the sizes to choose from: parts of a usual lot, with and without a small size."""
    found = {(limit,)} if expected >= limit else set()
    for factor in _LARGE if deviation else (0.0,):
        usual = max(1.0, expected + factor * deviation)
        least = math.ceil(usual / limit)
        for parts in (least, least + 1):
            large = min(limit, _rounded(usual / parts) if deviation else math.ceil(usual / parts))
            found.add((large,))
            if most_sizes > 1 and deviation:
                smaller = {_rounded(share * deviation) for share in _SMALL}
                found |= {(large, small) for small in smaller if small < large}
    return sorted(found)


def _rounded(rows: float) -> int:
    """Return a number of rows, rounded up to a multiple that suits the hardware."""
    multiple = 8 if rows >= 64 else 4 if rows >= 6 else 1
    return multiple * math.ceil(rows / multiple)
