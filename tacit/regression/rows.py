"""Private rows of a table: streamed sums over them, and what is made of noisy sums.

Every method of `PrivateRows` returns **private** values: sums over records, before any noise. It
reads the table in blocks that fit in the processor's cache and never holds a second copy, so a
table of ten million rows (in memory or in a `numpy.memmap`) needs a fixed amount of extra memory.

A record is z = (1, x): a constant 1 and a row of features, clipped to declared bounds and scaled to
[-1, 1]. If `row_norm` is finite, a longer record is shrunk to that norm together with its target.
Least squares on such rows is weighted least squares, whose weights depend on features only. So if
one linear model is right for all records it stays the answer, and one record contributes less.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tacit._arrays import Floats, Indices
from tacit.regression.bounds import Box

_BLOCK_BYTES = 1 << 20
_SHRUNK, _TRUSTED = 0.75, 0.5  # share of James and Stein's shrinking of matrices, see `shrink`


class SecondMoments(NamedTuple):
    """Sums over records z = (1, x) with targets y: private, or released with noise added."""

    gram: Floats
    """sum z z', (d + 1, d + 1)."""
    cross: Floats
    """sum y z, (d + 1,)."""
    square: float = 0.0
    """sum y^2."""


class PrivateRows:
    """Private rows of a table, clipped and scaled when they are read; the table is not copied.

    `factors` holds the number by which each row is multiplied to have a norm of at most `row_norm`.
    A block within the bounds is read in place, because clipping would not change it.
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

    def moments(self, y: Floats) -> SecondMoments:
        """Return the private sums of z z', y z and y^2 over shrunk rows z; `y` is in [-1, 1]."""
        size = self.n_features + 1
        gram, cross, square = np.zeros((size, size)), np.zeros(size), 0.0
        buffer = np.empty((self._size, self.n_features))
        for span, features in self.scaled():
            factors = self.factors[span]  # what shrinking makes of the constant 1
            rows = np.multiply(features, factors[:, None], out=buffer[: len(features)])
            target = factors * y[span]
            gram[0, 0] += factors @ factors
            gram[0, 1:] += factors @ rows
            gram[1:, 1:] += rows.T @ rows
            cross[0] += factors @ target
            cross[1:] += rows.T @ target
            square += target @ target
        gram[1:, 0] = gram[0, 1:]
        return SecondMoments(gram, cross, float(square))

    def gram(self, chosen: Indices | None = None) -> Floats:
        """Return the private sum of z z' over all shrunk rows z, or over the `chosen` rows only."""
        if chosen is None:
            return self.moments(np.zeros(self.n_rows)).gram
        total = np.zeros((self.n_features + 1, self.n_features + 1))
        for start in range(0, len(chosen), self._size):
            total += self.take(chosen[start : start + self._size]).gram()
        return total

    def norms(self, matrix: Floats) -> Floats:
        """Return the private norms of the rows z `matrix`, where z = (1, x) is not shrunk."""
        found = np.empty(self.n_rows)
        inner = matrix[1:] / self.box.half[:, None]
        offset = matrix[0] - self.box.center @ inner
        buffer = np.empty((self._size, len(offset)))
        for span, rows in self._clipped():
            moved = np.matmul(rows, inner, out=buffer[: len(rows)])
            moved += offset
            np.einsum("ij,ij->i", moved, moved, out=found[span])
        return np.sqrt(found, out=found)

    def whitened_gram(self, matrix: Floats, factors: Floats) -> Floats:
        """Return the private sum of u u' over the rows u = z `matrix`, times their `factors`."""
        total = np.zeros((matrix.shape[1],) * 2)
        for span, rows in self.scaled():
            moved = rows @ matrix[1:] + matrix[0]
            moved *= factors[span, None]
            total += moved.T @ moved
        return total

    def whitened_hessians(
        self,
        matrix: Floats,
        factors: Floats,
        theta: Floats,
        bend: Callable[[slice, Floats], Floats],
    ) -> list[Floats]:
        """Return the private sums of h u u', one for each column of h.

        u are the rows of `whitened_gram`. `bend` takes a slice of m rows and the products (m, k) of
        these rows, not multiplied by their factors, with `theta`, and returns h, (m, j).
        """
        scaled_theta = matrix @ theta
        columns = bend(slice(0, 0), np.zeros((0, theta.shape[1]))).shape[1]
        totals = [np.zeros((self.n_features + 1,) * 2) for _ in range(columns)]
        buffer = np.empty((self._size, self.n_features))
        for span, rows in self.scaled():
            roots = np.sqrt(bend(span, rows @ scaled_theta[1:] + scaled_theta[0]))
            roots *= factors[span, None]
            for total, column in zip(totals, roots.T, strict=True):
                weighted = np.multiply(rows, column[:, None], out=buffer[: len(rows)])
                total[0, 0] += column @ column
                total[0, 1:] += column @ weighted
                total[1:, 1:] += weighted.T @ weighted
        for total in totals:
            total[1:, 0] = total[0, 1:]
        return [matrix.T @ total @ matrix for total in totals]

    def weighted_sum(self, theta: Floats, weigh: Callable[[slice, Floats], Floats]) -> Floats:
        """Return the private sum over records z = (1, x) of weigh(margin) z, margin = theta' z.

        `theta` is (d + 1,) for d features, or (d + 1, k) for k outputs. `weigh` takes a slice of m
        rows and their margins, (m,) or (m, k), and returns weights of the same shape. The scaling
        is applied to `theta` and to the final sum instead of to the rows, so that a block within
        the bounds is used as it is stored.
        """
        center, half = self.box.center, self.box.half
        inner = (theta[1:].T / half).T
        offset = theta[0] - center @ inner
        total, count = np.zeros_like(inner), np.zeros_like(theta[0], dtype=np.float64)
        for span, rows in self._clipped():
            weights = weigh(span, rows @ inner + offset)
            total += rows.T @ weights
            count += weights.sum(axis=0)
        return np.concatenate(
            [count[None], ((total.T - np.multiply.outer(count, center)) / half).T]
        )

    def take(self, indices: Indices) -> "PrivateRows":
        """Return a copy of the private rows at `indices`."""
        taken = PrivateRows(
            self.X[indices], self.box, row_norm=self.row_norm, factors=self.factors[indices]
        )
        taken._inside[:] = self._inside.all()
        return taken

    def scaled(self) -> Iterator[tuple[slice, Floats]]:
        """Yield each slice of m rows with its private scaled features, (m, d), to be read only.

        Slices may share one buffer, so use the features before the next slice is read. A block that
        clipping and scaling would not change is given as it is stored.
        """
        buffer = np.empty((self._size, self.n_features))
        lower, upper = self._scaled_bounds()
        is_scaled = self.X.dtype == np.float64 and not self.box.center.any()
        is_scaled = is_scaled and bool((self.box.half == 1).all())
        for index, span in enumerate(self._spans()):
            if is_scaled and self._inside[index]:
                yield span, np.asarray(self.X[span], np.float64)
                continue
            rows = buffer[: span.stop - span.start]
            with np.errstate(over="ignore"):  # a warning would reveal a record far out of bounds
                np.subtract(self.X[span], self.box.center, out=rows)
                rows *= 1 / self.box.half
            if not self._inside[index]:
                np.clip(rows, lower, upper, out=rows)
            yield span, rows

    def _clipped(self) -> Iterator[tuple[slice, NDArray[np.floating]]]:
        buffer = np.empty((self._size, self.n_features))
        for index, span in enumerate(self._spans()):
            rows = self.X[span]
            if not (self._inside[index] and rows.dtype == np.float64):
                rows = np.clip(rows, self.box.lower, self.box.upper, out=buffer[: len(rows)])
            yield span, rows

    def _prepare(self) -> None:
        """Find the blocks of rows that need no clipping, and the factor that shrinks each row."""
        least, most = self.box.lower.max(), self.box.upper.min()
        for index, span in enumerate(self._spans()):
            rows = self.X[span]
            self._inside[index] = rows.min() >= least and rows.max() <= most
        if np.isfinite(self.row_norm):
            for span, rows in self.scaled():
                norms = np.sqrt(1.0 + np.einsum("ij,ij->i", rows, rows))
                self.factors[span] = np.minimum(1.0, self.row_norm / norms)

    def _scaled_bounds(self) -> tuple[Floats, Floats]:
        center, inverse = self.box.center, 1 / self.box.half
        return (self.box.lower - center) * inverse, (self.box.upper - center) * inverse

    def _spans(self) -> Iterator[slice]:
        for start in range(0, self.n_rows, self._size):
            yield slice(start, min(start + self._size, self.n_rows))


