"""A function of tensors as two compiled graphs, cut where its backward begins.

The cut is made by the partitioner that ordinary compiled training uses, which recomputes cheap
activations instead of keeping them. What the function reads besides its arguments, parameters and
buffers, is read where it lies at each call.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses import FakeTensorMode

from tacit.errors import IncompatibleModel
from tacit.training.gpu.graph_replay import Step

Compiled = Callable[[list[Tensor]], Sequence[Tensor]]
"""A compiled graph, called as autograd calls its own: with a list, which it empties."""


class Traced(NamedTuple):
    """A step, and what its graphs told."""

    run: Step
    held: int  # bytes that the forward keeps for the backward
    draws: bool  # random numbers
    tells: bool = True  # whether all gradients were finite, which it masks otherwise
    names: tuple[str, ...] = ()  # of the parameters, in the order of the sums


def two_graphs(joint: Callable[..., list[Tensor]], example: tuple[Tensor, ...]) -> Traced:
    """`joint(seed, ...)` traced, cut where `seed` enters, and compiled when first called.

    Its first result belongs to the forward and is dropped.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    graph, constants, mode = _traced(joint, example)
    draws = any(map(_is_random, graph.graph.nodes))
    with V.set_fake_mode(mode):
        graph = joint_graph_passes(graph)
    forward, backward = min_cut_rematerialization_partition(graph, None, num_fwd_outputs=1)
    names = [node.name for node in forward.graph.nodes if node.op == "placeholder"]
    order = [int(name.removeprefix("primals_")) - 1 for name in names]
    compiled: list[Compiled] = []

    @torch.no_grad()
    def step(seed: Tensor, others: list[Tensor]) -> list[Tensor]:
        inputs = [*constants, *others]
        inputs = [inputs[i] for i in order]
        if not compiled:
            compiled.append(_compiled(forward, inputs, is_backward=False))
        saved = list(compiled[0](inputs))[1:]
        saved.append(seed)
        if len(compiled) == 1:
            own = _own(saved, [*constants, *others, seed])
            compiled.append(_compiled(backward, saved, is_backward=True, own=own))
        return list(compiled[1](saved))

    return Traced(step, _bytes_held(forward), draws)


def _bytes_held(forward: fx.GraphModule) -> int:
    """Size of what the forward computes for the backward."""
    results = next(node for node in forward.graph.nodes if node.op == "output").args[0]
    kept = [node.meta["val"] for node in results if node.op != "placeholder"]
    return sum(value.numel() * value.itemsize for value in kept if isinstance(value, Tensor))


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _compiled(
    graph: fx.GraphModule, inputs: list[Tensor], *, is_backward: bool, own: Sequence[int] = ()
) -> Compiled:
    """`graph` compiled for tensors laid out like these; it takes a list, which it empties.

    So each activation is freed after its last use, as in an ordinary compiled backward.
    `torch.compile` would hold all of them until the end, and check its guards on every call. Inputs
    numbered in `own` may be overwritten.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    like = [mode.from_tensor(t) for t in inputs]
    context = TracingContext(mode)
    # As autograd's own compiler tells which activations a backward may put its results into.
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=list(own), static_input_indices=[])  # type: ignore[assignment]  # of its many fields, what is read
    with tracing(context):
        return compile_fx_inner(graph, like, is_backward=is_backward)


def _own(saved: Sequence[Tensor], others: Sequence[Tensor]) -> list[int]:
    """Numbers of the saved tensors whose memory no other one shares."""
    places = Counter(t.untyped_storage().data_ptr() for t in (*saved, *others))
    return [i for i, t in enumerate(saved) if places[t.untyped_storage().data_ptr()] == 1]


def _traced(
    joint: Callable[..., list[Tensor]], example: tuple[Tensor, ...]
) -> tuple[fx.GraphModule, list[Tensor], FakeTensorMode | None]:
    """The graph of (constants, mask, tensors, seed); the constants, which are the model's tensors.

    And the mode under which its shapes were found.

    Traced twice: as the engine runs it, then without operations in place and with the compiler's
    own decompositions, so that the partitioner can recompute pointwise work.
    """
    import torch._inductor.lowering  # the decompositions of pooling need it loaded
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    seed, *rest = example
    with _without_checkpoints():
        raw = make_fx(joint, tracing_mode="fake", _allow_non_fake_inputs=True)(*example)
    constants = _lift(raw)

    def functional(*inputs: Tensor) -> list[Tensor]:
        *primals, tangent = inputs
        with torch.no_grad():
            return raw(*primals[: len(constants)], tangent, *primals[len(constants) :])

    graph = make_fx(
        torch.func.functionalize(functional),
        decomposition_table=select_decomp_table(),
        tracing_mode="fake",
    )(*constants, *rest, seed)
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(inputs[:-1], 1):
        _rename(node, f"primals_{index}")
    _rename(inputs[-1], "tangents_1")
    _refuse_writes(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, constants, detect_fake_mode([node.meta["val"] for node in inputs])


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Checkpointed blocks run once: traced twice, the second would draw other dropout masks.

    The partitioner decides what is computed again, and never draws again.
    """
    from torch.utils import checkpoint

    def keep(*_: Any, **__: Any) -> Iterator[None]:  # Any: torch's own arguments
        yield

    name = "_checkpoint_without_reentrant_generator"
    kept = getattr(checkpoint, name)
    setattr(checkpoint, name, keep)
    try:
        yield
    finally:
        setattr(checkpoint, name, kept)


def _refuse_writes(graph: fx.GraphModule) -> None:
    """Raise if the model writes into its buffers: the backward would read what came after."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            raise IncompatibleModel(
                "the model writes into a buffer while it runs, as spectral_norm and counters do in "
                "train mode, which cannot be compiled. Use compile=False."
            )


def _lift(module: fx.GraphModule) -> list[Tensor]:
    """Turns the graph's constants (parameters, buffers) into its first inputs."""
    graph = module.graph
    first = next(iter(graph.nodes))
    constants: list[Tensor] = []
    for node in list(graph.nodes):
        if node.op != "get_attr" or not isinstance(getattr(module, node.target), Tensor):
            continue
        with graph.inserting_before(first):
            lifted = graph.placeholder(f"constant_{len(constants)}")
        constants.append(getattr(module, node.target).detach())
        node.replace_all_uses_with(lifted)
        graph.erase_node(node)
    module.recompile()
    return constants


def _rename(node: fx.Node, name: str) -> None:
    node.target = name
    node._rename(name)
