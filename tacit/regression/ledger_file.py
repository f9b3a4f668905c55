"""The ledger of a pickled estimator: its file, opened again for each payment.

A `Ledger` cannot be pickled, because a copy in memory would spend the budget again. A pickled
estimator keeps the path instead, so that worker processes pay into the same file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tacit.errors import LedgerError
from tacit.events import Event, Relation
from tacit.ledger import Entry, Ledger


@dataclass(frozen=True)
class LedgerFile:
    """Path and relation of a ledger; it pays like the ledger itself. No path: it cannot pay."""

    path: Path | None
    relation: Relation
    has_one_record_each: bool = False

    @classmethod
    def of(cls, ledger: "Ledger | LedgerFile") -> "LedgerFile":
        """Return the file of a ledger."""
        return cls(ledger.path, ledger.relation, ledger.has_one_record_each)

    def require_unit(self, *, is_user: bool) -> None:
        """Raise `ValueError` unless the ledger counts the unit that a release protects."""
        with self._opened() as ledger:
            ledger.require_unit(is_user=is_user)

    def spend(self, event: Event, *, note: str = "", partition: str | None = None) -> Entry:
        """Pay for `event` from the file; raise `LedgerError` if the file is not there."""
        with self._opened() as ledger:
            return ledger.spend(event, note=note, partition=partition)

    def _opened(self) -> Ledger:
        if self.path is None:
            raise LedgerError(
                "this estimator was pickled or sent to another process, and its ledger has no "
                "file to pay from. Use Ledger(FILE), or n_jobs=1."
            )
        if not self.path.exists():
            raise LedgerError(f"there is no ledger at {self.path}, which pays for this estimator.")
        ledger = Ledger(self.path, relation=self.relation)
        if self.has_one_record_each:
            ledger.declare_one_record_each()
        return ledger

    def __sklearn_clone__(self) -> Self:
        return self
