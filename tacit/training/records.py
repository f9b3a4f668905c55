"""Access to the private records, and the microbatches in which they reach the device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from tacit.training.fingerprint import data_digest
from tacit.training.tree import Batch, map_tensors, n_rows, take_rows

Indices = NDArray[np.int64]
Fetch = Callable[[Indices], Batch]


class Microbatch(NamedTuple):
    """A part of a lot, small enough to be on the device at once. Private."""

    batch: Batch
    weights: Tensor | None  # False for padding; None if there is none
    size: int = 0  # in records, without padding
    is_half: bool = False  # of a microbatch that did not fit in memory

    def __repr__(self) -> str:
        return "Microbatch(private)"

    def halves(self) -> list["Microbatch"]:
        """Return the two halves, with `size` 0: the records are counted on this microbatch."""
        rows = n_rows(self.batch)

        def take(start: int, stop: int) -> Microbatch:
            weights = None if self.weights is None else self.weights[start:stop]
            return Microbatch(take_rows(self.batch, start, stop), weights, is_half=True)

        return [take(0, rows // 2), take(rows // 2, rows)]


class Records:
    """Random access to the private records: `fetch` turns indices into a batch on `device`."""

    def __init__(
        self,
        dataset: Any,  # Any: a Dataset, a tensor, or a tuple of tensors
        *,
        collate_fn: Callable[[list[Any]], Batch] | None,
        device: torch.device,
    ) -> None:
        _refuse_unusable(dataset)
        if isinstance(dataset, Tensor) or _is_tensors(dataset):
            dataset = TensorDataset(*([dataset] if isinstance(dataset, Tensor) else dataset))
        self.dataset: Any = dataset
        self.device = device
        self.is_stored = collate_fn is None and isinstance(dataset, TensorDataset)
        self._fetch = _fetcher(dataset, collate_fn)
        self._digest: tuple[list[int], bytes] | None = None
        self.program = () if self.is_stored else (dataset, collate_fn)  # Python that fetches
        self.program = (dataset, collate_fn)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def on_device(self) -> tuple[Tensor, ...] | None:
        """The data set's tensors if all are on the model's device, else None. A row is a record."""
        tensors = self.dataset.tensors if self.is_stored else ()
        return tensors if tensors and all(t.device == self.device for t in tensors) else None

    def fetch(self, indices: Indices) -> Batch:
        """Return the records at `indices` as one batch on the model's device."""
        return self.to_device(self._fetch(indices))

    def fetch_on_host(self, indices: Indices) -> Batch:
        """Return the records at `indices` as one batch on the device where they are stored."""
        return self._fetch(indices)

    def to_device(self, batch: Batch) -> Batch:
        """Return `batch` with its tensors on the model's device."""
        return map_tensors(lambda t: t.to(self.device, non_blocking=True), batch)

    def digest(self) -> bytes:
        """Return a hash of all records (`fingerprint`), kept while no tensor is written. Private.

        Tensors count their changes by torch; a data set of another kind is read once.
        """
        tensors = self.dataset.tensors if self.is_stored else ()
        versions = [0 if t.is_inference() else t._version for t in tensors]
        if self._digest is None or self._digest[0] != versions:
            self._digest = versions, data_digest(self)
        return self._digest[1]

    def blank(self) -> Batch:
        """Return a batch of one row of zeros in the shape of a record; the shape is public."""
        return map_tensors(torch.zeros_like, self.fetch(np.zeros(1, np.int64)))


def _fetcher(dataset: Any, collate_fn: Callable[[list[Any]], Batch] | None) -> Fetch:
    """Return the fastest function from indices to a collated batch of `dataset`'s records."""
    if collate_fn is None and isinstance(dataset, TensorDataset):
        tensors = dataset.tensors

        def select(indices: Indices) -> Batch:
            rows = torch.from_numpy(indices)
            places = {t.device: rows.to(t.device, non_blocking=True) for t in tensors}
            # index_select: four times as fast as t[rows] on a CPU
            return tuple(t.index_select(0, places[t.device]) for t in tensors)

        return select
    if collate_fn is None and isinstance(dataset, Subset):
        inner, chosen = _fetcher(dataset.dataset, None), np.asarray(dataset.indices, np.int64)
        if isinstance(dataset.dataset, TensorDataset):
            return lambda indices: inner(chosen[indices])
    collate = default_collate if collate_fn is None else collate_fn

    def gather(indices: Indices) -> Batch:
        many = getattr(dataset, "__getitems__", None)
        wanted = indices.tolist()
        return collate(many(wanted) if many else [dataset[i] for i in wanted])

    return gather


def _is_tensors(dataset: object) -> bool:
    return (
        isinstance(dataset, tuple)  # a list is a data set of records
        and len(dataset) > 0
        and all(isinstance(part, Tensor) for part in dataset)
    )


def _refuse_unusable(dataset: object) -> None:
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "dataset must be a Dataset, got a DataLoader, whose own order and batch size would be "
            "silently replaced by the sampling that the accountant prices. Pass loader.dataset."
        )
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            "dataset must have random access (__len__ and __getitem__), got an IterableDataset: "
            "each record must be able to join each lot independently."
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(f"dataset must have __len__ and __getitem__, got {type(dataset).__name__}.")
