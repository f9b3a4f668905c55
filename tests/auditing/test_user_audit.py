"""The audit with user canaries: correct runs pass, and planted faults are flagged."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tacit
from tacit._users import RecordsOfUsers
from tacit.auditing import TrainingSetup, audit_training, scores_by_user, user_findings
from tacit.training import Users
from tacit.training.users import Unit

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


@pytest.mark.parametrize("sampled", ["users", "records"])
def test_correct_runs_pass(sampled):
    assert not is_flagged(user_findings(setup(sampled=sampled)))


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
    patch.setattr(Unit, "grouped", lambda self, records, ids, *, has_one_shape: records)


def keep_all_records(patch):
    patch.setattr(RecordsOfUsers, "kept", lambda self, most: np.arange(len(self.user_of_record)))


def shift_ids(patch):
    correct = RecordsOfUsers.of.__func__
    patch.setattr(
        RecordsOfUsers, "of", classmethod(lambda cls, ids, n: correct(cls, [*ids[1:], ids[0]], n))
    )


def price_fewer_records(patch):
    patch.setattr(Unit, "records_per_user", property(lambda self: 1))


@pytest.mark.parametrize(
    ("fault", "sampled"),
    [
        (occupy_two_slots, "users"),
        (clip_each_record, "users"),
        (shift_ids, "users"),
        (keep_all_records, "records"),
        (shift_ids, "records"),
        (price_fewer_records, "records"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_planted_faults_are_flagged(fault, sampled, monkeypatch):
    fault(monkeypatch)
    assert is_flagged(user_findings(setup(sampled=sampled)))


@pytest.mark.slow
@pytest.mark.parametrize("sampled", ["users", "records"])
def test_the_whole_audit_passes_on_correct_runs(sampled):
    found = audit_training(setup(sampled=sampled), steps=16, rng=0)
    assert found.passes, [f for f in found.findings if f.p_value < 1e-3]


def test_scores_of_a_user_are_averaged():
    scores, first = scores_by_user([0.0, 4.0, 2.0], ["a", "b", "a"])
    assert scores.tolist() == [1.0, 4.0]
    assert first == [0, 1]
