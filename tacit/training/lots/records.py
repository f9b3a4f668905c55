"""Access to the private records, and the microbatches in which they reach the device."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from tacit.errors import IncompatibleModel
from tacit.training.lots.one_by_one import OTHER_SHAPE, ByShape, OtherForm, row_count, stacked
from tacit.training.noise.key import Key, randomness
from tacit.training.program.pad_to import PadTo
from tacit.training.tree import Batch, form_of, map_tensors, n_rows, take_rows
from tacit.training.withheld_errors import ErrorGuard

Indices = NDArray[np.int64]
Fetch = Callable[[Indices], Batch]
_FIRST = 16  # records whose shapes are compared when training is set up
_ROWS, _NUMBERS = 256, 1 << 24  # records and numbers that are hashed at a time


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

    def of_one_shape(self, limit: int) -> list["Microbatch"]:
        """Return microbatches of at most `limit` records of one shape, if there are several shapes.

        Their `size` is then 0: the records are counted on this microbatch.
        """
        batches = self.batch if isinstance(self.batch, ByShape) else [self.batch]
        if self.weights is not None or (len(batches) == 1 and n_rows(batches[0]) <= limit):
            return [self]
        parts = [(batch, n_rows(batch), -(-n_rows(batch) // limit)) for batch in batches]
        return [
            Microbatch(take_rows(batch, k * rows // count, (k + 1) * rows // count), None)
            for batch, rows, count in parts
            for k in range(count)
        ]


class Columns(Dataset):
    """A table as a data set: a record maps the names of the columns to its values."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.columns.items()}


