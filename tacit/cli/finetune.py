"""`tacit finetune`: fine-tune a language model privately, into one run folder.

Exit codes: 0 done; 2 an error; 130 interrupted, and the run can be resumed.
"""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables


def finetune(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe file, or a run folder to resume.")
    ],
    *,
    epsilon: shared.MaybeEpsilon = None,
    delta: shared.MaybeDelta = None,
    settings: shared.Settings = None,
    data: shared.Root = None,
    ledger: shared.LedgerFile = None,
    seed: shared.Seed = None,
    out: shared.Out = None,
    page: shared.WithPage = True,
    as_json: shared.AsJson = False,
    lost_steps: shared.LostSteps = "reserve",
    progress: Annotated[
        bool | None,
        typer.Option(
            "--progress/--no-progress", help="Show a progress bar; default on a terminal."
        ),
    ] = None,
) -> None:
    """Fine-tune a language model privately, in full or by LoRA. To resume, give the run folder.

    A planner chooses batch, steps and noise from the budget and prints why. Nothing is downloaded.

    \b
    Examples:
      tacit finetune reviews.toml --epsilon 3 --out runs/reviews
      tacit finetune runs/reviews                 resumes an interrupted run
      torchrun --nproc-per-node 2 -m tacit finetune reviews.toml
    """
    from tacit.experiments import RECIPE, Recipe
    from tacit.text import FinetuningPlan, finetune

    if (Path(recipe) / RECIPE).is_file():
        out, recipe = Path(recipe), str(Path(recipe) / RECIPE)
    if ledger is not None:
        shared.require_ledger(ledger)
    chosen = shared.with_settings(
        Recipe.read(recipe, method="finetune"),
        settings,
        privacy__epsilon=epsilon,
        privacy__delta=delta,
        privacy__ledger=None if ledger is None else str(ledger.resolve()),
        run__seed=seed,
    )
    folder = tables.run_folder(out, f"{chosen.name}-epsilon-{chosen.privacy.epsilon:g}")

    def show(plan: FinetuningPlan) -> None:
        typer.echo(str(plan), err=as_json)

    shared.train_and_print(
        chosen,
        folder,
        root=data,
        page=page,
        as_json=as_json,
        progress=progress,
        lost_steps=lost_steps,
        verb="finetune",
        train=lambda *given, **options: finetune(*given, **options, on_plan=show),
    )
