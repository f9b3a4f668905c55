"""Pages of tables list columns with their declared bounds and categories."""

import pytest

from tacit.datasets import Column
from tacit.report.declared_columns import column_in_words, columns_section


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (Column(name="a", lower=0, upper=1.5), "number from 0 to 1.5"),
        (Column(name="a", lower=0, upper=4, step=1), "number from 0 to 4 in steps of 1"),
        (Column(name="a", at_least=3), "whether the number is at least 3"),
        (Column(name="a", categories=("x", "y")), "one of x, y"),
        (Column(name="a", type="ordered", categories=("x", "y")), "one of, in this order, x, y"),
        (Column(name="a", type="boolean"), "true or false"),
        (Column(name="a", type="ignored"), "not used"),
        (Column(name="a", type="person"), "names the person whose record it is"),
        (Column(name="a", type="weight", lower=0, upper=9), "weight of the record, from 0 to 9"),
        (
            Column(name="a", lower=0, upper=1, missing=0.5, outside="missing"),
            "number from 0 to 1; a missing value becomes 0.5; other values count as missing",
        ),
    ],
)
def test_a_column_is_described_by_its_domain(column, words):
    assert column_in_words(column) == words


def test_a_recipe_of_a_table_has_a_section_with_its_target_and_derived_features():
    schema = {
        "target": "income",
        "columns": {"age": {"lower": 17, "upper": 90}, "income": {"categories": ["low", "high"]}},
        "derived": [{"name": "old", "column": "age", "at_least": 65}],
    }
    (section,) = columns_section({"data": {"schema": schema}})
    assert dict(section.rows) == {
        "age": "number from 17 to 90",
        "income (target)": "one of low, high",
        "old (derived)": "whether age is at least 65",
    }
    assert columns_section({"data": {"name": "digits"}}) == ()
    assert columns_section({}) == ()
