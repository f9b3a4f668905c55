"""Captions say what is drawn, on every kind of page."""

from dataclasses import replace

import pytest

from tacit.experiments import Ascent, ErrorCurve, LogitStudy, Point, Study, Sweep
from tacit.report.comparison_page import Compared, comparison_figures
from tacit.report.figures import Figure, Series, Surface, not_drawn, repeats_in_words
from tacit.report.logit_page import logit_figures
from tacit.report.reports import run_figures, sweep_figures
from tacit.report.study_page import study_figure, write_pate_sweep
from tacit.report.transfer_figures import transfer_figures

LINE = Series(name="private", x=(1, 2), y=(1, 2))
BAND = replace(LINE, low=(0, 1), high=(2, 3))


@pytest.mark.parametrize(
    ("caption", "shown"),
    [
        ("A model trained without privacy ends at 97 %.", {"series": (LINE,)}),
        ("Means; bands are one standard deviation.", {"series": (LINE,)}),
        ("Whiskers are intervals.", {"series": (BAND,)}),
        ("Contour lines of the likelihood.", {"series": (LINE,)}),
        ("Points are shares.", {"series": (LINE,)}),
    ],
)
def test_a_caption_about_what_is_not_drawn_is_refused(caption, shown):
    with pytest.raises(ValueError, match="it is not drawn"):
        Figure(name="f", title="", caption=caption, **shown)


@pytest.mark.parametrize(
    ("caption", "shown"),
    [
        (
            "A model trained without privacy ends at 97 %.",
            {"series": (LINE, replace(LINE, name="without privacy (Newton)"))},
        ),
        ("Means; bands are one standard deviation.", {"series": (BAND,)}),
        ("Whiskers are intervals.", {"series": (replace(BAND, is_line=False),)}),
        (
            "Contour lines of the likelihood.",
            {"surface": Surface(name="z", x=(0, 1), y=(0, 1), z=((0, 1), (1, 2)), levels=(1,))},
        ),
        ("Points are shares.", {"series": (replace(LINE, is_line=False),)}),
    ],
)
def test_a_caption_about_what_is_drawn_stands(caption, shown):
    assert Figure(name="f", title="", caption=caption, **shown).caption == caption


@pytest.mark.parametrize(
    ("counts", "series", "words"),
    [
        ([1, 1], (LINE,), "One run at each place."),
        ([3, 3], (BAND,), "Each value is the mean of 3 runs; bands are wide."),
        ([1, 3], (BAND,), "Each value is the mean of 1 to 3 runs; bands are wide."),
        ([3, 3], (LINE,), "Each value is the mean of 3 runs."),
    ],
)
def test_repeats_are_stated_as_they_were_made(counts, series, words):
    assert repeats_in_words(counts, "run", series, bands="are wide") == words


def test_a_run_without_a_twin_has_no_caption_about_one(run):
    facts = run.facts()
    both, alone = (
        run_figures(facts, run)[0],
        run_figures(replace(facts, baseline_file=None), run)[0],
    )
    assert "without privacy" in both.caption
    assert [s.name for s in both.series] == ["private", "without privacy"]
    assert alone.caption == "The private model after each epoch."
    assert [s.name for s in alone.series] == ["private"]


def test_a_twin_that_was_measured_later_is_neither_drawn_nor_mentioned(run):
    run.write_lines("baseline.jsonl", [{"step": 900, "epoch": 18.0, "accuracy": 0.97}])
    (figure, *_) = run_figures(run.facts(), run)
    assert "without privacy" not in figure.caption
    assert len(figure.series) == 1


def test_a_paid_loss_is_drawn_with_the_noise_that_it_has(run):
    rows = [
        {
            "step": k,
            "epoch": k,
            "epsilon": 0.1 * k,
            "training_loss": 2.0 / k,
            "training_loss_std": 0.1,
        }
        for k in (1, 2, 3)
    ]
    run.write_lines("metrics.jsonl", rows)
    (figure, _) = run_figures(run.facts(), run)
    assert figure.name == "training_loss-by-epoch"
    assert figure.series[0].high == pytest.approx((2.1, 1.1, 2 / 3 + 0.1))
    assert "bands are one standard deviation of its noise" in figure.caption


