"""The file of a run's checkpoint: what the program sets, and how it is written beside the steps.

A checkpoint is copied between two steps, and a thread writes the copy while the next steps are
computed. The file is replaced as a whole (`tacit._whole_file`). A run waits for the thread
before it ticks off further steps in the ledger: no crash loses more steps than the plan reserves.
"""

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tacit._check import one_of, whole
from tacit._whole_file import remove_partial, whole_file

State = dict[str, Any]  # Any: tensors, numbers, texts, and containers of these
CHOICES = ("reserve", "pay", "skip")  # of what to do with lost steps


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How a run keeps its state, for `make_private(..., checkpoint=Checkpoint(path=...))`.

    A new process with the same `path` continues where the file was written. Steps after that are
    lost: they are taken again with fresh lots and noise, and paid again. The plan reserves as many
    as one crash can lose, `every`; a warning says how many there are.

    Parameters
    ----------
    path
        The file. None if the loop saves `private.state_dict()` by itself, in at most `every` steps.
    also
        What else is saved and restored, by name: schedulers and other objects with `state_dict` and
        `load_state_dict`.
    every
        Steps between two checkpoints, and steps reserved. Default: 1 % of the run's steps.
    lost_steps
        What to do where lost steps cost more than was promised, or the noise of a run is that of a
        seed. "reserve": nothing, and raise. "pay": pay for them and take them. "skip": end the run
        after fewer steps, for what is paid.
    """

    path: str | os.PathLike[str] | None = None
    also: Mapping[str, Any] = field(default_factory=dict)
    every: int | None = None
    lost_steps: str = "reserve"

    def __post_init__(self) -> None:
        if self.every is not None:
            whole(every=self.every, least=1)
        one_of(CHOICES, lost_steps=self.lost_steps)
        if taken := {"model", "optimizer", "private"} & self.also.keys():
            raise ValueError(f"also must have other names than {min(taken)!r}, which is saved too.")


class CheckpointWriter:
    """Writes one checkpoint at a time to a file, in a thread of its own."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def read(self) -> State | None:
        """Return what the file holds; None if there is none."""
        remove_partial(self._path)
        if not self._path.is_file():
            return None
        return torch.load(self._path, map_location="cpu", weights_only=True)

    def write(self, state: State) -> None:
        """Begin to write a copy of `state`, when the state before it is written."""
        self.wait()
        self._pending = self._pool.submit(self._write, _copied(state))

    def wait(self) -> None:
        """Return when the last state is on disk; raise what kept it from there."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _write(self, state: State) -> None:
        with whole_file(self._path, mode=0o600) as stream:
            torch.save(state, stream)


def _copied(value: Any) -> Any:  # Any: a part of a state
    """Return a copy of a state on the CPU, which the next step does not change."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _copied(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    return value
