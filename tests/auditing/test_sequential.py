"""A sequential test may be stopped at any time, and refutes a correct bill as rarely as stated."""

import numpy as np

from tacit.auditing import SequentialTest
from tacit.events import Gaussian


def rounds_until_refuted(noise, seed, most):
    rng, test = np.random.default_rng(seed), SequentialTest(Gaussian(1.0))
    while not test.is_refuted and test.rounds < most:
        inside = rng.integers(0, 2, 300).astype(bool)
        test.add(inside + rng.normal(0, noise, 300), inside)
    return test.rounds if test.is_refuted else None


def test_a_correct_bill_is_seldom_refuted_however_long_one_looks():
    refuted = [rounds_until_refuted(1.0, seed, most=6) for seed in range(12)]
    assert sum(found is not None for found in refuted) <= 4  # 0.6 expected; 0.0002 for more


def test_less_noise_is_refuted_after_few_rounds():
    found = [rounds_until_refuted(0.5, seed, most=12) for seed in range(3)]
    assert all(rounds is not None for rounds in found)


def test_evidence_is_kept_once_it_sufficed():
    test = SequentialTest(Gaussian(1.0))
    inside = np.arange(300) < 150
    for _ in range(3):
        test.add(inside * 10.0 + np.linspace(0, 1, 300), inside)
    assert test.is_refuted
    assert test.evidence >= 20
