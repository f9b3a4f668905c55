"""Sensitivities, noise on every coordinate, and solutions that stay finite."""

import itertools
import math

import numpy as np
import pytest

from tacit.accounting import GDP
from tacit.events import Relation
from tacit.mechanisms import generator
from tacit.regression import least_squares as ls
from tacit.regression._base import Bounds
from tacit.regression.statistics import Moments, PrivateRows, triangle

RELATIONS = [Relation.ADD_REMOVE, Relation.REPLACE_ONE]
BUDGET = {"epsilon": 1.0, "delta": 1e-6}


def corners(d):
    """Records at the corners and edges of the scaled box, targets at both ends."""
    for x in itertools.product([-1.0, 0.0, 1.0], repeat=d):
        for y in (-1.0, 1.0):
            yield np.array([1.0, *x]), y


def quadratic(z):
    """What one record adds to the released quadratic coefficients, tight analysis."""
    size = len(z)
    rows, columns = np.triu_indices(size)
    return (np.outer(z, z)[rows, columns] - np.where(rows == columns, 0.5, 0.0))[1:]


@pytest.mark.parametrize("d", [1, 2, 3])
def test_tight_sensitivities_are_reached_and_never_passed(d):
    plan = ls.plan_functional(d, epsilon=1.0, relation=Relation.ADD_REMOVE)
    records = list(corners(d))
    adds = [quadratic(z) for z, _ in records]
    assert max(np.abs(q).sum() for q in adds) == plan.quadratic.l1_sensitivity
    moves = max(np.abs(p - q).sum() for p in adds for q in adds)
    most = plan.quadratic.replace_factor * plan.quadratic.l1_sensitivity
    assert 0.85 * most <= moves <= most
    linear = [-2 * y * z for z, y in records]
    assert max(np.abs(b).sum() for b in linear) == plan.linear.l1_sensitivity
    moves = max(np.abs(b - c).sum() for b in linear for c in linear)
    assert moves == plan.linear.replace_factor * plan.linear.l1_sensitivity


@pytest.mark.parametrize("d", [1, 2, 5, 12])
def test_no_replaced_record_moves_the_quadratic_coefficients_further_than_claimed(d):
    """Uphill from random pairs of records: the worst that a search finds stays within the proof."""
    plan = ls.plan_functional(d, epsilon=1.0, relation=Relation.REPLACE_ONE)
    most = plan.quadratic.replace_factor * plan.quadratic.l1_sensitivity
    rng = np.random.default_rng(d)

    def moved(pair):
        x, w = (np.append(1.0, half) for half in pair)
        return float(np.abs(quadratic(x) - quadratic(w)).sum())

    worst = 0.0
    for _ in range(8):
        pair = rng.uniform(-1, 1, (2, d))
        for place in np.tile(np.arange(2 * d), 3):
            trials = np.repeat(pair.reshape(1, -1), 21, axis=0)
            trials[:, place] = np.linspace(-1, 1, 21)
            pair = max(trials.reshape(-1, 2, d), key=moved)
        worst = max(worst, moved(pair))
    assert 0.9 * most <= worst <= most


def test_published_sensitivities_are_the_classical_ones():
    plan = ls.plan_functional(
        13, epsilon=1.0, relation=Relation.REPLACE_ONE, analysis="published", split=0.5
    )
    assert plan.quadratic.noise_scale == pytest.approx(2 * 14**2 / 0.5)
    assert plan.linear.noise_scale == pytest.approx(4 * 14 / 0.5)


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_functional_mechanism_costs_its_epsilon(relation):
    plan = ls.plan_functional(5, epsilon=0.7, relation=relation)
    parts = (plan.quadratic, plan.linear)
    moves = [p.replace_factor if relation is Relation.REPLACE_ONE else 1.0 for p in parts]
    spent = sum(m / part.noise_multiplier for m, part in zip(moves, parts, strict=True))
    assert spent == pytest.approx(0.7)
    assert spent <= 0.7


def test_the_default_split_has_the_least_noise():
    def noise(split):
        plan = ls.plan_functional(6, epsilon=1.0, relation=Relation.ADD_REMOVE, split=split)
        sizes = 6 + 6 * 7 // 2, 7
        scales = plan.quadratic.noise_scale, plan.linear.noise_scale
        return sum(size * scale**2 for size, scale in zip(sizes, scales, strict=True))

    least = noise(None)
    assert all(least <= noise(split) for split in np.linspace(0.05, 0.95, 91))


