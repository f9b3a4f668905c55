"""A sealed process reads, but leaves nothing behind: for every way to leave something we know."""

import ctypes
import fcntl
import mmap
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import tacit
from tacit.errors import IncompatibleModel, ProgramError
from tacit.training import record_processes
from tacit.training.forked_process import finish, start
from tacit.training.record_processes import RecordProcesses
from tacit.training.sealed_process import seal
from tacit.training.withheld_errors import ErrorGuard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="filters of Linux")
LIBRARY = ctypes.CDLL(None, use_errno=True)


def system_call(number, *arguments):
    if LIBRARY.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")


def mapped(path):
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:1] = b"x"


def with_flags(flags):
    return lambda folder: os.open(folder / "file", flags)


def send_to(folder):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.sendto(b"x", str(folder / "server"))


WAYS = {
    "a new file": lambda f: (f / "new").write_text("x"),
    "an old file": lambda f: (f / "file").write_text("x"),
    "an old file, appended": lambda f: (f / "file").open("a").close(),
    "a file cut while it is opened": with_flags(os.O_RDONLY | os.O_TRUNC),
    "a file without a name": lambda f: os.open(f, os.O_TMPFILE | os.O_RDWR),
    "a length": lambda f: os.truncate(f / "file", 1),
    "a mapped file": lambda f: mapped(f / "file"),
    "an array in a file": lambda f: np.memmap(f / "file", np.uint8, "r+"),
    "a database": lambda f: sqlite3.connect(f / "base").execute("create table t (a)"),
    "a folder": lambda f: (f / "new").mkdir(),
    "a name": lambda f: (f / "file").rename(f / "other"),
    "a second name": lambda f: os.link(f / "file", f / "other"),
    "the text of a link": lambda f: (f / "link").symlink_to("text"),
    "a missing file": lambda f: (f / "file").unlink(),
    "a missing folder": lambda f: (f / "folder").rmdir(),
    "a mode": lambda f: (f / "file").chmod(0o600),
    "an owner": lambda f: os.chown(f / "file", 0, 0),
    "a time": lambda f: os.utime(f / "file", (1, 1)),
    "an attribute": lambda f: os.setxattr(f / "file", "user.a", b"x"),
    "a named pipe": lambda f: os.mkfifo(f / "pipe"),
    "shared memory by name": lambda _: SharedMemory(create=True, size=8),
    "old shared memory by name": lambda _: os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR),
    "a message to a server": send_to,
    "a connection": lambda _: socket.create_connection(("127.0.0.1", 9)),
    "a server": lambda _: socket.create_server(("127.0.0.1", 0)),
    "memory of system V": lambda _: check(LIBRARY.shmget(0, 8, 0o1600)),
    "a semaphore of system V": lambda _: check(LIBRARY.semget(0, 1, 0o1600)),
    "a queue of system V": lambda _: check(LIBRARY.msgget(0, 0o1600)),
    "a signal": lambda _: os.kill(os.getppid(), signal.SIGCONT),
    "a priority": lambda _: os.setpriority(os.PRIO_PROCESS, os.getppid(), 3),
    "processors": lambda _: os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0)),
    "a limit": lambda _: resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0)),
    "a call that is newer than the filter": lambda _: system_call(437, -100, b"/", None, 0),
    "rings of calls": lambda _: system_call(425, 1, None),
    "another program": lambda f: subprocess.run(["touch", str(f / "new")], check=True),
}


def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "file").write_text("some text")
    (tmp_path / "folder").mkdir()
    return tmp_path


def in_a_sealed_process(action):
    """Return the name of the error that `action` raises in a sealed process, or its result."""

    def compute():
        try:
            seal()
            return str(action()).encode()
        except Exception as error:
            return type(error).__name__.encode()

    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        return finish(*start(compute, nowhere=nowhere)).decode()
    finally:
        os.close(nowhere)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_can_be_left_behind(way, folder):
    before = sorted(map(str, folder.iterdir())), (folder / "file").stat()
    answer = in_a_sealed_process(lambda: WAYS[way](folder))
    assert answer in ("PermissionError", "OSError", "OperationalError", "CalledProcessError")
    after = sorted(map(str, folder.iterdir())), (folder / "file").stat()
    assert before[0] == after[0]
    assert before[1][:-3] == after[1][:-3]  # without the time of the last reading
    assert before[1].st_mtime_ns == after[1].st_mtime_ns


def test_a_lock_has_no_effect(folder):
    def lock():
        with (folder / "file").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_SH)
        return "done"

    with (folder / "file").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert in_a_sealed_process(lock) == "done"


