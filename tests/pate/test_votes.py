"""One record reaches one teacher; every teacher votes once; faults say which and spend nothing."""

import traceback

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.tree import DecisionTreeClassifier

from tacit.pate import TeacherError, count_votes, partition, train_teachers
from tacit.pate.classifier import _Copies
from tacit.pate.votes import ConstantTeacher


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


class Failing(Nearest):
    """Raises for one seed in a few."""

    def fit(self, X, y):
        if len(y) and self.seed % 3 == 0:
            raise FloatingPointError("diverged")
        return super().fit(X, y)


def blobs(n, seed=0):
    rng = np.random.default_rng(1000 + seed)  # no seed that a partition uses
    y = rng.integers(0, 3, n)
    return rng.normal(size=(n, 2)) + 4 * np.eye(3, 2)[y], y


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


def test_workers_give_the_same_teachers():
    X, y = blobs(300)
    public, _ = blobs(50, seed=9)
    make = _Copies(DecisionTreeClassifier(max_depth=3, max_features=1))
    alone = train_teachers(make, X, y, 6, n_classes=3, rng=1)
    shared = train_teachers(make, X, y, 6, n_classes=3, rng=1, n_jobs=2)
    assert np.array_equal(count_votes(alone, public, 3), count_votes(shared, public, 3))


def test_progress_is_told_after_each_teacher():
    X, y = blobs(100)
    told = []
    train_teachers(
        Nearest,
        X,
        y,
        5,
        n_classes=3,
        rng=0,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(i, 5) for i in range(1, 6)]


def test_a_teacher_that_raises_is_named():
    X, y = blobs(300)
    with pytest.raises(TeacherError, match=r"teacher \d+ of 12 failed to train \(FloatingPoint"):
        train_teachers(Failing, X, y, 12, n_classes=3, rng=0)


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_no_record_shows_in_the_traceback_of_a_teacher_that_cannot_train(n_jobs):
    X, y = np.array([["Smith"], ["Jones"]] * 6), np.arange(12) % 3
    with pytest.raises(TeacherError, match="ValueError") as caught:
        train_teachers(
            _Copies(DecisionTreeClassifier()), X, y, 2, n_classes=3, rng=0, n_jobs=n_jobs
        )
    shown = "".join(traceback.format_exception(caught.value))
    assert "Smith" not in shown
    assert "Jones" not in shown


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


def test_parts_without_records_or_with_one_class_still_vote():
    X, y = np.zeros((5, 2)), np.full(5, 2)
    teachers = train_teachers(Nearest, X, y, 5, n_classes=3, rng=0)
    votes = count_votes(teachers, np.zeros((4, 2)), 3)
    assert np.all(votes.sum(axis=1) == 5)
    assert any(len(part) == 0 for part in partition(5, 5, rng=0))


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


def test_missing_values_are_refused():
    X, y = blobs(50)
    X[3, 0] = np.nan
    with pytest.raises(ValueError, match="X must be finite"):
        train_teachers(Nearest, X, y, 5, n_classes=3)
    with pytest.raises(ValueError, match="X_public must be finite"):
        count_votes([ConstantTeacher(0)], [[np.inf]], 3)


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


def test_no_teachers_are_refused():
    with pytest.raises(ValueError, match="empty"):
        count_votes([], [[0.0]], 2)
