"""Description of a whole table: counts, means, standard deviations, quantiles and shares.

A small share of the budget first pays for a noisy count of values outside the declared domains, so
that a wrong schema is refused before the rest is spent. The rest is divided once: every declared
column gets the same share. What is spent on a schema that fits depends on the schema alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike

from tacit import events as ev
from tacit._arrays import Flags, Indices
from tacit._check import within
from tacit.events import Event
from tacit.summaries.averages import DEGREE, mean_interval, variance_interval
from tacit.summaries.bernstein import MomentSums, moment_block, moment_sums
from tacit.summaries.column_values import (
    CLIP,
    DROP,
    OTHER,
    Range,
    as_range,
    category_text,
    check_categories,
    codes,
    in_unit,
    is_outside_bounds,
    is_present,
    numbers,
    truths,
)
from tacit.summaries.counts import (
    count_interval,
    count_outside,
    one_cell_block,
    share_interval,
    whole_interval,
)
from tacit.summaries.error_law import Spread, half_width
from tacit.summaries.payment import Block, Division, NoisyBlock, ReleaseTerms, Terms, cell_counts
from tacit.summaries.quantiles import (
    CountTree,
    cells_for,
    check_probabilities,
    choose_tree,
    grid_size,
    quantile_interval,
    quantile_name,
    range_block,
    release_range,
)
from tacit.summaries.statistic import (
    POPULATION,
    RECORDS,
    Statistic,
    StatisticTable,
    check_about,
)


class Tally(NamedTuple):
    """A private column as the values that occur, with the number of records that have each."""

    values: ArrayLike
    repeats: Indices

    @property
    def n_records(self) -> int:
        """Number of records."""
        return int(self.repeats.sum())


TABLE = "(table)"
"""Name of the column in which the row about the whole table stands."""
_IGNORED = ("ignored", "person", "weight")
_HOW = "Declare (lower, upper), a list of categories, bool, or None for private bounds."


def describe(
    table: Any,  # Any: a mapping of columns or a data frame
    schema: Any,  # Any: a mapping of declarations or an object with `columns`
    *,
    probabilities: Sequence[float] = (0.25, 0.5, 0.75),
    about: str = POPULATION,
    check_share: float = 0.05,
    flags: Mapping[str, ArrayLike] | None = None,
    tolerated: float = 0.5,
    **terms: Unpack[ReleaseTerms],
) -> StatisticTable:
    """Return private statistics of every declared column of a table, in one budget.

    Guarantee: the call is (epsilon, delta)-DP, by the argument of `tacit.summaries.payment` for all
    blocks together, after `count_outside` with the share `check_share` of epsilon. Without a
    ledger, account for `event` of the result.

    Parameters
    ----------
    table
        Columns by name: a dictionary of lists or arrays, or a pandas or polars data frame. A column
        may be a `Tally`, as an engine counts it.
    schema
        What each column may hold, by name, from public knowledge: `(lower, upper)` for a number, a
        list of categories, `bool`, or None for a number whose bounds nobody can declare; these are
        then found privately (see `private_bounds`). Two numbers are bounds; write categories that
        are numbers as texts. Columns that are not declared are not read. A `tacit.datasets.Schema`
        is also accepted, with its rules for missing values and values outside the domain.
    probabilities
        Quantiles of every number.
    about
        "population" or "records": what the intervals of means, deviations, quantiles and shares are
        about. Counts are always about the records.
    check_share
        Share of epsilon, at most half, that pays for the check of the schema; 0 leaves it out. If
        more than the share `tolerated` of the values of a column are outside its declared domain,
        an error names the column and the rest is not spent. For a schema that fits better, the
        probability of this error is at most 0.001.
    flags
        What the check counts instead: for each name, which records are not as declared.
    terms
        Price and payment: see `ReleaseTerms`.

    >>> people = {"age": [30.0, 41.0, 52.0] * 400, "sex": ["f", "m", "f"] * 400}
    >>> found = describe(people, {"age": (18, 90), "sex": ["f", "m"]}, epsilon=2.0, rng=0)
    >>> found["age", "mean"].name, found["sex", "share of f"].about
    ('mean', 'population')
    """
    checked = Terms.check(terms)
    wanted = check_probabilities(probabilities)
    check_about(about)
    columns = declared_columns(schema)
    values = [_column_of(table, column.name) for column in columns]
    n_records = _length_of(values)
    if flags is None and check_share == 0:
        flags = {}
    if flags is None:
        pairs = zip(columns, values, strict=True)
        flags = {column.name: column.is_outside(_values_of(private)) for column, private in pairs}
    spent = _check_schema(flags, checked, check_share, tolerated)
    trees, division = _divide(columns, checked.less(check_share), n_records)
    event = division.pay(f"description of {len(columns)} columns")
    rows: list[Statistic] = []
    complete: list[NoisyBlock] = []
    first = 0
    for column, private, tree in zip(columns, values, trees, strict=True):
        block, found = column.release(private, tree, division, first, wanted, about)
        first += len(column.blocks(checked, n_records, tree))
        complete.append(block)
        rows += [replace(row, column=column.name) for row in found]
    head = _table_count(complete, n_records, checked)
    return StatisticTable(
        (head, *rows),
        ev.Sequence((*spent, event)) if spent else event,
        checked.epsilon,
        checked.delta,
        checked.relation,
        "description",
    )


@dataclass(frozen=True)
class _NumberColumn:
    """A declared number; without a range, its bounds are found privately."""

    name: str
    range: Range | None
    missing: str | float = DROP
    outside: str = CLIP
    step: float | None = None

    @property
    def n_values(self) -> int:
        """Number of values of a declared grid; 0 if there is none."""
        return grid_size(self.range, self.step) if self.range else 0

    def is_outside(self, values: ArrayLike) -> Flags:
        return is_outside_bounds(values, self.range)

    def blocks(self, terms: Terms, n_records: int, tree: CountTree) -> list[Block]:
        found = [] if self.range else [range_block(0.2)]
        share = 0.8 if found else 1.0
        found.append(moment_block(terms, DEGREE, n_records, share=0.4 * share))
        return [*found, *tree.blocks(0.6 * share)]

    def release(
        self,
        values: ArrayLike | Tally,
        tree: CountTree,
        division: Division,
        first: int,
        probabilities: Sequence[float],
        about: str,
    ) -> tuple[NoisyBlock, list[Statistic]]:
        terms, range_, rows = division.terms, self.range, []
        values, repeats = _taken_apart(values)
        if range_ is None:
            if repeats is not None:
                raise ValueError(f"column {self.name!r} needs bounds: its values were counted.")
            found = release_range(numbers(values), division, terms, index=first)
            range_ = Range(found.lower, found.upper)
            first += 1
        unit = in_unit(values, range_, missing=self.missing, outside=self.outside)
        block = division.noises[first].release(
            moment_sums(DEGREE, unit, repeats=repeats), terms.rng
        )
        counts = tree.release(unit, division, terms, first + 1, repeats)
        level, sums = terms.confidence, MomentSums.of(block, DEGREE)
        if self.range is None:
            rows = [
                Statistic(f"{end} bound", x, x, x, level, "found privately")
                for end, x in zip(("lower", "upper"), range_, strict=True)
            ]
        present = np.append(0.0, np.ones(DEGREE + 1))
        number = count_interval(block, present, level)
        width = range_.width
        average = mean_interval(sums, about, level).through(range_.unscale)
        deviation = variance_interval(sums, about, level).through(lambda x: width * math.sqrt(x))
        rows.append(Statistic("count", *number, level, RECORDS))
        rows.append(Statistic("mean", *average, level, about))
        rows.append(Statistic("standard deviation", *deviation, level, about))
        for p in probabilities:
            ends = quantile_interval(counts, p, range_, about, level)
            rows.append(Statistic(quantile_name(p), *ends, level, about))
        return block, rows


@dataclass(frozen=True)
class _Category:
    """A declared list of categories, or truth values, with the cells (other) and (missing)."""

    name: str
    categories: tuple[Any, ...]
    missing: Any = None
    outside: Any = None
    at_least: float | None = None

    def is_outside(self, values: ArrayLike) -> Flags:
        return self._cells(values) == len(self.categories)

    def blocks(self, terms: Terms, n_records: int, tree: CountTree) -> list[Block]:  # noqa: ARG002
        return [one_cell_block(terms, len(self.categories) + 2, n_records)]

    def release(
        self,
        values: ArrayLike | Tally,
        tree: CountTree,  # noqa: ARG002  # the signature of all columns
        division: Division,
        first: int,
        probabilities: Sequence[float],  # noqa: ARG002
        about: str,
    ) -> tuple[NoisyBlock, list[Statistic]]:
        k = len(self.categories)
        values, repeats = _taken_apart(values)
        cells = self._cells(values)
        for replaced, by in ((k, self.outside), (k + 1, self.missing)):
            if by is not None:
                cells = np.where(cells == replaced, self.categories.index(by), cells)
        noise = division.noises[first]
        block = noise.release(cell_counts(cells, k + 2, repeats), division.terms.rng)
        level = division.terms.confidence
        names = [f"share of {category_text(c)}" for c in self.categories]
        present = np.append(np.ones(k + 1), 0.0)
        number = Statistic("count", *count_interval(block, present, level), level, RECORDS)
        shares = [
            Statistic(name, *share_interval(block, cell, about, level, present), level, about)
            for name, cell in zip([*names, f"share of {OTHER}"], np.eye(k + 2), strict=False)
        ]
        return block, [number, *shares]

    def _cells(self, values: ArrayLike) -> Any:  # Any: integers
        if self.at_least is not None:
            column = numbers(values)
            absent = np.where(is_present(values), 2, 3)
            return np.where(np.isnan(column), absent, column >= self.at_least)
        return (
            truths(values) if self.categories == (False, True) else codes(values, self.categories)
        )


_Declared = _NumberColumn | _Category


def declared_columns(schema: Any) -> list[_Declared]:  # Any: see `describe`
    """Return the declared columns of a schema in one form; raise for what cannot be read."""
    columns = schema if isinstance(schema, Mapping) else getattr(schema, "declared", None)
    if columns is None:
        columns = getattr(schema, "columns", None)
    if columns is None:
        raise TypeError(f"schema must be a dictionary of declarations. {_HOW}")
    if isinstance(columns, Mapping):
        pairs = [(str(name), given) for name, given in columns.items()]
    else:
        pairs = [(column.name, column) for column in columns]
    found = [column for name, given in pairs if (column := _declared(name, given)) is not None]
    if not found:
        raise ValueError(f"schema must declare at least one column. {_HOW}")
    return found


def _declared(name: str, given: Any) -> _Declared | None:  # Any: what a user declares
    if given is None or given == "number":
        return _NumberColumn(name, None)
    if given is bool or given == "boolean":
        return _Category(name, (False, True))
    if isinstance(given, str):
        if given in _IGNORED:
            return None
        raise ValueError(f"column {name!r} has no declaration that can be read. {_HOW}")
    if isinstance(given, tuple | list | np.ndarray):
        if len(given) == 2 and all(_is_real(x) for x in given):
            return _NumberColumn(name, as_range(given, f"bounds of column {name!r}"))
        return _Category(name, check_categories(list(given), f"categories of column {name!r}"))
    return _from_settings(name, given)


def _from_settings(name: str, given: Any) -> _Declared | None:  # Any: an object or a mapping
    """Return the column that settings declare: type, lower, upper, categories, at_least, rules."""

    def setting(key: str) -> Any:  # Any: as declared
        return given.get(key) if isinstance(given, Mapping) else getattr(given, key, None)

    kind, missing, outside = setting("type") or "", setting("missing"), setting("outside")
    if kind in _IGNORED:
        return None
    if setting("categories"):
        listed = check_categories(list(setting("categories")), f"categories of column {name!r}")
        return _Category(
            name,
            listed,
            missing if missing in listed else None,
            outside if outside in listed else None,
        )
    if setting("at_least") is not None:
        filled = missing if isinstance(missing, bool) else None
        return _Category(name, (False, True), filled, at_least=float(setting("at_least")))
    if kind == "boolean":
        return _Category(name, (False, True), missing if isinstance(missing, bool) else None)
    bounds = setting("lower"), setting("upper")
    if bounds == (None, None) and kind != "number":
        raise ValueError(f"column {name!r} has no declaration that can be read. {_HOW}")
    range_ = None if bounds == (None, None) else as_range(bounds, f"bounds of column {name!r}")
    rule = DROP if outside in ("missing", DROP) else CLIP
    filled = float(missing) if _is_real(missing) else DROP
    return _NumberColumn(name, range_, filled, rule, setting("step"))


def _check_schema(
    flags: Mapping[str, ArrayLike], terms: Terms, share: float, tolerated: float
) -> tuple[Event, ...]:
    """Pay for the check of the schema and return its event; raise if a column is hopeless."""
    within(0, 0.5, check_share=share)
    if share == 0:
        return ()
    found = count_outside(
        flags,
        tolerated=tolerated,
        epsilon=terms.epsilon * share,
        relation=terms.relation,
        ledger=terms.ledger,
        rng=terms.rng,
        **({"records_per_person": terms.records_per_person} if terms.is_of_persons else {}),
    )
    if found.is_hopeless:
        raise ValueError(
            f"{found}. Correct its declaration. {100 * share:g} % of epsilon {terms.epsilon:g} was "
            "spent on this check, and nothing else."
        )
    return (found.event,)


def _divide(
    columns: Sequence[_Declared], terms: Terms, n_records: int
) -> tuple[list[CountTree], Division]:
    """Return the quantile tree of each column and the mechanisms of all blocks.

    Every tree is made as if all of them were alike; only numbers on a grid have fewer leaves.
    """
    n_trees = sum(isinstance(column, _NumberColumn) for column in columns)
    without = CountTree(0, 2, is_gaussian=False)
    n_other = sum(len(column.blocks(terms, n_records, without)) for column in columns)
    tree = without._replace(is_gaussian=terms.is_gaussian(n_other))
    n_cells = 0
    if n_trees:
        n_cells = cells_for(terms.epsilon / len(columns))
        tree = choose_tree(terms, n_cells, n_trees=n_trees, n_other=n_other)
    trees = [
        choose_tree(
            terms, n_cells, n_values=column.n_values, n_trees=n_trees, n_other=n_other,
            is_gaussian=tree.is_gaussian,
        )
        if isinstance(column, _NumberColumn) and column.n_values else tree
        for column in columns
    ]  # fmt: skip
    pairs = zip(columns, trees, strict=True)
    blocks = [block for column, own in pairs for block in column.blocks(terms, n_records, own)]
    return trees, terms.divide(blocks, is_gaussian=tree.is_gaussian)


def _table_count(blocks: Sequence[NoisyBlock], n_records: int, terms: Terms) -> Statistic:
    """Return the number of records, averaged over blocks in which each record adds exactly 1.

    Weights are inverse to the variances of the noise.
    """
    if terms.is_size_public:
        n = float(n_records)
        return Statistic("count", n, n, n, terms.confidence, RECORDS, TABLE)
    ones = [np.ones(len(block.cells)) for block in blocks]
    spreads = [block.spread(one) for block, one in zip(blocks, ones, strict=True)]
    weights = np.array([1 / spread.variance for spread in spreads])
    weights = weights / weights.sum()
    value = float(sum(w * b.cells.sum() for w, b in zip(weights, blocks, strict=True)))
    parts = [spread.scaled(w) for spread, w in zip(spreads, weights, strict=True)]
    half = float(half_width(sum(parts, Spread(0.0)), terms.confidence))
    ends = whole_interval(value, half)
    return Statistic("count", *ends, terms.confidence, RECORDS, TABLE)


def _column_of(table: Any, name: str) -> Any:  # Any: as for `describe`
    try:
        return table[name]
    except (KeyError, IndexError, TypeError, ValueError):
        raise ValueError(f"the table has no column {name!r}, which the schema declares.") from None
    except Exception as error:  # data frame libraries raise errors of their own
        if "NotFound" in type(error).__name__:
            raise ValueError(f"the table has no column {name!r}.") from None
        raise


def _length_of(values: Sequence[Any]) -> int:
    lengths = {c.n_records if isinstance(c, Tally) else len(c) for c in values}
    if len(lengths) != 1:
        raise ValueError("all columns of the table must have one value for each record.")
    return lengths.pop()


def _taken_apart(column: ArrayLike | Tally) -> tuple[ArrayLike, Indices | None]:
    """Return the values of a column, and how many records have each; None for one record each."""
    return (column.values, column.repeats) if isinstance(column, Tally) else (column, None)


def _values_of(column: ArrayLike | Tally) -> ArrayLike:
    if isinstance(column, Tally):
        raise ValueError("flags must be given for columns that were counted, or check_share=0.")
    return column


def _is_real(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
