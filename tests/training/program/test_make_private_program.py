"""Runs of the traced program: the releases of the loop over records, whatever the options."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from looped_reference import set_up
from slow_cases import one_fast
from speed_options import with_speed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import tacit
from tacit.errors import IncompatibleModel
from tacit.training import (
    AdaptiveClip,
    Automatic,
    Banded,
    NoisyLoss,
    PerGroup,
    PerLayer,
    Speed,
    Users,
    Views,
)

RECORDS, WIDTH = 60, 5


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))


def data():
    g = torch.Generator().manual_seed(1)
    return torch.randn(RECORDS, WIDTH, generator=g), torch.arange(RECORDS) % 3


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def run(way="traced", *, model=None, loss=loss_fn, dataset=None, steps=4, **options):
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    settings = {"batch_size": 16, "clip_norm": 0.3, "noise_multiplier": 0.5, "seed": 5}
    settings["check"] = way == "traced"
    dataset = data() if dataset is None else dataset
    with set_up(way):
        return model, tacit.make_private(
            model, optimizer, dataset, loss, steps=steps, **with_speed(settings | options)
        )


def trained(way="traced", **options):
    model, private = run(way, **options)
    for lot in private:
        private.step(lot)
    return model, private


def scaled(batch, examples=1):
    x, y = batch
    return x * torch.tensor([[1.0], [2], [3]]).repeat(examples, 1), y


class Listed(Dataset):
    """Records that are no rows of tensors."""

    def __init__(self, make):
        self.x, self.y = data()
        self.make = make

    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        return self.make(self.x[i], int(self.y[i]))


@dataclass
class Pair:
    x: Tensor
    y: Tensor
    task: ClassVar[str] = "a"


def as_pair(records):
    return Pair(torch.stack([x for x, _ in records]), torch.tensor([y for _, y in records]))


IDS = np.repeat(np.arange(24), np.arange(24) % 4 + 1)
OPTIONS = {
    "plain": {},
    "data set": {"dataset": Listed(lambda x, y: (x.numpy(), y))},
    "mapping": {
        "dataset": Listed(lambda x, y: {"x": x, "y": y}),
        "loss": lambda m, b: loss_fn(m, (b["x"], b["y"])),
    },
    "dataclass": {
        "dataset": Listed(lambda x, y: (x, y)),
        "collate_fn": as_pair,
        "loss": lambda m, b: loss_fn(m, (b.x, b.y)),
    },
    "views": {"augment": Views(3, scaled)},
    "users": {"users": Users(ids=IDS, records_per_user=4)},
    "users of a data set": {
        "users": Users(ids=IDS, records_per_user=5),
        "dataset": Listed(lambda x, y: (x, y)),
    },
    "records of users": {"users": Users(ids=IDS, records_per_user=2, sampled="records")},
    "noisy loss": {"noisy_loss": NoisyLoss(upper=2.0)},
    "adaptive": {"clip_norm": AdaptiveClip(0.3)},
    "per layer": {"clip_norm": PerLayer((0.2, 0.1))},
    "per group": {"clip_norm": PerGroup((("0",), ("2",)), (0.2, 0.1))},
    "automatic": {"clip_norm": Automatic(0.3)},
    "bounded": {"arithmetic": "bounded"},
    "banded": {"noise": Banded(bands=3)},
    "microbatches": {"max_microbatch": 5},
    "workers": {"num_workers": 1, "dataset": Listed(lambda x, y: (x, y))},
}
OF_SPEED = ("max_microbatch", "num_workers")


@pytest.mark.parametrize("name", one_fast(OPTIONS, 3))
def test_the_run_is_that_of_the_loop(name):
    options = dict(OPTIONS[name])
    speed = {k: options.pop(k) for k in OF_SPEED if k in options}
    found, private = trained(**(options | {"speed": Speed(**speed)}))
    expected, other = trained("alone", **(options | {"speed": Speed(**speed)}))
    assert private.isolation == "by construction: one traced program per example"
    scale = private.arithmetic.noise_factor / other.arithmetic.noise_factor
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4 + abs(scale - 1), atol=2e-4)


def test_a_loop_leaves_the_losses_to_the_program():
    model, private = run()
    optimizer = private._optimizer
    for _ in private:
        private.backward()
        optimizer.step()
    expected, _ = trained()
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"loss": lambda m, b: loss_fn(m, b).mean()}, ValueError, 'reduction="none"'),
        ({"loss": lambda m, b: m(b[0]).nothing}, AttributeError, "nothing"),
        (
            {
                "dataset": Listed(lambda x, y: (x, y)),
                "collate_fn": lambda r: (*torch.utils.data.default_collate(r), r[0][1]),
                "loss": lambda m, b: loss_fn(m, b[:2]),
            },
            IncompatibleModel,
            r"batch\[2\] is of type int",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(options, error, text):
    with pytest.raises(error, match=text):
        trained(**options)


@pytest.mark.slow
def test_a_compiled_run_takes_the_same_steps():
    x, y = torch.randn(60, 5), torch.randint(3, (60,))
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        private = tacit.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            (x, y),
            lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"),
            batch_size=10,
            steps=6,
            clip_norm=1.0,
            noise_multiplier=1.0,
            seed=3,
            speed=Speed(compile=compile),
        )
        for lot in private:
            private.step(lot)
            if private.steps_taken == 3:
                model.eval()  # a change of the mode drops the graphs
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found)
