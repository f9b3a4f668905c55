"""Counts, histograms and contingency tables, with confidence intervals.

The intervals of counts are about the records of the table: the noise is the only error. True counts
are whole numbers >= 0, so the ends are rounded inwards to whole numbers without loss of confidence.
The intervals of shares are about the population, by the score interval of Wilson 1927 with the
variance of the noise added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike

from tacit import events as ev
from tacit._arrays import Flags, Floats, Indices
from tacit._check import in_open_unit, whole
from tacit.events import Event, Relation
from tacit.mechanisms import ExponentialMechanism
from tacit.summaries.column_values import (
    ABSENT,
    OTHER,
    Category,
    as_range,
    category_text,
    check_categories,
    codes,
    flags_of,
    in_unit,
    is_present,
    same_length,
)
from tacit.summaries.error_law import Interval, Spread, accepted_range, half_width
from tacit.summaries.payment import Block, NoisyBlock, ReleaseTerms, Terms, cell_counts, pay
from tacit.summaries.statistic import (
    POPULATION,
    RECORDS,
    Statistic,
    StatisticTable,
    check_about,
)

_MOST_CELLS = 10**7


def count(values: ArrayLike, **terms: Unpack[ReleaseTerms]) -> Statistic:
    """Return a private count of the values of a column that are not missing, with an interval.

    Guarantee: (epsilon, delta)-DP. One record adds 0 or 1 to one cell.

    >>> count(range(1000), epsilon=1.0, rng=0).about
    'records'
    """
    checked = Terms.check(terms)
    present = is_present(values)
    event, block = checked.release(Block(1), [present.sum()], "count")
    found = count_interval(block, np.ones(1), checked.confidence)
    return Statistic("count", *found, checked.confidence, RECORDS, event=event)


def histogram(
    values: ArrayLike,
    *,
    bounds: tuple[float, float] | None = None,
    n_bins: int = 10,
    categories: Sequence[Category] | None = None,
    about: str = RECORDS,
    **terms: Unpack[ReleaseTerms],
) -> StatisticTable:
    """Return private counts of the bins of a number, or of declared categories.

    Guarantee: (epsilon, delta)-DP. One record adds 1 to one cell of one block.

    Give `bounds` and `n_bins` equal bins, which include their lower edge (values outside go to the
    outer bins), or `categories`; any other value is counted as "(other)". Missing values are
    counted as "(missing)". With `about="population"`, the rows are shares of the values that are
    not missing.

    >>> histogram(["a", "b", "a"] * 300, categories=["a", "b"], epsilon=2.0, rng=0)["a"].name
    'a'
    """
    checked = Terms.check(terms)
    check_about(about)
    if (bounds is None) == (categories is None):
        raise ValueError("histogram needs either bounds or categories.")
    if categories is not None:
        listed = check_categories(categories)
        cells = codes(values, listed)
        names = [*map(category_text, listed), OTHER]
    else:
        range_ = as_range(bounds)
        edges = range_.unscale(np.linspace(0, 1, _bin_number(n_bins) + 1))
        cells = bin_codes(in_unit(values, range_), n_bins)
        names = [f"[{a:.6g}, {b:.6g})" for a, b in pairwise(edges)]
        names[-1] = names[-1][:-1] + "]"
    event, released = release_cells(checked, cells, len(names) + 1, "histogram")
    rows = cell_rows(released, [*names, ABSENT], about, checked.confidence)
    return StatisticTable(
        tuple(rows), event, checked.epsilon, checked.delta, checked.relation, "histogram"
    )


def contingency_table(
    first: ArrayLike,
    second: ArrayLike,
    *,
    categories: tuple[Sequence[Category], Sequence[Category]],
    about: str = RECORDS,
    **terms: Unpack[ReleaseTerms],
) -> StatisticTable:
    """Return private counts of every pair of categories of two columns.

    Guarantee: (epsilon, delta)-DP. One record adds 1 to one cell of one block. Records with a
    missing or undeclared value are counted together as "(other)". Rows are named "a | b", and the
    released counts form the table `.values[:-1].reshape(len(categories[0]), len(categories[1]))`.
    """
    checked = Terms.check(terms)
    check_about(about)
    lists = [check_categories(c, f"categories[{k}]") for k, c in enumerate(categories)]
    if len(lists) != 2:
        raise ValueError("categories must be a pair of lists, one for each column.")
    i, j = codes(first, lists[0]), codes(second, lists[1])
    same_length(first=i, second=j)
    shape = len(lists[0]), len(lists[1])
    n_pairs = _few(shape[0] * shape[1])
    cells = np.where((i < shape[0]) & (j < shape[1]), i * shape[1] + j, n_pairs)
    names = [f"{category_text(a)} | {category_text(b)}" for a in lists[0] for b in lists[1]]
    event, released = release_cells(checked, cells, n_pairs + 1, "contingency table")
    rows = cell_rows(released, [*names, OTHER], about, checked.confidence)
    return StatisticTable(
        tuple(rows), event, checked.epsilon, checked.delta, checked.relation, "contingency table"
    )


@dataclass(frozen=True)
class OutsideCount:
    """Released check of a declaration: the column with most values outside, and how many there are.

    `is_hopeless` is the decision: the share outside is above the tolerated one beyond what noise
    explains.
    """

    column: str
    count: Statistic
    share: Statistic
    is_hopeless: bool
    tolerated: float
    false_alarm: float
    event: Event

    def __str__(self) -> str:
        found = f"column {self.column!r}: about {self.share.value:.0%} of the values are outside"
        return f"{found} the declared domain (noisy count {self.count.value:.0f})"


class FlagCounts(NamedTuple):
    """How many records of a column are outside its declared domain, of how many. Private."""

    flagged: int
    n_records: int


def _flag_counts(given: "ArrayLike | FlagCounts", name: str) -> FlagCounts:
    if isinstance(given, FlagCounts):
        return given
    flags = flags_of(given, name)
    return FlagCounts(int(flags.sum()), len(flags))


def count_outside(
    flags: "Mapping[str, ArrayLike | FlagCounts]",
    *,
    tolerated: float = 0.5,
    false_alarm: float = 1e-3,
    **terms: Unpack[ReleaseTerms],
) -> OutsideCount:
    """Return a private count of values outside the declared domain, for the worst column.

    Guarantee: (epsilon, delta)-DP, delta unused. Half of epsilon chooses the column with most
    flagged records by the exponential mechanism: one record adds 0 or 1 to each score, and all
    scores move in one direction. The other half releases the numbers of flagged and of other
    records of that column: one block of two cells. The price does not grow with the number of
    columns, and the noise only with its logarithm.

    `flags` holds, for each column, whether the value of each record is outside, or `FlagCounts`.

    *Decision.* `is_hopeless` is True if D = (1 - t) outside - t inside, for t = `tolerated`, is
    above the half width of its noise at confidence 1 - 2 `false_alarm`. Where at most a share t of
    the records of every column is flagged, D <= 0 before noise, so the probability of a false
    alarm is at most `false_alarm`.
    """
    checked = Terms.check(terms)
    t, alarm = in_open_unit(tolerated=tolerated), in_open_unit(false_alarm=false_alarm)
    if alarm >= 0.5:
        raise ValueError(f"false_alarm must be below 0.5, got {alarm}.")
    names = list(flags)
    if not names:
        raise ValueError("flags must hold at least one column, got none.")
    columns = [_flag_counts(flags[name], name) for name in names]
    n_records = columns[0].n_records
    if any(column.n_records != n_records for column in columns):
        raise ValueError("flags must have one value for each record in every column.")
    counts = np.array([column.flagged for column in columns], np.float64)
    half = checked if len(names) == 1 else checked.less(0.5)
    division = half.divide([one_cell_block(checked, 2, n_records)], is_gaussian=False)
    choice = _choice_of_column(half)
    event = division.event
    if len(names) > 1:
        event = ev.Sequence((choice.event, event))
    pay(event, "count of values outside the declared domain", checked)
    worst = choice.release(counts, checked.rng) if len(names) > 1 else 0
    flagged = counts[worst]
    block = division.noises[0].release([flagged, n_records - flagged], checked.rng)
    outside, share = np.array([1.0, 0.0]), np.array([1 - t, -t])
    margin = half_width(block.spread(share), 1 - 2 * alarm)
    confidence = checked.confidence
    column = names[worst]
    number = Statistic(
        "count outside", *count_interval(block, outside, confidence), confidence, RECORDS, column
    )
    part = Statistic(
        "share outside", *share_interval(block, outside, RECORDS, confidence), confidence, RECORDS,
        column,
    )  # fmt: skip
    return OutsideCount(column, number, part, bool(block.total(share) > margin), t, alarm, event)


def bin_codes(unit: Floats, n_bins: int) -> Indices:
    """Return the bin of each private number in [0, 1]; `n_bins` for a missing one."""
    bins = np.minimum(np.nan_to_num(unit) * n_bins, n_bins - 1).astype(np.int64)
    return np.where(np.isnan(unit), n_bins, bins)


def one_cell_block(terms: Terms, n_cells: int, n_records: int, share: float = 1.0) -> Block:
    """Return the block of a histogram in which every record has exactly one cell."""
    return Block(_few(n_cells), share, total=n_records if terms.is_size_public else None)


def release_cells(
    terms: Terms, cells: Indices, n_cells: int, note: str
) -> tuple[Event, NoisyBlock]:
    """Pay for a histogram in which every record has one cell, and return event and noisy counts."""
    block = one_cell_block(terms, n_cells, len(cells))
    return terms.release(block, cell_counts(cells, n_cells), note)


def cell_rows(
    block: NoisyBlock, names: Sequence[str], about: str, confidence: float
) -> list[Statistic]:
    """Return one row for each cell of a released histogram, whose last cell is for missing values.

    About the records a row is a count; about the population it is a share of all other cells.
    """
    unit = np.eye(len(names))
    if about == RECORDS:
        found = [count_interval(block, c, confidence) for c in unit]
    else:
        present = 1.0 - unit[-1]
        found = [share_interval(block, c, about, confidence, present) for c in unit[:-1]]
    return [
        Statistic(name, *ends, confidence, about) for name, ends in zip(names, found, strict=False)
    ]


def count_interval(block: NoisyBlock, cells: Floats, confidence: float) -> Interval:
    """Return the number of records in the marked cells of a released histogram."""
    value = float(block.total(cells))
    half = float(half_width(block.spread(cells), confidence))
    return whole_interval(value, half)


def whole_interval(value: float, half: float) -> Interval:
    """Return the whole numbers >= 0 within `half` of `value`; the nearest one if there are none."""
    nearest = max(round(value), 0)
    lower, upper = max(ceil(value - half - 1e-9), 0), max(floor(value + half + 1e-9), 0)
    if lower > upper:
        lower = upper = nearest
    return Interval(float(nearest), float(lower), float(upper))


def share_interval(
    block: NoisyBlock,
    cells: Floats,
    about: str,
    confidence: float,
    present: Floats | None = None,
) -> Interval:
    """Return the share of the marked cells among the `present` cells (default all)."""
    whole_ = np.ones_like(cells) if present is None else present
    total, number = float(block.total(whole_)), float(block.total(cells))
    center = float(np.clip(number / total, 0.0, 1.0)) if total > 0 else 0.5

    def accepts(p: Floats) -> Flags:
        spread = block.spread(cells - p[:, None] * whole_)
        if about == POPULATION:
            spread = spread + Spread(max(total, 0.0) * p * (1 - p))
        return np.abs(number - p * total) <= half_width(spread, confidence)

    return Interval(center, *accepted_range(accepts, center))


def _choice_of_column(terms: Terms) -> ExponentialMechanism:
    """Return the mechanism that chooses the column with the largest count, at the terms' epsilon.

    A replaced record may raise one score and lower another by 1: as a removal and an addition it
    has twice the effect, hence half the epsilon per record.
    """
    factor = 2.0 if terms.relation is Relation.REPLACE_ONE else 1.0
    return ExponentialMechanism(
        terms.epsilon / factor * (1 - 1e-9),
        sensitivity=float(terms.records_per_person),
        monotonic=True,
    )


def _bin_number(n_bins: Any) -> int:  # Any: checked here
    return _few(whole(n_bins=n_bins, least=1))


def _few(n_cells: int) -> int:
    if n_cells > _MOST_CELLS:
        raise ValueError(f"a table may have at most {_MOST_CELLS:,} cells, got {n_cells:,}.")
    return n_cells
