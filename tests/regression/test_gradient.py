"""Noisy descent on sparse and wide tables: sensitivity, equal models, and what a model reaches."""

import numpy as np
import pytest
from recorded_releases import recorded_releases
from scipy.sparse import csr_array, random_array
from sklearn.metrics import roc_auc_score

from tacit.events import Relation
from tacit.mechanisms import GaussianMechanism, generator
from tacit.regression import Bounds, LogisticRegression, gradient
from tacit.regression.gradient import WideRows

BUDGET = {"epsilon": 1.0, "delta": 1e-6, "relation": Relation.ADD_REMOVE}


def texts(rows=3000, columns=5000, seed=0):
    """Return sparse rows of presence, of very different lengths, and labels from ten columns."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 60, rows)
    common = (columns * rng.random(counts.sum()) ** 3).astype(int)
    X = csr_array((np.ones(len(common)), (np.repeat(np.arange(rows), counts), common)),
                  shape=(rows, columns))  # fmt: skip
    X.sum_duplicates()
    X.data[:] = 1.0
    score = X[:, [0, 1, 2, 3, 4]].sum(axis=1) - X[:, [5, 6, 7, 8, 9]].sum(axis=1)
    return X, (score + rng.normal(0, 0.5, rows) > 0).astype(float)


def values_released(monkeypatch, X, y, plan, outputs):
    """Return the exact values of a fit; releases return `outputs`, or are stored there if empty."""
    with recorded_releases(monkeypatch, outputs) as seen:
        rows = WideRows(X, Bounds(0, 1).box(X.shape[1], is_centered=False), y)
        gradient.fit_descent(rows, plan, largest_norm=20.0, n_records=300, rng=generator(0))
    return seen


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(
    "extreme", [np.ones(400), np.full(400, 1e9), np.eye(400)[0], np.zeros(400)]
)
def test_one_record_changes_no_release_by_more_than_its_sensitivity(monkeypatch, extreme, classes):
    X, y = texts(300, 400)
    y = np.arange(300) % classes * 1.0
    plan = gradient.plan_descent(n_classes=classes, n_records=300, **BUDGET)
    outputs = []
    exact = values_released(monkeypatch, X, y, plan, outputs)
    assert len(exact) == 1 + plan.steps
    dense = np.vstack([X.toarray(), np.broadcast_to(extreme, 400)])
    for table in (dense, csr_array(dense)):
        added = values_released(monkeypatch, table, np.append(y, 1.0), plan, outputs)
        replaced = values_released(monkeypatch, table[1:], np.append(y[1:], 1.0), plan, outputs)
        for one, second, third in zip(exact, added, replaced, strict=True):
            assert np.linalg.norm(one - second) <= 1 + 1e-9
            assert np.linalg.norm(one - third) <= 2 * (1 + 1e-9)


def test_sparse_and_dense_rows_give_the_same_model():
    X, y = texts(500, 300)
    models = [
        LogisticRegression(method="descent", bounds=Bounds(-1, 1), random_state=0).fit(table, y)
        for table in (X, X.toarray())
    ]
    np.testing.assert_allclose(models[0].coef_, models[1].coef_, atol=1e-7)
    np.testing.assert_allclose(models[0].predict_proba(X), models[1].predict_proba(X.toarray()))


def test_auto_takes_sparse_and_wide_tables():
    X, y = texts()
    model = LogisticRegression(epsilon=1.0, bounds=(0, 1), random_state=0).fit(X, y)
    assert model.method_ == "descent"
    assert roc_auc_score(y, model.decision_function(X)) > 0.8
    wide = LogisticRegression(epsilon=1.0, bounds=(0, 1), random_state=0)
    assert wide.fit(X[:200].toarray(), y[:200]).method_ == "descent"
    with pytest.raises(TypeError, match="dense data is required"):
        LogisticRegression(bounds=(0, 1), method="gradient").fit(X, y)
    with pytest.raises(ValueError, match="dense table of at most"):
        LogisticRegression(bounds=(0, 1), method="gradient").fit(X[:200].toarray(), y[:200])
    with pytest.raises(ValueError, match="no weights"):
        LogisticRegression(bounds=(0, 1), max_weight=1.0).fit(X, y, np.ones(len(y)))


def test_rows_are_cut_at_their_median():
    """1,000 rows: the noise of the histogram is below 10 with probability above 0.999."""
    mechanism = GaussianMechanism(1.0, l2_sensitivity=1.0)
    norms = np.r_[np.full(400, 0.01), np.full(600, 0.3)]
    inside = (norms[:, None] <= gradient._LEVELS).sum(axis=0) * 1.0
    assert gradient._release_median(inside, mechanism, generator(0)) == pytest.approx(2**-1.5)
    none = gradient._release_median(0 * inside, mechanism, generator(0))
    assert 0 < none <= 1


@pytest.mark.slow
def test_eleven_thousand_rows_of_54_000_columns_take_seconds():
    import resource
    import time

    rng = np.random.default_rng(0)
    X = random_array((11_000, 54_000), density=0.002, rng=rng, format="csr")
    y = (X[:, :50].sum(axis=1) > 0.03).astype(int)
    start = time.perf_counter()
    LogisticRegression(epsilon=8.0, bounds=(0, 1), random_state=0).fit(X, y)
    assert time.perf_counter() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20  # KiB
