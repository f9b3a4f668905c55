"""A journal hands released answers on, and refuses a file that is not its own."""

import numpy as np
import pytest

from tacit import Ledger
from tacit.errors import LedgerError
from tacit.pate import GNMax, Journal

VOTES = np.array([[100, 0, 0], [2, 98, 0], [0, 3, 97], [40, 30, 30]] * 3)


def test_a_journal_hands_answers_on_without_paying_again(tmp_path):
    ledger = Ledger(tmp_path / "l.ledger")
    path, settings = tmp_path / "answers.jsonl", {"n": len(VOTES)}
    first = GNMax(8.0).answer(
        VOTES, ledger=ledger, journal=Journal(path, settings=settings, ledger=ledger)
    )
    paid = len(list(ledger.history()))
    again = GNMax(8.0).answer(
        VOTES, ledger=ledger, journal=Journal(path, settings=settings, ledger=ledger)
    )
    assert again.tolist() == first.tolist()
    assert len(list(ledger.history())) == paid


def test_a_journal_of_other_settings_or_another_ledger_is_refused(tmp_path):
    ledger = Ledger()
    path = tmp_path / "answers.jsonl"
    journal = Journal(path, settings={"n": 1}, ledger=ledger)
    GNMax(8.0).answer(VOTES, ledger=ledger, journal=journal)
    with pytest.raises(LedgerError, match="other settings"):
        Journal(path, settings={"n": 2}, ledger=ledger)
    with pytest.raises(LedgerError, match="no payment"):
        Journal(path, settings={"n": 1}, ledger=Ledger())
    path.write_text("hello\n")
    with pytest.raises(LedgerError, match="journal"):
        Journal(path, settings={"n": 1}, ledger=ledger)


def test_a_line_torn_by_a_kill_is_dropped(tmp_path):
    ledger = Ledger()
    path = tmp_path / "answers.jsonl"
    GNMax(8.0).answer(VOTES[:3], ledger=ledger, journal=Journal(path, settings={}, ledger=ledger))
    with path.open("ab") as stream:
        stream.write(b'{"answers": [[3, ')
    journal = Journal(path, settings={}, ledger=ledger)
    assert len(journal) == 3
    journal.record([3], [1])
    assert len(Journal(path, settings={}, ledger=ledger)) == 4
