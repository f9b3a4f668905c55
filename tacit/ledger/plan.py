"""A plan: everything paid before its first step, and no more steps than were paid for."""

import os
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tacit._check import whole
from tacit.errors import BudgetExceeded, LedgerError
from tacit.events import Event, RandomAllocation, Repeated, Sequence
from tacit.ledger.entry import Entry
from tacit.ledger.store import Row

if TYPE_CHECKING:
    from tacit.ledger.ledger import Ledger


class Plan:
    """Hands out the steps of a reservation; make one with `Ledger.plan` or `Ledger.resume`.

    Call `step()` before each release. Steps are written down in blocks of `claim`: with 1 every
    step is durable before it runs; with more, most steps cost no writing, and a crash loses the
    rest of the block. Lost steps are never handed out again, so a crash can over-charge but not
    under-charge. Leaving the `with` block, or `close()`, gives unused steps of a block back.

    >>> from tacit import Budget, Ledger
    >>> from tacit.events import Gaussian
    >>> ledger = Ledger(budget=Budget(epsilon=2.0, delta=1e-5))
    >>> with ledger.plan(Repeated(Gaussian(8.0), 3), claim=2) as plan:
    ...     plan.step(), plan.step()
    (1, 2)
    >>> plan = ledger.resume(plan.id)
    >>> plan.step()
    3
    >>> plan.step()
    Traceback (most recent call last):
    tacit.errors.BudgetExceeded: plan 1 has no step left: all 3 were taken. ...
    """

    def __init__(self, ledger: "Ledger", entry: Entry, *, claim: int = 1) -> None:
        self._ledger = ledger
        self._claim = whole(claim=claim, least=1)
        self._pid = os.getpid()
        self._next, self._claimed = 1, 0  # steps _next.._claimed are ours to hand out
        self.entry = entry

    @property
    def id(self) -> int:
        """What `Ledger.resume` asks for."""
        return self.entry.id

    @property
    def event(self) -> Event:
        """Everything that was reserved."""
        return self.entry.event

    @property
    def steps(self) -> int:
        """How many steps were reserved."""
        return self.entry.steps

    @property
    def taken(self) -> int:
        """How many steps are used up, by anybody; steps of an open block are not."""
        with self._ledger._store.reading():
            return self._taken() - (self._claimed - self._next + 1)

    def step(self) -> int:
        """The number of the next step, from 1, durably taken; `BudgetExceeded` after the last."""
        if os.getpid() != self._pid:
            raise LedgerError(
                "this plan was made in another process and cannot follow a fork. "
                f"Open the ledger here and call resume({self.id})."
            )
        with self._ledger._store.lock:
            if self._next > self._claimed:
                self._take()
            self._next += 1
            return self._next - 1

    def close(self) -> None:
        """Give unused steps of the block back, so that `resume` can hand them out."""
        store = self._ledger._store
        with store.lock:
            unused = self._claimed - self._next + 1
            if unused <= 0 or os.getpid() != self._pid:
                return
            with store.transaction():
                # Only the end of what was taken can go back: later blocks keep their numbers.
                if self._taken() == self._claimed:
                    self._write(-unused)
            self._next, self._claimed = 1, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Plan {self.id}: {self.event}, {self.steps:,} steps>"

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a Plan cannot be copied or pickled: each copy would hand out its steps.")

    def _take(self) -> None:
        with self._ledger._store.transaction():
            taken = self._taken()
            block = min(self._claim, self.steps - taken)
            if block <= 0:
                raise BudgetExceeded(
                    f"plan {self.id} has no step left: all {self.steps:,} were taken. "
                    "Reserve another plan for more."
                )
            self._write(block)
        self._next, self._claimed = taken + 1, taken + block

    def _taken(self) -> int:
        return self._ledger._store.connection.execute(
            "SELECT taken FROM progress WHERE plan = ?", (self.id,)
        ).fetchone()[0]

    def _write(self, steps: int) -> None:
        store = self._ledger._store
        store.append(Row(kind="steps", plan=self.id, steps=steps))
        store.connection.execute(
            "UPDATE progress SET taken = taken + ? WHERE plan = ?", (steps, self.id)
        )


def steps_of(event: Event) -> int:
    """How many releases a plan of `event` makes, one after the other."""
    if isinstance(event, Repeated):
        return event.count * steps_of(event.event)
    if isinstance(event, Sequence):
        return sum(steps_of(part) for part in event.parts)
    if isinstance(event, RandomAllocation):
        return event.steps
    return 1
