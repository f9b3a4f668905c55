"""The ledger: the only object with memory. Pay here first, then release.

A `Plan` is paid whole before its first step, and hands out no more steps than were paid for.
"""

import functools
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import NoReturn, Self
from uuid import uuid4

from tacit import accounting
from tacit import events as ev
from tacit._check import in_open_unit, positive, whole
from tacit.errors import BudgetExceeded, LedgerError
from tacit.events import Event, Relation, Repeated, Sequence, from_json
from tacit.ledger.entry_cost import Cost, price
from tacit.ledger.filter import UNLIMITED, Budget, Filter, Remaining, fit
from tacit.ledger.store import Entry, LedgerRow, Settings, Store, Total, Totals, entry_of, now
from tacit.ledger.verify import Verification, verify_store


class Ledger:
    """The privacy budget of one private data set, kept across runs, processes and crashes.

    `spend` pays for an event durably or raises `BudgetExceeded` and records nothing, atomically
    across threads and processes that open the same file. All entries together are
    (`budget.epsilon`, `budget.delta`)-DP, even if each was chosen after seeing everything that was
    released before: `tacit.ledger.filter` states the rule and proves it.

    Parameters
    ----------
    path
        The file; created if it is missing. None keeps the ledger in memory.
    budget, relation, unit
        What may be spent in total, which data sets are neighbors, and what a record stands for,
        such as "patient". All three are fixed when the file is created: None takes that of the
        file, and another value is refused. In a new ledger, None means no limit, `ADD_REMOVE` and
        "record".
    timeout
        Seconds to wait for another process that holds the lock of the file.
    read_only
        Never write to the file, which must exist.

    Notes
    -----
    *Partitions.* An entry with `partition="p"` says that its event reads only the records of p. The
    partitions must be disjoint and given in advance, and whether a record belongs to one must not
    depend on other records. The cost is then the largest over partitions of unlabeled plus labeled
    entries (parallel composition). Under `REPLACE_ONE` a replaced record must stay in its
    partition: the label must not depend on values that may change. If it can move, two partitions
    change at once and this cost is too small.

    *Notes and labels are public.* They are stored and shown; put no private value into them.

    *One object.* A ledger cannot be copied or pickled (each copy would spend the whole budget), nor
    used after a fork; open the file again instead. Threads may share it. `sklearn.base.clone`
    returns it unchanged. Keep the file on a local disk: SQLite's log does not work on network
    drives. While the ledger is in use, `FILE-wal` beside it is part of it; copy both or neither.

    Examples
    --------
    >>> from tacit.events import Laplace
    >>> ledger = Ledger(budget=Budget(epsilon=1.0))
    >>> print(ledger.spend(Laplace(2.0), note="mean age"))
    spend 1: Laplace noise, multiplier 2 (mean age)
    >>> ledger.remaining().epsilon
    0.5
    >>> ledger.spend(Laplace(1.0))
    Traceback (most recent call last):
    tacit.errors.BudgetExceeded: Laplace noise, multiplier 1 would pass the budget (epsilon 1, ...
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        budget: Budget | None = None,
        relation: Relation | None = None,
        unit: str | None = None,
        *,
        timeout: float = 60.0,
        read_only: bool = False,
    ) -> None:
        _require_type("a Budget or None", Budget | None, budget=budget)
        wanted = Settings(
            id=uuid4().hex,
            created=now(),
            epsilon=None if budget is None else budget.epsilon,
            delta=None if budget is None else budget.delta,
            relation=str(Relation(relation or Relation.ADD_REMOVE)),
            unit=unit or "record",
        )
        self._store = Store(
            None if path is None else Path(path).resolve(),
            wanted=wanted,
            timeout=positive(timeout=timeout),
            read_only=read_only,
        )
        found = self._store.settings
        self.budget = None if found.epsilon is None else Budget(found.epsilon, found.delta or 0.0)
        self.relation = Relation(found.relation)
        self.unit = found.unit
        try:
            self._require_same("budget", budget, self.budget)
            self._require_same("relation", relation and Relation(relation), self.relation)
            self._require_same("unit", unit, self.unit)
        except LedgerError:
            self._store.close()
            raise
        self._filter: Filter | None = None

    @property
    def path(self) -> Path | None:
        """File of the ledger; None if it is kept in memory."""
        return self._store.path

    def spend(self, event: Event, *, note: str = "", partition: str | None = None) -> Entry:
        """Pay for `event` and return its durable entry; release only after this has returned.

        Raises `BudgetExceeded`, with nothing recorded, if the budget would be passed, and
        `LedgerError` if the entry could not be made durable.
        """
        return self._record("spend", event, note, partition, steps=1)

    def plan(
        self,
        event: Event,
        *,
        note: str = "",
        partition: str | None = None,
        steps: int | None = None,
        claim: int = 1,
    ) -> "Plan":
        """Pay for all of `event` at once; the steps of the returned plan then cost nothing extra.

        A plan is fixed before its first step. As the first entry of the ledger it is priced whole
        by the tightest accountant (PLD); as a later one by the filter, like any other entry.
        `steps` is how many steps to hand out, by default the repetitions in `event`, which must pay
        for all of them together. `claim` is how many are written to the file at a time, see `Plan`.
        """
        claim = whole(claim=claim, least=1)
        count = _steps_of(event) if steps is None else whole(steps=steps, least=1)
        if isinstance(event, Repeated | Sequence) and count > _steps_of(event):
            raise ValueError(
                f"steps must be at most the {_steps_of(event):,} releases in event, got {count:,}: "
                "steps beyond them would not be paid for."
            )
        entry = self._record("plan", event, note, partition, steps=count)
        return Plan(self._store, entry, claim=claim)

    def resume(self, plan_id: int, *, claim: int = 1) -> "Plan":
        """Return the plan with number `plan_id`, to take the steps that have not been taken."""
        with self._store.reading():
            rows = self._store.rows("id = ? AND kind = 'plan'", (whole(plan_id=plan_id),))
        if not rows:
            raise LedgerError(f"the ledger has no plan {plan_id}. See history().")
        return Plan(self._store, entry_of(rows[0]), claim=claim)

    def history(self) -> list[Entry]:
        """Return all payments, oldest first."""
        with self._store.reading():
            return [entry_of(row) for row in self._store.rows("kind <> 'steps'")]

    @property
    def event(self) -> Event:
        """Everything that was paid for, as one event; partitions are ignored (an over-charge)."""
        with self._store.reading():
            return self._joined(None)

    def remaining(self, *, partition: str | None = None) -> Remaining:
        """Return what one more entry may cost that concerns `partition`, or all records if None."""
        if self.budget is None:
            return UNLIMITED
        filter_ = self._known_filter() or fit(self.budget, ev.Gaussian(1.0), self.relation)
        label = _label(partition)
        with self._store.reading() as connection:
            met = Totals.read(connection, len(filter_.orders), label=label).met(label)
        left = [filter_.remaining(total.cost, self.budget) for total in met]
        return Remaining(
            epsilon=min(one.epsilon for one in left),
            delta=min(one.delta for one in left),
            noise_multiplier=max(one.noise_multiplier for one in left),
            fraction=min(one.fraction for one in left),
        )

    def epsilon(self, *, delta: float, accountant: accounting.Accountant | None = None) -> float:
        """Return what has been spent, as epsilon at `delta`; at `delta` 0, the pure epsilon.

        A single entry is priced as one event fixed in advance (PLD). Several entries are priced by
        `Filter.epsilon`, which holds however the entries and the moment of this call were chosen.
        At the delta of the budget the value is never above its epsilon, which bounds everything
        that is ever admitted.

        With an `accountant`, all entries are priced by it as one event. That is tighter, and
        **valid only if all events were fixed in advance**, not chosen after earlier releases.
        """
        delta = 0.0 if delta == 0 else in_open_unit(delta=delta)
        filter_ = self._known_filter()
        if filter_ is None:
            return 0.0
        with self._store.reading() as connection:
            totals = Totals.read(connection, len(filter_.orders))
            met = [(self._joined(label), total) for label, total in totals.met_by_label()]
        if accountant is not None:
            price_of = accountant.epsilon
            return max(price_of(event, delta=delta, relation=self.relation) for event, _ in met)
        spent = max(
            filter_.epsilon(total.cost, delta=delta)
            if total.entries > 1 or delta == 0
            else _whole(event, delta=delta, relation=self.relation)
            for event, total in met
        )
        if self.budget is not None and delta >= self.budget.delta:
            return min(spent, self.budget.epsilon)
        return spent

    def verify(self) -> Verification:
        """Check that the file is complete: structure, chain, totals, prices and budget.

        Raises `LedgerError` with the first fault. Keep a copy of `Verification.head` elsewhere to
        find out later whether the file was replaced by an older or a forged one.
        """
        return verify_store(self._store, self.budget, self.relation, fits_alone=self._fits_alone)

    def export(self) -> str:
        """Return the whole ledger as JSON, for archives and other programs."""
        with self._store.reading():
            entries, head = self._store.head()
            history = self.history()
            filter_ = self._known_filter()
            progress = self._store.connection.execute("SELECT plan, taken FROM progress").fetchall()
        return json.dumps(
            {
                "ledger": self._store.settings._asdict(),
                "filter": None if filter_ is None else json.loads(filter_.to_json()),
                "entries": [entry.to_dict() for entry in history],
                "steps_taken": {str(plan): taken for plan, taken in progress},
                "rows": entries,
                "head": head,
            },
            indent=2,
            allow_nan=False,
        )

    def close(self) -> None:
        """Close the file; what was paid stays paid."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else f"at {self.path}"
        return f"<Ledger {where}, budget: {self.budget or 'none'}, per {self.unit}>"

    def __sklearn_clone__(self) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:  # copy, deepcopy and pickle come here
        raise TypeError(
            "a Ledger cannot be copied or pickled: each copy would spend the whole budget. "
            "Pass the ledger itself; in another process open Ledger(path) again."
        )

    def _record(
        self, kind: str, event: Event, note: str, partition: str | None, *, steps: int
    ) -> Entry:
        _require_type("an Event", Event, event=event)
        _require_type("a string", str, note=note)
        label = _label(partition)
        while True:
            known = self._known_filter()
            filter_ = known or fit(self.budget, event, self.relation)
            cost = price(event, orders=filter_.orders, relation=self.relation)
            fits_alone = self._may_be_first(label, cost, filter_) and self._fits_alone(event)
            with self._store.transaction() as connection:
                if known is None and self._stored_filter() is not None:
                    continue  # another process made the first entry, and so fixed the filter
                totals = Totals.read(connection, len(filter_.orders), label=label)
                self._require_room(event, cost, totals.met(label), filter_, fits_alone)
                row = LedgerRow(
                    kind=kind,
                    partition=label,
                    note=note,
                    event=_json(event),
                    cost=cost.to_json(),
                    filter=None if known else filter_.to_json(),
                    steps=steps,
                )
                row = self._store.append(row)
                totals.add(connection, label, cost)
                if kind == "plan":
                    connection.execute("INSERT INTO progress VALUES (?, ?, 0)", (row.id, steps))
            return Entry(row.id, row.time, kind, event, note, partition, steps, cost, row.hash)

    def _require_room(
        self, event: Event, cost: Cost, met: Iterable[Total], filter_: Filter, fits_alone: bool
    ) -> None:
        if self.budget is None:
            return
        for entries, total in met:
            if filter_.admits(total + cost, self.budget) or (entries == 0 and fits_alone):
                continue
            left = filter_.remaining(total, self.budget)
            advice = "Add noise, or ask less."
            if filter_.set_aside == 1 and cost.pure == math.inf:
                advice = "This ledger adds epsilons and deltas: spend ApproximateDP(...) instead."
            raise BudgetExceeded(
                f"{event} would pass the budget ({self.budget}), so nothing was recorded. "
                f"Left: {left}. {advice}"
            )

    def _may_be_first(self, label: str, cost: Cost, filter_: Filter) -> bool:
        """Return whether an event that the filter refuses may still be admitted as first entry."""
        if self.budget is None or self.budget.delta == 0 or filter_.admits(cost, self.budget):
            return False
        with self._store.reading() as connection:
            # If another process adds an entry now, the answer True is outdated. That is harmless:
            # `_require_room` counts the entries again inside the transaction.
            totals = Totals.read(connection, len(filter_.orders), label=label)
            return any(total.entries == 0 for total in totals.met(label))

    def _fits_alone(self, event: Event) -> bool:
        assert self.budget is not None  # asked only where there is one
        epsilon, delta = self.budget.epsilon, self.budget.delta
        return delta > 0 and _whole(event, delta=delta, relation=self.relation) <= epsilon

    def _joined(self, label: str | None) -> Event:
        """Return all entries that concern partition `label` as one event; None for all entries."""
        only, labels = ("", ()) if label is None else ("AND partition IN ('', ?)", (label,))
        found = self._store.connection.execute(
            f"SELECT event, count(*) FROM entry WHERE kind <> 'steps' {only} "
            "GROUP BY event ORDER BY min(id)",
            labels,
        )
        parts = [Repeated(from_json(text), n) if n > 1 else from_json(text) for text, n in found]
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _known_filter(self) -> Filter | None:
        if self._filter is None:
            with self._store.reading():
                self._filter = self._stored_filter()
        return self._filter

    def _stored_filter(self) -> Filter | None:
        found = self._store.connection.execute("SELECT filter FROM entry WHERE id = 1").fetchone()
        return None if found is None else Filter.from_json(found[0])

    def _require_same(self, name: str, asked: object, found: object) -> None:
        if asked is not None and asked != found:
            raise LedgerError(
                f"{self.path} has {name} {found or 'none'}, but was opened with {name} {asked}. "
                f"A ledger never changes its {name}: leave it out to use the file's."
            )


