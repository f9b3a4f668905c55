"""The ledger: the only object with memory. Pay here first, then release.

A `Plan` is paid whole before its first step, and hands out no more steps than were paid for.
"""

import functools
import json
import math
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import NamedTuple, NoReturn, Self, cast
from uuid import uuid4

from tacit import accounting
from tacit import events as ev
from tacit._check import in_open_unit, positive, whole
from tacit.errors import BudgetExceeded, LedgerError
from tacit.events import Event, Relation, Repeated, Sequence, from_json
from tacit.ledger.chain import (
    SEPARATOR,
    Entry,
    LedgerRow,
    Settings,
    Total,
    Totals,
    entry_of,
    genesis,
    key_check,
    now,
)
from tacit.ledger.entry_cost import Cost, price
from tacit.ledger.filter import UNLIMITED, Budget, Filter, Remaining, fit
from tacit.ledger.postgres_store import PostgresStore, has_server_key, server_address
from tacit.ledger.reserved_plan import Plan, steps_of
from tacit.ledger.store import PAYMENTS, Store, has_key
from tacit.ledger.verify import Verification, verify_store
from tacit.ledger.witness import FileWitness

_KEY_VARIABLE = "TACIT_LEDGER_KEY"
_SHORTEST_KEY = 16  # bytes


class Epsilons(NamedTuple):
    """Three epsilons at one delta, which answer three questions about the same entries."""

    budget: float | None
    """What all entries, also future ones, cost together at most: the budget guards admission. None
    if there is no budget, or if it is stated at a smaller delta."""
    fixed_in_advance: float
    """The price by the tightest accountant, **valid only if all entries were fixed in advance**."""
    odometer: float
    """What the entries so far cost, however they and this moment were chosen. Always valid."""


