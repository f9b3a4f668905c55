"""Token sequences: their own lengths, public ones, and losses that padding does not change."""

import pytest
import torch

from tacit.text.language_model import SequenceLoss
from tacit.text.text_records import IGNORED
from tacit.text.token_sequences import TokenSequences

PAD = 0


def sequences(*, is_causal, n=40, length=12, end=2, seed=0):
    """Return padded ids and targets of random lengths, as `Packing` makes them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((n, length), PAD)
    targets = torch.full((n, length), IGNORED) if is_causal else torch.randint(0, 2, (n,))
    for row in range(n):
        size = int(torch.randint(2, length + 1, (), generator=generator))
        ids[row, :size] = torch.randint(3, 20, (size,), generator=generator)
        ids[row, size - 1] = end
        if is_causal:
            targets[row, size // 2 : size] = ids[row, size // 2 : size]
    return ids, targets


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_sequence_is_padded_by_its_own_length_and_holds_every_token(is_causal):
    ids, targets = sequences(is_causal=is_causal, length=40)
    data = TokenSequences(ids, targets, PAD)
    assert data.pad_to.lengths == (16, 24, 32, 40)
    seen = set()
    for row in range(len(data)):
        found, goals = data.pad_to([data[row]])
        length = found.shape[1]
        seen.add(length)
        assert length == min(n for n in data.pad_to.lengths if n >= len(data[row][0]))
        assert torch.equal(found[0], ids[row, :length])
        assert (ids[row, length:] == PAD).all()
        assert torch.equal(goals[0], targets[row, :length] if is_causal else targets[row])
    assert seen == set(data.pad_to.lengths)


def test_an_end_token_that_is_the_padding_token_is_kept_where_it_is_learned():
    ids, targets = sequences(is_causal=True, end=PAD)
    data = TokenSequences(ids, targets, PAD)
    for row in range(len(data)):
        own, goal = data[row]
        assert int(own[-1]) == int(goal[-1]) == PAD
        assert (targets[row, len(own) :] == IGNORED).all()


def test_a_text_of_no_tokens_is_padding():
    ids = torch.full((3, 8), PAD)
    data = TokenSequences(ids, torch.full((3, 8), IGNORED), PAD)
    assert len(data[0][0]) == 0
    found, goals = data.pad_to([data[0]])
    assert found.tolist() == [[PAD] * 8]
    assert goals.tolist() == [[IGNORED] * 8]


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_the_loss_of_a_sequence_does_not_depend_on_padding(per):
    class Model(torch.nn.Module):  # what a decoder computes for a token does not look ahead
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20)

        def forward(self, input_ids, attention_mask):
            hidden = self.table(input_ids).cumsum(1)
            return type("Found", (), {"logits": self.head(hidden)})

    ids, targets = sequences(is_causal=True, length=40)
    loss = SequenceLoss(is_causal=True, per=per, pad=PAD, length=ids.shape[1])
    data, model = TokenSequences(ids, targets, PAD), Model()
    alone = [loss(model, data.pad_to([data[row]])) for row in range(5)]
    torch.testing.assert_close(torch.cat(alone), loss(model, (ids[:5], targets[:5])))
