"""Every event is priced or refused: no other error, no NaN, no warning, lower end <= upper end.

Events are drawn at random from all types, with extreme parameters, and nested.
"""

import math

import numpy as np
import pytest

import tacit
from tacit import accounting as acc
from tacit import events as ev
from tacit.errors import BudgetExceeded, NotCertified, UnsupportedEvent
from tacit.events import Relation, Trials

MOST = 10**18
SIZES = (1e-60, 0.01, 0.5, 1.0, 4.0, 1e60)
SMALL = (0.0, 1e-300, 1e-6, 0.3, 1.0, 40.0, 400.0, 1e60)
RATES = (0.0, 1e-300, 1e-12, 0.01, 0.5, 0.999999, 1.0)
DELTAS = (0.0, 5e-324, 1e-300, 1e-17, 1e-6, 1e-6, 0.03, 0.5, 1 - 2**-53, 1.0)
EPSILONS = (0.0, 1e-300, 0.1, 1.0, 100.0, 1e308, math.inf)


def pick(rng, values):
    return values[int(rng.integers(len(values)))]


LEAVES = (
    lambda rng: ev.Gaussian(pick(rng, SIZES)),
    lambda rng: ev.Gaussian(pick(rng, SIZES), 1.0),
    lambda rng: ev.Laplace(pick(rng, SIZES)),
    lambda rng: ev.PureDP(pick(rng, SMALL)),
    lambda rng: ev.ApproximateDP(pick(rng, SMALL), pick(rng, (0.0, 1e-300, 1e-6, 0.04, 1.0))),
    lambda rng: ev.Exponential(pick(rng, SMALL)),
    lambda rng: ev.RandomizedResponse(pick(rng, (1e-12, 0.3, 1.0)), pick(rng, (2, 3, 1000))),
    lambda rng: ev.RenyiCurve((2.0, 4.0), (pick(rng, (0.0, 0.1)), 0.3), pick(rng, (1.0, 2.0))),
    lambda rng: ev.GaussianMixture(
        pick(rng, SIZES),
        (0.0, 1.0, pick(rng, (0.0, 2.0, 1e3))),
        pick(rng, ((0.5, 0.3, 0.2), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0))),
    ),
    lambda rng: ev.DiscreteGaussian(pick(rng, (0.01, 2.0, 1e6))),
    lambda rng: ev.DiscreteLaplace(pick(rng, (0.01, 2.0, 1e9)), pick(rng, (1, 5))),
    lambda rng: ev.ZeroConcentratedDP(
        pick(rng, (0.0, 0.1, 1e300)), pick(rng, (0.0, 1e-7, 1.0)), pick(rng, (1.0, 2.0))
    ),
    lambda rng: ev.TreeAggregation(pick(rng, SIZES), pick(rng, (1, 1000, MOST))),
    lambda rng: ev.BandedGaussian(pick(rng, SIZES), (1.0, 0.5), pick(rng, (2, 100)), 2),
    lambda rng: ev.Shuffled(ev.PureDP(pick(rng, (0.0, 0.5, 3.0))), pick(rng, (1, 2, 1000))),
    lambda rng: ev.NonPrivate(),
    lambda rng: ev.Sequence(()),
)  # fmt: skip

LAWS = (
    {"trials": Trials.GEOMETRIC},
    {"trials": Trials.GEOMETRIC, "most": 4},
    {"trials": Trials.LOGARITHMIC},
    {"trials": Trials.POISSON},
    {"trials": Trials.POISSON, "most": 2},
    {"trials": Trials.BINOMIAL, "most": 9},
    {"trials": Trials.NEGATIVE_BINOMIAL, "shape": -0.999999},
    {"trials": Trials.NEGATIVE_BINOMIAL, "shape": 1000.0},
    {"trials": Trials.FIXED},
)


def best_of(rng, event):
    law = pick(rng, LAWS)
    means = (2, 5) if "most" in law else (2, 5, 1 + 2**-40, 1e18)
    mean = pick(rng, means)
    if law["trials"] is Trials.FIXED:
        mean = round(mean)
    return ev.BestOf(event, mean, **law)


WRAPS = (
    lambda rng, a, b: ev.PoissonSampled(pick(rng, RATES), a),
    lambda rng, a, b: ev.FixedSizeSampled(*pick(rng, ((1, 1), (5, 5), (1, MOST), (10, 100))), a),
    lambda rng, a, b: ev.SampledWithReplacement(*pick(rng, ((1, 1), (10, 1000))), a),
    lambda rng, a, b: ev.TruncatedPoissonSampled(
        pick(rng, RATES), *pick(rng, ((1, 1), (5, 1000), (20, 10))), a
    ),
    lambda rng, a, b: ev.RandomAllocation(pick(rng, (1, 10)), a),
    lambda rng, a, b: ev.Repeated(a, pick(rng, (0, 2, 7, MOST))),
    lambda rng, a, b: ev.Sequence((a, b)),
    lambda rng, a, b: ev.OneOf((a, b), pick(rng, ((0.5, 0.5), (0.0, 1.0), (1e-300, 1.0)))),
    lambda rng, a, b: ev.ChosenOf((a, b)),
    lambda rng, a, b: best_of(rng, a),
)  # fmt: skip


