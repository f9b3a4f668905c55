"""Lots and how they are handed out."""

import os

import pytest
import torch
from torch.utils.data import Dataset

from tacit import sampling
from tacit.training.lots.lots import Lots
from tacit.training.lots.padding import Padding
from tacit.training.lots.records import Records
from tacit.training.noise.key import Key
from tacit.training.tree import n_rows

CPU = torch.device("cpu")


def lots_of(data, *, rate=0.3, limit=4, padding=None, num_workers=0, rank=0, ranks=1, seed=1):
    records = Records(data, collate_fn=None, device=CPU)
    return Lots(
        records,
        lambda key, n: lambda step: sampling.Poisson(rate).indices(n, key.numpy("lot", step)),
        key=Key.from_seed(seed),
        limit=limit,
        padding=padding,
        num_workers=num_workers,
        rank=rank,
        ranks=ranks,
    )


def fetched(lot):
    return [pending.fetch() for pending in lot.pending()]


def members(lot):
    """Record numbers of a lot over `torch.arange(n)`, padding left out."""
    found = []
    for microbatch in fetched(lot):
        (x,) = microbatch.batch
        found += x.tolist() if microbatch.weights is None else x[microbatch.weights > 0].tolist()
    return found


class Squares(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        return {"x": torch.tensor(float(i)), "y": i**2}


class Crashing(Squares):
    def __getitem__(self, i):
        os._exit(3)


def test_a_lot_is_cut_into_batches_that_fit_and_cover_it_once():
    for limit in (1, 3, 7, 100):
        lots = lots_of(torch.arange(50), limit=limit)
        lot = lots.lot(2)
        assert members(lot) == lots._draw(2).tolist()
        assert all(n_rows(microbatch.batch) <= limit for microbatch in fetched(lot))


def test_padded_batches_have_one_shape_and_padding_weighs_nothing():
    padding = Padding(multiple=8, limit=8)
    lots = lots_of(torch.arange(50) + 1, limit=8, padding=padding)
    for step in range(10):
        for microbatch in fetched(lots.lot(step)):
            (x,) = microbatch.batch
            assert x.shape == (8,)
            assert microbatch.weights.tolist() == (x > 0).float().tolist()


def test_the_lot_of_a_step_does_not_depend_on_the_steps_before():
    lots = lots_of(torch.arange(50))
    expected = [members(lots.lot(step)) for step in range(6)]
    assert [members(lot) for lot in lots.from_step(0, 6)] == expected
    assert [members(lot) for lot in lots.from_step(4, 6)] == expected[4:]
    assert len({tuple(lot) for lot in expected}) == 6


def test_an_empty_lot_has_no_microbatches_and_unpacks_as_one_row_of_zeros():
    lots = lots_of((torch.arange(50.0) + 1, torch.arange(50) + 1), rate=1e-9)
    lot = lots.lot(0)
    assert fetched(lot) == []
    x, y = lot
    assert x.tolist() == [0.0]
    assert y.tolist() == [0]


def test_ranks_share_every_lot_without_overlap():
    shares = [lots_of(torch.arange(50), rank=rank, ranks=3) for rank in range(3)]
    whole = lots_of(torch.arange(50))
    for step in range(5):
        parts = [members(lots.lot(step)) for lots in shares]
        assert sorted(i for part in parts for i in part) == members(whole.lot(step))


def test_workers_fetch_the_same_batches():
    alone, helped = lots_of(Squares(), limit=6), lots_of(Squares(), limit=6, num_workers=2)
    for a, b in zip(alone.from_step(3, 7), helped.from_step(3, 7), strict=True):
        for microbatch, other in zip(fetched(a), fetched(b), strict=True):
            assert torch.equal(microbatch.batch["x"], other.batch["x"])


def test_lots_that_are_dropped_or_used_twice_do_not_shift_what_workers_fetched():
    expected = [members(lot) for lot in lots_of(torch.arange(50), limit=4).from_step(0, 6)]
    helped = lots_of(torch.arange(50), limit=4, num_workers=1).from_step(0, 6)
    found = []
    for number, lot in enumerate(helped):
        if number == 1:
            continue  # dropped
        if number == 2:
            next(lot.pending()).fetch()  # interrupted
        if number == 3:
            members(lot)
        found.append(members(lot))
    assert found == [expected[0], *expected[2:]]


def test_a_worker_crash_is_explained():
    lots = lots_of(Crashing(), num_workers=1)
    with pytest.raises(RuntimeError, match=r"data worker ended.*Nothing of this step was released"):
        _ = [fetched(lot) for lot in lots.from_step(0, 3)]


def test_a_lot_can_be_unpacked_indexed_and_passed_as_keywords():
    pairs, named = (
        lots_of((torch.arange(9), torch.arange(9)), rate=1.0),
        lots_of(Squares(), rate=1.0),
    )
    x, y = pairs.lot(0)
    assert torch.equal(x, y)
    lot = named.lot(0)
    assert lot["x"].shape == (50,)
    assert dict(**lot)["y"].shape == (50,)


def test_microbatches_show_neither_size_nor_members():
    lot = lots_of(torch.arange(50.0), padding=Padding(multiple=4, limit=4)).lot(0)
    pending = next(lot.pending())
    assert repr(pending) == "PendingMicrobatch(private)"
    assert repr(pending.fetch()) == "Microbatch(private)"


def test_a_lot_shows_neither_size_nor_members():
    lot = lots_of(torch.arange(50)).lot(7)
    assert repr(lot) == "Lot(step=7)"
    assert not hasattr(lot, "__len__")
