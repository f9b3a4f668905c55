"""Every teacher votes once; every aggregator pays before it releases and stays in its budget."""

import math
import traceback

import numpy as np
import pytest

from tacit import Budget, Ledger
from tacit.accounting import flatten
from tacit.errors import BudgetExceeded
from tacit.events import Repeated, Sequence
from tacit.pate import (
    NO_ANSWER,
    ConfidentGNMax,
    GNMax,
    LaplaceMax,
    TeacherError,
    count_votes,
)
from tacit.pate.teachers import ConstantTeacher


@pytest.mark.parametrize("is_group", [False, True])
def test_no_record_shows_in_the_traceback_of_a_teacher_that_cannot_predict(is_group):
    class Chatty(ConstantTeacher):
        def predict(self, X):
            raise KeyError("Smith")

    class Group:
        def predict_all(self, X):
            raise KeyError("Smith")

    with pytest.raises(TeacherError, match="failed to predict") as caught:
        count_votes(Group() if is_group else [Chatty(0)], np.zeros((3, 2)), 2)
    assert "Smith" not in "".join(traceback.format_exception(caught.value))


def test_a_teacher_that_cannot_predict_is_named():
    class Mute(ConstantTeacher):
        def predict(self, X):
            raise RuntimeError

    with pytest.raises(TeacherError, match="teacher 1 of 2"):
        count_votes([ConstantTeacher(0), Mute(0)], np.zeros((3, 2)), 2)


@pytest.mark.parametrize(
    ("predicted", "match"),
    [
        (np.array([0, 1]), "one class for each"),
        (np.array([0, 1, 7]), "from 0 to 2"),
        (np.array([0, -1, 1]), "from 0 to 2"),
        (np.array([0.0, 1.0, 2.0]), "whole numbers"),
        (np.array([[0], [1], [2]]), "one class for each"),
    ],
    ids=["short", "too high", "negative", "float", "2-d"],
)
def test_wrong_predictions_are_refused(predicted, match):
    class Odd(ConstantTeacher):
        def predict(self, X):
            return predicted

    with pytest.raises(TeacherError, match=match):
        count_votes([Odd(0)], np.zeros((3, 2)), 3)


def test_no_teachers_are_refused():
    with pytest.raises(ValueError, match="empty"):
        count_votes([], [[0.0]], 2)


# Every aggregator -----------------------------------------------------------------------------

CONFIDENT = ConfidentGNMax(threshold=80, sigma_threshold=10.0, sigma_answer=8.0)
AGGREGATORS = [LaplaceMax(5.0), GNMax(8.0), CONFIDENT]
VOTES = np.array([[100, 0, 0], [2, 98, 0], [0, 3, 97], [40, 30, 30]] * 3)


class Watched(Ledger):
    """A ledger that counts its payments."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.paid = 0

    def spend(self, event, **kwargs):
        entry = super().spend(event, **kwargs)
        self.paid += event.count if isinstance(event, Repeated) else 1
        return entry


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=repr)
def test_clear_votes_get_their_winner(aggregator):
    labels = aggregator.answer(VOTES[:3], rng=0)
    assert labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=repr)
def test_what_the_ledger_holds_is_the_event_of_the_run(aggregator):
    ledger = Ledger()
    labels = aggregator.answer(VOTES, ledger=ledger, rng=0)
    whole = aggregator.event(len(VOTES), int(np.sum(labels != NO_ANSWER)))
    spent = Sequence(tuple(entry.event for entry in ledger.history()))
    assert flatten(spent) == flatten(whole)


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=repr)
@pytest.mark.parametrize("block", [1, 5, 100])
def test_payment_comes_before_every_draw_of_noise(aggregator, block):
    ledger = Watched()

    class Wary(np.random.Generator):
        drawn = 0

        def _count(self, size):
            self.drawn += 1 if np.ndim(size) == 0 and size is None else int(np.shape(size)[0] > 0)
            assert ledger.paid > 0

        def normal(self, *args, **kwargs):
            self._count(args[2] if len(args) > 2 else kwargs.get("size"))
            return super().normal(*args, **kwargs)

        def laplace(self, *args, **kwargs):
            self._count(args[2] if len(args) > 2 else kwargs.get("size"))
            return super().laplace(*args, **kwargs)

    aggregator.answer(VOTES, ledger=ledger, rng=Wary(np.random.PCG64(0)), block=block)
    assert ledger.paid >= len(VOTES)


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=repr)
def test_answers_stop_before_the_budget_is_passed(aggregator):
    budget = Budget(epsilon=3.0, delta=1e-5)
    ledger = Ledger(budget=budget)
    many = np.repeat(VOTES[:3], 200, axis=0)
    labels = aggregator.answer(many, ledger=ledger, rng=0)
    answered = labels != NO_ANSWER
    assert 0 < answered.sum() < len(many)
    assert not answered[np.flatnonzero(answered)[-1] + 1 :].any()
    assert ledger.epsilon(delta=1e-5) <= 3.0


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=repr)
def test_a_budget_too_small_for_one_query_raises_and_spends_nothing(aggregator):
    ledger = Ledger(budget=Budget(epsilon=1e-4, delta=1e-9))
    with pytest.raises(BudgetExceeded):
        aggregator.answer(VOTES, ledger=ledger, rng=0)
    assert list(ledger.history()) == []


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=repr)
@pytest.mark.parametrize("block", [1, 4])
def test_no_more_answers_are_given_than_allowed(aggregator, block):
    ledger = Ledger()
    labels = aggregator.answer(VOTES, ledger=ledger, rng=0, block=block, max_answers=5)
    assert np.sum(labels != NO_ANSWER) == 5
    most = flatten(aggregator.event(len(VOTES), 5))
    spent = flatten(Sequence(tuple(entry.event for entry in ledger.history())))
    assert all(count <= most[event] for event, count in spent.items())


def test_strict_raises_where_the_budget_ends():
    ledger = Ledger(budget=Budget(epsilon=1.0, delta=1e-5))
    with pytest.raises(BudgetExceeded):
        GNMax(8.0).answer(VOTES, ledger=ledger, rng=0, strict=True)
    assert ledger.epsilon(delta=1e-5) <= 1.0


@pytest.mark.parametrize("make", [LaplaceMax, GNMax])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_noise_must_be_positive_and_finite(make, value):
    with pytest.raises(ValueError, match="positive"):
        make(value)
