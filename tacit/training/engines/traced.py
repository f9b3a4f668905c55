"""Clipped sums of examples that cannot see each other by construction: `isolation="strict"`.

The program of one example, from its row to its gradient, is traced once, on synthetic data, before
any record is read. The trace is a graph: a function of the parameters, the row and random numbers,
without Python state. What else it refers to (buffers, frozen parameters, constants) is copied into
it. The graph is then mapped over the examples by `torch.func.vmap`. Of the user's code, only the
data set, `collate_fn` and `augment` ever meet a record, each record in a process of its own
(`record_processes`). No other record and no earlier call can enter an example's gradient, so the
guarantee does not rest on a test.

What remains to be trusted are torch's operators and the batching rules of vmap. A program that
branches on values, reads values out of tensors, writes into tensors that examples share, or calls
operators that are not torch's own (their code runs outside the trace and may keep state) is
refused.
"""

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tacit.errors import IncompatibleModel
from tacit.training.clip import Clip, ClippedSum, trainable
from tacit.training.engines.examples import as_views, clip_and_sum
from tacit.training.engines.vmap import (
    Decompose,
    LossModule,
    depends_on,
    examples_at_once,
    with_values,
)
from tacit.training.gradients.generic import without_fallback_warnings
from tacit.training.key import randomness
from tacit.training.noisy_loss import NoisyLoss, with_loss
from tacit.training.program_state import ProgramState
from tacit.training.record_processes import Example, RecordProcesses, Schema, rebuilt, schema_of
from tacit.training.tree import Batch, LossFn

if TYPE_CHECKING:
    from tacit.training.lots import Lot
    from tacit.training.records import Records

Gradients = Callable[[dict[str, Tensor], list[Tensor]], dict[str, Tensor]]
_LOSS = ""  # the loss of an example, among its gradients: no parameter has an empty name
_REFUSAL = (
    "isolation='strict' runs the program of one example as a traced graph, but this program {}. "
    "Change it, or use isolation='checked'."
)
_WRITES = "writes into a tensor that examples share, such as a buffer"
_OTHER_SCHEMA = (
    "isolation='strict' traces the program for the shapes, types and plain values of the first "
    "record, but another record has others. Pad records to one public length in collate_fn, give "
    "values as tensors, or use isolation='checked'."
)
_CHANGED = (
    "isolation='strict' traced the program when the run was made, but requires_grad of a parameter "
    "or the mode of a layer (train, eval) is different now. Put it back, or make a new run."
)
_HELD = (
    "uses a parameter, or a view of one, that it holds outside the model, in a closure or a list; "
    "read it from the model where it is used"
)
_CONSTANT = (
    "reads values out of a record or a parameter by Python code, or draws random numbers that are "
    "not torch's, in the model or loss_fn; they would be the same for every example and step"
)
_TORCHS_OWN = ("aten", "prims")
_OPERATOR = type(torch.ops.aten.add.Tensor)  # its name is private
# Ways to read values out of a tensor that tracing would not notice: the values are synthetic.
_READS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr}


