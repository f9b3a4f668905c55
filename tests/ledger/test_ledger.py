"""The ledger as its users see it."""

import copy
import json
import math
import pickle
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tacit
from tacit import Budget, Ledger, Relation, accounting
from tacit.accounting import GDP, RDP
from tacit.errors import BudgetExceeded, LedgerError
from tacit.events import (
    ApproximateDP,
    Event,
    Gaussian,
    Laplace,
    NonPrivate,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    Repeated,
    Sequence,
)
from tacit.ledger.filter import gaussian_limit

SGD = Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000)


def fill(ledger: Ledger, event: Event, *, at_most: int = 100_000) -> int:
    """How often `event` can be spent."""
    for count in range(at_most):
        try:
            ledger.spend(event)
        except BudgetExceeded:
            return count
    return at_most


@pytest.fixture(params=["memory", "file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "a.ledger"


def test_entries_say_what_was_paid(path: Path | None) -> None:
    ledger = Ledger(path, Budget(1.0, 1e-5))
    entry = ledger.spend(Laplace(10.0), note="mean", partition="east")
    assert (entry.id, entry.kind, entry.note, entry.partition) == (1, "spend", "mean", "east")
    assert entry.event == Laplace(10.0)
    assert ledger.history() == [entry]
    assert str(entry) == "spend 1: Laplace noise, multiplier 10 on east (mean)"
    assert entry.time.endswith("+00:00")


def test_a_pure_budget_is_spent_to_the_last_digit(path: Path | None) -> None:
    ledger = Ledger(path, Budget(1.0))
    assert fill(ledger, PureDP(0.1)) == 10
    assert ledger.epsilon(delta=0) == 1.0
    assert ledger.remaining().epsilon == 0
    assert ledger.remaining().fraction == 0
    with pytest.raises(BudgetExceeded, match=r"Left: nothing"):
        ledger.spend(PureDP(1e-9))


def test_a_refusal_records_nothing_and_says_what_is_left() -> None:
    ledger = Ledger(budget=Budget(1.0, 1e-5))
    ledger.spend(Gaussian(10.0))
    with pytest.raises(
        BudgetExceeded, match=r"nothing was recorded.*noise multiplier \d"
    ) as caught:
        ledger.spend(Gaussian(1.0))
    assert len(ledger.history()) == 1
    least = ledger.remaining().noise_multiplier
    assert f"{least:.4g}" in str(caught.value)
    ledger.spend(Gaussian(least))
    with pytest.raises(BudgetExceeded):
        ledger.spend(Gaussian(100.0))


def test_a_hundred_adaptive_gaussians_nearly_reach_what_knowing_all_would() -> None:
    budget = Budget(1.0, 1e-5)
    event = Gaussian(math.sqrt(100 / gaussian_limit(1.0, 1e-5)))
    assert GDP().epsilon(Repeated(event, 100), delta=1e-5) == pytest.approx(1.0)
    ledger = Ledger(budget=budget)
    assert 94 <= fill(ledger, event) <= 100
    assert GDP().epsilon(ledger.event, delta=budget.delta) <= budget.epsilon


def test_a_first_plan_is_priced_whole() -> None:
    tight = accounting.epsilon(SGD, delta=1e-5)
    ledger = Ledger(budget=Budget(tight, 1e-5))
    ledger.plan(SGD)
    assert ledger.epsilon(delta=1e-5) == tight
    with pytest.raises(BudgetExceeded):
        ledger.spend(PureDP(1e-6))
    with pytest.raises(BudgetExceeded):
        Ledger(budget=Budget(0.999 * tight, 1e-5)).plan(SGD)
    assert ledger.verify().entries == 1


def test_the_same_plan_does_not_fit_after_anything_else() -> None:
    ledger = Ledger(budget=Budget(accounting.epsilon(SGD, delta=1e-5) * 1.001, 1e-5))
    ledger.spend(PureDP(1e-9))
    with pytest.raises(BudgetExceeded):
        ledger.plan(SGD)


def test_a_plan_leaves_room_for_spends_that_depend_on_it() -> None:
    ledger = Ledger(budget=Budget(2.0, 1e-5))
    ledger.plan(SGD)
    assert fill(ledger, Gaussian(20.0)) > 3
    assert ledger.epsilon(delta=1e-5) <= 2.0
    assert ledger.epsilon(delta=1e-5, accountant=RDP()) <= ledger.epsilon(delta=1e-5)
    ledger.verify()


def test_epsilon_is_zero_before_and_never_above_the_budget() -> None:
    ledger = Ledger(budget=Budget(1.0, 1e-5))
    assert ledger.epsilon(delta=1e-5) == 0
    fill(ledger, Gaussian(15.0))
    assert 0.9 < ledger.epsilon(delta=1e-5) <= 1.0
    assert ledger.epsilon(delta=1e-9) > 1.0
    assert ledger.epsilon(delta=0) == math.inf


def test_epsilon_of_the_whole_event_is_offered_for_plans_known_in_advance() -> None:
    ledger = Ledger(budget=Budget(3.0, 1e-5))
    for _ in range(4):
        ledger.spend(Gaussian(5.0))
    ledger.spend(Laplace(20.0))
    assert ledger.event == Sequence((Repeated(Gaussian(5.0), 4), Laplace(20.0)))
    fixed = ledger.epsilon(delta=1e-5, accountant=RDP())
    assert fixed == RDP().epsilon(ledger.event, delta=1e-5)
    assert fixed < ledger.epsilon(delta=1e-5)


def test_without_a_budget_everything_is_recorded() -> None:
    ledger = Ledger()
    ledger.spend(Gaussian(0.5))
    assert ledger.epsilon(delta=1e-5) == accounting.epsilon(Gaussian(0.5), delta=1e-5)
    ledger.spend(NonPrivate())
    assert ledger.epsilon(delta=1e-5) == math.inf
    assert ledger.remaining().epsilon == math.inf
    assert ledger.verify().entries == 2


def test_a_release_without_noise_is_refused() -> None:
    with pytest.raises(BudgetExceeded):
        Ledger(budget=Budget(100.0, 0.1)).spend(NonPrivate())


def test_pure_budgets_refuse_what_has_no_pure_price() -> None:
    ledger = Ledger(budget=Budget(1.0))
    with pytest.raises(BudgetExceeded):
        ledger.spend(Gaussian(1e6))
    with pytest.raises(BudgetExceeded):
        ledger.spend(ApproximateDP(0.1, 1e-9))
    ledger.spend(PureDP(0.1))


def test_epsilons_and_deltas_of_approximate_entries_add() -> None:
    ledger = Ledger(budget=Budget(1.0, 1e-5))
    assert fill(ledger, ApproximateDP(0.5, 5e-6)) == 2
    ledger = Ledger(budget=Budget(1.0, 1e-5))
    ledger.spend(ApproximateDP(0.5, 5e-6))
    with pytest.raises(BudgetExceeded, match="spend ApproximateDP"):
        ledger.spend(Gaussian(50.0))
    ledger = Ledger(budget=Budget(1.0, 1e-5))
    ledger.spend(ApproximateDP(0.1, 1e-7))
    ledger.spend(Gaussian(50.0))


def test_disjoint_partitions_cost_as_much_as_the_dearest() -> None:
    ledger = Ledger(budget=Budget(1.0))
    ledger.spend(PureDP(0.25))
    for label in ("north", "south", "east"):
        ledger.spend(PureDP(0.5), partition=label)
    ledger.spend(PureDP(0.25), partition="north")
    assert ledger.epsilon(delta=0) == 1.0
    with pytest.raises(BudgetExceeded):
        ledger.spend(PureDP(0.01), partition="north")
    with pytest.raises(BudgetExceeded):
        ledger.spend(PureDP(0.01))  # concerns the north as well
    ledger.spend(PureDP(0.25), partition="south")
    ledger.spend(PureDP(0.75), partition="west")
    with pytest.raises(BudgetExceeded):
        ledger.spend(PureDP(0.76), partition="up")
    left = {label: ledger.remaining(partition=label).epsilon for label in ("east", "up", None)}
    assert left == {"east": 0.25, "up": 0.75, None: 0.0}
    assert ledger.verify().entries == 7


def test_the_first_entry_of_each_partition_is_priced_whole() -> None:
    tight = accounting.epsilon(SGD, delta=1e-5)
    ledger = Ledger(budget=Budget(tight, 1e-5))
    ledger.plan(SGD, partition="a")
    ledger.plan(SGD, partition="b")
    assert ledger.epsilon(delta=1e-5) == tight
    with pytest.raises(BudgetExceeded):
        ledger.plan(SGD)
    with pytest.raises(BudgetExceeded):
        ledger.spend(PureDP(1e-6), partition="a")
    assert ledger.verify().entries == 2


def test_the_relation_sets_the_price() -> None:
    replace = Ledger(budget=Budget(1.0), relation=Relation.REPLACE_ONE)
    assert fill(replace, PureDP(0.1)) == 5
    with pytest.raises(ValueError, match="swap"):
        Ledger(relation="swap")  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps])
