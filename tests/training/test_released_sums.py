"""The sums of repeated steps: whatever makes them differ, the noise is not used again."""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from slow_cases import one_fast
from test_checkpoint import constant, interrupted, load, saved, scheduled, train, weights
from torch.nn import functional as F

import tacit
from tacit.errors import BudgetExceeded, ProgramError
from tacit.training.key import Key
from tacit.training.released_sums import ReleasedSums


def test_a_tag_belongs_to_its_message_use_and_key():
    key, message = Key.fresh(), [b"one", bytes(range(50))]
    tag = key.tag("sum", 3, message)
    assert tag == key.tag("sum", 3, message)
    others = [
        key.tag("sum", 4, message),
        key.tag("other", 3, message),
        key.tag("sum", 3, [b"one", bytes(range(50))[::-1]]),
        Key.fresh().tag("sum", 3, message),
    ]
    assert len({tag, *others}) == 5


def test_tags_work_without_the_package_cryptography(monkeypatch):
    monkeypatch.setattr("tacit.training.key._poly1305", lambda: None)
    key = Key.fresh()
    assert key.tag("sum", 3, [b"a"]) == key.tag("sum", 3, [b"a"]) != key.tag("sum", 3, [b"b"])


def test_a_torn_line_is_read_when_it_is_whole(tmp_path):
    sums, reader = (ReleasedSums(tmp_path / "a", "run") for _ in range(2))
    sums.add("key", "1", "aa")
    with (tmp_path / "a.sums").open("ab") as file:
        file.write(b"run key 2 b")
    assert (reader.get("key", "1"), reader.get("key", "2")) == ("aa", None)
    with (tmp_path / "a.sums").open("ab") as file:
        file.write(b"b\nother key 3 cc\n")
    assert (reader.get("key", "2"), reader.get("key", "3")) == ("bb", None)


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_the_first_tag_of_a_step_stays(tmp_path, is_in_memory):
    path = None if is_in_memory else tmp_path / "a"
    one, other = (ReleasedSums(path, str(tmp_path)) for _ in range(2))
    assert (one.get("key", "1"), other.get("key", "1")) == (None, None)
    assert one.add("key", "1", "aa") == "aa"
    assert other.add("key", "1", "bb") == "aa"


def test_tags_of_many_runs_in_memory_are_bounded():
    for i in range(300):
        ReleasedSums(None, f"bounded {i}").add("key", "1", "aa")
    assert ReleasedSums(None, "bounded 299").get("key", "1") == "aa"
    assert ReleasedSums(None, "bounded 0").get("key", "1") is None


def test_weights_moved_before_empty_lots_are_refused(problem):
    """The sums are zero, with these weights and with others: a repetition would show that."""

    def make():
        return problem(steps=6, n_records=10**7, batch_size=1)

    case, other = make(), make()
    train(case, stop=2)
    state = saved(case)
    train(case)
    load(other, state)
    train(other, stop=4)
    with torch.no_grad():
        next(other.model.parameters()).mul_(0.5)
    with pytest.raises(ValueError, match="step 5 was"):
        train(other)


def test_steps_are_not_repeated_where_their_sums_are_not_known(problem, tmp_path):
    path = tmp_path / "a.ledger"
    first, state = interrupted(problem, constant, ledger=tacit.Ledger(path))
    again = problem(steps=100, ledger=tacit.Ledger(path))
    load(again, state)
    scheduled(again, constant, stop=6)
    assert torch.equal(weights(again.model), weights(first.model))
    (tmp_path / "a.ledger.sums").unlink()
    for ledger in (tacit.Ledger(path), tacit.Ledger(tmp_path / "b.ledger"), tacit.Ledger()):
        third = problem(steps=100, ledger=ledger)
        load(third, state)
        with pytest.raises(ValueError, match=r"not known here.*lost_steps="):
            scheduled(third, constant)
        load(third, state, lost_steps=4)
        scheduled(third, constant, stop=3)
    load(third, state, is_replay=True)
    scheduled(third, constant, stop=6)
    assert torch.equal(weights(third.model), weights(first.model))


