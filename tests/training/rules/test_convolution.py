"""Convolutions and normalizations of the traced program equal a loop over the examples."""

import copy
import math
import warnings

import pytest
import torch
from looped_reference import alone
from slow_cases import one_fast
from torch import nn
from torch.nn import functional as F

from tacit.training import Flat, clipped_sum
from tacit.training.rules import ghost_norm

CLIP = Flat(0.5)


class Apply(nn.Module):
    """`function(module, x)` with the given modules and parameters as attributes."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def total_of(model, batch):
    """A loss of each example that depends on every output, and not in the same way."""
    out = model(batch[0]).flatten(1)
    weights = torch.linspace(-1, 1, out.shape[1], dtype=out.dtype)
    return out.square().mean(1) + (out * weights).sum(1)


def sums(model, x, way=clipped_sum, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return way(model, total_of, (x,), CLIP, **options).sums


def check(model, x, **options):
    model, x = copy.deepcopy(model).double(), x.double()
    expected = sums(model, x, alone)
    # The bounded mode clips by a bound that is up to a share of 2^-12 of the terms above the norm.
    tolerance = {"rtol": 1e-10, "atol": 1e-11} if not options else {"rtol": 0.03, "atol": 0.03}
    for name, total in sums(model, x, **options).items():
        torch.testing.assert_close(total, expected[name], **tolerance)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def frames(layer):
    """A layer for which an example has two rows."""
    return Apply(lambda m, x: m.c(x.flatten(0, 1)).unflatten(0, (-1, 2)), c=layer)


LAYERS = {
    "1d": (lambda: nn.Conv1d(3, 4, 3), (3, 9)),
    "1d, many channels": (lambda: nn.Conv1d(32, 16, 3, padding=2), (32, 9)),
    "1d dilated": (lambda: nn.Conv1d(2, 3, 5, dilation=3, padding=6), (2, 20)),
    "2d strided": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 9, 9)),
    "2d, one channel": (lambda: nn.Conv2d(1, 4, 4, stride=2, padding=1), (1, 9, 8)),
    "2d, one position": (lambda: nn.Conv2d(3, 4, 5), (3, 5, 5)),
    "2d, stride leaves a rest": (lambda: nn.Conv2d(2, 3, 3, stride=3), (2, 10, 11)),
    "2d dilated": (lambda: nn.Conv2d(3, 4, 3, dilation=(2, 1)), (3, 9, 9)),
    "2d pointwise": (lambda: nn.Conv2d(3, 4, 1), (3, 5, 5)),
    "2d pointwise, strided": (lambda: nn.Conv2d(4, 3, 1, stride=2), (4, 5, 5)),
    "2d, many channels": (lambda: nn.Conv2d(16, 32, 3, stride=2, padding=1), (16, 17, 16)),
    "2d in groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 7, 7)),
    "2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), (4, 7, 7)),
    "2d in groups, many channels": (lambda: nn.Conv2d(32, 64, 3, groups=2), (32, 10, 10)),
    "2d same, even kernel": (lambda: nn.Conv2d(3, 4, (4, 3), padding="same"), (3, 7, 7)),
    "2d valid": (lambda: nn.Conv2d(3, 4, 3, padding="valid"), (3, 7, 7)),
    "2d circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 7, 7)),
    "3d": (lambda: nn.Conv3d(2, 3, (1, 2, 3), padding=(0, 1, 1)), (2, 3, 4, 5)),
    "1d transposed": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), (3, 6)),
    "2d transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2),
        (4, 5, 5),
    ),
    "2d transposed, dilated": (lambda: nn.ConvTranspose2d(3, 2, 3, dilation=2), (3, 5, 5)),
    "2d transposed, many channels": (lambda: nn.ConvTranspose2d(16, 32, 3, 2, 1), (16, 9, 9)),
    "3d transposed": (lambda: nn.ConvTranspose3d(2, 3, 2, bias=False), (2, 3, 3, 3)),
    "frames": (lambda: frames(nn.Conv1d(3, 4, 3)), (2, 3, 7)),
    "frames in groups": (lambda: frames(nn.Conv2d(4, 4, 3, groups=2)), (2, 4, 5, 5)),
    "frames, many channels": (lambda: frames(nn.Conv2d(16, 16, 3)), (2, 16, 10, 10)),
    "kernel made of parameters": (
        lambda: Apply(
            lambda m, x: F.conv2d(x, m.w - m.w.mean((1, 2, 3), keepdim=True)),
            w=nn.Parameter(torch.randn(4, 3, 3, 3)),
        ),
        (3, 6, 6),
    ),
    "used twice": (lambda: Apply(lambda m, x: m.c(m.c(x).tanh()), c=nn.Conv2d(3, 3, 3)), (3, 9, 9)),
}


@pytest.mark.parametrize("way", ["gram", "keep", "drop"])
@pytest.mark.parametrize("name", one_fast(LAYERS, 4))
def test_convolutions_equal_the_loop(name, way, monkeypatch):
    monkeypatch.setattr(ghost_norm, "cheapest_way", lambda *_, **__: way)
    build, shape = LAYERS[name]
    check(build(), torch.randn(5, *shape))


@pytest.mark.parametrize("name", one_fast(LAYERS, 4))
def test_bounded_convolutions_are_close_to_the_loop(name):
    build, shape = LAYERS[name]
    check(build(), torch.randn(5, *shape), bounded=True)


@pytest.mark.parametrize("name", one_fast([n for n in LAYERS if n.startswith("2d")], 3))
def test_channels_last_gives_the_same_sums(name):
    build, shape = LAYERS[name]
    model, x = nn.Sequential(build(), nn.ReLU(), nn.MaxPool2d(1)), torch.randn(5, *shape)
    expected = sums(model, x)
    model = model.to(memory_format=torch.channels_last)
    for key, total in sums(model, x.contiguous(memory_format=torch.channels_last)).items():
        torch.testing.assert_close(total, expected[key], rtol=1e-4, atol=1e-5)


NORMS = {
    "layer": (lambda: nn.LayerNorm(5), (4, 5)),
    "layer over two axes": (lambda: nn.LayerNorm((4, 5)), (4, 5)),
    "layer without shift": (lambda: nn.LayerNorm(5, bias=False), (5,)),
    "group": (lambda: nn.GroupNorm(2, 4), (4, 5, 5)),
    "group, one cell": (lambda: nn.Sequential(nn.Conv2d(3, 4, 5), nn.GroupNorm(2, 4)), (3, 5, 5)),
    "instance": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 5, 5)),
    "rms": (lambda: nn.RMSNorm(5), (4, 5)),
    "batch, in evaluation": (lambda: nn.Sequential(nn.BatchNorm2d(4).eval()), (4, 5, 5)),
    "after pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Upsample(scale_factor=2),
            nn.GroupNorm(4, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3), nn.Flatten(),
        ),
        (3, 9, 9),
    ),
}  # fmt: skip


@pytest.mark.parametrize("examples", [1, 5])
@pytest.mark.parametrize("name", one_fast(NORMS, 2))
def test_normalizations_equal_the_loop(name, examples):
    build, shape = NORMS[name]
    check(build(), torch.randn(examples, *shape))


# Non-finite examples ------------------------------------------------------------------------------

OTHERS = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "linear, positions": (lambda: nn.Linear(5, 3), (4, 5)),
    "matrix": (lambda: Apply(lambda m, x: x @ m.w, w=nn.Parameter(torch.randn(5, 3))), (4, 5)),
    "scale": (lambda: Apply(lambda m, x: x * m.w, w=nn.Parameter(torch.randn(5))), (4, 5)),
    "shift": (lambda: Apply(lambda m, x: (x + m.w).square(), w=nn.Parameter(torch.ones(5))), (5,)),
    "table": (
        lambda: Apply(
            lambda m, x: m.e(torch.arange(4).expand(len(x), -1)) * x[..., None],
            e=nn.Embedding(6, 3),
        ),
        (4,),
    ),
    "dead unit": (lambda: nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 3)), (4, 5)),
    "attention": (
        lambda: Apply(
            lambda m, x: F.scaled_dot_product_attention(*m.w(x)[:, None].chunk(3, -1)),
            w=nn.Linear(5, 12),
        ),
        (4, 5),
    ),
    "pooling": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)), (3, 6, 6)),
}
RULES = OTHERS | {f"{name} norm": case for name, case in NORMS.items()} | LAYERS


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("name", one_fast(RULES, 3))
def test_an_example_that_is_not_finite_leaves_the_bits_of_the_others(name, value):
    build, shape = RULES[name]
    model, x = build(), torch.randn(6, *shape)
    spoiled, mask = x.clone(), torch.arange(6) != 2
    spoiled[2].view(-1)[0] = value
    # Without the example, and with the same kernels: it is there, but does not count.
    expected, found = sums(model, x, weights=mask.float()), sums(model, spoiled)
    for key, total in found.items():
        assert torch.equal(total, expected[key])


@pytest.mark.parametrize("way", ["gram", "keep", "drop"])
@pytest.mark.parametrize("name", ["2d strided", "2d, many channels", "2d pointwise", "1d"])
def test_no_way_to_the_norm_spreads_what_is_not_finite(name, way, monkeypatch):
    monkeypatch.setattr(ghost_norm, "cheapest_way", lambda *_, **__: way)
    test_an_example_that_is_not_finite_leaves_the_bits_of_the_others(name, math.inf)
