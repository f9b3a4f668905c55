"""Sweeps, teachers, shadow models and tuning on Dask give what they give in process."""

import time

import numpy as np
import pytest

from tacit.experiments import RunFolder

distributed = pytest.importorskip("distributed", reason="dask is not installed")
joblib = pytest.importorskip("joblib")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def dask():
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as c,
        distributed.Client(c),
    ):
        yield


def on_dask():
    return joblib.parallel_config("dask")


def test_a_sweep(dask, tmp_path):
    from tacit.experiments import Recipe, sweep

    recipe = Recipe.parse("[training]\nepochs = 1\n[run]\nseed = 3\nbaseline_steps = 0")
    options = {"epsilons": [1.0, 3.0], "repeats": 1}
    started = time.perf_counter()
    alone = sweep(recipe, tmp_path / "alone", **options)
    between = time.perf_counter()
    with on_dask():
        spread = sweep(recipe, tmp_path / "spread", jobs=2, **options)
    print(
        f"sweep: {between - started:.1f} s in process, {time.perf_counter() - between:.1f} on Dask"
    )
    for one, other in zip(alone.cells, spread.cells, strict=True):
        first, second = (RunFolder(place / one.folder) for place in
                         (tmp_path / "alone", tmp_path / "spread"))  # fmt: skip
        assert one.folder == other.folder
        assert (first / "model.safetensors").read_bytes() == (
            second / "model.safetensors"
        ).read_bytes()
        assert first.facts().event == second.facts().event


def test_teachers_of_pate(dask):
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    from tacit.pate import PATEClassifier

    X, y = load_digits(return_X_y=True)
    X = X / 16
    options = {"n_teachers": 40, "n_queries": 60, "epsilon": 8.0, "delta": 1e-5, "rng": 0}
    started = time.perf_counter()
    alone = PATEClassifier(LogisticRegression(max_iter=200), **options)
    alone.fit(X[:1200], y[:1200], X[1200:])
    between = time.perf_counter()
    spread = PATEClassifier(LogisticRegression(max_iter=200), n_jobs=2, **options)
    with on_dask():
        spread.fit(X[:1200], y[:1200], X[1200:])
    print(
        f"PATE: {between - started:.1f} s in process, {time.perf_counter() - between:.1f} on Dask"
    )
    np.testing.assert_array_equal(alone.labels_, spread.labels_)
    np.testing.assert_array_equal(alone.predict(X[1200:]), spread.predict(X[1200:]))
    assert len(spread.ledger_.history()) == len(alone.ledger_.history())  # paid by the driver


def shadow(members, seed):
    rng = np.random.default_rng(seed)
    return members * 1.0 + rng.random(len(members))


def test_shadow_models(dask):
    from tacit.auditing import train_shadows

    alone = train_shadows(shadow, 50, n_models=8, rng=0)
    with on_dask():
        spread = train_shadows(shadow, 50, n_models=8, rng=0, n_jobs=2)
    np.testing.assert_array_equal(alone.scores, spread.scores)
    np.testing.assert_array_equal(alone.is_member, spread.is_member)


def test_tuning(dask):
    from tacit.regression import LogisticRegression
    from tacit.tuning import PrivateSearch

    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (800, 3))
    y = (X @ [2.0, -1.0, 0.0] > 0).astype(int)
    found = []
    for n_jobs in (1, 2):
        model = LogisticRegression(bounds=(-1, 1), classes=[0, 1])
        search = PrivateSearch(
            model, {"l2": [0.001, 0.1, 1.0]}, epsilon=4.0, delta=1e-6, random_state=0, n_jobs=n_jobs
        )
        if n_jobs == 1:
            search.fit(X, y)
        else:
            with on_dask():
                search.fit(X, y)
        found.append(search.best_estimator_.coef_)
    np.testing.assert_array_equal(found[0], found[1])
