"""PATE by recipe: data, teachers, aggregation and student become one run folder.

The training records are private. The test records must be public (those of a published data set, or
of the file `data.public_test`): their first part, without labels, is the pool of inputs that the
student may query; the rest measures the student. `RunFolder` lists the files that are written.
"""

import io
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tacit import accounting
from tacit.datasets import Dataset
from tacit.errors import WeakGuarantee
from tacit.events import Event, Gaussian, PureDP, Relation, Sequence
from tacit.experiments import data as data_of
from tacit.experiments.facts import (
    ANSWERS,
    CURVE,
    RECIPE,
    STUDENT,
    Facts,
    Metric,
    SeedValue,
    Touch,
    Utility,
    claim_fields,
    majority_share,
)
from tacit.experiments.folder import RunFolder, open_for_run
from tacit.experiments.recipe import Recipe
from tacit.experiments.table_check import (
    check_table,
    spend_check,
    table_releases,
    table_touches,
)
from tacit.ledger import Ledger
from tacit.pate import (
    NO_ANSWER,
    KernelTeacher,
    OverlapWarning,
    PATEClassifier,
    Progress,
    SpreadStudent,
    character_features,
    spend_budget,
)

_COMPONENTS = 200  # principal components of image features, computed from the public inputs


def run_pate(
    recipe: Recipe,
    folder: str | Path,
    *,
    data: str | Path | None = None,
    ledger: str | Path | None = None,
    progress: Progress | None = None,
) -> Facts:
    """Start or resume the PATE run in `folder`, and return its facts.

    `data` is the folder of the data sets. `ledger` is the ledger file that pays (default: the
    recipe's, or one in the folder). A folder that holds a run of another recipe is not changed and
    raises `ValueError`.
    """
    run = RunFolder(folder)
    with run.locked():
        return _run_pate(recipe, run, run.data_root(data), ledger, progress)


def _run_pate(
    recipe: Recipe,
    run: RunFolder,
    data: str | Path | None,
    ledger: str | Path | None,
    progress: Progress | None,
) -> Facts:
    """Do what `run_pate` says, while this process holds the folder."""
    start = time.perf_counter()
    refuse_other_recipe(recipe, run)
    was_killed = (run / ANSWERS).exists() and not run.is_finished
    run.write(RECIPE, recipe.to_toml())
    dataset = data_of.load(recipe.data, data)
    run.remember_data(data)
    if not dataset.is_test_public:
        raise ValueError(
            "PATE needs public inputs for its student to ask about: declare a public table of the "
            "same form with --public-test FILE (data.public_test)."
        )
    split = _split(dataset, recipe.answers.public_share)
    asked = recipe.privacy
    WeakGuarantee.issue(epsilon=asked.epsilon, delta=asked.delta, n_records=dataset.n_records)
    budget = None if asked.epsilon is None else asked.budget
    paying = run.open_ledger(recipe, budget) if ledger is None else open_for_run(ledger)
    if ledger is not None or recipe.privacy.ledger:
        _refuse_above_epsilon(recipe, dataset, paying)
    checked = check_table(
        recipe, dataset.flags, run, paying, epsilon=_planned_epsilon(recipe, paying), root=data
    )
    model = _classifier(recipe, dataset, run, paying, progress)
    with warnings.catch_warnings():
        if recipe.data.name == "table":  # rows of declared values coincide by chance
            warnings.simplefilter("ignore", OverlapWarning)
        model.fit(split.x, split.y, split.public)
    arrays = io.BytesIO()
    np.savez(arrays, **model.student_.to_arrays())  # type: ignore[arg-type]  # the file's keys
    run.write(STUDENT, arrays.getvalue())
    run.write_lines(CURVE, _by_answers(recipe, model, split))
    facts = _facts(recipe, dataset, model, split, checked)
    seconds = round(time.perf_counter() - start, 3)
    facts = replace(facts, resumed=int(was_killed), seconds=seconds)
    return run.finish(facts, model.ledger_)


