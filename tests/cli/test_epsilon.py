"""`tacit epsilon` prints the numbers of the library."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tacit
from tacit import events as ev
from tacit.cli import app
from tacit.cli._shared import sgd
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
        ("--delta 1e-5", "--delta 2", "delta must be in [0, 1], got 2.0"),
        ("--delta 1e-5", "--delta -1", "delta must be in [0, 1], got -1.0"),
        ("--rate 0.01", "--rate 1.5", "rate must be in [0, 1], got 1.5"),
        ("--rate 0.01", "--rate nan", "rate must be in [0, 1], got nan"),
        ("multiplier 4", "multiplier 0", "noise_multiplier must be a positive finite number"),
        ("multiplier 4", "multiplier inf", "noise_multiplier must be a positive finite number"),
        ("--steps 10000", "--steps -3", "steps must be a whole number >= 0, got -3"),
        ("--steps 10000", "--steps 2.5", "'2.5' is not a whole number"),
        ("--steps 10000", "--steps many", "'many' is not a whole number"),
        ("--steps 10000", "", "give --rate and --steps"),
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


def cpu_seconds(code: str, *arguments: str) -> float:
    """Return the least CPU time of three fresh interpreters, because others may share the cores."""
    timed = f"import time\ntry:\n {code}\nexcept SystemExit:\n pass\nprint(time.process_time())"
    command = [sys.executable, "-c", timed, *arguments]
    runs = [subprocess.check_output(command, text=True, cwd=ROOT) for _ in range(3)]
    return min(float(out.split()[-1]) for out in runs)


def test_tacit_epsilon_answers_quickly():
    base = cpu_seconds("import numpy, scipy.special")  # 0.2 s on an idle machine
    verb = cpu_seconds("from tacit.cli import main; main()", "epsilon", *ABADI.split())
    assert verb < max(0.6, 3.5 * base)  # half a second, unless the machine is busy
