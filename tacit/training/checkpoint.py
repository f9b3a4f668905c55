"""Payment, interrupts and restarts: what keeps the releases of a run and its bill equal.

The whole plan is reserved in the ledger before the first release, and steps are ticked off. A
checkpoint holds the key, so a resumed run draws the same lots and adds the same noise: steps that
were taken after the checkpoint and lost are repeated bit for bit, and the same release twice is one
release. So they are not paid again. That needs a deterministic computation and the same program;
model and optimizer must be those of the checkpoint, which the next step checks. To change anything,
give `lost_steps`: they are paid as extra steps, and the run continues with a fresh key. A
checkpoint is as secret as the data: anyone who has the key can subtract the noise.
"""

import hashlib
import signal
import threading
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tacit._check import whole
from tacit.events import Event
from tacit.events import Sequence as EventSequence
from tacit.ledger import Ledger
from tacit.ledger import Plan as ReservedPlan
from tacit.training.clip import Clip
from tacit.training.distributed import Ranks
from tacit.training.key import Key
from tacit.training.lots import Lots
from tacit.training.noise import NoisyMean
from tacit.training.plan import EpochSampler, TrainingPlan

VERSION = 1
State = dict[str, Any]  # Any: JSON values
_BLOCK = 64  # steps written at a time: a durable write for each would cost more than a small step


class RunState:
    """The state of a private run: its position, its payment, and restarts. Base of `Private`."""

    ledger: Ledger
    is_reproducible: bool
    steps_taken: int
    _model: nn.Module
    _optimizer: torch.optim.Optimizer
    _plan: TrainingPlan
    _lots: Lots
    _noise: NoisyMean
    _ranks: Ranks
    _clip_moves: tuple[float, ...]

    def __init__(self) -> None:
        self._run = uuid.uuid4().hex
        self._paid = 0  # steps
        self._reserved: ReservedPlan | None = None
        self._loaded_digest: str | None = None  # of the model and optimizer of a checkpoint

    def state_dict(self) -> State:
        """Return what `load_state_dict` needs, as JSON values. Secret: it holds the noise's key.

        Take it after the optimizer's step, together with the states of model and optimizer.
        """
        return {
            "version": VERSION,
            "run": self._run,
            "key": self._lots.key.secret.hex(),
            "is_reproducible": self.is_reproducible,
            "steps_taken": self.steps_taken,
            "clip_moves": list(self._clip_moves),
            "microbatch": self._lots.limit,
            "plan": self._plan.fingerprint(),
            "digest": digest(self._model, self._optimizer),
        }

    def load_state_dict(self, state: State, *, lost_steps: int | None = None) -> None:
        """Continue from `state_dict()`; load the model and the optimizer from the same moment.

        Guarantee: with `lost_steps=None` the run repeats, with the same lots and noise, the steps
        taken after the checkpoint, so nothing more is paid (see `tacit.training.checkpoint`).
        Otherwise `lost_steps` bounds how many were taken since: they are spent on top of the plan,
        and the run continues with fresh randomness.
        """
        _check(state, self._plan.fingerprint())
        self._ranks.require_equal("the checkpoint", [state["run"], state["steps_taken"]])
        self._begin_loop()  # lots that were handed out came from another key
        if lost_steps is None:
            _warn_if_not_repeatable(self._lots.records.device)
            key = Key(bytes.fromhex(state["key"]))
        else:
            event = _lost_event(self._plan, state["steps_taken"], lost_steps)
            if lost_steps:
                note = f"lost steps of run {state['run']}"
                self._ranks.on_first(lambda: self.ledger.spend(event, note=note))
            key = self._ranks.share(Key.fresh())
        self._lots.use(key)
        self._noise.use(key)
        self._run = state["run"]
        self._reserved = None
        self.is_reproducible = state["is_reproducible"]
        self._lots.limit = state["microbatch"]
        self.steps_taken = state["steps_taken"]
        self._clip_moves = tuple(state["clip_moves"])
        self._loaded_digest = state["digest"] if lost_steps is None else None

    def _pay(self) -> None:
        """Make sure that the next step is paid; raise `BudgetExceeded` otherwise."""
        if self._reserved is None:
            plan = self._plan
            self._reserved = reserve(
                self.ledger, plan.training_event, steps=plan.steps, run=self._run
            )
            self._paid = self._reserved.taken
        while self._paid <= self.steps_taken:
            self._paid = self._reserved.step()

    def _check_loaded(self) -> None:
        """Raise `ValueError` if the run would repeat its noise on other gradients."""
        expected = self._loaded_digest
        if expected is not None and digest(self._model, self._optimizer) != expected:
            raise ValueError(
                "model or optimizer are not those of the checkpoint that private was loaded from, "
                "so the same noise would fall on other gradients and cancel out of the "
                "difference. Load all three from one moment, or give lost_steps= to "
                "load_state_dict (0 if no step was taken after the checkpoint) to continue with "
                "fresh noise."
            )
        self._loaded_digest = None

    def _clip(self) -> Clip:
        """Return the clip rule of the next step. Public."""
        return self._plan.clip_at(self.steps_taken, self._clip_moves)

    def _begin_loop(self) -> int:
        raise NotImplementedError  # `ForeignLoops` has it


