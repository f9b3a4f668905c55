"""The user's Python code on one record, in a process of its own: for `isolation="strict"`.

A data set, a `collate_fn` or an `augment` may keep what it has seen in places that no list covers:
a buffer, an attribute of somebody's module, the environment. So the code runs on each record in a
process that has seen no other record and that ends afterwards. `RecordProcesses` forks one process,
the parent, before the first record is read. For every record the parent forks a child. The child
computes the tensors of its record, writes their bytes into a pipe and exits. The parent and the
process of the run receive bytes, and run none of the user's code on them.

What is sent back has a schema: the nesting of the batch, shapes, types, and plain values that are
no tensors. It is part of the program's declared format and must be the same for every record.

A process ends with its own memory, but files and shared memory outlast it. Children therefore get
copies of the memory that the run shares with other processes, and places of their own in the files
that it has open. They have no connections, what they print is dropped, and a filter of system calls
lets them change nothing else (`sealed_process`). Outside of this argument is what the system itself
counts and shows: clocks, process numbers, times at which files were read.
"""

import contextlib
import gc
import marshal
import os
import select
import signal
import socket
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from io import BufferedIOBase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.errors import IncompatibleModel, ProgramError
from tacit.training.forked_process import (
    close_connections,
    copy_shared_memory,
    finish,
    forbid_writing_files,
    receive,
    reopen_files,
    send,
    silence,
    start,
    start_server,
    use_one_thread,
)
from tacit.training.key import reseed
from tacit.training.program_state import ProgramState
from tacit.training.sealed_process import seal
from tacit.training.tree import Batch
from tacit.training.withheld_errors import ErrorGuard

Schema = tuple[Any, ...]  # Any: nested tuples of plain values, see `schema_of`
_READ, _QUIT, _READY = b"r", b"q", b"s"
_NO_RECORD = -1
_SECONDS = 5.0  # between two looks at whether the process of the run still exists
_CPU = torch.device("cpu")
_PLAIN = (type(None), bool, int, float, complex, str)
_FOREIGN = (
    "isolation='strict' takes batches of tensors, numbers and text in tuples, lists and mappings, "
    "but collate_fn or augment gave something else. Change it, or use isolation='checked'."
)
_ON_GPU = (
    "isolation='strict' runs the data set, collate_fn and augment in processes that cannot use the "
    "GPU, but one of them does. Compute on the CPU there, or use isolation='checked'."
)
_UNSEALED = (
    "isolation='strict' reads each record in a process that can change nothing outside itself, "
    "which needs Linux with filters of system calls (seccomp) on x86_64 or aarch64. Give a tensor "
    "or arrays without collate_fn and augment, or use isolation='checked'."
)
_DIED = (
    "the process that reads a record ended unexpectedly, often because memory ran out. Nothing of "
    "this step was released."
)


class Example(NamedTuple):
    """One record as a batch of one row: its schema, and its tensors that have rows. Private."""

    schema: Schema
    tensors: list[Tensor]

    def __repr__(self) -> str:
        return "Example(private)"


class RecordProcesses:
    """Computes `read(index)` in a process of its own for every record.

    Parameters
    ----------
    read
        The user's program from the number of a record to a batch of one row.
    program
        Functions and objects whose random generators are seeded anew for every record. Generators
        that are not found start from the same state for every record.
    guard
        Decides whether errors are shown with their text.
    processes
        Number of records that are read at the same time.
    """

    def __init__(
        self,
        read: Callable[[int], Batch],
        program: Sequence[Any],
        *,
        guard: ErrorGuard,
        processes: int = 1,
    ) -> None:
        if not hasattr(os, "fork"):
            raise IncompatibleModel(_UNSEALED)
        owner = os.getpid()

        def serve(there: socket.socket) -> None:
            _Parent(read, program, guard, there, max(1, processes)).serve(owner)

        pid, self._socket = start_server(serve)
        self._end = weakref.finalize(self, _end, self._socket, pid, owner)
        if self._socket.recv(1) != _READY:
            raise IncompatibleModel(_UNSEALED)

    def __call__(self, requests: Sequence[tuple[int, int]]) -> list[Example]:
        """Return the examples of records, each given by its number and a seed. Private."""
        if not requests:
            return []
        # New pipes for every call: one that is interrupted leaves no answers to the next.
        (asked, ask), (answers, answer) = os.pipe(), os.pipe()
        with os.fdopen(ask, "wb") as question, os.fdopen(answers, "rb") as stream:
            try:
                socket.send_fds(self._socket, [_READ], [asked, answer])
            except OSError:
                raise ProgramError(_DIED) from None
            finally:
                os.close(asked)
                os.close(answer)
            question.write(marshal.dumps([(int(index), int(seed)) for index, seed in requests]))
            question.close()
            return [_example(receive(stream)) for _ in requests]

    def start_one(self) -> None:
        """Start a process that reads no record, and wait for its end: to measure the time."""
        self([(_NO_RECORD, 0)])


def schema_of(batch: Batch, tensors: list[Tensor]) -> Schema:
    """Return the schema of a batch, and append its tensors that have rows to `tensors`.

    >>> schema_of({"x": torch.zeros(1, 2), "task": "a"}, [])[0]
    'mapping'
    """
    if isinstance(batch, Tensor):
        dtype = str(batch.dtype).removeprefix("torch.")
        if batch.layout != torch.strided:
            raise IncompatibleModel(_FOREIGN)
        if not batch.dim():
            return "number", dtype, batch.item()
        tensors.append(batch)
        return "rows", dtype, tuple(batch.shape)
    if type(batch) in _PLAIN:
        return "value", batch
    kind = f"{type(batch).__module__}:{type(batch).__qualname__}"
    if isinstance(batch, Mapping):
        if not all(type(name) in _PLAIN for name in batch):
            raise IncompatibleModel(_FOREIGN)
        items = tuple((name, schema_of(value, tensors)) for name, value in batch.items())
        return "mapping", kind, items
    if isinstance(batch, tuple | list | deque):
        is_named = hasattr(batch, "_fields")
        parts = tuple(schema_of(value, tensors) for value in batch)
        return "named" if is_named else "sequence", kind, parts
    raise IncompatibleModel(_FOREIGN)


