"""Rounding is not mixing, whatever the weights are; mixing is found beside it."""

import numpy as np
import pytest
import torch
from mixing_cases import CLASSES, WIDTH, ce, data
from slow_cases import one_fast
from torch import nn

from tacit.errors import IncompatibleModel
from tacit.training import Flat, mixing, rounding
from tacit.training.altered_lots import AlteredLots
from tacit.training.isolation import CheckedIsolation
from tacit.training.records import Records


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTM(2, 16, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.out(self.cell(x.view(len(x), -1, 2))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(2, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(2, CLASSES)

    def forward(self, x):
        return self.out(self.layer(x.view(len(x), -1, 2)).mean(1))


LAYERS = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, 300), nn.ReLU(), nn.Linear(300, CLASSES)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 32, 3), nn.ReLU(), nn.Conv1d(32, 32, 3),
        nn.Flatten(), nn.GroupNorm(4, 64), nn.Linear(64, CLASSES),
    ),
    "recurrent": Recurrent,
    "attention": Attention,
    "normalized": lambda: nn.Sequential(
        nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, CLASSES)
    ),
}  # fmt: skip
WEIGHTS = {"new": (0, 1.0), "trained": (100, 1.0), "saturated": (100, 4.0), "huge": (0, 1e4)}


def network(layers: str, weights: str) -> nn.Module:
    torch.manual_seed(0)
    net, (steps, scale) = LAYERS[layers](), WEIGHTS[weights]
    x, y = data()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        ce(net(x), y).mean().backward()
        optimizer.step()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(scale)
    return net


def altered(net: nn.Module, loss_fn, seed: int, rows: int = 100) -> AlteredLots:
    records = Records(data(), collate_fn=None, device=torch.device("cpu"))
    program = CheckedIsolation(net, loss_fn, records, Flat(1.0))
    rng = np.random.default_rng(seed)
    return AlteredLots(program, rng.choice(400, rows, replace=False), rng)


def plain(net, batch):
    return ce(net(batch[0]), batch[1])


def overflowing(net, batch):
    return (80 + ce(net(batch[0]), batch[1])).exp() * 1e3


FAMILY = [(layers, weights) for weights in WEIGHTS for layers in LAYERS]


@pytest.mark.parametrize("kind", one_fast(FAMILY, 7), ids=" ".join)
def test_rounding_is_not_mixing_even_if_it_was_measured_as_none(monkeypatch, kind):
    """Losses near 0 or of huge logits are rounded in steps, which small moves may not show."""
    monkeypatch.setattr(rounding, "ROOM", 0.0)
    net = network(*kind)
    for loss_fn in (plain, overflowing):
        for seed, rows in enumerate((100, 4, 5)):
            lots = altered(net, loss_fn, seed, rows)
            for test in (lots.isolate, lots.remove, lots.replace, lots.remove_gradients):
                test()


class OtherKernel(nn.Linear):
    """A layer that adds in another order if there is one row."""

    def forward(self, x):
        if len(x) > 1:
            return super().forward(x)
        parts = zip(x.split(4, 1), self.weight.split(4, 1), strict=True)
        return sum((part @ weight.T for part, weight in parts), self.bias * 0) + self.bias


@pytest.mark.slow
def test_a_row_alone_may_be_added_in_another_order():
    """Four of 400 tests took the steps in which softmax losses are rounded for mixing."""
    torch.manual_seed(0)
    net, centers = OtherKernel(256, 10), 0.35 * torch.randn(10, 256)
    y = torch.randint(0, 10, (1000,))
    x = centers[y] + torch.randn(1000, 256)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for _ in range(100):
        optimizer.zero_grad()
        ce(net(x), y).mean().backward()
        optimizer.step()
    records = Records((x, y), collate_fn=None, device=torch.device("cpu"))
    rng = np.random.default_rng(0)
    lots = AlteredLots(CheckedIsolation(net, plain, records, Flat(1.0)), np.arange(500), rng)
    for _ in range(500):
        lots.isolate()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_mixing_is_found_beside_rounding(monkeypatch, weights):
    monkeypatch.setattr(rounding, "ROOM", 0.0)
    lots = altered(network("linear", weights), lambda net, b: plain(net, b) / len(b[0]), 0)
    with pytest.raises(IncompatibleModel, match="alone"):
        [lots.isolate() for _ in range(20)]  # a loss of zero stays zero


def test_a_probe_does_not_take_rounding_for_mixing(monkeypatch):
    monkeypatch.setattr(rounding, "ROOM", 0.0)
    monkeypatch.setattr(mixing, "_same", lambda a, b: a is b or torch.equal(a, b))
    x, y = data()
    for weights in WEIGHTS:
        net = network("linear", weights)
        mixing.probe(net, plain, (x[:4], y[:4]), torch.device("cpu"))
        with pytest.raises(IncompatibleModel):
            mixing.probe(
                net, lambda net, b: plain(net, (b[0] - b[0].mean(0), b[1])), (x[:4], y[:4]),
                torch.device("cpu"),
            )  # fmt: skip
