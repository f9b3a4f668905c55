"""RAPPOR: exact ratios of one and of many reports, memory, and estimates from Bloom filters."""

import copy
import math

import mpmath
import numpy as np
import pytest

from tacit import local
from tacit.local.packed_bits import unpack


def test_one_report_has_the_ratio_of_theorem_two(enumeration):
    rappor = local.Rappor(n_options=3, permanent=0.5, low=0.25, high=0.75)
    laws = [enumeration.law(lambda rng, v=v: rappor.randomize(v, rng=rng))[0] for v in range(3)]
    assert enumeration.ratio(laws) == rappor.worst_case_ratio(n_reports=1)
    f, p, q = 0.5, 0.25, 0.75
    high = f * (p + q) / 2 + (1 - f) * q
    low = f * (p + q) / 2 + (1 - f) * p
    stated = math.log(high * (1 - low) / (low * (1 - high)))
    assert rappor.event_of(1).epsilon == pytest.approx(stated)


@pytest.mark.slow
def test_many_reports_of_one_value_have_the_exact_ratio(enumeration):
    rappor = local.Rappor(n_options=2, permanent=0.5, low=0.25, high=0.75)

    def two_reports(rng, value):
        person = rappor.client(rng)
        return np.concatenate([person.report(value), person.report(value)])

    laws = [enumeration.law(lambda rng, v=v: two_reports(rng, v))[0] for v in range(2)]
    assert enumeration.ratio(laws) == rappor.worst_case_ratio(n_reports=2)


def test_ever_more_reports_approach_the_lifetime_price_of_theorem_one():
    rappor = local.Rappor(n_options=4, n_bits=16, n_hashes=2, n_cohorts=3)
    prices = [rappor.event_of(n).epsilon for n in (1, 2, 10, 100)]
    assert prices == sorted(prices)
    assert prices[-1] <= rappor.lifetime_epsilon
    assert rappor.lifetime_epsilon == pytest.approx(4 * math.log(0.75 / 0.25))
    assert prices[-1] == pytest.approx(rappor.lifetime_epsilon, rel=1e-3)


def test_the_permanent_bits_are_remembered():
    rappor = local.Rappor(n_options=40, permanent=0.5, low=0.0, high=1.0)
    person = rappor.client(rng=3)
    first = person.report(7)
    assert all(np.array_equal(first, person.report(7)) for _ in range(5))
    assert person.spent.epsilon == pytest.approx(rappor.lifetime_epsilon)
    person.report(8)
    assert person.spent.epsilon == pytest.approx(2 * rappor.lifetime_epsilon)


