"""Laws of the runs of a search: draws follow the law that is priced."""

import math

import numpy as np
import pytest

from tacit import events as ev
from tacit.accounting import run_law
from tacit.events import Trials
from tacit.tuning import CheapTrials, EveryConfiguration, RandomRuns, choose_runs

LAWS = [
    RandomRuns(mean=10.0),
    RandomRuns(mean=5.0, trials="logarithmic"),
    RandomRuns(mean=20.0, trials="negative_binomial", shape=3.0),
    RandomRuns(mean=30.0, most=40),
    RandomRuns(mean=4.0, trials="poisson"),
    RandomRuns(mean=4.0, trials="binomial", most=9),
    RandomRuns(mean=7, trials="fixed"),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.describe())
def test_the_number_of_runs_is_drawn_from_the_law_that_is_priced(law):
    """The quantile function is exact: P(K <= k) is where the drawn number passes k."""
    found = run_law(law.event((ev.Gaussian(1.0),)))
    k = np.arange(0, min(60, found.most) + 1, dtype=float)
    below = np.cumsum(np.exp(found.log_probability(k)))
    for count, share in zip(k, below, strict=True):
        if 1e-6 < share < 1 - 1e-6:
            assert law._count(share - 1e-9) <= count < law._count(share + 1e-9)
    assert law._count(0.0) >= (0 if law.trials in ("poisson", "binomial") else 1)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.describe())
def test_the_largest_uniform_still_gives_a_number(law):
    count = law._count(1 - 2**-53)
    assert 1 <= count <= (law.most or math.inf)


def test_the_best_of_uniform_draws_has_the_expected_rank():
    assert RandomRuns(mean=4, trials="fixed").expected_rank() == pytest.approx(1 / 5)
    mean = 10.0  # geometric: E[1 / (K + 1)] in closed form
    g = 1 / mean
    exact = g / (1 - g) * (math.log(1 / g) / (1 - g) - 1)
    assert RandomRuns(mean=mean).expected_rank() == pytest.approx(exact, rel=1e-6)


def test_configurations_are_drawn_with_replacement():
    """Without replacement, 60 draws of 2 configurations would be impossible."""
    draws = RandomRuns(mean=60, trials="fixed").draw(2, np.random.default_rng(0))
    assert len(draws) == 60
    assert set(draws) == {0, 1}
    pairs = [
        RandomRuns(mean=2, trials="fixed").draw(2, np.random.default_rng(i)) for i in range(400)
    ]
    equal = sum(a == b for a, b in pairs)
    assert 150 < equal < 250  # binomial(400, 1/2): false alarm 5e-7; without replacement 0


def test_equal_configurations_are_one_event_and_others_a_mixture():
    a, b = ev.Gaussian(2.0), ev.Gaussian(3.0)
    law = RandomRuns(mean=5.0)
    assert law.event((a, a)).event == a
    assert law.event((a, b, a, a)).event == ev.OneOf((a, b), (0.75, 0.25))
    assert EveryConfiguration().event((a, b)) == ev.Sequence((a, b))
    assert EveryConfiguration().draw(3, np.random.default_rng(0)) == [0, 1, 2]


def test_the_law_follows_from_public_facts():
    terms = {"epsilon": 1.0, "delta": 1e-6}
    assert choose_runs(4, **terms, n_scoring=10_000) == CheapTrials()
    assert choose_runs(4, **terms, n_scoring=10_000, has_budget=False) == EveryConfiguration()
    assert choose_runs(4, **terms, n_scoring=50) == CheapTrials(count=0)
    many = choose_runs(100, **terms, most=50, n_scoring=2_000)
    assert isinstance(many, RandomRuns)
    assert many.most == 50
    assert Trials(many.trials) in (Trials.GEOMETRIC, Trials.NEGATIVE_BINOMIAL)


def test_cheap_trials_draw_with_replacement_or_try_all():
    rng = np.random.default_rng(0)
    assert CheapTrials().draw(5, rng) == [0, 1, 2, 3, 4]
    drawn = CheapTrials(count=2000).draw(5, rng)
    counts = np.bincount(drawn, minlength=5)
    assert abs(counts / 400 - 1).max() < 0.3  # 6 standard deviations: false alarms below 1e-8
    a, b = ev.Gaussian(1.0), ev.Gaussian(2.0)
    assert CheapTrials().event((a, b)) == ev.Sequence((a, b))
    assert CheapTrials(count=3).event((a, b)) == ev.Repeated(ev.OneOf((a, b), (0.5, 0.5)), 3)
