"""Transfer by recipe: a linear model of one table with the help of others, in one run folder.

Each file spends epsilon; the facts state what that costs one person, who is in one of the files or,
if `transfer.overlapping` says so, in all of them. A run that was killed after a payment repeats the
fit with the same noise, as long as tables and recipe are the same, so it does not pay again.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tacit import datasets  # tables load with scikit-learn, when they are first used
from tacit.datasets import Dataset
from tacit.experiments import data as data_of
from tacit.experiments.facts import RECIPE, Facts, Touch, Utility, claim_fields, file_hash
from tacit.experiments.folder import RunFolder
from tacit.experiments.recipe import Recipe
from tacit.experiments.regression_run import FITTED, fitted_model
from tacit.experiments.table_check import rng_of
from tacit.ledger import Ledger, paid_once


def run_transfer(
    recipe: Recipe,
    folder: str | Path,
    *,
    root: str | Path | None = None,
    ledger: str | Path | None = None,
) -> Facts:
    """Fit the recipe's model into `folder`, and return its facts; a finished run is kept.

    `root` is the folder of the data. `ledger` is the ledger file that pays (default: the recipe's,
    or one in the folder). `model.json` names the sources that agreed with the target.
    """
    run = RunFolder(folder)
    with run.locked():
        return _run_transfer(recipe, run, run.data_root(root), ledger)


def _run_transfer(
    recipe: Recipe, run: RunFolder, root: str | Path | None, ledger: str | Path | None
) -> Facts:
    """Do what `run_transfer` says, while this process holds the folder."""
    start = time.perf_counter()
    run.refuse_other_recipe(recipe, resume=f"tacit transfer {run.path}")
    if run.is_finished:
        run.close()
        return run.facts()
    run.refuse_foreign_files()
    files = [data_of.locate(name, root) for name in (recipe.data.path, *recipe.transfer.sources)]
    schema = data_of.schema_of(recipe.data)
    tables = [datasets.read_table(path, schema, test_share=0.0) for path in files]
    if schema.n_classes is not None:
        raise ValueError("transfer needs a number as target: declare lower and upper for it.")
    run.write(RECIPE, recipe.to_toml())
    run.remember_data(root)
    with run.open_ledger(recipe, None, ledger) as paying:
        parts = [file_hash(path).encode() for path in files]
        with paid_once(paying, *parts, recipe.to_toml().encode()) as seed:
            pairs = [(table.x_train, table.y_train) for table in tables]
            options = {"ledger": paying, "random_state": rng_of(recipe, 1) or seed}
            model = transfer_estimator(recipe, relation=str(paying.relation), **options)
            model.fit(*pairs[0], sources=pairs[1:])
            used = [files[k + 1].name for k in model.informative_]
            content = fitted_model(recipe, model) | {"informative": used}
            run.write(FITTED, json.dumps(content, indent=2, allow_nan=False) + "\n")
            facts = _facts(recipe, tables[0], paying, model, used)
            seconds = round(time.perf_counter() - start, 3)
            return run.finish(replace(facts, seconds=seconds), paying)


def _facts(recipe: Recipe, target: Dataset, ledger: Ledger, model: Any, used: list[str]) -> Facts:
    asked = recipe.transfer
    where = f"{len(used)} of {len(asked.sources)} tables"
    apart = "each person is in all files" if asked.overlapping else "no person is in two files"
    how = f"linear regression with the help of other tables, if {apart}: paid before its release"
    return Facts(
        **claim_fields(recipe, target.name, target.n_records, ledger, model.event_),
        assumed_public=target.public,
        sampling_assumed="none",
        sampling_used="none",
        touches=(
            Touch(what="size", how=f"the number of {target.unit}s is public", cost="public"),
            Touch(what="preprocessing", how="values scaled by declared bounds", cost="free"),
            Touch(what="training", how=how, cost="paid", event=model.event_.to_dict()),
        ),
        released=("coefficients", "which sources agree with the target"),
        method="transfer",
        model=f"linear regression of {recipe.data.schema.get('target')}, transfer from {where}",
        hyperparameters={
            "epsilon_per_file": recipe.privacy.epsilon,
            "h": asked.h,
            "q": asked.q,
            "overlapping": asked.overlapping,
        },
        utility=Utility(metric="r2", private=()),
        model_file=FITTED,
        metrics_file="",
    )


def transfer_estimator(recipe: Recipe, **options: Any) -> Any:
    """Return the recipe's unfitted `TransferRegression`, with further `options`."""
    from tacit.regression import Bounds, TransferRegression

    asked, privacy = recipe.transfer, recipe.privacy.budget
    return TransferRegression(
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        bounds=data_of.schema_of(recipe.data).bounds,
        target_bounds=Bounds(-1, 1),
        h=asked.h,
        q=asked.q,
        disjoint=not asked.overlapping,
        **options,
    )
