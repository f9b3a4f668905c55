"""Lots: the records drawn for one step, handed out in physical batches that fit in memory.

A lot is private: its members and its size. It is drawn by the sampler whose event is billed, from
the run's key and the step's number, so it does not depend on what happened before, and an
interrupted loop goes on where it was. An empty lot is a step like any other. A physical batch may
be padded with rows of zeros, whose weight is 0: they contribute exactly nothing to the sum.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tacit.training.noise import Key
from tacit.training.records import Batch, Indices, Micro, Records, pad_rows, seeded


class Part(NamedTuple):
    """A part of a lot that runs at once, fetched when asked for. Private."""

    indices: Indices
    limit: int  # rows of the physical batch, if it is padded
    fetch: Callable[[], Micro]

    def __repr__(self) -> str:
        return f"Part(limit={self.limit})"  # not its members


class Lot:
    """The records of one step; private. Give it to `Private.step`, or use it as a batch.

    Unpacked (`x, y = lot`) or indexed (`lot["x"]`, `model(**lot)`) it is the whole lot as one
    collated batch. An empty lot then has one row of zeros, which weighs nothing.
    """

    def __init__(
        self,
        source: "Lots",
        step: int,
        parts: Callable[[], Iterator[Part]],
        whole: Callable[[], Micro],
    ) -> None:
        self.source, self.key, self.step = source, source.key, step
        self.on_unpack: Callable[[Micro], None] | None = None
        self._parts, self._make_whole = parts, whole
        self._whole: Micro | None = None

    def __repr__(self) -> str:
        return f"Lot(step={self.step})"  # neither its size nor its members

    def parts(self) -> Iterator[Part]:
        """Its parts, not fetched yet; none if nothing was drawn. Private."""
        return self._parts()

    def micros(self) -> Iterator[Micro]:
        """Its physical batches, none if nothing was drawn. Private."""
        return (part.fetch() for part in self._parts())

    def whole(self) -> Micro:
        """All of it as one batch of at least one row. Private."""
        if self._whole is None:
            self._whole = self._make_whole()
            if self.on_unpack is not None:
                self.on_unpack(self._whole)
        return self._whole

    def __iter__(self) -> Iterator[Any]:  # Any: fields of the user's batch
        return iter(self.whole().batch)

    def __getitem__(self, name: Any) -> Any:  # Any: as the user's batch is indexed
        return self.whole().batch[name]

    def keys(self) -> Any:  # Any: the view that the user's mapping gives
        """Names of the fields, if records are mappings: this lets `model(**lot)` work."""
        return self.whole().batch.keys()


class Lots:
    """Draws the lot of every step and cuts it into physical batches of at most `limit` rows."""

    def __init__(
        self,
        records: Records,
        drawer: Callable[[Key, int], Callable[[int], Indices]],
        *,
        key: Key,
        limit: int,
        pad: bool,
        num_workers: int,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        self.records, self.limit, self.pad = records, limit, pad
        self._drawer, self._num_workers = drawer, num_workers
        self._part, self._parts = part, parts
        self._row_numbers = torch.arange(0)
        self.use(key)

    def use(self, key: Key) -> None:
        """Draw by this key from now on."""
        self.key, self._draw = key, self._drawer(key, len(self.records))

    def lower_limit(self, limit: int) -> None:
        """Run at most `limit` rows at once from now on."""
        self.limit = min(self.limit, limit)

    def from_step(self, start: int, stop: int) -> Iterator[Lot]:
        """Lots of steps `start` .. `stop` - 1, of which this rank's share is handed out."""
        if self._num_workers:
            yield from self._prefetched(start, stop)
            return
        for step in range(start, stop):
            yield self.lot(step)

    def lot(self, step: int) -> Lot:
        """The lot of one step, fetched when used."""
        mine = self._mine(step)

        def parts() -> Iterator[Part]:
            limit = self.limit  # may be lowered between two of them
            for i, indices in enumerate(self._cut(mine)):
                yield Part(indices, limit, partial(fetch, indices, limit, i))

        def fetch(indices: Indices, limit: int, number: int) -> Micro:
            return self._padded(self._fetch(indices, self.seed(step) + number), len(indices), limit)

        return Lot(self, step, parts, lambda: self._as_whole(mine, self.seed(step)))

    def seed(self, step: int) -> int:
        """Seed of the dropout and augmentation of `step` on this rank: a replay repeats them."""
        return int.from_bytes(self.key.bytes("model", step, 7, part=self._part))

    def most_batches(self, step: int) -> int:
        """Physical batches of the largest share of a lot, at least one. Private."""
        if self._parts == 1:
            return 1
        share = -(-len(self._draw(step)) // self._parts)
        return max(1, -(-share // self.limit))

    def nothing(self) -> Micro:
        """One row that weighs zero, in the shape of a record."""
        return Micro(self.records.blank(), torch.zeros(1, device=self.records.device))

    def _mine(self, step: int) -> Indices:
        # Every rank draws the same lot; the shares are disjoint and cover it.
        return self._draw(step)[self._part :: self._parts]

    def _cut(self, indices: Indices) -> list[Indices]:
        if not len(indices):
            return []
        if self.pad:
            return [indices[i : i + self.limit] for i in range(0, len(indices), self.limit)]
        return np.array_split(indices, -(-len(indices) // self.limit))

    def _padded(self, batch: Batch, rows: int, limit: int) -> Micro:
        if not self.pad:
            return Micro(batch, None, rows)
        if len(self._row_numbers) != limit:
            self._row_numbers = torch.arange(limit, device=self.records.device)
        return Micro(pad_rows(batch, limit), self._row_numbers < rows, rows)

    def _as_whole(self, indices: Indices, seed: int) -> Micro:
        if not len(indices):
            return self.nothing()
        return Micro(self._fetch(indices, seed), None, len(indices))

    def _fetch(self, indices: Indices, seed: int) -> Batch:
        """Records with the augmentation that a worker would give them."""
        if self.records.is_stored:
            return self.records.fetch(indices)
        with seeded(seed, self.records.device):
            return self.records.fetch(indices)

    def _prefetched(self, start: int, stop: int) -> Iterator[Lot]:
        # Workers are ahead of the steps. Whoever comes first to a lot cuts it for both, so that a
        # limit lowered in between does not give one lot the batches of another.
        cuts: dict[int, tuple[list[Indices], int]] = {}

        def cut_of(step: int) -> tuple[list[Indices], int]:
            if step in cuts:
                return cuts.pop(step)
            cuts[step] = self._cut(self._mine(step)), self.limit
            return cuts[step]

        def requests() -> Iterator[list[int]]:
            for step in range(start, stop):
                for i, indices in enumerate(cut_of(step)[0]):
                    yield [self.seed(step) + i, *indices.tolist()]

        loader = DataLoader(
            _Requested(self.records),
            batch_sampler=requests() if start < stop else [],  # type: ignore[arg-type]  # any iterable of requests will do
            collate_fn=_identity,
            num_workers=self._num_workers,
            generator=torch.Generator(),  # the user's own stream stays untouched
        )
        queue, start_of_lot = _Queue(iter(loader)), 0

        def take(indices: Indices, limit: int, number: int, seed: int) -> Micro:
            batch = queue.take(number)
            if batch is None:  # taken before, by an attempt that was interrupted
                batch = self._fetch(indices, seed)
            return self._padded(self.records.to_device(batch), len(indices), limit)

        for step in range(start, stop):
            (cut, limit), seed = cut_of(step), self.seed(step)

            def parts(
                cut: list[Indices] = cut,
                limit: int = limit,
                seed: int = seed,
                first: int = start_of_lot,
            ) -> Iterator[Part]:
                for i, indices in enumerate(cut):
                    yield Part(indices, limit, partial(take, indices, limit, first + i, seed + i))

            mine = self._mine(step)
            yield Lot(self, step, parts, lambda mine=mine, seed=seed: self._as_whole(mine, seed))
            start_of_lot += len(cut)


class _Requested(Dataset):
    """In a worker: seed as the request says, fetch, collate."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def __getitems__(self, request: Sequence[int]) -> Batch:
        torch.manual_seed(request[0])
        return self._records.fetch_on_host(np.asarray(request[1:], np.int64))


def _identity(batch: Batch) -> Batch:
    return batch


class _Queue:
    """Fetched batches by number; one that is asked for late is gone."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches, self._next = batches, 0

    def take(self, number: int) -> Batch | None:
        """Batch `number`, dropping those before it that nobody took; None if it was taken."""
        batch = None
        while self._next <= number:
            self._next += 1
            try:
                batch = next(self._batches)
            except RuntimeError as error:
                if not any(sign in str(error) for sign in ("exited unexpectedly", "by signal")):
                    raise
                raise RuntimeError(
                    "a data worker ended unexpectedly, often for want of memory. Nothing of this "
                    "step was released: iterate again to go on, or use num_workers=0 to see why."
                ) from error
        return batch
