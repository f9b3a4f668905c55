"""Audits find faults that are planted in tacit's own code, and are silent about correct code."""

from collections import Counter
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest

# An audit fits few records, with much noise.
pytestmark = pytest.mark.filterwarnings("ignore:the fitted model is constant")
faults = SimpleNamespace(**run_path(str(Path(__file__).parent / "faults.py")))
FAST = ("GNMax", "partition", "Gaussian", "Laplace", "adassp")
QUICK_FAULTS = (
    "gaussian_noise_a_tenth_short",
    "labels_without_noise",
    "records_teach_two_teachers",
    "one_of_three_releases_is_not_billed",
)
LEAST = 29  # of 30 faults that must be found
PER_AUDIT = 18 / 200  # share of audits of correct code that may raise an alarm


def finds(name, monkeypatch):
    with monkeypatch.context() as patch:
        fault = faults.FAULTS[name]
        fault.plant(patch)
        return not fault.audit(0).passes


def test_there_are_enough_faults_of_every_class():
    kinds = Counter(fault.kind for fault in faults.FAULTS.values())
    assert len(faults.FAULTS) >= 90
    named = {"scale", "law", "reuse", "draws", "clip", "divisor", "leak", "key", "bill"}
    assert kinds.keys() == named
    assert min(kinds.values()) >= 3


@pytest.mark.parametrize("name", QUICK_FAULTS)
def test_a_fault_is_found(name, monkeypatch):
    assert finds(name, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nine_tenths_of_all_faults_are_found(monkeypatch):
    found = {name: finds(name, monkeypatch) for name in faults.FAULTS}
    missed = [name for name, is_found in found.items() if not is_found]
    assert len(missed) <= len(found) * (1 - LEAST / 30), missed


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", ["a_tenth_of_the_noise_is_missing", "counts_are_a_tenth_short_of_noise"]
)
def test_a_tenth_less_noise_in_training_is_found_nine_times_in_ten(name, monkeypatch):
    fault = faults.FAULTS[name]
    fault.plant(monkeypatch)
    assert sum(not fault.audit(seed).passes for seed in range(10)) >= 9


@pytest.mark.parametrize("name", FAST)
def test_correct_code_passes(name):
    assert faults.CORRECT[name](1).passes


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_false_alarms_are_rare():
    names = list(faults.CORRECT)
    audits = [(names[i % len(names)], i) for i in range(200)]
    alarms = [(name, seed) for name, seed in audits if not faults.CORRECT[name](seed).passes]
    assert len(alarms) <= PER_AUDIT * len(audits), alarms
