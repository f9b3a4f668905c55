"""Payment, interrupts and restarts: what keeps the releases of a run and its bill equal.

The whole plan is reserved in the ledger before the first release, and steps are ticked off. A
checkpoint holds the key, so a resumed run draws the same lots and adds the same noise: steps that
were taken after the checkpoint and lost are repeated bit for bit, and the same release twice is one
release. So they are not paid again.

The same noise on another sum would cancel out of the difference, so a resumed run is compared with
its checkpoint before it draws a lot: the records, the program, the machine, weights and optimizer
(`fingerprint` says why these and not the sums). If anything differs, the run goes on with a fresh
key, for lots and noise, and the steps that may have been lost are paid once more: the ledger holds
their number. If records take turns, all steps after the checkpoint are paid once more, as a run of
their own: the fresh key draws other turns. A ledger that does not know the run cannot tell what was
lost; then the run is refused until the user gives `lost_steps`. The fresh key has the rest of the
plan from there on: a process that still has the old key, or loads it later, may repeat the steps
that were ticked off, and takes no others. So there are never more pairs of key and step with a
release than steps that were paid.

A loop may change anything after that, too. So every step after a checkpoint leaves a tag of its
sum, of what earlier steps add to it (`banded_noise`), of the weights and of the optimizer's
settings before it is released (`released_sums`), and a repeated step with another tag is refused:
the same noise would fall on another sum.

A checkpoint is as secret as the data: anyone who has the key can subtract the noise.
"""

import copy
import hashlib
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

import torch
from torch import Tensor, nn

from tacit._check import whole
from tacit.events import Event, from_dict
from tacit.events import Sequence as EventSequence
from tacit.ledger import Entry, Ledger
from tacit.ledger import Plan as ReservedPlan
from tacit.training.arithmetic import Arithmetic
from tacit.training.clip import Clip
from tacit.training.distributed import Ranks, is_sharded
from tacit.training.ema import TailMean
from tacit.training.fingerprint import bytes_of, content_of, program_digest, state_digest
from tacit.training.grid_noise import TILE
from tacit.training.key import Key
from tacit.training.lots import Lots
from tacit.training.noise import NoisyMean
from tacit.training.padding import Padding
from tacit.training.plan import EpochSampler, RunSampler, TrainingPlan
from tacit.training.program_state import ProgramState
from tacit.training.released_sums import ReleasedSums
from tacit.training.tree import LossFn

try:
    import _signal as _signals  # pyright: ignore[reportMissingImports]  # not of every Python
except ImportError:  # another Python
    _signals = signal

