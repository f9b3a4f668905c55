"""Programs in which one example sees another, of every kind that we could think of.

Each case is a small training program with a planted fault. `reach` says how many rows of a lot the
fault touches: "most" rows of every lot, "few" rows or lots, or only "late" in the run.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, CLASSES, RECORDS = 6, 3, 400


@dataclass(frozen=True)
class Case:
    """One program: what `make_private` needs, and how far its fault reaches."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    dataset: Any
    reach: Literal["most", "few", "late"]
    collate_fn: Callable[[list[Any]], Any] | None = None
    augment: Callable[[Any], Any] | None = None


CASES: dict[str, Callable[[], Case]] = {}


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return records with rare features and unbalanced classes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(RECORDS, WIDTH, generator=g)
    y = (torch.rand(RECORDS, generator=g) * CLASSES).long()
    y[torch.rand(RECORDS, generator=g) < 0.6] = 0
    return x, y


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def ce(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def case(reach: Literal["most", "few", "late"]):
    """Register a loss `(model, x, y) -> losses` as a case of its own."""

    def register(function):
        def build() -> Case:
            made = function()
            if isinstance(made, Case):
                return made
            return Case(model(), lambda m, batch: made(m, *batch), data(), reach)

        CASES[function.__name__] = build
        return function

    return register


# Every row, within the loss -----------------------------------------------------------------------


@case("most")
def class_weights_balanced_in_the_lot():
    def loss(m, x, y):
        counts = torch.bincount(y, minlength=CLASSES).clamp(min=1)
        return ce(m(x), y) * (len(y) / (CLASSES * counts))[y]

    return loss


@case("most")
def centered_by_a_detached_batch_mean():
    return lambda m, x, y: ce(m(x - x.mean(0).detach()), y)


@case("most")
def scaled_by_the_batch_maximum():
    return lambda m, x, y: ce(m(x / x.abs().max()), y)


@case("most")
def functional_batch_norm():
    return lambda m, x, y: ce(m(F.batch_norm(x, None, None, training=True)), y)


@case("most")
def softmax_over_the_batch():
    return lambda m, x, y: -torch.log_softmax(m(x), 0).gather(1, y[:, None]).squeeze(1)


@case("most")
def contrastive_loss():
    def loss(m, x, y):
        z = F.normalize(m(x), dim=1)
        return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z)), reduction="none")

    return loss


@case("most")
def mixup_inside_the_loss():
    return lambda m, x, y: ce(m(0.7 * x + 0.3 * x.roll(1, 0)), y)


@case("most")
def importance_weights_that_sum_to_one():
    return lambda m, x, y: ce(m(x), y) * x[:, 0].exp() / x[:, 0].exp().sum() * len(x)


@case("most")
def pairwise_ranking_loss():
    def loss(m, x, y):
        score = m(x)[:, 0]
        return F.softplus(-(score[:, None] - score[None]) * (y[:, None] - y[None])).mean(1)

    return loss


@case("most")
def divided_by_the_drawn_size():
    return lambda m, x, y: ce(m(x), y) / len(x)


@case("most")
def only_the_hardest_half_counts():
    def loss(m, x, y):
        losses = ce(m(x), y)
        return losses * (losses >= losses.median().detach())

    return loss


@case("most")
def weighted_by_rank():
    def loss(m, x, y):
        losses = ce(m(x), y)
        return losses * (losses.detach().argsort().argsort() + 1) / len(x)

    return loss


@case("most")
def attention_over_the_batch():
    return lambda m, x, y: ce(m(x + torch.softmax(x @ x.T, 1) @ x), y)


@case("most")
def decorrelation_penalty():
    def loss(m, x, y):
        out = m(x)
        c = (out - out.mean(0)).T @ (out - out.mean(0)) / len(x)
        return ce(out, y) + c.tril(-1).square().sum()

    return loss


@case("most")
def each_row_sees_the_one_before_it():
    return lambda m, x, y: ce(m(x + 0.3 * x.roll(1, 0).detach()), y)


@case("most")
def running_sum_down_the_batch():
    return lambda m, x, y: ce(m(x.cumsum(0)), y)


@case("most")
def gradients_centered_by_a_hook():
    def loss(m, x, y):
        hidden = m[0](x)
        hidden.register_hook(lambda g: g - g.mean(0))
        return ce(m[2](m[1](hidden)), y)

    return loss


@case("most")
def dropout_seeded_by_the_batch():
    def loss(m, x, y):
        g = torch.Generator().manual_seed(int(x.sum().abs() * 1e4))
        return ce(m(x * torch.randint(0, 2, x.shape, generator=g)), y)

    return loss


@case("most")
def a_layer_with_batch_statistics_of_its_own():
    class Whiten(nn.Module):
        def forward(self, x):
            return (x - x.mean(0)) / (x.std(0) + 1e-5)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 8), Whiten(), nn.Linear(8, CLASSES))
    return Case(net, lambda m, b: ce(m(b[0]), b[1]), data(), "most")


# Outside the loss ---------------------------------------------------------------------------------


def _ragged() -> list[tuple[Tensor, int]]:
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, 12, (RECORDS,), generator=g).tolist()
    sizes[7] = 60
    return [(torch.randn(n, WIDTH, generator=g) + 1, i % CLASSES) for i, n in enumerate(sizes)]


