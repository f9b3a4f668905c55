"""The errors that a user of tacit may want to catch, and one warning.

Wrong arguments raise `ValueError` or `TypeError`; every error below concerns the guarantee itself.
"""

import math
import warnings
from numbers import Integral, Real


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


class LearningStep(TacitError, ValueError):
    """A step before a private estimator or beside a private run learns from the records unpaid.

    Before an estimator, it may also mix them.
    """


class ProgramError(TacitError, RuntimeError):
    """The user's data set, `collate_fn`, `augment`, model or loss failed on private records.

    It names the kind of error and the line of code; the text is withheld, as it may quote records.
    """


class WeakGuarantee(UserWarning):
    """The guarantee that was asked for protects very little; the run goes on as asked."""

    MOST_EPSILON = 20.0

    @classmethod
    def issue(cls, *, epsilon: object, delta: object = None, n_records: object = None) -> None:
        """Issue a warning if epsilon is above 20, or delta above 1 / `n_records`.

        `n_records` must be public. Values that are not given, or are no numbers, are not judged.
        """
        most = float(epsilon) if isinstance(epsilon, Real) else 0.0
        if cls.MOST_EPSILON < most < math.inf:
            warnings.warn(
                f"epsilon {most:g} is above {cls.MOST_EPSILON:g}: the guarantee then allows "
                "results from which it is practically certain whether somebody took part. Common "
                "choices are 0.1 to 10.",
                cls,
                stacklevel=1,  # one place, so that the same warning is shown once
            )
        chance = float(delta) if isinstance(delta, Real) else 0.0
        n = int(n_records) if isinstance(n_records, Integral) else 0
        if n > 0 and 1 / n < chance < 1:
            warnings.warn(
                f"delta {chance:g} is above 1 / {n} (the number of records): to publish a record "
                "picked at random would have such a delta. Choose delta well below, such as "
                f"{0.1 / n:.1g}.",
                cls,
                stacklevel=1,
            )
