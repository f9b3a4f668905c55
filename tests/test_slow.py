"""What takes more than two seconds says what it does; what takes less says nothing."""

import time

from tacit import _slow


def test_slow_work_says_what_it_does_while_it_runs(capsys, monkeypatch):
    monkeypatch.setattr(_slow, "_AFTER", 0.02)
    with _slow.told_if_slow("tracing the program"):
        time.sleep(0.2)
        assert "tacit: tracing the program ..." in capsys.readouterr().err


def test_quick_work_says_nothing(capsys):
    with _slow.told_if_slow("tracing the program"):
        pass
    assert capsys.readouterr().err == ""
