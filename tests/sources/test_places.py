"""Tables that are odd, damaged or misused give the same integers in every place, or are refused."""

from decimal import Decimal
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pytest
from engine_cases import as_pandas

from tacit.datasets import Schema
from tacit.sources import (
    PartialMoments,
    count_outside,
    count_votes,
    fit_linear,
    fit_logistic,
    moments,
)

pq = pytest.importorskip("pyarrow.parquet")
LINE = Schema({"x": [0, 10], "y": [0, 1]}, target="y")
PERSONS = Schema({"p": "person", "x": [0, 1], "y": [0, 1]}, target="y")
SECRET = "4085-secret"


def line(**columns):
    return pa.table({"y": [0.25, 0.5], **columns})


def places_of(table: pa.Table, folder) -> dict:
    """Return the table in every place that needs no server."""
    polars, duckdb = pytest.importorskip("polars"), pytest.importorskip("duckdb")
    file, database = folder / f"{uuid4().hex}.parquet", folder / f"{uuid4().hex}.db"
    pq.write_table(table, file)
    with duckdb.connect(str(database)) as connection:
        connection.register("arrow", table)
        connection.execute("CREATE TABLE t AS FROM arrow")
    return {
        "chunks": [table.slice(0, 3), table.slice(3)],
        "pyarrow": table,
        "pandas": as_pandas(table),
        "polars": polars.from_arrow(table).lazy(),
        "parquet": file,
        "duckdb": f"duckdb:{database}#t",
    }


def same_moments(table: pa.Table, schema: Schema, folder, *, leaving_out=(), **options):
    found = {
        name: moments(place, schema, **options).gram.tolist()
        for name, place in places_of(table, folder).items()
        if name not in leaving_out
    }
    assert found == dict.fromkeys(found, found["chunks"])
    return found["chunks"]


NUMBERS = {
    "integers": pa.array([2**53 + 1, -(2**63), 2**63 - 1, 0, None, 7], pa.int64()),
    "unsigned": pa.array([2**64 - 1, 0, 5, None, 1, 7], pa.uint64()),
    "floats": pa.array([np.nan, np.inf, -np.inf, -0.0, None, 5e-324], from_pandas=False),
    "truths": pa.array([True, False, None, True, False, None]),
    "blanks": pa.array(["7", "\xa07", "7\u2003", "\x1c7\x85", "\u200b7", None]),
}


@pytest.mark.slow
@pytest.mark.parametrize("cells", NUMBERS.values(), ids=NUMBERS.keys())
def test_odd_cells_are_the_same_everywhere(cells, tmp_path):
    table = pa.table({"x": cells, "y": np.linspace(0, 1, 6)})
    declared = ["7", "0", "9007199254740993"] if cells.type == pa.string() else [-7, 2**53]
    for column in (declared, ["0", "7", "9007199254740993"], "boolean"):
        same_moments(table, Schema({"x": column, "y": [0, 1]}, target="y"), tmp_path)


IDS = {
    "integers": (pa.array([1, 1, 2, None, 2, 3], pa.int64()), 3),
    "no doubles": (pa.array([2**53, 2**53 + 1, 2**63 - 1, 2**63 - 2, None, 2**53], pa.int64()), 4),
    "signed zeros": (pa.array([0.0, -0.0, np.nan, None, 1.5, np.inf], from_pandas=False), 2),
    "rounded": (pa.array([2.0**53, 2.0**60, -(2.0**53), 1.0, 1.0, None]), 1),
    "texts": (pa.array(["1", " 1", "1\xa0", "NA", "1.0", None]), 2),
    "decimals": (pa.array([Decimal("1.0"), Decimal("1.5"), None] * 2, pa.decimal128(9, 1)), 2),
}


@pytest.mark.parametrize(
    ("ids", "persons"),
    [
        pytest.param(*case, id=name, marks=() if name == "no doubles" else pytest.mark.slow)
        for name, case in IDS.items()
    ],
)
def test_the_same_persons_are_counted_everywhere(ids, persons, tmp_path):
    table = pa.table({"p": ids, "x": np.linspace(0, 1, 6), "y": np.linspace(1, 0, 6)})
    refused = ("pandas",) if pa.types.is_decimal(ids.type) else ()  # pandas has no such type
    gram = same_moments(table, PERSONS, tmp_path, leaving_out=refused)
    assert gram[0][0] == persons * 2**30


