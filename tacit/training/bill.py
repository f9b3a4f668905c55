"""The run's plan in the ledger: reserved whole before the first release, then ticked off."""

from tacit.events import Event
from tacit.ledger import Ledger
from tacit.ledger import Plan as LedgerPlan

_BLOCK = 64  # steps written down at a time: one durable write each would cost more than small steps


class Bill:
    """Pays for one run. The whole plan is reserved once; steps that were paid are never paid twice.

    A resumed run finds its plan by `run` and repeats the steps that were ticked off after its
    checkpoint without new payment, since they are the same releases.
    """

    def __init__(self, ledger: Ledger, event: Event, *, steps: int, run: str) -> None:
        self.ledger, self.run = ledger, run
        self._event, self._steps = event, steps
        self._plan: LedgerPlan | None = None
        self._ticked = 0

    @property
    def note(self) -> str:
        """What the ledger says about the run."""
        return f"DP-SGD run {self.run}"

    def pay(self, step: int) -> None:
        """Make sure that `step`, from 0, is paid; raises `BudgetExceeded` otherwise."""
        if self._plan is None:
            self._plan = self._find() or self.ledger.plan(
                self._event, note=self.note, steps=self._steps, claim=min(_BLOCK, self._steps)
            )
            self._ticked = self._plan.taken
        while self._ticked <= step:
            self._ticked = self._plan.step()

    def _find(self) -> LedgerPlan | None:
        for entry in self.ledger.history():
            if (entry.kind, entry.note, entry.event) == ("plan", self.note, self._event):
                return self.ledger.resume(entry.id, claim=min(_BLOCK, self._steps))
        return None
