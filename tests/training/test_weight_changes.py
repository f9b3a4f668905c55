"""Weights move by released gradients only: old lines left in a loop stop the run, honest ones pass.

Each mistake below moves weights or buffers by private records, unpaid; none may be certified. Each
honest loop changes weights, buffers or gradients without records, and may not be refused.
"""

import copy
import pickle
import warnings

import pytest
import torch
from speed_options import with_speed
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import tacit
from tacit.errors import LearningStep
from tacit.experiments import step_touches
from tacit.report import certify
from tacit.training import EMA, Speed

STEPS, DELTA = 6, 1e-5
torch.manual_seed(0)
X, Y = torch.randn(200, 8), torch.randint(0, 3, (200,))


class Net(nn.Module):
    """A trained embedding of the input, a frozen layer, and buffers of three kinds."""

    def __init__(self, *, width=16):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.last = nn.Linear(width, 3)
        self.register_buffer("center", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.zeros(8), persistent=False)

    def forward(self, x):
        hidden = self.first(x.to(self.center.dtype) - self.center)
        return self.last(torch.relu(self.frozen(torch.relu(hidden))))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Loop:
    """What the loops below need: a model, its optimizer, a run, and the old program's loss."""

    def __init__(self, *, optimizer=None, steps=STEPS, model=None, **options):
        torch.manual_seed(1)
        self.model = Net() if model is None else model
        make = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1))
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        settings = {"batch_size": 20, "steps": steps, "clip_norm": 1.0, "noise_multiplier": 1.0}
        settings |= {"check": False, "n_records": 200, "users": range(200)} | options
        self.private = tacit.make_private(
            self.model, self.optimizer, (X, Y), loss_fn, **with_speed(settings)
        )

    def loss(self, model=None):
        rows = torch.randperm(200)[:20]
        return F.cross_entropy((model or self.model)(X[rows]), Y[rows])

    def old_step(self, optimizer=None):
        optimizer = optimizer or self.optimizer
        optimizer.zero_grad()
        self.loss().backward()
        optimizer.step()

    def run(self, *, after=None, before=None):
        for number, batch in enumerate(self.private):
            if before is not None:
                before(number)
            self.private.step(batch)
            if after is not None:
                after(number)

    def backward(self, *, between=None, after=None):
        for number, _ in enumerate(self.private):
            self.private.backward()
            if between is not None:
                between(number)
            self.optimizer.step()
            if after is not None:
                after(number)


def certified(loop, tmp_path):
    return certify(loop.private, tmp_path / "a.json", title="x", delta=DELTA)


# Mistakes -----------------------------------------------------------------------------------------


def old_lines_after_the_private_step():
    loop = Loop()
    return loop, lambda: loop.run(after=lambda _: loop.old_step())


def old_lines_before_the_private_step():
    loop = Loop()
    return loop, lambda: loop.run(before=lambda _: loop.old_step())


def old_lines_on_alternate_lots():
    loop = Loop()
    return loop, lambda: loop.run(after=lambda i: loop.old_step() if i % 2 else None)


def a_second_optimizer():
    loop = Loop()
    second = torch.optim.Adam(loop.model.parameters(), lr=1e-3)
    return loop, lambda: loop.run(after=lambda _: loop.old_step(second))


def a_second_optimizer_for_a_part_of_the_model():
    loop = Loop()
    second = torch.optim.SGD([loop.model.last.bias], lr=1e-3)
    return loop, lambda: loop.run(before=lambda _: loop.old_step(second))


def an_update_by_hand_through_data():
    loop = Loop()

    def update(_):
        for p in loop.private._parameters.values():
            p.data -= 0.01 * torch.autograd.grad(loop.loss(), p)[0]

    return loop, lambda: loop.run(after=update)


def an_update_that_replaces_data():
    loop = Loop()

    def update(_):
        p = loop.model.last.weight
        p.data = p.data - 0.01 * torch.autograd.grad(loop.loss(), p)[0]

    return loop, lambda: loop.run(after=update)


def one_row_of_a_large_matrix():
    loop = Loop(model=Net(width=300))

    def update(number):
        if number == 2:
            loop.model.first.weight.data[117].copy_(X[0])

    return loop, lambda: loop.run(after=update)


