"""What `isolation="checked"` costs after the first step, beside a run without tests.

    python benchmarks/isolation_cost.py [--seconds 60]

A CNN eagerly on the CPU, or GPT-2 small with compile=True and bfloat16 on a GPU if there is one.
Two runs of the same model, one with tests and one without, take turns in blocks of steps, so that a
slow moment of the machine meets both. Every step is timed by itself. The cost is

    (median of steps without a test + extra of a step with a test / mean gap of 80) / baseline - 1,

where the extra is the mean over tests, and the baseline is the median step of the other run. Tests
are made eight times as often as in a real run, so that enough of them are timed. On the CPU, with
one thread, the time is that of the processor.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _models import WORKLOADS
from _results import table, write

import tacit

BLOCK = 16  # steps of one run before the other one takes over
GAP = 80  # mean number of steps between two tests, of a run of 320 steps or more
TIMED_GAP = 8  # the same, while tests are timed


class TimedRun:
    """A private run whose steps are timed one by one, apart if a test came before them."""

    def __init__(self, workload: str, device: torch.device, *, check: bool) -> None:
        work = WORKLOADS[workload]
        size = work.batch_size
        torch.manual_seed(0)
        model = work.build().to(device)
        is_gpu = device.type == "cuda"
        if is_gpu:
            optimizer: Any = torch.optim.AdamW(
                model.parameters(), lr=1e-4, fused=True, capturable=True
            )
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def loss_fn(model: Any, batch: Any) -> Any:
            with torch.autocast(device.type, torch.bfloat16, enabled=work.autocast and is_gpu):
                return work.losses(model, batch)

        self.private = tacit.make_private(
            model,
            optimizer,
            work.batch(8 * size, device),
            loss_fn,
            batch_size=size,
            steps=100_000,
            clip_norm=1.0,
            noise_multiplier=1.0,
            speed=tacit.training.Speed(compile=is_gpu),
            check=check,
        )
        tests: Any = self.private._isolation
        tests._gap = TIMED_GAP
        if check:
            tests.next_check = 0
        self.lots = iter(self.private)
        self.clock = time.perf_counter if is_gpu else time.process_time
        self.synchronize: Callable[[], None] = torch.cuda.synchronize if is_gpu else lambda: None
        self.plain: list[float] = []
        self.tested: list[float] = []

    def take(self, steps: int, *, keep: bool = True) -> None:
        """Take steps; with `keep`, store the seconds of each."""
        for _ in range(steps):
            before = self.private.isolation
            self.synchronize()
            start = self.clock()
            self.private.step(next(self.lots))
            self.synchronize()
            seconds = self.clock() - start
            if keep:
                (self.plain if self.private.isolation == before else self.tested).append(seconds)


def measure(workload: str, device: torch.device, seconds: float) -> list[object]:
    """Return one row of the table."""
    with_tests, without = (TimedRun(workload, device, check=check) for check in (True, False))
    for run in (with_tests, without):
        run.take(8, keep=False)
    start = time.perf_counter()
    while (now := time.perf_counter() - start) < seconds or (
        len(with_tests.tested) < 10 and now < 2 * seconds
    ):
        for run in (with_tests, without):
            run.take(BLOCK)
    base, usual = statistics.median(without.plain), statistics.median(with_tests.plain)
    extra = statistics.mean(with_tests.tested) - usual
    cost = (usual + extra / GAP) / base - 1
    return [
        workload,
        f"{1e3 * base:.2f}",
        f"{1e3 * usual:.2f}",
        f"{1e3 * extra:.1f}",
        len(without.plain),
        len(with_tests.tested),
        f"{100 * cost:+.2f} %",
    ]


def main() -> None:
    """Measure on the GPU if there is one, else on the CPU with one thread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    seconds = parser.parse_args().seconds
    if torch.cuda.is_available():
        device, workload, place = torch.device("cuda"), "gpt2", torch.cuda.get_device_name()
    else:
        torch.set_num_threads(1)
        device, workload, place = torch.device("cpu"), "cnn-256", "the CPU, one thread"
    header = [
        "model", "ms a step without tests", "ms a step with tests", "extra ms of a test",
        "steps timed", "tests timed", "cost",
    ]  # fmt: skip
    write(
        f"isolation-cost-{device.type}",
        f'Cost of isolation="checked" after the first step, on {place}',
        ("tacit", "torch"),
        table(header, [measure(workload, device, seconds)]),
    )


if __name__ == "__main__":
    main()
