"""`tacit regress` fits tables within a budget."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from tacit import Budget, Ledger
from tacit.cli import app
from tacit.experiments import RunFolder


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_a_number_is_fitted_in_the_units_of_the_file(folder: Path) -> None:
    result = call(
        "regress", folder / "people.csv", "--schema", folder / "wage.toml", "--epsilon", 3,
        "--seed", 0, "--json", "--out", folder / "run",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    model = facts["coefficients"]
    assert model["age"] == pytest.approx(1.0, rel=0.05)
    assert model["region=south"] == pytest.approx(15, rel=0.1)
    assert facts["references"] == {"region": "north"}
    assert "region=north" not in model
    stored = json.loads((folder / "run" / "model.json").read_text())
    assert stored["coefficients"] == model
    low, high = facts["intervals"]["r2"]
    assert low <= facts["r2"] <= high
    assert facts["epsilon"] <= 3
    for name in ("certificate.json", "report.html", "facts.json", "check.json"):
        assert (folder / "run" / name).is_file()


def test_categories_are_fitted_by_the_logit_model(folder: Path) -> None:
    result = call(
        "regress", folder / "classes.csv", "--schema", folder / "class.toml", "--epsilon", 3,
        "--seed", 0, "--out", folder / "run", "--no-page",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "logistic regression, gradient: epsilon = 2." in result.output
    assert "region=south (vs north)" in result.output
    assert "95 % interval" in result.output


@pytest.mark.slow
def test_pure_privacy_is_the_functional_mechanism(folder: Path) -> None:
    result = call(
        "regress", folder / "people.csv", "--schema", folder / "wage.toml", "--epsilon", 1,
        "--delta", 0, "--out", folder / "run",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "linear regression, functional: epsilon = 1 at delta = 0" in result.output


def test_a_finished_run_is_kept_and_another_recipe_is_refused(folder: Path) -> None:
    options = ["regress", folder / "people.csv", "--schema", folder / "wage.toml", "--out",
               folder / "run", "--no-page", "--epsilon"]  # fmt: skip
    assert call(*options, 1).exit_code == 0
    model = (folder / "run" / "model.json").read_bytes()
    assert call("regress", folder / "run").exit_code == 0
    assert (folder / "run" / "model.json").read_bytes() == model
    assert "another recipe" in call(*options, 2).output


def test_a_run_that_was_killed_after_the_payment_does_not_pay_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tacit.experiments import regression_run

    Ledger(folder / "a.ledger", Budget(10, 1e-5)).close()
    options = ["regress", folder / "people.csv", "--schema", folder / "wage.toml", "--out",
               folder / "run", "--no-page", "--epsilon", 1]  # fmt: skip
    options += ["--ledger", folder / "a.ledger"]
    released = []

    def kill(recipe, model):
        released.append(model.coef_.tobytes())
        raise KeyboardInterrupt

    def stop(folder, name, content):
        if name == "check.json":
            raise KeyboardInterrupt
        return write(folder, name, content)

    write = RunFolder.write
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write", stop)
        assert call(*options).exit_code == 130
    with Ledger(folder / "a.ledger") as ledger:
        assert len(ledger.history()) == 1  # the check
    with monkeypatch.context() as patch:
        patch.setattr(regression_run, "fitted_model", kill)
        assert call(*options).exit_code == 130
    with Ledger(folder / "a.ledger") as ledger:
        assert len(ledger.history()) == 2  # the check and the fit
    assert call("regress", folder / "run", "--no-page").exit_code == 0
    with Ledger(folder / "a.ledger") as ledger:
        assert len(ledger.history()) == 3  # and the evaluation
    stored = json.loads((folder / "run" / "model.json").read_text())
    assert np.asarray(stored["coef"]).tobytes() == released[0]  # the same noise
    facts = json.loads((folder / "run" / "facts.json").read_text())
    assert facts["ledger_state"]["entries_of_run"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "model.json"], "run folder"),
        (["--out", "/proc/nothing/run"], "cannot be written"),
        (["--ledger", "nowhere.ledger"], "tacit ledger create"),
    ],
)
def test_what_cannot_work_is_refused_before_paying(folder: Path, options, message) -> None:
    result = call(
        "regress", folder / "people.csv", "--schema", folder / "wage.toml", "--epsilon", 1,
        *options,
    )  # fmt: skip
    assert result.exit_code == 2
    assert message in result.output


def test_an_overspent_ledger_stops_the_fit_with_one_line(folder: Path) -> None:
    file = folder / "people.ledger"
    Ledger(file, Budget(0.5, 1e-6)).close()
    result = call(
        "regress", folder / "people.csv", "--schema", folder / "wage.toml", "--epsilon", 1,
        "--ledger", file, "--out", folder / "run",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "would pass the budget" in result.output
    with Ledger(file) as ledger:
        (entry,) = ledger.history()
        assert entry.note.startswith("count of values outside the declared domain")
