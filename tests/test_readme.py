"""What the README says is true: its examples run, its files exist, its commands work."""

import doctest
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit.cli import app

ROOT = Path(__file__).resolve().parents[1]
HOST = r"https://(?:github|raw\.githubusercontent)\.com/tacit-dp/tacit"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_examples_run():
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    test = doctest.DocTestParser().get_doctest(blocks, {}, "README.md", "README.md", 0)
    assert len(test.examples) > 15
    failures: list[str] = []
    doctest.DocTestRunner(optionflags=options).run(test, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("command", re.findall(r"^\$ tacit (.*)$", README, re.MULTILINE))
def test_commands_work(command):
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tacit/[\w/]+\.py|\w+\.md)`", README))))
def test_files_exist(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([\w-]+)", README))))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)\s]+)\)", README))))
def test_links_are_absolute_and_lead_somewhere(target):
    """A page of a package index shows the README without the files beside it."""
    path = re.fullmatch(rf"{HOST}(?:/blob|)/main/([^#]+)(#.*)?", target)
    assert path, target
    assert (ROOT / path[1]).is_file()
