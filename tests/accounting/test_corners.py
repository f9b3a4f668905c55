"""Settings at the edge of what is asked: extreme rates, counts, deltas and epsilons."""

import math
import re
from pathlib import Path

import pytest

from tacit import accounting as acc
from tacit.accounting.brackets import Bracket
from tacit.accounting.pld import PLD
from tacit.accounting.pld.direction import DirectionPrice
from tacit.accounting.pld.pairs import directions
from tacit.events import (
    ApproximateDP,
    Exponential,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    Relation,
    Repeated,
    Sequence,
)


def step(rate, noise, steps):
    return Repeated(PoissonSampled(rate, Gaussian(noise)), steps)


RARE = [
    (1.11222e-07, 0.646562, 6136, 3.6e-10),
    (5.86764e-07, 1.04103, 39_686, 2.0e-08),
    (4.15503e-07, 1.08038, 608_534, 9.2e-12),
    (2.31659e-07, 0.764384, 5, 1.6e-13),
    (1.45254e-07, 3.33011, 12_217_507, 1.1e-14),
    (1e-4, 0.4, 1000, 1e-9),
    (3e-5, 0.5, 100, 1e-11),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "delta"), RARE)
def test_rare_sampling_has_a_sharp_bracket(rate, noise, steps, delta):
    found = acc.bracket(step(rate, noise, steps), delta=delta)
    assert 0 < found.lower <= found.upper
    assert found.width <= 2e-4 * found.upper


@pytest.mark.parametrize(("rate", "noise", "steps", "delta"), [(1e-3, 0.6, 1000, 1e-5), *RARE[-2:]])
def test_marked_losses_agree_with_other_methods(rate, noise, steps, delta):
    first = directions(step(rate, noise, steps), Relation.ADD_REMOVE)[0]
    marked = DirectionPrice(first, tolerance=1e-6)
    epsilon = marked.epsilon(delta).upper
    by_marks = marked._smoothed(epsilon, delta).delta(epsilon)
    assert by_marks.meets(marked._lattice_delta(epsilon, 0.0, Bracket(0.0, 1.0)))
    assert by_marks.width <= 1e-2 * by_marks.upper


def test_many_pure_releases_have_the_price_of_a_binomial_sum():
    found = acc.bracket(Repeated(PureDP(2.526), 299), delta=1e-5)
    assert 724.88 < found.lower <= found.upper < 724.89
    few = acc.bracket(Repeated(PureDP(0.3), 40), delta=1e-6)
    assert few.width <= 1e-8 * few.upper


def test_delta_of_nearly_certain_sampling_is_sharp():
    event = Repeated(PoissonSampled(1 - 1e-6, PureDP(1.0)), 10)
    found = PLD().delta_bracket(event, epsilon=9.99)
    assert found.width <= 1e-6 * found.upper


@pytest.mark.parametrize(
    "event",
    [
        PoissonSampled(1e-9, Gaussian(20.0)),
        PoissonSampled(1e-3, Gaussian(2.0)),
        PureDP(1e-9),
        PoissonSampled(1e-10, Laplace(1.0)),
        Gaussian(1e10),
    ],
    ids=str,
)
def test_a_quintillion_steps_have_a_price(event):
    found = acc.bracket(Repeated(event, 10**18), delta=1e-5)
    assert 0 <= found.lower <= found.upper


def test_the_ends_of_delta_and_epsilon_are_accepted():
    assert acc.epsilon(Repeated(PureDP(0.1), 3), delta=0) == pytest.approx(0.3)
    assert acc.bracket(Laplace(2.0), delta=0) == Bracket(0.5, 0.5)
    assert acc.epsilon(Gaussian(1.0), delta=0) == math.inf
    assert acc.epsilon(Gaussian(1.0), delta=1) == 0.0
    assert acc.delta(Gaussian(1.0), epsilon=math.inf) == 0.0
    both = Sequence((Gaussian(1.0), ApproximateDP(1.0, 1e-6)))
    assert acc.delta(both, epsilon=math.inf) == 1e-6
    for wrong in (-1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="delta must be in"):
            acc.epsilon(Gaussian(1.0), delta=wrong)


def test_the_examples_of_the_price_list_run():
    page = Path(__file__).resolve().parents[2] / "docs" / "price-list.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, page.name, "exec"), {})


def test_an_exponential_mechanism_keeps_the_lower_end_of_a_sequence():
    run = step(0.01, 4.0, 10_000)
    alone = acc.bracket(run, delta=1e-5)
    both = acc.bracket(Sequence((run, Exponential(0.1))), delta=1e-5)
    assert alone.lower < both.lower <= both.upper
