"""The seam of DP-SGD: the sum of clipped per-example gradients.

Everything that makes clipping fast (the traced program, ghost norms, mixed precision, compiled
graphs) is behind `clipped_sum`. Noise, accounting and the optimizer are in front of it and depend
on none of that.

Guarantee. Let S(D) be the sum over the examples of a batch D. Each example is computed by its own
run of the traced program of one example (`program`), or alone (`record_loop`), and adds a vector
whose norm is at most the clip rule's bound in every group; an example with a non-finite gradient
adds zero. So adding or removing one example moves S by at most `clip.l2_sensitivity`, up to the
rounding of the contraction, for which the factors leave room.
"""

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor, nn

from tacit._check import whole
from tacit.training import record_loop
from tacit.training.batch_norm import check_layers, norm_layers
from tacit.training.clipping.clip import Clip, ClippedSum, call_each
from tacit.training.distributed import gathered, is_sharded
from tacit.training.examples import Examples, views_one_by_one
from tacit.training.lots.records import Microbatch
from tacit.training.lots.users import in_segments
from tacit.training.noise.key import randomness
from tacit.training.noise.noisy_loss import NoisyLoss
from tacit.training.program import mapped
from tacit.training.program.one_example import Untraceable
from tacit.training.rules.operands import Unsupported
from tacit.training.tree import (
    Batch,
    LossFn,
    current_device,
    is_out_of_memory,
    n_rows,
    with_rows,
)

if TYPE_CHECKING:
    from tacit.training.gpu.compiled import CompiledSum
    from tacit.training.gpu.graph_replay import ReplayedStep
    from tacit.training.lots.lots import Lot, PendingMicrobatch
    from tacit.training.program.start import Started

T = TypeVar("T")


def clipped_sum(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    clip: Clip,
    *,
    weights: Tensor | None = None,
    augmentations: int = 1,
    chunk: int | None = None,
    bounded: bool = False,
    segments: Tensor | None = None,
) -> ClippedSum:
    """Return the sum over a batch of each example's clipped gradient. Private.

    The program of one example is traced and mapped over the batch. One that cannot be traced runs
    on one example after the other, after a warning.

    Parameters
    ----------
    model
        Left as it was found: no hooks, no attributes, no `p.grad`.
    loss_fn
        `loss_fn(model, batch)` gives one loss for each example, shape (examples,).
    batch
        Any nesting of tuples, lists and dicts; every tensor in it holds the examples on its first
        axis, except those without axes.
    clip
        `Flat`, `PerLayer`, `PerGroup` or `Automatic`.
    weights
        0 or 1 for each example, shape (examples,). A row of weight 0 adds exactly zero whatever it
        holds, so that batches can be padded to one shape.
    augmentations
        K > 1: the batch holds K views of each example in consecutive rows (examples * K rows), and
        the gradient of an example is the mean over its views (De et al. 2022, arXiv:2204.13650).
    chunk
        Most examples handled at once; memory grows with it, the sum does not depend on it.
    bounded
        Add in float64, and clip such that the effect of rounding is bounded, see
        `tacit.training.clipping.arithmetic`.
    segments
        A whole number for each row, such as that of a user: the gradients of rows with the same
        number are averaged and clipped once, so that "example" stands for "segment" above.

    Examples
    --------
    >>> from torch.nn.functional import mse_loss
    >>> from tacit.training import Flat
    >>> model = nn.Linear(2, 1, bias=False)
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return mse_loss(model(x).squeeze(-1), y, reduction="none")
    >>> batch = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([1e3, 0.0])
    >>> clipped_sum(model, loss_fn, batch, Flat(1.0)).sums["weight"].round(decimals=3)
    tensor([[-0.6000, -0.8000]])
    """
    views = whole(augmentations=augmentations, least=1)
    if segments is not None:
        batch, loss_fn = in_segments(batch, segments, loss_fn)
        views = 1  # the views of a segment's rows are rows of the segment
    check_layers(norm_layers(model))
    examples = Examples(model, loss_fn, batch, _mask(batch, views, weights), views, bounded)
    step = len(examples) if chunk is None else whole(chunk=chunk, least=1)
    with current_device(examples.mask.device):
        if 0 < len(examples) <= step:
            return _summed(examples, clip)
        total = ClippedSum.zeros(model, clip, dtype=torch.float64 if bounded else None)
        for start in range(0, len(examples), step or 1):
            total += _summed(examples.part(start, start + step), clip)
        return total


def _summed(examples: Examples, clip: Clip) -> ClippedSum:
    try:
        return mapped.run(examples, clip)
    except (Untraceable, Unsupported) as error:
        warnings.warn(
            f"The program of one example cannot be traced: {error.reason}. So examples run one at "
            "a time, which is slow.",
            RuntimeWarning,
            stacklevel=3,
        )
    return record_loop.run(examples, clip)


