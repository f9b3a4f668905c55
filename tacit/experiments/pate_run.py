"""PATE by recipe: data, teachers, aggregation and student become one run folder.

The training records are private. The test split is assumed public: its first part, without labels,
is the pool of inputs that the student may query; the rest measures the student. `RunFolder` lists
the files that are written.
"""

import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tacit import accounting
from tacit.datasets import Dataset
from tacit.events import Event, Sequence
from tacit.experiments import data as data_of
from tacit.experiments.facts import ANSWERS, CURVE, RECIPE, STUDENT, Facts, Metric, pate_facts
from tacit.experiments.folder import RunFolder
from tacit.experiments.recipe import Recipe
from tacit.ledger import Ledger
from tacit.pate import (
    NO_ANSWER,
    KernelTeacher,
    PATEClassifier,
    Progress,
    Sanitizer,
    SpreadStudent,
    character_features,
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
    start = time.perf_counter()
    run = RunFolder(folder)
    refuse_other_recipe(recipe, run)
    run.path.mkdir(parents=True, exist_ok=True)
    was_killed = (run / ANSWERS).exists() and not run.is_finished
    run.write(RECIPE, recipe.to_toml())
    dataset = data_of.load(recipe.data, data)
    split = _split(dataset, recipe.answers.public_share)
    budget = None if recipe.privacy.epsilon is None else recipe.privacy.budget
    paying = run.open_ledger(recipe, budget) if ledger is None else Ledger(ledger, budget=budget)
    model = _classifier(recipe, dataset, run, paying, progress)
    model.fit(split.x, split.y, split.public)
    run.write(STUDENT, _npz(model.student_))
    run.write_lines(CURVE, _by_answers(recipe, model, split))
    facts = pate_facts(
        recipe,
        dataset,
        model,
        event=_claim(recipe, model, len(split.public)),
        accuracy=model.score(split.test, split.truth),
        truth=split.truth,
        resumed=int(was_killed),
        seconds=time.perf_counter() - start,
    )
    return run.finish(facts, model.ledger_)


def refuse_other_recipe(recipe: Recipe, run: RunFolder) -> None:
    """Raise if `run` was begun by another recipe.

    A run is begun when answers may have been paid for. Before that, its recipe can be corrected.
    """
    is_begun = run.is_finished or (run / ANSWERS).exists()
    if is_begun and run.holds_other_recipe(recipe):
        raise ValueError(
            f"{run.path.name} holds a run of another recipe. Choose another folder with --out, or "
            f"go on as it was planned: tacit pate {run / RECIPE} --out {run.path}"
        )


class _Split(NamedTuple):
    """Private records, public inputs, and the test records that measure the student."""

    x: np.ndarray
    y: np.ndarray
    public: np.ndarray
    test: np.ndarray
    truth: np.ndarray


@dataclass(frozen=True)
class _MakeTeacher:
    """Factory of teachers that can be sent to other processes."""

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
        sanitizer=Sanitizer() if answers.sanitized else None,
        folder=run.path,
        n_jobs=teachers.jobs,
        progress=progress,
        rng=recipe.run.seed,
    )


def _by_answers(recipe: Recipe, model: PATEClassifier, split: _Split) -> list[Metric]:
    """Return epsilon and accuracy after growing numbers of queries, from released labels only.

    Epsilon is that of the plan, as in the facts: how many queries were answered may depend on the
    votes.
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


def _claim(recipe: Recipe, model: PATEClassifier, n_public: int) -> Event:
    """Return everything done to the private records.

    With a threshold the number of answers depends on the votes, so the whole plan is claimed.
    """
    has_check = recipe.answers.threshold is not None
    event = model.plan_event(n_public) if has_check else model.event_
    return event if model.sanitizer is None else Sequence((event, model.sanitizer.event))


def _npz(student: SpreadStudent) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **student.to_arrays())  # type: ignore[arg-type]  # names are the file's keys
    return buffer.getvalue()
