"""The ledger that stops a fit at its payment: what it refuses, and for whom."""

import numpy as np
import pytest

from tacit.events import Gaussian
from tacit.ledger import Ledger, PlannedPayment, PlanningLedger
from tacit.regression import LinearRegression, planned_event
from tacit.tuning import PrivateSearch

X = np.random.default_rng(0).uniform(-1, 1, (200, 2))


class UsersRegression(LinearRegression):
    """Fits one record of each user."""

    def fit(self, X, y, sample_weight=None):
        self._pay(Gaussian(2.0), "one record of each user", is_user=True)
        raise AssertionError("released")


@pytest.mark.parametrize("pay", ["spend", "plan"])
def test_a_fit_is_stopped_at_its_payment_and_nothing_is_recorded(pay):
    ledger = PlanningLedger()
    with pytest.raises(PlannedPayment) as stopped:
        getattr(ledger, pay)(Gaussian(2.0), note="a fit")
    assert stopped.value.event == Gaussian(2.0)
    assert ledger.history() == []


def test_fits_per_user_are_planned_where_they_are_asked_for_and_refused_in_a_search():
    bounds = {"bounds": (-1, 1), "target_bounds": (-2, 2)}
    estimator = UsersRegression(epsilon=1.0, delta=1e-6, ledger=Ledger(unit="user"), **bounds)
    assert planned_event(estimator, lambda copy: copy.fit(X, X.sum(1))) == Gaussian(2.0)
    record = LinearRegression(epsilon=1.0, delta=1e-6, **bounds)
    assert planned_event(record, lambda copy: copy.fit(X, X.sum(1))) is not None
    for_users = UsersRegression(epsilon=1.0, delta=1e-6, **bounds)
    search = PrivateSearch(for_users, {"fit_intercept": [True, False]}, epsilon=2.0, delta=1e-6)
    with pytest.raises(ValueError, match="but this release protects a user"):
        search.fit(X, X.sum(1))
