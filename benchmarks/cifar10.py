"""CIFAR-10 by the shipped recipes: scattering with a linear layer, and a wide residual network.

    python benchmarks/cifar10.py scattering [--seeds 3] [--device cuda]
    python benchmarks/cifar10.py wrn [--minutes 9]     # a GPU; call again until it is done
    python benchmarks/cifar10.py wrn --steps 400 --rate 8     # fewer steps than the recipe's 2,500
    python benchmarks/cifar10.py speed                 # scattering and standardized weights

Each call writes what is known so far to results/cifar10.md. Runs are ordinary run folders under
runs/cifar10, or of `TACIT_RUNS`: a call goes on where the last one stopped, and a finished run is
only read. Settings are those of the recipes. A shorter run of the wide residual network has less
noise at the same epsilon; its learning rate is given such that its product with the noise
multiplier is about that of De et al. 2022 (4 x 3). Nothing is chosen by test images.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from _results import RESULTS, cpu_seconds, table, write
from torch import nn
from torch.nn.functional import cross_entropy

from tacit.experiments import Progress, Recipe, RunFolder, train
from tacit.experiments.scattering import Scattering
from tacit.experiments.wide_resnet import WideResNet
from tacit.training import Flat, StandardizedConv2d, clipped_sum

HERE = Path(__file__).resolve().parent
RUNS = Path(os.environ.get("TACIT_RUNS", HERE.parent / "runs" / "cifar10"))
DATA = Path(os.environ.get("TACIT_DATA", HERE.parents[1] / "shared" / "data"))
SPEED = RESULTS / "cifar10_speed.json"
_ROWS = 25  # most rows of a curve


class OutOfTime(Exception):
    """The minutes of this call are over; the next call resumes the run."""


def main() -> None:
    """Do the part that was asked for, and write all results known so far."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["scattering", "wrn", "speed", "write"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--rate", type=float, default=4.0)
    options = parser.parse_args()
    if options.part == "scattering":
        for seed in range(options.seeds):
            _scattering(seed, options.device)
    elif options.part == "wrn":
        _some_minutes(options.minutes, steps=options.steps, rate=options.rate)
    elif options.part == "speed":
        SPEED.write_text(json.dumps({**_scattering_speed(), **_standardization_cost()}, indent=1))
    write(
        "cifar10",
        "CIFAR-10 at delta 1e-5",
        ("torch", "numpy"),
        _NOTES,
        *_scattering_rows(),
        *_wrn_rows(),
        *_speed_rows(),
    )


_NOTES = """Test accuracy on the 10,000 test images, which chose nothing. Epsilon is the upper end
of the PLD bracket of everything that looked at the training images, records added or removed, lots
drawn by Poisson sampling. The seeds make the noise reproducible, which is for benchmarks only."""


def _shown(progress: Progress) -> None:
    if progress.is_measured:
        accuracy = progress.metric.get("accuracy", float("nan"))
        print(f"step {progress.step} of {progress.steps}: {accuracy:.4f}", flush=True)


def _scattering(seed: int, device: str) -> None:
    """Train on features that are computed anew, and keep how long all of it took."""
    path, began, used = RUNS / f"scattering-{seed}", time.monotonic(), time.process_time()
    if (path / "facts.json").is_file():
        return
    settings = {"run.seed": seed, "run.device": device, "run.baseline_steps": 0}
    recipe = Recipe.read("cifar10-scattering").with_settings(settings)
    with TemporaryDirectory() as cache:
        train(recipe, path, root=DATA, on_progress=_shown, cache=Path(cache))
    name = f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}"
    if device == "cuda":
        name = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    seconds, used = time.monotonic() - began, time.process_time() - used
    kept = {"seconds": seconds, "processor": used, "device": name}
    (RUNS / f"scattering-{seed}.json").write_text(json.dumps(kept))


def _some_minutes(minutes: float, *, steps: int, rate: float) -> None:
    """Take as many steps of the wide residual network as fit in the time."""
    began, times = time.monotonic(), []
    settings = {"run.seed": 0, "training.learning_rate": rate}
    settings["training.epochs"] = steps * 4096 / 50_000
    recipe = Recipe.read("cifar10-wrn").with_settings(settings)

    def on_progress(progress: Progress) -> None:
        if progress.stage:  # before the first step
            return
        _shown(progress)
        times.append((progress.step, round(time.monotonic() - began, 4), progress.is_measured))
        if progress.is_measured or progress.step < 3:  # the state has just been saved
            _keep_times(times)
            if time.monotonic() - began > 60 * minutes:
                raise OutOfTime

    try:
        train(recipe, RUNS / "wrn", root=DATA, on_progress=on_progress)
    except OutOfTime:
        print("stopped; call again to go on")


def _keep_times(times: list[tuple[int, float, bool]]) -> None:
    """Write after how many seconds of this call each step was done."""
    (RUNS / f"wrn-times-{times[0][0]}.json").write_text(json.dumps(times))