def test_a_schedule_edited_in_another_ledger_is_refused(problem):
    _, state = interrupted(problem, constant, ledger=tacit.Ledger())
    again = problem(steps=100, ledger=tacit.Ledger())
    load(again, state)
    with pytest.raises(ValueError, match=r"step 5 was .*lost_steps=4,"):
        scheduled(again, lambda step: constant(step) * (1 if step < 4 else 2))


def test_a_second_process_sees_what_the_first_has_released_meanwhile(problem, tmp_path):
    ledger = tacit.Ledger(tmp_path / "a.ledger")
    first, state = interrupted(problem, constant, ledger=ledger, stop=3)
    again = problem(steps=100, ledger=tacit.Ledger(tmp_path / "a.ledger"))
    load(again, state)
    scheduled(again, constant, stop=3)
    scheduled(first, constant, stop=6)
    with pytest.raises(ValueError, match="step 5 was"):
        scheduled(again, lambda step: constant(step) * (1 if step < 4 else 2))


def test_a_state_saved_before_the_loop_is_the_one_that_was_loaded(problem):
    _, state = interrupted(problem, constant, ledger=tacit.Ledger(), stop=3)
    edited = problem(steps=100, ledger=tacit.Ledger())
    edited.x[3] *= 3
    load(edited, state)
    assert edited.private.state_dict() == state["private"]
    replay = problem(steps=100, ledger=tacit.Ledger())
    load(replay, state, is_replay=True)
    scheduled(replay, constant, stop=3)
    with pytest.raises(ValueError, match="a replay cannot be saved"):
        replay.private.state_dict()


def restarted(problem, state, path, *, edit):
    again = problem(steps=20, ledger=tacit.Ledger(path))
    again.x[3] += edit
    load(again, state)
    return again


@pytest.mark.filterwarnings("ignore:the data set is not")
def test_releases_of_all_keys_are_never_more_than_what_was_paid(problem, tmp_path, monkeypatch):
    monkeypatch.setattr("tacit.training.checkpoint._BLOCK", 1)
    path = tmp_path / "a.ledger"
    first = problem(steps=20, ledger=tacit.Ledger(path))
    train(first, stop=2)
    state = saved(first)
    train(first, stop=5)
    second = restarted(problem, state, path, edit=1.0)  # pays steps 3 to 5 again
    train(second, stop=7)
    of_second = saved(second)
    with pytest.raises(ValueError, match=r"step 6 is not paid with this noise"):
        train(first)
    back = restarted(problem, state, path, edit=0.0)
    with pytest.raises(ValueError, match=r"step 6 is not paid with this noise"):
        train(back)
    assert torch.equal(weights(back.model), weights(first.model))
    third = restarted(problem, state, path, edit=2.0)  # pays steps 3 to 7 again
    train(third, stop=9)
    back = restarted(problem, of_second, path, edit=1.0)
    with pytest.raises(ValueError, match=r"step 8 is not paid with this noise"):
        train(back)
    train(third)
    assert [entry.event.count for entry in third.private.ledger.history()] == [20, 3, 5]
    ((step, count),) = tacit.accounting.flatten(third.private.event).items()
    assert (count, back.private.event) == (28, third.private.event)  # both restarts know of both
    whole = tacit.epsilon(tacit.events.Repeated(step, 28), delta=1e-5)
    assert third.private.epsilon(delta=1e-5) == pytest.approx(whole)


@pytest.mark.parametrize("options", [{}, {"lost_steps": 4}], ids=["automatic", "lost_steps"])
def test_a_changed_restart_that_cannot_pay_stays_refused(problem, tmp_path, options):
    epsilon = problem(steps=6).private.epsilon(delta=1e-5) * 1.02
    budget = tacit.Budget(epsilon=epsilon, delta=1e-5)
    ledger = tacit.Ledger(tmp_path / "a.ledger", budget=budget)
    first = problem(steps=6, ledger=ledger)
    train(first, stop=2)
    state = saved(first)
    train(first)
    again = problem(steps=6, ledger=ledger)
    again.x[3] *= 3
    if options:
        with pytest.raises(BudgetExceeded):
            load(again, state, **options)
    else:
        load(again, state)
    for _ in range(2):
        with pytest.raises(BudgetExceeded):
            train(again)
    assert again.private.steps_taken == 2


