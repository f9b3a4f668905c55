"""Regression with a user as the unit of privacy: at most k records of each, priced exactly.

An estimator of `tacit.regression` protects one record: it releases sums that one record moves by a
bounded amount. `PerUser` keeps at most k records of each user, which move every sum by at most k
times as much (`tacit.accounting.for_group`, which prices that exactly), and gives the estimator the
largest epsilon for a record at which a user with k records costs the epsilon that was asked for.
"""

from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator

from tacit._check import positive, whole
from tacit._users import RecordsOfUsers, require_same_index
from tacit.accounting import epsilon as price
from tacit.accounting import for_group
from tacit.errors import UnsupportedEvent
from tacit.events import Event, PureDP, Relation, Sequence
from tacit.ledger import Entry, Ledger
from tacit.mechanisms import Rng, generator
from tacit.regression.estimator import planned_event
from tacit.summaries import choose_bound, count

_HALVINGS = 12  # of the range of epsilons for a record
_FOR_BOUND = 0.1  # share of epsilon that choosing the bound costs
_FOR_COUNT = 0.02  # share of epsilon that counting the records that are kept costs
_LEAST = 64  # an epsilon of a record below epsilon / (k times this) is not tried


class PerUser(BaseEstimator):
    """Fits `estimator` such that its epsilon and delta hold for a user, not for a record.

    Parameters
    ----------
    estimator
        An estimator of `tacit.regression`; its `epsilon` and `delta` are those of a user, its
        `ledger`, if there is one, must count users, and its relation must be "add_remove". How many
        records are kept depends on how they are spread over users. So it is private, and a fiftieth
        of epsilon counts them, unless the estimator's `n_records` states a public number.
    records_per_user
        k: most records of one user that are used; others are left out, chosen at random. A public
        number, or "private": then a tenth of epsilon goes to `tacit.summaries.choose_bound`, which
        finds a k that about nine in ten users do not exceed.

    Attributes
    ----------
    records_per_user_
        k, as given or as chosen.
    estimator_
        The fitted estimator.
    event_
        What was released, as an event for a user.

    Examples
    --------
    >>> from tacit.regression import LinearRegression
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (4000, 2))
    >>> model = LinearRegression(epsilon=2.0, delta=1e-6, bounds=(-1, 1), target_bounds=(-2, 2),
    ...                          random_state=0)
    >>> fitted = PerUser(model, records_per_user=2).fit(X, X.sum(1), users=np.arange(4000) // 2)
    >>> fitted.predict(X[:2]).shape
    (2,)
    """

    def __init__(
        self, estimator: Any = None, records_per_user: int | Literal["private"] = 4
    ) -> None:
        self.estimator = estimator
        self.records_per_user = records_per_user

    def fit(self, X: Any, y: Any, *, users: Any) -> Self:
        """Fit the estimator to the records of `users`, the id of a user for each record."""
        if self.estimator is None:
            raise TypeError("estimator must be one of tacit.regression, got None.")
        _require_users(self.estimator)
        require_same_index(X, users)
        found = RecordsOfUsers.of(users, len(y))
        most, epsilon = self.records_per_user, positive(epsilon=self.estimator.epsilon)
        if most != "private":
            most = whole(records_per_user=most, least=1)
        planned_event(self.estimator, lambda copy: copy.fit(X, y))  # an error comes before payment
        ledger, rng = self.estimator.ledger, self._generator()
        rest, paid, given = epsilon, list[Event](), dict[str, int]()
        if most == "private":
            share = _FOR_BOUND * epsilon
            most = choose_bound(users, epsilon=share, ledger=ledger, rng=rng)
            rest, paid = rest - share, [PureDP(share)]
        kept = found.kept(most)
        if self.estimator.n_records is None:
            share, ones = _FOR_COUNT * epsilon, np.ones(len(kept))
            counted = count(ones, epsilon=share, records_per_person=most, ledger=ledger, rng=rng)
            given["n_records"] = int(np.clip(round(counted.value), 1, len(y)))
            assert counted.event is not None  # it was paid for
            rest, paid = rest - share, [*paid, counted.event]
        model = _copy(self.estimator, rest, ledger, **given)
        rows: Any = X if hasattr(X, "shape") else np.asarray(X)  # Any: an array or a data frame
        table = rows.iloc[kept] if hasattr(rows, "iloc") else rows[kept]
        targets = y.iloc[kept] if hasattr(y, "iloc") else np.asarray(y)[kept]
        self.estimator_, event = fit_for_users(model, most, lambda copy: copy.fit(table, targets))
        self.event_ = Sequence((*paid, event)) if paid else event
        self.records_per_user_ = most
        return self

    def predict(self, X: Any) -> Any:
        """Return the predictions of the fitted estimator."""
        return self.estimator_.predict(X)

    def score(self, X: Any, y: Any) -> float:
        """Return the score of the fitted estimator."""
        return self.estimator_.score(X, y)

    def _generator(self) -> Rng:
        """Return a source of noise for bound and count that the estimator does not use itself."""
        if self.estimator.random_state is None:
            return generator(None)
        return generator(int(self.estimator._generator().integers(2**31)))


