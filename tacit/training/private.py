"""DP-SGD around a model that stays the user's own. Abadi et al. 2016, Algorithm 1.

One step: draw a lot, clip each example's gradient, add the clipped gradients, pay, add noise once,
divide by the declared batch size, and let the user's optimizer move the user's parameters. Nothing
else is attached to either: what leaves the step is `p.grad`.
"""

import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit import accounting
from tacit.errors import BudgetExceeded
from tacit.events import Event
from tacit.ledger import Ledger
from tacit.training import checkpoint, compatible
from tacit.training._interrupt import uninterrupted
from tacit.training.adam import AdamBC
from tacit.training.bill import Bill
from tacit.training.clip import Clip
from tacit.training.distributed import Ranks
from tacit.training.foreign import Recording
from tacit.training.gpu.recorded_update import Tail
from tacit.training.lots import Lot, Lots
from tacit.training.machinery import Clipper, Machinery
from tacit.training.noise import Key, NoisyMean
from tacit.training.plan import Plan
from tacit.training.records import Batch, Micro, current, n_rows, reseed
from tacit.training.schedules import scaled
from tacit.training.sums import ClippedSum


class Private:
    """A private run: iterate over it for lots and hand each to `step`. Made by `make_private`.

    Attributes
    ----------
    steps, steps_taken
        Planned releases and those made so far; the run ends when they are equal.
    ledger
        Where the whole plan is reserved before the first release.
    is_reproducible
        Whether a seed was given, so that the noise can be computed again by who knows it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: compatible.Loss | None,
        *,
        plan: Plan,
        lots: Lots,
        key: Key,
        ledger: Ledger,
        ranks: Ranks,
        machinery: Machinery,
        secure: bool,
        is_reproducible: bool,
    ) -> None:
        self.ledger, self.is_reproducible, self.steps_taken = ledger, is_reproducible, 0
        self._model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self._parameters = compatible.trainable(model, optimizer)
        self._norms = compatible.norm_layers(model)
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._plan, self._lots, self._ranks = plan, lots, ranks
        self._clipper = Clipper(model, loss_fn, plan.clip, machinery)
        self._key = key
        self._noise = NoisyMean(key, expected_batch=plan.expected_batch, secure=secure)
        self._tail = Tail(
            self._noise, self._parameters.values(), optimizer, is_alone=ranks.size == 1
        )
        self._clip_moves = (1.0,) * len(plan.clip.clip_norms)  # what adaptive clipping learned
        self._bill = Bill(ledger, plan.training_event, steps=plan.steps, run=uuid.uuid4().hex)
        self._handed_out: _HandedOut | None = None
        self._loop = 0  # number of the loop that is on
        self._sum_so_far: tuple[ClippedSum, int] | None = None
        self._loaded_digest: str | None = None  # of the model and optimizer to go on with
        compatible.claim(self, self._parameters, optimizer)

    # The step -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Lot]:
        """The lots that remain, from the one after the last step taken."""
        mine = self._begin_loop()
        for lot in self._lots.from_step(self.steps_taken, self.steps):
            lot.on_unpack = lambda micro, step=lot.step: self._hand_out_whole(micro, step, mine)
            self._sum_so_far = None
            try:
                yield lot
            finally:
                self._end_turn(mine)
            self._check_loop(mine)
            if self.steps_taken == lot.step:
                raise RuntimeError(
                    "the last lot was drawn but not used. Every lot is a step, whatever it holds: "
                    "call private.step(batch), or private.backward(losses), for each."
                )

    def step(self, lot: Lot) -> None:
        """One release: clip, add, pay, noise, divide, and the optimizer's own step.

        Guarantee: this step's share of `event`. Interrupted before the release, nothing has changed
        and the same lot can be stepped on again; an interrupt during it waits for its end. Copy a
        `p.grad` that you keep: on a GPU the next sum comes where it lies, before its noise.
        """
        self._take_back()
        self._check_turn(lot)
        clip = self._clip()
        for parameter in self._parameters.values():
            parameter.grad = None  # on a GPU it may lie where the next sum is put, without noise
        with current(self._lots.records.device):
            total, drawn = self._clipper.sum_over(lot, clip)  # private: this rank's part
            drawn = self._pay_and_add_over_ranks(total, drawn)  # private still
            with uninterrupted():
                self._release(total, drawn, clip, self._tail.release_and_move)

    def _release(
        self, total: ClippedSum, drawn: float, clip: Clip, release: Callable[..., None]
    ) -> None:
        """Noise once, the declared divisor, the result into `p.grad`; paid for by the caller."""
        step, multiple = self.steps_taken, self.noise_multiplier
        for parameter in self._frozen:
            parameter.grad = None  # the optimizer would follow whatever was left there
        groups = zip(clip.groups(list(total.sums)), clip.noise_scales, strict=True)
        scale_of = {name: scale for group, scale in groups for name in group}
        # Divided by its scale, one example moves the sum by at most 1 (proof in clip_rules).
        scales = [scale_of[name] for name in self._parameters]
        sums = [total.sums[name] for name in self._parameters]
        if isinstance(self._optimizer, AdamBC):
            stds = [multiple * scale / self._plan.expected_batch for scale in scales]
            self._optimizer.state_noise(zip(self._parameters.values(), stds, strict=True))
        self.steps_taken += 1  # first: whatever fails below, this step's noise is not drawn again
        release(sums, scales, step=step, noise_multiplier=multiple)
        if self._plan.adaptive is not None:
            self._clip_moves = self._plan.adaptive.release(
                self._clip_moves,
                total.within.tolist(),
                drawn,
                noise=self._noise,
                step=step,
                expected_batch=self._plan.expected_batch,
            )
        if self.steps_taken == self.steps:
            compatible.release_claim(self)

    # Loops that somebody else owns --------------------------------------------------------------

    def batches(self) -> Iterator[Batch]:
        """Physical batches for a loop that calls `backward` on each and then the optimizer.

        A lot that does not fit comes in several batches. Until its last one `p.grad` stays None, so
        the loop's `optimizer.step()` moves nothing. An empty lot comes as one row that weighs zero,
        and so does what a rank lacks to the number of batches of the others: a wrapped model may
        wait for all ranks in every forward pass.
        """
        mine = self._begin_loop()
        for lot in self._lots.from_step(self.steps_taken, self.steps):
            self._sum_so_far = None
            micros, most, number = lot.micros(), self._lots.most_batches(lot.step), 0
            micro = next(micros, None)
            while micro is not None or number < most:
                following, number = next(micros, None), number + 1
                micro = self._lots.nothing() if micro is None else micro
                is_last = following is None and number >= most
                self._hand_out(micro, is_last=is_last, number=number)
                try:
                    yield micro.batch
                    self._check_loop(mine)
                    # One record that makes a batch fail must not take its neighbors out of the sum.
                    left = self.steps_taken == lot.step if is_last else self._sum_so_far is None
                    if self._handed_out is not None or left:
                        raise RuntimeError(
                            "private.backward(losses) must succeed once for every batch, before "
                            "the next is fetched; after a failure begin another loop, which takes "
                            "the lot again. A loop that fetches ahead must iterate over private."
                        )
                finally:
                    self._end_turn(mine)
                micro = following

    def backward(self, losses: Tensor) -> None:
        """In place of `loss.backward()`: losses of the batch handed out last, one per example.

        Leaves in `p.grad` what may be released, or None while more of the lot is to come.
        """
        if (handed := self._handed_out) is None:
            raise RuntimeError("private.backward needs a batch from private or private.batches().")
        self._take_back()
        so_far, self._sum_so_far = self._sum_so_far, None  # a failure ends it
        compatible.check_layers(self._norms)
        compatible.check_losses(losses, n_rows(handed.micro.batch), is_private=True)
        with current(losses.device):
            total = handed.recording.clipped_sum(losses)  # private
            drawn = handed.micro.size  # private
            if so_far is not None:
                total, drawn = so_far[0] + total, so_far[1] + drawn
            for parameter in self._parameters.values():
                parameter.grad = None
            self._sum_so_far = None if handed.is_last else (total, drawn)
            if handed.is_last:
                drawn = self._pay_and_add_over_ranks(total, drawn)
                with uninterrupted():
                    self._release(total, drawn, handed.recording.clip, self._tail.release)

    def _hand_out(self, micro: Micro, *, is_last: bool, number: int = 1) -> None:
        self._check_loaded()
        # The loop's own randomness, such as dropout, is repeated when the run is resumed.
        reseed(self._lots.seed(self.steps_taken) + number, self._lots.records.device)
        recording = Recording(self._model, self._loss_fn, micro, self._clip(), self._parameters)
        self._handed_out = _HandedOut(micro, recording, is_last)

    def _hand_out_whole(self, micro: Micro, step: int, loop: int) -> None:
        # A lot that was stepped on, or left behind, is not released.
        if (step, loop) == (self.steps_taken, self._loop):
            self._hand_out(micro, is_last=True)

    def _begin_loop(self) -> int:
        """Two loops at a time could release parts of one lot twice: only the newest goes on."""
        self._take_back()
        self._loop += 1
        return self._loop

    def _end_turn(self, loop: int) -> None:
        if loop == self._loop:  # a loop that was left behind has nothing out
            self._take_back()

    def _check_loop(self, loop: int) -> None:
        if loop != self._loop:
            raise RuntimeError("another loop over this run has begun; go on with that one.")

    def _take_back(self) -> None:
        """Stop following the loop's operations; nothing is intercepted while no batch is out."""
        if self._handed_out is not None:
            self._handed_out.recording.stop()
            self._handed_out = None

    # What is public -----------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Planned number of releases."""
        return self._plan.steps

    @property
    def event(self) -> Event:
        """What the run and the `also` events of `make_private` do to the private data."""
        return self._plan.event

    @property
    def training_event(self) -> Event:
        """What the training steps alone do to the private data: the run pays for this event."""
        return self._plan.training_event

    @property
    def noise_multiplier(self) -> float:
        """Of the next step; of the last one when the run is over."""
        return self._plan.noise_multipliers[min(self.steps_taken, self.steps - 1)]

    @property
    def microbatch(self) -> int:
        """Most rows run at once; lowered when memory runs out."""
        return self._lots.limit

    @property
    def info(self) -> dict[str, Any]:  # Any: numbers and lists of them
        """Released and declared values only: losses, norms and lot sizes stay private."""
        return {
            "step": self.steps_taken,
            "steps": self.steps,
            "clip_norms": list(self._clip().clip_norms),
            "noise_multiplier": self.noise_multiplier,
            "expected_batch": self._plan.expected_batch,
            "n_records": self._plan.n_records,
            "is_reproducible": self.is_reproducible,
        }

    def epsilon(self, *, delta: float) -> float:
        """Price of the whole run, whether or not it has ended: the plan is paid in advance.

        Stopping early in the light of the results does not make it cheaper.
        """
        return accounting.epsilon(self.event, delta=delta, relation=self.ledger.relation)

    def __len__(self) -> int:
        """Planned lots, also those taken before a restart: so do libraries count on resuming."""
        return self.steps

    def __repr__(self) -> str:
        return f"Private(step {self.steps_taken} of {self.steps}, {self.event})"

    # Restarts -----------------------------------------------------------------------------------

    def state_dict(self) -> checkpoint.State:
        """What `load_state_dict` needs, as JSON values. Secret: it holds the noise's key.

        Take it after the optimizer's step, together with the states of model and optimizer.
        """
        return {
            "version": checkpoint.VERSION,
            "run": self._bill.run,
            "key": self._key.secret.hex(),
            "is_reproducible": self.is_reproducible,
            "steps_taken": self.steps_taken,
            "clip_moves": list(self._clip_moves),
            "microbatch": self._lots.limit,
            "plan": self._plan.fingerprint(),
            "digest": checkpoint.digest(self._model, self._optimizer),
        }

    def load_state_dict(self, state: checkpoint.State, *, lost_steps: int | None = None) -> None:
        """Go on from `state_dict()`; load the model and the optimizer from the same moment.

        Guarantee: with `lost_steps=None` the run repeats, with the same lots and noise, the steps
        taken after the checkpoint, so the bill stays the plan's (see `tacit.training.checkpoint`).
        Otherwise `lost_steps` bounds how many were taken since: they are spent on top of the plan,
        and the run goes on with fresh randomness.
        """
        checkpoint.check(state, self._plan.fingerprint())
        self._ranks.require_equal("the checkpoint", [state["run"], state["steps_taken"]])
        self._begin_loop()  # lots that are out were drawn by another key
        key, digest = Key(bytes.fromhex(state["key"])), None
        if lost_steps is None:
            checkpoint.warn_if_not_repeatable(self._lots.records.device)
            digest = state["digest"]
        else:
            event = checkpoint.lost_event(self._plan, state["steps_taken"], lost_steps)
            note = f"lost steps of run {state['run']}"
            if lost_steps:
                self._ranks.on_first(lambda: self.ledger.spend(event, note=note))
            key = self._ranks.share(Key.fresh())
        self._bill = Bill(self.ledger, self.training_event, steps=self.steps, run=state["run"])
        self.is_reproducible, self._lots.limit = state["is_reproducible"], state["microbatch"]
        self.steps_taken, self._clip_moves = state["steps_taken"], tuple(state["clip_moves"])
        self._loaded_digest = digest
        self._use(key)
        if self.steps_taken == self.steps:
            compatible.release_claim(self)

    def _use(self, key: Key) -> None:
        self._key = key
        self._lots.use(key)
        self._noise.use(key)

    def _clip(self) -> Clip:
        """The clip rule of the next step: public, by schedule and by what was released."""
        scheduled = self._plan.clip_factors[min(self.steps_taken, self.steps - 1)]
        return scaled(self._plan.clip, [scheduled * move for move in self._clip_moves])

    def _check_turn(self, lot: Lot) -> None:
        if not isinstance(lot, Lot):
            raise TypeError(
                f"batch must come from `for batch in private`, got {type(lot).__name__}: only lots "
                "that were drawn as billed may be stepped on."
            )
        whose = (lot.source, lot.key, lot.step)
        if whose != (self._lots, self._key, self.steps_taken):
            raise ValueError("this lot is of another step or run; each is used once, in order.")
        self._check_loaded()
        compatible.check_layers(self._norms)

    def _check_loaded(self) -> None:
        checkpoint.check_digest(self._loaded_digest, self._model, self._optimizer)
        self._loaded_digest = None

    def _pay_and_add_over_ranks(self, total: ClippedSum, drawn: int) -> float:
        """Pay for this step, then put the sum over all ranks in place of this rank's. Private.

        Returns how many records all ranks drew together.
        """
        if total.sums.keys() != self._parameters.keys():
            raise RuntimeError(
                "requires_grad of a parameter was changed during the run. Make a new run instead."
            )
        failure: Exception | None = None
        if self._ranks.rank == 0 or self.ledger.path is None:  # a file is paid by one rank only
            try:
                self._bill.pay(self.steps_taken)
            except Exception as error:  # raised below: the other ranks must hear of it first
                failure = error
        if self._ranks.size == 1:
            if failure is not None:
                raise failure
            return drawn
        for name, value in total.sums.items():
            total.sums[name] = value.contiguous()  # noise goes by place: the same on every rank
        counts = torch.tensor([drawn, failure is not None], dtype=torch.float64)
        counts = counts.to(total.within.device)
        self._ranks.add([*total.sums.values(), total.within, counts])
        if failure is not None:
            raise failure
        if counts[1] > 0:
            raise BudgetExceeded("another rank could not pay for this step; nothing was released.")
        return float(counts[0])


class _HandedOut(NamedTuple):
    """The physical batch that somebody else's loop holds."""

    micro: Micro
    recording: Recording
    is_last: bool