def cells(*groups):
    about = {"loss": None, "auc": None, "spent": 1.0, "folder": "f", "steps": 9, "seconds": 1.0}
    return [
        {"epsilon": e, "delta": 1e-5, "seed": s, "accuracy": 0.7 + 0.01 * s, **about}
        for e, repeats in groups
        for s in range(repeats)
    ]


def sweep_of(tmp_path, *groups):
    import json

    summaries = [
        {"epsilon": e, "delta": 1e-5, "accuracy": 0.7, "runs": n, "spread": None, "auc": None}
        for e, n in groups
    ]
    content = {"name": "toy", "cells": cells(*groups), "summaries": summaries, "baseline": None}
    content |= {"majority": None, "epsilon_of_all": 2.0, "published": []}
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    return Sweep.read(tmp_path)


def test_a_sweep_states_the_repeats_that_it_has(tmp_path):
    one, several, uneven = (
        sweep_figures(sweep_of(tmp_path, *groups))[0].caption
        for groups in (((1.0, 1), (2.0, 1)), ((1.0, 3), (2.0, 3)), ((1.0, 1), (2.0, 3)))
    )
    assert one == "One run at each place."
    assert several == "Each value is the mean of 3 runs; bands are one standard deviation."
    assert uneven == "Each value is the mean of 1 to 3 runs; bands are one standard deviation."


def logit_study(epsilons, repeats):
    axis = (-1.0, 0.0, 1.0, 2.0)
    return LogitStudy(
        attribute="educ", target="married", delta=1e-6, n_records=100, middle=5.0,
        ordinary=((0.0, 0.0), (0.5, 0.3)),
        private=tuple(
            Ascent(epsilon=e, points=((0.0, 0.0), (0.4, 0.2)), loss=0.6 + 0.01 * k)
            for e in epsilons for k in range(repeats)
        ),
        loss=0.55, log_odds=axis, slopes=axis,
        surface=tuple(tuple(-(x**2) - y**2 for x in axis) for y in axis),
        levels=((0.0, 0.2, 40), (10.0, 0.8, 60)),
    )  # fmt: skip


def test_a_study_of_one_budget_compares_no_budgets():
    one, _, loss = logit_figures(logit_study((1.0,), 1))
    several, _, losses = logit_figures(logit_study((1.0, 4.0), 3))
    assert "with less noise" in several.caption
    assert "with less noise" not in one.caption
    assert loss.caption == "One run at each place."
    assert "mean of 3 runs; bands reach" in losses.caption


def test_every_other_page_has_captions_that_fit(run, tmp_path):
    """Figures check their captions when they are made; here every page makes its own."""
    curves = (ErrorCurve(name="a", x=(1.0, 2.0), errors=((0.1, 0.2), (0.3, 0.4))),)
    study = Study(
        name="s", title="t", x_label="epsilon", y_label="error", curves=curves,
        without_privacy={"without privacy": 0.05}, data="d", n_records=10, n_fits=4, delta=1e-6,
        epsilon_of_all=1.0, is_public=True, is_paid=False,
    )  # fmt: skip
    assert "mean of 2 fits" in study_figure(study).caption
    points = [Point(v, 0.8 + a, 1.0, 20) for v in (1.0, 2.0) for a in (0.0, 0.1)]
    assert write_pate_sweep("teachers", points, tmp_path).is_file()
    fitted = {
        "alone": {"a": 1.0}, "coefficients": {"a": 2.0},
        "misfits": [{"source": "x.csv", "misfit": 0.5}],
    }  # fmt: skip
    figures = [*transfer_figures(fitted), *run_figures(run.facts(), run)]
    runs = [Compared("one", run, run.facts()), Compared("two", run, run.facts())]
    for figure in (*figures, *comparison_figures(runs)):
        assert figure.caption
        assert not not_drawn(figure.caption, figure)
