"""What docs/tuning.md says is true: its examples run."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tuning.md"


def test_the_examples_of_the_page_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)


def test_the_files_that_the_page_names_exist():
    text = PAGE.read_text(encoding="utf-8")
    for name in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (PAGE.parent / name).is_file()
