"""Book-keeping: the clipped sum in one backward that forms no weight gradient.

Every operation on a trainable tensor goes through a layer rule. The backward of a rule returns the
input gradient only, and leaves a factored form of the per-example gradients on a `Tape`. From these
come each example's norm, then its factor, then the sum in one weighted contraction per parameter:
the arithmetic of an ordinary step plus that of the norms (Bu et al. 2023, arXiv:2210.00038).

Operations are intercepted by a torch function mode for the length of the call: nothing is attached
to the model. A trainable tensor used in any way that the mode did not see would receive an ordinary
gradient; autograd is asked for those, and the engine gives up unless there are none.

This file and `gpu` are the only places in tacit that use private names of torch. Each such use here
has a fallback for versions of torch without the name.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from tacit.training.clip import (
    ROUNDING,
    Clip,
    ClippedSum,
    accumulator,
    factors_of,
    group_of,
    zeros_for,
)
from tacit.training.engines.examples import Examples, keep_freed_memory, total_squares
from tacit.training.engines.trace import LARGE, CallKey, CallSpec, Label, Trace, trace_calls
from tacit.training.gradients import RULES, generic
from tacit.training.gradients.factored import (
    Dense,
    FactoredGradient,
    TableRows,
    apart,
    combine,
    held_bytes,
    joined,
)
from tacit.training.gradients.ghost_norm import multiplied_in
from tacit.training.gradients.recurrent import PackedOrders, is_packed
from tacit.training.gradients.site import UNSEEN, Declined, Layout, Site, Stale, Unsupported, refuse
from tacit.training.noisy_loss import with_loss
from tacit.training.tree import (
    LossFn,
    require_gradient,
    results_in,
    tensors_in,
    with_rows,
)

TRACES_PER_MODEL = 256  # for example one for each length of sequence
WRITTEN = "a tensor is written into after a layer has used it"
_ATTEMPTS = 4  # to trace a batch, each with examples that the one before has found to matter
# By model, then by what the trace depends on: the trace, or why there is none.
_traces: WeakKeyDictionary[nn.Module, "OrderedDict[Any, Trace | str]"] = WeakKeyDictionary()

NonFinite = Literal["look", "mask", "ignore"]
"""What to do about examples whose gradient is not finite, which must add zero: "look" at the norms
and mask such examples only if there are any (waits for the device); always "mask" (a pass over the
activations, and a copy of them); or "ignore", where the caller looks at the norms and uses the sum
only if all of them are finite.
"""


def run(
    examples: Examples,
    clip: Clip,
    *,
    trace: Trace | None = None,
    nonfinite: NonFinite | Callable[[int], NonFinite] = "look",
) -> ClippedSum:
    """Return the clipped sum of the examples whose mask is True.

    A `trace` says which operations use parameters; without one the model is traced first. With a
    trace, and `nonfinite` other than "look", no tensor's value is read on the host, so that the
    whole function can be compiled. `nonfinite` may be a function of the bytes that a mask would
    have to pass over.
    """
    stale: Stale | None = None
    for _ in range(_ATTEMPTS):
        known = trace or trace_for(examples, stale=stale)
        tape = Tape(examples.parameters, examples.mask.shape[0], clip, bounded=examples.bounded)
        tape.is_sparse = examples.sparse
        try:
            with tape.emptied(), torch.enable_grad():
                with Intercept(known, tape, examples.rows) as intercept:
                    losses = examples.losses()
                require_gradient(losses)
                # The caller's autocast is for the forward: norms and factors would be in 16 bits.
                with torch.autocast(losses.device.type, enabled=False):
                    intercept.backward(losses, torch.full_like(losses, 1 / examples.views))
                    with torch.no_grad():
                        total = tape.clipped_sum(examples.mask, nonfinite)
                if examples.noisy_loss is None:
                    return total
                views, mask = examples.views, examples.mask
                return with_loss(total, examples.noisy_loss, losses, mask, views=views)
        except Stale as error:
            if trace is not None:
                raise
            stale = error.with_traceback(None)  # which would hold the tensors of this attempt
        except Unsupported as reason:
            _remember(examples, reason.reason)
            raise
        except RuntimeError as error:
            # Autograd keeps other tensors of an ordinary layer, or fewer.
            if "inplace" not in str(error):
                raise
            _remember(examples, WRITTEN)
            raise Unsupported(WRITTEN) from error
    raise Unsupported("the model uses its parameters in another way on every batch")


# Traces -------------------------------------------------------------------------------------------


def confirmed_trace(examples: Examples, clip: Clip) -> Trace:
    """Return a trace in which the order of the examples is known wherever a gradient arrives.

    If the first examples do not show it, the sum of all of them is computed, which finds others.
    """
    trace = trace_for(examples)
    if not trace.is_confirmed:
        run(examples, clip)
        trace = trace_for(examples)
    if not trace.is_confirmed:
        raise Unsupported("the loss of no example has a gradient at one of the layers")
    return trace


def trace_for(examples: Examples, *, stale: Stale | None = None) -> Trace:
    """Return the trace of the model's calls for batches of this shape, cached with the model.

    It is made again if the cached one was found `stale`.
    """
    cached = _traces.setdefault(examples.model, OrderedDict()).get(signature(examples))
    trace = None if stale else cached
    if isinstance(trace, Trace) and examples.rows in trace.square:
        trace = None  # the shapes of this batch would not show another branch
    if trace is None:
        keep_freed_memory()
        try:
            trace = trace_calls(examples, stale.rows if stale else None)
            if isinstance(cached, Trace):
                trace = trace.confirmed_by(cached)
        except Unsupported as reason:
            trace = reason.reason  # the exception itself would hold its frames, and so the batch
        _remember(examples, trace)
    if isinstance(trace, str):
        raise Unsupported(trace)
    return trace


def signature(examples: Examples) -> tuple[Any, ...]:
    """Return a trace's cache key; a trace that does not fit in spite of it raises `Stale`."""
    tensors, _ = with_rows(examples.batch)
    device = tensors[0].device.type
    return (
        _identity(examples.loss_fn),
        min(len(examples), LARGE),  # copies of fewer examples show less
        examples.views,
        tuple((t.shape[1:], t.dtype, t.device) for t in tensors),
        tuple(p.requires_grad for p in examples.model.parameters()),
        tuple(flags_of(module) for module in examples.model.modules()),
        flags_of(examples.loss_fn),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
    )


