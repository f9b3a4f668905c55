"""One Laplace answer costs what is stated; test_votes holds what all aggregators share."""

import math

import numpy as np


def test_one_laplace_answer_is_two_over_scale_dp():
    # Two coins: the log ratio of any outcome's probability between neighbors is below 2 / scale.
    rng = np.random.default_rng(0)
    scale, n = 4.0, 400_000
    noise = rng.laplace(0, scale, (n, 2))
    for here, there in (((6, 4), (5, 5)), ((5, 5), (4, 6))):
        p = np.mean((np.array(here) + noise).argmax(axis=1) == 0)
        q = np.mean((np.array(there) + noise).argmax(axis=1) == 0)
        assert abs(math.log(p / q)) <= 2 / scale + 0.02
        assert abs(math.log((1 - p) / (1 - q))) <= 2 / scale + 0.02
