"""Fits from sums on the grid: right, private, paid, and equal in every engine."""

import math

import numpy as np
import pandas as pd
import pytest

from tacit import Budget, Ledger, epsilon
from tacit.datasets import Schema
from tacit.errors import BudgetExceeded
from tacit.regression import LinearRegression
from tacit.sources import (
    PartialMoments,
    count_outside,
    count_votes,
    describe,
    fit_linear,
    fit_logistic,
    moments,
    open_table,
)
from tacit.sources.grid_encoding import STEPS
from tacit.sources.second_moments import GridRows

SCHEMA = Schema({"a": [0, 10], "b": ["x", "y"], "y": [-5, 15]}, target="y")


def people(n=4000, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(0, 10, n), rng.choice(["x", "y"], n)
    return pd.DataFrame({"a": a, "b": b, "y": a + 2 * (b == "y") + rng.normal(0, 0.1, n)})


def test_a_fit_is_that_of_the_rows_in_memory():
    frame = people(20_000)
    options = {"epsilon": 3.0, "delta": 1e-6, "random_state": 0, "method": "adassp"}
    found = fit_linear([frame], SCHEMA, **options)
    x, y = SCHEMA.encode(frame)
    memory = LinearRegression(bounds=SCHEMA.bounds, target_bounds=(-1, 1), **options).fit(x, y)
    np.testing.assert_allclose(found.coef_, memory.coef_, atol=1e-3)
    assert found.event_ == memory.event_


def test_one_record_changes_the_moments_by_no_more_than_its_sensitivity():
    extreme = pd.DataFrame(
        {
            "a": [math.inf, -math.inf, 10.0, 1e300, math.nan],
            "b": ["y", "x", "?", None, "y"],
            "y": [1e9, -1e9, 15, 0.0, math.nan],
        }
    )
    base = people(200)
    for norm in (1.2, 1.5, math.sqrt(3)):
        before = moments([base], SCHEMA, row_norm=norm).scaled()
        for k in range(len(extreme)):
            added = pd.concat([base, extreme[k : k + 1]])
            after = moments([added], SCHEMA, row_norm=norm).scaled()
            assert np.linalg.norm(after.gram - before.gram) <= norm**2
            assert np.linalg.norm(after.cross - before.cross) <= norm


def test_one_record_changes_a_gradient_by_no_more_than_its_sensitivity():
    schema = Schema({"a": [0, 10], "y": [-5, 15], "b": ["x", "y"]}, target="b")
    theta, base = np.array([[0.3], [-2.0], [4.0]]), people(100)
    for limit in (0.1, 1.0):
        for clip in (0.5, 0.8):
            found = []
            for frame in (
                base,
                pd.concat([base, pd.DataFrame({"a": [1e9], "b": ["x"], "y": [15.0]})]),
            ):
                with open_table([frame], schema) as table:
                    found.append(GridRows(table.features(schema), 2).gradient(theta, limit, clip))
            change = found[1] - found[0]
            assert np.linalg.norm(change[1:]) <= clip * limit * (1 + 1e-12)
            assert abs(change[0, 0]) <= clip * (1 + 1e-12)


def test_gradients_are_those_of_the_logistic_loss():
    schema = Schema({"a": [0, 10], "y": [-5, 15], "b": ["x", "y"]}, target="b")
    frame, theta = people(500), np.array([[0.3], [-2.0], [1.0]])
    x, labels = schema.encode(frame)
    rows = np.column_stack([np.ones(len(x)), x])
    residuals = 1 / (1 + np.exp(-rows @ theta[:, 0])) - labels
    with open_table([frame], schema) as table:
        found = GridRows(table.features(schema), 2).gradient(theta, math.sqrt(2), 1.0)
    np.testing.assert_allclose(found[:, 0], rows.T @ residuals, atol=500 * 2**-13)


def test_logistic_rounds_learn():
    frame = people(3000)
    schema = Schema({"a": [0, 10], "y": [-5, 15], "big": {"at_least": 0.5}}, target="big")
    frame["big"] = (frame["a"] > 5).astype(float)
    chunks = [frame]
    model = fit_logistic(chunks, schema, epsilon=4.0, delta=1e-6, random_state=0)
    x, labels = schema.encode(frame)
    predicted = model.predict(x) == model.classes_[1]
    assert np.mean(predicted == labels) > 0.85


def test_the_ledger_pays_once_and_first():
    ledger = Ledger(budget=Budget(1.0, 1e-6))
    fit_linear([people()], SCHEMA, epsilon=0.9, delta=9e-7, ledger=ledger)
    assert len(ledger.history()) == 1
    with pytest.raises(BudgetExceeded):
        fit_linear([people()], SCHEMA, epsilon=0.9, delta=9e-7, ledger=ledger)


def test_a_ledger_pays_for_its_own_unit():
    columns = {"who": {"type": "person"}, "a": [0, 10], "b": ["x", "y"], "y": [-5, 15]}
    frame = people().assign(who=np.arange(4000) // 2)
    by_person = Schema(columns, target="y")
    by_class = Schema(columns, target="b")
    both = {"epsilon": 1.0, "delta": 1e-7}
    releases = [
        (SCHEMA, by_person, lambda s, ledger: fit_linear([frame], s, ledger=ledger, **both)),
        (
            Schema({k: c for k, c in columns.items() if k != "who"}, target="b"),
            by_class,
            lambda s, ledger: fit_logistic([frame], s, ledger=ledger, **both),
        ),
        (SCHEMA, by_person, lambda s, ledger: describe([frame], s, epsilon=1.0, ledger=ledger)),
        (
            SCHEMA,
            by_person,
            lambda s, ledger: count_outside([frame], s, epsilon=1.0, ledger=ledger),
        ),
    ]
    for of_records, of_persons, release in releases:
        record, person = Ledger(), Ledger(unit="person")
        release(of_records, record)
        release(of_persons, person)
        with pytest.raises(ValueError, match="protects a user"):
            release(of_persons, record)
        with pytest.raises(ValueError, match="protects one record"):
            release(of_records, person)


def test_an_automatic_choice_says_why():
    linear = fit_linear([people()], SCHEMA, epsilon=1.0, delta=1e-6)
    assert (linear.method_, "read once" in linear.reason_) == ("adassp", True)
    schema = Schema({"a": [0, 10], "b": ["x", "y"]}, target="b")
    logistic = fit_logistic([people()], schema, epsilon=1.0, delta=1e-6)
    assert "rows stay where they are" in logistic.reason_


def test_chunks_add_up_to_the_table():
    frame, grown = people(), PartialMoments(SCHEMA)
    for start in range(0, len(frame), 999):
        grown.partial_fit([frame[start : start + 999]])
    np.testing.assert_array_equal(grown.moments.gram, moments([frame], SCHEMA).gram)
    model = fit_linear(grown, SCHEMA, epsilon=8.0, delta=1e-6, random_state=0)
    assert model.coef_[0] == pytest.approx(0.5, abs=0.1)


def test_sums_at_the_limit_fit_in_64_bits():
    frame = pd.DataFrame({"a": [10.0] * 8, "b": ["x"] * 8, "y": [15.0] * 8})
    largest = int(moments([frame], SCHEMA).gram.max()) // 8
    assert largest == STEPS**2
    assert largest * 2**32 < 2**63


def test_wrong_tables_are_refused_without_quoting_them(tmp_path):
    frame = people(20)
    with pytest.raises(ValueError, match=r"lacks|no column|missing"):
        moments(frame.drop(columns="a"), SCHEMA)
    with pytest.raises(ValueError, match="declared as a number, but is text") as error:
        moments(frame.assign(a="secret"), SCHEMA)
    assert "secret" not in str(error.value)
    with pytest.raises(ValueError, match="no weights"):
        moments(
            frame,
            Schema(
                {"a": [0, 1], "y": [0, 1], "w": {"type": "weight", "lower": 0, "upper": 2}},
                target="y",
            ),
        )
    with pytest.raises(TypeError, match="a table must be"):
        moments(3, SCHEMA)
    with pytest.raises(FileNotFoundError):
        moments(tmp_path / "none.parquet", SCHEMA)
    with pytest.raises(ValueError, match="without a password"):
        moments("postgresql://ana:secret@host/db#t", SCHEMA)


def test_votes_are_one_per_teacher():
    votes = pd.DataFrame({"query": [0, 0, 0, 1, 7], "teacher": [0, 1, 1, 0, 0],
                          "label": [1, 1, 0, 2, 1]})  # fmt: skip
    expected = [[1, 1, 0], [0, 0, 1]]
    for table in (votes, [votes[:2], votes[2:]]):
        assert count_votes(table, n_queries=2, n_classes=3).tolist() == expected


def visits(n_persons=300):
    """Return a table in which person k has k % 6 + 1 records, some of them equal."""
    frame = people(n_persons * 6)
    frame["who"] = np.repeat(np.arange(n_persons), 6)
    kept = np.arange(len(frame)) % 6 <= frame["who"] % 6
    frame.loc[frame.index % 6 == 1, ["a", "b", "y"]] = [3.0, "x", 3.0]
    frame.loc[frame.index % 6 == 2, ["a", "b", "y"]] = [3.0, "x", 3.0]
    return frame[kept]


BY_PERSON = Schema({"who": "person", "a": [0, 10], "b": ["x", "y"], "y": [-5, 15]}, target="y")


@pytest.mark.parametrize("most", [1, 2, 4, 6, 100])
def test_at_most_so_many_records_of_a_person_are_kept(most):
    frame = visits()
    expected = np.minimum(frame.groupby("who").size(), most).sum()
    for table in (frame, [frame[:500], frame[500:]]):
        assert moments(table, BY_PERSON, records_per_person=most).n_rows == expected


def test_a_person_changes_no_record_of_others():
    frame = visits()
    for most in (1, 3):
        whole = moments(frame, BY_PERSON, records_per_person=most).gram
        rest = moments(frame[frame["who"] != 4], BY_PERSON, records_per_person=most).gram
        one = moments(frame[frame["who"] == 4], BY_PERSON, records_per_person=most).gram
        np.testing.assert_array_equal(whole, rest + one)


def test_several_records_of_a_person_cost_what_was_asked_for_a_person():
    frame = visits(400)
    classes = Schema({"who": "person", "a": [0, 10], "b": ["x", "y"]}, target="b")
    for fit, schema in ((fit_linear, BY_PERSON), (fit_logistic, classes)):
        ledger = Ledger(unit="person")
        options = {"epsilon": 2.0, "delta": 1e-6, "random_state": 0}
        model = fit([frame], schema, records_per_person=3, ledger=ledger, **options)
        assert ledger.event == model.event_
        assert 1.9 < epsilon(model.event_, delta=1e-6) <= 2.0
        assert model.epsilon == 2.0
    ledger = Ledger(unit="person")
    describe([frame], BY_PERSON, epsilon=1.0, records_per_person=3, ledger=ledger)
    assert epsilon(ledger.event, delta=0) <= 1.0 + 1e-9


def test_a_bound_on_records_needs_persons():
    with pytest.raises(ValueError, match="column of type person"):
        fit_linear([people()], SCHEMA, records_per_person=2, epsilon=1.0, delta=1e-6)
    with pytest.raises(ValueError, match="records_per_person"):
        moments(visits(), BY_PERSON, records_per_person=0)
