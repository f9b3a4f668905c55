"""Restarts: the same run goes on, and nothing is under-counted."""

import copy
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import numpy as np
import pytest
import torch
from slow_cases import one_fast
from torch.nn import functional as F

import tacit
from tacit import events as ev
from tacit import sampling
from tacit.training import AdaptiveClip, Stairs
from tacit.training.key import AESWords, Key


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def train(case, stop=None):
    for lot in case.private:
        case.private.step(lot)
        if case.private.steps_taken == stop:
            break


def saved(case):
    """A checkpoint through JSON and torch, as a file would hold it."""
    return {
        "private": json.loads(json.dumps(case.private.state_dict())),
        "model": {name: value.clone() for name, value in case.model.state_dict().items()},
        "optimizer": copy.deepcopy(case.optimizer.state_dict()),
    }


def load(case, state, **options):
    case.model.load_state_dict(state["model"])
    case.optimizer.load_state_dict(state["optimizer"])
    case.private.load_state_dict(state["private"], **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adaptive": AdaptiveClip(), "secure": True},
        {"noise_schedule": Stairs((1.0, 2.0)), "clip_schedule": Stairs((1.0, 0.5, 0.25))},
        {"sampler": sampling.RandomAllocation(4), "steps": 8},
        {"model": "dropout"},
        {"static_shapes": True, "max_microbatch": 7},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_a_resumed_run_is_the_run(problem, options):
    def make():
        chosen = dict(options)
        if chosen.get("model") == "dropout":
            torch.manual_seed(0)
            chosen["model"] = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
            )
        return problem(**({"steps": 8, "momentum": 0.9} | chosen))

    whole, resumed = make(), make()
    train(whole, stop=3)
    state = saved(whole)
    train(whole)
    load(resumed, state)
    assert resumed.private.steps_taken == 3
    train(resumed)
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.private.info == whole.private.info


def test_the_same_ledger_is_charged_once(problem):
    ledger = tacit.Ledger()
    first = problem(steps=6, ledger=ledger)
    train(first, stop=2)
    state = saved(first)
    train(first, stop=5)  # three steps that the checkpoint does not know of
    second = problem(steps=6, ledger=ledger, model_seed=1)
    load(second, state)
    train(second)
    assert [entry.event for entry in ledger.history()] == [first.private.event]


def test_a_checkpoint_from_before_the_first_step_is_charged_once(problem):
    ledger = tacit.Ledger()
    first = problem(ledger=ledger)
    state = saved(first)
    train(first, stop=2)
    second = problem(ledger=ledger)
    load(second, state)
    train(second)
    assert len(ledger.history()) == 1


def test_another_ledger_is_charged_in_full(problem):
    first = problem(steps=6)
    train(first, stop=4)
    second = problem(steps=6)
    load(second, saved(first))
    train(second)
    assert [entry.event for entry in second.private.ledger.history()] == [first.private.event]


def test_a_run_without_its_checkpoint_is_a_second_run(problem):
    ledger = tacit.Ledger()
    for _ in range(2):
        train(problem(ledger=ledger), stop=2)
    assert len(ledger.history()) == 2


def test_lost_steps_are_paid_and_the_noise_is_fresh(problem):
    ledger = tacit.Ledger()
    first = problem(steps=6, ledger=ledger)
    train(first, stop=2)
    state = saved(first)
    second = problem(steps=6, ledger=ledger)
    load(second, state, lost_steps=3)
    step = ev.PoissonSampled(0.25, ev.Gaussian(1.0))
    assert ledger.history()[-1].event == ev.Repeated(step, 4)  # what the ledger has ticked off
    assert ledger.history()[-1].kind == "spend"
    train(second)
    train(first)
    assert second.private.steps_taken == 6
    assert not torch.equal(weights(second.model), weights(first.model))
    assert second.private.state_dict()["key"] != state["private"]["key"]
    assert len(ledger.history()) == 2


