"""Operators on stacked tensors: an example's loss has the same bits whatever the others hold."""

import warnings

import pytest
import torch
from looped_reference import alone
from torch import nn
from torch.nn import functional as F

from tacit.errors import IncompatibleModel
from tacit.training import Flat, clipped_sum
from tacit.training.examples import Examples
from tacit.training.program import mapped
from tacit.training.program.one_example import _map
from tacit.training.program.programs import Programs
from tacit.training.tree import require_gradient

EXAMPLES = 5
TABLE = torch.linspace(-1, 1, 18).view(9, 2)


class Scaled(nn.Module):
    """`function` of the examples (n, 4, 6) times a parameter."""

    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x):
        return self.function(x * self.scale)


def total(model, batch):
    out = model(batch[0]).flatten(1)
    return (out * torch.linspace(-1, 1, out.shape[1])).sum(1)


def numbers(x):
    """A number for each example: a tensor without axes, as one example has it."""
    return x.sum((1, 2))


# Each is written for any number of examples, on the first axis of x.
LIFTED = {
    "arithmetic": lambda x: (x * 2 - x.square()).tanh() / (1 + x.abs()),
    "other ranks": lambda x: x + x[:, 0].unsqueeze(1) * numbers(x)[:, None, None],
    "constants": lambda x: torch.where(torch.ones(4, 6) > 0, x, 0.0) + torch.arange(6.0),
    "comparison": lambda x: torch.where(x > 0.1, x, -x),
    "clamp": lambda x: x.clamp(-0.5, 0.5) + x.masked_fill(x < 0, 0.0),
    "casts": lambda x: x.double().float().type_as(x),
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(1),
    "sums": lambda x: x.sum(1) + x.mean((1,)) + x.amax(1) + x.cumsum(1)[:, 0],
    "spread": lambda x: x.var(2) + x.std(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=2),
    "largest": lambda x: x.topk(2, -1).values + x.sort(1).values[:, :, :2],
    "places": lambda x: x.gather(2, x.argsort(2)) * x.argmax(1)[:, None],
    "split": lambda x: torch.cat([*x.split(2, 2), *x.chunk(2, 1)[0].unbind(1)[:0]], -1),
    "joined with a constant": lambda x: torch.cat([x, torch.ones(len(x), 1, 6)], 1),
    "stacked": lambda x: torch.stack([x, x + 1], -1).flatten(1, 2),
    "moved": lambda x: x.transpose(1, 2).permute(0, 2, 1).unsqueeze(-1).squeeze(-1),
    "parts": lambda x: x[:, 1:, ::2] * x.select(1, 0)[:, None, ::2] + x.narrow(2, 1, 3)[:, 1:],
    "shapes": lambda x: x.reshape(len(x), 2, 2, 6).view(len(x), 4, 6).unflatten(2, (2, 3)),
    "repeated": lambda x: x[:, :1].expand(-1, 3, -1) + x[:, :3].repeat_interleave(1, 1),
    "turned": lambda x: x.flip(1).roll(1, 2),
    "gated": lambda x: F.glu(x, -1),
    "products": lambda x: x @ x.mT @ torch.ones(4, 3) + torch.bmm(x, x.mT)[:, :, :3],
    "einsum": lambda x: torch.einsum("bij,bkj,kl->bil", x, x, torch.ones(4, 2)),
    "linear": lambda x: F.linear(x, torch.ones(3, 6), torch.ones(3)),
    "norms": lambda x: F.layer_norm(x, (6,)) + F.rms_norm(x, (6,)),
    "padding": lambda x: F.pad(x, (1, 2)),
    "table": lambda x: F.embedding((x.detach() > 0).long(), TABLE) * x[..., None],
    "picked": lambda x: x[:, [0, 2], :2] + TABLE[x.detach().abs().long() % 9][:, 0, :2],
    "image": lambda x: F.max_pool2d(x[:, None], 2).sum(1) + F.avg_pool2d(x[:, None], 2).sum(1),
    "convolution": lambda x: F.conv1d(x, torch.ones(2, 4, 3)),
    "groups": lambda x: F.group_norm(x, 2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "written": lambda x: x.clone().mul_(2).add_(x[:, :1]).relu_(),
    "losses": lambda x: F.cross_entropy(x, x.detach().argmax(1), reduction="none"),
}
MAPPED = {
    "similarity of numbers": lambda x: x + (numbers(x).double() * numbers(x))[:, None, None],
    "transform": lambda x: torch.fft.fft(x).abs(),
    "mixed axes": lambda x: x[:, torch.tensor([0, 1]), :, None][:, :, torch.tensor([2, 3])],
}  # fmt: skip


def losses_of(model, x):
    found = []

    def seen(losses):
        require_gradient(losses)
        found.append(losses.detach())
        return losses

    mask = torch.ones(len(x), dtype=torch.bool)
    mapped.run(Examples(model, total, (x,), mask), Flat(1.0), seeded=seen)
    return found[0]


@pytest.mark.parametrize("name", [*LIFTED, *MAPPED])
def test_no_example_reaches_another(name):
    torch.manual_seed(0)
    model = Scaled((LIFTED | MAPPED)[name])
    x = torch.randn(EXAMPLES, 4, 6)
    with torch.random.fork_rng():
        losses = losses_of(model, x)
    for value in (torch.nan, torch.inf, 1e30, 0.0):
        other = x.clone()
        other[2] = value
        found = losses_of(model, other)
        rest = [0, 1, 3, 4]
        assert torch.equal(found[rest], losses[rest])


@pytest.mark.parametrize("name", LIFTED)
def test_operators_run_without_a_map(name):
    model, x = Scaled(LIFTED[name]), torch.randn(EXAMPLES, 4, 6)
    programs = Programs(model, total)
    programs.prepare((x,))
    calls = [str(n.args[1]) for n in programs.program_of((x,)).graph.graph.nodes
             if n.target is _map]  # fmt: skip
    assert not calls


@pytest.mark.parametrize("name", [*LIFTED, *MAPPED])
def test_sums_equal_a_loop(name):
    torch.manual_seed(0)
    model, x = Scaled((LIFTED | MAPPED)[name]), torch.randn(EXAMPLES, 4, 6)
    found, want = (way(model, total, (x,), Flat(0.5)).sums for way in (clipped_sum, alone))
    torch.testing.assert_close(found["scale"], want["scale"].float(), rtol=1e-4, atol=1e-5)


def test_a_parameter_may_be_a_single_number():
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.heat = nn.Linear(6, 3), nn.Parameter(torch.tensor(0.7))

        def forward(self, x):
            return self.first(x).mean((1, 2), keepdim=True) * self.heat

    x = torch.randn(EXAMPLES, 4, 6)
    found, want = (
        way(Tempered(), total, (x,), Flat(1.0)).sums["heat"].shape for way in (clipped_sum, alone)
    )
    assert found == want == ()


def test_an_input_that_is_overwritten_after_its_use_is_refused():
    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)

        def forward(self, x):
            h = self.first(x) * 1
            found = self.last(h)
            return found + h.mul_(2).sum((1, 2))[:, None, None]

    with pytest.raises(RuntimeError, match="in place"):
        clipped_sum(Overwrites(), total, (torch.randn(3, 4, 6),), Flat(1.0))


