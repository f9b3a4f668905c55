"""The host's work before the first compiled step on a GPU, done for an H200 on a machine without.

    python benchmarks/compile_without_gpu.py gpt2

It needs a torch that was built for CUDA, and Triton. The model is followed, cut and
compiled as for an H200, and kernels are assembled; none is started, and no CUDA graph is recorded.
Seconds are of processor time, of this process and of those that compile kernels.
"""

import argparse
import importlib
import os
import resource
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from _models import WORKLOADS

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    total_memory=150_000_000_000, shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448, L2_cache_size=60_000_000, gcnArchName="",
)  # fmt: skip


PRETENDED: dict[str, Callable[..., Any]] = {}  # functions of torch.cuda


def main() -> None:
    """Compile a workload's clipped sum and print the processor time of each phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--rows", type=int, help="of the batch that is followed")
    parser.add_argument("--profile", action="store_true", help="of Python, which makes it slower")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # fresh caches
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # others would look for a driver
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = folder
        pretend()
        compile_sum(arguments.workload, arguments.rows, profiled=arguments.profile)


def pretend() -> None:
    """Let torch and Triton take this machine for one with an H200, whose kernels never start."""
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from tacit.training.rules import ghost_norm

    class Driver:
        @staticmethod
        def get_current_target() -> Any:
            return GPUTarget("cuda", 90, 32)

        @staticmethod
        def get_current_device() -> int:
            return 0

        @staticmethod
        def get_current_stream(device: int) -> int:
            return 0

    PRETENDED.update(
        {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_properties": lambda *_: H200,
            "get_device_capability": lambda *_: (9, 0),
            "get_device_name": lambda *_: H200.name,
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda *_: None,
            "_exchange_device": lambda *_: 0,
            "_maybe_exchange_device": lambda *_: 0,
            "set_device": lambda *_: None,
            "synchronize": lambda *_: None,
            "is_bf16_supported": lambda *_, **__: True,
        }
    )
    driver.set_active(Driver())
    nothing = lambda *_, **__: None  # noqa: E731  # two names for it
    triton_helpers.set_driver_to_gpu = nothing
    CachingAutotuner._make_launchers = CachingAutotuner._dynamic_scale_rblock = nothing
    fake_tensor.init_gpu_context = nothing
    # Autograd needs a driver for tensors of a GPU. So the program is traced on tensors of the CPU,
    # with its choices for a GPU, and the graphs are moved before they are compiled.
    FakeTensor.is_cuda = property(lambda _: True)  # type: ignore[assignment]
    ghost_norm.RATES["cpu"] = ghost_norm.RATES["cuda"]


def pretend_available() -> None:
    """Let torch find the GPU, from the moment when graphs are compiled."""
    interface = importlib.import_module("torch._dynamo.device_interface").CudaInterface
    for name, value in PRETENDED.items():
        setattr(torch.cuda, name, value)
        if hasattr(interface, name):
            setattr(interface, name, staticmethod(value))
    for value in vars(importlib.import_module("torch.utils._triton")).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def move(graph: torch.fx.GraphModule) -> None:
    """Let the tensors of a graph be on the GPU."""
    device = torch.device("cuda", 0)
    for node in graph.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, tuple | list) else [values]:
            if isinstance(value, torch.Tensor):
                value.fake_device = device  # type: ignore[attr-defined]  # a FakeTensor
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    graph.recompile()


def compile_sum(name: str, rows: int | None, *, profiled: bool) -> None:
    """Follow and compile the clipped sum of a workload."""
    from tacit.training import Flat
    from tacit.training.gpu import compiled, graph_pair, graph_replay
    from tacit.training.program.programs import Programs

    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model = workload.build()
    batch = workload.batch(rows or workload.microbatch or workload.batch_size, torch.device("cpu"))

    def losses(model: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=workload.autocast):
            return workload.losses(model, batch)

    clock = Clock()
    compiler: Any = graph_pair._compiler()
    clock.watch(Programs, "prepare", "trace of one example")
    clock.watch(graph_pair, "_trace", "trace and decompositions")
    clock.watch(compiler, "joint_graph_passes", "passes over the joint graph")
    clock.watch(graph_pair, "_cut", "cut")
    clock.watch(graph_pair, "_compile", "compile forward, backward")
    heuristics = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    clock.add_up(heuristics.CachingAutotuner, "precompile", "kernels")
    lowering = importlib.import_module("torch._inductor.graph").GraphLowering
    clock.add_up(lowering, "run", "lowering")
    clock.add_up(
        importlib.import_module("torch._inductor.scheduler").Scheduler, "__init__", "scheduling"
    )
    clock.add_up(lowering, "codegen", "scheduling and code")
    clock.add_up(
        importlib.import_module("torch._inductor.compile_fx"),
        "_recursive_post_grad_passes",
        "later passes",
    )
    programs = Programs(model, losses)
    programs.prepare(batch)
    summed = compiled.CompiledSum(model, losses, Flat(1.0), programs)
    summed._flag = graph_replay.FiniteFlag(torch.device("cpu"))
    mask = torch.ones(len(batch[0]), dtype=torch.bool)
    graph_pair.start_processes()
    profile = __import__("cProfile").Profile() if profiled else None
    if profile:
        profile.enable()
    start = used()
    graphs: list[Any] = []
    cut = graph_pair._cut

    def keep(*args: Any) -> Any:
        graphs.extend(cut(*args))
        return tuple(graphs)

    graph_pair._cut = keep
    lift = graph_pair._trace
    modes: list[Any] = []

    def keep_mode(*args: Any, **options: Any) -> Any:
        found = lift(*args, **options)
        modes[:] = [found[2]]
        return found

    graph_pair._trace = keep_mode
    summed._traced(batch, mask, list(batch))
    pretend_available()
    for graph, is_backward in zip(graphs, (False, True), strict=True):
        move(graph)
        like = [node.meta["val"] for node in graph_pair._inputs(graph)]
        graph_pair._compile(compiler, modes[0], graph, like, is_backward=is_backward)
    print(f"all: {used() - start:.1f} s; {[len(g.graph.nodes) for g in graphs]} operations")
    for title, took in clock.sums.items():
        print(f"  {title}: {len(took)} times, {sum(took):.1f} s, longest {max(took):.1f}")
    if profile:
        profile.disable()
        __import__("pstats").Stats(profile).sort_stats("cumulative").print_stats(70)


def used() -> float:
    """Return the processor time of this process and of its ended children."""
    own, ended = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


class Clock:
    """Prints the time of each call of the functions that it watches, or of all calls together."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add_up(self, owner: Any, name: str, title: str) -> None:
        function = getattr(owner, name)
        took = self.sums.setdefault(title, [])

        def timed(*args: Any, **options: Any) -> Any:
            before = used()
            try:
                return function(*args, **options)
            finally:
                took.append(used() - before)

        setattr(owner, name, timed)

    def watch(self, owner: Any, name: str, title: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            before, began = used(), time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                took = time.perf_counter() - began
                print(f"{title}: {used() - before:.1f} s of {took:.1f}", flush=True)

        setattr(owner, name, timed)


if __name__ == "__main__":
    main()
