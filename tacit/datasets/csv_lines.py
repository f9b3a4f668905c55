"""CSV files, one line a record.

A quoted field may hold the separator, but never the end of a line. So a line that was added,
removed or damaged changes one record and no other. What a line holds is private: a line with too
few or too many fields, or with bytes of another encoding, is a record without usable values, which
the paid check of a table counts. Only the header line is public.
"""

import bz2
import csv
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tacit._check import did_you_mean, known_key
from tacit.datasets.columns import MISSING_MARKS, CellRules

FIELDS = "(number of fields)"
"""Name under which lines with a wrong number of fields are counted."""

_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar", " ": "blank"}
_LONGEST_LINE = 1 << 24  # bytes; a longer first line is no header
_ENCODINGS = ("utf-8", "latin-1", "cp1252", "ascii", "iso-8859-15")


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Section [file] of a schema: how the lines of the file are written.

    Parameters
    ----------
    separator, quote, decimal
        One sign each; an empty `quote` means that no field is quoted.
    header
        Whether the first line holds the names. If not, the names are `names`, or c1, c2, ….
    skip_lines
        Lines above the header, or above the first record, that are no records.
    encoding
        One in which a line end is one byte: utf-8, latin-1, cp1252, ….
    missing
        Texts that mean a missing value. A declared category is never one of them.
    """

    separator: str = ","
    quote: str = '"'
    decimal: str = "."
    header: bool = True
    names: tuple[str, ...] = ()
    skip_lines: int = 0
    encoding: str = "utf-8"
    missing: tuple[str, ...] = MISSING_MARKS

    def __post_init__(self) -> None:
        for name, least in (("separator", 1), ("quote", 0), ("decimal", 1)):
            sign = getattr(self, name)
            if not least <= len(sign) <= 1 or sign in ("\n", "\r", "\0"):
                raise ValueError(f"[file] {name} must be one sign, as in {name} = ';'.")
        if self.separator == self.quote or self.decimal not in (".", ","):
            raise ValueError("[file] separator and quote must differ, and decimal be '.' or ','.")
        if self.skip_lines < 0:
            raise ValueError("[file] skip_lines must be 0 or more.")
        if self.header and self.names:
            raise ValueError("[file] names go with header = false.")
        if self.encoding.lower().replace("_", "-") not in _ENCODINGS:
            raise ValueError(f"[file] encoding must be one of {', '.join(_ENCODINGS)}.")

    @classmethod
    def from_dict(cls, data: object) -> "Dialect":
        """Return the dialect that section [file] of a schema declares."""
        if not isinstance(data, Mapping):
            raise ValueError("[file] must be a table of settings.")
        wanted = {f.name: f for f in fields(cls)}
        given: dict[str, Any] = {}
        for key, value in data.items():
            known_key("[file]", key, list(wanted))
            kind = type(wanted[key].default)
            if kind is tuple and isinstance(value, list | tuple):
                if not all(isinstance(item, str) for item in value):
                    raise ValueError(f"[file] {key} must be a list of texts in quotes.")
                value = tuple(value)
            if type(value) is not kind:
                words = {str: "text", bool: "true or false", int: "a whole number"}
                raise ValueError(f"[file] {key} must be {words.get(kind, 'a list of texts')}.")
            given[key] = value
        return cls(**given)

    @property
    def rules(self) -> CellRules:
        """Which texts mean a missing value, and the decimal sign."""
        return CellRules(frozenset(text.strip() for text in self.missing), self.decimal)


def read_names(path: Path, dialect: Dialect) -> list[str]:
    """Return the names of the file's columns: the header, `dialect.names`, or c1, c2, ….

    Without a header, only the number of fields of the first record is used.
    """
    with _open(path) as stream:
        first = _first_line(stream, path, dialect)
    parts = _splitter(dialect)(first)
    assert parts is not None  # a header that cannot be split is refused by `_first_line`
    if not dialect.header:
        if dialect.names and len(dialect.names) != len(parts):
            raise ValueError(
                f"{path.name}: [file] names lists {len(dialect.names)} columns, but the first "
                f"line has {len(parts)} fields. Check names and separator."
            )
        return list(dialect.names) or [f"c{k}" for k in range(1, len(parts) + 1)]
    names = [part.strip() for part in parts]
    for k in {0, len(names) - 1}:  # the row numbers of R and pandas, or a separator at the end
        names[k] = names[k] or f"c{k + 1}"
    if problem := _problem_of(names):
        raise ValueError(
            f"the first line of {path.name} does not look like names of columns: {problem}. If it "
            "is a record, set header = false in [file] of the schema (schema init: --no-header). "
            "If it is a header, correct it, or skip it: header = false, skip_lines = 1, names = "
            "[...]."
        )
    return names


def read_cells(
    path: Path, dialect: Dialect, needed: Sequence[str], *, rows: int
) -> Iterator[dict[str, Any]]:  # Any: tuples of texts, and one array
    """Yield the needed columns of `rows` records at a time, as texts. Private.

    The key `FIELDS` holds 0 for a line with the right number of fields and NaN for others. A blank
    line is no record.
    """
    names = read_names(path, dialect)
    places = find_columns(path.name, needed, names, dialect)
    blank: list[Any] = [None] * len(names)
    n_fields, split = len(names), _splitter(dialect)
    with _open(path) as stream:
        for _ in range(dialect.skip_lines + dialect.header):
            stream.readline()
        lines = (line for line in _guarded(stream, path) if line and not line.isspace())
        while block := list(islice(lines, rows)):
            table = [split(line) for line in block]
            wrong = [k for k, row in enumerate(table) if row is None or len(row) != n_fields]
            for k in wrong:
                table[k] = blank
            columns = list(zip(*table, strict=True))  # type: ignore[arg-type]  # no row is None now
            found: dict[str, Any] = {name: columns[k] for name, k in places.items()}
            found[FIELDS] = np.zeros(len(table))
            found[FIELDS][wrong] = np.nan
            yield found


def count_lines(path: Path, dialect: Dialect) -> int:
    """Return the number of lines that are records: all but the header, skipped and blank ones."""
    read_names(path, dialect)  # refuses what is no CSV file
    with _open(path) as stream:
        for _ in range(dialect.skip_lines + dialect.header):
            stream.readline()
        return sum(1 for line in _guarded(stream, path) if not line.isspace())


def find_columns(
    file: str, needed: Sequence[str], names: Sequence[str], dialect: Dialect | None = None
) -> dict[str, int]:
    """Return the place of each needed column among `names`; raise if one is missing or twice."""
    missing = [name for name in needed if name not in names]
    if missing:
        other = ""
        if dialect is not None and len(names) == 1:
            seen = [word for sign, word in _SEPARATORS.items() if sign in names[0]]
            other = f" The first line has no {_SEPARATORS.get(dialect.separator, 'separator')}"
            other += f" but a {seen[0]}: set separator in [file]." if seen else "."
        raise ValueError(
            f"{file} has no column {missing[0]!r}"
            + (f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else "")
            + f".{other or did_you_mean(missing[0], names)}"
        )
    for name in needed:
        if list(names).count(name) > 1:
            raise ValueError(f"{file} has more than one column {name!r}. Rename one of them.")
    return {name: list(names).index(name) for name in needed}


def _problem_of(names: Sequence[str]) -> str:
    """Return why fields cannot be names of columns, without quoting them; "" if they can."""
    for place, name in enumerate(names, 1):
        if not name:
            return f"field {place} is empty"
        if "\r" in name:
            return "it goes on after the end of a line as old systems write it (CR)"
        if not name.isprintable():
            return f"field {place} has a sign that cannot be printed"
        if (first := list(names).index(name) + 1) < place:
            return f"fields {first} and {place} are equal"
        try:
            float(name)
        except ValueError:
            continue
        return f"field {place} is a number"
    return ""


def _splitter(dialect: Dialect) -> Callable[[bytes], list[str] | None]:
    """Return a function that splits one line into fields; None if a quote is never closed.

    A byte that is not of the encoding becomes a sign that no category and no number contains.
    """
    encoding, separator, quote = dialect.encoding, dialect.separator, dialect.quote

    def split(line: bytes) -> list[str] | None:
        text = line.decode(encoding, "surrogateescape").rstrip("\r\n").removeprefix("\ufeff")
        if not quote or quote not in text:
            return text.split(separator)
        try:
            (parts,) = csv.reader(
                [text],
                delimiter=separator,
                quotechar=quote,
                strict=True,
                skipinitialspace=True,
            )
        except (csv.Error, ValueError):
            return None
        return parts

    return split


def _first_line(stream: BinaryIO, path: Path, dialect: Dialect) -> bytes:
    """Return the header line, or the first record; raise if the file cannot be a CSV file."""
    line = b""
    try:
        for _ in range(dialect.skip_lines + 1):
            line = stream.readline(_LONGEST_LINE)
    except (OSError, EOFError, lzma.LZMAError, zlib.error):
        raise _unreadable(path) from None
    if not line.strip():
        try:
            is_empty = not stream.read(_LONGEST_LINE).strip()
        except (OSError, EOFError, lzma.LZMAError, zlib.error):
            raise _unreadable(path) from None
        if is_empty:
            raise ValueError(f"{path.name} is empty: it has no header and no records.")
        raise ValueError(
            f"the first line of {path.name} is empty. Set skip_lines in [file] of the schema "
            "(schema init: --skip-lines) to the number of lines above the header."
        )
    if b"\0" in line or line[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(
            f"{path.name} is no CSV file in {dialect.encoding}. Save it as CSV in UTF-8."
        )
    if dialect.header:
        try:
            line.decode(dialect.encoding)
        except UnicodeDecodeError:
            raise ValueError(
                f"the header of {path.name} is not written in {dialect.encoding}. Set encoding in "
                "[file] of the schema, for example latin-1."
            ) from None
    if _splitter(dialect)(line) is None:
        raise ValueError(
            f"the first line of {path.name} has a quote that is not closed: a "
            "quoted field cannot hold the end of a line."
        )
    return line


def _guarded(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    try:
        yield from stream
    except (OSError, EOFError, lzma.LZMAError, zlib.error):
        raise _unreadable(path) from None


def _open(path: Path) -> BinaryIO:
    opener = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(path.suffix, open)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    try:
        return opener(path, "rb")  # type: ignore[return-value]  # all three give binary streams
    except OSError as wrong:
        raise ValueError(f"{path.name} cannot be opened: {wrong.strerror}.") from None


def _unreadable(path: Path) -> ValueError:
    return ValueError(f"{path.name} is damaged or is not compressed as its name says.")
