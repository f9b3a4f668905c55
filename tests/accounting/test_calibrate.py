"""Calibration: always on the safe side, to one part in a million, in few evaluations."""

import math

import pytest

from tacit.accounting import (
    RDP,
    BasicComposition,
    calibrate,
    calibrate_count,
    epsilon,
    gaussian_epsilon,
)
from tacit.events import (
    BestOf,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    Relation,
    Repeated,
    Sequence,
)


class Counting:
    """RDP that counts how often it is asked."""

    def __init__(self):
        self.calls = 0

    def epsilon(self, event, *, delta, relation=Relation.ADD_REMOVE):
        self.calls += 1
        return RDP().epsilon(event, delta=delta, relation=relation)

    def delta(self, event, *, epsilon, relation=Relation.ADD_REMOVE):
        raise NotImplementedError


def sgd(rate, steps):
    return lambda noise: Repeated(PoissonSampled(rate, Gaussian(noise)), steps)


FAMILIES = {
    "mnist": (sgd(256 / 60_000, 14_062), 3.0, 1e-5),
    "abadi": (sgd(0.01, 10_000), 1.0, 1e-5),
    "language model": (sgd(1e-4, 100_000), 0.5, 1e-8),
    "tiny epsilon": (sgd(1e-3, 100_000), 0.05, 1e-8),
    "large epsilon": (sgd(0.1, 1000), 50.0, 1e-5),
    "one release": (Gaussian, 1e-3, 1e-6),
    "laplace": (Laplace, 1.0, 1e-9),
    "pure": (PureDP, 1.0, 1e-9),
    "rate": (lambda q: Repeated(PoissonSampled(q, Gaussian(2.0)), 1000), 2.0, 1e-5),
    "selection": (lambda s: BestOf(sgd(0.01, 500)(s), 10.0), 1.0, 1e-6),
    "allocation": (lambda s: Repeated(RandomAllocation(100, Gaussian(s)), 10), 1.0, 1e-6),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_answer_is_safe_and_within_one_in_a_million_of_the_best(name):
    family, target, delta = FAMILIES[name]
    accountant = Counting()
    x = calibrate(family, epsilon=target, delta=delta, accountant=accountant)
    assert accountant.calls <= 16
    price = RDP().epsilon(family(x), delta=delta)
    assert price <= target
    falls = RDP().epsilon(family(2 * x if name != "rate" else x / 2), delta=delta) < price
    falls = falls if name != "rate" else not falls
    beyond = x * (1 - 2e-6) if falls else x * (1 + 2e-6)
    if RDP().epsilon(family(beyond), delta=delta) <= target:  # flat there: pure DP at tiny delta
        assert price == pytest.approx(target, rel=1e-6)


def test_tight_calibration_matches_the_reference():
    # Certified by an independent implementation; see the comparison of accountants.
    noise = calibrate(sgd(0.01, 10_000), epsilon=1.0, delta=1e-5)
    assert noise == pytest.approx(3.812818, rel=3e-6)
    assert epsilon(sgd(0.01, 10_000)(noise), delta=1e-5) <= 1.0


@pytest.mark.parametrize("target", [1e-6, 0.3, 8.0, 1e3])
def test_gaussian_noise_equals_the_closed_form(target):
    noise = calibrate(Gaussian, epsilon=target, delta=1e-9)
    assert gaussian_epsilon(1 / noise, 1e-9) <= target * (1 + 1e-9)
    assert gaussian_epsilon((1 + 2e-6) / noise, 1e-9) > target


def test_count_is_the_most_that_fits():
    step = PoissonSampled(0.01, Gaussian(4.0))
    accountant = Counting()
    n = calibrate_count(lambda n: Repeated(step, n), epsilon=1.0, delta=1e-5, accountant=accountant)
    assert isinstance(n, int)
    assert accountant.calls <= 20
    assert RDP().epsilon(Repeated(step, n), delta=1e-5) <= 1.0
    assert RDP().epsilon(Repeated(step, n + 1), delta=1e-5) > 1.0


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100, 12_345])
def test_count_is_exact_for_basic_sums(n):
    target = 0.1 * n * (1 + 1e-9)
    found = calibrate_count(
        lambda count: Repeated(PureDP(0.1), count),
        epsilon=target,
        delta=1e-9,
        accountant=BasicComposition(),
    )
    assert found == n


def test_count_stops_at_the_most_allowed():
    family = lambda n: Repeated(Gaussian(1e9), n)  # noqa: E731  # short and local
    assert calibrate_count(family, epsilon=1.0, delta=1e-5, most=1000, accountant=RDP()) == 1000


def test_bounds_are_respected():
    assert calibrate(Gaussian, epsilon=50.0, delta=1e-5, bounds=(1.0, 10.0)) == 1.0
    rate = calibrate(lambda q: PoissonSampled(q, Gaussian(50.0)), epsilon=1.0, delta=1e-5)
    assert rate == 1.0  # the end of the domain is within the budget
    with pytest.raises(ValueError, match="bounds must be"):
        calibrate(Gaussian, epsilon=1.0, delta=1e-5, bounds=(2.0, 1.0))


def test_unreachable_targets_say_so():
    family = lambda s: Sequence((PureDP(2.0), Gaussian(s)))  # noqa: E731  # short and local
    with pytest.raises(ValueError, match="cannot be reached"):
        calibrate(family, epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="cannot be reached"):
        calibrate(Gaussian, epsilon=0.1, delta=1e-5, bounds=(1.0, 2.0))
    with pytest.raises(ValueError, match="cannot be reached"):
        calibrate_count(lambda n: Repeated(Gaussian(1.0), n), epsilon=0.1, delta=1e-5)


def test_families_that_do_not_change_or_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="does not change"):
        calibrate(lambda _: Gaussian(1.0), epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="outside its domain"):
        calibrate(lambda x: Gaussian(-x), epsilon=1.0, delta=1e-5)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_budgets_are_checked(bad):
    with pytest.raises(ValueError, match="epsilon must be"):
        calibrate(Gaussian, epsilon=bad, delta=1e-5)
    with pytest.raises(ValueError, match="delta must be"):
        calibrate(Gaussian, epsilon=1.0, delta=bad)
