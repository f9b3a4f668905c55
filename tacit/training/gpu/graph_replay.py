"""A step recorded as a CUDA graph and replayed: one launch, whatever the step computes.

The inputs of a graph are at fixed addresses. The host copies a fetched batch there. If the records
are on the GPU, the graph reads the rows itself, and the host sends only the row numbers. While a
graph runs it can report to the host whether all gradients were finite.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tacit.training.clip import call_each, is_dense

Result = TypeVar("Result")
Step = Callable[[Tensor, list[Tensor]], list[Tensor]]
"""(seed of the backward, other inputs) -> results of the backward."""


class Recordings:
    """The memory that the recordings of one computation for several numbers of rows share.

    They are replayed one after the other, so they can use the same temporary memory, and each puts
    its results where the first one did.
    """

    def __init__(self) -> None:
        self.pool: Any = None  # of the first recording
        self.results: list[Tensor] | None = None  # the tensors that every replay fills


class ReplayedStep:
    """A step that is recorded as a CUDA graph on construction and replayed by each call.

    With `data`, the records on the GPU, use `of_rows`; otherwise call the object with a batch. The
    results are in memory that the next call overwrites. The graph reads parameters at fixed
    addresses, so it uses the values that an update in place has written there.
    """

    def __init__(
        self,
        step: Step,
        mask: Tensor,
        tensors: Sequence[Tensor],
        data: tuple[Tensor, ...] | None = None,
        *,
        recordings: Recordings | None = None,
    ) -> None:
        recordings = Recordings() if recordings is None else recordings
        self._seed, self._factor = (torch.ones((), device=mask.device) for _ in range(2))
        self._scale = 1.0
        self._mask = mask.clone()
        self._tensors = [t.clone() for t in tensors]
        self._rows = None if data is None else _RowReader(data, self._mask, self._tensors)

        def run() -> list[Tensor]:
            if self._rows is not None:
                self._rows.fetch()
            results = step(self._seed, [self._factor, self._mask, *self._tensors])
            if recordings.results is not None:
                call_each("copy_", recordings.results, results)
                return recordings.results
            # The compiler leaves gaps to align matrix products.
            return [t if is_dense(t) else t.contiguous() for t in results]

        self._graph, self._results = _recorded(run, recordings.pool)
        if recordings.results is None:
            recordings.pool, recordings.results = self._graph.pool(), self._results
        self._run, self._pool = run, recordings.pool
        self._followed: tuple[object, torch.cuda.CUDAGraph | None] | None = None

    def __call__(self, scale: float, mask: Tensor, tensors: list[Tensor]) -> list[Tensor]:
        """Return the step's results for this batch, at `scale` times the rule's clip norms."""
        call_each("copy_", [self._mask, *self._tensors], [mask, *tensors])
        self._set_scale(scale)
        self.replay()
        return self._results

    def of_rows(self, scale: float, indices: NDArray[np.int64]) -> list[Tensor]:
        """Return the step's results for these rows of the data, at `scale` times the clip norms.

        The batch has a fixed size; entries after these rows are padding.
        """
        self.prepare(scale, indices)
        self.replay()
        return self._results

    def prepare(self, scale: float, indices: NDArray[np.int64]) -> list[Tensor]:
        """Prepare a replay for these rows; return the tensors that `replay` will fill."""
        assert self._rows is not None
        self._rows.send(indices)
        self._set_scale(scale)
        return self._results

    def replay(self) -> None:
        """Compute the results for what was prepared last."""
        self._graph.replay()

    def replay_with(self, launches: object, launch: Callable[[], None]) -> None:
        """Do `replay` and what `launch` does, as one CUDA graph if that can be recorded.

        It is recorded again if `launches`, which stands for the launches made by `launch`, is
        another object than the last time.
        """
        if self._followed is None or self._followed[0] is not launches:
            self._followed = launches, self._recorded_with(launch)
        graph = self._followed[1]
        if graph is not None:
            graph.replay()
            return
        self.replay()
        launch()

    def _recorded_with(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        def both() -> None:
            self._run()
            launch()

        try:
            return captured(both, self._pool)[0]
        except RuntimeError:  # for example out of memory; nothing was computed
            return None

    def _set_scale(self, scale: float) -> None:
        if scale != self._scale:
            self._scale = math.nan  # if this is interrupted, the next call sets both again
            self._factor.fill_(scale)
            self._seed.fill_(1 / scale)
            self._scale = scale


class _RowReader:
    """Copies rows of `data` into the tensors `targets`, which are at fixed addresses.

    `mask` marks the rows; the entries after them are zero. The host writes the row numbers into a
    slot of pinned memory, from which the GPU copies them without making the host wait. A slot is
    written again only after its copy has ended; an event marks the end of each half of the slots.
    """

    SLOTS = 8

    def __init__(self, data: tuple[Tensor, ...], mask: Tensor, targets: Sequence[Tensor]) -> None:
        self._data = data
        self._mask = mask
        self._targets = targets
        # Each slot holds the row numbers, then how many there are.
        pinned = torch.zeros(self.SLOTS, len(mask) + 1, dtype=torch.int64, pin_memory=True)
        self._slots = list(zip(pinned, pinned.numpy(), strict=True))
        self._wanted = torch.zeros(len(mask) + 1, dtype=torch.int64, device=mask.device)
        self._numbers = torch.arange(len(mask), device=mask.device)
        self._halves = [torch.cuda.Event() for _ in range(2)]
        self._next = 0
        self._kernel = _kernel_for([*data, *targets])

    def send(self, indices: NDArray[np.int64]) -> None:
        """Send the row numbers of the next replay to the GPU."""
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
        """Copy the rows that `send` named into `targets`. These copies are part of the graph."""
        if self._kernel is not None:
            marks = itertools.chain([self._mask], itertools.repeat(None))
            for source, target, mask in zip(self._data, self._targets, marks, strict=False):
                self._kernel(source, self._wanted, target, mask)
            return
        torch.lt(self._numbers, self._wanted[-1], out=self._mask)
        for source, target in zip(self._data, self._targets, strict=True):
            torch.index_select(source, 0, self._wanted[:-1], out=target)
            target.masked_fill_(~self._mask.view(-1, *[1] * (target.dim() - 1)), 0)


def _kernel_for(tensors: Sequence[Tensor]) -> Callable[..., None] | None:
    """Return the kernel that copies rows of such tensors; None without Triton, or if it cannot."""
    from tacit.training.gpu.available import has_triton

    if not has_triton():
        return None
    from tacit.training.gpu import take_rows

    return take_rows.take_rows if all(map(take_rows.takes, tensors)) else None


class FiniteFlag:
    """A flag by which a GPU reports, while it works, whether all gradients were finite.

    The device counts the reports and the failures among them in one number, which is copied to
    pinned memory of the host after each report.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros(1, dtype=torch.float64, device=device)
        self.pinned = torch.zeros(1, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._arrived = self.pinned.numpy()
        self._expected = 0
        self.number = next(_numbers)
        _flags[self.number] = self

    def clear(self) -> None:
        """Forget all reports, after waiting for those of an interrupted lot."""
        if not self._expected:
            return
        if self._is_waiting():  # the last lot was interrupted; its reports must arrive first
            torch.cuda.current_stream().synchronize()
        self.count.zero_()
        self._arrived[0] = self._expected = 0

    def expect(self) -> None:
        """Count one more report that `all_finite` must wait for."""
        self._expected += 1

    def all_finite(self) -> bool:
        """Wait for every expected report, then return True if all gradients were finite."""
        if not self._expected:
            return True
        while self._is_waiting():
            is_over = torch.cuda.current_stream().query()
            if is_over and self._is_waiting():
                raise RuntimeError(
                    "internal error: the CUDA stream finished without reporting the "
                    "finite-gradient flag."
                )
            time.sleep(_POLL)
        return bool(self._arrived[0] < _FAILED)

    def _is_waiting(self) -> bool:
        return self._arrived[0] % _FAILED < self._expected


@contextmanager
def warm_up() -> Iterator[None]:
    """Return a context for warm-up calls, in which `report` does not change any `FiniteFlag`."""
    _warm_ups.append(None)
    try:
        yield
    finally:
        _warm_ups.pop()


def captured(run: Callable[[], Result], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Record the kernel launches of `run` as a CUDA graph without executing them.

    `pool` is the memory of another graph, if both may use the same memory. Return the graph, and
    the result of `run`, whose tensors each replay fills.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as those of a data loader, may launch work of their own meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return graph, result


def report(value: Tensor, is_finite: Tensor, flag: FiniteFlag) -> Tensor:
    """Report `is_finite`, a boolean tensor, through `flag` to the host; return a copy of `value`.

    Computations that use the copy start after the report was sent, so the host gets it early.
    """
    return _report(value, is_finite, flag.number)


@torch.library.custom_op("tacit::report_finite", mutates_args=())
def _report(value: Tensor, is_finite: Tensor, number: int) -> Tensor:
    flag = _flags[number]
    if not _warm_ups:
        flag.count.add_((~is_finite).to(torch.float64) * _FAILED + 1.0)
        flag.pinned.copy_(flag.count, non_blocking=True)
    return value.clone()


@_report.register_fake
def _(value: Tensor, is_finite: Tensor, number: int) -> Tensor:  # the signature is the schema
    return torch.empty_like(value)


_warm_ups: list[None] = []
_numbers = itertools.count()
_flags: WeakValueDictionary[int, FiniteFlag] = WeakValueDictionary()
_FAILED = 2.0**24  # one failure; more than a lot has microbatches, and float64 counts both exactly
_POLL = 5e-5  # seconds


def _recorded(
    run: Callable[[], list[Tensor]], pool: Any
) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Return `run` recorded as a CUDA graph, and the result tensors that each replay fills.

    Before the recording `run` is called, because its first calls compile and allocate: twice, or
    once if it was recorded for another number of rows before, which left its memory in `pool`.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), warm_up():
        for _ in range(2 if pool is None else 1):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    return captured(run, pool)
