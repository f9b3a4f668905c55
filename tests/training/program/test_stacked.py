"""Operators that run natively on all examples equal a loop over the examples."""

import copy
import warnings

import pytest
import torch
from looped_reference import alone
from torch import nn
from torch.nn import functional as F

from tacit.training import Flat, clipped_sum
from tacit.training.program import mapped

CLIP = Flat(0.5)


class Apply(nn.Module):
    """`function(module, x)` of what a small layer gives, so that gradients pass through it."""

    def __init__(self, function, shape, **parts):
        super().__init__()
        self.function, self.shape = function, shape
        self.first = nn.Linear(6, torch.Size(shape).numel())
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, self.first(x).view(-1, *self.shape))


def total_of(model, batch):
    """A loss of each example that depends on every output, and not in the same way."""
    out = model(batch[0]).flatten(1)
    weights = torch.linspace(-1, 1, out.shape[1], dtype=out.dtype)
    return out.square().mean(1) + (out * weights).sum(1)


def check(model, *batch, loss_fn=total_of):
    model = copy.deepcopy(model).double()
    batch = tuple(t.double() if t.is_floating_point() else t for t in batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = alone(model, loss_fn, batch, CLIP).sums
        found = clipped_sum(model, loss_fn, batch, CLIP).sums
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-10, atol=1e-11)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def constant(*shape):
    return nn.Parameter(torch.randn(*shape), requires_grad=False)


def attention(mask=None, heads=(2, 2), **options):
    def run(m, x):  # (n, *inner, heads, 3 * 5, 4)
        q, k, v = x.chunk(3, -2)
        k, v = (t[..., : heads[1], :, :] for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, mask and mask(m, q), **options)

    return run


def attending(*inner, mask=None, **parts):
    options = {name: parts.pop(name) for name in ("scale", "is_causal", "enable_gqa", "heads")
               if name in parts}  # fmt: skip
    return Apply(attention(mask, **options), (*inner, 15, 4), **parts)