class Plan:
    """The steps of an event that was paid for whole; made by `Ledger.plan` or `Ledger.resume`.

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
        """Number of steps used up by any process; unused steps of this object's block excluded."""
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
        """Give unused steps of the block back, so that `resume` can hand them out."""
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
        query = "SELECT taken FROM progress WHERE plan = ?"
        return self._store.connection.execute(query, (self.id,)).fetchone()[0]

    def _write(self, steps: int) -> None:
        self._store.append(LedgerRow(kind="steps", plan=self.id, steps=steps))
        update = "UPDATE progress SET taken = taken + ? WHERE plan = ?"
        self._store.connection.execute(update, (steps, self.id))


def _steps_of(event: Event) -> int:
    """Return how many releases a plan of `event` makes, one after the other."""
    if isinstance(event, Repeated):
        return event.count * _steps_of(event.event)
    if isinstance(event, Sequence):
        return sum(_steps_of(part) for part in event.parts)
    if isinstance(event, ev.RandomAllocation):
        return event.steps
    return 1


_whole = functools.lru_cache(maxsize=1024)(accounting.epsilon)  # of an event fixed in advance
_json = functools.lru_cache(maxsize=1024)(Event.to_json)


def _require_type(rule: str, kind: type | UnionType, **named: object) -> None:
    """Raise `TypeError` if the named value is not of the kind that `rule` states."""
    ((name, value),) = named.items()
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {rule}, got {type(value).__name__}.")


def _label(partition: object) -> str:
    """Return the label under which entries of `partition` are stored; "" concerns all records."""
    if partition is None:
        return ""
    if not isinstance(partition, str) or not partition:
        raise ValueError(f"partition must be a non-empty string or None, got {partition!r}.")
    return partition