@case("most")
def padding_to_the_longest_record():
    def collate(records):
        x = nn.utils.rnn.pad_sequence([x for x, _ in records], batch_first=True)
        return x, torch.tensor([y for _, y in records])

    return Case(model(), lambda m, b: ce(m(b[0].mean(1)), b[1]), _ragged(), "most", collate)


@case("most")
def collate_standardizes_the_batch():
    def collate(records):
        x, y = torch.stack([x for x, _ in records]), torch.stack([y for _, y in records])
        return (x - x.mean(0)) / (x.std(0, correction=0) + 1e-3), y

    records = list(zip(*data(), strict=True))
    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), records, "most", collate)


@case("most")
def augmentation_mixes_rows():
    def augment(batch):
        x, y = batch
        return 0.5 * x + 0.5 * x[torch.randperm(len(x))], y

    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), data(), "most", augment=augment)


@case("most")
def augmentation_pastes_from_the_neighbor():
    def augment(batch):
        x, y = batch
        return torch.cat([x[:, :3], x.roll(1, 0)[:, 3:]], 1), y

    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), data(), "most", augment=augment)


@case("most")
def a_data_set_that_blends_with_the_record_before():
    class Blending(torch.utils.data.Dataset):
        def __init__(self):
            self.x, self.y = data()
            self.last = torch.zeros(WIDTH)

        def __len__(self):
            return RECORDS

        def __getitem__(self, i):
            blended = self.x[i] + 0.5 * self.last
            self.last = self.x[i]
            return blended, self.y[i]

    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), Blending(), "most")


# Python state between calls -----------------------------------------------------------------------


@case("most")
def a_running_sum_in_a_closure():
    total = [torch.zeros(WIDTH)]

    def loss(m, x, y):
        losses = ce(m(x + 0.1 * total[0]), y)
        total[0] = total[0] + x.detach().sum(0)
        return losses

    return loss


@case("most")
def a_memory_bank_of_past_rows():
    class Bank(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.past = model(), []

        def forward(self, x):
            out = self.net(x)
            if self.past:
                out = out + 0.2 * torch.cat(self.past[-4:]).mean(0)
            self.past.append(out.detach())
            return out

    return Case(Bank(), lambda m, b: ce(m(b[0]), b[1]), data(), "most")


@case("most")
def a_number_read_out_and_kept():
    kept = {"scale": 1.0}

    def loss(m, x, y):
        losses = ce(m(x), y) * kept["scale"]
        kept["scale"] = 0.9 * kept["scale"] + 0.1 * float(x[:, 0].abs().mean())
        return losses

    return loss


SEEN = np.zeros(WIDTH)


@case("most")
def a_global_array_of_statistics():
    SEEN[:] = 0

    def loss(m, x, y):
        global SEEN
        losses = ce(m(x - torch.tensor(SEEN, dtype=x.dtype)), y)
        SEEN = 0.5 * SEEN + 0.5 * x.mean(0).numpy()
        return losses

    return loss


@case("most")
def a_buffer_of_running_statistics():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x):
            out = self.net(x - self.mean)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            return out

    return Case(Running(), lambda m, b: ce(m(b[0]), b[1]), data(), "most")


# Few rows or lots ---------------------------------------------------------------------------------


@case("few")
def the_last_row_sees_the_first():
    def loss(m, x, y):
        seen = torch.zeros_like(x)
        seen[-1] = x[0]
        return ce(m(x + seen), y)

    return loss


@case("few")
def rows_of_the_rarest_class_are_averaged():
    def loss(m, x, y):
        rare = (y == 2) & (x[:, 0] > 1)
        mean = x[rare].mean(0) if bool(rare.any()) else x.new_zeros(WIDTH)
        return ce(m(torch.where(rare[:, None], mean, x)), y)

    return loss


@case("few")
def a_rare_record_rescales_the_lot():
    return lambda m, x, y: ce(m(x * (1 + (x[:, 0] > 2.4).any().float())), y)


@case("few")
def the_row_after_a_rare_one_sees_it():
    def loss(m, x, y):
        before = x.roll(1, 0)
        return ce(m(x + before * (before[:, 1:2] > 2.2)), y)

    return loss


@case("few")
def only_large_lots_are_normalized():
    return lambda m, x, y: ce(m(x - x.mean(0) if len(x) > 68 else x), y)


# Late ---------------------------------------------------------------------------------------------


@case("late")
def mixing_begins_after_some_calls():
    calls = [0]

    def loss(m, x, y):
        calls[0] += 1
        return ce(m(x - x.mean(0) if calls[0] > 60 else x), y)

    return loss


@case("late")
def a_statistic_that_is_used_after_a_warm_up():
    class Warm(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.calls, self.mean = model(), 0, torch.zeros(WIDTH)

        def forward(self, x):
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return self.net(x - self.mean if self.calls > 60 else x)

    return Case(Warm(), lambda m, b: ce(m(b[0]), b[1]), data(), "late")


@case("late")
def mixing_by_chance():
    def loss(m, x, y):
        return ce(m(x + 0.5 * x.roll(1, 0) if random.random() < 0.1 else x), y)

    return loss
