"""Programs in which one example sees another: one of each kind.

`reach` says how many rows of a lot it touches: "most" rows of every lot, "few" rows or lots, or
only "late" in the run.
"""

import collections
import copy
import itertools
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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
            loss_fn = lambda m, batch: made(m, *batch)  # noqa: E731
            return Case(model(), loss_fn, data(), reach)

        CASES[function.__name__] = build
        return function

    return register


@case("most")
def class_weights_balanced_in_the_lot():
    def loss(m, x, y):
        counts = torch.bincount(y, minlength=CLASSES).clamp(min=1)
        return ce(m(x), y) * (len(y) / (CLASSES * counts))[y]

    return loss


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
def a_running_sum_in_a_closure():
    total = [torch.zeros(WIDTH)]

    def loss(m, x, y):
        losses = ce(m(x + 0.1 * total[0]), y)
        total[0] = total[0] + x.detach().sum(0)
        return losses

    return loss


@case("most")
def a_number_read_out_and_kept():
    kept = {"scale": 1.0}

    def loss(m, x, y):
        losses = ce(m(x), y) * kept["scale"]
        kept["scale"] = 0.9 * kept["scale"] + 0.1 * float(x[:, 0].abs().mean())
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


@case("few")
def a_rare_record_rescales_the_lot():
    return lambda m, x, y: ce(m(x * (1 + (x[:, 0] > 2.4).any().float())), y)


@case("few")
def only_small_lots_are_centered():
    return lambda m, x, y: ce(m(x - x.mean(0) if len(x) < 56 else x), y)


@case("late")
def mixing_begins_after_some_calls():
    calls = [0]

    def loss(m, x, y):
        calls[0] += 1
        return ce(m(x - x.mean(0) if calls[0] > 60 else x), y)

    return loss


@case("late")
def mixing_by_chance():
    def loss(m, x, y):
        return ce(m(x + 0.5 * x.roll(1, 0) if random.random() < 0.1 else x), y)

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
def only_lots_of_usual_size_are_centered():
    return lambda m, x, y: ce(m(x - x.mean(0) if 58 <= len(x) <= 104 else x), y)


# Few digits, which hide small differences ---------------------------------------------------------


def autocast(change, weight=lambda y: 1.0):
    """Return a loss whose model computes in bfloat16 on changed rows."""

    def loss(m, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            out = m(change(x))
        return ce(out.float(), y) * weight(y)

    return loss


def balanced(y):
    counts = torch.bincount(y, minlength=CLASSES).clamp(min=1)
    return (len(y) / (CLASSES * counts))[y]


def float8(x):
    return x.to(torch.float8_e4m3fn).to(x.dtype)


@case("most")
def half_weight_mixup_in_bfloat16():
    return autocast(lambda x: 0.5 * x + 0.5 * x.roll(1, 0))


@case("most")
def a_bfloat16_model_sees_the_row_before():
    net = model().bfloat16()
    return Case(
        net, lambda m, b: ce(m((b[0] + 0.4 * b[0].roll(1, 0)).bfloat16()).float(), b[1]), data(),
        "most",
    )  # fmt: skip


@case("most")
def float8_rows_and_class_weights():
    return lambda m, x, y: ce(m(float8(x)), y) * balanced(y)


def noisy(loss):
    """Return a loss with noise from a generator that cannot be found and put back."""
    bits = np.random.PCG64(0)

    def with_noise(m, x, y):
        noise = np.random.Generator(bits).normal(size=x.shape)
        return loss(m, x, y, torch.from_numpy(noise).float())

    return with_noise


@case("most")
def mixup_and_noise_that_cannot_be_repeated():
    return noisy(lambda m, x, y, n: ce(m(0.5 * x + 0.5 * x.roll(1, 0) + 0.1 * n), y))


# Hard to see --------------------------------------------------------------------------------------


def over(loss, net, **options):
    return Case(net, lambda m, b: loss(m, *b), data(), "most", **options)


def plain(m, b):
    return ce(m(b[0]), b[1])


@case("most")
def lots_of_even_size_are_centered():
    return lambda m, x, y: ce(m(x - x.mean(0) if len(x) % 2 == 0 else x), y)


@case("most")
def cutmix_by_numpy_in_half_of_the_lots():
    def loss(m, x, y):
        if np.random.random() < 0.5:  # noqa: NPY002
            cut = np.random.randint(1, WIDTH)  # noqa: NPY002
            x = torch.cat([x[:, :cut], x.flip(0)[:, cut:]], 1)
        return ce(m(x), y)

    return loss


@case("most")
def collate_drops_records_that_are_alike_and_repeats_others():
    def collate(records):
        kept = {int(4 * x[0]): (x, y) for x, y in records}
        rows = list(itertools.islice(itertools.cycle(kept.values()), len(records)))
        return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])

    return Case(model(), plain, torch.utils.data.TensorDataset(*data()), "most", collate)


