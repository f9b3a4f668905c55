"""Restarts: a process that goes on has its own lots and noise, and what it takes is paid."""

import contextlib
import copy
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from slow_cases import one_fast
from torch.nn import functional as F

import tacit
from tacit import events as ev
from tacit import sampling
from tacit.errors import BudgetExceeded, LedgerError, ProgramError
from tacit.ledger import restart_reserve
from tacit.training import AdaptiveClip, Banded, Checkpoint, ScheduledClip, Stairs
from tacit.training import noise as noises
from tacit.training.checkpoint_file import CheckpointWriter
from tacit.training.clip import ClippedSum
from tacit.training.key import Key

STEP = ev.PoissonSampled(0.25, ev.Gaussian(1.0))
TOLD = "the run goes on after step"
AGAIN = f"ignore:{TOLD}"


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def train(case, stop=None):
    for lot in case.private:
        case.private.step(lot)
        if case.private.steps_taken == stop:
            break


def saved(case):
    """Return a checkpoint as a loop of the user's would write it."""
    parts = {"private": case.private, "model": case.model, "optimizer": case.optimizer}
    return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}


def load(case, state, **options):
    case.model.load_state_dict(state["model"])
    case.optimizer.load_state_dict(state["optimizer"])
    case.private.load_state_dict(state["private"], **options)


@pytest.fixture
def words(monkeypatch):
    """The first random words of the noise of every release, by process and step."""
    found, usual = [], noises.add_noise

    def seen(parts, factor, *, source, **options):
        found.append(source.sequence(0)(4).tobytes())
        return usual(parts, factor, source=source, **options)

    monkeypatch.setattr(noises, "add_noise", seen)
    return found


# Runs that were stopped in order ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": AdaptiveClip(1.0), "secure": True},
        {"schedule": Stairs((1.0, 2.0)), "clip_norm": ScheduledClip(1.0, Stairs((1.0, 0.5, 0.25)))},
        {"max_microbatch": 7},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_a_stopped_run_goes_on_with_other_noise_and_costs_no_more(problem, words, options):
    ledger = tacit.Ledger()
    first, second = (problem(steps=8, momentum=0.9, ledger=ledger, **options) for _ in range(2))
    train(first, stop=3)
    load(second, saved(first))
    assert torch.equal(weights(first.model), weights(second.model))
    assert second.private._position.clip_moves == first.private._position.clip_moves
    train(second)
    assert (second.private.steps_taken, len(ledger.history())) == (8, 1)
    assert len(set(words)) == len(words)
    assert second.private.event == first.private.event


def test_a_loop_of_the_users_own_goes_on(problem, words):
    def go(case, stop=None):
        for _ in case.private:
            case.private.backward()
            case.optimizer.step()
            if case.private.steps_taken == stop:
                break

    ledger = tacit.Ledger()
    first, second = (problem(steps=6, ledger=ledger, max_microbatch=7) for _ in range(2))
    go(first, stop=3)
    load(second, saved(first))
    go(second)
    assert (second.private.steps_taken, len(ledger.history())) == (6, 1)
    assert len(set(words)) == 6


def test_a_state_holds_no_key(problem):
    case = problem(seed=3, steps=6, noise=Banded(bands=2))
    train(case, stop=3)
    text, key = repr(saved(case)["private"]), case.private._lots.key
    assert key.secret.hex() not in text
    assert repr(key.secret)[2:-1] not in text
    assert not {"key", "noise", "residuals"} & saved(case)["private"].keys()


def test_a_run_without_its_checkpoint_is_a_second_run(problem):
    ledger = tacit.Ledger()
    for _ in range(2):
        train(problem(ledger=ledger), stop=2)
    assert len(ledger.history()) == 2


def test_two_processes_that_begin_one_run_have_one_plan(problem, words):
    ledger = tacit.Ledger()
    state, one, other = (
        saved(problem(ledger=ledger)),
        problem(ledger=ledger),
        problem(ledger=ledger),
    )
    load(one, state)
    load(other, state)
    train(one, stop=3)
    with pytest.raises(BudgetExceeded, match="no step left"):
        train(other)
    assert (len(ledger.history()), len(set(words))) == (1, 3)