def flags_of(holder: object) -> tuple[bool | str, ...]:
    """Return the flags and strings that an object has as attributes, `training` among them.

    A program may use the examples otherwise once a flag has changed, and a batch that is as long as
    its sequences would not show it.
    """
    held = getattr(holder, "__dict__", {})
    return tuple(value for value in held.values() if type(value) in (bool, str))


def _remember(examples: Examples, trace: Trace | str) -> None:
    traces = _traces.setdefault(examples.model, OrderedDict())
    traces[signature(examples)] = trace
    if len(traces) > TRACES_PER_MODEL:
        traces.popitem(last=False)


def _identity(loss_fn: LossFn) -> tuple[Any, ...]:
    """Return a cache key for `loss_fn`, equal for two closures of one definition and objects."""
    function = getattr(loss_fn, "__func__", loss_fn)
    code = getattr(function, "__code__", None)
    if code is None:
        return (type(loss_fn), id(loss_fn))
    cells = getattr(function, "__closure__", None) or ()
    return (code, id(getattr(loss_fn, "__self__", None)), *map(_content, cells))


def _content(cell: Any) -> Any:
    """Return a cache key for what a closure holds; a real number may be another at every step."""
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return None
    return float if type(content) is float else id(content)


# The forward and the backward ---------------------------------------------------------------------


