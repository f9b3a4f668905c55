"""The frame of the command line: verbs on demand, errors in one line."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tacit import __version__
from tacit.cli import VERBS, app
from tacit.errors import BudgetExceeded, NotCertified, UnsupportedEvent

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def failing(monkeypatch):
    """A verb `failing` whose command raises what it is given."""

    def install(error: BaseException):
        def failing() -> None:
            raise error

        module = types.ModuleType("tacit.cli.failing")
        module.failing = failing
        monkeypatch.setitem(sys.modules, "tacit.cli.failing", module)
        monkeypatch.setitem(VERBS, "failing", "Fails.")

    return install


def test_help_lists_every_verb_without_importing_it():
    code = (
        "import sys; from typer.testing import CliRunner; from tacit.cli import app, VERBS; "
        "out = CliRunner().invoke(app, ['--help']).output; "
        "assert all(f'  {verb} ' in out for verb in VERBS), out; "
        "loaded = [verb for verb in VERBS if f'tacit.cli.{verb}' in sys.modules]; "
        "assert not loaded and 'numpy' not in sys.modules, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def commands_of(verb: str) -> list[list[str]]:
    """The verb itself, or its commands where it has several."""
    command = typer.main.get_command(app).get_command(None, verb)
    return [[verb, name] for name in getattr(command, "commands", {})] or [[verb]]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb):
    assert run(verb, "--help").exit_code == 0
    for command in commands_of(verb):
        result = run(*command, "--help")
        assert result.exit_code == 0, result.output
        assert "Example" in result.output
        assert f"tacit {' '.join(command)} " in result.output
        assert "completion" not in result.output


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_answers_programs_in_json(verb):
    for command in commands_of(verb):
        help_text = run(*command, "--help").output
        assert "--json" in help_text or "as JSON" in help_text, command


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_verbs(shell):
    asked = {"COMP_WORDS": "tacit ver", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "tacit ver"}
    asked |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TACIT_COMPLETE": f"complete_{shell}"}
    result = subprocess.run(
        [sys.executable, "-m", "tacit"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | asked,
    )
    assert "verify" in result.stdout
    assert "sweep" not in result.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_summaries_fit_on_their_line(verb):
    assert len(VERBS[verb]) <= 64
    assert VERBS[verb] in run("--help").output


def test_version_is_printed():
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"tacit {__version__}\n")


def test_no_arguments_print_help():
    assert "Commands:" in run().output


def test_an_unknown_verb_is_a_usage_error():
    result = run("nonsense")
    assert result.exit_code == 2
    assert "nonsense" in result.output


@pytest.mark.parametrize(
    "error",
    [
        ValueError("delta must be in (0, 1), got 2."),
        BudgetExceeded("nothing is left."),
        UnsupportedEvent("no price."),
        NotCertified("no\nbound."),
        FileNotFoundError(2, "No such file or directory", "x.ledger"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_foreseen_errors_are_one_line_and_exit_code_2(failing, error):
    failing(error)
    result = run("failing")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"error: {' '.join(str(error).split())}\n"


def test_a_missing_extra_names_its_install_command(failing):
    failing(ModuleNotFoundError("No module named 'torch'", name="torch"))
    result = run("failing")
    assert result.exit_code == 2
    assert "pip install 'tacit-dp[torch]'" in result.stderr


@pytest.mark.parametrize(
    "error", [RuntimeError("bug"), ModuleNotFoundError("bug", name="tacit.x"), TypeError("bug")]
)
def test_faults_of_ours_are_not_hidden(failing, error):
    failing(error)
    assert run("failing").exception is error


def test_interruption_exits_with_130(failing):
    failing(KeyboardInterrupt())
    assert run("failing").exit_code == 130


def test_python_dash_m_tacit_is_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "tacit", "--version"], capture_output=True, text=True, cwd=ROOT
    )
    assert result.stdout == f"tacit {__version__}\n"
