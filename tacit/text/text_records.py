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
"""

import csv
import gzip
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_MOST_FIELD = 2**24  # characters of one cell


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


def read_texts(path: Path, settings: "TextSettings", *, has_label: bool) -> list[Text]:
    """Return the texts of a file. Errors name columns and files, and quote no text."""
    wanted = {"text": settings.text, "prompt": settings.prompt, "person": settings.person}
    wanted |= {"label": settings.label} if has_label else {}
    wanted = {name: column for name, column in wanted.items() if column}
    return [
        Text(**{name: _cell(row, column, path) for name, column in wanted.items()})
        for row in _rows(path, settings.text)
    ]


def public_lines(path: Path) -> list[str]:
    """Return the lines of a text file that is declared public."""
    return [line for line in _opened(path).read().splitlines() if line.strip()]


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
        raise ValueError(f"text.path: {settings.path} holds no texts.")
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
        held = read_texts(root / settings.public_test, alone, has_label=has_label)
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


def _rows(path: Path, column: str) -> Iterator[Mapping[str, object]]:
    if path.is_dir():
        from datasets import (  # pyright: ignore[reportMissingImports]  # of the extra `text`
            load_from_disk,
        )

        yield from load_from_disk(str(path))
        return
    kind = _format(path)
    stream = _opened(path)
    if kind == ".txt":
        yield from ({column: line} for line in stream.read().splitlines() if line.strip())
    elif kind == ".jsonl":
        for line in stream:
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"{path.name}: each line must be one JSON object.")
                yield row
    else:
        csv.field_size_limit(_MOST_FIELD)
        quoting = csv.QUOTE_NONE if kind == ".tsv" else csv.QUOTE_MINIMAL
        yield from csv.DictReader(stream, delimiter=_SEPARATORS[kind], quoting=quoting)


def _format(path: Path) -> str:
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in _FORMATS:
        raise ValueError(f"{path.name} must end with one of {', '.join(_FORMATS)}, or these .gz.")
    return kind


def _opened(path: Path) -> io.TextIOBase:
    if not path.is_file():
        raise ValueError(f"there is no text file at {path}.")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return io.StringIO(raw.decode("utf-8", errors="replace"), newline="")


def _cell(row: Mapping[str, object], column: str, path: Path) -> str:
    if column not in row:
        raise ValueError(f"{path.name} has no column {column!r}.")
    value = row[column]
    return "" if value is None else str(value)
