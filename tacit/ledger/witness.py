"""Witnesses: a memory outside the ledger file, which reveals that the file was put back.

Whoever can write a ledger file can also restore an older copy of it, spend from two copies, or
delete it and start anew. The file itself cannot reveal this. A witness can: it keeps the number of
rows and the hash of the last one, in a file on another machine or disk. Before a payment the ledger
must contain the row that the witness saw last. After a payment, and before `spend` returns, the
witness gets the new row. So every payment whose release may have happened is known to the witness.

A witness reveals nothing about the data: a hash and a count. It must be out of reach of whoever
could restore the ledger file.
"""

import contextlib
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from tacit.errors import LedgerError

_MOST_BYTES = 1000  # of a mark


class WitnessMark(NamedTuple):
    """The state of a ledger that a witness saw: its id, its number of rows, its last hash."""

    ledger: str
    entries: int
    hash: str

    def to_json(self) -> str:
        """Return the mark as one line of JSON."""
        return json.dumps(self._asdict())

    @staticmethod
    def from_json(text: str) -> "WitnessMark":
        """Return the mark that `to_json` wrote; raise `LedgerError` for anything else."""
        try:
            data = json.loads(text)
            mark = WitnessMark(data["ledger"], data["entries"], data["hash"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise LedgerError("the witness does not hold the mark of a ledger.") from None
        if [type(value) for value in mark] != [str, int, str]:
            raise LedgerError("the witness does not hold the mark of a ledger.")
        return mark


class FileWitness:
    """The last mark of one ledger in a file: one line for each mark, only ever appended.

    The file may have the append-only attribute of the file system, and may be on a network drive.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def last(self) -> WitnessMark | None:
        """Return the mark in the last whole line; None if the file is missing or empty."""
        if self.path.exists() and not self.path.is_file():
            raise LedgerError(f"the witness {self.path} is not a file.")
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 2 * _MOST_BYTES))
                tail = file.read()
        except FileNotFoundError:
            return None
        whole = tail[: tail.rfind(b"\n") + 1].splitlines()  # a crash may leave half a line
        return WitnessMark.from_json(whole[-1].decode("utf-8", "replace")) if whole else None

    def advance(self, mark: WitnessMark) -> None:
        """Append `mark` and wait until it is on disk."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(handle).st_size
            is_torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, (b"\n" if is_torn else b"") + mark.to_json().encode() + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """Keep other processes from advancing the witness, where the system has locks of files."""
        try:
            import fcntl
        except ImportError:  # other systems: the ledger's own lock serializes payments
            yield
            return
        beside = self.path.with_name(f".{self.path.name}.lock")
        handle = os.open(beside, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
