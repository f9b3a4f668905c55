"""The sums that a run has released, so that a repeated step is compared with its first time.

A resumed run repeats the noise of its lost steps. `fingerprint` compares what decides the sums
before the first lot is drawn, but a loop can change anything at any later step: a dropout rate, a
buffer, a constant of the loss. So each step also leaves a tag here, before its release, of its
clipped sum, what earlier steps add to it (`banded_noise`), the weights and the optimizer's
settings. A repeated step with another tag is refused.
Equal sums with equal noise are the same release.

A refusal of a step is visible. If weights or settings were changed, it depends on these alone. If
something else was changed, it shows that the change made a difference to this lot, which may depend
on a record; so that one bit is outside the guarantee, and restarts should change nothing.

A tag is a one-time authenticator (`Key.tag`) under a secret that only the checkpoint holds. It is
masked by a pad of its own, so it reveals nothing about the sum; two different sums have the same
tag with a probability below 2^-70.

The file also says which key has which steps of the plan: `hand_over` adds a line for each key that
a changed restart has taken. The first key of a run has no such line.

Steps before the first checkpoint are never repeated, so a run without checkpoints keeps nothing.
The tags of a run with a ledger in a file are in a second file beside it, one line for each step.
Each line is handed to the operating system before the step's release and is on disk within a
second: it survives the end of the process at any moment, and a failure of the machine may lose the
last second. Those of a ledger in memory are in memory, as the ledger is.
"""

import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

_SUFFIX = ".sums"
_MOST_RUNS = 256  # of which the tags are kept in memory; older ones cannot be repeated
_SECONDS = 1.0  # between two waits for the disk
_MARK = "checkpoint-"
_TURN = "turn"  # in place of a key
_in_memory: OrderedDict[str, dict[tuple[str, str], str]] = OrderedDict()


class Turn(NamedTuple):
    """The steps of a run's plan that one key may tick off: from `begin` on, before `end`."""

    begin: int
    end: int | None  # None for the newest key


class ReleasedSums:
    """The tags of one run's sums; several processes may add to them.

    >>> sums = ReleasedSums(None, "a run")
    >>> sums.add("key", "3", "0123")
    '0123'
    >>> ReleasedSums(None, "a run").add("key", "3", "4567")
    '0123'
    """

    def __init__(self, ledger: Path | None, run: str) -> None:
        self._run = run
        self._path = None if ledger is None else ledger.with_name(ledger.name + _SUFFIX)
        self._tags: dict[tuple[str, str], str] = {}
        self._is_known_to = 0  # bytes of the file that were read
        self._is_torn = False  # the file does not end with a whole line
        self._synced = 0.0
        if self._path is None:
            self._tags = _in_memory.setdefault(run, self._tags)
            _in_memory.move_to_end(run)
            while len(_in_memory) > _MOST_RUNS:
                _in_memory.popitem(last=False)

    def get(self, key: str, name: str) -> str | None:
        """Return the tag that was added under this name while the run had the named key."""
        self._read()
        return self._tags.get((key, name))

    def end(self, key: str) -> int:
        """Return the number of steps up to the last tag or checkpoint under this key."""
        self._read()
        names = [name for k, name in self._tags if k == key]
        steps = [int(name) + 1 for name in names if name.isdecimal()]
        marks = [int(name.removeprefix(_MARK)) for name in names if name.startswith(_MARK)]
        return max([0, *steps, *marks])

    def hand_over(self, key: str, taken: int) -> None:
        """Give the steps of the plan after the first `taken` to another key."""
        line, number = f"{key}:{taken}", len(self._turns())
        while self.add(_TURN, str(number), line) != line:  # another process was faster
            number += 1

    def turn(self, key: str) -> Turn:
        """Return which steps of the plan belong to this key."""
        turns = [("", 0), *self._turns()]
        place = next((i for i, (name, _) in enumerate(turns) if name == key), 0)
        return Turn(turns[place][1], turns[place + 1][1] if place + 1 < len(turns) else None)

    def _turns(self) -> list[tuple[str, int]]:
        """Return the keys after the first one, and after how many steps each began."""
        self._read()
        found: list[tuple[str, int]] = []
        while (line := self._tags.get((_TURN, str(len(found))))) is not None:
            key, _, taken = line.partition(":")
            found.append((key, int(taken)))
        return found

    def add(self, key: str, name: str, tag: str) -> str:
        """Add a tag, so that it outlasts this process; return the first one under this name.

        That is another one if another process was faster: lines are in the order of their arrival.
        """
        if self._path is None:
            return self._tags.setdefault((key, name), tag)
        self._read()
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # Begins a new line if the last one was cut short by a failure of the machine.
            start = "\n" if self._is_torn else ""
            os.write(handle, f"{start}{self._run} {key} {name} {tag}\n".encode())
            if time.monotonic() - self._synced > _SECONDS:
                os.fsync(handle)
                self._synced = time.monotonic()
        finally:
            os.close(handle)
        self._read()
        if (key, name) not in self._tags:
            raise OSError(
                f"a line that was written to {self._path} is not there. Nothing was released; make "
                "sure that the file can be written and the disk has room, then take the step again."
            )
        return self._tags[key, name]

    def _read(self) -> None:
        """Read the lines that were added to the file since the last time."""
        if self._path is None or not self._path.exists():
            return
        if self._path.stat().st_size == self._is_known_to:
            return
        with self._path.open("rb") as file:
            file.seek(self._is_known_to)
            *lines, torn = file.read().split(b"\n")
            self._is_known_to, self._is_torn = file.tell() - len(torn), bool(torn)
        for line in lines:
            run, *rest = line.decode("ascii", "replace").split(" ")
            if run == self._run and len(rest) == 3:
                key, name, tag = rest
                self._tags.setdefault((key, name), tag)