@pytest.mark.parametrize("shared", [True, False], ids=["one ledger", "a new ledger each time"])
def test_the_price_of_a_run_has_the_lost_steps_of_every_restart(problem, shared):
    """The checkpoint keeps what an earlier ledger was paid, and the ledger what came after it."""
    ledger = tacit.Ledger()
    case = problem(steps=6, ledger=ledger)
    planned = case.private.epsilon(delta=1e-5)
    train(case, stop=2)
    early = state = saved(case)
    for count in (5, 6, 4):  # at least the 4 that the ledger has ticked off, in one ledger
        case = problem(steps=6, ledger=ledger if shared else tacit.Ledger())
        load(case, state, lost_steps=count)
        state = early if shared else saved(case)
    step = ev.PoissonSampled(0.25, ev.Gaussian(1.0))
    lost = 4 + 4 + 4  # never more than the steps that remain
    assert tacit.accounting.flatten(case.private.event) == {step: 6 + lost}
    assert tacit.accounting.flatten(case.private.training_event) == {step: 6 + lost}
    epsilon = case.private.epsilon(delta=1e-5)
    assert epsilon == tacit.epsilon(ev.Repeated(step, 6 + lost), delta=1e-5) > planned
    assert case.private.epsilon_at(6, delta=1e-5) == epsilon
    assert case.private.epsilon_at(0, delta=1e-5) == tacit.epsilon(
        ev.Repeated(step, lost), delta=1e-5
    )
    assert len(case.private.info["repaid"]) == 3


def test_what_was_drawn_before_a_state_was_loaded_is_not_released_after_it(problem):
    # Its noise was, or will be, on the lot that the loaded key draws.
    case, state = problem(seed=1), saved(problem(seed=2))
    lot = next(iter(case.private))
    load(case, state)
    with pytest.raises(ValueError, match="another step or run"):
        case.private.step(lot)
    batch = tuple(lot)
    with pytest.raises(RuntimeError, match="needs a batch"):
        case.private.backward(case.loss_fn(case.model, batch))
    batch = next(batches := case.private.batches())
    losses = case.loss_fn(case.model, batch)
    load(case, state)
    with pytest.raises(RuntimeError, match="needs a batch"):
        case.private.backward(losses)
    with pytest.raises(RuntimeError, match="another loop"):
        next(batches)


def test_lost_steps_in_the_middle_of_an_epoch_are_refused(problem):
    case = problem(steps=8, sampler=sampling.RandomAllocation(4))
    train(case, stop=3)
    state = saved(case)
    with pytest.raises(ValueError, match="end of an epoch"):
        load(case, state, lost_steps=1)


@pytest.mark.parametrize(
    "change",
    [
        {"clip_norm": 2.0},
        {"noise_multiplier": 2.0},
        {"batch_size": 8},
        {"steps": 5},
        {"n_records": 70},
        {"adaptive": AdaptiveClip()},
        {"clip_schedule": Stairs((1.0, 0.5))},
    ],
    ids=str,
)
def test_another_plan_cannot_take_over(problem, change):
    state = problem(steps=4).private.state_dict()
    other = problem(**({"steps": 4} | change)).private
    with pytest.raises(ValueError, match="state comes from a run with another"):
        other.load_state_dict(state)


@pytest.mark.parametrize("changed", ["model", "optimizer", "learning rate"])
def test_the_same_noise_never_falls_on_another_computation(problem, changed):
    case = problem(steps=6, momentum=0.9)
    train(case, stop=2)
    state = saved(case)
    train(case, stop=4)
    other = problem(steps=6, momentum=0.9)
    load(other, state)
    if changed == "model":
        other.model.load_state_dict(case.model.state_dict())
    elif changed == "optimizer":
        other.optimizer.load_state_dict(case.optimizer.state_dict())
    else:
        other.optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(ValueError, match="would fall on other gradients"):
        next(iter(other.private))
    with pytest.raises(ValueError, match="would fall on other gradients"):
        next(other.private.batches())
    other.private.load_state_dict(state["private"], lost_steps=0)
    train(other)
    assert other.private.steps_taken == 6
    assert [entry.steps for entry in other.private.ledger.history() if entry.kind == "plan"] == [6]


def test_a_change_after_the_loop_began_is_refused(problem):
    case = problem(steps=6)
    train(case, stop=2)
    state = saved(case)
    other = problem(steps=6)
    load(other, state)
    lot = next(iter(other.private))
    other.optimizer.param_groups[0]["lr"] = 0.2
    for _ in range(2):
        with pytest.raises(ValueError, match="would fall on other gradients"):
            other.private.step(lot)


SCALE = 1.0  # read by `scaled_loss`


def scaled_loss(model, batch):
    x, y = batch
    return SCALE * F.cross_entropy(model(x), y, reduction="none")


def loss_times(factor):
    def loss_fn(model, batch):
        x, y = batch
        return factor * F.cross_entropy(model(x), y, reduction="none")

    return loss_fn


def two_classes(n=64):
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n) % 2
    return torch.randn(n, 4, generator=generator) + 2.0 * y[:, None], y


