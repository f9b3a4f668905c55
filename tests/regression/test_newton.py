"""Newton steps in whitened coordinates: sensitivity of each release, and what a model reaches."""

import numpy as np
import pytest
from recorded_releases import recorded_releases

from tacit.events import Relation
from tacit.mechanisms import generator
from tacit.regression import Bounds, newton
from tacit.regression.residual_tails import LOOKS, ResidualTails
from tacit.regression.rows import PrivateRows, from_triangle, shrink
from tacit.regression.whitening import whiten

BUDGET = {"epsilon": 1.0, "delta": 1e-6, "relation": Relation.ADD_REMOVE}


def skewed(rows=400, features=4, seed=0):
    """Return a table of very different scales, two columns nearly equal, with long tails."""
    rng = np.random.default_rng(seed)
    X = rng.exponential(size=(rows, features)) * 10.0 ** -np.arange(features)
    X[:, 1] = X[:, 0] + 1e-3 * X[:, 1]
    return X, np.clip(X @ np.linspace(-1, 1, features) + rng.standard_t(2, rows) / 3, -1, 1)


def values_released(monkeypatch, X, y, plan, outputs, weights=None, *, is_exact=True):
    """Return the exact values of a fit; releases return `outputs`, or are stored there if empty."""
    with recorded_releases(monkeypatch, outputs) as seen:
        rows = PrivateRows(X, Bounds(-2, 5).box(X.shape[1]), row_norm=plan.row_norm)
        if weights is not None:
            rows.factors *= np.sqrt(weights)
        newton.fit_newton(
            rows, y, plan, n_records=400, rng=generator(0), weights=weights, is_exact=is_exact
        )
    return seen


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 50.0])
@pytest.mark.parametrize(
    "extreme", [[5.0, 5, 5, 5], [-2.0, 5, -2, 5], [1e9, -1e9, 0, 0], [0.0, 5, 0, 0]], ids=str
)
@pytest.mark.parametrize("target", [-1.0, 1.0])
@pytest.mark.parametrize("kind", ["plain", "weighted", "counted"])
def test_one_record_changes_no_release_by_more_than_its_sensitivity(
    monkeypatch, extreme, target, epsilon, kind
):
    X, y = skewed()
    is_weighted, is_exact = kind == "weighted", kind != "counted"
    weights = np.random.default_rng(1).random(401) ** 4 if is_weighted else None
    if is_weighted:
        weights[[0, 400]] = 1.0  # of the record that goes and of the one that comes
    plan = newton.plan_newton(4, row_norm=1.6, n_records=400, **BUDGET | {"epsilon": epsilon})
    outputs = []
    old, more, other = (weights[:400], weights, weights[1:]) if is_weighted else (None, None, None)
    tables = [
        (X, y, old),
        (np.vstack([X, extreme]), np.append(y, target), more),
        (np.vstack([X[1:], extreme]), np.append(y[1:], target), other),
    ]
    exact, added, replaced = (
        values_released(monkeypatch, X, y, plan, outputs, weights, is_exact=is_exact)
        for X, y, weights in tables
    )
    has_errors = plan.errors is not None
    looks = LOOKS if plan.tails is not None else ()
    assert bool(looks) == (epsilon > 1)
    assert len(exact) == 4 + len(looks) + plan.steps + has_errors
    root = np.sqrt(2)
    steps = [2.0] * plan.steps
    for look in sorted(looks, reverse=True):
        steps.insert(look, root)
    factors = [2.0, *[root] * 3, *steps, *[root] * has_errors]
    for one, second, third, factor in zip(exact, added, replaced, factors, strict=True):
        assert np.linalg.norm(one - second) <= 1 + 1e-9
        assert np.linalg.norm(one - third) <= factor * (1 + 1e-9)