class Intercept(TorchFunctionMode):
    """Runs every operation that uses a shared tensor by the layer rule for the operation.

    A shared tensor is a parameter, or a tensor computed from parameters alone.
    """

    def __init__(self, trace: Trace, tape: "Tape", rows: int) -> None:
        super().__init__()
        self.trace = trace
        self.tape = tape
        self.rows = rows
        self.calls: Counter[CallKey] = Counter()
        self.is_checkpointed = False
        self.is_recomputing = False
        self.recomputed: list[Tensor] = []  # kept alive, so that no other tensor gets their ids
        self.packed = PackedOrders()

    def backward(self, losses: Tensor, seeds: Tensor) -> None:
        """Run the backward pass of `losses`, weighted by `seeds`.

        Raises `Stale` if a parameter was used outside of the layer rules: only then autograd finds
        an ordinary gradient for it.
        """
        self.is_recomputing = True
        self.tape.is_open = True
        targets = (self.tape.anchor, *self.tape.parameters.values())
        try:
            with torch.autograd.set_multithreading_enabled(False):
                found = self._gradients(losses, seeds, targets)
        finally:
            self.tape.is_open = False
        if any(gradient is not None for gradient in found):
            raise Stale

    def _gradients(self, losses: Tensor, seeds: Tensor, targets: tuple[Tensor, ...]) -> Any:
        if not self.is_checkpointed:
            return torch.autograd.grad(losses, targets, seeds, allow_unused=True)
        # Checkpointed blocks run again and must save the same tensors, so the mode has to be on;
        # `torch.autograd.grad` is itself a torch function, which would leave it.
        backward = getattr(torch.autograd.graph, "_engine_run_backward", None)
        if backward is not None:
            with self:
                return backward(
                    (losses,), (seeds,), False, False, targets, True, accumulate_grad=False
                )
        try:
            return torch.autograd.grad(losses, targets, seeds, allow_unused=True)
        except RuntimeError as error:  # a block ran again without the mode and saved other tensors
            refuse(error, "this version of torch cannot follow a checkpointed block")

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self._computed(func, args, kwargs)
        self.packed.follow(func, args, result)
        return result

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of a call, by a layer rule if it uses a shared tensor."""
        if func not in self.trace.functions or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        labels = self.tape.labels
        tensors = tensors_in(args, kwargs)
        shared = tuple(labels[id(t)] for t in tensors if id(t) in labels)
        if not shared:
            return func(*args, **kwargs)
        spec = self._spec((func, shared), tensors)
        if spec.kind == "derived":
            # Derived tensors are pulled back after the backward: a checkpointed block keeps theirs.
            with saved_tensors_hooks(_same, _same):
                result = func(*args, **kwargs)
            self._derive(DerivedCall.of(result, func, args, kwargs), shared, tensors)
            return result
        return self._meet(spec, func, args, kwargs, tensors)

    def _derive(self, made: "DerivedCall", shared: tuple[Label, ...], tensors: Any) -> None:
        for index, result in enumerate(made.results):
            self.tape.labels[id(result)] = (made.function, shared, index)
        if self.is_recomputing:
            self.recomputed.extend(made.results)
        else:
            self.tape.derive(made, tensors)

    def _spec(self, key: CallKey, tensors: tuple[Tensor, ...]) -> CallSpec:
        specs = self.trace.specs.get(key, [])
        index = 0 if self.is_recomputing else self.calls[key]
        self.calls[key] += 1
        if index >= len(specs):
            raise Stale
        spec = specs[index]
        for tensor, layout in zip(tensors, spec.layouts, strict=True):
            if layout is not None and tensor.shape[layout.dim] != self.rows * layout.inner:
                raise Stale
        return spec

    def _meet(
        self,
        spec: CallSpec,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        tensors: tuple[Tensor, ...],
    ) -> Any:
        """Run a call on shared tensors and examples, by the layer rule for `func`."""
        output = next(layout for layout in spec.outputs if layout is not None)
        if not self.is_recomputing:
            self.tape.count(tensors)
            self.is_checkpointed = self.is_checkpointed or _saved_tensors_are_hooked()
        site = self.tape.site(tensors, spec.layouts, output)
        if spec.order != "confirmed":
            site.doubts = self.tape.records
        if is_packed(func, args):
            site.order = self.packed.order_of(args[0])
        try:
            if func in self.trace.writes:
                return self._written(site, spec, func, args, kwargs)
            return self._by_rule(site, spec, func, args, kwargs)
        finally:
            site.forget_tensors()

    def _written(
        self, site: Site, spec: CallSpec, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """Run an operation that writes into its first argument: compute the result, then copy it.

        Autograd follows the copy, also into a part of a tensor.
        """
        plain, target = generic.without_write(func), args[0] if args else None
        if plain is None or target is None or site.layout(target) is None:
            raise Unsupported("an operation with a shared tensor writes into another tensor")
        before = target.clone()  # which the backward may need
        site.tensors = tuple(before if tensor is target else tensor for tensor in site.tensors)
        args = tuple(before if value is target else value for value in args)
        if plain is generic.copied:
            return target.copy_(plain(site, *args, **kwargs))
        return target.copy_(self._by_rule(site, spec, plain, args, kwargs))

    def _by_rule(
        self, site: Site, spec: CallSpec, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if spec.kind == "spread":
            return generic.spread(site, func, args, kwargs)
        rule = RULES.get(func)
        if rule is not None:
            try:
                return rule(site, *args, **kwargs)
            except Declined:
                pass
        if len(spec.outputs) != 1:
            raise Unsupported("an operation on a shared tensor with several results")
        return generic.generic(site, func, args, kwargs)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor's memory was written into; 0 if torch does not show it."""
    return getattr(tensor, "_version", 0)