def _scattering_rows() -> list[str]:
    done = [RunFolder(path) for path in sorted(RUNS.glob("scattering-?"))]
    facts = [folder.facts() for folder in done if folder.is_finished]
    if not facts:
        return ["## Scattering and a linear layer\n\nNot run."]
    whole = [json.loads(path.read_text()) for path in sorted(RUNS.glob("scattering-?.json"))]
    values = [100 * f.utility.private[0].value for f in facts]
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    row = (
        f"{max(f.epsilon for f in facts):.4f}",
        len(values),
        f"{statistics.fmean(values):.2f}{spread}",
        f"{min(values):.2f}",
        f"{statistics.median(f.seconds for f in facts):.0f}",
        ", ".join(f"{one['seconds']:.0f}" for one in whole),
        ", ".join(f"{one['processor']:.0f}" for one in whole if "processor" in one),
        "67.0 (Tramèr & Boneh 2021)",
    )
    header = ("epsilon", "seeds", "accuracy, mean ± sd", "lowest", "training, s", "all, s",
              "processor, s")  # fmt: skip
    where = whole[0]["device"] if whole else "an unknown device"
    words = f"On {where}. All: from reading the images to the facts, features included."
    return ["## Scattering and a linear layer", words, table((*header, "published"), [row])]


def _wrn_rows() -> list[str]:
    """Return the curve of accuracy against views seen, of the part of the run that is done."""
    title, folder = "## Wide residual network, WRN-16-4, epsilon 8", RUNS / "wrn"
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return [f"{title}\n\nNot run: it needs a GPU. `python benchmarks/cifar10.py wrn`"]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    training = Recipe.read(str(folder / "recipe.toml")).training
    each = training.batch * (training.views or 1)
    steps = round(training.epochs * 50_000 / training.batch)
    kept = rows[:: max(1, len(rows) // _ROWS)]
    kept += [rows[-1]] if kept[-1] is not rows[-1] else []
    lines = [
        (r["step"], f"{r['step'] * each / 1e6:.1f}", f"{r['epsilon']:.2f}",
         f"{100 * r['accuracy']:.2f}")
        for r in kept
    ]  # fmt: skip
    words = (
        f"{steps} steps were planned, with {training.views} views of each image, lots of "
        f"{training.batch:,} and learning rate {training.learning_rate:g}. {_wrn_speed(each)}"
    )
    return [title, words, table(("steps", "million views", "epsilon so far", "accuracy"), lines)]


def _wrn_speed(each: int) -> str:
    """Return sentences on the speed of the calls of the run."""
    found = []
    for path in sorted(RUNS.glob("wrn-times-*.json"), key=lambda p: int(p.stem.split("-")[-1])):
        times = json.loads(path.read_text())
        taken = [b[1] - a[1] for a, b in itertools.pairwise(times) if not (a[2] or b[2])]
        if len(taken) > 3:
            (start, _, _), (first, at, _), (last, end, _) = times[0], times[1], times[-1]
            found.append(
                f"Steps {first} to {last}: {each / statistics.median(taken[1:]):,.0f} views a "
                f"second in the median step, {each * (last - first) / (end - at):,.0f} with "
                f"measurements, checkpoints and tests of isolation; first step after {at:.0f} s."
            )
            assert start == first - 1
    return " ".join(found)


def _scattering_speed() -> dict[str, float]:
    images = torch.rand(256, 3, 32, 32)
    scatter = Scattering()
    scatter(images[:16])
    return {"images a second": 256 / cpu_seconds(lambda: scatter(images), enough=4.0)}


def _standardization_cost() -> dict[str, float]:
    """Return medians of ratios of CPU time: standardized over plain convolutions, interleaved."""
    found = {}
    for views in (1, 16):
        models = [_small(plain) for plain in (False, True)]
        rows = 16 if views == 1 else 2
        batch = (torch.rand(rows * views, 3, 32, 32), torch.zeros(rows * views, dtype=torch.long))
        times = [[_seconds(model, batch, views) for model in models] for _ in range(5)]
        found[f"ratio, {views} views"] = statistics.median(a / b for a, b in times[1:])
    return found


def _small(is_plain: bool) -> nn.Module:
    torch.manual_seed(0)
    model = WideResNet(3, 10, depth=16, width=2)
    if is_plain:
        for layer in model.modules():
            if isinstance(layer, StandardizedConv2d):
                del layer.gain
                layer.__class__ = nn.Conv2d  # the same weights, used as they are
    return model


def _seconds(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], views: int) -> float:
    def losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

    start = time.process_time()
    clipped_sum(model, losses, batch, Flat(1.0), augmentations=views)
    return time.process_time() - start


def _speed_rows() -> list[str]:
    if not SPEED.is_file():
        return []
    found = json.loads(SPEED.read_text())
    rows = [
        ("scattering, color images of 32 x 32 a second",
         f"{found['images a second']:,.0f}"),
        ("clipped sum of WRN-16-2, standardized over plain convolutions, 1 view",
         f"{found['ratio, 1 views']:.2f}"),
        ("the same, 16 views", f"{found['ratio, 16 views']:.2f}"),
    ]  # fmt: skip
    note = "CPU time of one thread; ratios are medians of 4 interleaved pairs after a first one."
    return ["## Speed on one CPU core", note, table(("what", "value"), rows)]


if __name__ == "__main__":
    main()