def test_badly_scaled_and_collinear_columns_do_not_hurt():
    """Excess over least squares: below 2 % with 20,000 records at epsilon 1, median of 9."""
    X, y = skewed(20_000)
    box = Bounds(0, 12).box(4)
    plan = newton.plan_newton(4, row_norm=box.row_norm, n_records=len(X), **BUDGET)
    Z = np.column_stack([np.ones(len(X)), (np.clip(X, 0, 12) - 6) / 6])
    least = np.mean((Z @ np.linalg.lstsq(Z, y, rcond=None)[0] - y) ** 2)
    rows = PrivateRows(X, box, row_norm=plan.row_norm)
    fits = [newton.fit_newton(rows, y, plan, n_records=len(X), rng=generator(k)) for k in range(9)]
    errors = [np.mean((Z @ fit.theta - y) ** 2) for fit in fits]
    assert np.median(errors) < 1.02 * least


@pytest.mark.parametrize("n_records", [20, 300])
def test_hopeless_budgets_fall_back_to_the_mean(n_records):
    X, y = skewed(n_records)
    plan = newton.plan_newton(4, row_norm=1.6, n_records=n_records, **BUDGET | {"epsilon": 0.01})
    rows = PrivateRows(X, Bounds(-2, 5).box(4), row_norm=plan.row_norm)
    for seed in range(5):
        found = newton.fit_newton(rows, y, plan, n_records=n_records, rng=generator(seed))
        assert np.isfinite(found.theta).all()
        assert abs(found.theta[0]) < 30
        assert found.uncertainty is None


def test_a_model_that_noise_hides_is_about_as_good_as_the_mean_alone():
    """With 250 records at epsilon 0.1 the released mean is all that can be known.

    It takes half of the budget, so that the noise of the mean is sqrt(2) times that of the whole.
    """
    rng = np.random.default_rng(0)
    X, y = rng.uniform(-1, 1, (250, 5)), np.full(250, 0.3)
    plan = newton.plan_newton(5, row_norm=1.7, n_records=250, **BUDGET | {"epsilon": 0.1})
    rows = PrivateRows(X, Bounds(-1, 1).box(5), row_norm=plan.row_norm)
    fits = [newton.fit_newton(rows, y, plan, n_records=250, rng=generator(k)) for k in range(40)]
    predicted = np.array([X @ fit.theta[1:] + fit.theta[0] for fit in fits])
    noise = plan.mean.noise_std / 250
    assert np.median(np.mean((predicted - 0.3) ** 2, axis=1)) < noise**2


def test_shrinking_keeps_what_agrees_and_lowers_the_error_of_the_rest():
    """James and Stein: a noisy matrix comes nearer to the exact one, in the mean of 200 draws."""
    rng = np.random.default_rng(0)
    expected = np.diag([1.0, 0.5, 0.2])
    exact, std = 0.7 * expected + 0.02, 0.1
    same, kept = shrink(0.7 * expected, std, expected)
    np.testing.assert_allclose(same, 0.7 * expected)
    assert 0 < kept < std
    errors = []
    for _ in range(200):
        noisy = exact + from_triangle(rng.normal(0, std, 6), 3)
        moved, _ = shrink(noisy, std, expected)
        errors.append([np.sum((noisy - exact) ** 2), np.sum((moved - exact) ** 2)])
    before, after = np.mean(errors, axis=0)
    assert after < 0.5 * before


def test_an_empty_and_a_constant_table_give_a_finite_model():
    for X in (np.zeros((50, 2)), np.full((50, 2), 5.0)):
        plan = newton.plan_newton(2, row_norm=1.3, n_records=50, **BUDGET)
        rows = PrivateRows(X, Bounds(-2, 5).box(2), row_norm=plan.row_norm)
        fit = newton.fit_newton(rows, np.zeros(50), plan, n_records=50, rng=generator(0))
        assert np.isfinite(fit.theta).all()


def rare(rng, X):
    return (rng.random(len(X)) < 0.03 * (1 + X[:, 0])) * 2.0 - 1


