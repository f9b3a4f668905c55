"""Seeded fits of every estimator, and summaries, as arrays of float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from _smooth_sensitivity import Sanitizer, publish_cost
from scipy.sparse import csr_array
from sklearn.naive_bayes import GaussianNB
from sklearn.tree import DecisionTreeClassifier
from torch import nn

from tacit import local, pate, summaries
from tacit.regression import (
    Bounds,
    FrankWolfe,
    LinearRegression,
    LogisticRegression,
    PerUser,
    TransferRegression,
    fit_for_users,
)
from tacit.tuning import CheapTrials, EveryConfiguration, PrivateSearch, RandomRuns

RNG = np.random.default_rng(20)
N = 3000
X = RNG.uniform(-2, 5, (N, 3))
SLOPES = np.array([2.0, -1.0, 0.5])
Y = X @ SLOPES + 1 + RNG.normal(0, 1, N)
LABELS = (RNG.normal(3, 2, N) < Y).astype(int)
CLASSES = np.digitize(Y, [0.0, 4.0])
WEIGHTS = RNG.uniform(0, 2, N)
OWNERS = RNG.integers(0, 900, N)
WIDE = (RNG.random((N, 60)) < 0.08) * RNG.uniform(-1, 1, (N, 60))
WIDE_Y = WIDE @ np.repeat([3.0, -3.0, 0.0], [3, 3, 54]) + RNG.normal(0, 0.1, N)
BOUNDS = Bounds([-2, -2, -1], [5, 4, 5])
TARGET = Bounds(-10, 15)


def released(model: Any) -> list[Any]:
    """Return all numbers that a fitted estimator releases."""
    found = [model.coef_, model.intercept_]
    if (inference := getattr(model, "inference_", None)) is not None:
        found += [inference.estimates, inference.covariance, inference.hidden]
        found += [] if inference.residual_std is None else [inference.residual_std]
    return found


def model(**options: Any) -> LinearRegression:
    settings = {"bounds": BOUNDS, "target_bounds": TARGET, "delta": 1e-6, "random_state": 1}
    return LinearRegression(**settings | options)


def linear(*, weights: Any = None, frame: bool = False, **options: Any) -> list[Any]:
    table = pd.DataFrame(X, columns=list("abc")) if frame else X
    return released(model(**options).fit(table, Y, weights))


def logistic(y: Any = LABELS, *, weights: Any = None, table: Any = X, **options: Any) -> list[Any]:
    settings = {"bounds": BOUNDS if table is X else Bounds(-1, 1), "random_state": 2}
    return released(LogisticRegression(**settings | options).fit(table, y, weights))


def frank_wolfe(y: Any, table: Any = WIDE, **options: Any) -> list[Any]:
    settings = {"bounds": Bounds(-1, 1), "random_state": 3, "steps": 12, "epsilon": 30.0}
    if options.get("loss", "squared") == "squared":
        settings["target_bounds"] = Bounds(-8, 8)
    return released(FrankWolfe(**settings | options).fit(table, y))


def transfer(**options: Any) -> list[Any]:
    settings = {"bounds": BOUNDS, "target_bounds": TARGET, "random_state": 4}
    cut = [slice(0, 400), slice(400, 1700), slice(1700, N)]
    sources = [(X[cut[1]], Y[cut[1]]), (X[cut[2]], 3 - Y[cut[2]])]
    found = TransferRegression(**settings | options).fit(X[cut[0]], Y[cut[0]], sources=sources)
    return [*released(found), *found.alone_, found.misfits_, found.informative_, found.weight_]


def per_user(model: Any, y: Any, most: Any) -> list[Any]:
    fitted = PerUser(model, records_per_user=most).fit(X, y, users=OWNERS)
    return [fitted.predict(X[:20])]


def for_users(model: Any) -> list[Any]:
    kept = [np.flatnonzero(user == OWNERS)[:2] for user in range(900)]
    rows = np.concatenate(kept)
    return released(fit_for_users(model, 2, lambda copy: copy.fit(X[rows], Y[rows]))[0])


def search(model: Any, space: Any, y: Any, **options: Any) -> list[Any]:
    found = PrivateSearch(model, space, random_state=5, **{"epsilon": 2.0} | options).fit(X, y)
    chosen = [list(space[name]).index(value) for name, value in found.best_params_.items()]
    return [*released(found.best_estimator_), [found.best_score_, *chosen]]


def rows_of(table: Any) -> list[Any]:
    """Return the values and intervals of released statistics."""
    rows = getattr(table, "rows", None) or (table,)
    return [[row.value for row in rows], [row.lower for row in rows], [row.upper for row in rows]]


def column_table() -> dict[str, Any]:
    """Draw records, a few of them with missing, infinite and unreadable values."""
    rng, n = np.random.default_rng(6), 2000
    x = rng.normal(50, 30, n).astype(object)
    for place, odd in zip(rng.integers(0, n, 5), (None, np.nan, np.inf, "x", "17"), strict=True):
        x[place] = odd
    return {
        "x": x,
        "y": rng.uniform(0, 100, n),
        "c": rng.choice(["a", "b", "z", None, 3], n),
        "d": rng.choice(["a", "b"], n),
        "label": rng.integers(0, 2, n),
        "score": rng.random(n),
        "number": rng.integers(0, 5, n),
    }


TABLE, AB, RANGE = column_table(), ("a", "b"), (0.0, 100.0)
SCHEMA = {"x": {"lower": 0.0, "upper": 100.0, "step": 1}, "score": (0.0, 1.0), "y": None,
          "c": AB, "label": bool}  # fmt: skip
SUMMARIES: dict[str, Callable[..., Any]] = {
    "count": lambda **k: summaries.count(TABLE["x"], **k),
    "histogram": lambda **k: summaries.histogram(TABLE["x"], bounds=RANGE, n_bins=7, **k),
    "categories": lambda **k: summaries.histogram(TABLE["c"], categories=AB, **k),
    "contingency table": lambda **k: summaries.contingency_table(
        TABLE["c"], TABLE["d"], categories=(AB, AB), **k
    ),
    "mean": lambda **k: summaries.mean(TABLE["x"], bounds=RANGE, **k),
    "mean of the records": lambda **k: summaries.mean(
        TABLE["x"], bounds=RANGE, about="records", **k
    ),
    "filled mean": lambda **k: summaries.mean(TABLE["x"], bounds=RANGE, missing=20.0, **k),
    "variance": lambda **k: summaries.variance(TABLE["x"], bounds=RANGE, outside="drop", **k),
    "covariance": lambda **k: summaries.covariance(
        {"x": TABLE["x"], "y": TABLE["y"], "s": TABLE["score"]},
        bounds={"x": RANGE, "y": RANGE, "s": (0, 1)}, **k,
    ),
    "quantiles": lambda **k: summaries.quantiles(
        TABLE["x"], [0.1, 0.5, 0.9], bounds=RANGE, n_cells=64, **k
    ),
    "quantiles on a grid": lambda **k: summaries.quantiles(
        TABLE["x"], [0.25, 0.75], bounds=RANGE, step=2.5, **k
    ),
    "accuracy": lambda **k: summaries.accuracy(TABLE["c"], TABLE["d"], **k),
    "auc": lambda **k: summaries.auc(TABLE["label"], TABLE["score"], **k),
    "commonest share": lambda **k: summaries.commonest_share(TABLE["number"], n_classes=5, **k),
    "r2": lambda **k: summaries.r2(TABLE["x"], TABLE["y"], bounds=RANGE, **k),
    "mean squared error": lambda **k: summaries.mean_squared_error(
        TABLE["x"], TABLE["y"], largest_error=50.0, **k
    ),
    "log loss": lambda **k: summaries.log_loss(TABLE["label"], TABLE["score"], **k),
    "describe": lambda **k: summaries.describe(TABLE, SCHEMA, **k),
}  # fmt: skip
TERMS: dict[str, dict[str, Any]] = {
    "pure": {"epsilon": 1.0, "rng": 8},
    "approximate": {"epsilon": 3.0, "delta": 1e-6, "rng": 9},
    "replaced": {"epsilon": 3.0, "delta": 1e-6, "rng": 10, "relation": "replace_one"},
}


def summary(name: str, terms: str) -> list[Any]:
    return rows_of(SUMMARIES[name](**TERMS[terms]))


def bounds_of(**terms: Any) -> list[Any]:
    found = summaries.private_bounds(TABLE["x"], **terms)
    return [[found.lower, found.upper]]


def one_bound() -> list[Any]:
    users = [u for u in range(800) for _ in range(1 + u % 3)]
    return [[summaries.choose_bound(users, epsilon=1.0, rng=0)]]


def local_fit(loss: str) -> list[Any]:
    X_unit = np.clip(X / 5, -1, 1)
    y = LABELS if loss == "logistic" else np.clip(Y / 15, -1, 1)
    model = local.LocalSGD(epsilon=4.0, n_features=3, loss=loss).fit(X_unit, y, rng=1)
    return [model.coef_ if hasattr(model, "coef_") else model.coef, [model.intercept]]


VOTES = np.random.default_rng(4).multinomial(250, [0.5, 0.25, 0.15, 0.1], size=120)


def published_cost() -> list[Any]:
    rule, sanitizer = pate.GNMax(20.0), Sanitizer()
    labels = rule.answer(VOTES, rng=0)
    cost = publish_cost(rule, VOTES, labels, sanitizer=sanitizer, rng=1)
    return [[cost.epsilon(delta=1e-5)]]


def blobs(n: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    return rng.normal(size=(n, 4)) + 3 * np.eye(3, 4)[y], y


def pate_fit(teacher: Any, **options: Any) -> list[Any]:
    # Queries that are spread would be those of scikit-learn's k-means, which sums in any order.
    settings = {"n_teachers": 20, "queries": "first", "rng": 2}
    found = pate.PATEClassifier(teacher, **settings | options)
    found.fit(*blobs(800, 1), blobs(150, 2)[0])
    return [found.queries_, found.labels_, found.predict(blobs(60, 3)[0])]


def student() -> list[Any]:
    X, y = blobs(200, 4)
    labels = np.where(np.arange(200) % 9 == 0, y, -1)
    found = pate.SpreadStudent(n_landmarks=50).fit(X, labels)
    return [found.predict_proba(blobs(40, 5)[0])]


def stacked() -> list[Any]:
    """Return the votes of teachers in a stack: private, yet what all answers follow from."""
    X, y = blobs(400, 6)
    torch.manual_seed(0)
    training = pate.TeacherTraining(steps=20, batch_size=16, learning_rate=0.05)
    teachers = pate.train_stacked_teachers(
        lambda: nn.Linear(4, 3), X, y, 8, n_classes=3, training=training, rng=3
    )
    return [pate.count_votes(teachers, blobs(60, 7)[0], 3)]


SPACE = {"method": ["adassp", "gradient", "functional"]}
FITS: dict[str, Callable[[], list[Any]]] = {
    "linear/auto": linear,
    "linear/auto, strong": partial(linear, epsilon=8.0),
    "linear/auto, weak": partial(linear, epsilon=0.05),
    "linear/auto, weights": partial(linear, weights=WEIGHTS, max_weight=2.0),
    "linear/auto, names": partial(linear, frame=True),
    "linear/auto, no intercept": partial(linear, fit_intercept=False),
    "linear/auto, replaced": partial(linear, relation="replace_one"),
    "linear/auto, ridge": partial(linear, l2=5.0),
    "linear/auto, lasso": partial(linear, l1=40.0),
    "linear/auto, declared size": partial(linear, n_records=2500),
    "linear/functional": partial(linear, method="functional"),
    "linear/functional, pure": partial(linear, method="functional", delta=None),
    "linear/functional, replaced": partial(linear, method="functional", relation="replace_one"),
    "linear/adassp": partial(linear, method="adassp"),
    "linear/adassp, published": partial(linear, method="adassp", analysis="published"),
    "linear/adassp, strong": partial(linear, method="adassp", epsilon=8.0),
    "linear/gradient": partial(linear, method="gradient", epsilon=2.0),
    "logistic/auto": logistic,
    "logistic/auto, classes": partial(logistic, CLASSES),
    "logistic/auto, wide": partial(logistic, (WIDE_Y > 0).astype(int), table=csr_array(WIDE)),
    "logistic/gradient": partial(logistic, method="gradient", epsilon=3.0),
    "logistic/gradient, weights": partial(
        logistic, method="gradient", weights=WEIGHTS, max_weight=2.0
    ),
    "logistic/gradient, replaced": partial(logistic, method="gradient", relation="replace_one"),
    "logistic/gradient, ridge": partial(logistic, method="gradient", l2=5.0),
    "logistic/gradient, lasso": partial(logistic, method="gradient", l1=20.0),
    "logistic/gradient, no intercept": partial(logistic, method="gradient", fit_intercept=False),
    "logistic/objective": partial(logistic, method="objective"),
    "logistic/objective, strong": partial(logistic, method="objective", epsilon=8.0),
    "logistic/descent": partial(logistic, method="descent"),
    "logistic/descent, sparse": partial(
        logistic, (WIDE_Y > 0).astype(int), table=csr_array(WIDE), method="descent", epsilon=4.0
    ),
    "frank wolfe/squared": partial(frank_wolfe, WIDE_Y),
    "frank wolfe/squared, replaced": partial(frank_wolfe, WIDE_Y, relation="replace_one"),
    "frank wolfe/squared, published": partial(frank_wolfe, WIDE_Y, analysis="published"),
    "frank wolfe/squared, radius": partial(frank_wolfe, WIDE_Y, radius=6.0, steps=None),
    "frank wolfe/logistic": partial(frank_wolfe, WIDE_Y > 0, loss="logistic"),
    "frank wolfe/logistic, no intercept": partial(
        frank_wolfe, WIDE_Y > 0, loss="logistic", fit_intercept=False
    ),
    "frank wolfe/sparse, squared": partial(frank_wolfe, WIDE_Y, csr_array(WIDE)),
    "frank wolfe/sparse, logistic": partial(
        frank_wolfe, WIDE_Y > 0, csr_array(WIDE), loss="logistic"
    ),
    "frank wolfe/vertices": partial(
        frank_wolfe, WIDE_Y, vertices=3 * np.vstack([np.eye(60), -np.eye(60)]), radius=None
    ),
    "transfer/auto": transfer,
    "transfer/declared": partial(transfer, h=0.5),
    "transfer/sparse": partial(transfer, h=1.0, q=1),
    "transfer/penalty": partial(transfer, penalty=0.01),
    "transfer/few features": partial(transfer, max_features=2),
    "transfer/shared people": partial(transfer, disjoint=False, source_epsilon=[0.5, 2.0]),
    "per user/linear": partial(
        per_user,
        model(epsilon=2.0), Y, 2,
    ),
    "per user/linear, private bound": partial(
        per_user,
        model(epsilon=4.0), Y,
        "private",
    ),
    "per user/logistic": partial(
        per_user, LogisticRegression(bounds=BOUNDS, random_state=1, epsilon=4.0), LABELS, 3
    ),
    "per user/fit for users": partial(
        for_users, model()
    ),
    "search/linear": partial(
        search, model(random_state=None), SPACE, Y,
        runs=EveryConfiguration(),
    ),
    "search/linear, random": partial(
        search, model(random_state=None), SPACE, Y,
        runs=RandomRuns(mean=2.0, most=4), epsilon=6.0,
    ),
    "search/logistic": partial(
        search, LogisticRegression(bounds=BOUNDS), {"method": ["gradient", "objective"]}, LABELS,
        runs=EveryConfiguration(), holdout=400,
    ),
    "search/cheap trials": partial(
        search, LogisticRegression(bounds=BOUNDS), {"l2": [1.0, 100.0]}, LABELS,
        runs=CheapTrials(), epsilon=3.0,
    ),
    "summary/private bounds": partial(bounds_of, epsilon=1.0, rng=0),
    "summary/private bounds, approximate": partial(bounds_of, epsilon=1.0, delta=1e-6, rng=1),
    "summary/records of a person": one_bound,
    "local/logistic": partial(local_fit, "logistic"),
    "local/squared": partial(local_fit, "squared"),
    "pate/gnmax": partial(pate_fit, GaussianNB(), n_queries=40, aggregator=pate.GNMax(5.0)),
    "pate/confident": partial(
        pate_fit, GaussianNB(), n_queries=40,
        aggregator=pate.ConfidentGNMax(threshold=12, sigma_threshold=4, sigma_answer=3),
    ),
    "pate/laplace": partial(
        pate_fit, GaussianNB(), n_queries=30, aggregator=pate.LaplaceMax(4.0), student=GaussianNB()
    ),
    "pate/budget": partial(pate_fit, GaussianNB(), epsilon=3.0, delta=1e-5, n_teachers=40),
    "pate/trees": partial(
        pate_fit, DecisionTreeClassifier(max_depth=3), n_queries=30, aggregator=pate.GNMax(5.0),
    ),
    "pate/student": student,
    "pate/stacked teachers": stacked,
    "pate/published cost": published_cost,
}  # fmt: skip
CASES = {f"fits/{name}": fit for name, fit in FITS.items()}
CASES |= {
    f"fits/summary/{name}/{terms}": partial(summary, name, terms)
    for name in SUMMARIES
    for terms in TERMS
}
