"""One record reaches one teacher, also in a stack; a failing teacher is named, nothing is spent."""

import traceback

import joblib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.tree import DecisionTreeClassifier

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tacit.errors import IncompatibleModel  # noqa: E402
from tacit.pate import (  # noqa: E402
    KernelTeacher,
    TeacherError,
    TeacherTraining,
    TorchTeacher,
    count_votes,
    partition,
    train_stacked_teachers,
    train_teachers,
)
from tacit.pate.classifier import _maker  # noqa: E402
from tacit.pate.teachers import ConstantTeacher  # noqa: E402

TRAINING = TeacherTraining(steps=40, batch_size=16, learning_rate=0.05)


def make_module():
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))


def make_teacher(seed):
    return TorchTeacher(make_module, seed=seed, training=TRAINING)


class Nearest:
    """The class of the nearest mean; quick, and good enough to vote."""

    def __init__(self, seed=0):
        self.seed = seed

    def fit(self, X, y):
        self.classes = np.unique(y)
        self.means = np.array([X[y == c].mean(axis=0) for c in self.classes])
        return self

    def predict(self, X):
        distance = ((np.asarray(X)[:, None] - self.means) ** 2).sum(axis=2)
        return self.classes[distance.argmin(axis=1)]


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


# One by one -----------------------------------------------------------------------------------


class Failing(Nearest):
    """Raises for one seed in a few."""

    def fit(self, X, y):
        if len(y) and self.seed % 3 == 0:
            raise FloatingPointError("diverged")
        return super().fit(X, y)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 1000))
def test_parts_are_disjoint_and_complete(n_records, n_teachers, seed):
    if n_records < n_teachers:
        with pytest.raises(ValueError, match="n_teachers"):
            partition(n_records, n_teachers, seed)
        return
    parts = partition(n_records, n_teachers, seed)
    assert len(parts) == n_teachers
    assert sorted(np.concatenate(parts).tolist()) == list(range(n_records))


def test_one_more_record_changes_one_part():
    # Same draws for the records both have: exactly one part grows, no other changes.
    before, after = partition(500, 20, rng=5), partition(501, 20, rng=5)
    changed = [i for i in range(20) if not np.array_equal(before[i], after[i])]
    assert len(changed) == 1
    assert set(after[changed[0]]) - set(before[changed[0]]) == {500}


def test_records_fall_evenly_on_teachers():
    sizes = np.array([len(part) for part in partition(100_000, 10, rng=0)])
    # Binomial(100,000, 0.1): standard deviation 95; 6 of them on 10 parts is below 2e-8.
    assert np.all(np.abs(sizes - 10_000) < 6 * 95)


@pytest.mark.parametrize("backend", ["threading", pytest.param("loky", marks=pytest.mark.slow)])
def test_workers_give_the_same_teachers(backend):
    X, y = blobs(300)
    public, _ = blobs(50, seed=9)
    make = _maker(DecisionTreeClassifier(max_depth=3, max_features=1))
    alone = train_teachers(make, X, y, 6, n_classes=3, rng=1)
    with joblib.parallel_config(backend):
        shared = train_teachers(make, X, y, 6, n_classes=3, rng=1, n_jobs=2)
    assert np.array_equal(count_votes(alone, public, 3), count_votes(shared, public, 3))


def test_progress_is_reported_after_each_teacher():
    X, y = blobs(100)
    seen = []
    train_teachers(
        Nearest,
        X,
        y,
        5,
        n_classes=3,
        rng=0,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(i, 5) for i in range(1, 6)]


def test_a_teacher_that_raises_is_named():
    X, y = blobs(300)
    with pytest.raises(TeacherError, match=r"teacher \d+ of 12 failed to train \(FloatingPoint"):
        train_teachers(Failing, X, y, 12, n_classes=3, rng=0)


@pytest.mark.parametrize("n_jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_record_shows_in_the_traceback_of_a_teacher_that_cannot_train(n_jobs):
    X, y = np.array([["Smith"], ["Jones"]] * 6), np.arange(12) % 3
    with pytest.raises(TeacherError, match="ValueError") as caught:
        train_teachers(_maker(DecisionTreeClassifier()), X, y, 2, n_classes=3, rng=0, n_jobs=n_jobs)
    shown = "".join(traceback.format_exception(caught.value))
    assert "Smith" not in shown
    assert "Jones" not in shown


@pytest.mark.parametrize(
    "y", [np.zeros(10), np.full(50, 3), np.full(50, 0.5), np.zeros((50, 1), int)]
)
def test_wrong_labels_are_refused(y):
    with pytest.raises(ValueError, match="y must"):
        train_teachers(Nearest, blobs(50)[0], y, 5, n_classes=3)


def test_more_teachers_than_records_are_refused():
    X, y = blobs(4)
    with pytest.raises(ValueError, match="fewer teachers"):
        train_teachers(Nearest, X, y, 5, n_classes=3)


def test_a_record_changes_the_votes_of_one_teacher_only():
    X, y = blobs(400)
    public, _ = blobs(100, seed=9)
    other = X.copy()
    other[17] = [50.0, -50.0]
    here = train_teachers(Nearest, X, y, 8, n_classes=3, rng=3)
    there = train_teachers(Nearest, other, y, 8, n_classes=3, rng=3)
    differ = [
        not np.array_equal(a.predict(public), b.predict(public))
        for a, b in zip(here, there, strict=True)
    ]
    assert sum(differ) <= 1
    moved = count_votes(here, public, 3) - count_votes(there, public, 3)
    assert np.all(np.abs(moved).sum(axis=1) <= 2)


def test_votes_add_up_to_the_number_of_teachers_and_are_mostly_right():
    X, y = blobs(600)
    public, truth = blobs(100, seed=9)
    votes = count_votes(train_teachers(Nearest, X, y, 10, n_classes=3, rng=0), public, 3)
    assert np.all(votes.sum(axis=1) == 10)
    assert np.mean(votes.argmax(axis=1) == truth) > 0.9


def test_parts_without_records_or_with_one_class_still_vote():
    X, y = np.zeros((5, 2)), np.full(5, 2)
    teachers = train_teachers(Nearest, X, y, 5, n_classes=3, rng=0)
    votes = count_votes(teachers, np.zeros((4, 2)), 3)
    assert np.all(votes.sum(axis=1) == 5)
    assert any(len(part) == 0 for part in partition(5, 5, rng=0))


def test_missing_values_are_refused():
    X, y = blobs(50)
    X[3, 0] = np.nan
    with pytest.raises(ValueError, match="X must be finite"):
        train_teachers(Nearest, X, y, 5, n_classes=3)
    with pytest.raises(ValueError, match="X_public must be finite"):
        count_votes([ConstantTeacher(0)], [[np.inf]], 3)


def rings(n, seed=0):
    """Two rings: easy with neighbors, hard with a few labels alone."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    angle = rng.uniform(0, 2 * np.pi, n)
    radius = 1 + 2 * y + rng.normal(0, 0.05, n)
    return np.column_stack([radius * np.cos(angle), radius * np.sin(angle)]), y


def test_a_kernel_teacher_learns_from_few_records_and_keeps_class_numbers():
    X, y = rings(80)
    test, truth = rings(200, seed=1)
    teacher = KernelTeacher().fit(X, np.where(y == 0, 2, 5))
    assert np.mean(teacher.predict(test) == np.where(truth == 0, 2, 5)) > 0.9
    assert KernelTeacher().fit(X[:1], [4]).predict(test).tolist() == [4] * 200
