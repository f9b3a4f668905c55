"""Where parameters meet the examples in a forward pass, found once per model and input shape.

Two small runs, on two and on three examples, show which axis of each tensor holds the examples: the
one that grows. Sizes alone could not: a batch as long as the sequence looks the same on both axes.
A tensor without such an axis is shared by all examples. The three-example run then checks, wherever
a shared tensor meets the examples, that the gradient of one example's loss reaches that example's
entries only. A model that fails this check mixes examples and is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tacit.errors import IncompatibleModel
from tacit.training.engines.examples import Examples, losses_of
from tacit.training.gradients import RAGGED, SPREADS
from tacit.training.gradients.generic import copied, names_a_write, without_write
from tacit.training.gradients.recurrent import PackedOrders, arrangements, is_packed
from tacit.training.gradients.site import Layout, Unsupported, refuse
from tacit.training.mixing import (
    refuse_batch_norm,
    refuse_call,
    refuse_dependence,
    refuse_size_dependence,
    restored_buffers,
)
from tacit.training.rounding import exceeds_rounding
from tacit.training.tree import (
    map_rows,
    require_gradient,
    results_in,
    tensors_in,
)

SMALL, LARGE = 2, 3
REORDERED = "the model changes the order of the examples"
# What a program can read out of a tensor into Python, and then branch on.
READS = frozenset(
    {
        *(getattr(Tensor, f"__{name}__") for name in ("bool", "int", "float", "index", "array")),
        *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.is_nonzero, torch.is_nonzero),
        *(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose),
    }
)
Shape = tuple[int, ...]
# A parameter's name; for a tensor derived from shared ones, how it was derived.
Label = str | tuple[Any, ...]
CallKey = tuple[Callable[..., Any], tuple[Label, ...]]


# Whether gradients have shown in which order a call has the examples; "unused" if it gets none.
Order = Literal["confirmed", "not confirmed", "unused"]


class CallSpec(NamedTuple):
    """How one call uses shared tensors (parameters, or derived from parameters) and examples.

    "site": the call combines shared tensors with examples; "spread": a shared tensor is expanded
    over the batch; "derived": the call has shared tensors only, so the result is shared too.
    """

    kind: Literal["site", "spread", "derived"]
    layouts: tuple[Layout | None, ...]  # of the tensor arguments
    outputs: tuple[Layout | None, ...]
    order: "Order" = "confirmed"  # of the examples


Specs = dict[CallKey, list[CallSpec]]


class Trace(NamedTuple):
    """For each operation with its shared tensors, a spec of each of its calls in a forward."""

    specs: Specs
    functions: frozenset[Callable[..., Any]]
    writes: frozenset[Callable[..., Any]]  # those of them that write into their first argument
    # Numbers of rows at which another axis is as long as that of the examples, so that no shape
    # would show if they changed places; empty if the program branches on no tensor.
    square: frozenset[int]

    @property
    def is_confirmed(self) -> bool:
        """Whether the order of the examples is known wherever a gradient can arrive."""
        return all(c.order != "not confirmed" for calls in self.specs.values() for c in calls)

    def trusted(self) -> "Trace":
        """Return a trace that is used as it is, for a program that computes what was traced."""
        specs = {key: [c._replace(order="confirmed") for c in cs] for key, cs in self.specs.items()}
        return self._replace(specs=specs)

    def confirmed_by(self, other: "Trace") -> "Trace":
        """Return this trace with what another one of the same calls has confirmed."""
        return self._replace(specs=_confirmed_by(self.specs, other.specs))


class _TracedCall(NamedTuple):
    """One call of the run on two examples: the function, and the shapes of its tensors."""

    function: Callable[..., Any]
    arguments: list[Shape]
    results: list[Shape]


def trace_calls(examples: Examples, first: Tensor | None = None) -> Trace:
    """Find where the model uses parameters on examples, for batches shaped like this one.

    The first examples of the batch are run, or those numbered `first`.

    Raises
    ------
    IncompatibleModel
        The model mixes examples.
    Unsupported
        The calls depend on the data, or arrange the examples in a way that no rule covers.
    """
    model, labels = examples.model, {id(p): name for name, p in examples.parameters.items()}
    order = torch.arange(len(examples), device=examples.mask.device)
    if first is not None:  # before all others: copies of one example would show no order
        others = torch.ones_like(order, dtype=torch.bool).index_fill_(0, first, False)
        order = torch.cat([first, order[others]])
    two, three = (order[torch.arange(n, device=order.device) % len(order)] for n in (SMALL, LARGE))
    reverse = three.flip(0)
    with undisturbed(model):
        small = _Log()
        with small:
            few = _losses(examples, two)
    with undisturbed(model):
        large = _Compare(labels, small.calls, examples.views)
        with large, _program_runs():
            losses = _losses(examples, three)
        specs = _checked(large, losses, examples.views)
    with undisturbed(model):
        # A model that sorts its examples may have found them in order.
        backwards = _Compare(labels, small.calls, examples.views)
        with backwards, _program_runs():
            reversed_losses = _losses(examples, reverse)
        specs = _confirmed_by(specs, _checked(backwards, reversed_losses, examples.views))
    with undisturbed(model):
        many = losses[: len(few)].detach()
        _refuse_if_sizes_differ(examples, two, few.detach(), many)
    functions = frozenset(function for function, _ in specs)
    square = frozenset(large.lengths if large.reads else ())
    return Trace(specs, functions, frozenset(filter(names_a_write, functions)), square)


@contextmanager
def _program_runs() -> Iterator[None]:
    """Raise `Unsupported` if the program, which took two examples, fails on three in any order.

    `pack_padded_sequence`, for example, may insist on examples that are sorted by length.
    """
    try:
        yield
    except IncompatibleModel:
        raise
    except Exception as error:  # the user's program may raise anything
        refuse(error, "the model does not take the examples in any order")


def _confirmed_by(specs: Specs, others: Specs) -> Specs:
    """Return `specs`, each call taken from `others` if it is the same one and confirmed there."""

    def chosen(one: CallSpec, other: CallSpec) -> CallSpec:
        is_needed = one.order != "confirmed" and other.order == "confirmed"
        return other if is_needed and _without_order(one) == _without_order(other) else one

    def of_key(key: CallKey) -> list[CallSpec]:
        own, known = specs[key], others.get(key, [])
        return list(map(chosen, own, known)) if len(own) == len(known) else own

    return {key: of_key(key) for key in specs}


def _without_order(spec: CallSpec) -> tuple[Any, ...]:
    places = [[o and o[:2] for o in layouts] for layouts in (spec.layouts, spec.outputs)]
    return (spec.kind, *places)


def _refuse_if_sizes_differ(examples: Examples, rows: Tensor, few: Tensor, many: Tensor) -> None:
    """Raise if losses of the same examples differ between batches of two sizes, beyond rounding."""

    def again() -> list[Tensor]:
        return [_losses(examples, rows).detach()]

    if torch.equal(few, many) or not torch.equal(again()[0], again()[0]):
        return  # a program that draws random numbers, such as dropout, cannot be compared
    if exceeds_rounding(examples.model, again, [few], [many]):
        refuse_size_dependence()


class _Log(TorchFunctionMode):
    """Records the tensor shapes of every call of the run on two examples."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_TracedCall] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_call(func, args, kwargs)
        arguments = [tuple(t.shape) for t in tensors_in(args, kwargs)]
        result = func(*args, **kwargs)
        self.calls.append(
            _TracedCall(func, arguments, [tuple(t.shape) for t in results_in(result)])
        )
        return result


