"""The ledger: the privacy budget of one data set, kept across runs, processes and crashes.

`Ledger` is the object to use. `filter` has the rule that keeps the budget, and its proof;
`entry_cost` what an event adds to each measure of the filter; `store` the file; `verify` the check
of a whole file.
"""

from tacit.ledger.filter import Budget, Remaining
from tacit.ledger.ledger import Ledger, Plan
from tacit.ledger.store import Entry
from tacit.ledger.verify import Verification

__all__ = ["Budget", "Entry", "Ledger", "Plan", "Remaining", "Verification"]
