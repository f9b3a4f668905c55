"""Statistics of the Gaussian bounds; tests/auditing/test_one_run holds what all bounds share."""

import numpy as np
import pytest
from _gaussian_bounds import gaussian_fit, noncentral_t_tail
from scipy import stats


@pytest.mark.parametrize(
    ("t", "freedom", "center"), [(1.5, 2, 0.5), (5.0, 3, 2.0), (30.0, 998, 28.5), (100.0, 6, 50.0)]
)
def test_the_tail_of_the_noncentral_t_law_agrees_with_its_series(t, freedom, center):
    expected = stats.nct.sf(t, freedom, center)
    assert noncentral_t_tail(t, freedom, center) == pytest.approx(expected, rel=1e-8)


def test_a_gaussian_fit_of_many_canaries_converges():
    rng = np.random.default_rng(0)
    inside = rng.integers(0, 2, 100_000).astype(bool)
    bound = gaussian_fit(inside + rng.normal(0, 0.5, 100_000), inside, delta=1e-5)
    assert 0.97 < bound.epsilon_lower / 10.0 < 1.0
