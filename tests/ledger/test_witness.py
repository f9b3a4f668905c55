"""Old copies, second copies, deletion, forgery and edits of a ledger are found before a spend."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tacit import Budget, Ledger
from tacit.errors import BudgetExceeded, LedgerError
from tacit.events import Gaussian, PureDP, Repeated
from tacit.ledger import FileWitness, WitnessMark
from tacit.ledger.chain import Settings, chained, genesis

BUDGET = Budget(1.0, 1e-5)
KEY = b"sixteen bytes or more"
EVENT = Gaussian(30.0)
Open = Callable[[], Ledger]


def tamper(path: Path, *commands: str) -> None:
    connection = sqlite3.connect(path)
    for name in ("entry_is_fixed", "entry_stays", "ledger_is_fixed"):
        connection.execute(f"DROP TRIGGER IF EXISTS {name}")
    for command in commands:
        connection.execute(command)
    connection.commit()
    connection.close()


@pytest.fixture
def witnessed(tmp_path: Path) -> Open:
    """A function that opens a ledger with a witness in a file elsewhere."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "a.ledger"
    return lambda: Ledger(path, BUDGET, witness=tmp_path / "elsewhere.witness")


def paid(open_: Open, times: int = 1) -> Path:
    with open_() as ledger:
        for _ in range(times):
            ledger.spend(EVENT)
        assert ledger.path is not None
        return ledger.path


def test_a_witnessed_ledger_works_and_needs_no_argument_again(witnessed: Open) -> None:
    path = paid(witnessed, 2)
    with Ledger(path) as ledger:
        ledger.spend(EVENT)
        assert ledger.verify().entries == 3
    with pytest.raises(LedgerError, match="witness"):
        Ledger(path, witness="another.witness")


def test_an_old_copy_is_found_before_a_spend(witnessed: Open) -> None:
    path = paid(witnessed)
    saved = path.read_bytes()
    paid(witnessed)
    path.write_bytes(saved)
    with pytest.raises(LedgerError, match="old copy"):
        paid(witnessed)
    with pytest.raises(LedgerError, match="old copy"), Ledger(path, read_only=True) as ledger:
        ledger.verify()


def test_an_old_copy_put_back_under_an_open_ledger_is_found(witnessed: Open) -> None:
    path = paid(witnessed)
    saved = path.read_bytes()
    with witnessed() as ledger:
        ledger.spend(EVENT)
        ledger._store.disconnect_if_idle()
        path.write_bytes(saved)
        with pytest.raises(LedgerError, match=r"replaced|old copy"):
            ledger.spend(EVENT)


def test_two_copies_cannot_both_spend(witnessed: Open) -> None:
    path = paid(witnessed)
    copy = path.with_name("copy.ledger")
    shutil.copy(path, copy)
    paid(witnessed)
    with pytest.raises(LedgerError, match="old copy"):
        Ledger(copy).spend(EVENT)
    with witnessed() as ledger:
        ledger.spend(EVENT)


def test_a_deleted_ledger_is_not_made_anew(witnessed: Open) -> None:
    path = paid(witnessed)
    path.unlink()
    with pytest.raises(LedgerError, match="witness saw one of 1 rows"):
        witnessed()
    assert not path.exists()


def test_a_forged_ledger_is_found(witnessed: Open) -> None:
    path = paid(witnessed)
    with witnessed() as ledger:
        settings = ledger._store.settings
        (row,) = ledger._store.rows()
    row = row._replace(note="forged")
    forged = chained(genesis(settings), row)
    update = f"UPDATE entry SET note = 'forged', hash = '{forged}'"
    tamper(path, update, f"UPDATE head SET hash = '{forged}'")
    with pytest.raises(LedgerError, match="not the one that its witness saw"):
        paid(witnessed)


def test_a_witness_that_is_lost_stops_payments(witnessed: Open, tmp_path: Path) -> None:
    path = paid(witnessed)
    with witnessed() as ledger:
        (tmp_path / "elsewhere.witness").unlink()
        with pytest.raises(LedgerError, match="lost its marks"):
            ledger.spend(EVENT)
        assert len(ledger.history()) == 1
    assert path.is_file()


def test_a_torn_line_of_a_witness_is_passed_over(tmp_path: Path) -> None:
    witness = FileWitness(tmp_path / "w")
    first, second = WitnessMark("a", 1, "x"), WitnessMark("a", 2, "y")
    witness.advance(first)
    with witness.path.open("ab") as file:
        file.write(second.to_json().encode()[:20])
    assert witness.last() == first
    witness.advance(second)
    assert witness.last() == second


def test_what_a_crash_left_unwitnessed_does_not_stop_the_ledger(tmp_path: Path) -> None:
    with Ledger(tmp_path / "a.ledger", BUDGET, witness=tmp_path / "w") as ledger:
        ledger.spend(EVENT)
        kept = (tmp_path / "w").read_bytes()
        ledger.spend(EVENT)
    (tmp_path / "w").write_bytes(kept)  # as if killed between commit and witness
    with Ledger(tmp_path / "a.ledger") as ledger:
        ledger.spend(EVENT)
        assert len(ledger.history()) == 3


# Without a witness: edits of one part are found before a spend.


