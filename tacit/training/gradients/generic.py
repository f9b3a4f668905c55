"""Any other operation on shared tensors: its own vector-Jacobian product, mapped over examples.

Only the one operation is mapped, with the inputs it had; the per-example gradients of the shared
tensors it reads are formed. `spread` and `add` are the two cases that need no product at all: a
shared tensor expanded over the batch, and one added to the examples (positions, tokens, shifts).
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tacit.training.gradients.factored import Dense
from tacit.training.gradients.site import Declined, Layout, Site, Unsupported, first_order
from tacit.training.sums import accumulator


def generic(site: Site, function: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
    """One result of `function(*args, **kwargs)`, mapped over the examples in the backward."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in places]
    layouts = [site.layout(t) for t in tensors]
    for place in places:
        leaves[place] = None

    def call(*values: Tensor) -> Tensor:
        filled = list(leaves)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return function(*args, **kwargs)

    shared = [t if site.is_shared(t) else None for t in tensors]
    hidden = [t.detach() if site.is_shared(t) else t for t in tensors]
    return _Generic.apply(site.anchor, (site, call, layouts, shared), *hidden)


class _Generic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, call: Any, *tensors: Tensor) -> Tensor:
        ctx.call = call
        kind = tensors[0].device.type
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.save_for_backward(*tensors)
        return call[1](*tensors)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> Any:
        site, function, layouts, shared = ctx.call
        wanted = [
            s is not None or needs
            for s, needs in zip(shared, ctx.needs_input_grad[2:], strict=True)
        ]
        kind, dtype, enabled = ctx.autocast
        with torch.enable_grad(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
            found = _mapped(function, ctx.saved_tensors, layouts, wanted, site, g)
        grads: list[Tensor | None] = []
        for s, layout, gradient in zip(shared, layouts, found, strict=True):
            if s is not None and gradient is not None:
                site.record(s, Dense(gradient))
            if s is None and gradient is not None and layout is not None:
                grads.append(layout.join(gradient))
            else:
                grads.append(None)
        return None, None, *grads


def _mapped(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    layouts: Sequence[Layout | None],
    wanted: Sequence[bool],
    site: Site,
    g: Tensor,
) -> list[Tensor | None]:
    """Per-example gradients of the wanted tensors, examples first; None for the others."""
    split = [
        t if layout is None else layout.split(t, site.examples)
        for t, layout in zip(tensors, layouts, strict=True)
    ]
    axes = tuple(None if layout is None else 0 for layout in layouts)

    def pull(g: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        def of_wanted(*chosen: Tensor) -> Tensor:
            rest = iter(chosen)
            return function(*(next(rest) if w else v for w, v in zip(wanted, values, strict=True)))

        chosen = [v for w, v in zip(wanted, values, strict=True) if w]
        return torch.func.vjp(of_wanted, *chosen)[1](g)

    mapped = torch.func.vmap(pull, in_dims=(0, *axes), randomness="error")
    try:
        with without_fallback_warnings():
            found = iter(mapped(site.output.split(g, site.examples), *split))
    except RuntimeError as error:
        raise Unsupported("an operation on a shared tensor that vmap cannot map") from error
    return [next(found) if w else None for w in wanted]


@contextmanager
def without_fallback_warnings() -> Iterator[None]:
    """Operations without a batching rule run example by example; that is what we are here for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def spread(site: Site, function: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
    """A shared tensor expanded over the batch: each example's gradient is that of its own copy."""
    shared = [t for t in site.tensors if site.is_shared(t)]
    result = function(*args, **kwargs)
    if len(shared) != 1:
        raise Unsupported("several shared tensors expanded over the batch at once")
    aligned = (1,) * (result.dim() - shared[0].dim()) + tuple(shared[0].shape)
    repeats = zip(result.shape, aligned, strict=True)
    if len(aligned) != result.dim() or any(r != a and a != 1 for r, a in repeats):
        raise Unsupported("a shared tensor repeated over the batch")
    return _Add.apply(site.anchor, None, result.detach(), (site, shared[0]))


def spread_to(site: Site, shared: Tensor, shape: Sequence[int]) -> Tensor:
    """`shared.expand(shape)` for a rule whose results have the site's layout."""
    expanded = shared.detach().expand(tuple(shape))
    if not site.is_shared(shared):
        return expanded
    return _Add.apply(site.anchor, None, expanded, (site, shared))


def add(site: Site, input: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """`input + other` with one of them shared."""
    if not isinstance(input, Tensor) or not isinstance(other, Tensor) or alpha != 1:
        raise Declined
    x, shared = (other, input) if site.is_shared(input) else (input, other)
    layout = site.require(x, shared)
    broadcast = torch.broadcast_shapes(x.shape, shared.shape)
    if tuple(broadcast) != tuple(x.shape) or layout != site.output:
        raise Declined
    return _Add.apply(site.anchor, x, shared.detach(), (site, shared))


class _Add(torch.autograd.Function):
    """x + shared, or shared alone where it already has the shape of the result."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, x: Tensor | None, shared: Tensor, call: Any) -> Tensor:
        ctx.call, ctx.dtype = call, None if x is None else x.dtype
        return shared.clone() if x is None else x + shared

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> Any:
        site, shared = ctx.call
        rows = site.output.split(g, site.examples)  # (examples, *one example's shape)
        own = (site.examples,) + (1,) * (g.dim() - shared.dim()) + tuple(shared.shape)
        if shared.numel() < rows[0].numel():
            rows = rows.to(accumulator(rows.dtype))
        rows = rows.sum_to_size(own).reshape(site.examples, *shared.shape)
        site.record(shared, Dense(rows))
        return None, g.to(ctx.dtype) if ctx.needs_input_grad[1] else None, None, None
