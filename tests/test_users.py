"""Which records belong to which user: ids, bounds, and who is not affected by whom."""

import numpy as np
import pytest

from tacit._users import RecordsOfUsers
from tacit.ledger import Ledger
from tacit.pate import LaplaceMax, partition
from tacit.summaries import choose_bound, count, limit_records, mean


def test_numbers_are_compared_by_value_and_texts_exactly():
    assert len(RecordsOfUsers.of([1, 1.0, 2], 3)) == 2
    assert len(RecordsOfUsers.of(["a", "a ", "A"], 3)) == 3
    assert len(RecordsOfUsers.of([("a,b", "c"), ("a", "b,c")], 2)) == 2


def test_what_is_kept_of_a_user_does_not_depend_on_others():
    ids = ["ann"] * 9 + ["bob"] * 9
    both, bob = limit_records(ids, 3), limit_records(ids[9:], 3)
    assert [i - 9 for i in both if i >= 9] == bob.tolist()
    assert len(both) == 6


def test_a_random_choice_takes_every_record_equally_often():
    users = RecordsOfUsers.of(["ann"] * 5, 5)
    chosen = [users.slots(np.array([0]), 2, seed=seed)[0][0] for seed in range(2000)]
    counts = np.bincount(np.concatenate(chosen), minlength=5)
    assert np.all(np.abs(counts - 800) < 5 * np.sqrt(2000 * 0.4 * 0.6))  # false alarm below 1e-5
    assert all(len(set(pair.tolist())) == 2 for pair in chosen)


def test_slots_beyond_the_records_repeat_the_same_user():
    users = RecordsOfUsers.of(["a", "b", "b", "b"], 4)
    rows, counts = users.slots(np.arange(2), 8)
    assert rows.shape == (2, 4)
    assert set(rows[0].tolist()) == {0}
    assert counts.sum(1).tolist() == [1, 3]


def test_all_records_of_a_user_go_to_one_teacher():
    ids = np.random.default_rng(0).integers(0, 100, 1000)
    parts = partition(1000, 10, rng=1, users=ids)
    assert sum(len(set(ids[part].tolist())) for part in parts) == len(set(ids.tolist()))


def test_a_bound_is_chosen_privately_and_paid():
    ids = [user for user in range(3000) for _ in range(1 + user % 4)]
    ledger = Ledger(unit="user")
    assert choose_bound(ids, epsilon=1.0, ledger=ledger, rng=0) == 4
    assert ledger.epsilon(delta=0) == pytest.approx(1.0)


def test_summaries_and_ledgers_have_one_unit():
    with pytest.raises(ValueError, match="one person"):
        count([1, 2, 3], epsilon=1.0, ledger=Ledger(unit="person"))
    with pytest.raises(ValueError, match="one record"):
        mean([1, 2], bounds=(0, 3), epsilon=1.0, records_per_person=2, ledger=Ledger())
    mean([1, 2], bounds=(0, 3), epsilon=1.0, records_per_person=2, ledger=Ledger(unit="person"))


@pytest.mark.parametrize("ids", [{0: "ann", 1: "ann"}, {"ann", "bob"}, "ab", None])
def test_ids_without_an_order_are_refused(ids):
    """The keys of a mapping from records to users are different for each record."""
    with pytest.raises(TypeError, match="in order"):
        limit_records(ids, 1)


def test_votes_are_paid_for_by_a_ledger_of_their_unit():
    votes = [[250, 0], [3, 247]]
    for unit, by_user in (("user", False), ("record", True)):
        with pytest.raises(ValueError, match="the ledger counts"):
            LaplaceMax(20.0).answer(votes, ledger=Ledger(unit=unit), by_user=by_user)
    ledger = Ledger(unit="user")
    LaplaceMax(20.0).answer(votes, ledger=ledger, by_user=True)
    assert len(ledger.history()) == 2
