"""The example of an audit runs as it stands; every run of the tests audits its honest half."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "audit_white_box.py"


@pytest.mark.slow
def test_the_honest_run_passes_with_few_canaries():
    audit = runpy.run_path(str(EXAMPLE))["audit"]
    audit.__globals__.update(CANARIES=400, SEED=2)  # one honest seed in 20 is refuted by chance
    assert audit()


@pytest.mark.slow
def test_the_honest_run_passes_and_the_quiet_one_does_not(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")  # it asserts both
    assert capsys.readouterr().out.count("p-value of the bill") == 2
