"""Weights after seeded private runs: tiny models in float64, three steps each.

The name of a run says model, setting and way: "default", or "single" for a program that cannot be
traced and runs on one record at a time. Weights start
from numpy's generator, so that no library's default initialization is recorded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import tacit
from tacit import sampling
from tacit.training import (
    EMA,
    AdamBC,
    AdaptiveClip,
    Automatic,
    Banded,
    Flat,
    Noise,
    NoisyLoss,
    PerGroup,
    PerLayer,
    Private,
    Ramp,
    Reports,
    ScheduledClip,
    Speed,
    Stairs,
    Users,
    Views,
)

N, STEPS, BATCH, CLIP_NORM = 60, 3, 12, 0.4
WAYS = ("default", "single")


def run_of(model, optimizer, data, loss_fn, *, way: str, speed: dict, **options) -> Private:
    """Return the run of one recorded case: the one place that calls `make_private`.

    The comparison before the run releases nothing and is left out.
    """
    settings = {"batch_size": BATCH, "clip_norm": CLIP_NORM, "seed": 7}
    if not {"steps", "epochs"} & options.keys():
        settings["steps"] = STEPS
    if not {"epsilon", "noise_multiplier"} & options.keys():
        settings["noise_multiplier"] = 0.8
    loss = one_at_a_time(loss_fn) if way == "single" else loss_fn
    chosen = Speed(check=False, **speed)
    return tacit.make_private(model, optimizer, data, loss, speed=chosen, **(settings | options))


def one_at_a_time(loss_fn):
    """Return the same losses by a program that cannot be traced, because it asks for a value."""

    def losses(model, batch):
        found = loss_fn(model, batch)
        return found if bool(found.detach().sum() > -1e9) else found * 2

    return losses


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 4), nn.Parameter(torch.zeros(5, 4))
        self.block = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.block(self.tokens(ids) + self.places).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind, *, is_packed=False):
        super().__init__()
        self.tokens, self.layer = nn.Embedding(7, 3), kind(3, 3, batch_first=True)
        self.head, self.is_packed = nn.Linear(3, 3), is_packed

    def forward(self, ids):
        x = self.tokens(ids)
        if self.is_packed:
            lengths = (ids > 0).sum(1).clamp(min=1).cpu()
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        state = self.layer(x)[1]
        return self.head((state[0] if isinstance(state, tuple) else state)[-1])


class Tied(nn.Module):
    """A language model whose head is its token table."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm, self.mix = nn.Embedding(7, 5), nn.LayerNorm(5), nn.Linear(5, 5)

    def forward(self, ids):
        x = self.tokens(ids)
        return F.linear(self.norm(x + self.mix(x).tanh()).mean(1), self.tokens.weight)


class Adapted(nn.Module):
    """A frozen layer with a thin trained one beside it, used twice."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for _ in range(2):
            x = torch.tanh(self.base(x) + self.up(self.down(x)))
        return self.head(x)


class Own(nn.Module):
    """Parameters that no layer of torch holds."""

    def __init__(self):
        super().__init__()
        self.scale, self.cube = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4, 2, 3))

    def forward(self, x):
        return torch.einsum("bi,ijk->bk", (x * self.scale).sin(), self.cube.tanh())


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 3, 2, bias=False), nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip


def strided() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 2, stride=2), nn.InstanceNorm2d(4, affine=True), nn.SiLU(),
        nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def signal() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2, dilation=2, padding=1), nn.Tanh(),
        nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def perceptron(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), *between, nn.Tanh(), nn.Linear(5, 3))


class Problem(NamedTuple):
    """An architecture and the shape of its inputs; None for five tokens."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] | None = (4,)


MODELS = {
    "logistic": Problem(lambda: nn.Linear(4, 3)),
    "perceptron": Problem(perceptron),
    "layer norm": Problem(lambda: perceptron(nn.LayerNorm(5))),
    "rms norm": Problem(lambda: perceptron(nn.RMSNorm(5))),
    "dropout": Problem(lambda: perceptron(nn.Dropout(0.3))),
    "convolutional": Problem(convolutional, (1, 4, 4)),
    "strided": Problem(strided, (1, 4, 4)),
    "signal": Problem(signal),
    "transformer": Problem(Transformer, None),
    "lstm": Problem(lambda: Recurrent(nn.LSTM), None),
    "gru": Problem(lambda: Recurrent(nn.GRU), None),
    "packed gru": Problem(lambda: Recurrent(nn.GRU, is_packed=True), None),
    "bag": Problem(lambda: nn.Sequential(nn.EmbeddingBag(7, 4, mode="sum"), nn.Linear(4, 3)), None),
    "table": Problem(
        lambda: nn.Sequential(nn.Embedding(40, 3), nn.Flatten(), nn.Linear(15, 3)), None
    ),
    "tied": Problem(Tied, None),
    "adapted": Problem(Adapted),
    "own parameters": Problem(Own),
}


