"""Models by recipe: their shapes, their start, and what is refused."""

import pytest
import torch

from tacit.experiments import models
from tacit.experiments.recipe import ModelSettings


@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8)])
@pytest.mark.parametrize("kind", ["linear", "mlp", "cnn"])
def test_every_kind_maps_records_to_classes(kind, shape):
    settings = ModelSettings(kind=kind, hidden=(5,), channels=(2, 3), activation="tanh")
    model = models.build(settings, shape, 4, seed=0)
    assert model(torch.zeros(7, *shape)).shape == (7, 4)
    inputs = " x ".join(map(str, shape))
    assert f"{inputs} inputs" in models.describe(settings, model, shape)


def test_the_weights_depend_on_the_seed_only():
    settings = ModelSettings(kind="mlp", hidden=(5,))
    first, same, other = (models.build(settings, (3,), 2, seed=seed) for seed in (1, 1, 2))
    weights = [next(model.parameters()) for model in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        ({"kind": "cnn"}, (9,), "needs images"),
        ({"kind": "cnn", "channels": (2, 2, 2)}, (4, 4), "too many layers"),
        ({"kind": "module", "module": "torch.nn"}, (4,), "package.module:Name"),
        ({"kind": "module", "module": "builtins:dict"}, (4,), "must be an nn.Module"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(settings, shape, message):
    with pytest.raises(ValueError, match=message):
        models.build(ModelSettings(**settings), shape, 2, seed=0)
