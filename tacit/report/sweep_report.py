"""From a finished sweep to its figures and page: what accuracy costs, budget by budget."""

from itertools import cycle
from pathlib import Path

from tacit.experiments import RunFolder, Summary, Sweep
from tacit.report.figures import Figure, Role, Series, files
from tacit.report.page import Number, Page, Section, render
from tacit.report.run_report import FIGURES, REPORT

_ROLES = (Role.PRIVATE, Role.OTHER, Role.FOURTH, Role.BOUND)  # one for each delta
_IN_SIGHT = 0.3  # a flat line farther below than this would press the others together


def write_sweep_report(folder: str | Path) -> Path:
    """Figures (CSV) and report.html of a finished sweep; the page's path."""
    run, sweep = RunFolder(folder), Sweep.read(folder)
    figures = sweep_figures(sweep)
    for figure in figures:
        for name, content in files(figure):
            run.write(f"{FIGURES}/{name}", content)
    return run.write(REPORT, render(_page(sweep, figures)))


def sweep_figures(sweep: Sweep) -> tuple[Figure, ...]:
    """Accuracy, and where there are any AUC and loss, against epsilon, a line for each delta."""
    figures = [_by_epsilon(sweep, "accuracy", "Accuracy on records not trained on")]
    if all(cell.auc is not None for cell in sweep.cells):
        figures.append(_by_epsilon(sweep, "auc", "Area under the ROC curve"))
    if all(cell.loss is not None for cell in sweep.cells):
        figures.append(_by_epsilon(sweep, "loss", "Loss on records not trained on"))
    return tuple(figures)


def _by_epsilon(sweep: Sweep, metric: str, title: str) -> Figure:
    deltas = sorted({cell.delta for cell in sweep.cells})
    series = [_private(sweep, metric, delta, role) for delta, role in zip(deltas, cycle(_ROLES))]
    ends = min(min(s.x) for s in series), max(max(s.x) for s in series)
    if sweep.baseline is not None and metric in sweep.baseline:
        series.append(_flat("without privacy", sweep.baseline[metric], ends, Role.BASELINE))
    lowest = min(min(s.y) for s in series)
    if metric == "accuracy" and sweep.majority and lowest - sweep.majority < _IN_SIGHT:
        series.append(_flat("commonest class", sweep.majority, ends, Role.BOUND))
    if metric == "accuracy" and sweep.published:
        points = sorted((p.epsilon, p.accuracy) for p in sweep.published)
        x, y = zip(*points, strict=True)
        name = " and ".join(dict.fromkeys(p.source for p in sweep.published))
        series.append(Series(name=name, x=x, y=y, role=Role.PUBLISHED, is_line=False))
    repeats = max(summary.runs for summary in sweep.summaries)
    spread = f"Mean of {repeats} runs; bands are one standard deviation." if repeats > 1 else ""
    return Figure(
        name=f"{metric}-by-epsilon",
        title=title,
        caption=spread or "One run for each budget.",
        x_label="epsilon",
        y_label="AUC" if metric == "auc" else metric,
        x_log=True,
        y_percent=metric == "accuracy",
        series=tuple(series),
    )


def _private(sweep: Sweep, metric: str, delta: float, role: Role) -> Series:
    epsilons = sorted({cell.epsilon for cell in sweep.cells if cell.delta == delta})
    means, lows, highs = [], [], []
    for epsilon in epsilons:
        values = [
            getattr(cell, metric)
            for cell in sweep.cells
            if (cell.epsilon, cell.delta) == (epsilon, delta)
        ]
        mean = sum(values) / len(values)
        squares = sum((value - mean) ** 2 for value in values)
        spread = (squares / (len(values) - 1)) ** 0.5 if len(values) > 1 else 0.0
        means.append(mean)
        lows.append(mean - spread)
        highs.append(mean + spread)
    has_band = any(high > low for low, high in zip(lows, highs, strict=True))
    return Series(
        name=f"private, delta {delta:g}",
        x=tuple(epsilons),
        y=tuple(means),
        low=tuple(lows) if has_band else (),
        high=tuple(highs) if has_band else (),
        role=role,
    )


def _flat(name: str, value: float, ends: tuple[float, float], role: Role) -> Series:
    return Series(name=name, x=ends, y=(value, value), role=role)


def _page(sweep: Sweep, figures: tuple[Figure, ...]) -> Page:
    best = max(sweep.summaries, key=lambda summary: summary.accuracy)
    numbers = [
        Number("best accuracy", f"{100 * best.accuracy:.2f} %", f"at epsilon {best.epsilon:g}"),
        Number("runs", str(len(sweep.cells)), "each with a bill of its own"),
        Number("all of them", f"{sweep.epsilon_of_all:.3f}", "epsilon of releasing every run"),
    ]
    if sweep.baseline is not None:
        value = f"{100 * sweep.baseline['accuracy']:.2f} %"
        numbers.append(Number("without privacy", value, "the same model and features"))
    rows = [
        (f"epsilon {row.epsilon:g}, delta {row.delta:g}", _outcome(row)) for row in sweep.summaries
    ]
    return Page(
        title=f"{sweep.name}: what accuracy costs",
        lead="The same recipe at several budgets, its settings fixed before any run.",
        numbers=tuple(numbers),
        figures=figures,
        sections=(
            Section(
                name="runs",
                title="Budget by budget",
                text=(
                    "Each bill holds if that run alone is released. Who publishes all of them "
                    f"pays epsilon {sweep.epsilon_of_all:.3f}."
                ),
                rows=tuple(rows),
            ),
        ),
        footer="Written by tacit; the numbers are in sweep.json and figures/.",
    )


def _outcome(row: Summary) -> str:
    said = f"accuracy {100 * row.accuracy:.2f} %"
    said += "" if row.spread is None else f" ± {100 * row.spread:.2f} over {row.runs} runs"
    return said + ("" if row.auc is None else f", AUC {row.auc:.4f}")