@case("most")
def quantized_by_the_largest_value_of_the_lot():
    def loss(m, x, y):
        scale = x.detach().abs().max() / 7
        return ce(m(torch.fake_quantize_per_tensor_affine(x, float(scale), 0, -8, 7)), y)

    return loss


@case("most")
def a_sparse_graph_of_similar_rows():
    def loss(m, x, y):
        near = (torch.cdist(x, x) < 2.5).float()
        weights = (near / near.sum(1, keepdim=True)).detach().to_sparse()
        return ce(m(torch.sparse.mm(weights, x)), y)

    return loss


@case("most")
def a_mapped_function_that_sees_the_whole_lot():
    def loss(m, x, y):
        return ce(m(torch.func.vmap(lambda row: row - x.mean(0))(x)), y)

    return loss


@case("most")
def tangents_of_the_sum_of_all_losses():
    def loss(m, x, y):
        slope = torch.func.jvp(lambda z: ce(m(z), y).sum(), (x,), (torch.ones_like(x),))[1]
        return ce(m(x), y) * (1 + slope.detach().abs())

    return loss


@case("most")
def a_compiled_block_that_centers():
    class Block(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    net = model()
    block = torch.compile(Block(), backend="eager", dynamic=True)
    return over(lambda m, x, y: ce(m(block(x)), y), net)


class Normalized(torch.autograd.Function):
    """The identity, whose gradient is divided by its norm over the whole lot."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / g.norm()


@case("most")
def gradients_are_normalized_over_the_lot():
    return lambda m, x, y: ce(m[2](Normalized.apply(m[1](m[0](x)))), y)


@case("most")
def a_hook_of_a_layer_divides_gradients_by_their_largest():
    net = model()
    net[0].register_full_backward_hook(lambda *_: None)
    net[2].register_full_backward_pre_hook(lambda _, g: (g[0] / g[0].abs().max(),))
    return over(lambda m, x, y: ce(m(x), y), net)


@case("most")
def straight_through_a_mean():
    def loss(m, x, y):
        h = m[0](x)
        mean = h.mean(0)
        return ce(m[2](m[1](h + (mean - mean.detach()))), y)

    return loss


@case("most")
def a_lesson_from_a_teacher_that_centers():
    net, teacher = model(), copy.deepcopy(model()).requires_grad_(False)

    def loss(m, x, y):
        target = teacher(x)
        return ce(m(x), y) + (m(x) - (target - target.mean(0))).square().mean(1)

    return over(loss, net)


@case("most")
def sinkhorn_over_the_lot():
    def loss(m, x, y):
        q = m(x).exp().T
        for _ in range(3):
            q = q / q.sum(1, keepdim=True)
            q = q / q.sum(0, keepdim=True)
        return -(q.T.detach() * F.log_softmax(m(x), 1)).sum(1)

    return loss


# Unusual ------------------------------------------------------------------------------------------


@case("most")
def time_steps_of_all_rows_in_one_running_sum():
    def loss(m, x, y):
        steps = x.view(-1, 2)  # (rows * 3, 2): the time of one row goes on in the next
        return ce(m((steps.cumsum(0) * 0.1).view_as(x)), y)

    return loss


@case("most")
def columns_are_sorted_and_scattered_back_by_one_order():
    def loss(m, x, y):
        order = x[:, 0].argsort()
        mixed = torch.zeros_like(x).scatter(0, order[:, None].expand_as(x), x.sort(0).values)
        return ce(m(mixed), y)

    return loss


@case("most")
def a_checkpointed_block_that_centers():
    def block(x):
        return x - x.mean(0)

    return lambda m, x, y: ce(m(checkpoint(block, x, use_reentrant=False)), y)


class _Centered(torch.autograd.Function):
    """The identity, whose gradients are centered over the rows."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0)


@case("most")
def a_custom_function_that_centers_gradients():
    return lambda m, x, y: ce(m[2](_Centered.apply(m[1](m[0](x)))), y)


@case("most")
def the_largest_principal_component_is_removed():
    def loss(m, x, y):
        axis = torch.linalg.svd(x - x.mean(0), full_matrices=False)[2][0]
        return ce(m(x - (x @ axis)[:, None] * axis), y)

    return loss


@case("most")
def bins_of_rows_share_their_mean():
    def loss(m, x, y):
        place = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        sums = torch.zeros(4, WIDTH).index_add(0, place, x)
        counts = torch.bincount(place, minlength=4).clamp(min=1)
        return ce(m(x - 0.5 * (sums / counts[:, None])[place]), y)

    return loss


@case("most")
def augmentation_whitens_by_the_covariance_of_the_lot():
    def augment(batch):
        x, y = batch
        scale = torch.linalg.inv(torch.linalg.cholesky(x.T @ x / len(x) + torch.eye(WIDTH)))
        return x @ scale.T, y

    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), data(), "most", augment=augment)


