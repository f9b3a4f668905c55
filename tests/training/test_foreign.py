"""Loops that somebody else owns: losses in, `p.grad` out."""

import contextlib

import pytest
import torch
from slow_cases import one_fast
from tacit.training.engines.examples import Examples
from tacit.training.engines.trace import trace_calls
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

import tacit
from tacit.errors import IncompatibleModel
from tacit.training import AdamBC, AdaptiveClip, Speed
from tacit.training.foreign import own_optimizer


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def stepped(case):
    for lot in case.private:
        case.private.step(lot)
    return weights(case.model)


def foreign(case, batches):
    for x, y in batches:
        case.optimizer.zero_grad()
        losses = F.cross_entropy(case.model(x), y, reduction="none")
        case.private.backward(losses)
        case.optimizer.step()
    return weights(case.model)


OPTIONS = {"seed": 3, "momentum": 0.9, "steps": 5, "batch_size": 8, "clip_norm": 0.2}


@pytest.mark.parametrize("with_loss_fn", [True, False])
@pytest.mark.parametrize("rows", [64, 3])
def test_a_foreign_loop_takes_the_same_steps(problem, with_loss_fn, rows):
    expected = stepped(problem(**OPTIONS))
    chosen = {} if with_loss_fn else {"loss_fn": None}
    case = problem(**OPTIONS, max_microbatch=rows, **chosen)
    assert torch.allclose(foreign(case, case.private.batches()), expected, atol=1e-5)
    assert case.private.steps_taken == 5


@pytest.mark.parametrize("with_loss_fn", [True, False])
def test_lots_unpack_in_a_plain_loop(problem, with_loss_fn):
    expected = stepped(problem(**OPTIONS))
    case = problem(**OPTIONS, **({} if with_loss_fn else {"loss_fn": None}))
    assert torch.allclose(foreign(case, case.private), expected, atol=1e-5)


@pytest.mark.parametrize("rows", [64, 3])
@pytest.mark.parametrize("taken", [1, 3])
def test_a_loop_ends_if_its_next_step_was_taken_elsewhere(problem, rows, taken):
    case = problem(**OPTIONS, max_microbatch=rows)
    private = case.private

    def batches():
        for batch in private.batches():
            yield batch
            if private.steps_taken == taken:
                private.step(private._lots.lot(taken))

    with pytest.raises(RuntimeError, match="step of this lot was taken elsewhere"):
        foreign(case, batches())
    assert private.steps_taken == taken + 1
    foreign(case, private.batches())  # another loop takes the steps that remain
    assert private.steps_taken == 5


class Loop:
    """What the libraries' loops do around one lot, in their order; none of them is imported."""

    def __init__(self, case):
        self.case, self.optimizer = case, case.optimizer
        self.schedule = torch.optim.lr_scheduler.StepLR(case.optimizer, 2, 0.5)

    def losses(self, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(self.case.model(x), y, reduction="none")

    def like_the_trainer(self, lot):
        assert "y" in lot  # it counts labels before the forward pass
        self.case.model.train()
        self.case.private.backward(self.losses(lot["x"], lot["y"]))
        nn.utils.clip_grad_norm_(self.case.model.parameters(), 100.0)
        self.optimizer.step()
        self.schedule.step()
        self.case.model.zero_grad()

    def like_lightning(self, lot):
        def closure():
            losses = self.losses(lot["x"], lot["y"])
            self.optimizer.zero_grad()
            self.case.private.backward(losses)
            return losses.detach()

        self.optimizer.step(closure)
        self.schedule.step()

    def like_lightning_by_hand(self, lot):
        with torch.autocast("cpu", torch.bfloat16):  # around backward and step too
            self.optimizer.zero_grad()
            self.case.private.backward(self.losses(lot["x"], lot["y"]))
            self.optimizer.step(lambda: None)
        self.schedule.step()

    def by_loss_fn(self, lot):
        with torch.autocast("cpu", torch.bfloat16):  # as Lightning does around the whole step
            self.optimizer.zero_grad()
            self.case.private.backward()
            self.optimizer.step()
        self.schedule.step()

    def by_loss_fn_after_a_look(self, lot):
        assert "y" in lot  # the Trainer counts labels
        self.case.private.backward()
        self.optimizer.step()
        self.schedule.step()
        self.case.model.zero_grad(set_to_none=False)

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


WAYS = ["like_the_trainer", "like_lightning", "like_lightning_by_hand"]
WAYS += ["by_loss_fn", "by_loss_fn_after_a_look", "its_own_in_autocast"]


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


@pytest.mark.parametrize("with_loss_fn", [True, False])
def test_a_compiled_model_is_followed_as_written(problem, with_loss_fn):
    expected = stepped(problem(**OPTIONS))
    case = problem(**OPTIONS, **({} if with_loss_fn else {"loss_fn": None}))
    compiled = torch.compile(case.model, backend="eager")
    for x, y in case.private:
        case.optimizer.zero_grad()
        case.private.backward(F.cross_entropy(compiled(x), y, reduction="none"))
        case.optimizer.step()
    assert torch.allclose(weights(case.model), expected, atol=1e-5)


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


def test_faint_dropout_is_not_taken_for_mixing():
    # A fresh transformer's loss hardly depends on its masks: two draws may agree by chance.
    for seed in range(60):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 32), nn.Dropout(0.1), nn.Linear(32, 2))
        with torch.no_grad():
            model[3].weight.mul_(0.01)
        batch = torch.randn(8, 4), torch.arange(8) % 2
        trace_calls(Examples(model, plain_loss, batch, torch.ones(8, dtype=torch.bool)))


