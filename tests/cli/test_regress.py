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
        assert len(ledger.history()) == 3  # the check, the count of missing targets and the fit
    assert call("regress", folder / "run", "--no-page").exit_code == 0
    with Ledger(folder / "a.ledger") as ledger:
        assert len(ledger.history()) == 4  # and the evaluation
    stored = json.loads((folder / "run" / "model.json").read_text())
    assert np.asarray(stored["coef"]).tobytes() == released[0]  # the same noise
    facts = json.loads((folder / "run" / "facts.json").read_text())
    assert facts["ledger_state"]["entries_of_run"] == [1, 2, 3, 4]


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
        entries = ledger.history()  # the check, and the count of missing targets
    assert len(entries) == 2
    for entry in entries:
        assert entry.note.startswith("count of values outside the declared domain")


WORK = """
target = "y"
[columns]
x = [0, 10]
g = ["a", "b"]
y = [0, 40]
"""


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A folder with y = 5 + 2 x + 3 [g = b] + noise of deviation 1, of which 8 % are missing."""
    rng = np.random.default_rng(0)
    n = 20_000
    x, b = rng.uniform(0, 10, n), rng.random(n) < 0.5
    y = np.where(rng.random(n) < 0.08, np.nan, 5 + 2 * x + 3 * b + rng.normal(0, 1, n))
    rows = zip(x, np.where(b, "b", "a"), y, strict=True)
    text = "".join(f"{x:.3f},{g},{'' if np.isnan(y) else f'{y:.3f}'}\n" for x, g, y in rows)
    (tmp_path / "t.csv").write_text(f"x,g,y\n{text}")
    (tmp_path / "t.toml").write_text(WORK)
    return tmp_path


TRUTH = {"(intercept)": 5, "x": 2, "g=b": 3}


@pytest.mark.parametrize("delta", [1e-6, pytest.param(0, marks=pytest.mark.slow)])
def test_missing_targets_are_left_out_of_the_fit(lines: Path, delta: float) -> None:
    result = call("regress", lines / "t.csv", "--schema", lines / "t.toml", "--epsilon", 3,
                  "--delta", delta, "--out", lines / "run", "--no-page", "--seed", 3,
                  "--no-evaluation")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "8% of the records have no target and were left out" in result.output
    model = json.loads((lines / "run" / "model.json").read_text())
    assert model["coefficients"] == pytest.approx(TRUTH, rel=0.1)
    assert model["without_target"]["value"] == pytest.approx(0.08, abs=0.02)
    assert model.get("residual_std", 1) == pytest.approx(1, rel=0.05)
    assert json.loads((lines / "run" / "facts.json").read_text())["epsilon"] <= 3


def test_intervals_are_printed_stored_and_predicted(lines: Path) -> None:
    result = call("regress", lines / "t.csv", "--schema", lines / "t.toml", "--epsilon", 0.5,
                  "--out", lines / "run", "--no-page", "--seed", 0)  # fmt: skip
    assert "R2 is not measured: its interval would be too wide" in result.output
    for text in ("std err", "[0.025", "residual standard deviation", "g=b (vs a)"):
        assert text in result.output
    model = json.loads((lines / "run" / "model.json").read_text())
    for name, row in model["intervals"]["rows"].items():
        assert row["lower"] <= row["estimate"] <= row["upper"]
        assert abs(row["estimate"] - TRUTH[name]) < 4 * row["std_error"]
    (lines / "new.csv").write_text("x,g\n5,a\n2,b\n")
    found = json.loads(
        call("predict", lines / "run", lines / "new.csv", "--interval", 0.95, "--json").stdout
    )["predictions"]
    for row, truth in zip(found, (15, 12), strict=True):
        assert row["y_lower"] < row["y"] < row["y_upper"]
        assert row["y"] == pytest.approx(truth, abs=0.5)
        assert row["y_upper"] - row["y_lower"] == pytest.approx(2 * 1.96, rel=0.1)
    # Without a page there is a certificate, and a missing one is named in one sentence.
    assert call("verify", lines / "run").exit_code == 0
    (lines / "run" / "certificate.json").unlink()
    assert "holds no certificate.json" in call("verify", lines / "run").output
    # A model of another method has no intervals.
    (lines / "run" / "model.json").write_text(
        json.dumps({k: v for k, v in model.items() if k not in ("intervals", "inference")})
    )
    assert call("predict", lines / "run", lines / "new.csv").exit_code == 0
    refused = call("predict", lines / "run", lines / "new.csv", "--interval", 0.95)
    assert "has no intervals" in refused.output


def test_a_changed_schema_asks_for_another_folder(lines: Path) -> None:
    options = ["regress", lines / "t.csv", "--out", lines / "run", "--no-page", "--epsilon", 2,
               "--schema"]  # fmt: skip
    (lines / "wrong.toml").write_text(WORK.replace("x = [0, 10]", "x = [0, 1]"))
    stopped = call(*options, lines / "wrong.toml")
    assert "spent 0.1 of this run's epsilon of 2" in stopped.output
    again = call(*options, lines / "t.toml")
    assert "the schema has changed since the run" in again.output
    assert "as it was planned" not in again.output


def test_advice_for_a_number_names_no_setting_of_training(lines: Path) -> None:
    result = call("advise", lines / "t.csv", "--schema", lines / "t.toml", "--epsilon", 1)
    assert result.exit_code == 0, result.output
    assert "variance of the residuals" in result.output
    assert "R2 is not measured" in result.output
    assert not any(word in result.output for word in ("batch", "epochs", "clipping", "rate"))
