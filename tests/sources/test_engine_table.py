"""Every engine gives exactly the sums of the reference, which reads cells in Python."""

import math
from uuid import uuid4

import numpy as np
import pytest
from engine_cases import SCHEMAS, as_pandas, to_postgres, troubled_table

from tacit.sources import moments

pq = pytest.importorskip("pyarrow.parquet")
TABLE = troubled_table()


def chunks():
    return [TABLE.slice(start, 700) for start in range(0, len(TABLE), 700)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param([("records", 1.5)], id="one"),
        pytest.param([("persons", math.inf)], id="persons", marks=pytest.mark.slow),
        pytest.param([(n, r) for n in SCHEMAS for r in (math.inf, 1.5)], id="all",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def reference(request):
    return {
        (name, norm): moments(chunks, SCHEMAS[name], row_norm=norm).gram
        for name, norm in request.param
    }


def same_in(place, reference):
    for (name, norm), expected in reference.items():
        found = moments(place, SCHEMAS[name], row_norm=norm).gram
        np.testing.assert_array_equal(found, expected, err_msg=f"{name}, row norm {norm}")


def test_the_reference_is_the_encoding_of_the_schema():
    schema = SCHEMAS["records"]
    x, y = schema.encode(TABLE)
    rows = np.column_stack([np.ones(len(x)), x, y]).astype(float)
    found = moments(chunks, schema).gram / 2**30
    np.testing.assert_allclose(found, rows.T @ rows, atol=len(x) * 2**-14)


def test_pyarrow(reference):
    same_in(TABLE, reference)


def test_pandas(reference):
    same_in(as_pandas(TABLE), reference)


@pytest.mark.slow
def test_polars_eager_lazy_and_from_a_file(reference, tmp_path):
    polars = pytest.importorskip("polars")
    pq.write_table(TABLE, tmp_path / "t.parquet")
    same_in(polars.from_arrow(TABLE), reference)
    same_in(polars.from_arrow(TABLE).lazy(), reference)
    same_in(polars.scan_parquet(tmp_path / "t.parquet"), reference)


def test_a_parquet_file_with_and_without_duckdb(reference, tmp_path, monkeypatch):
    import tacit.sources.places as places

    pq.write_table(TABLE, tmp_path / "t.parquet", row_group_size=500)
    same_in(tmp_path / "t.parquet", reference)
    monkeypatch.setattr(places, "_duckdb_connection", lambda *_: None)
    same_in(tmp_path / "t.parquet", reference)


@pytest.mark.slow
def test_duckdb_tables_and_views_of_files(reference, tmp_path):
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    pq.write_table(TABLE, tmp_path / "t.parquet")
    with duckdb.connect(str(tmp_path / "d.db")) as connection:
        connection.register("arrow", TABLE)
        connection.execute("CREATE TABLE visits AS FROM arrow")
        connection.execute(f"CREATE VIEW seen AS FROM '{tmp_path}/t.parquet'")
        same_in(connection.sql("FROM visits"), reference)
        with pytest.raises(ValueError, match="may overlook NaN"):
            moments(connection.sql("FROM seen"), SCHEMAS["records"])
    same_in(f"duckdb:{tmp_path}/d.db#visits", reference)
    same_in(f"duckdb:{tmp_path}/d.db#main.seen", reference)


@pytest.mark.slow
def test_postgresql(reference, postgres):
    same_in(to_postgres(TABLE, postgres.url, f"visits of {uuid4().hex}"), reference)


@pytest.mark.slow
def test_dask(reference):
    dataframe = pytest.importorskip("dask.dataframe", reason="dask is not installed")
    same_in(dataframe.from_pandas(as_pandas(TABLE), npartitions=3), reference)


@pytest.mark.slow
def test_spark(reference, spark, tmp_path):
    pq.write_table(TABLE, tmp_path / "t.parquet")
    same_in(spark.read.parquet(str(tmp_path / "t.parquet")), reference)


def test_the_order_of_rows_does_not_matter(reference):
    shuffled = TABLE.take(np.random.default_rng(1).permutation(len(TABLE)))
    same_in(shuffled, reference)
    same_in([shuffled], reference)
