"""Which optimizers may be recorded, and what a recorded step depends on."""

import functools
from contextlib import contextmanager
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tacit.training.gpu import recorded_update


class OnGpu(nn.Parameter):
    """A parameter that claims to be on a GPU."""

    is_cuda = True


@pytest.fixture
def parameters():
    return [OnGpu(torch.zeros(3))]


def test_sgd_may_be_recorded_and_an_unknown_optimizer_may_not(parameters):
    class Own(torch.optim.SGD):
        pass

    assert recorded_update.can_be_recorded(torch.optim.SGD(parameters, lr=0.1), parameters)
    assert not recorded_update.can_be_recorded(Own(parameters, lr=0.1), parameters)
    assert not recorded_update.can_be_recorded(torch.optim.Adam(parameters, lr=0.1), parameters)
    on_cpu = [nn.Parameter(torch.zeros(3))]
    assert not recorded_update.can_be_recorded(torch.optim.SGD(on_cpu, lr=0.1), on_cpu)


def test_adam_may_be_recorded_if_it_counts_steps_on_the_device(parameters):
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    optimizer.param_groups[0]["capturable"] = True
    assert recorded_update.can_be_recorded(optimizer, parameters)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)  # on the host: a replay would not see it
    assert not recorded_update.can_be_recorded(optimizer, parameters)


def test_an_optimizer_with_hooks_is_not_recorded(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    hook = optimizer.register_step_post_hook(lambda *_: None)
    assert not recorded_update.can_be_recorded(optimizer, parameters)
    hook.remove()
    assert recorded_update.can_be_recorded(optimizer, parameters)
    everyone = register_optimizer_step_pre_hook(lambda *_: None)
    assert not recorded_update.can_be_recorded(optimizer, parameters)
    everyone.remove()
    optimizer.step = lambda: None
    assert not recorded_update.can_be_recorded(optimizer, parameters)


def test_a_scheduler_does_not_keep_an_optimizer_from_being_recorded(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert recorded_update.can_be_recorded(optimizer, parameters)


def test_a_wrapper_around_the_step_of_a_scheduled_optimizer_is_called(parameters):
    def wrapped(step):
        @functools.wraps(step)
        def wrapper(*args):
            return step(*args)

        return wrapper

    after = torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.StepLR(after, 3)
    after.step = wrapped(after.step)
    assert not recorded_update.can_be_recorded(after, parameters)
    before = torch.optim.SGD(parameters, lr=0.1)
    before.step = MethodType(wrapped(type(before).step), before)
    torch.optim.lr_scheduler.StepLR(before, 3)
    assert not recorded_update.can_be_recorded(before, parameters)


def test_a_recorded_step_depends_on_settings_places_and_state():
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    seen = [recorded_update.launched_with(optimizer)]
    parameter.grad = torch.ones(3)
    optimizer.step()  # makes the momentum
    seen.append(recorded_update.launched_with(optimizer))
    optimizer.step()
    assert recorded_update.launched_with(optimizer) == seen[-1]
    optimizer.param_groups[0]["lr"] = 0.2  # rates are compared separately
    assert recorded_update.launched_with(optimizer) == seen[-1]
    optimizer.param_groups[0]["weight_decay"] = 0.2
    seen.append(recorded_update.launched_with(optimizer))
    kept = parameter.data
    parameter.data = torch.zeros(3)
    seen.append(recorded_update.launched_with(optimizer))
    momentum = optimizer.state[parameter]["momentum_buffer"]
    optimizer.state[parameter]["momentum_buffer"] = torch.zeros(3)
    seen.append(recorded_update.launched_with(optimizer))
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])
    assert kept is not momentum


def test_a_recorded_step_depends_on_the_group_of_each_parameter():
    a, b, c = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b, c]}], lr=0.1)
    before = recorded_update.launched_with(optimizer)
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(0))
    assert recorded_update.launched_with(optimizer) != before


class Noise:
    """Adds 1000 when launched, and nothing while it is recorded."""

    def __init__(self, sums):
        self.sums, self.is_recording = sums, False

    def launch(self):
        for total in self.sums:
            total.add_(0.0 if self.is_recording else 1000.0)


class Graph:
    """Replays one launch and one step of plain SGD."""

    def __init__(self, noise, parameter, rate):
        self.noise, self.parameter, self.rate = noise, parameter, rate

    def replay(self):
        self.noise.launch()
        with torch.no_grad():
            self.parameter.sub_(self.rate * self.noise.sums[0])


