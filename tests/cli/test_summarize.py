"""`tacit summarize` prints what it stores, pays once, and stops for a wrong schema."""

import html
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tacit import Budget, Ledger
from tacit.cli import app
from tacit.experiments import summary_run


def call(folder: Path, *arguments: object, schema: str = "wage.toml") -> Result:
    table = folder / ("classes.csv" if schema == "class.toml" else "people.csv")
    fixed = ["summarize", table, "--schema", folder / schema]
    return CliRunner().invoke(app, list(map(str, [*fixed, *arguments])))


@pytest.mark.slow
def test_every_number_printed_or_on_the_page_is_the_stored_one_and_the_run_verifies(
    folder: Path,
) -> None:
    out = folder / "run"
    result = call(folder, "--epsilon", 1, "--seed", 0, "--out", out)
    assert result.exit_code == 0, result.output
    stored = json.loads((out / "summary.json").read_text())
    lines = [re.split(r"\s{2,}", line.strip()) for line in result.output.splitlines()[1:]]
    printed = {(cells[0], cells[1]): cells[2:5] for cells in lines if len(cells) == 6}
    assert len(printed) == len(stored["rows"])
    for row in stored["rows"]:
        numbers = [float(x) for x in printed[row["column"], row["statistic"]]]
        assert numbers == [row["value"], row["lower"], row["upper"]]
    again = call(folder, "--epsilon", 1, "--seed", 0, "--out", out, "--no-page", "--json")
    as_json = json.loads(again.output)
    assert {name: as_json[name] for name in stored} == stored
    assert CliRunner().invoke(app, ["verify", str(out)]).exit_code == 0
    page = html.unescape((out / "report.html").read_text())
    for row in json.loads((out / "summary.json").read_text())["rows"]:
        value, low, high = (f"{row[name]:.6g}" for name in ("value", "lower", "upper"))
        assert f"{row['column']}: {row['statistic']}</th>" in page
        assert f"{value}, 95 % interval {low} to {high}" in page
    facts = json.loads((out / "facts.json").read_text())
    assert facts["epsilon"] <= 1
    assert facts["n_records"] != 30_000  # the noisy count: the exact one is not assumed public
    assert str(facts["n_records"]) in page.replace(",", "")
    assert "30,000" not in page


@pytest.mark.slow
def test_a_summary_that_was_killed_after_paying_does_not_pay_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "people.ledger"
    Ledger(file, Budget(1.0)).close()
    options = ["--epsilon", 0.5, "--ledger", file, "--out", folder / "run"]
    real, drawn = summary_run._describe, []

    def killed(*arguments: object) -> None:
        drawn.append(real(*arguments).values.tolist())
        raise KeyboardInterrupt

    monkeypatch.setattr(summary_run, "_describe", killed)
    assert call(folder, *options).exit_code == 130
    monkeypatch.setattr(summary_run, "_describe", real)
    again = CliRunner().invoke(app, ["summarize", str(folder / "run")])
    assert again.exit_code == 0, again.output
    rows = json.loads((folder / "run" / "summary.json").read_text())["rows"]
    assert [row["value"] for row in rows] == pytest.approx(drawn[0], rel=1e-4)
    with Ledger(file, read_only=True) as ledger:
        assert ledger.epsilon(delta=0) == pytest.approx(0.5)


def test_a_ledger_pays_once_for_one_folder(folder: Path) -> None:
    file = folder / "people.ledger"
    Ledger(file, Budget(1.0)).close()
    for _ in range(2):
        options = ["--ledger", file, "--out", folder / "run", "--no-page"]
        result = call(folder, "--epsilon", 1, *options)
        assert result.exit_code == 0, result.output
    with Ledger(file, read_only=True) as ledger:
        assert ledger.epsilon(delta=0) == pytest.approx(1.0)
    again = call(folder, "--epsilon", 0.5, "--ledger", file, "--out", folder / "run")
    assert again.exit_code == 2
    assert "a run of another recipe" in again.output


def test_a_wrong_schema_stops_with_one_line_and_a_small_price(folder: Path) -> None:
    file = folder / "people.ledger"
    Ledger(file, Budget(1.0)).close()
    wrong = (folder / "wage.toml").read_text().replace('"north", "south"', '"North", "South"')
    (folder / "wage.toml").write_text(wrong.replace('"west"', '"West"'))
    result = call(folder, "--epsilon", 1, "--ledger", file, "--seed", 0, "--out", folder / "run")
    assert result.exit_code == 2
    assert "column 'region'" in result.output
    assert result.output.count("\n") == 1
    with Ledger(file, read_only=True) as ledger:
        assert ledger.epsilon(delta=0) <= 0.05


def test_wrong_options_are_one_line(folder: Path) -> None:
    wrong = [
        (["--epsilon", 0], "epsilon must be"),
        (["--epsilon", 1, "--ledger", "none.ledger"], "there is no ledger"),
        (["--epsilon", 1, "--quantiles", "2"], "probability must be"),
        (["--epsilon", 1, "--about", "all"], "about must be"),
        (["--epsilon", 1, "--out", folder], "choose a new or empty folder"),
    ]
    for arguments, message in wrong:
        result = call(folder, *arguments)
        assert result.exit_code == 2
        assert message in result.output
