"""Programs that set something by their first lot and keep it where Python cannot put it back."""

import contextvars
import io
import os
import sqlite3
import time
import warnings

import numpy as np
import torch
from mixing_cases import WIDTH, Case, case, ce, data, model
from torch import nn


def centered(fit):
    """Return a loss on rows minus what `fit` returns, which sees every lot."""
    return Case(model(), lambda m, b: ce(m(b[0] - fit(b[0].detach())), b[1]), data(), "most")


@case("most")
def a_scale_of_the_first_lot_in_a_generator():
    def keep_first():
        rows = yield
        first = rows.mean(0)
        while True:
            rows = yield first

    kept = keep_first()
    next(kept)
    return centered(kept.send)


@case("most")
def a_scale_of_the_first_lot_in_the_environment():
    name = f"TACIT_TEST_{time.monotonic_ns()}"

    def fit(x):
        os.environ.setdefault(name, str(float(x.abs().max())))
        return float(os.environ[name])

    return centered(fit)


@case("most")
def a_scale_of_the_first_lot_in_a_context_variable():
    kept = contextvars.ContextVar("mean", default=None)

    def fit(x):
        if kept.get() is None:
            kept.set(x.mean(0))
        return kept.get()

    return centered(fit)


@case("most")
def a_scale_of_the_first_lot_in_a_stream_of_bytes():
    kept = io.BytesIO()

    def fit(x):
        if not kept.getvalue():
            kept.write(x.mean(0).numpy().tobytes())
        return torch.from_numpy(np.frombuffer(kept.getvalue(), np.float32).copy())

    return centered(fit)


@case("most")
def a_scale_of_the_first_lot_in_a_database():
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


@case("most")
def a_scale_of_the_first_lot_in_a_scripted_module():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        net = torch.jit.script(Scripted())
    return Case(net, lambda m, b: ce(m(b[0]), b[1]), data(), "most")


@case("most")
def a_mean_of_the_first_five_lots_in_a_generator():
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
