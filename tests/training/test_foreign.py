"""Loops that somebody else owns: losses in, `p.grad` out."""

import contextlib

import pytest
import torch
from slow_cases import one_fast
from torch import nn
from torch.nn import functional as F

from tacit.training import AdamBC, AdaptiveClip
from tacit.training.foreign import own_optimizer


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def stepped(case):
    for lot in case.private:
        case.private.step(lot)
    return weights(case.model)


def foreign(case, lots=None):
    for _ in case.private if lots is None else lots:
        case.private.backward()
        case.optimizer.step()
        case.optimizer.zero_grad()
    return weights(case.model)


def hooks(case):
    return len(case.optimizer._optimizer_step_post_hooks)


OPTIONS = {"seed": 3, "momentum": 0.9, "steps": 5, "batch_size": 8, "clip_norm": 0.2}


@pytest.mark.parametrize("rows", [64, 3])
def test_a_foreign_loop_takes_the_same_steps(problem, rows):
    expected = stepped(problem(**OPTIONS))
    case = problem(**OPTIONS, max_microbatch=rows)
    assert torch.allclose(foreign(case), expected, atol=1e-5)
    assert case.private.steps_taken == 5
    assert hooks(case) == 0


def test_lots_unpack_and_that_changes_nothing(problem):
    expected = stepped(problem(**OPTIONS))
    case, sizes = problem(**OPTIONS), []
    for lot in case.private:
        x, y = lot
        assert len(x) == len(y)
        assert x.shape[1:] == (4,)
        sizes.append(len(x))
        with torch.no_grad():
            case.model(x)
        case.private.backward()
        case.optimizer.step()
    assert len(set(sizes)) > 1
    assert torch.equal(weights(case.model), expected)


def test_an_empty_lot_unpacks_as_one_row_of_zeros(problem):
    case = problem(n=8, batch_size=1, n_records=10**8, noise_multiplier=0.0, steps=3)
    before = weights(case.model)
    for lot in case.private:
        x, y = lot
        assert x.tolist() == [[0.0] * 4]
        assert y.tolist() == [0]
        case.private.backward()
        case.optimizer.step()
    assert case.private.steps_taken == 3
    assert torch.equal(weights(case.model), before)


@pytest.mark.parametrize("by_name", [False, True])
def test_losses_that_are_passed_in_are_refused_with_the_replacement(problem, by_name):
    case = problem(**OPTIONS)
    for lot in case.private:
        losses = case.loss_fn(case.model, tuple(lot))
        given = ((), {"losses": losses}) if by_name else ((losses,), {})
        with pytest.raises(TypeError, match=r"takes no losses: let the loss_fn of make_private"):
            case.private.backward(*given[0], **given[1])
        break
    assert case.private.steps_taken == 0
    assert not case.private.ledger.history()


def test_loss_fn_is_required(problem):
    with pytest.raises(TypeError, match="loss_fn must be a function of"):
        problem(loss_fn=None)


# Each release belongs to one optimizer step -------------------------------------------------------


def paid(case):
    return [entry.event for entry in case.private.ledger.history()]


def accumulating(case):
    """Every second step of the optimizer left out, as by `accumulate_grad_batches=2`."""
    for number, _ in enumerate(case.private):
        case.private.backward()
        if number % 2:
            case.optimizer.step()
            case.optimizer.zero_grad()


@pytest.mark.parametrize("kind", one_fast([torch.optim.SGD, AdamBC], 2))
def test_accumulation_is_refused_before_the_next_release_is_paid(problem, kind):
    model = nn.Linear(4, 2)
    case = problem(model=model, optimizer=kind(model.parameters(), lr=0.1), steps=5)
    with pytest.raises(RuntimeError, match="no optimizer step has used the last release"):
        accumulating(case)
    assert case.private.steps_taken == 1
    assert all(bool(p.grad.any()) for p in model.parameters())  # the release is still there
    assert hooks(case) == 0


def test_a_refused_loop_goes_on_after_the_optimizer_step(problem):
    expected = stepped(problem(**OPTIONS))
    case, refused = problem(**OPTIONS), 0
    for number, _ in enumerate(case.private):
        if number % 2:
            with pytest.raises(RuntimeError, match="no optimizer step"):
                case.private.backward()
            refused += 1
            case.optimizer.step()  # that of the lot before
        case.private.backward()
        if not (number % 2 == 0 and number < 4):
            case.optimizer.step()
    assert refused == 2
    assert torch.equal(weights(case.model), expected)