@case("most")
def a_recurrent_state_goes_on_from_lot_to_lot():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.out = nn.GRUCell(WIDTH, 8), nn.Linear(8, CLASSES)
            self.state = torch.zeros(1, 8)

        def forward(self, x):
            start = self.state[torch.arange(len(x)) % len(self.state)]
            state = self.cell(x, start)
            self.state = state.detach()
            return self.out(state)

    return Case(Stateful(), lambda m, b: ce(m(b[0]), b[1]), data(), "most")


# Random numbers, which differ between lots of two sizes -------------------------------------------


def jitter(x, y):
    """Draw for each row as often as its label says, so that random numbers do not line up."""
    found = [np.random.randn(1 + int(k)).mean() for k in y]  # noqa: NPY002
    return 0.1 * torch.tensor(found, dtype=x.dtype)[:, None]


@case("most")
def the_dropout_rate_follows_the_size_of_the_lot():
    return lambda m, x, y: ce(m(F.dropout(x, len(x) / (len(x) + 30))), y)


@case("most")
def gradients_scaled_by_the_size_behind_dropout():
    """Losses do not show it."""

    def loss(m, x, y):
        hidden = m[0](F.dropout(x, 0.3))
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g * len(g) / 16)
        return 0.05 * ce(m[2](m[1](hidden)), y)

    return loss


@case("most")
def mixup_with_a_random_partner():
    def loss(m, x, y):
        weight = torch.distributions.Beta(1.0, 1.0).sample()
        other = torch.randperm(len(x))
        out = m(weight * x + (1 - weight) * x[other])
        return weight * ce(out, y) + (1 - weight) * ce(out, y[other])

    return loss


@case("most")
def a_mask_shared_by_the_lot_hides_its_largest_feature():
    def loss(m, x, y):
        mask = torch.rand(WIDTH) > 0.3
        mask[x.abs().sum(0).argmax()] = False
        return ce(m(x * mask), y)

    return loss


@case("most")
def noise_of_the_spread_of_the_lot():
    return lambda m, x, y: ce(m(x + torch.randn_like(x) * x.std(0)), y)


@case("most")
def random_pairs_repel_each_other():
    def loss(m, x, y):
        out = m(x)
        other = out[torch.randint(len(x), (len(x),))]
        return ce(out, y) + torch.exp(-(out - other.detach()).square().sum(1))

    return loss


@case("most")
def centered_rows_and_draws_that_depend_on_the_records():
    return lambda m, x, y: ce(m(x - x.mean(0) + jitter(x, y)), y)
