"""The page about engines is true: its examples run."""

import doctest
import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")


def test_examples_run():
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    test = doctest.DocTestParser().get_doctest(blocks, {}, "engines.md", "engines.md", 0)
    assert len(test.examples) > 10
    failures: list[str] = []
    doctest.DocTestRunner().run(test, out=failures.append)
    assert not failures, "".join(failures)
