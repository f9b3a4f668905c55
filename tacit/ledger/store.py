"""The ledger's file: append-only rows in SQLite, each durable before `append` returns.

WAL with `synchronous=FULL`: a commit returns after the write-ahead log is on disk, so what was
paid survives kill -9 and power loss. Writers first take the lock of the file (`BEGIN IMMEDIATE`),
so check and payment are one act across threads and processes. Rows form a hash chain that ends in
`head`, so an edited, missing or reordered row is found. Anyone who can write the file can also
forge a whole new chain, which only a copy of the head kept elsewhere reveals.

Running totals, one per partition, are kept in the file, so that a payment does not read history.
SQLite connections must not cross a fork, so they are closed before it and reopened on next use.
"""

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import uuid
import weakref
from collections.abc import Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote

from tacit.errors import LedgerError
from tacit.events import Event, from_json
from tacit.ledger.entry_cost import Cost, nothing

APPLICATION_ID = 0x74616369  # "taci"
VERSION = 1

_SCHEMA = """
CREATE TABLE ledger (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    id TEXT NOT NULL, created TEXT NOT NULL,
    epsilon REAL, delta REAL, relation TEXT NOT NULL, unit TEXT NOT NULL
);
CREATE TABLE head (
    one INTEGER PRIMARY KEY CHECK (one = 1), entries INTEGER NOT NULL, hash TEXT NOT NULL
);
CREATE TABLE entry (
    id INTEGER PRIMARY KEY,
    time TEXT NOT NULL, kind TEXT NOT NULL CHECK (kind IN ('spend', 'plan', 'steps')),
    partition TEXT NOT NULL, note TEXT NOT NULL, event TEXT, cost TEXT, filter TEXT,
    plan INTEGER REFERENCES entry (id), steps INTEGER NOT NULL, hash TEXT NOT NULL
);
CREATE TABLE total (
    partition TEXT PRIMARY KEY, entries INTEGER NOT NULL, cost TEXT NOT NULL
);
CREATE TABLE progress (
    plan INTEGER PRIMARY KEY REFERENCES entry (id),
    steps INTEGER NOT NULL, taken INTEGER NOT NULL CHECK (taken BETWEEN 0 AND steps)
);
CREATE TRIGGER ledger_is_fixed BEFORE UPDATE ON ledger
    BEGIN SELECT RAISE(ABORT, 'a ledger never changes its budget'); END;
CREATE TRIGGER entry_is_fixed BEFORE UPDATE ON entry
    BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END;
CREATE TRIGGER entry_stays BEFORE DELETE ON entry
    BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END;
"""


class Settings(NamedTuple):
    """Identity and rules of a ledger, written once when the file is created."""

    id: str
    created: str
    epsilon: float | None
    delta: float | None
    relation: str
    unit: str


class LedgerRow(NamedTuple):
    """One row of the chain; `hash` covers all other fields and the hash of the row before."""

    id: int = 0
    time: str = ""
    kind: str = "spend"
    partition: str = ""
    note: str = ""
    event: str | None = None
    cost: str | None = None
    filter: str | None = None
    plan: int | None = None
    steps: int = 1
    hash: str = ""


@dataclass(frozen=True)
class Entry:
    """One payment: the event, its time, its note and its cost. Contains nothing private."""

    id: int
    time: str
    kind: str
    """"spend", or "plan" for an event paid for whole, whose steps cost nothing extra."""
    event: Event
    note: str
    partition: str | None
    """The only partition whose records the event concerns; None for all records."""
    steps: int
    """Number of steps of a plan; 1 for a spend."""
    cost: Cost
    """What the event adds to each measure of the ledger's filter."""
    hash: str
    """Hash over this entry and all before it."""

    def __str__(self) -> str:
        where = f" on {self.partition}" if self.partition else ""
        note = f" ({self.note})" if self.note else ""
        return f"{self.kind} {self.id}: {self.event}{where}{note}"

    def to_dict(self) -> dict[str, Any]:
        """Return this entry as plain JSON values."""
        cost = json.loads(self.cost.to_json())
        return {**vars(self), "event": self.event.to_dict(), "cost": cost}


