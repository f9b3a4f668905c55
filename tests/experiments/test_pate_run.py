"""`tacit pate` and its recipe: defaults, refusals, a run folder that can be reported on."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from tacit import Ledger
from tacit.cli import app
from tacit.experiments import Recipe, RunFolder, run_pate
from tacit.pate import ConfidentGNMax, GNMax, LaplaceMax, SpreadStudent
from tacit.report import verify

SEEDED = Recipe(method="pate").with_settings({"run.seed": 1})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The default run: the embedded digits."""
    folder = tmp_path_factory.mktemp("pate")
    result = CliRunner().invoke(app, ["pate", "--out", str(folder), "--seed", "1"])
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_the_default_run_works_offline_and_says_that_epsilon_is_large(finished):
    _, output = finished
    assert "40 of 40 queries answered by 50 teachers of 1,438 records" in output
    assert "epsilon is large" in output


def test_the_run_folder_holds_facts_that_price_again(finished):
    import tacit

    folder, _ = finished
    facts = RunFolder(folder).facts()
    assert facts.method == "PATE"
    assert facts.epsilon == pytest.approx(tacit.epsilon(facts.claim, delta=facts.delta))
    assert facts.utility.mean > 0.7
    assert facts.claim == GNMax(10.0).event(40)
    ledger = Ledger(folder / "run.ledger", read_only=True)
    assert ledger.epsilon(delta=1e-5) >= facts.epsilon * (1 - 1e-9)


def test_the_released_student_can_be_read_back(finished):
    folder, _ = finished
    with np.load(folder / "student.npz") as arrays:
        student = SpreadStudent.from_arrays(dict(arrays))
    assert set(student.classes_) <= set(range(10))


def test_the_run_comes_with_page_figures_and_a_certificate_that_holds(finished):
    folder, _ = finished
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "What the answers cost" in page
    assert "What the answers taught" in page
    assert (folder / "figures" / "epsilon-by-answers.csv").is_file()
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
    certificate = json.loads((folder / "certificate.json").read_text())
    assert verify(certificate, folder=folder) == []


def test_running_again_in_the_same_folder_pays_nothing(finished):
    folder, _ = finished
    before = len(list(Ledger(folder / "run.ledger", read_only=True).history()))
    facts = run_pate(SEEDED, folder)
    assert len(list(Ledger(folder / "run.ledger", read_only=True).history())) == before
    assert facts.utility.mean == pytest.approx(RunFolder(folder).facts().utility.mean)


def test_a_finished_run_is_not_overwritten_by_another_recipe(finished):
    folder, _ = finished
    before = (folder / "recipe.toml").read_bytes()
    with pytest.raises(ValueError, match="another recipe"):
        run_pate(SEEDED.with_settings({"answers.noise": 3.0}), folder)
    assert (folder / "recipe.toml").read_bytes() == before


