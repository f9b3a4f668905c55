"""A traced graph in the compiler's own operations, none of which writes into a tensor.

Blocks of a network repeat, and so do their operations. An operation is decomposed once for each
layout of its arguments, and the result is copied to all places where it occurs.
"""

from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

_MARKS = ("recompute", "ac_graph_id")  # of checkpointed blocks, which the partitioner reads


def decomposed(
    raw: fx.GraphModule, trace: Callable[..., fx.GraphModule], mode: AbstractContextManager[Any]
) -> fx.GraphModule | None:
    """Return a graph with the results of `raw`, decomposed and without writes.

    `trace(function, *arguments)` returns the decomposed graph of a function. The result is None if
    `raw` is not a plain list of operations, or if it writes into a tensor that is read by another
    name afterwards. `raw` may have fewer writes then.
    """
    if not _without_writes(raw, mode):
        return None
    raw.graph.eliminate_dead_code()
    copier = _Copier(raw, trace)
    for node in raw.graph.nodes:
        if not copier.copy(node):
            return None
    return fx.GraphModule(copier.root, copier.graph)


def _without_writes(raw: fx.GraphModule, mode: AbstractContextManager[Any]) -> bool:
    """Replace operations in place by others; return whether this was possible for all of them.

    `x.add_(y)` becomes `z = x.add(y)`, and z takes the place of x from there on. No other tensor in
    the memory of x that was made before may be used after it.
    """
    place = {node: number for number, node in enumerate(raw.graph.nodes)}
    sharing: dict[int, list[fx.Node]] = {}  # nodes by the memory of their values
    given = {m for n in place if n.op == "placeholder" for m in _memory(n)}
    for node in list(place):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            target = node.args[0] if node.args else None
            function = _out_of_place(node, mode)
            if function is None or not isinstance(target, fx.Node):
                return False
            memory = _memory(target)
            others = [n for m in memory for n in sharing.get(m, ()) if n is not target]
            last = max((place[user] for other in others for user in other.users), default=-1)
            if memory & given or last > place[node]:
                return False
            node.target = function
            target.replace_all_uses_with(node, lambda user, at=place[node]: place[user] > at)
        for memory in _memory(node):
            sharing.setdefault(memory, []).append(node)
    return True


def _out_of_place(node: fx.Node, mode: AbstractContextManager[Any]) -> Any:
    """Return the operation that computes what `node` writes into its first argument, or None."""
    schema = node.target._schema  # type: ignore[union-attr]  # the caller has looked
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    packet = getattr(node.target, "_opname", "")
    if written != [True] + [False] * (len(written) - 1) or not packet.endswith("_"):
        return None
    home = getattr(torch.ops, node.target.namespace)  # type: ignore[union-attr]  # likewise
    found = getattr(getattr(home, packet[:-1], None), node.target._overloadname, None)  # type: ignore[union-attr]  # likewise
    if found is None or len(schema.returns) != 1:
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode, torch.no_grad():
        value = found(*args, **kwargs)
    return found if _layout(value)[:-1] == _layout(node.meta["val"])[:-1] else None


class _Part(NamedTuple):
    """The decomposition of an operation for arguments of one layout."""

    module: fx.GraphModule
    nodes: list[fx.Node]


