"""Tables where they are: what an engine computes of all rows, without handing one out.

`EngineTable` is what every kind of table can do: apply formulas to its rows (`stage`), keep one
record of each person, add up, and count. `FrameTable` serves data frames and engines through
narwhals, `PostgresTable` a PostgreSQL server, and `ChunkTable` an iteration over parts in Python,
such as a CSV file. Every result is **private**: exact sums over records, to be released with noise.

A result is fetched once, whole, after the engine has finished. Where a task fails, the engine
repeats it from the rows and uses one of its results, so no row is added twice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from tacit.datasets import Schema, find_columns
from tacit.sources.grid_encoding import (
    HASH,
    MOST_ROWS,
    PERSON,
    choice_order,
    code_names,
    encode,
    encode_cells,
    features,
    person_column,
    person_key,
)
from tacit.sources.operations import (
    BOOLEAN,
    NUMBER,
    TEXT,
    ArrayOperations,
    Expression,
    FrameOperations,
    Operations,
    SqlOperations,
    identifier,
    quoted,
)

Formulas: TypeAlias = Callable[[Operations], Mapping[str, Expression]]
"""Named formulas about the rows of a table."""
Chunks: TypeAlias = Callable[[], Iterable[Mapping[str, Any]]]
"""A function that starts one pass over the cells of a table. Any: see `tacit.datasets.Cells`."""
_MOST_SUMS = 6000  # formulas in one query
_BLOCK = 2**20  # rows whose products are added as doubles: 2^30 * 2^20 < 2^53, so exactly


class EngineTable(Protocol):
    """A table in an engine; see the module."""

    def encoded(self, schema: Schema) -> "EngineTable":
        """Return the table of features and target on the grid, one record of each person."""
        ...

    def flagged(self, schema: Schema) -> "EngineTable":
        """Return the table of flags: 1 where a cell is not as declared, by column."""
        ...

    def stage(self, formulas: Formulas) -> "EngineTable":
        """Return the table whose columns are the formulas, each an integer."""
        ...

    def sums(self, formulas: Formulas) -> dict[str, int]:
        """Return the sum of each formula over all rows. Private."""
        ...

    def gram(self, names: Sequence[str]) -> np.ndarray:
        """Return the sums of all products of two of the named columns. Private."""
        ...

    def count(self) -> int:
        """Return the number of rows. Private."""
        ...

    def tally(self, names: Sequence[str]) -> dict[tuple[int, ...], int]:
        """Return how often each combination of values of the named columns occurs. Private."""
        ...


class FrameTable:
    """A data frame of narwhals: pandas, polars, pyarrow, DuckDB, Dask or Spark."""

    def __init__(self, frame: Any) -> None:  # Any: a frame of narwhals
        self._frame = frame.lazy()
        self._ops = FrameOperations()

    def encoded(self, schema: Schema) -> "FrameTable":
        kinds, person = self._kinds(schema), person_column(schema)
        if person is None:
            codes = self._selected(lambda ops: encode(schema, kinds, ops).codes)
        else:
            codes = self._one_per_person(schema, kinds)
        return codes.stage(lambda ops: features(schema, ops))

    def flagged(self, schema: Schema) -> "FrameTable":
        kinds = self._kinds(schema)
        return self._selected(lambda ops: _numbered(encode(schema, kinds, ops).flags))

    def stage(self, formulas: Formulas) -> "FrameTable":
        return self._selected(formulas)

    def sums(self, formulas: Formulas) -> dict[str, int]:
        import narwhals.stable.v2 as nw

        found = formulas(self._ops)
        _require_few_sums(len(found))
        values = self._first_row(
            [expression.sum().cast(nw.Int64).alias(name) for name, expression in found.items()]
        )
        return dict(zip(found, values, strict=True))

    def gram(self, names: Sequence[str]) -> np.ndarray:
        return _gram_of(names, self.sums)

    def count(self) -> int:
        import narwhals.stable.v2 as nw

        return self._first_row([nw.len().cast(nw.Int64).alias("n")])[0]

    def tally(self, names: Sequence[str]) -> dict[tuple[int, ...], int]:
        import narwhals.stable.v2 as nw

        counted = self._frame.group_by(*names).agg(nw.len().cast(nw.Int64).alias("n"))
        rows = counted.select(*names, "n").collect().rows()
        return {tuple(int(v) for v in values): int(n) for *values, n in rows}

    def _selected(self, formulas: Formulas) -> "FrameTable":
        named = [value.alias(name) for name, value in formulas(self._ops).items()]
        return FrameTable(self._frame.select(*named))

    def _one_per_person(self, schema: Schema, kinds: Mapping[str, str]) -> "FrameTable":
        """Return the codes of the record of each person that `choice_order` puts first.

        Of records with equal numbers, which are equal or collide, each code is the smallest one.
        """
        import narwhals.stable.v2 as nw

        column, names = person_column(schema), code_names(schema)
        assert column is not None  # the caller asked
        key, missing = person_key(schema, column, kinds[column.name], self._ops)
        codes = encode(schema, kinds, self._ops).codes
        named = [value.alias(name) for name, value in codes.items()]
        rows = self._frame.select(*named, key.alias(PERSON), missing.alias("missing"))
        rows = rows.filter(~nw.col("missing")).drop("missing")
        rows = rows.with_columns(choice_order(schema, self._ops).alias(HASH))
        least = rows.group_by(PERSON).agg(nw.col(HASH).min().alias("least"))
        rows = rows.join(least, on=PERSON, how="inner").filter(nw.col(HASH) == nw.col("least"))
        kept = rows.group_by(PERSON).agg(*(nw.col(name).min() for name in names))
        return FrameTable(kept.select(*names))

    def _kinds(self, schema: Schema) -> dict[str, str]:
        types = self._frame.collect_schema()
        find_columns("the table", schema.needed, list(types))
        return {name: _frame_kind(name, types[name]) for name in schema.needed}

    def _first_row(self, expressions: Sequence[Any]) -> list[int]:
        (values,) = self._frame.select(*expressions).collect().rows()
        return [int(value or 0) for value in values]


class PostgresTable:
    """A table or view of a PostgreSQL server, or a query over one."""

    def __init__(self, connection: Any, query: str, kinds: Mapping[str, str] | None = None) -> None:
        self._connection, self._query, self._types = connection, query, kinds
        self._ops = SqlOperations()

    def encoded(self, schema: Schema) -> "PostgresTable":
        kinds, person = self._kinds(schema), person_column(schema)
        if any(derived.product for derived in schema.derived_features):
            raise ValueError(
                "PostgreSQL reports products that are too large or too small as errors, which "
                "would reveal them. Make the product a column of a view."
            )
        if person is None:
            codes = self.stage(lambda ops: encode(schema, kinds, ops).codes)
        else:
            codes = self._one_per_person(schema, kinds)
        return codes.stage(lambda ops: features(schema, ops))

    def flagged(self, schema: Schema) -> "PostgresTable":
        kinds = self._kinds(schema)
        return self.stage(lambda ops: _numbered(encode(schema, kinds, ops).flags))

    def stage(self, formulas: Formulas) -> "PostgresTable":
        listed = ", ".join(
            f"{quoted(value)} AS {identifier(name)}"
            for name, value in formulas(self._ops).items()
        )  # fmt: skip
        # OFFSET 0 keeps the server from computing a formula again wherever its name is used.
        return PostgresTable(self._connection, f"SELECT {listed} FROM {self._rows} OFFSET 0")

    def sums(self, formulas: Formulas) -> dict[str, int]:
        found = formulas(self._ops)
        _require_few_sums(len(found))
        values: list[int] = []
        texts = [f"sum({quoted(value)})" for value in found.values()]
        for start in range(0, len(texts), 1600):  # a query returns at most 1,664 columns
            (row,) = self._fetch(f"SELECT {', '.join(texts[start : start + 1600])} FROM {self._rows}")
            values += [int(value or 0) for value in row]
        return dict(zip(found, values, strict=True))

    def gram(self, names: Sequence[str]) -> np.ndarray:
        return _gram_of(names, self.sums)

    def count(self) -> int:
        return int(self._fetch(f"SELECT count(*) FROM {self._rows}")[0][0])

    def tally(self, names: Sequence[str]) -> dict[tuple[int, ...], int]:
        listed = ", ".join(map(identifier, names))
        query = f"SELECT {listed}, count(*) FROM {self._rows} GROUP BY {listed}"
        return {tuple(int(v) for v in values): int(n) for *values, n in self._fetch(query)}

    @property
    def _rows(self) -> str:
        return f"({self._query}) AS rows"

    def _one_per_person(self, schema: Schema, kinds: Mapping[str, str]) -> "PostgresTable":
        """Do what `FrameTable` does, with a query."""
        column, names = person_column(schema), code_names(schema)
        assert column is not None  # the caller asked
        key, missing = person_key(schema, column, kinds[column.name], self._ops)
        codes = encode(schema, kinds, self._ops).codes
        listed = ", ".join(f"{quoted(value)} AS {identifier(name)}" for name, value in codes.items())
        rows = f"SELECT {listed}, {quoted(key)} AS person FROM {self._rows} WHERE NOT {quoted(missing)}"
        order = quoted(choice_order(schema, self._ops))
        hashed = f"SELECT *, {order} AS hash FROM ({rows} OFFSET 0) AS coded"
        marked = f"SELECT *, min(hash) OVER (PARTITION BY person) AS least FROM ({hashed}) AS hashed"
        least = ", ".join(f"min({identifier(name)}) AS {identifier(name)}" for name in names)
        query = f"SELECT {least} FROM ({marked}) AS marked WHERE hash = least GROUP BY person"
        return PostgresTable(self._connection, query)

    def _kinds(self, schema: Schema) -> dict[str, str]:
        assert self._types is not None  # a table as it was opened
        find_columns("the table", schema.needed, list(self._types))
        for name in schema.needed:
            if not self._types[name]:
                raise ValueError(_wrong_type(name))
        return {name: self._types[name] for name in schema.needed}

    def _fetch(self, query: str) -> list[tuple[Any, ...]]:  # Any: values of SQL
        with self._connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()


class ChunkTable:
    """Cells that are read in chunks by Python, such as a file that is larger than memory."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def encoded(self, schema: Schema) -> "_ArrayTable":
        if person_column(schema) is None:
            codes = _ArrayTable(lambda: (encode_cells(schema, c).codes for c in self._chunks()))
        else:
            codes = _ArrayTable(lambda: [self._one_per_person(schema)])
        return codes.stage(lambda ops: features(schema, ops))

    def flagged(self, schema: Schema) -> "_ArrayTable":
        return _ArrayTable(lambda: (_numbered(encode_cells(schema, c).flags) for c in self._chunks()))

    def _one_per_person(self, schema: Schema) -> dict[str, np.ndarray]:
        """Do what `FrameTable` does, with a dictionary of all persons in memory."""
        column, names = person_column(schema), code_names(schema)
        assert column is not None  # the caller asked
        kept: dict[str, tuple[int, ...]] = {}
        for cells in self._chunks():
            codes = encode_cells(schema, cells).codes
            order = choice_order(schema, ArrayOperations(codes))
            rows = np.column_stack([order, *(codes[name] for name in names)]).tolist()
            for person, row in zip(column.ids(cells[column.name], schema.dialect.rules), rows,
                                   strict=True):  # fmt: skip
                if person is None:
                    continue
                old = kept.get(person)
                if old is None or row[0] < old[0]:
                    kept[person] = tuple(row)
                elif row[0] == old[0]:
                    kept[person] = tuple(map(min, row, old))
        table = np.array(list(kept.values()), np.int64).reshape(len(kept), len(names) + 1)
        return {name: table[:, k + 1] for k, name in enumerate(names)}


