"""PATE on MNIST reaches what the issue asks, at a price that holds for any data."""

import numpy as np
import pytest
from _pate_costs import private_cost
from sklearn.decomposition import PCA

import tacit
from tacit.datasets import load
from tacit.pate import (
    GNMax,
    KernelTeacher,
    SpreadStudent,
    character_features,
    count_votes,
    spread_queries,
    train_teachers,
)


@pytest.mark.slow
def test_250_teachers_teach_a_student_98_percent_of_mnist_below_epsilon_1(shared_data):
    # Published: 98.5 % at a data-dependent 1.97 (2018). Here 64 queries, sigma 60, one fixed seed.
    mnist = load("mnist", data=shared_data)
    train, rest = character_features(mnist.x_train), character_features(mnist.x_test)
    pca = PCA(200, random_state=0).fit(rest[:9000])
    public, test = np.split(pca.transform(rest), [9000])
    teachers = train_teachers(
        lambda _: KernelTeacher(), pca.transform(train), mnist.y_train, 250, n_classes=10, rng=0
    )
    queries = spread_queries(public, 64, rng=0)
    votes = count_votes(teachers, public[queries], 10)
    labels = np.full(9000, -1)
    labels[queries] = GNMax(60.0).answer(votes, rng=1)
    student = SpreadStudent().fit(public, labels)
    assert np.mean(student.predict(test) == mnist.y_test[9000:]) >= 0.98
    assert tacit.epsilon(GNMax(60.0).event(64), delta=1e-5) < 0.7
    assert private_cost(GNMax(60.0), votes).private_epsilon(delta=1e-5) < 0.7
