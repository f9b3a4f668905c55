"""The paid training loss: what it is in every run; what one example can change; its noise."""

import math

import numpy as np
import pytest
import torch
from looped_reference import set_up
from scipy import stats
from slow_cases import one_fast
from torch import nn

import tacit
from tacit import sampling
from tacit.training import AdaptiveClip, Banded, NoisyLoss, Users
from tacit.training.noisy_loss import _UNITS, correlation_of

LOSS = NoisyLoss(upper=2.0)


def run(case):
    for lot in case.private:
        case.private.step(lot)
    return case.private.noisy_losses


def exact_losses(case, steps=1):
    """The mean clipped loss of each lot around the middle of the range, without noise."""
    found = []
    for step in range(steps):
        batch = case.private._lots.lot(step).whole()
        losses = case.loss_fn(case.model, batch).detach().clamp(0.0, 2.0)
        found.append(1.0 + float((losses - 1.0).sum()) / case.private._plan.expected_batch)
    return found


OPTIONS = {
    "plain": {},
    "alone": {},
    "microbatches": {"max_microbatch": 3},
    "bounded": {"arithmetic": "bounded"},
    "views": {"augmentations": 2},
    "adaptive": {"clip_norm": AdaptiveClip(1.0)},
    "workers": {"num_workers": 1},
}


@pytest.mark.parametrize("kind", one_fast(OPTIONS, 2))
def test_the_loss_is_that_of_the_lot(problem, kind):
    options = {"noisy_loss": LOSS, "noise_multiplier": 0.0} | OPTIONS[kind]
    with set_up("alone" if kind == "alone" else "traced"):
        case = problem(seed=0, lr=0.0, check=False, **options)
    assert run(case) == pytest.approx(exact_losses(case, 4), abs=1e-5)


@pytest.mark.parametrize("rows", [6, 64])
def test_loops_that_call_backward_release_it_too(problem, rows):
    case = problem(
        seed=0, lr=0.0, check=False, noisy_loss=LOSS, noise_multiplier=0.0, max_microbatch=rows
    )
    private = case.private
    for _ in private:
        private.backward()
        case.optimizer.step()
    assert private.noisy_losses == pytest.approx(exact_losses(case, 4), abs=1e-5)


def test_the_loss_of_a_user_is_that_of_the_users_records(problem):
    case = problem(
        batch_size=8, users=np.arange(64) % 8, seed=0, lr=0.0, steps=1, check=False,
        noisy_loss=LOSS, noise_multiplier=0.0,
    )  # fmt: skip
    losses = case.loss_fn(case.model, (case.x, case.y)).detach()
    of_users = losses.view(8, 8).mean(0).clamp(0.0, 2.0)  # all users are in every lot
    assert run(case) == pytest.approx([float(of_users.mean())], abs=1e-5)


def test_losses_are_clipped_and_exact_sums_do_not_depend_on_their_order():
    losses = torch.tensor([0.0, 1.0, 5.0, -3.0, math.inf, -math.inf, math.nan, 1.5])
    mask = torch.ones(8, dtype=torch.bool)
    signs = [-1, 0, 1, -1, 1, -1, 0, 0.5]
    assert LOSS.total(losses, mask) == round(sum(signs) * _UNITS)
    assert LOSS.total(losses.flip(0), mask) == LOSS.total(losses, mask)
    assert LOSS.total(losses, torch.zeros(8, dtype=torch.bool)) == 0
    for i in range(8):  # one example moves the sum by at most half the range, whatever it is
        one = mask.clone()
        one[i] = False
        assert abs(LOSS.total(losses, mask) - LOSS.total(losses, one)) <= _UNITS


@pytest.mark.parametrize("share", [1e-4, 0.01, 0.5, 0.999])
@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 20.0])
def test_gradient_and_loss_together_are_the_release_that_is_billed(share, noise_multiplier):
    loss = NoisyLoss(upper=1.0, share=share)
    parts = (
        tacit.events.Gaussian(noise_multiplier * loss.gradient_factor),
        tacit.events.Gaussian(loss.multiplier(noise_multiplier)),
    )
    joint = 1 / math.hypot(*(1 / part.noise_multiplier for part in parts))
    assert noise_multiplier <= joint <= noise_multiplier * (1 + 1e-11)


def test_the_price_of_both_releases_is_that_of_the_plan(problem):
    private = problem(noisy_loss=NoisyLoss(upper=2.0, share=0.2), check=False).private
    loss = private._plan.noisy_loss
    pair = tacit.events.Sequence(
        (
            tacit.events.Gaussian(1.0 * loss.gradient_factor),
            tacit.events.Gaussian(loss.multiplier(1.0)),
        )
    )
    listed = tacit.events.Repeated(tacit.events.PoissonSampled(16 / 64, pair), 4)
    assert private.epsilon(delta=1e-5) == pytest.approx(tacit.epsilon(listed, delta=1e-5), rel=1e-6)


