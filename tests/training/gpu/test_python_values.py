"""Python values that a program reads are found wherever they are."""

from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tacit.errors import IncompatibleModel
from tacit.training.gpu.python_values import PythonValues, ReadValues

RATE = 0.1
settings = ModuleType("settings")


def helper():
    return RATE


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


def in_a_list():
    penalty = Penalty()
    penalty.schedule = [0.1, {"by": (0.2, [0.3])}]
    return penalty.loss, lambda: penalty.schedule[1]["by"][1].__setitem__(0, 0.4), "0"


def in_an_array():
    penalty = Penalty()
    penalty.scales = np.ones(3)
    return penalty.loss, lambda: penalty.scales.__setitem__(1, 2.0), "scales"


class Slotted:
    __slots__ = ("rate",)


def in_a_slot():
    penalty = Penalty()
    penalty.more = Slotted()
    penalty.more.rate = 0.1
    return penalty.loss, lambda: setattr(penalty.more, "rate", 0.2), "rate"


class Settings:
    power = 2.0


def on_a_class():
    def loss_fn(model, batch):
        return Settings.power

    return loss_fn, lambda: setattr(Settings, "power", Settings.power + 1), "power"


def in_a_module():
    settings.power = 2.0

    def loss_fn(model, batch):
        return settings.power

    return loss_fn, lambda: setattr(settings, "power", 3.0), "power"


def in_a_helper():
    def loss_fn(model, batch):
        return helper()

    return loss_fn, lambda: globals().update(RATE=globals()["RATE"] + 1), "RATE"


def in_a_place_that_was_not_there():
    penalty = Penalty()
    return penalty.loss, lambda: setattr(penalty, "late", 3.0), "late"


def in_an_object_that_is_replaced():
    penalty = Penalty()
    new = {"by": [SimpleNamespace(power=3)]}
    return penalty.loss, lambda: setattr(penalty, "more", new), "power"


CASES = [in_a_closure, in_a_global, on_an_object, deep_inside, in_a_partial, in_a_list, in_an_array]
CASES += [in_a_slot, on_a_class, in_a_module, in_a_helper, in_a_place_that_was_not_there]
CASES += [in_an_object_that_is_replaced]


@pytest.mark.parametrize("case", CASES)
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


def test_a_tensor_that_takes_the_place_of_one_that_the_graph_reads_is_seen():
    model = nn.Linear(2, 1)
    model.scale, model.last = torch.ones(3), torch.zeros(3)
    values = PythonValues(model, lambda model, batch: None)
    values.watch([model.scale])
    before = values()
    model.last = torch.ones(3)  # such as an output that the model keeps
    model.scale.fill_(2.0)  # read anew at each step
    assert values() == before
    model.scale = torch.full((3,), 4.0)
    assert values.name_of_change(before, values()) == "scale"


def test_numbers_read_out_of_tensors_are_noted_or_refused():
    constant, parameter = torch.tensor(2.0), nn.Parameter(torch.tensor(1.0))
    with ReadValues() as reads:
        assert float(constant) == 2.0
        assert constant > 1.0
        assert constant.tolist() == 2.0
    assert ReadValues.are_equal(reads.found)
    constant.fill_(3.0)
    assert not ReadValues.are_equal(reads.found)
    for read in (float, torch.Tensor.item, lambda p: p.exp().tolist()):
        with pytest.raises(IncompatibleModel, match="Python number"), ReadValues():
            read(parameter)
