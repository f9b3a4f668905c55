"""`tacit pate`: teachers vote, noise hides each, a student learns."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.cli import _run as run
from tacit.cli import _shared as shared

if TYPE_CHECKING:
    from tacit.experiments import PATERecipe, Point
    from tacit.pate import Progress

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_LARGE = 3.0  # above this an epsilon promises little


@app.command()
def pate(
    recipe: Annotated[Path | None, typer.Argument(help="TOML recipe; flags override it.")] = None,
    *,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="digits, mnist, fashion-mnist or table.")
    ] = None,
    teachers: Annotated[int | None, typer.Option(help="How many teachers.")] = None,
    queries: Annotated[int | None, typer.Option(help="How many labels to ask for.")] = None,
    noise: Annotated[float | None, typer.Option(help="Noise on each count, in votes.")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Answer only above this noisy count (Confident-GNMax).")
    ] = None,
    threshold_noise: Annotated[float | None, typer.Option(help="Noise of that check.")] = None,
    laplace: Annotated[bool, typer.Option("--laplace", help="Laplace noise (2017).")] = False,
    sanitized: Annotated[
        bool, typer.Option("--sanitized", help="Also publish the data-dependent cost, for a price.")
    ] = False,
    epsilon: Annotated[float | None, typer.Option(help="Stop before passing this.")] = None,
    delta: Annotated[float | None, typer.Option(help="Well below 1 / number of records.")] = None,
    seed: Annotated[int | None, typer.Option(help="Reproducible, so removable, noise.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Teachers trained at once.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="Ledger that pays.")] = None,
    vary: Annotated[
        str | None,
        typer.Option(metavar="NAME=A,B,...", help="One run each: teachers, noise or queries."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Run folder; one that was killed goes on.")] = Path(
        "runs/pate"
    ),
    page: run.WithPage = True,
    as_json: shared.AsJson = False,
) -> None:
    """Teach a student with the noisy votes of teachers on disjoint private parts.

    \b
    Example:
      tacit pate
      tacit pate --dataset mnist --teachers 250 --queries 64 --noise 60 --out runs/pate-mnist
      tacit pate --vary teachers=10,25,50,100
    """
    from tacit.experiments import PATERecipe, run_pate

    plan = PATERecipe() if recipe is None else PATERecipe.read(recipe)
    plan = plan.changed(
        {
            "data.name": dataset,
            "teachers.count": teachers,
            "teachers.jobs": jobs,
            "privacy.epsilon": epsilon,
            "privacy.delta": delta,
            "answers.queries": queries,
            "answers.noise": noise,
            "answers.threshold": threshold,
            "answers.threshold_noise": threshold_noise,
            "answers.mechanism": "laplace" if laplace else None,
            "answers.sanitized": sanitized or None,
            "seed": seed,
        }
    )
    if vary is not None:
        _sweep(plan, vary, out, data, ledger, as_json=as_json)
        return
    with _bar(quiet=as_json) as progress:
        facts = run_pate(plan, out, data=data, ledger=ledger, progress=progress)
    if page:
        run.write_page(out)
    if as_json:
        shared.print_json(facts.to_dict())
        return
    utility = facts.utility
    answered = f"{utility.others['answered']:.0f} of {facts.steps} queries answered"
    typer.echo(f"student accuracy = {100 * utility.mean:.2f} % on {utility.n_test:,} test records")
    typer.echo(
        f"epsilon = {shared.round_up(facts.epsilon)} at delta = {facts.delta:g}, {facts.relation}; "
        f"{answered} by {plan.teachers.count} teachers of {facts.n_records:,} records"
    )
    if (published := utility.others.get("sanitized epsilon")) is not None:
        typer.echo(f"for these data, sanitized: epsilon = {shared.round_up(published)}")
    if facts.epsilon > _LARGE:
        typer.secho(
            "This epsilon is large, so it promises little: few records make few teachers, and few "
            "teachers cannot outvote much noise.",
            fg=typer.colors.YELLOW,
        )
    typer.echo(f"wrote {out}")


def _sweep(
    plan: "PATERecipe",
    vary: str,
    out: Path,
    data: Path | None,
    ledger: Path | None,
    *,
    as_json: bool,
) -> None:
    from tacit.experiments import sweep_pate

    setting, _, listed = vary.partition("=")
    try:
        values = [float(value) for value in listed.split(",")]
    except ValueError:
        raise ValueError(f"--vary must look like teachers=10,50, got {vary!r}.") from None
    if not as_json:
        typer.echo(f"{setting:>10}  accuracy %  epsilon  answered")
    points = sweep_pate(
        plan,
        setting,
        values,
        out,
        data=data,
        ledger=ledger,
        on_point=lambda point: None if as_json else typer.echo(_row(point)),
    )
    if as_json:
        shared.print_json({"setting": setting, "points": [point._asdict() for point in points]})
    else:
        typer.echo(f"wrote {out}: one run each; on one private data set their costs add up")


def _row(point: "Point") -> str:
    accuracy = f"{100 * point.accuracy:10.2f}"
    return (
        f"{point.value:10g}  {accuracy}  {shared.round_up(point.epsilon, 4):>7}  {point.answered}"
    )


@contextlib.contextmanager
def _bar(*, quiet: bool) -> "Iterator[Progress | None]":
    """A progress bar on standard error; nothing if it is not a terminal or `quiet`."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    with Bar(console=console, transient=True) as bar:
        task = bar.add_task("training teachers", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
