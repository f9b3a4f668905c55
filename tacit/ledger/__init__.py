"""The ledger: the privacy budget of one data set, kept across runs, processes and crashes.

`Ledger` is what you use; `guard` holds the rule that keeps the budget and its proof, `price` what
an event takes from it, `store` the file, `plan` reservations, `verify` the check of a whole file.
"""

from tacit.ledger.budget import Budget, Remaining
from tacit.ledger.entry import Entry
from tacit.ledger.ledger import Ledger
from tacit.ledger.plan import Plan
from tacit.ledger.verify import Verification

__all__ = ["Budget", "Entry", "Ledger", "Plan", "Remaining", "Verification"]
