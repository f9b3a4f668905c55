"""The schema: declarations, and a transformer that learns nothing."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from tacit.datasets import Column, Schema
from tacit.regression import LinearRegression, LogisticRegression

COLUMNS = {
    "age": [18, 93],
    "region": ["north", "south", "west"],
    "employed": "boolean",
    "schooling": {"type": "ordered", "categories": ["none", "some", "much"], "missing": "none"},
    "name": "ignored",
    "income": {"lower": 0, "upper": 100, "missing": 0, "outside": "missing"},
}


def people(n: int = 500) -> dict[str, list]:
    rng = np.random.default_rng(1)
    age = rng.integers(10, 99, n).astype(float)
    age[::50] = np.nan
    return {
        "income": (rng.integers(0, 120, n) / 3).tolist(),
        "name": [f"Jane Doe {k}" for k in range(n)],
        "schooling": rng.choice(["none", "some", "much", "?"], n).tolist(),
        "employed": rng.choice([True, False], n).tolist(),
        "age": age.tolist(),
        "region": rng.choice(["north", "south", "west", "east"], n).tolist(),
        "y": rng.uniform(0, 1, n).tolist(),
    }


@parametrize_with_checks([Schema(default=[-10, 10])])
def test_the_schema_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("estimator", [LinearRegression, LogisticRegression])
def test_pandas_polars_and_pyarrow_give_the_same_model(estimator):
    schema, data = Schema(COLUMNS), people()
    models = []
    for make in (pd.DataFrame, pl.DataFrame, pa.table):
        options = {"epsilon": 1.0, "delta": 1e-6, "bounds": schema.bounds, "random_state": 3}
        if estimator is LinearRegression:
            options["target_bounds"] = (0, 1)
        y = np.asarray(data["y"])
        y = y if estimator is LinearRegression else y > 0.5
        model = make_pipeline(schema, estimator(**options)).fit(make(data), y)
        models.append((model[-1].coef_.tobytes(), model.predict(make(data)).tobytes()))
    assert models[0] == models[1] == models[2]


def test_missing_values_and_kinds_of_columns_are_read_alike_by_every_library():
    data = {
        "age": [30, None, 120, 18],
        "sex": ["f", None, "x", "m"],
        "ok": [True, False, None, True],
        "code": ["1", "2", "2", "1"],
        "weight": [1.5, float("nan"), 50.0, -3.0],
    }
    schema = Schema({"age": [0, 100], "sex": ["f", "m"], "ok": "boolean", "code": ["1", "2"],
                     "weight": [0, 10]})  # fmt: skip
    nullable = {
        "age": "Int64",
        "sex": "string",
        "ok": "boolean",
        "code": "Int8",
        "weight": "Float64",
    }
    frames = [
        pd.DataFrame(data),
        pd.DataFrame(data).astype(nullable),
        pd.DataFrame(data).astype({"sex": "category", "code": "category"}),
        pd.DataFrame(data).convert_dtypes(dtype_backend="pyarrow"),
        pl.DataFrame(data),
        pl.DataFrame(data).with_columns(pl.col("sex").cast(pl.Categorical)),
        pa.table(data),
        pa.table({**data, "sex": pa.array(data["sex"]).dictionary_encode()}),
        pa.concat_tables([pa.table(data).slice(0, 1), pa.table(data).slice(1)]),
    ]
    found = [schema.fit(frame).transform(frame) for frame in frames]
    assert found[0].shape == (4, 7)
    for other in found[1:]:
        assert np.array_equal(other, found[0])


def test_columns_are_found_by_name_and_others_are_ignored():
    schema, data = Schema(COLUMNS), pd.DataFrame(people())
    shuffled = data[list(reversed(data.columns))].drop(columns=["name", "y"])
    whole = schema.fit_transform(data)
    assert np.array_equal(whole, schema.transform(shuffled))
    assert whole.shape[1] == len(schema.get_feature_names_out()) == 7
    with pytest.raises(ValueError, match="has no column 'age'"):
        schema.transform(data.rename(columns={"age": "Alter"}))


def test_the_schema_works_in_a_column_transformer_with_names():
    ages, regions = Schema({"age": [18, 93]}), Schema({"region": COLUMNS["region"]})
    both = ColumnTransformer([("a", ages, ["age"]), ("r", regions, ["region"])])
    found = both.set_output(transform="pandas").fit_transform(pd.DataFrame(people()))
    assert list(found.columns) == ["a__age", "r__region=north", "r__region=south", "r__region=west"]
    together = Schema({"age": [18, 93], "region": COLUMNS["region"]})
    assert np.array_equal(found.to_numpy(), together.transform(pd.DataFrame(people())))


def test_rules_for_missing_values_and_values_outside():
    data = pd.DataFrame(
        {
            "age": [None, 200.0, -5.0, 55.5],
            "region": ["east", None, "west", " north "],
            "employed": ["yes", "maybe", None, "0"],
            "schooling": ["much", "?", "PhD", "some"],
            "income": [None, 500.0, -1.0, 100.0],
        }
    )
    rows = Schema(COLUMNS).transform(data)
    assert rows[:, 0].tolist() == [0.0, 1.0, -1.0, 0.0]
    assert rows[:, 1:4].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
    assert rows[:, 4].tolist() == [1, 0, 0, 0]
    assert rows[:, 5].tolist() == [1.0, -1.0, -1.0, 0.0]
    assert rows[:, 6].tolist() == [-1.0, -1.0, -1.0, 1.0]


def test_flags_mark_what_the_declaration_does_not_describe():
    column = Column(name="sex", categories=("f", "m"))
    assert column.flags(column.parse(("f", "x", None, "?", " m"))).tolist() == [
        False, True, True, True, False,
    ]  # fmt: skip
    ruled = Column(name="sex", categories=("f", "m"), missing="f")
    assert ruled.flags(ruled.parse(("f", "x", None, "?"))).tolist() == [False, True, False, False]


def test_the_kind_of_another_cell_changes_nothing():
    column = Column(name="code", categories=("1", "true"))
    alone = [column.parse([cell]).values[0] for cell in (1, True, "1", 1.0, "01", "True")]
    together = column.parse([1, True, "1", 1.0, "01", "True"]).values
    assert np.array_equal(alone, together, equal_nan=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[columns]\nage = ''", "line 2: column 'age' is not declared yet"),
        ("[columns]\nage = 'boolaen'", "Did you mean 'boolean'"),
        ("[columns]\nage = [1, 2, 3]", "line 2: column 'age' must list two numbers"),
        ("[columns]\nage = [93, 18]", "line 2: column 'age' must have lower < upper"),
        ("[columns]\nage = 'number'", "needs its bounds"),
        ("[columns]\nage = [0, inf]", "below 1e150"),
        ("[columns.a]\ntype='category'", "needs categories"),
        ("\n[columns.a]\ntipe='category'", "line 2: .*Did you mean 'type'"),
        ("[columns]\na=['x','x']", "differ from each other"),
        ("[columns]\na=['x', ' x']", "differ from each other"),
        ("[columns.a]\nlower='18'\nupper=93", "lower must be a number, got text"),
        ("[columns.a]\nlower=1\nupper=2\nmissing='x'", "missing must be a finite number"),
        ("[columns.a]\ncategories=['x']\nmissing='y'", "missing must be one of its categories"),
        ("[columns.a]\ncategories=['x']\noutside='clip'", "outside must be one of"),
        ("[columns]\na=[0,1]\nb='person'\nc='person'", "one column of type person"),
        ("target='b'\n[columns]\na=[0,1]\nb='person'", "cannot be of type person"),
        ("target='agee'\n[columns]\nage=[0,1]", "line 1: target 'agee'.*Did you mean 'age'"),
        ("target=3\n[columns]\nage=[0,1]", "name of a column, in quotes"),
        ("[columns]\na=[0,1]\n[file]\nseparator='::'", "separator must be one sign"),
        ("[columns]\na=[0,1]\n[file]\nseperator=';'", "Did you mean 'separator'"),
        ("[columns]\na=[0,1]\n[file]\nheader='no'", "header must be true or false"),
        ("[columns\na=1", "is not TOML.*line 1"),
        ("columns = 3", "at least one column"),
        ("derived = 3\n[columns]\na=[0,1]", "write each derived feature as"),
        ("[columns]\na=[0,1]\n[[derived]]\nname='b'\nat_least='x'", "another type"),
    ],
)
def test_errors_name_the_line_and_say_what_is_allowed(text, message):
    with pytest.raises(ValueError, match=message):
        Schema.parse(text)


def test_a_schema_is_written_and_read_back():
    import tomli_w

    schema = Schema(COLUMNS, target="income", file={"separator": ";", "missing": ["-9"]})
    again = Schema.parse(tomli_w.dumps(schema.to_dict()))
    assert again.to_dict() == schema.to_dict()
    assert again.dialect == schema.dialect
