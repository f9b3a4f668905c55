"""`tacit epsilon`, `calibrate` and `curve`: the library's numbers, safely rounded."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tacit
from tacit import events as ev
from tacit.cli import app
from tacit.cli._shared import round_down, round_up, sgd
from tacit.cli.epsilon import ACCOUNTANTS

ROOT = Path(__file__).resolve().parents[2]
ABADI = "--rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5"


def run(line: str):
    return CliRunner().invoke(app, line.split())


def answer(line: str) -> dict:
    result = run(f"{line} --json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_epsilon_prints_one_number_and_its_bracket():
    result = run(f"epsilon {ABADI}")
    assert result.exit_code == 0, result.output
    first, second, third = result.stdout.splitlines()
    assert first == "epsilon = 0.946867"
    assert second.startswith("certified: 0.9468")
    assert third == f"for {sgd(0.01, 4.0, 10_000)}"


def test_epsilon_as_json_is_the_library_s_bracket():
    data = answer(f"epsilon {ABADI} --relation replace_one")
    bracket = tacit.bracket(sgd(0.01, 4.0, 10_000), delta=1e-5, relation="replace_one")
    assert (data["lower"], data["upper"]) == (bracket.lower, bracket.upper)
    assert data["epsilon"] == data["upper"]
    assert ev.from_dict(data["event"]) == sgd(0.01, 4.0, 10_000)


def test_compare_shows_every_accountant_with_the_published_numbers():
    rows = {row["accountant"]: row for row in answer(f"epsilon {ABADI} --compare")["accountants"]}
    assert list(rows) == list(ACCOUNTANTS)
    assert rows["PLD"]["epsilon"] == pytest.approx(0.94687, abs=1e-5)
    assert rows["Moments"]["epsilon"] == pytest.approx(1.26, abs=0.005)
    assert rows["StrongComposition"]["epsilon"] == pytest.approx(9.34, abs=0.005)
    assert rows["PLD"]["epsilon"] <= rows["RDP"]["epsilon"]
    table = run(f"epsilon {ABADI} --compare").stdout
    assert all(name in table for name in ACCOUNTANTS)
    assert "NOT a guarantee" in table


def test_steps_may_be_written_as_a_power_of_ten():
    assert answer(f"epsilon {ABADI.replace('10000', '1e4')}") == answer(f"epsilon {ABADI}")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--delta 1e-5", "--delta 2", "delta must be in (0, 1), got 2.0"),
        ("--delta 1e-5", "--delta 0", "delta must be in (0, 1), got 0.0"),
        ("--rate 0.01", "--rate 1.5", "rate must be in [0, 1], got 1.5"),
        ("--rate 0.01", "--rate nan", "rate must be in [0, 1], got nan"),
        ("multiplier 4", "multiplier 0", "noise_multiplier must be a positive finite number"),
        ("multiplier 4", "multiplier inf", "noise_multiplier must be a positive finite number"),
        ("--steps 10000", "--steps -3", "steps must be a whole number >= 0, got -3"),
        ("--steps 10000", "--steps 2.5", "'2.5' is not a whole number"),
        ("--steps 10000", "--steps many", "'many' is not a whole number"),
        ("--steps 10000", "", "Missing option '--steps'"),
    ],
)
def test_faulty_input_is_answered_in_words_with_exit_code_2(old, new, message):
    for verb in ("epsilon", "curve"):
        result = run(f"{verb} {ABADI}".replace(old, new))
        assert result.exit_code == 2
        assert "Traceback" not in result.output
        if verb == "epsilon":
            assert message in " ".join(result.stderr.split())


def test_zero_steps_cost_nothing():
    assert answer(f"epsilon {ABADI}".replace("10000", "0"))["epsilon"] == 0


def test_calibrate_finds_the_least_noise():
    data = answer("calibrate --epsilon 1 --delta 1e-5 --rate 0.01 --steps 10000")
    assert data["noise_multiplier"] == pytest.approx(3.812818, rel=2e-6)
    assert data["epsilon_reached"] <= 1


def test_calibrate_finds_the_largest_rate():
    data = answer("calibrate --epsilon 1 --delta 1e-5 --noise-multiplier 4 --steps 10000")
    assert data["rate"] > 0.0104
    assert data["epsilon_reached"] <= 1
    bigger = sgd(data["rate"] * (1 + 1e-4), 4.0, 10_000)
    assert tacit.epsilon(bigger, delta=1e-5) > 1


def test_calibrate_finds_the_most_steps():
    data = answer("calibrate --epsilon 1 --delta 1e-5 --noise-multiplier 4 --rate 0.01")
    steps = data["steps"]
    assert isinstance(steps, int)
    assert data["epsilon_reached"] <= 1
    assert tacit.epsilon(sgd(0.01, 4.0, steps), delta=1e-5) <= 1
    assert tacit.epsilon(sgd(0.01, 4.0, steps + 1), delta=1e-5) > 1


def test_calibrate_prints_the_answer_rounded_to_the_safe_side():
    result = run("calibrate --epsilon 3 --delta 1e-5 --rate 0.01 --steps 10000")
    assert result.exit_code == 0, result.output
    name, printed = result.stdout.splitlines()[0].split(" = ")
    assert name == "noise multiplier"
    assert tacit.epsilon(sgd(0.01, float(printed), 10_000), delta=1e-5) <= 3


@pytest.mark.parametrize(
    "given", ["--rate 0.01 --steps 5 --noise-multiplier 1", "--rate 0.01", "--steps 5", ""]
)
def test_calibrate_wants_exactly_two_of_the_three(given):
    result = run(f"calibrate --epsilon 1 --delta 1e-5 {given}")
    assert result.exit_code == 2
    assert "exactly two of" in result.stderr


def test_a_budget_out_of_reach_is_an_error_not_a_number():
    result = run("calibrate --epsilon 1e-9 --delta 1e-9 --rate 0.9 --noise-multiplier 0.5")
    assert result.exit_code in (0, 2)
    assert "Traceback" not in result.output
    if result.exit_code == 0:
        assert "steps = 0" in result.stdout


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


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_curve_is_drawn_to_a_file(tmp_path, kind):
    pytest.importorskip("matplotlib")
    target = tmp_path / f"curve.{kind}"
    assert run(f"curve {ABADI} --points 5 --out {target}").exit_code == 0
    assert target.stat().st_size > 1000


def test_an_unknown_kind_of_file_is_refused_before_any_work(tmp_path):
    result = run(f"curve {ABADI} --out {tmp_path / 'curve.txt'}")
    assert result.exit_code == 2
    assert ".png, .svg or .pdf" in result.stderr


@pytest.mark.parametrize("value", [0.94686683, 1e-7 / 3, 123456.789, 2 / 3 * 1e9, 1e-300, 2.0])
def test_printed_bounds_enclose_the_value(value):
    for digits in (4, 6, 8):
        assert float(round_down(value, digits)) <= value <= float(round_up(value, digits))
        assert float(round_up(value, digits)) <= value * (1 + 1.1 * 10 ** (1 - digits))


def cpu_seconds(code: str, *arguments: str) -> float:
    """CPU time of a fresh interpreter, median of five: the clock and the cores may be shared."""
    timed = f"import time\ntry:\n {code}\nexcept SystemExit:\n pass\nprint(time.process_time())"
    command = [sys.executable, "-c", timed, *arguments]
    runs = [subprocess.check_output(command, text=True, cwd=ROOT) for _ in range(5)]
    return float(np.median([float(out.split()[-1]) for out in runs]))


def test_tacit_epsilon_answers_quickly():
    base = cpu_seconds("import numpy, scipy.special")  # 0.2 s on an idle machine
    verb = cpu_seconds("from tacit.cli import main; main()", "epsilon", *ABADI.split())
    assert verb < max(0.5, 2.5 * base)  # half a second, unless all is slow just now