class _Copier:
    """Copies nodes of `raw`, decomposed, into `graph`; `root` holds the constants of the parts."""

    def __init__(self, raw: fx.GraphModule, trace: Callable[..., fx.GraphModule]) -> None:
        self.raw = raw
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self._trace = trace
        self._made: dict[fx.Node, Any] = {}  # by node of `raw`: what stands for it in `graph`
        self._layouts: dict[fx.Node, Hashable] = {}  # of nodes of `raw`
        self._parts: dict[Hashable, _Part] = {}
        self._numbers: dict[Any, fx.Node] = {}  # by expression: where a number of rows is computed
        self._inputs = {m for n in raw.graph.nodes if n.op == "placeholder" for m in _memory(n)}

    def copy(self, node: fx.Node) -> bool:
        """Add a node of `raw` to the graph; return False if it is of an unknown kind."""
        if node.op == "placeholder":
            self._made[node] = made = self.graph.placeholder(node.name)
            made.meta = dict(node.meta)
        elif node.op == "output":
            self.graph.output(fx.map_arg(node.args[0], self._made.__getitem__))
        elif node.op != "call_function":
            return False
        elif isinstance(node.target, torch._ops.OpOverload):
            self._made[node] = self._decomposed(node)
        elif all(
            not isinstance(n.meta.get("val"), Tensor | tuple | list) for n in node.all_input_nodes
        ):
            self._made[node] = self._added(node, self._made, {})  # arithmetic with numbers of rows
        elif getattr(node.target, "__name__", "") == "getitem":
            value, index = node.args
            self._made[node] = self._made[value][index]  # type: ignore[index]  # several results
        else:
            return False
        return True

    def _decomposed(self, node: fx.Node) -> Any:
        inputs: list[fx.Node] = []
        key = (node.target, self._key(node.args, inputs), self._key(node.kwargs, inputs))
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = self._part(node, inputs)
        marks = {name: node.meta[name] for name in _MARKS if name in node.meta}
        made: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for one in part.nodes:
            if one.op == "placeholder":
                made[one] = self._made[next(given)]
            elif one.op == "output":
                return fx.map_arg(one.args[0], made.__getitem__)
            elif one.op == "get_attr":
                made[one] = self._constant(getattr(part.module, str(one.target)), one)
            else:
                made[one] = self._added(one, made, marks)
        raise AssertionError("a graph ends with its output")

    def _part(self, node: fx.Node, inputs: list[fx.Node]) -> _Part:
        """Decompose an operation for the layouts of its `inputs`, which may name a node twice."""

        def call(*values: Any) -> Any:
            given = iter(values)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(given))
            return node.target(*args, **kwargs)  # type: ignore[operator]  # an operation of torch

        module = self._trace(call, *(n.meta["val"] for n in inputs))
        return _Part(module, list(module.graph.nodes))

    def _added(self, node: fx.Node, made: dict[fx.Node, Any], marks: dict[str, Any]) -> fx.Node:
        """Add a node like `node`, with arguments from `made`; numbers are computed only once."""
        value = node.meta.get("val")
        number = value.node.expr if isinstance(value, torch.SymInt) else None
        if number is not None and number in self._numbers:
            return self._numbers[number]
        args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
        new = self.graph.create_node(node.op, node.target, args, kwargs)
        new.meta = {name: node.meta[name] for name in ("val", "tensor_meta") if name in node.meta}
        new.meta |= marks
        if number is not None:
            self._numbers[number] = new
        return new

    def _constant(self, value: Any, node: fx.Node) -> fx.Node:
        name = f"_constant_{len(self.root._buffers)}"
        self.root.register_buffer(name, value)
        new = self.graph.get_attr(name)
        new.meta = dict(node.meta)
        return new

    def _key(self, argument: Any, inputs: list[fx.Node]) -> Hashable:
        """Return a key that is equal for arguments of equal layout; add the nodes to `inputs`."""
        if isinstance(argument, fx.Node):
            inputs.append(argument)
            if argument not in self._layouts:
                self._layouts[argument] = _layout(argument.meta["val"], self._inputs)
            return self._layouts[argument]
        if isinstance(argument, tuple | list):
            return (type(argument), *(self._key(one, inputs) for one in argument))
        if isinstance(argument, dict):
            return tuple((name, self._key(one, inputs)) for name, one in argument.items())
        if isinstance(argument, slice):
            return (
                slice,
                *(self._key(a, inputs) for a in (argument.start, argument.stop, argument.step)),
            )
        return (type(argument), repr(argument))  # 0.0 and -0.0 are equal as keys


def _layout(value: Any, inputs: Collection[int] = ()) -> tuple[Any, ...]:
    """Return what a decomposition may depend on: all of a value but the numbers in it.

    The last entry says whether a tensor is in the memory of an input of the graph.
    """
    if isinstance(value, Tensor):
        return (
            *(tuple(map(_number, part)) for part in (value.shape, value.stride())),
            *(_number(value.storage_offset()), value.dtype, value.device, value.layout),
            *(value.is_conj(), value.is_neg(), value.untyped_storage()._cdata in inputs),
        )
    if isinstance(value, tuple | list):
        return tuple(_layout(one, inputs) for one in value)
    return (_number(value),)


def _number(value: Any) -> Hashable:
    node = getattr(value, "node", None)
    return (type(value), repr(value)) if node is None else (type(value), node.expr)


def _memory(node: fx.Node) -> set[int]:
    """Return what identifies the memory of a node's values."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return {v.untyped_storage()._cdata for v in values if isinstance(v, Tensor)}
