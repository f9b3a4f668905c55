"""Where a step's time goes: its kernels, and the host's functions.

    python benchmarks/step_profile.py mlp:tacit-poisson-compiled cnn:plain-graph

Workloads and methods are those of `training.py`. All processes prepare at the same time and are
profiled one after another. For each pair a file is written to `--folder`: milliseconds of a step,
milliseconds until the host has issued it, microseconds of each kernel, and a profile of Python.
"""

import argparse
import collections
import cProfile
import io
import json
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import training as bench

timed = bench.timed
SECONDS, STEPS = 0.2, 200  # of steps in a row: this long, and at most so many


def main() -> None:
    """Profile the pairs in processes of their own, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*", metavar="WORKLOAD:METHOD")
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "METHOD"))
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--limit", type=float, default=120, help="seconds until all are prepared")
    arguments = parser.parse_args()
    if arguments.one:
        lines: list[str] = []
        bench.timed = lambda *given: profiled(*given, lines)
        found = bench.measure(*arguments.one)
        name = "-".join(arguments.one)
        (arguments.folder / f"profile-{name}.txt").write_text("\n".join(lines) + "\n")
        print("MEASURED", json.dumps(found._asdict()))
        return
    pairs = [(w, m) for w, _, m in (pair.partition(":") for pair in arguments.pairs)]
    options = ["--folder", str(arguments.folder)]
    for pair, result in bench.in_turn(pairs, arguments.limit, __file__, options):
        print(*pair, result, flush=True)


def profiled(
    step: Callable[[], None], device: Any, rest: float, begin: float, lines: list[str]
) -> bench.Measured:
    """Time steps as the benchmark does, then add what they spend their time on to `lines`."""
    is_gpu = device.type == "cuda"

    def synchronize() -> None:
        if is_gpu:
            torch.cuda.synchronize()

    found = timed(step, device, rest, begin)
    steps = max(5, min(STEPS, round(SECONDS / found.seconds)))
    lines.append(str(found))
    lines.append(f"of {steps} steps in a row: ms a step, ms until the host has issued them")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        issued = time.perf_counter() - begin
        synchronize()
        took = time.perf_counter() - begin
        lines.append(f"{1e3 * took / steps:.4f} {1e3 * issued / steps:.4f}")
    if is_gpu:
        lines += kernels(step, 20)
    lines += host(step, steps, synchronize)
    return found


def kernels(step: Callable[[], None], steps: int) -> list[str]:
    """Return microseconds and launches of each kernel, a step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    spent: collections.Counter[str] = collections.Counter()
    counted: collections.Counter[str] = collections.Counter()
    for event in found.events() or ():
        if "cuda" in str(event.device_type).lower():
            spent[event.name] += event.device_time
            counted[event.name] += 1
    lines = [f"-- kernels: {sum(spent.values()) / steps:.1f} us a step, {len(spent)} kinds"]
    for name, total in spent.most_common(60):
        lines.append(f"{total / steps:10.2f} us {counted[name] / steps:7.2f} x {name[:150]}")
    return lines


def host(step: Callable[[], None], steps: int, synchronize: Callable[[], None]) -> list[str]:
    """Return Python's profile of the steps, which the profile itself makes slower."""
    synchronize()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    lines = [f"-- host, {steps} steps"]
    for order in ("tottime", "cumulative"):
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats(order).print_stats(70)
        kept = text.getvalue().splitlines()
        lines += [line.replace(str(Path.cwd()), ".") for line in kept if line.strip()]
    return lines


if __name__ == "__main__":
    main()
