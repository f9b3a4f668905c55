"""Copies of one event, paid one by one; three epsilons; and why a running curve is no filter."""

import math
from pathlib import Path

import pytest

from tacit import Budget, Ledger, accounting
from tacit.errors import BudgetExceeded
from tacit.events import (
    ApproximateDP,
    Event,
    Gaussian,
    PoissonSampled,
    PureDP,
    Relation,
    Repeated,
    Sequence,
)
from tacit.ledger.entry_cost import price
from tacit.ledger.filter import Filter, copies_fit, fit, gaussian_limit, limits_of

STEP = PoissonSampled(0.01, Gaussian(1.0))
ADD = Relation.ADD_REMOVE


def planned(event: Event, budget: Budget) -> int:
    """How many copies of `event` fit when their number is fixed in advance."""
    return accounting.calibrate_count(
        lambda n: Repeated(event, n), epsilon=budget.epsilon, delta=budget.delta
    )


def paid_singly(event: Event, budget: Budget) -> int:
    """How many times `event` can be paid one by one."""
    with Ledger(budget=budget) as ledger:
        for count in range(10_000):
            try:
                ledger.spend(event)
            except BudgetExceeded:
                return count
    raise AssertionError("the budget never ends")


@pytest.mark.parametrize(("epsilon", "least"), [(1.0, 244), (2.0, 1170)])
def test_sampled_steps_paid_singly_come_close_to_a_plan(epsilon: float, least: int) -> None:
    budget = Budget(epsilon, 1e-5)
    chosen = fit(budget, STEP, ADD)
    assert chosen.copied_event == STEP
    assert chosen.copies >= least
    assert planned(STEP, budget) <= 1.1 * chosen.copies
    assert copies_fit(chosen, budget, ADD)


def test_a_budget_without_copies_has_none_left() -> None:
    with Ledger(budget=Budget(1.0, 1e-5)) as ledger:
        ledger.spend(PureDP(0.1))
        left = ledger.remaining()
    assert (left.copies, left.copied_event) == (0, None)
    with Ledger() as ledger:
        assert ledger.remaining().copies == 0


def test_an_order_without_a_share_of_delta_admits_nothing() -> None:
    assert limits_of(Filter((2.0,), (0.0,), 0.5, 0.1), Budget(1.0, 1e-5)).renyi == (-1.0,)


def test_the_ledger_admits_as_many_copies_as_its_filter() -> None:
    budget = Budget(1.0, 1e-5)
    assert paid_singly(STEP, budget) == fit(budget, STEP, ADD).copies == 244
    assert planned(STEP, budget) == 254


@pytest.mark.slow
@pytest.mark.parametrize(
    "event",
    [
        PoissonSampled(0.001, Gaussian(0.7)),
        PoissonSampled(0.1, Gaussian(4.0)),
        PoissonSampled(0.02, Gaussian(1.3)),
        PoissonSampled(0.5, Gaussian(20.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("budget", [Budget(1.0, 1e-5), Budget(8.0, 1e-6)], ids=str)
def test_other_sampled_steps_paid_singly_come_close_to_a_plan(event: Event, budget: Budget) -> None:
    assert planned(event, budget) <= 1.1 * fit(budget, event, ADD).copies


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 8.0])
def test_gaussians_are_admitted_up_to_nearly_their_exact_price(epsilon: float) -> None:
    budget = Budget(epsilon, 1e-5)
    exact = gaussian_limit(epsilon, 1e-5)
    event = Gaussian(math.sqrt(400 / exact))  # 400 of them use up the budget exactly
    count = paid_singly(event, budget)
    spent = accounting.epsilon(Repeated(event, count), delta=1e-5)
    assert epsilon <= 1.05 * spent


def test_weaker_steps_count_as_copies_and_others_do_not() -> None:
    def copies(event: Event, relation: Relation = ADD) -> float:
        return price(event, orders=(), relation=relation, copy=STEP).copies

    assert copies(STEP) == 1
    assert copies(Repeated(STEP, 7)) == 7
    weaker = PoissonSampled(0.005, Gaussian(1.5))
    assert copies(Sequence((STEP, weaker))) == 2
    assert copies(weaker, Relation.REPLACE_ONE) == math.inf
    for other in (
        PoissonSampled(0.02, Gaussian(1.0)),
        PoissonSampled(0.01, Gaussian(0.9)),
        Gaussian(5.0),
        PureDP(1e-9),
        ApproximateDP(0.0, 1e-9),
    ):
        assert copies(other) == math.inf


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.005, 0.01])
@pytest.mark.parametrize("noise", [1.0, 1.4, 3.0])
def test_a_weaker_step_never_costs_more_than_the_copy_it_counts_as(
    rate: float, noise: float
) -> None:
    weaker = Repeated(PoissonSampled(rate, Gaussian(noise)), 30)
    for epsilon in (0.01, 0.1, 0.5):
        copy = accounting.delta(Repeated(STEP, 30), epsilon=epsilon)
        assert accounting.delta(weaker, epsilon=epsilon) <= copy * (1 + 1e-6)


