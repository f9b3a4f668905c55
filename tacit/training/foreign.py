"""Loops of somebody else: the clipped sum of losses that they compute, for `Private.backward`.

With `loss_fn` known, the loop's own forward pass is followed by the book-keeping engine: operations
on parameters are intercepted from the moment the batch is handed out until `backward`, and the
backward costs what `Private.step` costs. Otherwise, or if the loop does something else than
`loss_fn`, example i's gradient is found as the backward of losses[i], in batched chunks: right for
any model, but each example's backward runs over the whole batch.
"""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tacit.training.clip import Clip
from tacit.training.distributed import gathered, is_sharded
from tacit.training.engines.batch import as_written
from tacit.training.engines.bookkeeping import Intercept, Stale, plan_for
from tacit.training.engines.tape import Recorder
from tacit.training.engines.vmap import weigh
from tacit.training.gradients.site import Unsupported
from tacit.training.memory import is_out_of_memory
from tacit.training.records import Micro, map_tensors, n_rows
from tacit.training.sums import ClippedSum, trainable

Rows = tuple[Tensor, ...]  # of gradients, one for each example, by parameter
_BUDGET = 2**28  # elements of per-example gradient held at once
_WRAPPERS = ("accelerate", "lightning", "pytorch_lightning")

_DIFFERS = (
    "the loop uses the model in another way than loss_fn does. Make them the same, or give no "
    "loss_fn to make_private: any loop works then, more slowly. Nothing was released."
)


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The user's own optimizer inside the wrapper that Accelerate or Lightning put around it."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]  # both wrappers have it
    return optimizer


class _Follow(Intercept):
    """The engine's interception, with an error that makes sense inside a user's forward."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except (Stale, Unsupported):
            raise RuntimeError(_DIFFERS) from None


class Recording:
    """Follows the forward pass of one handed-out batch. `stop` it before anything else runs."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,  # Any: LossFn or None
        micro: Micro,
        clip: Clip,
        parameters: dict[str, nn.Parameter],
    ) -> None:
        self._model, self._is_sharded = model, is_sharded(model)
        rows, self.device = n_rows(micro.batch), next(iter(parameters.values())).device
        everything = torch.ones(rows, dtype=torch.bool)
        self.mask = (everything if micro.weights is None else micro.weights > 0).to(self.device)
        self.clip, self.parameters = clip, parameters
        self._intercept: Intercept | None = None
        self._stack = ExitStack()
        with ExitStack() as stack:  # leaves what was entered, should anything below fail
            stack.enter_context(as_written())
            if self._is_sharded:
                stack.enter_context(gathered(model))
                self.parameters = trainable(model)  # whole ones, under the same names
            if loss_fn is not None:
                self._follow(stack, loss_fn, micro, rows)
            self._stack = stack.pop_all()

    def _follow(self, stack: ExitStack, loss_fn: Any, micro: Micro, rows: int) -> None:
        # The loop may have moved the model since make_private, and moves its batches itself.
        batch = map_tensors(lambda t: t.to(self.device), micro.batch)
        try:
            plan = plan_for(self._model, loss_fn, batch, self.parameters, rows, 1)
        except Unsupported:
            return
        recorder = Recorder(self.parameters, rows, self.clip)
        self._intercept = stack.enter_context(_Follow(plan, recorder, rows))

    def stop(self) -> None:
        """Intercept nothing from now on."""
        self._stack.close()

    def clipped_sum(self, losses: Tensor) -> ClippedSum:
        """Sum of the clipped gradients of `losses`, one per example. Private. Frees the graph."""
        self.stop()
        whole = gathered(self._model) if self._is_sharded else nullcontext()
        # A loop may call backward inside its autocast: norms and factors are no place for bf16.
        with whole, as_written(), torch.autocast(self.device.type, enabled=False):
            if self._intercept is None:
                return clipped_sum_of(losses, self.parameters, self.clip, self.mask)
            return self._from_the_record(losses, self._intercept)

    def _from_the_record(self, losses: Tensor, intercept: Intercept) -> ClippedSum:
        with intercept.recorder.emptied():
            if not intercept.backward(losses, torch.ones_like(losses)):
                raise RuntimeError(_DIFFERS)  # a parameter was used where no rule saw it
            with torch.no_grad():
                return intercept.recorder.clipped(self.mask, "look")


def clipped_sum_of(
    losses: Tensor, parameters: dict[str, nn.Parameter], clip: Clip, keep: Tensor
) -> ClippedSum:
    """The same from the autograd graph alone; rows where `keep` is False add zero. Private."""
    rows, size = len(losses), max(1, sum(p.numel() for p in parameters.values()))
    step = max(1, min(rows, _BUDGET // size))
    seeds = torch.eye(rows, dtype=losses.dtype, device=losses.device)
    targets = list(parameters.values())
    total: ClippedSum | None = None
    gradients_of = _batched
    for start, stop in pairwise([0, *range(1, rows, step), rows]):
        # The first row alone shows whether rows can go together: dropout in a checkpointed block,
        # say, cannot be drawn again for many at a time.
        is_first, is_last = start == 0, stop == rows
        try:
            gradients = gradients_of(losses, targets, seeds[start:stop], is_first or not is_last)
        except RuntimeError as error:
            if not is_first or is_out_of_memory(error):
                raise
            gradients_of = _one_by_one
            gradients = gradients_of(losses, targets, seeds[start:stop], not is_last)
        part = weigh(dict(zip(parameters, gradients, strict=True)), clip, keep[start:stop])
        total = part if total is None else total + part
    assert total is not None  # a batch has at least one row
    return total


def _batched(losses: Tensor, targets: Sequence[Tensor], seeds: Tensor, keep_graph: bool) -> Rows:
    """Gradient of `losses` for each row of `seeds`."""
    return torch.autograd.grad(
        losses,
        targets,
        grad_outputs=seeds,
        is_grads_batched=True,
        materialize_grads=True,
        allow_unused=True,
        retain_graph=keep_graph,
    )


def _one_by_one(losses: Tensor, targets: Sequence[Tensor], seeds: Tensor, keep_graph: bool) -> Rows:
    """The same, in as many backward passes as there are rows."""
    rows = [
        torch.autograd.grad(
            losses,
            targets,
            grad_outputs=seed,
            materialize_grads=True,
            allow_unused=True,
            retain_graph=keep_graph or number < len(seeds),
        )
        for number, seed in enumerate(seeds, 1)
    ]
    return tuple(map(torch.stack, zip(*rows, strict=True)))