@pytest.mark.parametrize(
    "rappor",
    [
        local.Rappor(n_options=6, permanent=0.25),
        local.Rappor(n_options=20, n_bits=16, n_hashes=2, n_cohorts=8, permanent=0.25),
        local.Rappor(
            n_options=20, n_bits=16, n_hashes=2, n_cohorts=8, permanent=0.05, low=0.0, high=1.0
        ),
    ],
    ids=["basic", "Bloom filter", "little noise"],
)
def test_estimates_are_unbiased_and_errors_are_as_stated(rappor):
    n, rng = 40_000, np.random.default_rng(1)
    options = rng.integers(0, rappor.n_options // 2, size=n)
    truth = np.bincount(options, minlength=rappor.n_options) / n
    errors = []
    for seed in range(12):
        cohorts = rng.integers(0, rappor.n_cohorts, size=n)
        reports = rappor.randomize(options, cohorts, rng=seed)
        found = rappor.estimate(reports, cohorts)
        errors.append((found.values - truth) / found.standard_errors)
    # At least 72 weakly dependent standard normal errors: each bound fails with chance < 1e-4.
    assert abs(np.mean(errors, axis=0)).max() < 5 / math.sqrt(12)
    assert 0.7 < np.std(errors) < 1.4


def test_options_that_share_all_bits_are_refused():
    rappor = local.Rappor(n_options=9, n_bits=4, n_hashes=1)
    with pytest.raises(ValueError, match="share bits"):
        rappor.estimate(rappor.randomize(np.zeros(10, int), rng=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 0.75, "high": 0.5}, "low must be below high"),
        ({"n_cohorts": 2}, "give n_bits"),
        ({"n_bits": 2, "n_hashes": 3}, "at most n_bits"),
        ({"permanent": 0.0}, "permanent must be"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        local.Rappor(n_options=4, **options)


def test_cohorts_must_match_the_reports():
    rappor = local.Rappor(n_options=4, n_bits=8, n_cohorts=2)
    with pytest.raises(ValueError, match="cohort of each report"):
        rappor.randomize([1, 2])
    with pytest.raises(ValueError, match="one cohort for each"):
        rappor.randomize([1, 2], cohorts=[0])


def permanent_bits(person, n_options, value):
    """The remembered bits, which `low` 0 and `high` 1 send as they are."""
    return unpack(person.report(value)[None], n_options)[0]


@pytest.mark.parametrize("by", ["client", "class"])
@pytest.mark.parametrize("rng", [None, 3, "generator"])
def test_different_values_and_reports_have_different_noise(by, rng):
    rappor = local.Rappor(n_options=200, permanent=0.5, low=0.0, high=1.0)
    seed = np.random.default_rng(5) if rng == "generator" else rng
    person = rappor.client(seed) if by == "client" else local.RapporClient(rappor, 0, seed)
    differ = permanent_bits(person, 200, 1) ^ permanent_bits(person, 200, 2)
    assert differ.sum() > 20  # equal noise would leave 2; independent noise 75
    noisy = local.Rappor(n_options=200)
    person = noisy.client(seed) if by == "client" else local.RapporClient(noisy, 0, seed)
    assert not np.array_equal(person.report(1), person.report(1))


def test_a_forked_person_draws_other_noise():
    person = local.Rappor(n_options=200).client()
    assert person.rng is None
    twin = copy.deepcopy(person)  # as a fork does
    assert not np.array_equal(person.report(1), twin.report(1))


@pytest.mark.slow
def test_what_was_spent_bounds_values_that_change_at_the_same_times(enumeration):
    rappor = local.Rappor(n_options=2, permanent=0.5, low=0.0, high=1.0)

    def reports(rng, values):
        person = rappor.client(rng)
        return np.concatenate([person.report(value) for value in values])

    laws = {
        values: enumeration.law(lambda rng, v=values: reports(rng, v))[0]
        for values in [(0, 1), (1, 0), (0, 0), (1, 1)]
    }
    lifetime = rappor.worst_case_ratio(n_reports=None)
    assert enumeration.ratio([laws[0, 0], laws[1, 1]]) == lifetime
    assert enumeration.ratio([laws[0, 1], laws[1, 0]]) == lifetime**2
    assert enumeration.ratio([laws[0, 0], laws[0, 1]]) == float("inf")  # not protected


@pytest.mark.parametrize("n_reports", [1, 2, 50, 1000, 10**6])
@pytest.mark.parametrize("permanent", [1e-12, 0.1, 0.9])
def test_prices_are_rounded_up(n_reports, permanent):
    rappor = local.Rappor(
        n_options=4, n_bits=64, n_hashes=30, permanent=permanent, low=0.1, high=0.7
    )
    with mpmath.workdps(60):
        ratio = rappor.worst_case_ratio(n_reports)
        exact = mpmath.log(mpmath.mpf(ratio.numerator) / mpmath.mpf(ratio.denominator))
        found = rappor.event_of(n_reports).epsilon
        assert exact <= found <= exact * (1 + 1e-12) + 1e-12
    assert found <= rappor.lifetime_epsilon


@pytest.mark.parametrize(("n_bits", "n_hashes"), [(2, 2), (8, 3), (64, 5)])
def test_every_option_sets_as_many_bits_as_there_are_hashes(n_bits, n_hashes):
    rappor = local.Rappor(n_options=30, n_bits=n_bits, n_hashes=n_hashes, n_cohorts=4)
    assert (rappor._codes.sum(axis=2) == n_hashes).all()
