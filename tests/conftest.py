"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real data sets; tests that ask for it are skipped where it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("TACIT_DATA", beside))
    if not folder.is_dir():
        pytest.skip("real data sets not found: set TACIT_DATA to their folder")
    return folder
