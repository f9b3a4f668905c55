"""DP-SGD around a model that stays the user's own. Abadi et al. 2016, Algorithm 1.

`Private.step` and `_pay_and_release` are one step, from top to bottom:

1. *draw*: the sampler whose event is billed draws the records of this step, from the run's key and
   the step's number alone (`lots`). Loops over `private` get the lots in order, each once.
2. *map, clip, add* (`lot_sum`): the gradient of each record is that of the program of one example
   (`program`) on this record alone. It is clipped to norm C_g in each group g of parameters (one
   group, if the clip norm is a number); a record whose gradient is not finite adds zero. So adding
   or removing one record moves the sum by at most C_g in each group, and nothing else is assumed of
   the sum below.
3. *pay* (`payments`): before its first release, the run reserves its whole plan in the ledger.
   Each step is ticked off there, durably and in blocks, before anything of it leaves.
4. *noise, divide*: each group is divided by a scale (`Clip.noise_scales`) such that one record
   moves the whole vector by at most 1, gets noise of the step's noise multiplier on a grid, and is
   multiplied by the scale again. With one group the scale is C. The result is divided by the
   declared batch size, never by the drawn one: `p.grad`.
5. *update*: the user's optimizer moves the user's parameters by `p.grad`, which is post-processing.

If the process ends

- before 3: nothing left, and no step was ticked off.
- between 3 and 4: up to one block of steps is ticked off, and nothing of this step left. A process
  that goes on from the checkpoint has a new key. It takes these steps again with other lots and
  other noise, and ticks them off again, out of the reserve of the plan (`checkpoint`); without a
  checkpoint there is no going on, and a new run pays for a plan of its own.
- after 4: who saw `p.grad` saw a release that is paid. Steps that a new process takes again, after
  the newest checkpoint, are other releases, and are ticked off too.

If an error is raised before the step is counted, the lot can be used again in this process, and is
not paid twice. After that (in the optimizer, say) the step is over, whatever moved. The step is
counted before its noise is drawn, so this process never draws that noise for another sum, and
Ctrl-C is held back from there to the end of the update.

What leaves the step is `p.grad` and, if asked for, noisy counts (adaptive clipping) and noisy
losses that are part of the same event. Hooks on the optimizer and the parameters notice what a loop
does between a release and its update (`LastRelease`); they change nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from tacit import accounting
from tacit._slow import told_if_slow
from tacit.events import Event
from tacit.ledger import Entry, Ledger
from tacit.training.adam import tell_noise
from tacit.training.clipping.clip import Clip, ClippedSum
from tacit.training.distributed import Ranks
from tacit.training.loops.epochs import Epoch, StepReports, epochs_of
from tacit.training.loops.foreign import LastRelease
from tacit.training.loops.turns import Turns
from tacit.training.loops.weight_changes import changes_of
from tacit.training.lot_sum import LotSum
from tacit.training.lots.lots import Lot, Lots
from tacit.training.noise.key import Key
from tacit.training.noise.noisy_mean import NoisyMean, replayed_update
from tacit.training.plan import TrainingPlan
from tacit.training.resume import checkpoint as restarts
from tacit.training.resume.checkpoint_file import Checkpoint, State
from tacit.training.resume.interrupts import Uninterrupted
from tacit.training.resume.payments import Payments
from tacit.training.withheld_errors import ErrorGuard

if TYPE_CHECKING:
    from tacit.training.clipping.arithmetic import Arithmetic
    from tacit.training.ema import TailMean
    from tacit.training.gpu.graph_replay import ReplayedStep


@dataclass
class Position:
    """Where a run is: all that changes from step to step but weights, optimizer and payments."""

    end: int  # steps after which the run ends: all of the plan, unless lost steps are skipped
    clip_moves: tuple[float, ...]  # factors of the clip norms, from adaptive clipping
    steps_taken: int = 0
    first_step: int = 0  # of this process
    kept: int | None = None  # step of the newest checkpoint
    is_replay: bool = False


class Private:
    """A private run: iterate over it for lots and pass each to `step`. Made by `make_private`.

    Attributes
    ----------
    ledger
        Where the whole plan is reserved before the first release.
    isolation
        How examples are kept apart, as the certificate says.
    arithmetic
        What is proved about the rounding of the sums, as a number and in words.
    is_reproducible
        Whether a seed was given: anyone who knows the seed can compute the noise again.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        parameters: dict[str, nn.Parameter],
        plan: TrainingPlan,
        lots: Lots,
        lot_sum: LotSum,
        isolation: str,
        guard: ErrorGuard,
        noise: NoisyMean,
        ledger: Ledger,
        ranks: Ranks,
        is_reproducible: bool,
        arithmetic: "Arithmetic",
        checkpoint: Checkpoint | None = None,
        mean: "TailMean | None" = None,
        reports: StepReports | None = None,
    ) -> None:
        self.ledger, self.isolation, self.arithmetic = ledger, isolation, arithmetic
        self.is_reproducible = is_reproducible
        self._model, self._optimizer, self._parameters = model, optimizer, parameters
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._plan, self._lots, self._lot_sum, self._noise = plan, lots, lot_sum, noise
        self._guard, self._ranks, self._reports, self._mean = guard, ranks, reports, mean
        self._position = Position(plan.steps, (1.0,) * len(plan.clip.clip_norms))
        self._bill, self._turns = Payments(ledger, plan), Turns()
        self._changes = changes_of(model)
        self._release = LastRelease(optimizer, parameters, self._changes)
        self._checkpoint, self._seeded = checkpoint, lots.key if is_reproducible else None
        self._salt = Key.fresh()  # of the hash of the records
        self._priced: dict[tuple[Event, float], float] = {}
        is_alone = ranks.size == 1
        self._replayed = replayed_update(
            noise, list(parameters.values()), optimizer, is_alone=is_alone
        )
        # Where nothing but the noise reads a lot's sum, both may be one launch on a GPU: the sum is
        # then computed after the payment, with the release.
        is_float = all(p.dtype == torch.float32 for p in parameters.values())
        is_read = not is_alone or reports is not None or plan.adaptive is not None
        self._may_defer = is_float and not is_read and arithmetic.mode == "fast"

    # The step -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Lot]:
        """Yield the lots of the steps that remain, starting after the last step taken."""
        return self._turns.lots(self, self.steps)

    def step(self, lot: Lot, *, update: bool = True) -> None:
        """Take one step of DP-SGD on `lot`, including the optimizer's step if `update`.

        Gradients are clipped and summed, the step is paid, and noise is added. Guarantee: the
        release is one step of `training_event`. After an error before the release the same lot can
        be used again; an interrupt during the release waits for its end. `p.grad` then holds the
        release, unless the optimizer wrote into it, as torch's Nesterov momentum does on a GPU.
        Copy it to keep it: the next step may overwrite its memory.
        """
        with self._turns.one_step, self._lots.on_device():
            self._turns.require_next(lot, self)
            self._release.require_used(self.steps_taken)
            is_first = self.steps_taken == self._position.first_step
            self._changes.enter_step(self._model, is_first=is_first)
            clip = self._clip()
            for parameter in self._parameters.values():
                parameter.grad = None  # a step that fails leaves no gradient behind
            defer = update and self._may_defer and self._replayed is not None
            slow = told_if_slow("taking the first step") if is_first else nullcontext()
            with slow, self._guard:  # map the program over the lot, clip and add; private
                total, drawn = self._lot_sum(lot, clip, defer=defer and self._lot_sum.compiles)
            deferred = self._lot_sum.deferred() if defer else None
            self._pay_and_release(total, drawn, clip, update=update, deferred=deferred)
            if not update:
                self._release.watch(self._changes.require_unchanged, self._moved_by_release)

    def _pay_and_release(
        self,
        total: ClippedSum,
        drawn: float,
        clip: Clip,
        *,
        update: bool,
        deferred: "ReplayedStep | None",
    ) -> None:
        """Pay for the step and set `p.grad` to the noisy mean of the clipped gradients.

        The sums of all ranks are added first. The optimizer's step follows if `update`. If the sum
        was `deferred`, that replay computes it together with the release.
        """
        at, plan = self._position, self._plan
        step, multiplier = at.steps_taken, self.noise_multiplier
        if total.sums.keys() != self._parameters.keys():
            raise RuntimeError(
                "requires_grad of a parameter was changed during the run. Make a new run instead."
            )
        if self._ranks.size == 1:
            self._bill.pay(step)
        else:  # `total` and `drawn` become those of all ranks, still private
            like = self._parameters if self.arithmetic.mode == "fast" else {}
            total, drawn = self._ranks.pay_and_add(total, drawn, lambda: self._bill.pay(step), like)
        # Divided by its scale, one example moves the sum by at most 1: see `clip`, `arithmetic`.
        scales = self.arithmetic.noise_scales(clip, list(self._parameters))
        scales = [plan.gradient_factor * scale for scale in scales]  # see `noisy_loss`
        sums = self.arithmetic.finished(total.sums, self._parameters, drawn)
        with Uninterrupted():
            for parameter in self._frozen:
                parameter.grad = None  # the optimizer would follow whatever was left there
            if self._mean is not None:
                self._mean.observe(step)
            noise_std = multiplier * self._noise.deviation(step) / plan.expected_batch
            tell_noise(self._optimizer, self._parameters.values(), scales, noise_std)
            at.steps_taken += 1  # first: this noise is not drawn again if the rest fails
            how = {"step": step, "noise_multiplier": multiplier}
            if update and self._replayed is not None:
                self._replayed.release_and_move(sums, scales, deferred=deferred, **how)
            else:
                self._noise.release_into(self._parameters.values(), sums, scales, **how)
                if update:
                    self._optimizer.step()
            if plan.adaptive is not None:  # noisy counts of unclipped examples, paid with the step
                of_step = {"expected_batch": plan.expected_batch, "noise": self._noise}
                at.clip_moves = plan.adaptive.release(
                    at.clip_moves, total.within.tolist(), drawn, step=step, **of_step
                )
            if self._reports is not None:
                self._reports.release_loss(total.loss, noise=self._noise, step=step)
            if update:
                self._moved_by_release()
        if self._reports is not None and self._ranks.rank == 0:
            self._reports.report(self, step)

    def _clip(self) -> Clip:
        """Return the clip rule of the next step, after schedule and adaptive clipping. Public."""
        return self._plan.clip_at(self.steps_taken, self._position.clip_moves)

    # Loops ----------------------------------------------------------------------------------------

    def backward(self, losses: object = None) -> None:
        """Set `p.grad` to the noisy gradient of the lot; call this in place of `loss.backward()`.

        For loops of other libraries. The lot is the one that `for lot in private` yielded last, and
        the losses are those of the `loss_fn` given to `make_private`. The lot is paid and used
        once, as by `step`, and the loop's own optimizer does the rest.

        Each release belongs to one optimizer step. If none has followed, because the loop
        accumulates gradients, the next call raises `RuntimeError` before anything is paid. The loop
        may discard a release by `optimizer.zero_grad()`: it goes on after a warning, because what
        was paid stays paid.
        """
        if losses is not None:
            raise TypeError(
                "private.backward() takes no losses: let the loss_fn of make_private compute them, "
                "one for each example, and call private.backward() for each lot of "
                "`for lot in private`."
            )
        if self._turns.lot is None:
            raise RuntimeError(
                "private.backward() needs a lot of `for lot in private`, and uses each lot once."
            )
        self.step(self._turns.lot, update=False)
        self._turns.lot = None
        self._release.is_unused = True

    def _moved_by_release(self) -> None:
        """After a release has moved the weights: average them if the run is over, and mark them."""
        if self._mean is not None and self.steps_taken == self.steps:
            self._mean.apply_at_end(self.steps_taken)
        self._changes.mark()

    def declare_public_change(self, reason: str) -> None:
        """State that no private record had a part in what was changed of the model up to now.

        A run stops where something other than itself has changed parameters or saved buffers (see
        `weight_changes`). After this call it goes on, and its certificate states `reason`.
        """
        self._changes.declare(reason)
        self._release.allow()

    def require_unchanged(self) -> None:
        """Raise `LearningStep` if something other than this run has changed the model."""
        self._changes.require_unchanged(model=self._model)

    def epochs(self) -> Iterator[Epoch]:
        """Yield the epochs of the run, each of which yields its lots.

        A resumed run begins with what remains of its epoch. An epoch that is left early, by a
        `break`, is yielded again with its remaining lots: every planned step is paid.

            for epoch in private.epochs():
                for batch in epoch:
                    private.step(batch)
        """
        return epochs_of(self)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Give the model the mean weights of the last steps so far inside the block.

        `noise=Banded(...)` averages them, and the model keeps the mean when the run ends. Without
        it, or before the last steps, the model stays as it is. Call this between steps: after the
        last one, it sets the model to the mean for good, if leaving the loop has not done so.
        """
        if self._mean is not None and self.steps_taken == self.steps:
            self._mean.apply_at_end(self.steps_taken)
        if self._mean is None or not self._mean.updates:
            yield self._model
            return
        with self._mean.applied(self.steps_taken) as model:
            yield model

    # What is public -------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of steps of the run, each of which releases one noisy gradient."""
        return self._position.end

    @property
    def steps_taken(self) -> int:
        """Number of steps taken; the run ends when it equals `steps`."""
        return self._position.steps_taken

    @property
    def event(self) -> Event:
        """Event to price: `training_event` and the `also` events given to `make_private`."""
        return self._plan.together(self.training_event)

    @property
    def training_event(self) -> Event:
        """Event of the training steps, which is what the run pays to the ledger.

        It includes the steps that are reserved for a restart, and lost steps that were paid beyond.
        """
        return self._bill.event()

    def epsilon(self, *, delta: float) -> float:
        """Return the epsilon of `event` at `delta`: the cost of the whole run, paid in advance.

        It includes lost steps that were paid beyond the reserve, so it can exceed the epsilon that
        the run was planned for. Stopping early because of the results does not make the run
        cheaper.
        """
        return self.epsilon_at(self._plan.steps, delta=delta)

    def epsilon_at(self, step: int, *, delta: float) -> float:
        """Return the epsilon at `delta` of a run planned to end after `step` steps.

        It is the exact price of the first `step` steps of the plan, of the steps reserved for a
        restart, of the releases in `also`, and of lost steps that were paid beyond the reserve; for
        samplers that are priced by the epoch, of the epochs begun.
        At `private.steps` it equals `private.epsilon`. The run itself costs `private.epsilon` from
        its first step on, also if it is stopped early because of its results. Results are kept, so
        that asking again is free.
        """
        plan = self._plan
        if not isinstance(step, int) or not 0 <= step <= plan.steps:
            raise ValueError(f"step must be a whole number from 0 to {plan.steps}, got {step!r}.")
        event = plan.together(self._bill.event(plan.event_until(step)))
        if (event, delta) not in self._priced:
            self._priced[event, delta] = accounting.epsilon(
                event, delta=delta, relation=self.ledger.relation
            )
        return self._priced[event, delta]

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier of the next step, or of the last step if the run has finished."""
        return self._plan.noise_at(self.steps_taken)

    @property
    def microbatch(self) -> int:
        """Largest number of rows on the device at once; it is lowered when memory runs out."""
        return self._lots.limit

    @property
    def noisy_losses(self) -> list[float]:
        """The noisy training losses of the steps that this process has taken, oldest first."""
        return [] if self._reports is None else list(self._reports.losses)

    @property
    def info(self) -> dict[str, Any]:  # Any: numbers and lists of them
        """Public facts on the run, by name. Losses, norms and lot sizes are private: left out.

        If `noisy_loss` is released, `gradient_factor` times the noise multiplier and the clip norm
        is the noise of the gradient's sum. `reserve` counts steps that are paid for a restart,
        `repaid` describes lost steps that were paid beyond them. `public_changes` are the reasons
        given to `declare_public_change`.
        """
        plan, repaid = self._plan, [str(event) for event in self._bill.repaid.values()]
        return {
            **({"bands": len(plan.column)} if len(plan.column) > 1 else {}),
            **({"gradient_factor": factor} if (factor := plan.gradient_factor) > 1 else {}),
            **({"reserve": plan.reserve} if plan.reserve else {}),
            **({"repaid": repaid} if repaid else {}),
            **({"public_changes": declared} if (declared := list(self._changes.declared)) else {}),
            "step": self.steps_taken,
            "steps": self.steps,
            "clip_norms": list(self._clip().clip_norms),
            "noise_multiplier": self.noise_multiplier,
            "expected_batch": plan.expected_batch,
            "n_records": plan.n_records,
            "is_reproducible": self.is_reproducible,
        }

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

    def __len__(self) -> int:
        """Return the planned number of steps, including those before a restart.

        Lightning and Trainer need this number to resume a run.
        """
        return self.steps

    def __repr__(self) -> str:
        return f"Private(step {self.steps_taken} of {self.steps}, {self.event})"

    # Payments and restarts ------------------------------------------------------------------------

    @property
    def payments(self) -> list[Entry]:
        """The entries of the ledger for this run: its plan, and lost steps that were paid again."""
        return self._bill.entries

    def pay_whole(self) -> None:
        """Tick off all steps, for a process without this ledger that loads the checkpoint next."""
        self._bill.hand_over()
        restarts.keep(self, now=True)

    def state_dict(self) -> State:
        """Return position and payments of the run, for `load_state_dict`. It holds no key.

        Call this after the optimizer's step, and save it with the states of model and optimizer;
        for a sharded model call it on every rank. `make_private(..., checkpoint=path)` does all of
        that by itself.
        """
        return restarts.saved_state(self)

    def load_state_dict(self, state: State, *, lost_steps: str | None = None) -> None:
        """Continue from a `state_dict()`; load model and optimizer as saved at the same moment.

        Guarantee: this process has a key of its own, so no noise is used twice, whatever has
        changed since. Steps that were ticked off after the checkpoint are lost: they are taken
        again and paid again, and a warning says how many they are and what the run costs. If that
        is more than was promised, `BudgetExceeded` says so, unless `lost_steps` says what to do;
        see `Checkpoint`.
        """
        restarts.load_saved_state(self, state, lost_steps)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError("a private run cannot be copied: the copy would draw the same noise again.")
