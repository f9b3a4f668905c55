"""A student that uses unlabeled inputs, and a choice of what to ask."""

import numpy as np
import pytest

from tacit.pate import SpreadStudent, spread_queries


def rings(n, seed=0):
    """Two rings: easy with neighbors, hard with a few labels alone."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    angle = rng.uniform(0, 2 * np.pi, n)
    radius = 1 + 2 * y + rng.normal(0, 0.05, n)
    return np.column_stack([radius * np.cos(angle), radius * np.sin(angle)]), y


def some_labels(y, known):
    labels = np.full(len(y), -1)
    labels[known] = y[known]
    return labels


def test_few_labels_spread_along_neighbors():
    X, y = rings(400)
    known = np.concatenate([np.flatnonzero(y == 0)[:3], np.flatnonzero(y == 1)[:3]])
    student = SpreadStudent(spread=0.99, n_landmarks=200).fit(X, some_labels(y, known))
    test, truth = rings(200, seed=1)
    assert np.mean(student.predict(test) == truth) > 0.97


def test_a_label_that_all_others_outvote_is_dropped():
    X, y = rings(400)
    known = np.concatenate([np.flatnonzero(y == 0)[:8], np.flatnonzero(y == 1)[:8]])
    labels = some_labels(y, known)
    labels[known[0]] = 1
    student = SpreadStudent(n_landmarks=200).fit(X, labels)
    assert np.mean(student.spread_labels_ == y) > 0.97


def test_classes_keep_their_numbers():
    X, y = rings(100)
    student = SpreadStudent().fit(X, np.where(y == 0, 3, 7))
    assert set(student.predict(X)) <= {3, 7}
    assert student.predict_proba(X).sum(axis=1) == pytest.approx(1)


def test_no_label_at_all_is_refused():
    with pytest.raises(ValueError, match="no label"):
        SpreadStudent().fit(rings(20)[0], np.full(20, -1))


def test_spread_queries_are_different_and_cover_all_groups():
    rng = np.random.default_rng(0)
    X = np.repeat(np.eye(5) * 10, 30, axis=0) + rng.normal(size=(150, 5))
    chosen = spread_queries(X, 5, rng=0)
    assert sorted(chosen // 30) == [0, 1, 2, 3, 4]
    assert len(set(spread_queries(X, 40, rng=0))) == 40


def test_more_queries_than_inputs_are_refused():
    with pytest.raises(ValueError, match="n_queries"):
        spread_queries(np.zeros((3, 2)), 4)


def test_a_saved_student_predicts_the_same():
    X, y = rings(100)
    student = SpreadStudent().fit(X, y)
    again = SpreadStudent.from_arrays(student.to_arrays())
    assert np.array_equal(again.predict(X), student.predict(X))
