"""`tacit curve` plots epsilon in the terminal and in files."""

import json

import numpy as np
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.cli._shared import sgd

ABADI = "--rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5"


def run(line: str):
    return CliRunner().invoke(app, line.split())


def answer(line: str) -> dict:
    result = run(f"{line} --json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_curve_over_steps_rises_to_the_epsilon_of_the_run():
    data = answer(f"curve {ABADI} --points 9")
    assert (np.diff(data["epsilon"]) >= 0).all()
    assert data["x"][-1] == 10_000
    assert data["epsilon"][-1] == tacit.epsilon(sgd(0.01, 4.0, 10_000), delta=1e-5)


def test_the_curve_over_delta_falls():
    data = answer(f"curve {ABADI} --over delta --points 9")
    assert (np.diff(data["x"]) > 0).all()
    assert (np.diff(data["epsilon"]) <= 0).all()
    assert min(data["x"]) <= 1e-5


def test_the_curve_is_drawn_in_the_terminal():
    lines = run(f"curve {ABADI} --points 9").stdout.splitlines()
    assert lines[0].startswith("epsilon against steps: rate 0.01")
    assert any(0x2800 < ord(character) <= 0x28FF for line in lines for character in line)


def test_the_curve_is_drawn_to_a_file_with_its_data_beside(tmp_path):
    target = tmp_path / "curve.svg"
    assert run(f"curve {ABADI} --points 5 --out {target}").exit_code == 0
    assert target.read_text(encoding="utf-8").startswith("<svg")
    assert len(target.with_suffix(".csv").read_text().splitlines()) == 1 + 5


def test_an_unknown_kind_of_file_is_refused_before_any_work(tmp_path):
    result = run(f"curve {ABADI} --out {tmp_path / 'curve.txt'}")
    assert result.exit_code == 2
    assert "must end in .svg" in result.stderr
