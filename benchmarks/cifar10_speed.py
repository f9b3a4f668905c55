"""Where the time of the wide residual network goes on a GPU, with random images.

    python benchmarks/cifar10_speed.py step [--rows 512] [--steps 12]   # the recipe's step
    python benchmarks/cifar10_speed.py equal                            # its sum, in float32
    python benchmarks/cifar10_speed.py kernels                          # formed gradients of views

`step` trains WRN-16-4 as the recipe cifar10-wrn does (lots of 4,096, 16 views, standardized
weights, running mean) and prints the time to the first step and the views a second. It then
compares the compiled clipped sum of a small lot with the uncompiled one, in bfloat16 as in the run.
`equal` compares them in float32, where rounding hides nothing: uncompiled for WRN-16-4, compiled
for WRN-10-1. Both are compared with a loop over the examples in float64. `kernels` times the kernel
that forms the gradients of convolutions by settings, beside cuDNN's gradient of the whole batch.
"""

import argparse
import copy
import json
import time
from functools import partial

import torch
from torch.optim import SGD

from tacit.experiments.training_loop import gpu_losses
from tacit.experiments.views import shift_and_mirror
from tacit.experiments.wide_resnet import WideResNet
from tacit.training import EMA, Flat, Speed, clipped_sum, make_private
from tacit.training.gpu.compiled import CompiledSum

RECORDS, LOT, VIEWS = 50_000, 4_096, 16


def step(*, rows: int, steps: int, depth: int, lot: int, records: int) -> None:
    """Print what a run costs before its first step, and each step after it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    torch.manual_seed(0)
    data = (
        torch.rand(records, 3, 32, 32, device=device),
        torch.randint(0, 10, (records,), device=device),
    )
    model = WideResNet(3, 10, depth=depth, width=4 if depth == 16 else 1).to(device)
    mean = EMA(model, decay=0.999)
    private = make_private(
        model, SGD(model.parameters(), lr=1.0), data, gpu_losses, batch_size=lot, steps=1000,
        clip_norm=1.0, noise_multiplier=2.0, seed=0,
        speed=Speed(max_microbatch=rows or None, compile=True),
        augmentations=VIEWS, augment=shift_and_mirror,
    )  # fmt: skip
    found = {"make_private": time.monotonic() - began, "microbatch": private.microbatch}
    print(json.dumps(found), flush=True)
    times = []
    for lots in private:
        start = time.monotonic()
        private.step(lots)
        mean.update()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - start)
        if len(times) == 1:
            found["first step"] = time.monotonic() - began
            print(json.dumps(found), flush=True)
        if len(times) == steps:
            break
    # Every number of rows is recorded as a graph of its own, so a few steps more are slow.
    usual = sorted(times[1:])[: max(1, len(times) // 2)]
    found |= {
        "steps": [round(t, 3) for t in times],
        "views a second": lot * VIEWS / usual[len(usual) // 2],
    }
    found |= {"mean of the last half": lot * VIEWS * (steps // 2) / sum(times[-(steps // 2) :])}
    if device == "cuda":
        found["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(found), flush=True)
    print(json.dumps(_difference(private, model, data)), flush=True)
    if device == "cuda":
        _profile(private, mean)


def _difference(private, model, data) -> dict[str, float]:
    """Return how far the compiled sum of 64 records is from the uncompiled one."""
    batch = tuple(part[:64].repeat_interleave(VIEWS, 0) for part in data)
    compiled = private._lot_sum._compiled  # the very graphs of the run
    compiled.begin()
    ours = {
        n: s.double()
        for n, s in compiled(batch, torch.ones(64, device=batch[0].device)).sums.items()
    }
    is_finite = compiled.all_finite()
    plain = clipped_sum(model, gpu_losses, batch, Flat(1.0), augmentations=VIEWS).sums
    exact = clipped_sum(
        copy.deepcopy(model).double(), _double,
        (batch[0].double(), batch[1]), Flat(1.0), augmentations=VIEWS, engine="loop",
    ).sums  # fmt: skip

    return {
        "is_finite": is_finite, "compiled - uncompiled": _apart(ours, plain),
        "compiled - float64 loop": _apart(ours, exact),
        "uncompiled - float64 loop": _apart(plain, exact),
        "norm of the sum": sum(float(s.square().sum()) for s in ours.values()) ** 0.5,
    }  # fmt: skip


def _double(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _profile(private, mean) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for number, lots in enumerate(private):
            private.step(lots)
            mean.update()
            if number == 1:
                break
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda r: -r.device_time_total)
    total = sum(r.device_time_total for r in rows)
    for r in rows[:25]:
        spent = r.device_time_total
        print(f"{spent / total:6.1%} {spent / 2e3:9.2f} ms {r.count:6d} {r.key[:90]}")


def equal() -> None:
    """Print how far clipped sums in float32 are from a loop over the examples in float64."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    coarse = torch.rand(32 * VIEWS, 3, 4, 4, device=device)
    images = torch.nn.functional.interpolate(coarse, size=32, mode="bilinear")  # as photographs
    classes = torch.randint(0, 10, (32,), device=device).repeat_interleave(VIEWS)
    for depth, width, is_compiled in ((16, 4, False), (10, 1, True)):
        model = WideResNet(3, 10, depth=depth, width=width).to(device)
        for bound in (0.5, 1e3):  # all clipped, none clipped
            exact = clipped_sum(
                copy.deepcopy(model).double(), _double, (images.double(), classes), Flat(bound),
                augmentations=VIEWS, engine="loop",
            ).sums  # fmt: skip
            if is_compiled:
                compiled = CompiledSum(model, _double, Flat(bound), augmentations=VIEWS)
                compiled.begin()
                found = compiled((images, classes), torch.ones(32, device=device)).sums
            else:
                found = clipped_sum(
                    model, _double, (images, classes), Flat(bound), augmentations=VIEWS
                ).sums
            how = "compiled" if is_compiled else "uncompiled"
            print(
                f"WRN-{depth}-{width}, {how}, clip {bound:g}: {_apart(found, exact):.2g}",
                flush=True,
            )


