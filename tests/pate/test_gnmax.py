"""Labels are paid for before they are released, and cost what the events say."""

import math

import numpy as np
import pytest

import tacit
from tacit import Budget, Ledger
from tacit.accounting import flatten
from tacit.errors import BudgetExceeded, LedgerError
from tacit.events import Gaussian, Laplace, Relation, Repeated, Sequence
from tacit.pate import (
    NO_ANSWER,
    ConfidentGNMax,
    GNMax,
    InteractiveGNMax,
    Journal,
    LaplaceMax,
)

CONFIDENT = ConfidentGNMax(threshold=80, sigma_threshold=10.0, sigma_answer=8.0)
AGGREGATORS = [LaplaceMax(5.0), GNMax(8.0), CONFIDENT]
VOTES = np.array([[100, 0, 0], [2, 98, 0], [0, 3, 97], [40, 30, 30]] * 3)


class Watched(Ledger):
    """A ledger that says when it was paid."""

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


def test_events_state_the_sensitivity_under_every_relation():
    assert GNMax(40.0).event(1) == Sequence((Repeated(Gaussian(40 / math.sqrt(2), 1.0), 1),))
    assert LaplaceMax(20.0).event(1) == Sequence((Repeated(Laplace(10.0, 1.0), 1),))
    check, answer = CONFIDENT.event(10, 4).parts
    assert check == Repeated(Gaussian(10.0, 1.0), 10)
    assert answer == Repeated(Gaussian(8 / math.sqrt(2), 1.0), 4)
    prices = {
        relation: tacit.epsilon(CONFIDENT.event(10, 4), delta=1e-5, relation=relation)
        for relation in Relation
    }
    assert len({round(price, 9) for price in prices.values()}) == 1


def test_one_laplace_answer_is_two_over_scale_dp():
    # Two coins: the log ratio of any outcome's probability between neighbors is below 2 / scale.
    rng = np.random.default_rng(0)
    scale, n = 4.0, 400_000
    noise = rng.laplace(0, scale, (n, 2))
    for here, there in (((6, 4), (5, 5)), ((5, 5), (4, 6))):
        p = np.mean((np.array(here) + noise).argmax(axis=1) == 0)
        q = np.mean((np.array(there) + noise).argmax(axis=1) == 0)
        assert abs(math.log(p / q)) <= 2 / scale + 0.02
        assert abs(math.log((1 - p) / (1 - q))) <= 2 / scale + 0.02


def test_published_data_independent_prices_are_beaten_by_exact_composition():
    # 286 of 640 answered on MNIST: 3.175 by RDP in 2018; one Gaussian of mu = 0.6212 costs 2.543.
    paper = ConfidentGNMax(threshold=200, sigma_threshold=150, sigma_answer=40)
    assert tacit.epsilon(paper.event(640, 286), delta=1e-5) == pytest.approx(2.543, abs=2e-3)
    assert tacit.epsilon(LaplaceMax(20.0).event(100), delta=1e-5) < 4.31


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


def test_refused_queries_cost_their_check_alone():
    ledger = Ledger()
    votes = [[34, 33, 33]] * 20
    aggregator = ConfidentGNMax(threshold=90, sigma_threshold=2.0, sigma_answer=8.0)
    labels = aggregator.answer(votes, ledger=ledger, rng=0)
    assert set(labels) == {NO_ANSWER}
    assert {entry.event for entry in ledger.history()} == {Gaussian(2.0, 1.0)}


def test_answers_follow_the_noise_law():
    # GNMax on (60, 50, 40) at sigma 20: the winner's law by quadrature, 5 standard errors each.
    from tacit.pate.exact import winner_log_probabilities

    votes = np.repeat([[60, 50, 40]], 20_000, axis=0)
    labels = GNMax(20.0).answer(votes, rng=0, block=20_000)
    p = np.exp(winner_log_probabilities([60, 50, 40], sigma=20.0))
    seen = np.bincount(labels, minlength=3) / len(labels)
    assert np.all(np.abs(seen - p) < 5 * np.sqrt(p * (1 - p) / len(labels)))