def test_ledgers_and_plans_cannot_be_copied(copying: object) -> None:
    ledger = Ledger(budget=Budget(1.0))
    plan = ledger.plan(PureDP(0.1))
    for value in (ledger, plan):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copying(value)  # type: ignore[operator]  # each parameter is callable


def test_scikit_learn_clones_an_estimator_around_its_ledger() -> None:
    base = pytest.importorskip("sklearn.base")
    ledger = Ledger(budget=Budget(1.0))
    assert base.clone(ledger) is ledger


def test_threads_share_one_budget(path: Path | None) -> None:
    ledger = Ledger(path, Budget(0.1))
    granted: list[int] = []

    def work() -> None:
        granted.append(fill(ledger, PureDP(0.001), at_most=40))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(granted) == 100
    assert ledger.verify().entries == 100


@given(
    st.lists(
        st.tuples(
            st.sampled_from([Gaussian(20.0), Laplace(30.0), ApproximateDP(0.01, 1e-7), SGD]),
            st.sampled_from([None, "a", "b"]),
            st.booleans(),
        ),
        max_size=12,
    )
)
@settings(max_examples=8, deadline=None)
def test_whatever_is_asked_the_books_balance(asked: list[tuple[Event, str | None, bool]]) -> None:
    ledger, paid = Ledger(budget=Budget(1.0, 1e-5)), []
    for event, partition, reserve in asked:
        try:
            if reserve:
                paid.append(ledger.plan(event, partition=partition, claim=7).entry)
            else:
                paid.append(ledger.spend(event, partition=partition))
        except BudgetExceeded:
            continue
    assert ledger.history() == paid
    assert ledger.verify().entries == len(paid)
    assert 0 <= ledger.epsilon(delta=1e-5) <= 1.0
    assert ledger.epsilon(delta=1e-5, accountant=accounting.PLD()) <= 1.0


