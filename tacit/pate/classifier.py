"""PATE in one call: teachers, votes, noisy labels, and a student that learns them.

`fit` releases the student, the labels that the student learned, and which queries were answered.
All of them are computed from the noisy answers that the ledger paid for. Teachers and votes are
private; `fit` does not keep them.
"""

import hashlib
import math
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit._arrays import Indices
from tacit._check import in_open_unit, one_of, positive, whole
from tacit.accounting import GDP, calibrate
from tacit.accounting import epsilon as epsilon_of
from tacit.errors import BudgetExceeded, WeakGuarantee
from tacit.events import Event, Gaussian
from tacit.ledger import Budget, Ledger
from tacit.mechanisms import Rng, Seed, generator
from tacit.pate.gnmax import GNMax
from tacit.pate.journal import Journal
from tacit.pate.student import SpreadStudent, checked_queries, spread_queries
from tacit.pate.teachers import (
    Progress,
    Stacked,
    checked_records,
    train_stacked_teachers,
    train_teachers,
)
from tacit.pate.votes import (
    NO_ANSWER,
    Aggregator,
    Teacher,
    TeacherGroup,
    check_finite,
    count_votes,
)

_STATED = 1e-5
"""Delta at which a warning states the price of a fit without a budget."""


class OverlapWarning(UserWarning):
    """Warning that some public inputs equal private ones; public inputs are not protected."""


