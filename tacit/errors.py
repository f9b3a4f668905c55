"""What a user of tacit may catch.

Wrong arguments raise `ValueError` or `TypeError`; everything below is about the guarantee itself.
"""


class TacitError(Exception):
    """Base of every error that tacit raises on purpose."""


class BudgetExceeded(TacitError):
    """The next release would pass the budget, so it was not made and nothing was recorded."""


class UnsupportedEvent(TacitError):
    """No sound price is known for this event under the relation asked for."""


class NotCertified(TacitError):
    """A numerical bound could not be certified in double precision; no number is returned."""


class LedgerError(TacitError):
    """A ledger file is corrupt, foreign, of another version, or was opened with another budget."""


class IncompatibleModel(TacitError):
    """The model mixes examples or keeps data-dependent state: no example can be clipped alone."""
