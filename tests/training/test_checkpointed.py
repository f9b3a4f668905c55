"""Blocks that run again in the backward draw the dropout masks of their forward again."""

from functools import partial

import pytest
import torch
from looped_reference import set_up
from peak_memory import peak_bytes
from slow_cases import one_fast
from speed_options import with_speed
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tacit.training import Flat, clipped_sum, make_private

C = 0.05  # clips every example
OPTIONS = {"batch_size": 16, "steps": 3, "clip_norm": C, "noise_multiplier": 0.0, "seed": 5}


class Model(nn.Module):
    """Dropout before, in and after a block that may be checkpointed."""

    def __init__(self, is_checkpointed):
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.first, self.last, self.drop = nn.Linear(4, 16), nn.Linear(16, 2), nn.Dropout(0.5)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), self.drop, nn.Linear(16, 16))

    def forward(self, x):
        x = self.drop(self.first(x))
        for _ in range(2):  # frames are recomputed in reverse order, each with its own masks
            if self.is_checkpointed:
                x = checkpoint(self.block, x, use_reentrant=False)
            else:
                x = self.block(x)
        return self.last(self.drop(x))


def losses(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def released(is_checkpointed, *, foreign=False, records=64, **options):
    """Every noiseless gradient of a run: the clipped sums, divided by the batch size."""
    torch.manual_seed(0)
    model = Model(is_checkpointed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(records, 4), torch.arange(records) % 2
    private = make_private(model, optimizer, (x, y), losses, **with_speed(OPTIONS | options))
    found = []
    for lot in private:
        if foreign:
            private.backward()
            optimizer.step()
        else:
            private.step(lot)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(found)


@pytest.mark.parametrize("rows", one_fast([64, 5], 2))
@pytest.mark.parametrize("way", ["traced", "alone"])
def test_checkpointing_does_not_change_the_sum(way, rows):
    with set_up(way):
        assert torch.equal(*(released(c, max_microbatch=rows) for c in (True, False)))


def test_checkpointing_does_not_change_the_sum_of_a_foreign_loop():
    with_it, without = (released(c, foreign=True) for c in (True, False))
    assert torch.allclose(with_it, without, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # raised inside the compiler
def test_the_compiled_gradient_of_one_record_stays_within_the_clip_norm():
    alone = released(True, records=1, batch_size=1, compile=True)
    assert (alone.norm(dim=1) <= C * (1 + 1e-6)).all()
    assert (alone.norm(dim=1) > 0.9 * C).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # raised inside the compiler
def test_checkpointing_does_not_change_the_compiled_sum():
    with_it, without = (released(c, compile=True) for c in (True, False))
    assert torch.allclose(with_it, without, rtol=1e-4, atol=1e-7)


class Adapted(nn.Module):
    """Blocks of a wide layer with a low-rank adapter, each checkpointed or not."""

    def __init__(self, is_checkpointed, width=96, depth=6):
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "wide": nn.Linear(width, 2 * width),
                    "down": nn.Linear(width, 4, bias=False),
                    "up": nn.Linear(4, 2 * width, bias=False),
                    "back": nn.Linear(2 * width, width),
                }
            )
            for _ in range(depth)
        )
        self.last = nn.Linear(width, 2)

    def forward(self, x):
        for block in self.blocks:
            run = partial(self.run, block)
            x = checkpoint(run, x, use_reentrant=False) if self.is_checkpointed else run(x)
        return self.last(x.mean(1))

    @staticmethod
    def run(block, x):
        h = torch.tanh(x)
        h = F.gelu(block["wide"](h) + block["up"](block["down"](h)))
        return x + block["back"](h)


def memory_over_plain(is_checkpointed, is_trained):
    """Peak memory of a clipped sum over that of an ordinary backward."""
    model = Adapted(is_checkpointed)
    for name, p in model.named_parameters():
        p.requires_grad_(is_trained(name))
    batch = torch.randn(16, 96, 96), torch.arange(16) % 2

    def plain():
        losses(model, batch).sum().backward()
        model.zero_grad()

    def private():
        clipped_sum(model, losses, batch, Flat(1.0))

    for run in (plain, private):
        run()  # traces the model
    return peak_bytes(private) / peak_bytes(plain)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_adapters_take_the_memory_of_an_ordinary_step(is_checkpointed):
    def is_adapter(name):
        return "down" in name or "up" in name

    assert memory_over_plain(is_checkpointed, is_adapter) <= 1.10


def test_all_weights_take_little_more_memory_than_an_ordinary_step():
    assert memory_over_plain(False, lambda _: True) <= 1.15


def test_checkpoints_free_what_lies_between_layers():
    # The input and the output gradient of each layer are held until the clip factors are known.
    assert memory_over_plain(True, lambda _: True) <= 2.6
