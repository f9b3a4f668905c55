"""What a run reserves and ticks off in its ledger, and what it pays again after a crash.

The whole plan is reserved before the first release, and steps are ticked off before they are
taken. After a crash, steps that were ticked off after the checkpoint are lost: taken again, they
are ticked off again, out of the reserve of the plan.
"""

import uuid
import warnings

from tacit import accounting
from tacit.errors import BudgetExceeded, LedgerError
from tacit.events import Event, from_dict
from tacit.events import Sequence as EventSequence
from tacit.ledger import Entry, Ledger
from tacit.ledger import Plan as ReservedPlan
from tacit.training.checkpoint_file import CheckpointWriter, State
from tacit.training.plan import TrainingPlan

_PLAN, _LOST = "DP-SGD run", "lost steps of run"  # notes in the ledger, before the run's name
_BLOCK = 64  # steps ticked off at a time: a durable write for each costs more than a small step


class Payments:
    """The payments of one run of `plan` in `ledger`.

    Attributes
    ----------
    begin
        First step of this process, or of its piece. The steps from here on are ticked off by it.
    writer
        Writes the checkpoint, if this process keeps one: it waits for the file before further steps
        are ticked off, so that no crash loses more than one block.
    repaid
        Lost steps that were paid again, beyond the reserve, by hash of the ledger's entry.
    """

    def __init__(self, ledger: Ledger, plan: TrainingPlan) -> None:
        self.ledger, self.plan = ledger, plan
        self.run = uuid.uuid4().hex
        self.begin = 0
        self.writer: CheckpointWriter | None = None
        self.repaid: dict[str, Event] = {}
        self._paid = 0  # the steps from `begin` to this one are ticked off
        self._reserved: list[ReservedPlan] = []  # of this run in its ledger
        self._current = 0  # which of them is in use
        self._counted: tuple[str, int] | None = None  # a ledger and its steps, from the checkpoint
        self._handed_over = 0  # steps left that another process has ticked off for this one
        self._ahead = 0  # of these, how many are used at a time

    @property
    def entries(self) -> list[Entry]:
        """The entries of the ledger for this run: its plan, and lost steps that were paid again."""
        notes = f"{_PLAN} {self.run}", f"{_LOST} {self.run}"
        return [entry for entry in self.ledger.history() if entry.note in notes]

    def event(self, training: Event | None = None) -> Event:
        """Return one event of `training`, by default the plan's, and of lost steps paid again."""
        training = self.plan.training_event if training is None else training
        repaid = tuple(self.repaid.values())
        return EventSequence((training, *repaid)) if repaid else training

    # Payment --------------------------------------------------------------------------------------

    def pay(self, step: int) -> None:
        """Pay for `step` out of the reserved plan; raise `BudgetExceeded` if that fails."""
        while self._paid <= step:
            self._tick_off()

    def hand_over(self) -> None:
        """Tick off all steps, for a process without this ledger that loads the checkpoint next."""
        self._reserve()
        for reserved in self._reserved:
            for _ in range(reserved.steps - reserved.taken):
                self._handed_over += bool(reserved.step())
        self._ahead = 0  # this process uses none of them

    def _tick_off(self) -> int:
        """Tick off one more step, durably, and return its number in the plan."""
        if self.writer is not None and (self._paid - self.begin) % self._block == 0:
            self.writer.wait()  # no crash loses more than one block
        if self._handed_over:
            self._handed_over -= 1
            self._paid += 1
            return self._handed_over
        self._reserve()
        try:
            number = self._reserved[self._current].step()
        except BudgetExceeded:
            if self._current + 1 == len(self._reserved):
                raise
            self._current += 1
            return self._tick_off()
        self._paid += 1
        return number

    @property
    def _block(self) -> int:
        """Steps that are ticked off at a time: no more than the reserve, and whole pieces."""
        plan = self.plan
        return plan.reserve or (plan.piece if plan.piece > 1 else min(_BLOCK, plan.steps))

    def _reserve(self) -> None:
        """Reserve the whole plan of the run in the ledger, before its first step."""
        if not self._reserved:
            self._open_plans()  # another process that has this checkpoint may have reserved it
        if not self._reserved:
            plan = self.plan
            steps = plan.steps + plan.reserve
            self.ledger.plan(plan.training_event, note=f"{_PLAN} {self.run}", steps=steps)
            self._open_plans()

    def _open_plans(self) -> None:
        """Find the plans of this run in the ledger, in the order in which they were paid."""
        found = self.entries
        self._reserved = [self.ledger.resume(entry.id, claim=self._block) for entry in found]
        self.repaid |= {e.hash: e.event for e in found if e.note.startswith(_LOST)}

    def _ticked_off(self) -> int:
        return sum(plan.taken for plan in self._reserved)

    # Restarts -------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return what was paid, for a checkpoint; give back what is ticked off and not used."""
        if self.plan.piece == 1 and self.writer is None:
            for reserved in self._reserved:
                reserved.close()
        counted = self._counted or (self.ledger.id, 0)
        return {
            "run": self.run,
            "counted": (self.ledger.id, self._ticked_off()) if self._reserved else counted,
            "handed_over": self._handed_over,
            # What may be used before the next file is written: what is left of a block, and one.
            "ahead": self._ahead and self._ahead + (self.begin - self._paid) % self._ahead,
            "repaid": {name: event.to_dict() for name, event in self.repaid.items()},
            "event": self.plan.training_event.to_dict(),
            "unit": self.ledger.unit,
        }

    def begin_at(self, step: int, run: str) -> None:
        """Continue the payments of `run` from the piece of `step` on."""
        self.run = run
        self.begin = self._paid = self.plan.begin_of(step)

    def resume(
        self, state: State, lost_steps: str, *, taken: int, end: int, is_seeded: bool
    ) -> tuple[int, dict[str, Event], str]:
        """Find out which steps are lost, say so, and pay for them as far as `lost_steps` says.

        Return the last step, the lost steps that were paid again, and what no other process has.
        """
        self.repaid = {name: from_dict(event) for name, event in state["repaid"].items()}
        self._current = 0
        self._open_plans()
        ledger, before = self._counted = state["counted"]
        if self.begin >= end:  # the run is over
            return end, self.repaid, ""
        if state["handed_over"] and self.writer is None:
            raise ValueError(
                "the steps of this run are counted in the file of its checkpoint: give "
                "checkpoint=FILE to make_private."
            )
        # Who uses steps that were handed over writes the file first, which says how many at most.
        lost = min(state["ahead"], state["handed_over"])
        self._handed_over, self._ahead = state["handed_over"] - lost, self._block
        left = self._handed_over + sum(one.steps - one.taken for one in self._reserved)
        if self._reserved:
            lost += self._ticked_off() - before
        elif not state["handed_over"]:  # then nothing was paid, so nothing was released
            left = end
            lost -= before or ledger != self.ledger.id
        if lost < 0:
            raise LedgerError(
                "the ledger does not know the steps that this run has paid for: it is another one, "
                "or an older copy. Use the ledger that the run has written."
            )
        if lost > 0 and is_seeded and lost_steps == "reserve":
            raise ValueError(
                f"{_told(taken, lost)}. That is not what its seed gives. Give lost_steps='pay' to "
                "take them."
            )
        end = self._end_after(lost, left, lost_steps, taken=taken, end=end)
        return end, self.repaid, self._attempt(end) if is_seeded else ""

    def _end_after(self, lost: int, left: int, lost_steps: str, *, taken: int, end: int) -> int:
        """Return the last step of a run that has `left` paid steps and has lost `lost` others."""
        told, missing = _told(taken, lost), end - self.begin - left
        if missing <= 0:
            if lost > 0:
                warnings.warn(
                    f"{told}, taken again out of the reserve; {self._price()} as planned.",
                    stacklevel=7,
                )
            return end
        event, less = self.plan.lost_event(missing), max(taken, self.begin + left)
        told += (
            f". {missing:,} of the steps that remain are not paid: with them, {self._price(event)}"
            f" instead of {self._price()}"
        )
        fewer = f"lost_steps='skip' ends the run after {less:,} of {self.plan.steps:,} steps"
        if lost_steps == "skip":
            warnings.warn(f"{told}. The run ends after {less:,} steps instead.", stacklevel=7)
            return less
        if lost_steps == "reserve":
            raise BudgetExceeded(f"{told}. lost_steps='pay' pays for them; {fewer}.")
        try:
            self.ledger.plan(event, note=f"{_LOST} {self.run}", steps=missing)
        except BudgetExceeded as refusal:
            raise BudgetExceeded(f"{told}. The budget has no room for them; {fewer}.") from refusal
        self._open_plans()
        warnings.warn(f"{told}. They are paid.", stacklevel=7)
        return end

    def _price(self, more: Event | None = None) -> str:
        """Return the epsilon of the run in words, with one more payment if it is given."""
        extra = () if more is None else (more,)
        delta = self.plan.delta or 0.1 / self.plan.n_records
        event = EventSequence((self.plan.together(self.event()), *extra))
        epsilon = accounting.epsilon(event, delta=delta, relation=self.ledger.relation)
        return f"epsilon {epsilon:.4g} at delta {delta:.3g}"

    def _attempt(self, end: int) -> str:
        """Return what no other process of a seeded run has: the first step that it ticks off."""
        if self.begin >= end:
            return ""
        if self._handed_over:  # this number is in the file before one of them is used
            return f"handed over, {len(self.repaid)} paid again, {self._handed_over} left"
        number = self._tick_off()
        return f"plan {self._reserved[self._current].id}, step {number}"


def _told(taken: int, lost: int) -> str:
    told = f"the run goes on after step {taken:,} with fresh lots and noise"
    return f"{told}; steps lost after it: up to {lost:,}" if lost > 0 else told
