"""One call describes a whole table within one budget."""

import json

import numpy as np
import pandas as pd
import pytest

from tacit import Budget, Ledger
from tacit.datasets import Schema
from tacit.summaries import Statistic, describe

RNG = np.random.default_rng(0)
N = 8_000
PEOPLE = {
    "age": RNG.integers(18, 91, N),
    "income": np.exp(RNG.normal(10, 0.8, N)),
    "sex": RNG.choice(["f", "m"], N),
    "smokes": RNG.random(N) < 0.2,
}
SCHEMA = {"age": (18, 90), "income": None, "sex": ["f", "m"], "smokes": bool}


@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_every_declared_column_is_described(delta, relation):
    found = describe(PEOPLE, SCHEMA, epsilon=20.0, delta=delta, relation=relation, rng=0)
    assert found["(table)", "count"].value == pytest.approx(N, abs=10)
    assert found["age", "mean"].value == pytest.approx(54, abs=1)
    assert found["age", "median"].lower <= 54 <= found["age", "median"].upper
    assert found["income", "upper bound"].value >= np.quantile(PEOPLE["income"], 0.99)
    assert found["sex", "share of f"].value == pytest.approx(0.5, abs=0.02)
    assert found["smokes", "share of True"].value == pytest.approx(0.2, abs=0.02)


def test_data_frames_and_schemas_give_the_same_as_dictionaries():
    declared = Schema.parse(
        'target = "sex"\n[columns.age]\nlower = 18\nupper = 90\n[columns.sex]\n'
        'categories = ["f", "m"]\n'
    )
    columns = {name: PEOPLE[name] for name in ("age", "sex")}
    plain = describe(columns, {"age": (18, 90), "sex": ["f", "m"]}, epsilon=1.0, rng=3)
    framed = describe(pd.DataFrame(PEOPLE), declared, epsilon=1.0, rng=3)
    assert plain.to_dict() == framed.to_dict()


def test_a_wrong_schema_stops_for_a_twentieth_of_the_budget():
    ledger = Ledger(budget=Budget(1.0))
    wrong = SCHEMA | {"sex": ["female", "male"]}
    with pytest.raises(ValueError, match=r"column 'sex'.*5 % of epsilon 1 was spent") as caught:
        describe(PEOPLE, wrong, epsilon=1.0, ledger=ledger, rng=0)
    assert "'f'" not in str(caught.value)
    assert ledger.epsilon(delta=0) <= 0.05


def test_swapped_columns_stop():
    with pytest.raises(ValueError, match="outside the declared domain"):
        describe(PEOPLE, {"age": ["f", "m"], "sex": (18, 90)}, epsilon=1.0, rng=0)


def test_settings_of_columns_are_followed():
    table = {"x": [None, 5.0, 500.0] * 1000, "c": ["a", "?", None] * 1000}
    schema = {
        "x": {"lower": 0, "upper": 10, "missing": 1.0, "outside": "missing"},
        "c": {"categories": ["a", "b"], "missing": "b", "outside": "a"},
        "id": "ignored",
        "t": {"type": "number", "at_least": 3.0},
    }
    table["t"] = [1.0, 3.0, None] * 1000
    found = describe(table, schema, epsilon=1e4, rng=0, check_share=0.0)
    assert found["x", "mean"].value == pytest.approx(3.0, abs=0.1)
    assert found["x", "count"].value == 2000
    assert found["c", "share of a"].value == pytest.approx(2 / 3, abs=0.01)
    assert found["t", "share of True"].value == pytest.approx(0.5, abs=0.01)


def test_the_table_reads_well_and_is_json():
    found = describe(PEOPLE, SCHEMA, epsilon=1.0, rng=0)
    assert "age      mean" in str(found)
    assert str(found).endswith("epsilon 1, delta 0, add_remove")
    rows = json.loads(found.to_json())["rows"]
    assert len(rows) == len(found)
    assert Statistic.from_dict(rows[1]) == found.rows[1]
    with pytest.raises(KeyError, match="more than one"):
        _ = found["mean"]


def test_rounding_never_shortens_an_interval():
    found = describe(PEOPLE, SCHEMA, epsilon=1.0, rng=0)
    for exact, rounded in zip(found, found.rounded(3), strict=True):
        assert rounded.lower <= exact.lower
        assert rounded.upper >= exact.upper


@pytest.mark.parametrize(
    "schema", [{}, 5, {"age": "text"}, {"age": (9, 1)}, {"sex": []}, {"age": {}}], ids=str
)
def test_schemas_that_declare_nothing_are_refused(schema):
    with pytest.raises((ValueError, TypeError)):
        describe(PEOPLE, schema, epsilon=1.0)


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no column 'wage'"):
        describe(PEOPLE, {"wage": (0, 1)}, epsilon=1.0)