def test_until_the_last_batch_of_a_lot_the_optimizer_moves_nothing(problem):
    case = problem(seed=3, momentum=0.9, batch_size=32, steps=2, max_microbatch=10)
    moves, batches = 0, 0
    for x, y in case.private.batches():
        before = weights(case.model)
        case.private.backward(F.cross_entropy(case.model(x), y, reduction="none"))
        case.optimizer.step()
        batches += 1
        moves += not torch.equal(weights(case.model), before)
    assert batches > 4
    assert moves == 2


def test_empty_lots_come_as_one_row_that_weighs_nothing(problem):
    for options in ({}, {"loss_fn": None}):
        case = problem(n=8, batch_size=1, n_records=10**8, noise_multiplier=0.0, steps=3, **options)
        before = weights(case.model)
        foreign(case, case.private.batches())
        assert case.private.steps_taken == 3
        assert torch.equal(weights(case.model), before)


def test_adaptive_clipping_works_in_a_foreign_loop(problem):
    options = OPTIONS | {"adaptive": AdaptiveClip()}
    own, other = problem(**options), problem(**options, max_microbatch=3)
    stepped(own)
    foreign(other, other.private.batches())
    assert other.private.info["clip_norms"] == pytest.approx(own.private.info["clip_norms"])


def test_nothing_stays_intercepted_after_the_batch_is_done(problem):
    case = problem(**OPTIONS)
    for x, y in case.private.batches():
        assert len(_get_current_function_mode_stack()) == 1
        case.private.backward(F.cross_entropy(case.model(x), y, reduction="none"))
        assert len(_get_current_function_mode_stack()) == 0
        break
    assert len(_get_current_function_mode_stack()) == 0
    for _ in case.private.batches():
        break  # without backward
    assert len(_get_current_function_mode_stack()) == 0
    for lot in case.private:
        _x, _y = lot  # looked at, then stepped on
        case.private.step(lot)
        break
    assert len(_get_current_function_mode_stack()) == 0


def test_evaluation_inside_the_loop_is_left_alone(problem):
    expected = stepped(problem(**OPTIONS))
    case = problem(**OPTIONS)
    for x, y in case.private.batches():
        with torch.no_grad():
            case.model(case.x)
        case.private.backward(F.cross_entropy(case.model(x), y, reduction="none"))
        case.optimizer.step()
    assert torch.allclose(weights(case.model), expected, atol=1e-5)


def test_a_loop_that_differs_from_loss_fn_is_told_so(problem):
    case = problem(**OPTIONS)
    (x, y) = next(batches := case.private.batches())
    with pytest.raises(RuntimeError, match="another way than loss_fn"):
        case.private.backward(
            F.cross_entropy(case.model(case.model[0].weight[0] + x), y, reduction="none")
        )
    assert case.private.steps_taken == 0
    batches.close()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_reduced_loss_is_explained(problem, reduction):
    case = problem(**OPTIONS)
    x, y = next(batches := case.private.batches())
    with pytest.raises(ValueError, match="one loss per example"):
        case.private.backward(F.cross_entropy(case.model(x), y, reduction=reduction))
    batches.close()


