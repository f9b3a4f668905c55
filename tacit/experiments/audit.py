"""Audit of a finished run: attacks give lower bounds on epsilon, to compare with its stated cost.

A DP-SGD run is trained again by its recipe, with canaries, and every release is attacked. Each
canary is an artificial example whose gradient uses coordinates that no real record touches. So what
the audit writes about them reveals nothing about the records and is not paid for. Values that do
depend on the records (the accuracy with canaries, and the demonstrations) are measured only if the
recipe declares the records public.

A PATE run is attacked through its answers: can a single vote be seen through the noise? Every
canary is a run of its own, with as many queries as the audited run. All queries have the votes that
a single record changes most (a tie, or a count at the threshold), and the run's own aggregator and
noise answer them. No record and no teacher of the run is used, so nothing is paid.

Beside the attacks, the mechanism itself is tested with the recipe's model and settings: noise,
draws, sensitivity, keys and bill (`mechanism_checks`). Regressions and transfers are tested in this
way alone.

Demonstrations compare the released model with a twin trained without privacy (`demonstrations`).
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tacit import accounting
from tacit.auditing import (
    AuditBound,
    BillTest,
    GradientCanaries,
    MechanismAudit,
    flip_coins,
    noise_bound,
    one_run,
    refute_event,
    threshold_test,
)
from tacit.datasets import Dataset
from tacit.events import Event, Relation
from tacit.experiments import data
from tacit.experiments.demonstrations import Demonstrations, demonstrate
from tacit.experiments.facts import AUDIT, RECIPE, Facts
from tacit.experiments.features import Prepared, cache_folder
from tacit.experiments.folder import RunFolder
from tacit.experiments.mechanism_checks import (
    check_answers,
    check_regression,
    check_training,
    check_transfer,
)
from tacit.experiments.recipe import Recipe
from tacit.mechanisms import Rng, Seed, generator
from tacit.pate import NO_ANSWER, Aggregator, ConfidentGNMax

if TYPE_CHECKING:  # an audit of a PATE run does not need torch
    from tacit.experiments.training_loop import TrainingLoop

AUDIT_VERSION = 1
_FITS = {"regression": check_regression, "transfer": check_transfer}
_ATTACKS = 5  # bounds and tests that are computed for one run
_PILOT = 100_000  # answers drawn beforehand to estimate the probability of each outcome


@dataclass(frozen=True, kw_only=True)
class RunAudit:
    """Results of the attacks on one run. `audit.json` holds the same values as plain JSON."""

    epsilon: float
    """Cost of the attacked releases: the sampling rate, steps and noise of the recipe."""
    claimed: float
    """Cost stated in the run's facts, which may cover more; no bound may exceed it either."""
    delta: float
    bounds: tuple[AuditBound, ...]
    tests: tuple[BillTest, ...]
    """Tests of the event's whole trade-off curve: from fair coins only, and from the assumption
    that scores are independent."""
    n_canaries: int
    accuracy: dict[str, float] | None
    """With canaries and without, on the public test split; None if the records are private."""
    demonstrations: Demonstrations | None
    """Attacks on the released model and on a non-private twin; None if records are private."""
    created: str
    mechanism: MechanismAudit | None = None
    """Tests of the mechanism, each with its p-value, and what was not tested."""
    confidence: float = 0.95
    """Probability that a correct run passes all bounds and all tests together."""
    model_sha256: str = ""
    """Hash of the model of the audited run, so that no other run can use these results."""
    version: int = AUDIT_VERSION

    @property
    def passes(self) -> bool:
        """Whether no lower bound is above a stated cost and no test shows a fault."""
        cost = min(self.epsilon, self.claimed)
        holds = all(bound.passes(cost) for bound in self.bounds)
        is_tested_good = self.mechanism is None or self.mechanism.passes
        return holds and is_tested_good and not any(test.is_refuted for test in self.tests)

    def to_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return plain JSON values."""
        tests = [{**asdict(test), "is_refuted": test.is_refuted} for test in self.tests]
        plain = json.loads(json.dumps(asdict(self)))
        mechanism = None if self.mechanism is None else self.mechanism.to_dict()
        error = round(1 - self.confidence, 12)
        return {
            **plain,
            "tests": tests,
            "mechanism": mechanism,
            "family_wise_error": error,
            "passes": self.passes,
        }


class Attack(NamedTuple):
    """The attacked event, the attack's score of each canary, and which canaries were included.

    `reference` holds scores of canaries that were never candidates for the training set.
    """

    event: Event
    scores: NDArray[np.float64]
    is_member: NDArray[np.bool_]
    reference: NDArray[np.float64] = np.zeros(0)


def audit_run(
    path: str | Path,
    *,
    n_canaries: int = 10_000,
    confidence: float = 0.95,
    root: str | Path | None = None,
    seed: int | None = None,
    trust_code: Collection[str] = (),
) -> RunAudit:
    """Audit the finished run in folder `path`, and write `audit.json` there.

    Half of the probability 1 - `confidence` is for the tests of the mechanism (Holm). The other
    half is divided equally among lower bounds and tests of the bill (Bonferroni). So a run whose
    stated cost is correct passes with probability at least `confidence`. `trust_code` lists modules
    whose code the recipe may run (`Recipe.parse`).
    """
    folder = RunFolder(path)
    folder.facts()  # raises if there is no finished run
    with folder.locked():
        return _audit_run(folder, n_canaries, confidence, root, seed, trust_code)


def _audit_run(
    folder: RunFolder,
    n_canaries: int,
    confidence: float,
    root: str | Path | None,
    seed: int | None,
    trust_code: Collection[str],
) -> RunAudit:
    """Do what `audit_run` says, while this process holds the folder."""
    facts, recipe = folder.facts(), Recipe.read(folder / RECIPE, trust_code=trust_code)
    root = folder.data_root(root)
    accuracy = demonstrations = None
    half = (1 - confidence) / 2
    terms: dict[str, Any] = {"confidence": 1 - half, "rng": seed}
    if recipe.method in _FITS:
        mechanism = _FITS[recipe.method](recipe, **terms)
        return _write(folder, facts, confidence, mechanism, cost=facts.epsilon)
    if recipe.method not in ("dp-sgd", "pate"):
        raise ValueError(f"a {recipe.method} cannot be audited yet.")
    if recipe.method == "pate":
        mechanism = check_answers(recipe, **terms)
        attack = attack_answers(recipe, facts.steps, n_canaries=n_canaries, rng=seed)
    else:
        from tacit.experiments.released import load_model
        from tacit.experiments.training_loop import evaluate, tensors

        dataset = data.load(recipe.data, root, takes_persons=True)
        released = load_model(folder.path, trust_code=trust_code)
        prepared = released.prepare(dataset, cache=cache_folder())
        mechanism = check_training(recipe, facts, prepared, dataset, **terms)
        canaries = GradientCanaries(n_canaries, clip_norm=recipe.training.clip_norm, rng=seed)
        loop = _train(canaries, recipe, facts, prepared, dataset, seed)
        attack = Attack(loop.private.event, canaries.scores, canaries.is_member, canaries.reference)
        if recipe.data.holds_public_records:
            with loop.released() as model:
                found = evaluate(model, *tensors(prepared.x_test, prepared.y_test))
            without = facts.utility.private[0].value
            accuracy = {"with_canaries": found["accuracy"], "without": without}
            demonstrations = demonstrate(folder, facts, released, dataset, prepared)
    cost = accounting.epsilon(attack.event, delta=facts.delta, relation=Relation(facts.relation))
    bounds, tests = _bounds_and_tests(attack, cost, facts, 1 - half / _ATTACKS)
    return _write(
        folder,
        facts,
        confidence,
        mechanism,
        cost=cost,
        bounds=bounds,
        tests=tests,
        n_canaries=n_canaries,
        accuracy=accuracy,
        demonstrations=demonstrations,
    )


def _write(
    folder: RunFolder,
    facts: Facts,
    confidence: float,
    mechanism: MechanismAudit,
    *,
    cost: float,
    bounds: tuple[AuditBound, ...] = (),
    tests: tuple[BillTest, ...] = (),
    n_canaries: int = 0,
    accuracy: dict[str, float] | None = None,
    demonstrations: Demonstrations | None = None,
) -> RunAudit:
    """Return the results as one value, and write them to `audit.json`."""
    found = RunAudit(
        epsilon=cost,
        claimed=facts.epsilon,
        delta=facts.delta,
        bounds=bounds,
        tests=tests,
        n_canaries=n_canaries,
        accuracy=accuracy,
        demonstrations=demonstrations,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        mechanism=mechanism,
        confidence=confidence,
        model_sha256=facts.model_sha256,
    )
    folder.write(AUDIT, json.dumps(found.to_dict(), indent=2) + "\n")
    return found


def attack_answers(recipe: Recipe, n_queries: int, *, n_canaries: int, rng: Seed = None) -> Attack:
    """Attack the answers of PATE: guess for each canary whether it moved one teacher's vote.

    Each canary is a simulated run of `n_queries` queries. A fair coin decides whether its record
    moves one vote in every query. The score adds up the log-likelihood ratio of each outcome (an
    answer, or no answer). `Attack.event` is the event of the answers.
    """
    n_teachers, most = recipe.teachers.count, recipe.answers.most or n_queries
    aggregator, random = recipe.answers.aggregator(n_teachers), generator(rng)
    inside = flip_coins(n_canaries, random)
    ratios = _log_ratios(aggregator, n_teachers, random)
    scores, answers = np.zeros(n_canaries), np.zeros(n_canaries, np.int64)
    for _ in range(n_queries):
        asked = answers < most
        outcome = _answer(aggregator, n_teachers, inside, random)
        scores += np.where(asked, ratios[outcome], 0.0)
        answers += outcome != NO_ANSWER
    return Attack(aggregator.event(n_queries, min(n_queries, most)), scores, inside)


def _bounds_and_tests(
    attack: Attack, cost: float, facts: Facts, confidence: float
) -> tuple[tuple[AuditBound, ...], tuple[BillTest, ...]]:
    """Return all lower bounds on epsilon and all tests of `cost`, each at the given confidence."""
    event, seen = attack.event, (attack.scores, attack.is_member)
    at: dict[str, Any] = {"confidence": confidence, "delta": facts.delta}
    of: dict[str, Any] = {"confidence": confidence, "relation": Relation(facts.relation)}
    bounds = (
        one_run(*seen, **at, expected_epsilon=cost),
        threshold_test(*seen, **at),
        noise_bound(*seen, event, **of, delta=facts.delta, reference=attack.reference),
    )
    coins = refute_event(*seen, event, **of)
    return bounds, (
        coins,
        refute_event(*seen, event, **of, independent=True, reference=attack.reference),
    )


def _answer(
    aggregator: Aggregator, n_teachers: int, inside: NDArray[np.bool_], random: Rng
) -> NDArray[np.int64]:
    """Simulate one query for each canary: return the winning class 0 or 1, or `NO_ANSWER`.

    A canary for which `inside` is True moves one vote to class 0.
    """
    top = n_teachers // 2
    if isinstance(aggregator, ConfidentGNMax):
        top = min(max(round(aggregator.threshold), 0), n_teachers - 1)
    votes = np.column_stack([top + inside, n_teachers - top - inside])
    return aggregator.answer(votes, rng=random, block=len(votes))


def _log_ratios(aggregator: Aggregator, n_teachers: int, random: Rng) -> NDArray[np.float64]:
    """Estimate log(P(outcome | canary included) / P(outcome | not)) by simulating many queries.

    The result is indexed by the outcome: 0, 1, or `NO_ANSWER`, which is -1 and so the last entry.
    """
    rates = []
    for is_inside in (True, False):
        drawn = _answer(aggregator, n_teachers, np.full(_PILOT, is_inside), random)
        counts = np.bincount(drawn + 1, minlength=3) + 1.0
        rates.append(np.log(counts / counts.sum()))
    refused, first, second = rates[0] - rates[1]
    return np.array([first, second, refused])


def _train(
    canaries: GradientCanaries,
    recipe: Recipe,
    facts: Facts,
    prepared: Prepared,
    dataset: Dataset,
    seed: int | None,
) -> "TrainingLoop":
    """Train by the recipe on the records and the canaries, and return the finished loop."""
    from tacit.experiments import models
    from tacit.experiments.training_loop import TrainingLoop, tensors

    loop = TrainingLoop(
        recipe,
        models.build(recipe.model, prepared.shape, dataset.n_classes, seed=seed or 0),
        tensors(prepared.x_train, prepared.y_train),
        n_records=facts.n_records,
        noise_multiplier=float(facts.hyperparameters["noise_multiplier"]),
        seed=seed,
        canaries=canaries,
        persons=dataset.persons,
    )
    for _ in loop.steps():
        pass
    return loop
