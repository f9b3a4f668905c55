"""Experiments for one run on a GPU; not kept."""

import os
import sys
import tempfile
import time

os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())  # compile times are measured
import torch


def kernels() -> None:
    from tacit.training.gpu import noise as N
    from tacit.training.gpu import update as U
    from tacit.training.grid_noise import make_grids

    sizes = [40_000_000] * 4
    for warps in (4, 8):
        N.WARPS = U.WARPS = warps
        sums = [torch.zeros(n, device="cuda") for n in sizes]
        ps = [torch.nn.Parameter(torch.zeros(n, device="cuda")) for n in sizes]
        grids = make_grids(1.0, [1.0] * 4, sum(sizes))
        blocks = N.Blocks(sums, grids, 1.0, 12)
        blocks.set_nonce(bytes(range(32)), 7)
        for name in ("noise", "sgd", "adamw"):
            if name == "noise":
                launch = blocks.launch
            else:
                kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
                more = {"momentum": 0.9} if name == "sgd" else {"capturable": True}
                optimizer = kind(ps, lr=1e-9, **more)
                for p in ps:
                    p.grad = torch.zeros_like(p)
                optimizer.step()
                update = U.Update(blocks, ps, optimizer)
                update.set_rates()
                launch = lambda update=update: update.launch(blocks)  # noqa: E731
            start = time.perf_counter()
            launch()
            torch.cuda.synchronize()
            compiled = time.perf_counter() - start
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            launch()
            begin.record()
            for _ in range(10):
                launch()
            end.record()
            torch.cuda.synchronize()
            took = begin.elapsed_time(end) / 10
            print(f"warps {warps} {name}: first {compiled:.2f} s, then {took:.3f} ms", flush=True)
        fresh = torch.zeros(10**6, device="cuda")
        one = N.Blocks([fresh], make_grids(1.0, [1.0], 10**6), 1.0, 12)
        one.set_nonce(bytes(range(32)), 7)
        one.launch()
        print("std", float(fresh.std()), "mean", float(fresh.mean()), "first", fresh[:3].tolist())


def steady(workload: str, cheap: int) -> None:
    import collections
    import threading

    import first_step
    import training as bench

    from tacit.training.gpu import compiled

    compiled._CHEAP_TO_MASK = cheap
    samples, alone = collections.Counter(), collections.Counter()

    def timed(step, *_):
        for _ in range(200):
            step()
        torch.cuda.synchronize()
        for _ in range(3):
            begin = time.perf_counter()
            for _ in range(1000):
                step()
            host = time.perf_counter() - begin
            torch.cuda.synchronize()
            print(workload, cheap, f"{time.perf_counter() - begin:.4f} ms a step, host {host:.4f}")
        over = threading.Event()
        first_step.PERIOD = 0.001
        thread = threading.Thread(target=first_step.sample, args=(samples, alone, over))
        thread.start()
        for _ in range(3000):
            step()
        over.set()
        thread.join()
        return bench.Measured(0.0, 0.0)

    bench.timed = timed
    bench.measure(workload, "tacit-poisson-compiled")
    total = sum(alone.values())
    for title, counted in (("inclusive", samples), ("innermost", alone)):
        print("--", title, total)
        for place, count in counted.most_common(45):
            print(f"{100 * count / total:6.1f} % {place}")


if sys.argv[1] == "kernels":
    kernels()
else:
    steady(sys.argv[1], 2 ** int(sys.argv[2]))
