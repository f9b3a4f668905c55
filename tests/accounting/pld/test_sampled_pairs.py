"""Samples of every kind, mixtures and discrete noise: against enumeration, quadrature and peers."""

import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from tacit import accounting as acc
from tacit.accounting.pld import PLD
from tacit.accounting.pld.loss_laws import (
    Folded,
    MixedNormals,
    Mixture,
    Normal,
    OneRelease,
    Sampled,
)
from tacit.errors import UnsupportedEvent
from tacit.events import (
    DiscreteGaussian,
    DiscreteLaplace,
    FixedSizeSampled,
    Gaussian,
    GaussianMixture,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    Relation,
    RenyiCurve,
    Repeated,
    SampledWithReplacement,
    Sequence,
    TreeAggregation,
    TruncatedPoissonSampled,
    ZeroConcentratedDP,
)
from tacit.sampling import Poisson


def hockey_stick(p, q, epsilon):
    """Integral of (p - e^epsilon q)_+ for two lists of (weight, mean) of normal laws."""
    x = np.linspace(-14.0, 14.0, 28_001)

    def density(parts, scale=1.0):
        return sum(weight * norm.pdf(x, mean, scale) for weight, mean in parts)

    return np.maximum(density(p) - math.exp(epsilon) * density(q), 0.0).sum() * (x[1] - x[0])


def samples_of_fixed_size(values, size):
    sets = list(itertools.combinations(values, size))
    return [(1 / len(sets), sum(chosen)) for chosen in sets]


def truncated_samples(values, rate, most):
    found = []
    for drawn in itertools.product((0, 1), repeat=len(values)):
        chosen = [v for v, is_in in zip(values, drawn, strict=True) if is_in]
        weight = math.prod(rate if is_in else 1 - rate for is_in in drawn)
        parts = samples_of_fixed_size(chosen, min(len(chosen), most))
        found += [(weight * share, total) for share, total in parts]
    return found


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", [1, 2])
def test_a_sample_of_fixed_size_is_bounded_and_met(size, epsilon):
    # The noise multiplier is 1; records contribute -1 to 1, and there are three or four of them.
    others = [-1.0, -1.0, -1.0]
    with_it, without = (
        samples_of_fixed_size([*others, 1.0], size),
        samples_of_fixed_size(others, size),
    )
    event = FixedSizeSampled(size, 4, Gaussian(1.0))
    true = max(hockey_stick(with_it, without, epsilon), hockey_stick(without, with_it, epsilon))
    bound = PLD().delta(event, epsilon=epsilon)
    assert true <= bound * (1 + 1e-6)
    assert true >= 0.999 * bound  # the larger data set has the declared number of records
    for values in ([0.5, -1.0, 1.0], [0.0, 0.0, 0.0]):
        p, q = samples_of_fixed_size([*values, 1.0], size), samples_of_fixed_size(values, size)
        assert hockey_stick(p, q, epsilon) <= bound * (1 + 1e-6)
    replaced = samples_of_fixed_size([*others, -1.0], size)
    bound = PLD().delta(event, epsilon=epsilon, relation=Relation.REPLACE_ONE)
    assert hockey_stick(with_it, replaced, epsilon) <= bound * (1 + 1e-6)
    lower = acc.bracket(event, delta=0.05, relation=Relation.REPLACE_ONE)
    assert 0 < lower.lower <= lower.upper


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("most", [1, 2])
def test_a_truncated_sample_is_bounded(most, epsilon):
    event = TruncatedPoissonSampled(0.3, most, 3, Gaussian(1.0))
    bounds = {r: PLD().delta(event, epsilon=epsilon, relation=r) for r in Relation}
    rng = np.random.default_rng(most)
    for size in (2, 2, 3, 3):  # of the three records one leaves, or a fourth joins them
        others = rng.choice([-1.0, 0.0, 1.0], size).tolist()
        with_it, without, old, blank = (
            truncated_samples(values, 0.3, most)
            for values in ([*others, 1.0], others, [*others, -1.0], [*others, 0.0])
        )
        neighbors = [(Relation.ADD_REMOVE, without)]
        if size == 2:
            neighbors += [(Relation.REPLACE_ONE, old), (Relation.ZERO_OUT, blank)]
        for relation, other in neighbors:
            for p, q in ((with_it, other), (other, with_it)):
                assert hockey_stick(p, q, epsilon) <= bounds[relation] * (1 + 1e-6)