def in_a_thread(action):
    """Return what `action` computes in a thread that Python starts.

    Threads of OpenMP are no test: they never begin in a fork of a process that had them already,
    sealed or not. That is why `tacit` computes in one thread there.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result(timeout=60)


READS = {
    "a file": lambda f: (f / "file").read_text(),
    "a folder": lambda f: len(os.listdir(f)),
    "a mapped file": lambda f: np.memmap(f / "file", np.uint8, "r").sum(),
    "another program": lambda f: subprocess.run(["cat", str(f / "file")], stdout=-1).stdout,
    "a product of matrices": lambda _: float(torch.randn(200, 200).mm(torch.randn(200, 200)).sum()),
    "an import": lambda _: __import__("wave").__name__,
    "a thread": lambda _: in_a_thread(lambda: float(torch.ones(1000).sum())),
}


@pytest.mark.parametrize("way", READS)
def test_reading_and_computing_go_on(way, folder):
    assert not in_a_sealed_process(lambda: READS[way](folder)).endswith("Error")


# In a run -----------------------------------------------------------------------------------------


def a_file_opened_by_name(folder, *, write):
    path = folder / "held"
    np.zeros(6, np.float32).tofile(path)

    def visit(x):
        held = np.memmap(path, np.float32, "r+" if write else "r")
        total = x + torch.from_numpy(np.array(held))
        if write:
            held[:] = total.numpy()
        return total

    return visit


def shared_memory_by_name(name):
    def visit(x):
        memory = SharedMemory(name=name)
        held = np.frombuffer(memory.buf, np.float32)[:6]
        held[:] = total = (x + torch.from_numpy(held.copy())).numpy()
        return torch.from_numpy(total)

    return visit


def a_pipe_that_was_open():
    source, sink = os.pipe()
    os.set_blocking(source, False)

    def visit(x):
        try:
            held = torch.frombuffer(bytearray(os.read(source, 24)), dtype=torch.float32)
        except (OSError, ValueError):
            held = torch.zeros(6)
        os.write(sink, (x + held).numpy().tobytes())
        return x + held

    return visit


def the_answers_of_other_records():
    """Write into every connection that the process has."""

    def visit(x):
        for number in range(3, 64):
            try:
                if number != max(map(int, os.listdir("/proc/self/fd"))):
                    os.write(number, b"\0" * 64)
            except OSError:
                continue
        return x

    return visit


def read_by(visit):
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    return RecordProcesses(lambda i: visit(rows[i].clone())[None], (), guard=ErrorGuard())


def test_memory_that_records_open_by_name_is_refused(tmp_path):
    memory = SharedMemory(create=True, size=24)
    try:
        for visit in (
            shared_memory_by_name(memory.name),
            a_file_opened_by_name(tmp_path, write=True),
        ):
            with pytest.raises(ProgramError, match="PermissionError"):
                read_by(visit)([(0, 0)])
    finally:
        memory.close()
        memory.unlink()


def test_a_file_may_be_read(tmp_path):
    (found,) = read_by(a_file_opened_by_name(tmp_path, write=False))([(0, 0)])
    assert found.tensors[0].shape == (1, 6)


def test_a_pipe_that_was_open_connects_no_records():
    read = read_by(a_pipe_that_was_open())
    assert torch.equal(read([(2, 0)])[0].tensors[0], read([(1, 0), (2, 0)])[1].tensors[0])


def test_a_record_cannot_answer_for_another():
    read = read_by(the_answers_of_other_records())
    plain = read_by(lambda x: x)
    try:
        found = read([(0, 0), (1, 0)])
    except ProgramError:
        return  # it has spoilt its own answer
    assert torch.equal(found[1].tensors[0], plain([(1, 0)])[0].tensors[0])


def test_systems_without_filters_are_refused(monkeypatch):
    def fail():
        raise OSError

    monkeypatch.setattr(record_processes, "seal", fail)
    with pytest.raises(IncompatibleModel, match="seccomp"):
        read_by(lambda x: x)


def test_hooks_of_all_modules_are_no_part_of_a_strict_step():
    held = [None]

    def hook(_, __, output):
        if not isinstance(output, dict):
            return None
        before, held[0] = held[0], {n: v.detach().clone() for n, v in output.items()}
        return output if before is None else {n: v + before[n].sum() for n, v in output.items()}

    def moved(rows):
        torch.manual_seed(0)
        held[0], model = None, torch.nn.Linear(6, 2)
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
        try:
            private = tacit.make_private(
                model, torch.optim.SGD(model.parameters(), lr=0.0), TensorDataset(rows),
                lambda m, b: m(b[0]).square().sum(1), batch_size=len(rows), steps=2, seed=0,
                clip_norm=1.0, noise_multiplier=0.0, isolation="strict",
            )  # fmt: skip
            for lot in private:
                private.step(lot)
        finally:
            handle.remove()
        return len(rows) * torch.cat([p.grad.flatten() for p in model.parameters()])

    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    assert float((moved(rows) - moved(rows[:-1])).norm()) <= 1 + 1e-5
