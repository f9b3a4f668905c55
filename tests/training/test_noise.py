"""The noise of a step: its law, its independence, its source."""

import copy
import math
import os
import pickle

import numpy as np
import pytest
import torch
from scipy.stats import chi2, norm

from tacit.training.gpu import available
from tacit.training.grid_noise import TILE, make_grids
from tacit.training.key import Key
from tacit.training.noise import NoisyMean

FALSE_ALARM = 1e-6  # probability that one of the statistical tests below fails on sound code


def releases(*, secure, steps, sizes=(30, 20), multiplier=2.0, scales=(0.5, 0.5), batch=10.0):
    """(steps, coordinates) of released values whose sums are zero."""
    mean = NoisyMean(Key.from_seed(5), expected_batch=batch, secure=secure)
    zeros = [torch.zeros(size) for size in sizes]
    return np.array(
        [
            torch.cat(mean.release(zeros, scales, step=t, noise_multiplier=multiplier)).numpy()
            for t in range(steps)
        ],
        dtype=float,
    )


@pytest.mark.parametrize("secure", [False, True])
def test_every_coordinate_has_exactly_the_stated_variance(secure):
    steps, expected = 600, (2.0 * 0.5 / 10.0) ** 2
    values = releases(secure=secure, steps=steps)
    statistic = (values**2).sum(0) / expected  # chi-squared with `steps` degrees of freedom
    tail = FALSE_ALARM / 2 / values.shape[1]
    assert (statistic > chi2.ppf(tail, steps)).all()
    assert (statistic < chi2.isf(tail, steps)).all()


@pytest.mark.parametrize("secure", [False, True])
def test_noise_has_mean_zero(secure):
    values = releases(secure=secure, steps=600) / 0.1
    z = np.abs(values.mean(0)) * math.sqrt(600)
    assert (z < norm.isf(FALSE_ALARM / 2 / values.shape[1])).all()


@pytest.mark.parametrize("secure", [False, True])
def test_noise_is_correlated_neither_across_parameters_nor_across_steps(secure):
    """Peers, entry 20: one key used for several parameters."""
    steps = 600
    values = releases(secure=secure, steps=steps) / 0.1
    coordinates = values.shape[1]
    across = (values.T @ values / math.sqrt(steps))[np.triu_indices(coordinates, 1)]
    later = values[1:].T @ values[:-1] / math.sqrt(steps - 1)
    tests = across.size + later.size
    bound = 1.05 * norm.isf(FALSE_ALARM / 2 / tests)  # products of normals: a little heavier tails
    assert np.abs(across).max() < bound
    assert np.abs(later).max() < bound


def test_each_group_has_its_own_scale():
    values = releases(secure=False, steps=300, sizes=(40, 40), scales=(1.0, 3.0))
    ratio = values[:, 40:].std() / values[:, :40].std()
    assert ratio == pytest.approx(3.0, rel=0.05)  # 12,000 draws each: 0.9 % standard error


def test_sum_is_divided_by_the_declared_batch():
    mean = NoisyMean(Key.from_seed(0), expected_batch=8.0)
    (released,) = mean.release([torch.full((3,), 4.0)], [1.0], step=0, noise_multiplier=0.0)
    assert released.tolist() == [0.5] * 3


def test_a_seed_repeats_the_noise_and_no_seed_does_not():
    def draw(key):
        mean = NoisyMean(key, expected_batch=1.0)
        return mean.release([torch.zeros(4)], [1.0], step=3, noise_multiplier=1.0)[0].clone()

    assert torch.equal(draw(Key.from_seed(1)), draw(Key.from_seed(1)))
    assert not torch.equal(draw(Key.from_seed(1)), draw(Key.from_seed(2)))
    assert not torch.equal(draw(Key.from_seed(None)), draw(Key.from_seed(None)))