@pytest.mark.parametrize("n_records", [2, 5])
def test_a_sample_that_is_always_cut_costs_what_the_dearer_neighbor_costs(n_records):
    # At rate 1 and with at most one record, the record is the one that is seen, in the place of
    # another one, with probability 1 / n. The dearer neighbor is the one without a record.
    event = TruncatedPoissonSampled(1.0, 1, n_records, Gaussian(1.0))
    as_fixed = FixedSizeSampled(1, n_records, Gaussian(1.0))
    for epsilon in (0.1, 1.0):
        found, exact = (PLD().delta(one, epsilon=epsilon) for one in (event, as_fixed))
        assert found == pytest.approx(exact, rel=1e-6)
    first, second = PLD().profiles(event, [0.1, 1.0])
    assert max(first[0], second[0]) == pytest.approx(PLD().delta(event, epsilon=0.1), rel=1e-4)


def test_an_epoch_of_random_allocation_has_both_ends():
    # Two steps: the record moves one of two normal numbers, each with probability 1/2.
    x = np.linspace(-7.0, 8.0, 751)
    plain, moved = norm.pdf(x), norm.pdf(x, 1.0)
    q = np.multiply.outer(plain, plain)
    p = 0.5 * (np.multiply.outer(moved, plain) + np.multiply.outer(plain, moved))
    found = acc.bracket(RandomAllocation(2, Gaussian(1.0)), delta=1e-3)
    true_at = [(np.maximum(p - math.exp(e) * q, 0.0).sum() * (x[1] - x[0]) ** 2) for e in found]
    assert true_at[0] >= 1e-3 * (1 - 1e-3) >= true_at[1] * (1 - 2e-3)
    assert found.lower >= 0.6 * found.upper


def test_a_truncated_sample_costs_little_more_than_a_poisson_sample():
    steps = Repeated(TruncatedPoissonSampled(0.01, 160, 10_000, Gaussian(1.0)), 1000)
    plain = acc.epsilon(Repeated(PoissonSampled(0.01, Gaussian(1.0)), 1000), delta=1e-5)
    found = acc.bracket(steps, delta=1e-5)
    assert plain * (1 - 1e-6) <= found.upper <= 1.01 * plain
    assert found.lower >= 0.99 * plain


# Records of one user in one lot: rate 0.01, 1,000 steps, noise 1, delta 1e-5; recomputed with
# dp_accounting's mixture of Gaussians on grids of 1e-4, 1e-3 and 1e-3.
@pytest.mark.parametrize(
    ("records", "epsilon"),
    [
        (1, 1.828),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((4, 8.899), (10, 27.900))),
    ],
)
def test_several_records_of_one_user_in_a_lot(records, epsilon):
    step = Poisson(0.01).amplify_user(Gaussian(1.0), records)
    found = acc.bracket(Repeated(step, 1000), delta=1e-5)
    assert found.upper == pytest.approx(epsilon, abs=1e-3)
    assert found.width <= 1e-3 * found.upper
    if records == 1:
        one = acc.bracket(Repeated(PoissonSampled(0.01, Gaussian(1.0)), 1000), delta=1e-5)
        assert found.lower <= one.upper
        assert one.lower <= found.upper


