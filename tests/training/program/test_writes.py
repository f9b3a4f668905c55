"""Operations in place: on examples, on weights computed from parameters, before and after use."""

import pytest
import torch
from looped_reference import alone
from torch import nn
from torch.nn import functional as F

from tacit.training import Flat, clipped_sum

C = Flat(0.3)


class Model(nn.Module):
    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.write = write
        self.a, self.o = nn.Linear(5, 4), nn.Linear(4, 3)
        self.s, self.t = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.w, self.c = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return self.o(self.write(self, x))


def losses(model, batch):
    return model(batch[0]).square().flatten(1).sum(1)


def multiplied(m, x):
    h = m.a(x)
    h *= m.s
    h += m.s.exp()
    h -= m.t
    h /= 1 + m.s.square()
    return h


def of_the_input(m, x):
    h = x[..., :4].clone()
    h.mul_(m.s).add_(m.t, alpha=2.0)
    return h


def of_a_part(m, x):
    h = m.a(x)
    h[..., 1:3] *= m.s[1:3]
    return h


def into_a_part(m, x):
    h = torch.zeros_like(x)[..., :4]
    h[..., 0] = m.c
    h[..., 1:] = m.a(x)[..., 1:]
    return h


def copied(m, x):
    h = torch.empty_like(x[..., :4])
    h.copy_(m.s)
    return h * m.a(x)


def filled(m, x):
    return torch.empty_like(x[..., :4]).fill_(m.c) * m.a(x)


def with_three(m, x):
    return m.a(x).addcmul_(m.s, m.t).lerp_(m.t.expand(*x.shape[:-1], 4), 0.3)


def clamped(m, x):
    return m.a(x).clamp_(min=m.s - 1).pow_(2)


def after_use(m, x):
    w = m.w.clone()
    h = F.linear(x, w)
    w.mul_(0.5)
    return torch.tanh(h) + F.linear(x, w)


def after_addition(m, x):
    s = m.s * 1
    h = x[..., :4] + s
    s.mul_(2)
    return torch.tanh(h) * s


def after_addition_in_part(m, x):
    s = m.s * 1
    h = x[..., :4] + s
    s[0] = 5.0
    return torch.tanh(h) * s


def through_a_view(m, x):
    w = m.w * 1
    row = w[0]
    h = x * row
    w.mul_(3)
    return F.linear(torch.tanh(h), w)


def before_use(m, x):
    w = m.w.clone()
    w[0] = 0.0
    return F.linear(x, w)


def of_a_view_before_use(m, x):
    w = m.w * 1
    w[:, 1].add_(2)
    return F.linear(x, w) + F.linear(x.sin(), w.t().contiguous().t())


def of_the_source(m, x):
    w = m.w.t().clone()
    v = w.t()
    w.mul_(2)
    return F.linear(x, v)


def of_a_copys_source(m, x):
    w = m.w.clone()
    v = w.clone()
    w.mul_(2)
    return F.linear(x, v) + F.linear(x.sin(), w)


WRITES = [multiplied, of_the_input, of_a_part, into_a_part, copied, filled, with_three, clamped]
WRITES += [after_use, after_addition, after_addition_in_part, through_a_view, before_use]
WRITES += [of_a_view_before_use, of_the_source, of_a_copys_source]


@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 5), (1, 5)], ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_gives_the_gradient_of_the_loop(write, shape):
    model, batch = Model(write).double(), (torch.randn(*shape, dtype=torch.float64),)
    expected = alone(model, losses, batch, C).sums
    found = clipped_sum(model, losses, batch, C).sums
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-9, atol=1e-12)
