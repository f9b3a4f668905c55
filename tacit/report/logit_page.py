"""Page of a study of a logit model: the likelihood surface with paths, the curve, and the loss."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
from scipy.special import expit

from tacit.experiments import Ascent, LogitStudy, RunFolder
from tacit.report.figures import Figure, Role, Series, Surface, repeats_in_words
from tacit.report.page import Number, Page
from tacit.report.reports import STUDY, flat_line, write_report

_PATH_ROLES = (Role.PUBLISHED, Role.PRIVATE, Role.OTHER, Role.FOURTH)  # one for each epsilon
_CONTOURS = 14


def write_logit_report(study: LogitStudy, folder: str | Path) -> Path:
    """Write study.json, the figures and report.html, and return the page's path."""
    run, figures = RunFolder(folder), logit_figures(study)
    run.write(STUDY, json.dumps(study.to_dict(), indent=2, allow_nan=False) + "\n")
    return write_report(run, figures, _logit_page(study, figures))


def logit_figures(study: LogitStudy) -> tuple[Figure, Figure, Figure]:
    """Return figures of the surface with training paths, the fitted curve, and loss by epsilon."""
    return _surface(study), _curve(study), _losses(study)


def _shown(study: LogitStudy) -> list[tuple[Ascent, Role]]:
    """Return the runs to draw: the first run at each of at most four epsilons, smallest first."""
    first = {run.epsilon: run for run in reversed(study.private)}
    epsilons = sorted(first)
    step = max(1, math.ceil(len(epsilons) / len(_PATH_ROLES)))
    return list(zip([first[e] for e in epsilons[::step]], _PATH_ROLES, strict=False))


def _surface(study: LogitStudy) -> Figure:
    heights = np.asarray(study.surface)
    top, bottom = heights.max(), heights.min()
    # Levels are dense near the maximum, where the paths end.
    drops = (top - bottom) * (np.arange(_CONTOURS, 0, -1) / (_CONTOURS + 1)) ** 3
    paths = [Series.of(f"epsilon {run.epsilon:g}", run.points, r) for run, r in _shown(study)]
    return Figure(
        name="likelihood-surface",
        title="Paths up the log-likelihood",
        caption=(
            "Contour lines of the mean log-likelihood. DP-SGD climbs by noisy steps"
            + (", and with less noise it ends closer to the maximum. " if len(paths) > 1 else ". ")
            + "Newton's method finds the maximum without privacy."
        ),
        x_label=f"log-odds at {study.attribute} {study.middle:g}",
        y_label=f"slope of {study.attribute}",
        series=(*paths, Series.of("without privacy (Newton)", study.ordinary, Role.BASELINE)),
        surface=Surface(
            name="mean log-likelihood",
            x=study.log_odds,
            y=study.slopes,
            z=study.surface,
            levels=tuple((top - drops).tolist()),
        ),
    )


def _curve(study: LogitStudy) -> Figure:
    values = tuple(value for value, _, _ in study.levels)
    shares = tuple(share for _, share, _ in study.levels)
    x = np.linspace(min(values), max(values), 60)

    def fitted(name: str, point: tuple[float, float], role: Role) -> Series:
        p = expit(point[0] + point[1] * (x - study.middle))
        return Series(name=name, x=tuple(x), y=tuple(p), role=role)

    return Figure(
        name=f"{study.target}-by-{study.attribute}",
        title=f"P({study.target}) by {study.attribute}",
        caption="Points are shares in the data. The curve at each epsilon follows from released "
        "parameters, the dashed one is fitted without privacy.",
        x_label=study.attribute,
        y_label=f"P({study.target})",
        y_percent=True,
        series=(
            Series(name="share in the data", x=values, y=shares, role=Role.BASELINE, is_line=False),
            *(fitted(f"epsilon {run.epsilon:g}", run.points[-1], r) for run, r in _shown(study)),
            fitted("without privacy", study.ordinary[-1], Role.BASELINE),
        ),
    )


def _losses(study: LogitStudy) -> Figure:
    epsilons = sorted({run.epsilon for run in study.private})
    groups = [[run.loss for run in study.private if run.epsilon == e] for e in epsilons]
    has_bands = max(map(len, groups)) > 1
    private = Series(
        name=f"private, delta {study.delta:g}",
        x=tuple(epsilons),
        y=tuple(statistics.fmean(group) for group in groups),
        low=tuple(min(group) for group in groups if has_bands),
        high=tuple(max(group) for group in groups if has_bands),
    )
    ends = epsilons[0], epsilons[-1]
    return Figure(
        name="loss-by-epsilon",
        title="What privacy costs in loss",
        caption=repeats_in_words(
            map(len, groups), "run", (private,), bands="reach from the smallest loss to the largest"
        ),
        x_label="epsilon",
        y_label="mean loss",
        x_log=True,
        series=(private, flat_line("without privacy", study.loss, ends, Role.BASELINE)),
    )


def _logit_page(study: LogitStudy, figures: tuple[Figure, ...]) -> Page:
    best = max(study.private, key=lambda run: run.epsilon)
    log_odds, slope = study.ordinary[-1]
    return Page(
        title=f"P({study.target}) by {study.attribute}, with and without privacy",
        lead=(
            f"A logit model of {study.n_records:,} records, trained by DP-SGD at several budgets. "
            "The surface and the shares are computed from all records without noise, because the "
            "data are public."
        ),
        numbers=(
            Number("slope", f"{slope:.4f}", f"without privacy; log-odds {log_odds:.3f}"),
            Number("private slope", f"{best.points[-1][1]:.4f}", f"at epsilon {best.epsilon:g}"),
            Number("loss", f"{study.loss:.5f}", "without privacy"),
            Number("private loss", f"{best.loss:.5f}", f"at epsilon {best.epsilon:g}"),
        ),
        figures=figures,
        footer="Written by tacit. The numbers are in study.json and figures/.",
    )
