"""The tests that need a GPU, and a record of what passed on which device.

    python benchmarks/gpu_tests.py [--limit 540] [--each 60] [paths]

Runs every test marked `gpu` and writes the commit, the device and the results to
results/gpu-tests.md, also if `--limit` seconds are over before all tests are. No test takes longer
than `--each` seconds. `make test-gpu` calls it. Without a GPU nothing runs, except with
`--without`, which runs the tests of the same files that need none, to try this script.
"""

import argparse
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

from _results import table, write

ROOT = Path(__file__).resolve().parent.parent
# Kernels first: what else fails may be for their reasons.
PATHS = (
    "tests/training/gpu/test_kernels.py", "tests/training/gpu/test_banded_blocks.py",
    "tests/training/test_loop_on_gpu.py",
    "tests/training/test_arithmetic.py", "tests/training", "tests/text",
)  # fmt: skip
LINE = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
FAILED = ("FAILED", "ERROR")


def main() -> int:
    """Run the tests, write the record and return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", default=list(PATHS))
    parser.add_argument("--limit", type=float, default=3600)
    parser.add_argument("--each", type=float, default=300)
    parser.add_argument("--without", action="store_true")
    arguments = parser.parse_args()
    import torch

    is_gpu = torch.cuda.is_available()
    if not is_gpu and not arguments.without:
        print("There is no GPU here: nothing was run.")
        return 1
    command = [
        sys.executable, "-u", "-m", "pytest", "-v", "-o", "addopts=--import-mode=importlib",
        "-m", "gpu" if is_gpu else "not gpu and not slow", "-p", "no:cacheprovider",
        "--color=no", "--tb=short", f"--timeout={arguments.each}", *arguments.paths,
    ]  # fmt: skip
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(arguments.limit, child.kill)
    timer.start()
    outcomes: dict[str, str] = {}
    assert child.stdout is not None
    for line in child.stdout:
        print(line, end="", flush=True)
        if found := LINE.match(line):
            outcomes[found[1]] = found[2]
    status = child.wait()
    timer.cancel()
    failed = [name for name, outcome in outcomes.items() if outcome in FAILED]
    write(
        "gpu-tests",
        f"Tests on {torch.cuda.get_device_name() if is_gpu else 'a CPU'}",
        ("torch", "triton", "numpy"),
        f"Commit {_commit()}. Tests of {', '.join(arguments.paths)}. "
        + ("All were reached." if status >= 0 else "The time was over before all were reached."),
        table(["outcome", "tests"], sorted(Counter(outcomes.values()).items())),
        "Failed: " + (", ".join(failed) or "none") + ".",
    )
    return status


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
