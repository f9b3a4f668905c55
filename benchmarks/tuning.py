"""What a private search costs and what it finds.

    python benchmarks/tuning.py adult | tables | fashion | fashion-recipe

*adult*: logistic DP-SGD on a9a at a total epsilon of 0.3 (delta 1e-6), from 48 configurations: 8
learning rates over 3.5 decades, 2 clip norms, 3 shapes of run. Every configuration is trained with
the noise that the plan gives to one run, several times; searches are then simulated by drawing
runs, configurations and noisy scores as `PrivateSearch` does. A few whole searches confirm it.
*tables*: every table of the data folder at a total epsilon of 1, against the best configuration of
a grid that was chosen for free, with all of epsilon in one run.
*fashion*: one whole search on Fashion-MNIST at a total epsilon of 3, learning rates over three
decades; *fashion-recipe*: one run of the hand-tuned recipe. Each call adds a row.
The environment variable JOBS sets how many runs or splits are computed at a time.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

import _results as results
import _tables as tables
import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.datasets import load_svmlight_file

from tacit import Ledger, datasets
from tacit.experiments import Recipe, RecipeClassifier
from tacit.regression import Bounds, LinearRegression, LogisticRegression
from tacit.tuning import (
    CoinSplit,
    PrivateSearch,
    SearchPlan,
    choose_runs,
    plan_search,
)

DELTA = 1e-6
FASHION_DELTA = 1e-5  # that of the recipe
SMALL = 20_000  # records
JOBS = int(os.environ.get("JOBS", "1"))
SHAPES = ((512, 5.0), (2048, 20.0), (8192, 40.0))
LINEAR = '[model]\nkind = "linear"\n[training]\nmomentum = 0.0\naverage = 0.0'
GRID = [
    {
        "training.learning_rate": float(rate),
        "training.clip_norm": clip,
        "training.batch_size": batch,
        "training.epochs": epochs,
    }
    for rate in np.geomspace(0.01, 0.01 * 10**3.5, 8)
    for clip in (0.5, 2.0)
    for batch, epochs in SHAPES
]


def a9a(name: str) -> tuple[Any, Any]:
    """Return records and labels of one file of Adult with binary features."""
    X, y = load_svmlight_file(str(tables.DATA / "libsvm" / name), n_features=123)
    return X.toarray().astype(np.float32), y


def adult(seeds: int = 3, searches: int = 2) -> None:
    """Report the accuracy of searches on Adult at epsilon 0.3."""
    (X, y), (X_test, y_test) = a9a("a9a.gz"), a9a("a9a.t.gz")
    share, epsilon = 0.12, 0.3
    n_training = round((1 - share) * len(y))

    def model(index: int, run_epsilon: float) -> RecipeClassifier:
        made = RecipeClassifier(
            Recipe.parse('name = "adult"\n' + LINEAR), epsilon=run_epsilon, delta=DELTA
        )
        return made.set_params(**GRID[index], n_records=n_training, classes=[-1, 1])

    plan = plan_search(
        lambda x, which: tuple(model(i, x).planned(n_training).event for i in which),
        len(GRID),
        runs=choose_runs(
            len(GRID), epsilon=epsilon, delta=DELTA, n_scoring=share * len(y), holdout=share
        ),
        split=CoinSplit(share),
        epsilon=epsilon,
        delta=DELTA,
    )
    print(plan.describe(), f"noise {plan.score_noise / (share * len(y)):.2%}", flush=True)
    is_scoring = np.random.default_rng(0).random(len(y)) < share
    found = np.zeros((len(GRID), seeds, 2))
    for index in range(len(GRID)):
        for seed in range(seeds):
            made = model(index, plan.run_epsilon).fit(X[~is_scoring], y[~is_scoring])
            right = made.predict(X[is_scoring]) == y[is_scoring]
            found[index, seed] = right.sum(), made.score(X_test, y_test)
        print(index, found[index].mean(axis=0).round(4), flush=True)
    chosen = simulated(plan, found)
    accuracy = found[:, :, 1].mean(axis=1)
    rows = [
        ["one run of the search, configuration drawn blindly", f"{100 * accuracy.mean():.2f}"],
        [
            "one run of the search, best configuration chosen for free",
            f"{100 * accuracy.max():.2f}",
        ],
        ["private search, mean", f"{100 * np.mean(chosen):.2f}"],
        ["private search, lowest tenth", f"{100 * np.quantile(chosen, 0.1):.2f}"],
    ]
    base = RecipeClassifier(Recipe.parse('name = "adult"\n' + LINEAR))
    for repeat in range(searches):
        search = PrivateSearch(base, GRID, epsilon=epsilon, delta=DELTA, holdout=share).fit(X, y)
        rows.append(
            [f"one whole search ({repeat + 1})", f"{100 * search.score(X_test, y_test):.2f}"]
        )
        print(rows[-1], search.best_params_, flush=True)
    results.write(
        "tuning_adult",
        "A private search on Adult",
        ("torch", "numpy"),
        f"{plan.describe()}. {seeds} trainings of each configuration, 20,000 simulated searches.",
        results.table(["a9a, total epsilon 0.3, delta 1e-6", "test accuracy, %"], rows),
    )


def simulated(plan: SearchPlan, found: NDArray[np.float64]) -> list[float]:
    """Return the test accuracy of simulated searches.

    `found` holds, for each configuration and each training, the number of right answers on the
    scoring records and the test accuracy.
    """
    rng = np.random.default_rng(0)
    chosen = []
    for _ in range(20_000):
        draws = plan.runs.draw(len(found), rng)
        runs = found[draws, rng.integers(0, found.shape[1], len(draws))]
        noisy = runs[:, 0] + rng.normal(0, plan.score_noise, len(draws))
        chosen.append(float(runs[noisy.argmax(), 1]))
    return chosen


def numeric(frame: pd.DataFrame, target: str) -> tables.Table:
    """Return a table with indicators for text columns; bounds are its smallest and largest values.

    Such bounds are taken from the data. For this comparison they count as declared.
    """
    y = frame[target].to_numpy(np.float64)
    X = pd.get_dummies(frame.drop(columns=target), drop_first=True).to_numpy(np.float64)
    X = X[:, X.min(axis=0) < X.max(axis=0)]
    bounds = Bounds(X.min(axis=0), X.max(axis=0))
    return tables.Table(X, y, bounds, Bounds(y.min(), y.max()))


def all_tables() -> Iterator[tuple[str, tables.Table, bool]]:
    """Yield the name of each table, the table, and whether its target is a class."""
    census = tables.DATA / "census"
    yield "fertility, weeks worked", tables.fertility(), False
    yield "ACS income bin", tables.acs_income(), False
    yield "Adult, hours", tables.adult_hours(), False
    yield "Adult, income", tables.adult_income(), True
    homes = pd.read_csv(census / "california_housing_1990.csv.gz")
    yield "California housing", numeric(homes, "median_house_value"), False
    yield (
        "CPS earnings",
        numeric(pd.read_csv(census / "cps_earnings_cpssw8.csv.gz"), "earnings"),
        False,
    )
    units = pd.read_csv(census / "cps_taxunits_2012_2014.csv.gz").drop(
        columns=["e00200p", "e00200s"]
    )
    yield "CPS tax units, wages", numeric(units, "e00200"), False
    people = pd.read_csv(census / "fulton_pums5.csv.gz").select_dtypes("number")
    yield "PUMS, married", numeric(people, "married"), True
    kdd = pd.read_csv(census / "census_income_kdd_train.csv.xz").select_dtypes("number")
    yield "KDD income, numeric columns", numeric(kdd, "income"), True
    for path in sorted((tables.DATA / "uci-regression").glob("*.csv.gz")):
        if "mask" not in path.name:
            frame = pd.read_csv(path, header=None)
            yield f"UCI {path.name[:-7]}", numeric(frame, frame.columns[-1]), False


def tables_at_one(repeats: int = 9) -> None:
    """Report, for every table, a search at epsilon 1 against the best of a free grid.

    Small tables get four times as many splits, because there one split says little. The page is
    written as soon as every table has a split, and again after each further split.
    """
    every = list(all_tables())
    work = [
        (i, seed)
        for i, (_, table, _) in enumerate(every)
        for seed in range(repeats * (4 if len(table.y) < SMALL else 1))
    ]
    work.sort(key=lambda item: (item[1], len(every[item[0]][1].y)))
    pool = Parallel(n_jobs=JOBS, return_as="generator_unordered")
    found: dict[tuple[str, int], list[list[float]]] = {(n, len(t.y)): [] for n, t, _ in every}
    for i, scores in pool(
        delayed(one_table)(i, every[i][1], every[i][2], seed) for i, seed in work
    ):
        found[every[i][0], len(every[i][1].y)].append(scores)
        print(every[i][0], scores, flush=True)
        if all(found.values()):
            report_tables(found)


def report_tables(found: dict[tuple[str, int], list[list[float]]]) -> None:
    """Write a page about the scores of each (table, number of records), one list for each split."""
    rows = []
    for (name, n_records), splits in found.items():
        scores = np.array(splits)  # (splits, methods and then the search)
        best = scores[:, int(scores[:, :-1].mean(axis=0).argmax())]
        lost = best - scores[:, -1]
        error = lost.std(ddof=1) / np.sqrt(len(lost)) if len(lost) > 1 else np.nan
        is_within = "yes" if lost.mean() <= 0.01 else "no"
        values = (best.mean(), scores[:, -1].mean(), lost.mean(), error)
        rows.append(
            [name, f"{n_records:,}", str(len(lost)), *(f"{x:.4f}" for x in values), is_within]
        )
        print(rows[-1], flush=True)
    header = ["table", "records", "splits", "best of a free grid", "search", "difference",
              "standard error", "within 0.01"]  # fmt: skip
    results.write(
        "tuning_tables",
        "A private search on every table, total epsilon 1",
        ("numpy", "scikit-learn"),
        "R2, or accuracy for classes, on splits 80/20. The free grid spends all of epsilon on each "
        "method, and its best is chosen on the test rows.",
        results.table(header, rows),
    )


def one_table(i: int, table: tables.Table, has_classes: bool, seed: int) -> tuple[int, list[float]]:
    """Return the index of a table and, on one split, the scores of each method and a search."""
    grid = ("gradient", "objective") if has_classes else ("adassp", "gradient", "functional")
    X, y, X_test, y_test = tables.split(table, seed)
    common = {"bounds": table.bounds, "delta": DELTA}
    if has_classes:
        model = LogisticRegression(**common)
    else:
        model = LinearRegression(**common, target_bounds=table.target_bounds)
    alone = [clone(model).set_params(method=method, epsilon=1.0) for method in grid]
    search = PrivateSearch(model, {"method": list(grid)}, epsilon=1.0, delta=DELTA)
    return i, [one.fit(X, y).score(X_test, y_test) for one in (*alone, search)]


def fashion_search() -> None:
    """Add one whole search on Fashion-MNIST, learning rates over three decades, to the results.

    A search that was killed is continued.
    """
    recipe, dataset = fashion_task()
    ledger = results.RESULTS / "tuning_fashion.ledger"
    own = recipe.training.learning_rate
    rates = [float(own * 10**k) for k in np.linspace(-1.5, 1.5, 7)]
    search = PrivateSearch(
        RecipeClassifier(recipe, classes=range(10)),
        {"training.learning_rate": rates},
        epsilon=3.0,
        delta=FASHION_DELTA,
        holdout=0.1,
        n_records=dataset.n_records,
        ledger=Ledger(ledger),
        n_jobs=JOBS,
        progress=print,
    ).fit(dataset.x_train, dataset.y_train)
    chosen = search.best_params_.get("training.learning_rate", own)
    accuracy = search.score(dataset.x_test, dataset.y_test)
    add_fashion(f"search, chose {chosen:.3g}", accuracy, search.plan_.describe())
    ledger.unlink()


def fashion_recipe() -> None:
    """Add one run of the hand-tuned recipe, with all of epsilon 3, to the results."""
    recipe, dataset = fashion_task()
    made = RecipeClassifier(
        recipe, epsilon=3.0, delta=FASHION_DELTA, n_records=dataset.n_records
    ).fit(dataset.x_train, dataset.y_train)
    add_fashion("hand-tuned recipe", made.score(dataset.x_test, dataset.y_test), "one run")


def fashion_task() -> tuple[Recipe, datasets.Dataset]:
    """Return the recipe of Fashion-MNIST at epsilon 3, and its data."""
    return Recipe.read("fashion-mnist").for_epsilon(3.0), datasets.load(
        "fashion-mnist", data=tables.DATA
    )


def add_fashion(what: str, accuracy: float, how: str) -> None:
    """Write a line into tuning_fashion.csv and a page with all its lines."""
    path = results.RESULTS / "tuning_fashion.csv"
    new = pd.DataFrame({"run": [what], "accuracy": [round(accuracy, 4)], "how": [how]})
    new.to_csv(path, mode="a", header=not path.exists(), index=False)
    print(what, accuracy, how, flush=True)
    found = pd.read_csv(path).sort_values("run")
    is_search = found.run.str.startswith("search")
    means = [
        ["hand-tuned recipe, mean", "", f"{100 * found.accuracy[~is_search].mean():.2f}"],
        ["private search, mean", "", f"{100 * found.accuracy[is_search].mean():.2f}"],
    ]
    rows = [
        [run, how, f"{100 * accuracy:.2f}"]
        for run, accuracy, how in found.itertuples(index=False, name=None)
    ]
    results.write(
        "tuning_fashion",
        "A private search on Fashion-MNIST, total epsilon 3",
        ("torch", "numpy"),
        "Seven learning rates over three decades around that of the recipe. Every row of a search "
        "is a whole search, everything charged.",
        results.table(["Fashion-MNIST, delta 1e-5", "how", "test accuracy, %"], [*means, *rows]),
    )


PARTS = {
    "adult": adult,
    "tables": tables_at_one,
    "fashion": fashion_search,
    "fashion-recipe": fashion_recipe,
}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
