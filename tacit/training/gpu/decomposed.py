"""A traced graph in the compiler's own operations, none of which writes into a tensor.

Blocks of a network repeat, and so do their operations. An operation is decomposed once for each
layout of its arguments, and the result is copied to all places where it occurs.
"""

import operator
from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

_MARKS = ("recompute", "ac_graph_id")  # of checkpointed blocks, which the partitioner reads

Trace = Callable[..., fx.GraphModule]
"""(function, *arguments) -> the graph of the function, decomposed."""


def decomposed(
    raw: fx.GraphModule, trace: Trace, table: Container[Any], mode: AbstractContextManager[Any]
) -> fx.GraphModule | None:
    """Return a graph with the results of `raw`, decomposed and without writes.

    Operations that are not in `table` have no decomposition. The result is None if `raw` is not a
    plain list of operations, if it writes into a tensor that is read by another name
    afterwards, or if a decomposition lays its result out in another way. `raw` may have fewer
    writes then.
    """
    if not _without_writes(raw, mode):
        return None
    raw.graph.eliminate_dead_code()
    copier = _Copier(trace, table, mode)
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
    return found if _layout(value) == _layout(node.meta["val"]) else None


class _Decomposition(NamedTuple):
    """The decomposition of an operation for arguments of one layout."""

    module: fx.GraphModule
    nodes: list[fx.Node]
    results: dict[fx.Node, int]  # which of the operation's results is this node
    bases: dict[fx.Node, fx.Node]  # in whose memory this node is: an argument or a result


class _Differs(Exception):
    """Raised if a decomposition gives a result another layout than the operation does."""


