"""`tacit regress` fits tables within a budget."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tacit import Budget, Ledger
from tacit.cli import app


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


def test_a_fit_killed_after_its_payment_does_not_pay_twice(folder, monkeypatch):
    from tacit.cli import _tables

    command = ["regress", str(folder / "people.csv"), "--schema", str(folder / "wage.toml")]
    command += ["--epsilon", "1", "--ledger", str(folder / "a.ledger")]
    first, shown = [], _tables.show

    def killed(schema, model, about, **options):
        first.append(model.coef_.tolist())
        raise KeyboardInterrupt

    monkeypatch.setattr(_tables, "show", killed)
    assert CliRunner().invoke(app, command).exit_code == 130
    assert CliRunner().invoke(app, command).exit_code == 130
    assert first[0] == first[1]  # the same noise: nothing new is released
    monkeypatch.setattr(_tables, "show", shown)
    assert CliRunner().invoke(app, command).exit_code == 0
    with Ledger(folder / "a.ledger") as ledger:
        assert len(ledger.history()) == 1
    assert CliRunner().invoke(app, command).exit_code == 0
    with Ledger(folder / "a.ledger") as ledger:
        assert len(ledger.history()) == 2  # a new fit is a new release
