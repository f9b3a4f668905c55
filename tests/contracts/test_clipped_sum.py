"""Both ways to sum, for every kind of model, clip rule and batch, equal the loop in float64."""

import looped_reference as reference
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tacit.training import Automatic, Flat, PerGroup, PerLayer, clipped_sum

WAYS = {"traced": clipped_sum, "alone": reference.alone}


class Patches(nn.Module):
    """A small vision transformer: parameters of its own, a token in front, tensors time first."""

    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(2, 8, 2, stride=2)
        self.token, self.places = (nn.Parameter(torch.randn(1, n, 8) / 2) for n in (1, 5))
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.cut(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.block(x.transpose(0, 1))[0])


class Tied(nn.Module):
    """A language model whose head is its token table."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 6), nn.Embedding(6, 6)
        self.norm, self.mix = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return F.linear(self.norm(x + self.mix(x).tanh()).mean(1), self.tokens.weight)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, 5, padding_idx=0)
        self.layer = nn.LSTM(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.layer(self.tokens(ids).transpose(0, 1))[1][0][-1])


class Adapted(nn.Module):
    """A frozen layer with a thin trained one beside it, used twice."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.head = nn.Linear(6, 3)
        self.head.weight.requires_grad_(False)

    def forward(self, x):
        for _ in range(2):
            x = torch.tanh(self.base(x) + self.up(self.down(x)))
        return self.head(x)


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 2, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


MODELS = {
    "logistic": (lambda: nn.Linear(6, 3), (6,)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)), (6,)),
    "convolutional": (convolutional, (2, 4, 4)),
    "vision transformer": (Patches, (2, 4, 4)),
    "tied language model": (Tied, None),
    "recurrent": (Recurrent, None),
    "adapted": (Adapted, (6,)),
}
CLIPS = {
    "flat": lambda model: Flat(0.4),
    "automatic": lambda model: Automatic(0.4),
    "per layer": lambda model: PerLayer.split(model, 0.4),
    "per group": lambda model: PerGroup((("",), _last_layer(model)), (0.3, 0.2)),
}


def _last_layer(model):
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return (names[-1].rpartition(".")[0],)


def problem(name, n=6):
    torch.manual_seed(len(name))
    build, shape = MODELS[name]
    model = build()
    # Sequences of six tokens: with six examples the two axes are as long.
    x = torch.randint(0, 7, (n, 6)) if shape is None else torch.randn(n, *shape)
    return model, (x, torch.randint(0, 3, (n,)))


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", MODELS)
def test_each_way_equals_the_loop(name, clip, way):
    model, batch = problem(name)
    rule = CLIPS[clip](model)
    expected = reference.looped(model, cross_entropy, batch, rule)
    found = WAYS[way](model, cross_entropy, batch, rule)
    assert reference.relative_error(found.sums, expected) < 5e-5  # room in norms
    assert found.within.shape == (len(rule.clip_norms),)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_one_example_is_never_longer_than_the_clip_norm(name, way):
    for clip in (Flat(0.01), PerLayer.split(problem(name)[0], 0.01)):
        model, batch = problem(name, n=1)
        found = WAYS[way](model, cross_entropy, batch, clip)
        assert reference.norm_of(found.sums) <= 0.01


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_each_way_equals_the_loop_in_low_precision(name, way):
    model, (x, y) = problem(name, n=24)
    model = model.to(torch.bfloat16)
    batch = (x.to(torch.bfloat16) if x.is_floating_point() else x), y
    exact = reference.looped(model, cross_entropy, batch, Flat(0.4))
    found = WAYS[way](model, cross_entropy, batch, Flat(0.4))
    # The forward and backward of the model itself round to 8 bits in every operation; so does
    # plain training, whose error is the yardstick.
    plain = torch.autograd.grad(cross_entropy(model, batch).sum(), list(_trained(model).values()))
    true = reference.looped(model, cross_entropy, batch, Flat(1e9))
    yardstick = reference.relative_error(dict(zip(true, plain, strict=True)), true)
    assert reference.relative_error(found.sums, exact) < 1e-2 + 2 * yardstick


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_padding_and_odd_microbatches_change_nothing(name, way):
    model, batch = problem(name, n=7)
    weights = torch.tensor([1, 1, 0, 1, 1, 1, 0])
    expected = reference.looped(model, cross_entropy, batch, Flat(0.4), weights=weights)
    chunks = {"chunk": 3} if way == "traced" else {}
    found = WAYS[way](model, cross_entropy, batch, Flat(0.4), weights=weights, **chunks)
    assert reference.relative_error(found.sums, expected) < 5e-5  # room in norms


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_example_that_is_not_finite_gives_nothing(name, bad, way):
    model, (x, y) = problem(name)

    def poisoned(model, batch):
        y = batch[1]
        return cross_entropy(model, batch) * torch.where(y == 0, bad, 1.0)

    expected = reference.looped(model, poisoned, (x, y), Flat(0.4))
    found = WAYS[way](model, poisoned, (x, y), Flat(0.4))
    assert reference.relative_error(found.sums, expected) < 5e-5  # room in norms


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_views_are_averaged_before_clipping(name, way):
    model, batch = problem(name, n=6)
    expected = reference.looped(model, cross_entropy, batch, Flat(0.2), augmentations=2)
    found = WAYS[way](model, cross_entropy, batch, Flat(0.2), augmentations=2)
    assert reference.relative_error(found.sums, expected) < 5e-5  # room in norms


def _trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
