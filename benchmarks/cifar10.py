"""CIFAR-10 by the shipped recipe: scattering with a linear layer.

    python benchmarks/cifar10.py scattering [--seeds 3] [--device cuda]
    python benchmarks/cifar10.py speed                 # of the scattering transform

Each call writes what is known so far to results/cifar10.md. Runs are ordinary run folders under
runs/cifar10, or of `TACIT_RUNS`: a finished run is only read. Nothing is chosen by test images.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from _results import RESULTS, cpu_seconds, table, write

from tacit.experiments import Progress, Recipe, RunFolder, train
from tacit.experiments.scattering import Scattering

HERE = Path(__file__).resolve().parent
RUNS = Path(os.environ.get("TACIT_RUNS", HERE.parent / "runs" / "cifar10"))
DATA = Path(os.environ.get("TACIT_DATA", HERE.parents[1] / "shared" / "data"))
SPEED = RESULTS / "cifar10_speed.json"


def main() -> None:
    """Do the part that was asked for, and write all results known so far."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["scattering", "speed", "write"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.part == "scattering":
        for seed in range(options.seeds):
            _scattering(seed, options.device)
    elif options.part == "speed":
        SPEED.write_text(json.dumps(_scattering_speed(), indent=1))
    write(
        "cifar10",
        "CIFAR-10 at delta 1e-5",
        ("torch", "numpy"),
        _NOTES,
        *_scattering_rows(),
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


def _scattering_speed() -> dict[str, float]:
    images = torch.rand(256, 3, 32, 32)
    scatter = Scattering()
    scatter(images[:16])
    return {"images a second": 256 / cpu_seconds(lambda: scatter(images), enough=4.0)}


def _speed_rows() -> list[str]:
    if not SPEED.is_file():
        return []
    found = json.loads(SPEED.read_text())
    row = ("scattering, color images of 32 x 32 a second", f"{found['images a second']:,.0f}")
    return ["## Speed on one CPU core", "CPU time of one thread.", table(("what", "value"), [row])]


if __name__ == "__main__":
    main()