def test_sums_that_were_cut_off_are_not_known(problem, tmp_path, monkeypatch):
    monkeypatch.setattr("tacit.training.checkpoint._BLOCK", 1)
    path, sums = tmp_path / "a.ledger", tmp_path / "a.ledger.sums"
    first, state = interrupted(problem, constant, ledger=tacit.Ledger(path))
    lines = sums.read_bytes().splitlines(keepends=True)
    sums.write_bytes(b"".join(lines[:-1]) + lines[-1][:50])  # one step may be in flight
    again = problem(steps=100, ledger=tacit.Ledger(path))
    load(again, state)
    scheduled(again, constant, stop=6)
    assert torch.equal(weights(again.model), weights(first.model))
    for end in (lines[-2][:50], bytes(200)):
        sums.write_bytes(b"".join(lines[:-2]) + end)
        load(again, state)
        with pytest.raises(ValueError, match=r"not known here"):
            scheduled(again, constant)


def test_a_line_that_cannot_be_read_back_is_an_error(tmp_path, monkeypatch):
    sums = ReleasedSums(tmp_path / "a", "run")
    monkeypatch.setattr(os, "write", lambda *_: 0)
    with pytest.raises(OSError, match=r"is not there\. Nothing was released"):
        sums.add("key", "1", "aa")


@pytest.mark.parametrize("place", ["_observe", "_compare_with_first_time", "_adapt"])
def test_a_checkpoint_made_in_the_middle_of_a_step_does_not_repeat_its_noise(
    problem, monkeypatch, place
):
    ledger = tacit.Ledger()
    first = problem(steps=6, ledger=ledger)
    train(first, stop=2)
    states = []

    usual = getattr(first.private, place)

    def save_first(*arguments, **named):  # as a signal handler would
        if not states:
            states.append(saved(first))
        return usual(*arguments, **named)

    monkeypatch.setattr(first.private, place, save_first)
    train(first)
    again = problem(steps=6, ledger=ledger)
    load(again, states[0])
    at = states[0]["private"]["steps_taken"]
    lot = next(iter(again.private))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=f"step {at + 1} was taken before"),
    ):
        again.private.step(lot)
    assert again.private.steps_taken == at


def test_two_threads_or_a_call_inside_the_loss_cannot_use_one_lot_twice(problem):
    private, lots, both = None, [], threading.Barrier(2)

    def loss_fn(model, batch):
        if lots and threading.current_thread() is not threading.main_thread():
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)
        elif lots:
            private.step(lots[0])
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="none")

    private = problem(loss_fn=loss_fn, check=False).private
    loop = iter(private)
    lots.append(next(loop))
    with pytest.raises(ProgramError, match="raised RuntimeError in loss_fn"):
        private.step(lots[0])
    assert private.steps_taken == 0
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(private.step, lots[0]) for _ in range(2)]
    assert sum(one.exception() is None for one in found) == 1
    assert private.steps_taken == 1


def test_a_run_without_a_checkpoint_keeps_no_sums(problem, tmp_path):
    train(problem(steps=6, ledger=tacit.Ledger(tmp_path / "a.ledger")))
    assert not (tmp_path / "a.ledger.sums").exists()


