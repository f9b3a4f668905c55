"""The largest physical batch before memory runs out, private beside ordinary, on a GPU.

    python benchmarks/physical_batch.py [--workloads gpt2 wrn-16-4] [--compiled]

Each pair of workload and method has a process of its own that may use a fixed part of the device's
memory. The largest batch whose step fits (forward, backward, optimizer) is found by bisection, to
within two percent. Both sides run eagerly, or both run compiled as CUDA graphs. Both use torch's
expandable segments: otherwise the result depends on gaps between blocks, which differ by chance.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from typing import Any

from _results import table, write

LIMITS = {"mlp": 1, "cnn-2048": 2, "lstm": 2, "wrn-16-4": 8, "gpt2": 24, "gpt2-lora": 24}  # GiB
_ROWS_OF_A_CPU = 3  # as if memory ended there: a CPU only tests this script
METHODS = {False: ("plain", "tacit"), True: ("plain-graph", "tacit-compiled")}


def main() -> None:
    """Bisect in processes and write results/physical-batch.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="*", default=list(LIMITS))
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "METHOD"))
    parser.add_argument("--between", nargs=2, type=int, default=(1, 0), help="known to fit, or not")
    arguments = parser.parse_args()
    if arguments.one:
        print("LARGEST", json.dumps(largest(*arguments.one, *arguments.between)))
        return
    rows = []
    for workload in arguments.workloads:
        plain, tacit = (in_process(workload, m) for m in METHODS[arguments.compiled])
        rows.append([workload, LIMITS[workload], plain, tacit, f"{tacit / plain:.2f}"])
        print(*rows[-1], flush=True)
        report(rows, arguments.compiled, is_final=len(rows) == len(arguments.workloads))


def report(rows: list[list[Any]], is_compiled: bool, *, is_final: bool) -> None:
    """Write what is known so far."""
    write(
        "physical-batch-compiled" if is_compiled else "physical-batch",
        "The largest physical batch before memory runs out",
        ("tacit", "torch"),
        table(["workload", "GiB allowed", "plain", "tacit", "ratio"], rows),
        is_final=is_final,
    )


def in_process(workload: str, method: str) -> int:
    command = [sys.executable, __file__, "--one", workload, method]
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | allocator
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("LARGEST "))
    return int(json.loads(line.removeprefix("LARGEST ")))


def largest(workload: str, method: str, low: int = 1, high: int = 0) -> int:
    """Return the rows of the largest batch that fits: at least `low`, and below `high` if given."""
    import torch
    from _models import WORKLOADS

    work, device = WORKLOADS[workload], device_here()
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(LIMITS[workload] * 2**30 / total)
    model = work.build().to(device)
    if work.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    while not high:
        does_fit = fits(work, model, optimizer, method, 2 * low)
        low, high = (2 * low, 0) if does_fit else (low, 2 * low)
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        if fits(work, model, optimizer, method, middle):
            low = middle
        else:
            high = middle
    return low


def device_here() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fits(work: Any, model: Any, optimizer: Any, method: str, rows: int) -> bool:
    import torch

    is_gpu = torch.cuda.is_available()
    if not is_gpu and rows > _ROWS_OF_A_CPU:
        return False
    try:
        one_step(work, model, optimizer, method, rows)
        if is_gpu:
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return False
    finally:
        torch._dynamo.reset()
        gc.collect()
        optimizer.zero_grad()
        torch.cuda.empty_cache()
    return True


def one_step(work: Any, model: Any, optimizer: Any, method: str, rows: int) -> None:
    import torch
    from training import plain_graph

    from tacit.training import Flat, clipped_sum
    from tacit.training.gpu.compiled import CompiledSum
    from tacit.training.program.programs import Programs

    device = device_here()

    def losses(model: Any, batch: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=work.autocast):
            return work.losses(model, batch)

    batch = work.batch(rows, device)
    if work.channels_last:
        batch = (batch[0].to(memory_format=torch.channels_last), batch[1])
    if method == "plain-graph":
        loss = torch.compile(lambda x, y: losses(model, (x, y)).sum(), dynamic=False)
        if device.type == "cuda":
            plain_graph(optimizer, loss, *batch, rows, rows)
            return
        loss(*batch).backward()
    elif method == "plain":
        losses(model, batch).sum().backward()
    else:
        if method == "tacit":
            total = clipped_sum(model, losses, batch, Flat(1.0))
        else:
            mask = torch.ones(rows, dtype=torch.bool, device=device)
            programs = Programs(model, losses)
            programs.prepare(batch)
            total = CompiledSum(model, losses, Flat(1.0), programs)(batch, mask, reuse=True)
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.grad = total.sums[name]
    optimizer.step()


if __name__ == "__main__":
    main()
