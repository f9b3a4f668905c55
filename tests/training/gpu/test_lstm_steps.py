"""All time steps of an LSTM in one launch, beside the same steps one by one in float64."""

import pytest
import torch

from tacit.training.gradients.recurrent import _CELLS, _all_steps, _all_steps_backward, _recur

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("steps", "rows", "width"),
    [(64, 256, 128), (1, 1, 1), (7, 33, 20), (5, 17, 100), (3, 2100, 16)],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_all_steps_at_once_are_the_steps_one_by_one(steps, rows, width, has_bias):
    from tacit.training.gpu import lstm_steps

    torch.manual_seed(0)
    zx = torch.randn(rows, steps, 4 * width, device="cuda").transpose(0, 1)
    h, c = (0.5 * torch.randn(rows, width, device="cuda") for _ in range(2))
    w = torch.randn(4 * width, width, device="cuda") / width**0.5
    b = torch.randn(4 * width, device="cuda") if has_bias else None
    assert lstm_steps.supports(zx, w)
    found = _all_steps("lstm", zx, [h, c], w, b, None, None)

    zx64, h64, c64, w64 = (t.double().requires_grad_() for t in (zx, h, c, w))
    b64 = None if b is None else b.double()
    states = _recur(_CELLS["lstm"], zx64, (h64, c64), w64, b64, None)[0]
    for got, wanted in zip(found, zip(*states, strict=True), strict=False):
        assert_close(got, torch.stack(wanted))

    grad = torch.randn(steps, rows, width, device="cuda")
    last = [torch.randn(rows, width, device="cuda") for _ in range(2)]
    dz, _, _, dh, dc = _all_steps_backward("lstm", grad, last, found[:2], found[2:], w, None, None)
    value = sum((s[0] * g).sum() for s, g in zip(states[1:], grad.double(), strict=True))
    value = value + sum((s * g).sum() for s, g in zip(states[-1], last, strict=True))
    wanted = torch.autograd.grad(value, (zx64, h64, c64))
    for got, exact in zip((dz, dh, dc), wanted, strict=True):
        assert_close(got, exact)


def test_a_row_that_is_not_finite_leaves_the_others_alone():
    zx = torch.randn(6, 40, 64, device="cuda")
    h = torch.zeros(40, 16, device="cuda")
    w = torch.randn(64, 16, device="cuda")
    clean = _all_steps("lstm", zx, [h, h], w, None, None, None)
    zx[2, 7] = float("nan")
    spoilt = _all_steps("lstm", zx, [h, h], w, None, None, None)
    others = [row for row in range(40) if row != 7]
    for one, other in zip(clean, spoilt, strict=True):
        assert torch.equal(one[:, others], other[:, others])


def assert_close(found, wanted):
    error = (found.double() - wanted.detach()).norm() / wanted.detach().norm()
    assert float(error) < 4e-3  # TF32 has 11 bits, and a step's error enters the next ones