def fit_for_users(
    estimator: Any,  # Any: the estimators share no type
    records_per_user: int,
    fit: Callable[[Any], Any],
    *,
    trial: Callable[[Any], Any] | None = None,
) -> tuple[Any, Event]:
    """Return a copy of the estimator, fitted by `fit(copy)`, and the event that a user pays for.

    The caller guarantees that `fit` uses at most `records_per_user` records of each user. The
    largest epsilon of a record is found by fits that end at their payment, which comes before any
    release; `trial(copy)` makes them, if it is given. The event depends on public facts alone.
    """
    _require_users(estimator)
    payer = _Payer(estimator.ledger, records_per_user)
    fitted = _copy(estimator, _epsilon_of_record(estimator, records_per_user, trial or fit), payer)
    fit(fitted)
    fitted.ledger = None  # its events are those of a record
    assert payer.event is not None  # every fit pays
    return fitted, payer.event


def _require_users(estimator: Any) -> None:
    """Raise unless the estimator's ledger counts users, and its relation has a price for them."""
    ledger: Ledger | None = estimator.ledger
    if ledger is not None:
        ledger.require_unit(is_user=True)
    if Relation(estimator.relation) is not Relation.ADD_REMOVE:
        raise UnsupportedEvent(
            "the price of replacing a user with several records is not known. Use "
            "relation='add_remove'."
        )


def _copy(estimator: Any, epsilon: float, ledger: Any, **given: Any) -> Any:
    """Return an unfitted copy of the estimator at another epsilon, which pays to `ledger`."""
    plain = {**estimator.get_params(deep=False), "epsilon": epsilon, "ledger": ledger, **given}
    return type(estimator)(**plain)


def _epsilon_of_record(estimator: Any, most: int, trial: Callable[[Any], Any]) -> float:
    """Return the largest epsilon of a record, about, at which a user costs what was asked."""
    wanted, delta = positive(epsilon=estimator.epsilon), estimator.delta or 0.0
    if most == 1:
        return wanted

    def fits(epsilon: float) -> bool:
        event = planned_event(_copy(estimator, epsilon, None), trial)
        return price(for_group(event, most), delta=delta) <= wanted

    low, high = wanted / most, wanted
    while not fits(low):  # at the same delta, k records may cost more than k times as much
        low, high = low / 2, low
        if low < wanted / (_LEAST * most):
            raise UnsupportedEvent("the price for several records of a user is not known here.")
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _Payer:
    """What the estimator sees as its ledger: it pays for `records` records in place of one."""

    relation = Relation.ADD_REMOVE

    def __init__(self, ledger: Ledger | None, records: int) -> None:
        self._ledger, self._records = ledger, records
        self.event: Event | None = None

    def spend(self, event: Event, *, note: str = "", partition: Any = None) -> Entry | None:
        """Pay for what `records` records do to the release `event`."""
        of_user = event if self._records == 1 else for_group(event, self._records)
        self.event = of_user
        if self._ledger is None:
            return None
        return self._ledger.spend(of_user, note=f"{note}, per user", partition=partition)

    def __sklearn_clone__(self) -> "_Payer":
        return self