def test_export_is_json_with_everything(path: Path | None) -> None:
    ledger = Ledger(path, Budget(1.0, 1e-5), unit="patient")
    ledger.spend(Gaussian(10.0), note="först")
    with ledger.plan(Repeated(Gaussian(50.0), 3)) as plan:
        plan.step()
    data = json.loads(ledger.export())
    assert data["ledger"]["epsilon"] == 1.0
    assert data["ledger"]["unit"] == "patient"
    assert [entry["note"] for entry in data["entries"]] == ["först", ""]
    assert data["steps_taken"] == {"2": 1}
    assert data["head"] == ledger.verify().head
    assert tacit.events.from_dict(data["entries"][0]["event"]) == Gaussian(10.0)


@pytest.mark.parametrize("claim", [1, 4, 100])
def test_a_plan_hands_out_each_step_once(claim: int, path: Path | None) -> None:
    ledger = Ledger(path, Budget(1.0, 1e-5))
    plan = ledger.plan(Repeated(Gaussian(50.0), 10), claim=claim)
    assert [plan.step() for _ in range(10)] == list(range(1, 11))
    with pytest.raises(BudgetExceeded, match="no step left"):
        plan.step()
    assert plan.taken == 10
    assert len(ledger.history()) == 1
    ledger.verify()


