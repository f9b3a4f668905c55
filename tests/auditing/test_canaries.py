"""Canaries are planted by fair coins, reach the full clip norm, and cost the others nothing."""

import numpy as np
import pytest
import torch
from _gaussian_bounds import gaussian_threshold_test
from scipy import stats
from speed_options import with_speed
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.auditing import (
    GradientCanaries,
    flip_coins,
    noise_bound,
    refute_event,
    roc,
)
from tacit.auditing.canaries import log_ratio


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def problem(n=60):
    torch.manual_seed(0)
    return torch.randn(n, 4), torch.randint(0, 2, (n,))


def audited(canaries, data=None, *, collate=None, **options):
    torch.manual_seed(0)
    data = problem() if data is None else data
    model, planted, loss = canaries.plant(nn.Linear(4, 2), data, loss_fn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"batch_size": 100, "steps": 5, "noise_multiplier": 1.0, "n_records": 200}
    private = tacit.make_private(
        model, optimizer, planted, loss, clip_norm=0.5, seed=0, **with_speed(settings | options)
    )
    for lot in canaries.watch(private):
        private.step(lot)
    return private, model


def test_coins_are_fair_and_come_from_their_generator():
    coins = flip_coins(10_000, 0)
    assert coins.dtype == bool
    assert abs(coins.mean() - 0.5) < 0.02  # four standard deviations
    np.testing.assert_array_equal(coins, flip_coins(10_000, 0))
    assert (flip_coins(100) != flip_coins(100)).any()


def test_a_member_moves_its_coordinate_by_the_clip_norm_and_the_others_do_not():
    canaries = GradientCanaries(200, clip_norm=0.5, rng=1)
    audited(canaries, batch_size=200, n_records=200, noise_multiplier=0.0, steps=3)
    # Every record is in every lot: three releases of one clip norm each.
    np.testing.assert_allclose(canaries.sums, np.where(canaries.is_member, 3.0, 0.0), rtol=1e-4)


def test_canaries_leave_the_gradient_of_real_records_alone():
    x, y = problem()
    released = []
    for plant in (False, True):
        torch.manual_seed(0)
        model, data, loss = nn.Linear(4, 2), (x, y), loss_fn
        if plant:
            model, data, loss = GradientCanaries(50, clip_norm=0.5, rng=0).plant(model, data, loss)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        n = len(data[0])
        private = tacit.make_private(
            model, optimizer, data, loss, batch_size=n, steps=1, clip_norm=0.5, noise_multiplier=0.0
        )
        for lot in private:
            private.step(lot)
        weight = (model.inner if plant else model).weight
        released.append(weight.grad * n)
    torch.testing.assert_close(released[0], released[1])


def test_a_traced_program_takes_the_canaries():
    canaries = GradientCanaries(60, clip_norm=0.5, rng=2)
    audited(canaries, batch_size=60, n_records=90, noise_multiplier=0.1)
    inside = canaries.scores[canaries.is_member]
    assert inside.mean() > canaries.scores[~canaries.is_member].mean()


def test_a_map_style_data_set_is_audited_like_tensors():
    x, y = problem()
    scores = []
    for data in ((x, y), [(a, b) for a, b in zip(x, y, strict=True)]):
        canaries = GradientCanaries(100, clip_norm=0.5, rng=3)
        audited(canaries, data)
        scores.append(canaries.scores)
    np.testing.assert_allclose(*scores, rtol=1e-3, atol=1e-4)


def test_the_audited_model_predicts_as_its_inner_one():
    canaries = GradientCanaries(20, clip_norm=0.5, rng=4)
    inner = nn.Linear(4, 2)
    model, _, _ = canaries.plant(inner, problem(), loss_fn)
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), inner(x))


def test_a_white_box_audit_comes_near_the_bill_and_stays_below_it():
    canaries = GradientCanaries(3000, clip_norm=0.5, rng=5)
    private, _ = audited(canaries, batch_size=1560, n_records=1560, noise_multiplier=2.0)
    bill = private.epsilon(delta=1e-5)
    fit = gaussian_threshold_test(canaries.sums, canaries.is_member, delta=1e-5)
    scale = noise_bound(canaries.scores, canaries.is_member, private.event, delta=1e-5)
    assert 0.6 * bill < fit.epsilon_lower < bill
    assert 0.6 * bill < scale.epsilon_lower < bill
    test = refute_event(canaries.scores, canaries.is_member, private.event, independent=True)
    assert not test.is_refuted


def test_the_likelihood_ratio_beats_the_sum_where_sampling_is_sparse():
    rng = np.random.default_rng(0)
    inside = flip_coins(4000, rng)
    drawn = inside & (rng.random((50, 4000)) < 0.05)
    released = drawn + rng.normal(0, 0.5, drawn.shape)
    ratios = log_ratio(released, rate=0.05, noise_multiplier=0.5).sum(axis=0)
    assert roc(ratios, inside).auc > roc(released.sum(axis=0), inside).auc + 0.05


def test_the_likelihood_ratio_is_that_of_the_two_densities():
    x = np.linspace(-3, 4, 50)
    mixture = 0.3 * stats.norm.pdf(x, 1, 0.7) + 0.7 * stats.norm.pdf(x, 0, 0.7)
    expected = np.log(mixture / stats.norm.pdf(x, 0, 0.7))
    np.testing.assert_allclose(log_ratio(x, rate=0.3, noise_multiplier=0.7), expected)


def test_scores_need_a_run_and_a_run_its_own_canaries():
    canaries = GradientCanaries(10, clip_norm=0.5, rng=6)
    with pytest.raises(RuntimeError, match="no release"):
        _ = canaries.scores
    with pytest.raises(RuntimeError, match="nothing was released"):
        canaries.record()
    canaries.plant(nn.Linear(4, 2), problem(), loss_fn)
    with pytest.raises(ValueError, match="planted already"):
        canaries.plant(nn.Linear(4, 2), problem(), loss_fn)
