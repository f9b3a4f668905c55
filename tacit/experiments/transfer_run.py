"""Transfer by recipe: a linear model of one table with the help of others, in one run folder.

Each file spends epsilon: a part checks it by the schema, and the target's file also pays for the
noisy evaluation. The facts state what that costs one person, who is in one of the files or, if
`transfer.overlapping` says so, in all of them. See `tacit.experiments.regression_run`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tacit.datasets import Dataset
from tacit.experiments import data as data_of
from tacit.experiments.facts import Facts
from tacit.experiments.recipe import Recipe
from tacit.experiments.regression_run import FittedModel, run_fit
from tacit.ledger import Ledger
from tacit.mechanisms import Rng


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
    asked = recipe.transfer
    if not asked.sources:
        raise ValueError("transfer needs SOURCES: one or more files of related tables.")
    if data_of.schema_of(recipe.data).n_classes is not None:
        raise ValueError("transfer needs a number as target: declare lower and upper for it.")
    return run_fit(
        recipe,
        folder,
        _fit,
        verb="transfer",
        root=root,
        ledger=ledger,
        sources=asked.sources,
        disjoint=not asked.overlapping,
    )


def _fit(
    recipe: Recipe, tables: Sequence[Dataset], epsilon: float, ledger: Ledger, rng: Rng
) -> FittedModel:
    asked = recipe.transfer
    (x, y), *sources = [(table.x_train, table.y_train) for table in tables]
    options = {"relation": str(ledger.relation), "ledger": ledger, "random_state": rng}
    model = transfer_estimator(recipe, epsilon, **options).fit(x, y, sources=sources)
    used = [Path(asked.sources[k]).name for k in model.informative_]
    apart = "each person is in all files" if asked.overlapping else "no person is in two files"
    return FittedModel(
        model,
        f"linear regression, transfer from {len(used)} of {len(sources)} tables, if {apart}",
        {
            "epsilon_per_file": recipe.privacy.budget.epsilon,
            "h": asked.h,
            "q": asked.q,
            "overlapping": asked.overlapping,
        },
        content={"informative": used},
        released=("which sources agree with the target",),
    )


def transfer_estimator(recipe: Recipe, epsilon: float, **options: Any) -> Any:
    """Return the recipe's unfitted `TransferRegression`, with further `options`.

    Any: settings of several types.
    """
    from tacit.regression import Bounds, TransferRegression

    asked = recipe.transfer
    return TransferRegression(
        epsilon=epsilon,
        delta=recipe.privacy.budget.delta,
        bounds=data_of.schema_of(recipe.data).bounds,
        target_bounds=Bounds(-1, 1),
        h=asked.h,
        q=asked.q,
        disjoint=not asked.overlapping,
        **options,
    )