def test_a_class_without_votes_is_no_trouble():
    assert LaplaceMax(2.0).answer([[0, 50, 0, 0]], rng=0).tolist() == [1]
    assert GNMax(2.0).private_cost([[0, 50, 0, 0]], tight=True).private_epsilon(delta=1e-5) >= 0


def test_an_agreeing_student_spares_queries_and_answers_itself():
    aggregator = InteractiveGNMax(
        threshold=50, sigma_threshold=5.0, sigma_answer=8.0, confidence=0.9
    )
    votes = [[100, 0], [100, 0], [60, 40]]
    student = [[0.99, 0.01], [0.02, 0.98], [0.5, 0.5]]
    ledger = Ledger()
    labels = aggregator.answer(votes, student, ledger=ledger, rng=0)
    # Agreed: the student's label, free. Contradicted: the teachers'. Unsure both: none.
    assert labels.tolist() == [0, 0, NO_ANSWER]
    answers = [e for e in ledger.history() if e.event == Gaussian(8 / math.sqrt(2), 1.0)]
    assert len(answers) == 1
    assert aggregator.private_cost(votes, student, labels).values.min() > 0
    with pytest.raises(ValueError, match="student_probabilities"):
        aggregator.answer(votes, [[0.5, 0.5]])
    with pytest.raises(ValueError, match="student_probabilities"):
        aggregator.answer(votes, [[0.5, math.nan]] * 3)


def test_labels_and_votes_must_match_in_the_private_cost():
    with pytest.raises(ValueError, match="labels"):
        GNMax(4.0).private_cost(VOTES, [0, 1])
    with pytest.raises(ValueError, match="tight"):
        LaplaceMax(4.0).private_cost(VOTES, tight=True)


@pytest.mark.parametrize("make", [LaplaceMax, GNMax])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_noise_must_be_positive_and_finite(make, value):
    with pytest.raises(ValueError, match="positive"):
        make(value)


def test_a_journal_hands_answers_on_without_paying_again(tmp_path):
    ledger = Ledger(tmp_path / "l.ledger")
    path, settings = tmp_path / "answers.jsonl", {"n": len(VOTES)}
    first = GNMax(8.0).answer(
        VOTES, ledger=ledger, journal=Journal(path, settings=settings, ledger=ledger)
    )
    paid = len(list(ledger.history()))
    again = GNMax(8.0).answer(
        VOTES, ledger=ledger, journal=Journal(path, settings=settings, ledger=ledger)
    )
    assert again.tolist() == first.tolist()
    assert len(list(ledger.history())) == paid


def test_a_journal_of_other_settings_or_another_ledger_is_refused(tmp_path):
    ledger = Ledger()
    path = tmp_path / "answers.jsonl"
    journal = Journal(path, settings={"n": 1}, ledger=ledger)
    GNMax(8.0).answer(VOTES, ledger=ledger, journal=journal)
    with pytest.raises(LedgerError, match="other settings"):
        Journal(path, settings={"n": 2}, ledger=ledger)
    with pytest.raises(LedgerError, match="no payment"):
        Journal(path, settings={"n": 1}, ledger=Ledger())
    path.write_text("hello\n")
    with pytest.raises(LedgerError, match="journal"):
        Journal(path, settings={"n": 1}, ledger=ledger)


def test_a_line_torn_by_a_kill_is_dropped(tmp_path):
    ledger = Ledger()
    path = tmp_path / "answers.jsonl"
    GNMax(8.0).answer(VOTES[:3], ledger=ledger, journal=Journal(path, settings={}, ledger=ledger))
    with path.open("ab") as stream:
        stream.write(b'{"answers": [[3, ')
    journal = Journal(path, settings={}, ledger=ledger)
    assert len(journal) == 3
    journal.record([3], [1])
    assert len(Journal(path, settings={}, ledger=ledger)) == 4
