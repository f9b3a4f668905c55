"""Clipped sum of examples that cannot see each other by construction: `isolation="strict"`.

The program of one example, from its row to its gradient, is traced once on synthetic data. The
trace is a graph: a function of the parameters, the row and random numbers, without Python state. It
is then mapped over the examples by `torch.func.vmap`. No other record and no earlier call can enter
an example's gradient, so the guarantee does not rest on a test.

What remains to be trusted are the batching rules of vmap itself. A program that branches on values,
reads values out of tensors or writes into tensors that it shares between examples cannot be traced
and is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from tacit.errors import IncompatibleModel
from tacit.training.clip import Clip
from tacit.training.engines import batch as b
from tacit.training.engines.vmap import _chunk, _Decompose, _Losses, weigh
from tacit.training.gradients.generic import without_fallback_warnings
from tacit.training.sums import ClippedSum, trainable

_REASON = (
    "isolation='strict' runs one example's program as a traced graph, and this program cannot be "
    "traced: {reason}. Use isolation='checked', or change the program."
)


class TracedExamples:
    """The traced program of one example, for each shape that an example can have."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor], *, views: int = 1
    ) -> None:
        self._model, self._loss_fn, self._views = model, loss_fn, views
        self._graphs: dict[Any, Callable[..., dict[str, Tensor]]] = {}

    def clipped_sum(self, examples: Sequence[Any], clip: Clip) -> ClippedSum:
        """Return the sum of clipped gradients of `examples`, each a batch of its own. Private."""
        total = ClippedSum.zeros(self._model, clip)
        values = {name: p.detach() for name, p in trainable(self._model).items()}
        for members in self._by_shape(examples).values():
            gradients = self._graph(members[0])
            step = _chunk(values)
            for start in range(0, len(members), step):
                rows = [torch.stack(t) for t in zip(*members[start : start + step], strict=True)]
                with without_fallback_warnings():
                    found = gradients(values, rows)
                total += weigh(found, clip, torch.ones(len(rows[0]), dtype=torch.bool, device=rows[0].device))
        return total

    def _by_shape(self, examples: Sequence[Any]) -> dict[Any, list[list[Tensor]]]:
        found: dict[Any, list[list[Tensor]]] = {}
        for example in examples:
            tensors, self._rebuild = b.split_rows(example)
            key = tuple((t.shape, t.dtype) for t in tensors)
            found.setdefault(key, []).append(tensors)
        return found

    def _graph(self, tensors: list[Tensor]) -> Callable[..., dict[str, Tensor]]:
        modes = tuple(module.training for module in self._model.modules())
        key = (tuple((t.shape, t.dtype) for t in tensors), modes)
        if key not in self._graphs:
            self._graphs[key] = self._trace([torch.zeros_like(t) for t in tensors])
        return self._graphs[key]

    def _trace(self, blank: list[Tensor]) -> Callable[..., dict[str, Tensor]]:
        values = {name: p.detach().clone() for name, p in trainable(self._model).items()}
        losses, rebuild = _Losses(self._model, self._loss_fn, self._views), self._rebuild

        def gradients(values: dict[str, Tensor], rows: list[Tensor]) -> dict[str, Tensor]:
            leaves = {name: value.requires_grad_() for name, value in values.items()}
            replaced = {f"model.{name}": value for name, value in leaves.items()}
            with torch.enable_grad():
                loss = functional_call(losses, replaced, (rebuild(rows),)).mean()
                found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            return dict(zip(leaves, found, strict=True))

        with _Decompose(), sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(devices=[]):
            try:
                graph = make_fx(gradients)(values, blank)
            except (RuntimeError, TypeError, ValueError) as error:
                raise IncompatibleModel(_REASON.format(reason=_plainly(error))) from None
        _require_no_shared_writes(graph)
        return vmap(graph, in_dims=(None, 0), randomness="different")


def _plainly(error: Exception) -> str:
    if "data-dependent" in str(error) or "get value out of a tracing tensor" in str(error):
        return "it branches on a value, or reads a value out of a tensor"
    return f"{type(error).__name__} while tracing"


def _require_no_shared_writes(graph: fx.GraphModule) -> None:
    """Raise if the graph writes into a tensor that it did not make: that would be kept state."""
    roots: dict[fx.Node, bool] = {}  # whether a node's memory may be shared between calls
    for node in graph.graph.nodes:
        if node.op in ("get_attr", "placeholder"):
            roots[node] = True
            continue
        schema = getattr(node.target, "_schema", None)
        inputs = [a for a in node.all_input_nodes if roots.get(a)]
        roots[node] = False
        if schema is None:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is None or not isinstance(value, fx.Node):
                continue
            if argument.alias_info.is_write and roots.get(value):
                raise IncompatibleModel(
                    _REASON.format(reason="it writes into a tensor that all examples share")
                )
            roots[node] = roots[node] or bool(roots.get(value))
        del inputs
