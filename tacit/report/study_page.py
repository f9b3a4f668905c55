"""Pages of studies and PATE sweeps: curves over repeated fits, and the price of releasing them."""

import json
import statistics
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from tacit.experiments import ErrorCurve, Point, RunFolder, Study
from tacit.report.figures import Figure, Role, Series, repeats_in_words
from tacit.report.page import Number, Page, Section
from tacit.report.reports import DEVIATION, STUDY, write_report

_WIDE = 100.0  # ratio of errors from which the axis is logarithmic
_ROLES = (Role.PRIVATE, Role.OTHER, Role.FOURTH, Role.PUBLISHED)


def write_study(study: Study, folder: str | Path) -> Path:
    """Write study.json, study.csv, the figure and report.html, and return the page's path."""
    run = RunFolder(folder)
    run.write(STUDY, json.dumps(study.to_dict(), indent=2, allow_nan=False) + "\n")
    rows = [
        (curve.name, x, repeat, error)
        for curve in study.curves
        for x, errors in zip(curve.x, curve.errors, strict=True)
        for repeat, error in enumerate(errors)
    ]
    run.write_table("study.csv", ("curve", study.x_label, "repeat", study.y_label), rows)
    figure = study_figure(study)
    return write_report(run, (figure,), _page(study, figure))


def write_pate_sweep(setting: str, points: Sequence[Point], folder: str | Path) -> Path:
    """Write figures and page of a PATE sweep: accuracy and epsilon against the varied setting."""
    values = sorted({point.value for point in points})
    repeats = sum(point.value == values[0] for point in points)

    def figure(metric: str, title: str) -> Figure:
        found = [tuple(getattr(p, metric) for p in points if p.value == value) for value in values]
        curve = ErrorCurve(name=metric, x=tuple(values), errors=tuple(found))
        return Figure(
            name=f"{metric}-by-{setting}",
            title=title,
            caption=_repeated(curve.errors, "run", (line := _series(curve, Role.PRIVATE),)),
            x_label=setting,
            y_label=metric,
            y_percent=metric == "accuracy",
            series=(line,),
        )

    accuracy = figure("accuracy", "Accuracy of the student")
    figures = (accuracy, figure("epsilon", "Epsilon of each run, if it alone is released"))
    means, best = accuracy.series[0].y, max(accuracy.series[0].y)
    page = Page(
        title=f"PATE: accuracy against {setting}",
        lead=f"{len(points)} runs. Each bill holds if that run alone is released.",
        numbers=(
            Number(
                "best accuracy", f"{100 * best:.2f} %", f"{setting} {values[means.index(best)]:g}"
            ),
            Number("runs", str(len(points)), f"{repeats} at each value"),
        ),
        figures=figures,
        footer="Written by tacit. The numbers are in sweep.csv and figures/.",
    )
    return write_report(RunFolder(folder), figures, page)


def study_figure(study: Study) -> Figure:
    """Return the figure of a study: means, with bands of one standard deviation over repeats."""
    series = [_series(curve, role) for curve, role in zip(study.curves, cycle(_ROLES))]
    ends = min(min(s.x) for s in series), max(max(s.x) for s in series)
    series += [
        Series(name=name, x=ends, y=(error, error), role=Role.BASELINE)
        for name, error in study.without_privacy.items()
    ]
    means = [y for s in series for y in s.y]
    return Figure(
        name=f"{study.name}-by-{study.x_label.replace(' ', '-')}",
        title=study.title,
        caption=_repeated([e for c in study.curves for e in c.errors], "fit", series),
        x_label=study.x_label,
        y_label=study.y_label,
        x_log=study.x_label == "epsilon" and len(study.curves[0].x) > 1,
        y_log=min(means) > 0 and max(means) > _WIDE * min(means),
        series=tuple(series),
    )


def _repeated(groups: Sequence[Sequence[float]], what: str, series: Sequence[Series]) -> str:
    return repeats_in_words(map(len, groups), what, series, bands=DEVIATION)


def _series(curve: ErrorCurve, role: Role) -> Series:
    means = [statistics.fmean(errors) for errors in curve.errors]
    spreads = [statistics.stdev(errors) if len(errors) > 1 else 0.0 for errors in curve.errors]
    pairs = list(zip(means, spreads, strict=True)) if any(spreads) else []
    low, high = (tuple(m + sign * s for m, s in pairs) for sign in (-1, 1))
    return Series(name=curve.name, x=curve.x, y=tuple(means), low=low, high=high, role=role)


def cost_in_words(study: Study) -> str:
    """Return what a study promises about its records, and what releasing its fits costs."""
    price = f"Releasing all {study.n_fits:,} fitted models costs epsilon {study.epsilon_of_all:.4g}"
    price += f" at delta {study.delta:g}"
    price += ", which the ledger has paid." if study.is_paid else "."
    if study.is_public:
        return f"The records are public, so the errors may be shown. {price}"
    return (
        "The errors were measured on held-out records without noise, so this page is not private: "
        f"do not publish it unless the records are public. {price}"
    )


def _page(study: Study, figure: Figure) -> Page:
    rows = []
    for curve in study.curves:
        for x, errors in zip(curve.x, curve.errors, strict=True):
            spread = f" ± {statistics.stdev(errors):.4g}" if len(errors) > 1 else ""
            text = f"{statistics.fmean(errors):.4g}{spread}"
            rows.append((f"{curve.name}, {study.x_label} {x:g}", text))
    rows += [(name, f"{error:.4g}") for name, error in study.without_privacy.items()]
    best = min(statistics.fmean(errors) for curve in study.curves for errors in curve.errors)
    return Page(
        title=study.title,
        lead=f"{study.n_fits:,} private fits of {study.data}, {study.n_records:,} records.",
        numbers=(
            Number("smallest error", f"{best:.4g}", study.y_label),
            Number("fits", f"{study.n_fits:,}", "each with noise of its own"),
            Number("all of them", f"{study.epsilon_of_all:.4g}", "epsilon of releasing every fit"),
        ),
        warnings=() if study.is_public else (cost_in_words(study),),
        figures=(figure,),
        sections=(
            Section(name="cost", title="What it costs", text=cost_in_words(study)),
            Section(name="errors", title="Point by point", text=study.y_label, rows=tuple(rows)),
        ),
        footer="Written by tacit. The numbers are in study.json, study.csv and figures/.",
    )