def test_a_finished_run_stays_finished(problem):
    ledger = tacit.Ledger()
    case, other = problem(ledger=ledger), problem(ledger=ledger)
    train(case)
    load(other, saved(case))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a script that is started again after its end is no mistake
        assert list(other.private) == []


# Lost steps ---------------------------------------------------------------------------------------


def kept(problem, folder, *, stop=None, ledger=None, lost_steps: Any = "reserve", **options):
    """Return a run with a checkpoint in `folder`, after step `stop`."""
    place = Checkpoint(path=folder / "last.pt", lost_steps=lost_steps)
    ledger = tacit.Ledger(folder / "a.ledger") if ledger is None else ledger
    options = {"steps": 300, "check": False} | options
    case = problem(checkpoint=place, ledger=ledger, **options)
    if stop != 0:
        train(case, stop=stop)
    return case


def crashed(problem, folder, *, stop, **options):
    """Take steps up to `stop` and leave no more behind than a process that is killed."""
    case = kept(problem, folder, stop=stop, **options)
    case.private._bill.writer.wait()
    return case


def test_one_crash_stays_within_the_reserve(problem, words, tmp_path):
    options = {"noise_multiplier": None, "epsilon": 2.0, "delta": 1e-5}
    options["ledger"] = tacit.Ledger(tmp_path / "b", tacit.Budget(epsilon=2.0, delta=1e-5))
    del options["noise_multiplier"]
    first = crashed(problem, tmp_path, stop=47, **options)
    assert first.private._plan.reserve == 3
    with pytest.warns(UserWarning, match=r"after step 45 .*up to 3, .*; epsilon 2 at"):
        again = kept(problem, tmp_path, stop=0, **options)
    assert (again.private.steps_taken, again.private.steps) == (45, 300)
    train(again)
    assert again.private.epsilon(delta=1e-5) <= 2.0
    assert len(options["ledger"].history()) == 1
    assert len(words) == len(set(words)) == 47 + 255
    with pytest.raises(BudgetExceeded):  # neither paid for nor possible
        again.private._bill._reserved[0].step()


def test_the_reserve_costs_less_than_one_percent_of_noise(problem):
    options = {"steps": 300, "epsilon": 2.0, "delta": 1e-5, "check": False}
    plain = problem(**options).private
    with_reserve = problem(checkpoint=Checkpoint(), **options).private
    assert (plain._plan.reserve, with_reserve._plan.reserve) == (0, 3)
    assert 1 < with_reserve.noise_multiplier / plain.noise_multiplier < 1.01
    assert with_reserve.epsilon_at(300, delta=1e-5) == with_reserve.epsilon(delta=1e-5) <= 2.0
    assert with_reserve.info["reserve"] == 3


def test_a_second_crash_asks_before_it_costs_more(problem, tmp_path):
    for stop in (47, 101):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", TOLD)
            crashed(problem, tmp_path, stop=stop)
    with pytest.raises(BudgetExceeded, match=r"3 of the steps that remain are not paid: .*epsilon"):
        kept(problem, tmp_path, stop=0)
    with pytest.warns(UserWarning, match="The run ends after 297 steps instead"):
        fewer = kept(problem, tmp_path, lost_steps="skip")
    assert fewer.private.steps_taken == fewer.private.steps == fewer.private.info["steps"] == 297
    assert tacit.accounting.flatten(fewer.private.event) == {STEP: 303}
    over = kept(problem, tmp_path, stop=0)  # it stays so, without another question
    assert list(over.private) == []


@pytest.mark.filterwarnings(AGAIN)
def test_lost_steps_can_be_paid_as_long_as_the_budget_lasts(problem, tmp_path):
    price = tacit.epsilon(ev.Repeated(STEP, 309), delta=1e-5)
    ledger = tacit.Ledger(tmp_path / "b", tacit.Budget(epsilon=1.03 * price, delta=1e-5))
    options = {"ledger": ledger, "lost_steps": "pay"}
    for number, stop in enumerate((47, 100, 104)):
        case = crashed(problem, tmp_path, stop=stop, **options)
        assert tacit.accounting.flatten(case.private.event) == {STEP: 303 + 3 * max(0, number - 1)}

    def crash_again_and_again():
        for stop in range(108, 300, 4):
            crashed(problem, tmp_path, stop=stop, **options)

    with pytest.raises(BudgetExceeded, match=r"no room for them; lost_steps='skip' ends"):
        crash_again_and_again()
    case = kept(problem, tmp_path, **options | {"lost_steps": "skip"})
    assert case.private.steps_taken == case.private.steps < 300
    assert case.private.epsilon(delta=1e-5) <= 1.03 * price


