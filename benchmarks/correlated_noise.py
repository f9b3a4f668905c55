"""Correlated noise against DP-SGD: accuracy on Fashion-MNIST, and the time of a step.

    python benchmarks/correlated_noise.py accuracy [--jobs 2] [--seeds 5] [--images 60000]
    python benchmarks/correlated_noise.py time [--device cpu] [--models mlp,gpt2] [--turns 15]
    python benchmarks/correlated_noise.py release --device cuda

Accuracy: softmax regression on scattering features under a public random projection to 256
dimensions, plain SGD, lots of 128 on average, 2,048 steps, and the mean of the weights of the last
quarter of the steps for both kinds of noise. The learning rate is chosen for each cell on 10,000
held-out training images, training on the others with two seeds; then the model is trained on all
training images with each seed and evaluated on the test images once. Bands are chosen by
`Banded()`. Images come from $TACIT_DATA/fashion-mnist.

Time: milliseconds of a step with its lot, eight steps of DP-SGD and eight with 16 bands in turn,
since some steps with bands do more than others. On a CPU it is processor time, on one thread; on a
GPU steps are compiled, and the host waits for the device after eight steps. `release` is the part
of a step on a GPU that correlated noise changes.
"""

import argparse
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _models import WORKLOADS, Workload
from _results import table, write
from torch import nn
from torch.nn.functional import cross_entropy

from tacit.datasets import fashion_mnist
from tacit.experiments.features import project, random_directions
from tacit.experiments.scattering import Scattering, contrast_normalize, group_normalize
from tacit.mechanisms import optimal_bands
from tacit.training import Banded, Speed, make_private
from tacit.training.banded_noise import BandedNoise
from tacit.training.ema import TailMean
from tacit.training.gpu.recorded_update import RecordedUpdate
from tacit.training.key import Key
from tacit.training.noise import NoisyMean

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("TACIT_DATA", HERE.parents[1] / "shared" / "data"))
CACHE = HERE.parent / "runs" / "correlated_noise.npz"
EPSILONS, DELTA = (1.0, 3.0, 8.0), 1e-5
BATCH, STEPS, WIDTH, CLIP = 128, 2048, 256, 0.1
RATES = tuple(2.0**k for k in range(-1, 8))
HELD_OUT = 10_000
STEPS_OF_TURN, WARM_UP = 8, 3
RELEASED = (795_010, 162_716_160)  # parameters of mlp and of gpt2
NAMES = {False: "DP-SGD", True: "correlated"}


class Cell(NamedTuple):
    """One training run."""

    is_banded: bool
    epsilon: float
    rate: float
    seed: int
    is_final: bool  # on all training images, evaluated on the test images


