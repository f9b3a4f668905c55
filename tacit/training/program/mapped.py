"""The clipped sum of a lot: the traced program of one example, on all examples at once.

The operators of the program run on stacked examples; `stacked` says why none can reach another. At
a site (an operator with parameters) a rule of `layers` computes the operator, and in the backward
it collects factored per-example gradients on the `MappedTape`. Norms, factors and the clipped sum
follow.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap

from tacit.training import torch_internals
from tacit.training.clipping.clip import (
    ROUNDING,
    Clip,
    ClippedSum,
    accumulator,
    factors_of,
    group_of,
    zeros_for,
)
from tacit.training.examples import Examples, keep_freed_memory, total_squares
from tacit.training.noise.noisy_loss import with_loss
from tacit.training.program.derived import pulled_by_autograd
from tacit.training.program.one_example import OneExample
from tacit.training.program.programs import Programs
from tacit.training.rules import layers
from tacit.training.rules.factored import (
    Dense,
    FactoredGradient,
    TableRows,
    Together,
    apart,
    combine,
    held_bytes,
    in_sequence,
    is_better_joined,
    is_small,
    joined,
)
from tacit.training.rules.ghost_norm import multiplied_in
from tacit.training.rules.operands import Declined
from tacit.training.rules.operators import REWRITTEN, RULES
from tacit.training.torch_internals import mappable, on_its_own, version_of
from tacit.training.tree import require_gradient, with_rows

NonFinite = Literal["look", "mask", "ignore"]
"""What to do about examples whose gradient is not finite, which must add zero: "look" at the norms
and mask such examples only if there are any (waits for the device); always "mask" (a pass over the
activations, and a copy of them); or "ignore", where the caller looks at the norms and uses the sum
only if all of them are finite.
"""
_EXAMPLE_BY_EXAMPLE = "There is a performance drop"  # vmap's, of an operator it has no rule for
_OVERWRITTEN = (
    "the program writes into a tensor in place that the gradient of a parameter is computed from. "
    "Use the operation that returns a new tensor."
)


def run(
    examples: Examples,
    clip: Clip,
    *,
    programs: Programs | None = None,
    seeded: Callable[[Tensor], Tensor] | None = None,
    nonfinite: NonFinite | Callable[[int], NonFinite] = "look",
) -> ClippedSum:
    """Return the clipped sum of the examples whose mask is True.

    Without `programs`, the program is traced for the shape of the examples where it is new. With
    `nonfinite` other than "look", no tensor's value is read on the host, so that the whole function
    can be compiled; `seeded` is then applied to the losses, where its backward begins.
    """
    keep_freed_memory()
    tensors, _ = with_rows(examples.batch)
    rows = [t.unflatten(0, (-1, examples.views)) for t in tensors]
    if programs is None:
        programs = Programs.of(examples.model, examples.loss_fn, examples.views)
        programs.prepare(examples.batch)
        programs.begin_lot()
    program = programs.program_of(examples.batch)
    tape = MappedTape(program, examples, clip)
    held: dict[str, Tensor] = {**examples.parameters}
    if not held.keys() >= {*program.names}:
        held = dict(examples.model.named_parameters()) | dict(examples.model.named_buffers())
    values = [held[name] for name in program.names]
    tape.begin(dict(zip(program.names, values, strict=True)))

    try:
        modes = torch_internals.modes_put_back(examples.mask.device.type)
        with modes, torch.enable_grad():
            losses = program.run(tape, *values, *rows)
        require_gradient(losses)
        with torch.autocast(losses.device.type, enabled=False):
            tape.backward(losses if seeded is None else seeded(losses))
            with torch.no_grad():
                total = tape.clipped_sum(examples.mask, losses, nonfinite)
    finally:
        tape.empty()
    return with_loss(total, examples.noisy_loss, losses, examples.mask)


class MappedTape:
    """What a mapped program calls at sites, and the per-example gradients that it collects."""

    def __init__(self, program: OneExample, examples: Examples, clip: Clip) -> None:
        self.program = program
        self.mask = examples.mask
        self.examples = examples.mask.shape[0]  # `len` would make it a number for the compiler
        self.parameters = examples.parameters
        self.clip, self.bounded, self.is_sparse = clip, examples.bounded, examples.sparse
        self.groups = group_of(clip, list(self.parameters))
        self.anchor = torch.zeros((), requires_grad=True)
        self.labels: dict[int, str] = {}
        self.shared: dict[str, Tensor] = {}
        self.waiting: dict[str, list[FactoredGradient]] = {}
        self.waiting_together: dict[tuple[str, ...], list[Together]] = {}
        self.norms: list[list[Tensor]] = [[] for _ in clip.clip_norms]
        self.measured: list[tuple[list[str], FactoredGradient]] = []
        self.small: dict[int, list[tuple[str, Dense]]] = {}
        self.rounding = 0.0

    def begin(self, values: dict[str, Tensor]) -> None:
        """Take the values of parameters, which are shared by all examples."""
        for name, value in values.items():
            if name in self.parameters:
                self.label(name, value)

    def label(self, name: str, value: Tensor) -> Tensor:
        """Note that `value` is the shared value called `name`, also if it is computed again."""
        if name in self.shared:
            self.labels.pop(id(self.shared[name]), None)
        self.labels[id(value)] = name
        self.shared[name] = value
        return value

    def note(self, name: str, value: Tensor) -> None:
        """Keep a value that the gradients of derived values are computed with."""
        self.shared[name] = value

    def is_shared(self, tensor: Tensor | None) -> bool:
        """Return whether `tensor` is a shared value."""
        return id(tensor) in self.labels

    def is_small(self, shared: Tensor) -> bool:
        """Return whether the gradients of a shared value are formed, being so few numbers."""
        return is_small(shared, self.examples)

    # Calls of the graph ---------------------------------------------------------------------------

    def meet(
        self,
        fits: bool,
        target: Any,
        stacked: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute an operator that takes shared values and examples.

        `fits` says whether its rule takes arguments of these kinds. `stacked` has the structure of
        `args`, with True for values of all examples.
        """
        try:
            if fits:
                return RULES[target].run(self, *args, **kwargs)
        except Declined:
            pass
        try:
            return self._rewritten(target, stacked, args, kwargs)
        except Declined:
            pass
        args = _paired(self._stacked, args, stacked)
        stacked = _paired(lambda *_: True, args, args)
        return self.map(target, stacked, args, kwargs)

    def _rewritten(
        self, target: Any, stacked: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if target not in REWRITTEN:
            raise Declined

        def own(value: Tensor, is_row: bool) -> Tensor:
            return value if self.is_shared(value) else self._stacked(value, is_row)

        return REWRITTEN[target](self, *_paired(own, args, stacked), **kwargs)

    def _stacked(self, value: Tensor, is_row: bool) -> Tensor:
        """Return the values of all examples, on the first axis."""
        if is_row:
            return value
        if self.is_shared(value):
            return self.copy(value)
        return value.expand(self.examples, *value.shape)

    def site(
        self,
        compute: Callable[[], Tensor],
        x: Tensor | None,
        collect: Callable[[Tensor], None],
        *,
        reads: bool = True,
    ) -> Tensor:
        """Return `compute()`; call `collect` with its gradient, in the backward.

        `x` holds the examples that it is computed from. Shared values have no history there, so
        if `x` has none either, the anchor stands for it: else autograd would pass the site by.
        `reads` says that `collect` reads `x`, which the program must not overwrite then.
        """
        if not torch.is_grad_enabled():
            return compute()
        if x is None or not x.requires_grad:
            result = _Start.apply(self.anchor, compute)
        else:
            result = compute()
        read = x if reads else None
        # The graph keeps its hooks until the losses are gone, but what they need only once.
        pending = [(collect, read, 0 if read is None else version_of(read))]

        def hook(g: Tensor) -> None:
            collect, read, version = pending.pop()
            if read is not None and version_of(read) != version:
                raise RuntimeError(_OVERWRITTEN)
            collect(g)

        result.register_hook(hook)
        return result

    def plain(self, *values: Tensor | None) -> list[Any]:
        """Return shared values without their history, so that autograd computes no gradients."""
        return [None if value is None else value.detach() for value in values]

    def copy(self, shared: Tensor) -> Tensor:
        """Return the copy that each example has of a shared value."""
        return layers.copies(self, shared)

    def spread(self, value: Tensor, is_row: bool) -> Tensor:
        """Return a copy of a tensor for each example, which may write into it."""
        return self._stacked(value, is_row).clone()

    def map(
        self, target: Any, stacked: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute any operator for each example; random numbers are drawn for each."""
        rows: list[Tensor] = []
        _paired(lambda value, is_row: rows.append(value) if is_row else None, args, stacked)
        run = mappable(target)

        def of_one(_: Tensor, *values: Tensor) -> Any:
            left = iter(values)
            own = _paired(lambda v, is_row: next(left) if is_row else v, args, stacked)
            return run(*own, **kwargs)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_EXAMPLE_BY_EXAMPLE)
            return vmap(of_one, randomness="different")(self.mask, *rows)

    def each(
        self, function: Callable[..., Any], stacked: Sequence[bool], tensors: Sequence[Tensor]
    ) -> Any:
        """Call a function of the user's own, on one example after the other."""
        if not any(stacked):
            return function(*tensors)
        rows = [self._stacked(*pair).unbind() for pair in zip(tensors, stacked, strict=True)]
        found = [function(*of_one) for of_one in zip(*rows, strict=True)]
        if isinstance(found[0], Tensor):
            return torch.stack(found)
        return tuple(
            torch.stack(results) if isinstance(results[0], Tensor) else results[0]
            for results in zip(*found, strict=True)
        )

    # Backward -------------------------------------------------------------------------------------

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass, in which sites collect the per-example gradients."""
        targets = (self.anchor, *self.parameters.values())
        with torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(losses, targets, torch.ones_like(losses), allow_unused=True)
        assert all(g is None for g in found[1:]), "a parameter was used outside of the sites"

    def add(self, tensor: Tensor, gradient: FactoredGradient) -> None:
        """Add the per-example gradients from one site that takes the shared `tensor`."""
        name = self.labels[id(tensor)]
        if name in self.parameters and name not in self.program.joint:
            self._settle(name, gradient)
        else:
            self.waiting.setdefault(name, []).append(gradient)

    def add_together(self, tensors: Sequence[Tensor], gradient: Together) -> None:
        """Add the per-example gradients from one site that takes several shared tensors."""
        names = tuple(self.labels[id(tensor)] for tensor in tensors)
        groups = {self.groups.get(name) for name in names}  # None: derived from parameters
        is_slower = len(names) == 1 or tensors[0].is_cuda  # kernels there take aligned widths
        if is_slower or len(groups) > 1 or None in groups:
            for tensor, own in zip(tensors, gradient.apart(), strict=True):
                self.add(tensor, own)
        elif self.program.joint.isdisjoint(names):
            self._measure(list(names), gradient.side_by_side())
        else:
            self.waiting_together.setdefault(names, []).append(gradient)

    def empty(self) -> None:
        """Forget all tensors."""
        gradients = self.waiting, self.waiting_together, self.measured, self.small
        for held in (*gradients, self.norms, self.shared, self.labels):
            held.clear()

    def clipped_sum(
        self, mask: Tensor, losses: Tensor, nonfinite: NonFinite | Callable[[int], NonFinite]
    ) -> ClippedSum:
        """Return the sum of the clipped gradients of the examples where `mask` is True.

        An example whose loss or norm is not finite adds zero.
        """
        self._settle_waiting()
        if callable(nonfinite):
            nonfinite = nonfinite(sum(held_bytes(gradient) for _, gradient in self.measured))
        squared = total_squares(self.norms, mask)
        squared = squared + 0.0 * losses.detach().to(squared.dtype)
        finite = None
        has_nonfinite = nonfinite == "look" and not math.isfinite(float(squared.sum()))
        if nonfinite == "mask" or has_nonfinite:
            finite = torch.isfinite(squared).all(0)
        factors, within = factors_of(
            self.clip, squared, mask, rounding=self.rounding, finite=finite
        )
        sums: dict[str, Tensor] = {}
        while self.measured:
            names, gradient = self.measured.pop()
            of_group = factors[self.groups[names[0]]]
            value = None
            if self.is_sparse and isinstance(gradient, TableRows):
                value = gradient.sum_of_rows(of_group, finite, bounded=self.bounded)
            if value is None:
                value = gradient.weighted_sum(of_group, finite, bounded=self.bounded)
            shapes = [self.parameters[name].shape for name in names]
            for name, part in zip(names, apart(value, shapes), strict=True):
                dtype = self._dtype_of_sum(name)
                sums[name] = part if part.dtype == dtype else part.to(dtype)
        for name, p in self.parameters.items():
            if name not in sums:
                sums[name] = zeros_for(p, self._dtype_of_sum(name))
        return ClippedSum({name: sums[name] for name in self.parameters}, within)

    def _dtype_of_sum(self, name: str) -> torch.dtype:
        return torch.float64 if self.bounded else accumulator(self.parameters[name].dtype)

    def _settle(self, name: str, gradient: FactoredGradient) -> None:
        if is_better_joined(gradient, self.parameters[name], self.examples):
            formed = Dense(gradient.dense())  # so that what it is computed from can be freed
            self.small.setdefault(self.groups[name], []).append((name, formed))
        else:
            self._measure([name], gradient)

    def _measure(self, names: list[str], gradient: FactoredGradient) -> None:
        squared, kept = gradient.settle(bounded=self.bounded)
        dtype = accumulator(kept.dtype) if self.bounded else multiplied_in(kept.dtype)
        self.rounding = max(self.rounding, ROUNDING[dtype])
        self.norms[self.groups[names[0]]].append(squared)
        self.measured.append((names, kept))

    def _settle_waiting(self) -> None:
        for name, sources, needed in reversed(self.program.derived):
            if gradients := self.waiting.pop(name, None):
                gradient, values = combine(gradients), [self.shared[n] for n in needed]
                for source, step in sources:
                    self.waiting.setdefault(source, []).append(step(gradient, *values))
                if not sources:
                    for source, found in pulled_by_autograd(values[0], gradient, self.parameters):
                        self.waiting.setdefault(source, []).append(found)
        uses = Counter(name for names in self.waiting_together for name in names)
        for names, together in self.waiting_together.items():
            whole = in_sequence(together)
            if self.waiting.keys().isdisjoint(names) and all(uses[name] == 1 for name in names):
                self._measure(list(names), whole.side_by_side())
                continue
            for name, own in zip(names, whole.apart(), strict=True):
                self.waiting.setdefault(name, []).append(own)
        for name in self.parameters:
            if gradients := self.waiting.pop(name, None):
                self._settle(name, combine(gradients))
        for members in self.small.values():
            names, gradients = zip(*members, strict=True)
            self._measure(list(names), joined(gradients))


class _Start(torch.autograd.Function):
    """Gives a history to what is computed from records and shared values alone."""

    @staticmethod
    def forward(_: Any, __: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return on_its_own(compute())

    @staticmethod
    def backward(*_: Any) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's own form
        return None, None


def _paired(change: Callable[[Any, Any], Any], value: Any, stacked: Any) -> Any:
    """Return arguments in which every tensor is `change(tensor, is_stacked)`."""
    if isinstance(value, tuple | list):
        return [_paired(change, *pair) for pair in zip(value, stacked, strict=True)]
    return change(value, stacked) if isinstance(value, Tensor) else value
