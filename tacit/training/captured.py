"""A step recorded as a CUDA graph: one launch, whatever it holds.

Its inputs lie in fixed places. They are filled by copying a batch that was fetched, or, where the
records lie on the GPU, by the graph itself from the numbers of the rows: then only these leave the
host. In return, a graph may tell the host a number while it goes on.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tacit.training.records import Indices

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
            return step(self._seed, [self._factor, self._mask, *self._tensors])

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
    """Where a number arrives that a GPU sends from the middle of its work."""

    def __init__(self) -> None:
        self.slot = torch.zeros(1, pin_memory=torch.cuda.is_available())
        self._number, self.address = self.slot.numpy(), next(_addresses)
        _mailboxes[self.address] = self

    def clear(self) -> None:
        """Before the work that sends the next number."""
        self._number[0] = _NOTHING

    def read(self) -> float:
        """The number, when it is there."""
        while self._number[0] == _NOTHING:
            is_over = torch.cuda.current_stream().query()
            if is_over and self._number[0] == _NOTHING:
                raise RuntimeError("the device ended its work without telling what it should.")
            time.sleep(_POLL)
        return float(self._number[0])


def tell(value: Tensor, told: Tensor, mailbox: Mailbox) -> Tensor:
    """`value`; whatever uses it runs after `told` was sent to the mailbox."""
    return _tell(value, told.to(torch.float32).reshape(1), mailbox.address)


@torch.library.custom_op("tacit::tell", mutates_args=())
def _tell(value: Tensor, told: Tensor, address: int) -> Tensor:
    _mailboxes[address].slot.copy_(told, non_blocking=True)
    return value.clone()


@_tell.register_fake
def _(value: Tensor, told: Tensor, address: int) -> Tensor:  # noqa: ARG001  # the signature is the schema
    return torch.empty_like(value)


_addresses = itertools.count()
_mailboxes: WeakValueDictionary[int, Mailbox] = WeakValueDictionary()
_NOTHING = -1.0
_POLL = 5e-5  # seconds


def _recorded(run: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """`run` as a graph, and its results; run before, to settle what must not be recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as those of a data loader, may go on with their own launches.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()
    return graph, results
