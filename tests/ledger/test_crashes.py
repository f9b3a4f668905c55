"""Racing, killed and starved processes: never an under-charge, never a lost entry.

The small versions run always; those the project promises run with `-m slow`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tacit import Budget, Ledger
from tacit.errors import LedgerError
from tacit.events import PureDP

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and kill -9")


def stress(*arguments: object) -> dict[str, Any]:
    script = Path(__file__).with_name("stress.py")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_race(file: Path, processes: int, spends: int) -> None:
    granted = stress("race", file, processes, spends)["granted"]
    assert len(granted) == processes
    assert sum(granted) == min(1_000, processes * spends)
    with Ledger(file) as ledger:
        assert ledger.verify().entries == sum(granted)


def test_four_racing_processes_get_exactly_what_fits(tmp_path: Path) -> None:
    check_race(tmp_path / "a.ledger", 4, 300)


@pytest.mark.slow
def test_sixteen_processes_times_200_spends_get_exactly_1000(tmp_path: Path) -> None:
    check_race(tmp_path / "a.ledger", 16, 200)


def check_kills(file: Path, times: int, seed: int) -> None:
    found = stress("kill", file, times, seed)
    assert found["killed"] == times
    assert found["released"] > times  # the test would prove little if nobody got far
    assert found["missing"] == 0
    assert found["repeated_steps"] == 0
    assert found["steps_within_taken"]


def test_twelve_kills_lose_no_entry(tmp_path: Path) -> None:
    check_kills(tmp_path / "a.ledger", 12, 1)


@pytest.mark.slow
def test_two_hundred_kills_lose_no_entry(tmp_path: Path) -> None:
    check_kills(tmp_path / "a.ledger", 200, 2)


def test_a_full_disk_refuses_loses_nothing_and_recovers(tmp_path: Path) -> None:
    found = stress("full", tmp_path / "a.ledger", 300_000)
    assert "could not be written" in found["message"]
    assert "Release nothing" in found["message"]
    assert found["paid"] > 10
    assert found["missing"] == 0


def test_a_database_at_its_largest_size_refuses(tmp_path: Path) -> None:
    with Ledger(tmp_path / "a.ledger", Budget(epsilon=10.0)) as ledger:
        ledger._store.connection.execute("PRAGMA max_page_count = 1")  # at least what it has
        with pytest.raises(LedgerError, match=r"full.*Release nothing"):
            ledger.spend(PureDP(0.001), note="x" * 50_000)
        assert ledger.verify().entries == 0


def test_a_child_may_open_the_file_again_while_the_parent_closes_it(tmp_path: Path) -> None:
    assert stress("reopen", tmp_path / "a.ledger")["entries"] == 22


def test_a_forked_child_is_told_to_open_the_file_again(tmp_path: Path) -> None:
    found = stress("forked", tmp_path / "a.ledger")
    spend, memory, step = found["messages"]
    assert "Open Ledger(" in spend
    assert "give it a path" in memory
    assert "resume(1)" in step
    assert found["entries"] == 2
