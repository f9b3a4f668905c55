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


def short_of_memory(most, error, *, late=0):
    """Return losses that fail on more than `most` rows, from call `late` on."""
    calls = [0]

    def loss_fn(model, batch):
        calls[0] += 1
        if calls[0] > late and len(batch[0]) > most:
            raise error
        return losses(model, batch)

    return loss_fn


NO_MEMORY = {
    "cpu": RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory"),
    "gpu": torch.OutOfMemoryError("CUDA out of memory"),
    "python": MemoryError(),
}


def small(loss_fn, **options):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(400, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"batch_size": BATCH, "steps": 3, "clip_norm": 1.0, "noise_multiplier": 1.0}
    return make_private(
        model, optimizer, (x, torch.arange(400) % 2), loss_fn, seed=0, **(settings | options)
    )


@pytest.mark.parametrize("kind", NO_MEMORY)
@pytest.mark.parametrize("most", [40, 16, 5])
def test_tests_take_half_of_the_rows_when_memory_runs_out(kind, most):
    """The program needs a buffer of its own for each row: only a run on few rows fits."""
    run = small(short_of_memory(most, NO_MEMORY[kind]))
    assert re.fullmatch(r"tested, \d\d+ checks", run.isolation)
    assert run._isolation.halves == 16
    assert most / 2 < run.microbatch <= most
    for lot in run:
        run.step(lot)


def test_memory_that_does_not_suffice_for_any_rows_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        small(short_of_memory(3, NO_MEMORY["gpu"]))


def test_mixing_is_found_on_the_rows_that_fit():
    fits = short_of_memory(16, NO_MEMORY["cpu"])

    def mixing(model, batch):
        x, y = batch
        return fits(model, (x - x.mean(0), y))

    with pytest.raises(IncompatibleModel):
        small(mixing, check=True)


def test_a_test_during_the_run_takes_half_of_the_rows_when_memory_runs_out():
    """Memory of other programs may be gone when the run has begun."""
    short = [10**9]

    def loss_fn(model, batch):
        if len(batch[0]) > short[0]:
            raise NO_MEMORY["cpu"]
        return losses(model, batch)

    run = small(loss_fn)
    before = run._isolation.checks
    for lot in run:
        short[0], run._isolation.next_check = 20, 0
        run.step(lot)
        assert run.microbatch <= 20
    assert run._isolation.checks == before + 3
