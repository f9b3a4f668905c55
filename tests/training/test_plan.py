"""Schedules are evaluated before the run and priced step by step."""

import numpy as np
import pytest

from tacit import events as ev
from tacit import sampling
from tacit.training import Automatic, Flat, PerLayer, Ramp, ScheduledClip, Stairs
from tacit.training.clip import scaled
from tacit.training.plan import _drawn_ahead, count_steps, expected_lot
from tacit.training.schedules import factors


@pytest.mark.parametrize(
    "schedule", [Ramp(2.0, 0.5), Ramp(2.0, 0.5, is_geometric=True), Stairs((2.0, 0.5))]
)
def test_a_schedule_starts_and_ends_where_it_says(schedule):
    found = factors(schedule, 100)
    assert found[0] == 2.0
    assert found[-1] == pytest.approx(0.5)
    assert len(found) == 100
    assert len(set(found)) <= 8


def test_without_a_schedule_every_factor_is_one():
    assert factors(None, 3) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("bad", [lambda step, steps: 0.0, lambda step, steps: float("nan")])
def test_factors_must_be_positive(bad):
    with pytest.raises(ValueError, match="schedule must be"):
        factors(bad, 3)


def test_a_number_is_not_a_schedule():
    with pytest.raises(TypeError, match="schedule must be Stairs"):
        factors(0.5, 3)


def test_every_clip_rule_follows_a_schedule():
    assert scaled(Flat(2.0), [0.5]).clip_norms == (1.0,)
    assert scaled(Automatic(2.0), [0.5]).clip_norms == (1.0,)
    assert scaled(PerLayer((1.0, 2.0)), [2.0, 0.5]).clip_norms == (2.0, 1.0)


LOTS = {
    "number": (16, 16.0),
    "Poisson": (sampling.Poisson(0.1), 6.0),
    "truncated": (sampling.TruncatedPoisson(0.1, 8, n_records=60), 6.0),
    "fixed size": (sampling.FixedSize(7, n_records=60), 7.0),
    "allocation": (sampling.RandomAllocation(8), 7.5),
    "shuffle": (sampling.Shuffle(8, n_records=60, unamplified=True), 7.5),
    "turns": (sampling.CyclicPoisson(0.7, groups=6), 7.0),
    "order": (sampling.FixedOrder(7), 60 / 7),
    "stream": (sampling.Stream([[0]], separation=2, expected_batch=3.5), 3.5),
}


@pytest.mark.parametrize("kind", LOTS)
def test_the_expected_lot_follows_from_how_lots_are_drawn(kind):
    lots, expected = LOTS[kind]
    assert expected_lot(lots, 60) == expected


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.7, 256 / 1e7])
def test_a_pass_is_counted_in_whole_numbers(rate):
    n = 10**7
    lot = expected_lot(sampling.Poisson(rate), n)
    assert lot == round(rate * n)
    assert count_steps(epochs=3, steps=None, batch_size=lot, n_records=n) == -(-3 * n // int(lot))


def test_a_lot_that_nobody_can_be_in_is_refused():
    with pytest.raises(ValueError, match="batch_size must be <= n_records and above 0"):
        expected_lot(sampling.Poisson(0.0), 60)


def test_noise_schedule_is_in_the_bill(problem):
    run = problem(steps=4, noise_multiplier=2.0, schedule=Stairs((1.0, 2.0))).private
    step = [ev.PoissonSampled(0.25, ev.Gaussian(sigma)) for sigma in (2.0, 4.0)]
    assert run.event == ev.Sequence((ev.Repeated(step[0], 2), ev.Repeated(step[1], 2)))
    multipliers = []
    for lot in run:
        multipliers.append(run.noise_multiplier)
        run.step(lot)
    assert multipliers == [2.0, 2.0, 4.0, 4.0]


def test_clip_schedule_moves_the_clip_norm_and_not_the_bill(problem):
    plain = problem(steps=4).private
    run = problem(steps=4, clip_norm=ScheduledClip(1.0, Stairs((1.0, 0.25)))).private
    assert run.event == plain.event
    norms = []
    for lot in run:
        norms.append(run.info["clip_norms"])
        run.step(lot)
    assert norms == [[1.0], [1.0], [0.25], [0.25]]


def test_calibration_spends_the_budget_on_the_whole_schedule(problem):
    run = problem(steps=8, epsilon=1.0, delta=1e-5, schedule=Ramp(1.5, 0.75)).private
    assert 0.97 < run.epsilon(delta=1e-5) <= 1.0


@pytest.mark.parametrize(
    "asked",
    [range(40), [0, 0, 1, 1, 2], [7, 8, 9, 3, 4, 30, 31, 0], [39, 38, 0, 1], [39, 40, 41]],
    ids=str,
)
def test_lots_drawn_ahead_are_those_of_their_steps(asked):
    drawn = []

    def draw(step):
        drawn.append(step)
        return np.array([step, step + 1])

    lots = _drawn_ahead(draw, 40)
    for step in asked:
        assert lots(step).tolist() == [step, step + 1]
    assert max(drawn) <= max(39, *asked)  # no step after the last one
    if isinstance(asked, range):
        assert drawn == list(asked)  # each once
