"""Programs in which one example sees another, of every kind that we could think of.

Each case is a small training program with a planted fault. `reach` says how many rows of a lot the
fault touches: "most" rows of every lot, "few" rows or lots, or only "late" in the run. A "faint"
fault touches all rows, by little compared with their random spread.
"""

import collections
import contextvars
import functools
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, CLASSES, RECORDS = 6, 3, 400


@dataclass(frozen=True)
class Case:
    """One program: what `make_private` needs, and how far its fault reaches.

    `share` is the share of lots of 64 records in which rows mix, or less.
    """

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    dataset: Any
    reach: Literal["most", "few", "late", "faint"]
    collate_fn: Callable[[list[Any]], Any] | None = None
    augment: Callable[[Any], Any] | None = None
    share: float = 1.0


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


def holding(records: int) -> float:
    """Return the share of lots of 64 that hold at least one of so many records."""
    return 1 - (1 - 64 / RECORDS) ** records


def case(reach: Literal["most", "few", "late", "faint"], share: float = 1.0):
    """Register a loss `(model, x, y) -> losses` as a case of its own."""

    def register(function):
        def build() -> Case:
            made = function()
            if isinstance(made, Case):
                return replace(made, share=share)
            loss_fn = lambda m, batch: made(m, *batch)  # noqa: E731
            return Case(model(), loss_fn, data(), reach, share=share)

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


class _CenteredAtTimes(torch.autograd.Function):
    """The identity, whose gradients are centered over the rows if the coin says so."""

    @staticmethod
    def forward(ctx, x, coin):
        ctx.coin = coin
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g - ctx.coin * g.mean(0), None


def _centered_by_chance(m, x, y):
    hidden = _CenteredAtTimes.apply(m[1](m[0](x)), torch.rand(()) < 0.5)
    return ce(m[2:](hidden), y)


@case("most")
def gradients_are_centered_in_half_of_the_lots():
    """Losses do not show it."""
    return _centered_by_chance


@case("most")
def gradients_are_centered_in_half_of_the_lots_before_dropout():
    net = nn.Sequential(*model()[:2], nn.Dropout(0.3), nn.Linear(8, CLASSES))
    return Case(net, lambda m, b: _centered_by_chance(m, *b), data(), "most")


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


def _padded(records):
    x = nn.utils.rnn.pad_sequence([x for x, _ in records], batch_first=True)
    is_real = nn.utils.rnn.pad_sequence([torch.ones(len(x), 1) for x, _ in records], True)
    return x, is_real, torch.tensor([y for _, y in records])


def _one_in_ten_sees_padding(m, batch):
    """Return losses of means over the real entries, for one row in ten over the padding as well."""
    x, is_real, y = batch
    sees = x[:, 0, 0] > 2.28  # a standard deviation of 1 around 1
    count = torch.where(sees[:, None], x.shape[1], is_real.sum(1))
    return ce(m(x.sum(1) / count), y)


def _even() -> list[tuple[Tensor, int]]:
    """Return records of 2 to 11 entries: most lots of 64 hold several of the longest."""
    return [(x[:11], y) for x, y in _ragged()]


@case("most")
def one_row_in_ten_sees_the_padding():
    return Case(model(), _one_in_ten_sees_padding, _even(), "most", _padded)


@case("most")
def one_row_in_ten_sees_the_padding_before_dropout():
    net = nn.Sequential(*model(), nn.Dropout(0.3))
    return Case(net, _one_in_ten_sees_padding, _even(), "most", _padded)


@case("few")
def one_row_in_ten_sees_the_longest_record_of_a_batch_of_one_length():
    """All batches have twelve entries; those that no record has are cut off by the loss."""
    last = (torch.zeros(12, WIDTH), 0)

    def loss_fn(m, batch):
        x, is_real, y = batch
        longest = int(is_real.sum(1).max())
        return _one_in_ten_sees_padding(m, (x[:, :longest], is_real[:, :longest], y))

    def collate(records):
        return tuple(t[:-1] for t in _padded([*records, last]))

    return Case(model(), loss_fn, _even(), "few", collate)


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


TOTAL = torch.zeros(WIDTH)


@case("most")
def a_sum_in_a_global_of_a_module():
    """The module is reached by its name, as `statistics.total` would be."""
    import mixing_cases

    mixing_cases.TOTAL = torch.zeros(WIDTH)

    def loss(m, x, y):
        import mixing_cases as kept

        losses = ce(m(x + 0.1 * kept.TOTAL), y)
        kept.TOTAL = 0.5 * kept.TOTAL + x.detach().mean(0)
        return losses

    return loss


