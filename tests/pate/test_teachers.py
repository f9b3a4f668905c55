"""Stacked teachers are as apart as separate ones, and as good."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tacit.errors import IncompatibleModel  # noqa: E402
from tacit.pate import (  # noqa: E402
    TeacherTraining,
    TorchTeacher,
    count_votes,
    partition,
    train_stacked_teachers,
    train_teachers,
)

TRAINING = TeacherTraining(steps=40, batch_size=16, learning_rate=0.05)


def make_module():
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))


def make_teacher(seed):
    return TorchTeacher(make_module, seed=seed, training=TRAINING)


def blobs(n, seed=0):
    rng = np.random.default_rng(1000 + seed)  # no seed that a partition uses
    y = rng.integers(0, 3, n)
    return (rng.normal(size=(n, 2)) + 4 * np.eye(3, 2)[y]).astype(np.float32), y


def stacked(X, y, n_teachers=6, **options):
    options = {"training": TRAINING, "rng": 7} | options
    return train_stacked_teachers(make_module, X, y, n_teachers, n_classes=3, **options)


def test_a_record_changes_one_stacked_teacher_only():
    X, y = blobs(300)
    public, _ = blobs(200, seed=9)
    other, other_y = X.copy(), y.copy()
    other[17], other_y[17] = [30.0, -30.0], (y[17] + 1) % 3
    here, there = stacked(X, y), stacked(other, other_y)
    hit = next(
        i for i, part in enumerate(partition(300, 6, np.random.default_rng(7))) if 17 in part
    )
    for name, values in here._parameters.items():
        same = [torch.equal(a, b) for a, b in zip(values, there._parameters[name], strict=True)]
        assert [i for i, equal in enumerate(same) if not equal] == [hit]
    assert np.sum(np.any(here.predict_all(public) != there.predict_all(public), axis=1)) <= 1


def test_removing_a_record_changes_one_stacked_teacher_only():
    X, y = blobs(301)
    parts = partition(301, 6, rng=2)
    fewer = [part[part != 300] for part in parts]
    hit = next(i for i, part in enumerate(parts) if 300 in part)
    here, there = stacked(X, y, parts=parts), stacked(X, y, parts=fewer)
    for name, values in here._parameters.items():
        changed = [i for i in range(6) if not torch.equal(values[i], there._parameters[name][i])]
        assert changed == [hit]


def test_stacked_teachers_vote_as_well_as_separate_ones():
    X, y = blobs(400)
    public, truth = blobs(200, seed=9)
    together = count_votes(stacked(X, y), public, 3)
    apart = count_votes(train_teachers(make_teacher, X, y, 6, n_classes=3, rng=7), public, 3)
    rows = np.arange(200)
    assert together[rows, truth].mean() > 5.0
    assert abs(together[rows, truth].mean() - apart[rows, truth].mean()) < 0.5


def test_a_part_without_records_votes_for_a_fixed_class():
    X, y = blobs(40)
    parts = [np.arange(20), np.empty(0, int), np.arange(20, 40)]
    teachers = stacked(X, y, 3, parts=parts)
    assert set(teachers.predict_all(X)[1]) == {1}
    assert np.all(count_votes(teachers, X, 3).sum(axis=1) == 3)


def test_the_same_seed_gives_the_same_teachers_and_leaves_torch_alone():
    X, y = blobs(100)
    before = torch.random.get_rng_state()
    first, second = stacked(X, y), stacked(X, y)
    assert np.array_equal(first.predict_all(X), second.predict_all(X))
    assert torch.equal(before, torch.random.get_rng_state())


def test_modules_with_running_averages_are_refused():
    X, y = blobs(50)
    with pytest.raises(IncompatibleModel, match="BatchNorm"):
        train_stacked_teachers(
            lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), X, y, 4, n_classes=3
        )


def test_different_architectures_are_refused():
    X, y = blobs(50)
    sizes = iter(range(3, 20))
    with pytest.raises(IncompatibleModel, match="same architecture"):
        train_stacked_teachers(lambda: nn.Linear(2, next(sizes)), X, y, 4, n_classes=3)


def test_repr_tells_how_many_and_nothing_else():
    X, y = blobs(50)
    assert repr(stacked(X, y, 4)) == "StackedTeachers(4 teachers)"
