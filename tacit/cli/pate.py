"""`tacit pate`: train a student on the noisy votes of teachers, each on its own private records."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables

if TYPE_CHECKING:
    from tacit.experiments import Point, Recipe

_LARGE = 3.0  # an epsilon above this promises little


def pate(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="TOML recipe, or a table. Options override its settings."),
    ] = None,
    *,
    schema: tables.MaybeSchema = None,
    public_test: tables.PublicTest = None,
    public_sample: tables.PublicSample = None,
    dataset: Annotated[
        str | None, typer.Option(help="digits, mnist, fashion-mnist or table.")
    ] = None,
    teachers: Annotated[int | None, typer.Option(help="Number of teachers.")] = None,
    queries: Annotated[int | None, typer.Option(help="Number of labels to ask for.")] = None,
    noise: Annotated[
        float | None, typer.Option(help="Standard deviation of the noise on each vote count.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="Answer only if the noisy top count is above this (Confident-GNMax)."),
    ] = None,
    threshold_noise: Annotated[
        float | None, typer.Option(help="Standard deviation of the noise of that check.")
    ] = None,
    laplace: Annotated[
        bool, typer.Option("--laplace", help="Use Laplace noise, as published in 2017.")
    ] = False,
    epsilon: Annotated[
        float | None,
        typer.Option(help="Budget: chooses the noise, unless --noise or --threshold do."),
    ] = None,
    delta: shared.MaybeDelta = None,
    seed: shared.Seed = None,
    jobs: Annotated[int | None, typer.Option(help="Teachers trained at the same time.")] = None,
    data: shared.Root = None,
    ledger: shared.LedgerFile = None,
    vary: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=A,B,...",
            help="Run once for each value of one setting: teachers, noise or queries.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs at each value of --vary.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Run folder. An interrupted run in it is resumed.")
    ] = Path("runs/pate"),
    page: shared.WithPage = True,
    as_json: shared.AsJson = False,
) -> None:
    """Train a student on noisy votes of teachers, which learn from disjoint private records.

    \b
    Example:
      tacit pate
      tacit pate --dataset mnist --teachers 250 --queries 64 --noise 60 --out runs/pate-mnist
      tacit pate people.csv --schema people.toml --public-test volunteers.csv
      tacit pate --epsilon 4 --vary teachers=10,25,50,100 --repeats 5
    """
    from tacit.experiments import run_pate, spend_all_on_votes

    if ledger is not None:
        shared.require_ledger(ledger)
    shared.require_folder(out)
    plan = _plan(recipe, schema, public_test, public_sample)
    plan = plan.with_settings(
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
            "run.seed": seed,
        }
    )
    if epsilon is not None and (vary or "teachers").startswith("teachers"):
        plan = spend_all_on_votes(plan)
    if vary is not None:
        _sweep(plan, vary, out, repeats, data, ledger, as_json=as_json)
        return
    with shared.progress_bar("training teachers", is_hidden=as_json) as show:
        facts = run_pate(
            plan, out, data=data, ledger=ledger, progress=lambda done, n: show(done, n, "")
        )
    shared.write_results(out, page=page)
    if as_json:
        shared.print_json(facts.to_dict())
        return
    utility = facts.utility
    answered = f"{utility.others['answered']:.0f} of {facts.steps} queries answered"
    accuracy = utility.private[0].value
    typer.echo(f"student accuracy = {100 * accuracy:.2f} % on {utility.n_test:,} test records")
    typer.echo(
        f"epsilon = {shared.round_up(facts.epsilon)} at delta = {facts.delta:g}, {facts.relation}; "
        f"{answered} by {plan.teachers.count} teachers of {facts.n_records:,} {facts.unit}s"
    )
    if facts.epsilon > _LARGE:
        typer.secho(
            "This epsilon is large, so it promises little. Few records allow few teachers, and "
            "the votes of few teachers do not stand out from much noise.",
            fg=typer.colors.YELLOW,
        )
    typer.echo(f"wrote {out}")


def _plan(
    given: Path | None, schema: Path | None, public_test: Path | None, public_sample: Path | None
) -> "Recipe":
    """Return the recipe of the argument, or that of a table with its schema and public inputs."""
    from tacit.experiments import Recipe

    if given is None:
        return Recipe(method="pate")
    if schema is None and not tables.is_table(given):
        return Recipe.read(given, method="pate")
    if schema is None or public_test is None:
        raise ValueError("a table needs --schema FILE and --public-test FILE, the public inputs.")
    options = tables.FitOptions(schema=schema, public_test=public_test, public_sample=public_sample)
    settings = tables.table_settings(given, options)
    return Recipe.from_dict(settings, method="pate")


def _sweep(
    plan: "Recipe",
    vary: str,
    out: Path,
    repeats: int,
    data: Path | None,
    ledger: Path | None,
    *,
    as_json: bool,
) -> None:
    from statistics import fmean, stdev

    from tacit.experiments import sweep_pate
    from tacit.report import write_pate_sweep

    setting, _, listed = vary.partition("=")
    try:
        values = [float(value) for value in listed.split(",")]
    except ValueError:
        raise ValueError(f"--vary must look like teachers=10,50, got {vary!r}.") from None
    say = (lambda _: None) if as_json else typer.echo

    def on_point(point: "Point") -> None:
        accuracy, cost = f"{100 * point.accuracy:10.2f}", shared.round_up(point.epsilon, 4)
        say(f"{point.value:10g}  {accuracy}  {cost:>7}  {point.answered}")

    say(f"{setting:>10}  accuracy %  epsilon  answered")
    points = sweep_pate(
        plan, setting, values, out, repeats=repeats, data=data, ledger=ledger, on_point=on_point
    )
    if repeats > 1:
        say(f"{setting:>10}  mean ± standard deviation of {repeats} runs")
        for value in values:
            found = [100 * point.accuracy for point in points if point.value == value]
            say(f"{value:10g}  {fmean(found):10.2f} ± {stdev(found):.2f}")
    page = write_pate_sweep(setting, points, out)
    say(f"page      {page}")
    say(f"wrote {out}; if you release several of these runs, their costs add up")
    if as_json:
        shared.print_json({"setting": setting, "points": [point._asdict() for point in points]})
