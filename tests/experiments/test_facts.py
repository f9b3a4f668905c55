"""The hash of a folder: names and contents count, and what Python caches does not."""

import pytest

from tacit.experiments import folder_hash


def folder(path, files):
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content)
    return folder_hash(path)


FILES = {"a.txt": "one", "b.txt": "two", "c/d.txt": "three"}


@pytest.mark.parametrize(
    "other",
    [
        {"a.txt": "two", "b.txt": "one", "c/d.txt": "three"},
        {"a.txt": "one", "b.txt": "two", "c/e.txt": "three"},
        {"a.txt": "one", "b.txt": "two"},
        FILES | {"e.txt": ""},
        FILES | {"a.txt": "One"},
    ],
)
def test_every_name_and_content_counts(tmp_path, other):
    assert folder(tmp_path / "one", FILES) != folder(tmp_path / "other", other)


def test_equal_folders_have_equal_hashes_wherever_they_are(tmp_path):
    cached = FILES | {"__pycache__/a.pyc": "anything"}
    assert folder(tmp_path / "one", FILES) == folder(tmp_path / "other/place", cached)
