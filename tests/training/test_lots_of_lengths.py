"""Microbatches of records of several lengths: each holds one length, and is nearly full."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tacit
from tacit.training import PadTo, Speed
from tacit.training.one_by_one import ByShape
from tacit.training.records import Microbatch

RECORDS, MAXIMUM = 40, 24


def test_records_of_one_length_fill_microbatches():
    rows = [torch.arange(10).reshape(5, 2), torch.arange(21).reshape(7, 3)]
    parts = Microbatch(ByShape(rows), None, 12).of_one_shape(3)
    assert [part.batch.shape for part in parts] == [(2, 2), (3, 2), (2, 3), (2, 3), (3, 3)]
    for whole, found in zip(rows, (parts[:2], parts[2:]), strict=True):
        assert torch.equal(torch.cat([part.batch for part in found]), whole)
    assert len(Microbatch(rows[1], None, 7).of_one_shape(3)) == 3
    (same,) = Microbatch(rows[1], None, 7).of_one_shape(7)
    assert same.size == 7


def run_of(**speed):
    torch.manual_seed(0)
    data = [(torch.arange(1, 2 + i % 24), i % 3) for i in range(RECORDS)]
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(25, 4, padding_idx=0), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = tacit.make_private(
        model, optimizer, data,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        batch_size=12, steps=3, clip_norm=0.3, noise_multiplier=0.5, seed=5,
        collate_fn=PadTo(MAXIMUM), speed=Speed(check=False, **speed),
    )  # fmt: skip
    return model, private


def test_small_microbatches_change_nothing():
    found = []
    for rows in (None, 2):
        model, private = run_of(max_microbatch=rows)
        for lot in private:
            private.step(lot)
        found.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    torch.testing.assert_close(*found)
    cut = private._lots.cut(np.arange(RECORDS))
    assert max(part.rows for part in cut) == 2 * len(PadTo(MAXIMUM).lengths)


def test_lengths_are_not_compiled():
    with pytest.raises(ValueError, match=r"compile cannot take.*PadTo\(lengths="):
        run_of(compile=True)