def reserve(ledger: Ledger, event: Event, *, steps: int, run: str) -> ReservedPlan:
    """Reserve the plan of `run` in the ledger, or find it there if the run was resumed.

    Raises `BudgetExceeded` if the plan does not fit. A resumed run repeats the steps that were
    ticked off after its checkpoint without new payment, since they are the same releases.
    """
    note, block = f"DP-SGD run {run}", min(_BLOCK, steps)
    for entry in ledger.history():
        if (entry.kind, entry.note, entry.event) == ("plan", note, event):
            return ledger.resume(entry.id, claim=block)
    return ledger.plan(event, note=note, steps=steps, claim=block)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C until the end of the block, so that state and parameters always agree."""
    usual = signal.getsignal(signal.SIGINT)
    # Only the main thread receives signals; a handler not set from Python cannot be put back.
    if threading.current_thread() is not threading.main_thread() or usual is None:
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if held and callable(usual):
        usual(*held[0])


def _check(state: State, fingerprint: dict[str, Any]) -> None:
    """Raise `ValueError` unless `state` comes from a run with the same plan."""
    if state.get("version") != VERSION:
        raise ValueError(f"state must be of version {VERSION}, got {state.get('version')!r}.")
    saved = state["plan"]
    for name, value in fingerprint.items():
        if saved.get(name) != value:
            raise ValueError(
                f"state comes from a run with another {name}. A run may only be resumed as it was "
                "planned: the same noise on another computation would cancel out of the difference."
            )


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Return a hash of all that decides the next steps; None for sharded models (not checked)."""
    found = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, DTensor):
            return None
        found.update(name.encode() + _bytes(tensor))
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        states = [optimizer.state.get(p, {}) for p in group["params"]]
        for values in (options, *states):
            for name in sorted(values):
                found.update(name.encode() + _bytes(values[name]))
    return found.hexdigest()


def _lost_event(plan: TrainingPlan, steps_taken: int, lost_steps: int) -> Event:
    """Return the event of steps after the checkpoint that are paid instead of repeated."""
    whole(lost_steps=lost_steps)
    sampler = plan.sampler
    if isinstance(sampler, EpochSampler) and steps_taken % sampler.steps:
        raise ValueError(
            "lost_steps can only be given for a checkpoint at the end of an epoch: in the middle "
            "of one, fresh randomness would let a record take part twice."
        )
    multipliers = plan.noise_multipliers[steps_taken : steps_taken + lost_steps]
    return plan.event_of(multipliers) if multipliers else EventSequence(())


def _warn_if_not_repeatable(device: torch.device) -> None:
    """Warn on a GPU, which may add in another order and so put the noise on another sum."""
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        warnings.warn(
            "steps taken after this checkpoint are repeated with the same noise, which is sound if "
            "their gradients are bit for bit the same. Call torch.use_deterministic_algorithms"
            "(True) in every run, or give lost_steps= (0 if no step was taken after it).",
            stacklevel=3,
        )


def _bytes(value: Any) -> bytes:  # Any: options and state of any optimizer
    if isinstance(value, Tensor) and value.dim():
        return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, Tensor):
        value = value.item()
    return repr(list(value) if isinstance(value, tuple) else value).encode()