def problem(name: str) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Return a model in float64 and its records."""
    rng = np.random.default_rng(len(name))
    build, shape = MODELS[name]
    model = build().double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.from_numpy(rng.normal(0, 0.5, p.shape)))
    x = rng.integers(0, 7, (N, 5)) if shape is None else rng.normal(0, 1.5, (N, *shape))
    return model, (torch.from_numpy(x), torch.from_numpy(rng.integers(0, 3, N)))


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def of_columns(model, batch):
    x = torch.stack([batch[name] for name in "abcd"], 1)
    return F.cross_entropy(model(x), batch["y"], reduction="none")


SGD = partial(torch.optim.SGD, lr=0.5)
OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.3, momentum=0.9, nesterov=True),
    "decay": partial(torch.optim.SGD, lr=0.3, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.05),
    "adamw": partial(torch.optim.AdamW, lr=0.05, amsgrad=True),
    "adam without bias": partial(AdamBC, lr=0.05),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.02),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


def weights(
    model: str = "perceptron",
    *,
    way: str = "default",
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    clip: Callable[[nn.Module], Any] | None = None,
    adaptive: Callable[[Any], AdaptiveClip] | None = None,
    loop: Callable[..., list[Any]] | None = None,
    data: Callable[..., Any] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = cross_entropy,
    speed: dict | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """Return what a run releases: all trained weights, and what `loop` adds."""
    net, records = problem(model)
    trained = [p for p in net.parameters() if p.requires_grad]
    if clip is not None:
        options["clip_norm"] = clip(net)
    if adaptive is not None:
        options["clip_norm"] = adaptive(options.get("clip_norm", CLIP_NORM))
    records = records if data is None else data(*records)
    held = optimizer(net.parameters())
    options = {"way": way, "speed": speed or {}} | options
    again = partial(run_of, net, held, records, loss_fn, **options)
    more = (steps if loop is None else loop)(again, net, held)
    return [np.array(part.detach().tolist()) for part in [*trained, *map(torch.as_tensor, more)]]


def steps(make, net, optimizer) -> list[Any]:
    private = make()
    for lot in private:
        private.step(lot)
    return []


def by_backward(make, net, optimizer) -> list[Any]:
    private = make()
    for _ in private:
        private.backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def with_schedule(make, net, optimizer) -> list[Any]:
    private = make()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in private:
        private.backward()
        optimizer.step()
        schedule.step()
    return []


def with_means(make, net, optimizer) -> list[Any]:
    private, means = make(), EMA(net, decay=0.6)
    for lot in private:
        private.step(lot)
        means.update()
    return list(means.state_dict()["means"].values())


def with_reports(make, net, optimizer) -> list[Any]:
    found = []
    private = make(reports=Reports(noisy_loss=LOSS, callbacks=[found.append]))
    for lot in private:
        private.step(lot)
    return [[step.loss for step in found], [step.epoch_loss or 0.0 for step in found]]


def with_gradients(make, net, optimizer) -> list[Any]:
    private, found = make(), []
    for lot in private:
        private.step(lot, update=False)
        found += [p.grad.clone() for p in net.parameters() if p.requires_grad]
    return found


def resumed(make, net, optimizer) -> list[Any]:
    """Take two steps, save, and continue in another run that pays from the same ledger."""
    ledger = tacit.Ledger()
    private = make(ledger=ledger)
    for lot in private:
        private.step(lot)
        if private.steps_taken == 2:
            break
    saved = private.state_dict()
    del private
    private = make(ledger=ledger)
    private.load_state_dict(saved)
    for lot in private:
        private.step(lot)
    return []


def shifted_views(batch):
    """Turn the rows of an example, which follow each other, into different views."""
    x, y = batch
    factor = 1 + 0.1 * (torch.arange(len(x)) % 3).to(x.dtype)
    return x * factor.view(-1, *[1] * (x.ndim - 1)), y


def random_views(batch):
    x, y = batch
    return x + 0.1 * torch.randn_like(x), y


def last_apart(net: nn.Module) -> PerGroup:
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    return PerGroup((("",), (names[-1].rpartition(".")[0] or names[-1],)), (0.3, 0.2))


CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "flat": lambda net: Flat(0.3),
    "loose": lambda net: Flat(30.0),
    "automatic": lambda net: Automatic(0.4),
    "per layer": lambda net: PerLayer.split(net, 0.4),
    "per layer in proportion": lambda net: PerLayer.split(net, 0.4, noise="proportional"),
    "per group": last_apart,
}
LOSS = NoisyLoss(upper=4.0, share=0.05)
ADAPTIVE = {
    "adaptive": partial(AdaptiveClip, count_noise_std=2.0),
    "adaptive high": partial(AdaptiveClip, quantile=0.8, learning_rate=0.5),
}

IDS = [f"person {number}" for number in np.random.default_rng(0).integers(0, 25, N)]
USERS = {
    "mean": Users(ids=IDS, records_per_user=20),
    "sum": Users(ids=IDS, records_per_user=20, combine="sum"),
    "few": Users(ids=IDS, records_per_user=2, combine="sum"),
    "records": Users(ids=IDS, records_per_user=3, sampled="records"),
    "all different": list(range(N)),
}


def in_order(steps: int) -> sampling.FixedOrder:
    return sampling.FixedOrder(steps, places=[(7 * i) % steps for i in range(N)])


STREAM = sampling.Stream(
    [[(3 * i + 5 * step) % N for i in range(10)] for step in range(8)],
    separation=3, participations=2, expected_batch=BATCH,
)  # fmt: skip
BANDS: dict[str, dict[str, Any]] = {
    "two": {"noise": Banded(bands=2)},
    "four": {"noise": Banded(bands=4), "steps": 8},
    "last weights": {"noise": Banded(bands=3, average=0.0), "steps": 6},
    "average of all": {"noise": Banded(bands=3, average=1.0), "steps": 6},
    "restart": {"noise": Banded(bands=3, restart=3), "batch_size": in_order(3), "steps": 6},
    "order": {"noise": Banded(bands=4), "batch_size": in_order(4), "steps": 8},
    "stream": {"noise": Banded(bands=3), "batch_size": STREAM, "steps": 8},
    "chosen": {"noise": Banded(), "steps": 16, "batch_size": 6, "epsilon": 2.0, "delta": 1e-3},
}  # fmt: skip
SCHEDULES: dict[str, dict[str, Any]] = {
    "clip stairs": {"clip_norm": ScheduledClip(CLIP_NORM, Stairs((1.0, 0.5)))},
    "noise stairs": {"noise": Noise(schedule=Stairs((1.0, 1.5, 2.0)))},
    "clip linear": {"clip_norm": ScheduledClip(CLIP_NORM, Ramp(1.0, 0.4))},
    "noise exponential": {"noise": Noise(schedule=Ramp(2.0, 0.5, is_geometric=True))},
    "both by functions": {
        "clip_norm": ScheduledClip(CLIP_NORM, lambda step, steps: 1 - 0.5 * step / steps),
        "noise": Noise(schedule=lambda step, steps: 1 + step / steps),
    },
    "noise for a budget": {
        "noise": Noise(schedule=Stairs((1.0, 2.0))), "epsilon": 3.0, "delta": 1e-3,
    },
    "budget": {"epsilon": 3.0, "delta": 1e-3},
    "budget in epochs": {"epsilon": 3.0, "delta": 1e-3, "epochs": 1},
    "budget of more": {"epsilon": 3.0, "delta": 1e-3, "also": tacit.events.Laplace(4.0)},
    "no noise": {"noise_multiplier": 0.0},
    "secure": {"noise": Noise(secure=True)},
    "declared size": {"n_records": 72},
}  # fmt: skip
SAMPLERS = {
    "fixed size": sampling.FixedSize(BATCH, n_records=N),
    "truncated": sampling.TruncatedPoisson(0.2, 10, n_records=N),
    "allocation": sampling.RandomAllocation(5),
    "shuffled": sampling.Shuffle(1, n_records=N, unamplified=True),
    "turns": sampling.CyclicPoisson(0.6, groups=3),
    "order": in_order(5),
}
SPEEDS = {
    "microbatches": {"max_microbatch": 5},
    "workers": {"num_workers": 2},
}


class Listed(torch.utils.data.Dataset):
    """Records of different lengths, as a data set gives them."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i][: 2 + i % 4], int(self.y[i])

    @staticmethod
    def collate(records):
        rows = [F.pad(x, (0, 5 - len(x))) for x, _ in records]
        return torch.stack(rows), torch.tensor([y for _, y in records])