class Records:
    """Random access to the private records: `fetch` turns indices into a batch on `device`.

    Errors of the data set and of `collate_fn` are shown as `guard` says. Floating-point numbers of
    arrays and tables become `dtype`; tensors stay as they are. The data set and `collate_fn` are
    asked for one record at a time, and the results are stacked.

    Attributes
    ----------
    is_stored
        Whether records are rows of tensors, fetched all at once.
    is_plain
        Whether none of the user's code runs when a record is fetched.
    of_users
        Whether what is fetched at an index is a user with several records (`users`).
    n_lengths
        Number of public lengths that a record may be padded to (`PadTo`).
    """

    of_users, n_lengths = False, 1

    def __init__(
        self,
        dataset: Any,  # Any: a Dataset, a table, a tensor, or a tuple of tensors or arrays
        *,
        collate_fn: Callable[[list[Any]], Batch] | None,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        guard: ErrorGuard | None = None,
    ) -> None:
        _refuse_unusable(dataset)
        self.dataset: Any = _as_dataset(dataset, dtype)
        self.device = device
        self.is_stored = collate_fn is None and _is_stored(self.dataset)
        self._fetch = _fetcher(self.dataset, collate_fn)
        self.guard = ErrorGuard() if guard is None else guard
        inner = self.dataset.dataset if type(self.dataset) is Subset else self.dataset
        is_table = type(inner) is Columns and _are_plain(inner.columns.values())
        is_tensors = type(inner) is TensorDataset and _are_plain(inner.tensors)
        self.is_plain = collate_fn is None and (is_table or is_tensors)
        self.collate_fn = collate_fn
        self.n_lengths = len(collate_fn.lengths) if isinstance(collate_fn, PadTo) else 1

    def __len__(self) -> int:
        return self.guard(len, self.dataset)

    @property
    def on_device(self) -> tuple[Tensor, ...] | None:
        """The data set's tensors if all are on the model's device, else None. A row is a record."""
        tensors = self.dataset.tensors if self.is_stored else ()
        return tensors if tensors and all(t.device == self.device for t in tensors) else None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that hold the data set, if it is made of such. Private."""
        inner = self.dataset.dataset if type(self.dataset) is Subset else self.dataset
        held = getattr(inner, "columns", None)
        found = held.values() if isinstance(held, dict) else getattr(inner, "tensors", ())
        return [t for t in found if isinstance(t, Tensor)]

    @property
    def is_ragged(self) -> bool:
        """Whether the first records, read one by one, differ in their shapes or types."""
        few = np.arange(min(_FIRST, len(self)))
        if self.is_stored or self.is_plain:
            return False
        try:
            return isinstance(self.guard(self._fetch, few), ByShape)
        except OtherForm:  # lists of numbers, of which torch makes one tensor for each
            record = self.first()
            parts = record.values() if isinstance(record, Mapping) else record
            if not any(isinstance(part, list) for part in parts):
                raise
            return True

    def fetch(self, indices: Indices, seed: int = 0) -> Batch:
        """Return the records at `indices` as one batch on the model's device."""
        return self.to_device(self.fetch_on_host(indices, seed))

    def fetch_on_host(self, indices: Indices, seed: int = 0) -> Batch:  # noqa: ARG002  # see below
        """Return the records at `indices` as one batch on the device where they are stored.

        `seed` is for subclasses, which choose some of a user's records (`users`).
        """
        batch = self.guard(self._fetch, indices)
        if not self.is_stored and row_count(batch) != len(indices):
            raise ValueError(
                "the first axis of a batch must count the examples, but collate_fn or the data set "
                "did not give one row for each record. Change it."
            )
        return batch

    def in_parts(self, indices: Indices) -> list[Indices]:
        """Return parts of a lot's indices that are best summed apart; here the lot itself."""
        return [indices]

    def in_rows(self, batch: Batch) -> Batch:
        """Return a fetched batch with a row for each record: here, as it is."""
        return batch

    def to_device(self, batch: Batch) -> Batch:
        """Return `batch` with its tensors on the model's device."""
        return map_tensors(lambda t: t.to(self.device, non_blocking=True), batch)

    def digest(self, salt: Key) -> bytes:
        """Return a hash of every record, in order, under `salt`. Private.

        Data sets that are no tensors are read, record by record, with fixed seeds for random
        augmentation; one that gives other records at every pass has another hash each time.
        """
        found = hashlib.sha256(salt.secret)
        if self.is_stored:
            for tensor in self.dataset.tensors:
                _hash(tensor, found)
            return found.digest()
        for start in range(0, len(self), _ROWS):
            rows = np.arange(start, min(start + _ROWS, len(self)))
            with randomness(start, torch.device("cpu")):
                map_tensors(partial(_hash, found=found), self.fetch_on_host(rows))
        return found.digest()

    def blank(self) -> Batch:
        """Return a batch of one row of zeros in the shape of a record; the shape is public."""
        return _zeros(self.fetch(np.zeros(1, np.int64)))

    def first(self) -> Any:  # Any: as the data set gives it
        """Return the first record as the data set gives it; only its form is public."""
        return self.guard(read_records, self.dataset, [0])[0]

    def blanks(self) -> list[Batch]:
        """Return a batch like `blank` for every shape that a record can have, which is public.

        These are the lengths of `PadTo`, from the shortest; else all records have one shape.
        """
        pad = self.collate_fn
        if not isinstance(pad, PadTo):
            if self.is_ragged:
                raise IncompatibleModel(OTHER_SHAPE)
            return [self.blank()]
        found = [self.guard(pad.at_length, self.first(), length) for length in pad.lengths]
        return [self.to_device(_zeros(batch)) for batch in found]


def _zeros(batch: Batch) -> Batch:
    """Return the batch with zeros for all that it holds; raise if it holds more than tensors."""
    form_of(batch)
    return map_tensors(torch.zeros_like, batch)


def _hash(tensor: Tensor, found: Any) -> Tensor:  # Any: a hash of hashlib
    """Add type, shape and numbers of a tensor to the hash `found`; return the tensor."""
    found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    for part in tensor.detach().to_dense().reshape(-1).split(_NUMBERS):
        found.update(part.cpu().contiguous().view(torch.uint8).numpy())
    return tensor


