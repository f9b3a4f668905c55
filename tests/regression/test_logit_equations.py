"""Equations of unshrunk logistic models: expected Hessians, released ones, and the root."""

import numpy as np
import pytest
from scipy.special import expit

from tacit.regression.logit_equations import Curvature, LogitEquations, NormalRows

MEAN = np.array([0.6, 0.0, -0.3])


@pytest.fixture(scope="module")
def rows():
    """Rows with the mean MEAN and the Gram matrix 1."""
    u = np.random.default_rng(0).normal(size=(200_000, 3))
    u = (u - u.mean(axis=0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(u.T, bias=True))).T
    root = np.linalg.cholesky(np.eye(3) - np.outer(MEAN, MEAN))
    return u @ root.T + MEAN


def curvatures(rows, theta, clip):
    p = expit(rows @ theta)
    return p * (1 - p) * np.minimum(1, clip / np.maximum(p, 1 - p))


@pytest.mark.parametrize("clip", [0.5, 1.0])
@pytest.mark.parametrize("theta", [(0.0, 0.0, 0.0), (1.0, -2.0, 0.5), (-4.0, 1.0, 2.0)])
def test_normal_rows_have_the_hessian_of_a_sample(rows, theta, clip):
    exact = (rows.T * curvatures(rows, np.array(theta), clip)) @ rows / len(rows)
    expected = NormalRows(np.eye(3), MEAN, clip).hessian(np.array(theta))
    np.testing.assert_allclose(expected, exact, atol=0.004)


def test_the_change_along_a_way_is_that_of_the_gradient(rows):
    def gradient(theta):
        return rows.T @ expit(rows @ theta) / len(rows)

    models = np.array([[0.0, 0.0, 0.0], [2.0, -1.0, 0.0]])
    steps = np.array([[1.0, -3.0, 2.0], [-2.0, 0.5, 0.5]])
    found = NormalRows(np.eye(3), MEAN, 1.0).changes(models, steps, steps)
    exact = [gradient(m + s) - gradient(m) for m, s in zip(models, steps, strict=True)]
    np.testing.assert_allclose(found, exact, atol=0.004)


def test_the_root_is_found_from_far_models_where_one_newton_step_misses_it(rows):
    truth = np.array([0.5, -3.0, 1.5])

    def gradient(theta):
        return rows.T @ (expit(rows @ theta) - expit(rows @ truth)) / len(rows)

    models = np.array([[0.3, -1.0, 0.5], [0.6, -4.5, 2.5]])
    gradients = np.array([gradient(model) for model in models])
    equations = LogitEquations(
        models, gradients, np.full(2, 1e-8), NormalRows(np.eye(3), MEAN, 1.0)
    )
    hessian = (rows.T * curvatures(rows, models[0], 1.0)) @ rows / len(rows)
    found = equations.root(Curvature(hessian, 1e-6 * np.eye(3)), models[0], models[0])
    np.testing.assert_allclose(found.theta, truth, atol=0.05)
    newton = models[0] - np.linalg.solve(hessian, gradients[0])
    assert np.linalg.norm(newton - truth) > 0.5


def test_equations_without_a_root_have_no_solution():
    model = np.zeros((1, 3))
    equations = LogitEquations(
        model, np.array([[5.0, 0.0, 0.0]]), np.ones(1), NormalRows(np.eye(3), MEAN, 1.0)
    )
    curvature = Curvature(0.25 * np.eye(3), 0.01 * np.eye(3))
    assert equations.root(curvature, model[0], model[0]) is None
    assert equations.root(curvature.doubted(2.0), model[0], model[0]) is None  # nothing is known


def test_a_hessian_is_believed_by_its_precision():
    prior = Curvature(np.diag([0.2, 0.01]), 0.04 * np.eye(2))
    found = np.array([[0.1, 0.02], [0.02, 0.02]])
    exact = prior.updated(found, 1e-9)
    np.testing.assert_allclose(exact.hessian, found, rtol=1e-3)
    np.testing.assert_allclose(exact.doubts, 0, atol=1e-6)
    np.testing.assert_allclose(prior.updated(found, 1e3).hessian, prior.hessian, atol=1e-6)
    between = prior.updated(found, 0.02)  # noise that hides the second direction only
    assert between.hessian[0, 0] == pytest.approx(0.1, rel=0.3)
    assert between.hessian[1, 1] == pytest.approx(0.01, rel=0.05)
    assert between.doubts[0, 0] < 0.01 < 0.035 < between.doubts[1, 1]
    scaled = prior.rescaled(2 * prior.hessian, 1e-9, 1.0)
    np.testing.assert_allclose(scaled.hessian, 2 * prior.hessian)


def test_the_error_of_a_hessian_has_the_stated_covariance():
    rng = np.random.default_rng(1)
    curvature = Curvature(np.diag([0.2, 0.05]), np.diag([0.01, 0.04]))
    vector, half = np.array([1.0, -2.0]), np.sqrt([0.2, 0.05])
    draws = []
    for _ in range(20_000):
        z = rng.normal(size=(2, 2))
        noise = np.array([[0.1, 0], [0, 0.2]]) * z
        noise[0, 1] = noise[1, 0] = np.sqrt(0.1 * 0.2 / 2) * z[0, 1]
        draws.append(half * (noise @ (half * vector)))
    np.testing.assert_allclose(curvature.error(vector), np.cov(np.array(draws).T), rtol=0.1)
