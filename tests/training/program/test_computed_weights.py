"""Weights that are computed from parameters: every operation with a rule equals the loop."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from looped_reference import alone
from slow_cases import one_fast
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.utils import parametrize

from tacit.training import Flat, clipped_sum

CLIP = Flat(0.5)


class Mappable(Function):
    """Twice the tensor, with a rule for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w):
        return 2 * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 2 * g


def bounded(w: torch.Tensor) -> torch.Tensor:
    return 2 * torch.tanh(w) + w


class Tanh(nn.Module):
    def forward(self, w):
        return torch.tanh(w)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # deprecated, and still in use
    SCRIPTED = torch.jit.script(bounded)

COMPUTED = {
    "custom function that vmap maps": Mappable.apply,
    "scripted function": SCRIPTED,
    "view": lambda w: w.reshape(-1).view(w.shape),
    "transposed twice": lambda w: w.movedim(0, -1).movedim(-1, 0),
    "cast": lambda w: w.to(torch.float64).to(torch.float32),
    "view of a custom function": lambda w: Mappable.apply(w).view(w.shape),
    "cast of a custom function to a parameter's type": None,  # in `Computed.forward`
    "parametrization": None,  # in `Computed.__init__`
}


class Computed(nn.Module):
    """A call of one operation, of which the parameters named in `chosen` are computed."""

    def __init__(self, call, shapes, how, chosen):
        super().__init__()
        self.call, self.how, self.chosen = call, how, chosen
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / 2))
        self.names = list(shapes)
        if how == "parametrization":
            for name in chosen:
                parametrize.register_parametrization(self, name, Tanh())

    def forward(self, x):
        return self.call(x, SimpleNamespace(**{n: self._of(n) for n in self.names}))

    def _of(self, name):
        w = getattr(self, name)
        if name not in self.chosen or self.how == "parametrization":
            return w
        if self.how == "cast of a custom function to a parameter's type":
            return Mappable.apply(w).type_as(w)
        return COMPUTED[self.how](w)


def title(function):
    return function.__qualname__.removeprefix("_VariableFunctionsClass.")


def weight(*shape, bias=None):
    return {"w": shape} if bias is None else {"w": shape, "b": (bias,)}


def attention(x, p):
    x = x.transpose(0, 1)
    return F.multi_head_attention_forward(
        x, x + 1, x - 1, 4, 2, p.w, p.b, p.k, p.v, False, 0.0, p.o, p.c
    )[0].transpose(0, 1)


def self_attention(x, p):
    x = x.transpose(0, 1)
    return F.multi_head_attention_forward(
        x, x, x, 4, 2, p.w, p.b, None, None, False, 0.0, p.o, p.c
    )[0].transpose(0, 1)


def recurrent(function, count):
    def call(x, p):
        state = [x.new_zeros(1, len(x), 3)] * count
        hidden = state if count == 2 else state[0]
        options = (True, 1, 0.0, False, False, True)
        return function(x, hidden, [p.w, p.u, p.b, p.c], *options)[0]

    return call


def cell(function, count):
    def call(x, p):
        state = [x.new_ones(len(x), 3)] * count
        out = function(x, state if count == 2 else state[0], p.w, p.u, p.b, p.c)
        return torch.cat(out, 1) if count == 2 else out

    return call


def gates(n):
    return {"w": (3 * n, 4), "u": (3 * n, 3), "b": (3 * n,), "c": (3 * n,)}


def convolution(name, transposed=False):
    function = getattr(torch, name)
    dims = int(name[-2])
    shape = (2, 3, *(3,) * dims) if transposed else (3, 2, *(3,) * dims)
    return lambda x, p: function(x, p.w, p.b), weight(*shape, bias=3), (5, 2, *(5,) * dims)


PROJECTIONS = {"w": (12, 4), "b": (12,), "o": (4, 4), "c": (4,)}
ENDS = {"k": (1, 1, 4), "v": (1, 1, 4)}

