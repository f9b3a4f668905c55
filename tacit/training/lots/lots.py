"""Lots: the records drawn for one step, handed out in microbatches that fit in memory.

The members and the size of a lot are private. A lot is drawn by the sampler whose event is billed,
from the run's key and the step's number, so it does not depend on earlier steps, and an interrupted
loop continues where it was. An empty lot is a step like any other. A microbatch may be padded with
rows of zeros, whose weight is 0: they contribute exactly nothing to the sum.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tacit.training.lots.padding import Padding
from tacit.training.lots.records import Indices, Microbatch, Records
from tacit.training.noise.key import Key, randomness, reseed
from tacit.training.tree import Batch, current_device, pad_rows


class PendingMicrobatch(NamedTuple):
    """A microbatch whose record indices are drawn, but whose records are not read yet. Private."""

    indices: Indices
    rows: int  # with padding
    fetch: Callable[[], Microbatch]

    def __repr__(self) -> str:
        return "PendingMicrobatch(private)"


class _Cut(NamedTuple):
    """The record indices of one microbatch, and its number of rows with padding."""

    indices: Indices
    rows: int


class Lot:
    """The records of one step; private. Pass it to `Private.step`, or use it as a batch.

    Unpacked (`x, y = lot`) or indexed (`lot["x"]`) it is the whole lot as one collated batch, for a
    look at shapes; an empty lot is one row of zeros. Nothing accounts for what is computed from it.
    """

    def __init__(
        self,
        source: "Lots",
        step: int,
        *,
        cut: list[_Cut] | None = None,
        prefetched: Callable[[int], Batch | None] | None = None,
    ) -> None:
        self.source = source
        self.key = source.key
        self.step = step
        self._indices = source.indices(step)
        self._cut = cut
        self._prefetched = prefetched
        self._whole: Batch | None = None

    def __repr__(self) -> str:
        return f"Lot(step={self.step})"  # neither its size nor its members

    def pending(self) -> Iterator[PendingMicrobatch]:
        """Yield the microbatches before their records are read; none for an empty lot. Private."""
        cut = self.source.cut(self._indices) if self._cut is None else self._cut
        for number, part in enumerate(cut):
            yield PendingMicrobatch(*part, partial(self._fetch, part, number))

    def whole(self) -> Batch:
        """Return the whole lot as one batch; an empty lot as one row of zeros. Private."""
        if self._whole is None:
            self._whole = self._make_whole()
        return self._whole

    def __iter__(self) -> Iterator[Any]:  # Any: fields of the user's batch
        return iter(self._for_loop())

    def __getitem__(self, name: Any) -> Any:  # Any: as the user's batch is indexed
        return self._for_loop()[name]

    def keys(self) -> Any:  # Any: the view that the user's mapping gives
        """Return the names of the fields if records are mappings, as `model(**lot)` needs."""
        return self._for_loop().keys()

    def _for_loop(self) -> Any:  # Any: the user's batch
        return self.source.records.in_rows(self.whole())

    def _make_whole(self) -> Batch:
        if not len(self._indices):
            return self.source.records.blank()
        return self.source.fetch(self._indices, self.source.seed(self.step))

    def _fetch(self, part: _Cut, number: int) -> Microbatch:
        batch = None if self._prefetched is None else self._prefetched(number)
        if batch is None:  # no workers, or an interrupted attempt has already taken it
            batch = self.source.fetch(part.indices, self.source.seed(self.step), number)
        return self.source.padded(batch, part)


class Lots:
    """Draws the lot of every step and cuts it into microbatches of at most `limit` rows."""

    def __init__(
        self,
        records: Records,
        drawer: Callable[[Key, int], Callable[[int], Indices]],
        *,
        key: Key,
        limit: int,
        padding: Padding | None,
        num_workers: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.records = records
        self.limit = limit
        self.padding = padding
        self._drawer = drawer
        self.num_workers = num_workers
        self._rank = rank
        self._ranks = ranks
        self._row_numbers: dict[int, Tensor] = {}
        self.use(key)

    def use(self, key: Key) -> None:
        """Use `key` for the lots drawn from now on."""
        self.key = key
        self._draw = self._drawer(key, len(self.records))

    def lower_limit(self, limit: int) -> None:
        """Make microbatches of at most `limit` rows from now on."""
        self.limit = min(self.limit, limit)
        self.padding = self.padding and self.padding.within(self.limit)

    def use_few_sizes(self) -> None:
        """Pad microbatches to few sizes from now on, because each takes a compilation."""
        self.padding = self.padding and self.padding.with_few_sizes()

    def from_step(self, start: int, stop: int) -> Iterator[Lot]:
        """Yield the lots of steps `start` to `stop` - 1, each with this rank's records only."""
        if self.num_workers:
            yield from self._prefetched(start, stop)
            return
        for step in range(start, stop):
            yield self.lot(step)

    def lot(self, step: int) -> Lot:
        """Return this rank's records of a step's lot; they are read when they are used."""
        return Lot(self, step)

    def seed(self, step: int) -> int:
        """Return the seed of this rank's dropout and augmentation in `step`, from the run's key."""
        return int.from_bytes(self.key.bytes("model", step, 7, part=self._rank))

    def on_device(self) -> AbstractContextManager[Any]:  # Any: its value is unused
        """Return a context in which the model's GPU, if there is one, is the current device."""
        return current_device(self.records.device)

    def indices(self, step: int) -> Indices:
        """Return the indices of this rank's records in the lot of `step`. Private."""
        # Every rank draws the same lot; the shares are disjoint and cover it.
        return self._draw(step)[self._rank :: self._ranks]

    def cut(self, indices: Indices) -> list[_Cut]:
        """Split a lot's record indices into microbatches that fit in memory.

        Of records of several lengths, so many are read at once that those of one length fill a
        microbatch of their own (`Microbatch.of_one_shape`).
        """
        return [cut for part in self.records.in_parts(indices) for cut in self._cut(part)]

    def _cut(self, indices: Indices) -> list[_Cut]:
        n, padding = len(indices), self.padding
        if not n:
            return []
        if padding is None:
            most = self.limit * self.records.n_lengths
            return [_Cut(p, len(p)) for p in np.array_split(indices, -(-n // most))]
        sizes = padding.cover(n)
        if len(sizes) == 1:
            return [_Cut(indices, sizes[0])]
        parts = np.array_split(indices, len(sizes))
        return [_Cut(*part) for part in zip(parts, sizes, strict=True)]

    def padded(self, batch: Batch, part: _Cut) -> Microbatch:
        """Return a batch of a part's records as a microbatch, with the padding of the part."""
        n, rows = len(part.indices), part.rows
        if self.padding is None:
            return Microbatch(batch, None, n)
        if rows not in self._row_numbers:
            self._row_numbers[rows] = torch.arange(rows, device=self.records.device)
        return Microbatch(pad_rows(batch, rows), self._row_numbers[rows] < n, n)

    def fetch(self, indices: Indices, seed: int, number: int = 0) -> Batch:
        """Return the records at `indices`, microbatch `number` of a step with a `seed`, as a batch.

        Random augmentation follows from both. Which records of a user are chosen follows from the
        seed alone: the number depends on the other users of a lot.
        """
        if self.records.is_stored:
            return self.records.fetch(indices, seed)
        with randomness(seed + number, self.records.device):
            return self.records.fetch(indices, seed)

    def _prefetched(self, start: int, stop: int) -> Iterator[Lot]:
        """Yield the lots of steps `start` to `stop` - 1; worker processes read records ahead."""
        cuts: dict[int, list[_Cut]] = {}

        def cut_of(step: int) -> list[_Cut]:
            # The first caller cuts for both the workers and the lot, so that a limit lowered in
            # between cannot give one lot the microbatches of another.
            if step in cuts:
                return cuts.pop(step)
            cuts[step] = self.cut(self.indices(step))
            return cuts[step]

        def requests() -> Iterator[list[int]]:
            for step in range(start, stop):
                for number, part in enumerate(cut_of(step)):
                    yield [self.seed(step), number, *part.indices.tolist()]

        loader = DataLoader(
            _Requested(self.records),
            batch_sampler=requests() if start < stop else [],  # type: ignore[arg-type]  # any iterable of requests will do
            collate_fn=_identity,
            num_workers=self.num_workers,
            generator=torch.Generator(),  # the user's own stream stays untouched
        )
        queue, first = _Queue(iter(loader)), 0
        for step in range(start, stop):
            cut = cut_of(step)
            yield Lot(self, step, cut=cut, prefetched=partial(self._from_queue, queue, first))
            first += len(cut)

    def _from_queue(self, queue: "_Queue", first: int, number: int) -> Batch | None:
        batch = queue.take(first + number)
        return None if batch is None else self.records.to_device(batch)


class _Requested(Dataset):
    """The data set in worker processes: a request holds seed, number and indices of records."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def __getitems__(self, request: Sequence[int]) -> Batch:
        seed, number, *indices = request
        reseed(seed + number, torch.device("cpu"))  # this process reads records, nothing else
        return self._records.fetch_on_host(np.asarray(indices, np.int64), seed)


def _identity(batch: Batch) -> Batch:
    return batch


class _Queue:
    """Batches read by worker processes, numbered in order; each can be taken once."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._next = 0

    def take(self, number: int) -> Batch | None:
        """Return batch `number` and drop all earlier batches; None if it was already taken."""
        batch = None
        while self._next <= number:
            self._next += 1
            try:
                batch = next(self._batches)
            except RuntimeError as error:
                if not any(sign in str(error) for sign in ("exited unexpectedly", "by signal")):
                    raise
                raise RuntimeError(
                    "a data worker ended unexpectedly, often because memory ran out. Nothing of "
                    "this step was released: iterate again to continue, or use num_workers=0 to "
                    "see why."
                ) from error
        return batch
