"""Flattening: the only place where counts are multiplied."""

import math
from fractions import Fraction

import pytest

from tacit.accounting import epsilon, flatten
from tacit.errors import UnsupportedEvent
from tacit.events import (
    FixedSizeSampled,
    Gaussian,
    Laplace,
    PoissonSampled,
    RandomAllocation,
    Relation,
    Repeated,
    Sequence,
    TreeAggregation,
    TruncatedPoissonSampled,
)

STEP = PoissonSampled(0.01, Gaussian(4.0))


def test_counts_multiply_through_nesting():
    inner = Sequence((Repeated(STEP, 3), Laplace(1.0)))
    event = Sequence((Repeated(Repeated(inner, 5), 2), STEP))
    assert flatten(event) == {STEP: 31, Laplace(1.0): 10}


def test_nothing_is_nothing():
    assert flatten(Sequence(())) == {}
    assert flatten(Repeated(STEP, 0)) == {}
    assert flatten(PoissonSampled(0.0, Gaussian(1.0))) == {}
    assert flatten(PoissonSampled(0.5, Sequence(()))) == {}


def test_keys_keep_the_order_of_first_appearance():
    parts = (Laplace(2.0), STEP, Gaussian(1.0), Laplace(2.0))
    assert list(flatten(Sequence(parts))) == [Laplace(2.0), STEP, Gaussian(1.0)]


@pytest.mark.parametrize(
    "event",
    [
        PoissonSampled(1.0, Repeated(Gaussian(2.0), 3)),
        RandomAllocation(1, Repeated(Gaussian(2.0), 3)),
    ],
)
def test_a_sample_of_everything_is_no_sample(event):
    assert flatten(event) == {Gaussian(2.0): 3}
    assert flatten(PoissonSampled(1.0, Gaussian(2.0))) == {Gaussian(2.0): 1}


def test_a_truncation_that_cannot_bite_is_no_truncation():
    event = TruncatedPoissonSampled(0.1, 51, 50, Gaussian(2.0))
    assert flatten(event) == {PoissonSampled(0.1, Gaussian(2.0)): 1}


def test_a_cap_that_only_the_larger_neighbor_reaches_is_kept():
    event = TruncatedPoissonSampled(0.1, 50, 50, Gaussian(2.0))
    assert flatten(event) == {event: 1}


def test_more_repetitions_than_a_float_can_count_are_refused():
    with pytest.raises(UnsupportedEvent, match="repetitions"):
        flatten(Repeated(Repeated(STEP, 10**12), 10**12))


def test_gaussians_on_one_sample_are_one_gaussian_rounded_to_the_safe_side():
    (merged,) = flatten(PoissonSampled(0.1, Sequence((Gaussian(3.0), Gaussian(4.0, 1.5)))))
    assert isinstance(merged, PoissonSampled)
    assert isinstance(merged.event, Gaussian)
    assert merged.event.noise_multiplier == pytest.approx(2.4)
    assert merged.event.noise_multiplier <= 2.4
    assert merged.event.replace_factor == 2.0


@pytest.mark.parametrize("noise", [0.3, 0.9, 5.0])
def test_the_nodes_of_a_tree_are_one_gaussian_rounded_to_the_safe_side(noise):
    (merged,) = flatten(TreeAggregation(noise, 1000))  # a record is in 10 nodes
    assert isinstance(merged, Gaussian)
    assert merged.noise_multiplier == pytest.approx(noise / math.sqrt(10))
    assert 10 * Fraction(merged.noise_multiplier) ** 2 <= Fraction(noise) ** 2


def test_different_releases_on_one_sample_stay_together():
    both = Sequence((Gaussian(1.0), Repeated(Laplace(1.0), 2)))
    assert flatten(PoissonSampled(0.1, both)) == {PoissonSampled(0.1, both): 1}
    with pytest.raises(UnsupportedEvent):
        epsilon(FixedSizeSampled(10, 100, both), delta=1e-5)


def test_deep_nesting_does_not_overflow_the_stack():
    event = STEP
    for _ in range(5000):
        event = Repeated(event, 1)
    assert flatten(event) == {STEP: 1}


def test_a_full_fixed_size_sample_costs_a_replacement_when_records_come_and_go():
    everything = FixedSizeSampled(10, 10, Gaussian(2.0))
    closed = epsilon(Gaussian(2.0), delta=1e-5, relation=Relation.REPLACE_ONE)
    assert epsilon(everything, delta=1e-5) == pytest.approx(closed, rel=1e-9)
    replaced = epsilon(everything, delta=1e-5, relation=Relation.REPLACE_ONE)
    assert replaced >= closed * (1 - 1e-12)
