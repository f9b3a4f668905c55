"""Tables: encoded by the schema alone, one row at a time."""

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tacit import datasets
from tacit.datasets import Schema, read_columns, read_rows, read_table, with_target

SCHEMA = """
target = "income"
[columns.age]
lower = 18
upper = 90
[columns.state]
categories = ["GA", "NY"]
[columns.income]
categories = ["low", "high"]
[[derived]]
name = "is_senior"
column = "age"
at_least = 65
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text(
        "age,state,income,secret\n10,GA,low,1\n200,NY,high,2\n54,TX,low,3\n,GA,odd,4\n70,NY,high,5\n"
    )
    return path


def encoded(path, schema):
    """Features and target of the rows that have a target."""
    rows = with_target(read_rows(path, schema))
    return rows.x, rows.y


def test_numbers_are_clipped_to_the_declared_bounds_and_scaled(table):
    x, y = encoded(table, Schema.parse(SCHEMA))
    # the income of the fourth record is no declared class, so the record is left out
    assert x[:, 0].tolist() == [-1.0, 1.0, 0.0, pytest.approx(16 / 36)]
    assert x[:, 1:3].tolist() == [[1, 0], [0, 1], [0, 0], [0, 1]]
    assert x[:, 3].tolist() == [0, 1, 0, 1]
    assert y.tolist() == [0, 1, 0, 1]


def test_parquet_gives_the_same_features(table, tmp_path):
    schema = Schema.parse(SCHEMA)
    pd.read_csv(table).to_parquet(tmp_path / "people.parquet")
    whole, parquet = (encoded(one, schema)[0] for one in (table, tmp_path / "people.parquet"))
    assert np.array_equal(whole, parquet)


def test_an_added_line_moves_no_other_row_between_training_and_test(tmp_path):
    rng = np.random.default_rng(0)
    schema = Schema({"a": [0, 3], "y": ["0", "1"]}, target="y")
    lines = [f"{a},{y}" for a, y in rng.integers(0, 4, (200, 2)) % [4, 2]]
    for place in (0, 57, 200):
        for added in ("1,0", "3,1", ",1", "2,", 'x,"y', ""):
            parts = []
            for some in (lines, lines[:place] + [added] + lines[place:]):
                (tmp_path / "t.csv").write_text("\n".join(["a,y", *some]) + "\n")
                found = read_table(tmp_path / "t.csv", schema, test_share=0.4)
                parts.append([_multiset(found.x_train, found.y_train),
                              _multiset(found.x_test, found.y_test)])  # fmt: skip
            changes = [((b - a) + (a - b)).total() for a, b in zip(*parts, strict=True)]
            assert sum(changes) == (added in ("1,0", "3,1", ",1"))  # the others have no target


def _multiset(x: np.ndarray, y: np.ndarray) -> Counter:
    return Counter(map(tuple, np.column_stack([x, y]).tolist()))


def test_the_numbers_of_records_are_shares_of_the_number_of_rows(table):
    schema = Schema.parse(SCHEMA)
    first = read_table(table, schema, test_share=0.4)
    assert (first.n_records, first.n_held_out) == (3, 2)
    assert first.feature_names == ("age", "state=GA", "state=NY", "is_senior")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target = 'a'", "at least one column"),
        ("target = 'a'\n[columns.b]\nlower=0\nupper=1", "declared columns"),
        ("target = 'b'\n[columns.b]\nlower=0", "line 2: column 'b' must declare lower and upper"),
        ("target = 'b'\n[columns.b]\nlower=1\nupper=1", "lower < upper"),
        ("target = 'b'\n[columns.b]\nlower=0\nupper=1\nscale=2", "has no 'scale'"),
        ("target = 'b'\nother=1\n[columns.b]\nlower=0\nupper=1", "a schema has no 'other'"),
        (
            "target = 'b'\n[columns.b]\nlower=0\nupper=1\n[[derived]]\nname='c'",
            "'product'",
        ),
    ],
)
def test_a_wrong_schema_says_what_to_write(text, message):
    with pytest.raises(ValueError, match=message):
        Schema.parse(text)


def test_a_missing_column_is_an_error_that_shows_no_value(table):
    schema = Schema.parse("target='wealth'\n[columns.wealth]\nlower=0\nupper=1")
    with pytest.raises(ValueError, match="has no column 'wealth'"):
        read_rows(table, schema)


TARGETS = {  # a declaration, cells that are a target, and cells that are none
    "number": ({"lower": 0, "upper": 10}, ["5", "12", "-3", "inf"], ["", "NA", "odd", "nan"]),
    "strict number": ({"lower": 0, "upper": 10, "outside": "missing"}, ["5"], ["12", "-3", "?"]),
    "boolean": ({"type": "boolean"}, ["yes", "0"], ["", "perhaps", "2"]),
    "threshold": ({"at_least": 7}, ["7", "-inf"], ["", "odd"]),
    "category": ({"categories": ["a", "b"]}, ["a", "b"], ["", "c"]),
    "with a default": ({"categories": ["a", "b"], "outside": "b"}, ["a", "c"], [""]),
    "ordered": ({"type": "ordered", "categories": ["a", "b"]}, ["a", "b"], ["NULL", "c"]),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_record_without_a_target_is_left_out_and_counted(tmp_path, kind):
    declared, good, bad = TARGETS[kind]
    cells = [good[0], *bad, *good, *bad] * 3
    schema = Schema({"x": [0, 99], "y": declared}, target="y")
    x = np.arange(len(cells)) % 50
    path = tmp_path / "t.csv"
    path.write_text("x,y\n" + "".join(f"{a},{b}\n" for a, b in zip(x, cells, strict=True)))
    found = read_table(path, schema, test_share=0.4)
    assert (found.n_records + found.n_held_out, len(found.flags["y"])) == (len(cells),) * 2
    kept = np.array([cell in good for cell in cells])
    assert len(found.x_train) + len(found.x_test) == kept.sum()
    x_read, _ = encoded(path, schema)
    assert x_read[:, 0] == pytest.approx(schema.transform(pd.DataFrame({"x": x[kept]}))[:, 0])
    x_frame, y_frame = schema.encode(pd.DataFrame({"x": x, "y": cells}))
    assert len(x_frame) == len(y_frame) == kept.sum()


def test_a_declared_value_for_missing_targets_keeps_every_record(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,y\n1,\n2,9\n3,odd\n")
    schema = Schema({"x": [0, 4], "y": {"lower": 0, "upper": 10, "missing": 0}}, target="y")
    _, y = encoded(path, schema)
    assert y.tolist() == [-1, pytest.approx(0.8), -1]


def test_a_threshold_makes_two_classes_and_a_missing_number_is_none(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,income\n1,5\n2,\n3,9\n4,7\n")
    schema = datasets.Schema.parse(
        'target = "income"\n[columns.income]\nat_least = 7\n[columns.x]\nlower = 0\nupper = 4\n'
    )
    assert schema.n_classes == 2
    _, y = encoded(path, schema)
    assert y.tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match="one of the three"):
        datasets.Schema.parse('target = "a"\n[columns.a]\nat_least = 7\nlower = 0\nupper = 9\n')


ALONE = """
target = "married"
[columns.age]
lower = 0
upper = 100
[columns.zip]
categories = ["01", "02"]
[columns.veteran]
lower = 0
upper = 1
[columns.married]
categories = ["0", "1"]
"""
PEOPLE = "age,zip,veteran,married\n20,01,True,0\n30.5,02,False,1\n40,01,True,1\n"


@pytest.mark.parametrize(
    "added", ["50,02,True,", ",,,", "x,y,z,w", "1e3,1.5,2,1.0", "-1,01,true,01"]
)
def test_one_row_changes_nothing_about_how_the_others_are_read(tmp_path, added):
    schema, path = Schema.parse(ALONE), tmp_path / "people.csv"
    path.write_text(PEOPLE)
    x, y = encoded(path, schema)
    assert x[:, 1:3].tolist() == [[1, 0], [0, 1], [1, 0]]
    assert x[:, 3].tolist() == [1, -1, 1]
    assert y.tolist() == [0, 1, 1]
    path.write_text(PEOPLE + added + "\n")
    more_x, more_y = encoded(path, schema)
    np.testing.assert_array_equal(more_x[:3], x)
    np.testing.assert_array_equal(more_y[:3], y)


def test_a_missing_value_in_parquet_changes_no_other_row(tmp_path):
    schema = Schema.parse(ALONE.replace('["01", "02"]', '["1", "2"]'))
    rows = {"age": [20, 30], "zip": [1, 2], "veteran": [True, False], "married": [0, 1]}
    found = []
    for name, last in (("whole", 1), ("gap", None)):
        table = {
            column: pd.array([*values, None if last is None else type(values[0])(last)])
            for column, values in rows.items()
        }
        pd.DataFrame(table).to_parquet(tmp_path / f"{name}.parquet")
        x, y = encoded(tmp_path / f"{name}.parquet", schema)
        found.append((x[:2].tolist(), y[:2].tolist()))
    assert found[0] == found[1]
    assert found[0][1] == [0, 1]


def test_a_person_changes_at_most_one_record_also_without_an_id(tmp_path: Path) -> None:
    """A record without an id that came first would otherwise hide the next one without an id."""
    schema = Schema({"who": "person", "age": [0, 100]})
    lines = ["who,age", "NA,1", "ann,2", ",3", "ann,4", "bob,5", "1,2,3", "?,6"]
    for left_out in range(1, len(lines) + 1):
        kept = [line for k, line in enumerate(lines) if k != left_out]
        if left_out in (2, 4):  # both records of one person go
            kept = [line for line in kept if not line.startswith("ann")]
        (tmp_path / "t.csv").write_text("\n".join(kept))
        ages = {round(50 + 50 * float(x)) for (x,) in read_rows(tmp_path / "t.csv", schema).x}
        assert len(ages ^ {2, 5}) <= 1
        found = read_columns(tmp_path / "t.csv", schema)["age"]
        assert {int(age) for age in found} == ages


def test_a_table_without_any_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("who,age\nNA,1\n,2\n")
    with pytest.raises(ValueError, match=r"t\.csv has no record with the id of a person"):
        read_rows(tmp_path / "t.csv", Schema({"who": "person", "age": [0, 100]}))
