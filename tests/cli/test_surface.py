"""`tacit surface` draws a logit model of public records."""

import json

import pytest
from typer.testing import CliRunner

from tacit.cli import app


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_a_surface_is_drawn_from_a_table(tmp_path, monkeypatch):
    pytest.importorskip("jinja2")
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{k % 5},{int(k % 5 > k % 3)}\n" for k in range(500))
    (tmp_path / "t.csv").write_text("x,y\n" + rows)
    (tmp_path / "t.toml").write_text(
        'name = "t"\n[data]\nname = "table"\npath = "t.csv"\nis_public = true\n'
        '[data.schema]\ntarget = "y"\n'
        '[data.schema.columns.y]\ncategories = ["0", "1"]\n'
        "[data.schema.columns.x]\nlower = 0\nupper = 4\n[training]\nepochs = 2\n"
    )
    arguments = ("surface", "t.toml", "--epsilons", "1", "--repeats", "1", "--out", "here")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "no privacy" in result.stdout
    assert (tmp_path / "here" / "figures" / "y-by-x.csv").is_file()
    assert len(json.loads(run(*arguments, "--json").stdout)["private"]) == 1
    assert run("surface", "t.toml", "--epsilons", "").exit_code == 2
    assert run("surface", "digits").exit_code == 2
