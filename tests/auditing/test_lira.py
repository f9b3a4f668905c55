"""Scores, the likelihood-ratio attack, and the limit on any attack."""

import joblib
import numpy as np
import pytest
from scipy import stats

from tacit.auditing import (
    Shadows,
    best_tpr,
    lira,
    logit_confidence,
    minus_loss,
    roc,
    roc_points,
    train_shadows,
)
from tacit.auditing.lira import halves
from tacit.auditing.one_run import gaussian_inverse


def memorizing(n_records=2000, n_models=32, gain=1.0, seed=0):
    """A pool whose records differ in difficulty; models add `gain` to those they trained on."""
    rng = np.random.default_rng(seed)
    easy = rng.normal(0, 4, n_records)

    def score(members, seed):
        noise = np.random.default_rng(1000 + seed).normal(size=n_records)
        return easy + gain * members + noise

    members = rng.random(n_records) < 0.5
    return score, members, score(members, -1)


def test_every_record_is_in_half_of_the_shadow_models():
    members = halves(501, 8, rng=0)
    assert members.shape == (8, 501)
    assert (members.sum(axis=0) == 4).all()
    assert 150 < members[0].sum() < 350


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_the_ratio_beats_the_raw_score_where_records_differ(mode):
    score, members, target = memorizing()
    shadows = train_shadows(score, len(members), n_models=32, rng=0)
    attack = roc(lira(target, shadows, mode=mode), members)
    raw = roc(target, members)
    # A shift of one standard deviation: the best AUC is Phi(1 / sqrt(2)) = 0.760.
    assert attack.auc > 0.70
    assert raw.auc < 0.62
    assert attack.tpr_at(0.01) > 2 * raw.tpr_at(0.01)


def test_one_variance_or_many_are_both_available():
    score, members, target = memorizing(n_records=400)
    shadows = train_shadows(score, 400, n_models=64, rng=0)
    shared = roc(lira(target, shadows, one_variance=True), members).auc
    own = roc(lira(target, shadows, one_variance=False), members).auc
    assert abs(shared - own) < 0.1


def test_models_that_keep_nothing_are_not_attacked():
    score, members, target = memorizing(gain=0.0, seed=1)
    shadows = train_shadows(score, len(members), n_models=16, rng=1)
    assert abs(roc(lira(target, shadows), members).auc - 0.5) < 0.05


@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.slow)])
def test_shadow_models_train_in_other_workers(backend):
    score, _, _ = memorizing(n_records=50)
    alone = train_shadows(score, 50, n_models=4, rng=0)
    with joblib.parallel_config(backend):
        many = train_shadows(score, 50, n_models=4, rng=0, n_jobs=2)
    np.testing.assert_array_equal(alone.scores, many.scores)


def test_the_curve_handles_ties_and_ends_at_one():
    curve = roc([1, 1, 1, 1], [True, False, True, False])
    assert curve.fpr.tolist() == [0.0, 1.0]
    assert curve.auc == 0.5
    perfect = roc([2, 3, 0, 1], [True, True, False, False])
    assert perfect.auc == 1.0
    assert perfect.tpr_at(0.0) == 1.0
    assert perfect.summary == {"auc": 1.0, "tpr_at_0.001": 1.0, "tpr_at_0.01": 1.0}


def test_the_area_agrees_with_the_rank_test():
    rng = np.random.default_rng(2)
    scores, members = rng.normal(size=300), rng.random(300) < 0.4
    u = stats.mannwhitneyu(scores[members], scores[~members]).statistic
    assert roc(scores, members).auc == pytest.approx(u / (members.sum() * (~members).sum()))


def test_no_attack_passes_the_limit_and_a_gaussian_one_comes_near():
    fpr = np.geomspace(1e-4, 0.9, 50)
    limit = best_tpr(fpr, epsilon=4.3772, delta=1e-5)
    inverse = gaussian_inverse(1.0)
    for x, most in zip(fpr, limit, strict=True):
        assert inverse(most) >= x * (1 - 1e-4)  # what is above is out of reach of 1-GDP
    assert best_tpr(0.0, epsilon=0.0) == 0.0
    assert best_tpr(1.0, epsilon=3.0, delta=0.1) == 1.0


def test_logits_give_loss_and_scaled_confidence():
    logits, labels = np.array([[2.0, 1.0, 0.0], [0.0, 50.0, 0.0]]), np.array([0, 1])
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    true = p[[0, 1], labels]
    np.testing.assert_allclose(minus_loss(logits, labels), np.log(true))
    assert logit_confidence(logits, labels)[0] == pytest.approx(np.log(true[0] / (1 - true[0])))
    assert logit_confidence(logits, labels)[1] == pytest.approx(50 - np.log(2))  # 1 - p is 0 here
    with pytest.raises(ValueError, match="records, classes"):
        minus_loss(logits, [0])


def test_wrong_shapes_and_modes_are_refused():
    shadows = Shadows(np.zeros((4, 3)), halves(3, 4, rng=0))
    with pytest.raises(ValueError, match="one score for each record"):
        lira(np.zeros(2), shadows)
    with pytest.raises(ValueError, match="one of online, offline"):
        lira(np.zeros(3), shadows, mode="both")
    with pytest.raises(ValueError, match="members and others"):
        roc([1, 2], [True, True])
    with pytest.raises(ValueError, match="one length"):
        roc([1, 2, 3], [True, False])


def test_the_points_of_curves_come_with_the_limit_for_any_attack():
    rng = np.random.default_rng(4)
    members = rng.random(500) < 0.5
    curves = {"target": roc(members + rng.normal(size=500), members)}
    points = roc_points(curves, epsilon=4.0, delta=1e-5)
    assert points[0] == ("target", 0.0, 0.0)
    assert {name for name, _, _ in points} == {"target", "any attack, epsilon 4"}
    assert all(y <= best_tpr(x, epsilon=4.0, delta=1e-5) for name, x, y in points if "any" in name)
