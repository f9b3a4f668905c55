"""Programs that keep examples apart, though at first sight they may not seem to.

`make_private` must accept each of them, on every seed: a refusal would be an unpaid release.
"""

import random
from collections.abc import Callable

import numpy as np
import torch
from mixing_cases import CLASSES, WIDTH, Case, ce, data, model
from torch import nn
from torch.nn import functional as F

PROGRAMS: dict[str, Callable[[], Case]] = {}


def program(function):
    """Register a function that returns a case, or a loss `(model, x, y) -> losses`."""

    def build() -> Case:
        made = function()
        if isinstance(made, Case):
            return made
        return Case(model(), lambda m, batch: made(m, *batch), data(), "none")

    PROGRAMS[function.__name__] = build
    return function


@program
def plain():
    return lambda m, x, y: ce(m(x), y)


@program
def dropout():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.4), nn.Linear(16, CLASSES))
    return Case(net, lambda m, b: ce(m(b[0]), b[1]), data(), "none")


@program
def losses_are_logged():
    log = []

    def loss(m, x, y):
        losses = ce(m(x), y)
        log.append(losses.detach().mean())
        return losses

    return loss


@program
def gradient_penalty():
    def loss(m, x, y):
        x = x.clone().requires_grad_()
        losses = ce(m(x), y)
        (g,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        return losses + 0.1 * g.square().sum(1)

    return loss


@program
def noise_from_numpy():
    def loss(m, x, y):
        noise = torch.from_numpy(np.random.randn(*x.shape)).to(x.dtype)  # noqa: NPY002
        return ce(m(x + 0.1 * noise), y)

    return loss


@program
def spans_masked_by_python_randomness():
    def loss(m, x, y):
        mask = torch.ones_like(x)
        for row in mask:
            row[random.randrange(WIDTH)] = 0
        return ce(m(x * mask), y)

    return loss


@program
def weight_standardization_by_batch_norm():
    class Standardized(nn.Conv1d):
        def forward(self, x):
            w = F.batch_norm(self.weight.view(1, len(self.weight), -1), None, None, training=True)
            return F.conv1d(x, w.view_as(self.weight), self.bias, padding=1)

    torch.manual_seed(0)
    net = nn.Sequential(Standardized(1, 8, 3), nn.Flatten(), nn.Linear(8 * WIDTH, CLASSES))
    return Case(net, lambda m, b: ce(m(b[0].unsqueeze(1)), b[1]), data(), "none")


@program
def experts_chosen_for_each_row():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.gate = nn.Linear(WIDTH, 4)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(4))

        def forward(self, x):
            weights = self.gate(x).softmax(1)
            chosen = weights.argmax(1)
            out = x.new_zeros(len(x), CLASSES)
            for i, expert in enumerate(self.experts):
                rows = torch.where(chosen == i)[0]
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, i, None])
            return out

    return Case(Experts(), lambda m, b: ce(m(b[0]), b[1]), data(), "none")


@program
def augmentation_of_each_row():
    def augment(batch):
        x, y = batch
        return x + 0.1 * torch.randn_like(x), y

    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), data(), "none", augment=augment)


@program
def an_lstm():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.lstm, self.out = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, CLASSES)

        def forward(self, x):
            return self.out(self.lstm(x.unsqueeze(2))[0][:, -1])

    return Case(Recurrent(), lambda m, b: ce(m(b[0]), b[1]), data(), "none")


@program
def bfloat16_under_autocast():
    def loss(m, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            out = m(x)
        return ce(out.float(), y)

    return loss


@program
def a_deep_network_in_bfloat16():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(12)]
    net = nn.Sequential(nn.Linear(WIDTH, 32), *layers, nn.Linear(32, CLASSES)).bfloat16()
    return Case(net, lambda m, b: ce(m(b[0].bfloat16()).float(), b[1]), data(), "none")


@program
def losses_of_very_different_size():
    return lambda m, x, y: ce(m(x), y) * (10 * x[:, 0]).exp()


@program
def a_schedule_in_a_global_of_a_module():
    import clean_programs

    clean_programs.CALLS = 0

    def loss(m, x, y):
        import clean_programs as kept

        kept.CALLS += 1
        return ce(m(x), y) * (1 + kept.CALLS / 50)

    return loss


