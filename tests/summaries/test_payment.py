"""Contracts of every release: its price, its payment, its sensitivity, its silence."""

import math
import sys

import numpy as np
import pytest
from release_calls import CALLS, draw_table, odd_record, with_record
from slow_cases import one_fast

import tacit
from tacit import Budget, Ledger, summaries
from tacit.errors import BudgetExceeded
from tacit.events import Relation
from tacit.mechanisms import ExponentialMechanism
from tacit.summaries import noisy_scores, payment
from tacit.summaries.payment import Block, Terms, cell_counts, fractional_sums

TABLE = draw_table(np.random.default_rng(0), 300)
RELATIONS = [Relation.ADD_REMOVE, Relation.REPLACE_ONE]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("call", one_fast(CALLS, 8))
def test_the_event_costs_what_was_asked(call, delta, relation):
    event = CALLS[call](TABLE, epsilon=1.0, delta=delta, relation=relation, rng=1).event
    ledger = Ledger(budget=Budget(1.0, delta), relation=relation)
    ledger.spend(event)
    if delta == 0:
        assert ledger.epsilon(delta=0) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("call", CALLS)
def test_a_release_is_paid_first_or_not_made(call, monkeypatch):
    ledger = Ledger(budget=Budget(1.0))
    order = []
    original = payment.BlockNoise.release
    spend = ledger.spend
    monkeypatch.setattr(ledger, "spend", lambda *a, **k: (order.append("pay"), spend(*a, **k))[1])
    monkeypatch.setattr(
        payment.BlockNoise, "release", lambda *a: (order.append("release"), original(*a))[1]
    )
    found = CALLS[call](TABLE, epsilon=0.9, ledger=ledger, rng=1)
    assert order[0] == "pay"
    assert ledger.event == found.event or call == "describe"  # which pays in two parts
    assert ledger.epsilon(delta=0) == pytest.approx(0.9, rel=1e-6)
    entries = len(ledger.history())
    order.clear()
    with pytest.raises(BudgetExceeded):
        CALLS[call](TABLE, epsilon=5.0, ledger=ledger, rng=1)
    assert "release" not in order
    assert len(ledger.history()) == entries


def recorded_sums(call, table, monkeypatch, **terms):
    """Return the private sums that a call hands to its mechanisms, each block by itself."""
    seen = []
    original = payment.BlockNoise.release

    def release(self, sums, rng):
        seen.append((self, np.asarray(sums, float)))
        return original(self, sums, rng)

    with monkeypatch.context() as patch:
        patch.setattr(payment.BlockNoise, "release", release)
        # These depend on what was released before, so they differ between neighbors.
        guess = noisy_scores._Guess(0.4, 0.7, 1.0)
        patch.setattr(noisy_scores, "_r2_guess", lambda *a, **k: guess)
        patch.setattr(
            sys.modules["tacit.summaries.describe"],
            "release_range",
            lambda *a, **k: same_range(*a, **k),
        )
        patch.setattr(ExponentialMechanism, "release", lambda self, scores, rng: (
            seen.append((self, np.asarray(scores, float))), 0)[1])  # fmt: skip
        CALLS[call](table, rng=1, **terms)
    return seen


def same_range(*arguments, **options):
    """Release private bounds, and return bounds that do not depend on what was released."""
    module = sys.modules["tacit.summaries.quantiles"]  # the package has a function of this name
    return module.release_range(*arguments, **options)._replace(lower=-64.0, upper=128.0)