# For each operation with a rule: the call, the shapes of its parameters, and of its input.
CALLS = {
    F.linear: (lambda x, p: F.linear(x, p.w, p.b), weight(3, 4, bias=3), (5, 2, 4)),
    torch.matmul: (lambda x, p: torch.matmul(x, p.w), weight(4, 3), (5, 2, 4)),
    torch.Tensor.matmul: (lambda x, p: x.matmul(p.w) + p.b, weight(4, 3, bias=3), (5, 4)),
    torch.Tensor.__matmul__: (lambda x, p: x @ p.w + p.b, weight(4, 3, bias=3), (5, 2, 4)),
    torch.mm: (lambda x, p: torch.mm(x, p.w), weight(4, 3), (5, 4)),
    torch.Tensor.mm: (lambda x, p: x.mm(p.w), weight(4, 3), (5, 4)),
    torch.addmm: (lambda x, p: torch.addmm(p.b, x, p.w), weight(4, 3, bias=3), (5, 4)),
    F.embedding: (lambda x, p: F.embedding(x, p.w), weight(7, 4), (5, 3)),
    F.embedding_bag: (lambda x, p: F.embedding_bag(x, p.w), weight(7, 4), (5, 3)),
    torch.Tensor.__getitem__: (lambda x, p: p.w[x], weight(7, 4), (5, 3)),
    F.layer_norm: (lambda x, p: F.layer_norm(x, (4,), p.w, p.b), weight(4, bias=4), (5, 3, 4)),
    F.rms_norm: (lambda x, p: F.rms_norm(x, (4,), p.w), weight(4), (5, 3, 4)),
    torch.rms_norm: (lambda x, p: torch.rms_norm(x, (4,), p.w), weight(4), (5, 3, 4)),
    F.group_norm: (lambda x, p: F.group_norm(x, 2, p.w, p.b), weight(4, bias=4), (5, 4, 6)),
    F.instance_norm: (
        lambda x, p: F.instance_norm(x, weight=p.w, bias=p.b),
        weight(4, bias=4),
        (5, 4, 6),
    ),
    F.multi_head_attention_forward: (attention, PROJECTIONS | ENDS, (5, 3, 4)),
    torch.add: (lambda x, p: torch.add(x, p.w) * p.b, {"w": (3, 4), "b": (4,)}, (5, 3, 4)),
    torch.Tensor.add: (lambda x, p: x.add(p.w), weight(3, 4), (5, 3, 4)),
    torch.Tensor.__add__: (lambda x, p: x + p.w, weight(3, 4), (5, 3, 4)),
    torch.Tensor.__radd__: (lambda x, p: p.w + x, weight(3, 4), (5, 3, 4)),
    torch.lstm: (recurrent(torch.lstm, 2), gates(4), (5, 6, 4)),
    torch.gru: (recurrent(torch.gru, 1), gates(3), (5, 6, 4)),
    torch.rnn_tanh: (recurrent(torch.rnn_tanh, 1), gates(1), (5, 6, 4)),
    torch.rnn_relu: (recurrent(torch.rnn_relu, 1), gates(1), (5, 6, 4)),
    torch.lstm_cell: (cell(torch.lstm_cell, 2), gates(4), (5, 4)),
    torch.gru_cell: (cell(torch.gru_cell, 1), gates(3), (5, 4)),
    torch.rnn_tanh_cell: (cell(torch.rnn_tanh_cell, 1), gates(1), (5, 4)),
    torch.rnn_relu_cell: (cell(torch.rnn_relu_cell, 1), gates(1), (5, 4)),
    torch.conv1d: convolution("conv1d"),
    torch.conv2d: convolution("conv2d"),
    torch.conv3d: convolution("conv3d"),
    torch.conv_transpose1d: convolution("conv_transpose1d", transposed=True),
    torch.conv_transpose2d: convolution("conv_transpose2d", transposed=True),
    torch.conv_transpose3d: convolution("conv_transpose3d", transposed=True),
}
CASES = {
    **{title(f): case for f, case in CALLS.items()},
    "self-attention": (self_attention, PROJECTIONS, (5, 3, 4)),
    "no rule": (lambda x, p: torch.sin(x * p.w) * p.b, {"w": (4,), "b": (4,)}, (5, 3, 4)),
    "expanded": (
        lambda x, p: torch.cat([p.w.expand(len(x), 1, 4), x * p.b], 1),
        {"w": (1, 1, 4), "b": (4,)},
        (5, 3, 4),
    ),
}


def losses(model, batch):
    out = model(batch[0]).flatten(1)
    return out.square().mean(1) + (out * torch.linspace(-1, 1, out.shape[1])).sum(1)


@pytest.mark.parametrize("name", one_fast(CASES, 3))
def test_a_computed_weight_has_the_gradient_of_the_loop(name):
    check(name, "parametrization", chosen=tuple(CASES[name][1])[:1])


@pytest.mark.slow  # a minute; the test above is a part of it
@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.parametrize("name", CASES)
def test_computed_weights_have_the_gradient_of_the_loop(name, how):
    names = tuple(CASES[name][1])
    # One parameter at a time, all but the first, and all of them; the others are plain.
    for chosen in {(n,) for n in names} | {names[1:], names} - {()}:
        check(name, how, chosen=chosen)


def check(name, how, *, chosen):
    call, shapes, size = CASES[name]
    torch.manual_seed(0)
    x = torch.randint(0, 7, size) if shapes["w"][0] == 7 else torch.randn(size)
    model = Computed(call, shapes, how, chosen)
    expected = alone(model, losses, (x,), CLIP).sums
    assert all(bool(value.any()) for value in expected.values())
    assert_equal(clipped_sum(model, losses, (x,), CLIP).sums, expected)


def assert_equal(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-4, atol=1e-6)
