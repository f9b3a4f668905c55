"""The examples of private training run as they stand."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LOOPS = {  # and what they need besides torch
    "plain_loop.py": ["sklearn"],
    "accelerate_loop.py": ["accelerate"],
    "lightning_loop.py": ["lightning"],
    "trainer_loop.py": ["transformers", "accelerate", "datasets.load"],
}


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example as a script, in this process: what it prints."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def number(word, output):
    return float(re.search(rf"{word} ([0-9.]+)", output)[1])


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("name", LOOPS)
def test_loops_learn_within_their_budget(run, name):
    for library in LOOPS[name]:
        pytest.importorskip(library, reason=f"{name} needs it: pip install {library}")
    output = run(name)
    assert number("accuracy", output) > 0.8
    assert number("epsilon", output) <= 6.0


def test_the_plain_loop_resumes_without_a_second_charge(run, tmp_path):
    pytest.importorskip("sklearn")
    first = run("plain_loop.py", tmp_path)
    second = run("plain_loop.py", tmp_path)
    assert first == second


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 80


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("epsilon", "accuracy"), [(1, 0.95), (3, 0.97)])
def test_mnist_reaches_its_accuracy(run, monkeypatch, shared_data, epsilon, accuracy):
    monkeypatch.setenv("TACIT_DATA", str(shared_data))
    output = run("mnist_cnn.py", "--epsilon", epsilon)
    assert number("accuracy", output) >= accuracy
    assert number("epsilon", output) <= epsilon