def skewed_errors(rng, X):
    return X[:, 0] / 50 + np.minimum(rng.lognormal(0, 1.2, len(X)), 150) / 100 - 0.9


def outliers_by_features(rng, X):
    is_far = (rng.random(len(X)) < 0.02) & (X[:, 1] > 0)
    return 0.1 * X[:, 0] + 0.01 * rng.normal(size=len(X)) + 0.8 * is_far


@pytest.mark.parametrize("kind", [rare, skewed_errors, outliers_by_features])
@pytest.mark.parametrize(("epsilon", "most"), [(1.0, 1.0), (8.0, 0.1), (1000.0, 1e-3)])
def test_few_large_residuals_do_not_bias_the_model(kind, epsilon, most):
    """The excess over least squares, in percent, falls to 0 as noise does: median of 5."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (20_000, 3))
    y = kind(rng, X)
    plan = newton.plan_newton(3, row_norm=2.0, n_records=len(X), **BUDGET | {"epsilon": epsilon})
    rows = PrivateRows(X, Bounds(-1, 1).box(3), row_norm=plan.row_norm)
    Z = np.column_stack([np.ones(len(X)), X])
    least = np.mean((Z @ np.linalg.lstsq(Z, y, rcond=None)[0] - y) ** 2)
    fits = [newton.fit_newton(rows, y, plan, n_records=len(X), rng=generator(k)) for k in range(5)]
    excess = [100 * np.mean((Z @ fit.theta - y) ** 2) / least - 100 for fit in fits]
    assert np.median(excess) < most


def test_light_tails_and_noise_alone_leave_the_clip_as_it_is():
    X = np.random.default_rng(0).uniform(-1, 1, (2000, 2))
    y = 0.05 * np.random.default_rng(1).normal(size=2000)
    plan = newton.plan_newton(2, row_norm=1.8, n_records=2000, **BUDGET)
    rows = PrivateRows(X, Bounds(-1, 1).box(2), row_norm=plan.row_norm)
    for seed in range(20):
        records = whiten(
            rows, rows, y, plan.first_gram, plan.norms, weights=None, widest=2.0, total=2000.0,
            n_records=2000, fit_intercept=True, rng=generator(seed),
        )  # fmt: skip
        tails = ResidualTails(2000.0)
        for theta in np.zeros((2, 3)):
            tails.look(records, theta, plan.tails, generator(seed))
            assert tails.widened(0.25, slope=0.01) == 0.25
            assert tails.widened(0.02, slope=1e-6) > 0.05  # almost no noise: nothing is cut off


@pytest.mark.parametrize("rows_of", [0.8, 1.0, 1.5])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_declared_number_of_records_may_be_wrong(rows_of, is_weighted):
    """Records without a target are left out: what is divided by is a released count."""
    rng = np.random.default_rng(0)
    n_rows = round(20_000 * rows_of)
    X = rng.uniform(-1, 1, (n_rows, 3))
    y = 0.5 + X @ [0.1, -0.1, 0.05] + 0.03 * rng.normal(size=n_rows)
    plan = newton.plan_newton(3, row_norm=2.0, n_records=20_000, **BUDGET)
    rows = PrivateRows(X, Bounds(-1, 1).box(3), row_norm=plan.row_norm)
    weights = np.ones(n_rows) if is_weighted else None
    fits = [
        newton.fit_newton(
            rows, y, plan, n_records=20_000, rng=generator(k), is_exact=False, weights=weights
        )
        for k in range(5)
    ]
    theta = np.median([fit.theta for fit in fits], axis=0)
    np.testing.assert_allclose(theta, [0.5, 0.1, -0.1, 0.05], atol=0.002)
    assert np.median([fit.residual_std for fit in fits]) == pytest.approx(0.03, rel=0.05)
    errors = [np.sqrt(np.diag(fit.uncertainty.covariance)) for fit in fits]
    assert (np.median(errors, axis=0) < 4 * 0.03 * np.sqrt(3 / n_rows)).all()
