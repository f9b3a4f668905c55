"""DP-SGD for the logit model: the sensitivity of a step."""

import numpy as np
import pytest

from tacit.events import Relation
from tacit.regression import Bounds, sgd
from tacit.regression.rows import PrivateRows


@pytest.mark.parametrize("n_classes", [2, 4])
def test_one_record_moves_the_gradient_by_no_more_than_claimed(n_classes):
    plan = sgd.plan_sgd(
        n_classes=n_classes, row_norm=1.5, rate=0.5, epsilon=1.0, delta=1e-6,
        relation=Relation.ADD_REMOVE,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    X = rng.uniform(-300, 300, (300, 10))
    labels = rng.integers(0, n_classes, 300).astype(float)
    theta = rng.normal(size=(11, 1 if n_classes == 2 else n_classes)) * 5
    box = Bounds(-100, 100).box(10)
    for i in range(0, 300, 2):
        one, other = (
            sgd.sgd_gradient(
                PrivateRows(X[j : j + 1], box, row_norm=1.5), labels[j : j + 1], theta,
                plan.residual_clip,
            )
            for j in (i, i + 1)
        )  # fmt: skip
        bound = plan.gradient.l2_sensitivity * (1 + 1e-9)
        assert np.linalg.norm(one) <= bound
        assert np.linalg.norm(one - other) <= 2 * bound
