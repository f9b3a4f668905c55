"""`torchrun -m tacit train`: one run folder, one plan, and the model of a single process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tacit.experiments import RunFolder
from tacit.ledger import Ledger

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RECIPE = """
name = "small"
[data]
name = "digits"
[privacy]
epsilon = 3.0
[training]
epochs = 3
[run]
seed = 7
baseline_steps = 0
"""


CORRELATED = RECIPE.replace("epochs = 3", "epochs = 3\nbands = 4")


def start(folder: Path, ranks: int, text: str = RECIPE, *more: str) -> subprocess.Popen:
    recipe = folder.parent / "recipe.toml"
    recipe.write_text(text)
    return launch(ranks, "-m", "tacit", "train", str(recipe), "--out", str(folder), *more)


def launch(ranks: int, *program: str) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return subprocess.Popen(
        [sys.executable, *(launcher if ranks > 1 else []), *program],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def run(folder: Path, ranks: int, text: str = RECIPE, *more: str) -> str:
    process = start(folder, ranks, text, *more)
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    return out


def wait_for_steps(folder: Path, process: subprocess.Popen, rows: int) -> None:
    while len(RunFolder(folder).read_lines("metrics.jsonl")) < rows:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


def kill_all(process: subprocess.Popen) -> None:
    """Kill the launcher and its workers, which are in sessions of their own, at one moment."""
    victims = [process.pid, *children_of(process.pid)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    process.communicate()


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    direct = [int(word) for word in path.read_text().split()] if path.exists() else []
    return [grown for child in direct for grown in (child, *children_of(child))]


def weights(folder: Path):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(folder, 1)
    return folder


def check_same_run(folder: Path, alone: Path) -> None:
    check_run(folder, alone)
    for name, value in weights(alone).items():
        torch.testing.assert_close(weights(folder)[name], value, rtol=1e-4, atol=1e-5)


def check_run(folder: Path, alone: Path) -> None:
    facts, single = RunFolder(folder).facts(), RunFolder(alone).facts()
    assert facts.event == single.event
    with Ledger(folder / "run.ledger") as ledger:
        assert [entry.kind for entry in ledger.history()] == ["plan"]
        ledger.verify()
    verified = subprocess.run(
        [sys.executable, "-m", "tacit", "verify", str(folder)], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_make_one_run_that_equals_that_of_one_process(tmp_path, alone, ranks):
    out = run(tmp_path / "run", ranks)
    assert out.count("epsilon") == 1  # rank 0 prints alone
    check_same_run(tmp_path / "run", alone)


@pytest.mark.parametrize("numbers", [(2, 3), (3, 2), (1, 2), (3, 1)])
def test_a_killed_run_resumes_on_another_number_of_ranks(tmp_path, alone, numbers):
    kill_and_resume(tmp_path / "run", *numbers)
    check_run(tmp_path / "run", alone)


def test_correlated_noise_begins_anew_where_a_killed_run_ended(tmp_path):
    (tmp_path / "alone").mkdir()
    run(tmp_path / "alone" / "run", 1, CORRELATED)
    kill_and_resume(tmp_path / "run", 2, 3, CORRELATED)
    check_run(tmp_path / "run", tmp_path / "alone" / "run")


def kill_and_resume(folder: Path, first: int, second: int, text: str = RECIPE) -> None:
    process = start(folder, first, text)
    wait_for_steps(folder, process, 1)
    kill_all(process)
    assert not RunFolder(folder).is_finished
    run(folder, second, text, "--lost-steps", "skip")  # a run with a seed asks
    assert RunFolder(folder).facts().resumed == 1


def test_a_rank_that_dies_ends_the_run_and_it_resumes(tmp_path, alone):
    process = start(tmp_path / "run", 3)
    wait_for_steps(tmp_path / "run", process, 1)
    workers = children_of(process.pid)
    os.kill(workers[-1], signal.SIGKILL)
    _, error = process.communicate(timeout=120)
    assert process.returncode != 0
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers), error
    run(tmp_path / "run", 2, RECIPE, "--lost-steps", "pay")
    check_run(tmp_path / "run", alone)


@pytest.mark.parametrize("options", [[], ["--shard"]], ids=["DDP", "FSDP2"])
def test_the_example_of_data_parallel_training_runs(options):
    process = launch(2, str(ROOT / "examples" / "data_parallel.py"), *options)
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    assert out.count("epsilon 3.000 on 2 ranks") == 1
