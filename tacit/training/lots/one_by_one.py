"""Records read one at a time and stacked, so that no code of the user's sees two of them.

The data set, `collate_fn` and `augment` are Python code, which a traced program does not cover.
They are called on one record (or one user) at a time. What they give must be tensors with one row
for each record (`augment`: one for each view), in containers, and nothing else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.errors import IncompatibleModel
from tacit.training.tree import Batch, form_of, n_rows, with_rows

_OTHER_FORM = (
    "records must have one form: the same names in the same order, the same containers, and None "
    "at the same places. Give what differs as a tensor with one row for each record."
)
OTHER_SHAPE = (
    "a record has another shape or type than the program was traced for. If its length differs, "
    "give collate_fn=tacit.training.PadTo(maximum), which pads each record by its own length to "
    "one of a few public lengths. (Padding to the longest record of a lot would make the gradient "
    "of one record depend on the length of another.)"
)


class OtherForm(IncompatibleModel):
    """Raised if records hold their tensors in different ways."""


class ByShape(list[Batch]):
    """Batches of the records of one lot, one for each shape. Private."""


def row_count(batch: Batch) -> int:
    """Return the number of rows of a batch, or of all batches of `ByShape`. Private."""
    return sum(map(n_rows, batch)) if isinstance(batch, ByShape) else n_rows(batch)


def stacked(examples: Sequence[Batch], rows: int = 1) -> Batch:
    """Return the examples, batches of `rows` rows each, as one batch: `ByShape` if shapes differ.

    Raises `IncompatibleModel` if they hold anything but rows, `OtherForm` if in different ways.
    """
    groups: dict[Any, list[list[Tensor]]] = {}
    first = examples[0]
    _, rebuild = with_rows(first)
    form = form_of(first)
    for example in examples:
        tensors, _ = with_rows(example)
        if form_of(example) != form:
            raise OtherForm(_OTHER_FORM)
        if not tensors or any(t.shape[0] != rows for t in tensors):
            raise ValueError(
                "the first axis of every tensor in a batch must count the examples, but collate_fn "
                "or augment gave another number of rows for one record. Change it."
            )
        key = tuple((t.shape[1:], t.dtype) for t in tensors)
        groups.setdefault(key, []).append(tensors)
    batches = [
        rebuild([torch.cat(parts) for parts in zip(*group, strict=True)])
        for group in groups.values()
    ]
    return batches[0] if len(batches) == 1 else ByShape(batches)


def random_like(record: Any) -> Any:  # Any: a record as the data set gives it
    """Return a record of the same form with random numbers; raise `TypeError` for other things."""
    if isinstance(record, Tensor):
        if record.is_floating_point() or record.is_complex():
            return torch.randn_like(record)
        return torch.randint_like(record, 2)
    if isinstance(record, np.ndarray):
        return random_like(torch.from_numpy(record)).numpy()
    if isinstance(record, bool | int | float):
        return type(record)(
            torch.randn(()) if isinstance(record, float) else torch.randint(2**15, ())
        )
    if isinstance(record, Mapping):
        return {name: random_like(value) for name, value in record.items()}
    if isinstance(record, tuple | list):
        return type(record)(random_like(value) for value in record)
    raise TypeError(f"no random record can be made of a {type(record).__name__}")
