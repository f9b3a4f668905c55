"""The examples of the pages on certificates, ledgers and users run, and print what they say."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PRINTED = {
    "certificate.md": ["consistent, not authenticated", "authenticated", "metrics.jsonl is not"],
    "ledger.md": ["2.00 ", "5\n", "0.6 0.0"],
    "users.md": ["[1.8, 8.9, 27.9]", "user 3.0", "True"],
}


@pytest.mark.parametrize("name", PRINTED)
def test_the_examples_of_a_page_run(name, capsys):
    page = (DOCS / name).read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(code, name, "exec"), {})
    printed = capsys.readouterr().out
    for text in PRINTED[name]:
        assert text in printed


def test_the_recipe_of_the_page_is_accepted():
    from tacit.experiments import Recipe

    page = (DOCS / "certificate.md").read_text(encoding="utf-8")
    (toml,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    assert Recipe.parse(toml).model.module == "torch.nn:Sequential"