def test_a_private_step_does_not_overwrite_a_release_either(problem):
    case = problem(**OPTIONS)
    lots = iter(case.private)
    next(lots)
    case.private.backward()
    lot = next(lots)
    with pytest.raises(RuntimeError, match="no optimizer step"):
        case.private.step(lot)
    assert case.private.steps_taken == 1
    case.optimizer.step()
    case.private.step(lot)
    assert case.private.steps_taken == 2


def test_a_step_without_an_update_may_be_taken_for_its_gradient_alone(problem):
    case, found = problem(**OPTIONS), []
    for lot in case.private:
        case.private.step(lot, update=False)
        found.append(case.model[0].weight.grad.clone())
    assert len(found) == 5


@pytest.mark.parametrize("to_none", [True, False])
def test_a_loop_may_discard_a_release_and_is_warned(problem, to_none):
    case = problem(**OPTIONS)
    for number, _ in enumerate(case.private):
        if number == 2:
            with pytest.warns(RuntimeWarning, match="release of step 2 was discarded by zero_grad"):
                case.private.backward()
        else:
            case.private.backward()
        if number != 1:  # where a gradient scaler skips a step
            case.optimizer.step()
        case.optimizer.zero_grad(set_to_none=to_none)
    assert case.private.steps_taken == 5


class ByData(torch.optim.Optimizer):
    """Writes past the version counters of parameters, as some optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.1)


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=0.0, fused=True)  # leaves version counters alone


@pytest.mark.parametrize("kind", [ByData, fused, AdamBC])
def test_every_kind_of_optimizer_step_is_noticed(problem, kind):
    model = nn.Linear(4, 2)
    case = problem(model=model, optimizer=kind(model.parameters()), steps=4)
    for _ in case.private:
        case.private.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        case.optimizer.step()  # and no zero_grad
    assert case.private.steps_taken == 4


def test_a_step_with_a_closure_and_one_at_the_start_of_the_next_turn_are_noticed(problem):
    case = problem(**OPTIONS)
    for _ in case.private:
        case.optimizer.step(lambda: case.private.backward())
    assert case.private.steps_taken == 5
    late = problem(**OPTIONS)
    for _ in late.private:
        late.optimizer.step()
        late.private.backward()
    late.optimizer.step()
    assert torch.equal(weights(late.model), weights(case.model))


def test_no_hook_stays_on_the_optimizer_when_the_loop_is_left(problem):
    case = problem(**OPTIONS)
    for _ in case.private:
        case.private.backward()
        assert hooks(case) == 1
        break
    assert hooks(case) == 0
    foreign(case)  # what followed the last lot of a loop is not watched
    assert hooks(case) == 0


class Loop:
    """What the libraries' loops do around one lot, in their order; none of them is imported."""

    def __init__(self, case):
        self.case, self.optimizer = case, case.optimizer
        self.schedule = torch.optim.lr_scheduler.StepLR(case.optimizer, 2, 0.5)

    def like_the_trainer(self, lot):
        assert "y" in lot  # it counts labels before the forward pass
        self.case.model.train()
        self.case.private.backward()
        nn.utils.clip_grad_norm_(self.case.model.parameters(), 100.0)
        self.optimizer.step()
        self.schedule.step()
        self.case.model.zero_grad()

    def like_lightning(self, _lot):
        def closure():
            self.optimizer.zero_grad()
            self.case.private.backward()
            return torch.zeros(())

        self.optimizer.step(closure)
        self.schedule.step()

    def like_lightning_by_hand(self, _lot):
        with torch.autocast("cpu", torch.bfloat16):  # around the whole step
            self.optimizer.zero_grad()
            self.case.private.backward()
            self.optimizer.step(lambda: None)
        self.schedule.step()

    def like_keras(self, _lot):
        self.case.model.zero_grad(set_to_none=False)
        self.case.private.backward()
        with torch.no_grad():
            self.optimizer.step()
        self.schedule.step()

    def its_own_in_autocast(self, lot):
        with torch.autocast("cpu", torch.bfloat16):
            self.its_own(lot)

    def its_own(self, lot):
        self.case.private.step(lot)
        self.schedule.step()


