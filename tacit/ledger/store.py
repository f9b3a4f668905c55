"""The ledger's file: append-only rows in SQLite, each durable before `append` returns.

WAL with `synchronous=FULL`: a commit returns after the write-ahead log is on disk, so what was
paid survives kill -9 and power loss. Writers first take the lock of the file (`BEGIN IMMEDIATE`),
so check and payment are one act across threads and processes.

**What is detected.** Rows form a hash chain that starts from the settings and ends in `head`.
Before each payment every row that this process has not seen yet is checked, the totals and the
progress of plans are added up again from the rows, and the settings are compared with the start of
the chain. So an edited budget, edited or missing rows, and edited totals are found before the next
payment.

**What is not.** Whoever can write the file can forge a whole new chain, unless the chain is keyed:
then each hash is an HMAC, and the key is not in the file. Neither reveals that the file was put
back to an older copy, copied, or deleted and made anew; only a `witness` does.

A payment does not read history: a process adds up the rows when it first uses the file, and later
only the new ones. SQLite connections must not cross a fork, so they are closed before it and
reopened on next use.
"""

import contextlib
import functools
import hmac
import os
import sqlite3
import threading
import uuid
import weakref
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from tacit._whole_file import sync_folder
from tacit.errors import LedgerError
from tacit.ledger.chain import LedgerRow, Seen, Settings, Totals, chained, genesis, key_check, now
from tacit.ledger.witness import FileWitness, WitnessMark

APPLICATION_ID = 0x74616369  # "taci"
VERSION = 2  # `PRAGMA user_version` of a file
PAYMENTS = "kind IN ('spend', 'plan')"
_MOST_TEXT = 16 * 2**20  # bytes of one value in the file

