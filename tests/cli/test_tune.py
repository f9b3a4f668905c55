"""`tacit tune` releases one run of a search and states the price of all of them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit.cli import app
from tacit.datasets import Schema
from tacit.experiments import Recipe, RunFolder, tune
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


def test_tune_refuses_what_it_cannot_vary(recipe):
    for given in ((), ("--vary", "training.epochs"), ("--vary", "training.epoch=1,2")):
        assert run("tune", recipe, *given, "--out", "there").exit_code == 2


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