class LotSum:
    """Sums the clipped gradients of a lot, one microbatch after the other.

    Parameters
    ----------
    loss_fn
        Computes one loss per example.
    views, augment
        Each example is repeated `views` times and `augment` turns the repeated rows into views; the
        gradient of an example is the mean over its views.
    compile
        Whether to compile the sum, see `tacit.training.gpu`. With "auto", a program that cannot be
        compiled runs as it is, after one warning. `reason`, why the sum is compiled or not, is
        printed before the first lot.
    bounded
        Whether the rounding of the sum must be bounded (`tacit.training.clipping.arithmetic`).
    noisy_loss
        How the examples' losses are added, if the run releases them; else None.
    started
        The traced program, or the loop over records in its place.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        clip: Clip,
        *,
        started: "Started",
        views: int = 1,
        augment: Callable[[Batch], Batch] | None = None,
        compile: bool | Literal["auto"] = False,
        reason: str = "",
        bounded: bool = False,
        noisy_loss: NoisyLoss | None = None,
    ) -> None:
        self._noisy_loss = noisy_loss
        self._reason = reason
        self._bounded = bounded
        self._model = model
        self._loss_fn = loss_fn
        self._engine = started.engine
        self._views = views
        self._augment = augment
        self._norms = norm_layers(model)
        self._is_sharded = is_sharded(model)
        self._is_on_gpu = next(model.parameters()).is_cuda
        self._may_be_sparse = not (self._is_on_gpu or self._is_sharded)
        self._clip_norm = clip.clip_norms[0]
        self._running: ClippedSum | None = None
        self._compiled: CompiledSum | None = None
        self._may_fail = compile == "auto"
        self._programs = programs = started.programs
        is_fixed = programs is not None and not programs.moving
        if compile is True and not is_fixed:
            raise ValueError(
                "compile=True needs a program that is traced once. This one is traced again for "
                "each lot or runs record by record, as the warning above says. Leave compile out."
            )
        # Also if that fails, as it will again.
        self.compiles = bool(compile) and is_fixed
        if self.compiles and programs is not None:
            from tacit.training.gpu import compiled

            options = {"augmentations": views, "bounded": bounded}
            self._compiled = compiled.CompiledSum(model, loss_fn, clip, programs, **options)

    def __call__(
        self,
        lot: "Lot",
        clip: Clip,
        *,
        masked: bool = False,
        defer: bool = False,
    ) -> tuple[ClippedSum, int]:
        """Return the sum of a lot, and how many records the lot holds. Private.

        With `defer`, the sum of a small lot on a GPU may be only prepared. The caller then computes
        it by the replay that `deferred` returns, before it reads the sum.

        A microbatch that does not fit in memory is summed in halves. A compiled sum assumes finite
        gradients. If some are not, the lot is summed again uncompiled (`masked`), without them.
        """
        if self._norms:
            check_layers(self._norms)
        if self._reason:
            print(self._reason, file=sys.stderr)
            self._reason = ""
        compiled = None if masked else self._compiled
        if compiled is not None:
            if self._programs is not None:
                with self._seeded(lot):
                    self._programs.begin_lot()
            compiled.begin()
            if compiled.has_fixed_rows:
                lot.source.use_few_sizes()
        drawn = 0
        with gathered(self._model) if self._is_sharded else nullcontext(), self._seeded(lot):
            if compiled is None and self._programs is not None:
                self._programs.begin_lot()
            pending = list(lot.pending())
            is_own = compiled is None and not self._is_on_gpu  # no sum is overwritten by the next
            total = None if pending and (is_own or len(pending) == 1) else self._zeros(clip)
            compute = partial(self._clipped_sum, clip=clip, masked=masked)
            for microbatch in pending:
                try:
                    is_deferred = defer and len(pending) == 1
                    parts = self._sum_of_rows(lot, microbatch, clip, compiled, defer=is_deferred)
                    if not parts:
                        fetched, lower_limit = microbatch.fetch(), lot.source.lower_limit
                        for alike in fetched.of_one_shape(lot.source.limit):
                            parts += in_halves(compute, alike, on_halved=lower_limit)
                except Exception as error:
                    if compiled is None or not self._gives_up(error):
                        raise
                    break
                for part in parts:
                    if total is None:
                        total = part
                    else:
                        total += part
                drawn += len(microbatch.indices)
        if compiled is not None and self._compiled is None:
            return self(lot, clip)
        if compiled is not None and not compiled.all_finite():
            return self(lot, clip, masked=True)
        assert total is not None  # there are zeros if nothing was drawn
        return total, drawn

    def deferred(self) -> "ReplayedStep | None":
        """Return the replay that computes the last lot's sum, if it was deferred; once only."""
        if self._compiled is None:
            return None
        found, self._compiled.deferred = self._compiled.deferred, None
        return found

    def _gives_up(self, error: Exception) -> bool:
        """Run uncompiled from now on, after a warning, if `error` says that compiling failed."""
        from tacit.training.gpu.compiled import NotCompiled

        if not isinstance(error, NotCompiled):
            return False
        if not self._may_fail and error.__cause__ is not None:
            raise error.__cause__
        warnings.warn(f"Steps run without compilation: {error}.", RuntimeWarning, stacklevel=4)
        self._compiled = None
        return True

    def _clipped_sum(self, microbatch: Microbatch, clip: Clip, *, masked: bool) -> ClippedSum:
        """Return the clipped sum of a microbatch; the next call may overwrite a compiled sum."""
        batch, weights = microbatch.batch, microbatch.weights
        batch = views_one_by_one(batch, self._views, self._augment)
        if self._compiled is not None and not masked:
            assert weights is not None  # compiled batches are padded
            reuse = not microbatch.is_half  # halves are collected before they are added
            return self._compiled(batch, weights, self._scale(clip), reuse=reuse)
        mask = _mask(batch, self._views, weights)
        examples = Examples(
            self._model,
            self._loss_fn,
            batch,
            mask,
            self._views,
            bounded=self._bounded,
            noisy_loss=self._noisy_loss,
            sparse=self._may_be_sparse,
        )
        return self._engine(examples, clip)

    def _sum_of_rows(
        self,
        lot: "Lot",
        microbatch: "PendingMicrobatch",
        clip: Clip,
        compiled: "CompiledSum | None",
        *,
        defer: bool,
    ) -> list[ClippedSum]:
        """Return the compiled sum of records that the GPU reads itself, or an empty list.

        The GPU can read them if the whole data set is on it and rows are used unchanged.
        """
        data = lot.source.records.on_device
        is_plain = self._augment is None and self._views == 1
        if compiled is None or data is None or not (self._is_on_gpu and is_plain):
            return []
        try:
            scale = self._scale(clip)
            return [compiled.of_records(microbatch, data, scale, reuse=True, defer=defer)]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return []

    def _zeros(self, clip: Clip) -> ClippedSum:
        """Return a zero sum, to which microbatches are added; on a GPU always the same tensors.

        On a GPU a CUDA graph reads the finished sum, and it reads fixed addresses.
        """
        if self._running is None or not self._is_on_gpu:
            is_double = self._bounded or self._programs is None
            dtype = torch.float64 if is_double else None
            self._running = ClippedSum.zeros(self._model, clip, dtype=dtype)
        else:
            call_each("zero_", [*self._running.sums.values(), self._running.within])
        return self._running

    def _scale(self, clip: Clip) -> float:
        """Return this step's clip norm divided by the clip norm that was compiled in."""
        return clip.clip_norms[0] / self._clip_norm

    def _seeded(self, lot: "Lot") -> AbstractContextManager[None]:
        """Return a context that seeds dropout and augmentation from the run's key, if used."""
        draws = self._compiled is None or self._augment is not None or self._compiled.draws
        if not draws:
            return nullcontext()
        return randomness(lot.source.seed(lot.step), lot.source.records.device)


