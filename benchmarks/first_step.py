"""Where the time until the first compiled step goes: phases, and a profile of the main thread.

    python benchmarks/first_step.py gpt2

The stack of the main thread is sampled from another thread, so Python runs at its usual speed.
"""

import argparse
import collections
import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import training as bench

import tacit
from tacit.training import make
from tacit.training.gpu import compiled, graph_pair

PERIOD = 0.02  # seconds between two samples


def main() -> None:
    """Take the first steps of a workload, and print what took how long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--method", default="tacit-poisson-compiled")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lines", type=int, default=60)
    arguments = parser.parse_args()
    start = time.perf_counter()
    watch(make, "start", start)
    watch(graph_pair, "_trace", start)
    watch(graph_pair, "_compile", start)
    watch(compiled, "ReplayedStep", start)
    compiler: Any = graph_pair._compiler()
    watch(compiler, "joint_graph_passes", start)
    watch(compiler, "min_cut_rematerialization_partition", start)
    samples: collections.Counter[str] = collections.Counter()
    alone: collections.Counter[str] = collections.Counter()
    is_over = threading.Event()
    sampler = threading.Thread(target=sample, args=(samples, alone, is_over), daemon=True)
    sampler.start()
    runs: list[Any] = []
    make_private = tacit.make_private

    def made(*args: Any, **options: Any) -> Any:
        runs.append(make_private(*args, **options))
        print(f"{time.perf_counter() - start:7.2f} made", flush=True)
        return runs[-1]

    def take_steps(step: Callable[[], None], *_: Any) -> bench.Measured:
        for number in range(arguments.steps):
            before = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            took = time.perf_counter() - before
            if number == 0:
                is_over.set()
            if number < 3 or took > 0.2:
                print(
                    f"{time.perf_counter() - start:7.2f} step {number} took {took:.3f}", flush=True
                )
        return bench.Measured(0.0, 0.0)

    tacit.make_private = made
    bench.timed = take_steps
    bench.measure(arguments.workload, arguments.method)
    tell(runs[-1])
    for title, counted in (("inclusive", samples), ("innermost", alone)):
        print(f"-- {title}, samples of 20 ms until the first step ended")
        for place, count in counted.most_common(arguments.lines):
            print(f"{count:6d} {place}")


def watch(owner: Any, name: str, start: float) -> None:
    """Print how long each call of a function takes."""
    function: Callable[..., Any] = getattr(owner, name)

    def timed(*args: Any, **options: Any) -> Any:
        before = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            now = time.perf_counter()
            print(f"{now - start:7.2f} {name} took {now - before:.2f}", flush=True)

    setattr(owner, name, timed)


def sample(samples: Any, alone: Any, is_over: threading.Event) -> None:
    """Count the functions on the main thread's stack, every 20 ms."""
    main_thread = threading.main_thread().ident
    while not is_over.wait(PERIOD):
        frame = sys._current_frames().get(main_thread or 0)
        seen, depth = set[str](), itertools.count()
        while frame is not None:
            code = frame.f_code
            place = f"{'/'.join(Path(code.co_filename).parts[-3:])}:{code.co_name}"
            if next(depth) == 0:
                alone[place] += 1
            if place not in seen:
                seen.add(place)
                samples[place] += 1
            frame = frame.f_back


def tell(private: Any) -> None:
    """Print what was traced and recorded."""
    found = private._lot_sum._compiled
    print("padding", private._lots.padding, "fixed rows:", found and found.has_fixed_rows)
    for graphs in found._graphs.values() if found else ():
        print("sizes recorded:", sorted(graphs.of_rows))
        for traced in graphs.traces:
            guards = [str(guard.expr) for guard in traced.rows._shapes.guards][:12]
            print("trace: free", traced.rows.are_free(), "held", traced.held, guards)


if __name__ == "__main__":
    main()