def test_after_other_entries_the_budget_still_holds() -> None:
    step = Repeated(PoissonSampled(0.01, Gaussian(4.0)), 500)
    with Ledger(budget=Budget(1.0, 1e-5)) as ledger:
        ledger.spend(step)
        assert ledger.remaining().copies == fit(Budget(1.0, 1e-5), step, ADD).copies - 500
        ledger.spend(Gaussian(60.0))  # no copy: the other measures have to admit all of it
        assert ledger.remaining().copies == 0
        count = 0
        while True:
            try:
                ledger.spend(step)
            except BudgetExceeded:
                break
            count += 1
            assert count < 20
        assert ledger.verify().entries == 2 + count
        assert ledger.epsilons(delta=1e-5).fixed_in_advance <= 1.0


def test_a_ledger_of_copies_says_how_many_are_left() -> None:
    with Ledger(budget=Budget(1.0, 1e-5)) as ledger:
        for _ in range(10):
            ledger.spend(STEP)
        assert "a run like the first (234 releases" in str(ledger.remaining())
        with pytest.raises(BudgetExceeded, match="234 releases"):
            ledger.spend(Gaussian(60.0))


# A running total of curves is no filter.

EPSILON, DELTA, FIRST = 1.0, 1e-3, 0.5


def excess(first_loss: float, probability: float, second: float) -> float:
    """Sum of max(0, P - e^epsilon Q) over the answers of a second randomized response."""
    found = 0.0
    for loss in (second, -second):
        p = probability * math.exp(loss) / (1 + math.exp(loss))
        found += max(0.0, p * (1 - math.exp(EPSILON - first_loss - loss)))
    return found


def second_epsilon() -> float:
    """The pure epsilon that uses up DELTA after the likelier answer of the first round."""
    likely = math.exp(FIRST) / (1 + math.exp(FIRST))
    low, high = EPSILON - FIRST, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        unlikely = excess(-FIRST, 1 - likely, middle)
        low, high = (
            (middle, high) if excess(FIRST, likely, middle) + unlikely <= DELTA else (low, middle)
        )
    return low * (1 - 1e-6)


def test_a_running_total_of_curves_is_not_a_valid_filter_and_is_not_used() -> None:
    likely = math.exp(FIRST) / (1 + math.exp(FIRST))
    after_likely = PureDP(second_epsilon(), replace_factor=1.0)
    after_unlikely = ApproximateDP(0.0, DELTA)
    first = PureDP(FIRST, replace_factor=1.0)
    # Each path alone is within the budget, as a running total would check.
    for second in (after_likely, after_unlikely):
        total = accounting.epsilon(Sequence((first, second)), delta=DELTA)
        assert total <= EPSILON * (1 + 1e-4)
    # Chosen by the first answer, they are not: the probabilities, added up by hand.
    true_delta = excess(FIRST, likely, after_likely.epsilon) + DELTA * (1 - likely)
    assert true_delta > 1.3 * DELTA
    refused = 0
    for second in (after_likely, after_unlikely):
        with Ledger(budget=Budget(EPSILON, DELTA)) as ledger:
            ledger.spend(first)
            try:
                ledger.spend(second)
            except BudgetExceeded:
                refused += 1
    assert refused >= 1


