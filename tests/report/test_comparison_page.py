"""Several runs on one page: what differs, what they share, and what is refused."""

import csv
import json
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tacit.cli import app
from tacit.experiments import RunFolder
from tacit.report import write_comparison
from tacit.report.comparison_page import read_runs


def changed(run, name, **changes):
    """A copy of the run with other facts, in a folder beside it."""
    path = run.path.with_name(name)
    shutil.copytree(run.path, path)
    other = RunFolder(path)
    facts = replace(other.facts(), **changes)
    other.write("facts.json", json.dumps(facts.to_dict()))
    return other


@pytest.fixture
def unsealed(monkeypatch):
    """Lets a test compare runs whose facts it edited, although no ledger vouches for them."""
    monkeypatch.setattr("tacit.report.comparison_page.require_consistent", lambda run: None)


def text_of(run, *others, out=None):
    page = write_comparison([run.path, *(o.path for o in others)], out or run.path.parent / "both")
    return page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("unsealed")
def test_results_and_settings_that_differ_are_in_columns(run):
    other = changed(run, "other", hyperparameters={"batch_size": 1000, "clip_norm": 0.5})
    text = text_of(run, other)
    settings = text.partition('id="settings"')[2].partition("</section>")[0]
    assert "clip_norm" in settings
    assert "batch_size" not in settings
    same = text.partition('id="same"')[2].partition("</section>")[0]
    assert "batch_size" in same
    assert "epsilon of releasing every run" in text


def test_epsilon_against_accuracy_has_whiskers_and_data(run):
    other = changed(run, "other")
    text = text_of(run, other)
    assert text.count('class="whisker"') == 2
    assert "Whiskers are 95 % intervals." in text
    table = run.path.parent / "both/figures/accuracy-by-epsilon.csv"
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["series"] for row in rows] == ["run", "other"]
    assert 0.899 < float(rows[0]["low"]) < 0.905 < float(rows[0]["high"]) < 0.912


@pytest.mark.usefixtures("unsealed")
def test_runs_of_other_kinds_are_compared_by_what_they_share(run):
    votes = changed(run, "votes", method="PATE", unit="person", metrics_file="")
    other = replace(run.facts().utility, metric="r2", private=run.facts().utility.private[:1])
    numbers = changed(run, "numbers", method="regression", utility=other, data="houses")
    text = text_of(run, votes, numbers)
    assert "Runs of DP-SGD, PATE, regression, compared by what they share." in text
    assert "different units of privacy (person, record)" in text
    assert "of different data" in text
    assert "different metrics" in text
    assert text.count("<svg") == 1  # accuracy of two runs against epsilon
    assert "epsilon of releasing every run" not in text


@pytest.mark.usefixtures("unsealed")
def test_runs_that_were_not_measured_are_compared_too(run):
    empty = replace(run.facts().utility, private=())
    runs = [changed(run, f"r{k}", utility=empty) for k in (1, 2)]
    text = text_of(*runs)
    assert "<svg" not in text
    assert "not measured" in text


def test_what_cannot_be_compared_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="two or more different"):
        write_comparison([run.path, run.path / "../run"], tmp_path / "out")
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "sweep.json").write_text("{}")
    with pytest.raises(ValueError, match="is a sweep, which is compared on its own page"):
        write_comparison([run.path, sweep], tmp_path / "out")
    with pytest.raises(ValueError, match="is a run folder, whose page would be lost"):
        write_comparison([run.path, changed(run, "o").path], run.path)
    (tmp_path / "empty").mkdir()
    with pytest.raises((ValueError, OSError)):
        write_comparison([run.path, tmp_path / "empty"], tmp_path / "out")
    broken = changed(run, "broken")
    broken.write("model.safetensors", b"other weights")
    with pytest.raises(ValueError, match="parts disagree"):
        write_comparison([run.path, broken.path], tmp_path / "out")


def test_runs_of_the_same_name_keep_as_much_of_their_path_as_is_needed(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "a/run")
    shutil.copytree(run.path, tmp_path / "b/run")
    assert [c.name for c in read_runs([tmp_path / "a/run", tmp_path / "b/run"])] == [
        "a/run",
        "b/run",
    ]


def test_the_command_compares_several_folders(run, tmp_path):
    other = changed(run, "other")
    out = tmp_path / "page"
    done = CliRunner().invoke(app, ["report", str(run.path), str(other.path), "--out", str(out)])
    assert done.exit_code == 0
    assert (out / "report.html").is_file()
