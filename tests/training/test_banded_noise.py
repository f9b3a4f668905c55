"""How many bands pay: prices and noise against known numbers, and never above DP-SGD's."""

import numpy as np
import pytest

from tacit import accounting
from tacit.training.banded_noise import banded_event, choose_bands, price_bands

FASHION = {"batch_size": 256, "n_records": 60_000, "steps": 2048, "delta": 1e-5}


@pytest.mark.parametrize(
    ("epsilon", "bands", "multiplier", "noise"),
    [
        (0.5, 4, 2.8757, 46.64),
        (1.0, 1, 1.0139, 32.45),
        (1.0, 8, 2.2517, 26.37),
        (3.0, 32, 1.8125, 11.87),
        (8.0, 64, 1.2164, 6.29),
    ],
)
def test_noise_and_price(epsilon, bands, multiplier, noise):
    found = price_bands(bands, epsilon=epsilon, **FASHION)
    assert found.noise_multiplier == pytest.approx(multiplier, abs=6e-5)
    assert found.noise == pytest.approx(noise, abs=6e-3)


@pytest.mark.parametrize(("epsilon", "bands"), [(0.5, 4), (1.0, 8), (3.0, 32), (8.0, 64)])
def test_the_best_number_of_bands(epsilon, bands):
    assert choose_bands(epsilon=epsilon, **FASHION).bands == bands


def test_one_epoch_of_a_million_records_gains_more_than_twofold():
    setting = {"batch_size": 1000, "n_records": 10**6, "steps": 1000, "epsilon": 1, "delta": 1e-5}
    assert price_bands(1, **setting).noise / choose_bands(**setting).noise >= 2.4


def test_large_batches_take_one_band():
    found = choose_bands(batch_size=8192, n_records=60_000, steps=280, epsilon=1.0, delta=1e-5)
    assert found.bands == 1


@pytest.mark.parametrize("settings", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_the_choice_is_never_worse_than_independent_noise(settings):
    rng = np.random.default_rng(settings)
    for _ in range(settings):
        n_records = int(10 ** rng.uniform(2, 6))
        setting = {
            "n_records": n_records,
            "batch_size": int(n_records ** rng.uniform(0.1, 1.0)),
            "steps": int(10 ** rng.uniform(0, 3.5)),
            "epsilon": 10 ** rng.uniform(-1, 1),
            "delta": 1e-6,
        }
        found = choose_bands(most=16, **setting)
        assert found.noise <= price_bands(1, **setting).noise * (1 + 1e-12)
        shape = {name: setting[name] for name in ("n_records", "batch_size", "steps")}
        event = banded_event(found.noise_multiplier, bands=found.bands, **shape)
        assert accounting.epsilon(event, delta=1e-6) <= setting["epsilon"] * (1 + 1e-9)
