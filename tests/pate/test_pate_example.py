"""The example of PATE runs as it stands."""

import re
import runpy
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pate_student.py"


def test_the_student_learns_within_its_budget(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    output = capsys.readouterr().out
    assert float(re.search(r"accuracy ([0-9.]+)", output)[1]) > 0.5
    assert float(re.search(r"epsilon ([0-9.]+)", output)[1]) <= 6.0