def entry_of(row: LedgerRow) -> Entry:
    """Return the entry that is stored in a row of kind spend or plan."""
    assert row.event is not None  # only rows of kind steps have none
    assert row.cost is not None
    event, cost, partition = from_json(row.event), Cost.from_json(row.cost), row.partition or None
    return Entry(row.id, row.time, row.kind, event, row.note, partition, row.steps, cost, row.hash)


class Total(NamedTuple):
    """Number and summed cost of some entries."""

    entries: int
    cost: Cost


class Totals(NamedTuple):
    """Totals by partition label; the label "" stands for entries that concern all records."""

    by_label: dict[str, Total]
    n_orders: int

    @staticmethod
    def read(connection: sqlite3.Connection, n_orders: int, *, label: str = "") -> "Totals":
        """Read all totals, or only those that concern records of partition `label`."""
        only, labels = ("WHERE partition IN ('', ?)", (label,)) if label else ("", ())
        rows = connection.execute(f"SELECT partition, entries, cost FROM total {only}", labels)
        found = {name: Total(entries, Cost.from_json(cost)) for name, entries, cost in rows}
        return Totals(found, n_orders)

    def of(self, label: str) -> Total:
        """Return the total of the entries with exactly this label."""
        return self.by_label.get(label) or Total(0, nothing(self.n_orders))

    def met(self, label: str) -> list[Total]:
        """Return what has been spent on each group of records that an entry with `label` concerns.

        An entry that concerns all records concerns those of every partition known so far and, with
        the unlabeled entries alone, those of any other partition.
        """
        return [self._met_in(label)] if label else [total for _, total in self.met_by_label()]

    def met_by_label(self) -> list[tuple[str, Total]]:
        """Return what has been spent on each partition; "" stands for every partition not named."""
        named = [(name, self._met_in(name)) for name in self.by_label if name]
        return [("", self.of("")), *named]

    def _met_in(self, label: str) -> Total:
        common, own = self.of(""), self.of(label)
        return Total(common.entries + own.entries, common.cost + own.cost)

    def after(self, label: str, cost: Cost) -> Total:
        """Return the total of `label` with one more entry."""
        old = self.of(label)
        return Total(old.entries + 1, old.cost + cost)

    def add(self, connection: sqlite3.Connection, label: str, cost: Cost) -> None:
        """Write `after(label, cost)`; call it inside the transaction that appends the entry."""
        entries, total = self.after(label, cost)
        row = (label, entries, total.to_json())
        connection.execute("INSERT OR REPLACE INTO total VALUES (?, ?, ?)", row)


