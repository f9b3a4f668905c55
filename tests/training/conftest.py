"""A small private problem that the tests of the training loop share."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from speed_options import with_speed
from torch import nn
from torch.nn import functional as F

import tacit


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.fixture
def problem() -> Callable[..., SimpleNamespace]:
    """Makes a run on two Gaussian classes: `problem(noise_multiplier=1.0, ...)`."""

    def make(
        *,
        n=64,
        width=4,
        lr=0.1,
        momentum=0.0,
        model=None,
        data=None,
        loss_fn=cross_entropy,
        optimizer=None,
        model_seed=0,
        **options,
    ):
        torch.manual_seed(model_seed)
        model = (
            nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 2))
            if model is None
            else model
        )
        generator = torch.Generator().manual_seed(1)
        y = torch.arange(n) % 2
        x = torch.randn(n, width, generator=generator) + 2.0 * y[:, None]
        data = (x, y) if data is None else data
        if optimizer is None:
            optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        settings = {"batch_size": 16, "clip_norm": 1.0}
        if not {"steps", "epochs"} & options.keys():
            settings["steps"] = 4
        if not {"epsilon", "noise_multiplier"} & options.keys():
            settings["noise_multiplier"] = 1.0
        private = tacit.make_private(
            model, optimizer, data, loss_fn, **with_speed(settings | options)
        )
        return SimpleNamespace(
            private=private, model=model, optimizer=optimizer, x=x, y=y, loss_fn=loss_fn
        )

    return make
