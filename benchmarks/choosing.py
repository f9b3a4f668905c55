"""What clip norm, learning rate, batch size, length and epsilon do to a private model.

    python benchmarks/choosing.py run --data DATA [--processes 16] [--seeds 3]
    python benchmarks/choosing.py draw

Fashion-MNIST, a network of one hidden layer (784-128-10), plain SGD, delta 1e-5, test accuracy.
Nothing is tuned on the test images: the figures show all values that were tried. `draw` draws the
tables of results/choosing.md for the page docs/choosing.md.
"""

import argparse
import itertools
import statistics
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import _results as results
import torch
from joblib import Parallel, delayed
from torch.nn import functional as F

import tacit

DELTA = 1e-5
FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"


class Setting(NamedTuple):
    """One run. `reach` is learning rate times clip norm: how far one step can go."""

    clip_norm: float = 0.1
    reach: float = 0.3
    batch_size: int = 2_048
    epochs: float = 20.0
    epsilon: float = 3.0


FIELDS = {"clip": "clip_norm", "batch": "batch_size", "epochs": "epochs", "epsilon": "epsilon"}
WORDS = {"clip": "clip norm", "batch": "batch", "epochs": "epochs", "epsilon": "epsilon"}
SHADES = ("#8ecae6", "#2a9d8f", "#e9a23b", "#d1495b")
REACHES = (0.03, 0.1, 0.3, 1.0, 3.0)
STUDIES = {
    "clip": [Setting(c, r) for c in (0.01, 0.1, 1.0, 10.0) for r in REACHES],
    "batch": [Setting(batch_size=b, reach=r) for b in (128, 512, 2_048, 8_192) for r in REACHES],
    "epochs": [Setting(epochs=e, reach=r) for e in (2, 5, 20, 60) for r in REACHES],
    "epsilon": [Setting(epsilon=e, reach=r) for e in (0.5, 1, 3, 8) for r in REACHES],
}


def accuracy(data: tacit.datasets.Dataset, setting: Setting, seed: int) -> float:
    """Train one model privately and return its test accuracy in percent."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    x, y = torch.from_numpy(data.x_train).float().flatten(1), torch.from_numpy(data.y_train)
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    rate = setting.reach / setting.clip_norm
    private = tacit.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=rate),
        (x, y),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        batch_size=setting.batch_size,
        epochs=setting.epochs,
        clip_norm=setting.clip_norm,
        epsilon=setting.epsilon,
        delta=DELTA,
        seed=seed,
    )
    for batch in private:
        private.step(batch)
    with torch.no_grad():
        said = model(torch.from_numpy(data.x_test).float().flatten(1)).argmax(1)
    return float((said == torch.from_numpy(data.y_test)).float().mean()) * 100


def main() -> None:
    """Run every setting and write the tables, or draw the tables that were written."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("run", "draw"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    if given.what == "run":
        run(tacit.datasets.load("fashion-mnist", data=given.data), given.processes, given.seeds)
    else:
        for name in STUDIES:
            draw(name)


def run(data: tacit.datasets.Dataset, processes: int, seeds: int) -> None:
    """Train every setting with every seed and write the mean accuracies."""
    settings = sorted(set(itertools.chain(*STUDIES.values())), key=lambda one: -one.epochs)
    tasks = list(itertools.product(settings, range(seeds)))
    found = Parallel(n_jobs=processes, verbose=1)(
        delayed(accuracy)(data, setting, seed) for setting, seed in tasks
    )
    by_setting: dict[Setting, list[float]] = defaultdict(list)
    for (setting, _), value in zip(tasks, found, strict=True):
        by_setting[setting].append(value)
    results.write(
        "choosing",
        f"Test accuracy on Fashion-MNIST, mean of {seeds} seeds",
        ["tacit", "torch"],
        "A network 784-128-10, plain SGD. Unless varied: clip norm 0.1, batch 2,048, 20 epochs, "
        "epsilon 3, delta 1e-5. Columns: learning rate times clip norm.",
        *(study_table(name, by_setting) for name in STUDIES),
    )


def study_table(name: str, by_setting: dict[Setting, list[float]]) -> str:
    """Return the mean accuracies of a study: a row for each value, a column for each reach."""
    rows: dict[float, list[str]] = defaultdict(list)
    for setting in STUDIES[name]:
        rows[getattr(setting, FIELDS[name])].append(f"{statistics.fmean(by_setting[setting]):.1f}")
    body = [[f"{value:g}", *means] for value, means in rows.items()]
    return results.table([name, *(f"{reach:g}" for reach in REACHES)], body)


def draw(name: str) -> None:
    """Write the figure of a study: accuracy against learning rate times clip norm."""
    import matplotlib.pyplot as plt

    text = (results.RESULTS / "choosing.md").read_text(encoding="utf-8")
    (block,) = (part for part in text.split("\n\n") if part.startswith(f"| {name} |"))
    rows = [line.strip("| ").split(" | ") for line in block.strip().splitlines()[2:]]
    gray = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), "#6b7a83")
    ticks = dict.fromkeys(("xtick.color", "ytick.color"), "#6b7a83")
    with plt.rc_context({"svg.hashsalt": "tacit", "font.size": 11, **gray, **ticks}):
        figure, axes = plt.subplots(figsize=(6.4, 3.4))
        for shade, (value, *means) in zip(SHADES, rows, strict=True):
            accuracies = [float(mean) for mean in means]
            axes.plot(REACHES, accuracies, "o-", color=shade, label=f"{WORDS[name]} {value}")
        axes.set(xscale="log", xlabel="learning rate x clip norm", ylabel="test accuracy, %")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.tight_layout()
        path = FIGURES / f"choosing-{name}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