@pytest.mark.parametrize("n_pairs", [12, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", CALLS)
def test_one_record_moves_a_block_by_at_most_its_sensitivity(call, n_pairs, monkeypatch):
    rng = np.random.default_rng(7)
    table = draw_table(rng, 40)
    for replaced in (False, True):
        relation = RELATIONS[replaced]
        before = recorded_sums(call, table, monkeypatch, epsilon=1.0, relation=relation)
        for _ in range(n_pairs):
            place = int(rng.integers(40))
            changed = with_record(table, place, odd_record(rng), replaced=replaced)
            after = recorded_sums(call, changed, monkeypatch, epsilon=1.0, relation=relation)
            for (noise, a), (_, b) in zip(before, after, strict=True):
                if isinstance(noise, ExponentialMechanism):  # added: all scores rise
                    assert np.ptp(np.append(b - a, 0.0)) <= noise.sensitivity * (1 + replaced)
                    continue
                n_released = noise.block.n_released
                change = (b - a)[:n_released]
                factor = noise.mechanism.replace_factor if replaced else 1.0
                most = noise.mechanism.l1_sensitivity * factor
                assert np.abs(change).sum() <= most * (1 + 1e-12)
                l2 = math.sqrt(2) if replaced and n_released > 1 else 1.0
                assert np.linalg.norm(change) <= l2 * (1 + 1e-5)


@pytest.mark.parametrize("call", CALLS)
def test_errors_and_results_quote_no_record(call):
    secret = "Jane Doe HIV+"
    table = {name: [secret, *list(column)[1:]] for name, column in TABLE.items()}
    if call in ("auc", "log loss"):  # predictions are released already, and must be numbers
        table["score"] = TABLE["score"]
    found = CALLS[call](table, epsilon=1.0, rng=1)
    assert secret not in repr(found) + str(found)


@pytest.mark.parametrize("call", CALLS)
def test_an_empty_table_is_released_like_any_other(call):
    table = {name: np.asarray(column)[:0] for name, column in TABLE.items()}
    CALLS[call](table, epsilon=1.0, rng=1)


@pytest.mark.parametrize("call", CALLS)
def test_records_of_one_person_are_covered_by_more_noise(call, monkeypatch):
    one = recorded_sums(call, TABLE, monkeypatch, epsilon=1.0)
    five = recorded_sums(call, TABLE, monkeypatch, epsilon=1.0, records_per_person=5)
    for (a, _), (b, _) in zip(one, five, strict=True):
        if isinstance(a, ExponentialMechanism):
            assert b.noise_scale == pytest.approx(5 * a.noise_scale, rel=1e-6)
        else:
            assert b.variance == pytest.approx(25 * a.variance, rel=1e-6)


def test_tables_in_the_place_of_a_column_are_refused():
    # A row of a table would count as one record, but contribute several values.
    table = np.ones((5, 3))
    for call in (
        lambda: summaries.count(table, epsilon=1.0),
        lambda: summaries.mean(table, bounds=(0, 1), epsilon=1.0),
        lambda: summaries.histogram(table, categories=["1"], epsilon=1.0),
        lambda: summaries.quantiles(table, bounds=(0, 1), epsilon=1.0),
        lambda: summaries.count_outside({"a": table}, epsilon=1.0),
        lambda: summaries.private_bounds(table, epsilon=1.0),
        lambda: summaries.r2(table, table, bounds=(0, 1), epsilon=1.0),
        lambda: summaries.describe({"a": table}, {"a": (0, 1)}, epsilon=1.0),
        lambda: summaries.describe({"a": table}, {"a": bool}, epsilon=1.0),
    ):
        with pytest.raises(ValueError, match="one column"):
            call()


def test_normal_noise_is_used_where_it_is_smaller():
    many = Terms.check({"epsilon": 1.0, "delta": 1e-6})
    assert not many.is_gaussian(1)
    assert many.is_gaussian(100)
    assert not Terms.check({"epsilon": 1.0}).is_gaussian(100)


def test_shares_divide_the_budget():
    for delta in (0.0, 1e-6):
        terms = Terms.check({"epsilon": 2.0, "delta": delta})
        division = terms.divide([Block(3, 0.5), Block(3, 1.5)], is_gaussian=delta > 0)
        assert tacit.epsilon(division.event, delta=delta or 1e-12) <= 2.0
        ratio = division.noises[0].variance / division.noises[1].variance
        assert ratio == pytest.approx(3.0 if delta else 9.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": 0.0},
        {"epsilon": 1.0, "delta": 1.0},
        {"epsilon": 1.0, "confidence": 1.0},
        {"epsilon": 1.0, "relation": "both"},
        {"epsilon": 1.0, "records_per_person": 0},
        {"epsilon": 1.0, "relation": "replace_one", "ledger": Ledger()},
    ],
    ids=str,
)
def test_wrong_terms_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        Terms.check(wrong)


def test_the_relation_is_that_of_the_ledger():
    ledger = Ledger(relation=Relation.REPLACE_ONE)
    assert Terms.check({"epsilon": 1.0, "ledger": ledger}).relation is Relation.REPLACE_ONE


def test_fractional_sums_add_up_exactly():
    rng = np.random.default_rng(3)
    rows = rng.dirichlet(np.ones(6), 70_000)
    found = fractional_sums(lambda part: rows[part], len(rows), 6)
    assert found.sum() == len(rows)
    assert np.abs(found - rows.sum(axis=0)).max() < 70_000 * 6 * 2.0**-30


def test_codes_below_zero_have_no_cell():
    assert cell_counts(np.array([-1, 0, 2, 2]), 3).tolist() == [1, 0, 2]
