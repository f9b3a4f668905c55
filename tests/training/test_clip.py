"""Clip rules: no contribution passes its bound, and noise scales fit the bounds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tacit.training import Automatic, Flat, PerGroup, PerLayer
from tacit.training.clipping.clip import ROUNDING, ClippedSum, factors_of

RULES = [
    Flat(0.7),
    Automatic(0.7, 0.01),
    PerLayer((0.3, 0.4)),
    PerGroup((("a",), ("b",)), (0.3, 0.4)),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(
    norms=st.lists(st.floats(0, 2.0**50, width=32), min_size=1, max_size=5),
    rounding=st.sampled_from([r for r in ROUNDING.values() if r >= 2**-17]),
)
def test_no_contribution_is_longer_than_the_clip_norm(rule, norms, rounding):
    squared = torch.tensor([norms] * len(rule.clip_norms), dtype=torch.float32).square()
    factors = rule.factors(squared, rounding=rounding).double()
    for bound, factor in zip(rule.clip_norms, factors, strict=True):
        # The norm may be wrong by its rounding error; the contribution stays within the bound.
        true = squared[0].double().sqrt() * (1 + rounding / 2)
        assert bool((factor * true <= bound * (1 + 1e-7)).all())
        assert bool((factor >= 0).all())


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_has_factor_zero(rule, bad):
    factors = rule.factors(torch.full((len(rule.clip_norms), 2), bad))
    assert bool((factors == 0).all())


def test_short_gradients_are_left_alone():
    assert Flat(1.0).factors(torch.tensor([[0.0, 0.25]])).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("noise", ["equal", "proportional", (1.0, 5.0)])
def test_noise_scales_give_every_rule_sensitivity_one(noise):
    rule = PerGroup((("a",), ("b",)), (3.0, 4.0), noise)
    ratios = [c / s for c, s in zip(rule.clip_norms, rule.noise_scales, strict=True)]
    assert math.hypot(*ratios) == pytest.approx(1.0)
    assert rule.l2_sensitivity == pytest.approx(5.0)


def test_equal_noise_has_the_scale_of_the_whole_sensitivity():
    assert PerLayer((3.0, 4.0)).noise_scales == pytest.approx((5.0, 5.0))
    assert PerLayer((3.0, 4.0), "proportional").noise_scales == pytest.approx(
        (3.0 * math.sqrt(2), 4.0 * math.sqrt(2))
    )


def test_split_gives_the_sensitivity_asked_for():
    rule = PerLayer.split(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), 0.9)
    assert len(rule.clip_norms) == 2
    assert rule.l2_sensitivity == pytest.approx(0.9)


def test_groups_are_found_by_the_longest_name():
    rule = PerGroup((("",), ("head", "body.0.bias")), (1.0, 1.0))
    names = ["body.0.weight", "body.0.bias", "head.weight", "header.weight"]
    assert rule.groups(names) == (
        ("body.0.weight", "header.weight"),
        ("body.0.bias", "head.weight"),
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Flat(0.0), "clip_norm must be"),
        (lambda: Flat(math.inf), "clip_norm must be"),
        (lambda: Flat(-1.0), "clip_norm must be"),
        (lambda: PerLayer(()), "clip_norms must be"),
        (lambda: PerLayer((1.0, -1.0)), "clip_norms must be"),
        (lambda: PerLayer((1.0,), "loud"), "noise must be"),
        (lambda: PerGroup((("a",),), (1.0, 2.0)), "as many entries"),
        (lambda: Automatic(1.0, 0.0), "stability must be"),
        (lambda: PerLayer((1.0,)).groups(["a.w", "b.w"]), "each of the 2 layers"),
        (lambda: PerGroup((("a",),), (1.0,)).groups(["b.w"]), "every trainable parameter"),
    ],
)
def test_wrong_rules_are_refused(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()


def test_examples_within_the_clip_norm_are_counted():
    squared, everyone = torch.tensor([[3.9, 4.0, 4.1, 7.9]]), torch.ones(4, dtype=torch.bool)
    _, within = factors_of(Flat(2.0), squared, everyone, rounding=2.0**-17, finite=None)
    assert within.tolist() == [2]


def test_two_sums_add_up_with_their_counts_and_losses():
    one, other = (
        ClippedSum({"w": torch.tensor([1.0 * k])}, torch.tensor([2.0 * k]), 3 * k) for k in (1, 10)
    )
    total = one + other
    assert (total.sums["w"].item(), total.within.item(), total.loss) == (11, 22, 33)


def test_what_is_allowed_for_rounding_shortens_no_gradient_by_much():
    for dtype, rounding in ROUNDING.items():
        assert torch.finfo(dtype).eps / 2 <= rounding < 0.01