def main() -> None:
    """Parse the arguments and run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("accuracy", "time", "release"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default="logistic,mlp,cnn-256,lstm")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    if options.what == "time":
        models = options.models.split(",")
        measure_time(torch.device(options.device), models, options.turns)
    elif options.what == "release":
        measure_release(torch.device(options.device))
    else:
        measure_accuracy(options.jobs, options.seeds, options.images)


def measure_accuracy(jobs: int, seeds: int, images: int) -> None:
    """Choose a learning rate for each cell, train with all seeds, and write the table."""
    make_features(jobs, images)
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        kinds = [(banded, epsilon) for epsilon in EPSILONS for banded in (False, True)]
        tries = [
            Cell(*kind, rate, seed, False) for kind in kinds for rate in RATES for seed in (0, 1)
        ]
        scores: dict[tuple[Any, ...], list[float]] = {}
        for cell, (accuracy, _) in zip(tries, pool.map(train, tries), strict=True):
            scores.setdefault((cell.is_banded, cell.epsilon, cell.rate), []).append(accuracy)
        best = {
            kind: max(RATES, key=lambda rate: statistics.fmean(scores[(*kind, rate)]))
            for kind in kinds
        }
        for kind in kinds:
            row = ", ".join(
                f"{rate:g}: {100 * statistics.fmean(scores[(*kind, rate)]):.2f}" for rate in RATES
            )
            print(f"held out, {NAMES[kind[0]]}, epsilon {kind[1]:g}: {row}", flush=True)
        finals = [Cell(*kind, best[kind], seed, True) for kind in kinds for seed in range(seeds)]
        found: dict[tuple[Any, ...], list[float]] = {}
        bands: dict[tuple[Any, ...], int] = {}
        for cell, (accuracy, number) in zip(finals, pool.map(train, finals), strict=True):
            found.setdefault((cell.is_banded, cell.epsilon), []).append(100 * accuracy)
            bands[cell.is_banded, cell.epsilon] = number
    rows = []
    for epsilon in EPSILONS:
        plain, banded = found[False, epsilon], found[True, epsilon]
        gains = [b - a for a, b in zip(plain, banded, strict=True)]
        rows.append(
            (
                f"{epsilon:g}", spread(plain), f"{best[False, epsilon]:g}", spread(banded),
                f"{best[True, epsilon]:g}", bands[True, epsilon],
                f"{statistics.fmean(gains):+.2f}", f"{min(gains):+.2f}",
            )
        )  # fmt: skip
    header = (
        "epsilon", "DP-SGD, %", "its learning rate", "correlated, %", "its learning rate",
        "bands", "gain, points", "least of the seeds",
    )  # fmt: skip
    note = (
        f"Fashion-MNIST, lots of {BATCH}, {STEPS} steps, delta {DELTA:g}, {seeds} seeds, mean ± "
        "standard deviation on the test images. " + (__doc__ or "").split("\n\n")[2]
    )
    write("correlated_noise", "Correlated noise", ("torch", "numpy"), note, table(header, rows))


def spread(values: list[float]) -> str:
    """Return mean and standard deviation as text."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.2f} ± {deviation:.2f}"


