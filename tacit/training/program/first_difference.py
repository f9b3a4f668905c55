"""Where a call on a whole lot first computes something else than calls on its examples.

Both are followed operator by operator on synthetic records. The first operator whose inputs are
those of the examples, stacked, and whose output is not, is what combines them. If there is none, it
is the first whose output is not.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tacit.training.program.tensor_values import line_of
from tacit.training.tree import name_of_kind, results_in, tensors_in

_SEQUENCES = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_ROUTERS = "router", "gate", "expert", "balanc", "aux"
_CAUSES = "a statistic over the batch, a contrastive loss, or a division by the size of the batch"


class _OperatorCall(NamedTuple):
    """One call of an operator: what it took and gave, and where."""

    name: str
    layers: tuple[str, ...]  # modules that run, the outermost first
    line: str
    taken: list[Tensor]
    given: list[Tensor]


def first_difference(
    model: nn.Module, whole: Callable[[], Any], alone: Sequence[Callable[[], Any]], rounding: float
) -> str:
    """Return where the run `whole` differs from those of its examples, and the likely cause.

    Returns "" if no operator is to blame. `rounding` is the relative difference that may be.
    """
    lot = _followed(model, whole)
    examples = [_followed(model, run) for run in alone]
    first: _OperatorCall | None = None
    for call, *others in zip(lot, *examples, strict=False):
        if any(other.name != call.name for other in others):
            return _described(model, first or call)
        if any(len(other.given) != len(call.given) for other in others):
            continue  # such as the rows of a lot, one by one
        if _are_stacked(call.given, [c.given for c in others], rounding):
            continue
        if _are_stacked(call.taken, [c.taken for c in others], rounding):
            return _described(model, call)
        first = first or call
    return _described(model, first) if first else ""


def _described(model: nn.Module, call: _OperatorCall) -> str:
    layers = dict(model.named_modules())
    place = "after the model, in loss_fn"
    cause = _CAUSES
    if call.layers:
        name = call.layers[-1]
        place = f"in {name or 'the model'} ({name_of_kind(type(layers[name]))})"
        cause = "a statistic over the batch, or an axis that is taken for the batch's"
    for name in call.layers:
        layer = layers[name]
        if isinstance(layer, _SEQUENCES) and not getattr(
            layer, "batch_first", getattr(getattr(layer, "self_attn", None), "batch_first", True)
        ):
            place = f"in {name or 'the model'} ({name_of_kind(type(layer))})"
            cause = "batch_first=True, which is missing there: it takes the first axis for time"
    if call.layers and any(word in call.layers[-1].lower() for word in _ROUTERS):
        cause = "a router's balancing loss or capacity, which is computed over the batch"
    return f"They first differ {place}, at {call.name}{call.line}. The likely cause is {cause}."


def _followed(model: nn.Module, run: Callable[[], Any]) -> list[_OperatorCall]:
    """Return the calls of operators in a run; those before an error, if it raises one."""
    found = _OperatorCalls()
    with ExitStack() as stack:
        for name, layer in model.named_modules():
            enter = layer.register_forward_pre_hook(partial(found.enter, name), prepend=True)
            leave = layer.register_forward_hook(found.leave, always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        stack.enter_context(found)
        try:
            run()
        except Exception:
            found.layers.clear()
    return found.calls


class _OperatorCalls(TorchFunctionMode):
    """Notes what the functions of torch take and give."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_OperatorCall] = []
        self.layers: list[str] = []

    def enter(self, name: str, *_: Any) -> None:
        """Note that a module begins to run."""
        self.layers.append(name)

    def leave(self, *_: Any) -> None:
        """Note that it ends."""
        self.layers.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        taken = [t.detach().clone() for t in tensors_in(args, kwargs)]
        result = func(*args, **kwargs)
        given = [t.detach().clone() for t in results_in(result) if isinstance(t, Tensor)]
        if taken and given:
            name = getattr(func, "__name__", "an operator").strip("_")
            line = line_of()
            self.calls.append(_OperatorCall(name, tuple(self.layers), line, taken, given))
        return result


def _are_stacked(
    whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], rounding: float
) -> bool:
    """Return whether each tensor of the lot is that of the examples, along some axis."""
    if any(len(part) != len(whole) for part in parts):
        return False
    pairs = zip(whole, zip(*parts, strict=True), strict=True)
    return all(_is_stacked(tensor, own, rounding) for tensor, own in pairs)


def _is_stacked(whole: Tensor, parts: Sequence[Tensor], rounding: float) -> bool:
    if all(part.shape == whole.shape for part in parts):
        return all(_is_close(part, whole, rounding) for part in parts)
    if any(part.dim() != whole.dim() or part.shape != parts[0].shape for part in parts):
        return False
    found = (torch.cat(list(parts), axis) for axis in range(whole.dim()))
    return any(one.shape == whole.shape and _is_close(one, whole, rounding) for one in found)


def _is_close(a: Tensor, b: Tensor, rounding: float) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    a, b = a.to(torch.complex128), b.to(torch.complex128)
    scale = float(b.nan_to_num(0.0, 0.0, 0.0).abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=rounding, atol=rounding * scale, equal_nan=True)
