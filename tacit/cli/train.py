"""`tacit train`: train one recipe into one run folder.

Exit codes: 0 done; 2 an error; 130 interrupted, and the run can be resumed.
"""

from pathlib import Path

import typer

from tacit.cli import _shared as shared


def train(
    recipe: shared.RecipeName = "digits",
    *,
    epsilon: shared.MaybeEpsilon = None,
    delta: shared.MaybeDelta = None,
    data: shared.Root = None,
    out: shared.Out = None,
    seed: shared.Seed = None,
    settings: shared.Settings = None,
    trust_code: shared.TrustCode = None,
    page: shared.WithPage = True,
    as_json: shared.AsJson = False,
) -> None:
    """Train a private model from a recipe. To resume an interrupted run, give its folder.

    \b
    Examples:
      tacit train --epsilon 3
      tacit train mnist --epsilon 1 --data DATA
      tacit train runs/mnist-epsilon-1          resumes an interrupted run
    """
    from tacit.experiments import RECIPE, RunFolder

    if (Path(recipe) / RECIPE).is_file():
        out, recipe = Path(recipe), str(Path(recipe) / RECIPE)
    chosen = shared.recipe_of(
        recipe,
        settings,
        trust_code=trust_code,
        privacy__epsilon=epsilon,
        privacy__delta=delta,
        run__seed=seed,
    )
    folder = out or Path("runs") / f"{chosen.name}-epsilon-{chosen.privacy.epsilon:g}"
    if RunFolder(folder).is_finished:
        typer.echo(f"{folder} is finished; for a new run, choose another --out.", err=True)
    shared.train_and_print(chosen, folder, root=data, page=page, as_json=as_json)
