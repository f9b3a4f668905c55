"""The running mean of the weights."""

import pytest
import torch
from torch import nn

from tacit.training import EMA


def test_mean_follows_the_formula_with_warm_up():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    ema = EMA(model, decay=0.5)
    expected = 0.0
    for t, value in enumerate([1.0, 2.0, 3.0, 4.0]):
        with torch.no_grad():
            model.weight.fill_(value)
        ema.update()
        decay = min(0.5, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * value
    with ema.applied():
        assert model.weight.item() == pytest.approx(expected)
    assert model.weight.item() == 4.0


def test_model_has_its_own_weights_again_after_an_error():
    model = nn.Linear(1, 1)
    before = model.weight.item()
    ema = EMA(model)
    with pytest.raises(KeyError), ema.applied():
        raise KeyError
    assert model.weight.item() == before


def test_state_goes_on_where_it_was():
    model = nn.Linear(2, 2)
    ema, other = EMA(model, decay=0.9), EMA(model, decay=0.5)
    ema.update()
    other.load_state_dict(ema.state_dict())
    assert (other.decay, other.updates) == (0.9, 1)
    with pytest.raises(ValueError, match="same parameters"):
        EMA(nn.Conv1d(1, 1, 1)).load_state_dict(EMA(nn.Bilinear(1, 1, 1, bias=False)).state_dict())


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert set(EMA(model).state_dict()["means"]) == {"weight"}
