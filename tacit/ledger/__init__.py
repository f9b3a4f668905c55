"""The ledger: the privacy budget of one data set, kept across runs, processes and crashes.

`Ledger` is the object to use. `filter` has the rule that keeps the budget, and its proof;
`entry_cost` what an event adds to each measure of the filter; `store` the file, and
`postgres_store` the same on a server; `migration` the way from one to the other; `verify` the check
of a whole ledger; `witness` the memory outside the file that reveals an old copy; `planning` the
ledger that stops a fit at its payment; `pending` work that is paid once although it may be killed.
"""

from tacit.ledger.chain import Entry
from tacit.ledger.filter import Budget, Remaining
from tacit.ledger.ledger import Epsilons, Ledger
from tacit.ledger.migration import move
from tacit.ledger.pending import any_pending, is_pending, paid_once
from tacit.ledger.planning import PlannedPayment, PlanningLedger
from tacit.ledger.postgres_store import server_address, without_password
from tacit.ledger.postgres_store import write_pointer as connect
from tacit.ledger.relation import agreed_relation
from tacit.ledger.reserved_plan import Plan, restart_reserve
from tacit.ledger.verify import Verification
from tacit.ledger.witness import FileWitness, WitnessMark

__all__ = [
    "Budget",
    "Entry",
    "Epsilons",
    "FileWitness",
    "Ledger",
    "Plan",
    "PlannedPayment",
    "PlanningLedger",
    "Remaining",
    "Verification",
    "WitnessMark",
    "agreed_relation",
    "any_pending",
    "connect",
    "is_pending",
    "move",
    "paid_once",
    "restart_reserve",
    "server_address",
    "without_password",
]
