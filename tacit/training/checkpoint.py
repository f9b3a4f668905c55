"""Payment, interrupts and restarts: what keeps the releases of a run and its bill equal.

The whole plan is reserved in the ledger before the first release, and steps are ticked off. A
checkpoint holds the key, so a resumed run draws the same lots and adds the same noise: steps that
were taken after the checkpoint and lost are repeated bit for bit, and the same release twice is one
release. So they are not paid again.

The same noise on another sum would cancel out of the difference, so a resumed run is compared with
its checkpoint before it draws a lot: the records, the program, the machine, weights and optimizer
(`fingerprint` says why these and not the sums). If anything differs, the run goes on with a fresh
key, for lots and noise, and the steps that may have been lost are paid once more: the ledger holds
their number. A ledger that does not know the run cannot tell it; then the run is refused until the
user gives `lost_steps`.

The optimizer's settings are part of every step's noise, and so are weights that the loop has moved
by itself: a change after the restart gives independent noise. But a step that was taken before the
restart would then be released a second time, on the same lot and unpaid. So the ledger holds a
digest of both, written durably before the first step that has it (`Marks`), and a repeated step
with another one is refused.

A checkpoint is as secret as the data: anyone who has the key can subtract the noise.
"""

import hashlib
import inspect
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tacit._check import whole
from tacit.events import Event
from tacit.events import Sequence as EventSequence
from tacit.ledger import Entry, Ledger
from tacit.ledger import Plan as ReservedPlan
from tacit.training.arithmetic import Arithmetic
from tacit.training.clip import Clip
from tacit.training.distributed import Ranks, is_sharded
from tacit.training.fingerprint import program_digest
from tacit.training.grid_noise import TILE
from tacit.training.key import Key
from tacit.training.lots import Lots
from tacit.training.noise import NoisyMean
from tacit.training.padding import Padding
from tacit.training.plan import EpochSampler, TrainingPlan
from tacit.training.program_state import ProgramState
from tacit.training.tree import LossFn

VERSION = 2
State = dict[str, Any]  # Any: JSON values
_MARK = "settings of steps "
_BLOCK = 64  # steps written at a time: a durable write for each would cost more than a small step


