"""Records of different lengths: each is padded, by its own length alone, to a public length.

Padding to the longest record of a lot is mixing: what one record adds to the sum then depends on
the length of another one. A public grid of lengths avoids that, and wastes at most a third of the
positions. The records of one padded length form one microbatch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate

from tacit._check import whole
from tacit.training.tree import Batch

_SHORTEST = 16  # shorter lengths save little and take a trace each

_POSITIONS = "max_position_embeddings", "n_positions"


class PadTo:
    """A `collate_fn` that pads each record by its own length to one of a few public lengths.

    A record is a sequence (a tensor, an array, a list of numbers), or a tuple or mapping of
    sequences of one length and of numbers. Guarantee: what a record becomes depends on no other
    record. All lengths are tried when training is set up, so nothing that is printed or raised
    later depends on which of them occur.

    It is the default for records of different lengths if the model is one of transformers, whose
    configuration declares a maximum.

    Parameters
    ----------
    maximum
        The longest length. Longer records are cut: whether there are any is private. Shorter ones
        are padded to the next power of two or 1.5 times one, from 16 on.
    lengths
        The lengths themselves, in place of `maximum`.
    value
        What to pad with: a number, or one for each name of a mapping (place in a tuple). The
        default is 0, and -100 for "labels", which losses of torch ignore.
    mask
        Name of a further entry of the mapping that says which positions are the record's own.
        With True, for other records, it is appended to the tuple.
    fields
        Names (places in a tuple) of the sequences to pad, if others have a fixed length.

    Examples
    --------
    >>> pad = PadTo(100, mask=True)
    >>> pad.lengths
    (16, 24, 32, 48, 64, 96, 100)
    >>> ids, mask = pad([torch.arange(20)])
    >>> ids.shape, int(mask.sum())
    (torch.Size([1, 24]), 20)
    """

    def __init__(
        self,
        maximum: int | None = None,
        *,
        lengths: Sequence[int] | None = None,
        value: float | Mapping[Any, float] = 0,  # Any: names, or places in a tuple
        mask: str | bool = False,
        fields: Sequence[str | int] | None = None,
    ) -> None:
        if (maximum is None) == (lengths is None):
            raise ValueError("PadTo takes either maximum, the longest length, or lengths.")
        self.lengths = tuple(sorted(set(lengths or _grid(whole(maximum=maximum, least=1)))))
        whole(lengths=self.lengths[0], least=1)
        self.value, self.mask, self.fields = value, mask, fields

    @classmethod
    def of_model(cls, model: Any, record: Any) -> "PadTo | None":  # Any: a module; a record
        """Return the lengths up to the positions that a model of transformers declares, if any."""
        config = getattr(model, "config", None)
        found = [getattr(config, name, None) for name in _POSITIONS]
        maximum = next((n for n in found if isinstance(n, int)), None)
        is_tokens = isinstance(record, Mapping) and "input_ids" in record
        mask = "attention_mask" if is_tokens and "attention_mask" not in record else False
        return None if maximum is None else cls(maximum, mask=mask)

    def __call__(self, records: list[Any]) -> Batch:
        """Return records as a batch of the least public length that holds all of them."""
        longest = max(max(self._lengths_of(record)) for record in records)
        length = next((n for n in self.lengths if n >= longest), self.lengths[-1])
        return default_collate([self._padded(record, length) for record in records])

    def __repr__(self) -> str:
        return f"PadTo(lengths={self.lengths})"

    def require_fitting(self, *, stacks: bool) -> None:
        """Raise `ValueError` if several lengths do not fit other options of a run.

        `stacks` says that records are stacked, as those of one user are.
        """
        if stacks and len(self.lengths) > 1:
            raise ValueError(
                "PadTo must have one length with users, whose records are stacked: "
                "PadTo(lengths=[n])."
            )

    def at_length(self, record: Any, length: int) -> Batch:  # Any: a record
        """Return one record as a batch, padded or cut to `length`."""
        return default_collate([self._padded(record, length)])

    def _lengths_of(self, record: Any) -> set[int]:
        found: set[int] = set()
        self._map(record, lambda sequence, _: found.add(len(sequence)))
        if len(found) > 1:
            raise ValueError(
                "the sequences of a record must have one length to be padded together. Name those "
                "to pad: PadTo(..., fields=...)."
            )
        if not found:
            raise TypeError("PadTo pads sequences of numbers, but a record holds none.")
        return found

    def _padded(self, record: Any, length: int) -> Any:
        own = min(length, max(self._lengths_of(record)))

        def pad(sequence: Tensor, name: Any) -> Tensor:
            after = [0, 0] * (sequence.dim() - 1) + [0, max(0, length - len(sequence))]
            return F.pad(sequence[:length], after, value=self._value_of(name))

        padded = self._map(record, pad)
        if not self.mask:
            return padded
        mask = torch.arange(length) < own
        if isinstance(padded, dict):
            return padded | {str(self.mask): mask}
        return (*padded, mask) if isinstance(padded, tuple) else (padded, mask)

    def _value_of(self, name: Any) -> float:
        if not isinstance(self.value, Mapping):
            return -100 if name == "labels" and self.value == 0 else self.value
        return self.value.get(name, 0)

    def _map(self, record: Any, change: Callable[[Tensor, Any], Any]) -> Any:
        """Return the record with `change(sequence, name)` for each sequence to be padded."""
        if isinstance(record, Mapping):
            return {n: self._changed(v, n, change) for n, v in record.items()}
        if isinstance(record, tuple):
            return tuple(self._changed(v, n, change) for n, v in enumerate(record))
        return self._changed(record, 0, change)

    def _changed(self, value: Any, name: Any, change: Callable[[Tensor, Any], Any]) -> Any:
        is_sequence = isinstance(value, Tensor | np.ndarray | list)
        tensor = torch.as_tensor(value) if is_sequence else value
        if not is_sequence or not tensor.dim() or (self.fields and name not in self.fields):
            return tensor
        return change(tensor, name)


def _grid(maximum: int) -> list[int]:
    """Return the powers of two and 1.5 times them from 16 to `maximum`, which is the last."""
    powers = [_SHORTEST * 2**k for k in range(maximum.bit_length())]
    grid = [n for power in powers for n in (power, power * 3 // 2) if n < maximum]
    return [*grid, maximum]
