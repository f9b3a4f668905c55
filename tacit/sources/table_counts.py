"""Counts that an engine makes: descriptions of a table, checks of its schema, and votes.

Every function groups or adds up where the rows are, and releases noisy results on the driver by
`tacit.summaries`, which pays first.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from tacit import summaries
from tacit._arrays import Indices
from tacit.datasets import FIELDS, Schema
from tacit.sources.engine_table import EngineTable, require_few_rows
from tacit.sources.grid_encoding import (
    flagged_names,
    flags,
    plain_values,
    require_bound,
    summarized,
)
from tacit.sources.places import open_table
from tacit.summaries import FlagCounts, OutsideCount, ReleaseTerms, StatisticTable, Tally


def describe(
    table: Any,  # Any: what `open_table` takes
    schema: Schema,
    *,
    probabilities: Sequence[float] = (0.25, 0.5, 0.75),
    check_share: float = 0.05,
    tolerated: float = 0.5,
    **terms: Unpack[ReleaseTerms],
) -> StatisticTable:
    """Return private statistics of every declared column; see `tacit.summaries.describe`.

    The engine counts how often each value occurs, one pass for each column. Numbers are rounded to
    1 / 2^16 of their range. If the schema has a column of type person, the engine keeps at most
    `records_per_person` records of each (default 1), and the guarantee is for a person. With more
    than 1, which are not independent, intervals are about these records, not about a population.

    >>> import pandas as pd
    >>> people = pd.DataFrame({"age": [30.0, 41.0, 52.0] * 400})
    >>> found = describe(people, Schema({"age": [18, 90]}), epsilon=50.0, rng=0)
    >>> round(found["age", "mean"].value)
    41
    """
    most, terms = _of_persons(schema, terms)
    with open_table(table, schema) as opened:
        rows = opened.coded(schema, most)
        return summaries.describe(
            tallies(rows, schema),
            schema,
            probabilities=probabilities,
            about="population" if most == 1 else "records",
            check_share=check_share,
            tolerated=tolerated,
            flags=flag_counts(rows, schema) if check_share else {},  # type: ignore[arg-type]
            **terms,
        )


def count_outside(
    table: Any,  # Any: what `open_table` takes
    schema: Schema,
    *,
    tolerated: float = 0.5,
    **terms: Unpack[ReleaseTerms],
) -> OutsideCount:
    """Return a private count of cells that the schema does not describe, for the worst column.

    See `tacit.summaries.count_outside`, and `describe` for persons with several records.
    """
    most, terms = _of_persons(schema, terms)
    with open_table(table, schema) as opened:
        found = flag_counts(opened.coded(schema, most), schema)
    return summaries.count_outside(found, tolerated=tolerated, **terms)


def flag_counts(rows: EngineTable, schema: Schema) -> dict[str, FlagCounts]:
    """Return how many cells of each column are not as declared, from one pass. Private."""
    names = flagged_names(schema)
    found = rows.sums(
        lambda ops: {**flags(schema, ops), "n": ops.where([(ops.column("c0") < 0, 1)], 1)}
    )
    n_rows = require_few_rows(found.pop("n", 0))
    counted = {name: FlagCounts(found.get(f"f{k}", 0), n_rows) for k, name in enumerate(names)}
    return {FIELDS: FlagCounts(0, n_rows), **counted}  # a table in an engine has no lines


def tallies(rows: EngineTable, schema: Schema) -> dict[str, Tally]:
    """Return how often each value of each column occurs, one pass for each column. Private."""
    found = {}
    for code, column in summarized(schema).items():
        counted = sorted(rows.tally([code]).items())
        values = plain_values(column, [key[0] for key, _ in counted])
        repeats = np.array([n for _, n in counted], np.int64)
        found[column.name] = Tally(_column(values), repeats)
    return found


def count_votes(
    table: Any,  # Any: what `open_table` takes
    *,
    n_queries: int,
    n_classes: int,
    query: str = "query",
    teacher: str = "teacher",
    label: str = "label",
) -> Indices:
    """Return the votes of teachers on public queries, (queries, classes), counted by an engine.

    The table has one row per vote: numbers of query, teacher and label. A teacher has one vote on
    each query, the smallest label of its rows, so that whoever changes a teacher moves one vote.
    Rows with other numbers are not counted. Private: pass the result to an aggregator of
    `tacit.pate`, which pays and adds noise.

    >>> import pandas as pd
    >>> votes = pd.DataFrame({"query": [0, 0, 0, 1], "teacher": [0, 1, 1, 0],
    ...                       "label": [1, 1, 0, 2]})
    >>> count_votes(votes, n_queries=2, n_classes=3).tolist()
    [[1, 1, 0], [0, 0, 1]]
    """
    columns = {name: [0, 1] for name in (query, teacher, label)}
    with open_table(table, Schema(columns)) as opened:
        rows = opened.integers([query, teacher, label])
        counted = rows.least(["i0", "i1"], "i2").tally(["i0", "i2"])
    votes = np.zeros((n_queries, n_classes), np.int64)
    for (asked, answer), n in counted.items():
        if 0 <= asked < n_queries and 0 <= answer < n_classes:
            votes[asked, answer] = n
    return votes


def _of_persons(schema: Schema, terms: ReleaseTerms) -> tuple[int, ReleaseTerms]:
    """Return how many records of each person are kept, and the terms that state it.

    Without a column of persons all are kept, and `records_per_person` is what the caller vouches.
    """
    if not summarized(schema):
        raise ValueError("the schema declares no column to summarize.")
    if schema.unit != "person":
        return 1, terms
    most = require_bound(schema, terms.get("records_per_person") or 1)
    return most, {**terms, "records_per_person": most}


def _column(values: list[Any]) -> Any:  # Any: numbers as an array, texts as a list
    if all(isinstance(value, float) for value in values):
        return np.array(values, np.float64)
    return values
