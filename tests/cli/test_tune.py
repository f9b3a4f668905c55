"""`tacit tune` releases one run of a search and states the price of all of them."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tacit.tuning.search
from tacit.cli import app
from tacit.datasets import Schema
from tacit.experiments import Recipe, RunFolder, tune, tuned_run
from tacit.ledger import Ledger

VARY = ("--vary", "training.learning_rate=0.01,0.5", "--epsilon", "4")


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.slow  # trains twice and prices the search
def test_tune_writes_a_run_that_can_be_verified(recipe):
    arguments = ("tune", recipe, *VARY, "--out", "here")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "one run alone costs" in result.stdout
    assert run("verify", "here").exit_code == 0
    facts = RunFolder("here").facts()
    assert facts.epsilon <= 4.0
    assert facts.seconds == 0  # it would show the number of runs
    page = Path("here/report.html").read_text(encoding="utf-8")
    assert "Tried: training.learning_rate in [0.01, 0.5]" in page
    with Ledger("here/run.ledger", read_only=True) as ledger:
        assert len(ledger.history()) == 1
    found = json.loads(run(*arguments, "--json", "--no-page").stdout)  # a finished search stays
    assert found["chosen"] in ({"training.learning_rate": rate} for rate in (0.01, 0.5))
    assert found["run_epsilon"] < found["epsilon"]
    other = run("tune", recipe, "--vary", "training.clip_norm=1,2", "--out", "here")
    assert other.exit_code == 2
    assert "holds another search" in other.output


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((), "needs --vary"),
        (("training.epochs",), "must be SETTING=VALUE"),
        (("training.epoch=1,2",), "Did you mean 'epochs'"),
        (("training.clip_norm=0.1,,2",), "empty value"),
        (("training.clip_norm=,1",), "empty value"),
        (("training.clip_norm=-1,2",), "clip_norm must be"),
        (("training.clip_norm=1,1.0",), "twice"),
        (("training.clip_norm=1,2", "training.clip_norm=3"), "names training.clip_norm twice"),
        (("privacy.delta=1e-5,1e-6",), "cannot be varied"),
    ],
)
def test_tune_refuses_what_it_cannot_vary_and_leaves_no_folder(recipe, values, message):
    given = [word for value in values for word in ("--vary", value)]
    result = run("tune", recipe, *given, "--out", "there")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not Path("there").exists()


def documented() -> list[str]:
    """Return the example of the docs, which is that of --help too."""
    page = Path(__file__).parents[2] / "docs" / "tuning.md"
    (line,) = [x for x in page.read_text(encoding="utf-8").splitlines() if x.startswith("tacit tu")]
    assert line in run("tune", "--help").output
    return line.split()[1:]


@pytest.mark.slow  # prices a search and trains three times
def test_the_documented_command_tunes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = run(*documented(), "--set", "training.epochs=3", "--out", "here", "--no-page")
    assert result.exit_code == 0, result.output
    assert "chosen    training.learning_rate = " in result.stdout
    assert "with noise" in result.stdout
    facts = RunFolder("here").facts()
    assert (facts.delta, facts.epsilon <= 8) == (1e-5, True)
    assert not (tmp_path / "cache").exists()  # features of private records
    assert not [name for name in os.listdir("here") if "search-" in name or "pending" in name]


def quick(recipe):
    return Recipe.read(recipe).with_settings({"privacy.epsilon": 1.0})


@pytest.mark.filterwarnings("ignore:no setting will be tried")
def test_a_search_without_trials_says_so_before_it_pays(recipe):
    arguments = ("tune", recipe, "--vary", "training.clip_norm=0.5,1", "--most-runs", "1")
    result = run(*arguments, "--out", "here", "--no-page")
    assert result.exit_code == 0, result.output
    assert "no setting was tried" in result.stdout
    assert "score" not in result.stdout
    with pytest.warns(UserWarning, match="no setting will be tried"):
        tune(quick(recipe), "other", {"training.clip_norm": [0.5, 1.0]}, most_runs=1)


@pytest.mark.filterwarnings("ignore:no setting will be tried")
@pytest.mark.parametrize("late", ["claim_fields", "finish", "end"])
def test_a_search_that_is_killed_late_pays_once_and_releases_the_same(recipe, late, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    search = (quick(recipe), "here", {"training.clip_norm": [0.5, 1.0]})
    with monkeypatch.context() as patch:
        if late == "claim_fields":
            patch.setattr(tuned_run, "claim_fields", killed)
        else:
            place = RunFolder if late == "finish" else tacit.tuning.search.Unfinished
            patch.setattr(place, "finish" if late == "finish" else "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            tune(*search, most_runs=1)
    first = Path("here/model.safetensors").read_bytes()
    facts = tune(*search, most_runs=1)
    assert Path("here/model.safetensors").read_bytes() == first
    assert facts.epsilon <= 1.0
    with Ledger("here/run.ledger", read_only=True) as ledger:
        assert len(ledger.history()) == 1
    assert not [name for name in os.listdir("here") if "search-" in name or "pending" in name]


@pytest.mark.slow  # reads a table and trains twice
def test_tune_of_a_private_table_pays_for_its_check_and_shows_a_noisy_score(folder):
    schema = Schema.read(folder / "class.toml").to_dict()
    table = {"name": "table", "path": str(folder / "classes.csv"), "schema": schema}
    training = {"batch_size": 2000, "epochs": 2.0}
    given = Recipe.from_dict({"name": "wages", "data": table, "training": training})
    facts = tune(given.with_settings({"privacy.epsilon": 2.0}), folder / "run",
                 {"training.learning_rate": [0.01, 0.5]})  # fmt: skip
    assert facts.epsilon <= 2.0
    assert facts.n_records == 30_000  # no record is held out beside those that score
    assert facts.utility.n_test == 0
    assert {touch.cost for touch in facts.touches if touch.what == "evaluation"} == set()
    assert facts.utility.private[0].value == facts.utility.others["score"]
    for verb in ("report", "verify"):
        assert run(verb, str(folder / "run")).exit_code == 0
    with Ledger(folder / "run" / "run.ledger", read_only=True) as ledger:
        assert len(ledger.history()) == 2