def _apart(a, b) -> float:
    top = sum(float((a[n].double() - b[n].double()).square().sum()) for n in b)
    return (top / sum(float(b[n].double().square().sum()) for n in b)) ** 0.5


def kernels() -> None:
    """Time the kernel for 256 examples of 16 views, at the four shapes of most of the work."""
    from tacit.training.gpu import conv_norms

    for inputs, outputs, size, stride in _SHAPES:
        x, g = _random(inputs, size), _random(outputs, size // stride)
        weight = torch.randn(outputs, inputs, 3, 3, device="cuda", dtype=torch.bfloat16)
        flops = 2 * 9 * inputs * g.numel()
        spans = [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1
        given = g, x, weight, None, *spans, [False, True, False]
        one = _seconds(partial(torch.ops.aten.convolution_backward, *given))
        print((inputs, outputs, size, stride), f"cuDNN {1e3 * one:.2f} ms", flush=True)
        for tiles in _SETTINGS:
            if tiles[0] <= outputs:
                conv_norms._instance_tiles = lambda *_, tiles=tiles: tiles[:3]
                conv_norms._warps = lambda *_, tiles=tiles: tiles[3]
                run = partial(conv_norms.conv2d_instances, x, g, [3, 3], stride, 1, examples=256)
                try:
                    one = _seconds(run)
                except RuntimeError as error:  # too much shared memory
                    print(" ", tiles, type(error).__name__)
                    continue
                print(f"  {tiles} {1e3 * one:.2f} ms {flops / one / 1e12:.0f} TFLOP/s", flush=True)


_SHAPES = [(64, 64, 32, 1), (64, 128, 32, 2), (128, 128, 16, 1), (256, 256, 8, 1)]
_SETTINGS = [  # tiles of outputs, values and positions; warps
    (64, 64, 64, 4),
    (64, 128, 64, 4),
    (64, 256, 64, 8),
    (128, 64, 64, 4),
    (128, 128, 64, 8),
    (128, 128, 64, 4),
    (128, 128, 32, 8),
]


def _random(channels: int, size: int) -> torch.Tensor:
    found = torch.randn(256 * VIEWS, channels, size, size, device="cuda", dtype=torch.bfloat16)
    return found.to(memory_format=torch.channels_last)


def _seconds(run) -> float:
    for _ in range(2):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 5e3


def main() -> None:
    """Do the part that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=["step", "equal", "kernels"])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--lot", type=int, default=LOT)
    parser.add_argument("--records", type=int, default=RECORDS)
    given = parser.parse_args()
    if given.part != "step":
        {"equal": equal, "kernels": kernels}[given.part]()
        return
    step(
        rows=given.rows, steps=given.steps, depth=given.depth, lot=given.lot, records=given.records
    )


if __name__ == "__main__":
    main()
