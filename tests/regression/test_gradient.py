"""Noisy gradient descent: clips and rates that follow the noise, and the sensitivity of a step."""

import numpy as np
import pytest

from tacit.events import Relation
from tacit.mechanisms import secure_generator
from tacit.regression import Bounds, gradient
from tacit.regression.rows import PrivateRows


def plan(**changes):
    settings = {"n_classes": 2, "row_norm": 1.5, "n_records": 20_000, "epsilon": 1.0} | changes
    return gradient.plan_logistic(10, **settings, delta=1e-6, relation=Relation.ADD_REMOVE)


def test_noisier_plans_read_more_records_for_the_curvature():
    assert plan(n_records=1000, epsilon=0.1).gram_rate == 1.0
    assert plan(n_records=10**6).gram_rate == 0.05


def test_residuals_are_clipped_only_where_noise_dominates():
    assert plan().residual_clip == 1.0
    assert plan(n_records=500).residual_clip == 0.5
    assert plan(n_classes=3).residual_clip == pytest.approx(np.sqrt(2))


@pytest.mark.parametrize("n_classes", [2, 4])
@pytest.mark.parametrize("n_records", [300, 20_000])
def test_one_record_moves_the_gradient_by_no_more_than_claimed(n_classes, n_records):
    settings = plan(n_classes=n_classes, n_records=n_records)
    rng = np.random.default_rng(0)
    X = rng.uniform(-300, 300, (300, 10))
    labels = rng.integers(0, n_classes, 300).astype(float)
    theta = rng.normal(size=11 if n_classes == 2 else (11, n_classes)) * 5
    box = Bounds(-100, 100).box(10)
    for i in range(0, 300, 2):
        one, other = (
            gradient.logistic_gradient(
                PrivateRows(X[j : j + 1], box, row_norm=1.5), labels[j : j + 1], theta,
                settings.residual_clip, n_classes,
            )
            for j in (i, i + 1)
        )  # fmt: skip
        bound = settings.gradient.l2_sensitivity * (1 + 1e-9)
        assert np.linalg.norm(one) <= bound
        assert np.linalg.norm(one - other) <= 2 * bound


def test_a_secure_draw_takes_rows_at_its_rate():
    """Binomial with 20,000 trials at 0.3; six deviations, false alarms below 1e-8."""
    drawn = gradient.draw(0.3, 20_000, secure_generator())
    assert abs(len(drawn) - 6000) < 6 * np.sqrt(20_000 * 0.3 * 0.7)
    assert (np.diff(drawn) > 0).all()
