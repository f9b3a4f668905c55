"""AdaSSP: sensitivities of its three releases, and the noise that pricing them together saves."""

import math

import numpy as np
import pytest

from tacit.events import Relation
from tacit.regression import adassp
from tacit.regression.rows import triangle

BUDGET = {"epsilon": 1.0, "delta": 1e-6}


def random_records(row_norm, count=400, d=3):
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(count, d + 1)) * rng.exponential(2, (count, 1))
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1, row_norm / norms), rng.uniform(-1, 1, count).round()


def test_one_record_moves_gaussian_statistics_by_no_more_than_claimed():
    plan = adassp.plan_adassp(row_norm=2.0, **BUDGET, relation=Relation.ADD_REMOVE)
    rows, y = random_records(plan.row_norm)
    base = rows[:50].T @ rows[:50]
    for i in range(60, 400, 2):
        z, w = rows[i], rows[i + 1]
        added, replaced = np.outer(z, z), np.outer(z, z) - np.outer(w, w)
        for mechanism, add, replace in (
            (plan.gram, triangle(added), triangle(replaced)),
            (plan.cross, y[i] * z, y[i] * z - y[i + 1] * w),
            (plan.eigenvalue, smallest(base + added) - smallest(base),
             smallest(base + np.outer(z, z)) - smallest(base + np.outer(w, w))),
        ):  # fmt: skip
            bound = mechanism.l2_sensitivity
            assert np.linalg.norm(add) <= bound * (1 + 1e-9)
            assert np.linalg.norm(replace) <= bound * mechanism.replace_factor * (1 + 1e-9)


def smallest(matrix):
    return np.linalg.eigvalsh(matrix)[:1]


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_joint_pricing_needs_less_noise_than_thirds_of_epsilon(epsilon):
    delta = 1e-6
    thirds = math.sqrt(math.log(6 / delta)) / (epsilon / 3)
    plan = adassp.plan_adassp(
        row_norm=1.0, epsilon=epsilon, delta=delta, relation=Relation.ADD_REMOVE
    )
    assert thirds / plan.gram.noise_multiplier >= 1.6
    assert thirds / plan.cross.noise_multiplier >= 1.6


def test_rows_are_left_as_they_are_where_noise_is_negligible():
    def chosen(n_records):
        return adassp.choose_row_norm(
            8, row_norm=2.0, full_norm=3.0, n_records=n_records, **BUDGET,
            relation=Relation.ADD_REMOVE,
        )  # fmt: skip

    assert chosen(10**4) == 2.0
    assert chosen(10**6) == 3.0
