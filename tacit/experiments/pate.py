"""PATE by recipe: data, teachers, aggregation and student to a run folder.

The training records are private. The test split is assumed public: its first part, without labels,
is what the student asks about; the rest measures the student. The run folder holds

    recipe.toml        every setting written out
    answers.jsonl      released answers; a killed run goes on from here
    run.ledger         the payments
    student.npz        what is released: the student's numbers (`SpreadStudent.from_arrays`)
    by_answers.jsonl   epsilon and accuracy after growing numbers of answers
    facts.json         `Facts`, written last
"""

import datetime
import hashlib
import io
import json
import platform
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tacit
from tacit import accounting
from tacit._check import in_open_unit, positive, whole
from tacit.datasets import Dataset
from tacit.events import Event, Sequence
from tacit.experiments import _toml
from tacit.experiments import data as data_of
from tacit.experiments.run import LEDGER, RECIPE, Facts, RunFolder, SeedValue, Touch, Utility
from tacit.experiments.settings import Data, section
from tacit.ledger import Budget, Ledger
from tacit.pate import (
    NO_ANSWER,
    Aggregator,
    ConfidentGNMax,
    GNMax,
    KernelTeacher,
    LaplaceMax,
    PATEClassifier,
    Progress,
    Sanitizer,
    SpreadStudent,
    character_features,
)

ANSWERS, STUDENT, CURVE = "answers.jsonl", "student.npz", "by_answers.jsonl"
_COMPONENTS = 200  # of images' features; from the public inputs


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """Who votes."""

    count: int = 50
    width: float = 0.85
    ridge: float = 0.03
    jobs: int | None = None

    def __post_init__(self) -> None:
        whole(count=self.count, least=1)
        positive(width=self.width)
        positive(ridge=self.ridge)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What is asked, and the noise in votes. `threshold` makes it Confident-GNMax."""

    queries: int = 40
    mechanism: str = "gaussian"
    """gaussian (GNMax) or laplace (LNMax)."""
    noise: float | None = None
    """Standard deviation (or Laplace scale); default a fifth of the teachers."""
    threshold: float | None = None
    threshold_noise: float | None = None
    most: int | None = None
    """Stop after so many answers; it bounds the claim where a threshold decides who is answered."""
    sanitized: bool = False
    """Publish what the votes at hand cost, for its own price."""

    def __post_init__(self) -> None:
        whole(queries=self.queries, least=1)
        if self.mechanism not in ("gaussian", "laplace"):
            raise ValueError(
                f"answers.mechanism must be gaussian or laplace, got {self.mechanism!r}."
            )
        if (self.threshold is None) != (self.threshold_noise is None):
            raise ValueError("answers.threshold and answers.threshold_noise go together.")
        if self.mechanism == "laplace" and (self.sanitized or self.threshold is not None):
            raise ValueError("answers.threshold and answers.sanitized need gaussian noise.")

    def aggregator(self, n_teachers: int) -> Aggregator:
        """The aggregator that these settings name."""
        noise = n_teachers / 5 if self.noise is None else self.noise
        if self.mechanism == "laplace":
            return LaplaceMax(noise)
        if self.threshold is None or self.threshold_noise is None:
            return GNMax(noise)
        return ConfidentGNMax(
            threshold=self.threshold, sigma_threshold=self.threshold_noise, sigma_answer=noise
        )


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What is claimed; `epsilon` is a budget that answers stop at, None for no limit."""

    epsilon: float | None = None
    delta: float = 1e-5

    def __post_init__(self) -> None:
        in_open_unit(delta=self.delta)
        if self.epsilon is not None:
            positive(epsilon=self.epsilon)