def test_a_plan_left_in_order_goes_on_where_it_stopped() -> None:
    ledger = Ledger(budget=Budget(1.0, 1e-5))
    with ledger.plan(Repeated(Gaussian(50.0), 10), claim=4) as plan:
        assert [plan.step(), plan.step()] == [1, 2]
    assert plan.taken == 2
    again = ledger.resume(plan.id, claim=4)
    assert again.event == plan.event
    assert [again.step() for _ in range(8)] == list(range(3, 11))
    ledger.verify()


def test_steps_of_a_crashed_block_are_lost_not_repeated() -> None:
    ledger = Ledger(budget=Budget(1.0, 1e-5))
    crashed = ledger.plan(Repeated(Gaussian(50.0), 10), claim=4)
    crashed.step()
    again = ledger.resume(crashed.id)
    assert [again.step() for _ in range(6)] == list(range(5, 11))
    crashed.close()  # too late: others have taken later steps
    with pytest.raises(BudgetExceeded):
        again.step()
    ledger.verify()


@pytest.mark.parametrize(
    ("event", "steps"),
    [
        (Gaussian(9.0), 1),
        (Repeated(Gaussian(9.0), 7), 7),
        (Sequence((Repeated(Gaussian(9.0), 7), Laplace(50.0))), 8),
        (Repeated(RandomAllocation(5, Gaussian(9.0)), 2), 10),
    ],
    ids=str,
)
def test_a_plan_has_as_many_steps_as_its_event(event: Event, steps: int) -> None:
    assert Ledger().plan(event).steps == steps
    assert Ledger().plan(event, steps=3).steps == 3


def test_wrong_arguments_are_named() -> None:
    ledger = Ledger(budget=Budget(1.0))
    with pytest.raises(TypeError, match="event must be an Event"):
        ledger.spend("noise")  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(TypeError, match="note must be a string"):
        ledger.spend(PureDP(0.1), note=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="partition must be"):
        ledger.spend(PureDP(0.1), partition="")
    with pytest.raises(TypeError, match="budget must be a Budget"):
        Ledger(budget=1.0)  # type: ignore[arg-type]
    with pytest.raises(LedgerError, match="no plan 1"):
        ledger.resume(1)
    with pytest.raises(ValueError, match="claim"):
        ledger.plan(PureDP(0.1), claim=0)
    assert ledger.history() == []
    for wrong in ({"epsilon": -1.0}, {"epsilon": math.nan}, {"epsilon": 1.0, "delta": 1.0}):
        with pytest.raises(ValueError, match="must be"):
            Budget(**wrong)


def test_a_closed_ledger_says_so() -> None:
    with Ledger(budget=Budget(1.0)) as ledger:
        ledger.spend(PureDP(0.1))
    with pytest.raises(LedgerError, match="closed"):
        ledger.spend(PureDP(0.1))


def test_what_is_left_of_a_huge_budget_can_be_said():
    left = Ledger(budget=Budget(epsilon=1e4, delta=1e-5)).remaining()
    assert left.epsilon == pytest.approx(1e4)


def test_a_plan_hands_out_no_more_steps_than_its_event_has():
    ledger = Ledger()
    with pytest.raises(ValueError, match="at most the 3 releases"):
        ledger.plan(Repeated(Gaussian(20.0), 3), steps=4)
    assert ledger.plan(Repeated(Gaussian(20.0), 3), steps=2).steps == 2
