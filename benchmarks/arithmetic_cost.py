"""The cost of bounded arithmetic: a private step with it, beside the default.

    python benchmarks/arithmetic_cost.py [--workloads mlp cnn-256] [--compiled] [--steps 30]

On a GPU if there is one, else on one thread of the CPU. Two runs of the same workload, one of each
kind, take turns step by step in one process, so that both see the same state of the machine. The
ratio is the median over turns, and so are the milliseconds of each. A step is the whole step:
forward, clipping, noise, optimizer. The expected batch is 4,096 records unless --batch says
otherwise, so that the printed eta is that of such lots. A workload that fails is reported and does
not stop the others.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _models import WORKLOADS, Workload
from _results import table, write

import tacit
from tacit.sampling import FixedSize

PACKAGES = ("tacit", "torch", "numpy")
ON_CPU, ON_GPU = ("mlp", "cnn-256"), ("mlp", "cnn-2048", "lstm", "wrn-16-4", "gpt2")
BATCH = {"gpt2": 32, "gpt2-lora": 32, "wrn-16-4": 1_024, "lstm": 512}  # the others take 4,096


class Cost(NamedTuple):
    """Median milliseconds of a step, fast and bounded, their ratio, and eta."""

    fast: float
    bounded: float
    ratio: float
    eta: float


def main() -> None:
    """Time the workloads and write results/arithmetic-cost-<device>.md."""
    is_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="*", default=ON_GPU if is_gpu else ON_CPU)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--microbatch", type=int)
    arguments = parser.parse_args()
    if not is_gpu:
        torch.set_num_threads(1)
    device = torch.device("cuda" if is_gpu else "cpu")
    rows = []
    for name in arguments.workloads:
        batch = arguments.batch or BATCH.get(name, 4_096)
        try:
            cost = measure(
                WORKLOADS[name],
                device,
                batch=batch,
                steps=arguments.steps,
                compiled=arguments.compiled,
                microbatch=arguments.microbatch,
            )
            numbers = [f"{cost.fast:.3g}", f"{cost.bounded:.3g}", f"{cost.ratio:.2f}"]
            rows.append([name, batch, *numbers, f"{cost.eta:.1e}"])
        except Exception as error:  # one workload must not stop the others
            rows.append([name, batch, "–", "–", f"{type(error).__name__}: {error}"[:200], "–"])
        print(*rows[-1], flush=True)
        if is_gpu:
            torch.cuda.empty_cache()
    kind = torch.cuda.get_device_name() if is_gpu else "CPU, one thread"
    suffix = "-compiled" if arguments.compiled else ""
    write(
        f"arithmetic-cost-{'gpu' if is_gpu else 'cpu'}{suffix}",
        f"The cost of bounded arithmetic, on {kind}",
        PACKAGES,
        f"Median of {arguments.steps} steps of each kind, in turns.",
        table(["workload", "batch", "fast, ms", "bounded, ms", "ratio", "eta, bounded"], rows),
    )


def measure(
    workload: Workload,
    device: torch.device,
    *,
    batch: int,
    steps: int,
    compiled: bool,
    microbatch: int | None,
) -> Cost:
    """Take steps of both kinds in turns and return their medians."""
    kinds = ("fast", "bounded")
    limit = microbatch or min(batch, workload.microbatch or batch)
    made = {
        kind: make_step(workload, device, kind, batch=batch, limit=limit, compiled=compiled)
        for kind in kinds
    }
    for step, _ in made.values():
        for _ in range(3):  # compile, and fill caches
            step()
    turns = []
    for number in range(steps):
        order = kinds if number % 2 else kinds[::-1]  # neither kind is always the first
        turns.append({kind: timed(made[kind][0], device) for kind in order})
    fast, bounded = ([turn[kind] for turn in turns] for kind in kinds)
    ratio = statistics.median(b / f for f, b in zip(fast, bounded, strict=True))
    return Cost(
        1e3 * statistics.median(fast), 1e3 * statistics.median(bounded), ratio, made["bounded"][1]
    )


def make_step(
    workload: Workload, device: torch.device, kind: Any, *, batch: int, limit: int, compiled: bool
) -> tuple[Callable[[], None], float]:
    """Return a function that takes one private step, and the run's eta."""
    torch.manual_seed(0)
    model = workload.build().to(device)
    x, y = workload.batch(2 * batch, device)
    if workload.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.contiguous(memory_format=torch.channels_last)
    trained = [p for p in model.parameters() if p.requires_grad]

    def losses(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=workload.autocast):
            return workload.losses(model, batch)

    private = tacit.make_private(
        model,
        torch.optim.SGD(trained, lr=0.1),
        (x, y),
        losses,
        batch_size=FixedSize(batch, 2 * batch),
        steps=100_000,
        clip_norm=1.0,
        noise_multiplier=1.0,
        ledger=tacit.Ledger(relation=tacit.Relation.REPLACE_ONE),
        noise=tacit.training.Noise(arithmetic=kind),
        speed=tacit.training.Speed(max_microbatch=limit, compile=compiled, check=False),
    )
    lots = iter(private)
    eta = private.arithmetic.eta
    return lambda: private.step(next(lots)), float("nan") if eta is None else eta


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of one step: of the GPU with its waits, or of the one CPU thread."""
    if device.type == "cpu":
        start = time.process_time()
        step()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