def weights_initialized_again_from_the_data():
    loop = Loop()

    def initialize(number):
        if number == 1:
            with torch.no_grad():
                loop.model.first.bias.copy_(X.std(0).repeat(2))

    return loop, lambda: loop.run(after=initialize)


def a_frozen_layer_fitted_on_the_side():
    loop = Loop()
    layer = loop.model.frozen

    def fit(_):
        hidden = torch.relu(loop.model.first(X)).detach()
        layer.weight.data.copy_(torch.linalg.lstsq(hidden, hidden).solution)

    return loop, lambda: loop.run(after=fit)


def a_mean_of_the_records_in_a_buffer():
    loop = Loop()

    def center(number):
        if number == 0:
            loop.model.center = X.mean(0)

    return loop, lambda: loop.run(after=center)


def another_loss_added_to_the_released_gradient():
    loop = Loop()
    return loop, lambda: loop.backward(between=lambda _: (0.01 * loop.loss()).backward())


def the_old_backward_in_place_of_the_released_gradient():
    loop = Loop()

    def again(_):
        loop.optimizer.zero_grad()
        loop.loss().backward()

    return loop, lambda: loop.backward(between=again)


def weights_of_an_ordinary_model():
    loop, other = Loop(), Net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    loop.loss(other).backward()
    optimizer.step()

    def load(number):
        if number == 3:
            loop.model.load_state_dict(other.state_dict())

    return loop, lambda: loop.run(after=load)


def automatic_optimization_beside_the_private_step():
    loop = Loop()

    def closure():
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        return loss

    return loop, lambda: loop.run(after=lambda _: loop.optimizer.step(closure))


def a_closure_that_adds_to_the_release():
    loop = Loop()

    def closure():
        loop.private.backward()
        loop.loss().backward()
        return 0.0

    def run():
        for _ in loop.private:
            loop.optimizer.step(closure)

    return loop, run