class _Compare(TorchFunctionMode):
    """Finds the axis of each tensor that counts examples.

    The model runs on two examples, then on three; the axis whose length grew is the one.
    """

    def __init__(self, labels: dict[int, str], calls: list[_TracedCall], views: int) -> None:
        super().__init__()
        self.labels: dict[int, Label] = dict(labels)
        self.reference, self.views = iter(calls), views
        self.found: list[tuple[CallKey, CallSpec, tuple[Tensor, ...]]] = []
        self.derived: list[Tensor] = []  # kept alive, so that no other tensor gets their ids
        self.packed = PackedOrders()
        # By id of a result of a packed call: a function that puts its gradient in regular order.
        self.arranged: dict[int, Callable[[Tensor | None], Any]] = {}
        self.reads = False  # whether the program has read a value out of a tensor
        self.lengths: set[int] = set()  # of axes beside that of the examples

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = next(self.reference, None)
        tensors = tensors_in(args, kwargs)
        shapes = [tuple(t.shape) for t in tensors]  # before an operation in place changes them
        if before is None or before.function != func:
            raise Unsupported("the model calls other operations on another batch")
        if before.arguments[:1] != shapes[:1]:
            refuse_batch_norm(func, args, kwargs)
        shared = tuple(self.labels[id(t)] for t in tensors if id(t) in self.labels)
        if shared and any(map(self._is_untraced, tensors, before.arguments)):
            raise Unsupported("a tensor is computed from parameters in a way that is not followed")
        is_part = func is Tensor.__setitem__ and id(args[0]) not in self.labels
        if shared and (is_part or kwargs.get("out") is not None):
            raise Unsupported("a shared tensor is written into another one")
        self.reads = self.reads or func in READS
        is_write = (
            torch.is_grad_enabled() and names_a_write(func) and id(args[0]) not in self.labels
        )
        if shared and is_write:
            result, *results = _written(func, args, kwargs)
            results = tuple(results)
        else:
            result = func(*args, **kwargs)
            results = results_in(result)
        self.packed.follow(func, args, result)
        if shared and any(r.requires_grad for r in results):
            if is_packed(func, args):
                arranged = arrangements(results, args[1], self.packed.order_of(args[0]))
                self.arranged.update(arranged)
                spec = CallSpec("site", (None,) * len(shapes), (Layout(1),) * len(results))
            else:
                spec = self._spec(func, before, shapes, results)
            self.found.append(((func, shared), spec, results))
            if spec.kind == "derived":
                for index, r in enumerate(results):
                    self.labels[id(r)] = (func, shared, index)
                    self.derived.append(r)
        return result

    def _is_untraced(self, tensor: Tensor, small: Shape) -> bool:
        """Return True for a tensor without examples whose gradient no rule would pass on.

        A custom autograd function or a scripted one makes such tensors from parameters unseen.
        """
        return tensor.requires_grad and id(tensor) not in self.labels and tensor.shape == small

    def _spec(
        self, func: Any, before: _TracedCall, shapes: list[Shape], results: tuple[Tensor, ...]
    ) -> CallSpec:
        layouts: tuple[Layout | None, ...] = (None,) * len(shapes)
        if func not in RAGGED:
            layouts = self._layouts(before.arguments, shapes)
        outputs = self._layouts(before.results, [tuple(r.shape) for r in results])
        for shape, layout in zip(shapes, layouts, strict=True):
            if layout is not None:
                rest = {n for dim, n in enumerate(shape) if dim != layout.dim}
                self.lengths |= rest | {n // layout.inner for n in rest}
        if any(outputs) and (any(layouts) or func in RAGGED):
            return CallSpec("site", layouts, outputs)
        if any(outputs):
            if func not in SPREADS:
                raise Unsupported("a shared tensor becomes one per example in an unknown way")
            return CallSpec("spread", layouts, outputs)
        if any(layouts):
            raise Unsupported("an operation on a shared tensor reduces over the examples")
        return CallSpec("derived", layouts, outputs)

    def _layouts(self, small: list[Shape], large: list[Shape]) -> tuple[Layout | None, ...]:
        if len(small) != len(large):
            raise Unsupported("the model calls other operations on another batch")
        return tuple(self._layout(a, b) for a, b in zip(small, large, strict=True))

    def _layout(self, small: Shape, large: Shape) -> Layout | None:
        if small == large:
            return None
        grown = [d for d, (a, b) in enumerate(zip(small, large, strict=False)) if a != b]
        if len(small) == len(large) and len(grown) == 1:
            dim = grown[0]
            inner, rest = divmod(small[dim], SMALL * self.views)
            if rest == 0 and large[dim] == inner * LARGE * self.views:
                return Layout(dim, inner)
        raise Unsupported("a tensor's shape depends on the batch in an unknown way")


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Run an operation that writes into its first argument, as the engine does.

    Return the argument and what was written, whose gradient autograd shows: of the argument, it
    shows that of what is written last.
    """
    plain = without_write(func)
    if plain is None:
        raise Unsupported("an operation with a shared tensor writes into another tensor")
    target, *others = args
    before = target.clone()
    made = others[0].expand_as(before) if plain is copied else plain(before, *others, **kwargs)
    return target.copy_(made), made


def _checked(run: _Compare, losses: Tensor, views: int) -> Specs:
    """Return the specs of all calls; raise if an example's loss has a gradient at another one."""
    meeting = [
        (r, o)
        for _, spec, results in run.found
        for r, o in zip(results, spec.outputs, strict=True)
        if spec.kind != "derived" and o is not None and r.requires_grad
    ]
    require_gradient(losses)
    if not meeting:
        raise Unsupported("no operation on a parameter takes the examples as input")

    def gradients(targets: list[Tensor], *weights: float) -> list[Tensor | None]:
        """Return the gradients of the weighted losses, with the examples in regular order."""
        seeds = losses.new_tensor(weights).repeat_interleave(views)
        found = torch.autograd.grad(losses, targets, seeds, retain_graph=True, allow_unused=True)
        pairs = zip(targets, found, strict=True)
        return [run.arranged.get(id(r), _same)(g) for r, g in pairs]

    targets = [r for r, _ in meeting]
    order: dict[int, _Order] = {}
    try:
        found = zip(gradients(targets, 1, 1, 1), gradients(targets, 1, 2, 4), strict=True)
        for (r, layout), (plain, scaled) in zip(meeting, found, strict=True):
            order[id(r)] = _order(layout, plain, scaled)
        unclear = [(r, o) for r, o in meeting if order[id(r)].order == "not confirmed"]
        if unclear:
            seeds = torch.zeros(LARGE, LARGE).fill_diagonal_(torch.nan).tolist()
            marked = zip(*(gradients([r for r, _ in unclear], *s) for s in seeds), strict=True)
            for (r, layout), marks in zip(unclear, marked, strict=True):
                order[id(r)] = _order_of_marks(order[id(r)], layout, marks)
    except RuntimeError as error:
        refuse(error, "autograd gives no gradient inside the model")
    specs: Specs = {}
    for key, spec, results in run.found:
        specs.setdefault(key, []).append(_ordered(key, spec, results, order))
    return specs


def _same(gradient: Any) -> Any:
    return gradient


class _Order(NamedTuple):
    """The order of examples in a tensor, None if its gradients contradict each; as `CallSpec`."""

    layout: Layout | None
    order: Order


def _candidates(layout: Layout) -> list[Layout]:
    """Return the orders that the entries of the examples' axis may have."""
    return [layout] if layout.inner == 1 else [layout, layout._replace(outermost=False)]


def _order(layout: Layout, plain: Tensor | None, scaled: Tensor | None) -> _Order:
    """Return the order of examples in a tensor that its gradients confirm.

    `scaled` is the gradient for losses times 1, 2 and 4: each example's part of `plain` must be
    multiplied by its number. Two examples that are found in their places leave no other place to
    the third one.
    """
    if plain is None or scaled is None:
        return _Order(layout, "unused")
    wide = torch.complex128 if plain.is_complex() else torch.float64
    fitting: list[Layout] = []
    shown = 0  # examples with a gradient
    for candidate in _candidates(layout):
        one, other = (candidate.split(g, LARGE).flatten(1).to(wide) for g in (plain, scaled))
        ratio = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64, device=one.device)
        finite = torch.isfinite(one).all(1) & torch.isfinite(other).all(1)
        error = (other - ratio * one)[finite].norm()
        # Powers of two scale exactly; what remains is sums in another order, on some devices.
        slack = 1e-4 if torch.finfo(plain.dtype).bits >= 32 else 0.02
        if error <= slack * other[finite].norm():
            fitting.append(candidate)
            shown = int((other[finite] != 0).any(1).sum())
    if not fitting:
        _decline_if_reordered(layout, plain.to(wide), scaled.to(wide))
        return _Order(None, "confirmed")
    is_clear = len(fitting) == 1 and shown >= 2
    return _Order(fitting[0], "confirmed" if is_clear else "not confirmed")


