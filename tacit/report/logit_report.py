"""From a study of a logit model to its figures and page."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
from scipy.special import expit

from tacit.experiments import Ascent, LogitStudy, RunFolder
from tacit.report.figures import Figure, Role, Series, Surface, files
from tacit.report.page import Number, Page, render
from tacit.report.run_report import FIGURES, REPORT

STUDY = "study.json"
_ROLES = (Role.PUBLISHED, Role.PRIVATE, Role.OTHER, Role.FOURTH)
_CONTOURS = 14


def write_logit_report(study: LogitStudy, folder: str | Path) -> Path:
    """study.json, figures (CSV) and report.html; the page's path."""
    run, figures = RunFolder(folder), logit_figures(study)
    run.write(STUDY, json.dumps(study.to_dict(), indent=2, allow_nan=False) + "\n")
    for figure in figures:
        for name, content in files(figure):
            run.write(f"{FIGURES}/{name}", content)
    return run.write(REPORT, render(_page(study, figures)))


def logit_figures(study: LogitStudy) -> tuple[Figure, Figure, Figure]:
    """The surface with its paths, the fitted curve, and the loss at each budget."""
    return _surface(study), _curve(study), _losses(study)


def _shown(study: LogitStudy) -> list[Ascent]:
    """The first run at each of at most four budgets, the least first."""
    first = {run.epsilon: run for run in reversed(study.private)}
    epsilons = sorted(first)
    step = max(1, math.ceil(len(epsilons) / len(_ROLES)))
    return [first[epsilon] for epsilon in epsilons[::step]]


def _surface(study: LogitStudy) -> Figure:
    heights = np.asarray(study.surface)
    top, bottom = heights.max(), heights.min()
    # Levels crowd at the top, where the paths end.
    drops = (top - bottom) * (np.arange(_CONTOURS, 0, -1) / (_CONTOURS + 1)) ** 3
    paths = [
        _path(f"epsilon {run.epsilon:g}", run.points, role)
        for run, role in zip(_shown(study), _ROLES, strict=False)
    ]
    return Figure(
        name="likelihood-surface",
        title="The way up the log-likelihood",
        caption=(
            "Contours of the mean log-likelihood. DP-SGD climbs by noisy steps, and with less "
            "noise ends nearer to the top, which Newton's method finds without privacy."
        ),
        x_label=f"log-odds at {study.attribute} {study.middle:g}",
        y_label=f"slope of {study.attribute}",
        series=(*paths, _path("without privacy (Newton)", study.ordinary, Role.BASELINE)),
        surface=Surface(
            name="mean log-likelihood",
            x=study.log_odds,
            y=study.slopes,
            z=study.surface,
            levels=tuple((top - drops).tolist()),
        ),
    )


def _path(name: str, points: tuple[tuple[float, float], ...], role: Role) -> Series:
    x, y = zip(*points, strict=True)
    return Series(name=name, x=x, y=y, role=role)


def _curve(study: LogitStudy) -> Figure:
    values = [value for value, _, _ in study.levels]
    x = np.linspace(min(values), max(values), 60)

    def fitted(name: str, point: tuple[float, float], role: Role) -> Series:
        p = expit(point[0] + point[1] * (x - study.middle))
        return Series(name=name, x=tuple(x), y=tuple(p), role=role)

    private = [
        fitted(f"epsilon {run.epsilon:g}", run.points[-1], role)
        for run, role in zip(_shown(study), _ROLES, strict=False)
    ]
    shares = Series(
        name="share in the data",
        x=tuple(values),
        y=tuple(share for _, share, _ in study.levels),
        role=Role.BASELINE,
        is_line=False,
    )
    return Figure(
        name=f"{study.target}-by-{study.attribute}",
        title=f"P({study.target}) by {study.attribute}",
        caption="Curves that the released parameters give, and the shares that they describe.",
        x_label=study.attribute,
        y_label=f"P({study.target})",
        y_percent=True,
        series=(
            shares,
            *private,
            fitted("without privacy", study.ordinary[-1], Role.BASELINE),
        ),
    )


def _losses(study: LogitStudy) -> Figure:
    epsilons = sorted({run.epsilon for run in study.private})
    groups = [[run.loss for run in study.private if run.epsilon == e] for e in epsilons]
    means = [statistics.fmean(group) for group in groups]
    return Figure(
        name="loss-by-epsilon",
        title="What privacy costs in loss",
        caption=f"Mean of {len(groups[0])} runs at each budget; bands are from least to most.",
        x_label="epsilon",
        y_label="mean loss",
        x_log=True,
        series=(
            Series(
                name=f"private, delta {study.delta:g}",
                x=tuple(epsilons),
                y=tuple(means),
                low=tuple(min(group) for group in groups),
                high=tuple(max(group) for group in groups),
            ),
            Series(
                name="without privacy",
                x=(epsilons[0], epsilons[-1]),
                y=(study.loss, study.loss),
                role=Role.BASELINE,
            ),
        ),
    )


def _page(study: LogitStudy, figures: tuple[Figure, ...]) -> Page:
    best = max(study.private, key=lambda run: run.epsilon)
    log_odds, slope = study.ordinary[-1]
    return Page(
        title=f"P({study.target}) by {study.attribute}, with and without privacy",
        lead=(
            f"A logit model of {study.n_records:,} records, trained by DP-SGD at several budgets. "
            "Surface and shares show all records: the data are public."
        ),
        numbers=(
            Number("slope", f"{slope:.4f}", f"without privacy; log-odds {log_odds:.3f}"),
            Number("private slope", f"{best.points[-1][1]:.4f}", f"at epsilon {best.epsilon:g}"),
            Number("loss", f"{study.loss:.5f}", "without privacy"),
            Number("private loss", f"{best.loss:.5f}", f"at epsilon {best.epsilon:g}"),
        ),
        figures=figures,
        footer="Written by tacit; the numbers are in study.json and figures/.",
    )
