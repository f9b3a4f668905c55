"""Work that is killed after its payment does not pay again, and repeats its noise."""

from pathlib import Path

import pytest

from tacit import Budget, Ledger
from tacit.events import Gaussian, PureDP
from tacit.ledger import paid_once


class Killed(BaseException):
    pass


def test_the_second_try_pays_nothing_and_has_the_same_seed(tmp_path: Path) -> None:
    seeds = []
    for is_killed in (True, True, False):
        with Ledger(tmp_path / "a.ledger", Budget(1.0)) as ledger:
            try:
                with paid_once(ledger, b"data", b"settings") as seed:
                    seeds.append(seed)
                    ledger.spend(PureDP(0.5), note="a")
                    ledger.spend(PureDP(0.5), note="a")
                    if is_killed:
                        raise Killed
            except Killed:
                assert list((tmp_path / ".a.ledger.pending").iterdir())
    assert len(set(seeds)) == 1
    assert seeds[0].bit_length() > 128
    assert not (tmp_path / ".a.ledger.pending").exists()
    with Ledger(tmp_path / "a.ledger") as ledger:
        assert len(ledger.history()) == 2


def test_other_data_other_settings_and_finished_work_pay_again(tmp_path: Path) -> None:
    seeds = []
    for parts in (
        (b"data", b"s"),
        (b"other", b"s"),
        (b"data", b"t"),
        (b"datas", b""),
        (b"data", b"s"),
    ):
        with Ledger(tmp_path / "a.ledger") as ledger:
            try:
                with paid_once(ledger, *parts) as seed:
                    seeds.append(seed)
                    ledger.spend(PureDP(0.1))
                    if len(seeds) < 4:
                        raise Killed
            except Killed:
                pass
    assert len(set(seeds)) == 4  # the last one is the first one again
    assert seeds[-1] == seeds[0]
    with Ledger(tmp_path / "a.ledger") as ledger:
        assert len(ledger.history()) == 4
        with paid_once(ledger, b"data", b"s") as seed:
            ledger.spend(PureDP(0.1))
        assert seed not in seeds
        assert len(ledger.history()) == 5


def test_another_payment_in_the_same_place_is_paid(tmp_path: Path) -> None:
    with Ledger(tmp_path / "a.ledger") as ledger:
        for event in (PureDP(0.1), Gaussian(5.0)):
            with ledger.attempt("run"):
                ledger.spend(event)
        with ledger.attempt("run"):
            ledger.spend(PureDP(0.1), partition="east")
        assert len(ledger.history()) == 3


def test_the_file_is_secret_and_confirms_no_guess(tmp_path: Path) -> None:
    import hashlib

    with Ledger(tmp_path / "a.ledger") as ledger:
        with pytest.raises(Killed), paid_once(ledger, b"data"):
            raise Killed
        (file,) = (tmp_path / ".a.ledger.pending").iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert hashlib.sha256(b"data").digest() not in file.read_bytes()
