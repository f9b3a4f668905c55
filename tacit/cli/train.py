"""`tacit train`: one recipe to one run folder.

Exit codes: 0 done; 2 something was wrong; 130 interrupted, and the run can be resumed.
"""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _run as run
from tacit.cli import _shared as shared

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def train(
    recipe: run.RecipeName = "digits",
    *,
    epsilon: Annotated[float | None, typer.Option(help="The budget.")] = None,
    delta: Annotated[float | None, typer.Option(help="Well below 1 / records.")] = None,
    data: run.Root = None,
    out: run.Out = None,
    seed: run.Seed = None,
    settings: run.Settings = None,
    page: run.WithPage = True,
    as_json: shared.AsJson = False,
) -> None:
    """Train a private model by a recipe; RECIPE may also be a run folder, to go on with it.

    \b
    Examples:
      tacit train --epsilon 3
      tacit train mnist --epsilon 1 --data DATA
      tacit train runs/mnist-epsilon-1          resumes an interrupted run
    """
    from tacit.experiments import RECIPE, RunFolder
    from tacit.experiments import train as train_recipe

    if (Path(recipe) / RECIPE).is_file():
        out, recipe = Path(recipe), str(Path(recipe) / RECIPE)
    chosen = run.recipe_of(
        recipe, settings, privacy__epsilon=epsilon, privacy__delta=delta, run__seed=seed
    )
    folder = out or Path("runs") / f"{chosen.name}-epsilon-{chosen.privacy.epsilon:g}"
    if RunFolder(folder).is_finished:
        typer.echo(f"{folder} is finished; for a new run, choose another --out.", err=True)
    with run.resumable(folder), run.progress_bar(chosen.name, is_hidden=as_json) as show:
        facts = train_recipe(chosen, folder, root=data, on_progress=show)
    written = run.write_page(folder) if page else None
    if as_json:
        shared.print_json(run.outcome(facts, folder, written))
    else:
        run.print_outcome(facts, folder, written)
