"""Blocks that run again in the backward draw the dropout masks of their forward again."""

import pytest
import torch
from slow_cases import one_fast
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tacit.training import make_private

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


def released(is_checkpointed, *, foreign=False, records=64, loss_fn=losses, **options):
    """Every noiseless gradient of a run: the clipped sums, divided by the batch size."""
    torch.manual_seed(0)
    model = Model(is_checkpointed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(records, 4), torch.arange(records) % 2
    private = make_private(model, optimizer, (x, y), loss_fn, **(OPTIONS | options))
    found = []
    for lot in private:
        if foreign:
            private.backward(losses(model, lot))
            optimizer.step()
        else:
            private.step(lot)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(found)


@pytest.mark.parametrize("rows", one_fast([64, 5], 2))
@pytest.mark.parametrize("engine", ["bookkeeping", "loop"])
def test_checkpointing_does_not_change_the_sum(engine, rows):
    options = {"engine": engine, "max_microbatch": rows}
    assert torch.equal(released(True, **options), released(False, **options))


@pytest.mark.parametrize("loss_fn", [losses, None])
def test_checkpointing_does_not_change_the_sum_of_a_foreign_loop(loss_fn):
    with_it, without = (released(c, foreign=True, loss_fn=loss_fn) for c in (True, False))
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
