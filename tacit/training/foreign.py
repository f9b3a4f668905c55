"""Loops that somebody else owns: Lightning, Accelerate, Trainer, or the user's own plain loop.

Such a loop gets microbatches (or whole lots), computes the losses itself and calls
`private.backward(losses)` in place of `loss.backward()`. With `loss_fn` given to `make_private`,
the loop's own forward pass is followed by the book-keeping engine: operations on parameters are
intercepted from the moment the microbatch is handed out until `backward`, and the backward costs
what an uncompiled `Private.step` costs. Without `loss_fn`, example i's gradient is the backward of
losses[i]: right for any model, but each example's backward runs over the whole microbatch.

A loop may also leave the losses to `loss_fn` and call `private.backward()` for each lot: the sum is
then that of `Private.step`, compiled if the run compiles, and the loop's optimizer does the rest.
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tacit.errors import IncompatibleModel
from tacit.training.arithmetic import Arithmetic
from tacit.training.checkpoint_file import State
from tacit.training.clip import Clip, ClippedSum, trainable
from tacit.training.distributed import gathered, is_sharded
from tacit.training.ema import TailMean
from tacit.training.engines.bookkeeping import Intercept, Tape, confirmed_trace
from tacit.training.engines.examples import Examples, as_written
from tacit.training.engines.loop import clipped_sum_of
from tacit.training.engines.trace import undisturbed
from tacit.training.epochs import EpochLoops
from tacit.training.gradients.site import Stale, Unsupported
from tacit.training.key import randomness, reseed
from tacit.training.lots import Lot
from tacit.training.mixing import check_layers, norm_layers
from tacit.training.noisy_loss import with_loss
from tacit.training.records import Microbatch
from tacit.training.rounding import is_close
from tacit.training.tree import (
    Batch,
    LossFn,
    current_device,
    map_tensors,
    n_rows,
    require_gradient,
)

if TYPE_CHECKING:
    from tacit.training.gpu.graph_replay import ReplayedStep  # noqa: F401  # `private` has it from here
    from tacit.training.isolation import Isolation

_WRAPPERS = ("accelerate", "lightning", "pytorch_lightning")

_UNTESTED = (
    "the losses of the loop are not those of loss_fn, which was tested for examples that influence "
    "each other; so the loop counts as not tested. Make loss_fn compute what the loop computes."
)
_DIFFERS = (
    "the loop uses the model in another way than loss_fn does. Make them the same, or give no "
    "loss_fn to make_private: any loop works then, more slowly. Nothing was released."
)


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the torch optimizer inside a wrapper of Accelerate or Lightning, if there is one."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]  # both wrappers have it
    return optimizer


class ForeignLoops(EpochLoops):
    """The methods of a private run for training loops of other libraries. Base of `Private`.

    It keeps track of the loop that is running, the microbatch that the loop holds, and the clipped
    sum of the lot's microbatches so far.
    """

    _loss_fn: LossFn | None
    _lot_sum: Any  # a callable: how lots are summed
    _parameters: dict[str, nn.Parameter]
    _replayed: Any  # `RecordedUpdate`, or None

    def __init__(
        self,
        model: nn.Module,
        isolation: "Isolation",
        arithmetic: Arithmetic,
        mean: TailMean | None = None,
    ) -> None:
        super().__init__(mean)
        self.arithmetic = arithmetic
        self._isolation = isolation
        self._guard = isolation.guard
        self._norms = norm_layers(model)
        self._loop = 0  # number of the newest loop
        self._handed_out: _HandedOut | None = None
        self._sum_so_far: tuple[ClippedSum, int] | None = None
        self._lot: Lot | None = None  # which a loop over the run holds
        self._at_end: RemovableHandle | None = None

    def batches(self) -> Iterator[Batch]:
        """Yield microbatches for a loop that calls `backward` on each and then the optimizer.

        A lot that does not fit in memory comes in several microbatches. Until the last of them
        `p.grad` stays None, so the loop's `optimizer.step()` moves nothing. An empty lot comes as
        one row of zeros with weight 0. A rank with fewer microbatches than other ranks gets such
        rows too, because a wrapped model may wait for all ranks in every forward pass.
        """
        return self.batches_until(self._end)

    def batches_until(self, end: int) -> Iterator[Batch]:
        """Yield the microbatches of `batches` for the steps that remain before step `end`."""
        mine = self._begin_loop()
        self._note_end(end)
        for lot in self._lots.from_step(self.steps_taken, min(end, self._end)):
            self.keep()
            self._sum_so_far = None
            microbatches, most = lot.microbatches(), self._lots.most_batches(lot.step)
            microbatch, number = next(microbatches, None), 0
            while microbatch is not None or number < most:
                following, number = next(microbatches, None), number + 1
                microbatch = self._lots.nothing() if microbatch is None else microbatch.finite()
                is_last = following is None and number >= most
                if self.steps_taken != lot.step:
                    raise RuntimeError(
                        "the step of this lot was taken elsewhere; each is used once."
                    )
                self._hand_out(microbatch, is_last=is_last, number=number)
                try:
                    yield self._lots.records.for_loop(microbatch.batch)
                    self._check_loop(mine)
                    self._check_used(lot.step, is_last=is_last)
                finally:
                    self._end_turn(mine)
                microbatch = following
        self._end_loop()

    def backward(self, losses: Tensor | None = None) -> None:
        """Add up the microbatch's clipped gradients; call this in place of `loss.backward()`.

        `losses` holds one loss per row of the microbatch that was yielded last: per example, or per
        record of each user. Afterwards `p.grad` is the noisy gradient, or None while microbatches
        of the lot are still to come.

        Without `losses`, those of `loss_fn` on the lot that was yielded last are used. Such a loop
        iterates over `private`, need not unpack the lot, and is as fast as `private.step`: only
        this way are steps of a loop compiled.
        """
        if losses is None:
            self._backward_by_loss_fn()
            return
        with self._one_step:
            if (handed := self._handed_out) is None:
                raise RuntimeError("private.backward needs a batch from private or .batches().")
            self._take_back()
            so_far, self._sum_so_far = self._sum_so_far, None  # lost if anything below fails
            check_layers(self._norms)
            losses = self._lots.records.losses_of_examples(losses, handed.microbatch.batch)
            require_gradient(losses)
            with current_device(losses.device):
                total = self._guard(handed.forward.clipped_sum, losses)  # private
                total = with_loss(total, self._plan.noisy_loss, losses, handed.forward.mask)
                drawn = handed.microbatch.size  # private
                if so_far is not None:
                    total, drawn = so_far[0] + total, so_far[1] + drawn
                for parameter in self._parameters.values():
                    parameter.grad = None
                if handed.tested is not None:
                    self._compare_with_loss_fn(handed, losses)
                if handed.is_last:
                    if self.steps_taken >= self._isolation.next_check:
                        self._check_isolation()
                    self._pay_and_release(total, drawn, handed.forward.clip)
                    self._end_with_the_optimizer()
                else:
                    self._sum_so_far = total, drawn

    def _backward_by_loss_fn(self) -> None:
        if self._lot is None:
            raise RuntimeError(
                "private.backward() without losses needs a lot of `for lot in private`, and uses "
                "each lot once. Loops over private.batches() give their own losses."
            )
        self.step(self._lot, update=False)
        self._lot = None
        self._end_with_the_optimizer()

    def state_dict(self) -> State:
        """Return position and payments of the run, for `load_state_dict`. It holds no key.

        Call this after the optimizer's step, and save it with the states of model and optimizer. A
        run in which examples were seen to influence each other cannot be continued.
        """
        if self._isolation.is_void:
            raise IncompatibleModel(f"{self._isolation.statement}. Begin a new run.")
        return super().state_dict()

    def _check_isolation(self) -> None:
        """Test the program on this step's lot, before it is paid for; see `isolation`."""
        lot = self._lots.lot(self.steps_taken)
        self._isolation.check_lot(lot, self._lots.key, self._ranks)

    def _compare_with_loss_fn(self, handed: "_HandedOut", losses: Tensor) -> None:
        """Withdraw the statement that the program was tested if the loop computes something else.

        What was tested is `loss_fn`. A loop that gives the same losses is taken to do the same.
        """
        seed, device = self._lots.seed(self.steps_taken) + handed.number, self._lots.records.device
        with gathered(self._model), as_written(), torch.no_grad(), randomness(seed, device):
            expected = self._guard(self._isolation.losses_of_batch, handed.tested)
        if not is_close(losses.detach(), expected):
            self._isolation.is_of_loop = False
            warnings.warn(_UNTESTED, RuntimeWarning, stacklevel=3)

    @property
    def isolation(self) -> str:
        """How it was made sure that no example influences another one, as the certificate says.

        "by construction", "tested, n checks", "not tested", or, after a test has failed, that the
        run has no guarantee: then none of its releases has, the earlier ones included.
        """
        return self._isolation.statement

    def chance_of_missing(self, share: float) -> float:
        """Return a bound on the chance that mixing in a `share` of the lots was not found so far.

        It is the chance over the random tests, 0 if examples are kept apart by construction, and 1
        if nothing was tested; see docs/isolation.md.
        """
        return self._isolation.chance_of_missing(share)

    def _begin_loop(self) -> int:
        """Begin a new loop over the lots, end the one before it, and return the new one's number.

        Two loops at the same time could release parts of one lot twice.
        """
        self._take_back()
        self._lot = None
        self._loop += 1
        return self._loop

    def _check_loop(self, loop: int) -> None:
        if loop != self._loop:
            raise RuntimeError("another loop over this run has begun; continue with that one.")

    def _end_turn(self, loop: int) -> None:
        if loop == self._loop:  # an older loop holds nothing
            self._take_back()
            self._lot = None
            self._end_run()  # the loop goes on or is left, so the optimizer has taken its step
            if self._at_end is not None:
                self._at_end.remove()

    def _end_with_the_optimizer(self) -> None:
        """After the last release, end the run when the optimizer has taken its step.

        A loop of another library may stop then, and keep its iterator of batches.
        """
        if self._mean is None or self.steps_taken < self._end:
            return
        end = WeakMethod(self._end_run)  # the optimizer must not keep the run alive

        def after_step(*_: object) -> None:
            if (end_run := end()) is not None:
                end_run()

        self._at_end = self._optimizer.register_step_post_hook(after_step)

    def _take_back(self) -> None:
        """Stop intercepting the operations of the user's loop, until the next microbatch."""
        if self._handed_out is not None:
            self._handed_out.forward.stop()
            self._handed_out = None

    def _hand_out_whole(self, microbatch: Microbatch, step: int, loop: int) -> None:
        """Begin intercepting for a lot that the current loop unpacks; ignore any other lot."""
        if (step, loop) == (self.steps_taken, self._loop):
            self._hand_out(microbatch, is_last=True)

    def _hand_out(self, microbatch: Microbatch, *, is_last: bool, number: int = 1) -> None:
        if self._isolation.is_certain:
            raise RuntimeError(
                "the program of one example covers private.step(batch) and private.backward() "
                "alone: a loop of your own computes outside of it. Leave its losses out, or use "
                "isolation='checked' with another engine."
            )
        tested = None
        if self._isolation.tests_loop(self.steps_taken):
            tested = map_tensors(torch.clone, microbatch.batch)  # the loop may write into its batch
        # Random numbers that the loop draws, such as dropout, follow from the key as well.
        reseed(self._lots.seed(self.steps_taken) + number, self._lots.records.device)
        mode = self.arithmetic.mode
        forward = self._guard(
            ForeignForward,
            self._model,
            None if mode == "formed" else self._loss_fn,
            microbatch,
            self._clip(),
            self._parameters,
            bounded=mode == "bounded",
        )
        self._handed_out = _HandedOut(microbatch, forward, is_last, number, tested)

    def _check_used(self, step: int, *, is_last: bool) -> None:
        # One record that makes a batch fail must not take its neighbors out of the sum.
        is_unused = self.steps_taken == step if is_last else self._sum_so_far is None
        if self._handed_out is not None or is_unused:
            raise RuntimeError(
                "private.backward(losses) must succeed once for every batch, before the next is "
                "fetched; after a failure begin another loop, which takes the lot again. A loop "
                "that fetches ahead must iterate over private."
            )

    def _may_defer(self) -> bool:
        """Whether nothing but the noise reads a lot's sum, so that both may be one launch on a GPU.

        The sum is then computed after the payment, with the release.
        """
        is_read = self._ranks.size > 1 or self._plan.adaptive is not None
        is_read = is_read or self._reports is not None or self.arithmetic.mode != "fast"
        if is_read:
            return False
        # Sums of other dtypes are copied before their release.
        is_float = all(p.dtype == torch.float32 for p in self._parameters.values())
        return is_float and getattr(self._lot_sum, "compiles", False)

    def _pay_and_release(self, total: ClippedSum, drawn: float, clip: Clip) -> None:
        raise NotImplementedError  # `Private` has it

    def step(self, lot: Lot, *, update: bool = True) -> None:
        raise NotImplementedError  # `Private` has it


