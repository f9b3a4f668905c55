"""What `train`, `sweep` and `demo` share: recipes with settings changed, progress, the outcome."""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit.cli._shared import round_up

if TYPE_CHECKING:
    from tacit.experiments import Facts, OnProgress, Recipe

RecipeName = Annotated[
    str, typer.Argument(metavar="[RECIPE]", help="A recipe file, or the name of a shipped one.")
]
Root = Annotated[Path | None, typer.Option("--data", help="Folder of the data [TACIT_DATA].")]
Out = Annotated[Path | None, typer.Option("--out", help="The folder to write.")]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Reproducible, hence removable, noise: for tests.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: training.epochs=20."),
]
WithPage = Annotated[bool, typer.Option("--page/--no-page", help="Write report.html.")]


def recipe_of(name: str, settings: list[str] | None, **changes: Any) -> "Recipe":
    """The recipe with `--set` and the flags that were given; `changes` are dotted with `__`."""
    from tacit.experiments import Recipe

    chosen: dict[str, Any] = dict(_setting(text) for text in settings or ())
    chosen |= {key.replace("__", "."): v for key, v in changes.items() if v is not None}
    return Recipe.read(name).with_settings(chosen)


def _setting(text: str) -> tuple[str, Any]:  # Any: a TOML value
    key, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} must be KEY=VALUE, as in training.epochs=20.")
    try:
        return key.strip(), tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()  # text without quotes


@contextmanager
def progress_bar(label: str, *, is_hidden: bool) -> Iterator["OnProgress"]:
    """A bar on standard error: steps, time left, epsilon and accuracy so far."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from tacit.experiments import Progress as Where

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[shown]}"),
    )
    is_off = is_hidden or not console.is_terminal
    with Progress(*columns, console=console, disable=is_off) as bar:
        task = bar.add_task(label, total=1, shown="")

        def show(where: Where) -> None:
            metric = where.metric
            shown = ""
            if metric:
                shown = f"epsilon {metric['epsilon']:.3f}  accuracy {metric['accuracy']:.2%}"
            bar.update(task, completed=where.step, total=where.steps, shown=shown)

        yield show


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """An interrupted run says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"\ninterrupted; go on with: tacit train {out}", err=True)
        raise typer.Exit(130) from None


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3, ... that holds no finished run."""
    from tacit.experiments import RunFolder

    folder, number = wanted, 1
    while RunFolder(folder).is_finished:
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def write_page(out: Path) -> Path | None:
    """The page of a finished run or sweep; None, with a line on standard error, without jinja2."""
    try:
        from tacit.report import write_page as written

        return written(out)
    except ModuleNotFoundError as missing:
        typer.echo(f"no page: install 'tacit[report]' for {missing.name}.", err=True)
        return None


def outcome(facts: "Facts", out: Path, page: Path | None) -> dict[str, Any]:  # Any: JSON values
    """What a run came to, for `--json`."""
    utility = facts.utility
    return {
        "epsilon": facts.epsilon,
        "delta": facts.delta,
        "relation": facts.relation,
        "accuracy": utility.private[0].value,
        "non_private_accuracy": utility.non_private[0].value if utility.non_private else None,
        "majority_accuracy": utility.majority,
        "metrics": utility.others,
        "steps": facts.steps,
        "resumed": facts.resumed,
        "noise_multiplier": facts.hyperparameters["noise_multiplier"],
        "seconds": facts.seconds,
        "run": str(out),
        "page": None if page is None else str(page),
    }


def print_outcome(facts: "Facts", out: Path, page: Path | None) -> None:
    """What a run came to, in four lines."""
    utility = facts.utility
    accuracy = f"accuracy  {utility.private[0].value:.2%}"
    if utility.non_private:
        accuracy += f"   without privacy {utility.non_private[0].value:.2%}"
    if utility.majority is not None:
        accuracy += f"   commonest class {utility.majority:.2%}"
    typer.echo(
        f"epsilon   {round_up(facts.epsilon)} at delta {facts.delta:g} "
        f"({facts.relation}, one {facts.unit} of {facts.n_records:,})"
    )
    typer.echo(accuracy)
    typer.echo(f"run       {out}")
    if page is not None:
        typer.echo(f"page      {page}")