ATTENTION = {
    "plain": lambda: attending(2),
    "scaled": lambda: attending(2, scale=0.3),
    "causal": lambda: attending(2, is_causal=True),
    "without heads": lambda: Apply(attention(heads=(None, None)), (15, 4)),
    "groups of heads": lambda: attending(4, heads=(4, 2), enable_gqa=True),
    "windows": lambda: attending(3, 2),
    "windows of two axes": lambda: attending(2, 3, 2),
    "constant mask": lambda: attending(2, mask=lambda m, _: m.bias, bias=constant(5, 5)),
    "constant mask of heads": lambda: attending(
        2, mask=lambda m, _: m.bias, bias=constant(2, 5, 5)
    ),
    "constant mask of windows": lambda: attending(
        3, 2, mask=lambda m, _: m.bias, bias=constant(3, 1, 5, 5)
    ),
    "constant mask with an axis of one": lambda: attending(
        2, mask=lambda m, _: m.bias, bias=constant(1, 1, 5, 5)
    ),
    "mask by values": lambda: attending(2, mask=lambda _, q: q.detach()[..., :1] > -9.0),
    "mask of some rows": lambda: attending(
        2, mask=lambda _, q: (q.detach().sum((1, 3), keepdim=True) > 0).mT | torch.eye(5).bool()
    ),
    "all hidden": lambda: attending(
        2, mask=lambda _, q: (q.detach().sum((1, 3), keepdim=True) > 0).expand(-1, -1, -1, 5)
    ),
    "numbers by example": lambda: attending(2, mask=lambda _, q: q.sum(-1, keepdim=True)),
    "numbers by example and window": lambda: attending(
        3, 2, mask=lambda _, q: q.sum((2, 4), keepdim=True)
    ),
    "trained mask": lambda: attending(
        2, mask=lambda m, _: m.bias, bias=nn.Parameter(torch.randn(2, 5, 5))
    ),
    "trained mask of windows": lambda: attending(
        3, 2, mask=lambda m, _: m.bias, bias=nn.Parameter(torch.randn(2, 5, 5))
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_equals_the_loop(name):
    check(ATTENTION[name](), torch.randn(4, 6))


def image(function, *shape, **parts):
    return Apply(function, shape or (4, 6, 6), **parts)


def frozen(layer):
    return layer.requires_grad_(False)


IMAGES = {
    "maximum": lambda: image(lambda _, x: F.max_pool2d(x, 3, 2, 1)),
    "maximum, one image": lambda: image(lambda _, x: F.max_pool2d(x.flatten(0, 1), 2)[: len(x)]),
    "maximum of sequences": lambda: image(lambda _, x: F.max_pool1d(x, 2), 4, 6),
    "maximum of volumes": lambda: image(lambda _, x: F.max_pool3d(x, 2), 2, 4, 4, 4),
    "mean": lambda: image(lambda _, x: F.avg_pool2d(x, 2)),
    "adaptive": lambda: image(lambda _, x: F.adaptive_avg_pool2d(x, 4)),
    "adaptive maximum": lambda: image(lambda _, x: F.adaptive_max_pool2d(x, 4)),
    "frozen convolution": lambda: image(lambda m, x: m.c(x), c=frozen(nn.Conv2d(4, 3, 3))),
    "frozen, same": lambda: image(
        lambda m, x: m.c(x), c=frozen(nn.Conv2d(4, 3, 3, padding="same"))
    ),
    "frozen, one image": lambda: image(
        lambda m, x: m.c(x.flatten(0, 1)), 1, 4, 6, 6, c=frozen(nn.Conv2d(4, 3, 3))
    ),
    "frozen 1d": lambda: image(lambda m, x: m.c(x), 4, 6, c=frozen(nn.Conv1d(4, 3, 3))),
    "frozen 3d": lambda: image(lambda m, x: m.c(x), 2, 3, 3, 3, c=frozen(nn.Conv3d(2, 3, 2))),
    "frozen transposed": lambda: image(
        lambda m, x: m.c(x), c=frozen(nn.ConvTranspose2d(4, 3, 3, 2))
    ),
    "a kernel for each example": lambda: image(
        lambda _, x: F.conv2d(x[:1, :2], x[0, :, :3, :3].reshape(2, 2, 3, 3))
    ),
    "group norm": lambda: image(lambda _, x: F.group_norm(x, 2)),
    "frozen group norm": lambda: image(lambda m, x: m.n(x), n=frozen(nn.GroupNorm(2, 4))),
    "instance norm": lambda: image(lambda _, x: F.instance_norm(x)),
    "layer norm": lambda: image(lambda _, x: F.layer_norm(x, (6,))),
    "frozen batch norm": lambda: image(lambda m, x: m.n(x), n=frozen(nn.BatchNorm2d(4)).eval()),
    **{
        mode: lambda mode=mode: image(lambda _, x: F.interpolate(x, scale_factor=2, mode=mode))
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    },
    "grid": lambda: image(
        lambda _, x: F.grid_sample(x[:, 2:], x[:, :2].movedim(1, -1).tanh(), align_corners=False)
    ),
    "affine grid": lambda: image(
        lambda _, x: F.affine_grid(x.flatten(1)[:, :6].view(-1, 2, 3), [len(x), 1, 4, 4], False)
    ),
    "shuffled": lambda: image(lambda _, x: F.pixel_shuffle(x, 2)),
    "unfolded": lambda: image(lambda _, x: F.fold(F.unfold(x, 3), (6, 6), 3)),
    "reflected": lambda: image(lambda _, x: F.pad(x, (1, 2, 2, 1), mode="reflect")),
    "circular": lambda: image(lambda _, x: F.pad(x, (1, 2, 2, 1), mode="circular")),
    "spectrum": lambda: image(
        lambda _, x: torch.stft(x, 4, window=torch.ones(4), return_complex=True).abs(), 12
    ),
    "constant table": lambda: image(
        lambda m, x: m.e(x.detach().abs().long() % 5) * x[..., None], e=frozen(nn.Embedding(5, 2))
    ),
    "divergence": lambda: image(
        lambda _, x: F.kl_div(x.log_softmax(-1), torch.full_like(x, 0.2), reduction="none"), 5
    ),
    "frozen encoder": lambda: image(
        lambda m, x: m.t(x),
        5,
        4,
        t=frozen(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)).eval(),
    ),
    "frozen recurrent layer": lambda: image(
        lambda m, x: m.r(x)[0], 5, 4, r=frozen(nn.LSTM(4, 3, batch_first=True))
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_equal_the_loop(name):
    check(IMAGES[name](), torch.randn(4, 6))


def test_what_is_stacked_never_runs_example_by_example(monkeypatch):
    monkeypatch.setattr(mapped, "_EXAMPLE_BY_EXAMPLE", "no such warning")
    slow = {"affine grid"}
    for name in IMAGES.keys() - slow:
        model, x = IMAGES[name](), torch.randn(4, 6)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using padding='same'")
            clipped_sum(model, total_of, (x,), CLIP)


# Random numbers -----------------------------------------------------------------------------------


def attended(x, scale=1.0):
    q, k, v = x.view(-1, 3, 2, 2, 4).unbind(1)
    return F.scaled_dot_product_attention(q, k * scale, v, dropout_p=0.4)


DRAWN = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "of channels": lambda x: F.dropout2d(x.view(-1, 12, 2, 2), 0.4),
    "of channels in place": lambda x: F.dropout2d(x.view(-1, 12, 2, 2) * 1, 0.4, inplace=True),
    "alpha": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "alpha of channels": lambda x: F.feature_alpha_dropout(x.view(-1, 12, 4), 0.4, training=True),
    "native": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "attention": attended,
    "fresh uniform": lambda x: x * torch.empty(48).uniform_(),
    "fresh normal": lambda x: x + torch.zeros(48).normal_(),
    "fresh bernoulli": lambda x: x * torch.ones(48).bernoulli_(0.6),
    "fresh exponential": lambda x: x * torch.empty(48).exponential_(),
    "in place on examples": lambda x: x * torch.empty_like(x).uniform_(),
    "gumbel": F.gumbel_softmax,
    "rand": lambda x: x * torch.rand(48),
    "randn": lambda x: x + torch.randn_like(x),
    "randint": lambda x: x * torch.randint(3, (48,)),
    "randperm": lambda x: x[:, torch.randperm(48)],
    "multinomial": lambda x: x[:, torch.multinomial(torch.ones(48), 20)],
    "poisson": lambda x: x * torch.poisson(torch.ones(48)),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full((48,), 0.6)),
}


class Drawing(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.linspace(-1, 1.5, 48))

    def forward(self, x):
        return self.function(x * self.w)


def losses_of(model, x, monkeypatch):
    """Return the losses that the engine computes for the rows of x."""
    found = []
    monkeypatch.setattr(mapped, "with_loss", lambda _, __, losses, *___: found.append(losses))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clipped_sum(model, total_of, (x,), CLIP)
    return found[0].detach()


@pytest.mark.parametrize("name", DRAWN)
def test_each_example_draws_its_own_numbers_by_the_same_law(name, monkeypatch):
    # All examples are equal, so they differ by what is drawn. Mean and spread of the loss are those
    # of plain calls for each example: within five standard errors, of false alarms below 1e-5.
    model, x = Drawing(DRAWN[name]), torch.randn(48).expand(1500, 48)
    found = losses_of(model, x, monkeypatch)
    assert found.unique().numel() > 5
    plain = torch.cat([total_of(model, (row[None],)) for row in x]).detach()
    for power in (1, 2):
        a, b = found**power, plain**power
        error = ((a.var() + b.var()) / len(x)).sqrt()
        assert (a.mean() - b.mean()).abs() < 5 * error + 1e-6


@pytest.mark.parametrize("name", ["dropout of weights", "attention on weights"])
def test_what_is_drawn_for_weights_is_drawn_for_each_example(name, monkeypatch):
    dropped = Apply(lambda m, x: x @ F.dropout(m.w, 0.5), (4,), w=nn.Parameter(torch.randn(4, 4)))
    queried = Apply(
        lambda m, x: F.scaled_dot_product_attention(
            m.q.expand(len(x), -1, -1), x, x, dropout_p=0.5
        ),
        (3, 4),
        q=nn.Parameter(torch.randn(2, 4)),
    )
    model = dropped if name == "dropout of weights" else queried
    assert losses_of(model, torch.ones(64, 6), monkeypatch).unique().numel() > 5
