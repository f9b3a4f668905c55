"""`tacit local`: simulated clients of a table."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from tacit.cli import app


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = zip(
        rng.choice(["bus", "car", "walk"], 20_000, p=[0.6, 0.3, 0.1]),
        rng.normal(40, 8, 20_000),
        strict=True,
    )
    path = tmp_path / "people.csv"
    path.write_text("way,age\n" + "".join(f"{way},{age:.2f}\n" for way, age in rows))
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["local", *map(str, arguments)])


def test_frequencies_of_declared_options_are_estimated(table):
    result = call(table, "--column", "way", "--options", "bus,car", "--epsilon", 2, "--seed", 1,
                  "--delta", 1e-6, "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert list(facts["estimates"]) == ["bus", "car", "(other)"]
    truth = {"bus": 0.6, "car": 0.3, "(other)": 0.1}
    for name, row in facts["estimates"].items():
        assert row["lower"] < row["estimate"] < row["upper"]
        assert row["estimate"] == pytest.approx(truth[name], abs=0.04)
    assert 0 < facts["shuffled_epsilon"] < 0.2
    assert facts["event"]["type"] == "RandomizedResponse"


def test_means_and_quantiles_of_numbers_are_estimated(table):
    bounds = ("--column", "age", "--lower", 0, "--upper", 100, "--epsilon", 2, "--seed", 1)
    mean = json.loads(call(table, *bounds, "--json").stdout)["estimates"]["mean"]
    assert mean["estimate"] == pytest.approx(40, abs=2)
    result = call(table, *bounds, "--quantiles", "0.5", "--delta", 1e-6)
    assert result.exit_code == 0, result.output
    assert "quantile 0.5" in result.output
    assert "hides who sent which report" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--column", "way"), "give --options, or --lower and --upper"),
        (("--column", "nothing", "--options", "a,b"), "no column"),
        (("--column", "age", "--lower", 0), "give --options"),
        (("--column", "way", "--options", "bus,car,bus"), "must be different"),
        (("--column", "way", "--options", "bus,(other)"), "must be different"),
    ],
)
def test_wrong_arguments_are_named(table, arguments, message):
    result = call(table, *arguments, "--epsilon", 1)
    assert result.exit_code == 2
    assert message in result.output
