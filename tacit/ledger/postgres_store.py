"""The ledger of a team: the tables of `store` on a PostgreSQL server.

The guarantees are those of the file. Whoever writes first locks the row `head` (`FOR UPDATE`), so
check and payment are one act across all clients. A commit returns after the server's log is on disk
(`synchronous_commit`; a server with `fsync` off is refused), so what was paid survives a crash of
client and server. If the connection breaks during a commit, the payment may or may not have been
recorded: the caller gets an error and releases nothing, so this can only over-charge.

`postgresql://USER@HOST/DATABASE#NAME` is the ledger NAME (default `tacit_ledger`), a schema of that
database. A **pointer file** holds such an address and can be given wherever the file of a ledger
can; it also gives a place to what a run keeps beside its ledger. Passwords belong in the file or
the variable that PostgreSQL clients read (`~/.pgpass`, `PGPASSWORD`), and are never stored.

Roles: `grant` lets a role of the server spend, or only read. The role that creates a ledger owns
its tables, and can forge them unless the chain is keyed, like the owner of a file.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tacit.errors import LedgerError
from tacit.ledger.chain import LedgerRow, Settings
from tacit.ledger.store import VERSION, Store, create_witnessed, fill, wrong_format

_SCHEMES = ("postgresql://", "postgres://")
_POINTER = "tacit ledger on a server\n"
_DEFAULT = "tacit_ledger"
_TABLES = f"""
CREATE TABLE format (version integer NOT NULL);
INSERT INTO format VALUES ({VERSION});
CREATE TABLE ledger (
    one integer PRIMARY KEY CHECK (one = 1), id text NOT NULL, created text NOT NULL,
    epsilon float8, delta float8, relation text NOT NULL, unit text NOT NULL,
    key_check text, witness text
);
CREATE TABLE head (
    one integer PRIMARY KEY CHECK (one = 1), entries bigint NOT NULL, hash text NOT NULL
);
CREATE TABLE entry (
    id bigint PRIMARY KEY, time text NOT NULL,
    kind text NOT NULL CHECK (kind IN ('spend', 'plan', 'steps', 'seal')),
    partition text NOT NULL, note text NOT NULL, event text, cost text, filter text,
    plan bigint REFERENCES entry (id), steps bigint NOT NULL, hash text NOT NULL
);
CREATE TABLE total (partition text PRIMARY KEY, entries bigint NOT NULL, cost text NOT NULL);
CREATE TABLE progress (
    plan bigint PRIMARY KEY REFERENCES entry (id),
    steps bigint NOT NULL, taken bigint NOT NULL CHECK (taken BETWEEN 0 AND steps)
);
CREATE FUNCTION is_fixed() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'entries are append-only, a budget never changes'; END $$;
CREATE TRIGGER entry_is_fixed BEFORE UPDATE OR DELETE OR TRUNCATE ON entry
    EXECUTE FUNCTION is_fixed();
CREATE TRIGGER ledger_is_fixed BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger
    EXECUTE FUNCTION is_fixed();