MIXED = [
    MixedNormals(sigma, shifts, weights, sign)
    for sigma, shifts, weights in (
        (1.0, (0.0, 1.0, 2.0), (0.9, 0.08, 0.02)),
        (0.4, (0.0, 1.0), (0.999, 0.001)),
        (3.0, (0.5, 4.0), (0.3, 0.7)),
    )
    for sign in (1, -1)
]


@pytest.mark.parametrize("law", MIXED, ids=str)
def test_masses_of_a_mixture_are_those_of_its_densities(law):
    low, high = law.span(math.log(1e-6))
    edges = np.linspace(max(low, -3.0), min(high, 3.0), 9)
    p, q = law.cells(edges)
    assert p.sum() == pytest.approx(1.0, abs=1e-13)
    assert q.sum() == pytest.approx(1.0, abs=1e-13)
    x = np.linspace(-12 * law.sigma, 12 * law.sigma + 4, 400_001)
    mixed = sum(w * norm.pdf(x, s, law.sigma) for s, w in zip(law.shifts, law.weights, strict=True))
    plain = norm.pdf(x, 0, law.sigma)
    loss = law.sign * np.log(mixed / plain)
    first, second = (mixed, plain) if law.sign == 1 else (plain, mixed)
    cell = np.searchsorted(edges, loss)
    for mass, density in ((p, first), (q, second)):
        found = np.bincount(cell, density * (x[1] - x[0]), len(edges) + 1)
        assert mass == pytest.approx(found, abs=2e-4)
    epsilon = 0.3
    true = np.maximum(first - math.exp(epsilon) * second, 0.0).sum() * (x[1] - x[0])
    assert OneRelease(law).delta(epsilon).upper == pytest.approx(true, abs=1e-5)


def test_a_folded_law_has_the_profile_of_its_half_in_both_directions():
    half = Sampled(Normal(0.7), 0.2, 1, 0)
    folded = Folded(half)
    p, q = folded.cells(np.linspace(-2, 2, 40))  # the atom at 0 is inside a cell
    assert p.sum() == pytest.approx(1.0, abs=1e-13)
    assert q.sum() == pytest.approx(1.0, abs=1e-13)
    assert p[::-1] == pytest.approx(q, abs=1e-13)
    for epsilon in (0.0, 0.1, 0.7, 2.0):
        assert OneRelease(folded).delta(epsilon).upper == pytest.approx(
            OneRelease(half).delta(epsilon).upper, rel=1e-9
        )
    both = Mixture((half, folded), (0.5, 0.5))
    assert OneRelease(both).delta(0.4).upper == pytest.approx(
        OneRelease(half).delta(0.4).upper, rel=1e-9
    )


def exact_delta(p, q, epsilon):
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


@pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.REPLACE_ONE])
@pytest.mark.parametrize("sensitivity", [1, 3])
def test_discrete_noise_has_the_price_of_its_probabilities(sensitivity, relation):
    shift = sensitivity * (2 if relation is Relation.REPLACE_ONE else 1)
    k = np.arange(-400, 401)
    for event, weight in (
        (DiscreteGaussian(3.0, sensitivity), np.exp(-(k**2) / 18.0)),
        (DiscreteLaplace(4.0, sensitivity), np.exp(-np.abs(k) / 4.0)),
    ):
        q = weight / weight.sum()
        p = np.roll(q, shift)
        for epsilon in (0.0, 0.2, 1.0):
            found = PLD().delta_bracket(event, epsilon=epsilon, relation=relation)
            true = exact_delta(p, q, epsilon)
            assert found.lower - 1e-12 <= true <= found.upper + 1e-12
        two = acc.epsilon(Repeated(event, 2), delta=1e-3, relation=relation)
        pp, qq = np.outer(p, p).ravel(), np.outer(q, q).ravel()
        assert exact_delta(pp, qq, two) <= 1e-3 * (1 + 1e-9)
        assert exact_delta(pp, qq, 0.99 * two) > 1e-3


