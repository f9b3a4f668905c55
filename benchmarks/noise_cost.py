"""The cost of noise on a grid: releases on a CPU, noise and update on a GPU, beside the old ones.

    python benchmarks/noise_cost.py [--parts cpu kernel step]

`cpu` times one release of a million weights on one thread, by the compiled loop and by numpy alone,
each in a process of its own. `kernel` times the GPU kernels that add
noise, and that add noise and take AdamW's step, for the 163 million parameters of the GPT-2-like
model. `step` times that model's whole compiled step. The old samplers, in the state before the
grid, are kept here: torch's float32 normals on a CPU, Philox4x32 and a float32 Box-Muller transform
on a GPU. Every GPU variant has a process of its own.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

SIZES = [(50257, 768), (1024, 768), *[(768, 2304), (768, 768), (768, 3072), (3072, 768)] * 12]
SIZES += [(2304,), (768,), (3072,), (768,)] * 12 + [(768, 50257)]
VARIANTS = {"old": 0, "ChaCha8": 8, "ChaCha12 (default)": 12, "ChaCha20 (secure)": 20}
SHAPES = [(256, 4), (512, 4), (512, 8), (128, 4), (256, 8)]  # lanes and warps


def main() -> None:
    """Run the parts, each GPU variant in a process of its own, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", default=["cpu", "kernel", "step"])
    parser.add_argument("--one", nargs=4, metavar=("PART", "VARIANT", "LANES", "WARPS"))
    arguments = parser.parse_args()
    if arguments.one:
        part, variant, lanes, warps = arguments.one
        act = {"kernel": kernels, "step": whole_step, "cpu": on_cpu}[part]
        found = act(variant, int(lanes), int(warps))
        print("MEASURED", json.dumps(found))
        return
    if "cpu" in arguments.parts:
        for way in ("compiled", "numpy"):
            print(
                "CPU, one thread, 1,000,000 weights, ms:", way, in_process("cpu", way), flush=True
            )
    if not torch.cuda.is_available():
        return
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if "kernel" in arguments.parts:
        for variant in VARIANTS:
            print("kernels, ms:", variant, in_process("kernel", variant), flush=True)
        for lanes, warps in SHAPES[1:]:
            found = in_process("kernel", "ChaCha12 (default)", lanes, warps)
            print(f"kernels, ms: ChaCha12, {lanes} lanes, {warps} warps", found, flush=True)
    if "step" in arguments.parts:
        for variant in ("old", "ChaCha12 (default)", "old", "ChaCha12 (default)"):
            print("whole GPT-2 step, ms:", variant, in_process("step", variant), flush=True)


def in_process(part: str, variant: str, lanes: int = 256, warps: int = 4) -> object:
    command = [sys.executable, __file__, "--one", part, variant, str(lanes), str(warps)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    except subprocess.TimeoutExpired:
        return "no result within 150 s"
    for line in done.stdout.splitlines():
        if line.startswith("MEASURED"):
            return json.loads(line.removeprefix("MEASURED"))
    return "failed: " + " | ".join(done.stderr.strip().splitlines()[-4:])[-600:]


def timed(act: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    act()
    found = []
    for _ in range(repeats):
        start = clock()
        act()
        found.append(clock() - start)
    return statistics.median(found)


def on_cpu(way: str, _lanes: int, _warps: int) -> dict[str, float]:
    """Return the medians of interleaved releases, in CPU time: other processes do not count.

    By the way "numpy", the package of the compiled loop counts as not installed.
    """
    if way == "numpy":
        sys.modules["llvmlite"] = None  # type: ignore[assignment]  # so says Python's manual
    from tacit.training.key import Key
    from tacit.training.noise import NoisyMean

    torch.set_num_threads(1)
    count, rounds = 10**6, 25
    sums, key = [torch.randn(count)], Key.from_seed(1)
    default = NoisyMean(key, expected_batch=10.0)
    secure = NoisyMean(key, expected_batch=10.0, secure=True)
    buffer, state = torch.empty(count), torch.Generator().get_state()

    def old() -> None:
        for part in buffer.split(1 << 18):
            part.normal_(std=0.1, generator=torch.Generator().set_state(state))
        buffer.add_(sums[0], alpha=0.1)

    ways = {
        "old": old,
        "default": lambda: default.release(sums, [1.0], step=0, noise_multiplier=1.0),
        "secure": lambda: secure.release(sums, [1.0], step=0, noise_multiplier=1.0),
    }
    for _ in range(40):  # after so many numbers the loop is compiled
        default.release(sums, [1.0], step=0, noise_multiplier=1.0)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(timed(way, 1, time.thread_time))
    medians = {name: round(1e3 * statistics.median(times), 2) for name, times in found.items()}
    ratios = [new / old for new, old in zip(found["default"], found["old"], strict=True)]
    return medians | {"default / old": round(statistics.median(ratios), 2)}


def kernels(variant: str, lanes: int, warps: int) -> dict[str, float]:
    """Return milliseconds of the noise kernel, and of noise with AdamW's step, on a GPU."""
    from tacit.training.gpu import noise, update
    from tacit.training.grid_noise import make_grids

    prepare(variant, lanes, warps)
    parameters = [torch.nn.Parameter(torch.randn(size, device="cuda") * 0.02) for size in SIZES]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True, capturable=True)
    optimizer.step()
    sums = [torch.zeros_like(p) for p in parameters]
    grids = make_grids(1.0, [1.0] * len(sums), sum(p.numel() for p in parameters))
    blocks = noise.Blocks(sums, grids, 1 / 32, VARIANTS[variant] or 12)
    blocks.set_nonce(bytes(range(32)), 1)
    fused = update.Update(blocks, parameters, optimizer)
    fused.set_rates()
    return {
        "million parameters": round(sum(p.numel() for p in parameters) / 1e6, 1),
        "noise": on_gpu(blocks.launch),
        "noise and AdamW": on_gpu(lambda: fused.launch(blocks)),
    }


def on_gpu(act: Callable[[], object], repeats: int = 30) -> float:
    for _ in range(5):
        act()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        act()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return round(statistics.median(times), 3)


def whole_step(variant: str, lanes: int, warps: int) -> dict[str, float]:
    """Return milliseconds of a whole step of the GPT-2-like model, compiled, batch 32 x 512."""
    import training

    prepare(variant, lanes, warps)
    return {"step": round(1e3 * training.measure("gpt2", "tacit-compiled").seconds, 2)}


def prepare(variant: str, lanes: int, warps: int) -> None:
    """Set the kernels' shape and rounds; for "old", put the sampler before the grid in place."""
    from tacit.training.gpu import available, noise, update

    for module in (noise, update):
        vars(module).update(LANES=lanes, WARPS=warps)
    if variant != "old":
        available.chacha_rounds = lambda *, is_full: VARIANTS[variant]
        return
    import _old_noise

    for module in (noise, update):
        vars(module).update(normals=_old_noise.normals, released=_old_noise.released)


if __name__ == "__main__":
    main()
