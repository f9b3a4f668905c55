"""Clipped sums of examples that cannot see each other by construction: `isolation="strict"`.

The program of one example, from its row to its gradient, is traced once on synthetic data. The
trace is a graph: a function of the parameters, the row and random numbers, without Python state. It
is then mapped over the examples by `torch.func.vmap`. No other record and no earlier call can enter
an example's gradient, so the guarantee does not rest on a test.

Records are fetched, collated and augmented one at a time, by the user's own Python code. A lot
during which that code changed any object that it can reach is refused before its release.

What remains to be trusted are the batching rules of vmap itself, and state that Python cannot show.
A program that branches on values, reads values out of tensors, writes into tensors that examples
share, or calls operators that are not torch's own (their code runs outside the trace and may keep
state) is refused.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tacit.errors import IncompatibleModel
from tacit.training.clip import Clip, ClippedSum, trainable
from tacit.training.engines.examples import as_views, clip_and_sum
from tacit.training.engines.vmap import Decompose, LossModule, examples_at_once
from tacit.training.gradients.generic import without_fallback_warnings
from tacit.training.key import randomness
from tacit.training.program_state import ProgramState
from tacit.training.tree import Batch, LossFn, with_rows

if TYPE_CHECKING:
    from tacit.training.lots import Lot

Gradients = Callable[[dict[str, Tensor], list[Tensor]], dict[str, Tensor]]
_REFUSAL = (
    "isolation='strict' runs the program of one example as a traced graph, but this program {}. "
    "Change it, or use isolation='checked'."
)
_WRITES = "writes into a tensor that examples share, such as a buffer"
_TORCHS_OWN = ("aten", "prims")
# Ways to read values out of a tensor that tracing would not notice: the values are synthetic.
_READS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr}


class TracedLotSum:
    """Sums the clipped gradients of a lot by the traced program of one example.

    Called like `LotSum`, of which it has the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        views: int = 1,
        augment: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self._model = model
        self._views = views
        self._augment = augment
        self._losses = LossModule(model, loss_fn, views)
        self._graphs: dict[Any, Gradients] = {}

    def __call__(self, lot: "Lot", clip: Clip) -> tuple[ClippedSum, int]:
        """Return the sum of a lot, and how many records the lot holds. Private."""
        source, records = lot.source, lot.source.records
        fetching = ProgramState(*records.program, self._augment)
        examples, seed = [], source.seed(lot.step)
        for index in np.concatenate([np.zeros(0, np.int64), *(m.indices for m in lot.pending())]):
            with randomness(seed + int(index), records.device):
                fetched = records.fetch(np.asarray([index]))
                examples.append(as_views(fetched, self._views, self._augment))
        if fetching.has_changed():
            raise IncompatibleModel(
                _REFUSAL.format("keeps Python state in its data set, collate_fn or augment")
            )
        with randomness(seed, records.device):
            return self.clipped_sum(examples, clip), len(examples)

    def clipped_sum(self, examples: Sequence[Batch], clip: Clip) -> ClippedSum:
        """Return the sum of clipped gradients of `examples`, each a batch of its own. Private."""
        total = ClippedSum.zeros(self._model, clip, dtype=torch.float64)
        values = {name: p.detach() for name, p in trainable(self._model).items()}
        by_shape: dict[Any, list[list[Tensor]]] = {}
        for example in examples:
            tensors, _ = with_rows(example)
            key = tuple((t.shape, t.dtype) for t in tensors)
            by_shape.setdefault(key, []).append(tensors)
            self._graph(key, example)
        for key, members in by_shape.items():
            step = examples_at_once(values)
            for start in range(0, len(members), step):
                chunk = members[start : start + step]
                rows = [torch.stack(tensors) for tensors in zip(*chunk, strict=True)]
                with without_fallback_warnings():
                    found = self._graph(key, None)(values, rows)
                everyone = torch.ones(len(chunk), dtype=torch.bool, device=rows[0].device)
                total += clip_and_sum(found, clip, everyone)
        return total

    def _graph(self, shapes: Any, example: Batch) -> Gradients:
        """Return the traced program for examples of these shapes; trace it if it is new."""
        key = (shapes, tuple(module.training for module in self._model.modules()))
        if key not in self._graphs:
            self._graphs[key] = self._trace(example)
        return self._graphs[key]

    def _trace(self, example: Batch) -> Gradients:
        tensors, rebuild = with_rows(example)
        blank = [torch.zeros_like(t) for t in tensors]  # the shape of a record is public
        values = {name: p.detach().clone() for name, p in trainable(self._model).items()}

        def gradients(values: dict[str, Tensor], rows: list[Tensor]) -> dict[str, Tensor]:
            leaves = {f"model.{name}": value.requires_grad_() for name, value in values.items()}
            with torch.enable_grad():
                loss = functional_call(self._losses, leaves, (rebuild(rows),)).mean()
                found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            return dict(zip(values, found, strict=True))

        with _NoReads(), Decompose(), sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng([]):
            try:
                graph = make_fx(gradients)(values, blank)
                inputs = [*values.values(), *blank]
                _Inspection(graph, inputs).run(*inputs)
                mapped = vmap(graph, in_dims=(None, 0), randomness="different")
                with without_fallback_warnings():
                    # vmap refuses to write an example into a tensor that examples share.
                    mapped(values, [torch.stack([t, t]) for t in blank])
            except (RuntimeError, TypeError, ValueError) as error:
                raise IncompatibleModel(_REFUSAL.format(_reason(error))) from None
        return mapped


class _Inspection(Interpreter):
    """Runs a traced program once, and refuses it unless it is a function of its inputs alone.

    A number that is written into a tensor from outside the graph, such as a counter of calls, would
    come back with the next examples; how many calls there are depends on the lot.
    """

    def __init__(self, graph: GraphModule, inputs: Sequence[Tensor]) -> None:
        super().__init__(graph)
        held = [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
        self._shared = {_memory(t) for t in (*held, *inputs) if isinstance(t, Tensor)}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "namespace", "aten") not in _TORCHS_OWN:
            raise IncompatibleModel(_REFUSAL.format(f"calls the operator {target}"))
        # By torch's convention, operators that write end in "_", or write to "out".
        name = str(target).split(".")[1] if hasattr(target, "namespace") else ""
        is_written = name.endswith("_") and not name.endswith("__")
        for value in (*(args[:1] if is_written else ()), kwargs.get("out")):
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor) and _memory(tensor) in self._shared:
                    raise IncompatibleModel(_REFUSAL.format(_WRITES))
        return super().call_function(target, args, kwargs)


def _memory(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor shares with its views."""
    return tensor.untyped_storage().data_ptr()


class _NoReads(TorchFunctionMode):
    """Refuses to read values out of tensors while a program is traced."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            raise IncompatibleModel(_REFUSAL.format("reads values out of a tensor"))
        return func(*args, **(kwargs or {}))


def _reason(error: Exception) -> str:
    if "data-dependent" in str(error) or "value out of a tracing tensor" in str(error):
        return "branches on a value, or reads a value out of a tensor"
    if "more than 1 value per channel" in str(error):
        return "normalizes over the examples of a batch (BatchNorm)"
    if "inplace" in str(error) or "in place" in str(error):
        return _WRITES
    return f"cannot be traced and mapped ({type(error).__name__})"