@dataclass(eq=False, repr=False)
class PATEClassifier:
    """A private classifier: teachers on disjoint parts label public inputs for a student.

    Guarantee: everything kept after `fit` is (epsilon, delta)-DP in the private records, at the
    epsilon and delta that the ledger's payments add up to, and never above the ledger's budget if
    it has one. Inputs in `X_public` are not protected.

    Parameters
    ----------
    teacher
        A scikit-learn classifier to copy, a function from a seed to a new teacher, or
        `Stacked(make_module)` to train torch modules at once.
    student
        A classifier with `fit` and `predict`; default `SpreadStudent()`. With `use_unlabeled` it is
        trained on all public inputs, with label -1 for the unlabeled ones (as scikit-learn's
        semi-supervised classifiers expect); otherwise on the labeled inputs only.
    epsilon, delta
        Budget of the whole `fit`. The noise, and the number of queries unless it is given, are
        chosen for it (`spend_budget`). All answers are paid for at once, so that the price is
        exact.
    n_teachers, aggregator
        More teachers outvote more noise, but each learns from fewer records. The aggregator's noise
        is in votes; default `GNMax(n_teachers / 5)`, whose price grows with the number of queries.
        With `epsilon` it is chosen.
    n_queries
        Number of public inputs to ask about; by default all, and at most 1,000.
    max_answers
        Stop after this many answers, so that `plan_event` is cheaper with Confident-GNMax.
    queries
        Which public inputs to ask about: "spread" picks typical, well-spread inputs
        (`spread_queries`), "first" the first ones.
    classes
        All class labels; by default those in `y_private`, which then count as public.
    ledger
        Pays for the answers: for all of them at once if their number is fixed in advance, so that
        the price is exact, and else before each answer. By default a ledger in memory, see
        `ledger_`.
    folder
        Where to keep released answers: `fit` with the same settings and ledger continues where a
        killed `fit` stopped.
    rng
        Source of randomness for partition, teachers and noise. None is fresh entropy; anyone who
        has the seed can remove the noise.

    Attributes
    ----------
    queries_, labels_
        Numbers of the public inputs asked about, and their released labels as indices into
        `classes_`, `NO_ANSWER` where refused.
    event_
        Event of this run, given the number of answers that it released.
    """

    teacher: Any = None
    student: Any = None
    _: KW_ONLY
    epsilon: float | None = None
    delta: float | None = None
    n_teachers: int = 50
    aggregator: Aggregator | None = None
    n_queries: int | None = None
    max_answers: int | None = None
    queries: Literal["spread", "first"] = "spread"
    use_unlabeled: bool = True
    classes: ArrayLike | None = None
    ledger: Ledger | None = None
    folder: str | Path | None = None
    n_jobs: int | None = None
    progress: Progress | None = None
    rng: Seed = None

    def fit(
        self, X_private: Any, y_private: ArrayLike, X_public: Any, *, users: Any = None
    ) -> Self:
        """Train teachers on the private records, buy labels for public inputs, train the student.

        With `users`, the id of a user for each private record, all records of a user go to one
        teacher, so that the price is that of a user; the ledger must count users then.

        All arguments are checked before anything is paid. Issues an `OverlapWarning` if some public
        inputs equal private ones; only the caller, who holds the records, receives the warning.
        """
        WeakGuarantee.issue(epsilon=self.epsilon)
        random = generator(self.rng)
        self.classes_, labels = _class_indices(y_private, self.classes)
        n_classes = len(self.classes_)
        aggregator = self.checked_aggregator(len(X_public), n_classes)
        X_private, labels = checked_records(X_private, labels, n_classes=n_classes)
        X_public = _checked_public(X_public, X_private)
        _warn_of_overlap(X_private, X_public)
        self._warn_of_defaults(len(X_public))
        self.ledger_ = self._payer(is_user=users is not None)
        self.queries_ = self._choose_queries(X_public, n_classes)
        journal = self._journal(aggregator, X_public)
        teachers = self._train(X_private, labels, n_classes, random, users)
        votes = count_votes(teachers, X_public[self.queries_], n_classes)
        by_user = users is not None
        self.labels_ = self._ask(aggregator, votes, random, journal, by_user=by_user)
        self.event_ = aggregator.event(len(self.labels_), self.n_answered_)
        self.student_ = self._teach(X_public)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the class that the student predicts for each input."""
        return self.classes_[np.asarray(self.student_.predict(X))]

    def score(self, X: Any, y: ArrayLike) -> float:
        """Return the share of inputs whose class is predicted correctly."""
        return float(np.mean(self.predict(X) == np.asarray(y)))

    @property
    def n_answered_(self) -> int:
        """Number of answered queries; released with the labels."""
        return int(np.sum(self.labels_ != NO_ANSWER))

    def plan_event(self, n_public: int) -> Event:
        """Return the event of the most that `fit` can release, known beforehand.

        All queries are asked, and all are answered up to `max_answers`. State this event for
        Confident-GNMax without a budget, because its number of answers depends on the votes.
        """
        n_classes = 2 if self.classes is None else len(np.unique(np.asarray(self.classes)))
        n_queries = self._count_queries(n_public, n_classes)
        most = n_queries if self.max_answers is None else min(n_queries, self.max_answers)
        return self.checked_aggregator(n_public, n_classes).event(n_queries, most)

    def checked_aggregator(self, n_public: int | None = None, n_classes: int = 2) -> Aggregator:
        """Return the aggregator that `fit` uses; raise if the other settings do not suit it.

        With `epsilon`, it depends on the number of public inputs and on the number of classes.
        """
        n_teachers = whole(n_teachers=self.n_teachers, least=1)
        if self.epsilon is not None:
            return GNMax(self._spending(n_public or 1000, n_classes).sigma)
        if self.delta is not None:
            raise ValueError("delta must be given together with epsilon, got delta alone.")
        return GNMax(n_teachers / 5) if self.aggregator is None else self.aggregator

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002  # scikit-learn's
        """Return the settings by name, as scikit-learn expects."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def set_params(self, **params: Any) -> Self:
        """Change settings by name, as scikit-learn expects."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"PATEClassifier has no setting {name!r}.")
            setattr(self, name, value)
        return self

    def _spending(self, n_public: int, n_classes: int) -> "Spending":
        for name in ("aggregator", "max_answers"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} must be None with epsilon, which fixes all releases.")
        return spend_budget(
            epsilon=positive(epsilon=self.epsilon),
            delta=in_open_unit(delta=self.delta, advice="It must be given with epsilon."),
            n_teachers=self.n_teachers,
            n_classes=n_classes,
            n_public=n_public,
            n_queries=self.n_queries,
        )

    def _warn_of_defaults(self, n_public: int) -> None:
        """Issue a warning that states the price, if neither budget, noise nor queries are given."""
        if any(x is not None for x in (self.epsilon, self.aggregator, self.n_queries, self.ledger)):
            return
        cost = epsilon_of(self.plan_event(n_public), delta=_STATED)
        warnings.warn(
            f"without a budget, the answers will cost epsilon {cost:.1f} at delta {_STATED:g}. "
            "Pass epsilon and delta, which choose the noise and the number of queries.",
            stacklevel=3,
        )

    def _payer(self, *, is_user: bool) -> Ledger:
        if self.ledger is not None:
            self.ledger.require_unit(is_user=is_user)
            return self.ledger
        unit = "user" if is_user else "record"
        if self.epsilon is None:
            return Ledger(unit=unit)
        budget = Budget(positive(epsilon=self.epsilon), in_open_unit(delta=self.delta))
        return Ledger(budget=budget, unit=unit)

    def _ask(
        self,
        aggregator: Aggregator,
        votes: Indices,
        random: Rng,
        journal: Journal | None,
        *,
        by_user: bool,
    ) -> Indices:
        """Return the released labels.

        If the number of answers is fixed in advance, they are paid for as one event, whose price is
        exact. If the ledger refuses it, as many queries as the budget allows are paid for one by
        one; with `epsilon`, the refusal is raised.
        """
        options = {"ledger": self.ledger_, "rng": random, "journal": journal, "by_user": by_user}
        if not aggregator.has_check and self.max_answers is None:
            try:
                return aggregator.answer(votes, block=len(votes), **options)
            except BudgetExceeded:
                if self.epsilon is not None:
                    raise
        return aggregator.answer(votes, max_answers=self.max_answers, **options)

    def _count_queries(self, n_public: int, n_classes: int) -> int:
        if self.epsilon is not None:
            return self._spending(n_public, n_classes).n_queries
        return checked_queries(
            min(n_public, 1000) if self.n_queries is None else self.n_queries, n_public
        )

    def _choose_queries(self, X_public: NDArray[Any], n_classes: int) -> Indices:
        one_of(("spread", "first"), queries=self.queries)
        n_queries = self._count_queries(len(X_public), n_classes)
        if self.queries == "spread":
            # A fixed seed: the choice uses public inputs only and must be the same after a resume.
            return spread_queries(X_public, n_queries, rng=0)
        return np.arange(n_queries)

    def _journal(self, aggregator: Aggregator, X_public: NDArray[Any]) -> Journal | None:
        if self.folder is None:
            return None
        asked = np.ascontiguousarray(X_public[self.queries_])
        settings = {
            "aggregator": repr(aggregator),
            "n_teachers": self.n_teachers,
            "n_classes": len(self.classes_),
            "n_queries": len(asked),
            "public_inputs_sha256": hashlib.sha256(asked.tobytes()).hexdigest(),
        }
        path = Path(self.folder)
        path.mkdir(parents=True, exist_ok=True)
        return Journal(path / "answers.jsonl", settings=settings, ledger=self.ledger_)

    def _train(
        self, X: NDArray[Any], labels: Indices, n_classes: int, random: Rng, users: Any
    ) -> list[Teacher] | TeacherGroup:
        if self.teacher is None:
            raise ValueError(
                "teacher must be given: a classifier to copy, or a function of a seed."
            )
        if isinstance(self.teacher, Stacked):
            make, training = self.teacher.make_module, self.teacher.training
            train = partial(train_stacked_teachers, make, training=training)
        else:
            make = _maker(self.teacher)
            train = partial(train_teachers, make, n_jobs=self.n_jobs, progress=self.progress)
        return train(X, labels, self.n_teachers, n_classes=n_classes, rng=random, users=users)

    def _teach(self, X_public: NDArray[Any]) -> Any:
        answered = self.labels_ != NO_ANSWER
        if not answered.any():
            raise ValueError(
                "no query was answered, so there is nothing to learn. "
                "Lower the threshold, or allow a larger budget."
            )
        student = SpreadStudent() if self.student is None else deepcopy(self.student)
        if self.use_unlabeled:
            labels = np.full(len(X_public), NO_ANSWER, dtype=np.int64)
            labels[self.queries_] = self.labels_
            return student.fit(X_public, labels)
        return student.fit(X_public[self.queries_[answered]], self.labels_[answered])


class Spending(NamedTuple):
    """Number of queries, and standard deviation of the noise on each vote count."""

    n_queries: int
    sigma: float


def spend_budget(
    *,
    epsilon: float,
    delta: float,
    n_teachers: int,
    n_classes: int,
    n_public: int,
    n_queries: int | None = None,
) -> Spending:
    """Return how GNMax spends a budget: as many queries as leave the noise at a fifth of the votes.

    There are at least ten queries per class and at most 1,000, if there are so many public inputs.
    n answers with noise sigma cost what one answer with noise sigma / sqrt(n) costs. A warning says
    so if the noise is larger than half of the votes.

    >>> spend_budget(epsilon=2.0, delta=1e-5, n_teachers=250, n_classes=10, n_public=5000).n_queries
    314
    """
    unit = calibrate(lambda m: Gaussian(m), epsilon=epsilon, delta=delta, accountant=GDP())
    single = math.sqrt(2.0) * unit * (1 + 1e-9)
    if n_queries is None:
        affordable = int((n_teachers / 5 / single) ** 2)
        n_queries = min(n_public, max(10 * n_classes, min(affordable, 1000)))
    sigma = single * math.sqrt(checked_queries(n_queries, n_public))
    if sigma > n_teachers / 2:
        warnings.warn(
            f"the noise on the votes of {n_teachers} teachers has standard deviation {sigma:.0f}: "
            "most labels will be wrong. Use more teachers, a larger epsilon or fewer queries.",
            stacklevel=4,
        )
    return Spending(n_queries, sigma)


def _maker(teacher: Any) -> Callable[[int], Teacher]:
    """Return a function from a seed to a new, untrained teacher; an estimator is copied."""
    if teacher is None:
        raise ValueError("teacher must be given: a classifier to copy, or a function of a seed.")
    return partial(_copy, teacher) if hasattr(teacher, "fit") else teacher


def _copy(teacher: Any, seed: int) -> Teacher:
    """Return a copy of an unfitted estimator, with `seed` as its `random_state` if it has one."""
    copy = deepcopy(teacher)
    if "random_state" in getattr(copy, "get_params", dict)():
        copy.set_params(random_state=seed)
    return copy


def _class_indices(y: ArrayLike, classes: ArrayLike | None) -> tuple[NDArray[Any], Indices]:
    labels = np.asarray(y)
    known = np.unique(labels) if classes is None else np.unique(np.asarray(classes))
    if len(known) < 2:
        raise ValueError(f"classes must be at least 2, got {len(known)}. Declare all of them.")
    index = np.clip(np.searchsorted(known, labels), 0, len(known) - 1)
    if not np.array_equal(known[index], labels):
        raise ValueError("y_private must hold only the declared classes.")
    return known, index.astype(np.int64)


def _checked_public(X_public: Any, X_private: Any) -> NDArray[Any]:
    check_finite(X_public, "X_public")
    public = np.asarray(X_public)
    if public.shape[1:] != np.shape(X_private)[1:]:
        raise ValueError(
            f"X_public must have inputs of the shape of X_private's, {np.shape(X_private)[1:]}, "
            f"got {public.shape[1:]}."
        )
    return public


def _warn_of_overlap(X_private: Any, X_public: NDArray[Any]) -> None:
    private = np.ascontiguousarray(np.asarray(X_private, dtype=X_public.dtype))
    held = {row.tobytes() for row in private}
    if any(row.tobytes() in held for row in np.ascontiguousarray(X_public)):
        # The message states neither which inputs nor how many: both are private.
        warnings.warn(
            "some public inputs are identical to private ones. Public inputs are not protected: "
            "use inputs from elsewhere if membership in X_private is secret.",
            OverlapWarning,
            stacklevel=3,
        )