VERSION = 3
State = dict[str, Any]  # Any: JSON values
_MACHINE = "machine or number of ranks"
_ORDER = "order of records"
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
    _parameters: dict[str, nn.Parameter]

    def __init__(self, mean: TailMean | None = None) -> None:
        self._mean = mean  # of the weights, with correlated noise
        self._first_step = 0  # of this process
        self._run = uuid.uuid4().hex
        self._paid = 0  # steps
        self._reserved: ReservedPlan | None = None
        self._loaded: State | None = None  # a checkpoint whose next step has not been taken
        self._is_replay = False
        self._one_step = OneStep()
        self._salt = Key.fresh()  # for digests: the run's own key may come from a known seed
        self._loaded_at: int | None = None  # the step of a checkpoint whose key is in use
        self._sums: ReleasedSums | None = None  # since the first checkpoint
        self._is_unreleased = False  # nothing of the steps after the loaded checkpoint got out
        self._tags = ""  # which series of tags this run adds to
        self._repaid: dict[str, Event] = {}  # lost steps that were paid again, by ledger hash

    def __copy__(self) -> NoReturn:
        raise TypeError("a private run cannot be copied: the copy would draw the same noise again.")

    def __deepcopy__(self, _memo: object) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        self.__copy__()

    def state_dict(self) -> State:
        """Return the run's state as JSON values. Secret: it holds the key that gives the noise.

        Call this after the optimizer's step, and save it with the states of model and optimizer;
        for a sharded model call it on every rank. Until the first step after `load_state_dict`, it
        is the state that was loaded: nothing else has been compared with that state's key.
        """
        if self._is_replay:
            raise ValueError("a replay cannot be saved: nothing that it computes may be continued.")
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        self._record_sums()
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
            "unit": self.ledger.unit,
            "optimizer": _kind(self._optimizer),
            "digest": self._digest(),
            "salt": self._salt.secret.hex(),
            "binding": self._binding(),
            "noise": self._noise.state(),
            "mean": self._mean and self._mean.state(),
            "tags": self._tags,
            "repaid": {name: event.to_dict() for name, event in self._repaid.items()},
        }

    def load_state_dict(
        self,
        state: State,
        *,
        lost_steps: int | None = None,
        is_replay: bool = False,
        is_unreleased: bool = False,
    ) -> None:
        """Continue from a `state_dict()`; load model and optimizer as saved at the same moment.

        Guarantee: with `lost_steps=None` the run repeats the steps that were taken after the
        checkpoint, with the same lots and noise, so nothing more is paid. If data, program,
        machine, model or optimizer are not those of the checkpoint, it takes a fresh key and pays
        for those steps again, or is refused, when its next loop begins. Otherwise `lost_steps` is
        an upper bound on the number of those steps: they are paid on top of the plan, and the run
        continues with a fresh key. If the ledger has ticked off more steps, these are paid. A run
        in which records take turns pays for all steps after the checkpoint, as a run of its own.

        `is_replay` is for checking a run that is over: its steps are computed again wherever their
        sums are not known. Nothing that a replay computes may be released.

        With `is_unreleased` the caller vouches that nothing computed after the checkpoint has left
        the processes of the run, which have ended. Then there is no first release to compare with:
        on another machine, or on another number of ranks, where sums differ in their last bits,
        these steps are taken with the same lots and noise, and nothing more is paid.
        """
        if lost_steps is not None:
            whole(lost_steps=lost_steps)
        _check(state, self._plan.fingerprint(), is_repeated=lost_steps is None)
        _check_unit(state, self.ledger.unit, is_repeated=lost_steps is None)
        if state.get("optimizer", kind := _kind(self._optimizer)) != kind:
            raise ValueError(
                f"the optimizer must be of the checkpoint's kind, {state['optimizer']}, got {kind}."
            )
        self._check_order(state)
        first = (state.get("mean") or {}).get("first")
        if first != (self._mean and self._mean.first):
            raise ValueError(
                "average must be that of the checkpoint: weights before it are not known any more."
            )
        kept = hashlib.sha256(repr(state.get("noise")).encode()).hexdigest()
        self._ranks.require_equal("the checkpoint", [state["run"], state["steps_taken"], kept])
        self._loaded = self._sums = None
        self._begin_loop()  # lots that were handed out came from another key
        self._run = state["run"]
        self._reserved = None
        self._is_replay = is_replay
        self._is_unreleased, self._tags = is_unreleased, state.get("tags", "")
        self._loaded_at = None if is_replay else state["steps_taken"]
        self.is_reproducible = state["is_reproducible"]
        self._lots.limit = state["microbatch"]
        if self._lots.padding is not None:
            saved = state.get("padding") or {}  # of another form before version 3
            own = self._lots.padding.within(state["microbatch"])
            known = {"is_for_all": own.is_for_all, **saved}  # which older ones lack
            self._lots.padding = Padding(**known) if "multiple" in saved else own
        self.steps_taken = self._first_step = state["steps_taken"]
        self._clip_moves = tuple(state["clip_moves"])
        if "salt" in state:  # since version 2
            self._salt = Key(bytes.fromhex(state["salt"]))
        self._use(Key(bytes.fromhex(state["key"])))
        self._repaid = {name: from_dict(event) for name, event in state.get("repaid", {}).items()}
        self._read_repaid()
        self._noise.load_state(state.get("noise"))
        if self._mean is not None:
            self._mean.load_state(state["mean"])
        self._loaded = copy.deepcopy(state)
        if lost_steps is not None:
            self._take_fresh_key(lost_steps)

    @property
    def data_fingerprint(self) -> str:
        """A hash of all records under a random secret: public, and no guess can be tested with it.

        Whoever holds the secret (a checkpoint has it) and the records can compute it again.
        """
        return self._salt.bind("data set", self._lots.records.digest(self._salt))

    @property
    def generator(self) -> str:
        """The random generator of the noise: "cryptographic" or "statistical", and its name."""
        return self._noise.generator(self._lots.records.device)

    @property
    def payments(self) -> list[Entry]:
        """The entries of the ledger for this run: its plan, and lost steps that were paid again."""
        notes = _note(self._run), _lost_note(self._run)
        return [entry for entry in self.ledger.history() if entry.note.startswith(notes)]

    def _check_resumed(self) -> None:
        """Compare a resumed run with its checkpoint; if they differ, take a fresh key and pay."""
        if self._loaded is None:
            return
        reasons = self._ranks.gather(self._difference(self._loaded))
        moved = f"the {_MACHINE} is not that of the checkpoint"
        if self._is_unreleased and set(reasons) <= {None, moved}:
            # The tags of the first time are those of sums that nobody has seen.
            self._loaded, self._loaded_at = None, None
            self._tags = self._ranks.share(uuid.uuid4().hex)
            return
        if not any(reasons):
            if self._loaded_at is not None:
                self._ranks.on_first(self._require_known_sums)
            return
        reason = next(reason for reason in reasons if reason)
        if self._ranks.share(self._steps_in_ledger()) is None:
            raise ValueError(
                f"{reason}, so the same noise would fall on other gradients and cancel out of the "
                "difference. Load what was saved together, or give lost_steps= to load_state_dict "
                "(0 if no step was taken after the checkpoint) to continue with fresh noise."
            )
        lost = f"{self._take_fresh_key(0)} steps that may have been taken after the checkpoint"
        if isinstance(self._plan.sampler, RunSampler):
            left = self._plan.steps - self.steps_taken
            lost = f"all {left} steps after the checkpoint, as a run of their own,"
        warnings.warn(
            f"{reason}: the run continues with fresh noise, and {lost} are paid again.",
            stacklevel=4,
        )

    def _difference(self, loaded: State) -> str | None:
        """Return what differs from the checkpoint that was loaded, as the start of a sentence."""
        if loaded["version"] != VERSION:
            return "the checkpoint is of an older version"
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
            type(self._lot_sum).__name__,
            getattr(self._lot_sum, "_views", None),
            *(getattr(engine, name, None) for name in ("__module__", "__qualname__")),
            getattr(self._lot_sum, "compiles", False),
            self.arithmetic.mode,
            self._lots.padding is not None,
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        ]
        augment = getattr(self._lot_sum, "_augment", None)
        program = program_digest(self._model, self._optimizer, self._loss_fn, records, [augment])
        order = self._plan.order()
        return {
            "data set": self.data_fingerprint,
            "program": salt.bind("program", program),
            _MACHINE: salt.bind("machine", repr(machine).encode()),
            **({_ORDER: salt.bind(_ORDER, order)} if order else {}),
        }

    def _check_order(self, state: State) -> None:
        """Raise `ValueError` unless records take part in the steps that the checkpoint states."""
        order, salt = self._plan.order(), Key(bytes.fromhex(state.get("salt", "")))
        saved = state.get("binding", {}).get(_ORDER)
        if saved != (salt.bind(_ORDER, order) if order else None):
            raise ValueError(
                f"the {_ORDER} (places of FixedOrder, order of Stream) is not that of the "
                "checkpoint, so a record may take part more often than is paid: give the same one, "
                "or make a new run."
            )

    def _steps_in_ledger(self) -> int | None:
        """Return the steps of this run that the ledger has ticked off; None if it has none."""
        entry = _reserved_entry(self.ledger, self._plan.training_event, self._run)
        return None if entry is None else self.ledger.resume(entry.id).taken

    def _take_fresh_key(self, lost_steps: int) -> int:
        """Continue with a fresh key; pay for the steps taken after the checkpoint, return how many.

        They are those that the ledger has ticked off, and at least `lost_steps`. The fresh key has
        all steps of the plan that are not ticked off. If anything fails, the checkpoint that was
        loaded stays to be compared.
        """
        taken = self._ranks.share(self._steps_in_ledger()) or 0
        lost = max(lost_steps, taken - self.steps_taken)
        event = _lost_event(self._plan, self.steps_taken, lost)
        if event != EventSequence(()):
            self._ranks.on_first(lambda: self.ledger.spend(event, note=_lost_note(self._run)))
            self._read_repaid()
        key, sums = self._ranks.share(Key.fresh()), ReleasedSums(self.ledger.path, self._run)

        def take_over() -> None:
            sums.hand_over(self._key_name(key), taken)
            # Whoever ticks off a step looks for this line afterwards, so no step is missed.
            if (self._steps_in_ledger() or 0) != taken:
                raise RuntimeError(
                    "another process takes steps of this run. End it, then load the state again."
                )

        self._ranks.on_first(take_over)
        self._use(key)
        self._noise.start_anew(self.steps_taken)
        self._sums, self._loaded, self._loaded_at, self._is_replay = sums, None, None, False
        return lost

    def _read_repaid(self) -> None:
        """Add the payments for lost steps of this run, by any process, to those that are known.

        A checkpoint from before a restart does not hold what the restart paid; the ledger does.
        """
        found = [entry for entry in self.payments if entry.kind == "spend"]
        self.ledger.used.update(entry.id for entry in found)
        self._repaid |= self._ranks.share({entry.hash: entry.event for entry in found})

    def _with_repaid(self, training: Event) -> Event:
        """Return one event of `training` and of the lost steps that were paid again."""
        repaid = tuple(self._repaid.values())
        return EventSequence((training, *repaid)) if repaid else training

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Give the model the mean weights of the last steps so far inside the block.

        `noise=Banded(...)` averages them, and the model keeps the mean when the run ends. Without
        it, or before the last steps, the model stays as it is. Call this between steps: after the
        last one, it sets the model to the mean for good, if leaving the loop has not done so.
        """
        self._end_run()
        if self._mean is None or not self._mean.updates:
            yield self._model
            return
        with self._mean.applied(self.steps_taken) as model:
            yield model

    def _observe(self, scales: Sequence[float]) -> None:
        """Before a step moves them, add the weights to their mean, and state the noise's scale.

        Optimizers that correct for noise, such as `AdamBC`, are given that public number.
        """
        if self._mean is not None:
            self._mean.observe(self.steps_taken)
        state_noise = getattr(self._optimizer, "state_noise", None)
        if state_noise is not None:
            step, plan = self.steps_taken, self._plan
            factor = plan.noise_at(step) * self._noise.deviation(step) / plan.expected_batch
            stds = [factor * scale for scale in scales]
            state_noise(zip(self._parameters.values(), stds, strict=True))

    def _end_run(self) -> None:
        """Set the model to the mean of its last weights if the run is over and averages them."""
        if self._mean is not None:
            self._mean.apply_at_end(self.steps_taken)

    def _use(self, key: Key) -> None:
        self._lots.use(key)
        self._noise.use(key)

    def _settings(self) -> bytes:
        """Return a digest of the optimizer's settings for the next step."""
        found = hashlib.sha256()
        for group in self._optimizer.param_groups:
            for name in sorted(group.keys() - {"params"}):
                found.update(name.encode() + bytes_of(group[name]))
        return found.digest()

    def _record_sums(self) -> None:
        """From now on, keep a tag of every step's sum: this checkpoint may be loaded later."""
        self._sums = self._sums or ReleasedSums(self.ledger.path, self._run)
        if self._ranks.rank == 0:
            self._sums.add(self._tag_name(), f"checkpoint-{self.steps_taken}", "-")

    def _require_known_sums(self) -> None:
        """Raise `ValueError` if the sums of the steps after the loaded checkpoint are not known.

        Of the steps that this key has ticked off, those of one block may have left no tag.
        """
        self._sums, key = ReleasedSums(self.ledger.path, self._run), self._key_name()
        turn, taken = self._sums.turn(key), self._steps_in_ledger() or 0
        taken = taken if turn.end is None else min(taken, turn.end)
        tags = self._tag_name()
        is_cut = taken > turn.begin and taken - self._sums.end(tags) > _BLOCK
        if is_cut or self._sums.get(tags, f"checkpoint-{self.steps_taken}") is None:
            raise ValueError(
                "the sums of steps that were taken after the checkpoint are not known here, so "
                "repeated steps cannot be compared with them. A ledger in memory ends with its "
                "process; a ledger in a file has them in a second file beside it, whose name ends "
                "in .sums. Use that ledger, or give lost_steps= to load_state_dict: the number of "
                "steps taken after the checkpoint, 0 if there was none."
            )

    def _compare_with_first_time(self, step: int, released: Sequence[Tensor]) -> None:
        """Keep a tag of what this step releases; raise if it was taken before on another sum.

        Sums of a GPU whose order of additions may change are never repeated, so they are not kept.
        """
        if self._sums is None and self._loaded_at is None:
            return
        if released[0].is_cuda and not torch.are_deterministic_algorithms_enabled():
            return
        try:
            if self._loaded_at is not None:
                self._ranks.on_first(lambda: self._compare(step, released))
            elif self._ranks.rank == 0:
                self._compare(step, released)
        except Exception:
            self.steps_taken = step  # nothing is released
            raise

    def _compare(self, step: int, released: Sequence[Tensor]) -> None:
        assert self._sums is not None  # made with the first checkpoint, and at every restart
        key = self._tag_name()
        # With weights and buffers: a change of these shows whatever the lot holds, even nothing.
        held = [*self._model.parameters(), *self._model.buffers(), *released]
        if self._plan.noise_at(step):
            held += self._noise.past(step, released[0].device)  # it is added to the sum
        parts = [self._settings(), *map(content_of, held)]
        tag = self._salt.tag(f"sum {key}", step, parts)
        first = self._sums.get(key, str(step)) or self._sums.add(key, str(step), tag)
        if first != tag:
            lost = max(self._sums.end(key), self._paid) - (self._loaded_at or 0)
            raise ValueError(
                f"step {step + 1} was taken before with another sum of gradients, other weights or "
                "other settings of the optimizer, so the same noise would cancel out of the "
                "difference. Repeat what the run did the first time, or load the checkpoint with "
                f"lost_steps={lost}, which draws new lots and noise and pays for these steps again."
            )

    def _key_name(self, key: Key | None = None) -> str:
        """Return a name of a key, by default the one in use, that reveals nothing about it."""
        return self._salt.bind("key", (key or self._lots.key).secret)

    def _tag_name(self) -> str:
        """Return the name under which the tags of sums are kept: of the key and of the series."""
        return self._key_name() + self._tags

    def _digest(self) -> str:
        """Return a hash of weights, buffers and optimizer, of the shards of all ranks together."""
        found = self._of_shards(state_digest(self._model, self._optimizer))
        return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()

    def _of_shards(self, value: Any) -> list[Any]:  # Any: a checksum, or None
        """Return the value of each rank of a sharded model; this rank's if it is not sharded."""
        return self._ranks.gather(value) if is_sharded(self._model) else [value]

    def pay_whole(self) -> None:
        """Pay for all steps of the plan at once, such as for steps that another process takes."""
        if ReleasedSums(self.ledger.path, self._run).turn(self._key_name()).end is not None:
            raise ValueError(
                "a changed restart of this run went on with fresh noise and has the rest of the "
                "plan. Load a checkpoint of that restart."
            )
        reserved = self._reserve()
        while self._paid < self._plan.steps:
            self._paid = reserved.step()

    def _pay(self) -> None:
        """Pay for the next step out of the reserved plan; raise `BudgetExceeded` if that fails."""
        reserved = self._reserve()
        while self._paid <= self.steps_taken:
            self._require_turn()  # before, so that no step is ticked off in vain
            self._paid = reserved.step()
        self._require_turn()  # and after: see `_take_fresh_key`

    def _reserve(self) -> ReservedPlan:
        """Return the plan of this run in the ledger, reserved at the first call."""
        if self._reserved is None:
            plan = self._plan
            self._reserved = reserve(
                self.ledger, plan.training_event, steps=plan.steps, run=self._run
            )
            self._paid = self._reserved.taken
        return self._reserved

    def _require_turn(self) -> None:
        """Raise `ValueError` if the next step belongs to another key of this run."""
        end = None if self._sums is None else self._sums.turn(self._key_name()).end
        if end is not None and self.steps_taken >= end:
            raise ValueError(
                f"step {self.steps_taken + 1} is not paid with this noise: after step {end} was "
                "paid, a changed restart went on with fresh noise and has the rest of the plan. "
                "Load a checkpoint of that restart, or give lost_steps= to load_state_dict."
            )

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


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


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


