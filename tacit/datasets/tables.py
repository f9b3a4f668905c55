"""Tables (CSV or Parquet files), read by a schema of declared bounds and categories.

How a row is read does not depend on any other row, and whether a row is held out depends on that
row alone. If the schema names persons, one record of each person is kept, or at most k on request,
so that a person changes at most one record, or k of them, all of which are held out or none.

A record without a target is left out of the training and test records, but not of the count of
records, which is assumed public: how many targets are missing is private.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tacit._arrays import Flags
from tacit._users import RecordsOfUsers
from tacit.datasets.columns import Cells
from tacit.datasets.csv_lines import Dialect, count_lines, find_columns, read_cells, read_names
from tacit.datasets.dataset import Dataset, PersonRows
from tacit.datasets.frames import as_frame, frame_cells
from tacit.datasets.schema import EncodedRows, Schema

_ROWS = 65_536  # rows that are encoded at a time
_PARQUET = (".parquet", ".pq")


def read_rows(
    path: str | Path, schema: Schema, *, training: bool = True, records_per_person: int = 1
) -> EncodedRows:
    """Return the encoded rows of a table, with the first one of each person. Private.

    With `records_per_person` above 1, at most so many rows of each person are kept, chosen by a
    hash of the person's id.

    Without `training`, all rows are read, of their features alone, which is what a prediction
    needs. Raises if the file is no table, lacks a column, or has no records; no error quotes a
    value.
    """
    needed = schema.needed_for(training=training)
    parts = [schema.encode_rows(cells) for cells in read_cell_chunks(Path(path), schema, needed)]
    if not parts:
        raise ValueError(f"{Path(path).name} has no records.")
    rows = EncodedRows(*(_concatenated(pieces) for pieces in zip(*parts, strict=True)))
    if rows.persons is None:
        return rows
    return take_rows(rows, _some_of_each(rows.persons, path, records_per_person))


def read_columns(path: str | Path, schema: Schema) -> dict[str, list[Any]]:
    """Return the declared columns of a table as `Column.plain` reads them. Private.

    The first record of each person is kept. For what summarizes values, not features.
    """
    rules, found = schema.dialect.rules, {}
    for cells in read_cell_chunks(Path(path), schema, schema.needed):
        for column in schema.declared:
            if column.type != "ignored":
                part = column.plain(cells[column.name], rules)
                found.setdefault(column.name, []).extend(part)
    if not found or not next(iter(found.values())):
        raise ValueError(f"{Path(path).name} has no records.")
    person = next((c for c in schema.declared if c.type == "person"), None)
    if person is None:
        return found
    kept = _first_of_each(found[person.name], path)
    return {name: [values[k] for k in kept] for name, values in found.items()}


def frame_chunks(
    frames: Iterable[Any], needed: Sequence[str]
) -> Iterator[Mapping[str, Cells]]:  # Any: data frames of several libraries
    """Yield the needed columns of data frames as cells. Private."""
    for table in frames:
        frame = as_frame(table)
        if frame is None:
            raise TypeError("every chunk must be a data frame of pandas, polars or pyarrow.")
        find_columns("the table", needed, frame.columns)
        yield frame_cells(frame, needed)


def read_table(
    path: str | Path,
    schema: Schema,
    *,
    test_share: float = 0.2,
    seed: int = 0,
    records_per_person: int = 1,
    sampled: str = "persons",
) -> Dataset:
    """Return a table as a data set; `test_share` of the rows, chosen by `held_out`, are for tests.

    `records_per_person` above 1 needs a column of type person; for `sampled` see `PersonRows`.

    The numbers of records that the data set states are shares of the number of rows, which is
    assumed public: how many rows are really held out depends on their values.
    """
    schema.target_column  # noqa: B018  # raises if there is none
    if records_per_person > 1 and schema.unit != "person":
        raise ValueError(
            "records_per_person above 1 needs a column of type person, and the schema has none."
        )
    rows = read_rows(path, schema, records_per_person=records_per_person)
    found = as_dataset(rows, schema, name=_stem(path), test_share=test_share, seed=seed)
    if records_per_person == 1 or rows.persons is None:
        return found
    kept = with_target(rows)
    trained = ~held_out(kept, test_share, seed=seed)
    ids = tuple(str((kept.persons or ())[k]) for k in np.flatnonzero(trained))
    n = len(set(rows.persons)) if sampled == "persons" else len(rows.persons)
    n_test = round(test_share * n)
    persons = PersonRows(ids, records_per_person, sampled)
    public = (f"number of {sampled}", *found.public[1:])
    return replace(found, n_records=n - n_test, n_held_out=n_test, persons=persons, public=public)


def as_dataset(
    rows: EncodedRows, schema: Schema, *, name: str, test_share: float, seed: int = 0
) -> Dataset:
    """Return encoded rows as a data set, with `test_share` of them held out for tests.

    Rows without a target are left out of both parts, and counted in `n_records` and `flags`.
    """
    n, kept = len(rows.x), with_target(rows)
    assert kept.y is not None  # callers read a schema with a target
    test = held_out(kept, test_share, seed=seed)
    n_test = round(test_share * n)
    return Dataset(
        name=name,
        x_train=kept.x[~test],
        y_train=kept.y[~test],
        x_test=kept.x[test],
        y_test=kept.y[test],
        n_classes=schema.n_classes,
        feature_names=schema.feature_names,
        public=(f"number of {schema.unit}s", "bounds and categories of the schema"),
        n_records=n - n_test,
        n_held_out=n_test,
        is_test_public=False,
        flags=dict(zip(schema.checked, rows.flags.T, strict=True)),
        unit=schema.unit,
    )


def held_out(rows: EncodedRows, share: float, *, seed: int = 0) -> Flags:
    """Return which rows are held out, see `held_out_by_content`.

    A row with a person is hashed by the person's id alone.
    """
    is_one_person = rows.persons is not None
    return held_out_by_content(_contents(rows), share, seed=seed, by_unit=is_one_person)


def held_out_by_content(
    contents: Iterable[bytes], share: float, *, seed: int = 0, by_unit: bool = False
) -> Flags:
    """Return which records are held out: each with probability `share`, by a hash of its content.

    The k-th of several equal records is hashed with its number k; with `by_unit`, equal contents
    stand for one person, whose records are all held out or none. So an added record changes either
    the training records or those held out, by one record, and moves no other. (A permutation of
    the numbers of records would move many.)
    """
    key, limit = seed.to_bytes(16, "little", signed=True), int(share * 2**64)
    counts: dict[bytes, int] = {}
    found: list[bool] = []
    for content in contents:
        place = 0 if by_unit else counts.get(content, 0)
        counts[content] = place + 1
        digest = hashlib.blake2b(place.to_bytes(8, "little") + content, digest_size=8, key=key)
        found.append(int.from_bytes(digest.digest(), "little") < limit)
    return np.array(found, np.bool_)


def with_target(rows: EncodedRows) -> EncodedRows:
    """Return the rows that have a target. Private.

    A row without one must be gone before rows are held out: `held_out` numbers equal rows, and a
    row that is not used may not move those that are.
    """
    return take_rows(rows, np.flatnonzero(rows.has_target))


def take_rows(rows: EncodedRows, kept: np.ndarray) -> EncodedRows:
    """Return the rows whose numbers are in `kept`."""
    persons = None if rows.persons is None else tuple(rows.persons[k] for k in kept)
    y, weights = (None if part is None else part[kept] for part in (rows.y, rows.weights))
    return EncodedRows(rows.x[kept], y, rows.flags[kept], persons, weights, rows.has_target[kept])


def column_names(path: str | Path, dialect: Dialect) -> dict[str, str]:
    """Return the names of a file's columns, each with its type in Parquet or "". Public."""
    path = Path(path)
    if path.suffix not in _PARQUET:
        return dict.fromkeys(read_names(path, dialect), "")
    return {field.name: str(field.type) for field in _parquet(path).schema_arrow}


