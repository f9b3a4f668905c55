"""What one line of a ledger says."""

import json
from dataclasses import dataclass
from typing import Any

from tacit.events import Event, from_json
from tacit.ledger.cost import Cost
from tacit.ledger.store import Row


@dataclass(frozen=True)
class Entry:
    """One payment: an event, when and what for. Holds nothing private."""

    id: int
    time: str
    kind: str
    """"spend", or "plan" for a reservation whose steps cost nothing extra."""
    event: Event
    note: str
    partition: str | None
    """The only partition whose records the event concerns; None for all records."""
    steps: int
    """How many steps a plan has; 1 for a spend."""
    cost: Cost
    """What the event takes from each measure of the ledger's filter."""
    hash: str
    """Covers this entry and all before it."""

    def __str__(self) -> str:
        where = f" on {self.partition}" if self.partition else ""
        note = f" ({self.note})" if self.note else ""
        return f"{self.kind} {self.id}: {self.event}{where}{note}"

    def to_dict(self) -> dict[str, Any]:
        """This entry as plain JSON values."""
        return {
            "id": self.id,
            "time": self.time,
            "kind": self.kind,
            "event": self.event.to_dict(),
            "note": self.note,
            "partition": self.partition,
            "steps": self.steps,
            "cost": json.loads(self.cost.to_json()),
            "hash": self.hash,
        }


def entry_of(row: Row) -> Entry:
    """The entry that a row of kind spend or plan says."""
    assert row.event is not None  # only rows of kind steps have none
    assert row.cost is not None
    return Entry(
        id=row.id,
        time=row.time,
        kind=row.kind,
        event=from_json(row.event),
        note=row.note,
        partition=row.partition or None,
        steps=row.steps,
        cost=Cost.from_json(row.cost),
        hash=row.hash,
    )
