"""The tutorials run, are listed, and hold the lines that the page on Opacus's examples shows."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
DIFFS = re.findall(
    r"<!-- (\S+) -->\n```diff\n(.*?)```",
    (ROOT / "docs" / "opacus-examples.md").read_text(encoding="utf-8"),
    re.DOTALL,
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script.stem)
def test_tutorials_run_without_a_warning(script, tmp_path, monkeypatch, capsys):
    for switch in ("TACIT_CHECKPOINT", "TACIT_DATA", "TACIT_REVIEWS"):
        monkeypatch.delenv(switch, raising=False)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda script: script.stem)
def test_tutorials_are_in_the_navigation_and_in_their_list(script):
    title = re.search(r"^# # (.*)$", script.read_text(encoding="utf-8"), re.MULTILINE)[1]
    listed = (script.parent / "index.md").read_text(encoding="utf-8")
    assert f"- tutorials/{script.stem}.md\n" in NAVIGATION
    assert f"[{title}]({script.stem}.md)" in listed


@pytest.mark.parametrize(("twin", "diff"), DIFFS, ids=[path for path, _ in DIFFS])
def test_the_added_lines_of_a_diff_are_those_of_the_counterpart(twin, diff):
    lines = (ROOT / twin).read_text(encoding="utf-8").splitlines()
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert added
    assert [line for line in added if line not in lines] == []
