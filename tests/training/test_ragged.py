"""Bags and sequences of different lengths: by layer rules, equal to one example at a time."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import tacit
from tacit.training import Flat, Speed, clipped_sum
from tacit.training.gradients.site import Unsupported

LENGTH, EXAMPLES = 7, 11


class Bags(nn.Module):
    """Bags given with offsets, or as rows of one length."""

    def __init__(self, mode, *, is_ragged, is_weighted, padding_idx):
        super().__init__()
        self.is_ragged, self.is_weighted = is_ragged, is_weighted
        options = {"padding_idx": padding_idx, "include_last_offset": padding_idx is not None}
        self.bag = nn.EmbeddingBag(20, 6, mode=mode, **(options if is_ragged else {}))
        self.out = nn.Linear(6, 3)

    def forward(self, ids, lengths):
        if not self.is_ragged:
            return self.out(self.bag(ids))
        entries = ids[torch.arange(LENGTH) < lengths[:, None]]
        starts = F.pad(lengths.cumsum(0), (1, 0))
        starts = starts if self.bag.include_last_offset else starts[:-1]
        weights = entries / 7 if self.is_weighted else None
        return self.out(self.bag(entries, starts, per_sample_weights=weights))


class Packed(nn.Module):
    """A recurrent layer on packed sequences; last states, outputs or another layer read it."""

    def __init__(self, kind, *, read, batch_first=True, **options):
        super().__init__()
        self.read, self.batch_first = read, batch_first
        self.embed = nn.Embedding(20, 6)
        self.first = kind(6, 5, batch_first=batch_first, **options)
        width = (options.get("proj_size") or 5) * (2 if self.first.bidirectional else 1)
        self.second = nn.GRU(width, 4, batch_first=batch_first) if read == "again" else None
        self.out = nn.Linear(4 if self.second else width, 3)

    def packed(self, ids, lengths):
        x = self.embed(ids if self.batch_first else ids.t())
        return pack_padded_sequence(x, lengths, self.batch_first, enforce_sorted=False)

    def forward(self, ids, lengths):
        output, states = self.first(self.packed(ids, lengths))
        if self.second is not None:
            output = PackedSequence(F.dropout(output.data, 0.0), *output[1:])
            return self.out(self.second(output)[1][-1])
        if self.read == "outputs":
            padded, _ = pad_packed_sequence(output, batch_first=True, total_length=LENGTH)
            return self.out(padded.sum(1))
        last = states[0] if isinstance(states, tuple) else states
        return self.out(
            last[-2:].transpose(0, 1).flatten(1) if self.first.bidirectional else last[-1]
        )


def losses(model, batch):
    ids, lengths, labels = batch
    return F.cross_entropy(model(ids, lengths), labels, reduction="none")


def a_batch(least):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *a: torch.randint(*a, generator=generator)  # noqa: E731  # a short name
    lengths = draw(least, LENGTH + 1, (EXAMPLES,))
    return draw(0, 20, (EXAMPLES, LENGTH)), lengths, draw(0, 3, (EXAMPLES,))


def check(model, batch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, expected = (
            clipped_sum(model, losses, batch, Flat(0.2)).sums for engine in ("auto", "loop")
        )
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total.to(found[name]), rtol=1e-4, atol=1e-6)
    clipped_sum(model, losses, batch, Flat(0.2))  # the layer rules took it


@pytest.mark.parametrize("padding_idx", [None, 3, -2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_ragged_bags(mode, padding_idx):
    torch.manual_seed(0)
    is_weighted = mode == "weighted"
    mode = "sum" if is_weighted else mode
    for is_ragged in (True, False):
        options = {"is_weighted": is_weighted and is_ragged, "padding_idx": padding_idx}
        check(Bags(mode, is_ragged=is_ragged, **options), a_batch(least=0))


RECURRENT = [
    (nn.LSTM, {"proj_size": 3, "bidirectional": True}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    (nn.GRU, {"bidirectional": True, "batch_first": False}),
    (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
]


@pytest.mark.parametrize(("kind", "options"), RECURRENT)
def test_packed_sequences(kind, options):
    torch.manual_seed(0)
    for read in ("states", "outputs", "again"):
        check(Packed(kind, read=read, **options), a_batch(least=1))


def test_sequences_that_the_program_sorts_itself_are_not_taken_by_the_rule():
    class Sorted(Packed):
        def forward(self, ids, lengths):
            lengths, order = lengths.sort(descending=True)
            packed = pack_padded_sequence(self.embed(ids[order]), lengths, batch_first=True)
            return self.out(self.first(packed)[1][0][-1])[order.argsort()]

    with pytest.raises(Unsupported, match="order"):
        clipped_sum(Sorted(nn.LSTM, read="states"), losses, a_batch(1), Flat(1.0))


def test_a_batch_with_other_lengths_uses_the_same_trace():
    torch.manual_seed(0)
    model = Packed(nn.LSTM, read="outputs")
    for seed, rows in itertools.product((1, 2), (2, 5, EXAMPLES)):
        ids, lengths, labels = (t[:rows] for t in a_batch(least=1))
        generator = torch.Generator().manual_seed(seed)
        check(model, (ids, lengths[torch.randperm(rows, generator=generator)], labels))


@pytest.mark.slow
def test_runs_on_records_of_different_lengths():
    """Collated to padded rows and their lengths; the tests of isolation pass, and no loop runs."""
    ids, lengths, labels = (t.repeat_interleave(4, 0) for t in a_batch(least=1))
    records = [(row[:n], int(y)) for row, n, y in zip(ids, lengths, labels, strict=True)]

    def collate(rows):
        sequences, labels = zip(*rows, strict=True)
        padded = nn.utils.rnn.pad_sequence(
            [F.pad(s, (0, LENGTH - len(s))) for s in sequences], True
        )
        return padded, torch.tensor([len(s) for s in sequences]), torch.tensor(labels)

    bags = Bags("mean", is_ragged=True, is_weighted=False, padding_idx=None)
    for model in (bags, Packed(nn.LSTM, read="states")):
        found = []
        for engine in ("auto", "loop"):
            own = copy.deepcopy(model)
            options = {"clip_norm": 0.2, "noise_multiplier": 0.0, "seed": 1}
            private = tacit.make_private(
                own, torch.optim.SGD(own.parameters(), lr=0.5), records, losses,
                batch_size=9, steps=2, collate_fn=collate, check=engine == "auto",
                speed=Speed(engine=engine), **options,
            )  # fmt: skip
            for lot in private:
                private.step(lot)
            found.append(list(own.parameters()))
        for auto, looped in zip(*found, strict=True):
            torch.testing.assert_close(auto, looped, rtol=1e-4, atol=1e-6)
