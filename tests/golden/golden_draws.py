"""Draws with a seed, as hashes: mechanisms, samplers, local reports, votes, noise of training.

All are integers, or floats that a public grid makes exact, so no rounding can move them. If code
moves, the imports alone change.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from _label_prior import PriorLabels
from golden_store import digest

from tacit import local, mechanisms, pate, sampling
from tacit.training.banded_noise import BandedNoise
from tacit.training.grid_noise import SparseSum, SumOnGrid, add_noise, make_grids
from tacit.training.key import AESWords, Key, PhiloxWords, ShakeWords
from tacit.training.noise import NoisyMean

VALUES = np.linspace(-30, 30, 700) * 10.0 ** (np.arange(700) % 5 - 2)
COUNTS = np.arange(-350, 350) ** 3
SCORES = np.concatenate([np.linspace(0, 4, 40), [4.5, 4.4, 3.9]])

VECTORS: dict[str, Any] = {
    "gaussian": mechanisms.GaussianMechanism(2.0, l2_sensitivity=3.0),
    "gaussian, small": mechanisms.GaussianMechanism(0.01, l2_sensitivity=1e-3),
    "gaussian, replaced by one": mechanisms.GaussianMechanism(
        1.0, l2_sensitivity=1.0, replace_factor=1.0
    ),
    "grid gaussian": mechanisms.GridGaussianMechanism(2.0, l2_sensitivity=3.0, dimension=700),
    "laplace": mechanisms.LaplaceMechanism(2.0, l1_sensitivity=3.0),
    "laplace, large": mechanisms.LaplaceMechanism(300.0, l1_sensitivity=1e4),
    "discrete gaussian": mechanisms.DiscreteGaussianMechanism(2.0, l2_sensitivity=3.0),
    "discrete gaussian, small": mechanisms.DiscreteGaussianMechanism(0.3, l2_sensitivity=1.0),
    "discrete laplace": mechanisms.DiscreteLaplaceMechanism(0.5, l1_sensitivity=3.0),
    "discrete laplace, large": mechanisms.DiscreteLaplaceMechanism(70.0, l1_sensitivity=2.0),
}
CHOICES: dict[str, Any] = {
    "exponential": mechanisms.ExponentialMechanism(0.5, sensitivity=1.0),
    "exponential, monotone": mechanisms.ExponentialMechanism(2.0, sensitivity=0.3),
    "permute and flip": mechanisms.PermuteAndFlip(0.5, sensitivity=1.0),
    "laplace noisy max": mechanisms.LaplaceNoisyMax(0.5, sensitivity=1.0),
    "gaussian noisy max": mechanisms.GaussianNoisyMax(2.0, l2_sensitivity=1.0),
}
RNGS = {"seed": lambda: 5, "pcg": lambda: np.random.default_rng(11),
        "philox": lambda: np.random.Generator(np.random.Philox(3))}  # fmt: skip

SAMPLERS: dict[str, Any] = {
    "poisson": sampling.Poisson(0.3),
    "poisson, rare": sampling.Poisson(0.002),
    "poisson, all": sampling.Poisson(1.0),
    "truncated poisson": sampling.TruncatedPoisson(0.1, 90, 1000),
    "fixed size": sampling.FixedSize(40, n_records=1000),
    "fixed size, few": sampling.FixedSize(3, n_records=1000),
    "random allocation": sampling.RandomAllocation(7),
    "shuffle": sampling.Shuffle(6, n_records=1000, unamplified=True),
}
ORDERS: dict[str, Any] = {
    "cyclic poisson": sampling.CyclicPoisson(0.4, groups=3),
    "fixed order": sampling.FixedOrder(4),
    "given order": sampling.FixedOrder(4, places=[(7 * i) % 5 for i in range(1000)]),
    "stream": sampling.Stream(
        [[(3 * i + step) % 1000 for i in range(50)] for step in range(8)],
        separation=3,
        participations=2,
        expected_batch=50,
    ),
}

OPTIONS = np.arange(3000) ** 2 % 37
REALS = (np.arange(3000) * 7919 % 2401 - 1200) / 1000  # no library function: exact
ORACLES = (
    local.RandomizedResponse, local.OptimizedUnary, local.LocalHashing, local.HadamardResponse,
)  # fmt: skip
MEANS: dict[str, Any] = {
    "duchi": local.DuchiMean(epsilon=1.0, lower=-1, upper=1),
    "piecewise": local.PiecewiseMean(epsilon=2.0, lower=-1, upper=1),
    "hybrid": local.HybridMean(epsilon=1.0, lower=-1, upper=1),
    "histogram": local.LocalHistogram(epsilon=2.0, lower=-1.0, upper=1.0, n_bins=4),
    "labels": local.RandomizedLabels(epsilon=2.0, n_classes=37),
}
VOTES = np.random.default_rng(4).multinomial(250, [0.5, 0.25, 0.15, 0.1], size=120)
AGGREGATORS: dict[str, Any] = {
    "laplace max": pate.LaplaceMax(20.0),
    "gnmax": pate.GNMax(40.0),
    "confident gnmax": pate.ConfidentGNMax(threshold=120, sigma_threshold=30, sigma_answer=20),
}
PURPOSES = ("noise", "counts", "loss")


def _released(mechanism: Any, value: Any, rng: Any, times: int) -> str:
    source = rng()
    if isinstance(source, int):
        return digest(*[mechanism.release(value, source + i) for i in range(times)])
    return digest(*[mechanism.release(value, source) for _ in range(times)])


def _lots(sampler: Any) -> str:
    rng = np.random.default_rng(3)
    draws = [sampler.indices(1000, rng) for _ in range(6)]
    return digest(
        *[part for draw in draws for part in (draw if isinstance(draw, list) else [draw])]
    )


def _ordered(sampler: Any) -> str:
    rng = np.random.default_rng(5)
    draw = sampler.lots(1000, rng)
    return digest(*[draw(step, rng) for step in range(8)])


def _frequencies(kind: Any, epsilon: float, n_options: int) -> str:
    oracle = kind(epsilon=epsilon, n_options=n_options)
    return digest(oracle.randomize(OPTIONS % n_options, 3))


def _rappor(**options: Any) -> str:
    rappor, rng = local.Rappor(n_options=20, **options), np.random.default_rng(6)
    clients = [rappor.client(rng) for _ in range(20)]
    return digest(*[client.report(i) for _ in range(3) for i, client in enumerate(clients)])


def _rappor_at_once() -> str:
    reports = local.Rappor(n_options=20, n_bits=16, n_hashes=2).randomize(OPTIONS % 20, rng=2)
    return digest(reports)


def _quantile_reports() -> str:
    # Six options at most for each level, where randomized response has the shortest reports.
    found = local.LocalQuantiles(epsilon=3.0, lower=-1.0, upper=1.0, depth=2).randomize(REALS, 4)
    return digest(found.levels, *found.by_level)


def _labels_with_prior() -> str:
    prior = ((np.arange(37) * 11 + np.arange(300)[:, None] * 5) % 37 + 1) / 703  # all different
    return digest(PriorLabels(epsilon=1.0, n_classes=37).with_prior(
        OPTIONS[:300], prior, 8))  # fmt: skip


def _gradients() -> str:
    learner = local.LocalSGD(epsilon=4.0, n_features=3)
    X = np.clip(REALS[:900].reshape(300, 3), -1, 1)
    return digest(learner.randomize(np.zeros(4), X, X[:, 0] > 0, 5))


def _partition(users: Any) -> str:
    return digest(*pate.partition(600, 7, 3, users))


def _key(purpose: str) -> str:
    key = Key.from_seed(9)
    parts = [key.bytes(purpose, step, 40, part) for step in (0, 1, 1000) for part in (0, 2)]
    rng = key.numpy(purpose, 3)
    return digest(*parts, rng.integers(0, 2**63, 20), rng.random(20))


def _words(kind: Any, purpose: str, step: int) -> str:
    source, found = kind(Key.from_seed(3).bytes(purpose, step, 32)), []
    for number in (0, 1, 70_000):
        draw = source.sequence(number)
        found += [draw(count) for count in (4, 600, 1, 40_000, 300)]
    return digest(*found)


def _grid_noise(dtype: Any, threads: int) -> str:
    source = Key.from_seed(1).noise("noise", 5, is_cryptographic=True)
    total = (np.arange(70_000) * 7919 % 6007 / 1000 - 3).astype(dtype)
    grids = make_grids(0.7, [0.5, 2.0], 70_000)
    out = np.empty_like(total)
    cut = slice(0, 30_001), slice(30_001, None)
    parts = [SumOnGrid(total[c], grid, out[c]) for c, grid in zip(cut, grids, strict=True)]
    add_noise(parts, 1 / 64, source=source, threads=threads)
    return digest(out)


def _sparse_noise() -> str:
    rows, values = np.array([3, 5, 4000]), np.arange(24.0).reshape(3, 8)
    (grid,), out = make_grids(1.3, [2.0], 40_000), np.empty(40_000)
    total = SparseSum(rows, values, 0, 40_000)
    add_noise([SumOnGrid(total, grid, out)], 1.0, source=Key.from_seed(2).noise("noise", 0))
    return digest(out)


def _sums(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [(torch.arange(n, dtype=torch.float64) % 7 / 7 - step).to(dtype) for n in (50, 9000, 3)]


def _mean(step: int, dtype: torch.dtype, *, secure: bool = False) -> str:
    noise = NoisyMean(Key.from_seed(4), expected_batch=32.0, secure=secure)
    found = noise.release(_sums(step, dtype), [1.0, 0.5, 2.0], step=step, noise_multiplier=0.9)
    return digest(*[part.double().numpy() for part in found])


def _noisy_counts(purpose: Any, step: int) -> str:
    noise = NoisyMean(Key.from_seed(4), expected_batch=32.0)
    options = {"noise_multiplier": 1.5, "sensitivity": 2.0, "purpose": purpose}
    return digest(noise.release_counts([12.0, 3.5, 0.0], step=step, **options))


def _banded(bands: int, restart: int | None, dtype: torch.dtype) -> str:
    column = (1.0, 0.5, 0.375, 0.3125, 0.2734375, 0.24609375, 0.2255859375, 0.20947265625)[:bands]
    noise = BandedNoise(Key.from_seed(4), expected_batch=32.0, column=column, restart=restart)
    found = []
    for step in range(9):
        if step == 6:
            noise.start_anew(step)
        sums = _sums(step, dtype)
        options = {"step": step, "noise_multiplier": 0.9}
        found += [
            p.double().numpy().copy() for p in noise.release(sums, [1.0, 0.5, 2.0], **options)
        ]
    return digest(*found)


def _public_generators() -> str:
    rng = mechanisms.generator(12)
    words = [rng.random(3), rng.normal(size=3), rng.laplace(size=3), rng.integers(0, 99, 9)]
    return digest(*words, mechanisms.rounded_normal(0.7, step=0.125, size=9, rng=3))


CASES = {
    f"draws/mechanism/{name}/{rng}": partial(_released, mechanism, value, source, times)
    for table, value, times in ((VECTORS, VALUES, 2), (CHOICES, SCORES, 60))
    for name, mechanism in table.items()
    for rng, source in RNGS.items()
    for value in [COUNTS if name.startswith("discrete") else value]  # whole numbers
}
CASES |= {f"draws/sampler/{name}": partial(_lots, s) for name, s in SAMPLERS.items()}
CASES |= {f"draws/sampler/{name}": partial(_ordered, s) for name, s in ORDERS.items()}
CASES |= {
    f"draws/local/{kind.__name__}/{epsilon}/{n}": partial(_frequencies, kind, epsilon, n)
    for kind in ORACLES
    for epsilon in (0.5, 3.0)
    for n in (2, 37)
}
CASES |= {
    f"draws/local/{name}": lambda one=one: digest(
        one.randomize(OPTIONS if isinstance(one, local.RandomizedLabels) else REALS, 4)
    )
    for name, one in MEANS.items()
}
CASES |= {
    "draws/local/sampled vector": lambda: digest(
        local.SampledVector(epsilon=6.0, n_dimensions=5).randomize(REALS.reshape(-1, 5), 2)
    ),
    "draws/local/quantiles": _quantile_reports,
    "draws/local/labels with prior": _labels_with_prior,
    "draws/local/gradients": _gradients,
    "draws/local/rappor": _rappor,
    "draws/local/rappor in cohorts": partial(_rappor, n_bits=16, n_hashes=2, n_cohorts=4),
    "draws/local/rappor at once": _rappor_at_once,
    "draws/pate/partition": partial(_partition, None),
    "draws/pate/partition of users": partial(_partition, [i // 4 for i in range(600)]),
    "draws/generators": _public_generators,
}
CASES |= {
    f"draws/pate/{name}/block of {block}": lambda rule=rule, block=block: digest(
        rule.answer(VOTES, rng=7, block=block)
    )
    for name, rule in AGGREGATORS.items()
    for block in (1, 50)
}
CASES |= {
    f"draws/key/{purpose}": partial(_key, purpose)
    for purpose in ("noise", "counts", "loss", "lot", "turns", "model", "nonce")
}
CASES |= {
    f"draws/words/{kind.__name__}/{purpose}/{step}": partial(_words, kind, purpose, step)
    for kind in (AESWords, PhiloxWords, ShakeWords)
    for purpose in PURPOSES
    for step in (0, 1, 2, 1000)
}
CASES |= {
    f"draws/grid noise/{np.dtype(dtype).name}/{threads} threads": partial(
        _grid_noise, dtype, threads
    )
    for dtype in (np.float32, np.float64)
    for threads in (1, 2)
}
CASES |= {"draws/grid noise/sparse": _sparse_noise}
CASES |= {
    f"draws/mean/{str(dtype)[6:]}/{step}": partial(_mean, step, dtype)
    for dtype in (torch.float32, torch.float64)
    for step in (0, 1, 7, 4000)
}
CASES |= {"draws/mean/secure": partial(_mean, 3, torch.float64, secure=True)}
CASES |= {
    f"draws/counts/{purpose}/{step}": partial(_noisy_counts, purpose, step)
    for purpose in ("counts", "loss")
    for step in (0, 5)
}
CASES |= {
    f"draws/banded/{bands} bands/restart {restart}/{str(dtype)[6:]}": partial(
        _banded, bands, restart, dtype
    )
    for bands in (2, 4, 8)
    for restart in (None, 3)
    for dtype in (torch.float32, torch.float64)
}
