"""Noisy IRLS: sensitivity of each release, unbiased residuals, and what a model reaches."""

import numpy as np
import pytest
from recorded_releases import recorded_releases
from scipy.special import expit

from tacit.events import Relation
from tacit.mechanisms import GaussianMechanism, generator, secure_generator
from tacit.regression import Bounds, LogisticRegression, irls
from tacit.regression.rows import PrivateRows
from tacit.regression.whitening import WhitenedRows, draw

BUDGET = {"epsilon": 1.0, "delta": 1e-6, "relation": Relation.ADD_REMOVE}


def skewed(rows=400, classes=2, seed=0):
    """Return a table of very different scales, two columns nearly equal, with long tails."""
    rng = np.random.default_rng(seed)
    X = rng.exponential(size=(rows, 4)) * 10.0 ** -np.arange(4)
    X[:, 1] = X[:, 0] + 1e-3 * X[:, 1]
    return X, rng.integers(0, classes, rows).astype(float)


def values_released(monkeypatch, X, y, plan, outputs, weights, fit_intercept):
    """Return the exact values of a fit; releases return `outputs`, or are stored there if empty."""
    with recorded_releases(monkeypatch, outputs) as seen:
        rows = PrivateRows(X, Bounds(-2, 5).box(X.shape[1]))
        irls.fit_irls(
            rows, y, plan, n_records=400, rng=generator(0), weights=weights,
            fit_intercept=fit_intercept,
        )  # fmt: skip
    return seen


@pytest.mark.parametrize("epsilon", [0.1, 50.0])
@pytest.mark.parametrize("extreme", [[5.0, 5, 5, 5], [1e9, -1e9, 0, 0]], ids=str)
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_one_record_changes_no_release_by_more_than_its_sensitivity(
    monkeypatch, extreme, classes, epsilon, is_weighted, fit_intercept
):
    X, y = skewed(classes=classes)
    weights = np.random.default_rng(1).random(401) ** 4 if is_weighted else None
    if is_weighted:
        weights[[0, 400]] = 1.0  # of the record that goes and of the one that comes
    plan = irls.plan_irls(
        4, n_classes=classes, row_norm=1.6, n_records=400, is_weighted=is_weighted,
        **BUDGET | {"epsilon": epsilon},
    )  # fmt: skip
    outputs = []
    old, more, other = (weights[:400], weights, weights[1:]) if is_weighted else (None, None, None)
    exact = values_released(monkeypatch, X, y, plan, outputs, old, fit_intercept)
    has_errors = plan.errors is not None
    assert plan.choices == (3 if epsilon == 50.0 and classes == 2 else 0)
    n_gradients = plan.early_steps + plan.steps
    assert len(exact) == 3 + is_weighted + n_gradients + plan.choices + has_errors
    for label in (0.0, classes - 1.0):
        added = values_released(
            monkeypatch, np.vstack([X, extreme]), np.append(y, label), plan, outputs, more,
            fit_intercept,
        )  # fmt: skip
        replaced = values_released(
            monkeypatch, np.vstack([X[1:], extreme]), np.append(y[1:], label), plan, outputs, other,
            fit_intercept,
        )  # fmt: skip
        root = np.sqrt(2)
        factors = [*[1.0] * is_weighted, root, root, *[2.0] * plan.early_steps, root]
        factors += [2.0] * (plan.steps + plan.choices) + [root] * has_errors
        for one, second, third, factor in zip(exact, added, replaced, factors, strict=True):
            assert np.linalg.norm(one - second) <= 1 + 1e-9
            assert np.linalg.norm(one - third) <= factor * (1 + 1e-9)


@pytest.mark.parametrize("clip", [0.5, 0.8, 1.0])
def test_weighted_residuals_are_bounded_and_unbiased(clip):
    margins = np.linspace(-12, 12, 101)[:, None]
    p = expit(margins)
    zero, one = (irls.residuals_of(margins, np.full(101, label), clip) for label in (0.0, 1.0))
    assert max(np.abs(zero).max(), np.abs(one).max()) <= clip + 1e-12
    np.testing.assert_allclose((1 - p) * zero + p * one, 0, atol=1e-12)


def test_weighted_residuals_of_many_classes_are_bounded_and_unbiased():
    margins = np.random.default_rng(0).normal(0, 4, (200, 5))
    p = np.exp(margins) / np.exp(margins).sum(axis=1, keepdims=True)
    least, _ = irls.residual_bounds(5)
    found = [irls.residuals_of(margins, np.full(200, c), least) for c in range(5)]
    assert max(np.linalg.norm(r, axis=1).max() for r in found) <= least + 1e-12
    mean = sum(p[:, [c]] * r for c, r in enumerate(found))
    np.testing.assert_allclose(mean, 0, atol=1e-12)


def test_the_expected_hessian_is_that_of_normal_rows():
    """Mean over 400,000 simulated rows: standard errors are below 4e-4."""
    rng = np.random.default_rng(0)
    u = rng.normal(size=(400_000, 3)) * [0.8, 1, 1] + [0.6, 0, 0]  # Gram matrix 1
    theta = np.array([[0.5], [1.0], [-0.7]])
    p = expit(u @ theta)
    exact = (u * p * (1 - p)).T @ u / len(u)
    found = irls._expected_hessian(theta, np.array([0.6, 0, 0]), 1.0, 0.02)
    np.testing.assert_allclose(found, exact, atol=2e-3)