def test_a_person_is_one_whatever_the_type_of_the_id_in_a_chunk():
    pandas = pytest.importorskip("pandas")
    chunks = [
        pandas.DataFrame({"p": ids, "x": [0.1, 0.2], "y": [0.0, 1.0]})
        for ids in ([1, 2], [1.0, None], ["1", "z"], [Decimal(1), Decimal("2.00")])
    ]
    assert moments(chunks, PERSONS).n_rows == 3


def test_a_column_of_mixed_objects_is_refused():
    pandas = pytest.importorskip("pandas")
    ids = [f"k{k}" for k in range(200)] + [1, 1.0, None]  # its first rows are texts
    frame = pandas.DataFrame({"p": pandas.Series(ids, dtype=object), "x": 0.5, "y": 0.5})
    assert moments(frame[:200], PERSONS).n_rows == 200
    assert moments([frame], PERSONS).n_rows == 201
    with pytest.raises(ValueError, match="neither numbers, truth values nor text"):
        moments(frame, PERSONS)


@pytest.mark.slow
def test_names_of_columns_are_only_names(tmp_path):
    odd = ["a b", 'sel"ect', "select", "日本", "x; DROP TABLE t;--", "100%s", "a.b", "`", "person",
           "hash", "c0", "z0", "?", "$1"]  # fmt: skip
    table = pa.table({name: np.linspace(k, k + 9, 6) for k, name in enumerate(odd)})
    same_moments(table, Schema({name: [0, 20] for name in odd}, target="c0"), tmp_path)
    for pattern in ("*", "^x.*$"):
        given = line(**{pattern: [1.0, 2.0], "x": [5.0, 5.0]})
        with pytest.raises(ValueError, match="read as a pattern"):
            moments(given, Schema({pattern: [0, 10], "y": [0, 1]}, target="y"))


def test_files_of_a_pattern_keep_their_values_and_have_all_columns(tmp_path):
    pytest.importorskip("duckdb")
    for name, x in (("1", [1, 2]), ("2", [1.7, 2.7])):
        pq.write_table(line(x=x), tmp_path / f"{name}.parquet")
    found = moments(tmp_path / "*.parquet", LINE)
    np.testing.assert_array_equal(found.gram, moments(line(x=[1.0, 2.0]), LINE).gram
                                  + moments(line(x=[1.7, 2.7]), LINE).gram)  # fmt: skip
    pq.write_table(line(z=[1, 2]), tmp_path / "3.parquet")
    with pytest.raises(ValueError, match="lack the column 'x'"):
        moments(tmp_path / "*.parquet", LINE)


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    folder = tmp_path / "of[1]"
    folder.mkdir()
    pq.write_table(line(x=[1.0, 2.0]), folder / "a[2].parquet")
    assert moments(folder / "a[2].parquet", LINE).n_rows == 2


def test_a_file_with_a_column_twice_is_refused(tmp_path):
    twice = pa.Table.from_arrays([pa.array([0.1, 0.2])] * 3, names=["x", "x", "y"])
    pq.write_table(twice, tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="more than one column 'x'"):
        moments(tmp_path / "t.parquet", LINE)


def test_an_error_of_an_engine_quotes_no_value(tmp_path):
    polars, duckdb = pytest.importorskip("polars"), pytest.importorskip("duckdb")
    lazy = polars.DataFrame({"x": [SECRET], "y": [1.0]}).lazy()
    file = tmp_path / "d.db"
    with duckdb.connect(str(file)) as connection:
        connection.execute("CREATE TABLE t (x VARCHAR, y DOUBLE)")
        connection.execute("INSERT INTO t VALUES (?, 1)", [SECRET])
        connection.execute("CREATE VIEW v AS SELECT x::DOUBLE AS x, y FROM t")
    for place in (lazy.with_columns(polars.col("x").cast(polars.Float64)), f"duckdb:{file}#v"):
        for use in (moments, lambda table, schema: count_outside(table, schema, epsilon=1.0)):
            with pytest.raises(ValueError, match="is not shown") as caught:
                use(place, LINE)
            assert SECRET not in str(caught.value)


