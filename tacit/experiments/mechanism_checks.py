"""Tests of the mechanism that a recipe describes: DP-SGD, PATE or a regression, with p-values.

Each test runs tacit's own code with the settings of the recipe, and compares what comes out with
what was billed (`tacit.auditing`). No test releases anything about a record of the run.
"""

from functools import partial
from typing import Any

import numpy as np

from tacit._arrays import Floats
from tacit.auditing import (
    MechanismAudit,
    Result,
    TrainingSetup,
    audit_algorithm,
    audit_partition,
    audit_training,
    joined,
)
from tacit.datasets import Dataset
from tacit.events import Relation
from tacit.experiments import data as data_of
from tacit.experiments.facts import Facts
from tacit.experiments.features import Prepared
from tacit.experiments.recipe import Recipe
from tacit.experiments.regression_run import estimator_of, transfer_estimator
from tacit.ledger import Ledger
from tacit.mechanisms import Rng, Seed, generator
from tacit.pate import ConfidentGNMax, partition

Table = tuple[Floats, Any]
_RECORDS = 60  # artificial records of a regression
_QUERIES = 20
_FAR_TARGETS = (1e3, -1e3)  # beyond the bounds of any regression


def check_training(
    recipe: Recipe,
    facts: Facts,
    prepared: Prepared,
    dataset: Dataset,
    *,
    confidence: float,
    rng: Seed = None,
) -> MechanismAudit:
    """Test the DP-SGD of a recipe: its model, its releases, its optimizer, and its restarts."""
    from tacit.experiments import models
    from tacit.experiments.training_loop import (
        average_of,
        example_losses,
        optimizer_of,
        release_options,
        steps_of,
        tensors,
        users_of,
    )
    from tacit.training import Speed, make_private

    training = recipe.training
    settings: dict[str, Any] = {  # Any: numbers of several types
        "batch_size": training.lot,
        "steps": steps_of(recipe, facts.n_records),
        "noise_multiplier": float(facts.hyperparameters["noise_multiplier"]),
        "n_records": facts.n_records,
        "speed": Speed(max_microbatch=training.max_microbatch),
        **release_options(recipe),
    }
    records = tensors(prepared.x_train, prepared.y_train)
    if dataset.persons is not None:
        settings["users"] = users_of(dataset.persons, n_rows=len(records[0]))
    setup = TrainingSetup(
        make_private=make_private,
        model=models.build(recipe.model, prepared.shape, dataset.n_classes, seed=0),
        dataset=records,
        loss_fn=example_losses,
        settings=settings,
        how="step" if settings["noise"] is not None else "resumed",  # as a killed run goes on
        optimizer=partial(optimizer_of, recipe),
        average=partial(average_of, recipe),
    )
    return audit_training(setup, confidence=confidence, rng=rng)


def check_answers(recipe: Recipe, *, confidence: float, rng: Seed = None) -> MechanismAudit:
    """Test answers, threshold and partition of PATE with the recipe's teachers and noise."""
    random, count = generator(rng), recipe.teachers.count
    aggregator = recipe.answers.aggregator(count)

    def answer(votes: Any) -> Result:
        ledger = Ledger()
        return Result(aggregator.answer(votes, rng=random, ledger=ledger), ledger.event)

    half = count // 2
    rows = [[half, count - half, 0], [count - half, half, 0]]
    if isinstance(aggregator, ConfidentGNMax):
        top = min(max(round(aggregator.threshold), 1), count)
        rows.append([top, count - top, 0])  # one vote less is below the threshold
    votes = np.tile(rows, (_QUERIES, 1))
    clear = np.tile([[0, 0, count], [0, count, 0], [count, 0, 0]], (_QUERIES, 1))[: len(votes)]
    one_moved = clear + (np.roll(clear, 1, axis=1) - clear) // count
    pairs = [(votes, votes + [[-1, 0, 1]]), (clear, one_moved)]
    parts = [
        audit_algorithm(answer, pairs, part="answers", rng=random),
        audit_partition(partition, n_records=max(200, 4 * count), n_teachers=count, rng=random),
    ]
    return joined(parts, confidence=confidence)


def check_regression(recipe: Recipe, *, confidence: float, rng: Seed = None) -> MechanismAudit:
    """Test noise, sensitivity, post-processing and bill of a regression on artificial records."""
    schema, method = data_of.schema_of(recipe.data), recipe.regression.method
    if method == "objective":
        raise ValueError(
            "objective perturbation cannot be audited: its noise is inside an optimization, which "
            "no mechanism releases. Choose method gradient."
        )
    random, n_classes = generator(rng), schema.n_classes
    options: dict[str, Any] = {  # Any: settings of several types
        "epsilon": recipe.privacy.epsilon,
        "delta": recipe.privacy.delta,
        "bounds": schema.bounds,
        "n_records": _RECORDS,
    }

    def fit(records: Any) -> Result:
        seed = int(random.integers(0, 2**31))
        model = estimator_of(recipe, n_classes, random_state=seed, **options).fit(*records)
        return Result(np.append(model.coef_, model.intercept_), model.event_)

    width = len(schema.feature_names)
    table = _table(width, n_classes or 2, random)
    targets = (1,) if n_classes else (1, *_FAR_TARGETS)
    pairs = [(_with_row(table, row, y), table) for row in _extremes(width) for y in targets]
    return audit_algorithm(fit, pairs, part="regression", confidence=confidence, rng=random)


def check_transfer(recipe: Recipe, *, confidence: float, rng: Seed = None) -> MechanismAudit:
    """Test noise, sensitivity, post-processing and bill of a transfer on artificial tables.

    Neighboring data sets differ by a record of the target, or by a record of a source.
    """
    schema, random = data_of.schema_of(recipe.data), generator(rng)
    width = len(schema.feature_names)

    def fit(tables: Any) -> Result:
        options = {
            "random_state": int(random.integers(0, 2**31)),
            "relation": recipe.privacy.relation,
            "n_records": [_RECORDS] * len(tables),
        }
        model = transfer_estimator(recipe, recipe.privacy.budget.epsilon, **options)
        model.fit(*tables[0], sources=tables[1:])
        return Result(np.append(model.coef_, model.intercept_), model.event_)

    tables = tuple(_table(width, 2, random) for _ in range(1 + len(recipe.transfer.sources)))
    pairs = []
    for k in range(len(tables)):
        for row, target in zip(_extremes(width), (1, *_FAR_TARGETS), strict=True):
            longer = (*tables[:k], _with_row(tables[k], row, target), *tables[k + 1 :])
            pairs.append((longer, tables))
    return audit_algorithm(
        fit,
        pairs,
        part="transfer",
        confidence=confidence,
        relation=Relation(recipe.privacy.relation),
        is_parallel=not recipe.transfer.overlapping,
        rng=random,
    )


def _table(width: int, n_classes: int, random: Rng) -> Table:
    """Return artificial records and their targets."""
    return random.random((_RECORDS, width)) * 2 - 1, random.integers(0, n_classes, _RECORDS)


def _with_row(table: Table, row: Floats, target: float) -> Table:
    """Return the table with one record more."""
    return np.vstack([table[0], row]), np.append(table[1], target)


def _extremes(width: int) -> tuple[Floats, ...]:
    """Return records at the bounds of a table, and one far beyond them."""
    return np.ones(width), -np.ones(width), np.full(width, 1e3)
