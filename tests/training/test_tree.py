"""Nested batches: structure, rows, halves."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch

from tacit.training.lots.records import Microbatch
from tacit.training.tree import map_tensors, n_rows, pad_rows, with_rows


def test_batches_keep_their_structure():
    Pair = namedtuple("Pair", "a b")
    batch = {"p": Pair(torch.ones(2), [torch.zeros(2), "text"]), "n": 3}
    moved = map_tensors(lambda t: t + 1, batch)
    assert isinstance(moved["p"], Pair)
    assert moved["p"].b[0].tolist() == [1.0, 1.0]
    assert moved["p"].b[1] == "text"
    assert moved["n"] == 3


def test_numbers_without_rows_are_neither_padded_nor_split():
    batch = {"x": torch.ones(3, 2), "temperature": torch.tensor(2.0)}
    padded = pad_rows(batch, 5)
    assert padded["x"].sum(1).tolist() == [2.0, 2.0, 2.0, 0.0, 0.0]
    assert padded["temperature"] == 2.0
    first, second = Microbatch(padded, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])).halves()
    assert (n_rows(first.batch), n_rows(second.batch)) == (2, 3)
    assert second.weights.tolist() == [1.0, 0.0, 0.0]


def test_a_batch_without_tensors_is_refused():
    with pytest.raises(TypeError, match="collate_fn"):
        n_rows(["text", 3])


@pytest.mark.parametrize(
    "batch",
    [
        OrderedDict(x=torch.ones(2)),
        defaultdict(list, x=torch.ones(2)),
        UserDict(x=torch.ones(2)),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_mappings_of_every_kind_keep_their_type(batch):
    tensors, rebuild = with_rows({"inner": batch})
    assert [t.tolist() for t in tensors] == [[1.0, 1.0]]
    rebuilt = rebuild([torch.zeros(2)])["inner"]
    assert type(rebuilt) is type(batch)
    assert rebuilt["x"].tolist() == [0.0, 0.0]
    assert batch["x"].tolist() == [1.0, 1.0]