def random_records(row_norm, count=400, d=3):
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(count, d + 1)) * rng.exponential(2, (count, 1))
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1, row_norm / norms), rng.uniform(-1, 1, count).round()


def test_one_record_moves_gaussian_statistics_by_no_more_than_claimed():
    plan = ls.plan_adassp(row_norm=2.0, **BUDGET, relation=Relation.ADD_REMOVE)
    rows, y = random_records(plan.row_norm)
    base = rows[:50].T @ rows[:50]
    for i in range(60, 400, 2):
        z, w = rows[i], rows[i + 1]
        added, replaced = np.outer(z, z), np.outer(z, z) - np.outer(w, w)
        for mechanism, add, replace in (
            (plan.gram, triangle(added), triangle(replaced)),
            (plan.cross, y[i] * z, y[i] * z - y[i + 1] * w),
            (plan.eigenvalue, smallest(base + added) - smallest(base),
             smallest(base + np.outer(z, z)) - smallest(base + np.outer(w, w))),
        ):  # fmt: skip
            bound = mechanism.l2_sensitivity
            assert np.linalg.norm(add) <= bound * (1 + 1e-9)
            assert np.linalg.norm(replace) <= bound * mechanism.replace_factor * (1 + 1e-9)


def smallest(matrix):
    return np.linalg.eigvalsh(matrix)[:1]


@pytest.mark.parametrize("relation", RELATIONS)
def test_gaussian_plans_cost_exactly_their_budget(relation):
    for plan in (
        ls.plan_adassp(row_norm=2.0, **BUDGET, relation=relation),
        ls.plan_gradient(4, row_norm=2.0, n_records=10_000, **BUDGET, relation=relation),
    ):
        cost = GDP().epsilon(plan.event, delta=1e-6, relation=relation)
        assert cost <= 1.0
        assert cost == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_joint_pricing_needs_less_noise_than_thirds_of_epsilon(epsilon):
    delta = 1e-6
    thirds = math.sqrt(math.log(6 / delta)) / (epsilon / 3)
    plan = ls.plan_adassp(row_norm=1.0, epsilon=epsilon, delta=delta, relation=Relation.ADD_REMOVE)
    assert thirds / plan.gram.noise_multiplier >= 1.6
    assert thirds / plan.cross.noise_multiplier >= 1.6


@pytest.mark.parametrize("analysis", ["tight", "published"])
@pytest.mark.parametrize("relation", RELATIONS)
def test_every_functional_coefficient_carries_noise_at_its_scale(analysis, relation):
    """Asymmetric bounds (0, 100); false alarms: 39 coordinates at 6 sigma, below 1e-7."""
    draws = 3000
    rng = generator(5)
    X = np.random.default_rng(0).uniform(0, 100, (50, 3))
    rows = PrivateRows(X, Bounds(0, 100).box(3))
    exact = rows.moments(X[:, 0] / 100)
    plan = ls.plan_functional(3, epsilon=1.0, relation=relation, analysis=analysis)
    upper = np.triu_indices(4)
    noise = np.empty((draws, len(upper[0])))
    linear = np.empty((draws, 4))
    for i in range(draws):
        released = ls.release_functional(exact, plan, n_records=50, rng=rng)
        noise[i] = (released.gram - exact.gram)[upper]
        linear[i] = -2 * (released.cross - exact.cross)
    if analysis == "tight":
        assert (noise[:, 0] == 0).all()  # the constant: the declared number of records
        noise = noise[:, 1:]
    check_laplace(noise, plan.quadratic.noise_scale)
    check_laplace(linear, plan.linear.noise_scale)


def check_laplace(noise, scale):
    # The mean of |Laplace(scale)| is scale with standard deviation scale / sqrt(draws).
    size = np.abs(noise).mean(axis=0)
    assert (np.abs(size / scale - 1) < 6 / math.sqrt(len(noise))).all()
    assert (np.abs(noise.mean(axis=0)) < 6 * math.sqrt(2 / len(noise)) * scale).all()


