"""Places of tables: files, addresses of databases, data frames and chunks, opened as one type."""

import contextlib
import glob
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from tacit import datasets  # tables load with scikit-learn, when they are first used
from tacit.datasets import Schema
from tacit.ledger import without_password
from tacit.sources.addresses import DUCKDB, is_database
from tacit.sources.engine_table import ChunkTable, FrameTable, PostgresTable, RawTable
from tacit.sources.grid_encoding import require_engine_schema
from tacit.sources.operations import BOOLEAN, DECIMAL, INTEGER, NUMBER, TEXT, identifier

_PARQUET = (".parquet", ".pq")
_POSTGRES_KINDS = {  # type codes of the server's catalog, which never change
    **dict.fromkeys((20, 21, 23), INTEGER),
    **dict.fromkeys((700, 701), NUMBER),
    1700: DECIMAL,
    16: BOOLEAN,
    **dict.fromkeys((25, 1042, 1043, 19), TEXT),
}


@contextlib.contextmanager
def open_table(place: Any, schema: Schema) -> Generator[RawTable]:
    """Open a table where it is; what it computes is private.

    Parameters
    ----------
    place
        * `duckdb:FILE.parquet`, which may be a pattern; `duckdb:FILE#TABLE`; or
          `postgresql://USER@HOST/DATABASE#TABLE`; TABLE may be SCHEMA.TABLE;
        * a Parquet file, or a pattern such as `visits/*.parquet`: read by DuckDB if it is
          installed, and else in chunks;
        * a CSV file, read in chunks;
        * a data frame: pandas, polars (also lazy), pyarrow, a relation of DuckDB, Dask, Spark;
        * several data frames: a list, or a function that returns an iterator over them and can be
          called again.
    schema
        Declares the columns. Any: the types above.
    """
    require_engine_schema(schema)
    with contextlib.ExitStack() as stack:
        yield _opened(place, schema, stack)


def _opened(place: Any, schema: Schema, stack: contextlib.ExitStack) -> RawTable:
    if is_database(place):
        address, _, table = place.partition("#")
        if without_password(place) != place:
            raise ValueError(
                f"{without_password(place)} must be given without a password: addresses are "
                "written into run folders. Put it into ~/.pgpass or PGPASSWORD."
            )
        file = Path(address.removeprefix(DUCKDB))
        if not table and place.startswith(DUCKDB) and file.suffix in _PARQUET:
            return _file(file, schema, stack)
        if not table:
            raise ValueError(f"{place} names no table. Add #TABLE.")
        name = ".".join(identifier(unquote(part)) for part in table.split("."))
        if place.startswith(DUCKDB):
            return _duckdb(address.removeprefix(DUCKDB), name, stack)
        return _postgres(address, name, stack)
    if isinstance(place, str | Path):
        return _file(Path(place), schema, stack)
    if callable(place) or isinstance(place, list | tuple):
        return _chunks(cast("Any", place), schema)
    import narwhals.stable.v2 as nw

    frame = nw.from_native(place, pass_through=True)
    if not isinstance(frame, nw.DataFrame | nw.LazyFrame):
        raise TypeError(
            "a table must be a file, an address, a data frame, or a list of data frames, got "
            f"{type(place).__name__}."
        )
    if frame.implementation.is_duckdb() and "PARQUET" in frame.to_native().explain().upper():
        raise ValueError(
            "this relation of DuckDB reads Parquet files, in which DuckDB may overlook NaN. Give "
            "the path of the files, or the address duckdb:FILE#VIEW."
        )
    return FrameTable(frame)


def _chunks(given: Callable[[], Iterable[Any]] | Iterable[Any], schema: Schema) -> ChunkTable:
    frames = given if callable(given) else lambda: given
    passes: list[int] = []  # the number of frames of each pass

    def chunks() -> Iterator[Mapping[str, Any]]:
        n = 0
        for cells in datasets.frame_chunks(frames(), schema.needed):
            n += 1
            yield cells
        passes.append(n)
        if n != passes[0]:
            raise ValueError(
                f"the function gave {passes[0]} data frames in its first pass and {n} in a later "
                "one. It must start a new iteration over the same data frames at every call."
            )

    return ChunkTable(chunks)