def spend_all_on_votes(recipe: Recipe) -> Recipe:
    """Return the recipe with the noise at which all of its queries cost what its epsilon leaves.

    A recipe that states noise, threshold or Laplace noise is left as it is: its answers end where
    the budget does. A ledger that has paid for the check of a table admits slightly less than the
    rest of epsilon, because the votes come after a release. So a ledger is asked.
    """
    answers, budget = recipe.answers, recipe.privacy.budget
    is_stated = answers.noise is not None or answers.threshold is not None
    if is_stated or answers.mechanism != "gaussian":
        return recipe
    epsilon, settings = budget.epsilon, recipe.data
    if settings.name == "table" and settings.check_share and not settings.public_sample:
        trial = Ledger(budget=budget, relation=Relation(recipe.privacy.relation))
        spend_check(settings, trial, epsilon=epsilon)
        left = Gaussian(trial.remaining().noise_multiplier)
        epsilon = accounting.epsilon(left, delta=budget.delta, accountant=accounting.GDP())
        epsilon *= 1 - 1e-6  # for rounding on the way back to the noise
    found = spend_budget(
        epsilon=epsilon,
        delta=budget.delta,
        n_teachers=recipe.teachers.count,
        n_classes=2,
        n_public=answers.queries,
        n_queries=answers.queries,
    )
    return recipe.with_settings({"answers.noise": found.sigma})


def _planned_epsilon(recipe: Recipe, ledger: Ledger) -> float:
    """Return the epsilon of the run: that of the recipe, or the price of all planned queries."""
    if recipe.privacy.epsilon is not None:
        return recipe.privacy.epsilon
    return _price_of_answers(recipe, ledger)


def _price_of_answers(recipe: Recipe, ledger: Ledger, also: tuple[Event, ...] = ()) -> float:
    """Return the epsilon of all planned queries together with the events `also`."""
    assert recipe.privacy.delta is not None  # set for PATE
    answers = recipe.answers
    event = answers.aggregator(recipe.teachers.count).event(
        answers.queries, min(answers.queries, answers.most or answers.queries)
    )
    if also:
        event = Sequence((*also, event))
    return accounting.epsilon(event, delta=recipe.privacy.delta, relation=ledger.relation)


def _refuse_above_epsilon(recipe: Recipe, dataset: Dataset, ledger: Ledger) -> None:
    """Raise if the planned queries cost more than the recipe's epsilon.

    A ledger of the run's own stops the answers at that epsilon; a shared one has another budget.
    """
    limit = recipe.privacy.epsilon
    if limit is None:
        return
    share = recipe.data.check_share if dataset.flags else 0.0
    cost = _price_of_answers(recipe, ledger, (PureDP(share * limit),) if share else ())
    if cost > limit:
        raise ValueError(
            f"the planned queries cost epsilon {cost:.4g}, above {limit:g}: ask fewer queries, or "
            "raise the noise."
        )


def refuse_other_recipe(recipe: Recipe, run: RunFolder) -> None:
    """Raise if the run in the folder `run` was begun by a recipe that differs from `recipe`.

    A run counts as begun once answers may have been paid for. Before that, its recipe may still be
    changed.
    """
    if run.is_finished or (run / ANSWERS).exists():
        command = f"tacit pate {run / RECIPE} --out {run.path}"
        run.refuse_other_recipe(recipe, resume=command)


class _Split(NamedTuple):
    """The data of a PATE run: private records, public inputs, records to measure the student."""

    x: np.ndarray
    y: np.ndarray
    public: np.ndarray
    test: np.ndarray
    truth: np.ndarray


@dataclass(frozen=True)
class _MakeTeacher:
    """Makes untrained teachers; an object, so that it can be sent to worker processes."""

    width: float
    ridge: float

    def __call__(self, seed: int) -> KernelTeacher:  # noqa: ARG002  # it draws nothing
        return KernelTeacher(width=self.width, ridge=self.ridge)