def _lost_note(run: str) -> str:
    return f"lost steps of run {run}"


class OneStep:
    """A block that is entered once at a time: another thread, or the same one again, is refused.

    A lot is used once. Two steps at the same time would add the noise of two steps to one lot.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "a step of this run is being taken, by another thread or by a call inside loss_fn. "
                "Take one step at a time."
            )

    def __exit__(self, *_error: object) -> None:
        self._lock.release()


class Uninterrupted:
    """A block to whose end Ctrl-C is delayed, so that step counter and parameters stay consistent.

    The module behind `signal` is used, since every step enters such a block: `signal` itself turns
    numbers into enums, which takes as long as a small launch on a GPU.
    """

    def __enter__(self) -> None:
        self._held: tuple[int, FrameType | None] | None = None
        # Only the main thread receives signals; a handler not set from Python cannot be put back.
        is_main = threading.current_thread() is threading.main_thread()
        self._usual = _signals.getsignal(signal.SIGINT) if is_main else None
        if self._usual is not None:
            _signals.signal(signal.SIGINT, self._hold)

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _frames: object
    ) -> None:
        usual = self._usual
        if usual is None:
            return
        _signals.signal(signal.SIGINT, usual)
        if error is None and self._held is not None and callable(usual):
            usual(*self._held)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held = self._held or (number, frame)


def _check(state: State, fingerprint: dict[str, Any], *, is_repeated: bool) -> None:
    """Raise `ValueError` unless the checkpoint `state` has this plan's `fingerprint`."""
    version = state.get("version")
    if version not in (1, 2, VERSION):
        raise ValueError(f"state must be of version {VERSION}, got {version!r}.")
    if version != VERSION and is_repeated:
        raise ValueError(
            f"state is of version {version}, whose noise is not drawn any more, so lost steps "
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


def _check_unit(state: State, unit: str, *, is_repeated: bool) -> None:
    """Raise `ValueError` if steps of the run that was saved protected another unit than this one.

    States of earlier versions do not name it. If lost steps are repeated, the data set is compared,
    and that says whose record each one is.
    """
    saved = state.get("unit", unit if is_repeated else "record")
    if (saved == "record") != (unit == "record"):
        raise ValueError(
            f"state comes from a run that counts the privacy of one {saved}, but this run counts "
            f"that of one {unit}. Resume it with the same users= and a ledger of the same unit."
        )


def _lost_event(plan: TrainingPlan, steps_taken: int, lost_steps: int) -> Event:
    """Return what a fresh key costs: the event of the `lost_steps` taken after the checkpoint.

    If records take turns, it is that of all steps that remain after the checkpoint.
    """
    sampler = plan.sampler
    if isinstance(sampler, RunSampler):
        # With a fresh key other records may have their turns next, and the noise starts anew: what
        # follows is a run of its own, and the reserved plan pays for what the old key has released.
        lost_steps = plan.steps - steps_taken
    if isinstance(sampler, EpochSampler) and steps_taken % sampler.steps:
        raise ValueError(
            "lost_steps can only be given for a checkpoint at the end of an epoch: in the middle "
            "of one, fresh randomness would let a record take part twice."
        )
    multipliers = plan.noise_multipliers[steps_taken : steps_taken + lost_steps]
    return plan.event_of(multipliers) if multipliers else EventSequence(())
