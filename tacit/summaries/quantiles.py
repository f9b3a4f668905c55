"""Quantiles from a tree of noisy counts, and private bounds for a column without declared ones.

The range of a column is divided into equal cells, and the cells are the leaves of a tree: every
node has the same number of children. Each level is one block in which a record adds 1 to the node
that holds its value (hierarchical histograms; Hay et al. 2010, arXiv:0904.0942). Noisy counts are
made consistent by least squares as there: from the leaves upwards, a node averages its own count
with the sum over its children; from the top downwards, differences are divided equally.

**The interval of the quantile at p.** For an edge e between cells, G(e) = (1 - p) (values below e)
- p (values at or above e) estimates n (F(e) - p), where F(e) is the probability of a value below e.
Its noise has a known law, and its sampling variance at the quantile is n p (1 - p). Walking from
the left, edges with G(e) below minus its half width are rejected; the lower end is the last edge
before the first one that is not rejected. It lies above the quantile only if the first edge above
the quantile was rejected, though F >= p there. So one edge decides, however many are tried, and the
probability of this mistake is at most (1 - confidence) / 2. The upper end is found in the same way
from the right. This holds for every distribution, with ties and gaps; only the sampling error is
taken as normal.

**Values on a grid.** Where values are declared to be a step apart (whole numbers), each leaf holds
one value. There are fewer leaves, hence less noise, and the interval ends at the value of a leaf
instead of at an edge of its range.
"""

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Floats, Indices
from tacit._check import in_open_unit, positive, whole
from tacit.events import Event
from tacit.summaries.column_values import CLIP, DROP, Range, as_range, in_unit, numbers
from tacit.summaries.counts import bin_codes
from tacit.summaries.error_law import Interval, Spread, half_width
from tacit.summaries.payment import (
    Block,
    Division,
    NoisyBlock,
    ReleaseTerms,
    Terms,
    cell_counts,
)
from tacit.summaries.statistic import POPULATION, Statistic, StatisticTable, check_about

_MOST_LEAVES = 2**24
_EXPONENTS = np.arange(-40, 61)
"""Exponents of the public edges -2^60, ..., -2^-40, 0, 2^-40, ..., 2^60 for private bounds."""


def quantiles(
    values: ArrayLike,
    probabilities: Sequence[float] = (0.25, 0.5, 0.75),
    *,
    bounds: tuple[float, float],
    n_cells: int | None = None,
    step: float | None = None,
    about: str = POPULATION,
    missing: str | float = DROP,
    outside: str = CLIP,
    **terms: Unpack[ReleaseTerms],
) -> StatisticTable:
    """Return private quantiles of a column within declared bounds, with intervals.

    Guarantee: (epsilon, delta)-DP. Each level of the tree is one block in which one record adds 1
    to one cell. All quantiles come from the same release, so asking for more costs nothing.

    `n_cells` is the least number of equal cells between the bounds: intervals end at their edges.
    More cells give a finer answer with more noise; the default is 256 to 65,536, more at a larger
    epsilon. `step` is the distance of the possible values, known publicly, such as 1 for whole
    numbers: values are rounded to the grid that begins at the lower bound, intervals end on it, and
    they are shorter. A grid with more values than cells has no effect. Other arguments are as for
    `mean`.

    >>> table = quantiles(range(1000), [0.5], bounds=(0, 1000), epsilon=2.0, rng=0)
    >>> bool(table.lower[0] < 500 < table.upper[0])
    True
    """
    checked, range_ = Terms.check(terms), as_range(bounds)
    wanted = check_probabilities(probabilities)
    check_about(about)
    unit = in_unit(values, range_, missing=missing, outside=outside)
    cells = cells_for(checked.epsilon) if n_cells is None else whole(n_cells=n_cells, least=2)
    tree = choose_tree(checked, cells, n_values=grid_size(range_, step))
    division = checked.divide(tree.blocks(), is_gaussian=tree.is_gaussian)
    event = division.pay("quantiles")
    counts = tree.release(unit, division, checked)
    level = checked.confidence
    found = [quantile_interval(counts, p, range_, about, level) for p in wanted]
    rows = [
        Statistic(quantile_name(p), *ends, level, about)
        for p, ends in zip(wanted, found, strict=True)
    ]
    return StatisticTable(
        tuple(rows), event, checked.epsilon, checked.delta, checked.relation, "quantiles"
    )