_SCHEMA = """
CREATE TABLE ledger (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    id TEXT NOT NULL, created TEXT NOT NULL,
    epsilon REAL, delta REAL, relation TEXT NOT NULL, unit TEXT NOT NULL,
    key_check TEXT, witness TEXT
);
CREATE TABLE head (
    one INTEGER PRIMARY KEY CHECK (one = 1), entries INTEGER NOT NULL, hash TEXT NOT NULL
);
CREATE TABLE entry (
    id INTEGER PRIMARY KEY,
    time TEXT NOT NULL, kind TEXT NOT NULL CHECK (kind IN ('spend', 'plan', 'steps', 'seal')),
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


def has_key(path: Path) -> bool:
    """Return whether the file at `path` is a ledger with a keyed chain."""
    try:
        with contextlib.closing(_connect(path, 1.0, read_only=True)) as connection:
            found = connection.execute("SELECT key_check FROM ledger").fetchone()
            return found not in (None, (None,))
    except (sqlite3.Error, LedgerError, OSError):
        return False


class Store:
    """A connection to one ledger file, or to memory if `path` is None, used by one process."""

    failures: tuple[type[Exception], ...] = (sqlite3.Error,)
    """Errors of the database, which `explain` puts in words."""

    def __init__(
        self,
        path: Path | None,
        *,
        wanted: Settings,
        timeout: float,
        read_only: bool,
        key: bytes | None = None,
        witness: FileWitness | None = None,
    ) -> None:
        self.path = path
        self.read_only = read_only
        self.lock = threading.RLock()
        self.timeout = timeout
        self.key = key
        self.witness = witness
        self.seen: Seen | None = None
        self._pid = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False
        try:
            with _translated(self):
                self._require_tables(wanted)
                self.settings = self._load()
        except BaseException:
            self._disconnect()
            raise
        _live.add(self)

    def _require_tables(self, wanted: Settings) -> None:
        """Create the ledger if it is missing; raise if something else is in its place."""
        if self.path is None:
            self._connection = sqlite3.connect(
                ":memory:", isolation_level=None, check_same_thread=False
            )
            _create_tables(self._connection, wanted, self.key)
        else:
            _require_ledger_file(self.path, wanted, self.read_only, self.key, self.witness)

    def _connected(self, path: Path) -> sqlite3.Connection:
        """Return a new connection to the ledger at `path`."""
        return _connect(path, self.timeout, self.read_only)

    def damage(self) -> str | None:
        """Return what SQLite finds wrong with the file as a database, inside a transaction."""
        for check in ("integrity_check", "foreign_key_check"):
            found = self.connection.execute(f"PRAGMA {check}").fetchall()
            if found not in ([], [("ok",)]):
                return f"SQLite finds damage: {found[0]}"
        return None

    def explain(self, error: Exception) -> str:
        """Return what an error of the database means, in words."""
        return _explain(self, error)

    def _load(self) -> Settings:
        """Return the file's settings; check that the last row has the hash stored as `head`."""
        if not self.read_only:
            with self.transaction(is_checked=False) as connection:
                # Changes nothing, but fails now if the file cannot be written.
                connection.execute("UPDATE head SET entries = 0 WHERE one = 2")
        with self.reading() as connection:
            settings = self._stored_settings()
            query = "SELECT id, hash FROM entry ORDER BY id DESC LIMIT 1"
            last = connection.execute(query).fetchone()
            if self._has_chain_key(settings):
                expected = last or (0, genesis(settings, self.key))
                if self.head() != expected:
                    _corrupt(self.path, "entries are missing at its end")
            paid = connection.execute(f"SELECT count(*) FROM entry WHERE {PAYMENTS}").fetchone()
            counted = connection.execute("SELECT coalesce(sum(entries), 0) FROM total").fetchone()
            if paid[0] > counted[0]:  # an entry that reads several partitions counts in each
                _corrupt(self.path, "its running totals are not the sum of its entries")
        return settings

    def _stored_settings(self) -> Settings:
        columns = ", ".join(Settings._fields)
        found = self.connection.execute(f"SELECT {columns} FROM ledger").fetchone()
        return Settings(*found or _corrupt(self.path, "its settings are missing"))

    def _has_chain_key(self, settings: Settings) -> bool:
        """Return whether the chain can be checked; raise if the key is wrong or not needed."""
        if settings.key_check is None:
            if self.key is not None:
                _corrupt(self.path, "its chain is not keyed, but a key was given")
            return True
        if self.key is None:
            if not self.read_only:
                raise LedgerError(
                    f"{self.path} has a keyed chain. Give its key: key= in Python, the file named "
                    "by TACIT_LEDGER_KEY on the command line."
                )
            return False
        if not hmac.compare_digest(key_check(settings.id, self.key), settings.key_check):
            raise LedgerError(f"the key is not the key of the ledger at {self.path}.")
        return True

    def check(self) -> Seen:
        """Check all rows that are new to this process, inside a transaction; return their sum.

        Raises `LedgerError` if settings, rows, totals or the progress of plans were edited, if rows
        are missing, or if the file was replaced while it was open.
        """
        if self._stored_settings() != self.settings:
            _corrupt(self.path, "its budget or another setting was edited")
        entries, head = self.head()
        is_first, has_key = self.seen is None, self._has_chain_key(self.settings)
        seen = self.seen or Seen(0, genesis(self.settings, self.key))
        if entries < seen.entries or not self._holds(seen.entries, seen.hash):
            _corrupt(self.path, "it was replaced by an older or another file while it was open")
        for row in self.rows("id > ?", (seen.entries,)):
            if row.id != seen.entries + 1:
                _corrupt(self.path, f"entry {seen.entries + 1} is missing")
            if has_key and row.hash != chained(seen.hash, row, self.key):
                _corrupt(self.path, f"entry {row.id} was changed, or one before it was taken out")
            seen.add(row)
        if entries != seen.entries or (has_key and head != seen.hash):
            _corrupt(self.path, "entries are missing at its end")
        if is_first:
            self._check_sums(seen)
        self.seen = seen
        return seen

    def _require_here(self, seen: Seen) -> None:
        """Raise if the ledger was moved elsewhere: what is spent here would be spent twice."""
        if seen.moved_to:
            raise LedgerError(f"{self.path} was moved to {seen.moved_to}. Spend from there.")

    def _check_sums(self, seen: Seen) -> None:
        """Raise unless the stored totals and the stored progress are those of the rows."""
        if Totals.read(self.connection, 0).by_label != seen.totals:
            _corrupt(self.path, "its running totals are not the sum of its entries")
        stored = self.connection.execute("SELECT plan, steps, taken FROM progress").fetchall()
        if {plan: (steps, taken) for plan, steps, taken in stored} != seen.taken:
            _corrupt(self.path, "the progress of its plans is not the sum of its entries")

    def _holds(self, entries: int, hash_: str) -> bool:
        """Return whether row number `entries` is there and has this hash."""
        if entries == 0:
            return self.settings.key_check is not None or hash_ == genesis(self.settings)
        query = "SELECT hash FROM entry WHERE id = ?"
        return self.connection.execute(query, (entries,)).fetchone() == (hash_,)

    def check_witness(self) -> None:
        """Raise `LedgerError` unless the file continues what its witness saw last."""
        if self.witness is None:
            return
        mark, entries = self.witness.last(), self.head()[0]
        if mark is None:
            if self.settings.witness is not None:
                _corrupt(self.path, "its witness has lost its marks")
            return  # a witness that is given to an old ledger for the first time
        if mark.ledger != self.settings.id:
            _corrupt(self.path, "its witness saw another ledger: it was deleted and made anew")
        if mark.entries > entries:
            what = (
                f"its witness saw {mark.entries:,} rows and it has {entries:,}: it is an old copy"
            )
            _corrupt(self.path, what)
        if not self._holds(mark.entries, mark.hash):
            _corrupt(self.path, f"row {mark.entries:,} is not the one that its witness saw")

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
            self._connection = self._connected(self.path)
        return self._connection

    @contextlib.contextmanager
    def reading(self) -> Generator[sqlite3.Connection]:
        """Open a read transaction, so that all reads in the block see one state of the file."""
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
    def transaction(self, *, is_checked: bool = True) -> Generator[sqlite3.Connection]:
        """Open a write transaction: exclusive, all or nothing, durable when the block ends.

        The file is checked first (`check`, `check_witness`). The witness has the new head when the
        block ends.
        """
        if self.read_only:
            raise LedgerError(f"{self.path} was opened read-only, so nothing can be spent from it.")
        _ = self.connection  # raise in a forked child before it waits for a lock
        with self.lock, _translated(self), contextlib.ExitStack() as stack:
            connection = self.connection
            try:
                connection.execute("BEGIN IMMEDIATE")
                before = (0, "")
                if is_checked:
                    self._require_here(self.check())
                    before = self.head()
                    if self.witness is not None:
                        stack.enter_context(self.witness.alone())
                    self.check_witness()
                yield connection
                after = self.head() if is_checked else before
                connection.execute("COMMIT")
            except BaseException:
                # After a failed commit the row may still reach the disk: then it over-charges.
                with contextlib.suppress(*self.failures):
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                raise
            if self.witness is not None and after != before:
                self._tell_witness(self.witness, *after)

    def _tell_witness(self, witness: FileWitness, entries: int, head: str) -> None:
        try:
            witness.advance(WitnessMark(self.settings.id, entries, head))
        except (OSError, LedgerError) as error:
            raise LedgerError(
                f"the payment was recorded, but its witness was not reached ({error}). "
                "Release nothing, and try again when the witness can be reached."
            ) from error

    def head(self) -> tuple[int, str]:
        """Return the number of rows and the last row's hash; call this inside a transaction."""
        found = self.connection.execute("SELECT entries, hash FROM head").fetchone()
        return found or _corrupt(self.path, "its head is missing")

    def append(self, row: LedgerRow) -> LedgerRow:
        """Append `row`, inside a transaction; return it with number, hash and, if missing, time."""
        entries, previous = self.head()
        row = row._replace(id=entries + 1, time=row.time or now())
        row = row._replace(hash=chained(previous, row, self.key))
        execute = self.connection.execute
        execute("INSERT INTO entry VALUES (?,?,?,?,?,?,?,?,?,?,?)", row)
        execute("UPDATE head SET entries = ?, hash = ?", (row.id, row.hash))
        return row

    def rows(self, where: str = "1 = 1", parameters: tuple[object, ...] = ()) -> list[LedgerRow]:
        """Return the rows that satisfy the SQL condition `where`, which never comes from a user."""
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
        """Close the file's connection unless a transaction is open; the next use reopens it."""
        if self.path and not (self._connection and self._connection.in_transaction):
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _require_ledger_file(
    path: Path, wanted: Settings, read_only: bool, key: bytes | None, witness: FileWitness | None
) -> None:
    """Create the ledger file if it is missing; raise if the file is not a ledger."""
    if not path.parent.is_dir():
        raise LedgerError(f"the folder {path.parent} does not exist. Create it first.")
    if not path.exists():
        if read_only:
            raise LedgerError(f"there is no ledger at {path}.")
        create_witnessed(
            str(path), path.exists, lambda: create_file(path, wanted, key), wanted, key, witness
        )
    if not path.is_file():
        raise LedgerError(f"{path} is not a file.")
    with path.open("rb") as file:
        if file.read(16) != b"SQLite format 3\0":
            _corrupt(path, "it is empty, damaged, or another kind of file")


