"""Studies of many fits: what they measure and cost, and every command of docs/experiments.md."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.experiments import (
    line_data_sets,
    read_vertices,
    study_frank_wolfe,
    study_functional,
    study_migration,
)
from tacit.experiments.regression_studies import Table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "experiments.md"
SMALLER = {"--epsilons": "1", "--deltas": "1e-5", "--repeats": "2", "--sets": "1,2"}
SLOW = ("sweep", "pate", "surface")  # they train models


def table(n=600, n_classes=None, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (n, 3))
    y = 0.5 * x[:, 0] - 0.2 * x[:, 1] + rng.normal(0, 0.05, n)
    return Table("made", x, y if n_classes is None else y > 0, (-1, 1), n_classes, False)


def commands():
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


def small(command):
    """Return the arguments of a command of the page, with fewer fits."""
    _, *arguments = shlex.split(command)
    pairs = zip(["", *arguments[:-1]], arguments, strict=True)
    changed = [SMALLER.get(before, now) for before, now in pairs]
    return changed if "--repeats" in changed else [*changed, "--repeats", "2"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files that the page makes."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, PAGE.name, "exec"), {})
    return tmp_path


def run_and_check(command, files):
    result = CliRunner().invoke(app, [*small(command), "--out", "here", "--json"])
    assert result.exit_code == 0, result.output
    assert (files / "here" / "report.html").is_file()
    figures = list((files / "here" / "figures").glob("*.svg"))
    assert figures
    assert all(figure.with_suffix(".csv").is_file() for figure in figures)
    return json.loads(result.stdout)


@pytest.mark.filterwarnings("ignore:.* models are constant")  # by chance, on few records
@pytest.mark.parametrize("command", [c for c in commands() if c.split()[1] not in SLOW])
def test_an_experiment_of_the_page_runs(command, files):
    if "DATA" in command:
        pytest.skip("needs the folder of published tables: see the slow test")
    found = run_and_check(command, files)
    assert found["is_public"]
    assert all(np.isfinite(curve["errors"]).all() for curve in found["curves"])


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in commands() if "DATA" in c or c.split()[1] in SLOW])
def test_a_longer_command_of_the_page_runs(command, files):
    shared = Path(__file__).resolve().parents[3] / "shared" / "data"
    if "DATA" in command and not shared.is_dir():
        pytest.skip("the published tables are not here")
    run_and_check(command.replace("DATA", str(shared)), files)


def test_the_loss_falls_with_epsilon_and_the_price_covers_all_fits():
    made = table()
    study = study_functional(made, epsilons=[0.1, 100.0], splits=[0.3, 0.6], repeats=3, seed=1)
    assert [curve.name for curve in study.curves] == ["split 0.3", "split 0.6"]
    for curve in study.curves:
        first, last = (np.mean(errors) for errors in curve.errors)
        assert last < first
    assert study.n_fits == 12
    assert 500 < study.epsilon_of_all <= 600.6  # six fits of epsilon 100, six of 0.1
    assert not study.is_public
    assert study_functional(made, epsilons=[1.0], repeats=2, seed=1) == study_functional(
        made, epsilons=[1.0], repeats=2, seed=1
    )


def test_a_ledger_pays_for_every_fit():
    ledger = tacit.Ledger()
    study = study_functional(table(), epsilons=[0.5], repeats=3, ledger=ledger)
    assert study.is_paid
    assert len(ledger.history()) == 3


def test_frank_wolfe_takes_balls_and_polytopes(tmp_path):
    classes = table(n_classes=2)
    balls = study_frank_wolfe(classes, epsilons=[20.0], radii=[0.2, 4.0], steps=20, repeats=2)
    assert balls.y_label == "logistic loss"
    assert np.mean(balls.curves[1].errors) < np.mean(balls.curves[0].errors)
    (tmp_path / "v.csv").write_text("1,0,0\n0,-1,0\n0,0,0\n")
    vertices = read_vertices(tmp_path / "v.csv")
    hull = study_frank_wolfe(table(), epsilons=[20.0], vertices=vertices, repeats=2)
    assert hull.curves[0].name == "polytope of 3 vertices"
    for wrong, message in (("a,b\n", "numbers only"), ("1,2\n3\n", "one length"), ("", "vertex")):
        (tmp_path / "v.csv").write_text(wrong)
        with pytest.raises(ValueError, match=message):
            read_vertices(tmp_path / "v.csv")


@pytest.mark.slow
def test_migrated_data_sets_lower_the_error_on_the_line():
    tables, points = line_data_sets(8, n_records=400, seed=0)
    options = {"epsilon": 3.0, "h": 0.0, "points": points, "repeats": 9, "seed": 0}
    study = study_migration(tables, counts=[1, 7], **options)
    alone, helped = (np.array(curve.errors) for curve in study.curves)
    assert (helped.max(axis=1) < alone.max(axis=1)).all()
    assert np.median(helped[1]) < np.median(helped[0])
    assert np.median(helped[1]) < 0.1 * np.median(alone[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: study_functional(table(n_classes=2), epsilons=[1.0]), "a number as target"),
        (lambda: study_functional(table(), epsilons=[]), "at least one epsilon"),
        (lambda: study_functional(table(), epsilons=[1.0], repeats=0), "repeats must be"),
        (lambda: study_frank_wolfe(table(n_classes=3), epsilons=[1.0]), "two classes"),
        (lambda: study_migration([table()], counts=[2]), "from 0 to 0"),
        (lambda: study_migration([table(n_classes=2)]), "a number as target"),
    ],
)
def test_what_cannot_be_studied_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_table_that_is_not_declared_public_is_kept_to_its_owner(files):
    given = ("experiment", "functional", "wages.csv", "--schema", "wages.toml", "--repeats", "1")
    result = CliRunner().invoke(app, [*given, "--epsilons", "1", "--out", "here"])
    assert result.exit_code == 0, result.output
    assert "do not publish it" in result.stdout
    assert "do not publish it" in (files / "here" / "report.html").read_text()
    wrong = CliRunner().invoke(app, ["experiment", "migration", "wages.csv", "--by", "colour"])
    assert wrong.exit_code == 2
