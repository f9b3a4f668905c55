"""Stretches of a run are computed again from records and key; what does not follow is found."""

import pytest
import torch
from typer.testing import CliRunner

from tacit.cli import app
from tacit.experiments import Recipe, replay_run, train

SMALL = """
[training]
epochs = 2
[run]
baseline_steps = 0
stretches = 3
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "kept"
    train(Recipe.parse(SMALL), folder)
    return folder


def states(run):
    return sorted((run / "secret" / "replay").glob("*.pt"))


def test_every_stretch_of_an_honest_run_comes_out_the_same(run):
    found = replay_run(run, stretches=3)
    assert found[0].what == "the model before training"
    assert len(found) == 5
    assert all(part.is_same for part in found)
    assert {path.name for path in (run / "secret").iterdir()} == {"replay"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in states(run))


def test_weights_that_do_not_follow_are_found(run):
    path = states(run)[2]
    honest = path.read_bytes()
    state = torch.load(path, weights_only=True)
    next(iter(state["model"].values())).add_(0.01)
    torch.save(state, path)
    try:
        found = replay_run(run, stretches=3)
    finally:
        path.write_bytes(honest)
    assert [part.is_same for part in found] == [True, True, False, False, True]


@pytest.mark.slow
def test_the_verb_replays(run):
    assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0
    result = CliRunner().invoke(app, ["verify", str(run), "--replay", "1"])
    assert result.exit_code == 0, result.output
    assert "computed again: the released weights" in result.output


@pytest.mark.slow
def test_a_run_without_states_says_what_to_do(tmp_path):
    train(Recipe.parse(SMALL.replace("stretches = 3", "")), tmp_path / "run")
    with pytest.raises(ValueError, match=r"Set run\.stretches"):
        replay_run(tmp_path / "run")


def test_a_run_that_was_interrupted_comes_out_the_same(tmp_path):
    """Its second process has another key, and keeps the state with which it begins."""

    def kill(progress):
        if progress.step == 5:
            raise KeyboardInterrupt

    recipe = Recipe.parse(SMALL)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "run", on_progress=kill)
    with pytest.warns(UserWarning, match="out of the reserve"):
        train(recipe, tmp_path / "run")
    assert len(states(tmp_path / "run")) == 5
    found = replay_run(tmp_path / "run", stretches=4)
    assert len(found) == 6
    assert all(part.is_same for part in found)
