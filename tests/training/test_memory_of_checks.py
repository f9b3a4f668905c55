"""make_private tests a program within the memory that a step of it needs."""

import re

import pytest
import torch
from peak_memory import peak_bytes
from torch import nn
from torch.nn import functional as F

from tacit.errors import IncompatibleModel
from tacit.training import make_private
from tacit.training.rounding import norm_of_difference, summary_of

BATCH = 64


def losses(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def table():
    """A large table, of which an example uses few rows: gradients take the memory."""
    model = nn.Sequential(nn.EmbeddingBag(100_000, 64), nn.Linear(64, 2))
    return model, torch.randint(100_000, (1000, 32))


def deep():
    """Many layers on long examples: activations take the memory."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(24, 24), nn.Tanh())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24 * 200, 2)), torch.randn(1000, 200, 24)


@pytest.mark.parametrize("build", [table, deep])
def test_tests_before_the_first_step_keep_within_the_memory_of_a_step(build, monkeypatch):
    monkeypatch.setattr("tacit.training.memory_limit._SMALL", 0)  # as for a large model
    torch.manual_seed(0)
    model, x = build()
    y = torch.arange(1000) % 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"batch_size": BATCH, "steps": 2, "clip_norm": 1.0, "noise_multiplier": 1.0}

    def plain():
        losses(model, (x[:BATCH], y[:BATCH])).mean().backward()
        optimizer.step()

    needed = peak_bytes(plain)
    optimizer.state.clear()
    model.zero_grad()
    checks = peak_bytes(lambda: make_private(model, optimizer, (x, y), losses, **options))
    # A Poisson lot may be larger than the batch size: by 1.25 standard deviations, then it is cut.
    room = 1.25 / BATCH**0.5 if build is deep else 0.0
    assert checks <= (1.15 + room) * needed


def test_gradients_are_compared_in_pieces_whether_sparse_or_not():
    torch.manual_seed(0)
    rows, others = torch.tensor([[1, 4, 7]]), torch.tensor([[1, 5]])
    a = torch.sparse_coo_tensor(rows, torch.randn(3, 5), (9, 5), check_invariants=True).coalesce()
    b = torch.sparse_coo_tensor(others, torch.randn(2, 5), (9, 5), check_invariants=True).coalesce()
    c, d = torch.randn(300_000), torch.randn(300_000).double()
    whole = [torch.cat([t.to_dense().flatten().double() for t in g]) for g in ((a, c), (b, d))]
    expected = float((whole[0] - whole[1]).norm())
    for first in (a, a.to_dense()):
        for second in (b, b.to_dense()):
            assert norm_of_difference([first, c], [second, d]) == pytest.approx(expected)
        assert norm_of_difference([first, c]) == pytest.approx(float(whole[0].norm()))
        assert norm_of_difference([first, c], [first, c]) == 0
        assert summary_of([first, c]).tolist() == pytest.approx(summary_of([whole[0]]).tolist())


class Penalized(nn.Module):
    """A model whose losses need the gradient with respect to the input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        out = torch.tanh(self.layer(x)).squeeze(1)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.square().sum(1)


def mixed(model, batch):
    losses = model(batch[0])
    return losses * losses.mean() if len(losses) > 4 else losses


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # no fast engine takes it
def test_a_program_that_takes_gradients_itself_is_tested_too():
    model = Penalized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"batch_size": 8, "steps": 2, "clip_norm": 1.0, "noise_multiplier": 1.0}
    run = make_private(model, optimizer, torch.randn(40, 3), lambda m, b: m(b[0]), **options)
    assert re.fullmatch(r"tested, \d\d+ checks", run.isolation)
    with pytest.raises(IncompatibleModel, match="other examples"):
        make_private(model, optimizer, torch.randn(40, 3), mixed, **options)
