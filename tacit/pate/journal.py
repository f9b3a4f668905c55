"""Answers already released by a run, on disk, so that a killed run does not answer twice.

A run pays, draws the noise, writes the answers here, and only then hands them on. After a kill the
journal says which queries are answered: they are neither paid for nor answered again. A payment
whose answers were not written is lost, so a kill costs at most one block of queries too much, never
too little. Everything in the file has been paid for and may be published.
"""

import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tacit.errors import LedgerError
from tacit.ledger import Ledger

_KIND = "tacit-pate-answers"


class Journal:
    """The answers of one run: a text file of JSON lines, only ever appended to.

    Opened with the public settings of the run; a file written under other settings is refused.
    `ledger` must be the one that paid for the answers in the file. One process at a time.
    """

    def __init__(self, path: str | Path, *, settings: dict[str, Any], ledger: Ledger) -> None:
        self._path = Path(path)
        self._labels: dict[int, int] = {}
        if self._path.exists() and self._path.stat().st_size:
            self._read(settings, ledger)
        else:
            self.run = uuid.uuid4().hex
            self._append({"kind": _KIND, "run": self.run, "settings": settings})

    def __contains__(self, query: int) -> bool:
        return query in self._labels

    def __getitem__(self, query: int) -> int:
        return self._labels[query]

    def __len__(self) -> int:
        return len(self._labels)

    def record(self, queries: Sequence[int], labels: Sequence[int]) -> None:
        """Write answers that have been paid for; returns when they are on disk."""
        pairs = [(int(query), int(label)) for query, label in zip(queries, labels, strict=True)]
        if any(query in self._labels for query, _ in pairs):
            raise AssertionError("a query was answered twice")
        self._append({"answers": pairs})
        self._labels.update(pairs)

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("ab") as stream:
            stream.write(json.dumps(line).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _read(self, settings: dict[str, Any], ledger: Ledger) -> None:
        content = self._path.read_bytes()
        whole, newline, torn = content.rpartition(b"\n")
        try:
            lines = [json.loads(line) for line in whole.split(b"\n")] if newline else []
            head, *rest = lines
            kind, self.run, written = head["kind"], head["run"], head["settings"]
            for line in rest:
                self._labels.update({int(query): int(label) for query, label in line["answers"]})
        except (ValueError, KeyError, TypeError):
            raise LedgerError(
                f"{self._path.name} is not a journal of answers, or damaged."
            ) from None
        if kind != _KIND or written != json.loads(json.dumps(settings)):
            raise LedgerError(
                f"{self._path.name} was written by a run with other settings or other public "
                "inputs. Resume with the same ones, or use a new folder."
            )
        if self._labels and not any(self.run in entry.note for entry in ledger.history()):
            raise LedgerError(
                f"the ledger holds no payment for the answers in {self._path.name}. "
                "Resume with the ledger that paid for them."
            )
        if torn:  # killed inside a write: never handed on, so dropped; its payment is lost
            os.truncate(self._path, len(content) - len(torn))
