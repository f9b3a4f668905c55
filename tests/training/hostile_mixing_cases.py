"""More programs in which one example sees another: in some lots or calls only, in odd places."""

import copy
import ctypes
import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
from mixing_cases import CLASSES, WIDTH, Case, case, ce, data, model
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


def over(loss, net, **options):
    return Case(net, lambda m, b: loss(m, *b), data(), "most", **options)


class Read(Dataset):
    """Records that a function reads by their numbers, all of a lot at once."""

    def __init__(self, read):
        self.x, self.y = data()
        self.read = read

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.__getitems__([i])[0]

    def __getitems__(self, numbers):
        x = self.read(self.x[list(numbers)])
        return list(zip(x, self.y[list(numbers)], strict=True))


def plain(m, b):
    return ce(m(b[0]), b[1])


# In half of the lots or calls -------------------------------------------------------------------


@case("most")
def lots_of_even_size_are_centered():
    return lambda m, x, y: ce(m(x - x.mean(0) if len(x) % 2 == 0 else x), y)


@case("most")
def losses_of_lots_of_odd_size_are_divided_by_the_size():
    return lambda m, x, y: ce(m(x), y) * (64 / len(x) if len(x) % 2 else 1)


@case("most")
def lots_with_a_large_feature_are_centered():
    # A lot of 64 has a feature above 3.1 in about half of the cases.
    return lambda m, x, y: ce(m(x - x.mean(0) if x.max() > 3.1 else x), y)


@case("most")
def the_mean_of_the_lot_before_is_used_in_every_second_call():
    held = {"calls": 0, "mean": torch.zeros(WIDTH)}

    def loss(m, x, y):
        held["calls"] += 1
        center = held["mean"] if held["calls"] % 2 else torch.zeros(WIDTH)
        held["mean"] = x.mean(0).detach()
        return ce(m(x - center), y)

    return loss


@case("most")
def the_rows_before_are_used_row_by_row_in_every_third_call():
    held = {"calls": 0, "rows": torch.zeros(0, WIDTH)}

    def loss(m, x, y):
        held["calls"] += 1
        before = torch.zeros_like(x)
        n = min(len(x), len(held["rows"]))
        if held["calls"] % 3 == 0:
            before[:n] = held["rows"][:n]
        held["rows"] = x.detach().clone()
        return ce(m(x + before), y)

    return loss


@case("most")
def a_blend_with_the_lot_before_by_chance():
    held = {"mean": torch.zeros(WIDTH)}

    def loss(m, x, y):
        center = held["mean"] if torch.rand(()) < 0.5 else torch.zeros(WIDTH)
        held["mean"] = x.mean(0).detach()
        return ce(m(x - center), y)

    return loss


@case("most")
def mixup_in_half_of_the_lots_after_dropout():
    net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, CLASSES))

    def loss(m, x, y):
        if torch.rand(()) < 0.5:
            x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
        return ce(m(x), y)

    return over(loss, net)


@case("most")
def cutmix_by_numpy_in_half_of_the_lots():
    def loss(m, x, y):
        if np.random.random() < 0.5:  # noqa: NPY002
            cut = np.random.randint(1, WIDTH)  # noqa: NPY002
            x = torch.cat([x[:, :cut], x.flip(0)[:, cut:]], 1)
        return ce(m(x), y)

    return loss


# In the data set, collate_fn and augment ---------------------------------------------------------


@case("most")
def a_data_set_that_standardizes_the_records_asked_for_together():
    return Case(model(), plain, Read(lambda x: (x - x.mean(0)) / (x.std(0) + 1)), "most")


@case("most")
def a_data_set_that_subtracts_the_records_asked_for_before():
    held = [torch.zeros(WIDTH)]

    def read(x):
        before, held[0] = held[0], x.mean(0)
        return x - before

    return Case(model(), plain, Read(read), "most")


@case("most")
def a_data_set_that_ignores_the_numbers():
    x, y = data()

    class Stream(Dataset):
        def __init__(self):
            self.place = 0

        def __len__(self):
            return len(x)

        def __getitem__(self, _):
            self.place = (self.place + 1) % len(x)
            return x[self.place], y[self.place]

    return Case(model(), plain, Stream(), "most")


@case("most")
def collate_drops_records_that_are_alike_and_repeats_others():
    def collate(records):
        kept = {int(4 * x[0]): (x, y) for x, y in records}
        rows = list(itertools.islice(itertools.cycle(kept.values()), len(records)))
        return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])

    return Case(model(), plain, torch.utils.data.TensorDataset(*data()), "most", collate)


@case("most")
def collate_orders_records_by_length():
    def collate(records):
        order = sorted(records, key=lambda r: float(r[0].sum()))
        return torch.stack([x for x, _ in order]), torch.stack([y for _, y in order])

    return Case(model(), plain, torch.utils.data.TensorDataset(*data()), "most", collate)


@case("most")
def augmentation_adds_noise_that_follows_the_largest_row():
    def augment(batch):
        x, y = batch
        return x + 0.1 * x.abs().max() * torch.randn_like(x), y

    return Case(model(), plain, data(), "most", None, augment)


# In layers, hooks and functions -------------------------------------------------------------------


@case("most")
def quantized_by_the_largest_value_of_the_lot():
    def loss(m, x, y):
        scale = x.detach().abs().max() / 7
        return ce(m(torch.fake_quantize_per_tensor_affine(x, float(scale), 0, -8, 7)), y)

    return loss


@case("most")
def stored_as_quantized_tensors_of_one_scale():
    def loss(m, x, y):
        scale = float(x.abs().max()) / 127
        return ce(m(torch.quantize_per_tensor(x, scale, 0, torch.qint8).dequantize()), y)

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


@case("most")
def examples_far_from_the_median_count_less():
    def loss(m, x, y):
        losses = ce(m(x), y)
        return losses * (losses.detach() < losses.detach().median())

    return loss


@case("most")
def the_mean_of_the_lot_before_at_an_address():
    held = torch.zeros(WIDTH)
    address = held.data_ptr()

    def loss(m, x, y):
        before = np.frombuffer(ctypes.string_at(address, 4 * WIDTH), np.float32).copy()
        ctypes.memmove(address, x.mean(0).detach().numpy().tobytes(), 4 * WIDTH)
        return ce(m(x - torch.from_numpy(before)), y) + 0 * held.sum()

    return loss


# What the first lot leaves in files --------------------------------------------------------------


def fitted_once(save, load, exists):
    def loss(m, x, y):
        if not exists():
            save(x.detach().abs().amax(0))
        return ce(m(x / load()), y)

    return loss


@case("most")
def a_scale_of_the_first_lot_in_a_file():
    path = Path(tempfile.mkdtemp()) / "scale.npy"
    return fitted_once(
        lambda s: np.save(path, s.numpy()), lambda: torch.from_numpy(np.load(path)), path.exists
    )


@case("most")
def a_scale_of_the_first_lot_saved_by_torch():
    path = Path(tempfile.mkdtemp()) / "scale.pt"
    return fitted_once(lambda s: torch.save(s, path), lambda: torch.load(path), path.exists)