def _jitter(x, y):
    """Draw for each row as often as the row says, as masks of spans do for ragged records."""
    found = [np.random.randn(1 + int(k) % 3).mean() for k in y]  # noqa: NPY002
    return torch.tensor(found, dtype=x.dtype)[:, None]


@program
def draws_that_depend_on_the_record():
    return lambda m, x, y: ce(m(x + 0.1 * _jitter(x, y)), y)


@program
def functional_dropout():
    return lambda m, x, y: ce(m(F.dropout(x, 0.3, training=True)), y)


@program
def rows_on_the_last_axis():
    return lambda m, x, y: ce(m((2 * x.T).T.contiguous()), y)


@program
def values_sorted_within_each_row():
    return lambda m, x, y: ce(m(x.sort(dim=1).values), y)


@program
def a_hinge_that_is_zero_for_most_rows():
    def loss(m, x, y):
        out = m(x)
        return (0.01 - out.gather(1, y[:, None]).squeeze(1)).clamp(min=0) ** 2

    return loss


@program
def records_whose_losses_are_not_finite():
    def loss(m, x, y):
        losses = ce(m(x), y)
        return torch.where(x[:, 0] > 1.5, losses * torch.inf, losses)

    return loss


@program
def one_random_mask_for_the_whole_lot():
    return lambda m, x, y: ce(m(x * (torch.rand(x.shape[1]) > 0.3)), y)


@program
def noise_with_heavy_tails():
    def loss(m, x, y):
        noise = torch.from_numpy(np.random.standard_cauchy(x.shape)).to(x.dtype)  # noqa: NPY002
        return ce(m(x + 0.1 * noise), y)

    return loss


@program
def crops_of_random_length():
    def loss(m, x, y):
        width = random.randint(1, WIDTH)
        start = random.randint(0, WIDTH - width)
        return ce(m(F.pad(x[:, start : start + width], (0, WIDTH - width))), y)

    return loss


class ScaledStdConv2d(nn.Conv2d):
    """Scaled weight standardization of normalizer-free networks, as in timm's NF-ResNet."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.full((self.out_channels, 1, 1, 1), 1.0))
        self.scale = 1.0 * self.weight[0].numel() ** -0.5  # gamma * 1 / sqrt(fan-in)

    def forward(self, x):
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None,
            weight=(self.gain * self.scale).view(-1), training=True, momentum=0.0, eps=1e-6,
        ).reshape_as(self.weight)  # fmt: skip
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def _standardized(kind, **options):
    torch.manual_seed(0)
    net = nn.Sequential(
        kind(1, 8, 3, padding=1), nn.GELU(), kind(8, 8, 3, padding=1, **options), nn.GELU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip
    return Case(net, lambda m, b: ce(m(b[0].view(-1, 1, 2, 3)), b[1]), data(), "none")


@program
def timm_scaled_standardized_convolutions():
    return _standardized(ScaledStdConv2d)


@program
def rows_sorted_and_put_back():
    def loss(m, x, y):
        order = x[:, 0].argsort()
        return ce(m(x[order])[order.argsort()], y)

    return loss


@program
def equal_rows_computed_once():
    x, y = data()
    x[1::2] = x[::2]

    def loss(m, batch):
        x, y = batch
        rows, places = torch.unique(x, dim=0, return_inverse=True)
        return ce(m(rows)[places], y)

    return Case(model(), loss, (x, y), "none")


class OnlyChosenExperts(nn.Module):
    """Experts of which only those run that some row has chosen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 33), nn.GELU(), nn.Linear(33, CLASSES)) for _ in range(4)
        )

    def forward(self, x):
        chosen = self.gate(x).argmax(1)
        out = x.new_zeros(len(x), CLASSES)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            if len(rows):
                out[rows] = expert(x[rows]).to(out.dtype)
        return out


@program
def only_chosen_experts():
    return Case(OnlyChosenExperts(), lambda m, b: ce(m(b[0]), b[1]), data(), "none")


@program
def numbers_of_the_operating_system():
    drawn = random.SystemRandom()

    def loss(m, x, y):
        return ce(m(x + torch.tensor([[drawn.gauss(0, 0.1)] for _ in x])), y)

    return loss
