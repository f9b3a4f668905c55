"""What docs/summaries.md says is true: its examples run."""

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "summaries.md"


def test_examples_of_the_page_run():
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
    test = doctest.DocTestParser().get_doctest(blocks, {}, PAGE.name, PAGE.name, 0)
    assert len(test.examples) > 10
    failures: list[str] = []
    doctest.DocTestRunner().run(test, out=failures.append)
    assert not failures, "".join(failures)