@pytest.mark.filterwarnings(AGAIN)
def test_without_a_reserve_lost_steps_need_consent(problem):
    ledger = tacit.Ledger()
    first = problem(steps=6, ledger=ledger)
    train(first, stop=2)
    state = saved(first)
    train(first, stop=5)
    second = problem(steps=6, ledger=ledger)
    with pytest.raises(BudgetExceeded, match="4 of the steps"):  # a block ticks off all of them
        load(second, state)
    load(second, state, lost_steps="pay")
    train(second)
    assert [entry.event for entry in ledger.history()][1:] == [ev.Repeated(STEP, 4)]
    assert second.private.training_event == ev.Sequence(
        (ev.Repeated(STEP, 6), ev.Repeated(STEP, 4))
    )
    with pytest.raises(ValueError, match="lost_steps"):
        load(second, state, lost_steps=4)


@pytest.mark.filterwarnings(AGAIN)
def test_a_loop_that_saves_by_itself_has_a_reserve_too(problem):
    ledger = tacit.Ledger()
    options = {"steps": 20, "ledger": ledger, "checkpoint": Checkpoint(every=4)}
    first = problem(**options)
    train(first, stop=6)
    state = saved(first)  # gives back what is ticked off and not used
    train(first, stop=9)
    again = problem(**options)
    load(again, state)
    train(again)
    assert [entry.steps for entry in ledger.history()] == [24]


@pytest.mark.parametrize("seed", [None, 5])
def test_a_ledger_that_does_not_know_what_was_paid_is_refused(problem, tmp_path, seed):
    ledger = tacit.Ledger(tmp_path / "a.ledger")
    first = problem(steps=6, ledger=ledger, seed=seed)
    before = saved(first)
    train(first, stop=1)
    state = saved(first)
    for answer in ("reserve", "pay", "skip"):
        for one in (before, state):
            with pytest.raises(LedgerError, match="another one, or an older copy"):
                load(problem(steps=6, seed=seed), one, lost_steps=answer)
    state["private"]["counted"] = (ledger.id, 5)
    with pytest.raises(LedgerError, match="another one, or an older copy"):
        load(problem(steps=6, ledger=ledger, seed=seed), state)
    with pytest.raises(ValueError, match="a ledger that outlasts the process"):
        kept(problem, tmp_path, stop=0, ledger=tacit.Ledger())


SAMPLERS = {
    "bands": {"noise": Banded(bands=2), "steps": 200},
    "turns": {"batch_size": sampling.CyclicPoisson(0.5, 2), "steps": 200},
    "epochs": {"batch_size": sampling.RandomAllocation(2), "steps": 200},
    "few bands": {"noise": Banded(bands=8), "steps": 40, "batch_size": 4},
    "few epochs": {"batch_size": sampling.RandomAllocation(4), "steps": 8},
    "fixed order": {"batch_size": sampling.FixedOrder(4), "noise": Banded(bands=2), "steps": 9},
}


