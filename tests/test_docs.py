"""What the pages in docs/ say is true: their examples run, their links lead somewhere."""

import doctest
import json
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
MARKDOWN = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def blocks(page: Path, language: str) -> list[str]:
    found = rf"^ *```{language}\n(.*?)^ *```"
    return [
        textwrap.dedent(code) for code in re.findall(found, page.read_text("utf-8"), re.S | re.M)
    ]


@pytest.mark.filterwarnings("default")  # an example may show a warning
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write files
    names: dict = {}
    for code in blocks(page, "python"):
        if not code.startswith(">>>"):
            exec(compile(code, page.name, "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(code, names, page.name, page.name, 0)
        failures: list[str] = []
        runner = doctest.DocTestRunner(optionflags=MARKDOWN)
        runner.run(test, out=failures.append, clear_globs=False)
        names.update(test.globs)
        assert not failures, "".join(failures)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_excerpts_stand_in_the_code(page):
    found = re.findall(
        r"^<!-- (tacit/\S+) -->\n```py\n(.*?)^```", page.read_text("utf-8"), re.S | re.M
    )
    for file, code in found:
        assert code in (ROOT / file).read_text("utf-8"), code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        path = target.partition("#")[0]
        if path and "://" not in path and not path.startswith("reference/"):
            source = re.sub(
                r"^(tutorials/(?!index)\w+)\.md$", r"\1.py", path
            )  # executed by make docs
            assert (page.parent / source).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_is_in_the_navigation(page):
    assert re.search(rf"- (\w[\w ]*: )?{re.escape(page.name)}$", NAVIGATION, re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_toml_can_be_read(page):
    for text in blocks(page, "toml"):
        tomllib.loads(text)


def test_the_page_of_certificates_names_every_field():
    schema = json.loads((ROOT / "tacit/report/certificate.schema.json").read_text("utf-8"))
    fields = schema["properties"]
    names = {*fields, *fields["claim"]["properties"], *fields["context"]["properties"]}
    page = (ROOT / "docs" / "certificate.md").read_text("utf-8")
    assert [name for name in names if not re.search(rf"`(claim\.)?{name}[`.]", page)] == []