@pytest.mark.parametrize(
    "sampler",
    [
        sampling.CyclicPoisson(0.5, 4),
        sampling.FixedOrder(4),
        sampling.FixedOrder(2),  # turns are closer than the bands
        sampling.Stream(
            [(i,) for i in range(12)], separation=3, participations=2, expected_batch=1
        ),
    ],
    ids=repr,
)
def test_shares_add_up_when_noise_is_correlated(sampler):
    column, steps, loss = (1.0, 0.7, 0.3), 12, NoisyLoss(upper=1.0, share=0.3)
    correlated, independent = (sampler.event(1.0, steps, c) for c in (column, (1.0,)))
    factor = correlation_of(correlated, independent)
    separation, most = correlated.separation, correlated.participations or steps
    strategy = sum(c * np.eye(steps, k=-k) for k, c in enumerate(column))
    worst = 0.0
    for first in range(separation):
        turns = np.zeros(steps)
        turns[first::separation] = 1.0
        turns[np.flatnonzero(turns)[most if sampler != sampling.CyclicPoisson(0.5, 4) else 1 :]] = 0
        moved = (strategy @ turns / loss.gradient_factor, turns / loss.multiplier(1.0, factor))
        worst = max(worst, float(np.linalg.norm(np.concatenate(moved))))
    assert worst <= 1 / tacit.training.noisy_loss._multiplier(correlated.equivalent)


KINDS = {
    "Poisson": {},
    "banded": {"noise": Banded(bands=4)},
    "adaptive": {"clip_norm": AdaptiveClip(1.0)},
    "users": {"users": Users(ids=np.arange(64) % 32, sampled="records")},
}
SLOW = [pytest.param(kind, 1000, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize(("kind", "steps"), [("Poisson", 60), ("banded", 60), *SLOW])
def test_the_noise_has_the_deviation_that_is_stated(problem, kind, steps):
    """Chi-squared test of the losses; a correct one fails with probability 1e-4."""
    records = []
    case = problem(
        seed=5, lr=0.0, steps=steps, check=False, callbacks=[records.append],
        noisy_loss=NoisyLoss(upper=2.0, share=0.1), **KINDS[kind],
    )  # fmt: skip
    losses = run(case)
    exact = exact_losses(case, steps)
    stds = np.array([record.loss_std for record in records])
    noise = (np.array(losses) - exact) / stds
    assert 5e-5 < stats.chi2.cdf((noise**2).sum(), steps) < 1 - 5e-5
    assert np.ptp(stds) == 0
    bands = np.corrcoef(noise[1:], noise[:-1])[0, 1]
    assert abs(bands) < 4 / math.sqrt(
        steps
    )  # independent from step to step, also beside correlated gradients


def test_the_gradient_gets_more_noise_and_nothing_else_changes(problem):
    def gradients(**options):
        case = problem(seed=2, lr=0.0, steps=1, check=False, **options)
        run(case)
        return torch.cat([p.grad.flatten() for p in case.model.parameters()])

    silent = gradients(noise_multiplier=0.0)
    plain, with_loss = gradients(), gradients(noisy_loss=NoisyLoss(upper=2.0, share=0.75))
    torch.testing.assert_close(with_loss - silent, 2 * (plain - silent), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"upper": 0.0}, ValueError),
        ({"upper": math.inf}, ValueError),
        ({"upper": math.nan}, ValueError),
        ({"upper": 1e308, "lower": -1e308}, ValueError),
        ({"upper": 1.0, "share": 1.0}, ValueError),
        ({"upper": 1.0, "share": 0.0}, ValueError),
    ],
)
def test_wrong_settings_are_refused(options, error):
    with pytest.raises(error):
        NoisyLoss(**options)


def test_what_cannot_release_it_says_so(problem):
    with pytest.raises(ValueError, match="compile cannot release noisy_loss"):
        problem(noisy_loss=LOSS, compile=True)
    assert problem(noisy_loss=LOSS, compile="auto", check=False).private is not None
    with pytest.raises(TypeError, match="noisy_loss must be"):
        problem(noisy_loss=2.0)


def test_a_loss_that_mixes_examples_is_refused_although_its_gradient_does_not(problem):
    def mixed(model, batch):
        x, y = batch
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        return losses + x.mean()  # the gradient of each example is its own

    with pytest.raises(tacit.errors.IncompatibleModel):
        problem(loss_fn=mixed, noisy_loss=LOSS)
