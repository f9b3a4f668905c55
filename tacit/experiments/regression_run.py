"""Regression by recipe: a table and its schema become one run folder with a fitted model.

The target decides: a number is fitted by linear regression, categories by logistic regression. The
budget is divided in advance: `data.check_share` for the check of the table, `data.evaluation_share`
for the noisy evaluation, the rest for the fit. A run that was killed after a payment repeats the
fit with the same noise, as long as table and recipe are the same, so it does not pay again.
"""

import hashlib
import hmac
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tacit.datasets import Dataset
from tacit.events import Event, Relation, Sequence
from tacit.experiments import data as data_of
from tacit.experiments.coefficients import coefficients_of
from tacit.experiments.facts import (
    RECIPE,
    SECRET,
    Facts,
    SeedValue,
    Touch,
    Utility,
    claim_fields,
    majority_share,
)
from tacit.experiments.folder import RunFolder, write_whole
from tacit.experiments.paid_evaluation import PaidScores, pay_once, score_classes, score_numbers
from tacit.experiments.recipe import Recipe
from tacit.experiments.table_check import check_table, rng_of, table_releases, table_touches
from tacit.ledger import Entry, Ledger

FITTED = "model.json"
_KEY = "regression.key"


def run_regression(
    recipe: Recipe,
    folder: str | Path,
    *,
    root: str | Path | None = None,
    ledger: str | Path | None = None,
) -> Facts:
    """Fit the recipe's regression into `folder`, and return its facts; a finished run is kept.

    `root` is the folder of the data. `ledger` is the ledger file that pays (default: the recipe's,
    or one in the folder).
    """
    run = RunFolder(folder)
    with run.locked():
        return _run_regression(recipe, run, run.data_root(root), ledger)


def _run_regression(
    recipe: Recipe, run: RunFolder, root: str | Path | None, ledger: str | Path | None
) -> Facts:
    """Do what `run_regression` says, while this process holds the folder."""
    start = time.perf_counter()
    run.refuse_other_recipe(recipe, resume=f"tacit regress {run.path}")
    if run.is_finished:
        run.close()
        return run.facts()
    run.refuse_foreign_files()
    dataset = data_of.load(recipe.data, root, needs_classes=False)
    run.write(RECIPE, recipe.to_toml())
    run.remember_data(root)
    with run.open_ledger(recipe, None, ledger) as paying:
        budget = recipe.privacy.epsilon
        assert budget is not None  # set by Recipe
        checked = check_table(recipe, dataset.flags, run, paying, epsilon=budget, root=root)
        model = _fit(recipe, dataset, run, paying, budget - _reserved(recipe, dataset))
        run.write(FITTED, json.dumps(fitted_model(recipe, model), indent=2, allow_nan=False) + "\n")
        paid = _evaluate(recipe, dataset, run, paying, model)
        facts = _facts(recipe, dataset, paying, model, checked, paid)
        return run.finish(replace(facts, seconds=round(time.perf_counter() - start, 3)), paying)


@dataclass(frozen=True)
class _PaidOnce:
    """A ledger that does not pay twice for what this run has paid before it was killed."""

    ledger: Ledger
    name: str
    """Random name of the run, bound to its records and recipe; public."""

    @property
    def relation(self) -> Relation:
        return self.ledger.relation

    def spend(self, event: Event, *, note: str = "", partition: str | None = None) -> Entry:
        note = f"{note}, run {self.name}"
        for entry in self.ledger.history():
            if entry.note == note and entry.event == event:
                return entry
        return self.ledger.spend(event, note=note, partition=partition)


def _reserved(recipe: Recipe, dataset: Dataset) -> float:
    """Return the part of epsilon that the check and the evaluation spend."""
    settings, epsilon = recipe.data, recipe.privacy.epsilon or 0.0
    is_checked = dataset.flags and not settings.public_sample
    share = settings.check_share if is_checked else 0.0
    is_paid = not dataset.is_test_public and settings.evaluation == "paid"
    return epsilon * (share + (settings.evaluation_share if is_paid else 0.0))


def _fit(recipe: Recipe, dataset: Dataset, run: RunFolder, ledger: Ledger, epsilon: float) -> Any:
    """Return the fitted estimator. Any: linear and logistic models share no type.

    The noise is derived from a secret key, the records and the recipe: the same for the same fit,
    and unrelated for any other.
    """
    schema = data_of.schema_of(recipe.data)
    secret = _secret(recipe, run)
    content = hashlib.sha256(recipe.to_toml().encode())
    for part in (dataset.x_train, dataset.y_train):
        content.update(np.ascontiguousarray(part).data)
    seed = hmac.digest(secret, b"noise" + content.digest(), "sha256")
    name = hmac.digest(secret, b"name" + content.digest(), "sha256").hex()[:32]
    options: dict[str, Any] = {  # Any: settings of several types
        "epsilon": epsilon,
        "delta": recipe.privacy.delta,
        "bounds": schema.bounds,
        "relation": str(ledger.relation),
        "ledger": _PaidOnce(ledger, name),
        "n_records": dataset.n_records,
        "random_state": np.random.default_rng(int.from_bytes(seed)),
    }
    return estimator_of(recipe, dataset.n_classes, **options).fit(dataset.x_train, dataset.y_train)


