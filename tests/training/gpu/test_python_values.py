"""Python values that a program reads are found wherever they are."""

from functools import partial
from types import SimpleNamespace

import pytest
from torch import nn

from tacit.training.gpu.python_values import PythonValues

RATE = 0.1


class Penalty:
    def __init__(self):
        self.weight, self.more = 1.0, {"by": [SimpleNamespace(power=2)]}

    def loss(self, model, batch, *, scale=1.0):
        return scale * RATE


def in_a_closure():
    weight = 1.0

    def loss_fn(model, batch):
        return weight

    def change():
        nonlocal weight
        weight = 2.0

    return loss_fn, change, "weight"


def in_a_global():
    def loss_fn(model, batch):
        return RATE

    return loss_fn, lambda: globals().update(RATE=globals()["RATE"] + 1), "RATE"


def on_an_object():
    penalty = Penalty()
    return penalty.loss, lambda: setattr(penalty, "weight", 3.0), "weight"


def deep_inside():
    penalty = Penalty()
    return penalty.loss, lambda: setattr(penalty.more["by"][0], "power", 3), "power"


def in_a_partial():
    loss_fn = partial(Penalty().loss, scale=2.0)
    return loss_fn, lambda: loss_fn.keywords.update(scale=1.0), "scale"


@pytest.mark.parametrize(
    "case", [in_a_closure, in_a_global, on_an_object, deep_inside, in_a_partial]
)
def test_a_change_is_seen_and_named(case):
    loss_fn, change, name = case()
    values = PythonValues(nn.Linear(2, 1), loss_fn)
    before = values()
    assert values() == before
    change()
    assert values() != before
    assert values.name_of_change(before, values()) == name


def test_attributes_of_layers_are_seen_and_modes_are_not():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    values = PythonValues(model, lambda model, batch: None)
    before = values()
    model.eval()
    assert values() == before
    model[1].p = 0.5
    assert values.name_of_change(before, values()) == "p"
