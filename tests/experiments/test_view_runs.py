"""Runs of a recipe with views of each image stop and go on; sums over views are right."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tacit.experiments import Recipe, train
from tacit.experiments.released import load_model
from tacit.experiments.training_loop import TrainingLoop, augmentation
from tacit.training import Flat, clipped_sum, record_loop
from tacit.training.examples import Examples
from tacit.training.gpu.compiled import CompiledSum
from tacit.training.program.programs import Programs

SMALL = """
[model]
kind = "cnn"
[training]
batch_size = 16
epochs = 0.04
views = 2
momentum = 0.0
[run]
seed = 1
baseline_steps = 0
"""


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch):
    recipe = Recipe.parse(SMALL)

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
    with pytest.warns(UserWarning, match="goes on after"):
        facts = train(recipe, tmp_path / "stopped", lost_steps="skip")
    assert facts.resumed == 1
    assert facts.epsilon <= 3.0
    load_model(tmp_path / "stopped")


def test_views_and_devices_that_make_no_sense_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="needs data that are images"):
        augmentation(Recipe.parse('[training]\nviews = 2\n[features]\nkind = "pca"'))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU"):
        train(Recipe.parse('[run]\ndevice = "cuda"'), tmp_path / "run")


def in_bfloat16(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[0])
    return cross_entropy(logits.float(), batch[1], reduction="none")


def in_its_own_type(model, batch):
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def looped(model, loss_fn, batch, bound):
    """Return the clipped sum of plain PyTorch, one example with its views at a time."""
    total = {name: 0.0 for name, _ in model.named_parameters()}
    for views in zip(*(part.split(VIEWS) for part in batch), strict=True):
        found = torch.autograd.grad(loss_fn(model, views).mean(), list(model.parameters()))
        norm = sum(float(g.double().square().sum()) for g in found) ** 0.5
        for name, g in zip(total, found, strict=True):
            total[name] += g.double() * min(1.0, bound / norm)
    return total


def shallow():
    """Return a network of convolutions that runs and compiles in seconds."""
    first, second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
    layers = [first, nn.GroupNorm(4, 16), nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))


def distance(found, exact):
    squares = [(found[n].double() - exact[n]).square().sum() for n in exact]
    return float(sum(squares) / sum(e.square().sum() for e in exact.values())) ** 0.5


VIEWS = 2
HOW = [
    (shallow, "traced"),
    (shallow, "one at a time"),
    pytest.param((shallow, "compiled"), marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch
@pytest.mark.parametrize("made", HOW, ids=lambda made: f"{made[0].__name__}-{made[1]}")
@pytest.mark.parametrize("bound", [0.5, 1e3])
@pytest.mark.parametrize("loss_fn", [in_its_own_type, in_bfloat16])
def test_sums_are_as_near_to_float64_as_plain_gradients_of_the_same_type(loss_fn, bound, made):
    torch.manual_seed(0)
    make, how = made
    model, classes = make(), torch.randint(0, 10, (4,)).repeat_interleave(VIEWS)
    batch = torch.rand(4 * VIEWS, 3, 8, 8), classes
    double = copy.deepcopy(model).double()
    exact = looped(double, in_its_own_type, (batch[0].double(), classes), bound)
    plain = distance(looped(model, loss_fn, batch, bound), exact)
    if how == "compiled":
        programs = Programs(model, loss_fn, VIEWS)
        programs.prepare(batch)
        compiled = CompiledSum(model, loss_fn, Flat(bound), programs, augmentations=VIEWS)
        found = compiled(batch, torch.ones(4)).sums
    elif how == "one at a time":
        examples = Examples(model, loss_fn, batch, torch.ones(4, dtype=torch.bool), VIEWS)
        found = record_loop.run(examples, Flat(bound)).sums
    else:
        found = clipped_sum(model, loss_fn, batch, Flat(bound), augmentations=VIEWS).sums
    if loss_fn is in_bfloat16:
        assert plain > 1e-3  # bfloat16 itself is this far away
        assert distance(found, exact) <= 1.25 * plain
    else:
        assert plain < 1e-5
        assert distance(found, exact) < 1e-4  # clip factors leave room for rounding