class FixedRidges:
    """A solver whose models are known: one that is always wrong, and right ones for some ridges."""

    def __init__(self, right):
        self.theta, self.right, self.chosen = np.array([0.0, -1.0]), right, 0.0

    def ridge(self, penalty):
        return -self.theta if penalty in self.right else self.theta

    def set_least_ridge(self, penalty):
        self.chosen = penalty


@pytest.mark.parametrize(("right", "chosen"), [((0.01,), 0.01), ((), 0.0)])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_ridge_that_predicts_most_records_right_is_chosen(right, chosen, is_weighted):
    """Noise of std 4 on gains of 2,000 and of 0: a wrong choice has probability 1e-1 at most."""
    X = np.random.default_rng(0).uniform(-1, 1, (2000, 1))
    rows = PrivateRows(X, Bounds(-1, 1).box(1))
    weights = np.full(2000, 0.5) if is_weighted else None
    records = WhitenedRows(
        rows=rows, targets=(X[:, 0] > 0).astype(float), weights=weights, factors=np.ones(2000),
        whitening=np.eye(2), expected=np.eye(2), limit=2.0, mean_factor=1.0, reach=1.0,
        total=2000.0,
    )  # fmt: skip
    models = np.array([[0.0, 0.0], [1.0, -1.0]])
    assert records.count_right(models).tolist() == [1000.0 if is_weighted else 2000.0, 0.0]
    solver = FixedRidges(right)
    mechanism = GaussianMechanism(2.0, l2_sensitivity=1.0, replace_factor=2.0)
    irls._choose_ridge(records, solver, mechanism, generator(0))
    assert solver.chosen == chosen


def test_noise_decides_how_often_a_ridge_is_chosen():
    """The counts of all choices share one budget, so fewer choices have less noise each."""
    terms = {"n_classes": 2, "row_norm": 1.6, **BUDGET | {"epsilon": 1.0, "delta": 1e-6}}
    sizes = (2_000, 4_700, 6_500, 20_000)
    plans = [irls.plan_irls(4, **terms, n_records=n) for n in sizes]
    assert [plan.choices for plan in plans] == [0, 1, 2, 3]
    for n, plan in zip(sizes[1:], plans[1:], strict=True):
        assert plan.choice is not None
        noise = plan.choice.noise_std * np.sqrt(len(irls._RIDGES)) / n
        assert noise <= 1.05 * irls._CHOICE_NOISE  # all shares together are slightly above 1


def test_a_penalty_of_the_user_leaves_nothing_to_choose():
    terms = {"n_classes": 2, "row_norm": 1.6, "n_records": 10**5}
    assert irls.plan_irls(4, **terms, **BUDGET).choices > 0
    assert irls.plan_irls(4, **terms, is_penalized=True, **BUDGET).choices == 0
    assert irls.plan_irls(4, **terms | {"n_classes": 3}, **BUDGET).choices == 0


def test_more_budget_reaches_the_ordinary_fit_on_rare_classes_and_steep_slopes():
    """No stall at large epsilon: 3 % of the records in one class, log-odds up to 9."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (40_000, 2))
    y = rng.random(40_000) < expit(5 * X[:, 0] + 3 * X[:, 1] - 6)
    model = LogisticRegression(epsilon=100.0, delta=1e-6, bounds=(-1, 1), random_state=0).fit(X, y)
    np.testing.assert_allclose(model.coef_[0], [5, 3], rtol=0.08)
    np.testing.assert_allclose(model.intercept_, [-6], rtol=0.08)


def test_an_empty_and_a_constant_table_give_a_finite_model():
    for X in (np.zeros((50, 2)), np.full((50, 2), 5.0)):
        plan = irls.plan_irls(2, n_classes=2, row_norm=1.3, n_records=50, **BUDGET)
        rows = PrivateRows(X, Bounds(-2, 5).box(2))
        fit = irls.fit_irls(rows, np.zeros(50), plan, n_records=50, rng=generator(0))
        assert np.isfinite(fit.theta).all()


def test_a_secure_draw_takes_rows_at_its_rate():
    """Binomial with 20,000 trials at 0.3; six deviations, false alarms below 1e-8."""
    drawn = draw(0.3, 20_000, secure_generator())
    assert abs(len(drawn) - 6000) < 6 * np.sqrt(20_000 * 0.3 * 0.7)
    assert (np.diff(drawn) > 0).all()


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 8.0])
def test_steep_slopes_are_found_at_small_budgets_too(epsilon):
    """Log-odds from -9 to 6: the estimates are within four standard errors."""
    rng = np.random.default_rng(3)
    X = rng.uniform(0, 10, (10_000, 2))
    y = rng.random(10_000) < expit(X[:, 0] - 0.5 * X[:, 1] - 4)
    model = LogisticRegression(epsilon=epsilon, delta=1e-6, bounds=Bounds(0, 10), random_state=0)
    inference = model.fit(X, y).inference_
    off = np.abs(inference.estimates - [-4, 1, -0.5])
    assert (off < 4 * inference.standard_errors).all()
    assert (inference.standard_errors < 0.5).all()
