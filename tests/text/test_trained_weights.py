"""Weights that do not train, or are not used, are found after the first steps."""

import pytest
import torch
from torch import nn

from tacit.text import TrainedWeights, UntrainedWeights


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Adapted()


X = torch.ones(2, 3)


def moved(model, *names):
    for name, p in model.named_parameters():
        if name in names:
            p.data.add_(0.1)


def test_weights_that_train_pass(model):
    weights = TrainedWeights(model)
    moved(model, "down.weight", "up.weight")
    weights.require_moved()
    weights.require_counted(lambda: model(X).sum(1))
    weights.require_used(lambda: model(X), of="generation")


def test_an_adapter_that_is_not_trained_is_named(model):
    weights = TrainedWeights(model)
    moved(model, "up.weight")
    with pytest.raises(UntrainedWeights, match=r"1 of 2 .* did not move .*: down\.weight\."):
        weights.require_moved()


def test_a_weight_outside_the_loss_is_named(model):
    weights = TrainedWeights(model)
    with pytest.raises(UntrainedWeights, match=r"does not depend on 1 of 2 .*: up\.weight"):
        weights.require_counted(lambda: model.base(X) + model.down(X).sum())


def test_generation_without_the_adapter_is_refused_and_the_weights_are_kept(model):
    weights = TrainedWeights(model)
    moved(model, "down.weight", "up.weight")
    before = model(X)
    with pytest.raises(UntrainedWeights, match="generation does not use the trained weights"):
        weights.require_used(lambda: model.base(X), of="generation")
    assert torch.equal(model(X), before)


def test_random_outputs_prove_nothing(model):
    weights = TrainedWeights(model)
    moved(model, "up.weight")
    with pytest.raises(UntrainedWeights, match="is random"):
        weights.require_used(lambda: torch.rand(3), of="evaluation")


def test_a_frozen_model_is_refused(model):
    with pytest.raises(UntrainedWeights, match="no trainable weight"):
        TrainedWeights(model.requires_grad_(False))
