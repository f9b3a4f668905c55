"""Figures and page of a run, of a sweep, of an audit, and of a study of a logit model."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from tacit.auditing import best_tpr
from tacit.experiments import SWEEP, Ascent, LogitStudy, Sweep
from tacit.report import write_logit_report, write_page
from tacit.report.figures import Role
from tacit.report.logit_page import logit_figures
from tacit.report.reports import attack_figure, page_of, sweep_figures


def test_a_seed_is_a_warning(run):
    facts = replace(run.facts(), seed=3)
    certificate = {"claim": {"epsilon": 1.0}, "prices": []}
    page = page_of(facts, certificate, ())
    assert any("seed" in warning for warning in page.warnings)


def cell(epsilon, delta, seed):
    accuracy = 0.7 + 0.05 * epsilon + 0.01 * seed
    values = {"accuracy": accuracy, "loss": 0.5, "auc": None, "spent": epsilon}
    about = {"folder": "f", "steps": 9, "seconds": 1.0}
    return {"epsilon": epsilon, "delta": delta, "seed": seed, **values, **about}


@pytest.fixture
def folder(tmp_path):
    grid = [(e, d) for d in (1e-6, 1e-5) for e in (1.0, 2.0)]
    repeated = {"runs": 2, "spread": 0.007, "auc": None}
    sweep = {
        "name": "toy",
        "cells": [cell(e, d, s) for e, d in grid for s in (0, 1)],
        "summaries": [
            {"epsilon": e, "delta": d, "accuracy": 0.7 + 0.05 * e, **repeated} for e, d in grid
        ],
        "baseline": {"accuracy": 0.9, "loss": 0.3},
        "majority": 0.6,
        "epsilon_of_all": 5.0,
        "published": [{"epsilon": 2.0, "accuracy": 0.75, "source": "a paper"}],
    }
    (tmp_path / SWEEP).write_text(json.dumps(sweep))
    return tmp_path


@pytest.fixture
def sweep(folder):
    return Sweep.read(folder)


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
    accuracy, _ = sweep_figures(replace(sweep, majority=0.1))
    assert "commonest class" not in [series.name for series in accuracy.series]


def test_a_sweep_becomes_a_page_with_its_data(sweep, folder):
    (folder / SWEEP).write_text(json.dumps(sweep.to_dict()))
    assert Sweep.read(folder) == sweep
    text = write_page(folder).read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert "pays epsilon 5.000" in text
    table = (folder / "figures/accuracy-by-epsilon.csv").read_text()
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


@pytest.fixture
def audited(run):
    """A run with the data that an audit leaves behind."""
    fpr = np.linspace(0, 1, 2001)
    curves = {"without privacy": fpr**0.2, "any attack; epsilon 1": best_tpr(fpr, epsilon=1.0)}
    points = [
        f"{name},{x},{y}" for name, tpr in curves.items() for x, y in zip(fpr, tpr, strict=True)
    ]
    run.write("figures/membership.csv", "\n".join(["curve,fpr,tpr", *points]))
    pixels = [
        f"{row},{k},{i},{i / 9}"
        for row in ("the record", "epsilon 1")
        for k in range(2)
        for i in range(9)
    ]
    run.write("figures/inversion.csv", "\n".join(["row,image,pixel,value", *pixels]))
    shown = {"figures/membership.png": "Told apart.", "figures/inversion.png": "Given back."}
    audit = {"demonstrations": {"figures": shown}, "model_sha256": run.facts().model_sha256}
    run.write("audit.json", json.dumps(audit))
    return run


def test_attacks_are_drawn_like_every_other_figure(audited):
    text = write_page(audited.path).read_text(encoding="utf-8")
    assert text.count("<svg") == 5
    assert "data:image/png" not in text
    assert "any attack, epsilon 1" in text
    assert (audited / "figures/membership.svg").is_file()
    assert (audited / "figures/membership.csv").read_text().startswith("curve,fpr,tpr")


def test_a_drawn_roc_curve_states_the_best_rate_at_each_false_positive_rate(audited):
    figure = attack_figure(audited / "figures/membership.csv", "")
    assert figure is not None
    curve, bound, chance = figure.series
    assert (curve.name, bound.role, chance.name) == ("without privacy", Role.BOUND, "chance")
    assert curve.x == bound.x == chance.x
    assert (np.array(curve.y) <= np.array(curve.x) ** 0.2 + 1e-12).all()
    assert curve.y[-1] == 1.0
    assert bound.y == pytest.approx(best_tpr(bound.x, epsilon=1.0), rel=1e-3)


def test_pictures_get_their_rows_back(audited):
    figure = attack_figure(audited / "figures/inversion.csv", "")
    assert figure is not None
    assert [row.name for row in figure.pictures] == ["the record", "epsilon 1"]
    assert figure.pictures[0].pictures.shape == (2, 3, 3)
    assert attack_figure(audited / "figures/absent.csv", "") is None
