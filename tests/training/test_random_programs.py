"""Random small programs: the sum is that of the loop over records, batch after batch.

In between, parameters and modes change, so a trace that was cached may no longer fit.
"""

import warnings

import pytest
import torch
from looped_reference import alone, relative_error
from random_programs import random_program

from tacit.training import Flat, clipped_sum
from tacit.training.gpu.compiled import CompiledSum, NotCompiled

CLIP = Flat(0.3)
WAYS = [{}, {"chunk": 2}]


def check(seed):
    """Compare the sums of a program of one seed."""
    views = 1 + (seed % 5 == 0)
    program = random_program(seed, views=views)
    options = {"augmentations": views}
    for batch, change in zip(program.batches, program.changes, strict=True):
        change()
        options["weights"] = (torch.rand(len(batch[0]) // views) < 0.8).float()
        task = program.model, program.loss_fn, batch, CLIP
        expected = alone(*task, **options)
        for way in WAYS:
            found = clipped_sum(*task, **way, **options)
            assert_equal(found, expected, (seed, program.names, way))


def assert_equal(found, expected, label):
    """Compare two sums; both may be zero."""
    if any(bool(total.any()) for total in expected.sums.values()):
        assert relative_error(found.sums, expected.sums) < 1e-7, label
    else:
        assert not any(bool(total.any()) for total in found.sums.values()), label
    assert torch.equal(found.within, expected.within), label


@pytest.mark.filterwarnings("ignore:.*one at a time")
@pytest.mark.parametrize("seed", [1, 11, 21, 43])
def test_the_sum_is_that_of_the_loop(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*one at a time")
@pytest.mark.parametrize("tens", range(100, 130))
def test_so_it_does_for_many_programs(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_compiled_program_gives_the_sum_of_the_loop_or_says_why_not(seed):
    views = 1 + (seed % 5 == 0)
    program = random_program(seed, views=views)
    compiled = CompiledSum(program.model, program.loss_fn, CLIP, augmentations=views)
    for batch, change in zip(program.batches, program.changes, strict=True):
        change()
        weights = (torch.rand(len(batch[0]) // views) < 0.8).float()
        task = program.model, program.loss_fn, batch, CLIP
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # raised inside the compiler
            expected = alone(*task, weights=weights, augmentations=views)
            compiled.begin()
            try:
                found = compiled(batch, weights)
            except NotCompiled:  # with a reason; some are torch's own errors
                return
        assert compiled.all_finite()
        assert_equal(found, expected, (seed, program.names))
