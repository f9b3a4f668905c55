"""The file: what is refused, what is kept, what is found out."""

import os
import sqlite3
from pathlib import Path

import pytest

from tacit import Budget, Ledger, Relation
from tacit.errors import BudgetExceeded, LedgerError
from tacit.events import Gaussian, PureDP, Repeated

BUDGET = Budget(1.0, 1e-5)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A ledger with three spends and a plan, closed."""
    path = tmp_path / "clinic.ledger"
    with Ledger(path, BUDGET, unit="patient") as ledger:
        for number in range(3):
            ledger.spend(Gaussian(20.0), note=f"query {number}", partition="east")
        ledger.plan(Repeated(Gaussian(60.0), 5)).step()
    return path


def tamper(path: Path, *commands: str | tuple[str, tuple[object, ...]]) -> None:
    connection = sqlite3.connect(path)
    for name in ("entry_is_fixed", "entry_stays", "ledger_is_fixed"):
        connection.execute(f"DROP TRIGGER {name}")
    for command in commands:
        connection.execute(*((command,) if isinstance(command, str) else command))
    connection.commit()
    connection.close()


def test_a_ledger_is_remembered(file: Path) -> None:
    with Ledger(file) as ledger:
        assert ledger.budget == BUDGET
        assert ledger.unit == "patient"
        assert ledger.relation is Relation.ADD_REMOVE
        assert [entry.note for entry in ledger.history()][:3] == ["query 0", "query 1", "query 2"]
        assert ledger.resume(4).taken == 1
        assert ledger.verify().entries == 4


def test_a_spent_budget_stays_spent(tmp_path: Path) -> None:
    with Ledger(tmp_path / "a.ledger", Budget(0.5)) as ledger:
        ledger.spend(PureDP(0.5))
    with Ledger(tmp_path / "a.ledger", Budget(0.5)) as ledger, pytest.raises(BudgetExceeded):
        ledger.spend(PureDP(1e-9))


def test_the_file_is_made_durable_at_each_commit(file: Path) -> None:
    with Ledger(file) as ledger:
        connection = ledger._store.connection
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA foreign_keys").fetchone() == (1,)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"budget": Budget(2.0, 1e-5)}, "budget"),
        ({"budget": Budget(1.0)}, "budget"),
        ({"relation": Relation.REPLACE_ONE}, "relation"),
        ({"unit": "visit"}, "unit"),
    ],
)
def test_a_file_with_other_settings_is_refused(file: Path, arguments: dict, name: str) -> None:
    with pytest.raises(LedgerError, match=f"has {name} .* but was opened with {name}"):
        Ledger(file, **arguments)
    Ledger(file, BUDGET, Relation.ADD_REMOVE, "patient").close()


def test_a_file_without_a_budget_cannot_get_one(tmp_path: Path) -> None:
    Ledger(tmp_path / "a.ledger").close()
    with pytest.raises(LedgerError, match="has budget none"):
        Ledger(tmp_path / "a.ledger", BUDGET)


@pytest.mark.parametrize("content", [b"", b"hello", b"SQLite format 3\0" + b"\0" * 4000])
def test_a_foreign_or_empty_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.ledger"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"cannot be used as a ledger|not a ledger"):
        Ledger(path, BUDGET)
    assert path.read_bytes() == content


def test_another_database_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute("CREATE TABLE entry (id INTEGER)")
    connection.commit()
    connection.close()
    with pytest.raises(LedgerError, match="not a ledger"):
        Ledger(tmp_path / "a.db", BUDGET)


@pytest.mark.parametrize("number", [1, 99])
def test_another_format_is_refused_and_named(file: Path, number: int) -> None:
    tamper(file, f"PRAGMA user_version = {number}")
    with pytest.raises(LedgerError, match=f"is a ledger of format {number}, .* format 2 alone"):
        Ledger(file)


def test_a_missing_folder_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="does not exist"):
        Ledger(tmp_path / "nowhere" / "a.ledger", BUDGET)
    with pytest.raises(LedgerError, match="is not a file"):
        Ledger(tmp_path, BUDGET)
    with pytest.raises(LedgerError, match="there is no ledger"):
        Ledger(tmp_path / "b.ledger", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_damaged_bytes_are_found(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[4096:8192] = b"\xff" * 4096
    file.write_bytes(content)
    with pytest.raises(LedgerError), Ledger(file) as ledger:
        ledger.verify()


def test_entries_cannot_be_changed_by_accident(file: Path) -> None:
    connection = sqlite3.connect(file)
    for command in (
        "UPDATE entry SET note = 'other'",
        "DELETE FROM entry",
        "UPDATE ledger SET epsilon = 9",
    ):
        with pytest.raises(sqlite3.IntegrityError):
            connection.execute(command)
    connection.close()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("UPDATE entry SET note = 'other' WHERE id = 2", "entry 2 was changed"),
        ("UPDATE entry SET cost = replace(cost, '0.', '0.0') WHERE id = 1", "entry 1 was changed"),
        ("UPDATE entry SET partition = 'west' WHERE id = 3", "entry 3 was changed"),
        ("DELETE FROM entry WHERE id = 2", "entry 2 is missing"),
        ("UPDATE total SET cost = 'x'", "no ledger writes"),
        ("UPDATE total SET cost = '{}'", "no ledger writes"),
        ("UPDATE entry SET id = 99 WHERE id = 1", "missing"),
        ("DELETE FROM total", "running totals"),
        ("UPDATE total SET entries = 1", "running totals"),
        ("UPDATE progress SET taken = 0", "progress"),
        ("UPDATE ledger SET epsilon = 9", "changed"),
    ],
)
def test_edits_are_found(file: Path, command: str, message: str) -> None:
    tamper(file, command)
    with pytest.raises(LedgerError, match=message), Ledger(file) as ledger:
        ledger.verify()


def test_an_entry_that_cannot_be_read_is_reported_as_damage(file: Path) -> None:
    tamper(file, 'UPDATE entry SET event = \'{"type": "Magic"}\' WHERE id = 1')
    with Ledger(file) as ledger, pytest.raises(LedgerError, match="no ledger writes"):
        ledger.history()


def test_entries_cut_off_at_the_end_are_found_at_opening(file: Path) -> None:
    tamper(file, "DELETE FROM progress", "DELETE FROM entry WHERE id >= 4")
    with pytest.raises(LedgerError, match="missing at its end"):
        Ledger(file)


def test_a_forged_price_is_found_even_with_a_forged_chain(file: Path) -> None:
    from tacit.ledger.store import LedgerRow as Row
    from tacit.ledger.store import chained, genesis

    with Ledger(file) as ledger:
        settings, rows = ledger._store.settings, ledger._store.rows()
    previous, commands = genesis(settings), []
    for row in rows:
        cost = row.cost and row.cost.replace("0.00", "0.0000")
        row = Row(*row[:6], cost, *row[7:])
        previous = chained(previous, row)
        commands.append(
            ("UPDATE entry SET cost = ?, hash = ? WHERE id = ?", (cost, previous, row.id))
        )
    tamper(file, *commands, f"UPDATE head SET hash = '{previous}'")
    with pytest.raises(LedgerError, match=r"priced too low"), Ledger(file) as ledger:
        ledger.verify()


def test_reading_only_never_writes(file: Path) -> None:
    before = file.read_bytes()
    with Ledger(file, read_only=True) as ledger:
        assert len(ledger.history()) == 4
        ledger.verify()
        with pytest.raises(LedgerError, match="read-only"):
            ledger.spend(PureDP(0.001))
        with pytest.raises(LedgerError, match="read-only"):
            ledger.resume(4).step()
    assert file.read_bytes() == before


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere"
)
def test_a_write_protected_file_is_refused_when_opened_and_can_be_read(file: Path) -> None:
    file.chmod(0o444)
    file.parent.chmod(0o555)
    try:
        with pytest.raises(LedgerError, match=r"cannot be written|cannot be opened"):
            Ledger(file)
        with Ledger(file, read_only=True) as ledger:
            assert len(ledger.history()) == 4
    finally:
        file.parent.chmod(0o755)


def test_a_file_that_cannot_be_written_is_refused_when_opened(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tacit.ledger import store

    monkeypatch.setattr(  # root may write everywhere, so the refusal has to come from SQLite
        store,
        "_connect",
        lambda path, timeout, _: sqlite3.connect(f"file:{path}?mode=ro", uri=True),
    )
    with pytest.raises(LedgerError, match="cannot be written"):
        Ledger(file)


def test_a_file_kept_locked_is_reported_and_nothing_is_recorded(file: Path) -> None:
    with Ledger(file, timeout=0.05) as ledger:
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="locked by another process"):
            ledger.spend(PureDP(0.001))
        assert len(ledger.history()) == 4
        other.execute("ROLLBACK")
        other.close()
        ledger.spend(PureDP(0.001))
        assert len(ledger.history()) == 5


def test_an_interrupted_spend_leaves_no_trace(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tacit.ledger.store import Totals

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with Ledger(file) as ledger:
        monkeypatch.setattr(Totals, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ledger.spend(PureDP(0.001))
        assert ledger.verify().entries == 4


def test_two_processes_that_make_the_same_file_share_it(tmp_path: Path) -> None:
    from tacit.ledger import store

    path = tmp_path / "a.ledger"
    with Ledger(path, BUDGET) as ledger:
        ledger.spend(Gaussian(30.0))
        store.create_file(path, ledger._store.settings)  # comes second, must not replace it
        assert len(ledger.history()) == 1
    assert [item.name for item in tmp_path.iterdir()] == ["a.ledger"]
