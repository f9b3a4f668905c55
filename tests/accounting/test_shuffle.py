"""Amplification by shuffling: against exact values, high precision, and published formulas."""

import itertools
import math
import time
from collections import Counter

import mpmath
import numpy as np
import pytest
from _shuffle_closed_form import shuffled_closed_form
from scipy.stats import binom

import tacit
from tacit import events as ev
from tacit.accounting import RDP
from tacit.accounting.one_event import pure_epsilon
from tacit.accounting.shuffle import (
    _binomial_tail,
    clone_probability,
    local_guarantee,
    shuffled_atoms,
    shuffled_delta,
    shuffled_epsilon,
)
from tacit.errors import BudgetExceeded, UnsupportedEvent


def pair_delta(local_epsilon: float, n: int, epsilon: float, gamma: float) -> float:
    """Hockey-stick divergence of the pair of the reduction, summed over all outcomes."""
    e, total = math.exp(local_epsilon), 0.0
    for c in range(n):
        a = np.arange(c + 2)
        low, high = binom.pmf(a - 1, c, 0.5), binom.pmf(a, c, 0.5)
        p, q = (e * low + high) / (e + 1), (low + e * high) / (e + 1)
        total += binom.pmf(c, n - 1, gamma) * np.maximum(p - math.exp(epsilon) * q, 0).sum()
    return total


def shuffled_law(channel: np.ndarray, values: list[int]) -> dict[tuple[int, ...], float]:
    """Exact law of the counts of each report when one person holds each of `values`."""
    law = {(0,) * channel.shape[1]: 1.0}
    for value in values:
        grown: dict[tuple[int, ...], float] = Counter()
        for counts, probability in law.items():
            for report, chance in enumerate(channel[value]):
                new = counts[:report] + (counts[report] + 1,) + counts[report + 1 :]
                grown[new] += probability * chance
        law = grown
    return law


def exact_delta(channel: np.ndarray, n: int, epsilon: float) -> float:
    """Largest delta over all data sets of the others and all pairs of values of one person."""
    worst = 0.0
    k = len(channel)
    for others in itertools.combinations_with_replacement(range(k), n - 1):
        laws = [shuffled_law(channel, [x, *others]) for x in range(k)]
        for p, q in itertools.permutations(laws, 2):
            delta = sum(max(p[key] - math.exp(epsilon) * q.get(key, 0.0), 0.0) for key in p)
            worst = max(worst, delta)
    return worst


def response(epsilon: float, k: int) -> np.ndarray:
    """Randomized response as a matrix: row x is the law of the report of x."""
    e = math.exp(epsilon)
    return np.where(np.eye(k, dtype=bool), e, 1.0) / (e + k - 1)


def subset_selection(epsilon: float) -> np.ndarray:
    """Subset selection of 2 of 3 options: reports are likely under two values."""
    e = math.exp(epsilon)
    return np.where(np.eye(3, dtype=bool), 1.0, e) / (2 * e + 1)


@pytest.mark.parametrize("n", [2, 5, 10, 20])
@pytest.mark.parametrize("local_epsilon", [0.5, 1.0, 3.0])
def test_never_below_the_exact_value_of_binary_randomized_response(n, local_epsilon):
    gamma = clone_probability(local_epsilon, is_response=True)
    for epsilon in (0.0, 0.1 * local_epsilon, 0.5 * local_epsilon, 0.9 * local_epsilon):
        exact = exact_delta(response(local_epsilon, 2), n, epsilon)
        bound = shuffled_delta(local_epsilon, n, epsilon=epsilon, clones=gamma)
        assert exact <= bound
        assert bound <= shuffled_delta(local_epsilon, n, epsilon=epsilon) + 1e-12


@pytest.mark.parametrize("n", [2, 4, 7])
@pytest.mark.parametrize("local_epsilon", [0.5, 2.0])
def test_never_below_the_exact_value_with_three_options(n, local_epsilon):
    gamma = clone_probability(local_epsilon, is_response=True)
    for epsilon in (0.1 * local_epsilon, 0.5 * local_epsilon):
        exact = exact_delta(response(local_epsilon, 3), n, epsilon)
        assert exact <= shuffled_delta(local_epsilon, n, epsilon=epsilon, clones=gamma)
        exact = exact_delta(subset_selection(local_epsilon), n, epsilon)
        assert exact <= shuffled_delta(local_epsilon, n, epsilon=epsilon)