@pytest.mark.parametrize("changes", [{"teachers.width": 2.0}, {"answers.most": 3}, {"run.seed": 2}])
def test_an_unfinished_run_is_not_resumed_by_another_recipe(tmp_path, monkeypatch, changes):
    recipe = SEEDED.with_settings({"answers.queries": 8, "teachers.count": 10})
    with monkeypatch.context() as killed:
        killed.setattr(SpreadStudent, "fit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_pate(recipe, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"another recipe.*go on as it was planned: tacit pate"):
        run_pate(recipe.with_settings(changes), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    facts = run_pate(recipe.with_settings({"teachers.jobs": 1}), tmp_path)
    assert facts.resumed == 1
    assert len(list(Ledger(tmp_path / "run.ledger", read_only=True).history())) == 1  # one plan


def test_a_recipe_under_which_nothing_was_begun_can_be_put_right(tmp_path):
    recipe = SEEDED.with_settings({"answers.queries": 8, "teachers.count": 10})
    with pytest.raises(ValueError, match="color"):
        run_pate(recipe.with_settings({"data": replace(recipe.data, name="color")}), tmp_path)
    assert run_pate(recipe, tmp_path).steps == 8


def test_with_a_threshold_the_curve_ends_at_the_epsilon_that_is_claimed(tmp_path):
    changes = {"answers.threshold": 30.0, "answers.threshold_noise": 12.0, "answers.queries": 16}
    facts = run_pate(SEEDED.with_settings(changes), tmp_path)
    *_, last = (tmp_path / "by_answers.jsonl").read_text().splitlines()
    assert json.loads(last)["answers"] < 16
    assert json.loads(last)["epsilon"] == pytest.approx(facts.epsilon)


def test_one_ledger_can_pay_for_all_that_is_varied(tmp_path):
    paying = tmp_path / "all.ledger"
    Ledger(paying).close()
    command = ["pate", "--out", str(tmp_path / "runs"), "--queries", "15", "--ledger", str(paying)]
    result = CliRunner().invoke(app, [*command, "--vary", "noise=5,10"])
    assert result.exit_code == 0, result.output
    assert len(list(Ledger(paying, read_only=True).history())) == 2  # one plan for each run
    other = CliRunner().invoke(app, [*command, "--teachers", "20", "--vary", "noise=5,10"])
    assert other.exit_code == 2
    assert "another recipe" in other.stderr


def test_flags_override_a_recipe_and_a_budget_stops_the_answers(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[teachers]\ncount = 30\n[answers]\nqueries = 40\nnoise = 20.0\n")
    result = CliRunner().invoke(
        app,
        ["pate", str(recipe), "--noise", "8", "--epsilon", "3", "--out", str(tmp_path / "run")]
        + ["--json"],
    )
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    assert facts["hyperparameters"]["aggregator"] == "GNMax(sigma=8.0)"
    assert facts["hyperparameters"]["teachers"] == 30
    assert facts["utility"]["others"]["answered"] < 40
    assert facts["epsilon"] <= 3.0


@pytest.mark.parametrize(
    ("changes", "aggregator"),
    [
        ({"answers.noise": 7.0}, GNMax(7.0)),
        ({"answers.mechanism": "laplace"}, LaplaceMax(10.0)),
        (
            {"answers.threshold": 30.0, "answers.threshold_noise": 5.0},
            ConfidentGNMax(threshold=30.0, sigma_threshold=5.0, sigma_answer=10.0),
        ),
    ],
)
def test_settings_name_an_aggregator(changes, aggregator):
    recipe = Recipe(method="pate").with_settings(changes)
    assert recipe.answers.aggregator(recipe.teachers.count) == aggregator


@pytest.mark.parametrize(
    "changes",
    [
        {"answers.threshold": 3.0},
        {"answers.mechanism": "cauchy"},
        {"answers.mechanism": "laplace", "answers.threshold": 3.0, "answers.threshold_noise": 1.0},
        {"teachers.count": 0},
        {"privacy.delta": 2.0},
        {"answers.public_share": 1.5},
    ],
)
def test_wrong_settings_are_refused(changes):
    with pytest.raises(ValueError, match=r"must|together|need"):
        Recipe(method="pate").with_settings(changes)


def test_a_recipe_is_written_out_and_read_back(tmp_path):
    recipe = Recipe(method="pate").with_settings({"teachers.count": 77, "answers.noise": 3.0})
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.to_toml())
    assert Recipe.read(path) == recipe
    path.write_text("[teachers]\nnumber = 3\n")
    with pytest.raises(ValueError, match="has no 'number'"):
        Recipe.read(path)
    path.write_text("oops")
    with pytest.raises(ValueError, match="not TOML"):
        Recipe.read(path)


def test_a_setting_can_be_varied_and_finished_points_are_kept(tmp_path):
    command = ["pate", "--out", str(tmp_path), "--queries", "15", "--vary", "teachers=10,20"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    lines = (tmp_path / "sweep.csv").read_text().splitlines()
    assert lines[0] == "teachers,accuracy,epsilon,answered,run"
    assert len(lines) == 3
    again = CliRunner().invoke(app, [*command, "--json"])
    points = json.loads(again.output)["points"]
    assert [point["value"] for point in points] == [10.0, 20.0]
    assert (tmp_path / "sweep.csv").read_text().splitlines() == lines


@pytest.mark.parametrize("vary", ["teachers", "teachers=a,b", "color=1,2"])
def test_a_setting_that_cannot_be_varied_is_refused(tmp_path, vary):
    result = CliRunner().invoke(app, ["pate", "--out", str(tmp_path), "--vary", vary])
    assert result.exit_code == 2