def test_large_draws_do_not_depend_on_the_number_of_threads():
    def draw():
        mean = NoisyMean(Key.from_seed(1), expected_batch=1.0)
        zeros = [torch.zeros(TILE + 17), torch.zeros(TILE)]
        return torch.cat(mean.release(zeros, [1.0, 1.0], step=0, noise_multiplier=1.0))

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = draw()
        torch.set_num_threads(2)
        assert torch.equal(one, draw())
    finally:
        torch.set_num_threads(threads)
    first, second = one[:TILE], one[TILE : 2 * TILE]
    z = float((first * second).mean()) * math.sqrt(TILE)
    assert abs(z) < norm.isf(FALSE_ALARM / 2)  # chunks are independent


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("multiplier", [1e-9, 0.7, 30.0])
def test_a_release_lies_on_a_grid_that_does_not_depend_on_the_sum(secure, multiplier):
    """Peers, entry 19: noise that hides the sum must not leave its last bits readable."""
    mean = NoisyMean(Key.from_seed(1), expected_batch=1.0, secure=secure)
    (grid,) = make_grids(multiplier, [1.0], 6)
    for total in (torch.zeros(6).double(), torch.rand(6).double()):
        (released,) = mean.release([total], [1.0], step=0, noise_multiplier=multiplier)
        steps = released.numpy() / grid.step
        assert np.array_equal(steps, np.rint(steps))


@pytest.mark.parametrize("secure", [False, True])
def test_counts_are_noised_on_a_grid_from_their_own_stream(secure):
    """Peers, entry 15: the count's noise bypassed secure mode."""
    mean = NoisyMean(Key.from_seed(1), expected_batch=1.0, secure=secure)
    noise = [
        mean.release_counts([0.0], step=t, noise_multiplier=4.0, sensitivity=0.5)[0]
        for t in range(400)
    ]
    assert np.std(noise) == pytest.approx(2.0, rel=0.18)  # 5 standard errors
    (grid,) = make_grids(4.0, [0.5], 1)
    assert np.array_equal(np.array(noise) / grid.step, np.rint(np.array(noise) / grid.step))
    (gradient,) = mean.release([torch.zeros(1)], [0.5], step=0, noise_multiplier=4.0)
    assert float(gradient) != pytest.approx(noise[0], rel=1e-6)


def test_sums_of_any_type_and_layout_are_released_with_their_own_type_and_place():
    mean = NoisyMean(Key.from_seed(1), expected_batch=2.0)
    sums = [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(3.0, dtype=torch.bfloat16),
        torch.arange(4.0, dtype=torch.float64),
        torch.zeros(0),
    ]
    before = [total.clone() for total in sums]  # they may be overwritten
    released = mean.release(sums, [1e-6] * 4, step=0, noise_multiplier=1.0)
    for total, noisy in zip(before, released, strict=True):
        assert (noisy.dtype, noisy.shape) == (total.dtype, total.shape)
        assert torch.allclose(noisy.double(), total.double() / 2, atol=1e-5)


def test_an_overflowed_sum_is_released_as_a_number_too_large():
    mean = NoisyMean(Key.from_seed(1), expected_batch=1.0)
    total = torch.tensor([math.inf, -math.inf, 1.0])
    (released,) = mean.release([total], [1.0], step=0, noise_multiplier=1.0)
    assert released[:2].tolist() == [math.inf, -math.inf]  # 2^1000 steps, in float32
    assert math.isfinite(released[2])


def sparse_sum(value=1.0, rows=1000, width=4):
    given = torch.tensor([[3, 7]])
    values = torch.full((2, width), value)
    return torch.sparse_coo_tensor(given, values, (rows, width), check_invariants=True).coalesce()


