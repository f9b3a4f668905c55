"""Adam with its second moment corrected for noise."""

import pytest
import torch

from tacit.training import AdamBC


def test_without_noise_it_is_adam():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    a = AdamBC([ours], lr=0.1, floor=1e-30)
    b = torch.optim.Adam([theirs], lr=0.1, eps=0.0)
    for _ in range(5):
        ours.grad = theirs.grad = torch.randn(5)
        a.step()
        b.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_the_variance_of_the_noise_leaves_the_second_moment():
    torch.manual_seed(0)
    signal, std, steps = 0.01, 1.0, 3000
    weight = torch.nn.Parameter(torch.zeros(400))
    optimizer = AdamBC([weight], lr=1e-3, floor=1e-12)
    for _ in range(steps):
        weight.grad = signal + std * torch.randn(400)
        optimizer.state_noise([(weight, std)])
        optimizer.step()
    state = optimizer.state[weight]
    corrected = (state["square"] - state["variance"]) / (1 - 0.999**steps)
    assert state["square"].mean() > 0.9  # the noise fills what Adam would divide by
    assert abs(float(corrected.mean())) < 0.02


def test_private_runs_state_their_noise(problem):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = AdamBC(model.parameters(), lr=0.01)
    run = problem(model=model, optimizer=optimizer, noise_multiplier=2.0, clip_norm=0.5).private
    for lot in run:
        run.step(lot)
    assert optimizer._noise_std[id(model.weight)] == pytest.approx(2.0 * 0.5 / 16)


def test_a_closure_is_called_before_the_gradient_is_read():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = AdamBC([weight], lr=0.1)

    def closure():
        assert torch.is_grad_enabled()
        weight.grad = torch.ones(1)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert weight.item() == pytest.approx(-0.1)