def test_wide_discrete_noise_costs_what_continuous_noise_costs():
    wide = acc.epsilon(Repeated(DiscreteGaussian(60.0, 3), 10), delta=1e-6)
    assert wide == pytest.approx(acc.epsilon(Repeated(Gaussian(20.0), 10), delta=1e-6), rel=1e-3)
    assert acc.epsilon(DiscreteGaussian(5e3), delta=1e-6) > 0  # by RDP


def test_a_sample_of_a_sample_is_a_sample():
    nested = PoissonSampled(0.1, PoissonSampled(0.5, Gaussian(2.0)))
    plain = acc.bracket(Repeated(PoissonSampled(0.05, Gaussian(2.0)), 50), delta=1e-6)
    assert acc.epsilon(Repeated(nested, 50), delta=1e-6) == pytest.approx(plain.upper, rel=1e-9)


def test_a_tree_is_one_gaussian_release():
    for steps, depth in ((1, 1), (2, 2), (3, 2), (4, 3), (1000, 10)):
        tree = acc.epsilon(TreeAggregation(5.0, steps), delta=1e-6)
        assert tree == pytest.approx(
            acc.epsilon(Gaussian(5 / math.sqrt(depth)), delta=1e-6), rel=1e-9
        )


def test_several_releases_on_one_sample_have_both_ends():
    inner = Sequence((Laplace(2.0), Laplace(3.0)))
    found = acc.bracket(PoissonSampled(0.2, inner), delta=1e-4)
    # Amplification: delta of the sample at log(1 + q (e^eps - 1)) is q times that of the releases.
    whole = acc.bracket(inner, delta=5e-4)
    for end, other in zip(found, whole, strict=True):
        assert end == pytest.approx(math.log1p(0.2 * math.expm1(other)), rel=1e-3)
    many = acc.bracket(Repeated(PoissonSampled(0.2, inner), 30), delta=1e-5)
    assert 0.99 * many.upper <= many.lower <= many.upper
    equal = acc.epsilon(PoissonSampled(0.2, Sequence((PureDP(0.5), PureDP(0.0)))), delta=1e-5)
    assert equal == pytest.approx(
        acc.epsilon(PoissonSampled(0.2, PureDP(0.5)), delta=1e-5), rel=1e-3
    )


def test_zcdp_and_its_samples_are_bounded():
    rho = 0.5 / 9.0  # of Gaussian noise 3
    plain = acc.epsilon(ZeroConcentratedDP(rho), delta=1e-5)
    assert plain == pytest.approx(acc.RDP().epsilon(Gaussian(3.0), delta=1e-5), rel=1e-6)
    assert acc.epsilon(ZeroConcentratedDP(rho, 1e-5), delta=1e-5) == math.inf
    assert plain < acc.epsilon(ZeroConcentratedDP(rho, 1e-6), delta=1e-5) < 1.1 * plain
    for sampled in (ZeroConcentratedDP(rho), RenyiCurve((2.0, 4.0, 16.0), (0.12, 0.24, 0.9))):
        found = acc.epsilon(Repeated(PoissonSampled(0.1, sampled), 5), delta=1e-5)
        least = acc.epsilon(Repeated(PoissonSampled(0.1, Gaussian(3.0)), 5), delta=1e-5)
        assert least < found < acc.epsilon(Repeated(sampled, 5), delta=1e-5)
    doubled = acc.epsilon(ZeroConcentratedDP(rho), delta=1e-5, relation=Relation.REPLACE_ONE)
    assert doubled == pytest.approx(acc.epsilon(ZeroConcentratedDP(4 * rho), delta=1e-5))