class RunState:
    """The state of a private run: steps taken, payment and restarts. Base class of `Private`."""

    ledger: Ledger
    is_reproducible: bool
    steps_taken: int
    _model: nn.Module
    _optimizer: torch.optim.Optimizer
    _plan: TrainingPlan
    _lots: Lots
    _noise: NoisyMean
    _ranks: Ranks
    _loss_fn: LossFn | None
    _lot_sum: Any  # a callable: how lots are summed
    arithmetic: Arithmetic
    _clip_moves: tuple[float, ...]

    def __init__(self) -> None:
        self._run = uuid.uuid4().hex
        self._paid = 0  # steps
        self._reserved: ReservedPlan | None = None
        self._loaded: State | None = None  # a checkpoint whose next step has not been taken
        self._salt = Key.fresh()  # for digests: the run's own key may come from a known seed
        self._marks = Marks([])
        self._loaded_at: int | None = None  # the step of a checkpoint whose key is in use
        self._repeated = 0  # steps before this one may have been taken before a restart
        self._trail = b""  # a digest of what the loop has set at every step so far
        self._left: bytes | None = None  # a checksum of the weights after the last step

    def __copy__(self) -> NoReturn:
        raise TypeError("a private run cannot be copied: the copy would draw the same noise again.")

    def __deepcopy__(self, _memo: object) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        self.__copy__()

    def state_dict(self) -> State:
        """Return the run's state as JSON values. Secret: it holds the key that gives the noise.

        Call this after the optimizer's step, and save it with the states of model and optimizer;
        for a sharded model call it on every rank.
        """
        left = [None if left is None else left.hex() for left in self._of_shards(self._left)]
        return {
            "version": VERSION,
            "run": self._run,
            "key": self._lots.key.secret.hex(),
            "is_reproducible": self.is_reproducible,
            "steps_taken": self.steps_taken,
            "clip_moves": list(self._clip_moves),
            "microbatch": self._lots.limit,
            "padding": self._lots.padding and asdict(self._lots.padding),
            "plan": self._plan.fingerprint(),
            "digest": self._digest(),
            "salt": self._salt.secret.hex(),
            "binding": self._binding(),
            "settings": self._trail.hex(),
            "left": left,
        }

    def load_state_dict(self, state: State, *, lost_steps: int | None = None) -> None:
        """Continue from a `state_dict()`; load model and optimizer as saved at the same moment.

        Guarantee: with `lost_steps=None` the run repeats the steps that were taken after the
        checkpoint, with the same lots and noise, so nothing more is paid. If data, program,
        machine, model or optimizer are not those of the checkpoint, it takes a fresh key and pays
        for those steps again, or is refused, when its next loop begins. Otherwise `lost_steps` is
        an upper bound on the number of those steps: they are paid on top of the plan, and the run
        continues with a fresh key.
        """
        _check(state, self._plan.fingerprint(), is_repeated=lost_steps is None)
        self._ranks.require_equal("the checkpoint", [state["run"], state["steps_taken"]])
        self._loaded = self._left = None
        self._begin_loop()  # lots that were handed out came from another key
        self._run = state["run"]
        self._reserved = None
        self._repeated, self._loaded_at = 0, state["steps_taken"]
        self.is_reproducible = state["is_reproducible"]
        self._lots.limit = state["microbatch"]
        if self._lots.padding is not None:
            saved = state.get("padding") or {"sizes": [state["microbatch"]]}
            self._lots.padding = Padding(**{**saved, "sizes": tuple(saved["sizes"])})
        self.steps_taken = state["steps_taken"]
        self._clip_moves = tuple(state["clip_moves"])
        if "salt" in state:  # since version 2
            self._salt = Key(bytes.fromhex(state["salt"]))
        if lost_steps is not None:
            self._take_fresh_key(lost_steps)
            return
        self._use(Key(bytes.fromhex(state["key"])))
        self._trail = bytes.fromhex(state["settings"])
        left = state["left"][self._ranks.rank if len(state["left"]) > 1 else 0]
        self._left = None if left is None else bytes.fromhex(left)
        self._loaded = state

    @property
    def data_fingerprint(self) -> str:
        """A hash of all records under a random secret: public, and no guess can be tested with it.

        Whoever holds the secret (a checkpoint has it) and the records can compute it again.
        """
        return self._salt.bind("data set", self._lots.records.digest())

    @property
    def generator(self) -> str:
        """The random generator of the noise: "cryptographic" or "statistical", and its name."""
        return self._noise.generator(self._lots.records.device)

    def _check_resumed(self) -> None:
        """Compare a resumed run with its checkpoint; if they differ, take a fresh key and pay."""
        if self._loaded is None:
            return
        reasons = self._ranks.gather(self._difference(self._loaded))
        if not any(reasons):
            return
        reason = next(reason for reason in reasons if reason)
        if (taken := self._ranks.share(self._steps_in_ledger())) is None:
            raise ValueError(
                f"{reason}, so the same noise would fall on other gradients and cancel out of the "
                "difference. Load what was saved together, or give lost_steps= to load_state_dict "
                "(0 if no step was taken after the checkpoint) to continue with fresh noise."
            )
        lost = max(0, taken - self.steps_taken)
        self._loaded = None
        self._take_fresh_key(lost)
        warnings.warn(
            f"{reason}: the run continues with fresh noise, and {lost} steps that may have been "
            "taken after the checkpoint are paid again.",
            stacklevel=4,
        )

    def _difference(self, loaded: State) -> str | None:
        """Return what differs from the checkpoint that was loaded, as the start of a sentence."""
        if loaded["digest"] != self._digest():
            return "model or optimizer are not those of the checkpoint"
        self._lots.records.forget_digest()  # records may have been edited where nothing shows it
        binding = self._binding()
        for name, value in loaded["binding"].items():
            if binding[name] != value:
                return f"the {name} is not that of the checkpoint"
        device = self._lots.records.device
        if device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            return "sums on a GPU may differ in their last bits from one run to the next"
        if self._lots.num_workers and ProgramState(*self._lots.records.program).generators():
            return "random generators of the data set go on in worker processes"
        if self._loss_fn is None:
            return "the loop computes its own losses, which cannot be compared with those before"
        return None

    def _binding(self) -> dict[str, str]:
        """Return what decides the sums of a run, by name, each as a hash under a secret."""
        records, salt = self._lots.records, self._salt
        engine = getattr(self._lot_sum, "_engine", None)
        machine = [
            self._ranks.size,
            records.device.type,
            torch.__version__,
            torch.backends.cpu.get_cpu_capability(),
            torch.get_num_threads(),
            sys.version_info[:3],
            self.generator,
            TILE,  # which random words each coordinate takes
            _kind_of(self._optimizer, self._model),
            type(self._lot_sum).__name__,
            getattr(self._lot_sum, "_views", None),
            *(getattr(engine, name, None) for name in ("__module__", "__qualname__")),
            getattr(self._lot_sum, "_compiled", None) is not None,
            self.arithmetic.mode,
            self._lots.padding is not None,
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        ]
        augment = getattr(self._lot_sum, "_augment", None)
        program = program_digest(self._model, self._loss_fn, records, [augment])
        return {
            "data set": self.data_fingerprint,
            "program": salt.bind("program", program),
            "machine or number of ranks": salt.bind("machine", repr(machine).encode()),
        }

    def _steps_in_ledger(self) -> int | None:
        """Return the steps of this run that the ledger has ticked off; None if it has none."""
        entry = _reserved_entry(self.ledger, self._plan.training_event, self._run)
        return None if entry is None else self.ledger.resume(entry.id).taken

    def _take_fresh_key(self, lost_steps: int) -> None:
        """Pay for steps that were taken after the checkpoint, and continue with a fresh key."""
        event = _lost_event(self._plan, self.steps_taken, lost_steps)
        if lost_steps:
            note = f"lost steps of run {self._run}"
            self._ranks.on_first(lambda: self.ledger.spend(event, note=note))
        self._use(self._ranks.share(Key.fresh()))
        self._repeated, self._loaded_at = 0, None

    def _use(self, key: Key) -> None:
        self._lots.use(key)
        self._noise.use(key)

    def _settings(self) -> bytes:
        """Return a digest of what the loop has set by itself for the next step.

        These are the optimizer's settings, and weights that are not as the optimizer left them.
        Numbers on a GPU count only where a resumed run repeats its noise: the host waits for them.
        """
        found = hashlib.sha256()
        is_repeated = torch.are_deterministic_algorithms_enabled()
        for group in self._optimizer.param_groups:
            for name in sorted(group.keys() - {"params"}):
                value = group[name]
                if is_repeated or not (isinstance(value, Tensor) and value.is_cuda):
                    found.update(name.encode() + _bytes(value))
        weights = self._weights()
        is_moved = self._left is not None and weights != self._left
        for moved in self._ranks.gather(weights if is_moved else b""):  # one noise for all ranks
            found.update(moved)
        return found.digest()

    def _weights(self) -> bytes:
        """Return a checksum of this rank's weights: 64 sums of their words, with wrap-around."""
        is_repeated = torch.are_deterministic_algorithms_enabled()
        found = hashlib.sha256()
        for parameter in self._model.parameters():
            if is_repeated or not parameter.is_cuda:
                content = _content(parameter)
                whole = len(content) // 512 * 512
                words = content[:whole].view(np.uint64).reshape(-1, 64)
                found.update(np.add.reduce(words, axis=0).tobytes() + content[whole:].tobytes())
        return found.digest()

    def _digest(self) -> str:
        """Return a hash of weights, buffers and optimizer, of the shards of all ranks together."""
        found = self._of_shards(digest(self._model, self._optimizer))
        return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()

    def _of_shards(self, value: Any) -> list[Any]:  # Any: a checksum, or None
        """Return the value of each rank of a sharded model; this rank's if it is not sharded."""
        return self._ranks.gather(value) if is_sharded(self._model) else [value]

    def _follow(self, settings: bytes) -> bytes:
        """Return a digest of what the loop has set at this step and at all steps before."""
        self._trail = hashlib.sha256(self._trail + settings).digest()
        return self._trail

    def _pay(self, settings: bytes) -> None:
        """Pay for the next step out of the reserved plan; raise `BudgetExceeded` if that fails.

        Raises `ValueError` for a repeated step that was taken with other `settings`. The key is
        part of the digest, so after a fresh key all steps have new ones.
        """
        step = self.steps_taken
        if self._reserved is None:
            plan = self._plan
            self._reserved = reserve(
                self.ledger, plan.training_event, steps=plan.steps, run=self._run
            )
            self._paid = self._reserved.taken
            self._marks = Marks(self._reserved.marks())
            if self._loaded_at is not None:  # a ledger without marks is of an older version
                self._repeated = self._marks.end or self._paid
        digest = self._lots.key.bind("settings", settings)
        if self._marks.at(step) != digest:
            if step < self._repeated:
                lost = max(self._repeated, self._paid) - (self._loaded_at or 0)
                raise ValueError(_other_settings(step, lost))
            self._reserved.mark(self._marks.add(step, digest))
        while self._paid <= step:
            self._paid = self._reserved.step()

    def _check_loaded(self) -> None:
        """Raise `ValueError` if model or optimizer were changed since the loop began."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded["digest"] != self._digest():
            self._loaded = loaded
            raise ValueError(
                "model or optimizer were changed after private had begun to repeat its steps, so "
                "the same noise would fall on other gradients and cancel out of the difference. "
                "Make changes before the loop begins, or give lost_steps= to load_state_dict."
            )

    def _clip(self) -> Clip:
        """Return the clip rule of the next step, after schedule and adaptive clipping. Public."""
        return self._plan.clip_at(self.steps_taken, self._clip_moves)

    def _begin_loop(self) -> int:
        raise NotImplementedError  # `ForeignLoops` has it


class Marks:
    """Which steps of a run may have been taken, each with a digest of the settings it was taken by.

    Every mark covers a range of steps and is written durably before the first of them is taken.

    >>> marks = Marks(["settings of steps 0 to 4: a", "settings of steps 4 to 68: b"])
    >>> marks.add(6, "c")  # replaces what was written for later steps
    'settings of steps 6 to 7: c'
    >>> [marks.at(step) for step in (0, 4, 6, 7)]
    ['a', 'b', 'c', None]
    >>> marks.end
    7
    """

    def __init__(self, notes: Sequence[str]) -> None:
        self._found: list[tuple[int, int, str]] = []  # by step
        for note in notes:
            steps, _, digest = note.removeprefix(_MARK).partition(": ")
            first, end = map(int, steps.split(" to "))
            self._put(first, end, digest)

    @property
    def end(self) -> int:
        """The first step after all that are covered."""
        return self._found[-1][1] if self._found else 0

    def at(self, step: int) -> str | None:
        """Return the digest of `step`, or None if it is not covered."""
        for first, end, digest in reversed(self._found):
            if first <= step:
                return digest if step < end else None
        return None

    def add(self, step: int, digest: str) -> str:
        """Return the note to write before `step`, which is not covered by this digest yet.

        It covers a block of steps if the last step had the same digest. With settings that change
        at every step it covers this one alone, so that the last step taken is known exactly.
        """
        end = step + (_BLOCK if self.at(step - 1) == digest else 1)
        self._put(step, end, digest)
        return f"{_MARK}{step} to {end}: {digest}"

    def _put(self, first: int, end: int, digest: str) -> None:
        while self._found and self._found[-1][0] >= first:
            self._found.pop()
        if self._found and self._found[-1][1] > first:
            self._found[-1] = (self._found[-1][0], first, self._found[-1][2])
        self._found.append((first, end, digest))


def _other_settings(step: int, lost: int) -> str:
    return (
        f"step {step + 1} may have been taken before the restart with other settings of the "
        "optimizer, or with weights that the loop had set otherwise. Taken again, it would be a "
        "second release of the same lot. Repeat the settings of the first time, or load the "
        f"checkpoint with lost_steps={lost}, which draws new lots and pays for these steps again."
    )


def _kind_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[object]:
    """Return the optimizer's class, the code of its step, its hooks, and its groups by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    kind = type(optimizer)
    step = getattr(inspect.unwrap(kind.step), "__code__", None)
    hooks = [
        getattr(hook, "__qualname__", repr(type(hook)))
        for place in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        for hook in getattr(optimizer, place, {}).values()
    ]
    groups = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    code = None if step is None else (step.co_code.hex(), repr(step.co_names))
    return [kind.__module__, kind.__qualname__, code, hooks, groups]


