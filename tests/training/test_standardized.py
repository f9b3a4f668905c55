"""Standardized weights: the rule gives the gradients of the loop, and is used once per step."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tacit.training import Flat, StandardizedConv2d, clipped_sum, standardize_weight
from tacit.training.engines import bookkeeping
from tacit.training.engines.examples import Examples
from tacit.training.gradients import convolution, generic
from tacit.training.gradients.factored import Dense

generator = torch.Generator().manual_seed(0)
IMAGES = torch.randn(6, 3, 6, 6, generator=generator, dtype=torch.float64)
CLASSES = torch.tensor([0, 1, 2, 3, 0, 1])


def losses(model, batch):
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def network() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        StandardizedConv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        StandardizedConv2d(16, 16, 3, stride=2, groups=2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 4),
    ).double()
    with torch.no_grad():
        model[0].weight[3] = 0.2  # a channel without variance: its norm counts as eps
        model[3].gain.uniform_(-2.0, 2.0)
    return model


def summed(model: nn.Module, engine: str, dtype: torch.dtype, **options) -> torch.Tensor:
    batch = (IMAGES.to(dtype), CLASSES)
    found = clipped_sum(model.to(dtype), losses, batch, engine=engine, **options)
    return torch.cat([part.flatten().double() for part in found.sums.values()])


@pytest.mark.parametrize("bound", [0.05, 1e3])
@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rule_gives_the_sum_of_the_loop_over_examples(monkeypatch, bound, views, dtype):
    monkeypatch.setattr(generic, "pull_back_by_autograd", None)  # the rule does without it
    options = {"clip": Flat(bound), "augmentations": views}
    expected = summed(network(), "loop", dtype, **options)
    found = summed(network(), "bookkeeping", dtype, **options)
    error = (found - expected).norm() / expected.norm()
    assert error < (1e-4 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("bounded", [False, True])
def test_formed_gradients_may_have_their_axes_in_another_order(monkeypatch, views, bounded):
    """A GPU forms them with the input channels last, and does not copy them."""
    orders = []

    def channels_last(self, **_):
        orders.append(self.weight.shape)
        values = formed(self).dense().reshape(self.examples, *self.weight.shape)
        return Dense(values.permute(0, 1, 3, 4, 2).contiguous(), axes=(0, 3, 1, 2))

    def total():
        mask = torch.ones(len(IMAGES) // views, dtype=torch.bool)
        given = Examples(network(), losses, (IMAGES, CLASSES), mask, views, bounded)
        return torch.cat([s.flatten() for s in bookkeeping.run(given, Flat(0.05)).sums.values()])

    expected, formed = total(), convolution.Convolved.formed
    monkeypatch.setattr(convolution.Convolved, "formed", channels_last)
    assert (total() - expected).norm() < 1e-12 * expected.norm()
    assert len(orders) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("bound", [0.05, 1e3])
def test_a_gpu_gives_the_sum_of_the_loop(views, bound):
    options = {"clip": Flat(bound), "augmentations": views}
    expected = summed(network(), "loop", torch.float64, **options)
    batch = (IMAGES.float().cuda(), CLASSES.cuda())
    found = clipped_sum(network().float().cuda(), losses, batch, **options).sums
    found = torch.cat([part.flatten().double().cpu() for part in found.values()])
    assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("frozen", ["weight", "gain"])
def test_what_is_frozen_gets_no_gradient(frozen):
    expected, found = network(), network()
    for model in (expected, found):
        getattr(model[0], frozen).requires_grad_(False)
    options = {"clip": Flat(0.1)}
    close = summed(expected, "loop", torch.float64, **options)
    torch.testing.assert_close(summed(found, "bookkeeping", torch.float64, **options), close)


def test_a_weight_that_two_layers_share_has_its_cross_term():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = StandardizedConv2d(3, 3, 3, padding=1)
            self.head = nn.Linear(108, 4)

        def forward(self, x):
            return self.head(self.convolution(self.convolution(x).relu()).flatten(1))

    model = Twice().double()
    sums = [summed(model, e, torch.float64, clip=Flat(0.1)) for e in ("loop", "bookkeeping")]
    torch.testing.assert_close(sums[1], sums[0])


def test_bounded_sums_have_the_same_value():
    from tacit.training.engines import bookkeeping
    from tacit.training.engines.examples import Examples

    model, batch = network().float(), (IMAGES.float(), CLASSES)
    everyone = torch.ones(6, dtype=torch.bool)
    sums = [
        bookkeeping.run(Examples(model, losses, batch, everyone, 1, bounded), Flat(0.1)).sums
        for bounded in (False, True)
    ]
    for name in sums[0]:
        torch.testing.assert_close(sums[1][name].float(), sums[0][name], rtol=1e-3, atol=1e-6)


def test_an_example_that_moves_the_weights_along_themselves_is_clipped_by_more():
    """Where almost all of h is removed, rounding of the sum is covered by a larger norm."""
    from tacit.training.gradients.standardized import Standardized
    from tacit.training.weight_standardization import unit_rows

    unit, _ = unit_rows(torch.randn(2, 50, generator=generator), 1e-4)
    small = 1e-6 * torch.randn(1, 2, 50, generator=generator)
    values = 1e3 * unit + small
    rest = torch.ones(2, 1), (2, 50), (0, 1)
    found = Standardized(values, (values * unit).sum(2), unit, *rest)
    squared, _ = found.settle(bounded=False)
    exact, u = values.double(), unit.double()
    exact = Standardized(exact, (exact * u).sum(2), u, *rest)
    assert squared.sqrt() > exact.dense().norm() + 1e-5
    far = values + 1e3 * torch.randn(1, 2, 50, generator=generator)  # little of it is removed
    plain = Standardized(far, (far * unit).sum(2), unit, *rest)
    exact_norm = plain.dense().double().norm()
    assert exact_norm < plain.settle(bounded=False)[0].sqrt() < (1 + 1e-4) * exact_norm


def test_weights_have_mean_zero_and_the_norm_of_the_gain():
    weight, gain = torch.randn(5, 3, 3, 3, generator=generator), torch.arange(5.0)
    rows = standardize_weight(weight, gain).flatten(1)
    assert rows.mean(1).abs().max() < 1e-6
    torch.testing.assert_close(rows.norm(dim=1), gain)
    moved = standardize_weight(3 * weight + 7, gain).flatten(1)
    torch.testing.assert_close(moved, rows, rtol=1e-4, atol=1e-5)
