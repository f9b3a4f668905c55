"""CIFAR-10 by the shipped recipes: scattering with a linear layer, and a wide residual network.

    python benchmarks/cifar10.py scattering [--seeds 3]     # about a minute a seed, on a CPU
    python benchmarks/cifar10.py wrn [--minutes 9]          # a GPU; call again until it is done
    python benchmarks/cifar10.py speed                      # scattering and standardized weights

Each call writes what is known so far to results/cifar10.md. Runs are ordinary run folders under
runs/cifar10: a call goes on where the last one stopped, and a finished run is only read. Settings
are those of the recipes; nothing is chosen here, and the test images only measure the result.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from _results import RESULTS, cpu_seconds, table, write
from torch import nn
from torch.nn.functional import cross_entropy

from tacit.experiments import Progress, Recipe, RunFolder, train
from tacit.experiments.scattering import Scattering
from tacit.experiments.wide_resnet import WideResNet
from tacit.training import Flat, StandardizedConv2d, clipped_sum

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "runs" / "cifar10"
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
    options = parser.parse_args()
    if options.part == "scattering":
        for seed in range(options.seeds):
            recipe = Recipe.read("cifar10-scattering").with_settings({"run.seed": seed})
            train(recipe, RUNS / f"scattering-{seed}", root=DATA, on_progress=_shown)
    elif options.part == "wrn":
        _some_minutes(options.minutes)
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


def _some_minutes(minutes: float) -> None:
    """Take as many steps of the wide residual network as fit in the time."""
    end = time.monotonic() + 60 * minutes

    def on_progress(progress: Progress) -> None:
        _shown(progress)
        if progress.is_measured and time.monotonic() > end:  # the state has just been saved
            raise OutOfTime

    recipe = Recipe.read("cifar10-wrn").with_settings({"run.seed": 0})
    try:
        train(recipe, RUNS / "wrn", root=DATA, on_progress=on_progress)
    except OutOfTime:
        print("stopped; call again to go on")


def _scattering_rows() -> list[str]:
    done = [RunFolder(path) for path in sorted(RUNS.glob("scattering-*"))]
    facts = [folder.facts() for folder in done if folder.is_finished]
    if not facts:
        return ["## Scattering and a linear layer\n\nNot run."]
    values = [100 * f.utility.private[0].value for f in facts]
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    row = (
        f"{max(f.epsilon for f in facts):.4f}",
        len(values),
        f"{statistics.fmean(values):.2f}{spread}",
        f"{min(values):.2f}",
        f"{statistics.median(f.seconds for f in facts):.0f}",
        "67.0 (Tramèr & Boneh 2021)",
    )
    header = ("epsilon", "seeds", "accuracy, mean ± sd", "lowest", "training, s", "published")
    return ["## Scattering and a linear layer", table(header, [row])]


def _wrn_rows() -> list[str]:
    """Return the curve of accuracy against views seen, of the part of the run that is done."""
    title, folder = "## Wide residual network, WRN-16-4, epsilon 8", RUNS / "wrn"
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return [f"{title}\n\nNot run: it needs a GPU. `python benchmarks/cifar10.py wrn`"]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    training = Recipe.read("cifar10-wrn").training
    each = training.batch * (training.views or 1)
    kept = rows[:: max(1, len(rows) // _ROWS)]
    kept += [rows[-1]] if kept[-1] is not rows[-1] else []
    lines = [
        (r["step"], f"{r['step'] * each / 1e6:.1f}", f"{r['epsilon']:.2f}",
         f"{100 * r['accuracy']:.2f}")
        for r in kept
    ]  # fmt: skip
    blocks = [title, table(("steps", "million views", "epsilon so far", "accuracy"), lines)]
    if RunFolder(folder).is_finished:
        seconds = RunFolder(folder).facts().seconds
        blocks.append(f"{rows[-1]['step'] * each / seconds:,.0f} views a second, all included.")
    return blocks


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