def create_witnessed(
    path: str,
    exists: Callable[[], bool],
    create: Callable[[], object],
    wanted: Settings,
    key: bytes | None,
    witness: FileWitness | None,
) -> None:
    """Create a ledger whose witness knows it; raise if the witness knows a lost ledger."""
    if witness is None:
        create()
        return
    with witness.alone():
        if exists():  # another process was first: use its ledger
            return
        mark = witness.last()
        if mark is not None and mark.entries > 0:
            raise LedgerError(
                f"there is no ledger at {path}, but its witness saw one of {mark.entries:,} rows. "
                "Restore the newest copy; a new ledger would spend the budget again."
            )
        # Before the file, so that no ledger exists that the witness has not seen.
        witness.advance(WitnessMark(wanted.id, 0, genesis(wanted, key)))
        create()


def create_file(
    path: Path, settings: Settings, key: bytes | None = None, rows: Sequence[LedgerRow] = ()
) -> bool:
    """Create a ledger file at `path` atomically: write it beside `path`, then link it there.

    Return whether it was created: False if there was a file already.

    Only the user may read it (mode 0600), and SQLite gives its log the same mode.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    try:
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            _create_tables(connection, settings, key, rows)
            connection.execute("PRAGMA journal_mode = WAL")
        try:
            os.link(draft, path)
        except FileExistsError:  # another process was first: use its file
            return False
        sync_folder(path.parent)
        return True
    finally:
        draft.unlink(missing_ok=True)


def _create_tables(
    connection: sqlite3.Connection,
    settings: Settings,
    key: bytes | None = None,
    rows: Sequence[LedgerRow] = (),
) -> None:
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
    connection.execute("BEGIN")
    fill(connection, settings, key, rows)
    connection.execute("COMMIT")


def fill(
    connection: Any,  # Any: a connection of sqlite3, or one to a server with its interface
    settings: Settings,
    key: bytes | None,
    rows: Sequence[LedgerRow] = (),
) -> None:
    """Write the settings, and the rows of a ledger that is moved here, into empty tables."""
    seen = Seen(0, genesis(settings, key))
    connection.execute("INSERT INTO ledger VALUES (1,?,?,?,?,?,?,?,?)", settings)
    for row in rows:
        connection.execute("INSERT INTO entry VALUES (?,?,?,?,?,?,?,?,?,?,?)", row)
        seen.add(row)
    for name, total in seen.totals.items():
        values = (name, total.entries, total.cost.to_json())
        connection.execute("INSERT INTO total VALUES (?, ?, ?)", values)
    for plan, (steps, taken) in seen.taken.items():
        connection.execute("INSERT INTO progress VALUES (?, ?, ?)", (plan, steps, taken))
    connection.execute("INSERT INTO head VALUES (1, ?, ?)", (seen.entries, seen.hash))


@functools.cache
def _objects() -> frozenset[tuple[str, ...]]:
    """Return the tables, indexes and triggers of a ledger file."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_SCHEMA)
        return frozenset(connection.execute("SELECT type, name, sql FROM sqlite_master"))


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
            raise wrong_format(path, version)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_TEXT)
        connection.execute("PRAGMA trusted_schema = OFF")
        objects = set(connection.execute("SELECT type, name, sql FROM sqlite_master"))
        if objects - _objects():  # a view or trigger could run any SQL
            _corrupt(path, "it has tables, views or triggers that no ledger has")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # macOS; elsewhere it does nothing
        return connection
    except BaseException:
        connection.close()
        raise


def wrong_format(where: object, version: object) -> LedgerError:
    """Return the error for a ledger of another format than this one."""
    return LedgerError(
        f"{where} is a ledger of format {version}, and this tacit uses format {VERSION} alone: use "
        "the tacit it was made with."
    )


def _corrupt(path: Path | None, why: str) -> NoReturn:
    raise LedgerError(f"{path} cannot be used as a ledger: {why}. Restore it from a backup.")


@contextlib.contextmanager
def _translated(store: Store) -> Generator[None]:
    """Raise `LedgerError` in place of errors of SQLite, of the system and of bad stored JSON."""
    try:
        yield
    except store.failures as error:
        raise LedgerError(store.explain(error)) from error
    except OSError as error:
        raise LedgerError(f"{store.path} cannot be opened: {error.strerror or error}.") from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        ArithmeticError,
    ) as error:
        # From JSON that is not what a ledger writes.
        raise LedgerError(f"{store.path} holds what no ledger writes ({error}).") from error


def _explain(store: Store, error: Exception) -> str:
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
