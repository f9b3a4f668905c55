"""`tacit train`: train one recipe, or a model of a table, into one run folder.

Exit codes: 0 done; 2 an error; 130 interrupted, and the run can be resumed.
"""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A recipe file, a built-in recipe (tacit recipes), a table, or a run folder.",
        ),
    ] = "digits",
    *,
    schema: tables.MaybeSchema = None,
    epsilon: shared.MaybeEpsilon = None,
    delta: shared.MaybeDelta = None,
    public_test: tables.PublicTest = None,
    public_sample: tables.PublicSample = None,
    evaluation: tables.Evaluation = True,
    ledger: shared.LedgerFile = None,
    data: shared.Root = None,
    out: shared.Out = None,
    seed: shared.Seed = None,
    settings: shared.Settings = None,
    trust_code: shared.TrustCode = None,
    page: shared.WithPage = True,
    as_json: shared.AsJson = False,
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
    from tacit.datasets import Schema
    from tacit.experiments import RECIPE, Recipe, RunFolder

    changes = {"privacy__epsilon": epsilon, "privacy__delta": delta, "run__seed": seed}
    if tables.is_table(recipe) or schema is not None:
        if schema is None or epsilon is None:
            raise ValueError("a table needs --schema FILE and --epsilon NUMBER.")
        declared = Schema.read(schema)
        if declared.n_classes is None:
            raise ValueError(
                f"target {declared.target!r} is a number. Use tacit regress, or declare at_least."
            )
        given = tables.table_settings(
            Path(recipe),
            declared,
            public_test=public_test,
            public_sample=public_sample,
            evaluation=evaluation,
            ledger=ledger,
        )
        given["privacy"] |= {"epsilon": epsilon} | ({} if delta is None else {"delta": delta})
        folder = tables.run_folder(out, f"{given['name']}-epsilon-{epsilon:g}")
        chosen = tables.advised(Recipe.from_dict(given), declared)
        chosen = shared.with_settings(chosen, settings, **changes)
    else:
        if (Path(recipe) / RECIPE).is_file():
            out, recipe = Path(recipe), str(Path(recipe) / RECIPE)
        if ledger is not None:
            shared.require_ledger(ledger)
            changes["privacy__ledger"] = str(ledger.resolve())
        chosen = shared.recipe_of(recipe, settings, trust_code=trust_code, **changes)
        if chosen.method != "dp-sgd":
            raise ValueError(f"{recipe} is of method {chosen.method}, which train does not do.")
        folder = out or Path("runs") / f"{chosen.name}-epsilon-{chosen.privacy.epsilon:g}"
        shared.require_folder(folder)
    if RunFolder(folder).is_finished and shared.rank() == 0:
        typer.echo(f"{folder} is finished; for a new run, choose another --out.", err=True)
    shared.train_and_print(chosen, folder, root=data, page=page, as_json=as_json)