# Three epsilons.


def test_three_epsilons_agree_for_one_entry_and_are_ordered_for_many() -> None:
    budget = Budget(3.0, 1e-5)
    with Ledger(budget=budget) as ledger:
        assert ledger.epsilons(delta=1e-5) == (3.0, 0.0, 0.0)
        ledger.spend(Gaussian(10.0))
        one = ledger.epsilons(delta=1e-5)
        assert one.odometer == one.fixed_in_advance == ledger.epsilon(delta=1e-5)
        for _ in range(5):
            ledger.spend(Gaussian(10.0))
        many = ledger.epsilons(delta=1e-5)
        exact = accounting.epsilon(Repeated(Gaussian(10.0), 6), delta=1e-5)
        assert many.fixed_in_advance == pytest.approx(exact, rel=1e-9)
        assert many.budget == 3.0
        assert many.fixed_in_advance <= many.odometer
        assert ledger.epsilons(delta=1e-7).budget is None  # promised at 1e-5 only
    with Ledger() as free:
        free.spend(PureDP(0.1))
        assert free.epsilons(delta=1e-5).budget is None


def test_a_used_up_budget_is_nearly_the_exact_price() -> None:
    budget = Budget(1.0, 1e-5)
    with Ledger(budget=budget) as ledger:
        for _ in range(paid_singly(Gaussian(40.0), budget)):
            ledger.spend(Gaussian(40.0))
        found = ledger.epsilons(delta=1e-5)
    assert found.budget is not None
    assert found.fixed_in_advance <= found.budget <= 1.05 * found.fixed_in_advance


def test_epsilons_up_to_a_row_leave_out_later_ones(tmp_path: Path) -> None:
    with Ledger(tmp_path / "a.ledger", Budget(3.0, 1e-5)) as ledger:
        head = ledger.spend(Gaussian(10.0)).hash
        before = ledger.epsilons(delta=1e-5)
        ledger.spend(Gaussian(5.0), partition="east")
        assert ledger.epsilons(delta=1e-5, head=head) == before
        assert ledger.epsilons(delta=1e-5).odometer > before.odometer
        assert [entry.id for entry in ledger.history(head=head)] == [1]


# Data sets that grow: one budget for each cohort.


def test_a_new_cohort_starts_with_a_full_budget(tmp_path: Path) -> None:
    with Ledger(tmp_path / "a.ledger", Budget(1.0)) as ledger:
        ledger.spend(PureDP(0.4), partition="2025")
        ledger.spend(PureDP(0.6), partition=("2025", "2026"))
        with pytest.raises(BudgetExceeded):
            ledger.spend(PureDP(0.1), partition=("2025", "2027"))
        assert ledger.remaining(partition="2026").epsilon == pytest.approx(0.4)
        entry = ledger.spend(PureDP(0.4), partition=["2027", "2026"])
        assert entry.partitions == ("2026", "2027")
        assert ledger.remaining(partition="2027").epsilon == pytest.approx(0.6)
        with pytest.raises(BudgetExceeded):
            ledger.spend(PureDP(0.1))  # reads all cohorts
        ledger.verify()
    with Ledger(tmp_path / "a.ledger") as ledger:
        assert ledger.epsilon(delta=0.0) == 1.0
        with pytest.raises(BudgetExceeded):
            ledger.spend(PureDP(0.1), partition="2026")
        ledger.spend(PureDP(0.6), partition="2027")
        ledger.verify()


@pytest.mark.parametrize("partition", [(), ("",), ("a", ""), ("a\x1fb",), "a\x1fb", "", (1,)])
def test_names_of_cohorts_are_checked(partition: object) -> None:
    with Ledger() as ledger, pytest.raises(ValueError, match="partition must be"):
        ledger.spend(PureDP(0.1), partition=partition)  # type: ignore[arg-type]  # on purpose
