"""Texts as records: files are read, tokens are packed, and no sequence mixes two units of privacy.

The unit of privacy is a record (one row of the file), or a person if `text.person` names a column.
A sequence of tokens holds text of ONE unit:

- record: one sequence for each record, cut at `length` tokens.
- person: the texts of a person are joined, each with an end token, and cut into at most
  `sequences_per_person` sequences of `length` tokens. Inside them, later texts of a person attend
  to earlier texts of the same person. What does not fit is left out.

So no attention and no loss crosses from one unit to another, and padding is all that short units
get. Sequences are padded on the right. Each sequence depends on the texts of its unit alone, on the
public tokenizer and on declared settings.

What the file is like (its format, its columns, the types of their values) is public and may be
refused. What a text says is not: bytes that are not UTF-8 are replaced, and a text without a person
is left out, where the unit is a person.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tacit.datasets import Dataset, PersonRows, held_out_by_content
from tacit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tacit.experiments import TextSettings

IGNORED = -100
"""Target of a token that has no loss, as `ignore_index` of torch's cross entropy."""
_FORMATS = (".csv", ".tsv", ".jsonl", ".txt")
_MOST_FIELD = 2**24  # characters of one cell
_HEAD = 4096  # bytes in which a null byte shows that a file is not text


class Text(NamedTuple):
    """One row of a file: what is learned, what comes before it, its class, and whose it is."""

    text: str
    prompt: str = ""
    label: str = ""
    person: str = ""


class Sequences(NamedTuple):
    """Token sequences of equal length: ids, targets (or classes), and the unit of each. Private."""

    ids: np.ndarray  # (sequences, length)
    targets: np.ndarray  # (sequences, length), or (sequences,) for classification
    units: tuple[str, ...] = ()


def read_texts(
    path: Path, settings: "TextSettings", *, has_label: bool, is_public: bool = False
) -> list[Text]:
    """Return the texts of a file. Errors name columns and files, and quote no text.

    Private bytes that are not UTF-8 are replaced; in a file that is declared public they are
    refused. Where the unit is a person, texts without one are left out.
    """
    wanted = {"text": settings.text, "prompt": settings.prompt, "person": settings.person}
    wanted |= {"label": settings.label} if has_label else {}
    wanted = {name: column for name, column in wanted.items() if column}
    columns = tuple(dict.fromkeys(wanted.values()))
    if path.is_dir():
        rows = _saved_rows(path, columns, settings)
    else:
        rows = _file_rows(path, columns, is_public=is_public)
    found: list[Text] = []
    kinds: set[type] = set()  # of the persons' ids
    for row in rows:
        text = Text(**{name: _plain(row[column], column, path) for name, column in wanted.items()})
        if settings.person:
            if not text.person:
                continue
            is_number = isinstance(row[settings.person], bool | int | float)
            kinds.add(float if is_number else str)
        found.append(text)
    if len(kinds) > 1:
        raise ValueError(
            f"{path.name}: column {settings.person!r} must hold ids of one type: is the text '1' "
            "the person 1, or another?"
        )
    return found


def public_lines(path: Path) -> list[str]:
    """Return the lines of a text file that is declared public."""
    return [line for line in _lines(_content(path, is_public=True)) if line.strip()]


