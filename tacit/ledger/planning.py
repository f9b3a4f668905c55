"""A ledger that tells what a fit would pay: it stops the fit at its first payment."""

from typing import NoReturn

from tacit.events import Event
from tacit.ledger.ledger import Ledger


class PlannedEvent(Exception):  # no error: it stops a fit at its payment
    """Carries the event that a fit was about to pay for."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event


class PlanningLedger(Ledger):
    """A ledger that stops a fit at its first payment, before anything is released."""

    def spend(self, event: Event, **_: object) -> NoReturn:
        """Raise `PlannedEvent` in place of a payment."""
        raise PlannedEvent(event)

    def plan(self, event: Event, **_: object) -> NoReturn:
        """Raise `PlannedEvent` in place of a reservation."""
        raise PlannedEvent(event)
