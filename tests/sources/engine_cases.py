"""A table with every kind of trouble, its schemas, and the engines that hold it."""

import math

import numpy as np
import pyarrow as pa

from tacit.datasets import Schema

COLUMNS = {
    "age": [18, 93],
    "income": [0, 3],
    "sex": ["f", "m"],
    "education": {"type": "ordered", "categories": ["low", "mid", "high"]},
    "smoker": "boolean",
    "kids": ["0", "1", "2", "3"],
    "tall": {"at_least": 1.8, "missing": True},
    "answer": "boolean",
    "tiny": [0, 1e100],
}
SCHEMAS = {
    "records": Schema(
        COLUMNS, target="income", derived=[{"name": "old", "column": "age", "at_least": 65}]
    ),
    "persons": Schema({**COLUMNS, "person": "person"}, target="income"),
    "rules": Schema(
        {
            **COLUMNS,
            "age": {"lower": 18, "upper": 93, "outside": "missing", "missing": 40.0},
            "sex": {"categories": ["f", "m"], "missing": "f", "outside": "m"},
            "smoker": {"type": "boolean", "missing": True},
        },
        target="income",
    ),
    "classes": Schema(COLUMNS, target="smoker"),
}


def troubled_table(n: int = 3000, seed: int = 0) -> pa.Table:
    """Return a table with nulls, NaN, infinities, huge and tiny numbers, and unknown texts.

    NaN and null are different values in it, which pandas cannot hold.
    """
    rng = np.random.default_rng(seed)
    age = rng.uniform(10, 100, n)
    income = age / 50 + rng.normal(0, 0.3, n)
    age[::97], age[1::211], age[2::223] = math.nan, math.inf, -math.inf
    income[3::401] = math.nan  # a column whose file statistics show neither null nor infinity
    tiny = rng.choice([0.0, 5e-324, 1e-310, 1e-200, 1e99, 1e100, 1e308], n)
    texts = {
        "sex": ["f", "m", " m\t", "x", "NA", "", "F", None],
        "education": ["low", "mid", "high ", "HIGH", "?", None],
        "answer": ["yes", "No", "TRUE", "0", "maybe", "", None],
    }
    return pa.table({
        "age": pa.array(age, mask=np.arange(n) % 53 == 0, from_pandas=False),
        "income": pa.array(income, from_pandas=False),
        **{name: pa.array(rng.choice(np.array(values, object), n).tolist(), pa.string())
           for name, values in texts.items()},
        "smoker": pa.array(rng.choice(np.array([True, False, None]), n).tolist(), pa.bool_()),
        "kids": pa.array([None if k > 5 else int(k) for k in rng.integers(0, 7, n)], pa.int64()),
        "tall": pa.array(rng.normal(1.75, 0.1, n).astype(np.float32), mask=rng.random(n) < 0.1),
        "tiny": pa.array(tiny),
        "person": pa.array([None if k % 31 == 0 else f"p{k % (n // 3)}" for k in range(n)]),
    })  # fmt: skip


def as_pandas(table: pa.Table):
    """Return the table in pandas, where NaN and null are one."""
    import pandas as pd

    kept = {pa.bool_(): pd.BooleanDtype(), pa.int64(): pd.Int64Dtype()}
    return table.to_pandas(types_mapper=kept.get)


def to_postgres(table: pa.Table, url: str, name: str) -> str:
    """Copy the table to a server and return its address."""
    import psycopg

    types = {pa.float64(): "float8", pa.float32(): "float4", pa.string(): "text",
             pa.bool_(): "boolean", pa.int64(): "int8"}  # fmt: skip
    columns = ", ".join(f'"{field.name}" {types[field.type]}' for field in table.schema)
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(f'CREATE TABLE "{name}" ({columns})')
        with cursor.copy(f'COPY "{name}" FROM STDIN') as copy:
            for row in zip(*(column.to_pylist() for column in table.columns), strict=True):
                copy.write_row(row)
    return f"{url}#{name}"