def test_sampling_with_replacement_is_a_binomial_number_of_draws():
    event = SampledWithReplacement(3, 10, Gaussian(1.0))
    weights = [math.comb(3, k) * 0.1**k * 0.9 ** (3 - k) for k in range(4)]
    p, q = list(zip(weights, range(4), strict=True)), [(1.0, 0.0)]
    for epsilon in (0.1, 0.5):
        true = max(hockey_stick(p, q, epsilon), hockey_stick(q, p, epsilon))
        found = PLD().delta(event, epsilon=epsilon, relation=Relation.ZERO_OUT)
        assert found == pytest.approx(true, rel=1e-4)
    replaced = acc.epsilon(event, delta=1e-3, relation=Relation.REPLACE_ONE)
    assert replaced > acc.epsilon(event, delta=1e-3, relation=Relation.ZERO_OUT)
    with pytest.raises(UnsupportedEvent, match="with replacement"):
        acc.epsilon(event, delta=1e-3)


@pytest.mark.parametrize("draws", [1, 2, 4])
@pytest.mark.parametrize("records", [3, 12])
def test_replacement_in_draws_with_replacement_costs_what_its_theorem_says(draws, records):
    """Against sums over all numbers of draws of each kind of record, and against the theorem."""
    relation, noise, alphas = Relation.REPLACE_ONE, 1.5, np.array([1.0, 1.2, 2.0, 5.0])
    event = SampledWithReplacement(draws, records, Gaussian(noise))
    found = [acc.delta(event, epsilon=math.log(a), relation=relation) for a in alphas]
    p = 1 / records
    weights = [math.comb(draws, k) * p**k * (1 - p) ** (draws - k) for k in range(draws + 1)]
    inner = 1 + (alphas - 1) / (1 - weights[0])
    parts = [
        w * np.array([acc.gaussian_delta(2 * k / noise, epsilon=math.log(a)) for a in inner])
        for k, w in list(enumerate(weights))[1:]
    ]
    assert np.all(np.sum(parts, axis=0) <= np.array(found) * (1 + 1e-7))
    assert found == pytest.approx(np.sum(parts, axis=0), rel=1e-3)
    for n_high in range(records):  # the others contribute +1 or -1, the record moves from +1 to -1
        high, low = [], []
        for k, w in enumerate(weights):
            for j in range(draws - k + 1):
                share = n_high / (records - 1)
                chance = math.comb(draws - k, j) * share**j * (1 - share) ** (draws - k - j)
                others = 2.0 * j - (draws - k)
                high.append((w * chance, (others + k) / noise))
                low.append((w * chance, (others - k) / noise))
        true = [hockey_stick(high, low, math.log(a)) for a in alphas]
        assert np.all(np.array(true) <= np.array(found) + 1e-9)


def test_many_draws_with_replacement_cost_a_little_more_than_a_poisson_sample():
    event = Repeated(SampledWithReplacement(100, 10_000, Gaussian(1.0)), 1000)
    found = acc.bracket(event, delta=1e-5, relation=Relation.ZERO_OUT)
    sampled = acc.epsilon(Repeated(PoissonSampled(0.01, Gaussian(1.0)), 1000), delta=1e-5)
    assert sampled < found.lower <= found.upper < 1.04 * sampled
    assert found.width < 1e-3 * found.upper
    replaced = acc.bracket(event, delta=1e-5, relation=Relation.REPLACE_ONE)
    assert found.lower <= replaced.lower <= replaced.upper < 27  # 3,893 by its Rényi curve


def test_a_mixture_is_refused_where_no_price_is_known():
    with pytest.raises(UnsupportedEvent, match="several contributions"):
        acc.epsilon(
            GaussianMixture(1.0, (0.0, 2.0), (0.5, 0.5)), delta=1e-5, relation=Relation.REPLACE_ONE
        )


def test_quadrature_agrees_on_one_mixture():
    law = MIXED[0]
    found = OneRelease(law).delta(0.5).upper

    def gain(x):
        mixed = sum(w * norm.pdf(x, s) for s, w in zip(law.shifts, law.weights, strict=True))
        return max(mixed - math.exp(0.5) * norm.pdf(x), 0.0)

    assert found == pytest.approx(quad(gain, -10, 14, limit=400)[0], rel=1e-6)