def plain_loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def autocast_loss(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


WAYS = ["like_the_trainer", "like_lightning", "like_lightning_by_hand", "like_keras"]
WAYS += ["its_own_in_autocast"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", one_fast([torch.optim.SGD, AdamBC], 2))
def test_the_loops_of_libraries_take_the_same_steps(problem, kind, way):
    found = []
    for name in ("its_own", way):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        generator = torch.Generator().manual_seed(1)
        records = [{"x": torch.randn(4, generator=generator), "y": i % 2} for i in range(64)]
        case = problem(
            model=model,
            optimizer=kind(model.parameters(), lr=0.1),
            data=records,
            loss_fn=autocast_loss,
            seed=3,
            clip_norm=0.2,
            max_microbatch=64,
        )
        loop = Loop(case)
        for lot in case.private:
            getattr(loop, name)(lot)
        assert case.private.steps_taken == case.private.steps
        found.append(weights(model))
    assert torch.equal(*found)


def test_wrapped_optimizers_hear_of_the_noise_too(problem):
    model = nn.Linear(4, 2)
    inner = AdamBC(model.parameters(), lr=0.1)
    wrapper = type("Wrapper", (torch.optim.Optimizer,), {"__module__": "accelerate.optimizer"})
    outer = wrapper(model.parameters(), {})
    outer.optimizer = inner
    assert own_optimizer(outer) is inner
    case = problem(model=model, optimizer=outer, noise_multiplier=2.0)
    for lot in case.private:
        case.private.step(lot)
    assert inner._noise_std[id(model.weight)] == pytest.approx(2.0 / 16)


@pytest.mark.filterwarnings("ignore")  # raised inside the compiler
def test_a_module_compiled_in_place_takes_the_same_steps(problem):
    expected = stepped(problem(**OPTIONS))
    case = problem(**OPTIONS)
    lots = iter(case.private)
    case.private.step(next(lots))  # plans are remembered
    case.model.compile(backend="eager")
    for lot in lots:
        case.private.step(lot)
    assert torch.allclose(weights(case.model), expected, atol=1e-5)


def test_adaptive_clipping_works_in_a_foreign_loop(problem):
    options = OPTIONS | {"clip_norm": AdaptiveClip(1.0)}
    own, other = problem(**options), problem(**options, max_microbatch=3)
    stepped(own)
    foreign(other)
    assert other.private.info["clip_norms"] == pytest.approx(own.private.info["clip_norms"])


def test_each_lot_is_released_once(problem):
    case = problem(**OPTIONS)
    with pytest.raises(RuntimeError, match="needs a lot"):
        case.private.backward()
    for lot in case.private:
        case.private.backward()
        with pytest.raises(RuntimeError, match="uses each lot once"):
            case.private.backward()
        with pytest.raises(ValueError, match="another step"):
            case.private.step(lot)
        case.optimizer.step()
    with pytest.raises(RuntimeError, match="needs a lot"):
        case.private.backward()
    assert case.private.steps_taken == 5


def test_a_lot_that_was_stepped_on_is_not_released_again(problem):
    case = problem(**OPTIONS)
    lots = iter(case.private)
    case.private.step(next(lots))
    with pytest.raises(ValueError, match="another step"):
        case.private.backward()
    assert case.private.steps_taken == 1


def test_large_lots_and_a_failed_step_give_the_same_steps(problem):
    expected = stepped(problem(**OPTIONS))
    case, fails = problem(**OPTIONS, max_microbatch=3), [True]
    usual = case.private._bill.pay

    def pay(step):
        if fails:
            raise fails.pop() and OSError("no room")
        usual(step)

    case.private._bill.pay = pay
    for _ in case.private:
        with contextlib.suppress(OSError):
            case.private.backward()
        if (
            next(case.model.parameters()).grad is None
        ):  # nothing was released: the lot is used again
            case.private.backward()
        case.optimizer.step()
        case.optimizer.zero_grad()
    assert torch.allclose(weights(case.model), expected, atol=1e-5)


def test_of_two_loops_over_one_run_only_the_newer_goes_on(problem):
    case = problem(**OPTIONS, max_microbatch=3)
    loops = [iter(case.private) for _ in range(2)]
    next(loops[0])
    next(loops[1])
    with pytest.raises(RuntimeError, match="another loop"):
        next(loops[0])
    assert case.private.steps_taken == 0
    case.private.backward()  # the newer loop's lot
    assert case.private.steps_taken == 1
