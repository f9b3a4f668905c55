"""A computation traced as a graph, cut where its backward begins, and both halves compiled.

The cut is made by the partitioner of ordinary compiled training, which recomputes cheap activations
instead of keeping them. The number of rows is a symbol where the program allows it; the compiler's
assumptions about it say which numbers a trace serves.
"""

import itertools
import operator
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx import traceback

from tacit.training.gpu.graph_replay import Step
from tacit.training.rules.ghost_norm import usual

Compiled = Callable[[list[Tensor]], Sequence[Tensor]]
"""A compiled graph. It is called with a list of tensors, which it empties."""


class Traced(NamedTuple):
    """The traced computation of a clipped sum, with facts that were read off its graphs."""

    run: Step
    held: int  # bytes that the forward keeps for the backward
    draws: bool  # whether it draws random numbers
    reports: bool = True  # whether it reports that a gradient was not finite, or masks the example
    is_compiled: bool = True
    names: tuple[str, ...] = ()  # of the parameters, in the order of the sums
    rows: "_Rows | None" = None  # the numbers of rows that it serves; None for all


def partition(joint: Callable[..., list[Tensor]], example: tuple[Tensor, ...]) -> Traced:
    """Trace `joint(seed, ...)`, cut the graph where `seed` is first used, and compile both parts.

    `joint` computes forward and backward, and `seed` is the factor on the losses' gradient.
    `example` holds arguments for tracing. The first result of `joint` belongs to the forward and is
    dropped. Each part is compiled on first use. Without torch's compiler the step calls `joint` as
    it is.
    """
    compiler = _compiler()
    if compiler is None:
        return Traced(lambda seed, others: joint(seed, *others)[1:], 0, True, is_compiled=False)
    graph, constants, mode = _trace(compiler, joint, example)
    seeded = torch.Tag.nondeterministic_seeded
    draws = any(seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes)
    with compiler.V.set_fake_mode(mode):
        graph = compiler.joint_graph_passes(graph)
    _keep_random_results(graph)
    forward, backward = _cut(compiler, graph)
    order = [int(node.name.removeprefix("primals_")) - 1 for node in _inputs(forward)]
    kept = [node.name for node in _results(forward)]
    wanted = [kept.index(node.name) for node in _inputs(backward)[:-1]]  # the last one is the seed
    first = int(_take_rows(backward, _inputs(graph)[len(constants) + 1].meta["val"].shape[0]))
    compiled: list[Compiled] = []
    strides: list[Any] = []

    @torch.no_grad()
    def step(seed: Tensor, others: list[Tensor]) -> list[Tensor]:
        inputs = [*constants, *others]
        inputs = [inputs[i] for i in order]
        if not compiled:
            like = [node.meta["val"] for node in _inputs(forward)]
            run, strides[:] = _compile(compiler, mode, forward, like, is_backward=False)
            compiled.append(run)
        found = compiled[0](inputs)
        saved: list[Any] = [others[1].shape[0]][:first]
        saved += [*(found[i] for i in wanted), seed]
        del found
        if len(compiled) == 1:
            own = _own(saved, [*constants, *others, seed])
            like = [node.meta["val"] for node in _inputs(backward)]
            pairs = zip(like[first:], wanted, strict=False)
            like[first:-1] = [_laid_out(v, strides[i], mode) for v, i in pairs]
            run, _ = _compile(compiler, mode, backward, like, is_backward=True, own=own)
            compiled.append(run)
        return list(compiled[1](saved))

    rows = _Rows(mode.shape_env, example[2].shape[0])
    return Traced(step, _bytes_held(forward), draws, rows=rows)


def _take_rows(backward: fx.GraphModule, rows: Any) -> bool:
    """Make the number of rows the first input of the backward if it is a symbol; return if it is.

    The backward may take multiples of it, such as the rows of all views. The compiler's cache
    compares those with the number of rows, and can do so only if that is an input too.
    """
    if not isinstance(rows, torch.SymInt):
        return False
    with backward.graph.inserting_before(next(iter(backward.graph.nodes))):
        backward.graph.placeholder("rows").meta["val"] = rows
    backward.recompile()
    return True


class _Rows:
    """For which numbers of rows a trace holds, from the facts that the compiler assumed."""

    def __init__(self, shapes: Any, traced: int) -> None:
        self._shapes = shapes
        self._traced = traced

    def are_free(self) -> bool:
        """Return whether the trace holds for other numbers of rows than that of the example."""
        return bool(self._symbols()) and not self._shapes.replacements

    def serve(self, rows: int) -> bool:
        """Return whether a batch of `rows` rows can be computed by this trace."""
        if rows == self._traced:
            return True
        if rows < 2 or not self.are_free():  # the compiler treats 0 and 1 apart
            return False
        values = dict.fromkeys(self._symbols(), rows)
        return all(guard.expr.subs(values) == True for guard in self._shapes.guards)  # noqa: E712  # sympy's True

    def _symbols(self) -> list[Any]:
        return list(self._shapes.var_to_range)