def draw(rng, depth):
    if depth == 0:
        return pick(rng, LEAVES)(rng)
    inner = draw(rng, depth - 1)
    other = draw(rng, int(rng.integers(depth)))
    return pick(rng, WRAPS)(rng, inner, other)


def check(event, delta, epsilon, relation):
    """Assert that all prices of `event` are numbers in order, unless it is refused."""
    try:
        found = acc.bracket(event, delta=delta, relation=relation)
        upper = acc.epsilon(event, delta=delta, relation=relation)
        mass = acc.delta(event, epsilon=epsilon, relation=relation)
    except (UnsupportedEvent, NotCertified) as error:
        assert str(error).endswith(".")  # noqa: PT017  # any of three calls may refuse
        return
    assert 0 <= found.lower <= found.upper
    assert found.lower <= upper
    assert 0 <= mass <= 1


def priced(event, seed):
    rng = np.random.default_rng(seed)
    check(event, pick(rng, DELTAS), pick(rng, EPSILONS), pick(rng, tuple(Relation)))


SLOW = {1, 13, 45, 50}  # seeds whose prices take more than two seconds


def random_event_is_priced_or_refused(seed):
    rng = np.random.default_rng(seed)
    priced(draw(rng, int(rng.integers(4))), seed)


@pytest.mark.parametrize("seed", sorted({*range(60)} - SLOW))
def test_random_events_are_priced_or_refused(seed):
    random_event_is_priced_or_refused(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*sorted(SLOW), *range(60, 1500)])
def test_many_random_events_are_priced_or_refused(seed):
    random_event_is_priced_or_refused(seed)


HOPELESS = [
    ev.NonPrivate(),
    ev.ApproximateDP(0.5, 1.0),
    ev.Gaussian(0.01),
    ev.PureDP(400.0),
    ev.DiscreteGaussian(0.01),
    ev.RenyiCurve((2.0, 4.0), (0.1, 0.3)),
    ev.ZeroConcentratedDP(1e300),
]
BOTH = pytest.mark.parametrize("relation", [Relation.ADD_REMOVE, Relation.REPLACE_ONE])


@BOTH
@pytest.mark.parametrize("event", HOPELESS, ids=str)
def test_a_part_of_probability_0_costs_nothing(event, relation):
    plain = ev.Gaussian(2.0)
    choice = ev.OneOf((event, plain, event), (0.0, 1.0, 0.0))
    settings = [lambda e: e, lambda e: ev.Repeated(e, 3), lambda e: ev.PoissonSampled(0.1, e)]
    settings += [lambda e: ev.BestOf(e, 3), lambda e: ev.ChosenOf((e, ev.Gaussian(4.0)))]
    for inside in settings:
        found = acc.epsilon(inside(choice), delta=1e-6, relation=relation)
        assert found == acc.epsilon(inside(plain), delta=1e-6, relation=relation)
    charge = acc.RDP().charge(choice, [2.0, 50.0], relation)
    assert np.array_equal(charge.values, acc.RDP().charge(plain, [2.0, 50.0], relation).values)


def test_a_contribution_of_probability_0_costs_nothing():
    likely = ev.GaussianMixture(2.0, (0.0, 1.0), (0.75, 0.25))
    padded = ev.GaussianMixture(2.0, (1e9, 0.0, 1.0), (0.0, 0.75, 0.25))
    assert acc.bracket(padded, delta=1e-6) == acc.bracket(likely, delta=1e-6)
    nothing = ev.GaussianMixture(2.0, (0.0, 5.0), (1.0, 0.0))
    assert acc.bracket(ev.PoissonSampled(0.1, nothing), delta=1e-6) == (0.0, 0.0)


def test_a_ledger_refuses_what_a_part_of_probability_0_hides():
    dear = ev.OneOf((ev.NonPrivate(), ev.Gaussian(0.02)), (0.0, 1.0))
    ledger = tacit.Ledger(budget=tacit.Budget(epsilon=1.0, delta=1e-6))
    with pytest.raises(BudgetExceeded):
        ledger.spend(dear)


@BOTH
@pytest.mark.parametrize("event", HOPELESS, ids=str)
def test_a_free_choice_with_a_dear_part_has_a_price(event, relation):
    choice = ev.ChosenOf((ev.Gaussian(2.0), event))
    check(choice, 1e-6, 1.0, relation)
    cheap = acc.bracket(ev.Gaussian(2.0), delta=1e-6, relation=relation)
    if not isinstance(event, ev.RenyiCurve) or relation is Relation.ADD_REMOVE:
        found = acc.bracket(choice, delta=1e-6, relation=relation)
        assert cheap.lower * (1 - 1e-9) <= found.lower < found.upper


