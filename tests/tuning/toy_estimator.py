"""A private estimator for tests: it pays for one Gaussian release and keeps a list of its runs."""

from functools import lru_cache

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin

from tacit.accounting import GDP, calibrate
from tacit.events import Gaussian
from tacit.mechanisms import generator

RUNS = []
"""Levels of all runs that went past their payment, in their order."""


@lru_cache
def noise_for(epsilon, delta):
    return calibrate(Gaussian, epsilon=epsilon, delta=delta, accountant=GDP())


class Toy(ClassifierMixin, BaseEstimator):
    """Predicts 1 where the first feature is below `level`: the share of 1 that it gets right."""

    def __init__(self, level=0.5, epsilon=1.0, delta=1e-6, ledger=None, random_state=None, fail=""):
        self.level = level
        self.epsilon = epsilon
        self.delta = delta
        self.ledger = ledger
        self.random_state = random_state
        self.fail = fail

    def event(self, n_rows):
        factor = n_rows if self.fail == "price" else 1.0
        return Gaussian(factor * noise_for(self.epsilon, self.delta))

    def fit(self, X, y):
        self.ledger.spend(self.event(len(y)))
        RUNS.append(self.level)
        if self.fail == "raise":
            raise RuntimeError(f"private record {X[0, 0]}")
        if self.fail == "again":
            self.ledger.spend(self.event(len(y)))
        print("private", X[0, 0])
        self.classes_ = np.array([0, 1])
        noise = generator(self.random_state).random()
        self.coef_ = np.array([np.nan if self.fail == "diverge" else self.level, noise])
        self.tag_ = f"tag{noise:.17f}"
        return self

    def predict(self, X):
        return (X[:, 0] < self.level).astype(int)


def records(n=2000, seed=0):
    X = np.random.default_rng(seed).random((n, 2))
    return X, np.ones(n, dtype=int)
