"""Fixtures shared by all tests."""

import os
import signal
from pathlib import Path

import pytest

# A background job starts with Ctrl-C ignored, and so would every process that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real data sets; tests that ask for it are skipped where it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("TACIT_DATA", beside))
    if not folder.is_dir():
        pytest.skip("real data sets not found: set TACIT_DATA to their folder")
    return folder
