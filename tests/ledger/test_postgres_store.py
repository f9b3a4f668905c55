"""A ledger on a server keeps the promises of the file: races, kills, crashes, roles, moves."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from postgres_server import server

from tacit import Budget, Ledger
from tacit.errors import BudgetExceeded, LedgerError
from tacit.events import Gaussian, PureDP, Repeated
from tacit.ledger import connect, move

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running():
    with server(durable=True) as found:
        yield found


@pytest.fixture
def address(running, request, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return f"{running.url}#{request.node.name}"


def test_it_behaves_like_the_file(address, tmp_path):
    budget = Budget(1.0, 1e-6)
    kept = []
    for place in (tmp_path / "a.ledger", address):
        with Ledger(place, budget) as ledger:
            ledger.spend(PureDP(0.1), note="it's 100 % a 'note'?")
            plan = ledger.plan(Repeated(Gaussian(50.0), 3), partition=("a", "b"), claim=2)
            steps = [plan.step(), plan.step(), plan.step()]
            with pytest.raises(BudgetExceeded):
                plan.step()
            with pytest.raises(BudgetExceeded):
                ledger.spend(PureDP(2.0))
            ledger.seal("a result")
            kept.append((steps, ledger.remaining(), ledger.remaining(partition="b"),
                         ledger.epsilons(delta=1e-6), ledger.event, ledger.verify().rows,
                         [(e.event, e.note, e.cost) for e in ledger.history()]))  # fmt: skip
    assert kept[0] == kept[1]
    with pytest.raises(LedgerError, match="never changes its budget"):
        Ledger(address, Budget(2.0, 1e-6))


def test_a_pointer_file_is_used_like_a_ledger_file(address, tmp_path):
    with Ledger(address, Budget(1.0)) as ledger:
        ledger.spend(PureDP(0.25))
        own = ledger.path
    connect(tmp_path / "team.ledger", address.replace("postgres@", "postgres:secret@"))
    assert "secret" not in (tmp_path / "team.ledger").read_text()
    for path in (own, tmp_path / "team.ledger"):
        with Ledger(path) as again:
            assert len(again.history()) == 1
            assert again.path == path


def test_edits_on_the_server_are_found(address, running):
    import psycopg

    with Ledger(address, Budget(1.0)) as ledger:
        ledger.spend(PureDP(0.5))
        name = address.partition("#")[2]
        with psycopg.connect(running.url, autocommit=True) as raw:
            for forbidden in (
                "UPDATE {}.entry SET cost = ''",
                "DELETE FROM {}.entry",
                "TRUNCATE {}.entry CASCADE",
                "UPDATE {}.ledger SET epsilon = 9",
            ):
                with pytest.raises(psycopg.errors.RaiseException):
                    raw.execute(forbidden.format(f'"{name}"'))
            raw.execute(f'ALTER TABLE "{name}".ledger DISABLE TRIGGER ledger_is_fixed')
            raw.execute(f'UPDATE "{name}".ledger SET epsilon = 9')
        with pytest.raises(LedgerError, match="budget or another setting was edited"):
            ledger.spend(PureDP(0.1))
    with Ledger(address) as ledger, pytest.raises(LedgerError, match="entry 1 was changed"):
        ledger.spend(PureDP(0.1))


def test_keys_and_witnesses_work_on_a_server(address, tmp_path):
    witness = tmp_path / "witness"
    with Ledger(address, Budget(1.0), key=b"k" * 20, witness=witness) as ledger:
        ledger.spend(PureDP(0.1))
        ledger.verify()
    with pytest.raises(LedgerError, match="keyed chain"):
        Ledger(address)
    with pytest.raises(LedgerError, match="not the key"):
        Ledger(address, key=b"x" * 20)


def test_a_role_may_spend_or_only_read(address, running):
    import psycopg

    with psycopg.connect(running.url, autocommit=True) as raw:
        raw.execute("CREATE ROLE spender LOGIN")
        raw.execute("CREATE ROLE reader LOGIN")
    with Ledger(address, Budget(1.0)) as owned:
        owned.spend(PureDP(0.1))
        owned.grant("spender", spend=True)
        owned.grant("reader")
        with pytest.raises(LedgerError, match="has no role"):
            owned.grant('x"; DROP SCHEMA public; --')
    as_role = {role: address.replace("postgres@", f"{role}@") for role in ("spender", "reader")}
    with Ledger(as_role["spender"]) as ledger:
        ledger.spend(PureDP(0.1))
        ledger.verify()
        with pytest.raises(LedgerError, match="only the role that owns"):
            ledger.grant("reader", spend=True)
    with Ledger(as_role["reader"], read_only=True) as ledger:
        assert len(ledger.history()) == 2
        with pytest.raises(LedgerError, match="read-only"):
            ledger.spend(PureDP(0.1))
    with pytest.raises(LedgerError, match="may not spend"):
        Ledger(as_role["reader"])


def test_a_role_that_may_spend_can_undo_no_payment(address, running):
    import psycopg

    name = address.partition("#")[2]
    with psycopg.connect(running.url, autocommit=True) as raw:
        raw.execute("CREATE ROLE cheat LOGIN")
        with Ledger(address, Budget(1.0)) as owned:
            owned.spend(PureDP(0.3))
            early = raw.execute(f'SELECT cost, entries FROM "{name}".total').fetchone()
            owned.spend(PureDP(0.5))
            owned.grant("cheat", spend=True)
    as_cheat = running.url.replace("postgres@", "cheat@")
    forbidden = [
        "DELETE FROM {}.entry",
        "UPDATE {}.entry SET cost = NULL",
        "UPDATE {}.ledger SET epsilon = 9",
        "DELETE FROM {}.total",
        "ALTER TABLE {}.entry DISABLE TRIGGER ALL",
        "DROP TABLE {}.entry",
    ]
    for statement in forbidden:
        with psycopg.connect(as_cheat) as raw, pytest.raises(psycopg.errors.InsufficientPrivilege):
            raw.execute(statement.format(f'"{name}"'))
    with psycopg.connect(as_cheat) as raw:
        raw.execute(f'UPDATE "{name}".total SET cost = %s, entries = %s', early)
    with pytest.raises(LedgerError, match="not the sum of its entries"):
        Ledger(address).spend(PureDP(0.6))


@pytest.mark.parametrize("key", [None, b"k" * 20])
def test_a_ledger_moves_to_a_server_and_back(running, tmp_path, monkeypatch, key):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    address = f"{running.url}#moved_{'with' if key else 'without'}_key"
    first, second = tmp_path / "a.ledger", tmp_path / "b.ledger"
    with Ledger(first, Budget(1.0), key=key) as ledger:
        ledger.spend(PureDP(0.25))
        plan = ledger.plan(Repeated(PureDP(0.01), 10), claim=2)
        plan.step()
        plan_id, ledger_id = plan.id, ledger.id
    move(first, address, key=key)
    move(first, address, key=key)  # completing a move that is complete changes nothing
    with Ledger(first, key=key) as old, pytest.raises(LedgerError, match="was moved to"):
        old.spend(PureDP(0.01))
    with pytest.raises(LedgerError, match="already moved"):
        move(first, second, key=key)
    with Ledger(address, key=key) as ledger:
        assert ledger.id == ledger_id
        assert ledger.resume(plan_id).step() == 3  # two were claimed
        ledger.spend(PureDP(0.25))
        assert ledger.remaining().epsilon == pytest.approx(0.4)
    move(address, second, key=key)
    with Ledger(second, key=key) as ledger:
        assert ledger.verify().entries == 3
        assert ledger.remaining().epsilon == pytest.approx(0.4)
        ledger.spend(PureDP(0.4))
    with Ledger(address, key=key) as gone, pytest.raises(LedgerError, match="was moved to"):
        gone.spend(PureDP(0.01))


def test_an_interrupted_move_is_completed(running, tmp_path, monkeypatch):
    import tacit.ledger.migration as migration

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    address, file = f"{running.url}#interrupted", tmp_path / "a.ledger"
    with Ledger(file, Budget(1.0)) as ledger:
        ledger.spend(PureDP(0.25))
    with monkeypatch.context() as patched:
        patched.setattr(migration, "create_on_server", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            move(file, address)
    with Ledger(file) as old, pytest.raises(LedgerError, match="was moved to"):
        old.spend(PureDP(0.01))
    move(file, address)
    with Ledger(address) as ledger:
        assert ledger.verify().entries == 1


def test_sixteen_clients_200_kills_and_10000_spends_lose_nothing(address, tmp_path):
    """Clients are killed at random moments; the budget fits exactly 10,000 of their spends."""
    Ledger(address, Budget(epsilon=10.0)).close()
    released = tmp_path / "released"
    released.touch()
    script = Path(__file__).with_name("server_spender.py")
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}

    def start(number):
        return subprocess.Popen(
            [sys.executable, str(script), address, str(released), str(number)], env=environment
        )

    rng = random.Random(3)
    clients, started, killed = [start(k) for k in range(16)], 16, 0
    while killed < 200:
        time.sleep(rng.uniform(0.0, 0.1))
        if released.stat().st_size < 60 * killed:  # let the clients spend between the kills
            time.sleep(0.2)
        place = rng.randrange(16)
        if clients[place].poll() is None:
            clients[place].send_signal(signal.SIGKILL)
            killed += clients[place].wait() == -signal.SIGKILL
        clients[place] = start(started)
        started += 1
    for client in clients:
        assert client.wait(timeout=900) == 0
    lines = released.read_text().split("\n")[:-1]
    with Ledger(address) as ledger:
        notes = [entry.note for entry in ledger.history()]
        assert ledger.verify().entries == len(notes) == 10_000  # none over
    assert len(set(lines)) == len(lines)
    assert not set(lines) - set(notes)  # none lost
    assert len(lines) >= 10_000 - killed  # a killed client may have paid without a release


def test_a_crash_of_the_server_loses_no_payment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with server(durable=True) as running:
        paid = []
        with Ledger(f"{running.url}#crash", Budget(epsilon=10.0), timeout=5.0) as ledger:
            paid += [ledger.spend(PureDP(0.01), note=str(k)).note for k in range(50)]
            running.stop("immediate")
            with pytest.raises(LedgerError, match="Release nothing"):
                ledger.spend(PureDP(0.01), note="lost")
            running.start()
        with Ledger(f"{running.url}#crash") as ledger:
            assert {entry.note for entry in ledger.history()} >= set(paid)
            ledger.spend(PureDP(0.01), note="after")
            ledger.verify()
