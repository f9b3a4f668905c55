"""Addresses of tables in databases: `duckdb:FILE#TABLE`, `postgresql://HOST/DATABASE#TABLE`."""

from pathlib import Path
from urllib.parse import unquote

DUCKDB, POSTGRES = "duckdb:", ("postgresql://", "postgres://")


def is_database(place: object) -> bool:
    """Return whether `place` is the address of a table in a database."""
    return isinstance(place, str) and place.startswith((DUCKDB, *POSTGRES))


def as_place(given: str | Path) -> str | Path:
    """Return an address that was read as a path, and so lost a slash, as an address again."""
    text = str(given)
    for scheme in POSTGRES:
        if text.startswith(scheme[:-1]) and not text.startswith(scheme):
            return scheme + text[len(scheme) - 1 :]
    return text if is_database(text) else given


def name_of(place: str) -> str:
    """Return the name of a table, for titles and folders."""
    address, _, table = place.removeprefix(DUCKDB).partition("#")
    name = unquote(table).rpartition(".")[2] or Path(address).name.split(".")[0]
    return name.strip("*?") or "table"


def require_rows(place: object) -> None:
    """Raise if the records are in a database, from which they are not read one by one."""
    if is_database(place):
        raise ValueError(
            "this method reads single records, and those of a database stay there: write the table "
            "to a Parquet file, or use tacit regress or tacit summarize, which need only sums."
        )