def in_halves(
    compute: Callable[[Microbatch], T], microbatch: Microbatch, *, on_halved: Callable[[int], None]
) -> list[T]:
    """Apply `compute` to a microbatch; if memory runs out, halve it until its parts fit.

    Returns one result for each part. `on_halved` is called with the number of rows that is tried
    next. A single example that does not fit raises.
    """
    try:
        return [compute(microbatch)]
    except (RuntimeError, MemoryError) as error:
        rows = n_rows(microbatch.batch)
        if not is_out_of_memory(error) or rows <= 1:
            raise
    # Outside the except block, whose traceback would keep the failed attempt's tensors alive.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    on_halved(-(-rows // 2))
    halves = microbatch.halves()
    return [part for half in halves for part in in_halves(compute, half, on_halved=on_halved)]


def _mask(batch: Batch, views: int, weights: Tensor | None) -> Tensor:
    """Return True for each example of nonzero weight, shape (examples,); check the batch's rows."""
    tensors, _ = with_rows(batch)
    lengths = {t.shape[0] for t in tensors}
    if not lengths:
        raise ValueError("batch must hold a tensor with the examples on its first axis, got none.")
    if len(lengths) > 1:
        raise ValueError(
            "batch must hold the examples on the first axis of every tensor, but its tensors "
            "differ in length there. Move the axis, or close over what is not per example."
        )
    examples, rest = divmod(lengths.pop(), views)
    if rest:
        raise ValueError(f"batch must hold {views} rows for each example, as augmentations says.")
    device = tensors[0].device
    if weights is None:
        return torch.ones(examples, dtype=torch.bool, device=device)
    if weights.shape != (examples,):
        raise ValueError("weights must have one entry for each example, shape (examples,).")
    return weights.to(device) > 0
