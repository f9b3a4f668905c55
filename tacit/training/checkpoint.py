"""Payment, interrupts and restarts: every process of a run has its own key, and pays for its steps.

The whole plan is reserved in the ledger before the first release, and steps are ticked off before
they are taken. A checkpoint holds the position of the run and what was paid, and no key: a process
that continues a run draws other lots and other noise. So no two sums ever share noise, whatever was
changed meanwhile. Steps after the checkpoint are lost; taken again, they are ticked off again, out
of the reserve of the plan. docs/guarantees.md has the proof, also for correlated noise.

A checkpoint is as private as the records: it holds weights that no one may have seen yet.
"""

import signal
import threading
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn

from tacit import accounting
from tacit._check import one_of
from tacit.errors import BudgetExceeded, LedgerError
from tacit.events import Event, from_dict
from tacit.events import Sequence as EventSequence
from tacit.ledger import Entry, Ledger
from tacit.ledger import Plan as ReservedPlan
from tacit.training.checkpoint_file import (
    CHOICES,
    Checkpoint,
    CheckpointWriter,
    LostSteps,
    State,
)
from tacit.training.clip import Clip
from tacit.training.distributed import Ranks, is_sharded
from tacit.training.ema import TailMean
from tacit.training.key import Key
from tacit.training.lots import Lots
from tacit.training.noise import NoisyMean
from tacit.training.plan import TrainingPlan

try:
    import _signal as _signals  # pyright: ignore[reportMissingImports]  # not of every Python
except ImportError:  # another Python
    _signals = signal

