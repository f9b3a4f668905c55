"""The chain: rows of a ledger, the hashes that link them, and what they add up to."""

import hashlib
import hmac
import json
import sqlite3
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tacit._untrusted import printable
from tacit.events import Event, from_json
from tacit.ledger.entry_cost import Cost, nothing

MOVED = "ledger moved to "
"""Start of the note of a sealed row after which a ledger continues elsewhere."""
SEPARATOR = "\x1f"  # between the names in the label of an entry that reads several partitions


class Settings(NamedTuple):
    """A ledger's id, creation time, budget, relation and unit, written once into a new file."""

    id: str
    created: str
    epsilon: float | None
    delta: float | None
    relation: str
    unit: str
    key_check: str | None = None
    """HMAC of the id, which tells a wrong key from a damaged file; None if no key is used."""
    witness: str | None = None
    """File of the witness; None if there is none."""


class LedgerRow(NamedTuple):
    """One row of a ledger file; `hash` covers its other fields and the hash of the row before."""

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
    """One payment in a ledger: event, time, note and cost. Contains nothing private."""

    id: int
    time: str
    kind: str
    """"spend", or "plan" for an event paid for whole, whose steps cost nothing extra."""
    event: Event
    note: str
    partition: str | None
    """The only partition whose records the event concerns; None for all records. The names of
    several partitions are separated by `SEPARATOR`, see `partitions`."""
    steps: int
    """Number of steps of a plan; 1 for a spend."""
    cost: Cost
    """What the event adds to each measure of the ledger's filter."""
    hash: str
    """Hash over this entry and all before it."""

    @property
    def partitions(self) -> tuple[str, ...]:
        """Names of the partitions whose records the event concerns; empty for all records."""
        return names_in(self.partition or "")

    def __str__(self) -> str:
        where = f" on {', '.join(self.partitions)}" if self.partition else ""
        note = f" ({self.note})" if self.note else ""
        return printable(f"{self.kind} {self.id}: {self.event}{where}{note}")

    def to_dict(self) -> dict[str, Any]:
        """Return this entry as plain JSON values."""
        cost = json.loads(self.cost.to_json())
        return {**vars(self), "event": self.event.to_dict(), "cost": cost}


def entry_of(row: LedgerRow) -> Entry:
    """Return the payment that is stored in a row of kind "spend" or "plan"."""
    if row.event is None or row.cost is None:
        raise ValueError(f"entry {row.id} has no event or no cost")
    event, cost, partition = from_json(row.event), Cost.from_json(row.cost), row.partition or None
    return Entry(row.id, row.time, row.kind, event, row.note, partition, row.steps, cost, row.hash)


def names_in(label: str) -> tuple[str, ...]:
    """Return the partitions that a label names; none for "", which stands for all records."""
    return tuple(label.split(SEPARATOR)) if label else ()


class Total(NamedTuple):
    """Number and summed cost of some entries, such as those of one partition."""

    entries: int
    cost: Cost


class Totals(NamedTuple):
    """Totals by partition label; the label "" stands for entries that concern all records."""

    by_label: dict[str, Total]
    n_orders: int

    @staticmethod
    def read(connection: sqlite3.Connection, n_orders: int) -> "Totals":
        """Read all totals that are stored in the file."""
        rows = connection.execute("SELECT partition, entries, cost FROM total")
        found = {name: Total(entries, Cost.from_json(cost)) for name, entries, cost in rows}
        return Totals(found, n_orders)

    def of(self, name: str) -> Total:
        """Return the total of the entries that name this partition; "": of those that name none."""
        return self.by_label.get(name) or Total(0, nothing(self.n_orders))

    def met(self, label: str) -> list[Total]:
        """Return the total spent on each partition that a new entry with `label` would read.

        An entry with label "" reads all records: those of each partition in the ledger, and those
        of no partition named so far, on which only unlabeled entries were spent.
        """
        if label:
            return [self._met_in(name) for name in names_in(label)]
        return [total for _, total in self.met_by_label()]

    def met_by_label(self) -> list[tuple[str, Total]]:
        """Return the total spent on each partition; "" stands for records of no named partition."""
        named = [(name, self._met_in(name)) for name in self.by_label if name]
        return [("", self.of("")), *named]

    def _met_in(self, name: str) -> Total:
        common, own = self.of(""), self.of(name)
        return Total(common.entries + own.entries, common.cost + own.cost)

    def after(self, label: str, cost: Cost) -> dict[str, Total]:
        """Return the totals that change when an entry with `label` and this cost is added."""
        changed: dict[str, Total] = {}
        for name in names_in(label) or ("",):
            old = self.of(name)
            changed[name] = Total(old.entries + 1, old.cost + cost)
        return changed

    def add(self, connection: sqlite3.Connection, label: str, cost: Cost) -> None:
        """Store the totals with an entry of this cost added, in the entry's transaction."""
        for name, (entries, total) in self.after(label, cost).items():
            row = (name, entries, total.to_json())
            connection.execute(
                "INSERT INTO total VALUES (?, ?, ?) ON CONFLICT (partition) "
                "DO UPDATE SET entries = excluded.entries, cost = excluded.cost",
                row,
            )


@dataclass
class Seen:
    """The rows of a file that this process has checked, and what they add up to."""

    entries: int
    hash: str
    totals: dict[str, Total] = field(default_factory=dict[str, Total])
    taken: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """Number of steps, and steps taken, of each plan."""
    moved_to: str = ""
    """Where the ledger was moved, if its last row says so."""

    def add(self, row: LedgerRow) -> None:
        """Add one checked row."""
        if row.kind in ("spend", "plan"):
            if row.cost is None:
                raise ValueError(f"entry {row.id} has no cost")
            cost = Cost.from_json(row.cost)
            self.totals.update(Totals(self.totals, len(cost.renyi)).after(row.partition, cost))
        if row.kind == "plan":
            self.taken[row.id] = (row.steps, 0)
        if row.kind == "steps":
            steps, taken = self.taken[row.plan or 0]
            self.taken[row.plan or 0] = (steps, taken + row.steps)
        is_moved = row.kind == "seal" and row.note.startswith(MOVED)
        self.moved_to = row.note.removeprefix(MOVED) if is_moved else ""
        self.entries, self.hash = row.id, row.hash


def now() -> str:
    """Return the time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def chained(previous: str, row: LedgerRow, key: bytes | None = None) -> str:
    """Return the hash of `row` when it follows a row with hash `previous` in the chain.

    With a `key` the hash is an HMAC (RFC 2104), which nobody can compute without the key.
    """
    return _hash(json.dumps([previous, *row[:-1]]), key)


def genesis(settings: Settings, key: bytes | None = None) -> str:
    """Return the hash from which the chain of rows starts: that of the ledger's settings."""
    return _hash(json.dumps(settings), key)


def key_check(ledger_id: str, key: bytes) -> str:
    """Return the value in a ledger's settings that tells whether `key` is the ledger's key."""
    return _hash(f"key of ledger {ledger_id}", key)


def _hash(text: str, key: bytes | None) -> str:
    if key is None:
        return hashlib.sha256(text.encode()).hexdigest()
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