def _order_of_marks(before: _Order, layout: Layout, marks: Sequence[Tensor | None]) -> _Order:
    """Return the order of examples that follows from where NaN in the gradient of each loss went.

    `marks` are the gradients with NaN for one of the three losses and zero for the others.
    """
    fitting: list[Layout] = []
    for candidate in _candidates(layout):
        parts = [None if g is None else candidate.split(g.isnan(), LARGE) for g in marks]
        if any(part is None for part in parts):
            return before
        # (loss, example): whether the NaN of the loss is found at the example
        reached = torch.stack([part.flatten(1).any(1) for part in parts if part is not None])
        elsewhere = reached & ~torch.eye(LARGE, dtype=torch.bool, device=reached.device)
        if not elsewhere.any() and reached.any(1).sum() >= 2:
            fitting.append(candidate)
        if layout.inner == 1 and elsewhere.any() and (reached.sum(1) == 1).all():
            raise Unsupported(REORDERED)
    return _Order(fitting[0], "confirmed") if len(fitting) == 1 else before


def _decline_if_reordered(layout: Layout, plain: Tensor, scaled: Tensor) -> None:
    """Raise `Unsupported` if each entry belongs to one example, but not to the one at its place."""
    one, other = (layout.split(g, LARGE).flatten(1) for g in (plain, scaled))
    ratios = [(other - k * one).norm(dim=1) <= 1e-4 * other.norm(dim=1) for k in (1, 2, 4)]
    if bool(torch.stack(ratios).any(0).all()):
        raise Unsupported(REORDERED)


