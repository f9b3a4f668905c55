"""Clipped losses, the block sampler, and the exact law of draws on sparse rows."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse, stats

from tacit.events import Relation
from tacit.regression import Bounds, frank_wolfe
from tacit.regression.sparse_gradient import (
    LOSSES,
    BlockSampler,
    ClippedLoss,
    SparseGradient,
    _log_two_cosh,
)

FALSE_ALARM = 1e-6
"""Probability that a statistical test would fail on correct code if its seed were not fixed."""


def sparse_rows(n=300, d=40, seed=0, *, has_constant=False, density=0.1):
    """Return scaled sparse rows, with columns of very different weight, and targets 0 or 1."""
    rng = np.random.default_rng(seed)
    X = sparse.random_array((n, d), density=density, rng=rng).tocsr()
    X = X + sparse.csr_array(np.outer(rng.random(n) < 0.7, np.arange(d) == 3).astype(float) * 0.5)
    y = (X @ rng.normal(size=d) > 0).astype(float)
    box = Bounds(-1, 1).box(d)
    return frank_wolfe.SparseRows(X, box, has_constant=has_constant), y


def lazy(rows, y, loss="logistic", *, slope, radius=4.0, clip=None):
    made = ClippedLoss.make(loss, reach=radius, clip=clip)
    return SparseGradient(rows.X, y, made, slope=slope, radius=radius), made


def dense_probabilities(rows, y, loss, theta, slope):
    """Return the probability of each vertex e_j, then of each -e_j, from the full gradient."""
    X = rows.X.toarray()
    gradient = X.T @ loss.residuals(X @ theta, y)
    scores = slope * np.concatenate([-gradient, gradient])
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def sampler_probabilities(sampler):
    """Return the probability of each item in `BlockSampler.draw`."""
    inside = sampler._weights / np.maximum(sampler._weights.sum(axis=1, keepdims=True), 1e-300)
    shares = sampler._sums / sampler._sums.sum()
    return (shares[:, None] * inside).reshape(-1)[: len(sampler.log_weights)]


def lazy_probabilities(state, scale):
    """Return the probability of each feature in `SparseGradient.draw`: proposed and accepted."""
    gradient = state._residuals_at(scale) @ state._rows
    accepted = _log_two_cosh(state._slope * np.abs(gradient)) - state._sampler.log_weights
    assert (accepted <= 0).all()  # otherwise the bound does not hold
    weights = sampler_probabilities(state._sampler) * np.exp(accepted)
    return weights / weights.sum()


@pytest.mark.parametrize("loss", LOSSES)
def test_without_a_clip_residuals_stay_within_the_proved_bound(loss):
    made = ClippedLoss.make(loss, reach=3.0, clip=1e9)
    margins, targets = np.meshgrid(
        np.linspace(-3, 3, 50), [0, 1] if loss == "logistic" else [-1, 1]
    )
    assert made.clip == (1.0 if loss == "logistic" else 4.0)
    assert np.abs(made.residuals(margins, targets)).max() <= made.clip


@pytest.mark.parametrize("loss", LOSSES)
def test_the_default_clip_leaves_the_zero_model_alone(loss):
    made = ClippedLoss.make(loss, reach=3.0)
    targets = np.array([0.0, 1.0])
    exact = (0.5 if loss == "logistic" else 0.0) - targets
    np.testing.assert_array_equal(made.residuals(np.zeros(2), targets), exact)


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=100, deadline=None)
@given(
    margin=st.floats(-3, 3), log_ratio=st.floats(0, 3), target=st.sampled_from([0.0, 1.0]),
    clip=st.sampled_from([0.2, 0.5, 10.0]),
)  # fmt: skip
def test_drift_bounds_what_a_shrinking_scale_does(loss, margin, log_ratio, target, clip):
    made = ClippedLoss.make(loss, reach=3.0, clip=clip)
    pair = np.array(
        [margin, margin * math.exp(log_ratio)]
    )  # at the scale of the model and at the reference
    now, before = made.residuals(pair, np.full(2, target))
    assert abs(now - before) <= made.bound_drift(log_ratio, reach=3.0) + 1e-12


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), size=st.integers(1, 60),
    spread=st.sampled_from([1.0, 50.0, 5000.0]),
)  # fmt: skip
def test_the_sampler_keeps_the_probabilities_of_its_weights(seed, size, spread):
    rng = np.random.default_rng(seed)
    logs = rng.normal(0, spread, size)
    sampler = BlockSampler(logs.copy())
    for _ in range(200):
        items = rng.permutation(size)[: rng.integers(size + 1)]
        logs[items] = rng.normal(rng.choice([-spread, 0, spread]), spread, len(items))
        sampler.update(items, logs[items])
    weights = np.exp(logs - logs.max())
    np.testing.assert_allclose(sampler_probabilities(sampler), weights / weights.sum(), atol=1e-10)


def test_the_sampler_never_draws_what_has_no_weight():
    sampler = BlockSampler(np.array([0.0, -np.inf, 0.0, -np.inf, -np.inf]))
    edges = [0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53]
    assert {sampler.draw(a, b) for a in edges for b in edges} == {0, 2}


def test_the_samplers_draws_have_the_law_of_its_weights():
    rng = np.random.default_rng(0)
    logs = rng.normal(0, 2, 30)
    sampler = BlockSampler(logs)
    counts = np.bincount([sampler.draw(*rng.random(2)) for _ in range(20_000)], minlength=30)
    expected = np.exp(logs) / np.exp(logs).sum() * 20_000
    assert chi_square(counts, expected) > FALSE_ALARM


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("has_constant", [True, False])
@pytest.mark.parametrize("slope", [0.01, 0.3, 5.0])
def test_the_fast_path_has_the_dense_probabilities_at_every_step(slope, has_constant, loss):
    rows, y = sparse_rows(has_constant=has_constant)
    state, made = lazy(rows, y, loss, slope=slope)
    rng, scale = np.random.default_rng(1), 1.0
    for step in range(300):
        exact = dense_probabilities(rows, y, made, scale * state.sums, slope)
        by_feature = exact.reshape(2, -1).sum(axis=0)
        np.testing.assert_allclose(lazy_probabilities(state, scale), by_feature, atol=1e-9)
        feature, sign = state.draw(scale, rng)
        scale = 2 / ((step + 1) * (step + 2))
        state.add(feature, (step + 1) * sign * 4.0, scale)


def test_probabilities_do_not_drift_in_a_long_run():
    rows, y = sparse_rows(n=200, d=100, density=0.05)
    state, made = lazy(rows, y, slope=0.2)
    rng, scale = np.random.default_rng(1), 1.0
    for step in range(5_000):
        feature, sign = state.draw(scale, rng)
        scale = 2 / ((step + 1) * (step + 2))
        state.add(feature, (step + 1) * sign * 4.0, scale)
    exact = dense_probabilities(rows, y, made, scale * state.sums, 0.2)
    np.testing.assert_allclose(
        lazy_probabilities(state, scale), exact.reshape(2, -1).sum(axis=0), rtol=1e-9
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_the_fast_path_draws_vertices_by_the_exact_law(loss):
    """Chi-square over all 2 d vertices, away from the reference; false alarm 1e-6 each."""
    rows, y = sparse_rows(d=20, density=0.05)
    slope = 0.08 if loss == "logistic" else 0.02
    state, made = lazy(rows, y, loss, slope=slope)
    step, scale = 0, 1.0
    while step < 60 or state._reference < 1.05 * scale:  # proposals must not be the exact law
        step += 1
        scale = 2 / (step * (step + 1))
        state.add(step % 3, step * 4.0, scale)
    rng = np.random.default_rng(2)
    drawn = Counter(state.draw(scale, rng) for _ in range(20_000))
    counts = np.array([drawn[j, sign] for sign in (1.0, -1.0) for j in range(20)])
    expected = 20_000 * dense_probabilities(rows, y, made, scale * state.sums, slope)
    assert chi_square(counts, expected) > FALSE_ALARM


@pytest.mark.slow
def test_fast_and_slow_runs_end_in_the_same_models_equally_often():
    """Two-sample chi-square over the models after three steps; false alarm 1e-6."""
    rows, y = sparse_rows(n=60, d=3, density=0.5)
    plan = frank_wolfe.plan_frank_wolfe(
        frank_wolfe.Ball(4.0, 3), ClippedLoss.make("logistic", reach=4.0), steps=3, epsilon=0.8,
        delta=1e-3, relation=Relation.ADD_REMOVE,
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def slow():
        return frank_wolfe.descend(
            rows, y, plan.domain, plan.loss, steps=3,
            choose=lambda scores: plan.pick.release(scores, rng),
        )  # fmt: skip

    fast = Counter(
        tuple(frank_wolfe.fit(rows, y, plan, rng=rng).round(6) + 0.0) for _ in range(1_500)
    )
    plain = Counter(tuple(slow().round(6) + 0.0) for _ in range(1_500))
    models = [model for model in fast | plain if fast[model] + plain[model] >= 10]
    counts = np.array([[runs[model] for model in models] for runs in (fast, plain)])
    assert len(models) > 20
    assert stats.chi2_contingency(counts).pvalue > FALSE_ALARM


def chi_square(counts, expected):
    """Return the p-value, with all cells of fewer than five expected draws taken as one."""
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    return stats.chisquare(counts[kept], expected[kept]).pvalue
