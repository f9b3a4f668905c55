"""`tacit ledger show|verify|export`."""

import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import tacit
from tacit import Budget, Ledger
from tacit.cli import app
from tacit.cli._shared import round_down
from tacit.errors import BudgetExceeded
from tacit.events import Gaussian, Laplace, PoissonSampled, Repeated


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small ledger, closed."""
    path = tmp_path / "clinic.ledger"
    with Ledger(path, Budget(1.0, 1e-5), unit="patient") as ledger:
        ledger.spend(Laplace(10.0), note="[bold]mean[/] age", partition="east")
        ledger.plan(Repeated(Gaussian(60.0), 5), note="training")
    return path


def ledger_verb(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["ledger", *map(str, arguments)], env={"COLUMNS": "200"})


def test_show_lists_entries_and_what_is_left(file: Path) -> None:
    result = ledger_verb("show", file)
    assert result.exit_code == 0
    for text in (
        "Laplace noise, multiplier 10",
        "[bold]mean[/] age",  # notes are text, never markup
        "plan: 5 x [Gaussian noise, multiplier 60]",
        "epsilon 1, delta 1e-05 (add_remove, per patient)",
        "if all entries were planned before the first result was seen",
        "The next run alone may cost",
    ):
        assert text in result.output


def test_what_the_next_run_may_cost_is_admitted_and_little_more_is_not(tmp_path: Path) -> None:
    step, budget = PoissonSampled(0.01, Gaussian(1.0)), Budget(4.0, 1e-6)
    path = tmp_path / "a.ledger"
    assert "The first run may cost" not in ledger_verb("show", path).output
    with Ledger(path, budget) as ledger:
        assert "The first run may cost up to epsilon 4" in ledger_verb("show", path).output
        ledger.plan(Repeated(step, 500))
    text = ledger_verb("show", path).output
    shown = json.loads(ledger_verb("show", path, "--json").stdout)
    first, gaussian, pure = (one["epsilon"] for one in shown["next"])
    assert shown["spent"]["epsilon"] < 1.6 < pure + gaussian + first
    assert f"epsilon {round_down(first, 4)} if it is a run like the first" in text
    with Ledger(path) as ledger:
        copies = ledger.remaining().copies
        assert first == tacit.epsilon(Repeated(step, copies), delta=1e-6)
        with pytest.raises(BudgetExceeded, match="a run like the first"):
            ledger.plan(Repeated(step, copies + 1))
        ledger.plan(Repeated(step, copies))
        with pytest.raises(BudgetExceeded):
            ledger.plan(step)
    shown = json.loads(ledger_verb("show", path, "--json").stdout)
    assert shown["spent"]["epsilon"] <= 4.0  # the odometer alone may be above the budget


def test_show_speaks_json(file: Path) -> None:
    data = json.loads(ledger_verb("show", file, "--json", "--delta", "1e-6").stdout)
    assert data["budget"] == {"epsilon": 1.0, "delta": 1e-5}
    assert data["spent"]["delta"] == 1e-6
    assert 0 < data["left"]["epsilon"] < 1
    assert [entry["kind"] for entry in data["entries"]] == ["spend", "plan"]


def test_show_works_without_a_budget_and_with_a_pure_one(tmp_path: Path) -> None:
    Ledger(tmp_path / "a.ledger").close()
    assert "Budget: none" in ledger_verb("show", tmp_path / "a.ledger").output
    with Ledger(tmp_path / "b.ledger", Budget(1.0)) as ledger:
        ledger.spend(Laplace(1.0))
    assert "epsilon 1 at delta 0" in ledger_verb("show", tmp_path / "b.ledger").output


def test_verify_says_that_all_is_well(file: Path) -> None:
    result = ledger_verb("verify", file)
    assert result.exit_code == 0
    assert result.stdout.startswith("whole: 2 entries, 2 rows, head ")
    assert json.loads(ledger_verb("verify", file, "--json").stdout)["whole"] is True


def test_verify_exits_with_1_on_a_changed_file(file: Path) -> None:
    connection = sqlite3.connect(file)
    connection.execute("DROP TRIGGER entry_is_fixed")
    connection.execute("UPDATE entry SET note = 'other' WHERE id = 1")
    connection.commit()
    connection.close()
    result = ledger_verb("verify", file)
    assert result.exit_code == 1
    assert "entry 1 was changed" in result.output
    assert json.loads(ledger_verb("verify", file, "--json").stdout)["whole"] is False


def test_export_prints_or_writes_json(file: Path, tmp_path: Path) -> None:
    printed = json.loads(ledger_verb("export", file).stdout)
    assert ledger_verb("export", file, "--output", tmp_path / "a.json").exit_code == 0
    assert json.loads((tmp_path / "a.json").read_text()) == printed


@pytest.mark.parametrize("verb", ["show", "verify", "export"])
def test_a_missing_file_is_reported_and_not_made(verb: str, tmp_path: Path) -> None:
    result = ledger_verb(verb, tmp_path / "no.ledger")
    assert result.exit_code == 2
    assert "there is no ledger at" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_file_is_reported_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    result = ledger_verb("show", tmp_path / "a.txt")
    assert result.exit_code == 2
    assert "cannot be used as a ledger" in result.output
    assert "Traceback" not in result.output
