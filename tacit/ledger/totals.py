"""Running totals, one per partition, kept in the file so that a spend does not read history."""

import sqlite3
from typing import NamedTuple

from tacit.ledger.cost import Cost, nothing


class Total(NamedTuple):
    """What the entries with one label sum to."""

    entries: int
    cost: Cost


class Totals(NamedTuple):
    """Sums by label; the label "" stands for entries that concern all records."""

    by_label: dict[str, Total]
    n_orders: int

    @staticmethod
    def read(connection: sqlite3.Connection, n_orders: int, *, label: str = "") -> "Totals":
        """All totals, or those that matter to records of partition `label`."""
        only, labels = ("WHERE partition IN ('', ?)", (label,)) if label else ("", ())
        rows = connection.execute(f"SELECT partition, entries, cost FROM total {only}", labels)
        found = {name: Total(entries, Cost.from_json(cost)) for name, entries, cost in rows}
        return Totals(found, n_orders)

    def of(self, label: str) -> Total:
        """Sum of the entries with exactly this label."""
        return self.by_label.get(label) or Total(0, nothing(self.n_orders))

    def met(self, label: str) -> list[Total]:
        """What each kind of record has met that an entry with `label` concerns.

        For an entry that concerns all records these are the records of every partition known so far
        and, with the unlabeled entries alone, those of any other partition.
        """
        if label:
            return [self._met_in(label)]
        return [total for _, total in self.met_by_label()]

    def met_by_label(self) -> list[tuple[str, Total]]:
        """What the records of each partition have met; "" stands for all partitions not named."""
        named = [(name, self._met_in(name)) for name in self.by_label if name]
        return [("", self.of("")), *named]

    def _met_in(self, label: str) -> Total:
        common, own = self.of(""), self.of(label)
        return Total(common.entries + own.entries, common.cost + own.cost)

    def after(self, label: str, cost: Cost) -> Total:
        """The total of `label` with one more entry."""
        old = self.of(label)
        return Total(old.entries + 1, old.cost + cost)

    def add(self, connection: sqlite3.Connection, label: str, cost: Cost) -> None:
        """Write `after(label, cost)`; call inside the transaction that appends the entry."""
        new = self.after(label, cost)
        connection.execute(
            "INSERT OR REPLACE INTO total VALUES (?, ?, ?)",
            (label, new.entries, new.cost.to_json()),
        )
