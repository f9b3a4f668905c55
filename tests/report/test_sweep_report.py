"""Figures and page of a sweep, and of a study of a logit model."""

import csv
import json

import pytest

from tacit.experiments import (
    SWEEP,
    Ascent,
    LogitStudy,
    Published,
    Summary,
    Sweep,
    SweepRun,
)
from tacit.report import write_page
from tacit.report.figures import Role
from tacit.report.logit_report import logit_figures, write_logit_report
from tacit.report.sweep_report import sweep_figures


def cell(epsilon, delta, seed, **metrics):
    values = {"accuracy": 0.7 + 0.05 * epsilon + 0.01 * seed, "loss": 0.5, "auc": None} | metrics
    return SweepRun(
        folder="f", epsilon=epsilon, delta=delta, seed=seed, spent=epsilon, steps=9, seconds=1.0,
        **values,
    )  # fmt: skip


@pytest.fixture
def sweep():
    cells = tuple(cell(e, d, s) for d in (1e-6, 1e-5) for e in (1.0, 2.0) for s in (0, 1))
    summaries = tuple(
        Summary(epsilon=e, delta=d, runs=2, accuracy=0.7 + 0.05 * e, spread=0.007, auc=None)
        for d in (1e-6, 1e-5)
        for e in (1.0, 2.0)
    )
    return Sweep(
        name="toy",
        cells=cells,
        summaries=summaries,
        baseline={"accuracy": 0.9, "loss": 0.3},
        majority=0.6,
        epsilon_of_all=5.0,
        published=(Published(epsilon=2.0, accuracy=0.75, source="a paper"),),
    )


def test_accuracy_has_a_line_for_each_delta_and_what_to_compare_with(sweep):
    accuracy, loss = sweep_figures(sweep)
    assert accuracy.name == "accuracy-by-epsilon"
    names = [series.name for series in accuracy.series]
    assert names[:2] == ["private, delta 1e-06", "private, delta 1e-05"]
    assert names[2:] == ["without privacy", "commonest class", "a paper"]
    first = accuracy.series[0]
    assert first.x == (1.0, 2.0)
    assert first.y == pytest.approx((0.755, 0.805))
    assert first.high[0] - first.y[0] == pytest.approx(0.01 / 2**0.5)
    assert accuracy.series[-1].role is Role.PUBLISHED
    assert [series.name for series in loss.series][-1] == "without privacy"


def test_a_far_baseline_does_not_press_the_figure_together(sweep):
    from dataclasses import replace

    accuracy, _ = sweep_figures(replace(sweep, majority=0.1))
    assert "commonest class" not in [series.name for series in accuracy.series]


def test_a_sweep_becomes_a_page_with_its_data(sweep, tmp_path):
    (tmp_path / SWEEP).write_text(json.dumps(sweep.to_dict()))
    assert Sweep.read(tmp_path) == sweep
    text = write_page(tmp_path).read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert "pays epsilon 5.000" in text
    table = (tmp_path / "figures/accuracy-by-epsilon.csv").read_text()
    rows = list(csv.reader(table.splitlines()))
    assert len(rows) == 1 + 4 + 2 + 2 + 1


@pytest.fixture
def study():
    axis = (-1.0, 0.0, 1.0, 2.0)
    return LogitStudy(
        attribute="educ",
        target="married",
        delta=1e-6,
        n_records=100,
        middle=5.0,
        ordinary=((0.0, 0.0), (0.5, 0.3)),
        private=tuple(
            Ascent(epsilon=e, points=((0.0, 0.0), (0.4, 0.2)), loss=0.6 + 0.01 * k)
            for e in (0.1, 1.0, 2.0, 3.0, 4.0)
            for k in range(2)
        ),
        loss=0.55,
        log_odds=axis,
        slopes=axis,
        surface=tuple(tuple(-((x - 0.5) ** 2) - (y - 0.3) ** 2 for x in axis) for y in axis),
        levels=((0.0, 0.2, 40), (10.0, 0.8, 60)),
    )


def test_a_study_is_drawn_as_surface_curve_and_loss(study, tmp_path):
    surface, curve, loss = logit_figures(study)
    assert [s.name for s in surface.series] == [
        "epsilon 0.1", "epsilon 2", "epsilon 4", "without privacy (Newton)",
    ]  # fmt: skip
    assert surface.surface is not None
    assert list(surface.surface.levels) == sorted(surface.surface.levels)
    assert curve.series[0].y == (0.2, 0.8)
    assert curve.series[-1].y[0] == pytest.approx(1 / (1 + 2.718281828 ** (0.3 * 5 - 0.5)))
    assert loss.series[0].low[0] == 0.6
    write_logit_report(study, tmp_path)
    assert len((tmp_path / "figures/likelihood-surface-surface.csv").read_text().splitlines()) == 17
    assert json.loads((tmp_path / "study.json").read_text())["loss"] == 0.55
