"""Samplers: the law that `amplify` claims is the law that `indices` draws."""

import time
import tracemalloc
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from tacit import events as ev
from tacit.errors import UnsupportedEvent
from tacit.sampling import (
    FixedOrder,
    FixedSize,
    Poisson,
    RandomAllocation,
    Shuffle,
    TruncatedPoisson,
)

FALSE_ALARM = 1e-6  # per test, split among its checks
STEP = ev.Gaussian(2.0)


def memberships(sampler, n: int, draws: int, seed: int) -> np.ndarray:
    """Return flags, (draws, n), for the records that took part in each draw."""
    rng = np.random.default_rng(seed)
    marks = np.zeros((draws, n), bool)
    for row in marks:
        row[sampler.indices(n, rng)] = True
    return marks


@pytest.mark.parametrize("rate", [0.004, 0.1, 0.5, 0.93])
def test_poisson_takes_each_record_independently_at_its_rate(rate):
    n, draws = 300, 4000
    marks = memberships(Poisson(rate), n, draws, seed=1)
    per_record = marks.sum(axis=0)  # every record on its own
    for count in (per_record.min(), per_record.max()):
        assert stats.binomtest(int(count), draws, rate).pvalue > FALSE_ALARM / n
    per_draw = marks.sum(axis=1)  # the number drawn is binomial, not only right on average
    support = np.arange(n + 1)
    expected = draws * stats.binom.pmf(support, n, rate)
    common = expected >= 8
    observed = np.bincount(per_draw, minlength=n + 1)
    pooled = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], draws - expected[common].sum())
    assert stats.chisquare(pooled, expected).pvalue > FALSE_ALARM


def test_all_subsets_have_their_poisson_probability():
    n, rate, draws = 4, 0.3, 40_000
    marks = memberships(Poisson(rate), n, draws, seed=2)
    observed = np.bincount(marks @ (1 << np.arange(n)), minlength=2**n)
    sizes = np.array([bin(code).count("1") for code in range(2**n)])
    expected = draws * rate**sizes * (1 - rate) ** (n - sizes)
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM


def test_draws_of_different_steps_are_independent():
    marks = memberships(Poisson(0.3), 50, 4001, seed=3)
    together = (marks[:-1] & marks[1:]).sum(axis=0)
    for count in together:
        assert stats.binomtest(int(count), 4000, 0.09).pvalue > FALSE_ALARM / 50


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_poisson_at_the_edges_takes_nobody_or_everybody(n):
    assert Poisson(0.0).indices(n).size == 0
    assert Poisson(1.0).indices(n).tolist() == list(range(n))


def test_a_poisson_draw_from_a_hundred_million_takes_under_a_millisecond():
    sampler, rng = Poisson(1e-5), np.random.default_rng(0)
    sampler.indices(10**8, rng)
    times = []
    for _ in range(50):
        start = time.process_time()
        drawn = sampler.indices(10**8, rng)
        times.append(time.process_time() - start)
    assert np.median(times) < 1e-3
    assert 700 < drawn.size < 1300
    tracemalloc.start()
    sampler.indices(10**8, rng)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 1000  # a hundred bytes for each of the 1000 expected


@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_every_subset_of_the_fixed_size_is_equally_likely(batch_size):
    n, draws = 5, 20_000
    rng = np.random.default_rng(4)
    sampler = FixedSize(batch_size, n_records=n)
    subsets = dict.fromkeys(combinations(range(n), batch_size), 0)
    for _ in range(draws):
        subsets[tuple(sampler.indices(n, rng).tolist())] += 1
    if len(subsets) > 1:
        assert stats.chisquare(list(subsets.values())).pvalue > FALSE_ALARM