@BOTH
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 0.03, 0.1])
def test_a_mixture_of_approximate_dp_has_a_price(delta, relation):
    part = ev.Sequence((ev.ApproximateDP(0.17, 0.04), ev.Exponential(0.06)))
    event = ev.OneOf((part, ev.Repeated(ev.ApproximateDP(2.07, 1e-6), 3)), (0.7, 0.3))
    found = acc.bracket(event, delta=delta, relation=relation)
    assert (found.upper == math.inf) == (
        delta < acc.delta(event, epsilon=math.inf, relation=relation)
    )


@BOTH
@pytest.mark.parametrize(
    "noise", [ev.PureDP(0.5), ev.DiscreteGaussian(2.0), ev.RandomizedResponse(0.3)]
)
def test_a_sample_of_all_records_costs_what_a_replacement_does(noise, relation):
    found = acc.bracket(ev.FixedSizeSampled(5, 5, noise), delta=1e-6, relation=relation)
    replaced = acc.bracket(noise, delta=1e-6, relation=Relation.REPLACE_ONE)
    assert found.upper == pytest.approx(replaced.upper, rel=1e-6)


@BOTH
@pytest.mark.parametrize("noise", [ev.PureDP(0.0), ev.ApproximateDP(0.0, 0.0), ev.Sequence(())])
def test_what_is_free_stays_free_on_every_sample_and_in_every_selection(noise, relation):
    for sample in (
        ev.TruncatedPoissonSampled(0.01, 5, 1000, noise),
        ev.FixedSizeSampled(1, MOST, noise),
        ev.PoissonSampled(1e-12, noise),
        ev.BestOf(noise, 5, Trials.GEOMETRIC),
        ev.BestOf(ev.Repeated(noise, 7), 5, Trials.POISSON),
    ):
        assert acc.epsilon(sample, delta=1e-6, relation=relation) < 1e-5


@pytest.mark.parametrize("shape", [-0.999999, -0.99, -0.5, 0.0, 3.0])
@pytest.mark.parametrize("delta", [5e-324, 1e-300, 1e-6])
def test_the_best_of_heavy_tailed_runs_is_priced_or_refused(shape, delta):
    check(
        ev.BestOf(ev.Gaussian(1.0), 10, Trials.NEGATIVE_BINOMIAL, shape), delta, 1.0, "add_remove"
    )


@pytest.mark.parametrize("trials", [Trials.GEOMETRIC, Trials.POISSON])
def test_approximate_dp_that_has_no_pair_is_priced_in_every_choice(trials):
    run, pure = ev.ZeroConcentratedDP(0.1, 1e-7), ev.ZeroConcentratedDP(0.1)
    mass = 10 * 1e-7
    best = ev.BestOf(run, 10, trials)
    found = acc.epsilon(best, delta=1e-5)
    assert found >= acc.epsilon(ev.BestOf(pure, 10, trials), delta=1e-5)
    assert found <= 1.01 * acc.epsilon(ev.BestOf(pure, 10, trials), delta=1e-5 - mass)
    assert acc.epsilon(best, delta=0.99e-7) == math.inf
    assert mass <= acc.delta(best, epsilon=math.inf) <= mass * (1 + 1e-6)
    for choice in (ev.OneOf((run, ev.Gaussian(2.0)), (0.5, 0.5)), ev.ChosenOf((run, pure))):
        assert 0 < acc.epsilon(choice, delta=1e-5) < acc.epsilon(ev.Repeated(run, 2), delta=1e-5)


def test_a_renyi_curve_beside_approximate_dp_in_a_selection_is_refused_with_the_reason():
    inner = ev.BestOf(ev.ZeroConcentratedDP(0.1, 1e-7), 2)
    event = ev.BestOf(ev.Sequence((ev.ZeroConcentratedDP(0.1), inner)), 3)
    with pytest.raises(UnsupportedEvent, match="together with a release that only has one"):
        acc.epsilon(event, delta=1e-5)


TINY = [
    ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(1.0)), 100),
    ev.Repeated(ev.TruncatedPoissonSampled(0.1, 5, 1000, ev.Gaussian(1.0)), 5),
    ev.Sequence((ev.Gaussian(1.0), ev.Laplace(2.0))),
    ev.Sequence((ev.RenyiCurve((2.0, 4.0), (0.1, 0.2), 1.0), ev.Gaussian(2.0))),
    ev.Repeated(ev.Laplace(1.0), 7),
    ev.Repeated(ev.BestOf(ev.Gaussian(2.0), 3), 2),
]


@pytest.mark.parametrize("event", TINY, ids=str)
def test_the_smallest_float_is_a_delta(event):
    found = acc.bracket(event, delta=5e-324)
    assert 0 <= found.lower <= found.upper < math.inf
    assert found.upper >= acc.bracket(event, delta=1e-6).lower
