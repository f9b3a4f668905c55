"""250 small torch teachers: stacked parameters against one after the other.

    python benchmarks/pate_teachers.py

Same architecture, same number of steps, same batch size, same parts; random features stand for
data, since only time is measured here. One by one is timed on `--measured` teachers and scaled to
all, after a warm-up.
"""

import argparse
import os
import time
from functools import partial

import numpy as np
import torch
from _results import table, write
from torch import nn

from tacit.pate import TeacherTraining, TorchTeacher, partition, train_stacked_teachers

N_TEACHERS, N_RECORDS, N_CLASSES = 250, 60_000, 10
THREADS = torch.get_num_threads()


def linear(n_inputs: int) -> nn.Module:
    return nn.Linear(n_inputs, N_CLASSES)


def perceptron(n_inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(n_inputs, 32), nn.ReLU(), nn.Linear(32, N_CLASSES))


def convolutional(n_inputs: int) -> nn.Module:
    side = round(n_inputs**0.5)
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)),
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * ((side - 1) // 2) ** 2, N_CLASSES),
    )


MODELS = [
    ("linear, 64 features", linear, 64),
    ("64-32-10 perceptron", perceptron, 64),
    ("convolution 8 x 3 x 3, 8 x 8 images", convolutional, 64),
    ("196-32-10 perceptron", perceptron, 196),
]


def seconds(call) -> tuple[float, float]:
    """Return wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def by_threads(call, n_threads: int) -> tuple[float, float]:
    """Return wall and CPU seconds with `n_threads` threads, after a warm-up call."""
    torch.set_num_threads(n_threads)
    call()
    taken = seconds(call)
    torch.set_num_threads(THREADS)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=int, default=20)
    measured = parser.parse_args().measured
    rng = np.random.default_rng(0)
    training = TeacherTraining(steps=100, batch_size=32, learning_rate=0.02)
    rows = []
    for name, make, n_inputs in MODELS:
        x = rng.normal(size=(N_RECORDS, n_inputs)).astype(np.float32)
        y = rng.integers(0, N_CLASSES, N_RECORDS)
        parts = partition(N_RECORDS, N_TEACHERS, rng=1)
        make_module = partial(make, n_inputs)

        def one_by_one(count, make_module=make_module, x=x, y=y, parts=parts):
            for i, part in enumerate(parts[:count]):
                TorchTeacher(make_module, seed=i, training=training).fit(x[part], y[part])

        def stacked(make_module=make_module, x=x, y=y, parts=parts):
            train_stacked_teachers(
                make_module, x, y, N_TEACHERS, n_classes=N_CLASSES, training=training, rng=1,
                parts=parts,
            )  # fmt: skip

        alone = min(by_threads(partial(one_by_one, measured), n) for n in {1, THREADS})
        alone = np.array(alone) * N_TEACHERS / measured
        stacked()
        together = np.min([seconds(stacked) for _ in range(3)], axis=0)
        rows.append(
            (
                name,
                f"{alone[0]:.2f} ({alone[1]:.2f})",
                f"{together[0]:.2f} ({together[1]:.2f})",
                f"{alone[0] / together[0]:.1f} ({alone[1] / together[1]:.1f})",
            )
        )
        print(rows[-1], flush=True)
    write(
        "pate_teachers",
        "250 torch teachers, 100 steps of 32 records: stacked against one by one",
        ("tacit", "torch", "numpy"),
        table(("model", "one by one, s", "stacked, s", "times faster"), rows),
        f"Wall seconds, CPU seconds in parentheses, {THREADS} threads on {os.cpu_count()} cores. "
        f"One by one: {measured} teachers, scaled to {N_TEACHERS}, with one thread or all, "
        "whichever is faster. Stacked: best of three.",
    )


if __name__ == "__main__":
    main()
