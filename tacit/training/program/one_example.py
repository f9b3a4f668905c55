"""The program of one example: traced once on tensors without values, and sorted for clipping.

`loss_fn(model, batch)` is followed on a batch of one example of which only shapes and types are
given. The result is a graph of torch operators: a function of the parameters, one example and
random numbers. For a lot, each operator of this graph is rewritten for all examples at once, such
that none reaches another (`stacked` says why), and no Python of the user runs on private data.

Each value of the graph is of one kind:

- *shared*: computed from trainable parameters alone (and constants);
- *example*: computed from the example, or drawn at random;
- *constant*: neither.

A *site* is an operator that takes a shared and an example value. Clipping needs the per-example
gradients there and nowhere else.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from tacit.errors import IncompatibleModel
from tacit.training import torch_internals
from tacit.training.examples import as_written
from tacit.training.program.checkpointed_blocks import folded
from tacit.training.program.derived import DerivedValue, pull_of
from tacit.training.program.stacked import lifted, simpler_cross_entropy, without_empty
from tacit.training.rules import products, recurrent
from tacit.training.rules.operators import has_rule, places_of
from tacit.training.torch_internals import CHECKPOINTED, Untraceable, schema_of, version_of
from tacit.training.tree import Batch, LossFn, check_losses, with_rows

aten = torch.ops.aten
Kind = Literal["shared", "example", "constant"]

_OFF = (
    "it computes without gradients in an autograd function, such as checkpoint(use_reentrant=True)"
)
_HELD = (
    "the program uses a tensor that was computed from parameters before it ran, whose gradient "
    "would be lost: compute it inside loss_fn or the model"
)

WRITES = (
    "loss_fn writes into {}, which all records share. Make it constant, compute it from public "
    "data, leave out max_norm of embeddings, or use .eval()."
)
_HOOKED = (
    " has a hook on its gradient (register_hook), which would be left out, or would see gradients "
    "of one record. Remove it, and change p.grad after private.step(batch, update=False) instead."
)


@dataclass(frozen=True, eq=False)
class OneExample:
    """The traced program of one example.

    Attributes
    ----------
    run
        `run(tape, *values, *rows)`, where `values` are those of `names`, returns the loss.
    names
        Parameters and buffers of the model that the program reads.
    derived
        Shared values that are computed from parameters, in the order of the graph.
    joint
        Parameters whose gradients have several parts: several sites, or derived values.
    constants
        Other tensors that it reads, and the version of each when it was traced.
    trained
        Those of them whose gradients autograd would compute.
    """

    run: Callable[..., Tensor]
    names: tuple[str, ...]
    derived: tuple[DerivedValue, ...]
    joint: frozenset[str]
    constants: tuple[tuple[Tensor, int], ...]
    trained: tuple[Tensor, ...]
    graph: fx.GraphModule = field(repr=False)


def traced(model: nn.Module, loss_fn: LossFn, batch: Batch, views: int = 1) -> OneExample:
    """Trace `loss_fn(model, batch)` for a batch like `batch`, one example of `views` rows.

    Only the shapes and types of its tensors are used.
    """
    torch_internals.require()
    for name, parameter in model.named_parameters():
        if torch_internals.is_hooked(parameter):
            raise IncompatibleModel(f"{name}{_HOOKED}")
    tensors, rebuild = with_rows(batch)

    def program(*rows: Tensor) -> Tensor:
        with as_written():
            losses = loss_fn(model, rebuild(rows))
        check_losses(losses, views)
        return losses.mean()

    with recurrent.LayerByLayer():
        module = torch_internals.traced(program, tensors)
    return _Sorted(module, model).result()


class _Sorted:
    """Sorts the nodes of a traced graph and prepares it to be mapped."""

    def __init__(self, module: fx.GraphModule, model: nn.Module) -> None:
        self.module, self.graph = module, module.graph
        self.model = model
        self.rows = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.names: dict[str, fx.Node] = {}
        self.constants: list[tuple[Tensor, int]] = []
        self.trained: list[Tensor] = []
        self.trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        with self.graph.inserting_before(self.rows[0]):
            self.tape = self.graph.placeholder("tape")
        self._name_tensors()
        self._simplify()
        self.roots: dict[fx.Node, fx.Node] = {}
        self.kinds: dict[fx.Node, Kind] = {}
        self._separate_writes()

    def result(self) -> OneExample:
        uses: Counter[str] = Counter()
        start = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(start):
            self.count = self.graph.call_function(_count, (self.tape,))
        self.kinds[self.count] = "constant"
        self.writes = any(map(written, self.graph.nodes))
        written_over = self._blocks_written_over()
        derived: dict[str, fx.Node] = {}
        labels = {node: name for name, node in self.names.items()}
        for node in list(self.graph.nodes):
            if self.kinds[node] != "example" and node.target is recurrent.LAYER:
                node.target = recurrent.layer_by_torch
            if isinstance(node.target, torch_internals.CustomCall):
                node.args = (self.tape, self._flags(node.args), *node.args)
            if node.op != "call_function" or self.kinds[node] != "example":
                continue
            if node.target is aten.as_strided.default:
                raise Untraceable("it reads memory by its address (as_strided)")
            for arg in _occurrences(node):
                if self.kinds[arg] == "shared":
                    times = 2 if node.target in products.OF_SEVERAL else 1
                    uses[labels.setdefault(arg, f"%{arg.name}")] += times
                    if arg not in self.names.values():
                        derived[labels[arg]] = arg
            self._replace(node)
        feeding = {
            name for name, node in self.names.items() if _reaches(node, set(derived.values()))
        }
        joint = feeding | {name for name, count in uses.items() if count > 1}
        pulls = self._pulls(labels, list(derived.values()))
        for name, node in derived.items():
            with self.graph.inserting_after(node):
                label = self.graph.call_function(_label, (self.tape, name, node))
            node.replace_all_uses_with(label, lambda user, own=label: user is not own)
        self.graph.eliminate_dead_code(_must_stay)
        self.graph.lint()
        self.module.recompile()
        return OneExample(
            folded(self.module, self.kinds, written_over),
            tuple(self.names),
            pulls,
            frozenset(joint),
            tuple(self.constants),
            tuple(self.trained),
            self.module,
        )

    def _pulls(
        self, labels: dict[fx.Node, str], pending: list[fx.Node]
    ) -> tuple[DerivedValue, ...]:
        """Say how the gradients of derived values are pulled back, in the order of the graph.

        `labels` name parameters and derived values. What is needed is noted on the tape.
        """
        order = {node: place for place, node in enumerate(self.graph.nodes)}
        found: dict[fx.Node, DerivedValue] = {}
        needed: dict[fx.Node, str] = {}
        while pending:
            node = pending.pop()
            if node in found or node in self.names.values():
                continue
            pull = pull_of(node, lambda arg: self.kinds.get(arg) == "shared")
            sources, needs = ((), (node,)) if pull is None else pull
            pending += [source for source, _ in sources]
            found[node] = DerivedValue(
                labels.setdefault(node, f"%{node.name}"),
                tuple((labels.setdefault(n, f"%{n.name}"), step) for n, step in sources),
                tuple(needed.setdefault(n, f"={n.name}") for n in needs),
            )
        start = next(n for n in self.graph.nodes if n.op != "placeholder")
        for node, name in needed.items():
            is_input = node.op == "placeholder"
            with (
                self.graph.inserting_before(start) if is_input else self.graph.inserting_after(node)
            ):
                self.graph.call_function(_note, (self.tape, name, node))
        return tuple(found[node] for node in sorted(found, key=order.__getitem__))

    # Tensors from outside -------------------------------------------------------------------------

    def _name_tensors(self) -> None:
        """Make parameters and buffers inputs of the graph; keep other tensors as constants."""
        held = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        by_id = {id(tensor): name for name, tensor in held.items()}
        by_memory = {memory_of(tensor): name for name, tensor in held.items()}
        for node in list(self.graph.nodes):
            if node.op != "get_attr":
                continue
            tensor = getattr(self.module, node.target)
            if not isinstance(tensor, Tensor):
                raise Untraceable("the program holds a part that is no tensor, such as a branch")
            name = by_id.get(id(tensor)) or by_memory.get(memory_of(tensor))
            if name is None:
                if torch_internals.is_fake(tensor):
                    raise Untraceable(
                        "the program takes gradients itself, such as a penalty on them"
                    )
                if tensor.grad_fn is not None:  # leaves are refused by `Programs`, by name
                    raise Untraceable(_HELD)
                self.constants.append((tensor, version_of(tensor)))
                node.meta.setdefault("val", tensor)
                continue
            part = self._input(name)
            with self.graph.inserting_before(node):
                if not _is_same_part(tensor, held[name]):
                    size = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
                    part = self.graph.call_function(aten.as_strided.default, (part, *size))
                if held[name].requires_grad and not tensor.requires_grad:  # by `.detach()` before
                    part = self.graph.call_function(aten.detach.default, (part,))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
            self.graph.erase_node(node)

    def _input(self, name: str) -> fx.Node:
        if name not in self.names:
            with self.graph.inserting_before(self.rows[0]):
                self.names[name] = self.graph.placeholder(f"value_{len(self.names)}")
        return self.names[name]

    # Random numbers and writes --------------------------------------------------------------------

    def _simplify(self) -> None:
        """Replace operators by others that need no rule, and dropout that is off by its input."""
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            change, new = _SIMPLER.get(node.target), node.meta.get("val")
            if change is not None:
                with self.graph.inserting_before(node):
                    new = change(self.graph, *node.args, **node.kwargs)
            elif not isinstance(new, int):  # as a size is, which is the same for all examples
                continue
            if new is not None:
                if isinstance(new, fx.Node):
                    new.meta = {"val": node.meta.get("val")} | new.meta
                node.replace_all_uses_with(new)
                self.graph.erase_node(node)

    def _separate_writes(self) -> None:
        """Sort the nodes; a tensor into which an example is written becomes one for each example.

        Whether a value holds examples may depend on a later write, so this is repeated until
        nothing changes.
        """
        while True:
            self._sort()
            changed = [self._own_copy(n) for n in list(self.graph.nodes) if n.op == "call_function"]
            if not any(changed):
                return

    def _own_copy(self, node: fx.Node) -> bool:
        for target in written(node):
            root = self.roots[target]
            is_shared = root.op == "get_attr" or root in self.names.values()
            if is_shared or node.target in _WITH_STATISTICS:
                if names := [n for n, value in self.names.items() if value is root]:
                    raise IncompatibleModel(WRITES.format(f"model.{names[0]}"))
                raise Untraceable("the program writes into a tensor that all examples share")
            is_row = root.op == "placeholder"
            values = [self.kinds[n] for n in node.all_input_nodes]
            is_own = root.target is _spread
            is_needed = bool(set(values) - {"constant"}) or is_random(node)
            if is_own or not (is_row or (self.kinds[root] != "example" and is_needed)):
                continue
            with self.graph.inserting_after(root):
                copy = self.graph.call_function(_spread, (self.tape, root, is_row))
            root.replace_all_uses_with(copy, lambda user, own=copy: user is not own)
            return True
        return False

    def _sort(self) -> None:
        self.kinds.clear()
        trainable = {node for name, node in self.names.items() if name in self.trainable}
        has_gradients = True
        for node in self.graph.nodes:
            if node.target is torch_internals.SET_GRADIENTS:
                has_gradients = bool(node.args[0])
            inputs = node.all_input_nodes
            of = {self.kinds[n] for n in inputs}
            if not has_gradients or node.target is aten.detach.default:
                of -= {"shared"}
            else:
                held = (getattr(self.module, n.target) for n in inputs if n.op == "get_attr")
                self.trained += [t for t in held if t.requires_grad]
            if node in self.rows or node.target is _spread or is_random(node):
                kind: Kind = "example"
            elif node in trainable:
                kind = "shared"
            else:
                kind = "example" if "example" in of else "shared" if "shared" in of else "constant"
            self.kinds[node] = kind
            self.roots[node] = self._root(node)
        if not has_gradients:  # an autograd function had none, and does not say when it ended
            raise Untraceable(_OFF)

    def _blocks_written_over(self) -> set[int]:
        """Return the checkpointed blocks that share memory which is written into with others."""
        found: set[int] = set()
        users: dict[fx.Node, set[int | None]] = {}
        for node in self.graph.nodes:
            for near in (node, *node.all_input_nodes):
                root = self.roots.get(near) or near
                users.setdefault(root, set()).add(node.meta.get(CHECKPOINTED))
        for node in self.graph.nodes:
            for target in written(node):
                blocks = users[self.roots[target]]
                if len(blocks) > 1:
                    found |= {block for block in blocks if block is not None}
        return found

    def _root(self, node: fx.Node) -> fx.Node:
        """Return the node whose memory `node` may share: itself if it is new."""
        source = _aliased(node)
        return node if source is None else self.roots[source]

    # Sites ----------------------------------------------------------------------------------------

    def _replace(self, node: fx.Node) -> None:
        """Make a node of an example one of all examples: see `stacked`."""
        if node.target in (_spread, operator.getitem) or isinstance(
            node.target, torch_internals.CustomCall
        ):
            return
        _give_all_arguments(node)
        shared = [n for n in node.all_input_nodes if self.kinds[n] == "shared"]
        is_met = node.target is recurrent.LAYER or (shared and has_rule(node))
        fits = False
        if is_met:
            fits = self._prepare(node, places_of(node, self.kinds))
        else:
            for value in shared:
                node.replace_input_with(value, self._of_all(_copy, node, value))
        new = None if is_met else lifted(node, self._is_example, self.count, writes=self.writes)
        if new is None:
            args: Any = (node.target, self._flags(node.args), *node.args)
            with self.graph.inserting_before(node):
                if is_met:
                    new = self.graph.call_function(_meet, (self.tape, fits, *args), node.kwargs)
                else:
                    new = self.graph.call_function(_map, (self.tape, *args), node.kwargs)
        for inserted in _since(node, self.kinds):
            self.kinds[inserted] = "example"
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def _prepare(self, node: fx.Node, places: tuple[int, ...] | None) -> bool:
        """Stack the arguments that a rule takes stacked; return whether the rule fits."""
        for place in places or ():
            value = node.args[place]
            if isinstance(value, fx.Node) and not self._is_example(value):
                call = _copy if self.kinds[value] == "shared" else _repeat
                node.update_arg(place, self._of_all(call, node, value))
        return places is not None

    def _of_all(self, call: Any, user: fx.Node, value: fx.Node) -> fx.Node:
        """Return a node for the values that all examples have of a tensor, in front of its user."""
        with self.graph.inserting_before(user):
            found = self.graph.call_function(call, (self.tape, value))
        found.meta, self.kinds[found] = {"val": value.meta.get("val")}, "example"
        return found

    def _is_example(self, node: fx.Node) -> bool:
        return self.kinds[node] == "example"

    def _flags(self, value: Any) -> Any:
        """Return the structure of arguments, in which True stands for values of examples."""
        if isinstance(value, tuple | list):
            return tuple(map(self._flags, value))
        return isinstance(value, fx.Node) and self._is_example(value)


def _since(node: fx.Node, known: dict[fx.Node, Kind]) -> Iterator[fx.Node]:
    """Yield the nodes just before `node` that are not known yet."""
    while (node := node.prev) not in known and node.op == "call_function":
        yield node


def _give_all_arguments(node: fx.Node) -> None:
    """Give the positional arguments that were given by name or not at all."""
    schema = schema_of(node.target)
    if schema is None:
        return
    kwargs = dict(node.kwargs)
    rest = [a for a in schema.arguments[len(node.args) :] if not a.kwarg_only]
    node.args += tuple(kwargs.pop(a.name, a.default_value) for a in rest)
    node.kwargs = kwargs


def _reaches(node: fx.Node, wanted: set[fx.Node]) -> bool:
    """Return whether one of the `wanted` nodes is computed from `node`."""
    pending, seen = [node], set[fx.Node]()
    while pending:
        for user in pending.pop().users:
            if user in wanted:
                return True
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return False


def _occurrences(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes among the arguments, each as often as it occurs."""
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), lambda n: found.append(n) or n)
    yield from found


