"""The schema of the page about tables is read."""

import re
from pathlib import Path

from tacit.datasets import Schema

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")


def test_the_schema_is_read():
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    schema = Schema.parse(text)
    assert schema.unit == "person"
    assert schema.needed == ["age", "region", "employed", "patient", "schooling", "income"]
