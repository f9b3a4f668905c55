"""Regression by recipe: a table and its schema become one run folder with a fitted model.

A transfer fits a linear model with the help of other tables. Each file spends epsilon: a part
checks it by the schema, and the target's file also pays for the noisy evaluation. The facts state
what that costs one person, who is in one of the files or, if `transfer.overlapping` says so, in all
of them. `model.json` names the sources that were used, and also holds the target's own fit.

The target decides: a number is fitted by linear regression, categories by logistic regression. The
budget is divided in advance: `data.check_share` for the check of the table, `data.evaluation_share`
for the noisy evaluation, the rest for the fit. A run that was killed after a payment repeats the
fit with the same noise, as long as table and recipe are the same, so it does not pay again
(`tacit.ledger.paid_once`).
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from tacit import datasets, summaries  # tables load with scikit-learn, when first used
from tacit import sources as engines
from tacit.datasets import Dataset
from tacit.errors import WeakGuarantee
from tacit.events import Event
from tacit.events import Sequence as EventSequence
from tacit.experiments import data as data_of
from tacit.experiments.coefficients import coefficients_of, intervals_of
from tacit.experiments.facts import Facts, SeedValue, Touch, Utility, claim_fields, majority_share
from tacit.experiments.folder import RunFolder
from tacit.experiments.paid_evaluation import (
    COMMONEST,
    PaidScores,
    score_classes,
    score_numbers,
    store,
)
from tacit.experiments.recipe import Recipe
from tacit.experiments.table_check import check_table, rng_of, table_releases, table_touches
from tacit.ledger import Ledger, paid_once
from tacit.mechanisms import Rng

FITTED = "model.json"
_COUNT_SHARE = 0.02  # part of a fit's epsilon that counts records without a target
_CONFIDENCE = 0.997  # of the interval that must exclude "none is missing"
_SHARE = ("value", "lower", "upper", "confidence")


@dataclass(frozen=True)
class FittedModel:
    """A fitted estimator, and what the facts say about it."""

    estimator: Any
    """Any: the estimators share no type. Its `event_` was paid."""
    used: str
    """The method in words, such as "linear regression, adassp"."""
    settings: dict[str, Any]
    """Settings of the fit. Any: JSON values."""
    content: dict[str, Any] = field(default_factory=dict)
    """What model.json holds besides coefficients and schema. Any: JSON values."""
    released: tuple[str, ...] = ()
    """What the fit releases besides the coefficients."""
    counted: Event | None = None
    """Event of the count of records without a target, if it was paid for."""


class Fit(Protocol):
    """A function that fits a model to private tables (the target first), and pays for it."""

    def __call__(
        self, recipe: Recipe, tables: Sequence[Dataset], epsilon: float, ledger: Ledger, rng: Rng
    ) -> FittedModel: ...


def run_regression(
    recipe: Recipe,
    folder: str | Path,
    *,
    root: str | Path | None = None,
    ledger: str | Path | None = None,
) -> Facts:
    """Fit the recipe's regression or transfer into `folder`, and return its facts.

    A finished run is kept. `root` is the folder of the data. `ledger` is the ledger file that pays
    (default: the recipe's, or one in the folder). Each table of a transfer spends the whole
    epsilon. Unless no person is in two tables, the costs add up.
    """
    verb, fit = _VERBS[recipe.method]
    sources, disjoint = recipe.transfer.sources, not recipe.transfer.overlapping
    if is_transfer := recipe.method == "transfer":
        _require_transfer(recipe)
    run = RunFolder(folder)
    with run.taken(recipe, verb=verb, root=root) as place:
        if run.is_finished:
            return run.facts()
        tables = [data_of.load(recipe.data, place, needs_classes=False, needs_rows=is_transfer)]
        schema, files = data_of.schema_of(recipe.data), [data_of.locate(s, place) for s in sources]
        tables += [datasets.read_table(file, schema, test_share=0.0) for file in files]
        budget = recipe.privacy.budget.epsilon
        _require_fit(recipe, tables, budget)
        with run.paying(recipe, place, ledger) as paying:
            flags = {file.name: table.flags for file, table in zip(files, tables[1:], strict=True)}
            checked = check_table(
                recipe, tables[0].flags, run, paying, epsilon=budget, root=place, others=flags,
                disjoint=disjoint,
            )  # fmt: skip
            content = _contents(tables, sources_of(recipe))
            with paid_once(paying, recipe.to_toml().encode(), *content) as seed:
                rest = budget - _reserved(recipe, tables[0])
                noise = rng_of(recipe, 2, fresh=seed)
                assert noise is not None  # it has a seed
                model = fit(recipe, tables, rest, paying, noise)
                content = fitted_model(recipe, model.estimator) | model.content
                run.write(FITTED, json.dumps(content, indent=2, allow_nan=False) + "\n")
                paid = _evaluate(recipe, tables[0], run, paying, model.estimator, noise)
                return run.finish(_facts(recipe, tables[0], run, paying, model, checked, paid),
                                  paying)  # fmt: skip


def sources_of(recipe: Recipe) -> str:
    """Return the address of the recipe's table in a database; empty for a file."""
    return recipe.data.path if engines.is_database(recipe.data.path) else ""


def _contents(tables: Sequence[Dataset], address: str) -> list[bytes]:
    """Return all private values that the releases of a run depend on.

    The rows of a database are not here, and may have changed: then every attempt is another one.
    """
    if address:
        return [os.urandom(32)]
    parts = (part for t in tables for part in (t.x_train, t.y_train, t.x_test, t.y_test))
    return [np.ascontiguousarray(part).tobytes() for part in parts]


def _reserved(recipe: Recipe, dataset: Dataset) -> float:
    """Return the part of epsilon that the check and the evaluation spend."""
    settings, epsilon = recipe.data, recipe.privacy.budget.epsilon
    is_checked = dataset.flags and not settings.public_sample
    share = settings.check_share if is_checked else 0.0
    is_paid = not dataset.is_test_public and settings.evaluation == "paid"
    return epsilon * (share + (settings.evaluation_share if is_paid else 0.0))


def _options(
    recipe: Recipe, dataset: Dataset, epsilon: float
) -> dict[str, Any]:  # Any: settings of several types
    return {
        "epsilon": epsilon,
        "delta": recipe.privacy.delta,
        "bounds": data_of.schema_of(recipe.data).bounds,
        "relation": recipe.privacy.relation,  # that of the ledger
        "n_records": dataset.n_records,
    }


def _require_fit(recipe: Recipe, tables: Sequence[Dataset], epsilon: float) -> None:
    """Raise before anything is paid or written, if the method cannot fit a model of this target.

    The fit is planned for a table without rows. In an engine all of it is tried; nobody pays.
    """
    from tacit.regression import planned_event

    (x, y), *sources = [(table.x_train[:0], table.y_train[:0]) for table in tables]
    if recipe.method == "transfer":
        sizes = [table.n_records for table in tables]
        relation = recipe.privacy.relation
        model = transfer_estimator(recipe, epsilon, relation=relation, n_records=sizes)
        planned_event(model, lambda copy: copy.fit(x, y, sources=sources))
        return
    options = _options(recipe, tables[0], epsilon)
    if sources_of(recipe):
        _fit_in_engine(recipe, [], options)
        return
    model = estimator_of(recipe, tables[0].n_classes, **options)
    planned_event(model, lambda copy: copy.fit(x, y))


def _fit_one(
    recipe: Recipe, tables: Sequence[Dataset], epsilon: float, ledger: Ledger, rng: Rng
) -> FittedModel:
    (dataset,) = tables
    left_out = _count_left_out(recipe, dataset, epsilon, ledger, rng)
    options = _options(recipe, dataset, epsilon - left_out.epsilon)
    options |= {"ledger": ledger, "random_state": rng}
    options["n_records"] = left_out.used_of(dataset.n_records)
    if address := sources_of(recipe):
        model = _fit_in_engine(recipe, address, options)
    else:
        model = estimator_of(recipe, dataset.n_classes, **options)
        model.fit(dataset.x_train, dataset.y_train)
    used = _method_of(recipe, model)
    kind = "linear" if dataset.n_classes is None else "logistic"
    return FittedModel(
        model,
        f"{kind} regression, {used}",
        {"method": used},
        content=left_out.content,
        released=tuple(
            what
            for what, is_released in (
                ("standard errors and intervals", getattr(model, "inference_", None) is not None),
                ("a noisy count of records without a target", left_out.found is not None),
            )
            if is_released
        ),
        counted=None if left_out.found is None else left_out.found.event,
    )


class _LeftOut(NamedTuple):
    """How many records of a table have no target: a released count, if one was needed."""

    found: "summaries.OutsideCount | None" = None
    epsilon: float = 0.0

    @property
    def is_clear(self) -> bool:
        """Whether records are missing beyond what the noise of the count explains."""
        return self.found is not None and self.found.share.lower > 0

    def used_of(self, n_records: int) -> int:
        """Return how many of `n_records` records have a target, as far as the count shows."""
        if self.found is None or not self.is_clear:
            return n_records
        return max(1, round(n_records * (1 - self.found.share.value)))

    @property
    def content(self) -> dict[str, Any]:
        """What model.json says about it. Any: JSON values."""
        if self.found is None or not self.is_clear:
            return {}
        share = self.found.share
        return {"without_target": {name: getattr(share, name) for name in _SHARE}}


def _count_left_out(
    recipe: Recipe, dataset: Dataset, epsilon: float, ledger: Ledger, rng: Rng
) -> _LeftOut:
    """Count the records without a target, for methods that take the number of records as known.

    The functional mechanism and noisy gradients of least squares do: with a number that is too
    large, the intercept or the residual standard deviation would be wrong. The count is paid for
    by a part of the fit's `epsilon`.
    """
    schema, address = data_of.schema_of(recipe.data), sources_of(recipe)
    is_adassp = address and recipe.privacy.delta  # what "auto" is in a database
    needing = ("functional",) if is_adassp else ("functional", "gradient", "auto")
    has_rule = schema.target_column.missing is not None  # then no record is left out
    if schema.n_classes is not None or not dataset.flags or has_rule:
        return _LeftOut()
    if recipe.regression.method not in needing:
        return _LeftOut()
    n = dataset.n_records + (0 if dataset.is_test_public else dataset.n_held_out)
    kept = len(dataset.y_train) + (0 if dataset.is_test_public else len(dataset.y_test))
    if address:
        with engines.open_table(address, schema) as table:
            kept = table.features(schema).count()
    found = summaries.count_outside(
        {schema.target: summaries.FlagCounts(n - kept, n)},
        epsilon=_COUNT_SHARE * epsilon,
        confidence=_CONFIDENCE,
        ledger=ledger,
        relation=ledger.relation,
        rng=rng,
    )
    return _LeftOut(found, _COUNT_SHARE * epsilon)


def _fit_in_engine(recipe: Recipe, table: Any, options: dict[str, Any]) -> Any:
    """Return a model that is fitted to sums which an engine computes. Any: two estimators."""
    schema = data_of.schema_of(recipe.data)
    WeakGuarantee.issue(**{name: options[name] for name in ("epsilon", "delta", "n_records")})
    fit = engines.fit_linear if schema.n_classes is None else engines.fit_logistic
    given = {name: value for name, value in options.items() if name != "bounds"}
    given["records_per_person"] = recipe.data.records_per_person
    return fit(table, schema, method=recipe.regression.method, **given)


def _fit_transfer(
    recipe: Recipe, tables: Sequence[Dataset], epsilon: float, ledger: Ledger, rng: Rng
) -> FittedModel:
    asked = recipe.transfer
    (x, y), *sources = [(table.x_train, table.y_train) for table in tables]
    options = {"relation": str(ledger.relation), "ledger": ledger, "random_state": rng}
    options |= {"n_records": [table.n_records for table in tables]}
    model = transfer_estimator(recipe, epsilon, **options).fit(x, y, sources=sources)
    names = [Path(source).name for source in asked.sources]
    used = [names[k] for k in model.informative_]
    apart = "each person is in all files" if asked.overlapping else "no person is in two files"
    alone = coefficients_of(data_of.schema_of(recipe.data), *model.alone_)
    return FittedModel(
        model,
        f"linear regression, transfer from {len(used)} of {len(sources)} tables, if {apart}",
        {
            "epsilon_per_file": recipe.privacy.budget.epsilon,
            "h": asked.h,
            "q": asked.q,
            "lambda": asked.penalty,
            "overlapping": asked.overlapping,
        },
        content={
            "informative": used,
            "alone": alone.values,
            "weight": model.weight_,
            "misfits": [
                {"source": name, "misfit": misfit if np.isfinite(misfit) else None}
                for name, misfit in zip(names, model.misfits_, strict=True)
            ],
        },
        released=("which sources agree with the target, and how well", "the target's own fit"),
    )


def _require_transfer(recipe: Recipe) -> None:
    """Raise if a transfer has no sources, or a target that is no number."""
    if not recipe.transfer.sources:
        raise ValueError("transfer needs SOURCES: one or more files of related tables.")
    if data_of.schema_of(recipe.data).n_classes is not None:
        raise ValueError("transfer needs a number as target: declare lower and upper for it.")


_VERBS: dict[str, tuple[str, Fit]] = {
    "regression": ("regress", _fit_one),
    "transfer": ("transfer", _fit_transfer),
}
run_transfer = run_regression  # the recipe's method decides


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
        penalty=asked.penalty,
        disjoint=not asked.overlapping,
        **options,
    )


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
        loss = "squared" if is_number else "logistic"
        return FrankWolfe(loss=loss, radius=recipe.regression.radius, **target, **options)
    if is_number:
        if method in ("descent", "objective"):
            raise ValueError(f"method {method} needs a target with categories.")
        return LinearRegression(method=method, **target, **options)
    if method in ("functional", "adassp"):
        raise ValueError(f"method {method} needs a number as target.")
    return LogisticRegression(method=method, **target, **options)


