"""The audit of DP-SGD covers loops and settings, and says what it did not test."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tacit
from tacit import training
from tacit.auditing import TrainingSetup, audit_training
from tacit.sampling import RandomAllocation

SETTINGS = {"batch_size": 20, "steps": 10, "clip_norm": 1.0, "noise_multiplier": 1.0}
SETTINGS["speed"] = training.Speed(check=False)


def squared_error(model, batch):
    x, y = batch
    return (model(x).squeeze(1) - y) ** 2


def audit(how="step", model=None, **options):
    torch.manual_seed(0)
    x = torch.randn(100, 3)
    setup = TrainingSetup(
        make_private=tacit.make_private,
        model=model or nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)),
        dataset=(x, x.sum(1)),
        loss_fn=squared_error,
        settings=SETTINGS | options,
        how=how,
    )
    return audit_training(setup, rng=0, steps=32)


def impossible(found):
    """Checks that a correct mechanism passes with certainty, and did not pass."""
    return [finding for finding in found.findings if finding.p_value == 0]


def test_an_unknown_loop_is_refused():
    with pytest.raises(ValueError, match="how must be"):
        audit("lightning")


def test_a_run_without_noise_must_be_billed_as_not_private():
    assert audit(noise_multiplier=0.0).passes


@pytest.mark.slow
def test_dropout_does_not_look_like_a_fault():
    dropout = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1))
    assert not impossible(audit(model=dropout))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # raised inside the compiler
@pytest.mark.parametrize(
    "options",
    [
        {"how": "backward"},
        {"how": "resumed"},
        {"clip_norm": training.Automatic(1.0)},
        {"clip_norm": training.AdaptiveClip(1.0)},
        {"noise": training.Noise(schedule=training.Ramp(1.0, 2.0))},
        {"noise": training.Noise(arithmetic="bounded")},
        {"speed": training.Speed(compile=True, check=False)},
        {"augment": training.Views(2, lambda batch: (batch[0] + 0.1, batch[1]))},
    ],
    ids=str,
)
def test_correct_settings_have_no_impossible_outcome(options):
    assert not impossible(audit(**options))


@pytest.mark.slow
def test_other_samplers_are_reported_as_tested_in_part():
    found = audit(batch_size=RandomAllocation(5))
    assert not impossible(found)
    assert any("draws" in what for what in found.not_tested)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "how", "verdict"),
    [
        ("correct", "step", "passes"),
        ("correct", "resumed", "passes"),
        ("correct", "backward", "passes"),
        ("half_of_the_noise", "step", "flagged"),
        ("every_run_has_the_same_key", "step", "flagged"),
        ("gradients_are_not_clipped", "backward", "flagged"),
    ],
)
def test_two_ranks_are_audited_like_one(name, how, verdict):
    script = Path(__file__).with_name("audit_ranks.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(script), name, how],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.findall(r"rank \d: [a-z]+?(?=rank|\s|$)", done.stdout)  # lines may join
    assert sorted(found) == [f"rank 0: {verdict}", f"rank 1: {verdict}"]
