"""Records of different lengths: each is padded by its own to a public length."""

import numpy as np
import pytest
import torch
from looped_reference import set_up
from speed_options import with_speed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import tacit
from tacit.errors import IncompatibleModel
from tacit.training import PadTo, Speed

RECORDS, MAXIMUM = 40, 24


class Tokens(Dataset):
    """Sequences of 1 to 30 tokens."""

    def __init__(self, form=tuple, most=30):
        g = torch.Generator().manual_seed(0)
        sizes = torch.randint(1, most + 1, (RECORDS,), generator=g).tolist()
        self.ids = [torch.randint(1, 50, (n,), generator=g) for n in sizes]
        self.form = form

    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        ids, y = self.ids[i], i % 3
        if self.form is dict:
            return {"input_ids": ids.tolist(), "labels": y}
        return ids, y


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, ids, mask):
        kept = self.table(ids) * mask[..., None]
        return self.out(kept.sum(1) / mask.sum(1, keepdim=True))


def loss_fn(model, batch):
    ids, y, mask = batch
    return F.cross_entropy(model(ids, mask), y, reduction="none")


def private(dataset, *, model=None, loss=loss_fn, way="traced", **options):
    model = Bag() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    settings = {"batch_size": 12, "steps": 4, "clip_norm": 0.3, "noise_multiplier": 0.5, "seed": 5}
    settings["check"] = way == "traced"
    with set_up(way):
        return tacit.make_private(model, optimizer, dataset, loss, **with_speed(settings | options))


def trained(*args, **options):
    run = private(*args, **options)
    for lot in run:
        run.step(lot)
    return run, [p.detach().clone() for p in run._parameters.values()]


def test_a_record_is_padded_by_its_own_length_to_a_public_one():
    pad = PadTo(40, mask=True, value=7)
    assert pad.lengths == (16, 24, 32, 40)
    for own, padded in ((1, 16), (16, 16), (17, 24), (33, 40), (90, 40)):
        ids, mask = pad([torch.arange(own)])
        assert ids.shape == mask.shape == (1, padded)
        kept = min(own, padded)
        assert mask.sum() == kept
        assert ids[0, :kept].tolist() == list(range(kept))
        assert (ids[0, kept:] == 7).all()
    assert PadTo(9).lengths == (9,)
    assert PadTo(lengths=[8, 2, 8]).lengths == (2, 8)


def test_sequences_of_a_mapping_have_values_and_a_mask_of_their_own():
    record = {"input_ids": [3, 4], "labels": np.array([1, 2]), "age": 7, "x": torch.ones(3)}
    pad = PadTo(lengths=[4], mask="mask", fields=["input_ids", "labels"])
    batch = pad([record])
    assert batch["input_ids"].tolist() == [[3, 4, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, -100, -100]]
    assert batch["mask"].tolist() == [[True, True, False, False]]
    assert batch["age"].tolist() == [7]
    assert batch["x"].shape == (1, 3)
    own = PadTo(lengths=[3], value={"a": 1.5})
    assert own([{"a": torch.zeros(2, 1), "labels": [1, 1]}])["a"].tolist() == [[[0], [0], [1.5]]]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: PadTo(), ValueError, "either maximum"),
        (lambda: PadTo(8, lengths=[2]), ValueError, "either maximum"),
        (lambda: PadTo(0), ValueError, "maximum"),
        (lambda: PadTo(8)([([1, 2], [1])]), ValueError, "fields="),
        (lambda: PadTo(8)([(1, 2)]), TypeError, "holds none"),
    ],
)
def test_what_cannot_be_padded_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_equals_the_loop_over_records(workers):
    pad = PadTo(MAXIMUM, mask=True)
    run, found = trained(Tokens(), collate_fn=pad, speed=Speed(num_workers=workers))
    assert run.isolation == "by construction: one traced program per example"
    one_length = PadTo(lengths=[MAXIMUM], mask=True)  # padding has no effect: it is masked
    _, expected = trained(Tokens(), collate_fn=one_length, way="alone")
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_all_lengths_are_traced_before_the_run():
    """Two data sets with other lengths trace the same programs."""
    keys = []
    for most in (2, 30):
        run = private(Tokens(most=most), collate_fn=PadTo(MAXIMUM, mask=True))
        keys.append(set(run._lot_sum._programs._shapes))
    assert keys[0] == keys[1]
    assert len(keys[0]) == 2


