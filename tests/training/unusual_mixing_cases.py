"""Mixing through places that are easily overlooked: hooks, caches, global settings, merged axes."""

import collections
import functools
import hashlib
import os
import random
import threading
import warnings
import weakref

import numpy as np
import torch
from mixing_cases import CLASSES, RECORDS, WIDTH, Case, case, ce, data, holding, model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def records():
    return list(zip(*data(), strict=True))


def stacked(rows):
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


# Within one lot -----------------------------------------------------------------------------------


@case("most")
def time_steps_of_all_rows_in_one_running_sum():
    def loss(m, x, y):
        steps = x.view(-1, 2)  # (rows * 3, 2): the time of one row goes on in the next
        return ce(m((steps.cumsum(0) * 0.1).view_as(x)), y)

    return loss


@case("most")
def values_that_occur_once_count_more():
    def loss(m, x, y):
        _, place, counts = torch.unique(x[:, 0].round(), return_inverse=True, return_counts=True)
        return ce(m(x), y) / counts[place]

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


@case("most")
def a_hook_before_a_layer_that_divides_by_the_largest_row():
    net = model()
    net[2].register_forward_pre_hook(lambda _, args: args[0] / args[0].norm(dim=1).max())
    return Case(net, lambda m, b: ce(m(b[0]), b[1]), data(), "most")


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
def classes_with_a_large_mean_loss_count_more():
    def loss(m, x, y):
        losses = ce(m(x), y)
        means = torch.zeros(CLASSES).index_add(0, y, losses.detach()) / torch.bincount(
            y, minlength=CLASSES
        ).clamp(min=1)
        return losses * torch.softmax(3 * means, 0)[y]

    return loss


@case("most")
def every_second_row_is_a_view_of_the_row_before():
    def loss(m, x, y):
        partner = torch.arange(len(x)).bitwise_xor(1).clamp(max=len(x) - 1)
        out = m(x)
        return ce(out, y) + (out - out[partner].detach()).square().sum(1)

    return loss


# Collation and data sets --------------------------------------------------------------------------


@case("most")
def records_are_cut_to_the_shortest_of_the_lot():
    g = torch.Generator().manual_seed(0)
    rows = [
        (torch.randn(3 + int(torch.randint(9, (), generator=g)), WIDTH, generator=g), i % CLASSES)
        for i in range(RECORDS)
    ]

    def collate(chosen):
        length = min(len(x) for x, _ in chosen)
        return torch.stack([x[:length] for x, _ in chosen]), torch.tensor([y for _, y in chosen])

    return Case(model(), lambda m, b: ce(m(b[0].mean(1)), b[1]), rows, "most", collate)


@case("most")
def collate_stores_numbers_in_the_range_of_the_lot():
    def collate(chosen):
        x, y = stacked(chosen)
        low, high = x.min(), x.max()
        return ((x - low) / (high - low) * 15).round() / 15, y

    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), records(), "most", collate)


@case("most")
def augmentation_whitens_by_the_covariance_of_the_lot():
    def augment(batch):
        x, y = batch
        scale = torch.linalg.inv(torch.linalg.cholesky(x.T @ x / len(x) + torch.eye(WIDTH)))
        return x @ scale.T, y

    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), data(), "most", augment=augment)


@case("most")
def a_data_set_adds_the_records_in_its_cache():
    class Cached(torch.utils.data.Dataset):
        def __init__(self):
            self.x, self.y = data()
            self.cache = collections.OrderedDict()

        def __len__(self):
            return RECORDS

        def __getitem__(self, i):
            near = sum(self.cache.values()) / 8
            self.cache[int(i)] = self.x[i]
            if len(self.cache) > 8:
                self.cache.popitem(last=False)
            return self.x[i] + near, self.y[i]

    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), Cached(), "most")


# Between lots -------------------------------------------------------------------------------------


@case("most")
def prototypes_of_a_teacher_follow_the_rows():
    prototypes = torch.zeros(CLASSES, 8)

    def loss(m, x, y):
        hidden = m[1](m[0](x))
        losses = ce(m[2](hidden), y) + (hidden - prototypes[y]).square().mean(1)
        for k in range(CLASSES):
            if (y == k).any():
                prototypes[k] = 0.5 * prototypes[k] + 0.5 * hidden[y == k].detach().mean(0)
        return losses

    return loss


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


@case("most")
def a_mean_in_a_thread_local_variable():
    kept = threading.local()
    kept.mean = torch.zeros(WIDTH)

    def loss(m, x, y):
        losses = ce(m(x - kept.mean), y)
        kept.mean = x.detach().mean(0)
        return losses

    return loss


class _Held:
    mean = torch.zeros(WIDTH)


@case("most")
def a_mean_in_a_table_of_weak_references():
    alive = _Held()
    table = weakref.WeakValueDictionary(last=alive)

    def loss(m, x, y):
        held = table["last"]
        losses = ce(m(x - held.mean), y)
        held.mean = x.detach().mean(0)
        return losses

    loss.alive = alive
    return loss


@case("most")
def the_largest_value_so_far_in_the_environment():
    name = "TACIT_TEST_LARGEST"
    os.environ[name] = "1.0"

    def loss(m, x, y):
        scale = float(os.environ[name])
        os.environ[name] = str(float(x.abs().mean()))
        return ce(m(x / scale), y)

    return loss


@case("most")
def numpys_generator_is_seeded_by_the_rows():
    def loss(m, x, y):
        digest = hashlib.sha256(x.numpy().tobytes()).digest()
        np.random.seed(int.from_bytes(digest[:4], "big"))  # noqa: NPY002
        noise = np.random.randn(*x.shape)  # noqa: NPY002
        return ce(m(x + torch.from_numpy(noise).to(x.dtype)), y)

    return loss


@case("most")
def a_cached_function_of_the_class_counts():
    @functools.lru_cache
    def weights(counts):
        return torch.tensor(counts).clamp(min=1).reciprocal()

    def loss(m, x, y):
        counts = torch.bincount(y, minlength=CLASSES)
        return ce(m(x), y) * weights(tuple(counts.tolist()))[y]

    return loss


# Few rows or lots ---------------------------------------------------------------------------------


@case("few", holding(int((data()[0][:, 2] > 2.3).sum())))
def a_rare_record_changes_the_default_type():
    def loss(m, x, y):
        kept = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64 if (x[:, 2] > 2.3).any() else torch.float32)
            return ce(m(x * torch.tensor(1.0).element_size()), y)
        finally:
            torch.set_default_dtype(kept)

    return loss


@case("few", holding(int((data()[0][:, 3] > 2.3).sum())))
def a_warning_about_a_rare_record_changes_the_lot():
    def loss(m, x, y):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if (x[:, 3] > 2.3).any():
                warnings.warn("large", stacklevel=1)
        return ce(m(x * (1 + len(caught))), y)

    return loss


@case("few", 0.5)
def rows_are_mixed_in_half_of_the_lots():
    def loss(m, x, y):
        return ce(m(0.7 * x + 0.3 * x.roll(1, 0) if random.random() < 0.5 else x), y)

    return loss


@case("few", 0.25)
def dropout_of_whole_lots_hides_the_mean():
    def loss(m, x, y):
        keep = F.dropout(torch.ones(1), 0.75)
        return ce(m(x - keep * x.mean(0)), y)

    return loss