def reserve(ledger: Ledger, event: Event, *, steps: int, run: str) -> ReservedPlan:
    """Reserve the plan of the run named `run` in the ledger, or find it there on a resumed run.

    Raises `BudgetExceeded` if the plan exceeds the budget. A resumed run repeats the steps that it
    took after its checkpoint without new payment, since they are the same releases.
    """
    block = min(_BLOCK, steps)
    entry = _reserved_entry(ledger, event, run)
    if entry is not None:
        return ledger.resume(entry.id, claim=block)
    return ledger.plan(event, note=_note(run), steps=steps, claim=block)


def _reserved_entry(ledger: Ledger, event: Event, run: str) -> Entry | None:
    for entry in ledger.history():
        if (entry.kind, entry.note, entry.event) == ("plan", _note(run), event):
            return entry
    return None


def _note(run: str) -> str:
    return f"DP-SGD run {run}"


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block, so that step counter and parameters stay consistent."""
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


def _check(state: State, fingerprint: dict[str, Any], *, is_repeated: bool) -> None:
    """Raise `ValueError` unless the checkpoint `state` has this plan's `fingerprint`."""
    if state.get("version") not in (1, VERSION):
        raise ValueError(f"state must be of version {VERSION}, got {state.get('version')!r}.")
    if state["version"] == 1 and is_repeated:
        raise ValueError(
            "state is of version 1 (tacit 0.1), whose noise is not drawn any more, so lost steps "
            "cannot be repeated. Give lost_steps= to load_state_dict: the number of steps taken "
            "after the checkpoint, 0 if there was none."
        )
    saved = state["plan"]
    for name, value in fingerprint.items():
        if saved.get(name) != value:
            raise ValueError(
                f"state comes from a run with another {name}. A run may only be resumed as it was "
                "planned: the same noise on another computation would cancel out of the difference."
            )


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of weights, buffers and optimizer state; of a sharded model, of this shard."""
    found = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.update(name.encode() + _bytes(tensor))
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        states = [optimizer.state.get(p, {}) for p in group["params"]]
        for values in (options, *states):
            for name in sorted(values):
                found.update(name.encode() + _bytes(values[name]))
    return found.hexdigest()


def _lost_event(plan: TrainingPlan, steps_taken: int, lost_steps: int) -> Event:
    """Return the event of the `lost_steps` taken after the checkpoint, to be paid once more."""
    whole(lost_steps=lost_steps)
    sampler = plan.sampler
    if isinstance(sampler, EpochSampler) and steps_taken % sampler.steps:
        raise ValueError(
            "lost_steps can only be given for a checkpoint at the end of an epoch: in the middle "
            "of one, fresh randomness would let a record take part twice."
        )
    multipliers = plan.noise_multipliers[steps_taken : steps_taken + lost_steps]
    return plan.event_of(multipliers) if multipliers else EventSequence(())


def _bytes(value: Any) -> bytes:  # Any: options and state of any optimizer
    if isinstance(value, Tensor) and value.dim():
        return _content(value).tobytes()
    if isinstance(value, Tensor):
        value = value.item()
    return repr(list(value) if isinstance(value, tuple) else value).encode()


def _content(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor or of this rank's shard, without a copy where possible."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