def test_a_length_that_cannot_run_is_refused_before_the_run():
    def short_only(model, batch):
        if batch[0].shape[1] > 16:
            raise ValueError("too long")
        return loss_fn(model, batch)

    with pytest.raises(ValueError, match="too long"):
        private(Tokens(most=2), loss=short_only, collate_fn=PadTo(MAXIMUM, mask=True))


def longest(records):
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in records], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(i)) for i, _ in records], batch_first=True)
    return ids, torch.tensor([y for _, y in records]), mask


@pytest.mark.parametrize("collate_fn", [None, longest])
def test_padding_to_the_longest_of_a_lot_is_refused_with_the_reason(collate_fn):
    with pytest.raises(IncompatibleModel, match=r"PadTo\(maximum\).*length of another"):
        private(Tokens(), collate_fn=collate_fn)


def test_a_length_that_is_found_late_is_refused_with_the_reason():
    data = Tokens()
    data.ids[:30] = [torch.ones(4, dtype=torch.long)] * 30
    loss = lambda m, b: F.cross_entropy(m(b[0], b[0] > 0), b[1], reduction="none")  # noqa: E731
    run = private(data, loss=loss, batch_size=40)
    lot = next(iter(run))
    with pytest.raises(IncompatibleModel, match=r"PadTo\(maximum\)"):
        run.step(lot)
    assert run.steps_taken == 0


def test_a_model_that_declares_its_positions_needs_no_collate_fn():
    model = Bag()
    model.config = type("Config", (), {"max_position_embeddings": MAXIMUM})()

    def loss(m, b):
        assert b["input_ids"].shape[1] <= MAXIMUM
        logits = m(b["input_ids"], b["attention_mask"])
        return F.cross_entropy(logits, b["labels"], reduction="none")

    run, found = trained(Tokens(dict), model=model, loss=loss)
    _, expected = trained(Tokens(), collate_fn=PadTo(MAXIMUM, mask=True))
    assert run.isolation.startswith("by construction")
    assert all(map(torch.equal, found, expected))


def test_several_lengths_need_records_of_shapes_of_their_own():
    with pytest.raises(ValueError, match="one length with users"):
        private(Tokens(), collate_fn=PadTo(MAXIMUM, mask=True), users=np.arange(RECORDS) // 2)


def test_users_take_one_length():
    ids = np.arange(RECORDS) // 2
    pad = PadTo(lengths=[MAXIMUM], mask=True)
    _, found = trained(Tokens(), collate_fn=pad, users=ids)
    _, expected = trained(Tokens(), collate_fn=pad, users=ids, way="alone")
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_packed_sequences_of_one_public_length_run_in_the_loop():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.gru, self.out = (
                nn.Embedding(50, 6),
                nn.GRU(6, 5, batch_first=True),
                nn.Linear(5, 3),
            )

        def forward(self, ids, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.table(ids), lengths, batch_first=True, enforce_sorted=False
            )
            return self.out(self.gru(packed)[1][-1])

    def loss(m, b):
        ids, y, lengths = b
        return F.cross_entropy(m(ids, lengths), y, reduction="none")

    pad = PadTo(MAXIMUM)

    def collate(records):
        return *pad(records), torch.tensor([len(ids) for ids, _ in records])

    class OneLength(Tokens):
        def __getitem__(self, i):
            return self.ids[i][:10], i % 3  # padded to the shortest length, 16

    with pytest.warns(RuntimeWarning, match="cannot be traced"):
        run, _ = trained(OneLength(), model=Packed(), loss=loss, collate_fn=collate)
    assert run.isolation == "one record at a time"
