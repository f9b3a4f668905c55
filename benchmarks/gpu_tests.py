"""The tests that need a GPU, and a record of what passed on which device.

    python benchmarks/gpu_tests.py [paths]

Runs every test marked `gpu` and writes the commit, the device and the results to
results/gpu-tests.md. `make test-gpu` calls it.
"""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from _results import table, write

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run the tests, write the record and return pytest's exit status."""
    import torch

    if not torch.cuda.is_available():
        print("There is no GPU here: nothing was run.")
        return 1
    paths = sys.argv[1:] or ["tests/training"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "addopts="]
        done = subprocess.run([*command, "--tb=short", f"--junitxml={report}", *paths], cwd=ROOT)
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    outcomes = Counter(_outcome(case) for case in cases)
    slowest = sorted(cases, key=lambda case: -float(case.get("time", 0)))[:5]
    failed = [case.get("name") for case in cases if _outcome(case) == "failed"]
    write(
        "gpu-tests",
        f"Tests on {torch.cuda.get_device_name()}",
        ("torch", "triton", "numpy"),
        f"Commit {_commit()}. Tests of {', '.join(paths)}.",
        table(["outcome", "tests"], sorted(outcomes.items())),
        "Failed: " + (", ".join(map(str, failed)) or "none") + ".",
        table(
            ["slowest", "s"], [(c.get("name"), f"{float(c.get('time', 0)):.0f}") for c in slowest]
        ),
    )
    return done.returncode


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
