"""Correlated noise on a GPU: the kernel releases what the formulas say, in and out of graphs."""

import copy

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn

import tacit
from tacit.mechanisms import optimal_bands
from tacit.training import Banded, Speed
from tacit.training.banded_noise import BandedNoise, residual_step
from tacit.training.gpu.recorded_update import RecordedUpdate
from tacit.training.key import Key
from tacit.training.noise import NoisyMean

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FALSE_ALARM = 1e-6


def mixed(values, column):
    found = np.zeros_like(values)
    for lag, weight in enumerate(column[: len(values)]):
        found[lag:] += weight * values[: len(values) - lag]
    return found


def is_white(z, lags):
    inside = chi2.ppf(FALSE_ALARM, z.size) < (z**2).sum() < chi2.isf(FALSE_ALARM, z.size)
    alike = [abs((z[k:] * z[:-k]).sum()) / np.sqrt(z[k:].size) for k in range(1, lags)]
    return inside and max(alike) < 6.0


@pytest.mark.parametrize("bands", [2, 7, 16])
def test_the_kernel_releases_mixed_sums_and_keeps_their_residuals(bands):
    column = optimal_bands(48, bands)
    noise = BandedNoise(Key.from_seed(1), expected_batch=4.0, column=column)
    scales, shapes = [0.5, 2.0, 1.0], [(3, 5), (70, 91), (4099,)]
    generator = torch.Generator().manual_seed(0)
    sums, means = [], []
    for step in range(48):
        total = [30 * torch.randn(shape, generator=generator) for shape in shapes]
        device = [t.cuda() for t in total]
        blocks = noise.in_place(device, scales, step=step, noise_multiplier=1.5)
        assert blocks is not None
        before = noise._residuals.clone()
        blocks.launch()
        noise.launched(step)
        flat, mean = (
            torch.cat([t.double().flatten().cpu() for t in parts]) for parts in (total, device)
        )
        units = [residual_step(grid) for grid in noise._grids(1.5, scales, len(flat))]
        unit = torch.cat([torch.full((t.numel(),), u) for t, u in zip(total, units, strict=True)])
        row = noise._residuals[step % (bands - 1)].cpu().double()
        assert torch.equal(row, ((flat - 4.0 * mean) / unit.double()).trunc())
        others = [i for i in range(bands - 1) if i != step % (bands - 1)]
        assert torch.equal(noise._residuals[others], before[others])
        sums.append(flat.numpy())
        means.append(mean.numpy())
    sizes = [15, 6370, 4099]
    z = mixed(4.0 * np.array(means) - np.array(sums), column) / np.repeat(scales, sizes) / 1.5
    assert is_white(z, bands + 2)


def test_the_kernel_and_the_host_can_take_turns():
    column = optimal_bands(32, 4)
    noise, seen = BandedNoise(Key.from_seed(2), expected_batch=1.0, column=column), []
    for step in range(32):
        kind = torch.float64 if step % 3 == 0 else torch.float32  # the kernel takes float32
        (mean,) = noise.release(
            [torch.zeros(5000, device="cuda", dtype=kind)], [1.0], step=step, noise_multiplier=1.0
        )
        seen.append(mean.double().cpu().numpy())
    assert is_white(mixed(np.array(seen), column), 6)


@pytest.mark.parametrize("bands", [2, 16])
def test_the_kernel_recovers_the_updates_of_the_definition(bands):
    """u = C^-1 (C g + z), with the z of a run without correlation under the same key."""
    column, steps, size = optimal_bands(40, bands), 40, 9000
    options = {"scales": [2.0], "noise_multiplier": 1.5}
    noise = BandedNoise(Key.from_seed(4), expected_batch=4.0, column=column)
    alone = NoisyMean(Key.from_seed(4), expected_batch=4.0, column=[1.0] + [0.0] * (bands - 1))
    generator = torch.Generator().manual_seed(0)
    sums = 30 * torch.randn(steps, size, generator=generator)
    zeros = torch.zeros(size, device="cuda")
    found, z = [], []
    for step in range(steps):
        found.append(noise.release([sums[step].cuda()], step=step, **options)[0].cpu().double())
        z.append(alone.release([zeros.clone()], step=step, **options)[0].cpu().double())
    strategy = torch.zeros(steps, steps, dtype=torch.float64)
    for lag, weight in enumerate(column):
        strategy += torch.diag(torch.full((steps - lag,), weight, dtype=torch.float64), -lag)
    noises = torch.linalg.solve_triangular(strategy, torch.stack(z), upper=False)
    expected = sums.double() / 4.0 + noises
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
def test_the_fused_update_is_that_of_the_optimizer(kind):
    seen, generator = [], torch.Generator().manual_seed(0)
    sums = [[t.cuda() for t in torch.randn(24, n, generator=generator)] for n in (70, 6400)]
    for is_alone in (True, False):  # otherwise the optimizer's own step is taken
        weights = [nn.Parameter(torch.ones(n, device="cuda")) for n in (70, 6400)]
        optimizer = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
        }[kind](weights)
        noise = BandedNoise(Key.from_seed(2), expected_batch=4.0, column=optimal_bands(24, 8))
        update = RecordedUpdate(noise, weights, optimizer, is_alone=is_alone)
        memory = [torch.empty(n, device="cuda") for n in (70, 6400)]
        for step in range(24):
            optimizer.param_groups[0]["lr"] *= 0.95  # as a schedule does
            for place, total in zip(memory, sums, strict=True):
                place.copy_(total[step])
            update.release_and_move(memory, [1.0, 2.0], step=step, noise_multiplier=1.0)
        (launches,) = update._launches.values()
        assert (launches._update is not None) == is_alone
        assert (launches.graph is not None) == is_alone  # which follows the rates
        seen.append(torch.cat([p.detach() for p in weights]))
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-4)


def test_residuals_of_more_than_two_to_the_31_numbers():
    size, column = 160_000_000, optimal_bands(32, 16)
    noise, seen = BandedNoise(Key.from_seed(3), expected_batch=1.0, column=column), []
    for step in range(24):
        total = torch.zeros(size, device="cuda")
        (mean,) = noise.release([total], [1.0], step=step, noise_multiplier=1.0)
        seen.append(mean[-20_000:].double().cpu().numpy())
    assert is_white(mixed(np.array(seen), column), 17)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_run_on_a_gpu_is_white_after_mixing(kind, compile):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).cuda()
    x, y = torch.randn(300, 20, device="cuda"), torch.randint(0, 5, (300,), device="cuda")
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if kind == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    )
    private = tacit.make_private(
        model,
        optimizer,
        (x, y),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1],
                                                         reduction="none") * 0.0,
        batch_size=30, steps=64, clip_norm=1.0, noise_multiplier=1.0, noise=Banded(bands=8),
        speed=Speed(compile=compile, check=False),
    )  # fmt: skip
    before, seen = copy.deepcopy(model.state_dict()), []
    for lot in private:
        private.step(lot)
        seen.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]).cpu())
    z = mixed(30 * torch.stack(seen).numpy(), private.event.column)
    assert is_white(z, 10)
    assert not torch.equal(before["0.weight"], model[0].weight)


def _losses(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