@dataclass(frozen=True, kw_only=True)
class PATERecipe:
    """A whole run. Every setting has a default: the embedded digits."""

    data: Data = field(default_factory=Data)
    public_share: float = 2 / 3
    """Share of the test split that the student may ask about; the rest measures it."""
    teachers: Teachers = field(default_factory=Teachers)
    answers: Answers = field(default_factory=Answers)
    privacy: Privacy = field(default_factory=Privacy)
    seed: int | None = None
    """Makes partition and noise reproducible, hence removable; default the system's entropy."""

    def __post_init__(self) -> None:
        in_open_unit(public_share=self.public_share)

    @classmethod
    def read(cls, path: str | Path) -> "PATERecipe":
        """The recipe in a TOML file."""
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as wrong:
            raise ValueError(f"{Path(path).name} is not TOML: {wrong}") from None
        return section(cls, data, "")

    def changed(self, changes: Mapping[str, Any]) -> "PATERecipe":
        """This recipe with `name` or `section.name` replaced; None leaves a setting as it is.

        >>> PATERecipe().changed({"teachers.count": 100, "seed": None}).teachers.count
        100
        """
        sections: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            if value is not None:
                part, _, key = name.rpartition(".")
                sections.setdefault(part, {})[key] = value
        own = sections.pop("", {})
        inner = {part: replace(getattr(self, part), **values) for part, values in sections.items()}
        return replace(self, **own, **inner)

    def to_toml(self) -> str:
        """All settings; what is None is left out."""
        return _toml.dumps(_without_none(asdict(self)))


class _Split(NamedTuple):
    """Private records, public inputs, and what the student is measured on."""

    x: np.ndarray
    y: np.ndarray
    public: np.ndarray
    test: np.ndarray
    truth: np.ndarray


def run_pate(
    recipe: PATERecipe,
    folder: str | Path,
    *,
    data: str | Path | None = None,
    ledger: str | Path | None = None,
    progress: Progress | None = None,
) -> Facts:
    """Carry out `recipe` in `folder` and write its facts; a killed run goes on where it stopped.

    `data` is the folder of the data sets, `ledger` the file that pays (default: one in the folder).
    A folder that holds a run of another recipe is left as it is, with an error.
    """
    start = time.perf_counter()
    run = RunFolder(folder)
    refuse_other_recipe(recipe, run)
    run.path.mkdir(parents=True, exist_ok=True)
    was_killed = (run / ANSWERS).exists() and not run.is_finished
    run.write(RECIPE, recipe.to_toml())
    dataset = data_of.load(recipe.data, data)
    split = _split(dataset, recipe.public_share)
    epsilon, delta = recipe.privacy.epsilon, recipe.privacy.delta
    budget = None if epsilon is None else Budget(epsilon=epsilon, delta=delta)
    book = Ledger(run / LEDGER if ledger is None else ledger, budget=budget)
    model = PATEClassifier(
        _MakeTeacher(recipe.teachers.width, recipe.teachers.ridge),
        n_teachers=recipe.teachers.count,
        aggregator=recipe.answers.aggregator(recipe.teachers.count),
        n_queries=recipe.answers.queries,
        max_answers=recipe.answers.most,
        classes=range(dataset.n_classes or 0),
        ledger=book,
        sanitizer=Sanitizer() if recipe.answers.sanitized else None,
        folder=folder,
        n_jobs=recipe.teachers.jobs,
        progress=progress,
        rng=recipe.seed,
    ).fit(split.x, split.y, split.public)
    student = _npz(model.student_)
    run.write(STUDENT, student)
    run.write_lines(CURVE, _by_answers(model, split, delta))
    facts = _facts(recipe, dataset, split, model, run)
    facts = replace(
        facts,
        model_sha256=hashlib.sha256(student).hexdigest(),
        seconds=time.perf_counter() - start,
        resumed=int(was_killed),
    )
    run.write("facts.json", _json(facts))
    return facts


def refuse_other_recipe(recipe: PATERecipe, run: RunFolder) -> None:
    """Raise if `run` was begun by another recipe; how many work at once makes no difference.

    Begun means that answers may have been paid for: before that, a recipe can be put right.
    """
    path = run / RECIPE
    if not path.is_file() or not (run.is_finished or (run / ANSWERS).exists()):
        return
    any_jobs = {"teachers.jobs": 1}
    if PATERecipe.read(path).changed(any_jobs) != recipe.changed(any_jobs):
        raise ValueError(
            f"{run.path.name} holds a run of another recipe. Choose another folder with --out, or "
            f"go on as it was planned: tacit pate {path} --out {run.path}"
        )


@dataclass(frozen=True)
class _MakeTeacher:
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


