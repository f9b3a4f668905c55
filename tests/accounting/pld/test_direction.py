"""Random settings: brackets of different error targets and engines must intersect."""

import math

import numpy as np
import pytest

from tacit.accounting.brackets import Bracket
from tacit.accounting.pld import PLD
from tacit.accounting.pld import direction as _side
from tacit.accounting.pld.direction import DirectionPrice as Side
from tacit.accounting.pld.loss_laws import Normal, OneRelease, Sampled
from tacit.accounting.pld.pairs import directions
from tacit.accounting.pld.sampled_gaussian_contour import SmoothModel
from tacit.errors import NotCertified
from tacit.events import Gaussian, PoissonSampled, Relation, Repeated


def draw(rng):
    def between(low, high):
        return float(10 ** rng.uniform(math.log10(low), math.log10(high)))

    rate, noise = between(1e-5, 1.0), between(0.3, 20.0)
    return rate, noise, int(between(1.0, 1e6)), between(1e-12, 1e-3)


def price(rate, noise, steps, delta, relation, tolerance=1e-7):
    event = Repeated(PoissonSampled(rate, Gaussian(noise)), steps)
    return PLD(tolerance=tolerance).bracket(event, delta=delta, relation=relation)


def on_lattice(rate, noise, steps, delta, relation, monkeypatch):
    """The lattice alone, coarse: an engine that shares no numerics with the contour."""
    monkeypatch.setattr(_side, "_LATTICE_POINTS", (1 << 12,))
    event = Repeated(PoissonSampled(rate, Gaussian(noise)), steps)
    worst = Bracket(0.0, 0.0)
    for direction in directions(event, relation):
        side = Side(direction, tolerance=1e-6)
        whole = Bracket(0.0, side.largest_loss)
        try:
            with np.errstate(over="ignore"):
                one = side._lattice_epsilon(delta, 0.0, whole) if steps > 1 else side.epsilon(delta)
        except NotCertified:
            one = whole
        worst = Bracket(max(worst.lower, one.lower), max(worst.upper, one.upper))
    return worst