class PrivateBounds(NamedTuple):
    """Bounds of a column that were found privately: released, no longer private.

    `is_reliable` is False if no cell had more records than the noise explains; the bounds are then
    those of the fullest noisy cell, and little can be learned from the column at this price.
    """

    lower: float
    upper: float
    is_reliable: bool
    event: Event


def private_bounds(
    values: ArrayLike, *, false_cell: float = 0.01, **terms: Unpack[ReleaseTerms]
) -> PrivateBounds:
    """Return bounds within which almost all values of a column lie, found privately.

    Guarantee: (epsilon, delta)-DP. One record adds 1 to one cell of a histogram whose edges are
    public: 0 and plus or minus the powers of two from 2^-40 to 2^60 (Wilson et al. 2020,
    arXiv:1909.01917, with 0 as an edge). The bounds are the outer edges of the outermost cells
    whose noisy count exceeds a threshold. With probability 1 - `false_cell` no empty cell does.
    What lies outside the bounds are cells with counts below about twice the threshold.

    Use it for columns whose bounds nobody can declare. Declared bounds cost nothing and are better.

    >>> found = private_bounds(np.linspace(3, 900, 50_000), epsilon=1.0, rng=0)
    >>> found.lower, found.upper
    (2.0, 1024.0)
    """
    checked = Terms.check(terms)
    column = numbers(values)
    division = checked.divide([range_block()])
    event = division.pay("private bounds")
    found = release_range(column, division, checked, false_cell)
    return PrivateBounds(found.lower, found.upper, found.is_reliable, event)


class FoundRange(NamedTuple):
    """Bounds from a noisy histogram over powers of two, and whether any cell was full enough."""

    lower: float
    upper: float
    is_reliable: bool


def range_block(share: float = 1.0) -> Block:
    """Return the block of the histogram over powers of two; a missing value has no cell."""
    return Block(len(_edges()) - 1, share)


def release_range(
    column: Floats, division: Division, terms: Terms, false_cell: float = 0.01, index: int = 0
) -> FoundRange:
    """Return the bounds of a private column, from the block number `index` of a paid division."""
    edges = _edges()
    n_cells = len(edges) - 1
    inside = np.clip(np.searchsorted(edges, column, side="right") - 1, 0, n_cells - 1)
    cells = np.where(np.isnan(column), -1, inside)
    block = division.noises[index].release(cell_counts(cells, n_cells), terms.rng)
    # One-sided at false_cell / n_cells for each cell, so at most false_cell for all together.
    level = 1 - 2 * in_open_unit(false_cell=false_cell) / n_cells
    threshold = float(half_width(block.spread(np.eye(1, n_cells)[0]), level))
    full = np.flatnonzero(block.cells > threshold)
    is_reliable = full.size > 0
    chosen = full if is_reliable else np.array([int(np.argmax(block.cells))])
    return FoundRange(float(edges[chosen[0]]), float(edges[chosen[-1] + 1]), is_reliable)


def check_probabilities(probabilities: Sequence[float]) -> list[float]:
    """Return the probabilities as floats; raise unless all are in (0, 1) and different."""
    listed = np.atleast_1d(np.asarray(probabilities)).tolist()
    wanted = [in_open_unit(probability=p) for p in listed]
    if not wanted or len(set(wanted)) < len(wanted):
        raise ValueError("probabilities must be different from each other, at least one.")
    return wanted


def quantile_name(probability: float) -> str:
    """Return the name of a row: "median", or "quantile 0.25"."""
    return "median" if probability == 0.5 else f"quantile {probability:g}"


def grid_size(range_: Range, step: float | None) -> int:
    """Return how many values a grid has from bound to bound; 0 without a `step`."""
    if step is None:
        return 0
    n_steps = range_.width / positive(step=step)
    if n_steps > _MOST_LEAVES:
        return 0  # too fine to matter
    if n_steps < 0.5 or abs(n_steps - round(n_steps)) > 1e-6 * n_steps:
        raise ValueError(f"step must divide the distance of the bounds, got {step}.")
    return round(n_steps) + 1


