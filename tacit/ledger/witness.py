"""Witnesses: a memory outside the ledger file, which reveals that the file was put back.

Whoever can write a ledger file can also restore an older copy of it, spend from two copies, or
delete it and start anew. The file itself cannot reveal this. A witness can: it keeps the number of
rows and the hash of the last one, in a file on another machine or disk, or on a server. Before a
payment the ledger must contain the row that the witness saw last. After a payment, and before
`spend` returns, the witness gets the new row. So every payment whose release may have happened is
known to the witness.

A witness reveals nothing about the data: a hash and a count. It must be out of reach of whoever
could restore the ledger file.
"""

import contextlib
import json
import os
import re
from collections.abc import Generator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tacit.errors import LedgerError

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

_MOST_BYTES = 1000  # of a mark
_SECONDS = 10.0  # to wait for a server


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


class Witness(Protocol):
    """Keeps the last mark of one ledger, out of reach of whoever can restore the ledger file."""

    def last(self) -> WitnessMark | None:
        """Return the newest mark; None if there is none yet."""
        ...

    def advance(self, mark: WitnessMark) -> None:
        """Keep `mark` durably before returning; never go back to fewer entries."""
        ...

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which no other process advances this witness."""
        ...


class FileWitness:
    """A witness in a file: one line for each mark, only ever appended.

    The file may have the append-only attribute of the file system. It may be on a network drive.
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
        """Hold a lock beside the file, where the system has such locks."""
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


class ServerWitness:
    """A witness on a server: GET returns the last mark, POST advances it (see `serve`)."""

    def __init__(self, url: str) -> None:
        self.url = url

    def last(self) -> WitnessMark | None:
        """Return the server's newest mark; raise `LedgerError` if the server does not answer."""
        from urllib.error import HTTPError, URLError
        from urllib.request import urlopen

        try:
            with urlopen(self.url, timeout=_SECONDS) as answer:
                return WitnessMark.from_json(answer.read(_MOST_BYTES).decode("utf-8", "replace"))
        except HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            raise LedgerError(f"the witness {self.url} answered {error.code}.") from None
        except (URLError, OSError) as error:
            raise LedgerError(f"the witness {self.url} does not answer ({error}).") from None

    def advance(self, mark: WitnessMark) -> None:
        """Send `mark`; return after the server has stored it."""
        from urllib.error import URLError
        from urllib.request import Request, urlopen

        request = Request(self.url, data=mark.to_json().encode(), method="POST")
        try:
            with urlopen(request, timeout=_SECONDS):
                return
        except (URLError, OSError) as error:
            raise LedgerError(f"the witness {self.url} refused a mark ({error}).") from None

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Return an empty context: the server refuses a mark that goes back."""
        return contextlib.nullcontext()


def witness_at(place: str | os.PathLike[str]) -> FileWitness | ServerWitness:
    """Return the witness at a file path or at an http(s) address."""
    text = os.fspath(place)
    if text.startswith(("http://", "https://")):
        return ServerWitness(text)
    return FileWitness(text)


def serve(
    folder: str | os.PathLike[str], *, host: str = "127.0.0.1", port: int = 0
) -> "ThreadingHTTPServer":
    """Return a server that keeps one witness file in `folder` for each address `/NAME`.

    Call `serve_forever()` on it. The server stores what it is sent and refuses to go back to fewer
    rows, or to another ledger. It does not ask who sends: put it where only the ledgers' machines
    can reach it. A false mark cannot free any budget; it only makes the true ledger be refused.
    """
    kept = Path(folder)
    kept.mkdir(parents=True, exist_ok=True)

    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            file = self._file()
            mark = None if file is None else file.last()
            if mark is None:
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self._reply(mark.to_json())

        def do_POST(self) -> None:
            file, size = self._file(), int(self.headers.get("Content-Length") or 0)
            if file is None or not 0 < size <= _MOST_BYTES:
                self.send_error(HTTPStatus.BAD_REQUEST)
                return
            try:
                mark = WitnessMark.from_json(self.rfile.read(size).decode("utf-8", "replace"))
            except LedgerError:
                self.send_error(HTTPStatus.BAD_REQUEST)
                return
            with file.alone():
                before = file.last()
                is_back = (
                    before is not None
                    and before.entries > 0
                    and (before.ledger != mark.ledger or before.entries >= mark.entries)
                )
                if is_back and before != mark:
                    self.send_error(HTTPStatus.CONFLICT)
                    return
                file.advance(mark)
            self._reply("")

        def _file(self) -> FileWitness | None:
            found = re.fullmatch(r"/([A-Za-z0-9_-]{1,100})", self.path)
            return FileWitness(kept / f"{found[1]}.witness") if found else None

        def _reply(self, text: str) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:  # Any: as in the base class
            """Print nothing for a request."""

    return ThreadingHTTPServer((host, port), Handler)