def test_a_sparse_sum_is_released_as_its_dense_form():
    mean, dense = (NoisyMean(Key.from_seed(1), expected_batch=2.0) for _ in range(2))
    for step in range(3):
        options = {"step": step, "noise_multiplier": 1.0}
        (found,) = mean.release([sparse_sum()], [1.0], **options)
        (expected,) = dense.release([sparse_sum().to_dense()], [1.0], **options)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "hold",
    [
        lambda grad: grad,
        lambda grad: grad.view(-1)[5:],
        lambda grad: grad.detach().numpy(),
        lambda grad: grad.data.t(),
        lambda grad: grad.untyped_storage(),
        lambda grad: torch.utils.dlpack.from_dlpack(grad),
        lambda grad: memoryview(grad.numpy()),
    ],
)
def test_a_gradient_that_anyone_holds_is_not_overwritten(hold):
    """The memory of a sparse sum's release is used again, but only once nothing refers to it."""
    mean, p = (
        NoisyMean(Key.from_seed(1), expected_batch=2.0),
        torch.nn.Parameter(torch.ones(1000, 4)),
    )
    options = {"noise_multiplier": 1.0}
    mean.release_into([p], [sparse_sum()], [1.0], step=0, **options)
    first, address, held = p.grad.clone(), p.grad.data_ptr(), hold(p.grad)
    p.grad = None
    mean.release_into([p], [sparse_sum()], [1.0], step=1, **options)
    assert p.grad.data_ptr() != address
    mean.release_into([p], [sparse_sum()], [1.0], step=0, **options)
    assert torch.equal(p.grad, first)
    mean.release_into([p], [sparse_sum()], [1.0], step=2, **options)
    address, kept = p.grad.data_ptr(), held
    p.grad = None
    mean.release_into([p], [sparse_sum(rows=1000)], [1.0], step=0, **options)
    assert p.grad.data_ptr() == address  # as nothing held that
    assert torch.equal(p.grad, first)
    if isinstance(kept, torch.Tensor) and kept.numel() == first.numel():
        assert torch.equal(kept.reshape(-1).sort().values, first.reshape(-1).sort().values)


def test_memory_is_used_again_for_numbers_of_its_size_and_type_only():
    mean = NoisyMean(Key.from_seed(1), expected_batch=2.0)
    sizes = [(1000, 4), (1000, 4), (500, 4), (2000, 4), (1000, 4)]
    kinds = [torch.float32, torch.float64, torch.float32, torch.float32, torch.float32]
    for step, ((rows, width), kind) in enumerate(zip(sizes, kinds, strict=True)):
        total = sparse_sum(rows=rows, width=width)
        options = {"step": step, "noise_multiplier": 1.0, "dtypes": [kind]}
        (found,) = mean.release([total], [1.0], **options)
        assert (found.shape, found.dtype) == ((rows, width), kind)
        assert torch.isfinite(found).all()
        del found


def test_a_copy_of_the_noise_is_refused():
    mean = NoisyMean(Key.from_seed(1), expected_batch=1.0)
    for copy_of in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy_of(mean)


def test_a_forked_process_gets_no_noise(monkeypatch):
    mean = NoisyMean(Key.from_seed(1), expected_batch=1.0)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="another process"):
        mean.release([torch.zeros(2)], [1.0], step=0, noise_multiplier=1.0)
    with pytest.raises(RuntimeError, match="another process"):
        mean.release_counts([0.0], step=0, noise_multiplier=1.0, sensitivity=1.0)


def test_the_places_used_last_are_remembered(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    class Blocks:
        def set_nonce(self, secret, step):
            self.key = secret, step

    monkeypatch.setattr(available, "noise_blocks", lambda *_: Blocks())
    mean, keys = NoisyMean(Key.from_seed(0), expected_batch=4.0), []

    def blocks(place, step):
        found = mean.in_place([place], [1.0], step=step, noise_multiplier=1.0)
        keys.append(found.key)
        return found

    often, *others = (torch.zeros(3).as_subclass(OnGpu) for _ in range(9))
    first = blocks(often, 0)
    for step, other in enumerate(others):
        blocks(other, 2 * step + 1)
        assert blocks(often, 2 * step + 2) is first
    assert len(mean._blocks) == 4
    assert blocks(often.view(torch.int32), 99) is not first  # other numbers in the same place
    assert len(set(keys)) == len(keys)  # each step has its own
