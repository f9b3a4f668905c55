"""Journal of the answers that a run has released, so that a killed run does not answer twice.

A run pays, draws the noise, writes the answers to the journal, and only then returns them. After a
kill the journal lists the queries that were answered; they are neither paid for nor answered again.
A payment whose answers were not written is lost. A kill can therefore cost up to one block of
queries too much, and never too little. Everything in the file has been paid for and is public.
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
    """File of the answers that one run has released: JSON lines, which are only appended.

    It is opened with the public settings of the run, and raises an error for a file written under
    other settings. `ledger` must be the ledger that paid for the answers in the file. Only one
    process may use the file at a time. `labels` maps the number of each asked query to its label.
    """

    def __init__(self, path: str | Path, *, settings: dict[str, Any], ledger: Ledger) -> None:
        self._path = Path(path)
        self.labels: dict[int, int] = {}
        content = self._path.read_bytes() if self._path.exists() else b""
        if not _is_torn_head(content):
            self._read(content, settings, ledger)
        else:
            self._path.write_bytes(b"")
            self.run = uuid.uuid4().hex
            self._append({"kind": _KIND, "run": self.run, "settings": settings})

    def __len__(self) -> int:
        return len(self.labels)

    def record(self, queries: Sequence[int], labels: Sequence[int]) -> None:
        """Write the labels of the numbered queries, already paid for; return once on disk."""
        pairs = [(int(query), int(label)) for query, label in zip(queries, labels, strict=True)]
        if any(query in self.labels for query, _ in pairs):
            raise AssertionError("a query was answered twice")
        self._append({"answers": pairs})
        self.labels.update(pairs)

    def fresh(self, rng: Rng) -> Rng:
        """Return `rng`, or a new generator derived from it if the journal already holds answers.

        A resumed run with a seed would otherwise draw the noise of its first answers again, and two
        answers with equal noise reveal more than two payments cover.
        """
        if not self.labels or not isinstance(rng, np.random.Generator):
            return rng
        return np.random.default_rng([*rng.integers(0, 2**32, 8).tolist(), len(self.labels)])

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
                self.labels.update({int(query): int(label) for query, label in line["answers"]})
        except (ValueError, KeyError, TypeError):
            raise LedgerError(
                f"{self._path.name} is not a journal of answers, or is damaged."
            ) from None
        if kind != _KIND or written != json.loads(json.dumps(settings)):
            raise LedgerError(
                f"{self._path.name} was written by a run with other settings or other public "
                "inputs. Resume with the same ones, or use a new folder."
            )
        if self.labels and not any(self.run in entry.note for entry in ledger.history()):
            raise LedgerError(
                f"the ledger holds no payment for the answers in {self._path.name}. "
                "Resume with the ledger that paid for them."
            )
        if torn:  # killed during a write: the answers were not returned, so the line is dropped
            os.truncate(self._path, len(content) - len(torn))


def _is_torn_head(content: bytes) -> bool:
    """Return whether a journal file ends within its first line, so its run has paid for nothing."""
    head = json.dumps({"kind": _KIND})[:-1].encode()
    return b"\n" not in content and (head.startswith(content) or content.startswith(head))
