"""`tacit train`: train one recipe, or a model of a table, into one run folder.

Exit codes: 0 done; 2 an error; 130 interrupted, and the run can be resumed.
"""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables
from tacit.cli._options import expanded


@expanded
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A recipe file, a built-in recipe (tacit recipes), a table, or a run folder.",
        ),
    ] = "digits",
    *,
    epsilon: shared.MaybeEpsilon = None,
    delta: shared.MaybeDelta = None,
    loss_upper: Annotated[
        float | None,
        typer.Option(help="Release a noisy training loss, clipped to this value, at no epsilon."),
    ] = None,
    lost_steps: shared.LostSteps = "reserve",
    progress: Annotated[
        bool | None,
        typer.Option(
            "--progress/--no-progress", help="Show a progress bar; default on a terminal."
        ),
    ] = None,
    given: tables.RecipeOptions,
) -> None:
    """Train a private model from a recipe or of a table. To resume a run, give its folder.

    For a table, `tacit advise` chooses the settings that --set does not give. Of EPSILON, 5 % check
    that the schema fits the table, and 10 % measure the model.

    \b
    Examples:
      tacit train --epsilon 3
      tacit train people.csv --schema people.toml --epsilon 1 --ledger people.ledger
      tacit train runs/mnist-epsilon-1          resumes an interrupted run
    """
    from tacit.experiments import RECIPE, RunFolder

    out = given.out
    if (Path(recipe) / RECIPE).is_file():
        out, recipe = Path(recipe), str(Path(recipe) / RECIPE)
    chosen = given.recipe(recipe, epsilon=epsilon, delta=delta)
    chosen = shared.with_settings(chosen, None, training__loss_upper=loss_upper)
    folder = tables.run_folder(out, f"{chosen.name}-epsilon-{chosen.privacy.epsilon:g}")
    if RunFolder(folder).is_finished and shared.rank() == 0:
        typer.echo(f"{folder} is finished; for a new run, choose another --out.", err=True)
    shared.train_and_print(
        chosen,
        folder,
        root=given.data,
        page=given.page,
        as_json=given.as_json,
        progress=progress,
        lost_steps=lost_steps,
    )
