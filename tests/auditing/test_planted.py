"""The audit finds every planted fault, and is silent about the correct twins."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from tacit.auditing import flip_coins, refute_event
from tacit.errors import UnsupportedEvent
from tacit.events import Gaussian
from tacit.sampling import Shuffle

planted = SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "planted.py")))

REPETITIONS = 5  # of each correct twin; false alarms are at most 5 % each


def audit(case, seed, confidence=0.95):
    rng = np.random.default_rng(seed)
    inside = flip_coins(case.n_trials, rng)
    scores = case.attack(inside, rng)
    options = {"independent": True, "epsilons": case.epsilons, "confidence": confidence}
    return refute_event(scores, inside, case.bill, **options)


@pytest.mark.parametrize("name", planted.CASES)
def test_a_planted_fault_is_found(name):
    assert audit(planted.CASES[name](is_broken=True), seed=0, confidence=0.999).is_refuted


@pytest.mark.parametrize("name", planted.CASES)
def test_the_correct_twin_passes(name):
    assert not audit(planted.CASES[name](is_broken=False), seed=0, confidence=0.999).is_refuted


def test_false_alarms_are_as_rare_as_stated():
    cases = [make(is_broken=False) for make in planted.CASES.values()]
    cheap = [case for case in cases if case.n_trials > 600]
    alarms = [audit(case, seed).is_refuted for case in cheap for seed in range(REPETITIONS)]
    assert sum(alarms) <= stats.binom.ppf(0.999, len(alarms), 0.05)


def test_tacit_refuses_to_charge_shuffled_batches_as_poisson():
    with pytest.raises(UnsupportedEvent, match="Chua"):
        Shuffle(steps=100, n_records=1000).amplify(Gaussian(0.4))