"""


def server_address(place: str | os.PathLike[str] | None) -> str | None:
    """Return the address of a ledger on a server, given itself or as a pointer file; else None."""
    if isinstance(place, str) and place.startswith(_SCHEMES):
        return place
    if place is None or not Path(place).is_file():
        return None
    with Path(place).open("rb") as file:
        text = file.read(4096).decode("utf-8", "replace")
    return text.removeprefix(_POINTER).strip() if text.startswith(_POINTER) else None


def write_pointer(file: Path, address: str) -> None:
    """Write a pointer file for the ledger at `address`; an existing file is never overwritten."""
    with file.open("x", encoding="utf-8") as stream:
        stream.write(f"{_POINTER}{without_password(address)}\n")


def without_password(address: str) -> str:
    """Return an address without its passwords, that of the user and those among its options."""
    scheme, sign, rest = address.partition("://")
    user, at, where = rest.rpartition("@")
    where, mark, text = where.partition("?")
    options, number, name = text.partition("#")
    kept = [one for one in options.split("&") if "password" not in unquote(one).partition("=")[0]]
    mark = mark if kept else ""
    return f"{scheme}{sign}{user.partition(':')[0]}{at}{where}{mark}{'&'.join(kept)}{number}{name}"


def has_server_key(address: str) -> bool | None:
    """Return whether the ledger at `address` has a keyed chain; None if there is no ledger."""
    session = _Connection(address, 10.0)
    try:
        if not session.has_tables():
            return None
        return session.execute("SELECT key_check FROM ledger").fetchone() != (None,)
    finally:
        session.close()


class PostgresStore(Store):
    """A connection to one ledger on a server, used by one process."""

    def __init__(self, address: str, pointer: Path | None, **options: Any) -> None:
        """Open the ledger; `options` are those of `Store`. Any: passed on unchanged."""
        self.failures = (_psycopg().Error,)
        self.address = address
        self._pointer = pointer
        super().__init__(pointer or Path(without_password(address)), **options)
        if pointer is None:
            self.path = _own_pointer(self.settings.id, address)

    def damage(self) -> str | None:
        """Return None: the server checks its tables itself."""
        return None

    def _require_tables(self, wanted: Settings) -> None:
        session = _Connection(self.address, self.timeout)
        try:
            if session.has_tables():
                session.require_version()
                return
            if self.read_only:
                raise LedgerError(f"there is no ledger at {without_password(self.address)}.")
            create_witnessed(
                without_password(self.address),
                session.has_tables,
                lambda: session.create(wanted, self.key),
                wanted,
                self.key,
                self.witness,
            )
        finally:
            session.close()

    def _connected(self, path: Path) -> Any:  # noqa: ARG002  # Any: see `_Connection`
        return _Connection(self.address, self.timeout)

    def explain(self, error: Exception) -> str:
        """Return what an error of the server means; texts of the server may quote a note."""
        pg = import_module("psycopg.errors")

        where = without_password(self.address)
        if isinstance(error, pg.LockNotAvailable):
            why = f"was kept locked by another client for {self.timeout:g} s. Nothing was recorded;"
            return f"{where} {why} release nothing and try again."
        if isinstance(error, pg.InsufficientPrivilege):
            return (
                f"this role may not spend from {where}. Open the ledger with read_only=True, or "
                "ask its owner: tacit ledger grant."
            )
        if isinstance(error, pg.OperationalError):
            return (
                f"{where} cannot be reached or was interrupted ({type(error).__name__}). Release "
                "nothing; try again when the server is there."
            )
        return f"{where} cannot be used as a ledger ({type(error).__name__}). See the server's log."

    def grant(self, role: str, *, spend: bool) -> None:
        """Let a role of the server spend, or only read; raise unless we own the ledger."""
        sql: Any = import_module("psycopg.sql")

        session: Any = self.connection  # Any: a `_Connection`
        owned = "SELECT pg_has_role(tableowner, 'MEMBER') FROM pg_tables WHERE schemaname = %s"
        if session.run(owned, [ledger_name(self.address)]).fetchone() != (True,):
            raise LedgerError("only the role that owns a ledger may grant rights on it.")
        if session.run("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone() is None:
            raise LedgerError(f"the server has no role {role!r}. Create it there first.")
        name, who = sql.Identifier(ledger_name(self.address)), sql.Identifier(role)
        session.run(sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(name, who))
        session.run(sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA {} TO {}").format(name, who))
        rights = {"entry": "INSERT", "head": "UPDATE", "total": "INSERT, UPDATE",
                  "progress": "INSERT, UPDATE"}  # fmt: skip
        for table, right in rights.items():
            verb = f"GRANT {right} ON {{}}.{table} TO {{}}"
            if not spend:
                verb = f"REVOKE {right} ON {{}}.{table} FROM {{}}"
            session.run(sql.SQL(verb).format(name, who))


class _Connection:
    """A connection to a server, with the part of the interface of sqlite3 that `Store` uses."""

    def __init__(self, address: str, timeout: float) -> None:
        psycopg = _psycopg()
        sql: Any = import_module("psycopg.sql")

        self._timeout, self._name = timeout, ledger_name(address)
        self._connection = psycopg.connect(
            address.partition("#")[0], autocommit=True, connect_timeout=max(2, int(timeout))
        )
        self._connection.execute(
            sql.SQL("SET search_path TO {}").format(sql.Identifier(self._name))
        )
        self._connection.execute("SET synchronous_commit TO on")
        if self._connection.execute("SHOW fsync").fetchone() != ("on",):
            raise LedgerError(
                f"the server of {without_password(address)} runs with fsync off, so that a crash "
                "may lose payments. Turn fsync on."
            )

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        status: Any = import_module("psycopg.pq").TransactionStatus
        idle = (status.IDLE, status.UNKNOWN)
        return self._connection.info.transaction_status not in idle

    def execute(self, query: str, parameters: Sequence[object] = ()) -> Any:  # Any: a cursor
        """Run one of the statements of `Store` in the dialect of the server."""
        if query == "BEGIN":
            return self.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        if query == "BEGIN IMMEDIATE":
            self.run("BEGIN ISOLATION LEVEL READ COMMITTED")
            self.run(f"SET LOCAL lock_timeout = {max(1, int(1000 * self._timeout))}")
            # Waits for the writer before us; what is read after this includes its rows.
            return self.run("SELECT one FROM head FOR UPDATE")
        done = self.run(query.replace("instr(", "strpos(").replace("?", "%s"), parameters)
        if query == "COMMIT" and done.statusmessage != "COMMIT":
            raise LedgerError("the server did not commit the payment. Release nothing.")
        return done

    def run(self, query: Any, parameters: Sequence[object] = ()) -> Any:  # Any: types of psycopg
        """Run a statement of the server's dialect."""
        return self._connection.execute(query, parameters or None)

    def has_tables(self) -> bool:
        """Return whether the ledger exists."""
        found = self.run(
            "SELECT 1 FROM pg_tables WHERE schemaname = %s AND tablename = 'ledger'", [self._name]
        )
        return found.fetchone() is not None

    def require_version(self) -> None:
        """Raise unless this tacit can use the tables."""
        (version,) = self.run("SELECT version FROM format").fetchone()
        if version != VERSION:
            raise wrong_format(self._name, version)

    def create(self, settings: Settings, key: bytes | None, rows: Sequence[LedgerRow] = ()) -> bool:
        """Create the ledger in one transaction; return False if there was one already."""
        sql: Any = import_module("psycopg.sql")

        lock = int.from_bytes(hashlib.sha256(self._name.encode()).digest()[:8], signed=True)
        with self._connection.transaction():
            self.run("SELECT pg_advisory_xact_lock(%s)", [lock])
            if self.has_tables():
                return False
            self.run(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self._name)))
            self.run(_TABLES)
            fill(self, settings, key, rows)
            return True

    def close(self) -> None:
        """Close the connection; an open transaction is undone."""
        self._connection.close()


def create_on_server(
    address: str, settings: Settings, key: bytes | None, rows: Sequence[LedgerRow]
) -> bool:
    """Create the ledger at `address` with these rows; return False if there is one already."""
    session = _Connection(address, 60.0)
    try:
        return session.create(settings, key, rows)
    finally:
        session.close()


def _psycopg() -> Any:  # Any: it is installed by an extra, and may be missing
    try:
        return import_module("psycopg")
    except ModuleNotFoundError:
        raise LedgerError(
            "a ledger on a server needs psycopg. Run: pip install 'tacit-dp[engines]'"
        ) from None


def ledger_name(address: str) -> str:
    """Return the name of the ledger in an address: what stands after #."""
    return unquote(address.partition("#")[2]) or _DEFAULT


def _own_pointer(ledger_id: str, address: str) -> Path:
    """Return a pointer file in the user's own folder, for a ledger that was opened by address."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(state) / "tacit" / "ledgers"
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    place = hashlib.sha256(without_password(address).encode()).hexdigest()[:8]
    file = folder / f"{ledger_id}-{place}.ledger"
    if not file.exists():
        with contextlib.suppress(FileExistsError):  # another process was first
            write_pointer(file, address)
    return file