def edited(number):
    """Return the data with one number of one record changed in its last bits."""
    x, y = two_classes()
    row = (7 * number + 3) % len(x)
    x[row, number % 4] = torch.nextafter(x[row, number % 4], torch.tensor(9.0))
    return x, y


def shuffled(number):
    x, y = two_classes()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(number))
    return x[order], y[order]


def other_loss(number):
    return [
        {"loss_fn": loss_times(1.0 + 2.0**-number)},
        {"loss_fn": lambda model, batch: loss_times(1.0)(model, batch) + 0.0},
    ][number % 2]


class Halved(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 1.0


CHANGES = {
    "edited record": lambda number: {"data": edited(number)},
    "shuffled rows": lambda number: {"data": shuffled(number)},
    "other loss": other_loss,
    "other learning rate": lambda number: {"lr": 0.1 + 0.01 * (number + 1)},
    "other code of the model": lambda _: {
        "model": Halved(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    },
    "lists of records": lambda _: {"data": list(zip(*two_classes(), strict=True))},
    "other views": lambda _: {"augmentations": 2, "augment": lambda batch: batch},
}


def resumed_with(problem, change, number, ledger=None, **options):
    """Return a run that took five steps, its checkpoint of step two, and a changed run of it."""
    common = {"steps": 8, "loss_fn": loss_times(1.0), "data": two_classes()} | options
    first = problem(**common, ledger=ledger)
    train(first, stop=2)
    state = saved(first)
    train(first, stop=5)
    again = problem(**(common | CHANGES[change](number)), ledger=ledger)
    again.model.load_state_dict(state["model"])
    again.private.load_state_dict(state["private"])
    if change != "other learning rate":
        again.optimizer.load_state_dict(state["optimizer"])
    return first, state, again


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 10))]
)
def test_a_changed_run_gets_other_noise_and_is_charged(problem, change, number):
    """Notes on reuse: the difference of two releases showed one record in the clear."""
    ledger = tacit.Ledger()
    _, state, again = resumed_with(problem, change, number, ledger)
    with pytest.warns(UserWarning, match="fresh noise, and 6 steps"):  # the block claims all 8
        lot = next(iter(again.private))
    again.private.step(lot)
    step = ev.PoissonSampled(0.25, ev.Gaussian(1.0))
    assert [entry.event for entry in ledger.history()][1:] == [ev.Repeated(step, 6)]
    assert again.private.state_dict()["key"] != state["private"]["key"]
    assert again.private.steps_taken == 3


@pytest.mark.parametrize("change", one_fast(CHANGES, 4))
def test_a_changed_run_is_refused_if_the_ledger_does_not_know_it(problem, change):
    _, _, again = resumed_with(problem, change, 0)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"not th.* of the checkpoint.*lost_steps="):
            next(iter(again.private))


def test_a_changed_constant_or_number_of_threads_is_noticed(problem, monkeypatch):
    case = problem(loss_fn=scaled_loss)
    train(case, stop=2)
    state = saved(case)
    for change, names in (
        (lambda m: m.setitem(scaled_loss.__globals__, "SCALE", 1.5), "program"),
        (lambda m: m.setattr(torch, "get_num_threads", lambda: 77), "machine"),
        (lambda m: m.setattr(AESWords, "is_available", lambda: False), "machine"),
    ):
        other = problem(loss_fn=scaled_loss)
        load(other, state)
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(ValueError, match=names):
                next(iter(other.private))
        train(other)  # unchanged again
        assert other.private.steps_taken == 4


def constant(_):
    return 0.1


def falling(step):
    return 0.1 * 0.9**step


def in_stairs(step):
    return 0.1 if step < 4 else 0.05


def scheduled(case, schedule, stop=None):
    """Train with a learning rate that is set after each step, as torch's schedulers do."""
    for lot in case.private:
        case.private.step(lot)
        case.optimizer.param_groups[0]["lr"] = schedule(case.private.steps_taken)
        if case.private.steps_taken == stop:
            break


def interrupted(problem, schedule, *, at=2, stop=6, ledger=None):
    """Return a run that was stopped without being closed, and its checkpoint at step `at`."""
    first = problem(steps=100, ledger=ledger)
    scheduled(first, schedule, stop=at)
    state = saved(first)
    scheduled(first, schedule, stop=stop)
    return first, state


SCHEDULES = {f.__name__: f for f in (falling, constant, in_stairs)}