def _method_of(recipe: Recipe, model: Any) -> str:
    """Return the name of the method that was used; an estimator may have chosen it itself."""
    asked = "transfer" if recipe.method == "transfer" else recipe.regression.method
    return getattr(model, "method_", getattr(model, "method", asked))


def fitted_model(recipe: Recipe, model: Any) -> dict[str, Any]:  # Any: estimators, JSON values
    """Return the content of model.json: coefficients by name, and the model of encoded rows."""
    schema = data_of.schema_of(recipe.data)
    named = coefficients_of(schema, model.coef_, model.intercept_)
    inference = getattr(model, "inference_", None)
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
        **({} if inference is None else intervals_of(schema, inference)),
    }


def _evaluate(
    recipe: Recipe, dataset: Dataset, run: RunFolder, ledger: Ledger, model: Any, rng: Rng
) -> PaidScores | None:
    """Return paid scores on private held-out records; None if they are public or not wanted."""
    settings = recipe.data
    if dataset.is_test_public or settings.evaluation == "none":
        return None
    x, y = dataset.x_test, dataset.y_test
    predicted = model.predict(x) if len(x) else np.zeros(0)
    odds = None
    if dataset.n_classes == 2:
        odds = model.decision_function(x) if len(x) else np.zeros(0)
    terms: dict[str, Any] = {  # Any: settings of several types
        "epsilon": settings.evaluation_share * recipe.privacy.budget.epsilon,
        "ledger": ledger,
        "rng": rng,
    }
    if dataset.n_classes is None:
        return store(run, score_numbers(y, predicted, **terms))
    return store(run, score_classes(y, predicted, odds, n_classes=dataset.n_classes, **terms))