# Normalizations that write running statistics (their arguments 3 and 4) where argument 5 is true.
_WITH_STATISTICS = (aten.batch_norm.default, aten.instance_norm.default)


def written(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operator writes into."""
    schema = schema_of(node.target)
    if node.target in _WITH_STATISTICS and node.args[5]:  # which its schema does not say
        return [n for n in node.args[3:5] if isinstance(n, fx.Node)]
    if schema is None or not schema.is_mutable:
        return []
    found = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            found += [
                v for v in (value if isinstance(value, Sequence) else [value]) if v is not None
            ]
    return found


def _aliased(node: fx.Node) -> Any:  # Any: a node or None, among many kinds of arguments
    """Return the argument whose memory the result may share, as a view or after a write."""
    if node.op != "call_function":
        return None
    if node.target is getattr or getattr(node.target, "__name__", "") == "getitem":
        return node.args[0]
    schema = schema_of(node.target)
    if schema is None or not any(r.alias_info is not None for r in schema.returns):
        return None
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and place < len(node.args):
            value = node.args[place]
            return value[0] if isinstance(value, Sequence) else value
    return None


def is_random(node: fx.Node) -> bool:
    """Return whether an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if node.target is not aten.scaled_dot_product_attention.default:
        return True
    rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return bool(rate != 0)


def _must_stay(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.target in (*torch_internals.MODES, _note):
        return True
    target: Any = node.target
    if target in (_meet, _map):
        target = next(a for a in node.args if schema_of(a) is not None)
    schema = schema_of(target)
    return schema is not None and schema.is_mutable


def memory_of(tensor: Tensor) -> tuple[int, torch.device]:
    """Return what tensors have in common that share memory."""
    try:
        return tensor.untyped_storage().data_ptr() or -id(tensor), tensor.device
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
        return -id(tensor), tensor.device


def _is_same_part(tensor: Tensor, whole: Tensor) -> bool:
    parts = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (tensor, whole)]
    return tensor is whole or parts[0] == parts[1]


# What the graph calls -----------------------------------------------------------------------------


def _meet(tape: Any, fits: bool, target: Any, stacked: Any, *args: Any, **kwargs: Any) -> Any:
    return tape.meet(fits, target, stacked, args, kwargs)


def _map(tape: Any, target: Any, stacked: Any, *args: Any, **kwargs: Any) -> Any:
    return tape.map(target, stacked, args, kwargs)


def _copy(tape: Any, shared: Tensor) -> Tensor:
    return tape.copy(shared)


def _repeat(tape: Any, value: Tensor) -> Tensor:
    return value.expand(tape.examples, *value.shape)


def _spread(tape: Any, value: Tensor, is_stacked: bool) -> Tensor:
    return tape.spread(value, is_stacked)


def _count(tape: Any) -> int:
    return tape.examples


def _label(tape: Any, name: str, value: Tensor) -> Tensor:
    return tape.label(name, value)


def _note(tape: Any, name: str, value: Tensor) -> None:
    tape.note(name, value)


def _simpler_fill(graph: fx.Graph, target: fx.Node, value: fx.Node) -> fx.Node:
    return graph.call_function(aten.copy_.default, (target, value))


def _without_dropout(_: fx.Graph, x: fx.Node, p: float, train: bool) -> fx.Node | None:
    return None if train and p else x


# What replaces a node; None leaves it as it is.
_SIMPLER: dict[Any, Callable[..., fx.Node | None]] = {
    aten.cross_entropy_loss.default: simpler_cross_entropy,
    aten.cat.default: without_empty,
    aten.fill_.Tensor: _simpler_fill,
    aten.dropout.default: _without_dropout,
    aten.dropout_.default: _without_dropout,
    aten.feature_dropout.default: _without_dropout,
    aten.alpha_dropout.default: _without_dropout,
}