def triangle(matrix: Floats) -> Floats:
    """Return the upper triangle of a symmetric matrix as a vector, to which noise can be added.

    Entries off the diagonal are multiplied by sqrt(2), so that the L2 norm of the vector equals the
    Frobenius norm of the matrix.
    """
    rows, columns = np.triu_indices(len(matrix))
    return matrix[rows, columns] * np.where(rows == columns, 1.0, np.sqrt(2.0))


def from_triangle(vector: Floats, size: int) -> Floats:
    """Return the symmetric matrix whose upper triangle `vector` holds: inverse of `triangle`."""
    rows, columns = np.triu_indices(size)
    matrix = np.empty((size, size))
    matrix[rows, columns] = vector / np.where(rows == columns, 1.0, np.sqrt(2.0))
    matrix[columns, rows] = matrix[rows, columns]
    return matrix


def triangle_noise(noise_std: float, size: int) -> float:
    """Return the approximate largest eigenvalue of the noise in a matrix released by `triangle`.

    `noise_std` is the noise of each entry of the vector. Off the diagonal of the `size` x `size`
    matrix, the noise has variance noise_std^2 / 2. Wigner's law gives 2 sqrt(size * variance).
    """
    return noise_std * math.sqrt(2.0 * size)


def combine(
    first: Floats, first_std: float, second: Floats, second_std: float, doubt: float
) -> tuple[Floats, float]:
    """Return the mean of two released matrices by their precision, and the std of its entries.

    The first matrix may differ from what the second one estimates, by a standard deviation of
    `doubt` times its mean eigenvalue.
    """
    variance = first_std**2 + (doubt * float(np.trace(first)) / len(first)) ** 2
    weight = variance / (variance + second_std**2)
    return first + weight * (second - first), math.sqrt(weight) * second_std


