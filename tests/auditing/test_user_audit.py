"""The audit with user canaries: correct runs pass, and planted faults are flagged."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tacit
from tacit._users import RecordsOfUsers
from tacit.auditing import TrainingSetup, audit_training, scores_by_user, user_findings
from tacit.training import Users
from tacit.training.lots.lots import Lots
from tacit.training.lots.users import Unit, UserRecords, _OfUsers

IDS = np.random.default_rng(0).integers(0, 40, 120)


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def setup(**options):
    torch.manual_seed(0)
    users = Users(ids=IDS, **{"records_per_user": 3, **options})
    return TrainingSetup(
        make_private=tacit.make_private,
        model=torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)),
        dataset=(torch.randn(120, 4), torch.arange(120) % 3),
        loss_fn=loss_fn,
        settings={
            "batch_size": 10, "steps": 8, "clip_norm": 1.0, "noise_multiplier": 1.0, "users": users,
        },
    )  # fmt: skip


def is_flagged(findings):
    return any(finding.p_value < 1e-6 for finding in findings)


@pytest.mark.parametrize("options", [{}, {"sampled": "records"}, {"combine": "sum"}], ids=str)
def test_correct_runs_pass(options):
    assert not is_flagged(user_findings(setup(**options)))


def occupy_two_slots(patch):
    correct = RecordsOfUsers.of.__func__

    def split(cls, ids, n):
        turn: dict = {}
        names = []
        for one in ids:
            turn[one] = turn.get(one, 0) + 1
            names.append(f"{one} {turn[one] % 2}")
        return correct(cls, names, n)

    patch.setattr(RecordsOfUsers, "of", classmethod(split))


def clip_each_record(patch):
    patch.setattr(Unit, "grouped", lambda self, records, ids, **_: records)


def keep_all_records(patch):
    patch.setattr(RecordsOfUsers, "kept", lambda self, most: np.arange(len(self.user_of_record)))


def shift_ids(patch):
    correct = RecordsOfUsers.of.__func__
    patch.setattr(
        RecordsOfUsers, "of", classmethod(lambda cls, ids, n: correct(cls, [*ids[1:], ids[0]], n))
    )


def price_fewer_records(patch):
    patch.setattr(Unit, "records_per_user", property(lambda self: 1))


def price_one_record_less(patch):
    correct = Unit.records_per_user
    patch.setattr(Unit, "records_per_user", property(lambda self: max(1, correct.fget(self) - 1)))


def choose_by_the_number_of_users(patch):
    """Which records of a user are used depends on how many users there are."""
    correct = RecordsOfUsers.slots

    def slots(self, users, most, *, seed=0):
        return correct(self, users, most, seed=seed + len(self))

    patch.setattr(RecordsOfUsers, "slots", slots)


def fill_slots_with_others(patch):
    correct = RecordsOfUsers.slots

    def slots(self, users, most, *, seed=0):
        rows, counts = correct(self, users, most, seed=seed)
        return np.where(counts, rows, np.roll(rows, 1, axis=0)), np.ones_like(counts)

    patch.setattr(RecordsOfUsers, "slots", slots)


def keep_by_the_order_of_all_records(patch):
    def kept(self, most):
        found, seen = [], {}
        for record in np.random.default_rng(0).permutation(len(self.user_of_record)).tolist():
            user = self.user_of_record[record]
            seen[user] = seen.get(user, 0) + 1
            found += [record] if seen[user] <= most else []
        return np.sort(found)

    patch.setattr(RecordsOfUsers, "kept", kept)


def spell_ids_by_place(patch):
    correct = RecordsOfUsers.of.__func__
    patch.setattr(
        RecordsOfUsers,
        "of",
        classmethod(
            lambda cls, ids, n: correct(cls, [f"{o} {i % 2}" for i, o in enumerate(ids)], n)
        ),
    )


def repeat_a_user_in_another_part(patch):
    correct = UserRecords.in_parts
    patch.setattr(UserRecords, "in_parts", lambda self, users: [*correct(self, users), users[:1]])


@pytest.mark.parametrize(
    ("fault", "sampled"),
    [
        (occupy_two_slots, "users"),
        (clip_each_record, "users"),
        (shift_ids, "users"),
        (keep_all_records, "records"),
        (shift_ids, "records"),
        (price_fewer_records, "records"),
        (choose_by_the_number_of_users, "users"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (choose_by_the_number_of_users, "records"),
                (keep_by_the_order_of_all_records, "records"),
                (fill_slots_with_others, "users"),
                (price_one_record_less, "records"),
                (spell_ids_by_place, "users"),
                (spell_ids_by_place, "records"),
                (repeat_a_user_in_another_part, "users"),
            ]
        ),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_planted_faults_are_flagged(fault, sampled, monkeypatch):
    fault(monkeypatch)
    assert is_flagged(user_findings(setup(sampled=sampled)))


def draw_whole_users(lots, step):
    """Records are billed as drawn independently, but all records of a user are drawn together."""
    records = lots.records
    owner = records._users.user_of_record[records._kept]
    return np.flatnonzero((_random(lots, step, len(records._users)) < 10 / len(records))[owner])


def draw_users_by_their_records(lots, step):
    """A user takes part if one of the records is drawn, more likely than is billed."""
    owner = lots.records._users.user_of_record
    return np.unique(owner[_random(lots, step, len(owner)) < 10 / len(lots.records)])


def draw_neighbors_together(lots, step):
    first = np.flatnonzero(_random(lots, step, len(lots.records) // 2) < 10 / len(lots.records))
    return np.sort(np.concatenate([2 * first, 2 * first + 1]))


def draw_some_twice(lots, step):
    drawn = np.flatnonzero(_random(lots, step, len(lots.records)) < 10 / len(lots.records))
    return np.concatenate([drawn, drawn[: len(drawn) // 2]]) if step % 2 else drawn


def _random(lots, step, n):
    seed = int.from_bytes(lots.key.bytes("fault", step, 7))
    return np.random.default_rng(seed).random(n)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "sampled"),
    [
        (draw_whole_users, "records"),
        (draw_users_by_their_records, "users"),
        (draw_neighbors_together, "users"),
        (draw_some_twice, "users"),
    ],
)
def test_planted_faults_of_draws_are_flagged(draw, sampled, monkeypatch):
    correct = Lots.indices

    def indices(self, step):  # small sets are for tests of the sensitivity
        is_large = isinstance(self.records, _OfUsers) and len(self.records) > 30
        return draw(self, step) if is_large else correct(self, step)

    monkeypatch.setattr(Lots, "indices", indices)
    assert not audit_training(setup(sampled=sampled), steps=32, rng=0).passes


@pytest.mark.slow
@pytest.mark.parametrize("sampled", ["users", "records"])
def test_the_whole_audit_passes_on_correct_runs(sampled):
    found = audit_training(setup(sampled=sampled), steps=16, rng=0)
    assert found.passes, [f for f in found.findings if f.p_value < 1e-3]


def test_scores_of_a_user_are_averaged():
    scores, first = scores_by_user([0.0, 4.0, 2.0], ["a", "b", "a"])
    assert scores.tolist() == [1.0, 4.0]
    assert first == [0, 1]