def rebuilt(schema: Schema, tensors: Iterator[Tensor]) -> Batch:
    """Return a batch with this schema and these tensors; what objects held besides is left out."""
    form, *rest = schema
    if form == "rows":
        return next(tensors)
    if form == "number":
        return torch.tensor(rest[1], dtype=getattr(torch, rest[0]))
    if form == "value":
        return rest[0]
    kind = _class_named(rest[0])
    if form == "mapping":
        items = {name: rebuilt(part, tensors) for name, part in rest[1]}
        if kind is dict or not issubclass(kind, MutableMapping):
            return kind(items)
        empty = kind()  # some take other arguments first
        empty.update(items)
        return empty
    parts = [rebuilt(part, tensors) for part in rest[1]]
    return kind(*parts) if form == "named" else kind(parts)


def _class_named(name: str) -> Any:  # Any: a class
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise IncompatibleModel(_FOREIGN)
    return found


class _Parent:
    """Forks a child for every request. Runs in a process that has seen no record."""

    def __init__(
        self,
        read: Callable[[int], Batch],
        program: Sequence[Any],
        guard: ErrorGuard,
        requests: socket.socket,
        processes: int,
    ) -> None:
        self._read, self._guard = read, guard
        self._socket, self._processes = requests, processes
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the run handles it
        torch.set_num_threads(1)
        use_one_thread()
        self._nowhere = silence()
        forbid_writing_files()
        close_connections(keep=requests.fileno(), nowhere=self._nowhere)
        copy_shared_memory()
        reopen_files(is_for_reading=True)
        seal()
        requests.send(_READY)
        self._state = ProgramState(*program)
        gc.freeze()

    def serve(self, owner: int) -> None:
        """Answer calls until the process of the run ends or asks for the end."""
        while os.getppid() == owner:
            if not select.select([self._socket], [], [], _SECONDS)[0]:
                continue
            message, pipes, _, _ = socket.recv_fds(self._socket, 1, 2)
            if message != _READ:
                return
            # A call that was interrupted has closed its pipes.
            with (
                contextlib.suppress(OSError, EOFError, ValueError, TypeError),
                os.fdopen(pipes[0], "rb") as question,
                os.fdopen(pipes[1], "wb") as answers,
            ):
                self._answer_all(marshal.loads(question.read()), answers)

    def _answer_all(self, requests: list[tuple[int, int]], answers: BufferedIOBase) -> None:
        running: deque[tuple[int, int]] = deque()
        try:
            for index, seed in requests:
                if len(running) == self._processes:
                    send(answers, finish(*running.popleft()))
                running.append(self._start(index, seed))
            while running:
                send(answers, finish(*running.popleft()))
        finally:
            for child in running:
                finish(*child)

    def _start(self, index: int, seed: int) -> tuple[int, int]:
        """Fork a child for one record; return its process and the pipe that it writes into."""
        return start(lambda: self._answer(index, seed), nowhere=self._nowhere)

    def _answer(self, index: int, seed: int) -> bytes:
        tensors: list[Tensor] = []
        try:
            with self._guard:
                if index == _NO_RECORD:
                    return marshal.dumps(("made", ("value", None), []))
                reseed(seed, _CPU)
                self._state.seed_generators(seed)
                schema = schema_of(self._on_cpu(index), tensors)
                return marshal.dumps(("made", schema, [_bytes(t) for t in tensors]))
        except BaseException as error:  # whatever it is, it ends with this process
            return marshal.dumps(("raised", type(error).__name__, str(error)))

    def _on_cpu(self, index: int) -> Batch:
        try:
            return self._read(index)
        except RuntimeError as error:
            if "re-initialize CUDA" in str(error):
                raise IncompatibleModel(_ON_GPU) from None
            raise


def _example(answer: bytes) -> Example:
    """Return an example from the bytes of a child; raise what the child has raised."""
    if not answer:
        raise ProgramError(_DIED)
    try:
        outcome, first, second = marshal.loads(answer)
    except (EOFError, ValueError, TypeError):  # it ended while it wrote
        raise ProgramError(_DIED) from None
    if outcome == "raised":
        kinds = {"IncompatibleModel": IncompatibleModel, "MemoryError": MemoryError}
        raise kinds.get(first, ProgramError)(second)
    tensors: list[Tensor] = []
    _fill(first, iter(second), tensors)
    return Example(first, tensors)


def _fill(schema: Schema, parts: Iterator[bytes], tensors: list[Tensor]) -> None:
    """Append the tensors of a schema, in its order, from their bytes."""
    form, *rest = schema
    if form == "rows":
        dtype, shape = getattr(torch, rest[0]), rest[1]
        data = bytearray(next(parts))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensors.append(flat.view(shape))
    elif form in ("mapping", "sequence", "named"):
        for part in rest[1]:
            _fill(part[1] if form == "mapping" else part, parts, tensors)


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def _end(connection: socket.socket, pid: int, owner: int) -> None:
    """Ask the parent to end, and wait for it; a process that was forked later does neither."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):  # it has ended before
        connection.send(_QUIT)
    connection.close()
    os.waitpid(pid, 0)
