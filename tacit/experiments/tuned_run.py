"""Private tuning by recipe: the best of several DP-SGD runs becomes one run folder.

Guarantee: everything in the folder is covered by `facts.event`: the event of the whole search
(`tacit.tuning.PrivateSearch`), and that of the check of a private table. The search is paid once,
before its first run. A search that was killed resumes and pays nothing more. How long a search took
shows how many runs it made, which the price assumes to be private: facts do not state it.

    runs/digits-tuned/
    ├── search.json         what was asked: the recipe and the space; then what was chosen
    ├── recipe.toml         the recipe with the chosen settings
    └── ...                 as for any run, see `tacit.experiments.folder`
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tacit.datasets import Dataset
from tacit.events import Event
from tacit.events import Sequence as EventSequence
from tacit.experiments import data, models
from tacit.experiments.facts import (
    LEDGER,
    METRICS,
    MODEL,
    RECIPE,
    Facts,
    SeedValue,
    Touch,
    Utility,
    claim_fields,
    majority_share,
)
from tacit.experiments.folder import RunFolder
from tacit.experiments.recipe import Recipe
from tacit.experiments.recipe_classifier import RecipeClassifier
from tacit.experiments.released import model_bytes
from tacit.experiments.table_check import check_table, table_releases, table_touches
from tacit.experiments.training_loop import evaluate, steps_of, tensors
from tacit.ledger import Budget, Ledger, any_pending
from tacit.tuning import PrivateSearch

SEARCH = "search.json"
_UNTRIED = (
    "no setting will be tried: there are too few records, or runs, for scores to tell settings "
    "apart at this epsilon. The whole budget goes into one run of the recipe as it is."
)
Space = Mapping[str, Sequence[Any]]  # Any: values of settings


def tune(
    recipe: Recipe,
    path: str | os.PathLike[str],
    space: Space,
    *,
    root: str | Path | None = None,
    holdout: float = 0.2,
    most_runs: int | None = None,
    jobs: int = 1,
    on_progress: Callable[[str], None] | None = None,
) -> Facts:
    """Search the `space` of settings of a DP-SGD recipe within its budget; return the facts.

    Parameters
    ----------
    space
        A grid {setting: [values]}, with names such as "training.learning_rate".
    holdout
        Share of the records that score the runs, each by its own coin.
    most_runs
        Largest number of runs; the limit is part of the price.
    jobs
        Number of runs at the same time.
    """
    if recipe.method != "dp-sgd":
        raise ValueError("tune needs a recipe of DP-SGD. For estimators use tacit.tuning.")
    if not space:
        raise ValueError("tune needs at least one setting to vary.")
    run = RunFolder(path)
    with run.locked():
        root = run.data_root(root)
        asked = {
            "recipe": recipe.to_toml(),
            "space": {name: list(values) for name, values in space.items()},
            "holdout": holdout,
            "most_runs": most_runs,
        }
        _refuse_other(run, asked)
        if run.is_finished and not any_pending(run / (recipe.privacy.ledger or LEDGER)):
            run.close()
            return run.facts()
        dataset = _load(recipe, root)
        filled = recipe.filled(dataset.n_records)
        budget = filled.privacy.budget
        search = PrivateSearch(
            RecipeClassifier(recipe, relation=filled.privacy.relation).set_params(
                classes=range(dataset.n_classes or 0)
            ),
            space,
            epsilon=budget.epsilon,
            delta=budget.delta,
            holdout=holdout,
            most_runs=most_runs,
            n_records=dataset.n_records,
            n_jobs=jobs,
            random_state=recipe.run.seed,
            progress=on_progress,
        )
        if not run.is_finished:
            # What cannot be searched is refused before anything is written or paid.
            if not search.plan(dataset.x_train, dataset.y_train).training:
                warnings.warn(_UNTRIED, stacklevel=2)
            run.write(SEARCH, json.dumps({"asked": asked}, indent=2) + "\n")
            run.remember_data(root)
        with run.open_ledger(filled, None) as ledger:
            checked = check_table(
                filled, dataset.flags, run, ledger, epsilon=budget.epsilon, root=root
            )
            share = filled.data.check_share if checked else 0.0
            search.set_params(ledger=ledger, epsilon=budget.epsilon * (1 - share))
            if run.is_finished:  # killed, perhaps, after the last file was written
                search.forget(dataset.x_train, dataset.y_train)
                run.close()
                return run.facts()
            # The search ends with the block: if it is killed before, it releases the same again.
            with search.fitting(dataset.x_train, dataset.y_train):
                facts = _write(run, asked, search, dataset, ledger, checked, budget)
                return run.finish(facts, ledger)  # without its duration: it shows how many runs


def _refuse_other(run: RunFolder, asked: dict[str, Any]) -> None:
    """Raise if the folder holds anything but this search."""
    if (run / SEARCH).is_file():
        stored = json.loads((run / SEARCH).read_text(encoding="utf-8"))
        if stored["asked"] != asked:
            raise ValueError(f"{run.path} holds another search. Choose another with --out.")
    elif not run.is_empty:
        raise ValueError(f"{run.path} is not empty and holds no run. Choose another with --out.")


def _load(recipe: Recipe, root: str | Path | None) -> Dataset:
    """Return the data; private records that would be held out join the search, which scores."""
    dataset = data.load(recipe.data, root)
    if dataset.is_test_public:
        return dataset
    return data.load(replace(recipe.data, evaluation="none"), root)


def _write(
    run: RunFolder,
    asked: dict[str, Any],
    search: PrivateSearch,
    dataset: Dataset,
    ledger: Ledger,
    checked: tuple[Event, ...],
    budget: Budget,
) -> Facts:
    """Write model, recipe, metrics and the outcome of the search; return the facts."""
    best: RecipeClassifier = search.best_estimator_
    trained = best.released_
    n_training = best.n_records or 0
    # The budget of the whole search: that of one run is smaller.
    privacy = replace(trained.recipe.privacy, epsilon=budget.epsilon, delta=budget.delta)
    recipe = replace(trained.recipe, privacy=privacy, published=())
    prepared = trained.prepare(dataset)
    run.write(MODEL, model_bytes(recipe, trained.model, prepared, dataset.n_classes))
    run.write(RECIPE, recipe.to_toml())
    plan = search.plan_
    found = {
        "asked": asked,
        "chosen": search.best_params_,
        "score": _score(search),
        "runs": plan.runs.describe(),
        "run_epsilon": plan.run_epsilon,
        "epsilon": plan.epsilon,
        "delta": plan.delta,
    }
    run.write(SEARCH, json.dumps(found, indent=2) + "\n")
    measured = {}
    if dataset.is_test_public and len(dataset.x_test):
        measured = evaluate(trained.model, *tensors(prepared.x_test, prepared.y_test))
    event = EventSequence((*checked, search.event_)) if checked else search.event_
    claim = claim_fields(recipe, dataset.name, dataset.n_records, ledger, event)
    steps, epochs = steps_of(recipe, n_training), recipe.training.epochs
    run.write_lines(
        METRICS, [{"step": steps, "epoch": epochs, "epsilon": claim["epsilon"], **measured}]
    )
    noise = best.planned(n_training).noise
    return Facts(
        **claim,
        assumed_public=(*dataset.public, *(("the test records",) if measured else ())),
        sampling_assumed="as stated by the event",
        sampling_used="as stated by the event",
        touches=_touches(recipe, search, asked["space"], dataset, checked),
        released=(
            "weights, settings and noisy score of one run of the search",
            *table_releases(recipe.data, dataset),
        ),
        method="DP-SGD",
        model=models.describe(recipe.model, trained.model, prepared.shape),
        hyperparameters=recipe.to_dict()["training"] | {"steps": steps, "noise_multiplier": noise},
        steps=steps,
        utility=_utility(recipe, search, dataset, measured),
    )


def _touches(
    recipe: Recipe,
    search: PrivateSearch,
    space: Space,
    dataset: Dataset,
    checked: tuple[Event, ...],
) -> tuple[Touch, ...]:
    """Return a description of every use of the data; that of the search says what was tried."""
    tried = "; ".join(f"{name} in {list(values)}" for name, values in space.items())
    chosen = ", ".join(f"{name} = {value}" for name, value in search.best_params_.items())
    how = f"{search.plan_.describe()}. Tried: {tried}. Chosen: {chosen or 'the recipe as it is'}"
    if (score := _score(search)) is not None:
        how += f". Its score, with noise, is {score:.4f}"
    found = [
        Touch(what="size", how="the number of training records is assumed public", cost="public"),
        *table_touches(recipe.data, dataset, checked, None),
        Touch(what="model selection", how=how, cost="paid", event=search.event_.to_dict()),
        Touch(what="early stopping", how="none: the number of steps was fixed", cost="public"),
    ]
    if dataset.is_test_public and len(dataset.x_test):
        how = f"on {dataset.n_held_out:,} records of the test split"
        found.append(Touch(what="evaluation", how=how, cost="public"))
    return tuple(found)


def _utility(
    recipe: Recipe, search: PrivateSearch, dataset: Dataset, measured: Mapping[str, float]
) -> Utility:
    """Return the accuracy on public test records, or else the noisy score of the search."""
    score = _score(search)
    value = measured.get("accuracy", score)
    return Utility(
        metric="accuracy",
        private=() if value is None else (SeedValue(seed=recipe.run.seed, value=value),),
        majority=majority_share(dataset.y_test) if measured else None,
        others={
            **({} if score is None else {"score": score}),
            **{name: measured[name] for name in ("loss", "auc") if name in measured},
        },
        n_test=dataset.n_held_out if measured else 0,
    )


def _score(search: PrivateSearch) -> float | None:
    """Return the noisy score of the chosen configuration; None if there were no trials."""
    return None if math.isnan(search.best_score_) else search.best_score_