@dataclass(frozen=True)
class Packing:
    """How texts become sequences: by unit, cut at `length` tokens and padded on the right."""

    tokenizer: Tokenizer
    settings: "TextSettings"
    is_causal: bool

    @property
    def start(self) -> list[int]:
        """Tokens before each text; the end token where the tokenizer has none for the start."""
        tokenizer = self.tokenizer
        first = tokenizer.bos_token_id
        if first is None:
            first = tokenizer.cls_token_id
        return [tokenizer.eos_token_id if first is None else first]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def sequences(self, texts: Sequence[Text]) -> Sequences:
        """Return the sequences of all units, in the order in which their first text comes."""
        units: dict[str, list[Text]] = {}
        for number, text in enumerate(texts):
            units.setdefault(text.person if self.settings.person else str(number), []).append(text)
        length = self.settings.length
        rows: list[tuple[list[int], Any, str]] = []
        for unit, own in units.items():
            rows += [(ids, target, unit) for ids, target in self._of_unit(own)]
        ids = np.full((len(rows), length), self.tokenizer.pad_token_id, np.int64)
        shape = (len(rows), length) if self.is_causal else (len(rows),)
        targets = np.full(shape, IGNORED if self.is_causal else 0, np.int64)
        for row, (tokens, target, _) in enumerate(rows):
            ids[row, : len(tokens)] = tokens
            if self.is_causal:
                targets[row, : len(tokens)] = target
            else:
                targets[row] = target
        return Sequences(ids, targets, tuple(unit for _, _, unit in rows))

    def _of_unit(
        self, texts: Sequence[Text]
    ) -> list[tuple[list[int], Any]]:  # Any: targets or a class
        """Return the sequences of one unit: ids and their targets, or ids and a class."""
        most, length = self.settings.sequences_per_person, self.settings.length
        if not self.is_causal:
            most = most if self.settings.person else 1
            return [(self._classified(text), self._class(text)) for text in islice(texts, most)]
        pairs = list(islice(chain.from_iterable(map(self._learned, texts)), most * length))
        most = most if self.settings.person else 1
        parts = [pairs[start : start + length] for start in range(0, len(pairs), length)][:most]
        return [([i for i, _ in part], [t for _, t in part]) for part in parts]

    def _learned(self, text: Text) -> Iterator[tuple[int, int]]:
        """Yield the tokens of a text to learn, each with its target; a prompt has no target."""
        yield from ((token, IGNORED) for token in self.start)
        yield from ((token, IGNORED) for token in (self.encode(text.prompt) if text.prompt else ()))
        yield from (
            (token, token) for token in [*self.encode(text.text), self.tokenizer.eos_token_id]
        )

    def _classified(self, text: Text) -> list[int]:
        """Return the tokens of a text to classify, cut so that the end token is kept."""
        body = self.encode(text.text)[: self.settings.length - len(self.start) - 1]
        return [*self.start, *body, self.tokenizer.eos_token_id]

    def _class(self, text: Text) -> int:
        """Return the number of a text's class. A text of an undeclared class has no loss."""
        declared = self.settings.classes
        return declared.index(text.label) if text.label in declared else IGNORED


def load_records(
    settings: "TextSettings",
    packing: Packing,
    *,
    root: Path,
    canaries: Sequence[str] = (),
) -> Dataset:
    """Return the private texts as token sequences, with the texts that measure the model.

    `canaries` are added as records (persons) of their own. The numbers of records that the data set
    states are shares of the number of units, which is assumed public: how many units are really
    held out is decided by a coin of each.
    """
    has_label = not packing.is_causal
    texts = read_texts(root / settings.path, settings, has_label=has_label)
    if not texts:
        of = " of a person" if settings.person else ""
        raise ValueError(f"text.path: {settings.path} holds no texts{of}.")
    n_units = len({text.person for text in texts}) if settings.person else len(texts)
    held: list[Text] = []
    n_held = 0
    if settings.evaluation == "paid":
        n_held = round(settings.test_share * n_units)
        if n_held == n_units:
            raise ValueError("text.test_share leaves no text to train on.")
        texts, held = _split(texts, settings)
    texts += [Text(secret, person=f"\0canary {i}") for i, secret in enumerate(canaries)]
    train = packing.sequences(texts)
    is_public = bool(settings.public_test)
    if is_public:
        alone = replace(settings, person="")
        held = read_texts(root / settings.public_test, alone, has_label=has_label, is_public=True)
        if not held:
            raise ValueError(f"text.public_test: {settings.public_test} holds no texts.")
        if has_label and not all(text.label in settings.classes for text in held):
            raise ValueError("the file text.public_test has a class that text.classes lacks.")
        packing = replace(packing, settings=alone)
    test = packing.sequences(held)
    return Dataset(
        Path(settings.path).name,
        train.ids,
        train.targets,
        test.ids,
        test.targets,
        len(settings.classes) or None,
        public=("the number of training records", "the model before training", "the tokenizer"),
        n_records=n_units - n_held + len(canaries),
        n_held_out=len(held) if is_public else n_held,
        is_test_public=is_public,
        unit="person" if settings.person else "record",
        persons=PersonRows(train.units, settings.sequences_per_person, "persons")
        if settings.person
        else None,
    )


def _split(texts: list[Text], settings: "TextSettings") -> tuple[list[Text], list[Text]]:
    """Return the texts to train on, and those held out: each unit by a coin of its own."""
    contents = (
        text.person.encode() if settings.person else json.dumps(text).encode() for text in texts
    )
    is_held = held_out_by_content(
        contents, settings.test_share, seed=settings.split_seed, by_unit=bool(settings.person)
    )
    train = [text for text, held in zip(texts, is_held, strict=True) if not held]
    return train, [text for text, held in zip(texts, is_held, strict=True) if held]


Row = Mapping[str, object]