class _ArrayTable:
    """Integer columns that come in chunks of arrays."""

    def __init__(self, chunks: Callable[[], Iterable[Mapping[str, np.ndarray]]]) -> None:
        self._chunks = chunks

    def encoded(self, schema: Schema) -> "_ArrayTable":
        raise TypeError(f"already encoded by {schema!r}")

    flagged = encoded

    def stage(self, formulas: Formulas) -> "_ArrayTable":
        def chunks() -> Iterator[Mapping[str, np.ndarray]]:
            for part in self._chunks():
                found = dict(formulas(ArrayOperations(dict(part))))
                yield {name: np.asarray(value, np.int64) for name, value in found.items()}

        return _ArrayTable(chunks)

    def sums(self, formulas: Formulas) -> dict[str, int]:
        totals: dict[str, int] = {}
        for part in self.stage(formulas)._chunks():
            for name, values in part.items():
                totals[name] = totals.get(name, 0) + int(values.sum())
        return totals

    def gram(self, names: Sequence[str]) -> np.ndarray:
        total = np.zeros((len(names), len(names)), np.int64)
        for part in self._chunks():
            columns = np.column_stack([part[name] for name in names]).astype(np.float64)
            for start in range(0, len(columns), _BLOCK):
                block = columns[start : start + _BLOCK]
                total += (block.T @ block).astype(np.int64)  # every partial sum is an exact double
        return total

    def count(self) -> int:
        return sum(len(next(iter(part.values()))) for part in self._chunks())

    def tally(self, names: Sequence[str]) -> dict[tuple[int, ...], int]:
        found: dict[tuple[int, ...], int] = {}
        for part in self._chunks():
            rows = np.column_stack([part[name] for name in names])
            values, counts = np.unique(rows, axis=0, return_counts=True)
            for value, n in zip(values.tolist(), counts.tolist(), strict=True):
                found[tuple(value)] = found.get(tuple(value), 0) + n
        return found


