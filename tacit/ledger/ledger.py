"""The ledger: the only object with memory. Pay here, then release."""

import functools
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self
from uuid import uuid4

from tacit import accounting
from tacit._check import in_open_unit, positive, whole
from tacit.errors import BudgetExceeded, LedgerError
from tacit.events import Event, Gaussian, Relation, Repeated, Sequence, from_json
from tacit.ledger.budget import UNLIMITED, Budget, Remaining
from tacit.ledger.cost import Cost, price
from tacit.ledger.entry import Entry, entry_of
from tacit.ledger.filter import Filter, fit
from tacit.ledger.plan import Plan, steps_of
from tacit.ledger.store import Row, Settings, Store, now
from tacit.ledger.totals import Total, Totals
from tacit.ledger.verify import Verification, verify_store


class Ledger:
    """The privacy budget of one private data set, kept across runs, processes and crashes.

    `spend` pays for an event durably or raises `BudgetExceeded` and records nothing, atomically
    across threads and processes that open the same file. All entries together are
    (`budget.epsilon`, `budget.delta`)-DP, even if each was chosen in the light of everything
    released before: `tacit.ledger.filter` states the rule and proves it.

    Parameters
    ----------
    path
        The file; made if it is missing. None keeps the ledger in memory.
    budget
        What may be spent in all. None records without limit in a new ledger, and takes the file's
        budget in an existing one; any other budget than the file's is refused.
    relation
        Which data sets are neighbors; the file's, or `ADD_REMOVE` in a new ledger, if None.
    unit
        What a record stands for ("record", "patient"); the file's, or "record", if None.
    timeout
        Seconds to wait for another process that holds the file's lock.
    read_only
        Look, but never spend; the file must exist.

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
    returns it unchanged. The file belongs on a local disk: SQLite's log does not work on network
    drives. While it is in use, `FILE-wal` beside it is part of it; copy both or neither.

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
        if budget is not None and not isinstance(budget, Budget):
            raise TypeError(f"budget must be a Budget or None, got {type(budget).__name__}.")
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
        """Where the ledger is kept; None for memory."""
        return self._store.path

    def spend(self, event: Event, *, note: str = "", partition: str | None = None) -> Entry:
        """The durable entry of `event`; release only after this has returned.

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
    ) -> Plan:
        """Everything of `event` paid for at once; its steps then cost nothing extra.

        A plan is fixed before its first step. As first entry of the ledger it is priced whole by
        the tightest accountant (PLD); later on, by the filter, like any other entry.

        Parameters
        ----------
        steps
            How many steps to hand out; by default, the repetitions in `event`. `event` must be the
            price of all of them together.
        claim
            How many steps to write down at a time, see `Plan`.
        """
        claim = whole(claim=claim, least=1)
        count = steps_of(event) if steps is None else whole(steps=steps, least=1)
        if isinstance(event, Repeated | Sequence) and count > steps_of(event):
            raise ValueError(
                f"steps must be at most the {steps_of(event):,} releases in event, got {count:,}: "
                "steps beyond them would not be paid for."
            )
        entry = self._record("plan", event, note, partition, steps=count)
        return Plan(self, entry, claim=claim)

    def resume(self, plan_id: int, *, claim: int = 1) -> Plan:
        """The plan with number `plan_id`, to take the steps that nobody has taken."""
        with self._store.reading():
            rows = self._store.rows("id = ? AND kind = 'plan'", (whole(plan_id=plan_id),))
        if not rows:
            raise LedgerError(f"the ledger has no plan {plan_id}. See history().")
        return Plan(self, entry_of(rows[0]), claim=claim)

    def history(self) -> list[Entry]:
        """All payments, oldest first."""
        with self._store.reading():
            return [entry_of(row) for row in self._store.rows("kind <> 'steps'")]

    @property
    def event(self) -> Event:
        """Everything that was paid for, as one event; partitions are ignored (an over-charge)."""
        with self._store.reading():
            return self._joined(None)

    def remaining(self, *, partition: str | None = None) -> Remaining:
        """What one more entry may cost that concerns `partition`, or all records if None."""
        if self.budget is None:
            return UNLIMITED
        filter_ = self._known_filter() or fit(self.budget, Gaussian(1.0), self.relation)
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
        """What has been spent, as epsilon at `delta`, which may be 0: then, the pure epsilon.

        A single entry is priced as the fixed event it is (PLD). Several entries are priced by
        `Filter.epsilon`, which holds however they were chosen and whenever you ask; the value is
        never above the budget's epsilon at its delta, which holds for all that is ever admitted.

        With an `accountant` the entries are priced by it as one event. That is tighter, and **valid
        only if all events were fixed in advance**, not chosen in the light of earlier releases.
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
            else _whole(event, delta, self.relation)
            for event, total in met
        )
        if self.budget is not None and delta >= self.budget.delta:
            return min(spent, self.budget.epsilon)
        return spent

    def verify(self) -> Verification:
        """A statement that the file is whole: structure, chain, totals, prices and budget.

        Raises `LedgerError` with the first thing found wrong. Keep `Verification.head` elsewhere to
        find out later if the file was replaced by an older or a forged one.
        """
        return verify_store(self._store, self.budget, self.relation, fits_alone=self._fits_alone)

    def export(self) -> str:
        """The whole ledger as JSON, for archives and other programs."""
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
        """Let go of the file; what was paid stays paid."""
        self._store.close()

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
        if not isinstance(event, Event):
            raise TypeError(f"event must be an Event, got {type(event).__name__}.")
        if not isinstance(note, str):
            raise TypeError(f"note must be a string, got {type(note).__name__}.")
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
                fixed = None if known else filter_.to_json()
                row = self._store.append(
                    Row(
                        kind=kind,
                        partition=label,
                        note=note,
                        event=_json(event),
                        cost=cost.to_json(),
                        filter=fixed,
                        steps=steps,
                    )
                )
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
        """Whether the price of the whole event matters: the filter refuses it even alone."""
        if self.budget is None or self.budget.delta == 0 or filter_.admits(cost, self.budget):
            return False
        with self._store.reading() as connection:
            # Records that have met an entry stay so: a stale answer is only ever too careful.
            totals = Totals.read(connection, len(filter_.orders), label=label)
            return any(total.entries == 0 for total in totals.met(label))

    def _fits_alone(self, event: Event) -> bool:
        budget = self.budget
        assert budget is not None  # asked only where there is one
        return budget.delta > 0 and _whole(event, budget.delta, self.relation) <= budget.epsilon

    def _joined(self, label: str | None) -> Event:
        """All that records of partition `label` met, as one event; None for everything."""
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


@functools.lru_cache(maxsize=1024)
def _whole(event: Event, delta: float, relation: Relation) -> float:
    """Epsilon of an event fixed in advance, by the tightest accountant."""
    return accounting.epsilon(event, delta=delta, relation=relation)


@functools.lru_cache(maxsize=1024)
def _json(event: Event) -> str:
    return event.to_json()


def _label(partition: str | None) -> str:
    if partition is None:
        return ""
    if not isinstance(partition, str) or not partition:
        raise ValueError(f"partition must be a non-empty string or None, got {partition!r}.")
    return partition
