"""Tables where they are: what an engine computes of all rows, without handing one out.

`EngineTable` is what every kind of table can do: apply formulas to its rows (`stage`), keep a few
records of each person, add up, and count. `FrameTable` serves data frames and engines through
narwhals, `PostgresTable` a PostgreSQL server, and `ChunkTable` an iteration over parts in Python,
such as a CSV file. Every result is **private**: exact sums over records, to be released with noise.

A result is fetched once, whole, after the engine has finished. Where a task fails, the engine
repeats it from the rows and uses one of its results, so no row is added twice.
"""

import contextlib
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from tacit.datasets import Column, Schema, find_columns
from tacit.sources.grid_encoding import (
    HASH,
    MOST_ROWS,
    PERSON,
    apply_rules,
    choice_order,
    code_names,
    encode,
    encode_cells,
    features,
    has_target,
    person_column,
    person_key,
)
from tacit.sources.operations import (
    BOOLEAN,
    DECIMAL,
    INTEGER,
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
Condition: TypeAlias = Callable[[Operations], Expression | None]
"""A formula that is true or false for each row."""
Chunks: TypeAlias = Callable[[], Iterable[Mapping[str, Any]]]
"""A function that starts one pass over the cells of a table. Any: see `tacit.datasets.Cells`."""
_MOST_SUMS = 6000  # formulas in one query
_BLOCK = 2**20  # rows whose products are added as doubles: 2^30 * 2^20 < 2^53, so exactly


class RawTable(Protocol):
    """A table as it was opened."""

    def coded(self, schema: Schema, most: int = 1) -> "EngineTable":
        """Return the table of codes on the grid, with at most `most` records of each person.

        They are the first ones in the order of `choice_order`, and of the codes where that is the
        same. Records without a person are left out. Without a column of persons, all are kept.
        """
        ...

    def features(self, schema: Schema, most: int = 1) -> "EngineTable":
        """Return the table of features and target on the grid, of the records of `coded`.

        Records without a target are left out.
        """
        ...

    def integers(self, names: Sequence[str]) -> "EngineTable":
        """Return the named columns as i0, i1, ..., without rows that lack one.

        They must hold integers.
        """
        ...


class EngineTable(Protocol):
    """A table of integers in an engine; see the module."""

    def stage(self, formulas: Formulas) -> "EngineTable":
        """Return the table whose columns are the formulas."""
        ...

    def extend(self, formulas: Formulas) -> "EngineTable":
        """Return the table with the formulas as further columns, each computed once."""
        ...

    def keep(self, condition: Condition) -> "EngineTable":
        """Return the rows for which the condition holds; all rows if it is None."""
        ...

    def sums(self, formulas: Formulas) -> dict[str, int]:
        """Return the sum of each formula over all rows. Private."""
        ...

    def gram(self, names: Sequence[str], *, constant: int = 0) -> np.ndarray:
        """Return the sums of all products of two of the named columns. Private.

        If a `constant` is given, it is one more column, before the others.
        """
        ...

    def least(self, keys: Sequence[str], value: str) -> "EngineTable":
        """Return the smallest `value` for each combination of the named columns."""
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
        self._ops = FrameOperations(is_spark=frame.implementation.is_spark_like())

    def coded(self, schema: Schema, most: int = 1) -> "FrameTable":
        table = self._with_doubles(schema)
        kinds = table._kinds(schema.needed)
        if person_column(schema) is None:
            return table.stage(lambda ops: encode(schema, kinds, ops))
        return table._of_persons(schema, kinds, most)

    def features(self, schema: Schema, most: int = 1) -> "FrameTable":
        if person_column(schema) is not None:
            codes = self.coded(schema, most).stage(lambda ops: apply_rules(schema, ops))
        else:
            table = self._with_doubles(schema)
            kinds = table._kinds(schema.needed)
            codes = table.stage(lambda ops: encode(schema, kinds, ops, with_rules=True))
        # A stage of its own: several features are made of one code, which is computed once.
        kept = codes.keep(lambda ops: has_target(schema, ops))
        return kept.stage(lambda ops: features(schema, ops))

    def stage(self, formulas: Formulas) -> "FrameTable":
        named = [value.alias(name) for name, value in formulas(self._ops).items()]
        with _without_values():
            return FrameTable(self._frame.select(*named))

    def extend(self, formulas: Formulas) -> "FrameTable":
        named = [value.alias(name) for name, value in formulas(self._ops).items()]
        with _without_values():
            return FrameTable(self._frame.with_columns(*named))

    def keep(self, condition: Condition) -> "FrameTable":
        found = condition(self._ops)
        return self if found is None else FrameTable(self._frame.filter(found))

    def sums(self, formulas: Formulas) -> dict[str, int]:
        import narwhals.stable.v2 as nw

        found = formulas(self._ops)
        _require_few_sums(len(found))
        values = self._first_row(
            [expression.sum().cast(nw.Int64).alias(name) for name, expression in found.items()]
        )
        return dict(zip(found, values, strict=True))

    def gram(self, names: Sequence[str], *, constant: int = 0) -> np.ndarray:
        return _gram_of(names, constant, self.sums)

    def least(self, keys: Sequence[str], value: str) -> "FrameTable":
        import narwhals.stable.v2 as nw

        with _without_values():
            return FrameTable(self._frame.group_by(*keys).agg(nw.col(value).min()))

    def integers(self, names: Sequence[str]) -> "FrameTable":
        import narwhals.stable.v2 as nw

        kinds = self._kinds(names)
        columns = [self._ops.column(_integer_of(kinds, name)).cast(nw.Int64) for name in names]
        with _without_values():
            rows = self._frame.select(*(c.alias(f"i{k}") for k, c in enumerate(columns)))
            return FrameTable(rows.drop_nulls())

    def count(self) -> int:
        import narwhals.stable.v2 as nw

        return self._first_row([nw.len().cast(nw.Int64).alias("n")])[0]

    def tally(self, names: Sequence[str]) -> dict[tuple[int, ...], int]:
        import narwhals.stable.v2 as nw

        with _without_values():
            counted = self._frame.group_by(*names).agg(nw.len().alias("n"))
            rows = counted.select(*names, "n").collect().rows()
        return {tuple(int(v) for v in values): int(n) for *values, n in rows}

    def _of_persons(self, schema: Schema, kinds: Mapping[str, str], most: int) -> "FrameTable":
        import narwhals.stable.v2 as nw

        column, names = person_column(schema), code_names(schema)
        assert column is not None  # the caller asked
        key, missing = person_key(schema, column, kinds[column.name], self._ops)
        codes = encode(schema, kinds, self._ops)
        named = [value.alias(name) for name, value in codes.items()]
        with _without_values():
            rows = self._frame.select(*named, key.alias(PERSON), missing.alias("missing"))
            rows = rows.filter(~nw.col("missing")).drop("missing")
            rows = rows.with_columns(choice_order(schema, self._ops).alias(HASH))
            return FrameTable(_first_of_each(rows, [HASH, *names], most).select(*names))

    def _with_doubles(self, schema: Schema) -> "FrameTable":
        """Return a table of pyarrow with doubles for the integers that become numbers.

        Expressions of pyarrow refuse to round an integer to the nearest double, and quote it. They
        cannot compare unsigned integers of 64 bits with others either. Ids of persons stay exact.
        """
        used = {name for derived in schema.derived_features for name in derived.used}
        used |= {c.name for c in schema.declared if c.is_feature and c.type == "number"}
        person = person_column(schema)
        if not self._frame.implementation.is_pyarrow():
            return self
        import narwhals.stable.v2 as nw

        table = self._frame.collect().to_native()
        for place, field in enumerate(table.schema):
            kind = str(field.type)
            if person is not None and field.name == person.name:
                continue
            if kind == "uint64" or (kind == "int64" and field.name in used):
                cells = table.column(place).cast("double", safe=False)
                table = table.set_column(place, field.name, cells)
        return FrameTable(nw.from_native(table))

    def _kinds(self, names: Sequence[str]) -> dict[str, str]:
        types = self._frame.collect_schema()
        find_columns("the table", names, list(types))
        for name in names:
            if name == "*" or (name.startswith("^") and name.endswith("$")):
                raise ValueError(f"column {name!r} has a name that engines read as a pattern.")
        if self._frame.implementation.is_pandas():
            _require_texts(self._frame.collect().to_native(), names)
        return {name: _frame_kind(name, types[name]) for name in names}

    def _first_row(self, expressions: Sequence[Any]) -> list[int]:
        with _without_values():
            (values,) = self._frame.select(*expressions).collect().rows()
        return [int(value or 0) for value in values]


class PostgresTable:
    """A table or view of a PostgreSQL server, or a query over one."""

    def __init__(self, connection: Any, query: str, kinds: Mapping[str, str] | None = None) -> None:
        self._connection, self._query, self._types = connection, query, kinds
        self._ops = SqlOperations()

    def coded(self, schema: Schema, most: int = 1) -> "PostgresTable":
        kinds = self._kinds(schema.needed)
        if any(derived.product for derived in schema.derived_features):
            raise ValueError(
                "PostgreSQL reports products that are too large or too small as errors, which "
                "would reveal them. Make the product a column of a view."
            )
        if person_column(schema) is None:
            return self.stage(lambda ops: encode(schema, kinds, ops))
        return self._of_persons(schema, kinds, most)

    def features(self, schema: Schema, most: int = 1) -> "PostgresTable":
        codes = self.coded(schema, most).stage(lambda ops: apply_rules(schema, ops))
        kept = codes.keep(lambda ops: has_target(schema, ops))
        return kept.stage(lambda ops: features(schema, ops))

    def stage(self, formulas: Formulas) -> "PostgresTable":
        return self._select(_listed(formulas(self._ops)))

    def extend(self, formulas: Formulas) -> "PostgresTable":
        return self._select(f"*, {_listed(formulas(self._ops))}")

    def keep(self, condition: Condition) -> "PostgresTable":
        found = condition(self._ops)
        return self if found is None else self._select("*", f"WHERE {quoted(found)} ")

    def sums(self, formulas: Formulas) -> dict[str, int]:
        found = formulas(self._ops)
        _require_few_sums(len(found))
        values: list[int] = []
        texts = [f"sum({quoted(value)})" for value in found.values()]
        for start in range(0, len(texts), 1600):  # a query returns at most 1,664 columns
            (row,) = self._fetch(
                f"SELECT {', '.join(texts[start : start + 1600])} FROM {self._rows}"
            )
            values += [int(value or 0) for value in row]
        return dict(zip(found, values, strict=True))

    def gram(self, names: Sequence[str], *, constant: int = 0) -> np.ndarray:
        return _gram_of(names, constant, self.sums)

    def least(self, keys: Sequence[str], value: str) -> "PostgresTable":
        listed, name = ", ".join(map(identifier, keys)), identifier(value)
        query = f"SELECT {listed}, min({name}) AS {name} FROM {self._rows} GROUP BY {listed}"
        return PostgresTable(self._connection, query)

    def integers(self, names: Sequence[str]) -> "PostgresTable":
        kinds = self._kinds(names)
        listed = [identifier(_integer_of(kinds, name)) for name in names]
        cells = ", ".join(f"{name}::int8 AS i{k}" for k, name in enumerate(listed))
        known = " AND ".join(f"{name} IS NOT NULL" for name in listed)
        query = f"SELECT {cells} FROM {self._rows} WHERE {known}"
        return PostgresTable(self._connection, query)

    def count(self) -> int:
        return int(self._fetch(f"SELECT count(*) FROM {self._rows}")[0][0])

    def tally(self, names: Sequence[str]) -> dict[tuple[int, ...], int]:
        listed = ", ".join(map(identifier, names))
        query = f"SELECT {listed}, count(*) FROM {self._rows} GROUP BY {listed}"
        return {tuple(int(v) for v in values): int(n) for *values, n in self._fetch(query)}

    @property
    def _rows(self) -> str:
        return f"({self._query}) AS rows"

    def _select(self, columns: str, where: str = "") -> "PostgresTable":
        # OFFSET 0 keeps the server from computing a formula again wherever its name is used.
        query = f"SELECT {columns} FROM {self._rows} {where}OFFSET 0"
        return PostgresTable(self._connection, query)

    def _of_persons(self, schema: Schema, kinds: Mapping[str, str], most: int) -> "PostgresTable":
        column, names = person_column(schema), code_names(schema)
        assert column is not None  # the caller asked
        key, missing = person_key(schema, column, kinds[column.name], self._ops)
        codes = _listed(encode(schema, kinds, self._ops))
        rows = f"SELECT {codes}, {quoted(key)} AS person FROM {self._rows}"
        rows += f" WHERE NOT {quoted(missing)} OFFSET 0"
        order = ", ".join([quoted(choice_order(schema, self._ops)), *map(identifier, names)])
        place = f"row_number() OVER (PARTITION BY person ORDER BY {order})"
        placed = f"SELECT *, {place} AS place FROM ({rows}) AS coded"
        listed = ", ".join(map(identifier, names))
        query = f"SELECT {listed} FROM ({placed}) AS placed WHERE place <= {most}"
        return PostgresTable(self._connection, query)

    def _kinds(self, names: Sequence[str]) -> dict[str, str]:
        assert self._types is not None  # a table as it was opened
        find_columns("the table", names, list(self._types))
        for name in names:
            if not self._types[name]:
                raise ValueError(_wrong_type(name))
        return {name: self._types[name] for name in names}

    def _fetch(self, query: str) -> list[tuple[Any, ...]]:  # Any: values of SQL
        with _without_values(), self._connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()


class ChunkTable:
    """Cells that are read in chunks by Python, such as a file that is larger than memory."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def coded(self, schema: Schema, most: int = 1) -> "ArrayTable":
        if person_column(schema) is None:
            needed = schema.needed
            return ArrayTable(lambda: (encode_cells(schema, part) for part in self._parts(needed)))
        return ArrayTable(lambda: [self._of_persons(schema, most)])

    def features(self, schema: Schema, most: int = 1) -> "ArrayTable":
        codes = self.coded(schema, most).stage(lambda ops: apply_rules(schema, ops))
        kept = codes.keep(lambda ops: has_target(schema, ops))
        return kept.stage(lambda ops: features(schema, ops))

    def integers(self, names: Sequence[str]) -> "ArrayTable":
        """Return the named columns as i0, i1, ...; rows without integers are left out."""
        columns = [Column(name=name, lower=-(2**53), upper=2**53) for name in names]

        def chunks() -> Iterator[Mapping[str, np.ndarray]]:
            for cells in self._parts(names):
                found = [_integers(column, cells[column.name]) for column in columns]
                kept = np.all([is_known for _, is_known in found], axis=0)
                yield {f"i{k}": values[kept] for k, (values, _) in enumerate(found)}

        return ArrayTable(chunks)

    def _parts(self, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:  # Any: see `Cells`
        """Yield the chunks, or one without rows if there are none."""
        part = None
        for part in self._chunks():
            yield part
        if part is None:
            yield {name: np.zeros(0) for name in names}

    def _of_persons(self, schema: Schema, most: int) -> dict[str, np.ndarray]:
        """Return the codes of the records that are kept, found with all persons in memory."""
        column, names = person_column(schema), code_names(schema)
        assert column is not None  # the caller asked
        kept: defaultdict[str, list[list[int]]] = defaultdict(list)
        for cells in self._parts(schema.needed):
            codes = encode_cells(schema, cells)
            order = choice_order(schema, ArrayOperations(codes))
            rows = np.column_stack([order, *(codes[name] for name in names)]).tolist()
            persons = column.ids(cells[column.name], schema.dialect.rules)
            for person, row in zip(persons, rows, strict=True):
                if person is not None:
                    insort(kept[person], row)
                    del kept[person][most:]
        found = [row for rows in kept.values() for row in rows]
        table = np.array(found, np.int64).reshape(len(found), len(names) + 1)
        return {name: table[:, k + 1] for k, name in enumerate(names)}


class ArrayTable:
    """Integer columns that come in chunks of arrays."""

    def __init__(self, chunks: Callable[[], Iterable[Mapping[str, np.ndarray]]]) -> None:
        self._chunks = chunks

    def stage(self, formulas: Formulas) -> "ArrayTable":
        def chunks() -> Iterator[Mapping[str, np.ndarray]]:
            for part in self._chunks():
                yield formulas(ArrayOperations(dict(part)))

        return ArrayTable(chunks)

    def extend(self, formulas: Formulas) -> "ArrayTable":
        def chunks() -> Iterator[Mapping[str, np.ndarray]]:
            for part in self._chunks():
                yield {**part, **formulas(ArrayOperations(dict(part)))}

        return ArrayTable(chunks)

    def keep(self, condition: Condition) -> "ArrayTable":
        def chunks() -> Iterator[Mapping[str, np.ndarray]]:
            for part in self._chunks():
                kept = condition(ArrayOperations(dict(part)))
                yield part if kept is None else {name: v[kept] for name, v in part.items()}

        return ArrayTable(chunks)

    def sums(self, formulas: Formulas) -> dict[str, int]:
        totals: dict[str, int] = {}
        for part in self.stage(formulas)._chunks():
            for name, values in part.items():
                totals[name] = totals.get(name, 0) + int(values.sum())
        return totals

    def gram(self, names: Sequence[str], *, constant: int = 0) -> np.ndarray:
        size = len(names) + bool(constant)
        total = np.zeros((size, size), np.int64)
        for part in self._chunks():
            found = [part[name] for name in names]
            if constant:
                found.insert(0, np.full(len(found[0]), constant))
            columns = np.column_stack(found).astype(np.float64)
            for start in range(0, len(columns), _BLOCK):
                block = columns[start : start + _BLOCK]
                total += (block.T @ block).astype(np.int64)  # every partial sum is an exact double
        return total

    def least(self, keys: Sequence[str], value: str) -> "ArrayTable":
        def reduced() -> list[dict[str, np.ndarray]]:
            found: dict[tuple[int, ...], int] = {}
            for *key, number in self.tally([*keys, value]):
                found[tuple(key)] = min(number, found.get(tuple(key), number))
            rows = np.array([(*key, n) for key, n in found.items()], np.int64)
            rows = rows.reshape(len(found), len(keys) + 1)
            return [{name: rows[:, k] for k, name in enumerate([*keys, value])}]

        return ArrayTable(reduced)

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


def _gram_of(
    names: Sequence[str], constant: int, sums: Callable[[Formulas], dict[str, int]]
) -> np.ndarray:
    """Return the matrix of sums of products, each computed once."""
    size = len(names)
    rows, columns = np.triu_indices(size)
    pairs = list(zip(rows.tolist(), columns.tolist(), strict=True))

    def formulas(ops: Operations) -> dict[str, Expression]:
        values = [ops.column(name) for name in names]
        found = {f"s{k}": values[i] * values[j] for k, (i, j) in enumerate(pairs)}
        if constant:
            found |= {f"t{k}": value for k, value in enumerate(values)}
            found["n"] = ops.where([(values[0] < 0, 1)], 1)
        return found

    found = sums(formulas)
    matrix = np.zeros((size, size), np.int64)
    matrix[rows, columns] = [found[f"s{k}"] for k in range(len(pairs))]
    matrix[columns, rows] = matrix[rows, columns]
    if not constant:
        return matrix
    first = constant * np.array([found[f"t{k}"] for k in range(size)], np.int64)
    corner = np.array([[constant**2 * found["n"]]], np.int64)
    return np.block([[corner, first[None]], [first[:, None], matrix]])


def _first_of_each(rows: Any, order: list[str], most: int) -> Any:  # Any: a frame of narwhals
    """Return the first `most` rows of each person in the order of the named columns."""
    import narwhals.stable.v2 as nw

    kind = rows.implementation
    if kind.is_dask():  # all rows of a person come to one part
        parts = rows.to_native().shuffle(PERSON)
        return nw.from_native(parts.map_partitions(_first_in_memory, order, most))
    if kind.is_pandas_like() or kind.is_pyarrow():
        return nw.from_native(_first_in_memory(rows.collect().to_pandas(), order, most)).lazy()
    place = nw.col(HASH).cum_count().over(PERSON, order_by=order)
    return rows.with_columns(place.alias("place")).filter(nw.col("place") <= most)


def _first_in_memory(frame: Any, order: list[str], most: int) -> Any:  # Any: a frame of pandas
    return frame.sort_values(order).groupby(PERSON).head(most)


def _listed(formulas: Mapping[str, Expression]) -> str:
    """Return named formulas as the columns of a query."""
    named = ((quoted(value), identifier(name)) for name, value in formulas.items())
    return ", ".join(f"{text} AS {name}" for text, name in named)


def _frame_kind(name: str, dtype: Any) -> str:  # Any: a type of narwhals
    import narwhals.stable.v2 as nw

    if dtype.is_integer():
        return INTEGER
    if dtype.is_numeric():
        return DECIMAL if dtype.is_decimal() else NUMBER
    if dtype == nw.Boolean:
        return BOOLEAN
    if dtype in (nw.String, nw.Categorical) or isinstance(dtype, nw.Enum):
        return TEXT
    raise ValueError(_wrong_type(name))


def _require_texts(frame: Any, names: Sequence[str]) -> None:  # Any: a frame of pandas
    """Raise if a column of objects holds anything but texts and missing values.

    The type of such a column is taken from its first rows. In later ones 1, 1.0 and "1" would be
    three texts, though they name one person.
    """
    from pandas.api.types import infer_dtype

    for name in names:
        cells = frame[name]
        if cells.dtype == object and infer_dtype(cells, skipna=True) not in ("string", "empty"):
            raise ValueError(_wrong_type(name))


def _wrong_type(name: str) -> str:
    return (
        f"column {name!r} holds neither numbers, truth values nor text in this table. Cast it "
        "there, in a view for example."
    )


def _integers(column: Column, cells: Any) -> tuple[np.ndarray, np.ndarray]:  # Any: see `Cells`
    """Return cells as integers, and which of them are integers."""
    if isinstance(cells, np.ndarray) and cells.dtype.kind == "i":
        return cells.astype(np.int64), np.ones(len(cells), np.bool_)
    values, is_missing, is_outside, *_ = column.parse(cells)
    is_known = ~is_missing & ~is_outside & (values == np.floor(values))
    return values.astype(np.int64), is_known


def _integer_of(kinds: Mapping[str, str], name: str) -> str:
    """Return the name of a column; raise unless it holds integers."""
    if kinds[name] != INTEGER:
        raise ValueError(f"column {name!r} must hold integers.")
    return name


@contextlib.contextmanager
def _without_values() -> Generator[None]:
    """Raise an error of an engine as one without its message, which may quote values."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"the engine could not read this table ({type(error).__name__}). Its message may quote "
            "private values and is not shown. Select the columns with the engine itself to see it."
        ) from None


def _require_few_sums(n: int) -> None:
    if n > _MOST_SUMS:
        raise ValueError(
            f"this schema needs {n:,} sums, more than the {_MOST_SUMS:,} that are computed in one "
            "query. Declare fewer columns or categories."
        )
