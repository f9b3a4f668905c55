"""Verification of a ledger file: replay every row and compare with what is stored."""

from collections.abc import Callable
from typing import NamedTuple, NoReturn

from tacit.errors import LedgerError
from tacit.events import Event, Relation, from_json
from tacit.ledger.chain import LedgerRow, Totals, chained, entry_of, genesis
from tacit.ledger.entry_cost import Cost, price
from tacit.ledger.filter import Budget, Filter, copies_fit
from tacit.ledger.store import Store

_PRICE_SLACK = 1e-6
"""Relative difference of prices that is accepted, since accountants may differ by version."""


class Verification(NamedTuple):
    """What `Ledger.verify` returns if it finds no fault in the file."""

    entries: int
    """Number of payments: spends and plans."""
    rows: int
    """Number of rows of the chain, including steps of plans."""
    head: str
    """Hash of the last row. A copy kept elsewhere reveals any later change to these rows."""


def verify_store(
    store: Store,
    budget: Budget | None,
    relation: Relation,
    *,
    fits_alone: Callable[[Event], bool],
    head: str | None = None,
    ask_witness: bool = True,
) -> Verification:
    """Check a ledger file and raise `LedgerError` at the first fault.

    `fits_alone(event)` is whether an event fits the budget as the only entry. `head` is the hash of
    a row that the ledger must contain: a head that was noted down earlier. `ask_witness` is
    whether the witness is compared too, which opens the file that the ledger names.
    """
    with store.reading():
        if damage := store.damage():
            _fail(store, damage)
        rows = store.rows()
        _verify_chain(store, rows)
        if head is not None and head not in {genesis(store.settings, store.key)} | {
            row.hash for row in rows
        }:
            _fail(store, "it does not continue from the given head: it is an old or another ledger")
        payments = [row for row in rows if row.kind in ("spend", "plan")]
        _verify_payments(store, payments, budget, relation, fits_alone)
        _verify_steps(store, rows)
        if ask_witness:
            store.check_witness()
        return Verification(len(payments), *store.head())


def _verify_chain(store: Store, rows: list[LedgerRow]) -> None:
    if store.settings.key_check is not None and store.key is None:
        _fail(store, "its chain is keyed and no key was given")
    previous = genesis(store.settings, store.key)
    for number, row in enumerate(rows, start=1):
        if row.id != number:
            _fail(store, f"entry {number} is missing")
        if row.hash != chained(previous, row, store.key):
            _fail(store, f"entry {number} was changed, or one before it was taken out")
        previous = row.hash
    if store.head() != (len(rows), previous):
        _fail(store, "entries are missing at its end")


def _verify_payments(
    store: Store,
    rows: list[LedgerRow],
    budget: Budget | None,
    relation: Relation,
    fits_alone: Callable[[Event], bool],
) -> None:
    """Check each entry's stored price and that the budget admitted it, and the stored totals."""
    if not rows:
        replayed = Totals({}, 0)
    else:
        if rows[0].filter is None or any(row.filter for row in rows[1:]):
            _fail(store, "the filter is not fixed by the first entry")
        filter_ = Filter.from_json(rows[0].filter)
        replayed = Totals({}, len(filter_.orders))
        if budget is not None and not copies_fit(filter_, budget, relation):
            _fail(store, "its filter admits more copies of its first event than the budget")
        for row in rows:
            cost = _verified_cost(store, row, filter_, relation)
            if budget is not None:
                event = from_json(row.event or "")
                for entries, total in replayed.met(row.partition):
                    admitted = filter_.admits(total + cost, budget)
                    if not admitted and (entries or not fits_alone(event)):
                        _fail(store, f"entry {row.id} passes the budget")
            replayed.by_label.update(replayed.after(row.partition, cost))
    if Totals.read(store.connection, replayed.n_orders).by_label != replayed.by_label:
        _fail(store, "its running totals are not the sum of its entries")


def _verified_cost(store: Store, row: LedgerRow, filter_: Filter, relation: Relation) -> Cost:
    entry = entry_of(row)
    fresh = price(entry.event, orders=filter_.orders, relation=relation, copy=filter_.copied_event)
    stored = (*entry.cost.measures, entry.cost.delta)
    pairs = zip(stored, (*fresh.measures, fresh.delta), strict=True)
    if any(old < (1 - _PRICE_SLACK) * now for old, now in pairs):
        _fail(store, f"entry {row.id} is priced too low for its event")
    return entry.cost


def _verify_steps(store: Store, rows: list[LedgerRow]) -> None:
    plans = {row.id: row.steps for row in rows if row.kind == "plan"}
    taken = dict.fromkeys(plans, 0)
    for row in rows:
        if row.kind == "steps":
            if row.plan not in plans:
                _fail(store, f"entry {row.id} takes steps of no plan")
            taken[row.plan] += row.steps
            if not 0 <= taken[row.plan] <= plans[row.plan]:
                _fail(store, f"plan {row.plan} has more steps taken than it has")
    stored = store.connection.execute("SELECT plan, steps, taken FROM progress").fetchall()
    if {plan: (steps, done) for plan, steps, done in stored} != {
        plan: (steps, taken[plan]) for plan, steps in plans.items()
    }:
        _fail(store, "the progress of its plans is not the sum of its entries")


def _fail(store: Store, why: str) -> NoReturn:
    raise LedgerError(f"{store.path or 'the ledger'} does not verify: {why}.")
