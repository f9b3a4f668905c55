"""Real tables with bounds from their codebooks: public facts, none taken from the records."""

import gzip
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.datasets import load_svmlight_file

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


def coded(
    name: str,
    target: str,
    target_bounds: tuple[float, float],
    ranges: dict[str, tuple[float, float]],
) -> Table:
    """Return columns of a census table; a category is the number of its name, sorted."""
    frame = pd.read_csv(DATA / "census" / name)
    columns = [
        frame[name]
        if pd.api.types.is_numeric_dtype(frame[name])
        else pd.Categorical(frame[name]).codes
        for name in ranges
    ]
    return Table(
        np.column_stack(columns).astype(np.float64),
        frame[target].to_numpy(np.float64),
        Bounds(*zip(*ranges.values(), strict=True)),
        Bounds(*target_bounds),
    )


def california() -> Table:
    """Median house value of block groups; ranges of the codebook, counts to the next thousand."""
    ranges = {
        "longitude": (-124.5, -114), "latitude": (32.5, 42), "housing_median_age": (0, 52),
        "total_rooms": (0, 40_000), "total_bedrooms": (0, 7000), "population": (0, 40_000),
        "households": (0, 7000), "median_income": (0, 15),
    }  # fmt: skip
    return coded("california_housing_1990.csv.gz", "median_house_value", (0, 500_001), ranges)


def cps_earnings() -> Table:
    """Earnings an hour."""
    ranges = {"gender": (0, 1), "age": (21, 64), "region": (0, 3), "education": (6, 20)}
    return coded("cps_earnings_cpssw8.csv.gz", "earnings", (0, 75), ranges)


def fulton() -> Table:
    """Income of persons in Fulton county."""
    flags = (
        "latino", "black", "asian", "married", "divorced", "uscitizen", "children", "disability",
        "militaryservice", "employed", "englishability",
    )  # fmt: skip
    ranges = {"sex": (0, 1), "age": (18, 93), "educ": (1, 16)} | dict.fromkeys(flags, (0, 1))
    return coded("fulton_pums5.csv.gz", "income", (-10_000, 750_000), ranges)


def tax_units() -> Table:
    """Wages of tax units; amounts of money are bounded by round numbers."""
    flags = ("elderly_dependents", "blind_head", "blind_spouse", "DSI")
    ranges = {
        "age_head": (0, 85), "age_spouse": (0, 85), "MARS": (1, 4), "XTOT": (1, 15),
        "nu06": (0, 10), "nu13": (0, 10), "nu18": (0, 12), "n1820": (0, 5), "n21": (0, 6),
        "n24": (0, 12), "EIC": (0, 3), "fips": (1, 56), "FLPDYR": (2012, 2014),
        "e00900p": (-150_000, 1e6), "e00900s": (-150_000, 1e6), "e02100": (-20_000, 1e6),
        "e01500": (0, 250_000), "e02300": (0, 125_000), "e02400": (0, 170_000),
        "e00300": (0, 1e6), "e00600": (0, 1e6), "ssi_ben": (0, 45_000), "snap_ben": (0, 30_000),
        "vet_ben": (0, 150_000),
    } | dict.fromkeys(flags, (0, 1))  # fmt: skip
    return coded("cps_taxunits_2012_2014.csv.gz", "e00200", (0, 1e6), ranges)


def census_weeks() -> Table:
    """Weeks worked in a year, from the census income table."""
    ranges = {
        "age": (0, 90), "class_of_worker": (0, 8), "education": (0, 16), "wage_per_hour": (0, 9999),
        "marital_status": (0, 6), "race": (0, 4), "sex": (0, 1), "capital_gains": (0, 99_999),
        "capital_losses": (0, 4608), "dividends": (0, 99_999), "num_persons_employer": (0, 6),
        "own_business": (0, 2), "veterans_benefits": (0, 2), "year": (94, 95), "income": (0, 1),
    }  # fmt: skip
    return coded("census_income_kdd_train.csv.xz", "weeks_worked", (0, 52), ranges)


