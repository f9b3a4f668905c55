"""The errors that a user of tacit may want to catch.

Wrong arguments raise `ValueError` or `TypeError`; every error below concerns the guarantee itself.
"""


class TacitError(Exception):
    """Base class of every error that tacit raises on purpose."""


class BudgetExceeded(TacitError):
    """The next release would exceed the budget, so it was not made and nothing was spent."""


class UnsupportedEvent(TacitError):
    """No sound price is known for this event under the requested neighboring relation."""


class NotCertified(TacitError):
    """A numerical bound could not be certified in double precision; no number is returned."""


class LedgerError(TacitError):
    """A ledger file is corrupt, is no ledger, or has another version or another budget."""


class IncompatibleModel(TacitError):
    """The model mixes examples or keeps data-dependent state: no example can be clipped alone."""


class ProgramError(TacitError, RuntimeError):
    """The user's data set, `collate_fn`, `augment`, model or loss failed on private records.

    It names the kind of error and the line of code; the text is withheld, as it may quote records.
    """