class Switched(torch.nn.Module):
    """A model with a dropout layer, a buffer, and a number that its loss reads by name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop = torch.nn.Linear(4, 8), torch.nn.Dropout(0.1)
        self.second = torch.nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(()))
        self.held = {"smoothing": 0.0}

    def forward(self, x):
        return self.second(self.drop(self.first(x).tanh())) * self.scale


def smoothed(model, batch):
    held = getattr(model, "he" + "ld")  # no name of it is in the code
    losses = F.cross_entropy(
        model(batch[0]), batch[1], reduction="none", label_smoothing=held["smoothing"]
    )
    return losses * float(os.environ.get("TACIT_TEST_FACTOR", "1"))


class Moved(torch.utils.data.Dataset):
    """Records that move by a number in a list, which is no plain attribute."""

    def __init__(self):
        self.by = [0.0]

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full((4,), i % 7 + self.by[0]), i % 2


def permute(case):
    with torch.no_grad():
        case.model.first.weight.copy_(case.model.first.weight.flip(0))


def forget(case):
    for state in case.optimizer.state.values():
        state["momentum_buffer"].zero_()


LATER = {
    "dropout": lambda case: setattr(case.model.drop, "p", 0.5),
    "buffer": lambda case: case.model.scale.fill_(2.0),
    "eval": lambda case: case.model.eval(),
    "loss": lambda case: case.model.held.update(smoothing=0.3),
    "momentum": forget,
    "weights permuted": permute,
    "records": lambda case: case.data.by.__setitem__(0, 1.0),
    "hook": lambda case: case.model.first.register_forward_hook(lambda *parts: 2 * parts[2]),
    "environment": lambda _case: os.environ.__setitem__("TACIT_TEST_FACTOR", "3"),
    ".data": lambda case: setattr(case.model.second.weight, "data", torch.ones(2, 8)),
}


def changed_later(problem, change, step, **options):
    """Return a run that was resumed at step 2 and changed before `step` + 1."""
    data, ledger = Moved(), tacit.Ledger()
    options = {"loss_fn": smoothed, "ledger": ledger, "momentum": 0.9, "steps": 8} | options
    case, again = (problem(model=Switched(), data=data, **options) for _ in range(2))
    train(case, stop=2)
    state = saved(case)
    train(case)
    load(again, state)
    train(again, stop=step)
    again.data = data
    change(again)
    return case, again, ledger


@pytest.mark.parametrize("name", one_fast(LATER, 10))
@pytest.mark.parametrize("step", one_fast([5, 3, 4], 3))
def test_a_change_at_a_later_step_is_refused(problem, name, step, monkeypatch):
    """Nothing that is compared when the loop begins shows these changes."""
    monkeypatch.setenv("TACIT_TEST_FACTOR", "1")
    _, again, ledger = changed_later(problem, LATER[name], step)
    with pytest.raises(ValueError, match="was taken before"):
        train(again)
    # A change of the optimizer's state moves the weights of the step after it.
    assert again.private.steps_taken == step + (name == "momentum")
    assert len(ledger.history()) == 1


@pytest.mark.slow
def test_autocast_around_repeated_steps_is_refused(problem):
    _, again, _ = changed_later(problem, lambda _: None, 4)
    mixed = torch.autocast("cpu", dtype=torch.bfloat16)
    with mixed, pytest.raises(ValueError, match="step 5 was"):
        train(again)


@pytest.mark.filterwarnings("ignore:the losses of the loop:RuntimeWarning")
def test_a_loop_that_does_not_use_its_loss_fn_is_compared_too(problem):
    def go(case, factor, stop):
        for x, y in case.private.batches():
            losses = F.cross_entropy(case.model(x), y, reduction="none")
            case.private.backward(losses * torch.where(y == 1, factor, 1.0))
            case.optimizer.step()
            if case.private.steps_taken == stop:
                return

    ledger = tacit.Ledger()
    case, same, other = (problem(steps=6, ledger=ledger) for _ in range(3))
    go(case, 1.0, 2)
    state = saved(case)
    go(case, 1.0, 6)
    load(same, state)
    go(same, 1.0, 6)
    assert torch.equal(weights(same.model), weights(case.model))
    load(other, state)
    with pytest.raises(ValueError, match="step 3 was"):
        go(other, 3.0, 6)