class _Reviewed(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.mean, self.deviation = torch.zeros(3), torch.ones(3)

    def forward(self, x):
        return self.body(x * self.weight, self)


def _written_pool(x, _):
    pooled = F.max_pool2d(x, 2, stride=1)
    pooled.reshape(len(x), -1).mul_(torch.arange(27.0))
    return pooled.flatten(1).sum(1)


def _mask_of_the_type(x, _):
    mask = torch.tril(torch.ones(4, 4, dtype=torch.float64)).type_as(x)
    return (x * mask[1]).sum((1, 2, 3))


def _strided(x, _):
    return x.as_strided((len(x), 3, 3), (x.stride(0), 4, 1)).sum((1, 2))


def _picked(x, _):
    place = torch.zeros(1, dtype=torch.long)
    return x.sum((1, 2, 3), keepdim=True).flatten(1).index_select(1, place).squeeze(1)


@pytest.mark.parametrize("body", [_written_pool, _mask_of_the_type, _strided, _picked])
def test_what_a_reviewer_broke_is_the_loop_again_and_independent(body):
    torch.manual_seed(0)
    model, x = _Reviewed(body), torch.randn(4, 3, 4, 4)
    total = lambda model, batch: model(batch[0])  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # some run in the loop
        one = torch.tensor([True, False, False, False])
        found = clipped_sum(model, total, (x,), Flat(0.5)).sums["weight"]
        first = clipped_sum(model, total, (x,), Flat(0.5), weights=one).sums["weight"]
        changed = torch.cat([x[:1], 7 * torch.randn(3, 3, 4, 4)])
        again = clipped_sum(model, total, (changed,), Flat(0.5), weights=one).sums["weight"]
    want = alone(model, total, (x.clone(),), Flat(0.5)).sums["weight"]
    torch.testing.assert_close(found.double(), want.double(), rtol=1e-4, atol=1e-5)
    assert torch.equal(first, again)


@pytest.mark.parametrize("is_buffer", [True, False])
def test_running_statistics_are_written_by_no_program(is_buffer):
    def body(x, model):
        normal = F.instance_norm(x, model.mean, model.deviation, use_input_stats=True)
        return (x - model.mean.view(3, 1, 1)).pow(2).sum((1, 2, 3)) + 0 * normal.sum((1, 2, 3))

    model, x = _Reviewed(body), torch.randn(4, 3, 4, 4)
    if is_buffer:
        for name in ("mean", "deviation"):
            value = getattr(model, name)
            delattr(model, name)
            model.register_buffer(name, value)
        with pytest.raises(IncompatibleModel, match=r"writes into model\.mean"):
            clipped_sum(model, lambda m, b: m(b[0]), (x,), Flat(0.5))
    else:
        with pytest.warns(RuntimeWarning, match="writes into a tensor that all examples share"):
            clipped_sum(model, lambda m, b: m(b[0]), (x,), Flat(0.5))