def _saved_tensors_are_hooked() -> bool:
    """Return whether saved tensors may be recomputed later, as in activation checkpointing."""
    # torch has no public way to ask. Without the private one assume so: that costs time only.
    ask = getattr(getattr(torch, "_C", None), "_autograd", None)
    ask = getattr(ask, "_top_saved_tensors_default_hooks", None)
    return ask is None or ask(True) is not None


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Switch off the forward hooks of a model inside the block, as sharded models need.

    FSDP2 frees the gathered parameters in a hook. The hooks stay on in versions of torch that lack
    the private dictionaries used here.
    """
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    found = [getattr(module, kind, {}) for module in model.modules() for kind in kinds]
    kept = [(hooks, dict(hooks)) for hooks in found]
    try:
        for hooks, _ in kept:
            hooks.clear()
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


# What the backward leaves -------------------------------------------------------------------------


class DerivedCall(NamedTuple):
    """A call whose tensor arguments are parameters or derived from parameters, and its results."""

    results: tuple[Tensor, ...]
    function: Any
    args: Any
    kwargs: dict[str, Any]
    versions: tuple[int, ...]  # of its tensors when the call returned

    @staticmethod
    def of(result: Any, function: Any, args: Any, kwargs: dict[str, Any]) -> "DerivedCall":
        """Return the call of `function` that has just returned `result`."""
        made = DerivedCall(results_in(result), function, args, kwargs, ())
        return made._replace(versions=made.present_versions())

    def present_versions(self) -> tuple[int, ...]:
        """Return the present versions of the tensors; others mean that one was written into."""
        return tuple(map(version_of, (*self.results, *tensors_in(self.args, self.kwargs))))


class Tape:
    """Collects per-example gradients, in factored form, during the backward pass.

    `clipped_sum` turns them into the clipped sum. If one call uses a parameter, the norms of its
    gradients are computed at once, and activations may be freed. If several calls use it, or it is
    a tensor derived from parameters, its gradients are kept until all of them have arrived.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        examples: int,
        clip: Clip,
        *,
        bounded: bool = False,
    ) -> None:
        self.bounded = bounded
        self.parameters = parameters
        self.examples = examples
        self.clip = clip
        self.labels: dict[int, Label] = {id(p): name for name, p in parameters.items()}
        self.groups = group_of(clip, list(parameters))
        self.anchor = torch.zeros((), requires_grad=True)
        self.uses: Counter[int] = Counter()
        self.versions: dict[int, int] = {}  # of tensors when the examples first met them
        self.waiting: dict[int, list[FactoredGradient]] = {}
        self.derived: list[DerivedCall] = []
        self.norms: list[list[Tensor]] = [[] for _ in clip.clip_norms]
        self.measured: list[tuple[list[str], FactoredGradient]] = []
        self.small: dict[int, list[tuple[str, Dense]]] = {}  # by group
        self.done: set[str] = set()
        self.rounding = 0.0
        self.is_open = False
        self.is_sparse = False  # whether sums of large tables may be sparse

    def count(self, tensors: tuple[Tensor, ...]) -> None:
        """Count one more call for each of `tensors`, whose gradients must all arrive."""
        for tensor in tensors:
            if id(tensor) in self.labels:
                self.uses[id(tensor)] += 1

    def site(
        self, tensors: tuple[Tensor, ...], layouts: tuple[Layout | None, ...], output: Layout
    ) -> Site:
        """Return what a layer rule needs for one call: its tensors and where they hold examples."""
        for tensor in tensors:
            if self.is_shared(tensor):
                self.versions.setdefault(id(tensor), version_of(tensor))
        return Site(self.examples, tensors, layouts, output, self.is_shared, self.add, self.anchor)

    def records(self) -> bool:
        """Return whether gradients are collected now: not those that the loss itself takes."""
        return self.is_open

    def is_shared(self, tensor: Tensor | None) -> bool:
        """Return whether `tensor` is a trainable parameter or derived from parameters."""
        return id(tensor) in self.labels

    def derive(self, made: DerivedCall, tensors: tuple[Tensor, ...]) -> None:
        """Add a call on parameters or tensors derived from them: its results are derived too."""
        self.count(tensors)
        self.derived.append(made)

    def add(self, tensor: Tensor, gradient: FactoredGradient) -> None:
        """Add the per-example gradients from one call that uses the shared `tensor`.

        Gradients of a backward pass inside the loss itself (an attack, a penalty on gradients) are
        ignored.
        """
        if not self.is_open:
            return
        label = self.labels[id(tensor)]
        if isinstance(label, str) and self.uses[id(tensor)] == 1:
            self._settle(label, gradient)
        else:
            self.waiting.setdefault(id(tensor), []).append(gradient)

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Empty the tape after the block, also if memory ran out inside.

        Gradients refer to activations, activations to the autograd graph, and its nodes to this
        tape. Part of that cycle is outside Python, so the garbage collector cannot free it.
        """
        try:
            yield
        finally:
            for held in (self.waiting, self.derived, self.norms, self.measured, self.small):
                held.clear()

    def clipped_sum(
        self, mask: Tensor, nonfinite: NonFinite | Callable[[int], NonFinite]
    ) -> ClippedSum:
        """Return the sum of the clipped gradients of the examples where `mask` is True."""
        self._settle_waiting()
        if callable(nonfinite):
            nonfinite = nonfinite(sum(held_bytes(gradient) for _, gradient in self.measured))
        squared = total_squares(self.norms, mask)
        finite = None
        has_nonfinite = nonfinite == "look" and not math.isfinite(float(squared.sum()))
        if nonfinite == "mask" or has_nonfinite:
            finite = torch.isfinite(squared).all(0)
        factors, within = factors_of(
            self.clip, squared, mask, rounding=self.rounding, finite=finite
        )
        sums: dict[str, Tensor] = {}
        while self.measured:  # newest first: frees the activations on the way
            names, gradient = self.measured.pop()
            of_group = factors[self.groups[names[0]]]
            value = None
            if self.is_sparse and isinstance(gradient, TableRows):
                value = gradient.sum_of_rows(of_group, finite, bounded=self.bounded)
            if value is None:  # a dense sum takes as little memory
                value = gradient.weighted_sum(of_group, finite, bounded=self.bounded)
            shapes = [self.parameters[name].shape for name in names]
            for name, part in zip(names, apart(value, shapes), strict=True):
                sums[name] = part.to(self._dtype_of_sum(name))
        for name, p in self.parameters.items():
            if name not in sums:  # no example used it
                sums[name] = zeros_for(p, self._dtype_of_sum(name))
        return ClippedSum({name: sums[name] for name in self.parameters}, within)

    def _dtype_of_sum(self, name: str) -> torch.dtype:
        return torch.float64 if self.bounded else accumulator(self.parameters[name].dtype)

    def _settle(self, name: str, gradient: FactoredGradient) -> None:
        # Two norms of one parameter would lack their cross term.
        assert name not in self.done, f"{name} was settled before"
        self.done.add(name)
        if isinstance(gradient, Dense) and gradient.is_better_joined():
            self.small.setdefault(self.groups[name], []).append((name, gradient))
        else:
            self._measure([name], gradient)

    def _measure(self, names: list[str], gradient: FactoredGradient) -> None:
        squared, kept = gradient.settle(bounded=self.bounded)
        dtype = accumulator(kept.dtype) if self.bounded else multiplied_in(kept.dtype)
        self.rounding = max(self.rounding, ROUNDING[dtype])
        self.norms[self.groups[names[0]]].append(squared)
        self.measured.append((names, kept))

    def _settle_waiting(self) -> None:
        """Pass gradients of derived tensors back to parameters, then measure all kept gradients."""
        for made in reversed(self.derived):
            for result in made.results:
                if gradients := self.waiting.pop(id(result), None):
                    is_as_made = made.versions == made.present_versions()
                    pull_back = generic.pull_back if is_as_made else generic.pull_back_by_autograd
                    version = version_of(result)
                    if self.versions.get(id(result), version) != version:
                        raise Unsupported(WRITTEN)
                    found = pull_back(made, result, combine(gradients), self.parameters)
                    for tensor, gradient in found:
                        self.waiting.setdefault(id(tensor), []).append(gradient)
        for name, p in self.parameters.items():
            if gradients := self.waiting.pop(id(p), None):
                self._settle(name, combine(gradients))
        if self.waiting:  # gradients of a tensor whose own parameters are not known
            raise Unsupported(UNSEEN)
        for members in self.small.values():
            names, gradients = zip(*members, strict=True)
            self._measure(list(names), joined(gradients))