class _Copier:
    """Copies nodes of `raw`, decomposed, into `graph`; `root` holds the constants of the parts.

    The compiler must see which tensors share memory. So the results of operations have the values
    of the trace, and tensors inside a part that share memory with its arguments or results are
    views of these. The others inside a part may have the same value in all copies of the part.
    """

    def __init__(
        self, trace: Trace, table: Container[Any], mode: AbstractContextManager[Any]
    ) -> None:
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self._trace, self._table, self._mode = trace, table, mode
        self._made: dict[fx.Node, Any] = {}  # by node of `raw`: what stands for it in `graph`
        self._layouts: dict[fx.Node, Hashable] = {}  # of nodes of `raw`
        self._parts: dict[Hashable, _Decomposition] = {}
        self._numbers: dict[Any, fx.Node] = {}  # by expression: where a number of rows is computed

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
            try:
                self._made[node] = self._decomposed(node)
            except _Differs:
                return False
        elif all(_is_number(n.meta.get("val")) for n in node.all_input_nodes):
            self._made[node] = self._added(node, self._made, node.meta.get("val"))
        elif getattr(node.target, "__name__", "") == "getitem":
            value, index = node.args
            self._made[node] = self._made[value][index]  # type: ignore[index]  # several results
        else:
            return False
        return True

    def _decomposed(self, node: fx.Node) -> Any:
        """Add the part of an operation to the graph; return what stands for its results."""
        if node.target not in self._table and not node.target._can_decompose():  # type: ignore[union-attr]  # an operation of torch
            return self._as_it_is(node)
        inputs: list[fx.Node] = []
        key = (node.target, self._key(node.args, inputs), self._key(node.kwargs, inputs))
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = self._part(node, inputs)
        values, made, given = _listed(node.meta["val"]), dict[fx.Node, Any](), iter(inputs)
        for one in part.nodes:
            if one.op == "placeholder":
                made[one] = self._made[next(given)]
            elif one.op == "output":
                return fx.map_arg(one.args[0], made.__getitem__)
            elif one.op == "get_attr":
                made[one] = self._constant(getattr(part.module, str(one.target)), one)
            else:
                value = one.meta.get("val")
                if one in part.results:
                    value = values[part.results[one]]
                elif one in part.bases:
                    base = part.bases[one]
                    at = part.results.get(base)
                    within = made[base].meta["val"] if at is None else values[at]
                    value = self._view(value, within)
                made[one] = self._added(one, made, value, node.meta)
        raise AssertionError("a graph ends with its output")

    def _as_it_is(self, node: fx.Node) -> Any:
        value = node.meta["val"]
        made = self._added(node, self._made, value, node.meta)
        if _is_number(value) or isinstance(value, Tensor):
            return made
        found = []
        for number, one in enumerate(value):
            found.append(self.graph.call_function(operator.getitem, (made, number)))
            found[-1].meta = {name: made.meta[name] for name in _MARKS if name in made.meta}
            found[-1].meta["val"] = one
        return found

    def _part(self, node: fx.Node, inputs: list[fx.Node]) -> _Decomposition:
        """Decompose an operation for the layouts of its `inputs`, which may name a node twice."""

        def call(*values: Any) -> Any:
            given = iter(values)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(given))
            return node.target(*args, **kwargs)  # type: ignore[operator]  # an operation of torch

        module = self._trace(call, *(n.meta["val"] for n in inputs))
        nodes, results = list(module.graph.nodes), dict[fx.Node, int]()
        pairs = zip(_listed(nodes[-1].args[0]), _listed(node.meta["val"]), strict=True)
        for number, (found, value) in enumerate(pairs):
            if isinstance(found, fx.Node) and isinstance(value, Tensor):
                if _layout(found.meta["val"]) != _layout(value):
                    raise _Differs
                if found.op != "placeholder":
                    results.setdefault(found, number)
        homes = {m: n for n in results for m in _memory(n)}
        homes |= {m: n for n in nodes if n.op == "placeholder" for m in _memory(n)}
        inner = [n for n in nodes if n.op == "call_function" and n not in results]
        bases = {n: homes[m] for n in inner for m in _memory(n) if m in homes}
        return _Decomposition(module, nodes, results, bases)

    def _view(self, value: Any, base: Any) -> Any:
        """Return a tensor of the layout of `value` in the memory of `base`."""
        if not isinstance(value, Tensor):
            return value
        with self._mode, torch.no_grad():
            return base.as_strided(value.shape, value.stride(), value.storage_offset())

    def _added(
        self,
        node: fx.Node,
        made: dict[fx.Node, Any],
        value: Any,
        meta: dict[str, Any] | None = None,
    ) -> fx.Node:
        """Add a node like `node`, with arguments from `made`; numbers are computed only once."""
        number = value.node.expr if isinstance(value, torch.SymInt) else None
        if number is not None and number in self._numbers:
            return self._numbers[number]
        args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
        new = self.graph.create_node(node.op, node.target, args, kwargs)
        new.meta = {name: meta[name] for name in _MARKS if meta and name in meta}
        new.meta["val"] = value
        if "tensor_meta" in node.meta:
            new.meta["tensor_meta"] = node.meta["tensor_meta"]
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
                self._layouts[argument] = _layout(argument.meta["val"])
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


def _layout(value: Any) -> Hashable:
    """Return what a decomposition may depend on: all of a value but the numbers in it."""
    if isinstance(value, Tensor):
        return (
            *(tuple(map(_number, part)) for part in (value.shape, value.stride())),
            *(_number(value.storage_offset()), value.dtype, value.device, value.layout),
            *(value.is_conj(), value.is_neg()),
        )
    if isinstance(value, tuple | list):
        return tuple(map(_layout, value))
    return _number(value)


def _number(value: Any) -> Hashable:
    node = getattr(value, "node", None)
    return (type(value), repr(value)) if node is None else (type(value), node.expr)


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor | tuple | list)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else [value]


def _memory(node: fx.Node) -> set[int]:
    """Return what identifies the memory of a node's values."""
    values = _listed(node.meta.get("val"))
    return {v.untyped_storage()._cdata for v in values if isinstance(v, Tensor)}
