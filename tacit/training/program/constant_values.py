"""The value of a tensor that a program makes of constants alone, such as a causal mask.

Programs branch on such values: `nn.Transformer` asks whether its mask is the causal one. While a
program is traced its tensors have no values, so the operators that made the tensor are run again.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from tacit.training.program import torch_internals
from tacit.training.program.one_example import is_random, written


def constant_value(tensor: Tensor) -> tuple[Tensor, list[Tensor]] | None:
    """Return the value of a tensor of a trace, and the tensors from outside that it is made of.

    None if it depends on the example, on a parameter that is trained, or on random numbers.
    """
    traced = torch_internals.node_of(tensor)
    if traced is None:
        return None
    node, root = traced
    wanted = _makers(node)
    if any(n.op == "placeholder" or is_random(n) for n in wanted):
        return None
    values: dict[fx.Node, Any] = {}
    outside: list[Tensor] = []
    with torch_internals.untraced(), torch.no_grad():
        for n in node.graph.nodes:
            if n not in wanted:
                continue
            if n.op == "get_attr":
                outside.append(getattr(root, n.target))
                if outside[-1].requires_grad or torch_internals.is_fake(outside[-1]):
                    return None
                values[n] = outside[-1].clone()
            else:
                args, kwargs = map_arg((n.args, n.kwargs), values.__getitem__)
                values[n] = n.target(*args, **kwargs)
    return values[node], outside


def _makers(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that made a value: its inputs and what was written into any of them."""
    found, before = {node}, 0
    while len(found) > before:
        before = len(found)
        for n in reversed(node.graph.nodes):
            if n in found or any(not found.isdisjoint(_line(target)) for target in written(n)):
                found |= {n, *n.all_input_nodes}
    return found


def _line(node: Any) -> set[fx.Node]:
    """Return a node and the first arguments behind it, of which it may be a view."""
    line = set[fx.Node]()
    while isinstance(node, fx.Node):
        line.add(node)
        node = node.args[0] if node.args else None
    return line
