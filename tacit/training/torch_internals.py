"""Every private name of torch that the traced program uses, in one place.

Checked with torch 2.13; `require` says at once whether this version of torch has what is needed.
"""
# pyright: reportPossiblyUnboundVariable=false
# A name is missing only in versions of torch that `require` refuses.

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial, partialmethod
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.nn.modules import transformer
from torch.utils import checkpoint

from tacit.errors import IncompatibleModel

try:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        unset_fake_temporarily,
    )
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
    from torch.autograd.function import _SingleLevelFunction
    from torch.fx.experimental.proxy_tensor import (
        disable_proxy_modes_tracing,
        get_proxy_mode,
        get_proxy_slot,
        make_fx,
        track_tensor_tree,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
    from torch.utils._python_dispatch import TorchDispatchMode

    _MISSING = ""
except ImportError as error:  # pragma: no cover  # other versions of torch
    _MISSING = str(error)
    TorchDispatchMode = object  # type: ignore[assignment,misc]  # `require` refuses to go on

# Nodes that switch a mode on or off: they have no tensors, and their order counts.
SET_GRADIENTS = None if _MISSING else torch._C._set_grad_enabled
MODES = () if _MISSING else (_enter_autocast, _exit_autocast, SET_GRADIENTS)
# A cast as autograd and the compiler write it.
TO_COPY = None if _MISSING else torch.ops.aten._to_copy.default
# Raised while tracing where a program needs a value.
ASKS_FOR_VALUES = (
    ()
    if _MISSING
    else (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
)


class Untraceable(IncompatibleModel):
    """Raised with the reason why the program of one example cannot be traced."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def require() -> None:
    """Raise `IncompatibleModel` if this version of torch lacks a private name used here."""
    if _MISSING:
        raise IncompatibleModel(
            f"torch {torch.__version__} cannot trace the program of one example ({_MISSING} is "
            "missing). It was checked with torch 2.13: use that version."
        )


def traced(program: Callable[..., Tensor], rows: Sequence[Tensor]) -> fx.GraphModule:
    """Return the graph of `program` on tensors like `rows`, of which only the shapes are used.

    Composite operators (linear, attention, a whole LSTM) stay whole. Tensors that the program finds
    elsewhere, such as parameters, are attributes of the graph, the very objects themselves.
    Gradients are enabled, else the graph would switch them off for all that follows.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True  # it prints what is raised, and its traceback
    try:
        with torch.enable_grad(), _whole_functions(), _marked_checkpoints(), _as_python():
            return make_fx(
                program, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True
            )(*rows)
    finally:
        log.disabled = was_disabled


@contextmanager
def _as_python() -> Iterator[None]:
    """Let what was compiled run as it was written, and inference mode as `torch.no_grad`.

    A trace sees neither inference mode nor what TorchScript makes of a function that ran before.
    """
    nested = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    with ExitStack() as stack:
        stack.enter_context(nested)
        stack.enter_context(torch.jit.optimized_execution(False))  # pyright: ignore[reportPrivateImportUsage]  # documented
        stack.enter_context(_replaced(torch._C, "_InferenceMode", _no_grad))
        for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
            stack.enter_context(_replaced(kind, "__call__", partialmethod(_anew, kind.__call__)))
        yield


def _no_grad(mode: bool) -> AbstractContextManager[Any]:
    return torch.no_grad() if mode else nullcontext()


def _anew(script: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
    script._debug_flush_compilation_cache()
    return call(script, *args, **kwargs)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of torch another value for a while; it may be inherited before."""
    inherited = object()
    plain = vars(owner).get(name, inherited)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if plain is inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, plain)


def _is_said_causal(_: Any, is_causal: bool | None = None, __: Any = None) -> bool:
    """Return what the caller of `nn.Transformer` says of a mask, whose values a trace lacks."""
    return is_causal is True


def is_hooked(parameter: Tensor) -> bool:
    """Return whether functions are called with the gradient of a parameter."""
    return bool(parameter._backward_hooks)


TENSOR = object()


@dataclass(frozen=True)
class CustomCall:
    """A call of a user's `autograd.Function`, which a graph has as one operator.

    `values` are its arguments, with `TENSOR` for each tensor; the graph has the tensors.
    """

    function: Any  # the class
    values: tuple[Any, ...]
    __name__ = "custom_call"

    def __hash__(self) -> int:
        """Return a hash although values may have none; two traces are compared by `==`."""
        return hash(self.function)

    def __call__(self, tape: Any, stacked: Any, *tensors: Tensor) -> Any:
        """Call the function for each example; `stacked` says which tensors differ among them."""
        return tape.each(self.on, stacked, tensors)

    def on(self, *tensors: Tensor) -> Any:
        """Call the function."""
        others = iter(tensors)
        values = (next(others) if value is TENSOR else value for value in self.values)
        return self.function.apply(*values)


@contextmanager
def _whole_functions() -> Iterator[None]:
    """Put calls of custom `autograd.Function`s into the graph: a trace would lose the backward.

    Programs keep `apply` of their function, such as `round = Round.apply`. It calls that of the
    base class, which is looked up at each call, so this is the one that is replaced.
    `nn.Transformer` does not look at the values of its mask: a causal one is as any other.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = super(_SingleLevelFunction, cls)  # pyright: ignore[reportArgumentType]  # as above
        mode, call = get_proxy_mode(), own.apply
        if mode is None or kwargs or cls.__module__.startswith("torch."):
            return call(*args, **kwargs)
        tensors = [a for a in args if isinstance(a, Tensor)]
        kept = CustomCall(cls, tuple(TENSOR if isinstance(a, Tensor) else a for a in args))
        nodes = tuple(get_proxy_slot(t, mode.tracer, t, lambda slot: slot.proxy) for t in tensors)
        proxy = mode.tracer.create_proxy("call_function", kept, nodes, {}, name="custom_call")
        with disable_proxy_modes_tracing():
            found = call(*args)
        return track_tensor_tree(found, proxy, constant=None, tracer=mode.tracer)

    with (
        _replaced(_SingleLevelFunction, "apply", classmethod(apply)),
        _replaced(transformer, "_detect_is_causal_mask", _is_said_causal),
    ):
        yield


CHECKPOINTED = "checkpointed"  # in the `meta` of a node: the number of the block it is in


@contextmanager
def _marked_checkpoints() -> Iterator[None]:
    """Mark the nodes of blocks under `torch.utils.checkpoint.checkpoint`.

    Blocks inside of blocks have the mark of the outermost one.
    """
    numbers, plain = count(), checkpoint._checkpoint_without_reentrant_generator
    inside = False

    def generator(function: Any, keeps: bool, contexts: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        mode = get_proxy_mode()
        if mode is None or inside or contexts is not checkpoint.noop_context_fn:
            yield from plain(function, keeps, contexts, *args, **kwargs)
            return
        nodes, number, inside = mode.tracer.graph.nodes, next(numbers), True
        before = len(nodes)
        try:
            yield
        finally:
            inside = False
        for node in [*nodes][before:]:
            if node.op == "call_function":
                node.meta[CHECKPOINTED] = number

    with _replaced(checkpoint, "_checkpoint_without_reentrant_generator", generator):
        yield


def version_of(tensor: Tensor) -> int:
    """Return a number that every write into `tensor` changes."""
    return tensor._version


def schema_of(operator: Any) -> Any:  # Any: torch says nothing of it
    """Return the arguments that an operator declares; None for an ordinary function."""
    return getattr(operator, "_schema", None)


def is_fake(value: Any) -> bool:  # Any: whatever a program holds
    """Return whether `value` is a tensor without values, of `traced`."""
    return isinstance(value, FakeTensor)


@contextmanager
def untraced() -> Iterator[None]:
    """Compute on real tensors, inside of `traced`, without a trace."""
    with unset_fake_temporarily(), disable_proxy_modes_tracing():
        yield


@contextmanager
def modes_put_back(kind: str) -> Iterator[None]:
    """Return a context after which autocast and gradients are as before, also after an error.

    A graph has nodes that switch them on and off, and an error may come in between. `kind` is that
    of the device.
    """
    before = (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_grad_enabled(),
    )
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.set_grad_enabled(before[2])


def on_its_own(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of a view: nobody can write into views of custom functions."""
    return tensor.clone() if tensor._is_view() else tensor


@cache
def mappable(target: Any) -> Any:
    """Return an operator, or the function that composes it of others if vmap has no rule for it.

    Without a rule vmap would call the operator's kernel for one example after the other.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    rules = ("FuncTorchBatched", "FuncTorchBatchedDecomposition")
    if (
        not isinstance(target, torch._ops.OpOverload)
        or any(has_kernel(target.name(), rule) for rule in rules)
        or not has_kernel(target.name(), "CompositeImplicitAutograd")
    ):
        return target
    return target.decompose


# oneDNN's product has no formula for autograd, so it is used inside of layer rules only. Below
# FEW multiply-adds a call of it takes longer than the product by torch's own library.
_ONEDNN: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
FEW = 2**20


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)`, by the faster library; autograd does not see it.

    Both libraries add in float32, in different orders. Bounds on rounding errors hold for any
    order (`rules.ghost_norm`), so they cover both.
    """
    if _may_use_onednn(x) and x.numel() * weight.shape[0] >= FEW and _onednn_is_faster():
        return _ONEDNN(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def products(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the products of two batches of matrices, by the faster library as in `linear`.

    oneDNN takes them one by one, which pays from 4 FEW multiply-adds each.
    """
    is_large = left[0].numel() * right.shape[2] >= 4 * FEW
    if not (is_large and _may_use_onednn(left) and _onednn_is_faster()):
        return torch.bmm(left, right, out=out)
    out = left.new_empty(*left.shape[:2], right.shape[2]) if out is None else out
    for a, b, found in zip(left.unbind(), right.mT.unbind(), out.unbind(), strict=True):
        found.copy_(_ONEDNN(a, b, None, "none", [], ""))
    return out


def _may_use_onednn(x: Tensor) -> bool:
    is_plain = _ONEDNN is not None and type(x) is Tensor
    return is_plain and x.dtype == torch.float32 and x.device.type == "cpu"


@cache
def _onednn_is_faster() -> bool:
    """Return whether oneDNN takes clearly less time than torch's own library on this processor.

    On AMD's, products of float32 matrices take it half the time. Measured once for a process, on
    constants, in about 1 ms; 0.8 leaves room for a noisy clock, so that processes choose alike.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    x, weight = torch.ones(64, 128), torch.ones(512, 128)
    ways = partial(F.linear, x, weight), partial(_ONEDNN, x, weight, None, "none", [], "")
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        own, other = map(_shortest, ways)
    return other < 0.8 * own


def _shortest(way: Callable[[], Tensor]) -> float:
    """Return the shortest of a few times that a call takes."""
    found = []
    for _ in range(8):
        start = time.perf_counter()
        way()
        found.append(time.perf_counter() - start)
    return min(found)
