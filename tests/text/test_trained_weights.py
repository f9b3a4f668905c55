"""Weights that do not train, or are not used, are found after the first steps."""

import copy

import pytest
import torch
from torch import nn

from tacit.text import TrainedWeights, UntrainedWeights
from tacit.text.trained_weights import require_saved


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


class Head(nn.Module):
    """An adapted layer with a head that is trained in full, and names as peft gives them."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.score, self.has_adapter = nn.Linear(3, 2), True

    def forward(self, x):
        hidden = self.base(x)
        if self.has_adapter:
            hidden = hidden + self.lora_B(self.lora_A(x))
        return self.score(hidden)


@pytest.fixture
def head():
    torch.manual_seed(0)
    return Head()


EVERY = ("lora_A.weight", "lora_B.weight", "score.weight", "score.bias")


def test_a_trained_head_without_its_adapter_is_not_enough(head):
    weights = TrainedWeights(head)
    moved(head, *EVERY)
    weights.require_used(lambda: head(X), of="generation")
    head.has_adapter = False
    with pytest.raises(UntrainedWeights, match=r"not use 2 of 4 trained weights: lora_A\.weight"):
        weights.require_used(lambda: head(X), of="generation")


def test_a_stale_copy_of_the_model_is_refused(head):
    weights = TrainedWeights(head)
    moved(head, *EVERY)
    stale = copy.deepcopy(head)
    weights.require_used(lambda: head(X), of="evaluation")
    with pytest.raises(UntrainedWeights, match="evaluation does not use the trained weights"):
        weights.require_used(lambda: stale(X), of="evaluation")
    half = copy.deepcopy(head).half()
    with pytest.raises(UntrainedWeights, match="evaluation does not use the trained weights"):
        weights.require_used(lambda: half(X.half()).float(), of="evaluation")


def test_weights_that_stop_moving_are_found_at_the_next_check(head):
    weights = TrainedWeights(head)
    moved(head, *EVERY)
    weights.require_moved()
    weights.renew()
    moved(head, "score.weight", "score.bias", "lora_B.weight")
    with pytest.raises(UntrainedWeights, match=r"did not move .* lora_A\.weight"):
        weights.require_moved()


def test_a_frozen_adapter_beside_a_trained_head_is_refused(head):
    head.lora_A.requires_grad_(False)
    with pytest.raises(UntrainedWeights, match=r"1 weights of adapters are frozen: lora_A"):
        TrainedWeights(head)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_has_diverged_is_refused(head, value):
    weights = TrainedWeights(head)
    moved(head, *EVERY)
    with pytest.raises(UntrainedWeights, match="training has diverged"):
        weights.require_used(lambda: torch.full((2,), value), of="generation")


def test_files_with_other_weights_are_refused():
    require_saved(torch.ones(3), torch.ones(3))
    for other in (torch.ones(3) + 1e-3, torch.ones(2), torch.full((3,), float("nan"))):
        with pytest.raises(UntrainedWeights, match="saved files"):
            require_saved(torch.ones(3), other)