def _split(dataset: Dataset, public_share: float) -> _Split:
    n_public = round(public_share * len(dataset.x_test))
    x, z = np.asarray(dataset.x_train), np.asarray(dataset.x_test)
    if x.ndim == 3:
        from sklearn.decomposition import PCA

        enlarge = -(-16 // min(x.shape[1:]))  # each pixel becomes a block until windows fit
        x, z = (
            character_features(part.repeat(enlarge, axis=1).repeat(enlarge, axis=2))
            for part in (x, z)
        )
        pca = PCA(min(_COMPONENTS, n_public), random_state=0).fit(z[:n_public])  # public inputs
        x, z = pca.transform(x), pca.transform(z)
    x, z = (part.reshape(len(part), -1).astype(np.float32) for part in (x, z))
    y, truth = np.asarray(dataset.y_train), np.asarray(dataset.y_test)
    return _Split(x, y, z[:n_public], z[n_public:], truth[n_public:])


def _classifier(
    recipe: Recipe, dataset: Dataset, run: RunFolder, ledger: Ledger, progress: Progress | None
) -> PATEClassifier:
    teachers, answers = recipe.teachers, recipe.answers
    return PATEClassifier(
        _MakeTeacher(teachers.width, teachers.ridge),
        n_teachers=teachers.count,
        aggregator=answers.aggregator(teachers.count),
        n_queries=answers.queries,
        max_answers=answers.most,
        classes=range(dataset.n_classes or 0),
        ledger=ledger,
        folder=run.path,
        n_jobs=teachers.jobs,
        progress=progress,
        rng=recipe.run.seed,
    )


def _by_answers(recipe: Recipe, model: PATEClassifier, split: _Split) -> list[Metric]:
    """Return rows with epsilon and student accuracy after growing numbers of queries.

    Only released labels are used. With a threshold, the number of answers depends on the private
    votes, so epsilon then covers every answer that was planned.
    """
    assert recipe.privacy.delta is not None  # set for PATE
    has_check = recipe.answers.threshold is not None
    aggregator, total = recipe.answers.aggregator(recipe.teachers.count), len(model.labels_)
    rows = []
    for n in np.unique(np.linspace(total / 8, total, 8).astype(int)):
        labels = np.full(len(split.public), NO_ANSWER)
        labels[model.queries_[:n]] = model.labels_[:n]
        answered = int(np.sum(labels != NO_ANSWER))
        if not answered:
            continue
        student = SpreadStudent().fit(split.public, labels)
        billed = min(int(n), recipe.answers.most or total) if has_check else answered
        rows.append(
            {
                "queries": int(n),
                "answers": answered,
                "epsilon": accounting.epsilon(
                    aggregator.event(int(n), billed),
                    delta=recipe.privacy.delta,
                    relation=model.ledger_.relation,
                ),
                "accuracy": float(np.mean(student.predict(split.test) == split.truth)),
            }
        )
    return rows


def _facts(
    recipe: Recipe,
    dataset: Dataset,
    model: PATEClassifier,
    split: _Split,
    checked: tuple[Event, ...],
) -> Facts:
    """Return the facts of the run, except its duration and whether it was resumed."""
    answers = _claim(recipe, model, len(split.public))
    event = Sequence((*checked, answers)) if checked else answers
    claim = claim_fields(recipe, dataset.name, dataset.n_records, model.ledger_, event)
    count = recipe.teachers.count
    votes = "teachers on disjoint random parts, seen through their noisy votes alone"
    alone = "features of each image alone, components from public inputs"
    accuracy = model.score(split.test, split.truth)
    return Facts(
        **claim,
        assumed_public=(*dataset.public, "test split, without labels where the student asks"),
        sampling_assumed="none: every record is used by one teacher",
        sampling_used="none: every record is used by one teacher",
        touches=(
            *table_touches(recipe.data, dataset, checked, None),
            Touch(what="training", how=votes, cost="paid", event=answers.to_dict()),
            Touch(what="preprocessing", how=alone, cost="free"),
            Touch(what="evaluation", how="on the public test split", cost="public"),
            Touch(what="size", how="number of records and classes", cost="public"),
        ),
        released=(
            "student",
            "labels of public inputs",
            "which queries were answered",
            *table_releases(recipe.data, dataset),
        ),
        method="PATE",
        model=f"kernel student of {count} kernel teachers",
        hyperparameters={
            "teachers": count,
            "queries": recipe.answers.queries,
            "aggregator": repr(recipe.answers.aggregator(count)),
        },
        steps=len(model.labels_),
        utility=Utility(
            metric="accuracy",
            private=(SeedValue(seed=recipe.run.seed, value=accuracy),),
            majority=majority_share(split.truth),
            others={"answered": float(model.n_answered_)},
            n_test=len(split.truth),
        ),
        model_file=STUDENT,
        metrics_file=CURVE,
    )


def _claim(recipe: Recipe, model: PATEClassifier, n_public: int) -> Event:
    """Return the event of everything that the run did to the private records.

    If the answers have a threshold, their number depends on the votes. The event then covers every
    planned query of the `n_public` public inputs.
    """
    has_check = recipe.answers.threshold is not None
    return model.plan_event(n_public) if has_check else model.event_
