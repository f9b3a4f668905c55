"""Wide residual networks in a recipe: small ones train with views, stop and go on."""

import pytest
import torch

from tacit.experiments import Recipe, train
from tacit.experiments.released import load_model
from tacit.experiments.training_loop import TrainingLoop, augmentation
from tacit.experiments.wide_resnet import WideResNet

SMALL = """
[model]
kind = "wide-resnet"
depth = 10
width = 1
[training]
batch_size = 16
epochs = 0.04
views = 2
momentum = 0.0
[run]
seed = 1
baseline_steps = 0
checkpoint_seconds = 0.0
"""


def test_the_network_of_the_paper_has_its_layers():
    model = WideResNet(3, 10, depth=16, width=4)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert sum(m.kernel_size == (3, 3) for m in convolutions) == 13  # the head is the 14th of 16
    assert sum(m.kernel_size == (1, 1) for m in convolutions) == 3
    assert {m.out_channels for m in convolutions} == {16, 64, 128, 256}
    with pytest.raises(ValueError, match=r"6 n \+ 4"):
        WideResNet(3, 10, depth=15, width=4)


@pytest.mark.slow
def test_a_run_that_was_stopped_gives_the_model_of_one_that_was_not(tmp_path, monkeypatch):
    recipe = Recipe.parse(SMALL)
    facts = train(recipe, tmp_path / "whole")
    assert facts.epsilon <= 3.0
    assert "WRN-10-1" in facts.model

    steps = TrainingLoop.steps

    def stopped(self):
        for step in steps(self):
            yield step
            if step == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(TrainingLoop, "steps", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "stopped")
    monkeypatch.undo()
    assert train(recipe, tmp_path / "stopped").resumed == 1
    weights = [load_model(tmp_path / name).model.state_dict() for name in ("whole", "stopped")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_views_and_devices_that_make_no_sense_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="needs data that are images"):
        augmentation(Recipe.parse('[training]\nviews = 2\n[features]\nkind = "pca"'))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU"):
        train(Recipe.parse('[run]\ndevice = "cuda"'), tmp_path / "run")
