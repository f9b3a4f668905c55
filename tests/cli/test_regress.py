"""`tacit regress` and `tacit transfer`."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from tacit import Budget, Ledger
from tacit.cli import app

SCHEMA = """
target = "wage"
[columns.age]
lower = 20
upper = 60
[columns.region]
categories = ["north", "south", "west"]
[columns.wage]
lower = 0
upper = 100
"""


def people(rows: int, low: float = 20, high: float = 60, seed: int = 0) -> pd.DataFrame:
    """wage = 10 + age, plus 15 in the south."""
    rng = np.random.default_rng(seed)
    age = rng.uniform(low, high, rows)
    region = rng.choice(["north", "south", "west"], rows)
    wage = 10 + age + 15 * (region == "south") + rng.normal(0, 1, rows)
    return pd.DataFrame({"age": age, "region": region, "wage": wage, "id": np.arange(rows)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wage.toml").write_text(SCHEMA)
    categories = SCHEMA.replace("lower = 0\nupper = 100", 'categories = ["low", "high"]')
    (tmp_path / "class.toml").write_text(categories)
    frame = people(30_000)
    frame.to_csv(tmp_path / "people.csv", index=False)
    frame.assign(wage=np.where(frame.wage > 50, "high", "low")).to_csv(
        tmp_path / "classes.csv", index=False
    )
    return tmp_path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_a_number_is_fitted_in_the_units_of_the_file(folder: Path) -> None:
    result = call(
        "regress", folder / "people.csv", "--schema", folder / "wage.toml", "--epsilon", 3,
        "--seed", 0, "--json", "--out", folder / "model.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    model = facts["coefficients"]
    assert model["age"] == pytest.approx(1.0, rel=0.05)
    assert model["region=south"] - model["region=north"] == pytest.approx(15, rel=0.1)
    assert facts == json.loads((folder / "model.json").read_text())


def test_categories_are_fitted_by_the_logit_model(folder: Path) -> None:
    result = call(
        "regress", folder / "classes.csv", "--schema", folder / "class.toml", "--epsilon", 3,
        "--seed", 0,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "logistic regression, gradient: epsilon = 3 at delta = 1e-06" in result.output


def test_pure_privacy_is_the_functional_mechanism(folder: Path) -> None:
    result = call(
        "regress", folder / "people.csv", "--schema", folder / "wage.toml", "--epsilon", 1,
        "--delta", 0,
    )  # fmt: skip
    assert "linear regression, functional: epsilon = 1 at delta = 0" in result.output


def test_an_overspent_ledger_stops_the_fit_with_one_line(folder: Path) -> None:
    file = folder / "people.ledger"
    Ledger(file, Budget(0.5, 1e-6)).close()
    result = call(
        "regress", folder / "people.csv", "--schema", folder / "wage.toml", "--epsilon", 1,
        "--ledger", file,
    )  # fmt: skip
    assert result.exit_code == 2
    assert "would pass the budget" in result.output
    with Ledger(file) as ledger:
        assert ledger.history() == []


def test_transfer_uses_the_file_that_agrees(folder: Path) -> None:
    people(3000, 20, 25, seed=1).to_csv(folder / "young.csv", index=False)
    people(30_000, seed=2).to_csv(folder / "same.csv", index=False)
    other = people(30_000, seed=3)
    other.assign(wage=90 - other.wage).to_csv(folder / "other.csv", index=False)
    result = call(
        "transfer", folder / "young.csv", folder / "same.csv", folder / "other.csv",
        "--schema", folder / "wage.toml", "--epsilon", 3, "--seed", 0, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["informative"] == ["same.csv"]
    assert facts["epsilon"] == pytest.approx(3.0)
    assert facts["coefficients"]["age"] == pytest.approx(1.0, abs=0.25)


def test_overlapping_files_add_their_costs(folder: Path) -> None:
    result = call(
        "transfer", folder / "people.csv", folder / "people.csv", "--schema",
        folder / "wage.toml", "--epsilon", 1, "--overlapping", "--json",
    )  # fmt: skip
    facts = json.loads(result.stdout)
    assert facts["epsilon_per_file"] == 1.0
    assert facts["epsilon"] > 1.4


def test_transfer_needs_a_number_as_target(folder: Path) -> None:
    result = call(
        "transfer", folder / "classes.csv", folder / "classes.csv", "--schema",
        folder / "class.toml", "--epsilon", 1,
    )  # fmt: skip
    assert result.exit_code == 2
    assert "transfer needs a number as target" in result.output
