"""Accuracy against epsilon for the shipped recipes: several seeds each, resumable.

    python benchmarks/accuracy.py [--only mnist,digits] [--seeds 5] [--jobs 2]

Every run is an ordinary run folder under runs/accuracy, so a second call trains only what is
missing. Hyperparameters are those of the recipes, fixed beforehand; noise is calibrated by PLD;
lots are really drawn by Poisson sampling. Writes results/accuracy.md, .csv and .png.
"""

import argparse
import csv
import os
import statistics
from pathlib import Path
from typing import Any

from _results import RESULTS, table, write

from tacit.experiments import SWEEP, Recipe, Sweep, sweep

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("TACIT_DATA", HERE.parents[1] / "shared" / "data"))
RUNS = HERE.parent / "runs" / "accuracy"

GRID: dict[str, tuple[float, ...]] = {
    "digits": (0.5, 1, 3, 8),
    "mnist": (0.5, 1, 3),
    "fashion-mnist": (1, 3),
    "paper-2016": (0.5, 2, 8),
    "pums-logistic": (0.1, 0.3, 1, 3),
    "pums-mlp": (0.1, 0.3, 1, 3),
    "kdd-income": (0.1, 0.3, 1, 3),
}
PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (  # title, metric, {recipe: label}
    ("MNIST", "accuracy", {"mnist": "scattering, linear"}),
    ("MNIST as in 2016", "accuracy", {"paper-2016": "PCA-60, 1,000 ReLUs"}),
    ("Fashion-MNIST", "accuracy", {"fashion-mnist": "scattering, linear"}),
    ("digits", "accuracy", {"digits": "scattering, linear"}),
    ("employment, census", "accuracy", {"pums-logistic": "logistic", "pums-mlp": "MLP"}),
    ("employment, census", "auc", {"pums-logistic": "logistic", "pums-mlp": "MLP"}),
    ("income, census", "auc", {"kdd-income": "logistic"}),
)