@pytest.mark.slow
@pytest.mark.parametrize("local_epsilon", [0.5, 1.0, 3.0])
def test_never_below_the_exact_value_for_every_n_up_to_twenty(local_epsilon):
    gamma = clone_probability(local_epsilon, is_response=True)
    for n, share in itertools.product(range(1, 21), (0.0, 0.05, 0.2, 0.4, 0.6, 0.8)):
        epsilon = share * local_epsilon
        two = exact_delta(response(local_epsilon, 2), n, epsilon)
        assert two <= shuffled_delta(local_epsilon, n, epsilon=epsilon, clones=gamma)
        if n <= 9:
            for channel in (response(local_epsilon, 3), subset_selection(local_epsilon)):
                exact = exact_delta(channel, n, epsilon)
                assert exact <= shuffled_delta(local_epsilon, n, epsilon=epsilon)


@pytest.mark.parametrize("local_epsilon", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("n", [1, 3, 60])
@pytest.mark.parametrize("is_response", [False, True])
def test_delta_is_that_of_the_reduction(local_epsilon, n, is_response):
    gamma = clone_probability(local_epsilon, is_response=is_response)
    for epsilon in (0.0, 0.03, 0.3 * local_epsilon, 0.8 * local_epsilon):
        found = shuffled_delta(local_epsilon, n, epsilon=epsilon, clones=gamma)
        exact = pair_delta(local_epsilon, n, epsilon, gamma)
        assert exact * (1 - 1e-9) <= found <= exact * 1.02 + 1e-30


def fair_binomial_tail(first: int, count: int) -> tuple[float, float]:
    """P(A >= first) and P(A = first - 1) for A ~ Bin(count, 1/2), independently of the library.

    The mass comes from mpmath's log-gamma function with 40 digits. The tail is that mass times a
    sum of products of ratios of successive masses, (count - j) / (j + 1).
    """
    with mpmath.workdps(40):
        logs = (
            mpmath.loggamma(count + 1) - mpmath.loggamma(first) - mpmath.loggamma(count - first + 2)
        )
        mass = float(mpmath.exp(logs - count * mpmath.log(2)))
    j = np.arange(first - 1, min(count, first + int(20 * math.sqrt(count)) + 100), dtype=np.float64)
    return mass * float(np.cumprod((count - j) / (j + 1)).sum()), mass


@pytest.mark.parametrize("count", [10, 37, 500, 10**4, 10**6, 4 * 10**7])
def test_binomial_tails_are_accurate_far_below_the_margin(count):
    for deviations in (0.5, 2, 5, 8):
        first = min(count, math.floor(count / 2 + deviations * math.sqrt(count) / 2) + 1)
        tail, mass = _binomial_tail(np.array(float(first)), np.array(float(count)))
        expected_tail, expected_mass = fair_binomial_tail(first, count)
        # delta is a difference of two such terms that cancel to about 1 / deviations^2 of each.
        assert float(mass) == pytest.approx(expected_mass, rel=1e-10)
        assert float(tail) == pytest.approx(expected_tail, rel=1e-10)


def fine_epsilon(local_epsilon: float, n: int, delta: float) -> float:
    """The numerical bound without grouping on the safe side, from independent tails."""
    gamma, e = math.exp(-local_epsilon), math.exp(local_epsilon)
    mean, spread = (n - 1) * gamma, 8 * math.sqrt((n - 1) * gamma * (1 - gamma))
    edges = np.unique(np.linspace(max(mean - spread, -1), min(mean + spread, n - 1), 60).round())
    weights = np.diff(binom.cdf(edges, n - 1, gamma))
    middles = np.round((edges[1:] + edges[:-1] + 1) / 2).astype(int)

    def delta_at(epsilon: float) -> float:
        growth, total = math.exp(epsilon), 0.0
        for count, weight in zip(middles.tolist(), weights.tolist(), strict=True):
            edge = (growth * e - 1) / ((e - 1) * (growth + 1))
            first = math.floor(edge * (count + 1)) + 1
            if first <= count:
                tail, mass = fair_binomial_tail(first, count)
                total += weight * ((e - growth) / (e + 1) * mass - (growth - 1) * tail)
        return total

    low, high = 0.0, local_epsilon
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if delta_at(middle) <= delta else (middle, high)
    return high


@pytest.mark.slow
@pytest.mark.parametrize("n", [10**3, 10**4, 10**5, 10**6, 10**7, 10**8])
@pytest.mark.parametrize("local_epsilon", [1.0, 3.0])
def test_epsilon_is_within_five_percent_of_the_numerical_bound(n, local_epsilon):
    delta = 1 / (10 * n)
    found = shuffled_epsilon(local_epsilon, n, delta=delta)
    assert found == pytest.approx(fine_epsilon(local_epsilon, n, delta), rel=0.01)


@pytest.mark.parametrize("n", [10**3, 10**6, 10**8])
def test_epsilon_takes_less_than_fifty_milliseconds(n):
    best = math.inf
    for _ in range(3):
        start = time.process_time()
        shuffled_epsilon(1.0, n, delta=1e-8)
        best = min(best, time.process_time() - start)
    assert best < 0.05


@pytest.mark.parametrize("n", [10**3, 10**5, 10**8])
@pytest.mark.parametrize("local_epsilon", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("is_response", [False, True])
def test_the_closed_form_is_above_the_numerical_bound(n, local_epsilon, is_response):
    gamma = clone_probability(local_epsilon, is_response=is_response)
    closed = shuffled_closed_form(local_epsilon, n, delta=1e-6, clones=gamma)
    assert shuffled_epsilon(local_epsilon, n, delta=1e-6, clones=gamma) <= closed <= local_epsilon


def test_the_closed_forms_are_those_of_the_papers():
    e, n, delta = math.exp(1.0), 10**5, 1e-6
    log = math.log(4 / delta)
    first = math.log1p((e - 1) / (e + 1) * (8 * math.sqrt(e * log / n) + 8 * e / n))
    assert shuffled_closed_form(1.0, n, delta=delta) == pytest.approx(first)
    second = math.log1p((e - 1) * (4 * math.sqrt(2 * log / ((e + 1) * n)) + 4 / n))
    gamma = clone_probability(1.0, is_response=True)
    assert shuffled_closed_form(1.0, n, delta=delta, clones=gamma) == pytest.approx(second)
    assert shuffled_closed_form(4.0, 100, delta=1e-6) == 4.0


@pytest.mark.parametrize(
    ("local_epsilon", "n"), [(1.0, 10), (2.0, 50), (4.0, 300), (1.0, 10**4), (0.5, 10**7)]
)
def test_the_atoms_dominate_the_pair_and_are_tight(local_epsilon, n):
    gamma = clone_probability(local_epsilon)
    atoms = shuffled_atoms(local_epsilon, n, gamma)
    assert atoms.p.sum() == pytest.approx(1, abs=1e-9)
    assert atoms.q.sum() == pytest.approx(1, abs=1e-9)
    np.testing.assert_allclose(atoms.q, atoms.p * np.exp(-atoms.losses), rtol=1e-6, atol=1e-25)
    for delta in (1e-2, 1e-4, 1e-6):
        epsilon = shuffled_epsilon(local_epsilon, n, delta=delta)
        found = np.maximum(atoms.p - math.exp(epsilon) * atoms.q, 0).sum()
        exact = shuffled_delta(local_epsilon, n, epsilon=epsilon)
        assert exact * (1 - 1e-6) <= found <= exact * 1.05 + 1e-15


def test_more_persons_and_less_local_noise_act_as_they_should():
    by_n = [shuffled_epsilon(1.0, n, delta=1e-6) for n in (1, 10, 100, 1000, 10**5)]
    assert by_n == sorted(by_n, reverse=True)
    assert by_n[0] == pytest.approx(1.0, abs=1e-4)
    by_local = [shuffled_epsilon(e, 1000, delta=1e-6) for e in (0.1, 0.5, 1, 2, 4)]
    assert by_local == sorted(by_local)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="delta must be"):
        shuffled_epsilon(1.0, 10, delta=0.0)
    with pytest.raises(ValueError, match="n_reports must be"):
        shuffled_epsilon(1.0, 0, delta=1e-6)
    with pytest.raises(ValueError, match="clones must be"):
        shuffled_delta(1.0, 10, epsilon=0.1, clones=1.5)


ROUND = ev.Shuffled(ev.RandomizedResponse(0.5, 4), 10_000)


@pytest.mark.parametrize("relation", list(ev.Relation))
def test_an_event_is_priced_by_its_local_epsilon_and_kind(relation):
    local = math.log(5)  # (1 - 0.5 + 0.125) / 0.125
    gamma = clone_probability(local, is_response=True)
    direct = shuffled_epsilon(local, 10_000, delta=1e-6, clones=gamma)
    assert tacit.epsilon(ROUND, delta=1e-6, relation=relation) == pytest.approx(direct, rel=1e-5)
    anything = ev.Shuffled(ev.PureDP(local, replace_factor=1.0), 10_000)
    looser = shuffled_epsilon(local, 10_000, delta=1e-6)
    assert tacit.epsilon(anything, delta=1e-6, relation=relation) == pytest.approx(looser, rel=1e-5)
    assert direct < looser


def test_the_local_epsilon_of_a_report_is_that_of_a_replaced_value():
    assert local_guarantee(ev.Shuffled(ev.PureDP(0.5), 9)).epsilon == 1.0
    assert local_guarantee(ev.Shuffled(ev.PureDP(0.5, replace_factor=1.0), 9)).epsilon == 0.5
    for relation in ev.Relation:
        assert pure_epsilon(ev.Shuffled(ev.PureDP(0.5), 9), relation) == 1


def test_repeated_rounds_cost_what_the_product_of_pairs_does():
    e, n, gamma = math.exp(1.0), 6, math.exp(-1.0)
    p, q = [], []
    for c in range(n):
        a = np.arange(c + 2)
        low, high = binom.pmf(a - 1, c, 0.5), binom.pmf(a, c, 0.5)
        weight = binom.pmf(c, n - 1, gamma)
        p.extend(weight * (e * low + high) / (e + 1))
        q.extend(weight * (low + e * high) / (e + 1))
    p_all, q_all = np.multiply.outer(p, p).ravel(), np.multiply.outer(q, q).ravel()
    event = ev.Repeated(ev.Shuffled(ev.PureDP(1.0, replace_factor=1.0), n), 2)
    for delta in (0.3, 0.1, 0.01):
        found = tacit.epsilon(event, delta=delta)
        exact = np.maximum(p_all - math.exp(found) * q_all, 0).sum()
        assert exact <= delta
        below = np.maximum(p_all - math.exp(found * 0.98) * q_all, 0).sum()
        assert below > delta * 0.999 or found == 0


@pytest.mark.parametrize("count", [1, 10, 200])
def test_rényi_prices_are_above_tight_ones_and_not_far(count):
    event = ev.Repeated(ROUND, count)
    tight = tacit.epsilon(event, delta=1e-6)
    assert tight <= tacit.epsilon(event, delta=1e-6, accountant=RDP()) <= 1.2 * tight
    assert tacit.delta(event, epsilon=tight) <= 1e-6 * (1 + 1e-3)


def test_rounds_are_paid_from_a_ledger():
    ledger = tacit.Ledger(budget=tacit.Budget(epsilon=0.5, delta=1e-6))
    for _ in range(10):
        ledger.spend(ROUND)
    assert 0.2 < ledger.epsilon(delta=1e-6) <= 0.5
    with pytest.raises(BudgetExceeded):
        ledger.spend(ev.Repeated(ROUND, 200))


def test_what_is_not_pure_has_no_price():
    with pytest.raises(UnsupportedEvent, match="must be pure DP"):
        tacit.epsilon(ev.Shuffled(ev.Gaussian(1.0), 100), delta=1e-6)
    assert tacit.epsilon(ev.Shuffled(ev.PureDP(0.0), 100), delta=1e-6) == 0
    assert tacit.bracket(ROUND, delta=1e-6).lower == 0


@pytest.mark.parametrize("local_epsilon", [30.0, 45.0, 100.0, 400.0, 499.0])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_reports_with_hardly_any_noise_are_not_amplified(local_epsilon, n):
    # There are no clones to speak of: delta is that of one report of binary randomized response.
    for share in (0.1, 0.5, 0.9, 0.99):
        epsilon = share * local_epsilon
        alone = -math.expm1(epsilon - local_epsilon) / (1 + math.exp(-local_epsilon))
        floor = alone * (1 - clone_probability(local_epsilon)) ** (n - 1)
        assert shuffled_delta(local_epsilon, n, epsilon=epsilon) >= floor * (1 - 1e-12)
    assert shuffled_epsilon(local_epsilon, n, delta=1e-6) >= local_epsilon * (1 - 1e-6)
    event = ev.Shuffled(ev.PureDP(local_epsilon, replace_factor=1.0), n)
    assert tacit.epsilon(ev.Repeated(event, 2), delta=1e-6) >= 2 * local_epsilon * (1 - 1e-6)
    assert tacit.epsilon(event, delta=1e-6, accountant=RDP()) >= local_epsilon * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_never_below_the_exact_value_of_arbitrary_randomizers(seed):
    # Three values, four reports; each probability is e^local or 1 times a base that is shared.
    rng, local_epsilon, n = np.random.default_rng(seed), 1.5, 4
    while True:
        is_likely = rng.random((3, 4)) < 0.5
        base = rng.dirichlet(np.ones(4))
        channel = np.where(is_likely, math.exp(local_epsilon / 2), 1.0) * base
        channel /= channel.sum(axis=1, keepdims=True)
        spread = (channel.max(axis=0) / channel.min(axis=0)).max()
        if spread > 1.5:
            break
    epsilon_0 = math.log(spread)
    for share in (0.0, 0.2, 0.6):
        exact = exact_delta(channel, n, share * epsilon_0)
        assert exact <= shuffled_delta(epsilon_0, n, epsilon=share * epsilon_0) + 1e-15