def count_rows(path: str | Path, dialect: Dialect) -> int:
    """Return the number of records of a file, which is assumed public; no value is read."""
    path = Path(path)
    if path.suffix in _PARQUET:
        return _parquet(path).metadata.num_rows
    return count_lines(path, dialect)


def read_cell_chunks(
    path: Path, schema: Schema, needed: Sequence[str], *, rows: int = _ROWS
) -> Iterator[Mapping[str, Cells]]:
    """Yield the needed columns of `rows` records at a time. Private."""
    if path.suffix not in _PARQUET:
        yield from read_cells(path, schema.dialect, needed, rows=rows)
        return
    file = _parquet(path)
    find_columns(path.name, needed, file.schema_arrow.names)
    import pyarrow

    try:
        for batch in file.iter_batches(rows, columns=list(needed)):
            yield frame_cells(as_frame(pyarrow.Table.from_batches([batch])), needed)
    except (pyarrow.ArrowException, OSError, ValueError):
        raise ValueError(f"{path.name} is damaged: its columns cannot be read.") from None


def _parquet(path: Path) -> Any:  # Any: pyarrow has no types
    import pyarrow
    from pyarrow import parquet

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, ValueError):
        raise ValueError(f"{path.name} is no Parquet file that can be read.") from None


def _first_of_each(persons: Sequence[str | None], path: str | Path) -> np.ndarray:
    """Return the numbers of the first record of each person, in order. Private.

    A record without an id is left out. It may belong to anyone: were the first of them kept, then
    without it the next one would take its place, and one person would change two records.
    """
    first: dict[str, int] = {}
    for k, person in enumerate(persons):
        if person is not None:
            first.setdefault(person, k)
    if not first:
        raise ValueError(
            f"{Path(path).name} has no record with the id of a person. Check the column, and "
            "separator and quote in [file] of the schema."
        )
    return np.fromiter(first.values(), np.intp, len(first))


def _some_of_each(persons: Sequence[str | None], path: str | Path, most: int) -> np.ndarray:
    """Return the numbers of at most `most` records of each person; of one, the first. Private."""
    if most == 1:
        return _first_of_each(persons, path)
    _first_of_each(persons, path)  # raises if no record has an id
    named = np.flatnonzero([person is not None for person in persons])
    users = RecordsOfUsers.of([person for person in persons if person is not None], len(named))
    return named[users.kept(most)]


def _concatenated(pieces: Sequence[Any]) -> Any:  # Any: arrays, tuples of texts, or None
    if pieces[0] is None:
        return None
    if isinstance(pieces[0], tuple):
        return tuple(text for piece in pieces for text in piece)
    return np.concatenate(pieces)


def _contents(rows: EncodedRows) -> Iterator[bytes]:
    """Yield what is hashed of each row: its person, or features, target and weight."""
    if rows.persons is not None:
        yield from ((person or "").encode("utf-8", "surrogatepass") for person in rows.persons)
        return
    parts = [np.asarray(part, np.float64) for part in (rows.y, rows.weights) if part is not None]
    numbers = np.column_stack([rows.x.astype(np.float64), *parts])
    yield from (row.tobytes() for row in np.ascontiguousarray(numbers))


def _stem(path: str | Path) -> str:
    return Path(path).name.split(".")[0]
