"""The clipped sum as two compiled graphs: forward, and backward with norms and contraction.

`engines.bookkeeping.compute` is a function of tensors, so it can be traced whole for one shape of
batch. The trace is cut where the backward begins, and both halves are compiled (`two_graphs`).
Parameters stay the model's own tensors: the optimizer's steps in place are seen by the graphs.

Shapes are static: batches are padded, and `weights` says which rows count. Clip norms may move from
step to step by a factor s without another compilation: clipping g at s C is s times clipping g / s
at C, so gradients are divided by s at the seed of the backward, and factors multiplied by it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tacit.training.clip import FLOAT32_ROUNDING, Clip
from tacit.training.engines.bookkeeping import compute, plan_for
from tacit.training.engines.tape import NonFinite
from tacit.training.engines.trace import undisturbed
from tacit.training.gpu.graph_replay import Captured, Mailbox, Step, tell
from tacit.training.gpu.partition import Traced, two_graphs
from tacit.training.gradients.rounding import cudnn_rounds, multiplied_in
from tacit.training.lots import Part
from tacit.training.sums import ClippedSum, trainable

# Bytes of activations that a GPU passes over in less time than the host needs to look and go on.
_CHEAP_TO_MASK = 2**28


class CompiledSum:
    """`clipped_sum` of the book-keeping engine for one model, loss and clip rule, compiled.

    Called with a batch, 0/1 weights and the factor by which this step's clip norms differ from the
    rule's; compiles once for each layout of batch. Private, like `clipped_sum`. On a GPU the whole
    computation is recorded as one CUDA graph and replayed, so it costs one launch.

    The compiled sum does not mask examples whose gradient is not finite, which would cost a pass
    over all activations: `all_finite` says whether the sums since `begin` can be used. A GPU tells
    that when the last norms are there, and goes on with the contraction while the host prepares
    what follows. Only models for which that is too short to matter do mask.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        clip: Clip,
        *,
        augmentations: int = 1,
    ) -> None:
        self.model, self.loss_fn, self.clip, self.views = model, loss_fn, clip, augmentations
        self._modules, self._device = list(model.modules()), next(model.parameters()).device
        homes = [home for m in self._modules for home in (m._parameters, m._buffers)]
        self._homes = [home for home in homes if home]
        self._places = list[int]()
        self._steps: dict[Any, dict[Any, list[_Known]]] = {}  # by state, then by layout
        self._of_rows: dict[Any, tuple[Captured | None, Traced]] = {}  # by state and size
        self._mailbox = Mailbox(self._device) if self._device.type == "cuda" else None
        self._all_finite = True  # as far as the host knows

    def begin(self) -> None:
        """Sums of another lot follow."""
        self._all_finite = True
        if self._mailbox is not None:
            self._mailbox.clear()

    def all_finite(self) -> bool:
        """Whether every gradient was finite since `begin`, as far as sums were not masked."""
        return self._all_finite and (self._mailbox is None or self._mailbox.all_held())

    @property
    def draws(self) -> bool:
        """Whether the model may draw random numbers: so far as is known from the graphs built."""
        layouts = self._steps.get(self._state(), {})
        steps = [known.traced for found in layouts.values() for known in found]
        return not steps or any(step.draws for step in steps)

    def _state(self) -> tuple[Any, ...]:
        """What the graphs depend on besides the batch and where tensors lie."""
        kind = self._device.type
        return (
            tuple(module.training for module in self._modules),
            tuple(p.requires_grad for home in self._homes for p in home.values() if p is not None),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            multiplied_in(torch.float32),  # norms leave room for these
            kind == "cuda" and cudnn_rounds(),
        )

    def __call__(
        self, batch: Any, weights: Tensor, scale: float = 1.0, *, reuse: bool = False
    ) -> ClippedSum:
        """The clipped sum, at `scale` times the rule's clip norms.

        With `reuse` it may lie in memory that the next call overwrites.
        """
        mask = weights if weights.dtype == torch.bool else weights > 0
        self._forget_if_moved()
        known, tensors = self._known(batch, mask)
        if (run := known.run) is None:
            with undisturbed(self.model, trainable(self.model)):
                kind = Captured if mask.is_cuda else Scaled
                run = known.run = kind(known.traced.run, mask, tensors)
        return self._run(known.traced, partial(run, scale, mask, tensors), reuse=reuse)

    def of_part(
        self, part: Part, data: tuple[Tensor, ...], scale: float = 1.0, *, reuse: bool = False
    ) -> ClippedSum:
        """The same for a part of a lot whose records are the rows of `data`, on the GPU.

        There the rows are fetched by the graph, if they can be.
        """
        self._forget_if_moved()
        key = (self._state(), part.limit)
        if key not in self._of_rows:
            batch, mask = _padded(part)
            known, tensors = self._known(batch, mask)
            run = None
            if all(t.is_contiguous() for t in (*data, *tensors)):
                with undisturbed(self.model, trainable(self.model)):
                    run = Captured(known.traced.run, mask, tensors, data)
            self._of_rows[key] = run, known.traced
        run, traced = self._of_rows[key]
        if run is None:
            return self(*_padded(part), scale, reuse=reuse)
        return self._run(traced, partial(run.of_rows, scale, part.indices), reuse=reuse)

    def _run(self, traced: Traced, run: Callable[[], list[Tensor]], *, reuse: bool) -> ClippedSum:
        """Results of a step as a sum; copied, if the next call would overwrite them."""
        if self._mailbox is None:
            *sums, within, is_finite = run()
            self._all_finite = self._all_finite and bool(is_finite)
        else:
            if traced.tells:
                self._mailbox.expect()
            try:
                *sums, within, _ = run() if reuse else [t.clone() for t in run()]
            except RuntimeError:  # out of memory, say: it may not be told any more
                self._all_finite = False
                raise
        return ClippedSum(dict(zip(traced.names, sums, strict=True)), within)

    def _forget_if_moved(self) -> None:
        """The graphs read parameters and buffers where they were."""
        places = [t.data_ptr() for home in self._homes for t in home.values() if t is not None]
        if places != self._places:
            self._steps.clear()
            self._of_rows.clear()
            self._places = places

    def _known(self, batch: Any, mask: Tensor) -> tuple["_Known", list[Tensor]]:
        """What is known for batches like this one, and the tensors of this one."""
        leaves, structure = pytree.tree_flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        fixed = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        key = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        known = self._steps.setdefault(self._state(), {}).setdefault(key, [])
        for seen in known:
            if seen.structure == structure:
                _require_equal(seen.fixed, fixed)
                return seen, tensors
        # A run that is resumed builds at another step: building must not move the random stream.
        with undisturbed(self.model, trainable(self.model)):
            traced = self._compiled(batch, mask, leaves, structure)
        known.append(_Known(structure, fixed, traced))
        return known[-1], tensors

    def _compiled(
        self, batch: Any, mask: Tensor, leaves: list[Any], structure: pytree.TreeSpec
    ) -> Traced:
        parameters = trainable(self.model)
        plan = plan_for(self.model, self.loss_fn, batch, parameters, len(mask), self.views)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def joint(
            nonfinite: NonFinite,
            seed: Tensor,
            factor: Tensor,
            mask: Tensor,
            *given: Tensor,
        ) -> list[Tensor]:
            replaced = iter(given)
            filled = [next(replaced) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            total: list[Tensor] = []

            def loss_fn(model: nn.Module, batch: Any) -> Tensor:
                losses = self.loss_fn(model, batch)
                total.append(losses.detach().sum())
                return _Seeded.apply(losses, seed)

            mailbox = self._mailbox if nonfinite == "ignore" else None
            clip = _Rescaled(self.clip, factor, mailbox)
            found = compute(
                self.model,
                loss_fn,
                pytree.tree_unflatten(filled, structure),
                clip,
                mask,
                self.views,
                plan,
                parameters,
                nonfinite=nonfinite,
            )
            return [total[0], *found.sums.values(), found.within, clip.is_finite]

        seed, factor = (torch.ones((), device=mask.device) for _ in range(2))
        example = (seed, factor, mask, *tensors)
        traced = two_graphs(partial(joint, "ignore"), example)
        if mask.is_cuda and traced.held < _CHEAP_TO_MASK:
            traced = two_graphs(partial(joint, "mask"), example)._replace(tells=False)
        return traced._replace(names=tuple(parameters))


@dataclass
class _Known:
    """A step, and the batches that it is for: those of this structure."""

    structure: pytree.TreeSpec
    fixed: list[Any]  # what is not a tensor in them
    traced: Traced
    run: "Captured | Scaled | None" = None  # ready for batches that were fetched


class Scaled:
    """A step as it is, on a CPU."""

    def __init__(self, step: Step, mask: Tensor, tensors: list[Tensor]) -> None:
        self._step, self._scale, self._one = step, 0.0, torch.ones(())
        self(1.0, mask, tensors)  # compiles

    def __call__(self, scale: float, mask: Tensor, tensors: list[Tensor]) -> list[Tensor]:
        """Results for this batch, at `scale` times the clip norms."""
        if scale != self._scale:
            self._scale, self._factor, self._seed = scale, self._one * scale, self._one / scale
        return self._step(self._seed, [self._factor, mask, *tensors])


class _Rescaled:
    """A clip rule whose factors are multiplied by a tensor; tells whether norms were finite."""

    def __init__(self, rule: Clip, factor: Tensor, mailbox: Mailbox | None) -> None:
        self._rule, self._factor, self._mailbox = rule, factor, mailbox
        self.is_finite = factor
        self.clip_norms, self.l2_sensitivity = rule.clip_norms, rule.l2_sensitivity
        self.noise_scales, self.groups = rule.noise_scales, rule.groups

    def factors(self, squared_norms: Tensor, *, rounding: float = FLOAT32_ROUNDING) -> Tensor:
        # Of padded rows too: 0 * inf there would poison the sum.
        self.is_finite = torch.isfinite(squared_norms).all()
        factors = self._rule.factors(squared_norms, rounding=rounding) * self._factor
        return factors if self._mailbox is None else tell(factors, self.is_finite, self._mailbox)


class _Seeded(torch.autograd.Function):
    """The identity, whose backward multiplies by `seed`: the partitioner's mark of a backward."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, seed: Tensor) -> Tensor:
        ctx.save_for_backward(seed)
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # as torch documents it
        (seed,) = ctx.saved_tensors
        return g * seed.to(g.dtype), None


def _padded(part: Part) -> tuple[Any, Tensor]:
    micro = part.fetch()
    assert micro.weights is not None  # compiled batches are padded
    return micro.batch, micro.weights


def _require_equal(seen: list[Any], fixed: list[Any]) -> None:
    """Raise unless what is not a tensor in a batch is as it was when the graphs were built."""
    if any(
        a is not b and (type(a) is not type(b) or repr(a) != repr(b))
        for a, b in zip(seen, fixed, strict=True)
    ):
        raise ValueError(
            "with compile, whatever is not a tensor in a batch is fixed in the graphs, but it has "
            "changed. Make it a tensor, leave it out in collate_fn, or do not compile."
        )