class ForeignForward:
    """Intercepts the forward pass of a user's loop on one microbatch, to clip its gradients.

    Call `stop` before anything else runs. The model and the batch may be on another device than at
    `make_private`, because the loop may move both.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        microbatch: Microbatch,
        clip: Clip,
        parameters: dict[str, nn.Parameter],
        *,
        bounded: bool = False,
    ) -> None:
        self.clip = clip
        self._bounded = bounded
        self._model = model
        self._parameters = parameters
        self._is_sharded = is_sharded(model)
        self._device = next(iter(parameters.values())).device
        everything = torch.ones(n_rows(microbatch.batch), dtype=torch.bool)
        mask = everything if microbatch.weights is None else microbatch.weights > 0
        self.mask = mask.to(self._device)
        self._intercept: Intercept | None = None
        self._stack = ExitStack()
        with ExitStack() as stack:  # leaves what was entered, should anything below fail
            stack.enter_context(as_written())
            if self._is_sharded:
                stack.enter_context(gathered(model))
                self._parameters = trainable(model)  # whole ones, under the same names
            if loss_fn is not None:
                self._follow(stack, loss_fn, microbatch.batch)
            self._stack = stack.pop_all()

    def _follow(self, stack: ExitStack, loss_fn: LossFn, batch: Batch) -> None:
        batch = map_tensors(lambda tensor: tensor.to(self._device), batch)
        examples = Examples(self._model, loss_fn, batch, self.mask)
        try:
            with undisturbed(self._model):
                trace = confirmed_trace(examples, self.clip)
        except Unsupported:
            return
        tape = Tape(self._parameters, len(examples), self.clip, bounded=self._bounded)
        self._intercept = stack.enter_context(_Follow(trace, tape, len(examples)))

    def stop(self) -> None:
        """Stop intercepting operations."""
        self._stack.close()

    def clipped_sum(self, losses: Tensor) -> ClippedSum:
        """Return the clipped sum of the gradients of `losses`; free the autograd graph. Private."""
        self.stop()
        whole = gathered(self._model) if self._is_sharded else nullcontext()
        # A loop may call backward inside its autocast, where norms and factors would be bf16.
        with whole, as_written(), torch.autocast(self._device.type, enabled=False):
            if self._intercept is None:
                return clipped_sum_of(losses, self._parameters, self.clip, self.mask)
            tape = self._intercept.tape
            with tape.emptied():
                try:
                    self._intercept.backward(losses, torch.ones_like(losses))
                except Stale:  # a parameter was used where no rule saw it
                    raise RuntimeError(_DIFFERS) from None
                except Unsupported as error:
                    raise RuntimeError(
                        f"{error.reason}. Give no loss_fn to make_private."
                    ) from None
                with torch.no_grad():
                    return tape.clipped_sum(self.mask, "look")


class _HandedOut(NamedTuple):
    """The microbatch that a user's loop has received and not yet passed to `backward`."""

    microbatch: Microbatch
    forward: ForeignForward
    is_last: bool  # of its lot
    number: int  # among the microbatches of its lot, from 1
    tested: Batch | None  # a copy for `loss_fn`, if the loop is to be compared with it

    def __repr__(self) -> str:
        return "_HandedOut(private)"


class _Follow(Intercept):
    """The book-keeping engine's `Intercept`, with errors that fit a user's forward pass."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except (Stale, Unsupported):
            raise RuntimeError(_DIFFERS) from None
