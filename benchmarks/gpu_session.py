"""What one call of at most ten minutes on a GPU measures, with a time limit for each row.

    python benchmarks/gpu_session.py CALL [--folder FOLDER] [--minutes 9.5] [--tiny]

A call runs its rows in turn. A row is another benchmark; it is stopped when its seconds are over,
and left out if too few are left. What a row prints is in FOLDER/CALL.log at once, what it writes in
FOLDER, and one line for each row in FOLDER/CALL.jsonl. With `--tiny` every row is done at a size
that a CPU can do, which only tests that it runs. Calls, in the order of their worth:

tests       tests marked gpu, kernels first
first       seconds until the first step of gpt2, by phases
steps       over the plain graph: gpt2, LoRA, WRN-16-4, CNN, MLP, LSTM; default sampler
defaults    all defaults beside an ordinary loop, and private.backward
large       Llama of 1.2e9 weights, in full and by LoRA, in time and memory
batches     the largest physical batch
cifar       the recipe of scattering
finetune    the fine-tuning recipe; needs --data and --base as benchmarks/finetune.py does
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, TextIO

HERE = Path(__file__).resolve().parent
LEAST = 0.4  # of a row's seconds that must be left for it to begin


class Row(NamedTuple):
    """A benchmark's arguments on a GPU and on a CPU, and its most seconds."""

    seconds: float
    command: str
    tiny: str


def training(seconds: float, workloads: str, methods: str, at_once: int) -> Row:
    """Return the row of training.py; its processes prepare for three quarters of the time."""
    return Row(
        seconds,
        f"training.py --workloads {workloads} --methods {methods} --at-once {at_once} "
        f"--limit {0.75 * seconds:.0f}",
        f"training.py --workloads logistic --methods {methods} --at-once {at_once}",
    )


CALLS = {
    "tests": [
        Row(560, "gpu_tests.py --limit 540 --each 90",
            "gpu_tests.py --without --each 90 tests/training/gpu/test_graph_replay.py"),
    ],
    "first": [
        Row(200, "first_step.py gpt2", "first_step.py logistic --steps 3"),
        Row(120, "first_step.py mlp", "first_step.py logistic --steps 3"),
        Row(200, "first_step.py gpt2-lora", "first_step.py logistic --steps 3"),
    ],
    # Small models first, which wait for the host: nothing else runs beside them.
    "steps": [
        training(110, "mlp", "plain-graph tacit-poisson-compiled", 2),
        training(110, "lstm cnn-2048", "plain-graph tacit-poisson-compiled", 4),
        training(160, "gpt2", "plain-graph tacit-poisson-compiled", 2),
        training(160, "gpt2-lora wrn-16-4", "plain-graph tacit-poisson-compiled", 4),
    ],
    "defaults": [
        training(270, "mlp cnn-2048 gpt2", "plain-loader tacit-defaults", 6),
        training(270, "mlp cnn-2048 gpt2", "tacit-backward-compiled tacit-poisson-compiled", 6),
    ],
    "large": [
        Row(270,
            "large_models.py full:plain-compiled full:tacit-compiled --wait 170 --folder {scratch}",
            "large_models.py full:plain full:tacit --tiny --depth 2 --rows 2 --folder {scratch}"),
        Row(270,
            "large_models.py lora:plain-compiled lora:tacit-compiled --wait 170 --folder {scratch}",
            "large_models.py lora:plain lora:tacit --tiny --depth 2 --rows 2 --folder {scratch}"),
    ],
    "batches": [
        Row(280, "physical_batch.py --workloads gpt2-lora gpt2 wrn-16-4 lstm",
            "physical_batch.py --workloads mlp"),
        Row(280, "physical_batch.py --workloads cnn-2048 mlp --compiled",
            "physical_batch.py --workloads mlp --compiled"),
    ],
    "cifar": [
        Row(60, "cifar10.py scattering --device cuda", "cifar10.py --help"),
    ],
    "finetune": [
        Row(560, "finetune.py {data} {base} {scratch} --device cuda --seconds 480",
            "finetune.py --help"),
    ],
}  # fmt: skip


def main() -> int:
    """Run the rows of a call; return the number of rows without a result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=list(CALLS))
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("OUT", "gpu-session")))
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--data", default="")
    parser.add_argument("--base", default="")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    deadline, missing = time.monotonic() + 60 * given.minutes, 0
    for row in CALLS[given.call]:
        left = 3600 if given.tiny else deadline - time.monotonic()
        text = (row.tiny if given.tiny else row.command).format(
            data=given.data, base=given.base, scratch="{scratch}"
        )
        outcome = "left out"
        began = time.monotonic()
        if left >= LEAST * row.seconds:
            with (given.folder / f"{given.call}.log").open("a") as log:
                most = 3600 if given.tiny else min(left, row.seconds)
                outcome = run(text.split(), most, given.folder, log)
        took = round(time.monotonic() - began, 1)
        missing += outcome != "done"
        line = json.dumps({"row": text, "outcome": outcome, "seconds": took})
        print(line, flush=True)
        with (given.folder / f"{given.call}.jsonl").open("a") as results:
            results.write(line + "\n")
    return missing


def run(command: list[str], seconds: float, folder: Path, log: TextIO) -> str:
    """Run a benchmark for so many seconds, with all its processes; return how it ended.

    What it keeps between calls is in a scratch folder, whose results are copied to `folder`.
    """
    scratch = Path(tempfile.gettempdir()) / "gpu-session"
    scratch.mkdir(exist_ok=True)
    command = [part.format(scratch=scratch) for part in command]
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    variables["TACIT_RESULTS"] = str(folder.resolve() / "results")
    log.write(f"\n# {' '.join(command)}\n")
    log.flush()
    child = subprocess.Popen(
        [sys.executable, str(HERE / command[0]), *command[1:]],
        stdout=log, stderr=subprocess.STDOUT, env=os.environ | variables, start_new_session=True,
    )  # fmt: skip
    try:
        status = child.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it started, and may have left
    child.wait()
    for found in scratch.glob("*.json*"):
        shutil.copy(found, folder)
    return "time was over" if status is None else "done" if status == 0 else f"failed, {status}"


if __name__ == "__main__":
    sys.exit(main())
