"""Rules for operations without a rule of their own, and for weights computed from parameters.

`generic` maps the vector-Jacobian product of one operation over the examples and forms the
per-example gradients of the shared tensors that it reads. Two cases need no such product: `spread`,
a shared tensor expanded over the batch, and `add`, one added to the examples (positions, tokens,
shifts).

A weight may also be transposed, cast, standardized, masked or looked up before an operation uses it
with the examples. `pull_back` then turns the per-example gradients of the computed weight into
those of the parameters: directly if the computation only moves numbers, otherwise by autograd
mapped over the examples.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.training.clip import accumulator
from tacit.training.gradients.factored import Dense, FactoredGradient, Outer, TableRows
from tacit.training.gradients.site import Declined, Layout, Operation, Site, Unsupported
from tacit.training.tree import is_out_of_memory, take_apart

CASTS = (
    Tensor.to,
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.type_as,
    Tensor.contiguous,
    Tensor.clone,
)
# `x += y` calls `__iadd__`, which writes what `__add__` returns.
_IN_PLACE = {
    f"__i{name}__": f"__{name}__"
    for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")
}
TRANSPOSES = (Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]  # descriptors


def generic(site: Site, function: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
    """Compute any function with one result; its backward collects per-example gradients."""
    tensors, rebuild = take_apart((args, kwargs))
    layouts = [site.layout(t) for t in tensors]

    def call(*values: Tensor) -> Tensor:
        args, kwargs = rebuild(values)
        return function(*args, **kwargs)

    shared = [t if site.is_shared(t) else None for t in tensors]
    return _Mapped(site, call, layouts, shared).apply(*tensors)


@dataclass
class _Mapped(Operation):
    """A function whose backward maps its vector-Jacobian product over the examples by vmap."""

    function: Callable[..., Tensor]
    layouts: list[Layout | None]
    shared: list[Tensor | None]  # None for arguments that are not shared

    def forward(self, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        kind = tensors[0].device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        return self.function(*tensors), tensors

    def backward(self, saved: Any, needs: Sequence[bool], g: Tensor) -> list[Tensor | None]:
        wanted = [s is not None or need for s, need in zip(self.shared, needs, strict=True)]
        kind, dtype, enabled = self.autocast
        with torch.enable_grad(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
            found = self._per_example(saved, wanted, g)
        for shared, gradient in zip(self.shared, found, strict=True):
            if shared is not None and gradient is not None:
                self.site.collect(shared, Dense(gradient))
        return [
            layout.join(gradient) if gradient is not None and layout is not None else None
            for layout, gradient in zip(self.layouts, found, strict=True)
        ]

    def _per_example(
        self, tensors: Sequence[Tensor], wanted: Sequence[bool], g: Tensor
    ) -> list[Tensor | None]:
        """Return per-example gradients of the tensors marked in `wanted`, None for the others.

        g is the gradient of the function's result.
        """
        examples = self.site.examples
        split = [
            t if layout is None else layout.split(t, examples)
            for t, layout in zip(tensors, self.layouts, strict=True)
        ]
        axes = tuple(None if layout is None else 0 for layout in self.layouts)

        def pull(g: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            def of_wanted(*chosen: Tensor) -> Tensor:
                rest = iter(chosen)
                pairs = zip(wanted, values, strict=True)
                return self.function(*(next(rest) if w else v for w, v in pairs))

            return torch.func.vjp(of_wanted, *compress(values, wanted))[1](g)

        mapped = torch.func.vmap(pull, in_dims=(0, *axes), randomness="error")
        try:
            with without_fallback_warnings():
                found = iter(mapped(self.site.output.split(g, examples), *split))
        except RuntimeError as error:
            raise Unsupported("an operation on a shared tensor that vmap cannot map") from error
        return [next(found) if w else None for w in wanted]


@contextmanager
def without_fallback_warnings() -> Iterator[None]:
    """Silence vmap's warning that an operation without a batching rule runs example by example."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def spread(site: Site, function: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
    """Expand a shared tensor over the batch; the backward collects per-example gradients.

    `function(*args, **kwargs)` is the call that expands it. An example's gradient is the gradient
    of that example's copy of the tensor.
    """
    shared = [t for t in site.tensors if site.is_shared(t)]
    result = function(*args, **kwargs)
    if len(shared) != 1:
        raise Unsupported("several shared tensors expanded over the batch at once")
    aligned = (1,) * (result.dim() - shared[0].dim()) + tuple(shared[0].shape)
    repeats = zip(result.shape, aligned, strict=True)
    if len(aligned) != result.dim() or any(r != a and a != 1 for r, a in repeats):
        raise Unsupported("a shared tensor repeated over the batch")
    return _Sum(site, shared[0]).apply(None, result.detach())