def require_few_rows(n_rows: int) -> int:
    """Return the number of rows; raise if their sums might not fit in 64 bits."""
    if n_rows > MOST_ROWS:
        raise ValueError(f"a statistic in an engine takes at most {MOST_ROWS:,} rows.")
    return n_rows


def _gram_of(names: Sequence[str], sums: Callable[[Formulas], dict[str, int]]) -> np.ndarray:
    """Return the matrix of sums of products, each computed once."""
    size = len(names)
    rows, columns = np.triu_indices(size)
    pairs = list(zip(rows.tolist(), columns.tolist(), strict=True))
    found = sums(lambda ops: {
        f"s{k}": ops.column(names[i]) * ops.column(names[j]) for k, (i, j) in enumerate(pairs)
    })  # fmt: skip
    matrix = np.zeros((size, size), np.int64)
    matrix[rows, columns] = list(found.values())
    matrix[columns, rows] = matrix[rows, columns]
    return matrix


def _numbered(flags: Mapping[str, Expression]) -> dict[str, Expression]:
    """Return flags by number: a name of a column may be any text."""
    return {f"f{k}": flag for k, flag in enumerate(flags.values())}


def _frame_kind(name: str, dtype: Any) -> str:  # Any: a type of narwhals
    import narwhals.stable.v2 as nw

    if dtype.is_numeric():
        return NUMBER
    if dtype == nw.Boolean:
        return BOOLEAN
    if dtype in (nw.String, nw.Categorical) or isinstance(dtype, nw.Enum):
        return TEXT
    raise ValueError(_wrong_type(name))


def _wrong_type(name: str) -> str:
    return (
        f"column {name!r} holds neither numbers, truth values nor text in this table. Cast it "
        "there, in a view for example."
    )


def _require_few_sums(n: int) -> None:
    if n > _MOST_SUMS:
        raise ValueError(
            f"this schema needs {n:,} sums, more than the {_MOST_SUMS:,} that are computed in one "
            "query. Declare fewer columns or categories."
        )
