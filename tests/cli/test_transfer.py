"""`tacit transfer` uses related tables."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tacit import Ledger
from tacit.cli import app


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_transfer_uses_the_file_that_agrees(folder: Path, people, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    people(3000, 20, 25, seed=1).to_csv(folder / "young.csv", index=False)
    people(30_000, seed=2).to_csv(folder / "same.csv", index=False)
    other = people(30_000, seed=3)
    other.assign(wage=90 - other.wage).to_csv(folder / "other.csv", index=False)
    result = call(
        "transfer", folder / "young.csv", folder / "same.csv", folder / "other.csv",
        "--schema", folder / "wage.toml", "--epsilon", 3, "--seed", 0, "--json",
        "--out", "run",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["informative"] == ["same.csv"]
    assert 2.5 < facts["epsilon"] <= 3.0
    assert facts["coefficients"]["age"] == pytest.approx(1.0, abs=0.25)
    assert call("verify", "run").exit_code == 0
    assert (folder / "run" / "report.html").is_file()
    assert call("predict", "run", folder / "young.csv", "--out", "p.csv").exit_code == 0
    again = json.loads(call("transfer", "run", "--json").stdout)
    assert again["coefficients"] == facts["coefficients"]


def test_overlapping_files_add_their_costs(folder: Path) -> None:
    result = call(
        "transfer", folder / "people.csv", folder / "people.csv", "--schema",
        folder / "wage.toml", "--epsilon", 1, "--overlapping", "--json",
        "--out", folder / "run",
    )  # fmt: skip
    facts = json.loads(result.stdout)
    assert facts["epsilon_per_file"] == 1.0
    assert facts["epsilon"] > 1.25
    with Ledger(folder / "run" / "run.ledger") as ledger:
        assert len(ledger.history()) == 5  # a check and a fit of each file, and the evaluation


def test_transfer_needs_a_number_as_target(folder: Path) -> None:
    result = call(
        "transfer", folder / "classes.csv", folder / "classes.csv", "--schema",
        folder / "class.toml", "--epsilon", 1, "--out", folder / "run",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "transfer needs a number as target" in result.output