def estimator_of(recipe: Recipe, n_classes: int | None, **options: Any) -> Any:
    """Return the unfitted estimator of the recipe's method; `n_classes` is None for a number.

    `options` are the settings that all estimators share. Any: linear and logistic models share no
    type.
    """
    from tacit.regression import FrankWolfe, LinearRegression, LogisticRegression

    method = recipe.regression.method
    is_number = n_classes is None
    target = {"target_bounds": (-1, 1)} if is_number else {"classes": range(n_classes)}
    if method == "frank-wolfe":
        if n_classes is not None and n_classes > 2:
            raise ValueError("method frank-wolfe needs a number or two classes as target.")
        loss, radius = "squared" if is_number else "logistic", recipe.regression.radius or 1.0
        return FrankWolfe(loss=loss, radius=radius, **target, **options)
    if is_number:
        if method in ("sgd", "objective"):
            raise ValueError(f"method {method} needs a target with categories.")
        return LinearRegression(method=method, **target, **options)
    if method in ("functional", "adassp"):
        raise ValueError(f"method {method} needs a number as target.")
    method = "gradient" if method == "auto" else method
    return LogisticRegression(method=method, **target, **options)


def _secret(recipe: Recipe, run: RunFolder) -> bytes:
    """Return the run's secret key: made at the first start, removed when the run ends."""
    if recipe.run.seed is not None:
        return hashlib.sha256(f"seed {recipe.run.seed}".encode()).digest()
    path = run / SECRET / _KEY
    if not path.is_file():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, os.urandom(32), mode=0o600)
    return path.read_bytes()


def fitted_model(recipe: Recipe, model: Any) -> dict[str, Any]:  # Any: estimators, JSON values
    """Return the content of model.json: coefficients by name, and the model of encoded rows."""
    schema = data_of.schema_of(recipe.data)
    named = coefficients_of(schema, model.coef_, model.intercept_)
    return {
        "kind": "linear" if schema.n_classes is None else "logistic",
        "method": _method_of(recipe, model),
        "coefficients": named.values,
        "references": named.references,
        "classes": list(schema.classes),
        "features": list(schema.feature_names),
        "coef": np.asarray(model.coef_).tolist(),
        "intercept": np.asarray(model.intercept_).tolist(),
        "schema": schema.to_dict(),
    }


def _method_of(recipe: Recipe, model: Any) -> str:
    """Return the name of the method that was used; an estimator may have chosen it itself."""
    asked = "transfer" if recipe.method == "transfer" else recipe.regression.method
    return getattr(model, "method_", getattr(model, "method", asked))


def _evaluate(
    recipe: Recipe, dataset: Dataset, run: RunFolder, ledger: Ledger, model: Any
) -> PaidScores | None:
    """Return paid scores on private held-out records; None if they are public or not wanted."""
    settings = recipe.data
    if dataset.is_test_public or settings.evaluation == "none":
        return None
    epsilon = settings.evaluation_share * (recipe.privacy.epsilon or 0.0)
    predicted = model.predict(dataset.x_test) if len(dataset.x_test) else np.zeros(0)
    rng = rng_of(recipe, 2)
    if dataset.n_classes is None:
        return pay_once(
            run,
            lambda: score_numbers(
                dataset.y_test, predicted, epsilon=epsilon, ledger=ledger, rng=rng
            ),
        )
    odds = model.decision_function(dataset.x_test) if dataset.n_classes == 2 else None
    return pay_once(
        run,
        lambda: score_classes(
            dataset.y_test, predicted, odds, epsilon=epsilon, ledger=ledger, rng=rng
        ),
    )


def _facts(
    recipe: Recipe,
    dataset: Dataset,
    ledger: Ledger,
    model: Any,
    checked: tuple[Event, ...],
    paid: PaidScores | None,
) -> Facts:
    kind = "linear" if dataset.n_classes is None else "logistic"
    used = _method_of(recipe, model)
    events = (*checked, model.event_, *(() if paid is None else (paid.event,)))
    event = events[0] if len(events) == 1 else Sequence(events)
    public_test = ("the test records",) if recipe.data.public_test else ()
    touches = [
        Touch(what="size", how=f"the number of {dataset.unit}s is assumed public", cost="public"),
        Touch(what="preprocessing", how="values scaled by declared bounds", cost="free"),
        *table_touches(recipe.data, dataset, checked, paid and paid.event),
        Touch(
            what="training",
            how=f"{kind} regression, {used}: paid before its release",
            cost="paid",
            event=model.event_.to_dict(),
        ),
    ]
    if dataset.is_test_public and len(dataset.x_test):
        how = f"on {dataset.n_held_out:,} test records that are declared public"
        touches.append(Touch(what="evaluation", how=how, cost="public"))
    return Facts(
        **claim_fields(recipe, dataset.name, dataset.n_records, ledger, event),
        assumed_public=(*dataset.public, *public_test),
        sampling_assumed="as stated by the event",
        sampling_used="as stated by the event",
        touches=tuple(touches),
        released=("coefficients", *table_releases(recipe.data, dataset)),
        method="regression",
        model=f"{kind} regression of {recipe.data.schema.get('target')}, {used}",
        hyperparameters={"method": used, "delta": recipe.privacy.delta},
        utility=_utility(recipe, dataset, model, paid),
        model_file=FITTED,
        metrics_file="",
    )


def _utility(recipe: Recipe, dataset: Dataset, model: Any, paid: PaidScores | None) -> Utility:
    """Return the scores: exact on public test records, noisy if paid for, else none."""
    metric = "r2" if dataset.n_classes is None else "accuracy"
    if paid is not None:
        values, n_test = paid.values, dataset.n_held_out
    elif dataset.is_test_public and len(dataset.x_test):
        values = {metric: float(model.score(dataset.x_test, dataset.y_test))}
        n_test = dataset.n_held_out
    else:
        values, n_test = {}, 0
    is_exact = paid is None and metric == "accuracy" and n_test
    return Utility(
        metric=metric,
        private=(SeedValue(seed=recipe.run.seed, value=values[metric]),) if values else (),
        majority=majority_share(dataset.y_test) if is_exact else None,
        others={name: value for name, value in values.items() if name != metric},
        n_test=n_test,
        intervals={} if paid is None else paid.intervals,
    )
