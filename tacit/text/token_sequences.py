"""Padded token sequences as a data set of sequences without their padding.

`make_private` pads each sequence again, by its own length, to one of a few public lengths
(`PadTo`). What is computed for a sequence is the same, since padding does not matter to the model
(`SequenceLoss.probe`); most of the padding is not computed.
"""

from torch import Tensor, arange
from torch.utils.data import Dataset

from tacit.text.text_records import IGNORED
from tacit.training import PadTo


class TokenSequences(Dataset):
    """Token ids and targets of each sequence, without padding on the right. Private.

    Targets are those of tokens, of shape (sequences, tokens), or classes, of shape (sequences,).

    Attributes
    ----------
    pad_to
        The `collate_fn` that pads them.

    >>> import torch
    >>> data = TokenSequences(torch.tensor([[5, 6, 0, 0], [5, 6, 7, 0]]), torch.tensor([1, 0]), 0)
    >>> data[0]
    (tensor([5, 6]), tensor(1))
    >>> data.pad_to([data[0]])
    [tensor([[5, 6, 0, 0]]), tensor([1])]
    """

    def __init__(self, ids: Tensor, targets: Tensor, pad: int) -> None:
        self.ids, self.targets = ids, targets
        is_used = ids != pad
        if targets.dim() == 2:
            is_used = is_used | (targets != IGNORED)  # an end token may be the padding token too
        self._lengths = (is_used * arange(1, ids.shape[1] + 1)).amax(1).tolist()
        self.pad_to = PadTo(ids.shape[1], value={0: pad, 1: IGNORED})

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        length, target = self._lengths[index], self.targets[index]
        return self.ids[index, :length], target[:length] if target.dim() else target
