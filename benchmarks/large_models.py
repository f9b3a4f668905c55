"""Fine-tuning a model of the shape of Llama 3.2 1B with activation checkpoints, on a GPU.

    python benchmarks/large_models.py [--folder FOLDER] [full:plain-compiled full:tacit ...]

8 sequences of 1,024 tokens a step, bf16 autocast, AdamW; every block is checkpointed (without
reentry). "lora" trains adapters of rank 16 on all linear layers of a frozen bfloat16 model. "gpt2"
is the workload of training.py, 32 x 512 tokens, without checkpoints, with the default sampler. Each
pair has a process of its own. They compile at the same time, and are timed one after the other when
all are ready, or when `--wait` seconds have passed. Peak memory: of the steps, and of everything
since the model was built, with make_private's comparison. Results are printed as they come and
written to FOLDER/large-models.jsonl.
"""

import argparse
import fcntl
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAIRS = ("full:plain-compiled", "full:tacit-compiled", "lora:plain-compiled", "lora:tacit-compiled")


def main() -> None:
    """Start one process for each pair, and wait for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*", default=list(PAIRS))
    parser.add_argument("--folder", type=Path, default=Path("large-models"))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="widths that a CPU can do")
    parser.add_argument("--wait", type=float, default=150, help="seconds for compilation")
    parser.add_argument("--one", action="store_true")
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.pairs[0], arguments)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for flag in arguments.folder.glob("ready-*"):
        flag.unlink()
    (arguments.folder / "processes").write_text(str(len(arguments.pairs)))
    options = [
        f"--{name}={getattr(arguments, name)}" for name in ("folder", "rows", "depth", "wait")
    ]
    options += ["--tiny"] if arguments.tiny else []
    children = [
        subprocess.Popen([sys.executable, __file__, pair, "--one", *options])
        for pair in arguments.pairs
    ]
    for child in children:
        child.wait()


def measure(pair: str, arguments: Any) -> None:
    """Time one pair in this process and write a line of results."""
    import torch

    begin = time.perf_counter()
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if is_gpu else "cpu")
    kind, _, method = pair.partition(":")
    torch.manual_seed(0)
    step, limit = build(kind, method, arguments, device)

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        if is_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    run(1)
    first = time.perf_counter() - begin
    run(100 if kind == "gpt2" and is_gpu else 4)  # lots of nearly every size are recorded
    before = torch.cuda.max_memory_allocated() if is_gpu else 0
    wait_for_others(pair, arguments, begin)
    with (arguments.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = [run(5 if kind == "gpt2" else 2) for _ in range(8 if is_gpu else 1)]
    peak = torch.cuda.max_memory_allocated() if is_gpu else 0
    found = {
        "pair": pair,
        "rows": arguments.rows,
        "ms": round(1e3 * statistics.median(times), 1),
        "GiB of steps": round(peak / 2**30, 2),
        "GiB in all": round(max(before, peak) / 2**30, 2),
        "microbatch": limit(),
        "first step, s": round(first, 1),
    }
    print(json.dumps(found), flush=True)
    with (arguments.folder / "large-models.jsonl").open("a") as results:
        results.write(json.dumps(found) + "\n")


def wait_for_others(pair: str, arguments: Any, begin: float) -> None:
    """Wait until every process is ready to be timed, or the time for it is over."""
    (arguments.folder / f"ready-{pair.replace(':', '-')}").touch()
    wanted = int((arguments.folder / "processes").read_text())
    while time.perf_counter() - begin < arguments.wait:
        if len(list(arguments.folder.glob("ready-*"))) >= wanted:
            return
        time.sleep(0.1)


def build(
    kind: str, method: str, arguments: Any, device: Any
) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Return a function that takes one step, and one that returns the rows of a microbatch."""
    if kind == "gpt2":
        return build_gpt2(method, device)
    import torch
    from _large_models import Llama
    from torch.nn import functional as F

    rows, length = arguments.rows, 32 if arguments.tiny else 1024
    sizes = {"vocabulary": 512, "width": 64, "heads": 4, "groups": 2, "inner": 128}
    model = Llama(depth=arguments.depth, **(sizes if arguments.tiny else {})).to(device)
    model.is_checkpointed = True
    if kind == "lora":
        adapted(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    is_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=is_gpu, capturable=is_gpu)
    vocabulary = model.tokens.num_embeddings
    ids = torch.randint(vocabulary, (8 * rows, length + 1), device=device)

    def losses(model: Any, batch: Any) -> Any:
        (ids,) = batch
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(ids[:, :-1])
        flat = logits.float().flatten(0, 1)
        found = F.cross_entropy(flat, ids[:, 1:].flatten(), reduction="none")
        return found.view(len(ids), -1).mean(1)

    if method.startswith("plain"):
        loss = torch.compile(losses, dynamic=False) if "compiled" in method else losses

        def step() -> None:
            loss(model, (ids[:rows],)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step, lambda: rows

    import tacit
    from tacit.sampling import FixedSize

    ledger = tacit.Ledger(relation=tacit.Relation.REPLACE_ONE)
    lots = FixedSize(rows, len(ids))
    return private_step(model, optimizer, (ids,), losses, lots, method, {"ledger": ledger})


def build_gpt2(method: str, device: Any) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Return what `build` does, for the workload gpt2 of training.py with the default sampler."""
    import torch
    from _models import WORKLOADS
    from training import plain_step

    work = WORKLOADS["gpt2"]
    size, is_gpu = work.batch_size if device.type == "cuda" else 2, device.type == "cuda"
    model = work.build().to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=is_gpu, capturable=is_gpu)
    data = work.batch(40 * size, device)

    def losses(model: Any, batch: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_gpu):
            return work.losses(model, batch)

    if method.startswith("plain"):
        step = plain_step(model, optimizer, losses, data, size, size, method)
        return step, lambda: size
    return private_step(model, optimizer, data, losses, size, method, {})


def private_step(
    model: Any, optimizer: Any, data: Any, losses: Any, batch_size: Any, method: str, options: Any
) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Return a function that takes a private step, and one that returns the microbatch's rows."""
    import tacit

    private = tacit.make_private(
        model,
        optimizer,
        data,
        losses,
        batch_size=batch_size,
        steps=100_000,
        clip_norm=1.0,
        noise_multiplier=1.0,
        speed=tacit.training.Speed(compile="compiled" in method),
        **options,
    )
    lots = iter(private)
    return lambda: private.step(next(lots)), lambda: private.microbatch


def adapted(model: Any) -> None:
    """Freeze the model in bfloat16 and give its linear layers adapters of rank 16."""
    import torch
    from torch import nn

    class Adapted(nn.Module):
        """A frozen layer plus a product of two narrow ones (Hu et al. 2021)."""

        def __init__(self, base: nn.Linear, rank: int = 16) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, rank, bias=False)
            self.up = nn.Linear(rank, base.out_features, bias=False)
            nn.init.normal_(self.up.weight, std=1e-3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    model.requires_grad_(False).to(torch.bfloat16)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                device = layer.weight.device
                setattr(block, name, Adapted(layer).to(device))


if __name__ == "__main__":
    main()
