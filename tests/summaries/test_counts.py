"""Counts, histograms, contingency tables, and the check of a declaration."""

import numpy as np
import pytest

from tacit.summaries import contingency_table, count, count_outside, histogram

TERMS = {"epsilon": 1e4, "rng": 0}


def test_counts_leave_out_missing_values():
    found = count([1, None, float("nan"), "", "x"] * 100, **TERMS)
    assert (found.value, found.lower, found.upper) == (200, 200, 200)


def test_bins_include_their_lower_edge_and_the_last_one_both():
    found = histogram([0, 1, 2, 3, 4, 9, -5, None], bounds=(0, 4), n_bins=2, **TERMS)
    assert [row.name for row in found] == ["[0, 2)", "[2, 4]", "(missing)"]
    assert found.values.tolist() == [3, 4, 1]


def test_categories_are_compared_as_texts():
    values = [1, 1.0, "1", " 1", True, 2, None, "", "b", [1]]
    found = histogram(values, categories=[1, "b"], **TERMS)
    assert found.values.tolist() == [4, 1, 3, 2]  # True, 2 and [1] are other values


def test_how_a_value_is_read_does_not_depend_on_other_records():
    for values in ([True, 1], [1, True]):
        assert histogram(values, categories=["1"], **TERMS)["1"].value == 1


def test_contingency_tables_hold_every_pair():
    a = np.repeat(["x", "y", "?"], [30, 20, 10])
    b = np.tile(["u", "v"], 30)
    found = contingency_table(a, b, categories=(["x", "y"], ["u", "v"]), **TERMS)
    assert found.values[:-1].reshape(2, 2).tolist() == [[15, 15], [10, 10]]
    assert found["(other)"].value == 10


def test_shares_are_of_the_values_that_are_not_missing():
    values = ["a"] * 600 + ["b"] * 300 + [None] * 500
    found = histogram(values, categories=["a", "b"], about="population", **TERMS)
    assert found["a"].value == pytest.approx(2 / 3, abs=1e-3)
    assert found["a"].lower < 2 / 3 < found["a"].upper


def test_the_worst_column_is_named():
    n = 2000
    flags = {f"c{k}": np.zeros(n, bool) for k in range(20)} | {"bad": np.ones(n, bool)}
    found = count_outside(flags, epsilon=0.05, rng=0)
    assert found.column == "bad"
    assert found.is_hopeless
    assert "'bad'" in str(found)


def test_false_alarms_are_rare():
    # Half of the records are outside: the largest share that is tolerated. At 2 % false alarms, 100
    # trials have more than 9 with probability below 1e-4.
    flags = {"a": np.arange(1000) < 500, "b": np.arange(1000) >= 500}
    alarms = [
        count_outside(flags, epsilon=0.5, false_alarm=0.02, rng=k).is_hopeless for k in range(100)
    ]
    assert sum(alarms) <= 9


def test_few_records_are_never_called_hopeless_by_noise_alone():
    assert not any(
        count_outside({"a": [True] * 10}, epsilon=0.01, rng=k).is_hopeless for k in range(50)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: histogram([1], epsilon=1.0), "either bounds or categories"),
        (lambda: histogram([1], categories=[], epsilon=1.0), "at least one"),
        (lambda: histogram([1], categories=["a", "a"], epsilon=1.0), "different"),
        (lambda: histogram([1], categories="ab", epsilon=1.0), "list"),
        (lambda: histogram([1], bounds=(0, 1), n_bins=10**9, epsilon=1.0), "at most"),
        (lambda: contingency_table([1], [1, 2], categories=([1], [1]), epsilon=1.0), "record"),
        (lambda: count_outside({}, epsilon=1.0), "at least one column"),
        (lambda: count_outside({"a": [1], "b": []}, epsilon=1.0), "one value for each record"),
        (lambda: count_outside({"a": [1]}, false_alarm=0.7, epsilon=1.0), "false_alarm"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