@pytest.mark.slow
def test_a_server_quotes_no_value_and_compares_texts_exactly(postgres):
    psycopg = pytest.importorskip("psycopg")
    name = f"t.{uuid4().hex}"
    with psycopg.connect(postgres.url) as connection:
        connection.execute(f"CREATE COLLATION folded_{name[2:]} (provider = icu, "
                           "locale = 'und-u-ks-level2', deterministic = false)")  # fmt: skip
        connection.execute(f'CREATE TABLE "{name}" (x text, y float8, s text COLLATE '
                           f"folded_{name[2:]}, n float8)")  # fmt: skip
        connection.execute(f'INSERT INTO "{name}" VALUES (%s, 1, %s, 1.5)', [SECRET, "F"])
        connection.execute(f'CREATE VIEW "v{name}" AS SELECT x::float8 AS x, y FROM "{name}"')
    with pytest.raises(ValueError, match="is not shown") as caught:
        moments(f"{postgres.url}#v{name.replace('.', '%2E')}", LINE)
    assert SECRET not in str(caught.value)
    place = f"{postgres.url}#{name.replace('.', '%2E')}"
    texts = moments(place, Schema({"s": ["f"], "y": [0, 1]}, target="y"))
    assert texts.gram[1, 1] == 0  # "F" is no "f", though the collation of the column says so
    with pytest.raises(ValueError, match="must hold integers"):
        count_votes(place, n_queries=1, n_classes=2, query="n", teacher="x", label="y")


def test_an_iteration_that_cannot_begin_again_is_refused():
    frames = iter([line(x=[1.0, 2.0])])
    with pytest.raises(ValueError, match="1 data frames in its first pass and 0"):
        fit_linear(lambda: frames, LINE, epsilon=1.0, delta=1e-6)


@pytest.mark.parametrize("n_records", [0, -1, 1.5, True, "3", float("nan")])
def test_the_number_of_records_is_whole_and_positive(n_records):
    with pytest.raises((ValueError, TypeError), match="n_records must be a whole number"):
        fit_linear(line(x=[1, 2]), LINE, epsilon=1.0, delta=1e-6, n_records=n_records)


def test_a_table_without_records_or_columns_is_refused():
    for empty in ([], line(x=[1.0, 2.0]).slice(2)):
        with pytest.raises(ValueError, match="no records"):
            fit_linear(empty, LINE, epsilon=1.0, delta=1e-6)
    with pytest.raises(ValueError, match="no column to summarize"):
        count_outside(pa.table({"p": [1]}), Schema({"p": "person"}), epsilon=1.0)


def test_moments_are_used_with_the_schema_that_made_them():
    # Four numbers have norm 2, four categories norm 1: the noise would be half of what is needed.
    wide = PartialMoments(Schema({name: [0, 1] for name in "abcdy"}, target="y"))
    short = Schema({"q": list("abcd"), "y": [0, 1]}, target="y")
    with pytest.raises(ValueError, match="another schema"):
        fit_linear(wide, short, epsilon=1.0, delta=1e-6)


def test_bounds_that_are_too_close_for_a_grid_are_refused():
    with pytest.raises(ValueError, match="too small for a grid"):
        moments(line(x=[1.0, 2.0]), Schema({"x": [0, 5e-324], "y": [0, 1]}, target="y"))


def test_votes_with_missing_numbers_are_not_counted(tmp_path):
    votes = pa.table({"query": [0, None, 1, 1, 1], "teacher": [2**53, 1, None, 0, 2**53 + 1],
                      "label": [1, 1, 0, None, 2]})  # fmt: skip
    for name, place in places_of(votes, tmp_path).items():
        found = count_votes(place, n_queries=2, n_classes=3).tolist()
        assert found == [[0, 1, 0], [0, 0, 1]], name


def test_votes_of_other_types_are_refused_by_engines():
    votes = pa.table({"query": [0.5], "teacher": [1], "label": [1]})
    with pytest.raises(ValueError, match="'query' must hold integers"):
        count_votes(votes, n_queries=1, n_classes=2)


def test_a_row_whose_features_are_zero_gives_no_warning():
    rows = pa.table({"s": ["a", "z"], "y": [True, False]})  # "z" is no category
    schema = Schema({"s": ["a", "b"], "y": "boolean"}, target="y")
    model = fit_logistic([rows], schema, epsilon=1.0, delta=1e-6, random_state=0)
    assert np.isfinite(model.coef_).all()
