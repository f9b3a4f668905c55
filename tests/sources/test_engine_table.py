"""Every engine gives exactly the sums of the reference, which reads cells in Python."""

import math
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import pytest
from engine_cases import SCHEMAS, as_pandas, to_postgres, troubled_table

from tacit import Ledger
from tacit.events import Event
from tacit.regression import LinearRegression
from tacit.sources import fit_linear, moments

pq = pytest.importorskip("pyarrow.parquet")
TABLE = troubled_table()


def chunks():
    return [TABLE.slice(start, 700) for start in range(0, len(TABLE), 700)]


class Case(NamedTuple):
    schema: str
    row_norm: float = math.inf
    records_per_person: int = 1


CASES = [Case(name, norm) for name in SCHEMAS for norm in (math.inf, 1.5)]
CASES += [Case("persons", norm, most) for norm, most in ((math.inf, 2), (1.5, 2), (math.inf, 9))]
FITTED = [Case("records"), Case("persons"), Case("persons", math.inf, 2)]


class Answer(NamedTuple):
    gram: np.ndarray
    model: LinearRegression | None
    bill: Event | None


def answer(place, case: Case) -> Answer:
    """Return the statistics of a table and, for some cases, a fit to it and what it cost."""
    schema, bound = SCHEMAS[case.schema], {"records_per_person": case.records_per_person}
    gram = moments(place, schema, row_norm=case.row_norm, **bound).gram
    if case not in FITTED:
        return Answer(gram, None, None)
    ledger = Ledger(unit=schema.unit)
    model = fit_linear(
        place, schema, epsilon=1.0, delta=1e-6, ledger=ledger, random_state=0, **bound
    )
    return Answer(gram, model, ledger.event)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param([Case("records", 1.5)], id="one"),
        pytest.param([Case("persons", math.inf, 2)], id="persons", marks=pytest.mark.slow),
        pytest.param(CASES, id="all", marks=pytest.mark.slow),
    ],
)
def reference(request):
    return {case: answer(chunks, case) for case in request.param}


def same_in(place, reference):
    """Check that statistics, models and bills are those of the reference, bit by bit."""
    for case, expected in reference.items():
        found = answer(place, case)
        np.testing.assert_array_equal(found.gram, expected.gram, err_msg=str(case))
        if expected.model is not None:
            np.testing.assert_array_equal(found.model.coef_, expected.model.coef_)
            assert found.bill == expected.bill


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
