"""What the first lot sets for good is found, wherever the program keeps it."""

import contextvars
import io
import os
import socket
import sqlite3
import sys
import time

import numpy as np
import pytest
import torch
from mixing_cases import WIDTH, Case, ce, data, model
from slow_cases import one_fast
from torch import nn

import tacit
from tacit.errors import IncompatibleModel
from tacit.training.first_lots import FirstLots

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies of processes need Linux")


def centered(fit):
    """Return a loss on rows minus what `fit` returns, which sees every lot."""
    return Case(model(), lambda m, b: ce(m(b[0] - fit(b[0].detach())), b[1]), data(), "most")


def in_a_generator():
    def keep_first():
        rows = yield
        first = rows.mean(0)
        while True:
            rows = yield first

    kept = keep_first()
    next(kept)
    return centered(kept.send)


def in_the_environment():
    name = f"TACIT_TEST_{time.monotonic_ns()}"

    def fit(x):
        os.environ.setdefault(name, str(float(x.abs().max())))
        return float(os.environ[name])

    return centered(fit)


def in_a_context_variable():
    kept = contextvars.ContextVar("mean", default=None)

    def fit(x):
        if kept.get() is None:
            kept.set(x.mean(0))
        return kept.get()

    return centered(fit)


def in_a_stream_of_bytes():
    kept = io.BytesIO()

    def fit(x):
        if not kept.getvalue():
            kept.write(x.mean(0).numpy().tobytes())
        return torch.from_numpy(np.frombuffer(kept.getvalue(), np.float32).copy())

    return centered(fit)


def in_a_database():
    base = sqlite3.connect(":memory:", check_same_thread=False)
    base.execute("create table kept (mean real)")

    def fit(x):
        if base.execute("select count(*) from kept").fetchone()[0] == 0:
            base.execute("insert into kept values (?)", (float(x.mean()),))
        return base.execute("select mean from kept").fetchone()[0]

    return centered(fit)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        self.mean = torch.zeros(WIDTH)
        self.is_fitted: bool = False

    def forward(self, x):
        if not self.is_fitted:
            self.mean = x.detach().mean(0)
            self.is_fitted = True
        return self.layer(x - self.mean)


def in_a_scripted_module():
    torch.manual_seed(0)
    net = torch.jit.script(Scripted())
    return Case(net, lambda m, b: ce(m(b[0]), b[1]), data(), "most")


def by_the_fifth_lot():
    """The mean of the first five lots, in a generator."""

    def keep_five():
        seen = []
        rows = yield
        while True:
            if len(seen) < 5:
                seen.append(rows.mean(0))
            rows = yield torch.stack(seen).mean(0)

    kept = keep_five()
    next(kept)
    return centered(kept.send)


FITTED = {
    build.__name__: build
    for build in (
        in_a_generator, in_the_environment, in_a_context_variable, in_a_stream_of_bytes,
        in_a_database, in_a_scripted_module, by_the_fifth_lot,
    )
}  # fmt: skip


def make(case, **options):
    return tacit.make_private(
        case.model, torch.optim.SGD(case.model.parameters(), lr=0.0), case.dataset, case.loss_fn,
        batch_size=64, steps=2, clip_norm=1.0, noise_multiplier=1.0, **options,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", one_fast(FITTED, 3))
def test_a_scale_of_the_first_lot_is_refused_wherever_it_is_kept(name):
    with pytest.raises(IncompatibleModel, match="depend on the lot before"):
        make(FITTED[name](), seed=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", FITTED)
def test_a_scale_of_the_first_lot_is_refused_on_fifty_seeds(name):
    for seed in range(50):
        with pytest.raises(IncompatibleModel, match="depend on the lot before"):
            make(FITTED[name](), seed=seed)


def first_lots(losses):
    return FirstLots(losses, (losses,))


LOT = np.arange(3)


def test_copies_start_from_the_same_state_and_leave_nothing_here():
    seen = []

    def losses(indices, seed):
        seen.append(int(indices[0]))
        return torch.full((len(indices), 1), float(sum(seen[:2])), dtype=torch.float64), None

    copies = first_lots(losses)
    for start in (5, 7):
        first = np.array([[start], [10]])
        assert copies(first, LOT, 0, seconds=30).tolist() == [[start + 10.0]] * 3
    assert seen == []


def test_there_is_no_result_for_a_program_that_cannot_run_in_a_copy():
    here, there = socket.socketpair()

    def asking(indices, seed):
        here.send(b"question")
        return torch.zeros(len(indices), 1), None

    def failing(indices, seed):
        raise ValueError("no")

    with here, there:
        there.send(b"message")
        for losses in (asking, failing):
            assert first_lots(losses)(LOT[None], LOT, 0, seconds=30) is None
        assert here.recv(7) == b"message"  # the copy did not take it


def test_a_copy_that_hangs_is_ended():
    copies = first_lots(lambda indices, seed: time.sleep(600))
    assert copies(LOT[None], LOT, 0, seconds=0.2) is None
    assert copies(LOT[None], LOT, 0, seconds=0.2) is None