def shrink(matrix: Floats, noise_std: float, expected: Floats) -> tuple[Floats, float]:
    """Return a released matrix moved towards a multiple of the `expected` one, and its new std.

    Noise spreads eigenvalues, so that the smallest ones are too small and their inverses too large.
    The rule of James & Stein 1961 takes off the share of the distance to the expected matrix that
    noise explains. Less than that is taken off, because an interval is rather too long than too
    short, and least where the noise is small relative to the mean eigenvalue: there the matrix is
    better than any expectation. A matrix released by `triangle` has size (size + 1) / 2 noisy
    entries, one of which is used for the multiple. An `expected` matrix of zeros changes nothing.
    """
    if not expected.any():  # nothing is known of the matrix
        return matrix, noise_std
    size = len(matrix)
    mean = float(np.sum(matrix * expected) / np.sum(expected**2)) * expected
    spread = float(np.sum((matrix - mean) ** 2))
    noise = noise_std**2 * (size * (size + 1) // 2 - 1)
    typical = max(float(np.trace(matrix)) / size, 1e-300)
    trusted = min(triangle_noise(noise_std, size) / (_TRUSTED * typical), 1.0) ** 2
    kept = 1 - _SHRUNK * trusted * min(noise / max(spread, 1e-300), 1.0)
    return mean + kept * (matrix - mean), math.sqrt(kept) * noise_std


def combine_squares(
    expected: Floats, found: Floats, noise_std: float, doubt: float, scale_doubt: float = 0.0
) -> Floats:
    """Return the mean of r^2 u u' from its expectation and from a release, rather too large.

    The expected matrix is known up to a factor 1 of standard deviation `scale_doubt`, and up to
    `doubt` or to what the release shows beyond its noise by two deviations, if that is more. Half
    of the standard deviation is added to the eigenvalues, and no eigenvalue is negative.
    """
    square, entries = float(np.sum(expected**2)), len(expected) * (len(expected) + 1) // 2
    gain = scale_doubt**2 / (scale_doubt**2 + noise_std**2 / max(square, 1e-300))
    ratio = float(np.sum(found * expected)) / max(square, 1e-300)
    expected = max(1 + gain * (ratio - 1), 0.0) * expected
    level = max(float(np.trace(expected)) / len(expected), 1e-300)
    noise = noise_std**2 * (entries + 2 * math.sqrt(2 * entries))
    shown = math.sqrt(max(float(np.sum((found - expected) ** 2)) - noise, 0.0))
    mean, std = combine(expected, 0.0, found, noise_std, max(doubt, shown / level))
    values, vectors = np.linalg.eigh(mean)
    return (vectors * np.maximum(values + std / 2, 0.0)) @ vectors.T


def solve_moments(moments: SecondMoments, *, noise: float, floor: float = 0.0) -> Floats:
    """Return the coefficients theta of ridge regression on released moments; always finite.

    theta minimizes theta' gram theta - 2 cross' theta + ridge |features|^2. This is post-processing
    of released values. The intercept is eliminated first and not penalized. The remaining matrix
    contains noise with eigenvalues up to about `noise`, so it may be indefinite. The eigenvalues of
    the exact matrix are at least `floor` (0 if no bound was released), and at least the smallest
    released eigenvalue minus `noise`. All eigenvalues are raised to the larger of these bounds, and
    then by the ridge, max(0, noise - bound). The ridge is 0 if the bound alone is large enough.
    """
    gram, cross = moments.gram, moments.cross
    count = max(gram[0, 0], noise, 1.0)
    means = gram[1:, 0] / count
    values, vectors = np.linalg.eigh(gram[1:, 1:] - count * np.outer(means, means))
    bound = max(floor, float(values[0]) - noise, 0.0)
    curvature = np.maximum(values, bound) + max(0.0, noise - bound)
    pull = vectors.T @ (cross[1:] - means * cross[0])
    usable = curvature > 0  # without noise a constant column has none, and its coefficient is 0
    slope = vectors[:, usable] @ (pull[usable] / curvature[usable])
    return np.append(cross[0] / count - means @ slope, slope)
