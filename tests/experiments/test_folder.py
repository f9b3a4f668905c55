"""The run folder: whole files only, and no run under another recipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tacit import Budget, Ledger
from tacit._whole_file import write_whole
from tacit.errors import LedgerError
from tacit.experiments import Recipe, RunFolder


def test_a_file_that_cannot_be_replaced_keeps_its_content_and_leaves_nothing(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write("metrics.jsonl", "old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        folder.write("metrics.jsonl", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == "old"


def test_the_name_of_a_new_file_is_on_disk_before_anything_follows(tmp_path, monkeypatch):
    """Or a power failure puts the old file back: a checkpoint that is older than its reserve."""
    synced = []

    def fsync(handle):
        synced.append((os.fstat(handle).st_ino, os.listdir(tmp_path)))

    monkeypatch.setattr("os.fsync", fsync)
    write_whole(tmp_path / "new", "text")
    assert synced[-1] == (tmp_path.stat().st_ino, ["new"])


def test_a_secret_file_is_readable_by_its_owner_alone(tmp_path):
    assert write_whole(tmp_path / "key", b"k", mode=0o600).stat().st_mode & 0o077 == 0


def test_a_folder_is_empty_until_a_file_is_complete(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert folder.is_empty
    folder.path.mkdir()
    (folder / ".recipe.toml.x.part").write_text("half")
    assert folder.is_empty
    folder.close()
    assert not list(folder.path.iterdir())
    folder.write("recipe.toml", "")
    assert not folder.is_empty


def test_recipes_are_compared_by_their_settings_not_their_text(tmp_path):
    folder, recipe = RunFolder(tmp_path), Recipe.read("digits")
    folder.refuse_other_recipe(recipe, resume="")  # the folder holds none
    folder.write("recipe.toml", "# written by hand\n" + recipe.to_toml().replace(" = ", "="))
    folder.refuse_other_recipe(recipe, resume="")
    other = recipe.with_settings({"training.epochs": 1})
    with pytest.raises(ValueError, match=r"another recipe.*as it was planned: tacit train"):
        folder.refuse_other_recipe(other, resume="tacit train")


def test_a_folder_without_facts_holds_no_finished_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="no finished run"):
        RunFolder(tmp_path).facts()


HOLD = """
import sys, time
from tacit.experiments.folder import RunFolder
with RunFolder(sys.argv[1]).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def python(code, *arguments):
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_held_folder_is_refused_and_freed_by_kill_9(tmp_path):
    folder = RunFolder(tmp_path / "run")
    holder = python(HOLD, folder.path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError, match="another process works in"), folder.locked():
        pass
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with folder.locked(), pytest.raises(BlockingIOError), folder.locked():
        pass  # a second thread or call of the same process is refused too
    with folder.locked():
        assert folder.is_empty


def test_every_verb_that_writes_holds_the_folder(tmp_path):
    from tacit.experiments import run_pate, sweep, train

    recipe = Recipe.parse("[training]\nepochs = 1\n")
    with RunFolder(tmp_path).locked():
        for work in (
            lambda: train(recipe, tmp_path),
            lambda: run_pate(Recipe(method="pate"), tmp_path),
            lambda: sweep(recipe, tmp_path, epsilons=[1.0]),
        ):
            with pytest.raises(BlockingIOError):
                work()


RACE = """
import json, os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from tacit.experiments import Recipe, RunFolder, train

recipe = Recipe.parse("[training]\\nbatch_size = 100\\nepochs = 3\\n[run]\\nbaseline_steps = 0")
FINISHED, REFUSED = 0, 3

def started(path):
    child = os.fork()
    if child:
        return child
    try:
        train(recipe, path)
        os._exit(FINISHED)
    except BlockingIOError:
        os._exit(REFUSED)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(9)

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for number in range(int(sys.argv[2])):
    path = os.path.join(sys.argv[1], str(number))
    both = [started(path), started(path)]
    if number % 2:
        time.sleep(random.uniform(0.0, 1.5))
        os.kill(both[0], signal.SIGKILL)
    codes = [ended(child) for child in both]
    last = ended(started(path))
    with RunFolder(path).reopen_ledger(RunFolder(path).facts()) as ledger:
        plans = [entry.kind for entry in ledger.history()]
    print(json.dumps([codes, last, plans]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and kill -9")
def test_two_processes_on_one_folder_leave_one_plan_and_a_finished_run(tmp_path):
    process = python(RACE, tmp_path, 20)
    lines = process.communicate(timeout=580)[0].splitlines()
    assert process.returncode == 0
    assert len(lines) == 20
    refused = 0
    for codes, last, plans in map(json.loads, lines):
        assert set(codes) <= {0, 3, -9}
        assert last == 0  # the folder is not dead: it is finished, or can be resumed
        assert plans == ["plan"]
        refused += 3 in codes
    assert refused > 5  # otherwise the processes hardly met


def test_a_run_remembers_where_its_data_are(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    assert folder.data_root(None) is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TACIT_DATA", raising=False)
    folder.remember_data("here")
    assert folder.data_root(None) == str(tmp_path / "here")
    assert folder.data_root("there") == "there"
    assert (folder / "data.json").stat().st_mode & 0o777 == 0o600
    folder.write("data.json", "[]")
    assert folder.data_root(None) is None


def test_the_ledger_that_a_recipe_names_must_exist_and_have_its_relation(tmp_path):
    file = tmp_path / "people.ledger"
    recipe = Recipe.from_dict({"privacy": {"ledger": str(file), "epsilon": 1.0}})
    with pytest.raises(LedgerError, match=r"there is no ledger at .*people\.ledger\. Create it"):
        RunFolder(tmp_path / "run").open_ledger(recipe, None)
    assert not file.exists()
    Ledger(file, Budget(4.0, 1e-5)).close()
    with RunFolder(tmp_path / "run").open_ledger(recipe, Budget(1.0, 1e-5)) as ledger:
        assert ledger.budget == Budget(4.0, 1e-5)
    other = recipe.with_settings({"privacy.relation": "replace_one"})
    with pytest.raises(LedgerError, match="relation"):
        RunFolder(tmp_path / "run").open_ledger(other, None)