def now() -> str:
    """Return the time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def chained(previous: str, row: LedgerRow) -> str:
    """Return the hash that `row` must have after a row with hash `previous`."""
    return hashlib.sha256(json.dumps([previous, *row[:-1]]).encode()).hexdigest()


def genesis(settings: Settings) -> str:
    """Return the hash at which the chain starts."""
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


class Store:
    """A connection to one ledger file, or to memory if `path` is None, used by one process."""

    def __init__(
        self, path: Path | None, *, wanted: Settings, timeout: float, read_only: bool
    ) -> None:
        self.path = path
        self.read_only = read_only
        self.lock = threading.RLock()
        self.timeout = timeout
        self._pid = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False
        try:
            with _translated(self):
                if path is None:
                    self._connection = sqlite3.connect(
                        ":memory:", isolation_level=None, check_same_thread=False
                    )
                    _create_tables(self._connection, wanted)
                else:
                    _require_ledger_file(path, wanted, read_only)
                self.settings = self._load()
        except BaseException:
            self._disconnect()
            raise
        _live.add(self)

    def _load(self) -> Settings:
        """Return the settings of the file, after a check that the chain ends as `head` states."""
        if not self.read_only:
            with self.transaction() as connection:
                # Changes nothing, but fails now if the file cannot be written.
                connection.execute("UPDATE head SET entries = 0 WHERE one = 2")
        with self.reading() as connection:
            columns = ", ".join(Settings._fields)
            found = connection.execute(f"SELECT {columns} FROM ledger").fetchone()
            settings = Settings(*found or _corrupt(self.path, "its settings are missing"))
            last = connection.execute("SELECT max(id), hash FROM entry").fetchone()
            expected = last if last[0] else (0, genesis(settings))
            if self.head() != expected:
                _corrupt(self.path, "entries are missing at its end")
            paid = connection.execute("SELECT count(*) FROM entry WHERE kind <> 'steps'").fetchone()
            summed = connection.execute("SELECT coalesce(sum(entries), 0) FROM total").fetchone()
            if paid != summed:
                _corrupt(self.path, "its running totals are not the sum of its entries")
        return settings

    @property
    def connection(self) -> sqlite3.Connection:
        """The open connection of this process."""
        if os.getpid() != self._pid:
            advice = f"Open Ledger({str(self.path)!r}) again in this process."
            if self.path is None:
                advice = "An in-memory ledger cannot be shared: give it a path."
            why = "this ledger was opened in another process and cannot be used after a fork."
            raise LedgerError(f"{why} {advice}")
        if self._is_closed:
            raise LedgerError("this ledger is closed. Open it again to use it.")
        if self._connection is None:
            assert self.path is not None  # memory stays connected until closed
            self._connection = _connect(self.path, self.timeout, self.read_only)
        return self._connection

    @contextlib.contextmanager
    def reading(self) -> Generator[sqlite3.Connection]:
        """Give one consistent view of the file inside the block."""
        _ = self.connection  # raise in a forked child before it waits for a lock
        with self.lock, _translated(self):
            connection = self.connection
            if connection.in_transaction:
                yield connection
                return
            try:
                connection.execute("BEGIN")
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextlib.contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """Write all or nothing, alone among all writers; durable when the block has been left."""
        if self.read_only:
            raise LedgerError(f"{self.path} was opened read-only, so nothing can be spent from it.")
        _ = self.connection  # raise in a forked child before it waits for a lock
        with self.lock, _translated(self):
            connection = self.connection
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # After a failed commit the row may still reach the disk: then it over-charges.
                with contextlib.suppress(sqlite3.Error):
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                raise

    def head(self) -> tuple[int, str]:
        """Return the number of rows and the hash of the last; call it inside a transaction."""
        found = self.connection.execute("SELECT entries, hash FROM head").fetchone()
        return found or _corrupt(self.path, "its head is missing")

    def append(self, row: LedgerRow) -> LedgerRow:
        """Append `row`, inside a transaction; return it with its number, time and hash."""
        entries, previous = self.head()
        row = row._replace(id=entries + 1, time=now())
        row = row._replace(hash=chained(previous, row))
        execute = self.connection.execute
        execute("INSERT INTO entry VALUES (?,?,?,?,?,?,?,?,?,?,?)", row)
        execute("UPDATE head SET entries = ?, hash = ?", (row.id, row.hash))
        return row

    def rows(self, where: str = "1", parameters: tuple[object, ...] = ()) -> list[LedgerRow]:
        """Return rows in order; `where` is SQL of this package, never of a user."""
        query = f"SELECT * FROM entry WHERE {where} ORDER BY id"
        return [LedgerRow(*values) for values in self.connection.execute(query, parameters)]

    def close(self) -> None:
        """Close the file; an in-memory ledger is lost after that."""
        if os.getpid() == self._pid:
            with self.lock:
                self._disconnect()
                self._is_closed = True

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at exit anything may be gone already
            self._disconnect()

    def disconnect_if_idle(self) -> None:
        """Close the connection to a file unless a transaction is open; the next use reopens it."""
        if self.path and not (self._connection and self._connection.in_transaction):
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _require_ledger_file(path: Path, wanted: Settings, read_only: bool) -> None:
    """Create the file if it is missing; refuse anything that is not a ledger."""
    if not path.parent.is_dir():
        raise LedgerError(f"the folder {path.parent} does not exist. Create it first.")
    if not path.exists():
        if read_only:
            raise LedgerError(f"there is no ledger at {path}.")
        _create_file(path, wanted)
    if not path.is_file():
        raise LedgerError(f"{path} is not a file.")
    with path.open("rb") as file:
        if file.read(16) != b"SQLite format 3\0":
            _corrupt(path, "it is empty, damaged, or another kind of file")


def _create_file(path: Path, settings: Settings) -> None:
    """Create a complete ledger at `path`, or nothing: write it beside `path`, then link it."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    try:
        with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            _create_tables(connection, settings)
            connection.execute("PRAGMA journal_mode = WAL")
        with contextlib.suppress(FileExistsError):  # another process was first: use its file
            os.link(draft, path)
        with contextlib.suppress(OSError):  # some systems cannot open a folder; the file is synced
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    finally:
        draft.unlink(missing_ok=True)


