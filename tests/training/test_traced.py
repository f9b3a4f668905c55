"""isolation="strict": a traced program is a function of one example, or it is refused."""

import itertools
import os
import re

import numpy as np
import pytest
import torch
from slow_cases import one_fast
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset

import tacit
from tacit.errors import IncompatibleModel

TOTAL = [0.0]  # state of an operator that was not written by torch


@torch.library.custom_op("test_traced::signed_by_total", mutates_args=())
def signed_by_total(x: torch.Tensor) -> torch.Tensor:
    TOTAL[0] += float(x.sum())
    return x.clone() if TOTAL[0] >= 0 else -x


signed_by_total.register_fake(torch.empty_like)
signed_by_total.register_autograd(lambda _, gradient: gradient)


class Sequences(Dataset):
    """Twelve sequences; that of number 10 is multiplied by `scale`, or has a length of its own."""

    def __init__(self, scale, length=4):
        generator = torch.Generator().manual_seed(0)
        self.records = [torch.randn(4, 3, generator=generator) for _ in range(12)]
        self.records[10] = scale * self.records[10][:length]

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return self.records[i], i % 2


class Program(nn.Module):
    """A linear layer whose input `change` alters, with a buffer that `change` may use."""

    def __init__(self, change):
        super().__init__()
        self.change, self.layer = change, nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        return self.layer(self.change(self, x.mean(1)))


def counts_calls(model, x):
    model.count += 1
    return x * torch.cos(3.14 * model.count[0])


def counts_in_a_view(model, x):
    model.count.view(2, 2)[1:].add_(1)
    return x * torch.cos(3.14 * model.count[3])


def counts_by_index(model, x):
    model.count[0] = model.count[0] + 1
    return x * torch.cos(3.14 * model.count[0])


def counts_in_data(model, x):
    model.count.data.add_(1)
    return x * torch.cos(3.14 * model.count[0])


def counts_into_out(model, x):
    torch.add(model.count, 1, out=model.count)
    return x * torch.cos(3.14 * model.count[0])


def moves_the_weights(model, x):
    model.layer.weight.data.mul_(-1)
    return x


def writes_the_example(model, x):
    model.count[:3] += x.detach()[0]
    return x * model.count[:3]


def calls_an_operator_with_state(_, x):
    return signed_by_total(x)


def writes_into_its_own_tensors(model, x):
    found = x + model.count[:3]
    found[:, 1:].mul_(2.0)
    return F.relu_(found).add_(1.0)


def private(change, scale=1.0, length=4):
    torch.manual_seed(0)
    model = Program(change)

    def loss_fn(model, batch):
        return F.cross_entropy(20 * model(batch[0]), batch[1], reduction="none")

    return model, tacit.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.0), Sequences(scale, length), loss_fn,
        batch_size=12, steps=1, clip_norm=1.0, noise_multiplier=0.0, isolation="strict",
        check=False,
    )  # fmt: skip


SHARED = [
    counts_calls,
    counts_in_a_view,
    counts_by_index,
    counts_in_data,
    counts_into_out,
    moves_the_weights,
    writes_the_example,
    calls_an_operator_with_state,
]


@pytest.mark.parametrize("change", SHARED, ids=lambda change: change.__name__)
def test_strict_refuses_whatever_outlasts_one_example(change):
    """A counter of calls moved the sum by 2.8 clip norms when one record was replaced."""
    with pytest.raises(
        IncompatibleModel, match=r"writes into a tensor|operator that is not torch's own"
    ):
        private(change)


def test_strict_takes_writes_into_tensors_of_the_example_itself():
    released = []
    for scale in (1.0, -3.0):
        model, run = private(writes_into_its_own_tensors, scale)
        for lot in run:
            run.step(lot)
        released.append(12 * torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert 0 < (released[0] - released[1]).norm() <= 2.0


def number_in(text):
    return float(re.findall(r"-?\d+\.?\d*", text)[0])


ROUTES = {
    "a shared array": lambda _, x: x * float(np.from_dlpack(x.detach()).max()),
    "text": lambda _, x: x * number_in(repr(x.detach())),
    "a list of tensors": lambda _, x: x * torch.tensor([x.detach().max()]),
    "a branch on text": lambda _, x: x * (2 if len(repr(x.detach())) > 24 else 1),
    "a parameter": lambda m, x: x * torch.tensor([m.layer.weight.detach().max()]),
    "numpy's random numbers": lambda _, x: x * np.random.rand(),  # noqa: NPY002
    "numbers of the system": lambda _, x: x * os.urandom(1)[0],
}


@pytest.mark.parametrize("route", one_fast(ROUTES, 3))
def test_strict_refuses_values_that_python_code_has_read(route):
    """They would be constants of the trace: the gradients of another program."""
    with pytest.raises(IncompatibleModel, match="by Python code"):
        private(ROUTES[route])


def test_strict_refuses_results_whose_shapes_depend_on_values():
    def cut(_, x):
        return x * torch.bincount(x.detach().abs().long().flatten(), minlength=3).reshape(-1)[:3]

    with pytest.raises(IncompatibleModel, match="shapes depend on values"):
        private(cut)


def test_strict_refuses_records_of_several_shapes():
    _, run = private(lambda _, x: x, length=3)
    (lot,) = itertools.islice(run, 1)
    with pytest.raises(IncompatibleModel, match="one public length"):
        run.step(lot)


class Summing(torch.Tensor):
    """Rows taken of it have the sum of all rows taken before subtracted."""

    total = 0.0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        if func in (torch.Tensor.index_select, torch.Tensor.__getitem__):
            found = found.as_subclass(torch.Tensor)
            cls.total, found = cls.total + float(found.sum()), found - cls.total
        return found


@pytest.mark.parametrize("wrap", [tuple, lambda parts: Subset(TensorDataset(*parts), range(12))])
def test_tensors_of_a_subclass_are_read_in_processes(wrap):
    sums = []
    for scale in (1.0, 500.0):
        torch.manual_seed(0)
        Summing.total, model, x = 0.0, nn.Linear(3, 2), torch.randn(12, 3)
        x[3] *= scale
        run = tacit.make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.0),
            wrap((x.as_subclass(Summing), torch.arange(12) % 2)),
            lambda model, b: model(b[0]).square().sum(1),
            batch_size=12, steps=1, clip_norm=1.0, noise_multiplier=0.0, isolation="strict",
            check=False,
        )  # fmt: skip
        for lot in run:
            run.step(lot)
        sums.append(12 * torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert float((sums[0] - sums[1]).norm()) <= 2.001