def check(setting, relation, monkeypatch):
    rate, noise, steps, delta = setting
    ours = price(*setting, relation)
    assert 0 <= ours.lower <= ours.upper < math.inf
    for tolerance in (1e-4, 3e-6):
        assert ours.meets(price(*setting, relation, tolerance))
    with monkeypatch.context() as patch:
        assert ours.meets(on_lattice(*setting, relation, patch))
    assert price(rate, noise, steps, 2 * delta, relation).lower <= ours.upper
    assert price(rate, 1.1 * noise, steps, delta, relation).lower <= ours.upper
    assert price(0.9 * rate, noise, steps, delta, relation).lower <= ours.upper
    assert price(rate, noise, steps + 1 + steps // 10, delta, relation).upper >= ours.lower


@pytest.mark.parametrize("seed", range(12))
def test_random_runs_agree_and_are_monotone(seed, monkeypatch):
    setting = draw(np.random.default_rng(seed))
    check(setting, Relation.REPLACE_ONE if seed % 3 == 0 else Relation.ADD_REMOVE, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_thousands_of_random_runs_agree_and_are_monotone(block, monkeypatch):
    rng = np.random.default_rng(1000 + block)
    for number in range(100):
        relation = Relation.REPLACE_ONE if number % 3 == 0 else Relation.ADD_REMOVE
        check(draw(rng), relation, monkeypatch)


@pytest.mark.parametrize(
    ("sigma", "rate", "epsilon"),
    [
        (0.4266556271978341, 0.00031608927882647187, 0.0003158231063265734),
        (0.3220593850795688, 1.6997491162176544e-07, 1.6980495114143487e-07),
        (0.3316398133869982, 7.405582811713953e-06, 7.398204622944547e-06),
    ],
)
def test_one_release_close_to_its_largest_loss_counts_its_cancellation(sigma, rate, epsilon):
    """Terms of delta nearly cancel there. At any x, the exact sum is a lower bound of delta."""
    mpmath = pytest.importorskip("mpmath")
    law = Sampled(Normal(sigma), rate, 0, 1)
    found = OneRelease(law).delta(epsilon)
    x = float(law.where_loss(np.array(epsilon)))
    with mpmath.workdps(50):
        q, grow = mpmath.mpf(rate), mpmath.exp(mpmath.mpf(epsilon))
        above = lambda at: mpmath.ncdf(-mpmath.mpf(at) / mpmath.mpf(sigma))  # noqa: E731
        exact = (1 - grow * (1 - q)) * above(x) - grow * q * above(mpmath.mpf(x) + 1)
        assert found.lower * (1 - 1e-9) <= exact <= found.upper


def test_no_large_lattice_is_laid_for_what_the_other_direction_settles(monkeypatch):
    """Adding a record is proved to cost at most 2.3 % more than removing one."""
    sizes = []

    class Recorded(_side.Lattice):
        def __init__(self, *args):
            sizes.append(args[-1])
            super().__init__(*args)

    monkeypatch.setattr(_side, "Lattice", Recorded)
    event = Repeated(PoissonSampled(1.0721363407216741e-07, Gaussian(1.1185048560473554)), 19192)
    found = PLD().bracket(event, delta=2.1529031952179906e-13)
    assert found.width < 0.03 * found.upper
    assert max(sizes, default=0) <= 1 << 13


@pytest.mark.parametrize("seed", range(8))
def test_a_glance_at_the_other_direction_never_claims_too_little(seed, monkeypatch):
    """Both quick bounds on delta of an added record are at least its certified lower bound."""
    rng, found = np.random.default_rng(seed), []

    def spy(bound, is_log):
        def checked(first, *args, **kwargs):
            found.append((bound(first, *args, **kwargs), is_log))
            return found[-1][0]

        return checked

    monkeypatch.setattr(_side, "bound_along", spy(_side.bound_along, is_log=False))
    quick = spy(_side.Family.log_delta_if_added, is_log=True)
    monkeypatch.setattr(_side.Family, "log_delta_if_added", quick)
    compared = 0
    while compared < 6:
        rate, sigma = 10 ** rng.uniform(-4, -0.05), 10 ** rng.uniform(-0.3, 1.2)
        steps, delta = int(10 ** rng.uniform(0.5, 6)), 10 ** rng.uniform(-13, -1)
        event = Repeated(PoissonSampled(rate, Gaussian(sigma)), steps)
        remove, add = (Side(one, tolerance=1e-7) for one in directions(event, Relation.ADD_REMOVE))
        floor = remove.epsilon(delta).lower
        if not 0 < floor < 50:
            continue
        found.clear()
        add.epsilon(delta, floor=floor, opposite=remove)
        for bound, is_log in found[:1]:
            claimed = math.exp(bound) if is_log else bound
            assert claimed >= Side(add.direction, tolerance=1e-7).delta(floor).lower * (1 - 1e-12)
            compared += 1


@pytest.mark.parametrize("seed", range(4))
def test_moments_of_an_added_record_on_the_grid_of_its_removal_are_upper_bounds(seed):
    rng = np.random.default_rng(seed)
    y = np.linspace(-38, 38, 200_001)
    for _ in range(12):
        rate, sigma = 10 ** rng.uniform(-5, -0.05), 10 ** rng.uniform(-0.4, 1.3)
        orders = np.sort(2 ** rng.uniform(-2, 8, 4))
        law = Sampled(Normal(sigma), rate, 1, 0)
        model = SmoothModel.cut_lightly(law, rng.uniform(-60, -20))
        loss = np.log1p(rate * np.expm1(np.minimum((y - 0.5 / sigma) / sigma, 300.0)))
        density = np.exp(-0.5 * y * y) / math.sqrt(2 * math.pi) * (y[1] - y[0])
        exact = np.log1p(np.expm1(np.multiply.outer(-orders, loss)) @ density)
        assert (model.log_moments_if_added(orders) >= exact * (1 - 1e-9) - 1e-13).all()


def test_only_the_same_record_added_is_compared_with_its_removal():
    run = Repeated(PoissonSampled(0.02, Gaussian(1.5)), 100)
    other = Repeated(PoissonSampled(0.03, Gaussian(1.5)), 100)
    remove, add = (Side(one, tolerance=1e-7) for one in directions(run, Relation.ADD_REMOVE))
    add.opposite = remove
    assert add._adds_what_is_removed()
    add.opposite = Side(directions(other, Relation.ADD_REMOVE)[0], tolerance=1e-7)
    assert not add._adds_what_is_removed()