def _by_answers(model: PATEClassifier, split: _Split, delta: float) -> list[dict[str, float]]:
    """Epsilon and accuracy after growing numbers of queries: all from released labels.

    Epsilon is the plan's, as in the facts: how many were answered may depend on the votes.
    """
    total = len(model.labels_)
    aggregator = model._checked_aggregator()
    rows = []
    for n in np.unique(np.linspace(total / 8, total, 8).astype(int)):
        labels = np.full(len(split.public), NO_ANSWER)
        labels[model.queries_[:n]] = model.labels_[:n]
        answered = int(np.sum(labels != NO_ANSWER))
        if not answered:
            continue
        student = SpreadStudent().fit(split.public, labels)
        billed = min(int(n), model.max_answers or total) if _has_check(aggregator) else answered
        rows.append(
            {
                "queries": int(n),
                "answers": answered,
                "epsilon": accounting.epsilon(
                    aggregator.event(int(n), billed),
                    delta=delta,
                    relation=model.ledger_.relation,
                ),
                "accuracy": float(np.mean(student.predict(split.test) == split.truth)),
            }
        )
    return rows


def _facts(
    recipe: PATERecipe, dataset: Dataset, split: _Split, model: PATEClassifier, run: RunFolder
) -> Facts:
    # With a threshold the number of answers depends on the votes, so the plan is claimed.
    has_check = _has_check(model._checked_aggregator())
    event = model.plan_event(len(split.public)) if has_check else model.event_
    if model.sanitizer is not None:
        event = Sequence((event, model.sanitizer.event))
    delta = recipe.privacy.delta
    accuracy = model.score(split.test, split.truth)
    counts = np.bincount(split.truth)
    others = {"answered": float(model.n_answered_)}
    if model.sanitized_cost_ is not None:
        others["sanitized epsilon"] = model.sanitized_cost_.epsilon(delta=delta)
    verified = model.ledger_.verify()
    return Facts(
        event=event.to_dict(),
        relation=str(model.ledger_.relation),
        unit=model.ledger_.unit,
        delta=delta,
        epsilon=accounting.epsilon(event, delta=delta, relation=model.ledger_.relation),
        epsilon_target=recipe.privacy.epsilon,
        data=dataset.name,
        n_records=len(split.x),
        assumed_public=(*dataset.public, "test split, without labels where the student asks"),
        sampling_assumed="none: every record is used by one teacher",
        sampling_used="none: every record is used by one teacher",
        touches=_touches(event),
        released=("student", "labels of public inputs", "which queries were answered"),
        seed="OS entropy" if recipe.seed is None else recipe.seed,
        method="PATE",
        model=f"kernel student of {recipe.teachers.count} kernel teachers",
        hyperparameters={
            "teachers": recipe.teachers.count,
            "queries": recipe.answers.queries,
            "aggregator": repr(recipe.answers.aggregator(recipe.teachers.count)),
        },
        steps=len(model.labels_),
        utility=Utility(
            metric="accuracy",
            private=(SeedValue(seed=recipe.seed, value=accuracy),),
            majority=float(counts.max() / counts.sum()),
            others=others,
            n_test=len(split.truth),
        ),
        model_file=STUDENT,
        metrics_file=CURVE,
        recipe_sha256=hashlib.sha256((run / RECIPE).read_bytes()).hexdigest(),
        ledger_head=verified.head,
        versions={
            "tacit": tacit.__version__,
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "scipy": version("scipy"),
        },
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _has_check(aggregator: Aggregator) -> bool:
    """Whether the votes decide how many queries are answered."""
    return isinstance(aggregator, ConfidentGNMax)


def _touches(event: Event) -> tuple[Touch, ...]:
    return (
        Touch(
            what="training",
            how="teachers on disjoint random parts, seen through their noisy votes alone",
            cost="paid",
            event=event.to_dict(),
        ),
        Touch(
            what="preprocessing",
            how="features of each image alone, components from public inputs",
            cost="free",
        ),
        Touch(what="evaluation", how="on the public test split", cost="public"),
        Touch(what="size", how="number of records and classes", cost="public"),
    )


def _npz(student: SpreadStudent) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **student.to_arrays())  # type: ignore[arg-type]  # names are the file's keys
    return buffer.getvalue()


def _json(facts: Facts) -> str:
    return json.dumps(facts.to_dict(), indent=2) + "\n"


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value
