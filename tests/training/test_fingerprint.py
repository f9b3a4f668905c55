"""Digests: a resumed run repeats its noise only if its data and its program are the same."""

import array
import collections
import datetime
import decimal
import fractions
import logging
import operator
import random
import re
import threading

import numpy as np
import pytest
import torch
from slow_cases import one_fast
from test_checkpoint import load, saved, scaled_loss, train, two_classes, weights
from torch.nn import functional as F

from tacit.training.fingerprint import _ProgramHash, program_digest, state_digest
from tacit.training.key import Key
from tacit.training.records import Records


class Weighted:
    """A loss with a factor for the examples of label 1: made-up records have label 0."""

    def __init__(self, factor):
        self.factor = factor

    def factor_of(self, y):
        return torch.where(y == 1, self.factor, 1.0)

    def loss(self, model, batch):
        return scaled_loss(model, batch) * self.factor_of(batch[1])

    __call__ = loss


class Slotted(Weighted):
    __slots__ = ("factor",)


class Stretch:
    """An `augment` that stretches the records."""

    def __init__(self, factor):
        self.factor, self.calls = factor, 0

    def __call__(self, batch):
        return batch[0] * self.factor, batch[1]


class Drawn(torch.utils.data.Dataset):
    """Records with random numbers of numpy, of Python, or of a generator that it keeps."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full((4,), i % 2 + self.draw()), i % 2


def weighted(*factors):
    criterion = torch.nn.CrossEntropyLoss(weight=torch.tensor(factors), reduction="none")
    return lambda model, batch: criterion(model(batch[0]), batch[1])


def from_table(*functions):
    table = dict(zip("abc", functions, strict=True))

    def loss_fn(model, batch):
        losses = scaled_loss(model, batch)
        return torch.where(batch[1] == 1, table["c"](losses), losses)

    return loss_fn


def counted(numbers):
    return lambda model, batch: scaled_loss(model, batch) * (1 + len(numbers) * (batch[1] == 1))


def once(losses):
    return losses


def twice(losses):
    return 2 * losses


def in_a_comprehension(factor):
    def times(losses):
        return factor * losses

    namespace = {"F": F, "times": times, "torch": torch}
    code = """def loss_fn(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return torch.where(batch[1] == 1, [times(part) for part in [losses]][0], losses)"""
    exec(code, namespace)
    return namespace["loss_fn"]


def with_frozen_layer():
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    model[0].requires_grad_(False)
    return model


# Options of a run and of the run that resumes it; made anew, so that no object is shared.
EDITS = {
    "class weights": lambda: ({"loss_fn": weighted(1.0, 2.0)}, {"loss_fn": weighted(1.0, 3.0)}),
    "method": lambda: ({"loss_fn": Weighted(2.0).loss}, {"loss_fn": Weighted(3.0).loss}),
    "callable": lambda: ({"loss_fn": Weighted(2.0)}, {"loss_fn": Weighted(3.0)}),
    "slot": lambda: ({"loss_fn": Slotted(2.0)}, {"loss_fn": Slotted(3.0)}),
    "augment": lambda: (
        {"augment": Stretch(1.0), "augmentations": 2},
        {"augment": Stretch(2.0), "augmentations": 2},
    ),
    "table": lambda: (
        {"loss_fn": from_table(once, twice, once)},
        {"loss_fn": from_table(once, twice, twice)},
    ),
    "nested": lambda: ({"loss_fn": counted(((1,), 2))}, {"loss_fn": counted(((1, 2),))}),
    "comprehension": lambda: (
        {"loss_fn": in_a_comprehension(2.0)},
        {"loss_fn": in_a_comprehension(3.0)},
    ),
    "arithmetic": lambda: ({}, {"arithmetic": "bounded"}),
    "padding": lambda: ({}, {"static_shapes": True}),
    "frozen": lambda: ({}, {"model": with_frozen_layer()}),
}


@pytest.mark.parametrize("edit", one_fast(EDITS, 6))
def test_every_edit_of_the_program_is_noticed_and_nothing_else(problem, edit):
    """An edit that the loss of a made-up record does not show gave the same noise again."""
    before, after = EDITS[edit]()
    unchanged, _ = EDITS[edit]()
    case = problem(**before)
    state = saved(case)
    train(case)
    same, other = problem(**unchanged), problem(**after)
    load(same, state)
    train(same)
    assert torch.equal(weights(same.model), weights(case.model))
    other.private.load_state_dict(state["private"])
    with pytest.raises(ValueError, match=r"not th.* of the checkpoint.*lost_steps="):
        next(iter(other.private))


class Missing(dict):
    """A dict with a value for what it does not hold."""

    scale = 1.0

    def __missing__(self, _):
        return self.scale


def missing(scale):
    found = Missing()
    found.scale = scale
    return found


CONSTANTS = {
    "slice": lambda i: slice(0, i),
    "range": range,
    "array": lambda i: array.array("f", [i]),
    "bytearray": lambda i: bytearray([i]),
    "memoryview": lambda i: memoryview(bytes([i])),
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "itemgetter": operator.itemgetter,
    "deque": lambda i: collections.deque([i]),
    "defaultdict": lambda i: collections.defaultdict(lambda: i),
    "dict with attributes": missing,
    "date": lambda i: datetime.date(2020, 1, i),
    "set": lambda i: {i},
    "pattern": lambda i: re.compile(str(i)),
    "bound": lambda i: [i].count,
    "nested": lambda i: [{"a": (slice(i),)}],
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_every_type_count(name):
    def digest(i):
        content = CONSTANTS[name](i)
        found = _ProgramHash()
        found.add(lambda losses: (losses, content))
        return found.digest()

    assert digest(2) == digest(2) != digest(3)


def test_what_differs_by_process_alone_does_not_count(problem):
    def two_functions():  # the same code at other addresses in memory
        def double(value):
            return 2 * value

        def halve(value):
            return value / 2

        return {halve, double}

    def found(value):
        hashed = _ProgramHash()
        hashed.add(value)
        return hashed.digest()

    one, other = two_functions(), two_functions()
    assert found(one) == found(other) != found({abs, *one})
    log = logging.getLogger("tests.fingerprint")
    before = found(lambda: log.debug("text"))
    log.isEnabledFor(logging.DEBUG)  # fills a cache of the logger
    assert found(lambda: log.debug("text")) == before
    assert found(log) != found(logging.getLogger("tests.other"))
    states = []
    for functions in (one, other):
        case = problem()
        case.optimizer.param_groups[0]["rule"] = min(functions, key=lambda f: f.__name__)
        states.append(state_digest(case.model, case.optimizer))
        program = program_digest(
            case.model, case.optimizer, case.loss_fn, case.private._lots.records
        )
        states.append(program)
    assert states[:2] == states[2:]


def test_a_tensor_kept_from_inside_a_transform_does_not_end_the_run(problem):
    kept = {}

    def loss_fn(model, batch):
        x, y = batch
        if not kept:
            kept["weight"] = torch.ones(2)
        return F.cross_entropy(model(x), y, reduction="none", weight=kept["weight"])

    case = problem(loss_fn=loss_fn, engine="vmap")
    train(case, stop=1)
    saved(case)
    train(case)


def test_an_object_that_cannot_be_pickled_counts_by_its_type():
    def digest(content):
        found = _ProgramHash()
        found.add(content)
        return found.digest()

    assert digest(threading.Lock()) == digest(threading.Lock()) != digest(threading.RLock())
    assert digest(np.random.normal) == digest(np.random.normal)  # whatever was drawn meanwhile


@pytest.mark.parametrize("draw", [np.random.random, random.random], ids=["numpy", "Python"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_resumed_run_repeats_the_random_numbers_of_numpy_and_python(problem, draw, workers):
    """The same noise on records with other random numbers would cancel out of the difference."""
    case = problem(data=Drawn(draw), num_workers=workers)
    train(case, stop=2)
    state = saved(case)
    train(case)
    other = problem(data=Drawn(draw), num_workers=workers)
    load(other, state)
    train(other)
    assert torch.equal(weights(other.model), weights(case.model))


def test_a_run_whose_own_generator_has_moved_on_is_not_repeated(problem):
    def make():
        generator = np.random.default_rng(0)

        def augment(batch):
            return batch[0] + float(generator.normal()), batch[1]

        return problem(augment=augment, augmentations=2)

    case = make()
    train(case, stop=2)
    other = make()
    load(other, saved(case))
    with pytest.raises(ValueError, match="the program is not that of the checkpoint"):
        next(iter(other.private))


class Held(torch.utils.data.Dataset):
    def __init__(self):
        self.x, self.y = two_classes()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


@pytest.mark.parametrize("how", one_fast(["object", "numpy", ".data"], 3))
def test_records_edited_where_torch_does_not_count_it_are_noticed(problem, how):
    """The run itself is loaded again, so nothing but the records has changed."""
    held = Held()
    case = problem(data=held if how == "object" else (held.x, held.y))
    state = saved(case)
    train(case)
    (held.x.numpy() if how == "numpy" else held.x.data)[3] += 1
    load(case, state)
    with pytest.warns(UserWarning, match="the data set is not that of the checkpoint"):
        next(iter(case.private))


def test_a_loop_that_always_moves_the_weights_is_repeated(problem):
    def go(case, stop):
        for lot in case.private:
            case.private.step(lot)
            with torch.no_grad():
                case.model[0].weight.clamp_(-0.1, 0.1)
            if case.private.steps_taken == stop:
                break

    case, other = problem(), problem()
    go(case, 2)
    state = saved(case)
    go(case, 4)
    load(other, state)
    go(other, 4)
    assert torch.equal(weights(other.model), weights(case.model))


@pytest.mark.parametrize("package", [True, False], ids=["Poly1305", "SHA-256"])
def test_every_edit_of_stored_records_changes_their_digest(package, monkeypatch):
    if not package:
        monkeypatch.setattr("tacit.training.key._poly1305", lambda: None)
    monkeypatch.setattr("tacit.training.fingerprint._BYTES", 256)  # several parts
    key, cpu = Key.fresh(), torch.device("cpu")
    x, y = torch.randn(40, 3), torch.arange(40)
    data = Records((x, y), collate_fn=None, device=cpu)
    before = data.digest(key)
    assert data.digest(key) == before != data.digest(Key.fresh())
    found, shown = {before}, x.numpy()  # writing by another library raises no version
    for row in range(40):
        for column in range(3):
            bits = shown[row].view(np.uint32)
            bits[column] ^= 1
            found.add(data.digest(key))
            bits[column] ^= 1
    y[7] += 1
    found.add(data.digest(key))
    y[7] -= 1
    assert len(found) == 122
    assert data.digest(key) == before
    others = [(x[:, :2], y), (x, x), (x,), (x.flip(0), y.flip(0)), (x.double(), y)]
    found |= {Records(other, collate_fn=None, device=cpu).digest(key) for other in others}
    assert len(found) == 127


def test_numbers_that_move_from_one_tensor_to_the_next_change_the_digest():
    key, cpu, flat = Key.fresh(), torch.device("cpu"), torch.arange(24.0)
    wide = [(flat[: 4 * k].view(4, k), flat[4 * k :].view(4, 6 - k)) for k in range(1, 6)]
    found = {Records(pair, collate_fn=None, device=cpu).digest(key) for pair in wide}
    assert len(found) == 5
