"""Blocks under `torch.utils.checkpoint`: what they compute is not kept, but computed again.

A trace has the operators of such a block among all others, with a mark. `folded` makes one call of
each block, which keeps its inputs only. In the backward the block runs again, with the random
numbers of its forward, and its sites collect the per-example gradients then.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tacit.training.torch_internals import CHECKPOINTED, MODES, on_its_own


def folded(
    module: fx.GraphModule, kinds: Mapping[fx.Node, str], kept: set[int]
) -> Callable[..., Any]:
    """Return the function of a graph: each marked block but those in `kept` is one call."""
    order = list(module.graph.nodes)
    blocks = _blocks(order, kinds, kept)
    if not blocks:
        return module.forward
    graph, new = fx.Graph(), dict[fx.Node, Any]()
    for place, node in enumerate(order):
        block = next((b for b in blocks if b.start <= place < b.stop), None)
        if block is None:
            new[node] = graph.node_copy(node, new.__getitem__)
        elif place == block.start:
            new |= _call(graph, module, order[block.start : block.stop], kinds, new)
    return fx.GraphModule(module, graph).forward


def _blocks(order: Sequence[fx.Node], kinds: Mapping[fx.Node, str], kept: set[int]) -> list[range]:
    """Return where the blocks lie whose results are tensors of all examples."""
    places: dict[int, list[int]] = {}
    for place, node in enumerate(order):
        if (mark := node.meta.get(CHECKPOINTED)) is not None and mark not in kept:
            places.setdefault(mark, []).append(place)
    found = []
    for own in places.values():
        block = range(own[0], own[-1] + 1)
        nodes = order[block.start : block.stop]
        results = _results(nodes)
        has_modes = any(node.target in MODES for node in nodes)
        are_tensors = all(
            kinds.get(n) == "example" and isinstance(n.meta.get("val"), Tensor) for n in results
        )
        is_apart = not found or found[-1].stop <= block.start
        if results and are_tensors and is_apart and not has_modes:
            found.append(block)
    return found


def _results(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    inside = {*nodes}
    return [node for node in nodes if not inside.issuperset(node.users)]


def _call(
    graph: fx.Graph,
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    kinds: Mapping[fx.Node, str],
    new: Mapping[fx.Node, Any],
) -> dict[fx.Node, Any]:
    """Add one call of the block of `nodes`; return the nodes of its results."""
    inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in {*nodes})
    own = fx.Graph()
    inner: dict[fx.Node, Any] = {n: own.placeholder(f"input_{i}") for i, n in enumerate(inputs)}
    for node in nodes:
        inner[node] = own.node_copy(node, inner.__getitem__)
    results = _results(nodes)
    own.output(tuple(inner[node] for node in results))
    are_examples = tuple(kinds.get(n) == "example" for n in inputs)
    block = _CheckpointedBlock(fx.GraphModule(module, own).forward, are_examples)
    tape = next(node for node in new.values() if node.op == "placeholder" and node.name == "tape")
    found = graph.call_function(block, (tape, *(new[n] for n in inputs)))
    return {node: graph.call_function(_item, (found, place)) for place, node in enumerate(results)}


def _item(values: Sequence[Any], place: int) -> Any:
    return values[place]


class _CheckpointedBlock:
    """One block of a graph: `run` gives its results; `are_examples` says which inputs are."""

    __name__ = "checkpointed_block"

    def __init__(self, run: Callable[..., Any], are_examples: tuple[bool, ...]) -> None:
        self.run, self.are_examples = run, are_examples

    def __call__(self, tape: Any, *values: Any) -> Any:
        """Return the results; nothing of the block is kept but its inputs."""
        examples = [v for v, own in zip(values, self.are_examples, strict=True) if own]
        if not torch.is_grad_enabled() or any(type(x) is not Tensor for x in examples):
            return self.run(*values)  # the compiler, which sees other tensors, keeps what it likes
        others = [None if own else v for v, own in zip(values, self.are_examples, strict=True)]
        return _RunAgain.apply(tape.anchor, self, others, *examples)

    def of(self, examples: Sequence[Tensor], others: Sequence[Any]) -> Any:
        """Return the results for inputs that are given apart."""
        rows = iter(examples)
        pairs = zip(others, self.are_examples, strict=True)
        return self.run(*(next(rows) if own else value for value, own in pairs))


class _RunAgain(torch.autograd.Function):
    """A block that runs without a history, and again with one in the backward."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, block: _CheckpointedBlock, others: list[Any], *examples: Tensor
    ) -> Any:
        kind = examples[0].device.type if examples else "cpu"
        ctx.anchor, ctx.block, ctx.others, ctx.kind = anchor, block, others, kind
        ctx.autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.devices = [] if kind != "cuda" else [examples[0].device]
        ctx.states = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in ctx.devices]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*examples)
        return tuple(map(on_its_own, block.of(examples, others)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        needed = ctx.needs_input_grad[3:]
        pairs = zip(ctx.saved_tensors, needed, strict=True)
        examples = [tensor.detach().requires_grad_(need) for tensor, need in pairs]
        states, (dtype, enabled) = ctx.states, ctx.autocast
        with torch.random.fork_rng(ctx.devices), torch.enable_grad():
            torch.set_rng_state(states[0])
            for device, state in zip(ctx.devices, states[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            with torch.autocast(ctx.kind, dtype, enabled, cache_enabled=False):
                results = ctx.block.of(examples, ctx.others)
        given = [
            (result, g)
            for result, g in zip(results, grads, strict=True)
            if g is not None and result.requires_grad
        ]
        wanted = [ctx.anchor, *(x for x in examples if x.requires_grad)]
        outputs, seeds = zip(*given, strict=True) if given else ((), ())
        found = iter(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)[1:])
        return None, None, None, *(next(found) if need else None for need in needed)
