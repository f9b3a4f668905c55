"""Audit of a finished run: train by its recipe again, with canaries, and attack every release.

The canaries have coordinates of their own, which no real record touches, so what the audit writes
about them says nothing about the records and is not paid for. Whatever does depend on the records
(the accuracy with canaries, membership inference on the released model) is measured only where the
recipe says that the records are public. A PATE run is attacked through its answers
(`tacit.experiments.audit_pate`).
"""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tacit import accounting
from tacit.auditing import (
    AuditBound,
    BillTest,
    GradientCanaries,
    noise_bound,
    one_run,
    refute_event,
    threshold_test,
)
from tacit.datasets import Dataset
from tacit.events import Event, Relation
from tacit.experiments import data, models, plan
from tacit.experiments.audit_pate import attack_answers
from tacit.experiments.demonstrate import Demonstrations, demonstrate
from tacit.experiments.evaluate import evaluate
from tacit.experiments.features import Prepared, cache_folder, prepare
from tacit.experiments.recipe import Recipe
from tacit.experiments.released import load_model
from tacit.experiments.run import RECIPE, Facts, RunFolder

if TYPE_CHECKING:
    from torch import nn

AUDIT, AUDIT_VERSION = "audit.json", 1
_ATTACKS = 5  # bounds and tests that speak about one run


