"""The rows that are on a device at once follow from its memory."""

import math

import pytest
import torch

from tacit.training.memory_limit import (
    fitting_rows,
    largest_microbatch,
    starting_limit,
    zero_step,
)

CPU = torch.device("cpu")


def test_the_starting_limit_follows_memory_and_lot():
    assert starting_limit(1, CPU, largest_lot=300) == 300
    assert starting_limit(2**34, CPU, largest_lot=300) == 1
    few = starting_limit(2**22, CPU, largest_lot=10**6)
    assert 1 <= few <= 64


def test_small_lots_are_not_cut_and_large_ones_above_a_usual_size():
    assert largest_microbatch(32, 1000) == 68
    assert largest_microbatch(600, 1000) == 748
    assert largest_microbatch(0.01, 1000) == 4
    assert largest_microbatch(32, 2**28) == 40


class FakeMeter:
    """A device of `size` bytes on which a step needs `fixed` bytes and `each` for a row.

    `curved` is the share by which rows of a large step need more than those of a small one.
    """

    def __init__(self, size, each, fixed=0, curved=0.0):
        self.size, self.each, self.fixed, self.curved = size, each, fixed, curved
        self.tried, self.overruns = [], 0

    def available(self):
        return self.size

    def needed(self, rows):
        return self.fixed + self.each * rows * (1 + self.curved * min(1, rows / 100))

    def step(self, rows):
        self.tried.append(rows)
        return rows

    def peak(self, run):
        run()
        needed = self.needed(self.tried[-1])
        self.overruns += needed > self.size
        return math.inf if needed > self.size else needed


@pytest.mark.parametrize("curved", [-0.3, 0.0, 0.3])
@pytest.mark.parametrize("fixed", [0, 10**9])
@pytest.mark.parametrize("each", [10**6, 3 * 10**7, 5 * 10**8])
def test_the_limit_is_near_what_fits(each, fixed, curved):
    meter = FakeMeter(40 * 10**9, each, fixed, curved)
    rows = fitting_rows(meter.step, meter, most=10**6)
    assert meter.needed(rows) <= meter.size
    assert 1.5 * meter.needed(rows) >= meter.size
    assert meter.overruns == 0
    assert len(meter.tried) <= 4


def test_no_more_rows_are_tried_than_a_microbatch_has():
    meter = FakeMeter(10**12, 10**6)
    assert fitting_rows(meter.step, meter, most=40) == 40
    assert meter.tried == [2, 6]  # that is far from the limit
    near = FakeMeter(6 * 10**7, 10**6)
    assert fitting_rows(near.step, near, most=40) == 40
    assert near.tried == [2, 6, 20]
    assert fitting_rows(meter.step, meter, most=1) == 1


def test_memory_for_the_optimizer_stays_free():
    meter = FakeMeter(10**10, 10**8)
    assert fitting_rows(meter.step, meter, most=1000, reserved=5 * 10**9) == 37


@pytest.mark.parametrize(
    ("each", "fits"), [(10**9, 7), (3 * 10**9, 2), (6 * 10**9, 1), (9 * 10**9, 1)]
)
def test_rows_that_run_out_of_memory_are_halved(each, fits):
    meter = FakeMeter(8 * 10**9, each)
    assert fitting_rows(meter.step, meter, most=100) == fits


def test_a_step_on_zeros_has_as_many_rows_as_asked_for():
    model, blank = torch.nn.Linear(3, 1), (torch.zeros(1, 3), torch.zeros(1))
    with zero_step(model, blank, lambda batch: batch) as run:
        x, y = run(5)
    assert (x.shape, y.shape) == ((5, 3), (5,))
    assert not torch.cat([x.flatten(), y]).any()