@pytest.mark.parametrize("name", one_fast(SCHEDULES, 3))
def test_an_unchanged_schedule_is_repeated_and_not_charged(problem, name):
    ledger, schedule = tacit.Ledger(), SCHEDULES[name]
    first, state = interrupted(problem, schedule, ledger=ledger)
    again = problem(steps=100, ledger=ledger)
    load(again, state)
    scheduled(again, schedule, stop=6)
    assert torch.equal(weights(again.model), weights(first.model))
    scheduled(again, schedule)
    assert again.private.steps_taken == 100
    assert len(ledger.history()) == 1
    assert ledger.verify().entries == 1


@pytest.mark.parametrize("name", one_fast(SCHEDULES, 3))
@pytest.mark.parametrize("step", one_fast([4, 3, 5], 3))
def test_a_schedule_edited_inside_repeated_steps_is_refused(problem, name, step):
    ledger, schedule = tacit.Ledger(), SCHEDULES[name]
    first, state = interrupted(problem, schedule, ledger=ledger)

    def edited_schedule(number):
        return schedule(number) * (1.0 if number < step else 1.001)

    again = problem(steps=100, ledger=ledger)
    load(again, state)
    with pytest.raises(ValueError, match=rf"step {step + 1} was .* lost_steps=62"):
        scheduled(again, edited_schedule)
    assert again.private.steps_taken == step
    assert all(p.grad is None for p in again.model.parameters())
    assert len(ledger.history()) == 1
    load(again, state, lost_steps=62)
    scheduled(again, edited_schedule, stop=9)
    step_event = ev.PoissonSampled(0.25, ev.Gaussian(1.0))
    assert [entry.event for entry in ledger.history()][1:] == [ev.Repeated(step_event, 62)]
    assert not torch.isclose(weights(again.model), weights(first.model)).all()
    # The steps under the fresh key are known in turn.
    state = saved(again)
    scheduled(again, edited_schedule, stop=12)
    third = problem(steps=100, ledger=ledger)
    load(third, state)
    scheduled(third, edited_schedule, stop=12)
    assert torch.equal(weights(third.model), weights(again.model))
    fourth = problem(steps=100, ledger=ledger)
    load(fourth, state)
    with pytest.raises(ValueError, match="step 11 was"):
        scheduled(fourth, lambda number: edited_schedule(number) * (1 if number < 10 else 1.1))
    assert len(ledger.history()) == 2


def test_weights_moved_inside_repeated_steps_are_refused(problem):
    ledger = tacit.Ledger()
    _, state = interrupted(problem, constant, ledger=ledger)
    again = problem(steps=100, ledger=ledger)
    load(again, state)
    scheduled(again, constant, stop=4)
    with torch.no_grad():
        next(again.model.parameters()).mul_(0.5)
    with pytest.raises(ValueError, match="step 5 was"):
        scheduled(again, constant)
    other = problem(steps=100, ledger=ledger)
    load(other, state)
    scheduled(other, constant, stop=7)  # one more than was taken before
    with torch.no_grad():
        next(other.model.parameters()).mul_(0.5)
    scheduled(other, constant, stop=9)


def test_a_checkpoint_of_the_first_version_asks_for_lost_steps(problem):
    case = problem(steps=6)
    train(case, stop=2)
    state = saved(case)
    old = {k: v for k, v in state["private"].items() if k not in ("binding", "optimizer")}
    for version in (1, 2):
        state["private"] = old | {"version": version}
        other = problem(steps=6)
        with pytest.raises(ValueError, match=rf"version {version}, .*lost_steps"):
            load(other, state)
        load(other, state, lost_steps=0)
        train(other)
        assert other.private.steps_taken == 6


def test_another_kind_of_optimizer_is_refused_in_one_sentence(problem):
    case = problem()
    state = saved(case)
    model = torch.nn.Linear(4, 2)
    other = problem(model=model, optimizer=torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match=r"the optimizer must be .*SGD, got .*Adam\.$"):
        other.private.load_state_dict(state["private"])


def test_the_fingerprint_is_salted_and_belongs_to_the_records(problem):
    first = problem(seed=1, data=two_classes())
    print_ = first.private.data_fingerprint
    assert print_ != problem(seed=1, data=two_classes()).private.data_fingerprint
    for data, is_same in ((two_classes(), True), (edited(1), False), (shuffled(1), False)):
        other = problem(seed=2, data=data)
        load(other, saved(first))
        assert (other.private.data_fingerprint == print_) is is_same


def test_writing_into_the_records_changes_their_fingerprint(problem):
    x, y = two_classes()
    private = problem(data=(x, y)).private
    before = private.data_fingerprint
    assert private.data_fingerprint == before
    x[3, 2] += 1.0
    assert private.data_fingerprint != before