def spread_to(site: Site, shared: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `shared.expand(shape)`, for rules that need one copy of a tensor for each example.

    The result must have the layout of the site's output. Its backward collects per-example
    gradients.
    """
    expanded = site.detached(shared).expand(tuple(shape))
    if not site.is_shared(shared):
        return expanded
    return _Sum(site, shared).apply(None, expanded)


def copied(site: Site, input: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Return `value`, which is shared, in the shape of `input`, into which it will be written."""
    if not site.is_shared(value):
        raise Unsupported("an operation with a shared tensor writes into another tensor")
    return spread_to(site, value, input.shape)


def names_a_write(function: Callable[..., Any]) -> bool:
    """Return whether the name of a function says that it writes into its first argument."""
    name = getattr(function, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def without_write(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function that computes what `function` writes into its first argument, if any."""
    name = function.__name__
    if name in ("copy_", "fill_"):
        return copied
    home = Tensor if getattr(Tensor, name, None) is function else torch
    return getattr(home, _IN_PLACE.get(name, name[:-1]), None)


def add(site: Site, input: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """Compute `input + other`, one of them shared; its backward collects per-example gradients."""
    if not isinstance(input, Tensor) or not isinstance(other, Tensor) or alpha != 1:
        raise Declined
    x, shared = (other, input) if site.is_shared(input) else (input, other)
    layout = site.require(x, shared)
    broadcast = torch.broadcast_shapes(x.shape, shared.shape)
    if tuple(broadcast) != tuple(x.shape) or layout != site.output:
        raise Declined
    return _Sum(site, shared).apply(x, shared)


@dataclass
class _Sum(Operation):
    """The sum x + shared; if x is None, the shared tensor alone, expanded over the batch."""

    shared: Tensor

    def forward(self, x: Tensor | None, shared: Tensor) -> tuple[Tensor, tuple[()]]:
        return (shared.clone() if x is None else x + shared), ()

    def backward(self, _saved: Any, needs: Any, g: Tensor) -> tuple[Tensor | None]:
        site, shared = self.site, self.shared
        rows = site.output.split(g, site.examples)  # (examples, *one example's shape)
        own = (site.examples,) + (1,) * (g.dim() - shared.dim()) + tuple(shared.shape)
        if shared.numel() < rows[0].numel():
            rows = rows.to(accumulator(rows.dtype))
        rows = rows.sum_to_size(own).reshape(site.examples, *shared.shape)
        site.collect(shared, Dense(rows))
        return (g if needs[0] else None,)


def pull_back(
    made: Any, result: Tensor, gradient: FactoredGradient, parameters: dict[str, nn.Parameter]
) -> Iterator[tuple[Tensor, FactoredGradient]]:
    """Yield (source, its per-example gradients) for each source of a computed weight.

    A source is a parameter or another shared tensor. `made` is the call (function, args, kwargs)
    that computed the weight `result` from it, and `gradient` holds the per-example gradients of
    `result`.
    """
    source = made.args[0] if made.args and isinstance(made.args[0], Tensor) else None
    if source is not None and made.function in CASTS and source.shape == result.shape:
        yield source, gradient
    elif source is not None and source.dim() == 2 and _is_transpose(made):
        yield source, _transposed(gradient)
    elif made.function is F.embedding and len(made.args) > 1 and not _depends_on_batch(made):
        yield made.args[1], _looked_up(made, gradient)
    else:
        yield from pull_back_by_autograd(made, result, gradient, parameters)


def _is_transpose(made: Any) -> bool:
    if made.function in (Tensor.transpose, torch.transpose):
        return {axis % 2 for axis in made.args[1:3]} == {0, 1}
    return made.function in TRANSPOSES


def _transposed(gradient: FactoredGradient) -> FactoredGradient:
    if isinstance(gradient, Outer):
        return gradient.transposed()
    return Dense(gradient.dense().transpose(1, 2))


def _depends_on_batch(lookup: Any) -> bool:
    """Return True if an embedding call sets max_norm or scale_grad_by_freq, which mix examples."""
    names = ("max_norm", "norm_type", "scale_grad_by_freq")
    given = dict(zip(names, lookup.args[3:], strict=False)) | lookup.kwargs
    return given.get("max_norm") is not None or bool(given.get("scale_grad_by_freq"))


def _looked_up(made: Any, gradient: FactoredGradient) -> TableRows:
    """Return the gradients of a table from which every example reads the same rows.

    `made` is the embedding call, and `gradient` holds the per-example gradients of its result.
    """
    ids, table = made.args[:2]
    padding = made.args[2] if len(made.args) > 2 else made.kwargs.get("padding_idx")
    values = gradient.dense()
    values = values.reshape(values.shape[0], -1, table.shape[1])  # (examples, T, width)
    ids = ids.long().reshape(1, -1).expand(values.shape[0], -1)
    if padding is not None:
        values = torch.where((ids == padding % table.shape[0]).unsqueeze(-1), 0.0, values)
    return TableRows(ids, values, table.shape[0])


def pull_back_by_autograd(
    _made: Any, tensor: Tensor, gradient: FactoredGradient, parameters: dict[str, nn.Parameter]
) -> Iterator[tuple[Tensor, FactoredGradient]]:
    """Yield (parameter, its per-example gradients) as `pull_back`, from autograd's own graph."""
    leaves = list(parameters.values())
    with torch.no_grad():
        seeds = gradient.dense().to(tensor.dtype)
    pull = partial(torch.autograd.grad, tensor, leaves, retain_graph=True, allow_unused=True)
    with torch.enable_grad():
        try:
            found = pull(seeds, is_grads_batched=True)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            rows = zip(*map(pull, seeds), strict=True)  # a backward that vmap cannot map
            found = [None if own[0] is None else torch.stack(own) for own in rows]
    for leaf, of_leaf in zip(leaves, found, strict=True):
        if of_leaf is not None:
            yield leaf, Dense(of_leaf)
