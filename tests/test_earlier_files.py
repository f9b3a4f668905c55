"""Files that earlier versions wrote are read as docs/versions.md promises.

tests/earlier holds what tacit 0.1.0 wrote: ledgers as the text of their tables, and run folders.
The number in a name is the version of the format.
"""

import shutil
import sqlite3
from pathlib import Path

import pytest

import tacit
from tacit import events as ev
from tacit.errors import LedgerError
from tacit.ledger.store import APPLICATION_ID, READABLE

EARLIER = Path(__file__).resolve().parent / "earlier"
VERSIONS = sorted(READABLE)


def restored(text: Path, path: Path, version: int) -> Path:
    """Write the SQLite file whose tables are given as text."""
    connection = sqlite3.connect(path)
    connection.executescript(text.read_text(encoding="utf-8"))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.commit()
    connection.close()
    return path


@pytest.fixture(params=VERSIONS, ids=lambda version: f"version {version}")
def ledger(request, tmp_path) -> Path:
    text = EARLIER / f"ledger-{request.param}.sql"
    return restored(text, tmp_path / "clinic.ledger", request.param)


@pytest.fixture(params=VERSIONS, ids=lambda version: f"version {version}")
def run(request, tmp_path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(EARLIER / f"run-{request.param}", folder)
    restored(folder / "run.sql", folder / "run.ledger", request.param)
    (folder / "run.sql").unlink()
    return folder


def test_a_ledger_states_what_was_spent_and_pays_on(ledger):
    with tacit.Ledger(ledger) as account:
        notes = [entry.note for entry in account.history()]
        assert notes == ["patients by ward", "training", "mean age"]
        assert account.budget == tacit.Budget(epsilon=4.0, delta=1e-5)
        assert account.epsilon(delta=1e-5) == pytest.approx(2.39685, rel=1e-5)
        assert account.verify().entries == 3
        account.spend(ev.Gaussian(30.0), note="later")
        assert account.verify().entries == 4


def test_a_ledger_of_a_later_version_is_refused_and_named(ledger):
    connection = sqlite3.connect(ledger)
    connection.execute(f"PRAGMA user_version = {max(READABLE) + 1}")
    connection.close()
    with pytest.raises(LedgerError, match=f"version {max(READABLE) + 1}"):
        tacit.Ledger(ledger)


def test_a_certificate_is_still_consistent(run):
    pytest.importorskip("jsonschema")
    from tacit.report import judge

    assert judge(run).problems == []
    assert judge(run / "certificate.json").word == "consistent, not authenticated"


def test_a_certificate_that_was_edited_is_still_found(run):
    pytest.importorskip("jsonschema")
    from tacit.report import judge

    path = run / "certificate.json"
    path.write_text(path.read_text().replace('"add_remove"', '"zero_out"'))
    assert judge(run).problems


def test_the_certificate_and_page_of_a_run_are_written_in_the_present_form(run):
    pytest.importorskip("jinja2")
    from tacit.report import judge, write_page

    write_page(run)
    verdict = judge(run)
    assert verdict.problems == []
    assert verdict.certificate["version"] == 2
