"""Each row of the mission works from the command line or a few lines of Python: `mission.sh`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mission.sh")
ROWS = re.findall(r'^names\[(\d+)\]="(.*)"$', SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)


def test_rows_are_numbered_in_order():
    assert [int(number) for number, _ in ROWS] == list(range(1, 20))


ENGINES = ("duckdb", "postgresql", "dask", "spark")
CASES = [(number, engine) for number, _ in ROWS for engine in (ENGINES if number == "17" else [""])]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "engine"), CASES, ids=[f"{n}{engine}" for n, engine in CASES])
def test_a_row_of_the_mission(number, engine):
    done = subprocess.run(
        ["bash", SCRIPT, number],
        env=os.environ | {"PYTHON": sys.executable} | ({"ENGINES": engine} if engine else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stdout.startswith("skip"):
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"ok {number} ")
