"""Padded token sequences as a data set of sequences without their padding.

A lot of texts is cut into microbatches of like lengths (`Speed.lengths`), and each is padded to its
own longest sequence. What is computed for a sequence is the same, since padding does not matter to
the model (`SequenceLoss.probe`); the padding is not computed.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from tacit.text.text_records import IGNORED

_LEAST = 2  # tokens: a causal model predicts the second one


class TokenSequences(Dataset):
    """Token ids and targets of each sequence, without padding on the right. Private.

    Targets are those of tokens, of shape (sequences, tokens), or classes, of shape (sequences,).

    >>> data = TokenSequences(torch.tensor([[5, 6, 0, 0], [5, 6, 7, 0]]), torch.tensor([1, 0]), 0)
    >>> data.collate([data[0], data[1]])[0].tolist()
    [[5, 6, 0], [5, 6, 7]]
    """

    def __init__(self, ids: Tensor, targets: Tensor, pad: int) -> None:
        self.ids, self.targets, self.pad = ids, targets, pad
        is_used = ids != pad
        if targets.dim() == 2:
            is_used = is_used | (targets != IGNORED)  # an end token may be the padding token too
        places = torch.arange(1, ids.shape[1] + 1)
        self.lengths: np.ndarray = (is_used * places).amax(1).clamp(min=_LEAST).numpy()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        length = int(self.lengths[index])
        target = self.targets[index]
        return self.ids[index, :length], target[:length] if target.dim() else target

    def collate(self, records: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return sequences as one batch, padded to the longest of them."""
        ids, targets = zip(*records, strict=True)
        padded = pad_sequence(list(ids), batch_first=True, padding_value=self.pad)
        if not targets[0].dim():
            return padded, torch.stack(targets)
        return padded, pad_sequence(list(targets), batch_first=True, padding_value=IGNORED)