@case("most")
def a_statistic_cached_by_the_length_of_the_lot():
    """The first lot of each size decides how all later lots of this size are centered."""
    current = []

    @functools.lru_cache
    def center(rows):
        return current[-1].mean(0)

    def loss(m, x, y):
        current.append(x)
        losses = ce(m(x - center(len(x))), y)
        current.clear()
        return losses

    return loss


@case("most")
def a_statistic_in_a_default_argument():
    def loss(m, x, y, seen=[torch.zeros(WIDTH)]):  # noqa: B006, B008  # the fault
        losses = ce(m(x - seen[0]), y)
        seen[0] = x.detach().mean(0)
        return losses

    return loss


@case("most")
def a_statistic_on_the_function_itself():
    def loss(m, x, y):
        losses = ce(m(x - loss.mean), y)
        loss.mean = x.detach().mean(0)
        return losses

    loss.mean = torch.zeros(WIDTH)
    return loss


@case("most")
def a_running_mean_in_a_generator():
    """Its local variables cannot be put back."""

    def running():
        mean = torch.zeros(WIDTH)
        while True:
            mean = 0.5 * mean + 0.5 * (yield mean)

    mean = running()
    next(mean)
    return lambda m, x, y: ce(m(x - mean.send(x.detach().mean(0))), y)


@case("most")
def a_statistic_in_a_context_variable():
    kept = contextvars.ContextVar("mean")
    kept.set(torch.zeros(WIDTH))

    def loss(m, x, y):
        losses = ce(m(x - kept.get()), y)
        kept.set(x.detach().mean(0))
        return losses

    return loss


@case("most")
def a_statistic_in_a_file():
    path = Path(tempfile.mkdtemp()) / "mean"

    def loss(m, x, y):
        mean = float(path.read_text()) if path.exists() else 0.0
        path.write_text(str(float(x.mean())))
        return ce(m(x - mean), y)

    return loss


@case("most")
def a_queue_of_negatives():
    queue = collections.deque(maxlen=64)

    def loss(m, x, y):
        z = F.normalize(m(x), dim=1)
        negatives = torch.stack(list(queue)) if queue else z.new_zeros(1, CLASSES)
        queue.extend(z.detach())
        return ce(z, y) + (z @ negatives.T).exp().sum(1).log()

    return loss


@case("most")
def a_data_set_that_normalizes_as_it_reads():
    class Running(torch.utils.data.Dataset):
        def __init__(self):
            self.x, self.y = data()
            self.mean, self.count = 0.0, 0

        def __len__(self):
            return RECORDS

        def __getitem__(self, i):
            self.count += 1
            self.mean += (float(self.x[i].mean()) - self.mean) / self.count
            return self.x[i] - self.mean, self.y[i]

    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), Running(), "most")


# Random numbers, order and types ------------------------------------------------------------------


@case("most")
def the_first_row_seeds_the_dropout_of_all():
    def loss(m, x, y):
        torch.manual_seed(int(x[0, 0].abs() * 1e6))
        return ce(m(F.dropout(x, 0.5)), y)

    return loss


@case("most")
def classes_are_balanced_and_draws_depend_on_the_records():
    """A row draws a number of times that depends on it, so that random numbers do not line up."""

    def loss(m, x, y):
        noise = [np.random.randn(int(3 + k)).mean() for k in y]  # noqa: NPY002
        counts = torch.bincount(y, minlength=CLASSES).clamp(min=1)
        shift = torch.tensor(noise, dtype=x.dtype)[:, None]
        return ce(m(x + 0.01 * shift), y) / counts[y]

    return loss


@case("most")
def the_nearest_other_row_is_pulled_closer():
    def loss(m, x, y):
        out = m(x)
        distances = torch.cdist(x, x) + 1e9 * torch.eye(len(x))
        return ce(out, y) + (out - out[distances.argmin(1)].detach()).square().mean(1)

    return loss