def _create_tables(connection: sqlite3.Connection, settings: Settings) -> None:
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
    connection.execute("BEGIN")
    connection.execute("INSERT INTO ledger VALUES (1,?,?,?,?,?,?)", settings)
    connection.execute("INSERT INTO head VALUES (1, 0, ?)", (genesis(settings),))
    connection.execute("COMMIT")


def _connect(path: Path, timeout: float, read_only: bool) -> sqlite3.Connection:
    address = f"file:{quote(str(path))}?mode={'ro' if read_only else 'rw'}"
    log = path.with_name(path.name + "-wal")
    has_log = log.exists() and log.stat().st_size > 0
    if read_only and not os.access(path.parent, os.W_OK) and not has_log:
        address += "&immutable=1"  # no log can be created there, and there is none to read
    connection = sqlite3.connect(
        address, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False
    )
    try:
        if connection.execute("PRAGMA application_id").fetchone() != (APPLICATION_ID,):
            raise LedgerError(f"{path} is a SQLite file, but not a ledger.")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version != VERSION:
            raise LedgerError(
                f"{path} has ledger version {version}, this tacit reads {VERSION}. "
                "Use the tacit it was made with."
            )
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # macOS; elsewhere it does nothing
        return connection
    except BaseException:
        connection.close()
        raise


def _corrupt(path: Path | None, why: str) -> NoReturn:
    raise LedgerError(f"{path} cannot be used as a ledger: {why}. Restore it from a backup.")


@contextlib.contextmanager
def _translated(store: Store) -> Generator[None]:
    """Raise errors of SQLite and of the system as `LedgerError`; release nothing after one."""
    try:
        yield
    except sqlite3.Error as error:
        raise LedgerError(_explain(store, error)) from error
    except OSError as error:
        raise LedgerError(f"{store.path} cannot be opened: {error.strerror or error}.") from error
    except (ValueError, KeyError) as error:  # from JSON that is not what a ledger writes
        raise LedgerError(f"{store.path} holds what no ledger writes ({error}).") from error


def _explain(store: Store, error: sqlite3.Error) -> str:
    where, text = store.path or "the in-memory ledger", str(error)
    if "locked" in text:
        why = f"was kept locked by another process for {store.timeout:g} s. Nothing was recorded; "
        return f"{where} {why}release nothing and try again."
    if "full" in text or "disk I/O" in text:
        return f"{where} could not be written ({text}). Release nothing; free space and try again."
    if "readonly" in text:
        advice = "Make them writable, or open the ledger with read_only=True."
        return f"{where}, or its -wal or -shm file, cannot be written. {advice}"
    if "unable to open" in text:
        return f"{where} cannot be opened ({text})."
    return f"{where} cannot be used as a ledger ({text}). Restore it from a backup."


_live: "weakref.WeakSet[Store]" = weakref.WeakSet()
_held: list[Store] = []


def _before_fork() -> None:
    # Locks of SQLite belong to a process, but its memory is copied: a child with a copy of an open
    # connection would assume locks that it does not hold. So no connection is open while forking.
    for store in list(_live):
        store.lock.acquire()
        _held.append(store)
        store.disconnect_if_idle()


def _after_fork() -> None:
    while _held:
        _held.pop().lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
