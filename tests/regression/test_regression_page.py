"""What docs/regression.md says is true: its examples run."""

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "regression.md"


def test_the_examples_of_the_page_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, PAGE.name, 0)
    assert len(test.examples) > 10
    failures: list[str] = []
    doctest.DocTestRunner(optionflags=options).run(test, out=failures.append)
    assert not failures, "".join(failures)


def test_the_files_that_the_page_names_exist():
    for name in re.findall(r"\]\(([\w./-]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / name).is_file()
