"""Noisy evaluation agrees with scikit-learn at a large budget, and hides what it must."""

import numpy as np
import pytest
from sklearn import metrics

from tacit.summaries import accuracy, auc, log_loss, mean_squared_error, r2

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 2, 8000)
SCORES = np.clip(0.35 * LABELS + RNG.normal(0.4, 0.2, 8000), 0.001, 0.999)
TARGETS = RNG.uniform(0, 10, 8000)
PREDICTED = TARGETS + RNG.normal(0, 2, 8000)
TERMS = {"epsilon": 1e4, "rng": 0, "about": "records"}


def test_scores_agree_with_scikit_learn():
    clipped = np.clip(TARGETS - PREDICTED, -10, 10)
    pairs = [
        (accuracy(LABELS, SCORES > 0.5, **TERMS), np.mean((SCORES > 0.5) == LABELS), 1e-3),
        (auc(LABELS, SCORES, **TERMS), metrics.roc_auc_score(LABELS, SCORES), 2e-3),
        (
            r2(TARGETS, PREDICTED, bounds=(0, 10), **TERMS),
            metrics.r2_score(TARGETS, TARGETS - clipped),
            1e-3,
        ),
        (
            mean_squared_error(TARGETS, PREDICTED, largest_error=10, **TERMS),
            np.mean(clipped**2),
            1e-2,
        ),
        (log_loss(LABELS, SCORES, **TERMS), np.mean(_losses()), 1e-3),
    ]
    for found, exact, tolerance in pairs:
        assert found.value == pytest.approx(exact, abs=tolerance), found


def _losses():
    return np.minimum(-np.log(np.where(LABELS == 1, SCORES, 1 - SCORES)), 5.0)


def test_labels_may_be_texts_and_several():
    labels = np.repeat(["cat", "dog", "owl"], 1000)
    assert accuracy(labels, labels, **TERMS).value == pytest.approx(1.0)
    table = np.full((3000, 3), 0.1)
    table[np.arange(3000), np.repeat([0, 1, 2], 1000)] = 0.8
    found = log_loss(np.repeat([0, 1, 2], 1000), table, **TERMS)
    assert found.value == pytest.approx(-np.log(0.8), abs=1e-3)
    found = auc(labels, (labels == "owl") * 0.9, positive_label="owl", **TERMS)
    assert found.value == pytest.approx(1.0, abs=1e-3)


def test_constant_targets_have_no_lower_end():
    found = r2(np.full(500, 5.0), np.full(500, 5.0), bounds=(0, 10), epsilon=0.5, rng=0)
    assert found.lower == -np.inf
    assert found.to_dict()["lower"] is None


def test_a_hidden_class_gives_the_whole_range():
    found = auc(np.ones(1000), np.ones(1000), epsilon=1.0, rng=0)
    assert (found.lower, found.upper) == (0, 1)


def test_odd_values_raise_no_error():
    odd = [np.nan, np.inf, -np.inf, 1e308, None, "x"]
    for values in (odd, odd[::-1]):
        r2(values, odd, bounds=(0, 1), epsilon=1.0, rng=0)
        mean_squared_error(values, odd, largest_error=1.0, epsilon=1.0, rng=0)
        auc(values, [0.1] * 6, epsilon=1.0, rng=0)
        accuracy(values, odd, epsilon=1.0, rng=0)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="one value for each record"):
        accuracy([1, 0], [1], epsilon=1.0)