def test_fixed_size_from_many_records_is_uniform_and_distinct():
    sampler = FixedSize(50, n_records=10**6)
    rng = np.random.default_rng(5)
    drawn = np.array([sampler.indices(10**6, rng) for _ in range(1000)])
    assert (np.diff(drawn, axis=1) > 0).all()
    counts = np.bincount(drawn.ravel() // 10**5, minlength=10)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_small_draws_take_every_record_alike():
    drawn = memberships(FixedSize(10, n_records=640), 640, draws=4000, seed=6)
    assert (drawn.sum(1) == 10).all()
    assert stats.chisquare(drawn.sum(0)).pvalue > FALSE_ALARM
    assert drawn.any(0).all()  # 62 times each in the mean


def test_a_fixed_order_takes_each_record_once_in_a_pass_and_shows_no_place():
    draw = FixedOrder(7).lots(100, np.random.default_rng(0))
    first, second = (
        [draw(step, np.random.default_rng()).tolist() for step in range(start, start + 7)]
        for start in (0, 7)
    )
    assert sorted(record for lot in first for record in lot) == list(range(100))
    assert first == second
    places = np.array([4, 1, 4])
    given = FixedOrder(5, places=places)
    places[:] = 0  # what the caller does with it later does not matter
    assert given.lots(3)(4, np.random.default_rng()).tolist() == [0, 2]
    assert repr(given) == "FixedOrder(steps=5)"
    assert given == FixedOrder(5, places=places)  # equality does not reveal places
    assert given.digest() != FixedOrder(5, places=places).digest()
    assert FixedOrder(5).digest() == b""


def test_truncation_keeps_a_uniform_part_of_a_large_draw():
    n, draws = 30, 20_000
    sampler = TruncatedPoisson(0.5, max_batch=12, n_records=n)
    marks = memberships(sampler, n, draws, seed=6)
    sizes = marks.sum(axis=1)
    assert sizes.max() == 12
    expected = stats.binom.pmf(np.arange(12), n, 0.5)
    expected = draws * np.append(expected, 1 - expected.sum())
    observed = np.bincount(sizes, minlength=13)
    common = expected >= 8
    pooled = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    assert stats.chisquare(pooled, expected).pvalue > FALSE_ALARM
    share = sizes.sum() / marks.size
    for count in marks.sum(axis=0):  # no record is favored
        assert stats.binomtest(int(count), draws, share).pvalue > FALSE_ALARM / n


def test_random_allocation_puts_each_record_in_one_uniform_step():
    n, steps, epochs = 20, 4, 10_000
    rng = np.random.default_rng(7)
    counts = np.zeros((n, steps))
    together = 0
    for _ in range(epochs):
        batches = RandomAllocation(steps).indices(n, rng)
        assert len(batches) == steps
        assert np.sort(np.concatenate(batches)).tolist() == list(range(n))
        step_of = np.empty(n, int)
        for step, batch in enumerate(batches):
            step_of[batch] = step
        counts[np.arange(n), step_of] += 1
        together += step_of[0] == step_of[1]  # independent records: with chance 1 / steps
    for row in counts:
        assert stats.chisquare(row).pvalue > FALSE_ALARM / n
    assert stats.binomtest(int(together), epochs, 1 / steps).pvalue > FALSE_ALARM


def test_random_allocation_gives_empty_batches_when_records_are_few():
    batches = RandomAllocation(5).indices(0)
    assert [batch.size for batch in batches] == [0] * 5


def test_shuffle_gives_equal_batches_that_cover_all_records():
    batches = Shuffle(4, n_records=20).indices(20, rng=8)
    assert [batch.size for batch in batches] == [5] * 4
    assert np.sort(np.concatenate(batches)).tolist() == list(range(20))


def test_removing_a_record_changes_one_shuffled_batch():
    sampler = Shuffle(4, n_records=20)
    with_last, without = sampler.indices(20, rng=9), sampler.indices(19, rng=9)
    changed = [a.tolist() != b.tolist() for a, b in zip(with_last, without, strict=True)]
    assert sum(changed) == 1


def test_shuffle_refuses_an_amplified_price_and_says_why():
    with pytest.raises(UnsupportedEvent, match=r"2403\.17673.*unamplified=True"):
        Shuffle(10, n_records=100).amplify(STEP)
    assert Shuffle(10, n_records=100, unamplified=True).amplify(STEP) == STEP


def test_each_sampler_claims_the_event_of_its_law():
    assert Poisson(0.1).amplify(STEP) == ev.PoissonSampled(0.1, STEP)
    assert FixedSize(3, 9).amplify(STEP) == ev.FixedSizeSampled(3, 9, STEP)
    assert RandomAllocation(7).amplify(STEP) == ev.RandomAllocation(7, STEP)
    truncated = TruncatedPoisson(0.1, max_batch=5, n_records=9)
    assert truncated.amplify(STEP) == ev.TruncatedPoissonSampled(0.1, 5, 9, STEP)


@pytest.mark.parametrize(
    "sampler",
    [
        Poisson(0.3),
        FixedSize(3, 20),
        RandomAllocation(4),
        TruncatedPoisson(0.3, 5, 20),
        Shuffle(4, 20),
    ],
    ids=repr,
)
def test_seeds_repeat_and_fresh_entropy_does_not(sampler):
    def flat(rng):
        drawn = sampler.indices(20, rng)
        return [batch.tolist() for batch in drawn] if isinstance(drawn, list) else drawn.tolist()

    assert flat(11) == flat(11)
    assert len({str(flat(None)) for _ in range(20)}) > 1


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_the_unit_interval_is_refused(rate):
    with pytest.raises(ValueError, match="rate must be in"):
        Poisson(rate)
    with pytest.raises(ValueError, match="rate must be in"):
        TruncatedPoisson(rate, 5, 10)


def test_a_number_of_records_other_than_declared_is_refused():
    for sampler in (FixedSize(3, 20), TruncatedPoisson(0.1, 3, 20)):
        with pytest.raises(ValueError, match="declared n_records = 20, got 19"):
            sampler.indices(19)
    with pytest.raises(ValueError, match="n must be <= n_records"):
        Shuffle(2, 20).indices(21)


@pytest.mark.parametrize("make", [lambda: RandomAllocation(0), lambda: FixedSize(0, 5)])
def test_zero_steps_or_an_empty_batch_are_refused(make):
    with pytest.raises(ValueError, match="whole number >= 1"):
        make()


def test_a_negative_number_of_records_is_refused():
    with pytest.raises(ValueError, match="n must be a whole number"):
        Poisson(0.5).indices(-1)