@dataclass(frozen=True, kw_only=True)
class RunAudit:
    """What attacks on a run proved; `audit.json` holds it as plain JSON values."""

    epsilon: float
    """The bill of the audited run: the recipe's sampling rate, steps and noise."""
    claimed: float
    """The bill in the run's facts and certificate, whatever else it covers; no bound may pass it
    either."""
    delta: float
    bounds: tuple[AuditBound, ...]
    tests: tuple[BillTest, ...]
    """Of the billed event on its own curve: with fair coins alone, and with independent scores."""
    n_canaries: int
    accuracy: dict[str, float] | None
    """With canaries and without, on the public test split; None if the records are private."""
    demonstrations: Demonstrations | None
    """Membership inference and inversion beside a non-private twin; None if private."""
    created: str
    version: int = AUDIT_VERSION

    @property
    def passes(self) -> bool:
        """Whether no bound is above either bill and no test refutes the audited one."""
        bill = min(self.epsilon, self.claimed)
        holds = all(bound.passes(bill) for bound in self.bounds)
        return holds and not any(test.is_refuted for test in self.tests)

    def to_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Plain JSON values."""
        tests = [{**asdict(test), "is_refuted": test.is_refuted} for test in self.tests]
        return {**json.loads(json.dumps(asdict(self))), "tests": tests, "passes": self.passes}


def audit_run(
    path: str | Path,
    *,
    n_canaries: int = 10_000,
    confidence: float = 0.95,
    root: str | Path | None = None,
    seed: int | None = None,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> RunAudit:
    """Audit the finished run in folder `path`, and write `audit.json` there.

    With probability at least `confidence` a run whose bill is right passes: each of the bounds and
    tests fails with at most its share of the rest (Bonferroni). Canaries take part in every lot.
    The sampling rate of the recipe is kept, and a longer divisor is met by a larger learning rate:
    real records train as they would without canaries.
    """
    folder = RunFolder(path)
    facts = folder.facts()
    if facts.method == "PATE":
        return _audit_answers(folder, facts, n_canaries, confidence, seed)
    recipe = Recipe.read(folder / RECIPE)
    dataset = data.load(recipe.data, root)
    released = load_model(folder.path)
    canaries = GradientCanaries(n_canaries, clip_norm=recipe.training.clip_norm, rng=seed)
    prepared = prepare(
        dataset,
        recipe.features,
        release=lambda name, *_: released._summaries[name],
        cache=cache_folder(),
    )
    event, model = _train(canaries, recipe, facts, prepared, dataset, seed, on_step)
    relation = Relation(facts.relation)
    bill = accounting.epsilon(event, delta=facts.delta, relation=relation)
    scores, inside = canaries.scores, canaries.is_member
    bounds, tests = _attacked(scores, inside, event, bill, facts.delta, relation, confidence)
    is_public = recipe.data.holds_public_records
    found = RunAudit(
        epsilon=bill,
        claimed=facts.epsilon,
        delta=facts.delta,
        bounds=bounds,
        tests=tests,
        n_canaries=n_canaries,
        accuracy=_accuracy(model, facts, prepared) if is_public else None,
        demonstrations=demonstrate(folder, facts, released, dataset, prepared)
        if is_public
        else None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    folder.write(AUDIT, json.dumps(found.to_dict(), indent=2) + "\n")
    return found


def _audit_answers(
    folder: RunFolder, facts: Facts, n_canaries: int, confidence: float, seed: int | None
) -> RunAudit:
    event, scores, inside = attack_answers(folder, n_canaries=n_canaries, rng=seed)
    relation = Relation(facts.relation)
    bill = accounting.epsilon(event, delta=facts.delta, relation=relation)
    bounds, tests = _attacked(scores, inside, event, bill, facts.delta, relation, confidence)
    found = RunAudit(
        epsilon=bill,
        claimed=facts.epsilon,
        delta=facts.delta,
        bounds=bounds,
        tests=tests,
        n_canaries=n_canaries,
        accuracy=None,
        demonstrations=None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    folder.write(AUDIT, json.dumps(found.to_dict(), indent=2) + "\n")
    return found


def _train(
    canaries: GradientCanaries,
    recipe: Recipe,
    facts: Facts,
    prepared: Prepared,
    dataset: Dataset,
    seed: int | None,
    on_step: Callable[[int, int], None],
) -> tuple[Event, "nn.Module"]:
    """What the audited run did to its records, and its model."""
    import torch
    from torch.nn.functional import cross_entropy

    from tacit.training import EMA, AdamBC, make_private

    def losses(model: Any, batch: Any) -> Any:  # Any: tensors
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

    training, n = recipe.training, facts.n_records
    assert dataset.n_classes is not None
    shape = tuple(prepared.x_train.shape[1:])
    inner = models.build(recipe.model, shape, dataset.n_classes, seed=seed or 0)
    records = (torch.from_numpy(prepared.x_train), torch.from_numpy(prepared.y_train))
    model, planted, loss_fn = canaries.plant(inner, records, losses)
    n_records = n + canaries.n_canaries // 2
    optimizer: torch.optim.Optimizer
    if training.optimizer == "adam":
        optimizer, longer = AdamBC(model.parameters(), lr=training.learning_rate), 1.0
    else:  # the divisor grows with the canaries, so the rate does
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=training.momentum)
        longer = n_records / n
    average = EMA(inner, decay=training.average) if training.average else None
    private = make_private(
        model,
        optimizer,
        planted,
        loss_fn,
        batch_size=round(plan.lot_of(recipe) * n_records / n),
        steps=facts.steps,
        clip_norm=training.clip_norm,
        noise_multiplier=float(facts.hyperparameters["noise_multiplier"]),
        n_records=n_records,
        seed=seed,
        max_microbatch=training.max_microbatch,
    )
    for lot in canaries.watch(private):
        rate = plan.learning_rate(recipe, n, private.steps_taken)
        for group in optimizer.param_groups:
            group["lr"] = longer * rate
        private.step(lot)
        if average is not None:
            average.update()
        on_step(private.steps_taken, private.steps)
    if average is not None:
        with average.applied() as averaged:
            inner = copy.deepcopy(averaged)  # what would be released
    return private.event, inner


def _attacked(
    scores: NDArray[np.float64],
    inside: NDArray[np.bool_],
    event: Event,
    bill: float,
    delta: float,
    relation: Relation,
    confidence: float,
) -> tuple[tuple[AuditBound, ...], tuple[BillTest, ...]]:
    each = 1 - (1 - confidence) / _ATTACKS
    asked: dict[str, Any] = {"delta": delta, "confidence": each}  # Any: both are floats
    bounds = (
        one_run(scores, inside, **asked, expected_epsilon=bill),
        threshold_test(scores, inside, **asked),
        noise_bound(scores, inside, event, **asked, relation=relation),
    )
    tests = tuple(
        refute_event(
            scores,
            inside,
            event,
            confidence=each,
            relation=relation,
            independent=independent,
        )
        for independent in (False, True)
    )
    return bounds, tests


def _accuracy(model: "nn.Module", facts: Facts, prepared: Prepared) -> dict[str, float]:
    import torch

    x, y = torch.from_numpy(prepared.x_test), torch.from_numpy(prepared.y_test)
    found = evaluate(model, x, y)["accuracy"]
    return {"with_canaries": found, "without": facts.utility.private[0].value}
