"""Facts about one event: exact where stated, rounded up elsewhere, and accurate in every digit."""

import json
import math
import os
import random
import subprocess
import sys
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from tacit.accounting.one_event import (
    dot,
    epsilon_and_delta,
    exact,
    expm1,
    gdp_mu_squared,
    log1p,
    log_mixture,
    log_mixture_at,
    product,
    pure_epsilon,
    response_law,
    round_up,
    sampled_epsilon,
)
from tacit.events import (
    ApproximateDP,
    Exponential,
    Gaussian,
    Laplace,
    NonPrivate,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    Relation,
)


def test_complex_functions_keep_small_digits():
    z = np.array([1e-9 + 2e-9j, 1e-3 - 1e-3j, -0.3 + 0.2j, 3.0 + 4.0j])
    assert expm1(log1p(z)) == pytest.approx(z, rel=1e-13)
    assert log1p(z[:1]) == pytest.approx(z[0] - z[0] ** 2 / 2, rel=1e-15)
    u = np.linspace(-40, 60, 23)
    for rate in (1e-6, 0.4, 0.9):
        assert log_mixture(rate, u + 0j).real == pytest.approx(log_mixture(rate, u), rel=1e-13)
        turned = log_mixture(rate, u + 0.7j)
        assert np.exp(turned[:12]) == pytest.approx(1 - rate + rate * np.exp(u[:12] + 0.7j))


def test_the_log_of_a_mixture_is_relatively_accurate_at_every_rate():
    rng = random.Random(1)
    for _ in range(300):
        rate = rng.choice([10 ** rng.uniform(-9, 0), 1 - 10 ** rng.uniform(-12, 0)])
        u = rng.choice([-1, 1]) * 10 ** rng.uniform(-12, 2.5)
        with localcontext() as context:
            context.prec = 60
            true = (1 - Decimal(rate) + Decimal(rate) * Decimal(u).exp()).ln()
            assert log_mixture_at(rate, u) == pytest.approx(float(true), rel=2e-14)
            assert abs(Decimal(sampled_epsilon(u, rate))) >= abs(true)


def test_stated_numbers_are_the_decimals_they_are_written_as():
    assert pure_epsilon(PureDP(0.1), Relation.REPLACE_ONE) == Fraction(1, 5)
    assert pure_epsilon(Exponential(0.1, replace_factor=1.5), Relation.REPLACE_ONE) == exact(0.15)
    assert pure_epsilon(Laplace(0.3), Relation.ADD_REMOVE) == Fraction(10, 3)
    assert round_up(Fraction(1, 3)) == math.nextafter(1 / 3, 1.0)
    for event in (Gaussian(1.0), NonPrivate(), ApproximateDP(0.1, 1e-6)):
        assert pure_epsilon(event, Relation.ADD_REMOVE) == math.inf


def test_what_is_rounded_is_rounded_up():
    rng = random.Random(2)
    for _ in range(300):
        answer = RandomizedResponse(10 ** rng.uniform(-8, 0), rng.choice([2, 5, 1000]))
        law = response_law(answer)
        assert law.loss == pytest.approx(math.log(law.truth / law.other), abs=1e-12)
        assert pure_epsilon(answer, Relation.REPLACE_ONE) >= law.loss
        release = PureDP(10 ** rng.uniform(-6, 2))
        sampled = PoissonSampled(rng.uniform(0.0, 1.0), release)
        plain = math.log1p(sampled.rate * math.expm1(release.epsilon))
        assert pure_epsilon(sampled, Relation.ADD_REMOVE) >= plain
        epsilon, delta = 10 ** rng.uniform(-6, 2), 10 ** rng.uniform(-12, -1)
        found = epsilon_and_delta(ApproximateDP(epsilon, delta), Relation.REPLACE_ONE)
        assert found[0] == 2 * epsilon
        assert found[1] >= min(1.0, delta * (1 + math.exp(epsilon)))


def test_a_replacement_that_was_priced_needs_no_group_privacy():
    event = ApproximateDP(0.5, 1e-6, replace_factor=1.0)
    assert epsilon_and_delta(event, Relation.REPLACE_ONE) == (0.5, 1e-6)
    twice = gdp_mu_squared(Gaussian(2.0), Relation.REPLACE_ONE)
    assert twice == pytest.approx(1.0)
    assert twice >= 1.0


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (3, 700, 5),
        (90, 260, 70),
        (2, 1, 70_000),
        (0, 4, 2),
        (1, 9000, 3),
        (5, 90_000, 1),
    ],
)
@pytest.mark.parametrize("kind", [float, complex])
def test_products_in_blocks_are_products(shape, kind):
    rows, inner, width = shape
    rng = np.random.default_rng(0)
    left, right = (rng.normal(size=s).astype(kind) for s in ((rows, inner), (inner, width)))
    right = right * (1 + 1j) if kind is complex else right
    assert product(left, right) == pytest.approx(left @ right, abs=1e-11)
    long = rng.normal(size=100_000)
    assert dot(long, long) == pytest.approx(float(long @ long), rel=1e-12)


PRICES = """
import os, pathlib, time, tacit
from tacit.events import Gaussian, PoissonSampled, Repeated

def ticks():
    time.sleep(0.2)
    stats = {p: (p / "stat").read_text() for p in pathlib.Path("/proc/self/task").iterdir()}
    times = {p: stat.rpartition(")")[2].split()[11:13] for p, stat in stats.items()}
    return {p.name: int(user) + int(system) for p, (user, system) in times.items()}

settings = [(1e-3, 15, 10**7, 1e-15), (0.01, 1, 10**4, 1e-3), (1e-6, 1, 10**5, 1e-9),
            (0.02, 0.6, 5, 1e-12), (1e-4, 0.5, 13, 1e-7), (1.96383e-4, 0.864877, 12, 9.4e-15)]
tacit.bracket(Gaussian(1.0), delta=1e-5)
tacit.bracket(Repeated(PoissonSampled(0.02, Gaussian(0.7)), 6), delta=1e-9)  # loads what is needed
before = ticks()
for rate, noise, steps, delta in settings:
    tacit.bracket(Repeated(PoissonSampled(rate, Gaussian(noise)), steps), delta=delta)
after = ticks()
print([after[name] - before.get(name, 0) for name in after if name != str(os.getpid())])
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs times of threads")
def test_a_price_wakes_no_other_thread():
    """Threads of a BLAS library wait busily after each product: 10 ticks of 10 ms each time."""
    few = {**os.environ, "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    found = subprocess.run(
        [sys.executable, "-c", PRICES], env=few, capture_output=True, text=True, check=True
    )
    assert all(ticks <= 2 for ticks in json.loads(found.stdout))
