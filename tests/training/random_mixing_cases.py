"""Programs that draw random numbers and in which one example sees another.

Random numbers hide mixing from a comparison of single runs: lots of two sizes draw other numbers.
Each case is found only by comparing laws, or only if both runs get the same numbers.
"""

import random

import coarse_mixing_cases  # noqa: F401  # registers its cases
import first_lot_cases  # noqa: F401  # registers its cases
import hostile_mixing_cases  # noqa: F401  # registers its cases
import numpy as np
import torch
import unusual_mixing_cases  # noqa: F401  # registers its cases
from mixing_cases import CASES, CLASSES, RECORDS, WIDTH, Case, case, ce, data, model
from torch import nn
from torch.nn import functional as F

__all__ = ["CASES"]


def jitter(x, y):
    """Draw for each row as often as its label says, so that random numbers do not line up."""
    found = [np.random.randn(1 + int(k)).mean() for k in y]  # noqa: NPY002
    return 0.1 * torch.tensor(found, dtype=x.dtype)[:, None]


# The size of the lot ------------------------------------------------------------------------------


@case("most")
def dropout_stays_active_and_losses_are_divided_by_the_size():
    return lambda m, x, y: ce(m(F.dropout(x, 0.3, training=True)), y) / len(x)


@case("most")
def a_dropout_layer_and_losses_divided_by_the_size_in_training():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES))

    def loss(m, batch):
        losses = ce(m(batch[0]), batch[1])
        return losses / len(losses) if m.training else losses

    return Case(net, loss, data(), "most")


@case("most")
def noise_whose_scale_is_the_size_of_the_lot():
    return lambda m, x, y: ce(m(x + 0.05 * len(x) * torch.randn_like(x)), y)


@case("most")
def the_dropout_rate_follows_the_size_of_the_lot():
    return lambda m, x, y: ce(m(F.dropout(x, len(x) / (len(x) + 30))), y)


@case("most")
def numpy_noise_and_a_step_size_by_the_size():
    def loss(m, x, y):
        noise = torch.from_numpy(np.random.randn(*x.shape)).to(x.dtype)  # noqa: NPY002
        return ce(m(x + 0.3 * noise), y) * len(x) ** -0.5

    return loss


@case("most")
def augmentation_with_a_generator_whose_noise_follows_the_size():
    rng = np.random.default_rng(0)

    def augment(batch):
        x, y = batch
        noise = torch.from_numpy(rng.normal(size=x.shape)).to(x.dtype)
        return x + len(x) / 40 * noise, y

    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), data(), "most", augment=augment)


@case("most")
def a_random_half_counts_and_is_divided_by_its_number():
    def loss(m, x, y):
        keep = torch.rand(len(x)) < 0.5
        return ce(m(x), y) * keep / keep.sum().clamp(min=1)

    return loss


@case("most")
def gradients_scaled_by_the_size_behind_dropout():
    """Losses do not show it."""

    def loss(m, x, y):
        hidden = m[0](F.dropout(x, 0.3))
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g * len(g) / 16)
        return 0.05 * ce(m[2](m[1](hidden)), y)

    return loss


# Other records, with random numbers that line up --------------------------------------------------


@case("most")
def mixup_with_a_random_partner():
    def loss(m, x, y):
        weight = torch.distributions.Beta(1.0, 1.0).sample()
        other = torch.randperm(len(x))
        out = m(weight * x + (1 - weight) * x[other])
        return weight * ce(out, y) + (1 - weight) * ce(out, y[other])

    return loss


@case("most")
def manifold_mixup_by_python_randomness():
    def loss(m, x, y):
        order = list(range(len(x)))
        random.shuffle(order)
        hidden = m[0](x)
        return ce(m[2](m[1](0.8 * hidden + 0.2 * hidden[order])), y)

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
def the_dropout_rate_follows_the_records():
    return lambda m, x, y: ce(m(F.dropout(x, float(x.abs().mean().clamp(0.05, 0.95)))), y)


@case("most")
def random_pairs_repel_each_other():
    def loss(m, x, y):
        out = m(x)
        other = out[torch.randint(len(x), (len(x),))]
        return ce(out, y) + torch.exp(-(out - other.detach()).square().sum(1))

    return loss


# Other records, with random numbers that do not line up -------------------------------------------


@case("most")
def centered_rows_and_draws_that_depend_on_the_records():
    return lambda m, x, y: ce(m(x - x.mean(0) + jitter(x, y)), y)


@case("most")
def random_pairs_and_draws_that_depend_on_the_records():
    def loss(m, x, y):
        shift = jitter(x, y)
        other = x[np.random.permutation(len(x))]  # noqa: NPY002
        return ce(m(0.5 * x + 0.5 * other + shift), y)

    return loss


@case("most")
def contrastive_rows_and_draws_that_depend_on_the_records():
    def loss(m, x, y):
        z = F.normalize(m(x + jitter(x, y)), dim=1)
        return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z)), reduction="none")

    return loss


@case("most")
def gradients_centered_and_draws_that_depend_on_the_records():
    """Losses do not show it."""

    def loss(m, x, y):
        hidden = m[0](x + jitter(x, y))
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g - g.mean(0))
        return ce(m[2](m[1](hidden)), y)

    return loss


@case("faint")
def a_data_set_that_adds_noise_of_the_size_of_the_last_record():
    """Laws differ, but by so little for so few rows that some seeds pass."""

    class Noisy(torch.utils.data.Dataset):
        def __init__(self):
            self.x, self.y = data()
            self.rng, self.scale = np.random.default_rng(0), 1.0

        def __len__(self):
            return RECORDS

        def __getitem__(self, i):
            noise = self.rng.normal(size=(1 + int(self.y[i]), WIDTH)).mean(0)
            noisy = self.x[i] + self.scale * torch.from_numpy(noise).to(self.x.dtype)
            self.scale = float(self.x[i].square().sum())
            return noisy, self.y[i]

    return Case(model(), lambda m, b: ce(m(b[0]), b[1]), Noisy(), "faint")


# The lot before, behind random numbers that cannot be put back ------------------------------------


def fresh_noise(x, scale):
    """Return normal noise from a generator that the operating system seeds at every call."""
    return scale * torch.from_numpy(np.random.default_rng().normal(size=tuple(x.shape))).to(x.dtype)


@case("most")
def noise_of_the_system_and_the_mean_of_the_lot_before():
    mean = [torch.zeros(WIDTH)]

    def loss(m, x, y):
        losses = ce(m(x + fresh_noise(x, 0.3) - mean[0]), y)
        mean[0] = x.detach().mean(0)
        return losses

    return loss


@case("most")
def noise_of_the_system_and_class_weights_of_the_lot_before():
    weights = [torch.ones(CLASSES)]

    def loss(m, x, y):
        losses = ce(m(x + fresh_noise(x, 0.1)), y) * weights[0][y]
        weights[0] = len(y) / (CLASSES * torch.bincount(y, minlength=CLASSES).clamp(min=1))
        return losses

    return loss


@case("most")
def noise_of_the_system_and_a_running_mean_of_the_lots_before():
    mean = [torch.zeros(WIDTH)]

    def loss(m, x, y):
        losses = ce(m(x + fresh_noise(x, 0.1) - mean[0]), y)
        mean[0] = 0.9 * mean[0] + 0.1 * x.detach().mean(0)
        return losses

    return loss