def main() -> None:
    """Run what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(GRID), help="recipes, with commas")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    for name in filter(None, options.only.split(",")):
        recipe = Recipe.read(name).with_settings({"run.seed": 0})
        sweep(
            recipe,
            RUNS / name,
            epsilons=GRID[name],
            repeats=options.seeds,
            jobs=options.jobs,
            root=DATA,
            on_run=lambda facts, name=name: print(
                f"{name}: epsilon {facts.epsilon:.4f}, "
                f"accuracy {facts.utility.private[0].value:.4f}, {facts.seconds:.0f} s",
                flush=True,
            ),
        )
    found = {name: Sweep.read(RUNS / name) for name in GRID if (RUNS / name / SWEEP).is_file()}
    _write_csv(found)
    _draw(found)
    write(
        "accuracy",
        "Accuracy against epsilon",
        ("torch", "numpy", "scipy"),
        _NOTES,
        table(
            (
                "recipe", "epsilon", "delta", "seeds", "accuracy, mean ± sd", "lowest", "AUC",
                "without privacy", "commonest class", "published",
            ),
            [row for name, result in found.items() for row in _rows(name, result)],
        ),
    )  # fmt: skip


_NOTES = """Mean and standard deviation over seeds on the test split; epsilon is the upper end
of the PLD bracket of everything that looked at the training records (features that are learned
included), at the delta shown, records added or removed, lots drawn by Poisson sampling. The twin
without privacy has the same model and features, Adam, one seed. Published figures are quoted from
the papers' own accounting. Hyperparameters are in `tacit/experiments/recipes`; they were chosen on
parts of the training records. The seeds make the noise reproducible, which
is for benchmarks only."""


def _rows(name: str, result: Sweep) -> list[tuple[object, ...]]:
    twin = result.baseline or {}
    rows = []
    for summary in result.summaries:
        cells = [c for c in result.cells if c.epsilon == summary.epsilon]
        spread = "" if summary.spread is None else f" ± {100 * summary.spread:.2f}"
        auc = "" if summary.auc is None else f"{summary.auc:.4f} (twin {twin.get('auc', 0):.4f})"
        rows.append(
            (
                name,
                f"{max(c.spent for c in cells):.4f}",
                f"{summary.delta:g}",
                summary.runs,
                f"{100 * summary.accuracy:.2f}{spread}",
                f"{100 * min(c.accuracy for c in cells):.2f}",
                auc,
                f"{100 * twin['accuracy']:.2f}" if twin else "",
                f"{100 * (result.majority or 0):.2f}",
                _published(result, summary.epsilon),
            )
        )
    return rows


def _published(result: Sweep, epsilon: float) -> str:
    points = [point for point in result.published if point.epsilon == epsilon]
    return ", ".join(f"{100 * p.accuracy:.4g} ({p.source})" for p in points)


def _draw(found: dict[str, Sweep]) -> None:
    """results/accuracy.png: a panel for each task."""
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if any(name in found for name in panel[2])]
    rows = -(-len(panels) // 4)
    figure = Figure(figsize=(14, 3.2 * rows), layout="constrained")
    grid = figure.subplots(rows, 4, squeeze=False).ravel()
    for axes, (title, metric, recipes) in zip(grid, panels, strict=False):
        for name, color in zip(recipes, ("#0b6e6a", "#5b4bc4"), strict=False):
            if name in found:
                _lines(axes, found[name], metric, recipes[name], color)
        axes.set(xscale="log", xlabel="epsilon", title=title)
        axes.set_ylabel("AUC" if metric == "auc" else "accuracy, %")
        epsilons = sorted({c.epsilon for n in recipes if n in found for c in found[n].cells})
        axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        shown = dict(zip(labels, handles, strict=True))  # each label once
        axes.legend(shown.values(), shown.keys(), fontsize=7.5, loc="lower right")
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(RESULTS / "accuracy.png", dpi=110)


def _lines(axes: Any, sweep: Sweep, metric: str, label: str, color: str) -> None:  # Any: an Axes
    scale = 1 if metric == "auc" else 100
    epsilons = sorted({cell.epsilon for cell in sweep.cells})
    groups = [[scale * getattr(c, metric) for c in sweep.cells if c.epsilon == e] for e in epsilons]
    means = [statistics.fmean(group) for group in groups]
    spreads = [statistics.stdev(group) if len(group) > 1 else 0.0 for group in groups]
    axes.errorbar(epsilons, means, spreads, color=color, marker="o", capsize=3, label=label)
    if sweep.baseline is not None:
        twin = scale * sweep.baseline[metric]
        axes.axhline(twin, color=color, ls="--", lw=1, label=f"{label}, without privacy")
    if metric == "auc":
        return
    if sweep.majority and min(means) - 100 * sweep.majority < 30:
        axes.axhline(100 * sweep.majority, color="#8a8f98", ls=":", label="commonest class")
    for source in dict.fromkeys(point.source for point in sweep.published):
        points = [(p.epsilon, 100 * p.accuracy) for p in sweep.published if p.source == source]
        marker = {"Abadi et al. 2016": "s", "Tramèr & Boneh 2021": "^"}.get(source, "v")
        axes.plot(*zip(*points, strict=True), marker, color="#b45309", label=source)


def _write_csv(found: dict[str, Sweep]) -> None:
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "accuracy.csv").open("w", newline="", encoding="utf-8") as stream:
        out = csv.writer(stream)
        out.writerow(
            ["recipe", "epsilon_asked", "epsilon", "delta", "seed", "accuracy", "loss", "auc",
             "steps", "seconds", "accuracy_without_privacy", "accuracy_commonest_class"]
        )  # fmt: skip
        for name, result in found.items():
            twin = (result.baseline or {}).get("accuracy")
            for c in result.cells:
                out.writerow(
                    [name, c.epsilon, c.spent, c.delta, c.seed, c.accuracy, c.loss, c.auc, c.steps,
                     c.seconds, twin, result.majority]
                )  # fmt: skip


if __name__ == "__main__":
    main()
