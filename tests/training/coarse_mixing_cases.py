"""Mixing that coarse rounding, lost random numbers or a few huge records could hide.

A tolerance that follows from the coarsest type in use, from a repetition with other random numbers,
or from the mean of the losses lets all of these pass.
"""

import secrets

import numpy as np
import torch
from mixing_cases import CLASSES, WIDTH, Case, case, ce, data, model
from torch import nn
from torch.nn import functional as F


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
def attention_over_the_batch_in_bfloat16():
    return autocast(lambda x: x + 0.3 * torch.softmax(x @ x.T, 1) @ x)


@case("most")
def class_weights_in_bfloat16():
    return autocast(lambda x: x, balanced)


@case("most")
def a_bfloat16_model_sees_the_row_before():
    net = model().bfloat16()
    return Case(
        net, lambda m, b: ce(m((b[0] + 0.4 * b[0].roll(1, 0)).bfloat16()).float(), b[1]), data(),
        "most",
    )  # fmt: skip


@case("most")
def bfloat16_losses_of_centered_rows():
    return lambda m, x, y: ce(m(x - x.mean(0)), y).bfloat16()


@case("most")
def float8_rows_and_class_weights():
    return lambda m, x, y: ce(m(float8(x)), y) * balanced(y)


@case("most")
def float8_rows_and_mixup():
    return lambda m, x, y: ce(m(0.5 * float8(x) + 0.5 * float8(x).roll(1, 0)), y)


@case("most")
def float8_contrast():
    def loss(m, x, y):
        z = F.normalize(m(float8(x)), dim=1)
        return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z)), reduction="none")

    return loss


@case("faint")
def a_leak_of_a_hundred_thousandth_of_the_mean():
    return lambda m, x, y: ce(m(x + 1e-5 * x.mean(0)), y)


@case("most")
def a_few_rows_are_ill_conditioned():
    def loss(m, x, y):
        out = m(x)[:, 0]
        return ce(m(x - x.mean(0)), y) + (x[:, 1] > 2) * torch.sin(1e8 * out).abs()

    return loss


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


@case("most")
def class_weights_and_noise_that_cannot_be_repeated():
    return noisy(lambda m, x, y, n: ce(m(x + 0.1 * n), y) * balanced(y))


@case("most")
def ranks_and_noise_that_cannot_be_repeated():
    return noisy(lambda m, x, y, n: ce(m(x.argsort(0).argsort(0) / len(x) + 0.3 * n), y))


@case("most")
def mixup_and_numbers_of_the_operating_system():
    def loss(m, x, y):
        drawn = np.frombuffer(secrets.token_bytes(x.numel()), np.uint8) / 255.0 - 0.5
        return ce(m(0.6 * x + 0.4 * x.flip(0) + 0.3 * torch.tensor(drawn).float().view_as(x)), y)

    return loss


@case("most")
def the_median_of_the_lot_before_beside_huge_records():
    x, y = data()
    x[::50, 0] = 1e12
    before = [torch.zeros(WIDTH)]

    def loss(m, batch):
        x, y = batch
        losses = ce(m(x - before[0]), y)
        before[0] = x.detach().median(0).values + 0.5
        return losses

    torch.manual_seed(0)
    return Case(nn.Linear(WIDTH, CLASSES), loss, (x, y), "most")
