"""Which optimizers may be recorded, and what a recorded step depends on."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tacit.training import tail


class OnGpu(nn.Parameter):
    """Says that it lies on a GPU."""

    is_cuda = True


@pytest.fixture
def parameters():
    return [OnGpu(torch.zeros(3))]


def test_sgd_may_be_recorded_and_an_unknown_optimizer_may_not(parameters):
    class Own(torch.optim.SGD):
        pass

    assert tail.can_be_recorded(torch.optim.SGD(parameters, lr=0.1), parameters)
    assert not tail.can_be_recorded(Own(parameters, lr=0.1), parameters)
    assert not tail.can_be_recorded(torch.optim.Adam(parameters, lr=0.1), parameters)
    on_cpu = [nn.Parameter(torch.zeros(3))]
    assert not tail.can_be_recorded(torch.optim.SGD(on_cpu, lr=0.1), on_cpu)


def test_adam_may_be_recorded_if_it_counts_steps_on_the_device(parameters):
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    optimizer.param_groups[0]["capturable"] = True
    assert tail.can_be_recorded(optimizer, parameters)


def test_an_optimizer_that_somebody_watches_is_not_recorded(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    hook = optimizer.register_step_post_hook(lambda *_: None)
    assert not tail.can_be_recorded(optimizer, parameters)
    hook.remove()
    assert tail.can_be_recorded(optimizer, parameters)
    everyone = register_optimizer_step_pre_hook(lambda *_: None)
    assert not tail.can_be_recorded(optimizer, parameters)
    everyone.remove()
    optimizer.step = lambda: None
    assert not tail.can_be_recorded(optimizer, parameters)


def test_a_scheduler_does_not_keep_an_optimizer_from_being_recorded(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert tail.can_be_recorded(optimizer, parameters)


def test_a_recorded_step_depends_on_settings_places_and_state():
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    seen = [tail.launched_with(optimizer)]
    parameter.grad = torch.ones(3)
    optimizer.step()  # makes the momentum
    seen.append(tail.launched_with(optimizer))
    optimizer.step()
    assert tail.launched_with(optimizer) == seen[-1]
    optimizer.param_groups[0]["lr"] = 0.2  # followed apart from the rest
    assert tail.launched_with(optimizer) == seen[-1]
    optimizer.param_groups[0]["weight_decay"] = 0.2
    seen.append(tail.launched_with(optimizer))
    kept = parameter.data
    parameter.data = torch.zeros(3)
    seen.append(tail.launched_with(optimizer))
    momentum = optimizer.state[parameter]["momentum_buffer"]
    optimizer.state[parameter]["momentum_buffer"] = torch.zeros(3)
    seen.append(tail.launched_with(optimizer))
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])
    assert kept is not momentum


def test_a_step_whose_optimizer_fails_is_not_drawn_again(problem):
    case = problem(steps=3)
    case.optimizer.step = lambda: 1 / 0
    lots = iter(case.private)
    lot = next(lots)
    with pytest.raises(ZeroDivisionError):
        case.private.step(lot)
    assert case.private.steps_taken == 1
    with pytest.raises(ValueError, match="another step"):
        case.private.step(lot)