class CountTree(NamedTuple):
    """Public shape of the tree: `depth` levels below the root, `branching` children a node.

    Each leaf is a range of values. With `n_values`, each of the first so many leaves is one value,
    and these values are equally far apart, from bound to bound.
    """

    depth: int
    branching: int
    is_gaussian: bool
    n_values: int = 0

    @property
    def n_leaves(self) -> int:
        """Number of equal cells."""
        return self.branching**self.depth

    def blocks(self, share: float = 1.0) -> list[Block]:
        """Return one block for each level; a missing value has no cell, so no total is known."""
        return [
            Block(self.branching**level, share / self.depth) for level in range(1, self.depth + 1)
        ]

    def release(
        self,
        unit: Floats,
        division: Division,
        terms: Terms,
        first: int = 0,
        repeats: Indices | None = None,
    ) -> "ConsistentCounts":
        """Release the levels of a private column in [0, 1], from block number `first` on.

        `repeats` says how many records have each value; default 1.
        """
        leaves = bin_codes(unit, self.n_leaves)
        if self.n_values:
            leaves = np.rint(np.nan_to_num(unit) * (self.n_values - 1)).astype(np.int64)
        leaves = np.where(np.isnan(unit), -1, leaves)
        levels: list[NoisyBlock] = []
        for level in range(1, self.depth + 1):
            nodes = np.where(leaves < 0, -1, leaves // self.branching ** (self.depth - level))
            noise = division.noises[first + level - 1]
            counts = cell_counts(nodes, self.branching**level, repeats)
            levels.append(noise.release(counts, terms.rng))
        return _consistent(self, levels)

    def leaf_ends(self, range_: Range) -> tuple[Floats, Floats]:
        """Return the lower and the upper end of each leaf, which are equal for single values."""
        if self.n_values:
            places = np.minimum(np.arange(self.n_leaves), self.n_values - 1)
            values = range_.unscale(places / (self.n_values - 1))
            return values, values
        edges = range_.unscale(np.linspace(0.0, 1.0, self.n_leaves + 1))
        return edges[:-1], edges[1:]


class ConsistentCounts(NamedTuple):
    """Released leaf counts after least squares, with the variance of each level's nodes."""

    tree: CountTree
    leaves: Floats
    variances: tuple[float, ...]
    """For each level, the variance of a node's count from its own noise and that of its subtree."""
    is_laplace: bool

    def balance(self, p: float) -> Floats:
        """Return G(e) for every edge e, the outermost included."""
        below = np.concatenate([[0.0], np.cumsum(self.leaves)])
        return below - p * below[-1]

    def spread(self, p: float) -> Spread:
        """Return the spread of the noise in G(e) for every edge but the outermost."""
        b, depth = self.tree.branching, self.tree.depth
        edges = np.arange(1, self.tree.n_leaves)
        variance = np.zeros(len(edges))
        fourth = np.zeros(len(edges))
        inside = np.zeros(len(edges))  # share of the node on the path that is below the edge
        for level in range(depth, 0, -1):
            left = edges // b ** (depth - level) % b  # children before the one on the path
            above = (left + inside) / b
            # A change of a parent's count is divided equally, so only differences of children
            # matter, except at the top, where the coefficients are 1 - p and -p.
            center = above if level > 1 else p
            parts = ((left, 1 - center), (1, inside - center), (b - 1 - left, center))
            v = self.variances[level - 1]
            for n, c in parts:
                square = c * c
                variance += v * n * square
                fourth += v**2 * n * square * square
            inside = above
        return Spread(variance, np.sqrt(fourth) if self.is_laplace else np.zeros(len(edges)))


def cells_for(epsilon: float) -> int:
    """Return a number of cells so fine that rounding to edges matters less than the noise."""
    return 256 if epsilon < 0.5 else 4096 if epsilon < 4 else 65_536


def choose_tree(
    terms: Terms,
    n_cells: int,
    *,
    n_values: int = 0,
    n_trees: int = 1,
    n_other: int = 0,
    is_gaussian: bool | None = None,
) -> CountTree:
    """Return the tree of at least `n_cells` leaves with the least noise in a median.

    If there are only `n_values` values on a grid, each is a leaf. `n_trees` such trees and
    `n_other` other blocks are released in one call. The choice depends on public numbers only.
    """
    if n_cells > _MOST_LEAVES:
        raise ValueError(f"n_cells must be at most 2**24, got {n_cells}.")
    is_grid = 0 < n_values <= n_cells
    n_cells, n_values = (n_values, n_values) if is_grid else (n_cells, 0)
    trees: list[tuple[float, CountTree]] = []
    laws = (False, True) if is_gaussian is None else (is_gaussian,)
    for is_gaussian in laws if terms.delta > 0 else (False,):
        for depth in range(1, 9):
            branching = max(int(np.ceil(n_cells ** (1 / depth) - 1e-9)), 2)
            n_blocks = n_trees * depth + n_other
            each = terms.cell_variance(n_blocks, is_gaussian=is_gaussian)
            variances = _node_variances(depth, branching, each)
            inner = sum(variances[1:]) * branching / 6  # average of j (1 - j / b) over children
            noise = variances[0] * branching / 4 + inner
            trees.append((noise, CountTree(depth, branching, is_gaussian, n_values)))
    return min(trees, key=lambda tree: tree[0])[1]


def quantile_interval(
    counts: ConsistentCounts, p: float, range_: Range, about: str, confidence: float
) -> Interval:
    """Return the quantile at `p` in the units of the column; see the module for the proof."""
    balance = counts.balance(p)
    starts, ends = counts.tree.leaf_ends(range_)
    spread = counts.spread(p)
    if about == POPULATION:
        spread = spread + Spread(max(float(counts.leaves.sum()), 0.0) * p * (1 - p))
    half = half_width(spread, confidence)
    inner = balance[1:-1]
    # The outermost edges are never rejected: all values are between them.
    first = np.flatnonzero(np.append(inner >= -half, True))[0]  # the leaf before the first edge
    last = np.flatnonzero(np.append(True, inner <= half))[-1]  # the leaf after the last edge
    lower, upper = starts[first], ends[last]
    value = float(np.clip(_crossing(balance, starts, ends), lower, upper))
    return Interval(value, float(lower), float(upper))


def _crossing(balance: Floats, starts: Floats, ends: Floats) -> float:
    """Return where a rising curve near `balance` passes 0, inside a leaf by interpolation."""
    rising = (np.maximum.accumulate(balance) + np.minimum.accumulate(balance[::-1])[::-1]) / 2
    leaf = int(np.clip(np.searchsorted(rising, 0.0), 1, len(starts))) - 1
    low, high = rising[leaf], rising[leaf + 1]
    share = np.clip(-low / (high - low), 0.0, 1.0) if high > low else 0.5
    return float(starts[leaf] + share * (ends[leaf] - starts[leaf]))


def _consistent(tree: CountTree, levels: list[NoisyBlock]) -> ConsistentCounts:
    """Return the least-squares leaf counts of noisy levels (Hay et al. 2010, Theorem 3)."""
    variances = _node_variances(tree.depth, tree.branching, levels[0].noise.variance)
    merged = [level.cells for level in levels]
    for level in range(tree.depth - 2, -1, -1):  # upwards: average own count and children's sum
        children = merged[level + 1].reshape(-1, tree.branching).sum(axis=1)
        own = variances[level] / levels[level].noise.variance
        merged[level] = own * merged[level] + (1 - own) * children
    final = merged[0]
    for below in merged[1:]:  # downwards: divide the difference equally
        family = below.reshape(-1, tree.branching)
        gap = final - family.sum(axis=1)
        final = (family + gap[:, None] / tree.branching).ravel()
    return ConsistentCounts(tree, final, tuple(variances), levels[0].noise.is_laplace)


def _node_variances(depth: int, branching: int, variance: float) -> list[float]:
    """Return the variance of a node's count from its own noise and its children's, by level."""
    found = [variance]
    for _ in range(depth - 1):
        found.insert(0, 1 / (1 / variance + 1 / (branching * found[0])))
    return found


def _edges() -> Floats:
    powers = 2.0**_EXPONENTS
    return np.concatenate([-powers[::-1], [0.0], powers])
