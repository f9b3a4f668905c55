"""Plans: events that were paid in full before their first step."""

import os
from typing import NoReturn, Self

from tacit import events as ev
from tacit._check import whole
from tacit.errors import BudgetExceeded, LedgerError
from tacit.events import Event, Repeated, Sequence
from tacit.ledger.chain import Entry, LedgerRow
from tacit.ledger.store import Store


class Plan:
    """The steps of an event that was paid in full; made by `Ledger.plan` or `Ledger.resume`.

    Call `step()` before each release. Steps are written to the file in blocks of `claim`. With 1,
    every step is durable before it runs; with more, most steps write nothing, and a crash loses the
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

    def __init__(self, store: Store, entry: Entry, *, claim: int = 1) -> None:
        self._store = store
        self._claim = whole(claim=claim, least=1)
        self._pid = os.getpid()
        self._next = 1  # steps _next, ..., _claimed may be handed out without writing
        self._claimed = 0
        self.entry = entry

    @property
    def id(self) -> int:
        """Number of the plan, for `Ledger.resume`."""
        return self.entry.id

    @property
    def event(self) -> Event:
        """The whole event that was paid for."""
        return self.entry.event

    @property
    def steps(self) -> int:
        """Number of steps that were paid for."""
        return self.entry.steps

    @property
    def taken(self) -> int:
        """Number of steps taken by all processes, without unused steps in this object's block."""
        with self._store.reading():
            return self._taken() - (self._claimed - self._next + 1)

    def step(self) -> int:
        """Take the next step durably and return its number, from 1; raise after the last one."""
        if os.getpid() != self._pid:
            raise LedgerError(
                "this plan was made in another process and cannot be used after a fork. "
                f"Open the ledger here and call resume({self.id})."
            )
        with self._store.lock:
            if self._next > self._claimed:
                self._take()
            self._next += 1
            return self._next - 1

    def close(self) -> None:
        """Return the unused steps of the current block, so that `Ledger.resume` can take them."""
        with self._store.lock:
            unused = self._claimed - self._next + 1
            if unused <= 0 or os.getpid() != self._pid:
                return
            with self._store.transaction():
                # Steps can go back only if no later block was taken: its numbers must not change.
                if self._taken() == self._claimed:
                    self._write(-unused)
            self._next = 1
            self._claimed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Plan {self.id}: {self.event}, {self.steps:,} steps>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a Plan cannot be copied or pickled: each copy would hand out its steps.")

    def _take(self) -> None:
        with self._store.transaction():
            taken = self._taken()
            block = min(self._claim, self.steps - taken)
            if block <= 0:
                raise BudgetExceeded(
                    f"plan {self.id} has no step left: all {self.steps:,} were taken. "
                    "Reserve another plan for more."
                )
            self._write(block)
        self._next = taken + 1
        self._claimed = taken + block

    def _taken(self) -> int:
        return self._store.check().taken[self.id][1]

    def _write(self, steps: int) -> None:
        taken = self._taken() + steps
        # With the time of the plan: how long steps take may depend on private data.
        row = LedgerRow(time=self.entry.time, kind="steps", plan=self.id, steps=steps)
        self._store.append(row)
        update = "UPDATE progress SET taken = ? WHERE plan = ?"
        self._store.connection.execute(update, (taken, self.id))


def restart_reserve(steps: int, piece: int = 1, *, every: int | None = None) -> int:
    """Return how many steps a plan of `steps` steps reserves for those that a crash may lose.

    That is one interval between checkpoints: `every` steps, default 1 % of all, rounded up to whole
    pieces of the run that have a price of their own. Nothing is reserved where a piece is so large
    that this would be more than 2 % of the run. docs/guarantees.md says what follows from it.

    >>> restart_reserve(1000), restart_reserve(30), restart_reserve(1000, piece=16)
    (10, 1, 16)
    >>> restart_reserve(1000, piece=250)
    0
    """
    wanted = -(-steps // 100) if every is None else whole(every=every, least=1)
    reserve = piece * -(-wanted // piece)
    return reserve if piece == 1 or 50 * reserve <= steps else 0


def steps_of(event: Event) -> int:
    """Return how many successive releases `event` consists of: the steps of its plan."""
    if isinstance(event, Repeated):
        return event.count * steps_of(event.event)
    if isinstance(event, Sequence):
        return sum(steps_of(part) for part in event.parts)
    if isinstance(event, ev.RandomAllocation | ev.BandedGaussian):
        return event.steps
    return 1