def test_every_gaussian_coordinate_carries_noise_at_its_scale(monkeypatch):
    """Asymmetric bounds (0, 100), AdaSSP and descent; false alarms at 6 sigma, below 1e-6."""
    X = np.random.default_rng(0).uniform(0, 100, (60, 2))
    y = X[:, 0] / 50 - 1
    seen = []
    original = ls.GaussianMechanism.release

    def spy(self, value, rng=None):
        released = original(self, value, rng)
        seen.append((self.noise_std, (released - value) / self.noise_std))
        return released

    monkeypatch.setattr(ls.GaussianMechanism, "release", spy)
    box = Bounds(0, 100).box(2)
    adassp = ls.plan_adassp(row_norm=box.row_norm, **BUDGET, relation=Relation.ADD_REMOVE)
    descent = ls.plan_gradient(
        2, row_norm=box.row_norm, n_records=60, **BUDGET, relation=Relation.ADD_REMOVE
    )
    rng = generator(0)
    draws = 600
    for plan, releases in ((adassp, 3), (descent, 1 + descent.steps)):
        seen.clear()
        for _ in range(draws):
            rows = PrivateRows(X, box, row_norm=plan.row_norm)
            ls.fit(rows, y, plan, n_records=60, rng=rng)
        assert len(seen) == draws * releases
        for first in range(releases):
            noise = np.array([z for _, z in seen[first::releases]])
            assert (np.abs(noise.std(axis=0) - 1) < 6 / math.sqrt(2 * draws)).all()
    assert [m.noise_std for m in (adassp.gram, adassp.cross)] == pytest.approx(
        [adassp.gram.noise_multiplier * 1.8, adassp.cross.noise_multiplier * math.sqrt(1.8)]
    )


def test_plenty_of_records_give_the_least_squares_solution():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (200_000, 3))
    y = np.clip(X @ [0.3, -0.2, 0.1] + 0.1 + rng.normal(0, 0.05, len(X)), -1, 1)
    box = Bounds(-1, 1).box(3)
    budget = BUDGET | {"relation": Relation.ADD_REMOVE}
    for plan in (
        ls.plan_functional(3, epsilon=1.0, relation=Relation.ADD_REMOVE),
        ls.plan_adassp(row_norm=box.row_norm, **budget),
        ls.plan_gradient(3, row_norm=box.row_norm, n_records=len(X), **budget),
    ):
        rows = PrivateRows(X, box, row_norm=plan.row_norm)
        theta = ls.fit(rows, y, plan, n_records=len(X), rng=generator(1))
        np.testing.assert_allclose(theta, [0.1, 0.3, -0.2, 0.1], atol=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_the_minimum_is_finite_however_indefinite_the_noisy_matrix(seed):
    rng = np.random.default_rng(seed)
    noise = 1e6 * rng.laplace(size=(6, 6))
    moments = Moments(noise + noise.T, 1e6 * rng.laplace(size=6))
    assert np.isfinite(ls.minimize_quadratic(moments, noise=1e5)).all()
    assert np.isfinite(ls.minimize_quadratic(Moments(np.zeros((6, 6)), np.ones(6)), noise=0)).all()


def test_the_method_follows_from_public_facts():
    def chosen(n_records, delta=1e-6, epsilon=1.0):
        return ls.choose_method(
            12, row_norm=Bounds(0, 1).box(12).row_norm, n_records=n_records, epsilon=epsilon,
            delta=delta, relation=Relation.ADD_REMOVE,
        )  # fmt: skip

    assert chosen(10**6) == "adassp"
    assert chosen(1000) == "gradient"
    assert chosen(40_000, epsilon=0.1) == "gradient"
    assert chosen(10**6, delta=0.0) == "functional"


def test_rows_are_left_as_they_are_where_noise_is_negligible():
    def chosen(n_records):
        return ls.choose_row_norm(
            8, row_norm=2.0, full_norm=3.0, n_records=n_records, **BUDGET,
            relation=Relation.ADD_REMOVE,
        )  # fmt: skip

    assert chosen(10**4) == 2.0
    assert chosen(10**6) == 3.0


def descent(n_records, epsilon):
    return ls.plan_gradient(
        5, row_norm=2.0, n_records=n_records, epsilon=epsilon, delta=1e-6,
        relation=Relation.ADD_REMOVE,
    )  # fmt: skip


def test_noisier_plans_read_more_records_for_the_curvature():
    assert descent(1000, 0.1).gram_rate == 1.0
    assert descent(10**6, 1.0).gram_rate == 0.05


def test_residuals_are_clipped_closer_where_there_is_more_noise():
    clips = [descent(n_records, 1.0).residual_clip for n_records in (100, 5_000, 20_000, 10**6)]
    assert clips[0] == 0.5
    assert clips[-1] == 1.5
    assert clips == sorted(clips)