def _file(path: Path, schema: Schema, stack: contextlib.ExitStack) -> RawTable:
    is_pattern = not path.is_file() and any(sign in str(path) for sign in "*?[")
    if not is_pattern and not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    if path.suffix in _PARQUET and (connection := _duckdb_connection(None, stack)) is not None:
        # By default DuckDB takes a Parquet file to hold no NaN, and then overlooks those in it.
        # Files of a pattern may hold a column as different types, such as integers and doubles.
        query = "SELECT * FROM read_parquet(?, can_have_nan => true, union_by_name => true)"
        name = str(path) if is_pattern else glob.escape(str(path))
        _require_columns(connection, name, schema)
        return _relation(lambda: connection.sql(query, params=[name]), path.name)
    if is_pattern:
        raise ValueError(f"{path.name}: a pattern needs Parquet files, and DuckDB installed.")
    return ChunkTable(lambda: datasets.read_cell_chunks(path, schema, schema.needed))


def _require_columns(connection: Any, pattern: str, schema: Schema) -> None:  # Any: no types
    """Raise if a file has a column twice, or only some of the files have it.

    DuckDB would take the first one, and missing values for the files without it.
    """
    duckdb: Any = import_module("duckdb")

    query = "SELECT name, count(*), count(DISTINCT file_name) FROM parquet_schema(?) GROUP BY name"
    try:
        rows = connection.execute(query, [pattern]).fetchall()
    except duckdb.Error:
        raise ValueError(f"{Path(pattern).name} names no Parquet file that can be read.") from None
    n_files = max(n for _, _, n in rows)  # every file has a root element
    for name, n_columns, n in rows:
        if name in schema.needed and n_columns > n:
            raise ValueError(f"{Path(pattern).name} has more than one column {name!r}.")
        if name in schema.needed and n < n_files:
            raise ValueError(f"some of the files {Path(pattern).name} lack the column {name!r}.")


def _duckdb(file: str, table: str, stack: contextlib.ExitStack) -> RawTable:
    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no DuckDB file {file}.")
    connection = _duckdb_connection(file, stack)
    if connection is None:
        raise ModuleNotFoundError("DuckDB is not installed. Run: pip install 'tacit-dp[engines]'")
    # For views of Parquet files; see _file. These optimizers rely on statistics without NaN.
    connection.execute("SET disabled_optimizers = 'statistics_propagation,filter_pushdown'")
    return _relation(lambda: connection.sql(f"FROM {table}"), f"{Path(file).name}#{table}")


def _relation(make: Callable[[], Any], name: str) -> RawTable:
    """Return a relation of DuckDB. Any: DuckDB has no types. Its errors may quote values."""
    import narwhals.stable.v2 as nw

    duckdb: Any = import_module("duckdb")

    try:
        return FrameTable(nw.from_native(make()))
    except duckdb.Error:
        raise ValueError(f"{name} cannot be read by DuckDB as a table.") from None


def _duckdb_connection(file: str | None, stack: contextlib.ExitStack) -> Any:
    """Return a connection, closed at the end; None if DuckDB is not installed. Any: no types."""
    try:
        duckdb: Any = import_module("duckdb")
    except ModuleNotFoundError:
        return None
    try:
        connection = duckdb.connect(file or ":memory:", read_only=file is not None)
    except duckdb.Error as error:
        why = "another program holds it" if "lock" in str(error).lower() else "it is no database"
        raise ValueError(f"{Path(file or '').name} cannot be opened by DuckDB: {why}.") from None
    stack.callback(connection.close)
    connection.execute("SET preserve_insertion_order = false")  # sums have no order
    return connection


def _postgres(address: str, table: str, stack: contextlib.ExitStack) -> RawTable:
    try:
        psycopg: Any = import_module("psycopg")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "PostgreSQL tables need psycopg. Run: pip install 'tacit-dp[engines]'"
        ) from None
    try:
        connection = stack.enter_context(psycopg.connect(address))
    except psycopg.Error as error:
        why = str(error).strip().splitlines()[-1]
        raise ValueError(f"{without_password(address)} cannot be reached: {why}") from None
    # All passes of a fit see one state of the table, and none can write.
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.read_only = True
    query = f"SELECT * FROM {table}"
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"{query} LIMIT 0")  # identifiers are quoted
            described = cursor.description or ()
    except psycopg.Error:
        raise ValueError(
            f"{without_password(address)} has no table {table} that you may read."
        ) from None
    kinds = {column.name: _POSTGRES_KINDS.get(column.type_code, "") for column in described}
    return PostgresTable(connection, query, kinds)