@pytest.fixture
def recorded(monkeypatch):
    """Launches of one parameter on a device that is made up, and what they work on."""
    parameter, total = nn.Parameter(torch.zeros(3)), torch.zeros(3)
    noise = Noise([total])

    @contextmanager
    def graph(_, **__):
        noise.is_recording = True
        moved = parameter.detach().clone()
        try:
            yield
        finally:
            noise.is_recording = False
            parameter.data.copy_(moved)  # recorded, not run

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(noise, parameter, 0.1))
    monkeypatch.setattr(recorded_update, "fused_update", lambda *_: None)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    launches = recorded_update._Launches([parameter], optimizer)

    def step():
        total.fill_(1.0)  # without noise yet
        parameter.grad = None
        launches.run(noise, [total], may_fuse=True)

    return SimpleNamespace(**locals())


def test_noise_is_added_once_whether_launched_or_replayed(recorded):
    for step in range(1, 15):
        recorded.step()
        assert recorded.parameter.grad is recorded.total
        assert recorded.total.tolist() == [1001.0] * 3
        assert recorded.parameter.tolist() == pytest.approx([-100.1 * step] * 3)
    assert recorded.launches.graph is not None


@pytest.mark.parametrize("failing", ["recording", "replay"])
def test_a_recording_that_fails_shows_no_sum_without_noise(recorded, monkeypatch, failing):
    def fail(*_):
        raise RuntimeError("capture")

    while recorded.launches._repeated < recorded_update._SETTLED - 1:
        recorded.step()
    with monkeypatch.context() as patch:
        if failing == "recording":
            patch.setattr(recorded.optimizer, "step", fail)
        else:
            patch.setattr(Graph, "replay", fail)
        with pytest.raises(RuntimeError, match="capture"):
            recorded.step()
    assert recorded.parameter.grad is None
    assert recorded.launches.graph is None
    for _ in range(2 * recorded_update._SETTLED):
        recorded.step()
        assert recorded.total.tolist() == [1001.0] * 3
    assert recorded.launches.graph is not None


class Deferred:
    """A sum that is computed with what follows it; a new graph for each size of a lot."""

    def __init__(self, total):
        self.total, self.seen, self.replays = total, [], 0

    def replay(self):
        self.replays += 1
        self.total.fill_(1.0)

    def replay_with(self, launches, launch):
        self.seen.append(launches)
        self.replay()
        launches.replay()


def test_a_deferred_sum_is_computed_before_its_noise_is_added(recorded):
    sizes = [Deferred(recorded.total) for _ in range(2)]
    for step in range(1, 30):
        recorded.total.fill_(-7.0)  # what the last step has left
        recorded.parameter.grad = None
        deferred = sizes[step % 2]
        recorded.launches.run(recorded.noise, [recorded.total], may_fuse=True, deferred=deferred)
        assert recorded.parameter.grad is recorded.total
        assert recorded.total.tolist() == [1001.0] * 3
        assert recorded.parameter.tolist() == pytest.approx([-100.1 * step] * 3)
    assert sum(size.replays for size in sizes) == 29  # once for each step
    assert {id(graph) for size in sizes for graph in size.seen} == {id(recorded.launches.graph)}
    before = recorded.launches.graph
    recorded.optimizer.param_groups[0]["weight_decay"] = 0.1
    for _ in range(70):
        recorded.launches.run(recorded.noise, [recorded.total], may_fuse=True, deferred=sizes[0])
    assert sizes[0].seen[-1] is recorded.launches.graph is not before


def test_a_deferred_sum_is_computed_for_an_optimizer_that_is_not_recorded(monkeypatch):
    parameter, total, released = nn.Parameter(torch.zeros(3)), torch.zeros(3), []
    noise = SimpleNamespace(release_into=lambda _, sums, *__, **___: released.append(sums[0][0]))
    update = recorded_update.RecordedUpdate(noise, [parameter], torch.optim.SGD([parameter]))
    update.release_and_move([total], [1.0], step=0, noise_multiplier=1.0, deferred=Deferred(total))
    assert released == [1.0]


def test_only_a_run_alone_that_need_not_be_repeated_has_our_own_update(recorded, monkeypatch):
    made = []
    monkeypatch.setattr(recorded_update, "can_be_recorded", lambda *_: True)
    monkeypatch.setattr(recorded_update, "fused_update", lambda *_: made.append(1))
    source = SimpleNamespace(in_place=lambda *_, **__: recorded.noise, launched=lambda _: None)
    parameters = [recorded.parameter]
    for is_alone, is_deterministic in ((True, False), (False, False), (True, True)):
        made.clear()
        ends = recorded_update.RecordedUpdate(
            source, parameters, recorded.optimizer, is_alone=is_alone
        )
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            for step in range(3):
                ends.release_and_move([recorded.total], [1.0], step=step, noise_multiplier=1.0)
        finally:
            torch.use_deterministic_algorithms(False)
        assert bool(made) == (is_alone and not is_deterministic)


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