def _facts(
    recipe: Recipe,
    dataset: Dataset,
    run: RunFolder,
    ledger: Ledger,
    model: FittedModel,
    checked: tuple[Event, ...],
    paid: PaidScores | None,
) -> Facts:
    fitted = model.estimator.event_
    counted = () if model.counted is None else (model.counted,)
    events = (*checked, *counted, fitted, *(() if paid is None else (paid.event,)))
    event = events[0] if len(events) == 1 else EventSequence(events)
    public_test = ("the test records",) if recipe.data.public_test else ()
    touches = [
        Touch(
            what="size", how=f"the number of {dataset.counted}s is assumed public", cost="public"
        ),
        Touch(what="preprocessing", how="values scaled by declared bounds", cost="free"),
        *table_touches(recipe.data, dataset, checked, paid and paid.event),
        *(
            Touch(
                what="preprocessing",
                how="noisy count of records without a target, which are left out",
                cost="paid",
                event=event.to_dict(),
            )
            for event in counted
        ),
        Touch(
            what="training",
            how=f"{model.used}: paid before its release",
            cost="paid",
            event=fitted.to_dict(),
        ),
    ]
    if dataset.is_test_public and len(dataset.x_test):
        how = f"on {dataset.n_held_out:,} test records that are declared public"
        touches.append(Touch(what="evaluation", how=how, cost="public"))
    kind, _, used = model.used.partition(", ")
    return Facts(
        **claim_fields(recipe, dataset.name, dataset.n_records, ledger, event),
        assumed_public=(*dataset.public, *public_test),
        sampling_assumed="as stated by the event",
        sampling_used="as stated by the event",
        touches=tuple(touches),
        released=("coefficients", *model.released, *table_releases(recipe.data, dataset)),
        method=recipe.method,
        model=f"{kind} of {recipe.data.schema.get('target')}, {used}",
        hyperparameters=model.settings | {"delta": recipe.privacy.delta},
        utility=_utility(recipe, dataset, model.estimator, paid),
        model_file=FITTED,
        metrics_file="",
        seconds=run.seconds,
        records_per_person=dataset.records_per_person,
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
        private=(SeedValue(seed=recipe.run.seed, value=values[metric]),)
        if metric in values
        else (),
        majority=majority_share(dataset.y_test) if is_exact else values.get(COMMONEST),
        others={name: v for name, v in values.items() if name not in (metric, COMMONEST)},
        n_test=n_test,
        intervals={} if paid is None else paid.intervals,
    )
