"""Bernstein polynomials: moments of a bounded column from one block of cells.

The Bernstein polynomials of degree d, B_k(u) = C(d, k) u^k (1 - u)^(d - k) for k = 0, ..., d, are
>= 0 on [0, 1] and sum to 1. So a record with value u may contribute B_k(u) to cell k of a block
(see `tacit.summaries.payment`), and the noise does not depend on d. Every polynomial of degree at
most d is a weighted sum of them, f(u) = sum_k b_k B_k(u), so the noisy cells give the sum of f over
all records with noise of variance v sum_k b_k^2: the count (b_k = 1), the sum (b_k = k / d), and
higher moments. For a mean at the middle of the bounds, degree 2 has the same noise as degree 1,
whose cells are the sums of u and of 1 - u.
"""

from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Flags, Floats, Indices
from tacit.summaries.error_law import Spread
from tacit.summaries.payment import Block, NoisyBlock, Terms, fractional_sums


def moment_block(
    terms: Terms, degree: int, n_records: int, *, n_columns: int = 1, share: float = 1.0
) -> Block:
    """Return the block of `n_columns` columns: a cell for missing values, then all products."""
    total = n_records if terms.is_size_public else None
    return Block(1 + (degree + 1) ** n_columns, share, is_fractional=True, total=total)


def moment_sums(degree: int, *columns: Floats, repeats: Indices | None = None) -> Floats:
    """Return the private cells of one or two columns in [0, 1]; NaN is a missing value.

    The first cell counts records with a missing value; the others hold the sums of B_j(u), or of
    B_j(u) B_k(v), with k running fastest. `repeats` says how many records have each value.
    """
    n_cells = 1 + (degree + 1) ** len(columns)
    is_missing: Flags = np.asarray(np.isnan(np.stack(columns)).any(axis=0))

    def parts(rows: slice) -> Floats:
        absent = is_missing[rows]
        product = np.ones((len(absent), 1))
        for column in columns:
            basis = bernstein_basis(np.where(absent, 0.0, column[rows]), degree)
            product = (product[:, :, None] * basis[:, None, :]).reshape(len(absent), -1)
        product[absent] = 0.0
        return np.column_stack([absent.astype(np.float64), product])

    return fractional_sums(parts, len(is_missing), n_cells, repeats)


def bernstein_basis(u: Floats, degree: int) -> Floats:
    """Return B_0(u), ..., B_degree(u) for each u in [0, 1], (values, degree + 1)."""
    k = np.arange(degree + 1)
    choose = np.array([comb(degree, j) for j in k], np.float64)
    return choose * u[:, None] ** k * (1 - u[:, None]) ** (degree - k)


def bernstein_coefficients(polynomial: ArrayLike, degree: int) -> Floats:
    """Return b_0, ..., b_degree of polynomials; the last axis holds coefficients of 1, u, u^2, ....

    b_k = sum_{j <= k} C(k, j) / C(degree, j) a_j, with zeros for absent a_j.

    >>> bernstein_coefficients([0, 0, 1], 2).tolist()  # u^2
    [0.0, 0.0, 1.0]
    >>> bernstein_coefficients([0, 1], 4).tolist()  # u
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    a = np.asarray(polynomial, np.float64)
    table = [[comb(k, j) / comb(degree, j) for k in range(degree + 1)] for j in range(a.shape[-1])]
    return a @ np.array(table)


def centered_power(center: float, power: int) -> Floats:
    """Return the coefficients of (u - center)^power in 1, u, u^2, ....

    >>> centered_power(0.5, 2).tolist()
    [0.25, -1.0, 1.0]
    """
    return np.array([comb(power, j) * (-center) ** (power - j) for j in range(power + 1)])


class MomentSums(NamedTuple):
    """Sums of polynomials of one column, from one released block or averaged over several.

    Each block holds the column alone (`side` None), or as the first or second column of a pair.
    """

    blocks: tuple[NoisyBlock, ...]
    sides: tuple[int | None, ...]
    degree: int

    @classmethod
    def of(cls, block: NoisyBlock, degree: int) -> "MomentSums":
        """Return the sums of the only column of a block."""
        return cls((block,), (None,), degree)

    def total(self, polynomial: ArrayLike) -> Floats:
        """Return the noisy sum over all present values of a polynomial, or of several."""
        totals = [block.total(w) for block, w in self._weighted(polynomial)]
        return np.mean(totals, axis=0)

    def spread(self, polynomial: ArrayLike) -> Spread:
        """Return the spread of the noise in `total(polynomial)`."""
        spreads = [block.spread(w) for block, w in self._weighted(polynomial)]
        return sum(spreads[1:], spreads[0]).scaled(1 / len(spreads))

    def cautious_total(self, polynomial: ArrayLike) -> float:
        """Return the noisy sum plus one standard deviation of its noise, at least 0.

        Used for variances of sampling errors: where noise hides a variance, an interval must not
        become too short.
        """
        noise_std = float(np.sqrt(self.spread(polynomial).variance))
        return max(float(self.total(polynomial)) + noise_std, 0.0)

    @property
    def is_lost(self) -> bool:
        """Whether the noise is as large as the count, so that no ratio is meaningful."""
        count = float(self.total([1.0]))
        return count < max(2.0, 4 * float(np.sqrt(self.spread([1.0]).variance)))

    def _weighted(self, polynomial: ArrayLike) -> list[tuple[NoisyBlock, Floats]]:
        own = bernstein_coefficients(polynomial, self.degree)
        ones = np.ones(self.degree + 1)
        by_side = {None: (own,), 0: (own, ones), 1: (ones, own)}
        return [
            (block, cell_weights(*by_side[side]))
            for block, side in zip(self.blocks, self.sides, strict=True)
        ]


def cell_weights(*factors: Floats) -> Floats:
    """Return the weights of all cells for a product of polynomials, one factor for each column.

    The weight of the first cell, which counts missing values, is 0.
    """
    product = np.ones(1)
    for factor in factors:
        outer = product[..., :, None] * factor[..., None, :]
        product = outer.reshape(*outer.shape[:-2], -1)
    return np.concatenate([np.zeros((*product.shape[:-1], 1)), product], axis=-1)