def test_backward_needs_a_batch_and_every_batch_a_backward(problem):
    case = problem(**OPTIONS)
    with pytest.raises(RuntimeError, match="needs a batch"):
        case.private.backward(torch.zeros(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="once for every batch"):
        for _ in case.private.batches():
            pass


@pytest.mark.parametrize("failing", one_fast(range(5), 4))
def test_a_batch_that_failed_is_not_left_out_of_its_lot(problem, failing):
    expected = stepped(problem(seed=1, max_microbatch=5))
    case = problem(seed=1, max_microbatch=5)

    def careless():
        for number, (x, y) in enumerate(case.private.batches()):
            losses = F.cross_entropy(case.model(x), y, reduction="none")
            with contextlib.suppress(ValueError):  # as loops do that skip what does not fit
                case.private.backward(losses.mean() if number == failing else losses)
                case.optimizer.step()

    with pytest.raises(RuntimeError, match="begin another loop"):
        careless()
    foreign(case, case.private.batches())
    assert torch.allclose(weights(case.model), expected, atol=1e-6)


def test_a_lot_that_was_stepped_on_is_not_released_again(problem):
    # Lots of two steps must be drawn on their own: that is what the bill assumes.
    case = problem()
    for lot in case.private:
        case.private.step(lot)
        batch = tuple(lot)
        with pytest.raises(RuntimeError, match="needs a batch"):
            case.private.backward(case.loss_fn(case.model, batch))
    assert case.private.steps_taken == case.private.steps


def test_batch_norm_is_refused_in_foreign_loops_too(problem):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(IncompatibleModel, match="BatchNorm1d"):
        problem(model=model, loss_fn=None)


def test_without_losses_each_lot_is_released_once(problem):
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


def test_without_losses_a_lot_that_was_stepped_on_is_not_released_again(problem):
    case = problem(**OPTIONS)
    lots = iter(case.private)
    case.private.step(next(lots))
    with pytest.raises(ValueError, match="another step"):
        case.private.backward()
    assert case.private.steps_taken == 1


def test_without_losses_microbatches_are_refused_and_nothing_is_released(problem):
    case = problem(**OPTIONS, max_microbatch=3)
    next(case.private.batches())
    with pytest.raises(RuntimeError, match="give their own losses"):
        case.private.backward()
    assert case.private.steps_taken == 0


def test_without_losses_large_lots_and_a_failed_step_give_the_same_steps(problem):
    expected = stepped(problem(**OPTIONS))
    case, fails = problem(**OPTIONS, max_microbatch=3), [True]
    usual = case.private._pay

    def pay():
        if fails:
            raise fails.pop() and OSError("no room")
        usual()

    case.private._pay = pay
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


def test_step_without_loss_fn_says_what_to_do(problem):
    case = problem(loss_fn=None)
    lots = iter(case.private)
    lot = next(lots)
    with pytest.raises(ValueError, match="loss_fn must be given"):
        case.private.step(lot)
    with pytest.raises(ValueError, match="loss_fn must be given"):
        case.private.backward()


@pytest.mark.parametrize("kind", ["batches", "lots"])
def test_of_two_loops_over_one_run_only_the_newer_goes_on(problem, kind):
    case = problem(**OPTIONS, max_microbatch=3)
    loops = [case.private.batches() if kind == "batches" else iter(case.private) for _ in range(2)]
    next(loops[0])
    next(loops[1])
    with pytest.raises(RuntimeError, match="another loop"):
        next(loops[0])
    assert case.private.steps_taken == 0


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("is_unpacked", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_record_that_is_not_finite_leaves_the_others_in_the_sum(engine, is_unpacked, bad):
    x, y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(12).long()
    releases = []

    def loss_of(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    for first in (x[0], torch.full((3,), bad)):
        data = (torch.cat([first[None], x[1:]]), y)
        model = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = tacit.make_private(
            model, optimizer, data, loss_of, batch_size=12, steps=1, clip_norm=0.5,
            noise_multiplier=0.0, speed=Speed(engine=engine), check=False,
        )  # fmt: skip
        for batch in run if is_unpacked else run.batches():
            inputs, labels = batch
            run.backward(F.cross_entropy(model(inputs), labels, reduction="none"))
            releases.append(12 * model.weight.grad.clone())
    assert 0 < float((releases[0] - releases[1]).norm()) <= 0.5 + 1e-5


def test_a_forward_pass_that_overflows_is_refused(problem):
    case = problem(engine="vmap", check=False)
    for inputs, labels in case.private:
        losses = F.cross_entropy(case.model(inputs), labels, reduction="none")
        with pytest.raises(FloatingPointError, match="nothing is released"):
            case.private.backward(losses * torch.tensor(1e38) * 1e38)
        break


def centered(model, x, y):
    return F.cross_entropy(model(x - x.mean(0)), y, reduction="none")


def divided(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none") / len(x)


def in_place(model, x, y):
    x -= x.mean(0)
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("losses", [centered, divided, in_place])
def test_a_loop_that_computes_something_else_counts_as_not_tested(losses):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2)), torch.randn(60, 4)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def run(loop):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = tacit.make_private(
            model, optimizer, (x, (x.sum(1) > 0).long()), loss_fn, batch_size=16, steps=3,
            clip_norm=1.0, noise_multiplier=1.0, seed=0,
        )  # fmt: skip
        for batch in private:
            private.backward(loop(model, *batch))
            optimizer.step()
        return private

    same = run(lambda model, x, y: loss_fn(model, (x, y)))
    assert same.isolation.startswith("tested, ")
    with pytest.warns(RuntimeWarning, match="the loop counts as not tested"):
        other = run(losses)
    assert other.isolation.startswith("not tested")
    assert other.chance_of_missing(1.0) == 1.0


def test_a_lot_whose_step_was_taken_is_not_released_by_its_microbatches_again(problem):
    case = problem(**OPTIONS, max_microbatch=4)
    private = case.private
    lot = next(iter(private))
    microbatches = private.batches()
    x, y = next(microbatches)
    private.backward(F.cross_entropy(case.model(x), y, reduction="none"))
    private.step(lot)
    with pytest.raises(RuntimeError, match="once"):
        next(microbatches)
    assert private.steps_taken == 1
