"""A process that is a copy of this one, and how the two are kept from influencing each other.

A forked process has its own memory, but it shares files, connections and some memory with the
process that it was copied from. Most functions here are called in the copy, to end the sharing.
"""

import ctypes
import mmap
import os
import socket
import stat
import warnings
from collections.abc import Callable
from io import BufferedIOBase
from os import _exit as leave  # without anything that the program left to be done at exit
from pathlib import Path

__all__ = ["leave"]
_MAP_FIXED = 0x10  # of Linux, on every processor; the standard library does not name it
_DEVICES = ("/dev/nvidia", "/dev/dri", "/dev/kfd")  # memory of a GPU, which copies cannot use
_OPEN_FILES = Path("/proc/self/fd")
_MAPS = Path("/proc/self/maps")
_OPENMP = ("libgomp", "libomp", "libiomp")  # of GCC, LLVM and Intel


def fork() -> int:
    """Copy this process; return 0 in the copy, and its number here."""
    with warnings.catch_warnings():
        # Other threads do not exist in the child, which waits for none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def start(compute: Callable[[], bytes], *, nowhere: int) -> tuple[int, int]:
    """Compute something in a copy of this process; return its number and a pipe for the result.

    The copy has no other connections (see `close_connections`).
    """
    source, sink = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            close_connections(keep=sink, nowhere=nowhere)
            reopen_files()
            with os.fdopen(sink, "wb") as stream:
                stream.write(compute())
        finally:
            leave(0)
    os.close(sink)
    return pid, source


def start_server(serve: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
    """Run `serve` in a copy of this process; return its number and a connection to it."""
    here, there = socket.socketpair()
    pid = fork()
    if pid == 0:
        try:
            here.close()
            serve(there)
        finally:
            leave(0)
    there.close()
    return pid, here


def finish(pid: int, source: int) -> bytes:
    """Return what a process that `start` began has computed; nothing if it ended before."""
    with os.fdopen(source, "rb") as stream:
        answer = stream.read()
    os.waitpid(pid, 0)
    return answer


def send(to: BufferedIOBase, message: bytes) -> None:
    """Write a message with its length."""
    to.write(len(message).to_bytes(8, "big") + message)
    to.flush()


def receive(source: BufferedIOBase) -> bytes:
    """Read one message; it is empty if the sender has ended."""
    size = source.read(8)
    return source.read(int.from_bytes(size, "big"))


def silence() -> int:
    """Drop what this process prints, let it read nothing, and return the file that does both."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    return nowhere


def use_one_thread() -> None:
    """Let OpenMP compute everything in the calling thread, however many threads are asked for.

    The threads of the other process do not exist in a copy of it. A library that counts on them,
    as torch does after `torch.set_num_threads(2)`, would wait for them for ever.
    """
    if not _MAPS.exists():
        return
    fields = (line.split(maxsplit=5) for line in _MAPS.read_text("utf-8", "replace").splitlines())
    for file in {field[5] for field in fields if len(field) == 6}:
        if Path(file).name.startswith(_OPENMP):
            library = ctypes.CDLL(file)
            library.omp_set_max_active_levels(0)  # no region of a program is run in parallel
            library.omp_set_num_threads(1)


def forbid_writing_files() -> None:
    """Make writes into files fail in this process and its children, pipes and sockets apart."""
    import resource  # POSIX has it, as it has fork

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def close_connections(*, keep: int, nowhere: int) -> None:
    """Replace sockets, pipes and the like by the empty file `nowhere`; leave the one in `keep`.

    Two processes that read from one connection take each other's messages.
    """
    for number in _numbers():
        kind = os.fstat(number).st_mode
        is_held = stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISCHR(kind)
        if not is_held and number != keep:
            os.dup2(nowhere, number)


def _numbers() -> list[int]:
    """Return the numbers of open files and connections, where the system lists them (Linux)."""
    found = [int(entry) for entry in os.listdir(_OPEN_FILES)] if _OPEN_FILES.exists() else []
    return [number for number in found if _is_open(number)]  # the list itself was one of them


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def shared_memory() -> list[tuple[int, int]]:
    """Return where memory begins and ends that others see and this process may write (Linux).

    That includes memory which it may not write yet, but could make writable.
    """
    found: list[tuple[int, int]] = []
    place: tuple[int, int] | None = None  # of shared memory that was not found to be writable yet
    for line in Path("/proc/self/smaps").read_text("utf-8", "replace").splitlines():
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):  # a new region: its place, rights and file
            begin, end = (int(part, 16) for part in first.split("-"))
            is_shared = rest[0][3] == "s" and not "".join(rest[4:]).startswith(_DEVICES)
            place = (begin, end) if is_shared else None
            is_writable = rest[0][1] == "w"
        else:
            is_writable = first == "VmFlags:" and "mw" in line.split()
        if place and is_writable:
            found.append(place)
            place = None
    return found


def copy_shared_memory() -> None:
    """Replace memory that this process shares with others, and may write, by a copy of its own."""
    if not Path("/proc/self/smaps").exists():
        return
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    for start, end in shared_memory():
        held = ctypes.string_at(start, end - start)
        found = library.mmap(start, end - start, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if found != start:
            raise OSError(ctypes.get_errno(), "shared memory cannot be copied")
        ctypes.memmove(start, held, end - start)


def reopen_files(*, is_for_reading: bool = False) -> None:
    """Give this process its own place in every open file; close files that cannot be reopened.

    With `is_for_reading`, it can no longer write into any of them.
    """
    import fcntl  # POSIX has it, as it has fork

    for number in _numbers():
        if not stat.S_ISREG(os.fstat(number).st_mode):
            continue
        try:
            how = fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
            how = os.O_RDONLY if is_for_reading else how
            again = os.open(_OPEN_FILES / str(number), how)
        except OSError:
            os.close(number)
            continue
        os.lseek(again, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(again, number)
        os.close(again)