def test_random_augmentation_in_the_data_set_is_replayed_for_the_fingerprint(problem):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            return torch.randn(4) + np.random.rand(), i % 2  # noqa: NPY002

    key = Key.fresh()
    found = [problem(data=Noisy(), check=False).private._lots.records.digest(key) for _ in "ab"]
    assert found[0] == found[1]


def test_the_order_of_loading_does_not_matter(problem):
    case = problem(steps=4, momentum=0.9)
    train(case, stop=2)
    state = saved(case)
    train(case)
    other = problem(steps=4, momentum=0.9)
    other.private.load_state_dict(state["private"])
    other.model.load_state_dict(state["model"])
    other.optimizer.load_state_dict(state["optimizer"])
    train(other)
    assert torch.equal(weights(other.model), weights(case.model))


def test_a_foreign_loop_with_dropout_resumes_exactly(problem):
    def make():
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
        return problem(model=torch.nn.Sequential(*layers), steps=6, max_microbatch=7)

    def go(case, stop=None):
        for x, y in case.private.batches():
            losses = torch.nn.functional.cross_entropy(case.model(x), y, reduction="none")
            case.private.backward(losses)
            case.optimizer.step()
            if case.private.steps_taken == stop:
                break

    whole, resumed = make(), make()
    go(whole, stop=3)
    state = saved(whole)
    go(whole)
    load(resumed, state)
    torch.manual_seed(99)
    go(resumed)
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_a_state_of_another_version_is_refused(problem):
    run = problem().private
    with pytest.raises(ValueError, match="version"):
        run.load_state_dict({"version": 99})


def test_a_finished_run_stays_finished(problem):
    case = problem()
    train(case)
    other = problem()
    load(other, saved(case))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a script that is started again after its end is no mistake
        assert list(other.private) == []


KILLED = textwrap.dedent("""
    import json, os, sys, time
    import torch, tacit
    from torch.nn import functional as F

    folder, resume = sys.argv[1], sys.argv[2] == "resume"
    torch.manual_seed(0)
    x = torch.randn(200, 5)
    y = (x.sum(1) > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss_fn(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="none")

    ledger = tacit.Ledger(f"{folder}/data.ledger", budget=tacit.Budget(epsilon=2.0, delta=1e-5))
    private = tacit.make_private(model, optimizer, (x, y), loss_fn, batch_size=40, steps=100,
                                 clip_norm=1.0, epsilon=1.9, delta=1e-5, ledger=ledger)
    if resume:
        state = torch.load(f"{folder}/checkpoint.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        private.load_state_dict(state["private"])
    for batch in private:
        private.step(batch)
        if private.steps_taken % 10 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                     "private": private.state_dict()}
            torch.save(state, f"{folder}/new.pt")
            os.replace(f"{folder}/new.pt", f"{folder}/checkpoint.pt")
        if private.steps_taken == 30 and not resume:
            torch.save([p.detach() for p in model.parameters()], f"{folder}/at30.pt")
        if private.steps_taken == 37 and not resume:
            torch.save([p.detach() for p in model.parameters()], f"{folder}/at37.pt")
            print("ready", flush=True)
            time.sleep(60)
        if private.steps_taken == 37 and resume:
            torch.save([p.detach() for p in model.parameters()], f"{folder}/again37.pt")
    print(json.dumps({"epsilon": private.epsilon(delta=1e-5), "entries": len(ledger.history()),
                      "ledger": ledger.epsilon(delta=1e-5), "steps": private.steps_taken}))
""")


@pytest.mark.slow
def test_kill_minus_nine_and_resume_gives_the_same_bill_and_the_same_releases(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}

    def command(mode):
        return [sys.executable, str(script), str(tmp_path), mode]

    first = subprocess.Popen(command("start"), stdout=subprocess.PIPE, text=True, env=environment)
    assert first.stdout is not None
    assert first.stdout.readline().strip() == "ready"
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stdout.close()
    begun = time.monotonic()
    output = subprocess.check_output(command("resume"), text=True, env=environment)
    result = json.loads(output.splitlines()[-1])
    assert time.monotonic() - begun < 120
    assert result["steps"] == 100
    assert result["entries"] == 1
    assert result["epsilon"] <= 1.9
    assert result["ledger"] == pytest.approx(result["epsilon"], rel=1e-6)
    before = torch.load(tmp_path / "at37.pt", weights_only=True)
    after = torch.load(tmp_path / "again37.pt", weights_only=True)
    assert all(map(torch.equal, before, after))  # the lost steps were repeated, not made anew
