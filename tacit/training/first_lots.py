"""What a program sets by the first lots that it sees, and keeps for good.

A program may compute a scale from the first lot and use it ever after. If it keeps the scale where
Python cannot put it back (an attribute of a `ScriptModule`, a variable of a generator, the
environment, memory of a C library), all runs in one process use the same scale, and none of them
shows where it came from. `FirstLots` keeps a copy of the process, made before the program has seen
a record, and runs the program in copies of that copy: each of them begins with an untouched one.

Files outlast processes. If a copy reads a file that was written after the program first ran, such
as a scale that was saved by the first lot, it is moved away and the lots are run again.
"""

import contextlib
import functools
import marshal
import os
import pickle
import select
import signal
import socket
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.training.forked_process import (
    close_connections,
    copy_shared_memory,
    finish,
    receive,
    send,
    shared_memory,
    silence,
    start,
    start_server,
    use_one_thread,
)
from tacit.training.program_state import ProgramState
from tacit.training.records import Indices

_MOST_SHARED = 2**30  # bytes of shared memory that are copied
_AWAY = ".moved-by-tacit"  # what is appended to the name of a file that is moved away


Losses = Callable[[Indices, int], tuple[Tensor, Any]]
"""A program: returns the losses (rows, views) of a lot by a seed, and something else."""


class _LotLosses(NamedTuple):
    """The losses of a lot in a copy, None if they cannot be repeated, and files that it opened."""

    losses: Tensor | None
    files: set[str]


class FirstLots:
    """Runs lots as the first ones of a program, in copies of this process as it is now.

    A copy may write files, as the program does here, but it has no connections, no GPU and one
    thread. There is no result if the program needs any of them, or takes too long. `roots` are the
    functions and objects of which the program consists.
    """

    def __init__(self, losses: Losses, roots: Sequence[Any]) -> None:
        self._began = time.time_ns()
        pid, here = start_server(lambda there: _serve(losses, roots, there))
        self._socket, self._stream = here, here.makefile("rwb")
        self._end = weakref.finalize(self, _end, here, pid, os.getpid())

    def __call__(
        self, first: Sequence[Indices], lot: Indices, seed: int, *, seconds: float
    ) -> list[Tensor] | None:
        """Return the losses of `lot` after each series of lots in `first`, or None. Private.

        There are none if they differ when the lot is run again: then the program has other memory,
        or random numbers that cannot be repeated.
        """
        run = functools.partial(self._run, lot=lot, seed=seed, seconds=seconds)
        found = [run(lots) for lots in first]
        written = sorted({file for one in found for file in one.files if self._is_new(file)})
        if written:
            found = []
            with contextlib.suppress(OSError), _moved_away(written) as forget:
                for lots in first:
                    found.append(run(lots))
                    forget()
        losses = [one.losses for one in found if one.losses is not None]
        return losses if len(losses) == len(first) else None

    def _is_new(self, file: str) -> bool:
        """Return whether a file was written after the program was first run."""
        try:
            found = os.stat(file)
        except (OSError, ValueError):
            return False
        return stat.S_ISREG(found.st_mode) and found.st_ctime_ns > self._began

    def _run(self, first: Indices, lot: Indices, seed: int, seconds: float) -> _LotLosses:
        answer = b""
        try:
            send(self._stream, pickle.dumps((first, lot, seed)))
            if select.select([self._socket], [], [], seconds)[0]:
                answer = receive(self._stream)
            else:
                self._end()
        except (OSError, ValueError):  # it has ended
            pass
        if not answer:
            return _LotLosses(None, set())
        numbers, files = marshal.loads(answer)
        once, again = torch.frombuffer(bytearray(numbers), dtype=torch.float64).chunk(2)
        is_repeatable = torch.equal(once.nan_to_num(torch.inf), again.nan_to_num(torch.inf))
        return _LotLosses(once.view(len(lot), -1) if is_repeatable else None, set(files))


@contextlib.contextmanager
def _moved_away(files: Iterable[str]) -> Iterator[Callable[[], None]]:
    """Give files other names inside the block, and a function that removes new ones in their place.

    A file that is renamed stays the same for a program that has it open.
    """

    def forget() -> None:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)

    moved: list[str] = []
    try:
        for file in files:
            os.rename(file, file + _AWAY)
            moved.append(file)
        yield forget
    finally:
        for file in moved:
            os.replace(file + _AWAY, file)


def can_run_first_lots(device: torch.device) -> bool:
    """Return whether copies of this process can run a program that uses `device`."""
    if sys.platform != "linux" or device.type != "cpu":  # elsewhere copies cannot be kept apart
        return False
    return sum(end - begin for begin, end in shared_memory()) <= _MOST_SHARED


def _serve(losses: Losses, roots: Sequence[Any], connection: socket.socket) -> None:
    """Answer requests until the other process closes its end."""
    os.setpgid(0, 0)  # so that it can be ended together with its own copies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process handles it
    nowhere = silence()
    close_connections(keep=connection.fileno(), nowhere=nowhere)
    copy_shared_memory()
    torch.set_num_threads(1)
    use_one_thread()
    with connection.makefile("rwb") as stream:
        while message := receive(stream):
            compute = functools.partial(_losses_after, losses, roots, *pickle.loads(message))
            send(stream, finish(*start(compute, nowhere=nowhere)))


def _losses_after(
    losses: Losses, roots: Sequence[Any], first: Indices, lot: Indices, seed: int
) -> bytes:
    """Run the lots in `first`, then `lot` twice; return its losses. Private.

    Random generators start anew for `lot`: what was drawn before may depend on records. The files
    that were opened are returned as well.
    """
    files: set[str] = set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "sqlite3.connect") and not isinstance(arguments[0], int):
            with contextlib.suppress(TypeError):
                files.add(os.path.abspath(os.fsdecode(arguments[0])))

    sys.addaudithook(note)  # in this copy alone
    before = ProgramState(*roots)
    for number, indices in enumerate(first):
        losses(indices, seed + 1 + number)
    after, found = ProgramState(*roots), []
    for _ in range(2):
        after.restore()
        before.restore_generators()
        found.append(losses(lot, seed)[0])
    return marshal.dumps((torch.stack(found).numpy().tobytes(), sorted(files)))


def _end(connection: socket.socket, pid: int, owner: int) -> None:
    """End the copies; a process that was forked later does not."""
    if os.getpid() != owner:
        return
    connection.close()
    for kill in (os.kill, os.killpg):  # it may have no group yet
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    os.waitpid(pid, 0)
