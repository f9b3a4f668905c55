"""`tacit tune`: choose settings of a recipe privately, and pay for the choice.

Exit codes: 0 done; 2 an error; 130 interrupted, and the same command resumes the search.
"""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables
from tacit.cli._options import expanded


@expanded
def tune(
    recipe: shared.RecipeName = "digits",
    *,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="SETTING=VALUE,VALUE,... to choose from; may be repeated."),
    ] = None,
    epsilon: shared.MaybeEpsilon = None,
    holdout: Annotated[
        float, typer.Option(help="Share of the records that score, each by its own coin.")
    ] = 0.2,
    most_runs: Annotated[
        int | None, typer.Option(min=1, help="Largest number of runs; part of the price.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs at the same time.")] = 1,
    given: tables.RecipeOptions,
) -> None:
    """Train a recipe with several settings, release the best run, and pay for the choice.

    EPSILON is the price of everything: all runs, their scores and the choice. No score but that of
    the released run is shown. The same command resumes an interrupted search.

    \b
    Example:
      tacit tune digits --vary training.learning_rate=0.01,1 --epsilon 8
    """
    from tacit.experiments import SEARCH
    from tacit.experiments import tune as run_search

    if not vary:
        raise ValueError("tune needs --vary SETTING=VALUE,VALUE at least once.")
    space = _space(vary)
    chosen = given.recipe(recipe, epsilon=epsilon)
    folder = given.out or Path("runs") / f"{chosen.name}-tuned"

    def say(line: str) -> None:
        if not given.as_json:
            typer.echo(line, err=True)

    try:
        facts = run_search(
            chosen,
            folder,
            space,
            root=given.data,
            holdout=holdout,
            most_runs=most_runs,
            jobs=jobs,
            on_progress=say,
        )
    except KeyboardInterrupt:
        typer.echo("\ninterrupted; the same command resumes the search.", err=True)
        raise typer.Exit(130) from None
    written = shared.write_results(folder, page=given.page)
    found = json.loads((folder / SEARCH).read_text(encoding="utf-8"))
    if given.as_json:
        shown = {name: found[name] for name in ("chosen", "score", "runs", "run_epsilon")}
        shared.print_json(shown | shared.outcome(facts, folder, written))
        return
    settings_text = ", ".join(f"{name} = {value}" for name, value in found["chosen"].items())
    typer.echo(f"chosen    {settings_text or 'nothing: no setting was tried'}")
    if found["score"] is not None:
        typer.echo(f"score     {found['score']:.4f}, with noise")
    alone = found["run_epsilon"]
    one = "" if alone is None else f"; one run alone costs {shared.round_up(alone, 4)}"
    typer.echo(
        f"epsilon   {shared.round_up(facts.epsilon)} at delta {facts.delta:g} for the whole "
        f"search{one}"
    )
    typer.echo(shared.utility_line(facts))
    typer.echo(f"run       {folder}")
    if written is not None:
        typer.echo(f"page      {written}")


def _space(vary: list[str]) -> dict[str, list[Any]]:  # Any: TOML values
    """Return the values to choose from, by setting; raise if a setting is named twice."""
    space: dict[str, list[Any]] = {}
    for name, values in map(_choices, vary):
        if name in space:
            raise ValueError(f"--vary names {name} twice. Give all its values at once.")
        space[name] = values
    return space


def _choices(text: str) -> tuple[str, list[Any]]:  # Any: TOML values
    """Return the name and the values in 'training.clip_norm=0.5,1'."""
    name, equals, values = text.partition("=")
    if not equals or not values.strip():
        raise ValueError(f"--vary must be SETTING=VALUE,VALUE, got {text!r}.")
    try:
        found = tomllib.loads(f"x = [{values}]")["x"]
    except tomllib.TOMLDecodeError:
        found = [value.strip() for value in values.split(",")]
        if "" in found:
            raise ValueError(f"--vary has an empty value, got {text!r}.") from None
    twice = [value for i, value in enumerate(found) if value in found[:i]]
    if twice:
        raise ValueError(f"--vary gives the value {twice[0]} twice, got {text!r}.")
    return name.strip(), found
