"""`tacit train` turns a recipe and options into a run folder and an exit code."""

import json

import pytest
from typer.testing import CliRunner

from tacit.cli import app


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
    arguments += ("--loss-upper", "4.6", "--no-progress")
    result = run("train", recipe, "--out", "here", "--no-page", "--json", *arguments)
    assert json.loads(result.stdout)["steps"] == 8
    assert "seed = 4" in (tmp_path / "here" / "recipe.toml").read_text()
    lines = (tmp_path / "here" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [0 < row["training_loss_std"] < 1 for row in rows] == [True, True]
    released = json.loads((tmp_path / "here" / "facts.json").read_text())["released"]
    assert "the mean training loss of each step, clipped to 4.6" in released


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
    from tacit.training import Private

    def stop(self, lot):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Private, "step", stop)
        result = run("train", recipe, "--out", "here")
    assert result.exit_code == 130
    assert "go on with: tacit train here" in result.stderr
    assert run("train", "here", "--no-page").exit_code == 0
