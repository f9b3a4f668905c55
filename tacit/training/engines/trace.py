"""Finds, once per model and input shape, where shared tensors meet the examples.

Two small runs, on two and on three examples, tell which axis of each tensor holds the examples: the
one that grows. Sizes alone could not: a batch as long as the sequence looks the same on both axes.
A tensor without such an axis is shared by all examples. The three-example run then checks, at every
meeting place, that the gradient of one example's loss reaches that example's entries only; a model
that fails mixes examples, and no example of it can be clipped alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tacit.errors import IncompatibleModel
from tacit.training.engines.batch import checked_losses, map_rows
from tacit.training.gradients import SPREADS
from tacit.training.gradients.site import Layout, Unsupported
from tacit.training.memory import is_out_of_memory

SMALL, LARGE = 2, 3
Shape = tuple[int, ...]
# A parameter's name; for a tensor derived from shared ones, how it was derived.
Label = str | tuple[Any, ...]
Key = tuple[Callable[..., Any], tuple[Label, ...]]


class Spec(NamedTuple):
    """What one call does with the examples.

    "site": shared tensors meet examples; "spread": a shared tensor is expanded over the batch;
    "derived": only shared tensors, so the result is shared too.
    """

    kind: Literal["site", "spread", "derived"]
    layouts: tuple[Layout | None, ...]  # of the tensor arguments
    outputs: tuple[Layout | None, ...]


class Plan(NamedTuple):
    """Specs by operation and shared tensors, one for each time that pair is called."""

    specs: dict[Key, list[Spec]]
    functions: frozenset[Callable[..., Any]]


class _Call(NamedTuple):
    function: Callable[..., Any]
    arguments: list[Shape]
    results: list[Shape]


def make_plan(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any,
    parameters: dict[str, nn.Parameter],
    *,
    examples: int,
    views: int,
) -> Plan:
    """Plan for batches shaped like this one.

    Raises
    ------
    IncompatibleModel
        The model mixes examples.
    Unsupported
        The calls depend on the data, or hold the examples in a way no rule knows.
    """
    labels = {id(p): name for name, p in parameters.items()}

    def losses_of(size: int) -> Tensor:
        return _losses(model, loss_fn, batch, size, examples, views)

    with undisturbed(model, parameters):
        small = _Log()
        with small:
            few = losses_of(SMALL)
    with undisturbed(model, parameters):
        large = _Compare(labels, small.calls, views)
        with large:
            losses = losses_of(LARGE)
        specs = _checked(large, losses, views)
    if not _agree(few, losses):
        with undisturbed(model, parameters):
            again, drawn = losses_of(SMALL), losses_of(SMALL)
        if _agree(again, few) and _agree(again, drawn, 1e-6):  # nothing is random, dropout say
            raise IncompatibleModel(
                "The loss of an example depends on which others are in the batch, so none can be "
                "clipped alone. Look for a statistic over the batch in the model or in the loss."
            )
    functions = frozenset(function for function, _ in specs)
    return Plan(specs, functions)


def tensors_in(args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Tensor arguments of a call, those in lists included, in order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return tuple(found)


def results_in(result: Any) -> tuple[Tensor, ...]:
    """Tensors among the results of a call."""
    return (result,) if isinstance(result, Tensor) else tensors_in((result,), {})


class _Log(TorchFunctionMode):
    """Writes down the shapes of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse(func, args, kwargs)
        arguments = [tuple(t.shape) for t in tensors_in(args, kwargs)]
        result = func(*args, **kwargs)
        self.calls.append(_Call(func, arguments, [tuple(t.shape) for t in results_in(result)]))
        return result


class _Compare(TorchFunctionMode):
    """Compares every call with the smaller run's, and keeps those that read shared tensors."""

    def __init__(self, labels: dict[int, str], calls: list[_Call], views: int) -> None:
        super().__init__()
        self.labels: dict[int, Label] = dict(labels)
        self.reference, self.views = iter(calls), views
        self.found: list[tuple[Key, Spec, tuple[Tensor, ...]]] = []
        self.derived: list[Tensor] = []  # held, so that their ids stay theirs

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = next(self.reference, None)
        tensors = tensors_in(args, kwargs)
        shapes = [tuple(t.shape) for t in tensors]  # before an operation in place changes them
        result = func(*args, **kwargs)
        shared = tuple(self.labels[id(t)] for t in tensors if id(t) in self.labels)
        if before is None or before.function != func:
            raise Unsupported("the model calls other operations on another batch")
        results = results_in(result)
        if shared and any(r.requires_grad for r in results):
            spec = self._spec(func, before, shapes, results)
            self.found.append(((func, shared), spec, results))
            if spec.kind == "derived":
                for index, r in enumerate(results):
                    self.labels[id(r)] = (func, shared, index)
                    self.derived.append(r)
        return result

    def _spec(
        self, func: Any, before: _Call, shapes: list[Shape], results: tuple[Tensor, ...]
    ) -> Spec:
        layouts = self._layouts(before.arguments, shapes)
        outputs = self._layouts(before.results, [tuple(r.shape) for r in results])
        if any(layouts) and any(outputs):
            return Spec("site", layouts, outputs)
        if any(outputs):
            if func not in SPREADS:
                raise Unsupported("a shared tensor becomes one per example in an unknown way")
            return Spec("spread", layouts, outputs)
        if any(layouts):
            raise Unsupported("an operation on a shared tensor reduces over the examples")
        return Spec("derived", layouts, outputs)

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