UCI = (
    "yacht", "concrete", "airfoil", "wine", "skillcraft", "parkinsons", "pol", "bike", "protein",
    "keggundirected",
)  # fmt: skip


def uci(name: str) -> Table:
    """Return a table of uci-regression, without constant columns.

    It has no codebook: bounds are the ranges that its maker publishes with the data, rounded
    outward to one digit.
    """
    rows = pd.read_csv(DATA / "uci-regression" / f"{name}.csv.gz", header=None).to_numpy(np.float64)
    rows = rows[:, rows.max(axis=0) > rows.min(axis=0)]
    lower = [-_round_up(-value) for value in rows.min(axis=0)]
    upper = [_round_up(value) for value in rows.max(axis=0)]
    bounds = Bounds(lower[:-1], upper[:-1])
    return Table(rows[:, :-1], rows[:, -1], bounds, Bounds(lower[-1], upper[-1]))


def _round_up(value: float) -> float:
    if value <= 0:
        return 0.0
    digit = 10.0 ** np.floor(np.log10(value))
    return float(np.ceil(value / digit - 1e-9) * digit)


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


def labeled(table: Table, label: NDArray[np.bool_], *, keep: list[int] | None = None) -> Table:
    """Return the table with a binary target, and only the features to `keep`."""
    lower, upper = (np.asarray(side) for side in (table.bounds.lower, table.bounds.upper))
    columns = list(range(table.X.shape[1])) if keep is None else keep
    bounds = Bounds(lower[columns], upper[columns])
    return Table(table.X[:, columns], label.astype(np.float64), bounds, Bounds(0, 1))


def halved(table: Table) -> Table:
    """Return whether the target is above its median."""
    return labeled(table, table.y > np.median(table.y))


def acs_high_income(encoding: str = "numbers") -> Table:
    """Income in the upper half of the bins; `encoding` is numbers, one-hot or one-hot, norm."""
    table = acs_income()
    label = (table.y >= 10).astype(np.float64)
    if encoding == "numbers":
        return table._replace(y=label, target_bounds=Bounds(0, 1))
    lower, upper = (np.asarray(side) for side in (table.bounds.lower, table.bounds.upper))
    columns = []
    for k, (low, high) in enumerate(zip(lower, upper, strict=True)):
        if k in (0, 5):  # age and hours stay numbers
            columns.append((table.X[:, [k]] - low) / (high - low))
        else:
            columns.append((table.X[:, [k]] == np.arange(low, high + 1)).astype(np.float64))
    norm = len(columns) ** 0.5 if encoding == "one-hot, norm" else None
    return Table(np.hstack(columns), label, Bounds(0, 1, norm=norm), Bounds(0, 1))


def adult_numbers() -> Table:
    """Income above 50,000 dollars from 11 attributes as numbers."""
    table = adult_hours()
    return labeled(table, table.X[:, 11] > 0, keep=list(range(11)))


def fulton_flag(column: int) -> Table:
    """Whether a person of Fulton county is married (6) or employed (12), from the others."""
    table = fulton()
    drop = {column, 7} if column == 6 else {column}  # nobody is both married and divorced
    keep = [k for k in range(table.X.shape[1]) if k not in drop]
    return labeled(table, table.X[:, column] > 0, keep=keep)


def census_high_income() -> Table:
    """Income above 50,000 dollars in the census income table."""
    table = census_weeks()
    return labeled(table, table.X[:, 14] > 0, keep=list(range(14)))


def fertility_more() -> Table:
    """More than two children."""
    table = fertility()
    return labeled(table, table.X[:, 0] > 0, keep=list(range(1, table.X.shape[1])))


def a9a() -> Table:
    """Adult as 123 binary features, 14 attributes."""
    with gzip.open(DATA / "libsvm" / "a9a.gz") as file:
        X, y = load_svmlight_file(file, n_features=123)
    return Table(X.toarray(), (y > 0).astype(np.float64), Bounds(0, 1, norm=14**0.5), Bounds(0, 1))
