"""A call on a GPU machine keeps what its rows found, also if their time is over."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def session(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("gpu_session", BENCHMARKS / "gpu_session.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    return module


def script(folder, name, text):
    (folder / name).write_text(text)
    return name


def call(session, monkeypatch, folder, *rows, minutes="1"):
    monkeypatch.setitem(session.CALLS, "tests", list(rows))
    arguments = ["gpu_session.py", "tests", "--folder", str(folder), "--minutes", minutes]
    monkeypatch.setattr(sys, "argv", arguments)
    missing = session.main()
    lines = (folder / "tests.jsonl").read_text().splitlines()
    return missing, [json.loads(line)["outcome"] for line in lines]


def test_a_row_that_takes_too_long_leaves_its_lines_and_the_rest_to_the_next(
    session, monkeypatch, tmp_path
):
    slow = script(tmp_path, "slow.py", "import time\nprint('half', flush=True)\ntime.sleep(60)")
    fails = script(tmp_path, "fails.py", "raise SystemExit(3)")
    good = "import os, pathlib, sys\nprint(os.environ['TACIT_RESULTS'])\n"
    good += "pathlib.Path(sys.argv[1], 'kept.json').write_text('{}')"
    good = script(tmp_path, "good.py", good)
    rows = [
        session.Row(0.2, slow, ""), session.Row(9, fails, ""),
        session.Row(9, f"{good} {{scratch}}", ""), session.Row(1e6, good, ""),
    ]  # fmt: skip
    missing, outcomes = call(session, monkeypatch, tmp_path / "found", *rows)
    assert outcomes == ["time was over", "failed, 3", "done", "left out"]
    assert missing == 3
    log = (tmp_path / "found" / "tests.log").read_text()
    assert "half" in log
    assert str(tmp_path / "found" / "results") in log
    assert (tmp_path / "found" / "kept.json").exists()


def test_every_row_names_a_benchmark_and_fits_into_a_call(session):
    for rows in session.CALLS.values():
        assert sum(row.seconds for row in rows) <= 570
        for row in rows:
            for command in (row.command, row.tiny):
                assert (BENCHMARKS / command.split()[0]).exists()