def _checked(run: _Compare, losses: Tensor, views: int) -> dict[Key, list[Spec]]:
    """The specs, once the gradients have shown that they keep the examples apart."""
    meeting = [
        (r, o)
        for _, spec, results in run.found
        for r, o in zip(results, spec.outputs, strict=True)
        if spec.kind != "derived" and o is not None and r.requires_grad
    ]
    weights = losses.new_tensor([1.0, 2.0, 4.0]).repeat_interleave(views)
    if not losses.requires_grad:
        raise ValueError("loss_fn must depend on the trainable parameters of the model.")
    if not meeting:
        raise Unsupported("no operation meets the examples")
    targets = [r for r, _ in meeting]
    ones = torch.ones_like(losses)
    try:
        plain = torch.autograd.grad(losses, targets, ones, retain_graph=True, allow_unused=True)
        scaled = torch.autograd.grad(losses, targets, weights, allow_unused=True)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise  # says nothing about the model
        raise Unsupported("autograd gives no gradient inside the model") from error
    order = {
        id(r): _order(layout, g, h)
        for (r, layout), g, h in zip(meeting, plain, scaled, strict=True)
    }
    specs: dict[Key, list[Spec]] = {}
    for key, spec, results in run.found:
        specs.setdefault(key, []).append(_ordered(key, spec, results, order))
    return specs


def _order(layout: Layout, plain: Tensor | None, scaled: Tensor | None) -> Layout | None:
    """The layout under which weighing the losses weighs the gradients; None if there is none."""
    if plain is None or scaled is None:
        return layout
    for candidate in (layout, layout._replace(outermost=False)):
        one, other = (candidate.split(g, LARGE).flatten(1).double() for g in (plain, scaled))
        ratio = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64, device=one.device)
        finite = torch.isfinite(one).all(1) & torch.isfinite(other).all(1)
        error = (other - ratio * one)[finite].norm()
        # Powers of two scale exactly; what remains is sums in another order, on some devices.
        slack = 1e-4 if torch.finfo(plain.dtype).bits >= 32 else 0.02
        if error <= slack * other[finite].norm():
            return candidate
        if layout.inner == 1:
            break
    return None


def _ordered(
    key: Key, spec: Spec, results: tuple[Tensor, ...], order: dict[int, Layout | None]
) -> Spec:
    checked = [order.get(id(r), o) for r, o in zip(results, spec.outputs, strict=True)]
    for layout, before in zip(checked, spec.outputs, strict=True):
        if layout is None and before is not None:
            if before.inner > 1:
                raise Unsupported("the examples are interleaved in an unknown way")
            names = ", ".join(str(label) for label in key[1] if isinstance(label, str))
            raise IncompatibleModel(
                f"The loss of one example depends on others where {names or 'a shared tensor'} is "
                "used, so none can be clipped alone. Look for a layer or a loss that mixes or "
                "reorders the examples of a batch (BatchNorm, a mean over the batch)."
            )
    inner = any(o is not None and not o.outermost for o in checked)
    layouts = tuple(
        o._replace(outermost=False) if inner and o is not None and o.inner > 1 else o
        for o in spec.layouts
    )
    return Spec(spec.kind, layouts, tuple(checked))


def _agree(few: Tensor, many: Tensor, tolerance: float = 1e-3) -> bool:
    """Whether the losses of the first examples are the same, up to sums in another order."""
    many, few = many[: len(few)].detach().double(), few.detach().double()
    finite = torch.isfinite(few) & torch.isfinite(many)
    slack = tolerance * few[finite].abs().amax() if bool(finite.any()) else 0.0
    return bool(((few - many)[finite].abs() <= slack + 1e-6).all())


def _refuse(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuses calls that mix examples or write what they see into the model, before they run."""
    if func is F.batch_norm and _argument("training", 5, args, kwargs):
        raise IncompatibleModel(
            "BatchNorm in training mode mixes the examples of a batch, so none can be clipped "
            "alone. Use nn.GroupNorm, or put the layer in eval mode."
        )
    if func is F.embedding and _argument("max_norm", 3, args, kwargs) is not None:
        raise IncompatibleModel(
            "Embedding with max_norm rewrites its table by what the batch holds. Drop max_norm."
        )
    if func is F.instance_norm and _argument("running_mean", 1, args, kwargs) is not None:
        raise IncompatibleModel(
            "InstanceNorm with track_running_stats keeps statistics of the examples. "
            "Use track_running_stats=False."
        )


def _argument(name: str, place: int, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _losses(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any,
    size: int,
    examples: int,
    views: int,
) -> Tensor:
    def chosen(tensor: Tensor) -> Tensor:
        first = torch.arange(size, device=tensor.device) % examples
        return tensor.unflatten(0, (examples, views))[first].flatten(0, 1)

    return checked_losses(loss_fn, model, map_rows(batch, chosen), size * views)


@contextmanager
def undisturbed(model: nn.Module, parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Puts back the random state and the buffers."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device for p in parameters.values() if p.is_cuda}
    try:
        with torch.random.fork_rng(devices=list(devices)), torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
