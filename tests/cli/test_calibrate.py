"""`tacit calibrate` finds the noise, the rate or the steps, and never exceeds the budget."""

import json

import pytest
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.cli._shared import sgd


def run(line: str):
    return CliRunner().invoke(app, line.split())


def answer(line: str) -> dict:
    result = run(f"{line} --json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


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
