"""The verbs train, sweep and demo: flags in, folder and exit code out."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit.cli import app

RECIPE = """
name = "quick"
[training]
batch_size = 360
epochs = 1
[run]
seed = 1
baseline_steps = 20
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "quick.toml"
    path.write_text(RECIPE)
    return str(path)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_train_writes_a_run_and_says_what_it_cost(recipe, tmp_path):
    result = run("train", recipe, "--epsilon", "2", "--no-page")
    assert result.exit_code == 0, result.output
    assert "epsilon   2" in result.stdout or "epsilon   1.99" in result.stdout
    assert "without privacy" in result.stdout
    assert (tmp_path / "runs" / "quick-epsilon-2" / "facts.json").is_file()


def test_json_is_one_object_and_a_finished_run_is_only_reported(recipe):
    arguments = ("train", recipe, "--out", "here", "--json", "--no-page")
    first, again = json.loads(run(*arguments).stdout), run(*arguments)
    assert first["epsilon"] <= 3.0
    assert first["run"] == "here"
    assert json.loads(again.stdout) == first
    assert "here is finished" in again.stderr


def test_settings_are_changed_from_the_command_line(recipe, tmp_path):
    arguments = ("--set", "training.epochs=2", "--set", "data.name=digits", "--seed", "4")
    result = run("train", recipe, "--out", "here", "--no-page", "--json", *arguments)
    assert json.loads(result.stdout)["steps"] == 8
    assert "seed = 4" in (tmp_path / "here" / "recipe.toml").read_text()


def test_a_run_folder_can_be_named_to_go_on(recipe):
    run("train", recipe, "--out", "here", "--no-page")
    result = run("train", "here", "--json", "--no-page")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["run"] == "here"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense",), "neither a recipe file"),
        (("--set", "training.epoch=3"), "Did you mean 'epochs'?"),
        (("--set", "epochs"), "KEY=VALUE"),
        (("--epsilon", "-1"), "privacy.epsilon must be a positive"),
        (("mnist", "--data", "absent"), "no mnist in absent"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = run("train", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "runs").exists()


def test_an_interrupted_run_says_how_to_go_on(recipe, monkeypatch):
    from tacit.experiments.training_run import Session

    def stop(self, on_progress):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Session, "go", stop)
        result = run("train", recipe, "--out", "here")
    assert result.exit_code == 130
    assert "go on with: tacit train here" in result.stderr
    assert run("train", "here", "--no-page").exit_code == 0


def test_sweep_prints_a_row_for_each_budget(recipe):
    arguments = ("sweep", recipe, "--epsilons", "1,4", "--repeats", "2", "--out", "here")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "releasing every run would cost epsilon" in result.stdout
    certificates = sorted(Path("here").glob("epsilon-*/certificate.json"))
    assert len(certificates) == 4
    assert run("verify", str(certificates[0])).exit_code == 0
    found = json.loads(run(*arguments, "--json").stdout)
    assert [row["epsilon"] for row in found["summaries"]] == [1.0, 4.0]
    assert run("sweep", recipe, "--epsilons", "one").exit_code == 2


def test_the_demo_learns_the_digits_and_writes_the_page(tmp_path, monkeypatch):
    pytest.importorskip("jinja2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = run("demo", "--json")
    found = json.loads(result.stdout)
    assert found["epsilon"] <= 3.0
    assert found["accuracy"] > 0.93, "two points above chance failures of one seed in a thousand"
    assert found["non_private_accuracy"] > 0.97
    assert (tmp_path / found["page"]).is_file()


def test_a_surface_is_drawn_from_a_table(tmp_path, monkeypatch):
    pytest.importorskip("jinja2")
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{k % 5},{int(k % 5 > k % 3)}\n" for k in range(500))
    (tmp_path / "t.csv").write_text("x,y\n" + rows)
    (tmp_path / "t.toml").write_text(
        'name = "t"\n[data]\nname = "table"\npath = "t.csv"\nis_public = true\n'
        '[data.schema]\ntarget = "y"\n'
        '[data.schema.columns.y]\ncategories = ["0", "1"]\n'
        "[data.schema.columns.x]\nlower = 0\nupper = 4\n[training]\nepochs = 2\n"
    )
    arguments = ("surface", "t.toml", "--epsilons", "1", "--repeats", "1", "--out", "here")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "no privacy" in result.stdout
    assert (tmp_path / "here" / "figures" / "y-by-x.csv").is_file()
    assert len(json.loads(run(*arguments, "--json").stdout)["private"]) == 1
    assert run("surface", "t.toml", "--epsilons", "").exit_code == 2
    assert run("surface", "digits").exit_code == 2
