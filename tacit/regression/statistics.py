"""Streamed statistics of private rows: Gram matrix, cross moments, weighted sums.

Every function here returns **private** values: sums over records, before any noise. They read the
table in blocks that fit in the processor's cache and never hold a second copy of it, so a table of
ten million rows (in memory or in a `numpy.memmap`) costs a fixed amount of extra memory.

A record is a row of features, clipped to declared bounds and scaled to [-1, 1], with a constant 1
in front. If `row_norm` is finite, a record longer than that is shrunk to it, together with its
target: least squares on such rows is weighted least squares, so the linear model that is right for
all records stays the answer while one record's contribution gets smaller.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tacit.regression._base import Box

Floats = NDArray[np.float64]

_BLOCK_BYTES = 1 << 20


class Moments(NamedTuple):
    """Private sums over records z = (1, x) and targets y."""

    gram: Floats
    """sum z z', (d + 1, d + 1)."""
    cross: Floats
    """sum y z, (d + 1,)."""
    square: float = 0.0
    """sum y^2."""


class PrivateRows:
    """Private rows of a table, clipped and scaled on the fly. Holds no copy of the table.

    `factors` is what each row is multiplied by to have a norm of at most `row_norm`. A block that
    already lies inside its bounds is read in place: clipping would not change it.
    """

    def __init__(
        self,
        X: NDArray[np.floating],
        box: Box,
        *,
        row_norm: float = np.inf,
        factors: Floats | None = None,
    ) -> None:
        self.X = X
        self.box = box
        self.row_norm = row_norm
        self.n_rows, self.n_features = X.shape
        self._size = max(64, _BLOCK_BYTES // (8 * (self.n_features + 1)))
        self._inside = np.zeros(-(-self.n_rows // self._size), np.bool_)
        self.factors = np.ones(self.n_rows) if factors is None else factors
        if factors is None:
            self._prepare()

    def moments(self, y: Floats) -> Moments:
        """Private Gram matrix and cross moments of the shrunk rows; `y` is already in [-1, 1]."""
        gram, cross, square = self._empty_gram(), np.zeros(self.n_features + 1), 0.0
        for span, rows in self._shrunk():
            factors = self.factors[span]
            target = factors * y[span]
            _add_gram(gram, rows, factors)
            cross[0] += factors @ target
            cross[1:] += rows.T @ target
            square += target @ target
        return Moments(gram, cross, float(square))

    def gram(self, chosen: NDArray[np.int64] | None = None) -> Floats:
        """Private Gram matrix of the shrunk rows, or of the `chosen` ones among them."""
        total = self._empty_gram()
        if chosen is not None:
            for start in range(0, len(chosen), self._size):
                total += self.take(chosen[start : start + self._size]).gram()
            return total
        for span, rows in self._shrunk():
            _add_gram(total, rows, self.factors[span])
        return total

    def pull(self, weights: Floats, push: Callable[[slice, Floats], Floats]) -> Floats:
        """Private sum over records of push(margin) z, where margin = weights' z.

        `weights` is (d + 1,) or (d + 1, k); `push` maps a span of rows and their margins, (m,) or
        (m, k), to multipliers of the same shape. Scaling is folded into the weights on the way in
        and into the sum on the way out, so that the table itself is read as it is.
        """
        center, half = self.box.center, self.box.half
        inner = (weights[1:].T / half).T
        offset = weights[0] - center @ inner
        total, count = np.zeros_like(inner), np.zeros_like(weights[0], dtype=np.float64)
        for span, rows in self._clipped():
            multipliers = push(span, rows @ inner + offset)
            total += rows.T @ multipliers
            count += multipliers.sum(axis=0)
        return np.concatenate(
            [count[None], ((total.T - np.multiply.outer(count, center)) / half).T]
        )

    def take(self, indices: NDArray[np.int64]) -> "PrivateRows":
        """Private rows of one draw; copies those rows."""
        return PrivateRows(
            self.X[indices], self.box, row_norm=self.row_norm, factors=self.factors[indices]
        )

    def scaled(self) -> Iterator[tuple[slice, Floats]]:
        """Spans of rows with their private (m, d) features; each overwrites the one before."""
        buffer = np.empty((self._size, self.n_features))
        inverse = 1 / self.box.half
        lower, upper = self._scaled_bounds()
        for index, span in enumerate(self._spans()):
            rows = buffer[: span.stop - span.start]
            with np.errstate(over="ignore"):  # a warning would tell of a record far out of bounds
                np.subtract(self.X[span], self.box.center, out=rows)
                rows *= inverse
            if not self._inside[index]:
                np.clip(rows, lower, upper, out=rows)
            yield span, rows

    def _shrunk(self) -> Iterator[tuple[slice, Floats]]:
        for span, rows in self.scaled():
            rows *= self.factors[span, None]
            yield span, rows

    def _clipped(self) -> Iterator[tuple[slice, NDArray[np.floating]]]:
        buffer = np.empty((self._size, self.n_features))
        for index, span in enumerate(self._spans()):
            rows = self.X[span]
            if not (self._inside[index] and rows.dtype == np.float64):
                rows = np.clip(rows, self.box.lower, self.box.upper, out=buffer[: len(rows)])
            yield span, rows

    def _prepare(self) -> None:
        """Find the blocks that need no clipping, and how much each row is to be shrunk."""
        self._inside[:] = True  # look at the rows as they are
        lower, upper = self._scaled_bounds()
        for index, (span, rows) in enumerate(self.scaled()):
            self._inside[index] = rows.min() >= lower.max() and rows.max() <= upper.min()
            if not self._inside[index]:
                np.clip(rows, lower, upper, out=rows)
            if np.isfinite(self.row_norm):
                norms = np.sqrt(1.0 + np.einsum("ij,ij->i", rows, rows))
                self.factors[span] = np.minimum(1.0, self.row_norm / norms)

    def _scaled_bounds(self) -> tuple[Floats, Floats]:
        center, inverse = self.box.center, 1 / self.box.half
        return (self.box.lower - center) * inverse, (self.box.upper - center) * inverse

    def _empty_gram(self) -> Floats:
        return np.zeros((self.n_features + 1, self.n_features + 1))

    def _spans(self) -> Iterator[slice]:
        for start in range(0, self.n_rows, self._size):
            yield slice(start, min(start + self._size, self.n_rows))


def _add_gram(gram: Floats, rows: Floats, factors: Floats) -> None:
    """Add to `gram` that of records (1, x) times their factors; `rows` holds x times them."""
    with_constant = factors @ rows
    gram[0, 0] += factors @ factors
    gram[0, 1:] += with_constant
    gram[1:, 0] += with_constant
    gram[1:, 1:] += rows.T @ rows


def triangle(matrix: Floats) -> Floats:
    """The upper triangle of a symmetric matrix, entries off the diagonal times sqrt(2).

    Keeps lengths: the L2 norm of the vector is the Frobenius norm of the matrix.
    """
    rows, columns = np.triu_indices(len(matrix))
    return matrix[rows, columns] * np.where(rows == columns, 1.0, np.sqrt(2.0))


def from_triangle(vector: Floats, size: int) -> Floats:
    """The symmetric matrix of which `triangle` gives `vector`."""
    rows, columns = np.triu_indices(size)
    matrix = np.empty((size, size))
    matrix[rows, columns] = vector / np.where(rows == columns, 1.0, np.sqrt(2.0))
    matrix[columns, rows] = matrix[rows, columns]
    return matrix