def _ordered(
    key: CallKey, spec: CallSpec, results: tuple[Tensor, ...], order: dict[int, _Order]
) -> CallSpec:
    found = [
        order.get(id(r), _Order(o, "unused")) for r, o in zip(results, spec.outputs, strict=True)
    ]
    checked = [one.layout for one in found]
    for layout, before in zip(checked, spec.outputs, strict=True):
        if layout is None and before is not None:
            if before.inner > 1:
                raise Unsupported("the examples are interleaved in an unknown way")
            refuse_dependence(label for label in key[1] if isinstance(label, str))
    inner = any(o is not None and not o.outermost for o in checked)
    layouts = tuple(
        o._replace(outermost=False) if inner and o is not None and o.inner > 1 else o
        for o in spec.layouts
    )
    orders = {one.order for one in found}
    known: Order = "confirmed" if "confirmed" in orders else "unused"
    if "not confirmed" in orders:
        known = "not confirmed"
    return CallSpec(spec.kind, layouts, tuple(checked), known)


def _losses(examples: Examples, rows: Tensor) -> Tensor:
    """Return the losses of a batch of the examples numbered `rows`."""
    views = examples.views

    def chosen(tensor: Tensor) -> Tensor:
        apart = tensor.unflatten(0, (len(examples), views))
        return apart[rows.to(tensor.device)].flatten(0, 1)

    batch = map_rows(chosen, examples.batch)
    return losses_of(examples.loss_fn, examples.model, batch, len(rows) * views)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore torch's random state and the model's buffers after the block."""
    devices = {p.device for p in model.parameters() if p.is_cuda}
    with (
        restored_buffers(model),
        torch.random.fork_rng(devices=list(devices)),
        torch.enable_grad(),
    ):
        yield
