"""Equal laws pass, whatever they are; different means, spreads and finiteness are found."""

import numpy as np
import pytest
import torch

from tacit.training.sequential_test import differ_in_law

ROWS = 16
LAWS = {
    "normal": lambda rng: rng.normal(size=ROWS),
    "heavy tails": lambda rng: rng.standard_cauchy(ROWS),
    "one number for all": lambda rng: rng.normal() * np.arange(ROWS),
    "rare": lambda rng: 1.0 * (rng.random(ROWS) < 0.02),
    "skewed": lambda rng: np.exp(4 * rng.normal(size=ROWS)),
    "constant": lambda rng: np.ones(ROWS),
    "not finite at times": lambda rng: np.where(rng.random(ROWS) < 0.1, np.inf, 1.0),
}


def are_told_apart(first, second, seed, **options) -> bool:
    rng = np.random.default_rng(seed)
    samplers = (lambda: torch.from_numpy(first(rng)), lambda: torch.from_numpy(second(rng)))
    return differ_in_law(*samplers, rng, **options)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_equal_laws_are_never_told_apart(law):
    assert not any(are_told_apart(law, law, seed) for seed in range(40))


@pytest.mark.parametrize(
    "change",
    [
        lambda x, _: x + 1,
        lambda x, _: x * 2,
        lambda x, _: x + (-1.0) ** np.arange(ROWS),
        lambda x, _: np.where(np.arange(ROWS) < 8, 0.0, x),
        lambda x, rng: np.where(rng.random(ROWS) < 0.5, np.nan, x),
    ],
    ids=[
        "all rows move",
        "all rows spread",
        "rows move in two directions",
        "some are constant",
        "half is not finite",
    ],
)
def test_different_laws_are_told_apart(change):
    def changed(rng):
        return change(LAWS["normal"](rng), rng)

    assert all(are_told_apart(LAWS["normal"], changed, seed) for seed in range(8))


def test_differences_within_the_slack_count_as_equal():
    def moved(rng):
        return LAWS["constant"](rng) + 1e-6

    assert are_told_apart(LAWS["constant"], moved, 0)
    assert not are_told_apart(LAWS["constant"], moved, 0, slack=1e-5)