class Ledger:
    """The privacy budget of one private data set, kept across runs, processes and crashes.

    `spend` pays for an event durably or raises `BudgetExceeded` and records nothing, atomically
    across threads and processes that open the same file. All entries together are
    (`budget.epsilon`, `budget.delta`)-DP, even if each was chosen after seeing everything that was
    released before: `tacit.ledger.filter` states the rule and proves it.

    Parameters
    ----------
    path
        The file; created if it is missing. None keeps the ledger in memory. An address
        `postgresql://USER@HOST/DATABASE#NAME`, or a pointer file with one, keeps it on a server;
        see `tacit.ledger.postgres_store`.
    budget, relation, unit
        What may be spent in total, which data sets are neighbors, and what a record stands for,
        such as "patient". All three are fixed when the file is created. For an existing file, None
        takes the stored value, and a different value is refused. In a new ledger, None means no
        limit, `ADD_REMOVE` and "record".
    timeout
        Seconds to wait for another process that holds the lock of the file.
    read_only
        Never write to the file, which must exist.
    key
        Secret of at least 16 bytes, or the file that holds it, which must not be in the folder of
        the ledger. It keys the hash chain of a new ledger, and is needed to open such a ledger
        again. Default: the file that the environment variable TACIT_LEDGER_KEY names, for new
        ledgers and for those that have a key.
    witness
        A file elsewhere, which remembers the last row. See `tacit.ledger.witness`. A new ledger
        stores the file's path.

    Notes
    -----
    *Partitions.* An entry with `partition="p"` says that its event reads only the records of p. The
    partitions must be disjoint and given in advance, and whether a record belongs to one must not
    depend on other records. The cost of a partition is that of the unlabeled entries plus those
    with its label, and the cost of the ledger is the largest over partitions (parallel
    composition). Under `REPLACE_ONE` a replaced record must stay in its
    partition: the label must not depend on values that may change. If it can move, two partitions
    change at once and this cost is too small. A tuple of names says that the event reads the
    records of these partitions and of no other. So a data set that grows can have one budget for
    each cohort of records: name the cohorts that exist, and a new one starts with a full budget.

    *Detection.* Before each payment the rows, totals and settings of the file are checked. Without
    a key, whoever can write the file can forge it whole. Without a witness, nobody can find out
    that an older copy was put back, that two copies are spent from, or that the file was deleted.

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
        key: bytes | str | os.PathLike[str] | None = None,
        witness: str | os.PathLike[str] | None = None,
    ) -> None:
        _require_type("a Budget or None", Budget | None, budget=budget)
        address = server_address(path)
        place = None if path is None else Path(path).resolve()
        if place and address and not place.is_file():
            place = None  # an address, and no pointer file with one
        secret, ledger_id = _secret(key, place, address), uuid4().hex
        watcher = None if witness is None else FileWitness(witness)
        wanted = Settings(
            id=ledger_id,
            created=now(),
            epsilon=None if budget is None else budget.epsilon,
            delta=None if budget is None else budget.delta,
            relation=str(Relation(relation or Relation.ADD_REMOVE)),
            unit=unit or "record",
            key_check=None if secret is None else key_check(ledger_id, secret),
            witness=None if watcher is None else str(watcher.path),
        )
        open_store = Store if address is None else functools.partial(PostgresStore, address)
        self._store = open_store(
            place,
            wanted=wanted,
            timeout=positive(timeout=timeout),
            read_only=read_only,
            key=secret,
            witness=watcher,
        )
        found = self._store.settings
        try:
            self.budget = _budget_of(found)
            self.relation = Relation(found.relation)
            self.unit = str(found.unit)
        except (TypeError, ValueError) as wrong:
            self._store.close()
            raise LedgerError(f"{path} has settings that no ledger has ({wrong}).") from None
        try:
            self._require_same("budget", budget, self.budget)
            self._require_same("relation", relation and Relation(relation), self.relation)
            self._require_same("unit", unit, self.unit)
            self._watch(wanted.witness)
        except LedgerError:
            self._store.close()
            raise
        self.has_one_record_each = False
        self._filter: Filter | None = None
        self._attempt: _Attempt | None = None
        self.used: set[int] = set()
        """Numbers of the entries that this object has paid or resumed."""

    @property
    def path(self) -> Path | None:
        """File of the ledger, or pointer file to a server; None if it is kept in memory."""
        return self._store.path

    @property
    def is_durable(self) -> bool:
        """Whether the ledger outlasts this process, in a file or on a server."""
        return self.path is not None or isinstance(self._store, PostgresStore)

    @property
    def store(self) -> Store:
        """The rows behind this ledger, for the other parts of `tacit.ledger`."""
        return self._store

    def grant(self, role: str, *, spend: bool = False) -> None:
        """Let a role of the server read this ledger, or also spend from it; for its owner only."""
        if not isinstance(self._store, PostgresStore):
            raise LedgerError("a file has no roles. Use the permissions of the file.")
        with self._store.transaction():
            self._store.grant(role, spend=spend)

    def spend(
        self, event: Event, *, note: str = "", partition: str | Iterable[str] | None = None
    ) -> Entry:
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
        partition: str | Iterable[str] | None = None,
        steps: int | None = None,
        claim: int = 1,
    ) -> "Plan":
        """Pay for all of `event` at once; the steps of the returned plan then cost nothing extra.

        A plan is fixed before its first step. As the first entry of the ledger it is priced whole
        by the tightest accountant (PLD); as a later one by the filter, like any other entry.
        `steps` is how many steps the plan hands out, by default the number of releases in `event`;
        `event` must cover all of them together. `claim` is how many steps are written to the file
        at a time, see `Plan`.
        """
        claim = whole(claim=claim, least=1)
        count = steps_of(event) if steps is None else whole(steps=steps, least=1)
        if isinstance(event, Repeated | Sequence) and count > steps_of(event):
            raise ValueError(
                f"steps must be at most the {steps_of(event):,} releases in event, got {count:,}: "
                "steps beyond them would not be paid for."
            )
        entry = self._record("plan", event, note, partition, steps=count)
        return Plan(self._store, entry, claim=claim)

    def resume(self, plan_id: int, *, claim: int = 1) -> "Plan":
        """Return the plan with number `plan_id`, to take the steps that remain."""
        with self._store.reading():
            rows = self._store.rows("id = ? AND kind = 'plan'", (whole(plan_id=plan_id),))
        if not rows:
            raise LedgerError(f"the ledger has no plan {plan_id}. See history().")
        self.used.add(rows[0].id)
        return Plan(self._store, entry_of(rows[0]), claim=claim)

    def require_unit(self, *, is_user: bool) -> None:
        """Raise `ValueError` unless this ledger counts users; records, if `is_user` is False.

        Every unit but "record" is a word for a user. Neither stands for the other: a guarantee for
        records says little about a user who has many, and costs of both kinds do not add up.
        """
        if is_user and self.unit == "record":
            raise ValueError(
                "the ledger counts the privacy of one record, but this release protects a user. "
                "Use a ledger made with unit='user' or another word for whose records they are."
            )
        if not is_user and self.unit != "record" and not self.has_one_record_each:
            raise ValueError(
                f"the ledger counts the privacy of one {self.unit}, but this release protects one "
                f"record. Say whose record each one is with users=; or, if no {self.unit} has two, "
                "call ledger.declare_one_record_each(); or use a ledger with unit='record'."
            )

    def declare_one_record_each(self) -> None:
        """Declare that no user has two records, so that a record's price is a user's.

        It is a fact about the data sets whose releases this object pays for from now on. It is
        taken on trust, and it is not stored in the file.
        """
        self.has_one_record_each = True

    def history(self, *, head: str | None = None) -> list[Entry]:
        """Return all payments, oldest first; with the hash `head` of a row, those up to it."""
        with self._store.reading():
            rows = self._store.rows(f"{PAYMENTS} AND id <= ?", (self._row_of(head),))
            return [entry_of(row) for row in rows]

    def seal(self, note: str) -> str:
        """Append a row that costs nothing and holds `note`; return its hash.

        A run seals the hashes of its results, so that the ledger vouches for them.
        """
        _require_type("a string", str, note=note)
        with self._store.transaction():
            return self._store.append(LedgerRow(kind="seal", note=note, steps=0)).hash

    def seals(self) -> list[tuple[int, str, str]]:
        """Return number, hash and note of every sealed row, oldest first."""
        with self._store.reading():
            return [(row.id, row.hash, row.note) for row in self._store.rows("kind = 'seal'")]

    @property
    def id(self) -> str:
        """Random name of the ledger, fixed when it was created."""
        return self._store.settings.id

    @contextmanager
    def attempt(self, name: str) -> Generator[None]:
        """Pay at most once in the block, however often the block is tried under the same `name`.

        Payments in the block get the name in their note. Where an earlier try has already made the
        same payment (its place in the block, its event, its partition), nothing is paid again and
        the old entry is returned. The block must release the same values at each try: name the
        data, the settings and the key of the noise in `name`.
        """
        if self._attempt is not None:
            raise LedgerError("attempts cannot be nested.")
        self._attempt = _Attempt(name)
        try:
            yield
        finally:
            self._attempt = None

    @property
    def event(self) -> Event:
        """Everything that was paid for, as one event. Ignoring partitions, it may over-charge."""
        with self._store.reading():
            return self._joined(None)

    def remaining(self, *, partition: str | Iterable[str] | None = None) -> Remaining:
        """Return the most that one more entry on `partition` may cost; None: on all records."""
        if self.budget is None:
            return UNLIMITED
        filter_ = self._known_filter() or fit(self.budget, ev.Gaussian(1.0), self.relation)
        label = _label(partition)
        with self._store.reading():
            met = Totals(self._store.check().totals, len(filter_.orders)).met(label)
        return Remaining.least([filter_.remaining(total.cost, self.budget) for total in met])

    def epsilon(self, *, delta: float, accountant: accounting.Accountant | None = None) -> float:
        """Return what has been spent, as epsilon at `delta`; at `delta` 0, the pure epsilon.

        A single entry is priced as one event fixed in advance (PLD). Several entries are priced by
        `Filter.epsilon`, which holds however the entries and the moment of this call were chosen.
        At the budget's delta the value is never above the budget's epsilon, because no entry beyond
        it is admitted.

        With an `accountant`, all entries are priced by it as one event. This price is tighter, and
        **valid only if all events were fixed in advance**, not chosen after earlier releases.
        """
        delta = 0.0 if delta == 0 else in_open_unit(delta=delta)
        if accountant is not None:
            price_of = accountant.epsilon
            met = self._met()
            prices = [price_of(event, delta=delta, relation=self.relation) for event, _ in met]
            return max([0.0, *prices])
        spent = self._odometer(self._met(), delta)
        if self.budget is not None and delta >= self.budget.delta:
            return min(spent, self.budget.epsilon)
        return spent

    def epsilons(self, *, delta: float, head: str | None = None) -> Epsilons:
        """Return the three epsilons of this ledger at `delta`, each valid for its own question.

        `head` is the hash of a row: then only entries up to that row count. The three agree for a
        single entry that uses up the budget. The odometer is never below the price of entries fixed
        in advance, and no valid odometer can match that price (Rogers et al. 2016,
        arXiv:1605.08294).
        """
        delta = in_open_unit(delta=delta)
        met = self._met(head)
        fixed = [_whole(event, delta=delta, relation=self.relation) for event, _ in met]
        budget = self.budget
        return Epsilons(
            budget=budget.epsilon if budget is not None and delta >= budget.delta else None,
            fixed_in_advance=max([0.0, *fixed]),
            odometer=self._odometer(met, delta),
        )

    def verify(self, *, head: str | None = None, ask_witness: bool = True) -> Verification:
        """Check the whole file: structure, hash chain, totals, prices, budget and witness.

        `head` is an earlier `Verification.head`, kept elsewhere: the ledger must continue from it.
        Without `ask_witness`, the file that a stranger's ledger names as its witness is not opened.
        Raises `LedgerError` with the first fault. An unkeyed ledger that was forged whole, or put
        back to an older copy, passes unless `head` or a witness contradicts it.
        """
        return verify_store(
            self._store,
            self.budget,
            self.relation,
            fits_alone=self._fits_alone,
            head=head,
            ask_witness=ask_witness,
        )

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
        self,
        kind: str,
        event: Event,
        note: str,
        partition: str | Iterable[str] | None,
        *,
        steps: int,
    ) -> Entry:
        _require_type("an Event", Event, event=event)
        _require_type("a string", str, note=note)
        label = _label(partition)
        if self._attempt is not None:
            note = self._attempt.note(note)
            for entry in self.history():
                if (entry.note, entry.event, entry.partition or "") == (note, event, label):
                    self.used.add(entry.id)
                    return entry
        while True:
            known = self._known_filter()
            filter_ = known or fit(self.budget, event, self.relation)
            cost = price(
                event,
                orders=filter_.orders,
                relation=self.relation,
                copy=filter_.copied_event,
            )
            fits_alone = self._may_be_first(label, cost, filter_) and self._fits_alone(event)
            with self._store.transaction() as connection:
                if known is None and self._stored_filter() is not None:
                    continue  # another process made the first entry, and so fixed the filter
                assert self._store.seen is not None  # set by the check of the transaction
                totals = Totals(self._store.seen.totals, len(filter_.orders))
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
            self.used.add(row.id)
            where = label or None
            return Entry(row.id, row.time, kind, event, note, where, steps, cost, row.hash)

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
        """Return whether an entry that the filter refuses is a first entry, priced more tightly."""
        if self.budget is None or self.budget.delta == 0 or filter_.admits(cost, self.budget):
            return False
        with self._store.reading():
            # If another process adds an entry now, the answer True is outdated. That is harmless:
            # `_require_room` counts the entries again inside the transaction.
            totals = Totals(self._store.check().totals, len(filter_.orders))
            return any(total.entries == 0 for total in totals.met(label))

    def _fits_alone(self, event: Event) -> bool:
        assert self.budget is not None  # asked only where there is one
        epsilon, delta = self.budget.epsilon, self.budget.delta
        return delta > 0 and _whole(event, delta=delta, relation=self.relation) <= epsilon

    def _met(self, head: str | None = None) -> list[tuple[Event, Total]]:
        """Return the event and the total of the entries that each partition's records meet.

        The list is empty if nothing was paid. With `head`, only entries up to that row count.
        """
        filter_ = self._known_filter()
        if filter_ is None:
            return []
        with self._store.reading():
            self._store.check()
            totals, last = Totals({}, len(filter_.orders)), self._row_of(head)
            for row in self._store.rows(f"{PAYMENTS} AND id <= ?", (last,)):
                totals.by_label.update(totals.after(row.partition, entry_of(row).cost))
            if not totals.by_label:
                return []
            return [(self._joined(name, last), total) for name, total in totals.met_by_label()]

    def _row_of(self, head: str | None) -> int:
        """Return the number of the row with hash `head`; None stands for the last row."""
        if head is None:
            return self._store.head()[0]
        if head == genesis(self._store.settings, self._store.key):
            return 0
        rows = self._store.rows("hash = ?", (head,))
        if not rows:
            raise LedgerError(f"the ledger {self.path} has no row with the given head.")
        return rows[0].id

    def _odometer(self, met: list[tuple[Event, Total]], delta: float) -> float:
        filter_ = self._known_filter()
        if filter_ is None:
            return 0.0
        found = [
            filter_.epsilon(total.cost, delta=delta)
            if total.entries > 1 or delta == 0
            else _whole(event, delta=delta, relation=self.relation)
            for event, total in met
        ]
        return max([0.0, *found])

    def _watch(self, given: str | None) -> None:
        """Use the witness that the file names, and check it; raise if another one was given."""
        stored, store = self._store.settings.witness, self._store
        if stored is not None:
            self._require_same("witness", given, stored)
            store.witness = FileWitness(stored)
        if not store.read_only:
            with store.reading():
                store.check_witness()

    def _joined(self, label: str | None, last: int | None = None) -> Event:
        """Return one event of all entries that read partition `label`; None: of all entries."""
        only = ""
        values: list[str | int] = []
        if label is not None:
            only = "AND (partition = '' OR instr(? || partition || ?, ?) > 0)"
            values += [SEPARATOR, SEPARATOR, f"{SEPARATOR}{label or SEPARATOR}{SEPARATOR}"]
        if last is not None:
            only += " AND id <= ?"
            values.append(last)
        found = self._store.connection.execute(
            f"SELECT event, count(*) FROM entry WHERE {PAYMENTS} {only} "
            "GROUP BY event ORDER BY min(id)",
            values,
        )
        parts = [Repeated(from_json(text), n) if n > 1 else from_json(text) for text, n in found]
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _known_filter(self) -> Filter | None:
        if self._filter is None:
            with self._store.reading():
                self._filter = self._stored_filter()
        return self._filter

    def _stored_filter(self) -> Filter | None:
        query = f"SELECT filter FROM entry WHERE {PAYMENTS} ORDER BY id LIMIT 1"
        found = self._store.connection.execute(query).fetchone()
        return None if found is None else Filter.from_json(found[0])

    def _require_same(self, name: str, asked: object, found: object) -> None:
        if asked is not None and asked != found:
            raise LedgerError(
                f"{self.path} has {name} {found or 'none'}, but was opened with {name} {asked}. "
                f"A ledger never changes its {name}: leave it out to use the file's."
            )


class _Attempt:
    """Counts the payments of one block, see `Ledger.attempt`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0

    def note(self, note: str) -> str:
        """Return the note of the next payment, with the name of the block and the payment's place.

        The same block makes the same payments in the same order, so the place identifies them.
        """
        self.count += 1
        return f"{note} [{self.name}, payment {self.count}]"


