"""Real tables with bounds from their codebooks: public facts, none taken from the records."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tacit.regression import Bounds

DATA = Path(os.environ.get("TACIT_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


class Table(NamedTuple):
    """Features and target with their declared bounds."""

    X: NDArray[np.float64]
    y: NDArray[np.float64]
    bounds: Bounds
    target_bounds: Bounds


def split(table: Table, seed: int) -> tuple[NDArray[np.float64], ...]:
    """Train and test rows, 80/20: X, y, X_test, y_test."""
    order = np.random.default_rng(seed).permutation(len(table.y))
    cut = len(order) * 4 // 5
    train, test = order[:cut], order[cut:]
    return table.X[train], table.y[train], table.X[test], table.y[test]


def fertility() -> Table:
    """Weeks worked by mothers of two or more, US census 1980."""
    frame = pd.read_csv(DATA / "census" / "fertility_us1980.csv.gz")
    flags = ["morekids", "afam", "hispanic", "other"]
    X = np.column_stack(
        [frame[name] == "yes" for name in flags]
        + [frame[name] == "male" for name in ("gender1", "gender2")]
        + [frame["age"]]
    ).astype(np.float64)
    return Table(
        X,
        frame["work"].to_numpy(np.float64),
        Bounds([0] * 6 + [21], [1] * 6 + [35]),  # women aged 21 to 35
        Bounds(0, 52),  # weeks in a year
    )


def acs_income() -> Table:
    """Income, in 20 bins, of persons of the American Community Survey; codes as numbers."""
    frame = pd.read_csv(DATA / "census" / "acs_income_binned.csv.gz")
    ranges = {
        "AGEP": (17, 94), "COW": (0, 8), "SCHL": (0, 23), "MAR": (0, 4), "RELP": (0, 17),
        "WKHP": (0, 98), "SEX": (0, 1), "RAC1P": (0, 8),
    }  # fmt: skip
    return Table(
        frame[list(ranges)].to_numpy(np.float64),
        frame["PINCP"].to_numpy(np.float64),
        Bounds(*zip(*ranges.values(), strict=True)),
        Bounds(0, 19),
    )


ADULT = [
    "age", "workclass", "fnlwgt", "education", "education_num", "marital", "occupation",
    "relationship", "race", "sex", "gain", "loss", "hours", "country", "income",
]  # fmt: skip


def _adult() -> pd.DataFrame:
    options = {"header": None, "names": ADULT, "skipinitialspace": True}
    train = pd.read_csv(DATA / "adult" / "adult.data.gz", **options)
    test = pd.read_csv(DATA / "adult" / "adult.test.gz", skiprows=1, **options)
    frame = pd.concat([train, test], ignore_index=True)
    return frame.assign(income=frame["income"].str.startswith(">50K").astype(int))


def adult_hours() -> Table:
    """Hours worked a week from 12 attributes; categories as the number of their name, sorted."""
    frame = _adult()
    ranges = {
        "age": (17, 90), "workclass": (0, 8), "education_num": (1, 16), "marital": (0, 6),
        "occupation": (0, 14), "relationship": (0, 5), "race": (0, 4), "sex": (0, 1),
        "gain": (0, 99_999), "loss": (0, 4356), "country": (0, 41), "income": (0, 1),
    }  # fmt: skip
    columns = [
        frame[name] if pd.api.types.is_numeric_dtype(frame[name])
        else pd.Categorical(frame[name]).codes
        for name in ranges
    ]  # fmt: skip
    return Table(
        np.column_stack(columns).astype(np.float64),
        frame["hours"].to_numpy(np.float64),
        Bounds(*zip(*ranges.values(), strict=True)),
        Bounds(1, 99),
    )


def adult_income() -> Table:
    """Income above 50,000 dollars from 12 attributes, each one-hot; numbers in round bins."""
    frame = _adult()
    bins = {
        "age": [20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70],
        "hours": [20, 30, 35, 40, 41, 45, 50, 55, 60],
        "gain": [1, 3000, 5000, 7000, 10_000, 20_000],
        "loss": [1, 1500, 1700, 1900, 2100],
    }
    groups = [pd.Series(np.digitize(frame[name], edges)) for name, edges in bins.items()]
    groups += [
        frame[name]
        for name in (
            "workclass", "education_num", "marital", "occupation", "relationship", "race", "sex",
        )
    ]  # fmt: skip
    groups.append(frame["country"] == "United-States")
    X = np.hstack([pd.get_dummies(group).to_numpy(np.float64) for group in groups])
    # Each group has exactly one 1: the norm of a row is the square root of their number.
    bounds = Bounds(0, 1, norm=len(groups) ** 0.5)
    return Table(X, frame["income"].to_numpy(np.float64), bounds, Bounds(0, 1))