@pytest.mark.parametrize(
    "command",
    [
        "UPDATE total SET entries = 0, cost = replace(cost, '0.00', '0.000')",
        "UPDATE total SET cost = (SELECT cost FROM entry WHERE id = 2)",
        "DELETE FROM total",
        "UPDATE ledger SET epsilon = 100",
        "UPDATE ledger SET delta = 0.1",
        "UPDATE ledger SET epsilon = NULL, delta = NULL",
        "UPDATE ledger SET unit = 'visit'",
        "UPDATE entry SET cost = (SELECT cost FROM entry WHERE id = 2) WHERE id = 1",
        "UPDATE entry SET note = 'x' WHERE id = 1",
        "DELETE FROM entry WHERE id = 1",
        "UPDATE progress SET taken = 0",
        "UPDATE progress SET steps = 100",
    ],
)
def test_edits_are_found_before_the_next_spend(tmp_path: Path, command: str) -> None:
    path = tmp_path / "a.ledger"
    with Ledger(path, BUDGET) as ledger:
        ledger.spend(Gaussian(20.0))
        ledger.spend(Gaussian(40.0))
        ledger.plan(Repeated(Gaussian(90.0), 5)).step()
    tamper(path, command)
    with pytest.raises(LedgerError), Ledger(path) as ledger:
        ledger.spend(EVENT)
    with pytest.raises(LedgerError), Ledger(path) as ledger:
        ledger.resume(3).step()


def test_edits_of_totals_under_an_open_ledger_free_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.ledger"
    with Ledger(path, Budget(1.0)) as ledger:
        ledger.spend(PureDP(0.9))
        tamper(path, "UPDATE total SET cost = replace(cost, '9/10', '0')")
        with pytest.raises(BudgetExceeded):
            ledger.spend(PureDP(0.5))


def test_a_head_kept_elsewhere_reveals_an_old_copy(tmp_path: Path) -> None:
    path = tmp_path / "a.ledger"
    with Ledger(path, BUDGET) as ledger:
        first = ledger.verify().head
        ledger.spend(EVENT)
        saved = path.read_bytes()
        head = ledger.spend(EVENT).hash
        assert ledger.verify(head=head) == ledger.verify(head=first)
    path.write_bytes(saved)
    with Ledger(path) as ledger:
        ledger.verify()  # by itself an old copy is a whole ledger
        with pytest.raises(LedgerError, match="given head"):
            ledger.verify(head=head)


# A keyed chain.


def test_a_keyed_ledger_needs_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, key = tmp_path / "data" / "a.ledger", tmp_path / "a.key"
    path.parent.mkdir()
    key.write_bytes(KEY + b"\n")
    with Ledger(path, BUDGET, key=key) as ledger:
        ledger.spend(EVENT)
    with pytest.raises(LedgerError, match=r"keyed chain\. Give its key"):
        Ledger(path)
    with pytest.raises(LedgerError, match="not the key"):
        Ledger(path, key=b"another key of enough bytes")
    with Ledger(path, read_only=True) as ledger:
        assert len(ledger.history()) == 1
        with pytest.raises(LedgerError, match="no key was given"):
            ledger.verify()
    monkeypatch.setenv("TACIT_LEDGER_KEY", str(key))
    with Ledger(path) as ledger:
        ledger.spend(EVENT)
        assert ledger.verify().entries == 2
    plain = Ledger(tmp_path / "data" / "b.ledger")
    assert plain._store.settings.key_check is not None


def test_a_forged_chain_without_the_key_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.ledger"
    with Ledger(path, BUDGET, key=KEY) as ledger:
        ledger.spend(EVENT, note="true")
        settings = ledger._store.settings
        (row,) = ledger._store.rows()
    for forged_by in (None, b"a key of the forger, long"):
        forged = chained(genesis(settings, forged_by), row._replace(note="forged"), forged_by)
        update = f"UPDATE entry SET note = 'forged', hash = '{forged}'"
        tamper(path, update, f"UPDATE head SET hash = '{forged}'")
        with pytest.raises(LedgerError), Ledger(path, key=KEY) as ledger:
            ledger.spend(EVENT)
    unkeyed = Settings(*settings[:6])
    forged = chained(genesis(unkeyed), row)
    tamper(
        path,
        "UPDATE ledger SET key_check = NULL",
        f"UPDATE entry SET note = 'true', hash = '{forged}'",
        f"UPDATE head SET hash = '{forged}'",
    )
    with pytest.raises(LedgerError, match="not keyed"):
        Ledger(path, key=KEY)


def test_a_key_beside_the_ledger_or_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.key").write_bytes(KEY)
    with pytest.raises(LedgerError, match="folder of the ledger"):
        Ledger(tmp_path / "a.ledger", key=tmp_path / "a.key")
    with pytest.raises(LedgerError, match="at least 16 bytes"):
        Ledger(tmp_path / "a.ledger", key=b"short")
    assert not (tmp_path / "a.ledger").exists()


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
def test_only_the_owner_may_read_a_ledger(tmp_path: Path) -> None:
    with Ledger(tmp_path / "a.ledger") as ledger:
        ledger.spend(EVENT)
        for name in ("a.ledger", "a.ledger-wal"):
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
