"""`tacit sweep` trains a recipe at every budget."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit.cli import app


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.slow
def test_sweep_prints_a_row_for_each_budget(recipe):
    arguments = ("sweep", recipe, "--epsilons", "1,4", "--repeats", "2", "--out", "here")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "releasing every run would cost epsilon" in result.stdout
    certificates = sorted(Path("here").glob("epsilon-*/certificate.json"))
    assert len(certificates) == 4
    assert run("verify", str(certificates[0])).exit_code == 0
    found = json.loads(run(*arguments, "--json").stdout)
    assert [row["epsilon"] for row in found["summaries"]] == [1.0, 4.0]
    assert run("sweep", recipe, "--epsilons", "one").exit_code == 2