def as_table(x, y):
    return pd.DataFrame(x.numpy(), columns=list("abcd")).assign(y=y.numpy())


def as_arrays(x, y):
    return x.numpy(), y.numpy()


def _settings() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}

    def add(group: str, name: str, ways=("default",), **options: Any) -> None:
        for way in ways:
            found[f"{group}/{name}/{way}"] = {"way": way} | options

    optimizers = [SGD, *OPTIMIZERS.values()]
    for number, model in enumerate(MODELS):
        add("model", model, WAYS, model=model, optimizer=optimizers[number % len(optimizers)])
    for name in ("perceptron", "convolutional", "tied", "lstm"):
        for clip, rule in CLIPS.items():
            add("clip", f"{name}, {clip}", model=name, clip=rule)
    for name, rule in ADAPTIVE.items():
        for clip in ("flat", "per layer", "automatic"):
            add("clip", f"{name}, {clip}", WAYS, clip=CLIPS[clip], adaptive=rule)
    for name in ("perceptron", "convolutional", "signal"):
        add("views", f"{name}, shifted", WAYS, model=name, augment=Views(3, shifted_views))
    add("views", "random", WAYS, augment=Views(2, random_views))
    add("views", "repeated", augment=Views(2), model="layer norm")
    for name, users in USERS.items():
        add("users", name, users=users, batch_size=6)
    for name in ("convolutional", "gru", "table"):
        add("users", f"mean, {name}", model=name, users=USERS["mean"], batch_size=6)
    add("users", "views", users=USERS["mean"], batch_size=6,
        augment=Views(2, random_views))  # fmt: skip
    add("users", "adaptive", users=USERS["records"], adaptive=ADAPTIVE["adaptive"])
    for name, bands in BANDS.items():
        add("bands", name, **bands)
    for name in ("convolutional", "transformer"):
        add("bands", f"two, {name}", model=name, noise=Banded(bands=2))
    add("bands", "users", users=USERS["mean"], batch_size=6, noise=Banded(bands=2))
    add("bands", "views", augment=Views(2, random_views), noise=Banded(bands=3))
    add("bands", "adam", noise=Banded(bands=3), optimizer=OPTIMIZERS["adam without bias"], steps=5)
    for name, optimizer in OPTIMIZERS.items():
        add("optimizer", name, optimizer=optimizer, clip=CLIPS["per layer"])
    for name, schedule in SCHEDULES.items():
        add("schedule", name, **({"steps": 6} if "epochs" not in schedule else {}) | schedule)
    for name, sampler in SAMPLERS.items():
        steps = {"steps": 1} if name == "shuffled" else {"steps": 5}
        add("sampler", name, batch_size=sampler, **steps)
    for name, speed in SPEEDS.items():
        add("speed", name, speed=speed)
    add("loop", "backward", WAYS, loop=by_backward)
    add("loop", "backward, convolutional", model="convolutional", loop=by_backward)
    add("loop", "microbatches", loop=by_backward, speed={"max_microbatch": 5})
    add("loop", "loss function", loop=with_schedule)
    add("loop", "gradients only", loop=with_gradients)
    add("loop", "means", loop=with_means)
    add("loop", "resumed", loop=resumed)
    add("loop", "resumed, bands", loop=resumed, noise=Banded(bands=2, average=0.0))
    for name in ("perceptron", "transformer"):
        add("loss", name, model=name, loop=with_reports)
    add("data", "table", data=as_table, loss_fn=of_columns)
    add("data", "arrays", data=as_arrays)
    add("data", "lists", model="bag", data=Listed, collate_fn=Listed.collate)
    add("data", "lists, gru", model="packed gru", data=Listed, collate_fn=Listed.collate)
    return found


SETTINGS = _settings()
CASES = {f"weights/{name}": partial(weights, **given) for name, given in SETTINGS.items()}