def _fetcher(dataset: Any, collate_fn: Callable[[list[Any]], Batch] | None) -> Fetch:
    """Return the fastest function from indices to a collated batch of `dataset`'s records."""
    if collate_fn is None and _is_stored(dataset):
        return lambda indices: tuple(_rows(dataset.tensors, indices))
    if collate_fn is None and isinstance(dataset, Columns):
        names, tensors = dataset.columns.keys(), list(dataset.columns.values())
        return lambda indices: dict(zip(names, _rows(tensors, indices), strict=True))
    if collate_fn is None and type(dataset) is Subset and _is_stored(dataset.dataset):
        inner, chosen = _fetcher(dataset.dataset, None), np.asarray(dataset.indices, np.int64)
        return lambda indices: inner(chosen[indices])
    collate = default_collate if collate_fn is None else collate_fn

    def one(index: int) -> Batch:
        return collate_records(collate, read_records(dataset, [index]))

    return lambda indices: stacked([one(index) for index in indices.tolist()])


def _is_stored(dataset: Any) -> bool:
    """Return whether records are rows of tensors, and no subclass says how to read them."""
    return (
        isinstance(dataset, TensorDataset)
        and _are_plain(dataset.tensors)
        and all(
            getattr(type(dataset), name, None) is getattr(TensorDataset, name, None)
            for name in ("__getitem__", "__getitems__")
        )
    )


def _are_plain(tensors: Iterable[Tensor]) -> bool:
    """Return whether all are torch's own tensors; a subclass may run code when a row is taken."""
    return all(type(t) in (Tensor, nn.Parameter) for t in tensors)


def read_records(dataset: Any, indices: list[int]) -> list[Any]:
    """Return the records at `indices`, as the data set gives them. Private."""
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if many else [dataset[i] for i in indices]


def collate_records(collate: Callable[[list[Any]], Batch], records: list[Any]) -> Batch:
    """Return one batch made of `records`. Private."""
    return collate(records)


def _rows(tensors: Sequence[Tensor], indices: Indices) -> Iterator[Tensor]:
    rows = torch.from_numpy(indices)
    places = {t.device: rows.to(t.device, non_blocking=True) for t in tensors}
    # index_select: four times as fast as t[rows] on a CPU
    return (t.index_select(0, places[t.device]) for t in tensors)


def _as_dataset(dataset: Any, dtype: torch.dtype) -> Any:
    """Return tensors, arrays and tables as a `Dataset`; anything else as it is."""
    if isinstance(dataset, Tensor):
        return TensorDataset(dataset)
    if _is_table(dataset):
        return Columns(
            {
                str(name): as_tensor(dataset[name], f"column {name}", dtype)
                for name in _names(dataset)
            }
        )
    # A list, or a tuple of anything else, is a data set of records.
    if isinstance(dataset, tuple) and dataset and all(map(_is_array, dataset)):
        tensors = [as_tensor(part, f"part {i}", dtype) for i, part in enumerate(dataset)]
        if len({len(t) for t in tensors}) > 1:
            raise ValueError(
                "dataset must be a tuple of tensors or arrays with one row per record each, but "
                "their lengths differ."
            )
        return TensorDataset(*tensors)
    return dataset


def as_tensor(values: Any, what: str, dtype: torch.dtype) -> Tensor:  # Any: an array or a table
    """Return an array or the columns of a table as a tensor; floating-point numbers get `dtype`.

    `what` names the values in errors.
    """
    if isinstance(values, Tensor):
        return values
    array = np.asarray(values)
    if array.dtype.kind not in "biufc" or array.ndim == 0:
        raise TypeError(
            f"{what} of the data set must hold numbers, one row per record, got "
            f"{array.dtype.type.__name__} in {array.ndim} axes. Encode text, dates and missing "
            "values as numbers first."  # the name of a type of text would state the longest one
        )
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # torch computes with few of these
        array = array.astype(np.int64)
    tensor = torch.tensor(array)  # a copy: arrays may be read-only or strided backwards
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _is_array(value: object) -> bool:
    is_column = hasattr(value, "to_numpy") and hasattr(value, "dtype")
    return isinstance(value, Tensor | np.ndarray) or is_column or _is_table(value)


def _is_table(value: object) -> bool:
    """Return whether `value` is a DataFrame, of pandas or of another library."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def _names(table: Any) -> list[Any]:
    names = list(table.columns)
    if not names or len(set(map(str, names))) < len(names):
        raise ValueError("dataset must be a table with columns of different names.")
    return names


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