def _saved_rows(path: Path, columns: Sequence[str], settings: "TextSettings") -> Iterator[Row]:
    """Yield the rows of a folder that `datasets` saved."""
    from datasets import (  # pyright: ignore[reportMissingImports]  # of the extra `text`
        DatasetDict,
        load_from_disk,
    )

    try:
        loaded = load_from_disk(str(path))
    except Exception:  # which one is raised depends on the file that is missing or broken
        raise ValueError(f"{path} holds no data set that `datasets` saved.") from None
    if isinstance(loaded, DatasetDict):
        parts = ", ".join(map(str, loaded))
        raise ValueError(f"{path} holds several data sets: name the folder of one ({parts}).")
    found: Any = loaded  # Any: the stubs say that rows may be columns
    _require_columns(found.column_names, columns, path)
    # The names of a column of classes, if the recipe writes classes as names.
    names = getattr(found.features.get(settings.label), "names", None) or ()
    if not set(settings.classes) <= set(names):
        names = ()
    try:
        for row in found.select_columns(list(columns)).with_format(None):
            label = row.get(settings.label)
            if isinstance(label, int) and 0 <= label < len(names):
                row[settings.label] = names[label]
            yield row
    except (OSError, ValueError):
        raise ValueError(f"{path} holds no data set that `datasets` saved.") from None


def _file_rows(path: Path, columns: Sequence[str], *, is_public: bool) -> Iterator[Row]:
    """Yield the rows of a file. A row ends where its line ends: at a line feed, and nowhere else.

    (A form feed or a separator of Unicode inside a text would otherwise make two records of one.)
    Only a quoted cell of a CSV file may go over several lines.
    """
    kind, content = _format(path), _content(path, is_public=is_public)
    if kind == ".txt":
        for line in _lines(content):
            if line.strip():
                yield dict.fromkeys(columns, line)
    elif kind == ".jsonl":
        yield from _json_rows(content, columns, path)
    else:
        cells = _csv_cells(content, path) if kind == ".csv" else _tsv_cells(content)
        header = next(cells, None)
        if header is None:
            return
        _require_columns(header, columns, path)
        places = [header.index(column) for column in columns]
        for row in cells:
            found = (row[place] if place < len(row) else None for place in places)
            yield dict(zip(columns, found, strict=True))


def _json_rows(content: str, columns: Sequence[str], path: Path) -> Iterator[Row]:
    for line in _lines(content):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path.name}: each line must be one JSON object.")
        _require_columns(row, columns, path)
        yield row


def _csv_cells(content: str, path: Path) -> Iterator[list[str]]:
    csv.field_size_limit(_MOST_FIELD)
    try:
        yield from filter(None, csv.reader(io.StringIO(content, newline="\n"), strict=True))
    except csv.Error:
        raise ValueError(
            f"{path.name} is no CSV file that can be read: a quote is not closed or stands inside "
            f"a cell, a line ends with a carriage return alone, or a cell is above {_MOST_FIELD:,} "
            "characters."
        ) from None


def _tsv_cells(content: str) -> Iterator[list[str]]:
    return (line.split("\t") for line in _lines(content) if line)


def _lines(content: str) -> Iterator[str]:
    return (line.removesuffix("\r") for line in content.split("\n"))


def _require_columns(found: Iterable[str], columns: Sequence[str], path: Path) -> None:
    names = list(found)
    for column in columns:
        if (times := names.count(column)) != 1:
            how_often = "no" if not times else "more than one"
            raise ValueError(f"{path.name} has {how_often} column {column!r}.")


def _format(path: Path) -> str:
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in _FORMATS:
        raise ValueError(f"{path.name} must end with one of {', '.join(_FORMATS)}, or these .gz.")
    return kind


def _content(path: Path, *, is_public: bool) -> str:
    if not path.is_file():
        raise ValueError(f"there is no text file at {path}.")
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error):
            raise ValueError(f"{path.name} cannot be unpacked: it is no whole .gz file.") from None
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in raw[:_HEAD]:
        raise ValueError(f"{path.name} is not text in UTF-8.")
    try:
        text = raw.decode("utf-8", errors="strict" if is_public else "replace")
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is not text in UTF-8.") from None
    return text.removeprefix("\ufeff")


def _plain(value: object, column: str, path: Path) -> str:
    """Return the text of a cell; empty if it is missing. 1, 1.0 and the text "1" are equal."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | bool | int | float | date):
        raise ValueError(f"{path.name}: column {column!r} must hold texts or numbers.")
    # A tokenizer takes neither halves of surrogate pairs nor, in some cases, null characters.
    return str(value).encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")
