"""The probe names the layer that lets one example see another."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.errors import IncompatibleModel


class Centered(nn.Module):
    """Takes the mean over the batch away: no layer of a known kind."""

    def forward(self, x):
        return x - x.mean(dim=0, keepdim=True)


class OwnForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) / x.norm()


class Attending(nn.Module):
    """Attention over the batch, as if it were a sequence."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.head(mixed)


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def contrastive(model, batch):
    x, _ = batch
    z = model(x)
    return -(z @ z.T).log_softmax(1).diagonal()


def start(model, loss_fn):
    torch.manual_seed(0)
    data = torch.randn(30, 4), torch.randint(0, 2, (30,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return tacit.make_private(
        model, optimizer, data, loss_fn, batch_size=10, steps=1, clip_norm=1.0, noise_multiplier=1.0
    )


@pytest.mark.parametrize(
    ("model", "loss_fn", "place"),
    [
        (nn.Sequential(nn.Linear(4, 4), Centered(), nn.Linear(4, 2)), cross_entropy, r"1 \(Center"),
        (
            nn.Sequential(nn.Sequential(nn.Linear(4, 4), Centered()), nn.Linear(4, 2)),
            cross_entropy,
            r"0\.1 \(Centered\)",
        ),
        (OwnForward(), cross_entropy, "the forward of OwnForward itself"),
        (Attending(), cross_entropy, r"attention \(MultiheadAttention\)"),
        (nn.Linear(4, 2), contrastive, "in loss_fn"),
    ],
    ids=["layer", "inner layer", "own forward", "attention", "loss"],
)
def test_the_place_that_mixes_is_named(model, loss_fn, place):
    with pytest.raises(IncompatibleModel, match=place):
        start(model, loss_fn)


def test_no_hook_stays_behind():
    model = nn.Sequential(nn.Linear(4, 4), Centered(), nn.Linear(4, 2))
    with pytest.raises(IncompatibleModel):
        start(model, cross_entropy)
    assert not any(layer._forward_hooks for layer in model.modules())
