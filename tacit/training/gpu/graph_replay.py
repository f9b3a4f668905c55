"""A step recorded as a CUDA graph: one launch, whatever it holds.

Its inputs lie in fixed places. They are filled by copying a batch that was fetched, or, where the
records lie on the GPU, by the graph itself from the numbers of the rows: then only these leave the
host. In return, a graph may tell the host something while it goes on.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tacit.training.records import Indices
from tacit.training.sums import is_dense

Step = Callable[[Tensor, list[Tensor]], list[Tensor]]
"""(seed of the backward, other inputs) -> results of the backward."""


class Captured:
    """A step, recorded when made and replayed when called.

    Made with `data`, it is called by `of_rows`. Its results lie where the next call puts them. The
    graph reads parameters where they are, so the optimizer's steps in place are seen.
    """

    def __init__(
        self,
        step: Step,
        mask: Tensor,
        tensors: Sequence[Tensor],
        data: tuple[Tensor, ...] | None = None,
    ) -> None:
        self._seed, self._factor = (torch.ones((), device=mask.device) for _ in range(2))
        self._scale = 1.0
        self._mask, self._tensors = mask.clone(), [t.clone() for t in tensors]
        self._rows = None if data is None else _Rows(data, self._mask, self._tensors)

        def run() -> list[Tensor]:
            if self._rows is not None:
                self._rows.fetch()
            results = step(self._seed, [self._factor, self._mask, *self._tensors])
            return [*map(_dense, results)]

        self._graph, self._results = _recorded(run)

    def __call__(self, scale: float, mask: Tensor, tensors: list[Tensor]) -> list[Tensor]:
        """Results for this batch, at `scale` times the clip norms."""
        torch._foreach_copy_([self._mask, *self._tensors], [mask, *tensors])  # pyright: ignore[reportPrivateImportUsage]  # as torch.optim does
        return self._replay(scale)

    def of_rows(self, scale: float, indices: Indices) -> list[Tensor]:
        """Results for these rows of the data, the rest of the batch being padding."""
        assert self._rows is not None
        self._rows.tell(indices)
        return self._replay(scale)

    def _replay(self, scale: float) -> list[Tensor]:
        if scale != self._scale:
            self._scale = math.nan  # should this be interrupted, both are set again
            self._factor.fill_(scale)
            self._seed.fill_(1 / scale)
            self._scale = scale
        self._graph.replay()
        return self._results


class _Rows:
    """Fetches rows of `data` into fixed places, zeros after the last, and marks which are rows.

    The host tells which in pinned memory, from where a copy is made without waiting. A slot is
    written again only after the copy from it: an event marks the end of each half of the slots.
    """

    SLOTS = 8

    def __init__(self, data: tuple[Tensor, ...], mask: Tensor, places: Sequence[Tensor]) -> None:
        self._data, self._mask, self._places = data, mask, places
        # The numbers of the rows, and last how many there are.
        self._told = torch.zeros(self.SLOTS, len(mask) + 1, dtype=torch.int64, pin_memory=True)
        self._slots = list(zip(self._told, self._told.numpy(), strict=True))
        self._wanted = torch.zeros(len(mask) + 1, dtype=torch.int64, device=mask.device)
        self._numbers = torch.arange(len(mask), device=mask.device)
        self._halves = [torch.cuda.Event() for _ in range(2)]
        self._next = 0

    def tell(self, indices: Indices) -> None:
        half, at = divmod(self._next, self.SLOTS // 2)
        if at == 0:
            self._halves[half].synchronize()  # long over, unless the host is far ahead
        slot, numbers = self._slots[self._next]
        numbers[: len(indices)] = indices
        numbers[len(indices) : -1] = 0
        numbers[-1] = len(indices)
        self._wanted.copy_(slot, non_blocking=True)
        if at == self.SLOTS // 2 - 1:
            self._halves[half].record()
        self._next = (self._next + 1) % self.SLOTS

    def fetch(self) -> None:
        torch.lt(self._numbers, self._wanted[-1], out=self._mask)
        for source, place in zip(self._data, self._places, strict=True):
            torch.index_select(source, 0, self._wanted[:-1], out=place)
            place.masked_fill_(~self._mask.view(-1, *[1] * (place.dim() - 1)), 0)


class Mailbox:
    """Where a GPU says, from the middle of its work, whether something held.

    It counts on the device how often it was told, and what; the count arrives in pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros(1, dtype=torch.float64, device=device)
        self.slot = torch.zeros(1, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._arrived, self._expected = self.slot.numpy(), 0
        self.address = next(_addresses)
        _mailboxes[self.address] = self

    def clear(self) -> None:
        """Forget what was told."""
        if self._is_waiting():  # the work was interrupted: what is on its way must arrive first
            torch.cuda.current_stream().synchronize()
        if self._expected:
            self.count.zero_()
            self._arrived[0] = self._expected = 0

    def expect(self) -> None:
        """Work that tells something follows."""
        self._expected += 1

    def all_held(self) -> bool:
        """Whether all held that was told, when it is all there."""
        while self._is_waiting():
            is_over = torch.cuda.current_stream().query()
            if is_over and self._is_waiting():
                raise RuntimeError("the device ended its work without telling what it should.")
            time.sleep(_POLL)
        return bool(self._arrived[0] < _FAILED)

    def _is_waiting(self) -> bool:
        return self._arrived[0] % _FAILED < self._expected


@contextmanager
def rehearsal() -> Iterator[None]:
    """Inside, work runs to be compiled and settled: what it tells does not arrive."""
    _rehearsals.append(None)
    try:
        yield
    finally:
        _rehearsals.pop()


def tell(value: Tensor, held: Tensor, mailbox: Mailbox) -> Tensor:
    """`value`; whatever uses it runs after `held`, true or false, was sent to the mailbox."""
    return _tell(value, held, mailbox.address)


@torch.library.custom_op("tacit::tell", mutates_args=())
def _tell(value: Tensor, held: Tensor, address: int) -> Tensor:
    mailbox = _mailboxes[address]
    if _rehearsals:
        return value.clone()
    mailbox.count.add_((~held).to(torch.float64) * _FAILED + 1.0)
    mailbox.slot.copy_(mailbox.count, non_blocking=True)
    return value.clone()


@_tell.register_fake
def _(value: Tensor, held: Tensor, address: int) -> Tensor:  # the signature is the schema
    return torch.empty_like(value)


_rehearsals: list[None] = []
_addresses = itertools.count()
_mailboxes: WeakValueDictionary[int, Mailbox] = WeakValueDictionary()
_FAILED = 2.0**24  # more than a lot has parts; float64 counts as many of these exactly
_POLL = 5e-5  # seconds


def _dense(tensor: Tensor) -> Tensor:
    """Without gaps, which the compiler leaves where it pads matrix products."""
    return tensor if is_dense(tensor) else tensor.contiguous()


def _recorded(run: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """`run` as a graph, and its results; run before, to settle what must not be recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), rehearsal():
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as those of a data loader, may go on with their own launches.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()
    return graph, results
