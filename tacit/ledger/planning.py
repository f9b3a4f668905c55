"""The ledger that stops a fit at its payment: the way to find out what the fit would cost."""

from typing import NoReturn

from tacit.events import Event
from tacit.ledger.ledger import Ledger


class PlannedPayment(Exception):  # no error: it stops a fit at its payment
    """Carries the event that a fit was about to pay for."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event


class PlanningLedger(Ledger):
    """A ledger that stops a fit at its first payment, before anything is released.

    Like every ledger it counts records, and refuses fits that protect users, unless `unit` says
    otherwise.
    """

    def spend(self, event: Event, **_: object) -> NoReturn:
        raise PlannedPayment(event)

    def plan(self, event: Event, **_: object) -> NoReturn:
        raise PlannedPayment(event)