class TracedLotSum:
    """Sums the clipped gradients of a lot by the traced program of one example.

    Called like `LotSum`. It must be made before anything else reads a record. Python values,
    buffers and frozen parameters that the program reads are those of that moment. `processes` reads
    the records, unless they are rows of tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        records: "Records",
        *,
        views: int = 1,
        augment: Callable[[Batch], Batch] | None = None,
        processes: int = 1,
        noisy_loss: NoisyLoss | None = None,
    ) -> None:
        self.model, self.loss_fn, self.views = model, loss_fn, views
        self._noisy_loss = noisy_loss
        self._device = records.device

        def read(index: int, seed: int | None = None) -> Batch:
            seed = torch.initial_seed() if seed is None else seed  # a process per record has it
            batch = records.fetch_on_host(np.asarray([index]), seed)
            return as_views(batch, views, augment)

        self._read: Callable[[Sequence[tuple[int, int]]], list[Example]]
        self._read = lambda requests: [_plain_example(read(*request)) for request in requests]
        self.processes: RecordProcesses | None = None
        if augment is not None or not records.is_plain:
            program = (*records.program, augment)
            self.processes = RecordProcesses(
                read, program, guard=records.guard, processes=processes
            )
            self._read = self.processes
        self._schema = self._public_schema()
        self._state = self._modes()
        self._gradients = self._trace(LossModule(model, loss_fn, views))

    def __call__(self, lot: "Lot", clip: Clip) -> tuple[ClippedSum, int]:
        """Return the sum of a lot, and how many records the lot holds. Private."""
        if self._modes() != self._state:
            raise RuntimeError(_CHANGED)
        seed = lot.source.seed(lot.step)
        indices = np.concatenate([np.zeros(0, np.int64), *(m.indices for m in lot.pending())])
        examples = self.read([(int(index), seed + int(index)) for index in indices])
        with randomness(seed, self._device):
            return self.clipped_sum(examples, clip), len(examples)

    def read(self, requests: Sequence[tuple[int, int]]) -> list[list[Tensor]]:
        """Return the tensors of records, each given by its number and a seed. Private."""
        examples = self._read(requests)
        if any(repr(example.schema) != repr(self._schema) for example in examples):  # NaN too
            raise IncompatibleModel(_OTHER_SCHEMA)
        return [example.tensors for example in examples]

    def clipped_sum(self, examples: Sequence[list[Tensor]], clip: Clip) -> ClippedSum:
        """Return the sum of clipped gradients of `examples`, each given by its tensors. Private."""
        total = ClippedSum.zeros(self.model, clip, dtype=torch.float64)
        values = {name: p.detach() for name, p in trainable(self.model).items()}
        step = examples_at_once(values)
        for start in range(0, len(examples), step):
            chunk = examples[start : start + step]
            rows = [torch.stack(group).to(self._device) for group in zip(*chunk, strict=True)]
            with without_fallback_warnings():
                found = _BoundCall.apply(self._gradients, values, rows)
            everyone = torch.ones(len(chunk), dtype=torch.bool, device=self._device)
            losses = found.pop(_LOSS)
            part = clip_and_sum(found, clip, everyone)
            total += with_loss(part, self._noisy_loss, losses, everyone)
        return total

    def blank(self) -> list[Tensor]:
        """Return zeros in the shapes of a record, which are public."""
        return [torch.zeros_like(t) for t in self._blank]

    def batch(self, tensors: Sequence[Tensor]) -> Batch:
        """Return a batch of these tensors as `loss_fn` gets it."""
        return rebuilt(self._schema, iter(tensors))

    def _public_schema(self) -> Schema:
        """Return the schema of the first record, and keep zeros in its shapes."""
        (first,) = self._read([(0, 0)])
        if not first.tensors or any(len(t) != self.views for t in first.tensors):
            raise IncompatibleModel(
                "the first axis of every tensor in a batch must count the examples, but a batch of "
                "one record has another number of rows. Change collate_fn or augment."
            )
        self._blank = [torch.zeros_like(t, device=self._device) for t in first.tensors]
        return first.schema

    def _modes(self) -> tuple[Any, ...]:
        names = tuple(trainable(self.model))
        return names, tuple(module.training for module in self.model.modules())

    def _trace(self, losses: LossModule) -> Gradients:
        parameters = trainable(self.model)
        values = {name: p.detach().clone() for name, p in parameters.items()}

        def gradients(values: dict[str, Tensor], rows: list[Tensor]) -> dict[str, Tensor]:
            leaves = {name: v.detach().requires_grad_() for name, v in values.items()}
            with torch.enable_grad():
                loss = with_values(losses, leaves, self.batch(rows)).mean()
                if depends_on(loss, parameters.values()):
                    raise IncompatibleModel(_REFUSAL.format(_HELD))
                found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            return dict(zip(values, found, strict=True)) | {_LOSS: loss.detach()}

        with _NoReads(), Decompose(), sdpa_kernel(SDPBackend.MATH), randomness(0, self._device):
            try:
                graph = self._same_for_all_values(gradients, values)
                memory = {_memory(p) for p in parameters.values()}
                if any(_memory(held) in memory for held in _constants(graph)):
                    raise IncompatibleModel(_REFUSAL.format(_HELD))
                _copy_constants(graph)
                # Not the module itself, whose call would run hooks that are set for all modules.
                mapped = vmap(graph.forward, in_dims=(None, 0), randomness="different")
                self._inspect(graph, mapped, values)
            # SystemError: torch has raised an error and a warning at the same time.
            except (RuntimeError, TypeError, ValueError, SystemError) as error:
                raise IncompatibleModel(_REFUSAL.format(_reason(error))) from None
        return mapped

    def _same_for_all_values(self, gradients: Gradients, values: dict[str, Tensor]) -> GraphModule:
        """Return the trace of the program; raise if it depends on values or on chance.

        A number that Python code reads out of a record or a parameter, or draws at random, is a
        constant of the trace, and would stay what it was at that moment. So the program is traced
        again, from the same Python state, on another synthetic record, with other parameters and
        random numbers, and must give the same graph. The first one may differ, as it fills caches.
        """
        state = ProgramState(self.model, self.loss_fn)

        def traced(factor: float, rows: list[Tensor], seed: int) -> GraphModule:
            state.restore()
            state.seed_generators(seed)
            with randomness(seed, self._device):
                return make_fx(gradients)({n: factor * v for n, v in values.items()}, rows)

        first = traced(1.0, self.blank(), 0)
        self._rows = self._accepted_rows(lambda rows: gradients(dict(values), rows))
        graph = traced(1.1, self._rows, 1)
        if _are_equal(first, graph) or _are_equal(graph, traced(1.0, self.blank(), 2)):
            return graph
        raise IncompatibleModel(_REFUSAL.format(_CONSTANT))

    def _accepted_rows(self, run: Callable[[list[Tensor]], Any]) -> list[Tensor]:
        """Return a synthetic record that differs from zeros wherever the program accepts it."""
        rows = self.blank()
        for place, kept in enumerate(rows):
            for rows[place] in (*_other_values(kept), kept):
                try:
                    run(rows)
                    break
                except IncompatibleModel:
                    raise
                except Exception:  # the user's code decides which values it accepts
                    continue
        return rows

    def _inspect(self, graph: GraphModule, mapped: Gradients, values: dict[str, Tensor]) -> None:
        """Raise unless the graph and its map leave everything but their results as it was."""
        rows = self._rows
        shared = [*_constants(graph), *values.values()]
        before = [tensor.clone() for tensor in shared]
        shapes = []
        for record in (rows, self.blank()):
            inspection = _Inspection(graph, [*values.values(), *record])
            inspection.run(*values.values(), *record)
            shapes.append(inspection.shapes)
        if shapes[0] != shapes[1]:
            raise IncompatibleModel(_REFUSAL.format("makes tensors whose shapes depend on values"))
        with without_fallback_warnings():
            # vmap refuses to write an example into a tensor that examples share.
            pairs = [torch.stack(pair) for pair in zip(rows, self.blank(), strict=True)]
            _BoundCall.apply(mapped, values, pairs)
        # Some operators write without saying so in their names or schemas.
        if not all(_is_unchanged(*pair) for pair in zip(before, shared, strict=True)):
            raise IncompatibleModel(_REFUSAL.format(_WRITES))


def _other_values(blank: Tensor) -> list[Tensor]:
    """Return values of the kind of `blank` to try, the most different ones first."""
    if blank.is_floating_point() or blank.is_complex():
        normal = torch.randn_like(blank)
        return [normal * 10.0 ** (3 * torch.rand_like(blank)), normal, torch.rand_like(blank)]
    # An index that is out of bounds is an error on a CPU; on a GPU, it ends the process.
    return [torch.ones_like(blank)] if blank.device.type == "cpu" else []


def _are_equal(a: GraphModule, b: GraphModule) -> bool:
    """Return whether two traces are the same program with the same constants."""
    codes = [[m.code for m in g.modules() if isinstance(m, GraphModule)] for g in (a, b)]
    return codes[0] == codes[1] and all(
        x is y or (x.shape == y.shape and x.dtype == y.dtype and _is_unchanged(x, y))
        for x, y in zip(_constants(a), _constants(b), strict=True)
    )


def _plain_example(batch: Batch) -> Example:
    tensors: list[Tensor] = []
    return Example(schema_of(batch, tensors), tensors)


def _nodes(graph: GraphModule) -> list[tuple[GraphModule, str]]:
    """Return what the graph refers to, as pairs of the module that holds it and its name."""
    modules = [m for m in graph.modules() if isinstance(m, GraphModule)]
    return [(m, str(n.target)) for m in modules for n in m.graph.nodes if n.op == "get_attr"]


def _copy_constants(graph: GraphModule) -> None:
    """Give the graph copies of the tensors it refers to, so that nobody else can write to them."""
    for module, name in _nodes(graph):
        held = operator.attrgetter(name)(module)
        if isinstance(held, GraphModule):
            continue
        if not isinstance(held, Tensor):
            raise IncompatibleModel(_REFUSAL.format("refers to an object that is no tensor"))
        owner, _, last = name.rpartition(".")
        holder = operator.attrgetter(owner)(module) if owner else module
        if last in holder._parameters:
            del holder._parameters[last]
        setattr(holder, last, held.detach().clone())


def _constants(graph: GraphModule) -> list[Tensor]:
    held = [operator.attrgetter(name)(module) for module, name in _nodes(graph)]
    return [value for value in held if isinstance(value, Tensor)]


def _is_unchanged(before: Tensor, now: Tensor) -> bool:
    return torch.equal(before.nan_to_num(), now.nan_to_num())


class _Inspection(Interpreter):
    """Runs a traced program once, and refuses it unless it is a function of its inputs alone.

    A number that is written into a tensor from outside the graph, such as a counter of calls, would
    come back with the next examples; how many calls there are depends on the lot.
    """

    def __init__(self, graph: GraphModule, inputs: Sequence[Tensor]) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # it would be added to the text of errors
        self._shared = {_memory(t) for t in (*_constants(graph), *inputs)}
        self.shapes: list[torch.Size] = []  # of what the operators returned, in their order

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is operator.getitem:
            return super().call_function(target, args, kwargs)
        if not isinstance(target, _OPERATOR) or target.namespace not in _TORCHS_OWN:
            raise IncompatibleModel(_REFUSAL.format("calls an operator that is not torch's own"))
        for place, argument in enumerate(target._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor) and _memory(tensor) in self._shared:
                    raise IncompatibleModel(_REFUSAL.format(_WRITES))
        result = super().call_function(target, args, kwargs)
        parts = result if isinstance(result, list | tuple) else [result]
        self.shapes += [part.shape for part in parts if isinstance(part, Tensor)]
        return result


class _BoundCall(torch.autograd.Function):
    """Calls a function inside of torch: only there, warnings of C++ code go through Python's."""

    @staticmethod
    def forward(_: Any, function: Gradients, *args: Any) -> Any:
        return function(*args)


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
    text = f"{error} {error.__cause__} {error.__context__}"
    if "data-dependent" in text or "value out of a tracing tensor" in text:
        return "branches on a value, or reads a value out of a tensor"
    if "more than 1 value per channel" in text:
        return "normalizes over the examples of a batch (BatchNorm)"
    if "inplace" in text or "in place" in text:
        return _WRITES
    return f"cannot be traced and mapped ({type(error).__name__})"
