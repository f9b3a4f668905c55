"""Regression per user: the price of k records, the ledger of users, and refusals."""

import pickle
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import tacit
from tacit.errors import UnsupportedEvent
from tacit.events import PureDP
from tacit.ledger import Ledger
from tacit.regression import (
    LinearRegression,
    LogisticRegression,
    PerUser,
    TransferRegression,
    per_user,
)

RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (1200, 2))
IDS = RNG.integers(0, 400, 1200)
LINEAR = {"epsilon": 2.0, "bounds": (-1, 1), "target_bounds": (-2, 2)}


@pytest.mark.parametrize(
    ("model", "delta"),
    [
        (LinearRegression(**LINEAR, delta=1e-6), 1e-6),
        (LinearRegression(**LINEAR, method="functional"), 0.0),
        (LogisticRegression(epsilon=2.0, delta=1e-6, bounds=(-1, 1), classes=[0, 1]), 1e-6),
    ],
    ids=["newton", "functional", "logistic"],
)
def test_a_user_costs_what_was_asked(model, delta):
    ledger = Ledger(unit="user")
    y = X.sum(1) if isinstance(model, LinearRegression) else (X.sum(1) > 0) * 1.0
    fitted = PerUser(model.set_params(ledger=ledger), records_per_user=3).fit(X, y, users=IDS)
    price = tacit.epsilon(fitted.event_, delta=delta)
    assert 1.96 < price <= 2.0
    assert ledger.event == fitted.event_
    assert fitted.predict(X[:3]).shape == (3,)


def test_records_and_users_are_not_mixed():
    user, record = Ledger(unit="user"), Ledger()
    with pytest.raises(ValueError, match="one user"):
        LinearRegression(**LINEAR, delta=1e-6, ledger=user).fit(X, X.sum(1))
    model = PerUser(LinearRegression(**LINEAR, delta=1e-6, ledger=record))
    with pytest.raises(ValueError, match="one record"):
        model.fit(X, X.sum(1), users=IDS)
    model = PerUser(LinearRegression(**LINEAR, delta=1e-6, relation="replace_one"))
    with pytest.raises(UnsupportedEvent, match="replacing a user"):
        model.fit(X, X.sum(1), users=IDS)


def test_the_bound_is_chosen_privately_and_paid():
    ledger, users = Ledger(unit="user"), np.repeat(np.arange(3000), 1 + np.arange(3000) % 2)
    table = np.random.default_rng(0).uniform(-1, 1, (len(users), 2))
    model = LinearRegression(**LINEAR, delta=1e-6, ledger=ledger, random_state=0)
    fitted = PerUser(model, records_per_user="private").fit(table, table.sum(1), users=users)
    assert fitted.records_per_user_ == 2
    assert tacit.epsilon(fitted.event_, delta=1e-6) <= 2.0
    assert len(ledger.history()) == 3
    with pytest.raises(TypeError, match="records_per_user"):
        PerUser(model, records_per_user="auto").fit(table, table.sum(1), users=users)


@pytest.mark.parametrize("model", [LinearRegression, LogisticRegression])
def test_how_many_records_are_kept_is_private(model, monkeypatch):
    """Users with equal rows but other ids give the same plan, if the noisy count is the same."""
    options = {"target_bounds": (-2, 2)} if model is LinearRegression else {"classes": [0, 1]}
    y = X.sum(1) if model is LinearRegression else (X.sum(1) > 0) * 1.0
    estimator = model(epsilon=0.05, delta=1e-6, bounds=(-1, 1), random_state=0, **options)
    seen, events = [], []

    def count(values, **_):
        seen.append(len(values))
        return SimpleNamespace(
            value=310.0, event=PureDP(0.001)
        )  # what noise may make of both numbers

    monkeypatch.setattr(per_user, "count", count)
    for n_users in (300, 299):  # four records each, but the last of 299 has eight
        users = np.minimum(np.arange(1200) // 4, n_users - 1)
        events.append(PerUser(estimator, records_per_user=1).fit(X, y, users=users).event_)
    assert seen == [300, 299]
    assert events[0] == events[1]


def test_no_estimator_of_records_pays_from_a_ledger_of_users(tmp_path):
    ledger = Ledger(tmp_path / "users.ledger", unit="user")
    model = LinearRegression(**LINEAR, delta=1e-6, ledger=ledger)
    of_two = TransferRegression(**LINEAR, delta=1e-6, ledger=ledger)
    for fit in (
        lambda: model.fit(X, X.sum(1)),
        lambda: pickle.loads(pickle.dumps(model)).fit(X, X.sum(1)),
        lambda: of_two.fit(X, X.sum(1), sources=[(X, X.sum(1))]),
    ):
        with pytest.raises(ValueError, match="the ledger counts the privacy of one user"):
            fit()
    ledger.declare_one_record_each()
    pickle.loads(pickle.dumps(model)).fit(X, X.sum(1))
    assert len(ledger.history()) == 1


def test_arguments_are_checked_before_the_bound_is_paid_for():
    ledger = Ledger(unit="user")
    model = LinearRegression(**LINEAR, delta=1e-6, ledger=ledger)
    with pytest.raises(ValueError, match="one id for each record"):
        PerUser(model, records_per_user="private").fit(X, X.sum(1), users=IDS[1:])
    table = pd.DataFrame(X)
    with pytest.raises(ValueError, match="another index"):
        PerUser(model).fit(table, X.sum(1), users=pd.Series(IDS).sample(frac=1, random_state=0))
    with pytest.raises(TypeError, match="estimator"):
        PerUser().fit(X, X.sum(1), users=IDS)
    with pytest.raises(ValueError, match="delta must be in"):
        PerUser(LinearRegression(**LINEAR, delta=2.0, ledger=ledger)).fit(X, X.sum(1), users=IDS)
    wrong = LinearRegression(epsilon=1.0, delta=1e-6, bounds=(-1, 1), ledger=ledger)
    with pytest.raises(ValueError, match="target_bounds must be declared"):
        PerUser(wrong, records_per_user="private").fit(X, X.sum(1), users=IDS)
    assert ledger.history() == []