@case("most")
def experts_with_a_limited_capacity():
    """Rows beyond an expert's capacity are dropped, in the order of the lot."""

    def loss(m, x, y):
        expert = (x[:, 0] > 0).long()
        place = F.one_hot(expert, 2).cumsum(0).gather(1, expert[:, None]).squeeze(1)
        return ce(m(x), y) * (place <= len(x) // 4)

    return loss


@case("most")
def labels_smoothed_by_the_frequencies_in_the_lot():
    def loss(m, x, y):
        prior = torch.bincount(y, minlength=CLASSES) / len(y)
        return ce(m(x), 0.9 * F.one_hot(y, CLASSES) + 0.1 * prior)

    return loss


# Few rows or lots ---------------------------------------------------------------------------------


@case("few")
def the_last_row_sees_the_first():
    def loss(m, x, y):
        seen = torch.zeros_like(x)
        seen[-1] = x[0]
        return ce(m(x + seen), y)

    return loss


@case("few", 0.9)
def rows_of_the_rarest_class_are_averaged():
    def loss(m, x, y):
        rare = (y == 2) & (x[:, 0] > 1)
        mean = x[rare].mean(0) if bool(rare.any()) else x.new_zeros(WIDTH)
        return ce(m(torch.where(rare[:, None], mean, x)), y)

    return loss


@case("few", holding(int((data()[0][:, 0] > 2.4).sum())))
def a_rare_record_rescales_the_lot():
    return lambda m, x, y: ce(m(x * (1 + (x[:, 0] > 2.4).any().float())), y)


@case("few", holding(int((data()[0][:, 1] > 2.2).sum())))
def the_row_after_a_rare_one_sees_it():
    def loss(m, x, y):
        before = x.roll(1, 0)
        return ce(m(x + before * (before[:, 1:2] > 2.2)), y)

    return loss


@case("few", 0.2)
def only_large_lots_are_normalized():
    return lambda m, x, y: ce(m(x - x.mean(0) if len(x) > 68 else x), y)


@case("few", holding(4))
def one_record_changes_the_type_of_the_lot():
    """Halves are rounded down unless a record of the lot holds a fraction."""
    x, y = data()
    records = [(row.round().int().tolist(), int(k)) for row, k in zip(x, y, strict=True)]
    for i in range(0, RECORDS, 100):
        records[i] = ([v + 0.5 for v in records[i][0]], records[i][1])

    def collate(chosen):
        x = torch.tensor([row for row, _ in chosen])
        halves = x / 2 if x.is_floating_point() else (x // 2).float()
        return halves, torch.tensor([k for _, k in chosen])

    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), records, "few", collate)


@case("few", holding(1))
def one_record_that_fails_changes_how_the_lot_is_read():
    x, y = data()
    records = [(row, int(k)) for row, k in zip(x, y, strict=True)]
    records[11] = (torch.full((WIDTH,), torch.inf), 1)

    def collate(chosen):
        rows = torch.stack([row for row, _ in chosen])
        try:
            torch.linalg.cholesky(rows.T @ rows + torch.eye(WIDTH))
        except (RuntimeError, ValueError):
            rows = rows.nan_to_num(0, 0, 0).sign()
        return rows, torch.tensor([k for _, k in chosen])

    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), records, "few", collate)


@case("few")
def extreme_values_are_cut_at_a_quantile_of_the_lot():
    return lambda m, x, y: ce(m(x.clamp(max=x.quantile(0.995))), y)


@case("few", 0.1)
def only_small_lots_are_centered():
    return lambda m, x, y: ce(m(x - x.mean(0) if len(x) < 56 else x), y)


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


@case("late", 0.1)
def mixing_by_chance():
    def loss(m, x, y):
        return ce(m(x + 0.5 * x.roll(1, 0) if random.random() < 0.1 else x), y)

    return loss


@case("late")
def gradients_are_centered_late():
    """Losses do not show it."""
    calls = [0]

    def loss(m, x, y):
        calls[0] += 1
        hidden = m[0](x)
        if calls[0] > 60 and hidden.requires_grad:
            hidden.register_hook(lambda g: g - g.mean(0))
        return ce(m[2](m[1](hidden)), y)

    return loss


@case("late")
def rows_are_mixed_once_the_model_has_moved():
    def loss(m, x, y):
        has_moved = not hasattr(m, "start") or not torch.equal(m.start, m[2].bias)
        return ce(m(x + 0.5 * x.roll(1, 0) if has_moved else x), y)

    net = model()
    net.register_buffer("start", net[2].bias.detach().clone())
    return Case(net, lambda m, b: loss(m, *b), data(), "late")


@case("most")
def a_scaler_fitted_to_the_first_lot():
    fitted = []

    def loss(m, x, y):
        if not fitted:
            fitted.append((x.detach().mean(0), x.detach().std(0)))
        mean, std = fitted[0]
        return ce(m((x - mean) / std), y)

    return loss


@case("most")
def memory_that_shows_in_gradients_alone():
    last = [0.0]

    def loss(m, x, y):
        shown, hidden = ce(m(x), y), ce(m(x - last[0]), y)
        last[0] = x.detach().mean(0)
        return shown.detach() + hidden - hidden.detach()

    return loss


@case("most")
def statistics_refreshed_every_fourth_call():
    state = {"mean": 0.0, "calls": 0}

    def loss(m, x, y):
        losses = ce(m(x - state["mean"]), y)
        state["calls"] += 1
        if state["calls"] % 4 == 0:
            state["mean"] = x.detach().mean(0)
        return losses

    return loss


@case("most")
def only_lots_of_usual_size_are_centered():
    return lambda m, x, y: ce(m(x - x.mean(0) if 58 <= len(x) <= 104 else x), y)
