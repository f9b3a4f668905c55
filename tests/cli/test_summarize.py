"""`tacit summarize` prints what it stores, pays once, and stops for a wrong schema."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tacit import Budget, Ledger
from tacit.cli import app


def call(folder: Path, *arguments: object, schema: str = "wage.toml") -> Result:
    table = folder / ("classes.csv" if schema == "class.toml" else "people.csv")
    fixed = ["summarize", table, "--schema", folder / schema]
    return CliRunner().invoke(app, list(map(str, [*fixed, *arguments])))


def test_every_printed_number_is_the_stored_one(folder: Path) -> None:
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
    as_json = call(folder, "--epsilon", 1, "--seed", 0, "--out", out, "--json")
    assert json.loads(as_json.output) == stored


def test_a_ledger_pays_once_for_one_folder(folder: Path) -> None:
    file = folder / "people.ledger"
    Ledger(file, Budget(1.0)).close()
    for _ in range(2):
        result = call(folder, "--epsilon", 1, "--ledger", file, "--out", folder / "run")
        assert result.exit_code == 0, result.output
    with Ledger(file, read_only=True) as ledger:
        assert ledger.epsilon(delta=0) == pytest.approx(1.0)
    again = call(folder, "--epsilon", 0.5, "--ledger", file, "--out", folder / "run")
    assert again.exit_code == 2
    assert "other settings" in again.output


def test_a_wrong_schema_stops_with_one_line_and_a_small_price(folder: Path) -> None:
    file = folder / "people.ledger"
    Ledger(file, Budget(1.0)).close()
    wrong = (folder / "wage.toml").read_text().replace('"north", "south"', '"North", "South"')
    (folder / "wage.toml").write_text(wrong.replace('"west"', '"West"'))
    result = call(folder, "--epsilon", 1, "--ledger", file, "--seed", 0)
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
        (["--epsilon", 1, "--out", folder], "must be a new or empty folder"),
    ]
    for arguments, message in wrong:
        result = call(folder, *arguments)
        assert result.exit_code == 2
        assert message in result.output