class Fused(torch.optim.Optimizer):
    """Writes into `.data`, as fused steps of other libraries do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad.data, alpha=-group["lr"])


def a_fused_step_of_another_library():
    loop = Loop()
    second = Fused(loop.model.parameters())
    return loop, lambda: loop.run(after=lambda _: loop.old_step(second))


def one_old_step_after_the_last_private_one():
    loop = Loop()

    def run():
        loop.run()
        loop.old_step()

    return loop, run


def one_old_step_after_a_loop_that_was_left():
    loop = Loop()

    def run():
        for number, batch in enumerate(loop.private):
            loop.private.step(batch)
            if number == 2:
                break
        loop.old_step()

    return loop, run


def the_old_loop_before_the_private_one():
    loop = Loop()

    def run():
        for _ in range(5):
            loop.old_step()
        loop.run()

    return loop, run


def a_scheduler_line_that_steps_the_optimizer():
    loop = Loop()

    def step(_):
        loop.loss().backward()  # for a curve of losses
        loop.optimizer.step()  # instead of scheduler.step()

    return loop, lambda: loop.run(after=step)


def a_layer_replaced_by_one_that_was_trained():
    loop = Loop()

    def replace(number):
        if number == STEPS - 1:
            loop.model.last = nn.Linear(16, 3)

    return loop, lambda: loop.run(after=replace)


MISTAKES = [
    old_lines_after_the_private_step,
    old_lines_before_the_private_step,
    old_lines_on_alternate_lots,
    a_second_optimizer,
    a_second_optimizer_for_a_part_of_the_model,
    an_update_by_hand_through_data,
    an_update_that_replaces_data,
    one_row_of_a_large_matrix,
    weights_initialized_again_from_the_data,
    a_frozen_layer_fitted_on_the_side,
    a_mean_of_the_records_in_a_buffer,
    another_loss_added_to_the_released_gradient,
    the_old_backward_in_place_of_the_released_gradient,
    weights_of_an_ordinary_model,
    automatic_optimization_beside_the_private_step,
    a_closure_that_adds_to_the_release,
    a_fused_step_of_another_library,
    one_old_step_after_the_last_private_one,
    one_old_step_after_a_loop_that_was_left,
    the_old_loop_before_the_private_one,
    a_scheduler_line_that_steps_the_optimizer,
    a_layer_replaced_by_one_that_was_trained,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda case: case.__name__)
def test_a_run_beside_which_something_trains_is_not_certified(mistake, tmp_path):
    loop, run = mistake()
    stopped = stop_of(run)
    if stopped is not None:
        assert "declare_public_change" in stopped
    with pytest.raises(ValueError, match=r"was changed by|has added to|has stepped|taken no step"):
        certified(loop, tmp_path)
    assert not (tmp_path / "a.json").exists()


def stop_of(run):
    """Return the words with which a loop was stopped; None if its end was reached."""
    try:
        run()
    except LearningStep as stopped:
        return str(stopped)
    return None


# Honest loops -------------------------------------------------------------------------------------


def schedulers():
    loop = Loop()
    slower = torch.optim.lr_scheduler.LinearLR(loop.optimizer, total_iters=2)
    stairs = torch.optim.lr_scheduler.StepLR(loop.optimizer, 2)
    loop.run(after=lambda _: (slower.step(), stairs.step()))
    return loop


def schedulers_of_a_loop_of_its_own():
    loop = Loop()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, STEPS)
    loop.backward(after=lambda _: cosine.step())
    return loop


def clipping_by_norm_after_the_release():
    loop = Loop()
    loop.backward(between=lambda _: nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1))
    return loop


def clipping_by_value_after_a_step_without_update():
    loop = Loop()
    for batch in loop.private:
        loop.private.step(batch, update=False)
        nn.utils.clip_grad_value_(loop.model.parameters(), 0.01)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return loop


def signs_of_the_release():
    loop = Loop()

    def sign(_):
        for p in loop.private._parameters.values():
            p.grad = p.grad.sign() + 1e-3 * p.detach()

    loop.backward(between=sign)
    return loop


def momentum():
    loop = Loop(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True))
    loop.run()
    return loop


def adam_with_weight_decay():
    loop = Loop(optimizer=lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=True))
    loop.backward()
    return loop


def a_fused_optimizer():
    loop = Loop(optimizer=lambda p: torch.optim.Adam(p, lr=0.1, fused=True))
    loop.run()
    return loop


def an_optimizer_that_writes_into_data():
    loop = Loop(optimizer=Fused)
    loop.run()
    return loop


def an_optimizer_that_writes_into_data_in_a_loop_of_its_own():
    loop = Loop(optimizer=Fused)
    loop.backward()
    return loop


def an_average_by_tacit():
    loop = Loop()
    mean = EMA(loop.model)

    def evaluate(_):
        mean.update()
        with mean.applied() as model, torch.no_grad():
            model(X)

    loop.run(after=evaluate)
    return loop


def an_average_by_torch():
    loop = Loop()
    mean = AveragedModel(loop.model)
    loop.run(after=lambda _: mean.update_parameters(loop.model))
    return loop


def an_average_that_is_swapped_in_by_hand():
    loop = Loop()
    mean = AveragedModel(loop.model)

    def evaluate(_):
        mean.update_parameters(loop.model)
        kept = copy.deepcopy(loop.model.state_dict())
        loop.model.load_state_dict(mean.module.state_dict())
        loop.model(X)
        loop.model.load_state_dict(kept)

    loop.run(after=evaluate)
    return loop


def data_swapped_by_hand():
    loop = Loop()

    def evaluate(_):
        kept = [p.data for p in loop.model.parameters()]
        for p in loop.model.parameters():
            p.data = p.data.half().float()
        loop.model(X)
        for p, data in zip(loop.model.parameters(), kept, strict=True):
            p.data = data.clone()

    loop.run(after=evaluate)
    return loop


def releases_added_up_by_the_loop():
    loop = Loop()
    sums = {}
    for number, lot in enumerate(loop.private):
        loop.private.step(lot, update=False)
        for name, p in loop.private._parameters.items():
            sums[name] = sums.get(name, 0) + p.grad / 3
        if number % 3 == 2:
            for name, p in loop.private._parameters.items():
                p.grad = sums.pop(name)
            loop.optimizer.step()
    return loop


def weights_loaded_before_the_first_step():
    other = Net()
    model = Net()
    model.load_state_dict(other.state_dict())
    loop = Loop(model=model)
    loop.model.load_state_dict(Net().state_dict())
    loop.run()
    return loop


def weights_initialized_before_the_first_step():
    loop = Loop()
    for p in loop.model.parameters():
        nn.init.normal_(p, std=0.1)
    loop.run()
    return loop


def layers_frozen_between_two_runs(tmp_path):
    first = Loop()
    first.run()
    first.model.first.requires_grad_(False)
    second = Loop(model=first.model)
    second.run()
    assert certified(first, tmp_path)
    return second


def two_runs_in_turns_with_one_optimizer(tmp_path):
    first = Loop()
    second = copy.copy(first)
    settings = {"batch_size": 20, "steps": STEPS, "clip_norm": 1.0, "noise_multiplier": 1.0}
    settings |= {"users": range(200), "speed": Speed(check=False)}
    second.private = tacit.make_private(first.model, first.optimizer, (X, Y), loss_fn, **settings)
    for one, two in zip(first.private, second.private, strict=True):
        first.private.step(one)
        second.private.step(two)
    assert certified(first, tmp_path)
    return second


def evaluation_passes():
    loop = Loop()

    def evaluate(_):
        loop.model.eval()
        with torch.no_grad():
            loop.model(X)
        loop.model.train()
        loop.model.zero_grad()
        loop.model(X).sum().backward()  # a saliency map; its gradients move nothing
        torch.save(loop.model.state_dict(), "/dev/null")

    loop.run(after=evaluate)
    return loop


def a_counter_and_a_cache_among_the_buffers():
    loop = Loop()

    def count(number):
        loop.model.calls += 1
        loop.model.cache[number] = 1.0
        loop.model.cache = torch.ones(9)

    loop.run(after=count)
    return loop


def a_counter_that_is_replaced():
    loop = Loop()

    def count(_):
        loop.model.calls = loop.model.calls + 1

    loop.run(before=count)
    return loop


def moves_to_the_same_device_and_copies():
    loop = Loop()

    def move(_):
        loop.model.to("cpu").train()
        loop.model.to(memory_format=torch.contiguous_format)
        copy.deepcopy(loop.model)
        pickle.dumps(loop.model)
        copy.deepcopy(loop.optimizer)

    loop.run(after=move)
    return loop


def bf16():
    loop = Loop(model=Net().to(torch.bfloat16))
    loop.run()
    return loop


def several_steps_on_one_release():
    loop = Loop()
    loop.backward(after=lambda _: loop.optimizer.step())
    return loop


def an_old_backward_whose_gradients_are_dropped():
    loop = Loop()
    loop.run(before=lambda _: loop.loss().backward())
    return loop


def a_closure_with_the_private_backward():
    loop = Loop()
    for _ in loop.private:
        loop.optimizer.step(lambda: loop.private.backward() or 0.0)
    return loop


def a_loop_that_was_left():
    loop = Loop()
    for batch in loop.private:
        loop.private.step(batch)
        break
    return loop


def epochs():
    loop = Loop(steps=20)
    for epoch in loop.private.epochs():
        for batch in epoch:
            loop.private.step(batch)
    return loop


def correlated_noise_and_the_mean_of_its_weights():
    banded = tacit.training.Banded(bands=4)
    loop = Loop(noise=banded, steps=40, users=None)
    for batch in loop.private:
        loop.private.step(batch)
        with loop.private.averaged() as model:
            model(X)
    return loop


def a_restart():
    first = Loop()
    for number, batch in enumerate(first.private):
        first.private.step(batch)
        if number == 2:
            parts = first.private, first.model, first.optimizer
            states = [copy.deepcopy(part.state_dict()) for part in parts]
            break
    second = Loop(ledger=first.private.ledger)
    parts = second.private, second.model, second.optimizer
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    second.run()
    return second


def a_refused_step_that_is_taken_again():
    loop = Loop()
    for batch in loop.private:
        with pytest.raises(TypeError):
            loop.private.step(X)
        loop.private.step(batch)
    return loop


HONEST = [
    schedulers,
    schedulers_of_a_loop_of_its_own,
    clipping_by_norm_after_the_release,
    clipping_by_value_after_a_step_without_update,
    signs_of_the_release,
    momentum,
    adam_with_weight_decay,
    a_fused_optimizer,
    an_optimizer_that_writes_into_data,
    an_optimizer_that_writes_into_data_in_a_loop_of_its_own,
    an_average_by_tacit,
    an_average_by_torch,
    an_average_that_is_swapped_in_by_hand,
    data_swapped_by_hand,
    releases_added_up_by_the_loop,
    weights_loaded_before_the_first_step,
    weights_initialized_before_the_first_step,
    layers_frozen_between_two_runs,
    two_runs_in_turns_with_one_optimizer,
    evaluation_passes,
    a_counter_and_a_cache_among_the_buffers,
    a_counter_that_is_replaced,
    moves_to_the_same_device_and_copies,
    bf16,
    several_steps_on_one_release,
    an_old_backward_whose_gradients_are_dropped,
    a_closure_with_the_private_backward,
    a_loop_that_was_left,
    epochs,
    correlated_noise_and_the_mean_of_its_weights,
    a_restart,
    a_refused_step_that_is_taken_again,
]


def _passes(case, tmp_path):
    takes_path = "tmp_path" in case.__code__.co_varnames[: case.__code__.co_argcount]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedulers, and of steps taken again
        loop = case(tmp_path) if takes_path else case()
    return certified(loop, tmp_path)


@pytest.mark.parametrize("case", HONEST, ids=lambda case: case.__name__)
def test_an_honest_loop_is_certified(case, tmp_path):
    assert _passes(case, tmp_path)["claim"]["epsilon"] > 0


# Declared changes, and what a run keeps -----------------------------------------------------------


def test_a_declared_change_is_stated_with_its_reason(tmp_path):
    loop = Loop()

    def prune(number):
        if number == 2:
            with torch.no_grad():
                loop.model.first.weight.mul_(loop.model.first.weight.abs() > 0.1)
            loop.private.declare_public_change("small weights are set to zero")

    loop.run(after=prune)
    touches = certified(loop, tmp_path)["claim"]["data_touches"]
    assert {
        "what": "training: weights changed beside the run, declared public: "
        "small weights are set to zero",
        "paid": "public",
    } in touches
    assert loop.private.info["public_changes"] == ["small weights are set to zero"]
    touches = step_touches("a recipe", loop.private.info)  # of the facts, and so of the page
    assert [
        touch.how for touch in touches if touch.what == "training" and touch.cost == "public"
    ] == ["weights changed beside the run, declared public: small weights are set to zero"]


def test_a_stopped_run_goes_on_after_a_declaration(tmp_path):
    loop = Loop()
    with pytest.raises(LearningStep):
        loop.run(after=lambda _: loop.model.center.add_(1.0))
    taken, spent = loop.private.steps_taken, loop.private.payments
    with pytest.raises(LearningStep):
        loop.run()
    assert (loop.private.steps_taken, loop.private.payments) == (taken, spent)
    loop.private.declare_public_change("the center is a published mean")
    loop.run()
    assert certified(loop, tmp_path)


@pytest.mark.parametrize("reason", ["", "  ", None])
def test_a_declaration_needs_a_reason(reason):
    with pytest.raises(ValueError, match="reason must say"):
        Loop().private.declare_public_change(reason)


def test_a_declared_penalty_may_be_added_to_the_release(tmp_path):
    loop = Loop()

    def penalty(_):
        sum(p.abs().sum() for p in loop.model.parameters() if p.requires_grad).backward()
        loop.private.declare_public_change("an L1 penalty, computed from the weights alone")

    loop.backward(between=penalty)
    assert loop.private.info["public_changes"] == ["an L1 penalty, computed from the weights alone"]
    assert certified(loop, tmp_path)


def test_a_gradient_that_was_added_is_named():
    loop, run = another_loss_added_to_the_released_gradient()
    with pytest.raises(LearningStep, match="an ordinary backward has added to the gradient of"):
        run()
    assert loop.private.steps_taken == 1


def test_nothing_is_computed_or_paid_once_a_change_is_noticed(monkeypatch):
    loop = Loop()
    lots = iter(loop.private)
    loop.private.step(next(lots))
    loop.old_step()
    monkeypatch.setattr(loop.private, "_lot_sum", None)
    with pytest.raises(LearningStep):
        loop.private.step(next(lots))
    assert loop.private.steps_taken == 1


def test_a_second_run_may_begin_with_other_weights_and_another_head(tmp_path):
    loop = Loop()
    loop.run()
    torch.nn.init.normal_(loop.model.first.weight)
    loop.model.last = nn.Linear(16, 3, bias=False)
    again = Loop(model=loop.model)
    again.run()
    certified(again, tmp_path)
