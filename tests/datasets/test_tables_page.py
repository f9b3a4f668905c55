"""The page about tables is true: its examples run and its schema is read."""

import doctest
import re
from pathlib import Path

from tacit.datasets import Schema

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")


def test_examples_run():
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    test = doctest.DocTestParser().get_doctest(blocks, {}, "tables.md", "tables.md", 0)
    assert len(test.examples) > 10
    failures: list[str] = []
    doctest.DocTestRunner(optionflags=options).run(test, out=failures.append)
    assert not failures, "".join(failures)


def test_the_schema_is_read():
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    schema = Schema.parse(text)
    assert schema.unit == "person"
    assert schema.needed == ["age", "region", "employed", "patient", "schooling", "income"]