_PLAN, _LOST = "DP-SGD run", "lost steps of run"  # notes in the ledger, before the run's name
_BLOCK = 64  # steps ticked off at a time: a durable write for each costs more than a small step


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
    _clip_moves: tuple[float, ...]
    _parameters: dict[str, nn.Parameter]
    _checkpoint: Checkpoint | None
    _seeded: Key | None  # from which the keys of a reproducible run are derived
    _end: int  # steps after which the run ends: all of the plan, unless lost steps are skipped

    def __init__(self, mean: TailMean | None = None) -> None:
        self._mean = mean  # of the weights, with correlated noise
        self._first_step = 0  # of this process
        self._run = uuid.uuid4().hex
        self._reserved: list[ReservedPlan] = []  # of this run in its ledger
        self._current = 0  # which of them is in use
        self._counted: tuple[str, int] | None = None  # a ledger and its steps, from the checkpoint
        self._handed_over = 0  # steps left that another process has ticked off for this one
        self._ahead = 0  # of these, how many are used at a time
        self._begin = self._paid = 0  # the steps from `_begin` to `_paid` are ticked off
        self._kept: int | None = None  # step of the newest checkpoint
        self._writer: CheckpointWriter | None = None
        self._is_replay = False
        self._one_step = OneStep()
        self._salt = Key.fresh()  # of the hash of the records
        self._repaid: dict[str, Event] = {}  # lost steps that were paid again, by ledger hash

    def __copy__(self) -> NoReturn:
        raise TypeError("a private run cannot be copied: the copy would draw the same noise again.")

    def __deepcopy__(self, _memo: object) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        self.__copy__()

    # Checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return position and payments of the run, for `load_state_dict`. It holds no key.

        Call this after the optimizer's step, and save it with the states of model and optimizer;
        for a sharded model call it on every rank. `make_private(..., checkpoint=path)` does all of
        that by itself.
        """
        if self._is_replay:
            raise ValueError("a replay cannot be saved: nothing that it computes may be continued.")
        if self._plan.piece == 1 and self._writer is None:
            for reserved in self._reserved:
                reserved.close()  # gives back what is ticked off, and not used
        counted = self._counted or (self.ledger.id, 0)
        return {
            "run": self._run,
            "counted": (self.ledger.id, self._steps_ticked_off()) if self._reserved else counted,
            "handed_over": self._handed_over,
            # What may be used before the next file is written: what is left of a block, and one.
            "ahead": self._ahead and self._ahead + (self._begin - self._paid) % self._ahead,
            "repaid": {name: event.to_dict() for name, event in self._repaid.items()},
            "event": self._plan.training_event.to_dict(),
            "unit": self.ledger.unit,
            "is_reproducible": self.is_reproducible,
            "steps_taken": self.steps_taken,
            "end": self._end,
            "clip_moves": list(self._clip_moves),
            "mean": self._mean and self._mean.state(),
            "salt": self._salt.secret.hex(),
        }

    def load_state_dict(self, state: State, *, lost_steps: LostSteps | None = None) -> None:
        """Continue from a `state_dict()`; load model and optimizer as saved at the same moment.

        Guarantee: this process has a key of its own, so no noise is used twice, whatever has
        changed since. Steps that were ticked off after the checkpoint are lost: they are taken
        again and paid again, and a warning says how many they are and what the run costs. If that
        is more than was promised, `BudgetExceeded` says so, unless `lost_steps` says what to do;
        see `Checkpoint`.
        """
        given = "reserve" if self._checkpoint is None else self._checkpoint.lost_steps
        chosen = lost_steps or given
        one_of(CHOICES, lost_steps=chosen)
        self._check(state)
        self._ranks.require_equal("the checkpoint", [state["run"], state["steps_taken"]])
        self._begin_loop()  # lots that were handed out came from another key
        self._run, self._salt = state["run"], Key(bytes.fromhex(state["salt"]))
        self.is_reproducible |= state["is_reproducible"]
        self.steps_taken, self._end = state["steps_taken"], state["end"]
        self._first_step = self.steps_taken
        self._begin = self._paid = self._plan.begin_of(self.steps_taken)
        self._clip_moves, self._kept = tuple(state["clip_moves"]), None
        if self._mean is not None:
            self._mean.load_state(state["mean"])
        self._noise.start_anew(self.steps_taken)
        self._use(self._ranks.share(Key.fresh()))  # so a refusal leaves no key that was used before
        resumed = self._ranks.on_first(lambda: self._resume(state, chosen))
        self._end, self._repaid, attempt = resumed
        own = Key.fresh() if self._seeded is None else self._seeded.of_attempt(attempt)
        self._use(self._ranks.share(own))

    def replay_state(self) -> State:
        """Return the state of the run with its key, for the audit of a finished run alone.

        It is the one exception to the rule that a key ends with its process: with it
        `tacit.experiments.replay_run` computes steps again. Whoever has it can subtract the noise.
        """
        return {
            "key": self._lots.key.secret.hex(),
            "steps_taken": self.steps_taken,
            "clip_moves": list(self._clip_moves),
            "microbatch": self._lots.limit,
            "noise": self._noise.state(),
            "mean": self._mean and self._mean.state(),
        }

    def load_replay(self, state: State) -> None:
        """Compute the steps after a `replay_state()` again; nothing of them may be released."""
        self._is_replay = True
        self.steps_taken = self._first_step = state["steps_taken"]
        self._clip_moves, self._lots.limit = tuple(state["clip_moves"]), state["microbatch"]
        if self._lots.padding is not None:
            self._lots.padding = self._lots.padding.within(state["microbatch"])
        if self._mean is not None:
            self._mean.load_state(state["mean"])
        self._noise.load_state(state["noise"])
        self._use(Key(bytes.fromhex(state["key"])))

    def open_checkpoint(self) -> None:
        """Continue from the file of the checkpoint, if there is one; else from the beginning."""
        if self._checkpoint is None or self._checkpoint.path is None:
            return
        if is_sharded(self._model):
            raise ValueError(
                "checkpoint.path is for a model that one process holds whole. Leave it out, and "
                "save private.state_dict() with the shards in your loop."
            )
        writer = CheckpointWriter(self._checkpoint.path)
        state = self._ranks.on_first(writer.read)
        if state is None and self._ranks.rank == 0 and not self.ledger.is_durable:
            raise ValueError(
                "a checkpoint needs a ledger that outlasts the process, which knows how many steps "
                "were taken: give ledger=tacit.Ledger(FILE)."
            )
        self._writer = writer if self._ranks.rank == 0 else None
        if state is not None:
            for name, part in self._saved_parts().items():
                part.load_state_dict(state[name])

    def keep(self, *, now: bool = False) -> None:
        """Begin to write a checkpoint, if one is due; with `now`, or after the last step, write it.

        Loops call this between two steps.
        """
        if self._writer is None:
            return
        is_over = self.steps_taken == self._end
        is_due = is_over or (self.steps_taken - self._begin) % self._plan.kept_every == 0
        if now or (is_due and self._kept != self.steps_taken):
            self._kept = self.steps_taken
            parts = self._saved_parts()
            self._writer.write({name: part.state_dict() for name, part in parts.items()})
            if now or is_over:
                self._writer.wait()

    def _end_loop(self) -> None:
        """When a loop has got all of its lots, end the run if it is over, and keep that."""
        self._end_run()
        if self.steps_taken == self._end:
            self.keep()

    def _saved_parts(self) -> dict[str, Any]:  # Any: objects with state_dict and load_state_dict
        own = {"model": self._model, "optimizer": self._optimizer, "private": self}
        return own | dict({} if self._checkpoint is None else self._checkpoint.also)

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

    # Restarts -------------------------------------------------------------------------------------

    def _check(self, state: State) -> None:
        """Raise `ValueError` unless what was paid for the saved run pays for this one."""
        first = (state.get("mean") or {}).get("first")
        is_same = state.get("event") == self._plan.training_event.to_dict()
        if not is_same or first != (self._mean and self._mean.first):
            raise ValueError(
                "the checkpoint is of a run with another plan: sampling, noise, steps, reserve and "
                "average have to be those that were paid for. Give the same ones, or begin a new "
                "run without the checkpoint."
            )
        if (state["unit"] == "record") != (self.ledger.unit == "record"):
            raise ValueError(
                f"the checkpoint is of a run that counts the privacy of one {state['unit']}, but "
                f"this run counts that of one {self.ledger.unit}. Give the same users= and a "
                "ledger of the same unit."
            )

    def _resume(self, state: State, lost_steps: LostSteps) -> tuple[int, dict[str, Event], str]:
        """Find out which steps are lost, say so, and pay for them as far as `lost_steps` says.

        Return the last step, the lost steps that were paid again, and what no other process has.
        """
        self._repaid = {name: from_dict(event) for name, event in state["repaid"].items()}
        self._current = 0
        self._open_plans()
        ledger, before = self._counted = state["counted"]
        if self._begin >= self._end:  # the run is over
            return self._end, self._repaid, ""
        if state["handed_over"] and self._writer is None:
            raise ValueError(
                "the steps of this run are counted in the file of its checkpoint: give "
                "checkpoint=FILE to make_private."
            )
        # Who uses steps that were handed over writes the file first, which says how many at most.
        lost = min(state["ahead"], state["handed_over"])
        self._handed_over, self._ahead = state["handed_over"] - lost, self._block
        left = self._handed_over + sum(one.steps - one.taken for one in self._reserved)
        if self._reserved:
            lost += self._steps_ticked_off() - before
        elif not state["handed_over"]:  # then nothing was paid, so nothing was released
            left = self._end
            lost -= before or ledger != self.ledger.id
        if lost < 0:
            raise LedgerError(
                "the ledger does not know the steps that this run has paid for: it is another one, "
                "or an older copy. Use the ledger that the run has written."
            )
        end = self._end_after(lost, left, lost_steps)
        return end, self._repaid, self._attempt(end)

    def _end_after(self, lost: int, left: int, lost_steps: LostSteps) -> int:
        """Return the last step of a run that has `left` paid steps and has lost `lost` others."""
        plan, taken = self._plan, self.steps_taken
        missing = self._end - self._begin - left
        told = f"the run goes on after step {taken:,} with fresh lots and noise"
        if lost > 0:
            told += f"; steps lost after it: up to {lost:,}"
            if self._seeded is not None and lost_steps == "reserve":
                advice = "Give lost_steps='pay' to take them"
                raise ValueError(f"{told}. That is not what its seed gives. {advice}.")
        if missing <= 0:
            if lost > 0:
                warnings.warn(
                    f"{told}, taken again out of the reserve; {self._price()} as planned.",
                    stacklevel=6,
                )
            return self._end
        event, end = plan.lost_event(missing), max(taken, self._begin + left)
        told += (
            f". {missing:,} of the steps that remain are not paid: with them, {self._price(event)}"
            f" instead of {self._price()}"
        )
        fewer = f"lost_steps='skip' ends the run after {end:,} of {plan.steps:,} steps"
        if lost_steps == "skip":
            warnings.warn(f"{told}. The run ends after {end:,} steps instead.", stacklevel=6)
            return end
        if lost_steps == "reserve":
            raise BudgetExceeded(f"{told}. lost_steps='pay' pays for them; {fewer}.")
        try:
            self.ledger.plan(event, note=f"{_LOST} {self._run}", steps=missing)
        except BudgetExceeded as refusal:
            raise BudgetExceeded(f"{told}. The budget has no room for them; {fewer}.") from refusal
        self._open_plans()
        warnings.warn(f"{told}. They are paid.", stacklevel=6)
        return self._end

    def _price(self, more: Event | None = None) -> str:
        """Return the epsilon of the run in words, with one more payment if it is given."""
        extra = () if more is None else (more,)
        delta = self._plan.delta or 0.1 / self._plan.n_records
        event = EventSequence((self._plan.together(self._with_repaid()), *extra))
        epsilon = accounting.epsilon(event, delta=delta, relation=self.ledger.relation)
        return f"epsilon {epsilon:.4g} at delta {delta:.3g}"

    def _attempt(self, end: int) -> str:
        """Return what no other process of a seeded run has: the first step that it ticks off."""
        if self._seeded is None or self._begin >= end:
            return ""
        if self._handed_over:  # this number is in the file before one of them is used
            return f"handed over, {len(self._repaid)} paid again, {self._handed_over} left"
        number = self._tick_off()
        return f"plan {self._reserved[self._current].id}, step {number}"

    # Payment --------------------------------------------------------------------------------------

    @property
    def payments(self) -> list[Entry]:
        """The entries of the ledger for this run: its plan, and lost steps that were paid again."""
        notes = f"{_PLAN} {self._run}", f"{_LOST} {self._run}"
        return [entry for entry in self.ledger.history() if entry.note in notes]

    def pay_whole(self) -> None:
        """Tick off all steps, for a process without this ledger that loads the checkpoint next."""
        self._reserve()
        for reserved in self._reserved:
            for _ in range(reserved.steps - reserved.taken):
                self._handed_over += bool(reserved.step())
        self._ahead = 0  # this process uses none of them
        self.keep(now=True)

    def _pay(self) -> None:
        """Pay for the next step out of the reserved plan; raise `BudgetExceeded` if that fails."""
        while self._paid <= self.steps_taken:
            self._tick_off()

    def _tick_off(self) -> int:
        """Tick off one more step, durably, and return its number in the plan."""
        if self._writer is not None and (self._paid - self._begin) % self._block == 0:
            self._writer.wait()  # no crash loses more than one block
        if self._handed_over:
            self._handed_over -= 1
            self._paid += 1
            return self._handed_over
        self._reserve()
        try:
            number = self._reserved[self._current].step()
        except BudgetExceeded:
            if self._current + 1 == len(self._reserved):
                raise
            self._current += 1
            return self._tick_off()
        self._paid += 1
        return number

    @property
    def _block(self) -> int:
        """Steps that are ticked off at a time: no more than the reserve, and whole pieces."""
        plan = self._plan
        return plan.reserve or (plan.piece if plan.piece > 1 else min(_BLOCK, plan.steps))

    def _reserve(self) -> None:
        """Reserve the whole plan of the run in the ledger, before its first step."""
        if not self._reserved:
            self._open_plans()  # another process that has this checkpoint may have reserved it
        if not self._reserved:
            plan = self._plan
            steps = plan.steps + plan.reserve
            self.ledger.plan(plan.training_event, note=f"{_PLAN} {self._run}", steps=steps)
            self._open_plans()

    def _open_plans(self) -> None:
        """Find the plans of this run in the ledger, in the order in which they were paid."""
        found = self.payments
        self._reserved = [self.ledger.resume(entry.id, claim=self._block) for entry in found]
        self._repaid |= {e.hash: e.event for e in found if e.note.startswith(_LOST)}

    def _steps_ticked_off(self) -> int:
        return sum(plan.taken for plan in self._reserved)

    def _with_repaid(self, training: Event | None = None) -> Event:
        """Return one event of `training`, by default the plan's, and of lost steps paid again."""
        training = self._plan.training_event if training is None else training
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
        if self._mean is not None and self.steps_taken == self._end:
            self._mean.apply_at_end(self.steps_taken)

    def _use(self, key: Key) -> None:
        self._lots.use(key)
        self._noise.use(key)

    def _clip(self) -> Clip:
        """Return the clip rule of the next step, after schedule and adaptive clipping. Public."""
        return self._plan.clip_at(self.steps_taken, self._clip_moves)

    def _begin_loop(self) -> int:
        raise NotImplementedError  # `ForeignLoops` has it


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