def _inputs(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _results(graph: fx.GraphModule) -> list[Any]:
    return list(next(node for node in graph.graph.nodes if node.op == "output").args[0])


def _laid_out(value: Any, strides: Any, mode: Any) -> Any:
    """Return the traced value with the strides that the compiled forward gives it."""
    if not isinstance(value, Tensor) or strides is None:
        return value
    with mode:
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def start_processes() -> None:
    """Start the processes in which torch's compiler makes kernels, if it has any."""
    if (compiler := _compiler()) is not None:
        compiler.AsyncCompile.use_process_pool()


@lru_cache(maxsize=1)
def _compiler() -> SimpleNamespace | None:
    """Return a namespace of the functions of torch's compiler that are used in this file.

    Warn and return None if this version of torch lacks one of them.
    """
    try:
        with warnings.catch_warnings():
            # torch 2.11 warns of its own use of `torch.jit.script_method` at this import.
            warnings.simplefilter("ignore", DeprecationWarning)
            import_module("torch._inductor.lowering")  # decompositions of pooling need it loaded
            found = {
                name: getattr(import_module(home), name)
                for home, names in _COMPILER.items()
                for name in names
            }
    except (ImportError, AttributeError):
        warnings.warn(
            f"compile=True has no effect with torch {torch.__version__}, whose compiler lacks a "
            "part that tacit uses. Steps run without compilation, with the same results.",
            stacklevel=2,
        )
        return None
    return SimpleNamespace(**found)


# Checked with torch 2.11 and 2.13.
_COMPILER = {
    "functorch.compile": ("min_cut_rematerialization_partition",),
    "torch._dispatch.python": ("enable_python_dispatcher",),
    "torch._guards": ("TracingContext", "tracing"),
    "torch._inductor.async_compile": ("AsyncCompile", "get_compile_threads"),
    "torch._inductor.compile_fx": ("compile_fx_inner",),
    "torch._inductor.decomposition": ("select_decomp_table",),
    "torch._inductor.fx_passes.joint_graph": ("joint_graph_passes",),
    "torch._inductor.virtualized": ("V",),
    "torch._subclasses": ("FakeTensorMode",),
    "torch.fx.experimental.proxy_tensor": ("make_fx",),
    "torch.fx.experimental.symbolic_shapes": (
        "DimDynamic",
        "ShapeEnv",
        "StatelessSymbolicContext",
    ),
    "torch.utils.checkpoint": ("_checkpoint_without_reentrant_generator",),
}


def _bytes_held(forward: fx.GraphModule) -> int:
    """Return the bytes of the tensors that the forward computes and keeps for the backward."""
    kept = [node.meta["val"] for node in _results(forward) if node.op != "placeholder"]
    return sum(usual(v.numel()) * v.itemsize for v in kept if isinstance(v, Tensor))


def _compile(
    compiler: SimpleNamespace,
    mode: Any,
    graph: fx.GraphModule,
    like: list[Any],
    *,
    is_backward: bool,
    own: Sequence[int] = (),
) -> tuple[Compiled, list[Any]]:
    """Compile `graph` for tensors with the layouts of `like`; also return its results' strides.

    The compiled graph may overwrite the inputs whose indices are in `own`. It takes a list of
    tensors and empties the list, so each activation is freed after its last use, as in an ordinary
    compiled backward. `torch.compile` would hold all of them until the end, and check its guards on
    every call.
    """
    if any(isinstance(t, Tensor) and t.is_cuda for t in like):
        _wait_for_processes(compiler)
    context = compiler.TracingContext(mode)
    # The compiler reads two of the fields that autograd's own compilation would set: which inputs
    # of the backward it may overwrite with results, and which ones never move.
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=list(own), static_input_indices=[])
    context.fakify_first_call = True  # strides are reported with the rows as a symbol
    context.output_strides = strides = []
    with compiler.tracing(context):
        return compiler.compile_fx_inner(graph, like, is_backward=is_backward), strides


def _wait_for_processes(compiler: SimpleNamespace, seconds: float = 30.0) -> None:
    """Wait until the compiler's processes are ready; before that it compiles one by one."""
    deadline = time.monotonic() + seconds
    if compiler.get_compile_threads() > 1:
        while not compiler.AsyncCompile.use_process_pool() and time.monotonic() < deadline:
            time.sleep(0.02)


def _own(saved: Sequence[Any], others: Sequence[Tensor]) -> list[int]:
    """Return indices of saved tensors that share memory with no other: these may be overwritten.

    The saved values may include numbers, such as the rows.
    """
    places = [t.untyped_storage().data_ptr() if isinstance(t, Tensor) else None for t in saved]
    count = Counter([*places, *(t.untyped_storage().data_ptr() for t in others)])
    return [i for i, place in enumerate(places) if place is not None and count[place] == 1]