def make_features(jobs: int, images: int) -> None:
    """Compute the projected scattering features of all images, once."""
    if CACHE.is_file():
        return
    data = fashion_mnist(DATA)
    everything = np.concatenate([data.x_train[:images], data.x_test])
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        parts = list(pool.map(features_of, np.array_split(everything, -(-len(everything) // 500))))
    x = np.concatenate(parts)
    CACHE.parent.mkdir(exist_ok=True)
    kept = {"x": x, "y": np.concatenate([data.y_train[:images], data.y_test]), "n": images}
    np.savez(CACHE, **kept)
    print(f"features of {len(x)} images are ready", flush=True)


def features_of(images: np.ndarray) -> np.ndarray:
    """Return the features of some images, each computed from its image alone."""
    scattering = Scattering()
    found = scattering(images.reshape(-1, 28, 28))
    found = group_normalize(found, 27).reshape(found.shape)
    found = contrast_normalize(found, scattering.orders).reshape(len(images), -1)
    return project(found, random_directions(found.shape[1], WIDTH))


def train(cell: Cell) -> tuple[float, int]:
    """Train one model; return its accuracy and the number of bands."""
    kept = np.load(CACHE)
    n = int(kept["n"])
    x, y = torch.from_numpy(kept["x"]), torch.from_numpy(kept["y"]).long()
    stop = n if cell.is_final else n - HELD_OUT * n // 60_000
    test = slice(n, None) if cell.is_final else slice(stop, n)
    model = nn.Linear(WIDTH, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    private = make_private(
        model, torch.optim.SGD(model.parameters(), lr=cell.rate), (x[:stop], y[:stop]), losses,
        batch_size=BATCH, steps=STEPS, clip_norm=CLIP, epsilon=cell.epsilon, delta=DELTA,
        noise=Banded() if cell.is_banded else None, seed=1000 * cell.is_final + cell.seed,
        speed=Speed(check=False),
    )  # fmt: skip
    mean = TailMean(model, steps=STEPS, share=Banded().average)
    for lot in private:
        private.step(lot)
        mean.observe(private.steps_taken)
    bands = private.info.get("bands", 1)
    if bands == 1:  # otherwise the run has averaged the weights by itself
        mean.apply_at_end(STEPS)
    with torch.no_grad():
        is_right = model(x[test]).argmax(1) == y[test]
    return float(is_right.double().mean()), bands


def losses(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of each example."""
    x, y = batch
    return cross_entropy(model(x), y, reduction="none")


def measure_time(device: torch.device, names: list[str], turns: int) -> None:
    """Measure steps of DP-SGD and of 16 bands in turn, for several models."""
    is_gpu, rows = device.type == "cuda", []
    clock = time.perf_counter if is_gpu else time.process_time
    torch.set_num_threads(torch.get_num_threads() if is_gpu else 1)
    for name in names:
        times: dict[bool, list[float]] = {False: [], True: []}
        runs = {
            is_banded: one_run(WORKLOADS[name], is_banded, device, turns) for is_banded in times
        }
        for turn in range(turns):  # in turn, so that the machine's other load meets both
            for is_banded, (private, lots) in runs.items():
                start = clock()
                for _ in range(STEPS_OF_TURN):
                    private.step(next(lots))
                if is_gpu:
                    torch.cuda.synchronize()
                if turn >= WARM_UP:
                    times[is_banded].append(1e3 * (clock() - start) / STEPS_OF_TURN)
        ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
        plain, banded = map(statistics.median, times.values())
        size = WORKLOADS[name].batch_size
        rows.append((name, size, f"{plain:.3f}", f"{banded:.3f}", f"{ratio:.3f}"))
        print(*rows[-1], flush=True)
        del runs
    header = ("model", "lot", "DP-SGD, ms", "16 bands, ms", "ratio")
    text = (
        f"{device.type}, {torch.get_num_threads()} threads. Medians of {turns - WARM_UP} turns of "
        f"{STEPS_OF_TURN} steps, {'wall' if is_gpu else 'processor'} time a step, DP-SGD and 16 "
        "bands in turn; the ratio is the median of the ratios of the turns."
    )
    where = f"correlated-noise-{device.type}"
    write(where, "Steps with correlated noise", ("torch",), text, table(header, rows))


def measure_release(device: torch.device, repeats: int = 100) -> None:
    """Measure noise and the step of SGD alone, with 1 and with 16 bands, for two sizes."""
    rows = []
    for size in RELEASED:
        times = []
        for bands in (1, 16):
            weights = nn.Parameter(torch.zeros(size, device=device))
            options = {"expected_batch": 1.0}
            if bands == 1:
                noise = NoisyMean(Key.from_seed(0), **options)
            else:
                column = optimal_bands(repeats, bands)
                noise = BandedNoise(Key.from_seed(0), column=column.tolist(), **options)
            sgd = torch.optim.SGD([weights], lr=0.0)
            update, total = RecordedUpdate(noise, [weights], sgd), torch.zeros_like(weights.data)
            step = partial(update.release_and_move, [total], [1.0], noise_multiplier=1.0)
            for number in range(WARM_UP * STEPS_OF_TURN):
                step(step=number)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for number in range(repeats):
                step(step=WARM_UP * STEPS_OF_TURN + number)
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start) / repeats)
            del update, noise, weights, total
        rows.append((f"{size:,}", *(f"{t:.3f}" for t in times), f"{times[1] - times[0]:.3f}"))
        print(*rows[-1], flush=True)
    header = ("parameters", "DP-SGD, ms", "16 bands, ms", "difference, ms")
    text = f"Noise and the step of SGD alone, one kernel, mean of {repeats} steps."
    where = f"correlated-noise-release-{device.type}"
    write(where, "Release with correlated noise", ("torch", "triton"), text, table(header, rows))


def one_run(workload: Workload, is_banded: bool, device: torch.device, turns: int) -> Any:
    """Return a run on random records, and its lots."""
    torch.manual_seed(0)
    data = workload.batch(20 * workload.batch_size, device)
    model = workload.build().to(device)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        is_half = workload.autocast and device.type == "cuda"
        with torch.autocast(device.type, torch.bfloat16, enabled=is_half):
            return workload.losses(model, batch)

    private = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.01), data, loss_fn,
        batch_size=workload.batch_size, steps=turns * STEPS_OF_TURN, clip_norm=1.0,
        noise_multiplier=1.0, noise=Banded(bands=16, average=0.0) if is_banded else None,
        speed=Speed(compile=device.type == "cuda", check=False),
    )  # fmt: skip
    return private, iter(private)


if __name__ == "__main__":
    main()
