"""A run epoch by epoch, the price of its first steps, and loops over what is finished."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from slow_cases import one_fast

import tacit
from tacit import sampling
from tacit.training import Banded, Stairs, Users

POISSON = {"batch_size": 10, "epochs": 3}  # 64 records: epochs end at steps 7, 13 and 20
KINDS = {
    "Poisson": (POISSON, [7, 13, 20]),
    "part of an epoch": ({"batch_size": 16, "steps": 10}, [4, 8, 10]),
    "all records": ({"batch_size": 64, "steps": 3}, [1, 2, 3]),
    "allocation": ({"steps": 6, "batch_size": sampling.RandomAllocation(3)}, [3, 6]),
    "fixed order": ({"steps": 7, "batch_size": sampling.FixedOrder(3)}, [3, 6, 7]),
    "banded": ({"steps": 8, "noise": Banded(bands=2)}, [4, 8]),
    "users": ({"batch_size": 4, "steps": 5, "users": np.arange(64) % 8}, [2, 4, 5]),
    "records of users": (
        {"steps": 6, "users": Users(ids=np.arange(64) % 32, sampled="records")},
        [4, 6],
    ),
}


def walk(private, most=None):
    """Take the steps of a run by its epochs; return the steps taken at the end of each."""
    ends = []
    for epoch in itertools.islice(private.epochs(), most):
        for lot in epoch:
            private.step(lot)
        ends.append(private.steps_taken)
    return ends


@pytest.mark.parametrize("kind", one_fast(KINDS, 2))
def test_every_sampler_has_epochs(problem, kind):
    options, ends = KINDS[kind]
    assert walk(problem(seed=0, check=False, **options).private) == ends


def test_epochs_take_the_same_steps_as_one_loop(problem):
    one, other = problem(seed=3, check=False, **POISSON), problem(seed=3, check=False, **POISSON)
    for lot in one.private:
        one.private.step(lot)
    walk(other.private)
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_resumed_run_goes_on_in_the_middle_of_an_epoch(problem, tmp_path):
    ledger = tacit.Ledger(tmp_path / "l")
    case = problem(seed=1, ledger=ledger, **POISSON)
    for lot in itertools.islice(case.private, 9):
        case.private.step(lot)
    state = case.private.state_dict()
    again = problem(seed=1, ledger=ledger, model=case.model, optimizer=case.optimizer, **POISSON)
    again.private.load_state_dict(state)
    first = next(again.private.epochs())
    assert (first.number, first.total, first.end, len(first)) == (2, 3, 13, 4)
    assert walk(again.private) == [13, 20]


def test_an_epoch_that_was_left_is_continued(problem):
    private, numbers = problem(steps=8, check=False).private, []
    for epoch in private.epochs():
        numbers.append(epoch.number)
        for lot in epoch:
            private.step(lot)
            if private.steps_taken == 2:
                break
    assert numbers == [1, 1, 2]


def test_an_epoch_without_a_step_is_refused(problem):
    with pytest.raises(RuntimeError, match="no step was taken in this epoch"):
        list(problem(check=False).private.epochs())


def test_epochs_serve_loops_that_call_backward(problem):
    case = problem(steps=6, max_microbatch=5, check=False)
    private, ends = case.private, []
    for epoch in private.epochs():
        for _ in epoch:
            private.backward()
            case.optimizer.step()
        ends.append(private.steps_taken)
    assert ends == [4, 6]


@pytest.mark.parametrize("again", [iter, lambda p: p.epochs()])
def test_a_second_pass_over_a_finished_run_says_so(problem, again):
    private = problem(check=False).private
    walk(private)
    with pytest.warns(RuntimeWarning, match="this run is over: all of its steps were taken"):
        assert list(again(private)) == []


def test_a_second_pass_over_a_finished_epoch_says_so(problem):
    private = problem(steps=8, check=False).private
    epoch = next(private.epochs())
    for lot in epoch:
        private.step(lot)
    with pytest.warns(RuntimeWarning, match="this epoch is over"):
        assert list(epoch) == []


def test_the_first_pass_warns_of_nothing(problem):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        walk(problem(check=False).private)


PRICED = {
    "Poisson": {"steps": 6},
    "noise schedule": {"steps": 6, "schedule": Stairs((1.0, 2.0))},
    "also": {"steps": 6, "also": tacit.events.Gaussian(3.0)},
    "shuffle": {"steps": 6, "batch_size": sampling.Shuffle(3, n_records=64, unamplified=True)},
    "banded": {"steps": 6, "noise": Banded(bands=2)},
    "fixed order": {"steps": 6, "batch_size": sampling.FixedOrder(3)},
}


@pytest.mark.parametrize("kind", one_fast(PRICED, 2))
def test_the_price_of_the_first_steps_is_that_of_a_run_which_ends_there(problem, kind):
    private = problem(seed=0, check=False, **PRICED[kind]).private
    shorter = problem(seed=0, check=False, **(PRICED[kind] | {"steps": 3})).private
    at = [private.epsilon_at(step, delta=1e-5) for step in range(7)]
    assert at == sorted(at)
    assert at[6] == private.epsilon(delta=1e-5)
    if kind != "noise schedule":  # whose stairs depend on the length of the run
        assert at[3] == shorter.epsilon(delta=1e-5)
    if kind not in ("also", "shuffle"):
        assert at[0] == 0.0 < at[1] < at[6]


def test_before_the_first_step_the_other_releases_are_priced(problem):
    private = problem(check=False, also=tacit.events.Gaussian(3.0)).private
    alone = tacit.epsilon(tacit.events.Gaussian(3.0), delta=1e-5)
    assert private.epsilon_at(0, delta=1e-5) == pytest.approx(alone, rel=1e-6)


def test_prices_of_steps_are_computed_once(problem, monkeypatch):
    private = problem(check=False).private
    first = private.epsilon_at(2, delta=1e-5)
    monkeypatch.setattr("tacit.accounting.epsilon", None)
    assert private.epsilon_at(2, delta=1e-5) == first


@pytest.mark.parametrize("step", [-1, 5, 2.5])
def test_a_step_outside_of_the_plan_has_no_price(problem, step):
    with pytest.raises(ValueError, match="whole number from 0 to 4"):
        problem(check=False).private.epsilon_at(step, delta=1e-5)