def _trace(
    compiler: SimpleNamespace, joint: Callable[..., list[Tensor]], example: tuple[Tensor, ...]
) -> tuple[fx.GraphModule, list[Tensor], Any]:
    """Return the traced graph of `joint`, the constants that it reads, and the tracing mode.

    The graph's arguments are (constants, mask, tensors, seed). The constants are the model's
    parameters and buffers. The function is traced twice: as the engine runs it, then without
    operations in place and with the compiler's own decompositions, so that the partitioner can
    recompute pointwise work. Some
    operations let the number of rows become fixed on the way (`_Rows`).
    """
    mode = compiler.FakeTensorMode(shape_env=compiler.ShapeEnv(), allow_non_fake_inputs=True)
    seed, *rest = _with_free_rows(compiler, mode, example)
    dispatcher = compiler.enable_python_dispatcher  # some operations take symbols there only
    with _marked_checkpoints(), mode, dispatcher():
        raw = compiler.make_fx(joint, _allow_non_fake_inputs=True)(seed, *rest)
    constants = _lift(raw, mode)
    values = [node.meta["val"] for node in _inputs(raw)]
    # The interpreter passes the marks of checkpoints on.
    run = torch.func.functionalize(fx.Interpreter(raw).run)
    with traceback.preserve_node_meta(), mode, dispatcher(), torch.no_grad():
        table = compiler.select_decomp_table()
        graph = compiler.make_fx(run, decomposition_table=table)(*values)
    inputs = _inputs(graph)
    names = [*(f"primals_{index}" for index in range(1, len(inputs))), "tangents_1"]
    for node, name in zip(inputs, names, strict=True):
        node.target = name
        node._rename(name)  # as of torch 2.6 and later
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, constants, mode


def _with_free_rows(
    compiler: SimpleNamespace, mode: Any, example: tuple[Tensor, ...]
) -> Iterator[Tensor]:
    """Yield tensors without data like those of `example`, whose number of rows is a symbol.

    The third one is the mask, which has one row for each example. The others have no axes, or a
    multiple of its rows.
    """
    mask = example[2]
    rows = mask.shape[0]
    context = compiler.StatelessSymbolicContext(dynamic_sizes=[compiler.DimDynamic.DYNAMIC])
    free = mode.from_tensor(mask, symbolic_context=context)
    for tensor in example:
        if tensor is mask:
            yield free
        elif not tensor.dim() or tensor.shape[0] % rows:
            yield mode.from_tensor(tensor, static_shapes=True)
        else:
            shape = (tensor.shape[0] // rows * free.shape[0], *tensor.shape[1:])
            kind = {"dtype": tensor.dtype, "device": tensor.device}
            with mode:
                yield torch.empty_strided(shape, tensor.stride(), **kind)


@contextmanager
def _marked_checkpoints() -> Iterator[None]:
    """Return a context in which activation checkpoints mark their operations to be run again.

    Each block is traced once only: traced twice, it would draw two different dropout masks. The
    partitioner computes what is marked again, before the backward of the block.
    """
    from torch.utils import checkpoint

    numbers = itertools.count(1)

    def mark(*_: Any, **__: Any) -> Iterator[None]:  # Any: torch's own arguments
        marks, before = traceback.get_current_meta(), {}
        for name, value in (("recompute", policy), ("ac_graph_id", next(numbers))):
            before[name] = marks.get(name)
            marks[name] = value
        yield
        marks = traceback.get_current_meta()
        for name, value in before.items():
            marks[name] = value
            if value is None:
                del marks[name]

    policy = checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    name = "_checkpoint_without_reentrant_generator"
    kept = getattr(checkpoint, name)
    setattr(checkpoint, name, mark)
    try:
        with traceback.preserve_node_meta():
            yield
    finally:
        setattr(checkpoint, name, kept)


def _cut(compiler: SimpleNamespace, graph: fx.GraphModule) -> tuple[fx.GraphModule, ...]:
    """Cut the graph where its backward begins; without checkpoints if these cannot be kept."""
    cut = compiler.min_cut_rematerialization_partition
    try:
        return cut(graph, None, num_fwd_outputs=1)
    except RuntimeError:
        marked = [node for node in graph.graph.nodes if node.meta.pop("recompute", None)]
        if not marked:
            raise
    return cut(graph, None, num_fwd_outputs=1)


def _keep_random_results(graph: fx.GraphModule) -> None:
    """Let the forward keep what was drawn at random, which must not be drawn again.

    Attention is among these operations, since it can have dropout; its results are kept too.
    """
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            parts = (user for user in node.users if user.target is operator.getitem)
            for result in (node, *parts):
                result.meta.pop("recompute", None)


def _lift(module: fx.GraphModule, mode: Any) -> list[Tensor]:
    """Turn the graph's constants (parameters, buffers) into its first inputs, and return them.

    The first of the inputs that it had, the seed of the backward, becomes the last one.
    """
    graph = module.graph
    seed, second, *others = _inputs(module)
    [second, *others][-1].append(seed)
    constants: list[Tensor] = []
    for node in list(graph.nodes):
        if node.op != "get_attr" or not isinstance(getattr(module, node.target), Tensor):
            continue
        constants.append(getattr(module, node.target).detach())
        with graph.inserting_before(second):
            lifted = graph.placeholder(f"constant_{len(constants)}")
        lifted.meta["val"] = mode.from_tensor(constants[-1], static_shapes=True)
        node.replace_all_uses_with(lifted)
        graph.erase_node(node)
    module.recompile()
    return constants
