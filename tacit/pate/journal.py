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

import numpy as np

from tacit.errors import LedgerError
from tacit.ledger import Ledger
from tacit.mechanisms import Rng

_KIND = "tacit-pate-answers"


class Journal:
    """The answers of one run: a text file of JSON lines, only ever appended to.

    Opened with the public settings of the run; a file written under other settings is refused.
    `ledger` must be the one that paid for the answers in the file. One process at a time.
    """

    def __init__(self, path: str | Path, *, settings: dict[str, Any], ledger: Ledger) -> None:
        self._path = Path(path)
        self._labels: dict[int, int] = {}
        self._published: dict[str, dict[str, float]] = {}
        content = self._path.read_bytes() if self._path.exists() else b""
        if not _is_torn_head(content):
            self._read(content, settings, ledger)
        else:
            self._path.write_bytes(b"")
            self.run = uuid.uuid4().hex
            self._append({"kind": _KIND, "run": self.run, "settings": settings})

    def __contains__(self, query: int) -> bool:
        return query in self._labels

    def __getitem__(self, query: int) -> int:
        return self._labels[query]

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def n_answered(self) -> int:
        """How many queries have a label; the others in here were refused."""
        return sum(label >= 0 for label in self._labels.values())

    def record(self, queries: Sequence[int], labels: Sequence[int]) -> None:
        """Write answers that have been paid for; returns when they are on disk."""
        pairs = [(int(query), int(label)) for query, label in zip(queries, labels, strict=True)]
        if any(query in self._labels for query, _ in pairs):
            raise AssertionError("a query was answered twice")
        self._append({"answers": pairs})
        self._labels.update(pairs)

    def published(self, what: str) -> dict[str, float] | None:
        """Numbers that were released under the name `what`, if they were."""
        return self._published.get(what)

    def n_published(self, part: str) -> int:
        """How many names of what was published contain `part`."""
        return sum(part in what for what in self._published)

    def publish(self, what: str, numbers: dict[str, float]) -> None:
        """Write numbers that have been paid for; returns when they are on disk."""
        self._append({"published": what, "numbers": numbers})
        self._published[what] = numbers

    def fresh(self, rng: Rng) -> Rng:
        """`rng`, or, if answers are here already, one whose noise none of them was given.

        A resumed run with a seed would otherwise draw again the noise of its first answers: two
        answers of equal noise say more than two payments cover.
        """
        if not self._labels or not isinstance(rng, np.random.Generator):
            return rng
        return np.random.default_rng([*rng.integers(0, 2**32, 8).tolist(), len(self._labels)])

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("ab") as stream:
            stream.write(json.dumps(line).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _read(self, content: bytes, settings: dict[str, Any], ledger: Ledger) -> None:
        whole, _, torn = content.rpartition(b"\n")
        try:
            head, *rest = [json.loads(line) for line in whole.split(b"\n")]
            kind, self.run, written = head["kind"], head["run"], head["settings"]
            for line in rest:
                if "published" in line:
                    self._published[line["published"]] = line["numbers"]
                    continue
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


def _is_torn_head(content: bytes) -> bool:
    """Whether a run was killed before its first line was whole: it has paid for nothing yet."""
    head = json.dumps({"kind": _KIND})[:-1].encode()
    return b"\n" not in content and (head.startswith(content) or content.startswith(head))