@pytest.mark.parametrize("name", one_fast(SAMPLERS, 2))
@pytest.mark.parametrize("stop", [5, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 7))])
def test_a_restart_begins_a_new_mechanism_and_both_are_paid(problem, tmp_path, words, name, stop):
    """docs/guarantees.md: whole turns, epochs or runs are paid, whichever part was released."""
    options = dict(SAMPLERS[name])
    piece = {"few bands": 8, "few epochs": 4, "fixed order": 9}.get(name, 2)
    ledger = tacit.Ledger(tmp_path / "a.ledger")
    first = crashed(problem, tmp_path, stop=stop, ledger=ledger, **options)
    plan = first.private._plan
    assert (plan.piece, plan.reserve) == (piece, 2 if piece == 2 else 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", TOLD)
        again = kept(problem, tmp_path, ledger=ledger, lost_steps="pay", **options)
    begin, steps = again.private._bill.begin, plan.steps
    assert again.private.steps_taken == steps
    assert len(words) == len(set(words)) == stop + steps - again.private._position.first_step
    begun = -(-stop // piece) + -(-(steps - begin) // piece)
    ticked_off = sum(one.taken for one in again.private._bill._reserved)
    assert piece * begun >= ticked_off >= stop + steps - begin
    paid = [entry.event for entry in ledger.history()]
    assert paid[0] == plan.training_event
    assert len(paid) == (1 if plan.reserve else 2)
    if name == "bands":
        assert paid[0].equivalent.count == 101  # type: ignore[attr-defined]  # a BandedGaussian
        assert again.private._noise._begin == again.private._position.first_step


@pytest.mark.filterwarnings(AGAIN)
def test_in_the_middle_of_an_epoch_the_new_draw_is_paid_whole(problem):
    ledger = tacit.Ledger()
    options = {"steps": 8, "batch_size": sampling.RandomAllocation(4), "ledger": ledger}
    first, again = problem(**options), problem(**options)
    train(first, stop=3)
    with pytest.raises(BudgetExceeded, match="4 of the steps"):
        load(again, saved(first))
    load(again, saved(first), lost_steps="pay")
    train(again)
    assert [sum(tacit.accounting.flatten(e.event).values()) for e in ledger.history()] == [2, 1]
    assert [plan.steps - plan.taken for plan in again.private._bill._reserved] == [0, 0]


def test_the_reserve_is_whole_pieces_and_never_dear():
    assert [restart_reserve(n) for n in (1, 100, 101, 5000)] == [1, 1, 2, 50]
    assert restart_reserve(2048, 32) == 32
    assert restart_reserve(2048, 64) == 0
    assert restart_reserve(1000, every=7) == 7


# Seeds --------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_weights_until_a_restart(problem, tmp_path):
    whole = problem(steps=60, seed=5)
    train(whole)
    case = kept(problem, tmp_path, steps=60, seed=5)
    assert torch.equal(weights(case.model), weights(whole.model))


def test_a_seeded_run_that_was_stopped_in_order_goes_on(problem, words):
    ledger = tacit.Ledger()
    first, second, third = (problem(steps=6, seed=5, ledger=ledger) for _ in range(3))
    train(first, stop=3)
    state = saved(first)
    load(second, state)
    train(second, stop=5)
    load(third, saved(second))
    train(third)
    assert len(set(words)) == len(words) == 6
    assert third.private.is_reproducible


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_finished_seeded_run_has_lost_nothing(problem, tmp_path, is_handed_over):
    options = {"steps": 105, "seed": 5}  # the last block is not used up
    if is_handed_over:
        kept(problem, tmp_path, stop=0, **options).private.pay_whole()
    for _ in "ab":
        case = kept(problem, tmp_path, **options)
        assert case.private.steps_taken == 105


@pytest.mark.filterwarnings(AGAIN)
def test_lost_steps_of_a_seeded_run_need_consent(problem, words, tmp_path):
    crashed(problem, tmp_path, stop=47, seed=5)
    with pytest.raises(ValueError, match=r"not what its seed gives\. Give lost_steps='pay'"):
        kept(problem, tmp_path, stop=0, seed=5)
    for stop in (52, 53, None):
        crashed(problem, tmp_path, stop=stop, seed=5, lost_steps="pay")
    assert len(set(words)) == len(words)


@pytest.mark.filterwarnings(AGAIN)
def test_a_run_whose_restart_was_refused_does_not_repeat_the_noise_of_its_seed(problem, words):
    ledger, options = tacit.Ledger(), {"steps": 6, "seed": 5, "checkpoint": Checkpoint(every=2)}
    first, again = (problem(ledger=ledger, **options) for _ in range(2))
    train(first, stop=2)
    state = saved(first)
    train(first, stop=4)
    with pytest.raises(ValueError, match="not what its seed gives"):
        load(again, state)
    train(again)  # as if nothing had been said, with the steps of the reserve
    assert len(set(words)) == len(words) == 8


# What may change between two processes ------------------------------------------------------------


class Switched(torch.nn.Module):
    """A model with a dropout layer, a buffer, and a number that its loss reads by name."""

    def __init__(self):
        super().__init__()
        self.first, self.drop = torch.nn.Linear(4, 8), torch.nn.Dropout(0.1)
        self.second = torch.nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(()))
        self.held, self.part = {"smoothing": 0.0}, slice(0, 8)

    def forward(self, x):
        hidden = self.drop(self.first(x).tanh())[:, self.part]
        return F.linear(hidden, self.second.weight[:, self.part]) * self.get_buffer("scale")


def smoothed(model, batch):
    losses = F.cross_entropy(
        model(batch[0]), batch[1], reduction="none", label_smoothing=model.held["smoothing"]
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


def copied_folder(case):
    """Another process goes on from a copy of the checkpoint and pays into the same ledger."""
    train(case.twin)


CHANGES = {
    "nothing": lambda _: None,
    "dropout rate": lambda case: setattr(case.model.drop, "p", 0.5),
    "buffer": lambda case: case.model.scale.fill_(2.0),
    "mode": lambda case: case.model.eval(),
    "loss": lambda case: case.model.held.update(smoothing=0.3),
    "slice": lambda case: setattr(case.model, "part", slice(0, 4)),
    "weights": lambda case: case.model.first.weight.data.mul_(0.5),
    ".data": lambda case: setattr(case.model.second.weight, "data", torch.ones(2, 8)),
    "momentum": lambda case: case.optimizer.state.clear(),
    "learning rate": lambda case: case.optimizer.param_groups[0].update(lr=0.2),
    "records": lambda case: case.data.by.__setitem__(0, 1.0),
    "hook": lambda case: case.model.first.register_forward_hook(lambda *parts: 2 * parts[2]),
    "environment": lambda _: os.environ.__setitem__("TACIT_TEST_FACTOR", "3"),
    "autocast": lambda case: case.stack.enter_context(torch.autocast("cpu", torch.bfloat16)),
    "last bits": lambda case: case.patch.setattr(
        ClippedSum, "__add__", lambda a, b: jittered(ADD(a, b))
    ),
    "threads": lambda case: case.patch.setattr(torch, "get_num_threads", lambda: 2),
    "copied folder": copied_folder,
}
ADD = ClippedSum.__add__


def jittered(total):
    """Return a sum as a machine that adds in another order would have it."""
    for value in total.sums.values():
        value.mul_(1 + 1e-7 * torch.randn_like(value))
    return total


@pytest.mark.filterwarnings(AGAIN)
@pytest.mark.parametrize("when", ["before the loop", "later"])
@pytest.mark.parametrize("name", one_fast(CHANGES, 3))
def test_whatever_has_changed_no_noise_is_used_twice_and_all_is_paid(
    problem, words, monkeypatch, tmp_path, name, when
):
    """What hashes of data, program and machine did not see. Nothing is compared any more."""
    monkeypatch.setenv("TACIT_TEST_FACTOR", "1")
    ledger = tacit.Ledger(tmp_path / "a.ledger")
    options = {"loss_fn": smoothed, "momentum": 0.9, "steps": 40, "max_microbatch": 8}

    def made(place):
        data = Moved()
        place = Checkpoint(path=place, every=8)
        case = problem(model=Switched(), data=data, ledger=ledger, check=False, checkpoint=place,
                       **options)  # fmt: skip
        case.data, case.patch, case.stack = data, monkeypatch, contextlib.ExitStack()
        return case

    train(made(tmp_path / "last.pt"), stop=13)
    (tmp_path / "copy.pt").write_bytes((tmp_path / "last.pt").read_bytes())
    again = made(tmp_path / "last.pt")
    again.twin = made(tmp_path / "copy.pt") if name == "copied folder" else None
    assert again.private.steps_taken == 8
    if when == "later":
        train(again, stop=11)
    with again.stack, contextlib.ExitStack() as refused:
        if again.twin is not None:  # one plan does not pay for both
            refused.enter_context(pytest.raises(BudgetExceeded, match="no step left"))
        CHANGES[name](again)
        again.private.declare_public_change(name)  # or other weights would stop the run
        train(again)
    assert len(set(words)) == len(words)
    ticked_off = sum(one.taken for one in again.private._bill._reserved)
    assert len(ledger.history()) == 1
    assert len(words) <= ticked_off <= 48
    if again.twin is None:
        assert again.private.steps_taken == 40


@pytest.mark.parametrize(
    "change",
    [{"noise_multiplier": 2.0}, {"batch_size": 8}, {"steps": 5}, {"clip_norm": AdaptiveClip(1.0)},
     {"checkpoint": Checkpoint()}],
    ids=str,
)  # fmt: skip
def test_another_plan_cannot_take_over(problem, change):
    state = problem(steps=4).private.state_dict()
    other = problem(**({"steps": 4} | change)).private
    with pytest.raises(ValueError, match="of a run with another plan"):
        other.load_state_dict(state)


def test_what_was_drawn_before_a_state_was_loaded_is_not_released_after_it(problem):
    ledger = tacit.Ledger()
    case, state = problem(ledger=ledger), saved(problem(ledger=ledger))
    lot = next(iter(case.private))
    load(case, state)
    with pytest.raises(ValueError, match="another step or run"):
        case.private.step(lot)
    next(lots := iter(case.private))
    load(case, state)
    with pytest.raises(RuntimeError, match="needs a lot"):
        case.private.backward()
    with pytest.raises(RuntimeError, match="another loop"):
        next(lots)


def test_two_threads_or_a_call_inside_the_data_set_cannot_use_one_lot_twice(problem):
    private: Any = None
    lots, both = [], threading.Barrier(2)

    class Waiting(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            if lots and threading.current_thread() is not threading.main_thread():
                with contextlib.suppress(threading.BrokenBarrierError):
                    both.wait(0.5)
            elif lots:
                private.step(lots[0])
            return torch.ones(4), i % 2

    private = problem(data=Waiting(), check=False).private
    loop = iter(private)
    lots.append(next(loop))
    with pytest.raises(ProgramError, match="the data set raised RuntimeError"):
        private.step(lots[0])
    assert private.steps_taken == 0
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(private.step, lots[0]) for _ in range(2)]
    assert sum(one.exception() is None for one in found) == 1
    assert private.steps_taken == 1


# The file -----------------------------------------------------------------------------------------


def test_steps_wait_for_the_checkpoint_that_covers_them(problem, monkeypatch, tmp_path):
    """No step is ticked off while the checkpoint of its block is not on disk."""
    states, usual, ready = [], CheckpointWriter._write, threading.Event()

    def slow(self, state):
        assert ready.wait(60)
        usual(self, state)
        states.append(state["private"]["steps_taken"])

    monkeypatch.setattr(CheckpointWriter, "_write", slow)
    case = kept(problem, tmp_path, stop=0, steps=200)
    tick_off = case.private._bill._tick_off

    def watched():
        if not (case.private._bill._paid - case.private._bill.begin) % case.private._bill._block:
            ready.set()  # only now: the checkpoint is not written before it is waited for
        number = tick_off()
        assert number - states[-1] <= 2
        return number

    monkeypatch.setattr(case.private._bill, "_tick_off", watched)
    train(case)
    assert states == [*range(0, 200, 2), 200]


def test_what_keeps_a_checkpoint_from_the_disk_is_raised(problem, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    case = kept(problem, tmp_path, stop=3, steps=200)
    before = (tmp_path / "last.pt").read_bytes()
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        train(case)
    assert case.private.steps_taken <= 6
    assert (tmp_path / "last.pt").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir() if "last" in path.name} == {"last.pt"}
    assert (tmp_path / "last.pt").stat().st_mode & 0o077 == 0


def test_other_objects_are_saved_and_restored(problem, tmp_path):
    def made():
        case = problem(steps=200, check=False)
        schedule = torch.optim.lr_scheduler.StepLR(case.optimizer, 10)
        ema = tacit.training.EMA(case.model)
        place = Checkpoint(path=tmp_path / "last.pt", also={"schedule": schedule, "ema": ema})
        again = problem(model=case.model, optimizer=case.optimizer, steps=200, check=False,
                        ledger=tacit.Ledger(tmp_path / "a"), checkpoint=place)  # fmt: skip
        return again, schedule, ema

    case, schedule, ema = made()
    for lot in case.private:
        case.private.step(lot)
        schedule.step()
        ema.update()
        if case.private.steps_taken == 13:
            break
    case.private._bill.writer.wait()
    with pytest.warns(UserWarning, match="after step 12 with"):
        _, schedule, ema = made()
    assert schedule.last_epoch == ema.updates == 12
    with pytest.raises(ValueError, match="other names than 'model'"):
        Checkpoint(also={"model": ema})
    with pytest.raises(TypeError, match="checkpoint must be a file"):
        problem(checkpoint=3)


@pytest.mark.filterwarnings(AGAIN)
def test_steps_can_be_handed_to_processes_without_the_ledger(problem, words, tmp_path):
    ledger = tacit.Ledger(tmp_path / "a.ledger")
    kept(problem, tmp_path, stop=0, ledger=ledger).private.pay_whole()
    for stop in (40, 50, 80):  # the second of them has no checkpoint of its own to go on from
        case = None
        with contextlib.suppress(BudgetExceeded):
            case = crashed(problem, tmp_path, stop=stop, ledger=tacit.Ledger())
            assert len(case.private.ledger.history()) == 0
        assert (case is None) == (stop == 80)  # the reserve is used up
    again = kept(problem, tmp_path, ledger=ledger, lost_steps="pay")
    assert len(ledger.history()) == 2
    assert len(set(words)) == len(words) <= 306
    assert again.private.steps_taken == 300


@pytest.mark.filterwarnings(AGAIN)
def test_workers_with_one_seed_have_other_keys_also_after_a_payment(problem, words, tmp_path):
    ledger, options = tacit.Ledger(tmp_path / "a.ledger"), {"seed": 5, "lost_steps": "pay"}
    for _ in range(3):  # the third has as many steps left as the second: 3 are paid again
        kept(problem, tmp_path, stop=0, ledger=ledger, **options).private.pay_whole()
        crashed(problem, tmp_path, stop=1, ledger=tacit.Ledger(), **options)
    assert len(ledger.history()) == 2
    assert len(set(words)) == len(words) == 3


@pytest.mark.filterwarnings(AGAIN)
def test_whole_turns_are_lost_where_steps_were_handed_over(problem, tmp_path):
    """The second turn is begun before the file after its first step is on disk."""
    ledger, options = tacit.Ledger(tmp_path / "a.ledger"), {"noise": Banded(bands=16)}
    options |= {"steps": 496, "n": 512}
    kept(problem, tmp_path, stop=0, ledger=ledger, **options).private.pay_whole()
    crashed(problem, tmp_path, stop=17, ledger=tacit.Ledger(), **options)
    again = kept(problem, tmp_path, stop=0, ledger=ledger, lost_steps="pay", **options).private
    turns = 2 - (again.steps_taken - 496) // 16  # of both processes
    assert (again.steps_taken, turns) == (15, 33)
    assert [entry.event.equivalent.count for entry in ledger.history()] == [31, 2]  # type: ignore[attr-defined]


def test_steps_that_were_handed_over_are_used_once(problem, words, tmp_path):
    options = {"steps": 8, "noise": Banded(bands=8)}  # one turn is the whole run
    first = kept(problem, tmp_path, stop=0, **options).private
    first.pay_whole()
    with pytest.raises(ValueError, match="give checkpoint=FILE"):  # nothing would count them
        problem(checkpoint=Checkpoint(), **options).private.load_state_dict(first.state_dict())
    crashed(problem, tmp_path, stop=1, ledger=tacit.Ledger(), **options)
    with pytest.raises(BudgetExceeded, match="8 of the steps"):
        kept(problem, tmp_path, ledger=tacit.Ledger(), **options)
    assert len(words) == 1


# The hash of the records --------------------------------------------------------------------------


def test_the_fingerprint_is_salted_and_belongs_to_the_records(problem):
    first = problem()
    print_, ledger = first.private.data_fingerprint, first.private.ledger
    assert print_ != problem().private.data_fingerprint
    for is_same in (True, False):
        other = problem(ledger=ledger)
        other.x[3, 2] += 0.0 if is_same else 1.0
        load(other, saved(first))
        assert (other.private.data_fingerprint == print_) is is_same


def test_random_augmentation_in_the_data_set_is_repeated_for_the_fingerprint(problem):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            return torch.randn(4) + np.random.rand(), i % 2  # noqa: NPY002

    key = Key.fresh()
    found = [problem(data=Noisy(), check=False).private._lots.records.digest(key) for _ in "ab"]
    assert found[0] == found[1]