_whole = functools.lru_cache(maxsize=1024)(accounting.epsilon)  # of an event fixed in advance
_json = functools.lru_cache(maxsize=1024)(Event.to_json)


def _require_type(rule: str, kind: type | UnionType, **named: object) -> None:
    """Raise `TypeError` unless the keyword argument is a `kind`; `rule` describes it in words."""
    ((name, value),) = named.items()
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {rule}, got {type(value).__name__}.")


def _label(partition: str | Iterable[str] | None) -> str:
    """Return the label stored for `partition`: its name or names, or "" for None (all records)."""
    if partition is None:
        return ""
    names = [partition] if isinstance(partition, str) else sorted(set(partition))
    of_text = all(isinstance(cast("object", name), str) for name in names)
    if not names or not of_text or any(not name or SEPARATOR in name for name in names):
        raise ValueError(
            f"partition must be a non-empty string, several of them, or None, got {partition!r}."
        )
    return SEPARATOR.join(names)


def _secret(
    key: bytes | str | os.PathLike[str] | None, ledger: Path | None, address: str | None
) -> bytes | None:
    """Return the key of the chain; raise if it is too short, or a file beside the ledger."""
    if key is None:
        key = os.environ.get(_KEY_VARIABLE) or None
        if key is None or (ledger is None and address is None):
            return None
        if address is not None:
            if has_server_key(address) is False:
                return None
        elif ledger is not None and ledger.is_file() and not has_key(ledger):
            return None
    if isinstance(key, bytes):
        secret = key
    else:
        file = Path(key).resolve()
        if ledger is not None and file.parent == ledger.parent:
            raise LedgerError(
                f"the key {file.name} is in the folder of the ledger. Keep it where whoever can "
                "write the ledger cannot read it."
            )
        try:
            secret = file.read_bytes().strip()
        except OSError as error:
            raise LedgerError(f"the key {file} cannot be read ({error.strerror}).") from None
    if len(secret) < _SHORTEST_KEY:
        raise LedgerError(f"the key of a ledger must have at least {_SHORTEST_KEY} bytes.")
    return secret


def _budget_of(settings: Settings) -> Budget | None:
    return None if settings.epsilon is None else Budget(settings.epsilon, settings.delta or 0.0)
