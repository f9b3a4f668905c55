"""DP-SGD around a model that stays the user's own. Abadi et al. 2016, Algorithm 1.

One step: draw a lot, clip each example's gradient, add the clipped gradients, pay, add noise once,
divide by the declared batch size, and let the user's optimizer move the user's parameters. Nothing
is attached to either of them: all that leaves the step is `p.grad`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from tacit.events import Event
from tacit.ledger import Ledger
from tacit.training.checkpoint import Checkpoint, Uninterrupted
from tacit.training.distributed import Ranks
from tacit.training.engines import Clip, ClippedSum, LotSum, TracedLotSum
from tacit.training.foreign import ForeignLoops
from tacit.training.lots import Lot, Lots
from tacit.training.noise import NoisyMean, replayed_update
from tacit.training.plan import TrainingPlan

if TYPE_CHECKING:
    from tacit.training.epochs import StepReports
    from tacit.training.foreign import Arithmetic, Isolation, ReplayedStep, TailMean


class Private(ForeignLoops):
    """A private run: iterate over it for lots and pass each to `step`. Made by `make_private`.

    `backward` serves loops of other libraries (`foreign`); `state_dict` and `load_state_dict` serve
    restarts (`checkpoint`).

    Attributes
    ----------
    steps, steps_taken
        Number of planned steps and of steps taken; the run ends when they are equal.
    ledger
        Where the whole plan is reserved before the first release.
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
        lot_sum: LotSum | TracedLotSum,
        isolation: "Isolation",
        noise: NoisyMean,
        ledger: Ledger,
        ranks: Ranks,
        is_reproducible: bool,
        arithmetic: "Arithmetic",
        checkpoint: Checkpoint | None = None,
        mean: "TailMean | None" = None,
        reports: "StepReports | None" = None,
    ) -> None:
        super().__init__(isolation, arithmetic, mean)
        self.ledger = ledger
        self.is_reproducible = is_reproducible
        self._seeded = lots.key if is_reproducible else None
        self._checkpoint, self._end = checkpoint, plan.steps
        self.steps_taken = 0
        self._reports, self._priced = reports, {}
        self._model = model
        self._optimizer = optimizer
        self._parameters = parameters
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._plan = plan
        self._lots = lots
        self._lot_sum = lot_sum
        self._noise = noise
        self._replayed = replayed_update(
            noise, list(parameters.values()), optimizer, is_alone=ranks.size == 1
        )
        self._ranks = ranks
        self._clip_moves = (1.0,) * len(plan.clip.clip_norms)  # factors from adaptive clipping

    # The step -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Lot]:
        """Yield the lots of the steps that remain, starting after the last step taken."""
        return self.lots_until(self.steps)

    def lots_until(self, end: int) -> Iterator[Lot]:
        """Yield the lots of the steps that remain before step `end`."""
        mine = self._begin_loop()
        self._note_end(end)
        try:
            for lot in self._lots.from_step(self.steps_taken, min(end, self._end)):
                self.keep()
                self._lot = lot
                yield lot
                self._check_loop(mine)
                if self.steps_taken == lot.step:
                    raise RuntimeError(
                        "the last lot was drawn but not used. Every lot is a step, whatever it "
                        "holds: call private.step(batch), or private.backward(), for each before "
                        "the next is fetched."
                    )
        finally:
            self._leave_loop(mine)
        self._end_loop()

    def step(self, lot: Lot, *, update: bool = True) -> None:
        """Take one step of DP-SGD on `lot`, including the optimizer's step if `update`.

        Gradients are clipped and summed, the step is paid, and noise is added. Guarantee: the
        release is one step of `training_event`. Interrupted before the release, nothing has changed
        and the same lot can be used again; an interrupt during the release waits for its end.
        `p.grad` then holds the release, unless the optimizer wrote into it, as torch's Nesterov
        momentum does on a GPU. Copy it to keep it: the next step may overwrite its memory.
        """
        with self._one_step, self._lots.on_device():
            self._check_turn(lot)
            if self._hook is not None:  # a release of `backward` came before
                self._check_last_release()
            if self.steps_taken >= self._isolation.next_check:
                self._check_isolation()
            clip = self._clip()
            for parameter in self._parameters.values():
                parameter.grad = None  # a step that fails leaves no gradient behind
            may_defer = update and self._replayed is not None and self._may_defer()
            options = {"defer": True} if may_defer else {}
            with self._guard:  # clip and add; private
                total, drawn = self._lot_sum(lot, clip, **options)
            deferred = self._lot_sum.deferred() if options else None
            self._pay_and_release(total, drawn, clip, is_own_loop=update, deferred=deferred)

    def _pay_and_release(
        self,
        total: ClippedSum,
        drawn: float,
        clip: Clip,
        *,
        is_own_loop: bool,
        deferred: "ReplayedStep | None",
    ) -> None:
        """Pay for the step and set `p.grad` to the noisy mean of the clipped gradients.

        The sums of all ranks are added first. The optimizer's step follows if `is_own_loop`. If the
        sum was `deferred`, that replay computes it together with the release.
        """
        if total.sums.keys() != self._parameters.keys():
            raise RuntimeError(
                "requires_grad of a parameter was changed during the run. Make a new run instead."
            )
        if self._ranks.size == 1:
            self._pay()
        else:  # `total` and `drawn` become those of all ranks, still private
            like = self._parameters if self.arithmetic.mode == "fast" else {}
            total, drawn = self._ranks.pay_and_add(total, drawn, self._pay, like)
        # Divided by its scale, one example moves the sum by at most 1: see `clip`, `arithmetic`.
        scales = self.arithmetic.noise_scales(clip, list(self._parameters))
        scales = [self._plan.gradient_factor * scale for scale in scales]  # see `noisy_loss`
        sums = self.arithmetic.finished(total.sums, self._parameters, drawn)
        step, multiplier = self.steps_taken, self.noise_multiplier
        with Uninterrupted():
            for parameter in self._frozen:
                parameter.grad = None  # the optimizer would follow whatever was left there
            self._observe(scales)
            self.steps_taken += 1  # first: this noise is not drawn again if the rest fails
            if is_own_loop and self._replayed is not None:
                self._replayed.release_and_move(
                    sums, scales, step=step, noise_multiplier=multiplier, deferred=deferred
                )
            else:
                self._noise.release_into(
                    self._parameters.values(), sums, scales, step=step, noise_multiplier=multiplier
                )
                if is_own_loop:
                    self._optimizer.step()
            self._adapt(total, drawn, step)
            if self._reports is not None:
                self._reports.release_loss(total.loss, noise=self._noise, step=step)
            if is_own_loop:
                self._end_run()
        if self._reports is not None:
            self._report(step)

    def _adapt(self, total: ClippedSum, drawn: float, step: int) -> None:
        """Adjust adaptive clip norms by noisy counts of unclipped examples, paid with the step."""
        if self._plan.adaptive is not None:
            self._clip_moves = self._plan.adaptive.release(
                self._clip_moves,
                total.within.tolist(),
                drawn,
                noise=self._noise,
                step=step,
                expected_batch=self._plan.expected_batch,
            )

    def _check_turn(self, lot: Lot) -> None:
        if not isinstance(lot, Lot):
            raise TypeError(
                f"batch must come from `for batch in private`, got {type(lot).__name__}: only lots "
                "that were drawn as billed may be stepped on."
            )
        if (lot.source, lot.key, lot.step) != (self._lots, self._lots.key, self.steps_taken):
            raise ValueError("this lot is of another step or run; each is used once, in order.")

    # What is public -------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of steps of the run, each of which releases one noisy gradient."""
        return self._end

    @property
    def event(self) -> Event:
        """Event to price: `training_event` and the `also` events given to `make_private`."""
        return self._plan.together(self.training_event)

    @property
    def training_event(self) -> Event:
        """Event of the training steps, which is what the run pays to the ledger.

        It includes the steps that are reserved for a restart, and lost steps that were paid beyond.
        """
        return self._with_repaid()

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier of the next step, or of the last step if the run has finished."""
        return self._plan.noise_at(self.steps_taken)

    @property
    def microbatch(self) -> int:
        """Largest number of rows on the device at once; it is lowered when memory runs out."""
        return self._lots.limit

    def __len__(self) -> int:
        """Return the planned number of steps, including those before a restart.

        Lightning and Trainer need this number to resume a run.
        """
        return self.steps

    def __repr__(self) -> str:
        return f"Private(step {self.steps_taken} of {self.steps}, {self.event})"
