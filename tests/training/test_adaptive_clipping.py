"""Clip norms that follow a private quantile (Andrew et al. 2021)."""

import numpy as np
import pytest
import torch

from tacit.training import AdaptiveClip, PerLayer, ScheduledClip, Stairs
from tacit.training.adaptive_clipping import count_sensitivity
from tacit.training.key import Key
from tacit.training.noise import NoisyMean


def moved(factors, within, drawn, *, adaptive=None, step=0):
    adaptive = adaptive or AdaptiveClip(1.0, count_noise_std=1e-9)
    noise = NoisyMean(Key.from_seed(1), expected_batch=100.0)
    return adaptive.release(factors, within, drawn, noise=noise, step=step, expected_batch=100.0)


def test_the_norm_moves_by_the_papers_rule():
    (factor,) = moved((1.0,), (80.0,), 100.0)
    assert factor == pytest.approx(np.exp(-0.2 * (0.8 - 0.5)))


def test_an_empty_draw_moves_nothing():
    """Peers, entry 15: division by the drawn size is 0 / 0 here, and private elsewhere."""
    assert moved((1.0,), (0.0,), 0.0) == pytest.approx((1.0,))


def test_the_divisor_is_the_declared_batch():
    """Peers, entry 15."""
    (factor,) = moved((1.0,), (10.0,), 10.0)  # all of a small draw within
    assert factor == pytest.approx(np.exp(-0.2 * (5.0 / 100.0 + 0.5 - 0.5)))


def test_one_example_moves_the_counts_by_the_stated_sensitivity():
    for groups in (1, 3):
        for bits in np.ndindex(*(2,) * groups):
            change = np.array(bits) - 0.5  # it adds `bits` to within and 1 to drawn
            assert np.linalg.norm(change) <= count_sensitivity(groups) + 1e-12


def test_the_event_is_noise_over_sensitivity():
    assert AdaptiveClip(1.0, count_noise_std=5.0).event(100.0, 1).noise_multiplier == 10.0
    assert AdaptiveClip(1.0).event(100.0, 4).noise_multiplier == 5.0  # 100 / 20 / (0.5 * 2)


def test_wild_noise_keeps_the_norm_in_reach():
    factors = (1.0,)
    for step in range(500):
        wild = AdaptiveClip(1.0, count_noise_std=1e9)
        factors = moved(factors, (0.0,), 0.0, adaptive=wild, step=step)
        assert 1e-6 <= factors[0] <= 1e6


def test_the_norm_finds_the_median(problem):
    torch.manual_seed(0)
    scale = torch.exp(torch.randn(400))
    x = scale[:, None] * torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    model = torch.nn.Linear(4, 1, bias=False)
    run = problem(
        n=400, model=model, data=(x, scale), batch_size=200, steps=80, lr=0.0,
        loss_fn=lambda m, b: m(b[0]).squeeze(1),
        clip_norm=AdaptiveClip(20.0, count_noise_std=4.0), seed=1,
    ).private  # fmt: skip
    for lot in run:
        run.step(lot)
    (norm,) = run.info["clip_norms"]
    assert norm == pytest.approx(float(scale.median()), rel=0.25)


def test_every_group_has_its_own_norm(problem):
    run = problem(clip_norm=AdaptiveClip(PerLayer((5.0, 0.001))), steps=6, seed=1).private
    for lot in run:
        run.step(lot)
    high, low = run.info["clip_norms"]
    assert high < 5.0
    assert low > 0.001


@pytest.mark.parametrize(
    "options",
    [{"quantile": 0.0}, {"quantile": 1.0}, {"learning_rate": 0.0}, {"count_noise_std": 0.0}],
)
def test_settings_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AdaptiveClip(1.0, **options)


WRONG_STARTS = ["1.0", None, AdaptiveClip(1.0), ScheduledClip(1.0, Stairs((1.0,)))]


@pytest.mark.parametrize("start", WRONG_STARTS)
def test_what_changes_starts_from_a_number_or_a_rule(problem, start):
    with pytest.raises(TypeError, match="clip_norm must be a number, a clip rule"):
        problem(clip_norm=AdaptiveClip(start))
