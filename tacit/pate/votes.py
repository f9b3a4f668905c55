"""Votes of the teachers on public inputs, and the paid, noisy answers that may be released.

One record reaches one teacher (`tacit.pate.teachers`), so it can change one vote on each query. On
each query one class then loses a vote and another class gains it, whether the record is added,
removed or replaced: the counts change by 2 in L1 norm and by sqrt(2) in L2 norm, and the highest
count changes by at most 1. `replace_factor` is 1 in every event, because replacing a record also
moves only one vote.

Teachers and votes are private. An `Aggregator` is the only object that releases anything computed
from them:

| aggregator | releases | event of one query |
|---|---|---|
| `LaplaceMax` | winner of counts + Laplace noise | `Laplace(scale / 2)` |
| `GNMax` | winner of counts + Gaussian noise | `Gaussian(sigma / sqrt(2))` |
| `ConfidentGNMax` | nothing, unless a noisy check finds a clear winner | a check, then GNMax |

The ledger is charged with these data-independent events. The number of answers that follow the
checks is known only as they are released. A budget is therefore kept by the ledger's filter.
Without a budget, the cost to state is `event(n_queries, max_answers)`, fixed beforehand (Gaussian
releases in adaptive order cost what their squared multipliers add up to: Smith & Thakurta 2022,
arXiv:2210.17520). A cost computed from votes is smaller, but private, and never charged:
`benchmarks/_pate_costs.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit import events
from tacit._arrays import Indices
from tacit._check import whole
from tacit.errors import BudgetExceeded, TacitError
from tacit.events import Event, Repeated
from tacit.ledger import Ledger
from tacit.mechanisms import Mechanism, Rng, Seed, generator
from tacit.pate.journal import Journal

NO_ANSWER = -1
"""Label of a query that was refused, or that was not asked because the budget ended."""

Pay = Callable[[Event, int], None]
"""pay(event, count): charge the ledger with `count` occurrences of `event`, or raise."""


class Teacher(Protocol):
    """Any object with scikit-learn's `fit` and `predict`; `predict` returns class numbers."""

    def fit(self, X: Any, y: Any) -> Any: ...  # Any: arrays, tables, tensors of the user's choice

    def predict(self, X: Any) -> Any: ...


@runtime_checkable
class TeacherGroup(Protocol):
    """Teachers that predict together, such as `StackedTeachers`."""

    def predict_all(self, X: Any) -> Indices:
        """Return the class number that each teacher predicts: (teachers, inputs)."""
        ...


class TeacherError(TacitError):
    """A teacher could not be trained or could not predict; nothing was spent or released.

    The teacher's own exception may quote private records ("could not convert string to float:
    'Smith'"). This message therefore names only its type, and the exception is not chained.
    """


class Aggregator(ABC):
    """Rule that answers queries by a noisy vote; it pays for answers before it releases them."""

    def answer(
        self,
        votes: ArrayLike,
        *,
        ledger: Ledger | None = None,
        rng: Seed = None,
        journal: Journal | None = None,
        block: int = 1,
        max_answers: int | None = None,
        strict: bool = False,
        by_user: bool = False,
    ) -> Indices:
        """Pay for and return a noisy label for each query, `NO_ANSWER` where it was refused.

        Parameters
        ----------
        votes
            Private counts of shape (queries, classes).
        ledger
            Pays for each block before it is released; None keeps no record. When the ledger
            refuses a payment, the remaining queries stay unanswered. `BudgetExceeded` is raised if
            it refuses the first payment, or any payment with `strict`. The budget is never passed.
        journal
            Answers of an earlier, killed run. They are returned unchanged, and their noise is not
            drawn again, even if `rng` is the same seed.
        block
            Number of queries paid for at once. Larger blocks are faster on a ledger file, but use
            the end of a budget less exactly.
        max_answers
            Stop after this many answers. `event(n_queries, max_answers)` then bounds the cost
            before the first query is asked, although the number of answers is not yet known.
        by_user
            Whether all records of each user are with one teacher, so that a user changes one vote.
            A ledger of users, and no other, pays for such votes.
        """
        if ledger is not None:
            ledger.require_unit(is_user=by_user)
        counts = as_votes(votes)
        payer = Ledger() if ledger is None else ledger
        random = generator(rng)
        block = whole(block=block, least=1)
        labels = np.full(len(counts), NO_ANSWER, dtype=np.int64)
        known: list[int] = []
        if journal is not None:
            random = journal.fresh(random)
            known = [i for i in range(len(labels)) if i in journal.labels]
            labels[known] = [journal.labels[i] for i in known]
        waiting = np.setdiff1d(np.arange(len(labels)), known)
        most = len(labels) if max_answers is None else max_answers
        left = whole(max_answers=most) - int(np.sum(labels != NO_ANSWER))
        note = f"PATE run {journal.run}" if journal is not None else "PATE"
        has_paid = bool(known)

        def pay(event: Event, count: int) -> None:
            nonlocal has_paid
            payer.spend(event if count == 1 else Repeated(event, count), note=note)
            has_paid = True

        while len(waiting) and left > 0:
            now = waiting[: min(block, left)]  # stays within max_answers if all are answered
            try:
                released = self._release(counts[now], pay, random)
            except BudgetExceeded:
                if strict or not has_paid:
                    raise
                break
            if journal is not None:
                journal.record(now.tolist(), released.tolist())
            labels[now] = released
            waiting, left = waiting[len(now) :], left - int(np.sum(released != NO_ANSWER))
        return labels

    def event(self, n_queries: int, n_answers: int | None = None) -> Event:
        """Return the event of asking `n_queries` and answering `n_answers` of them (None: all)."""
        n_queries = whole(n_queries=n_queries)
        n_answers = n_queries if n_answers is None else whole(n_answers=n_answers)
        parts = [Repeated(self._mechanism.event, n_answers)]
        if self._check is not None:
            parts.insert(0, Repeated(self._check.event, n_queries))
        return events.Sequence(tuple(parts))

    @property
    def has_check(self) -> bool:
        """Whether a query may be refused, so that the number of answers depends on the votes."""
        return self._check is not None

    @property
    @abstractmethod
    def _mechanism(self) -> Mechanism:
        """Mechanism that adds noise to the counts of one answered query."""

    @property
    def _check(self) -> Mechanism | None:
        """Mechanism that decides whether a query is answered; None if every query is."""
        return None

    def _release(self, counts: Indices, pay: Pay, random: Rng) -> Indices:
        """Pay for one block of queries, then return the noisy winners."""
        pay(self._mechanism.event, len(counts))
        return self._mechanism.release(counts, random).argmax(axis=1)


def as_votes(votes: ArrayLike) -> Indices:
    """Return `votes` as whole numbers (queries, classes); raise unless each teacher votes once.

    Every row must add up to the number of teachers. Error messages never show a count, because
    counts are private.
    """
    array = np.asarray(votes)
    if array.ndim != 2 or array.shape[1] < 2:
        raise ValueError(
            f"votes must have shape (queries, classes) with >= 2 classes, got {array.shape}."
        )
    if array.dtype.kind not in "iuf":
        raise TypeError(f"votes must be whole numbers, got dtype {array.dtype}.")
    if not np.all(np.isfinite(array)) or np.any(array < 0) or np.any(array != np.round(array)):
        raise ValueError("votes must be whole numbers >= 0: how many teachers chose each class.")
    counts = array.astype(np.int64)
    totals = counts.sum(axis=1)
    if len(totals) and (totals[0] < 1 or np.any(totals != totals[0])):
        raise ValueError(
            "votes of every query must add up to the number of teachers: each teacher votes once."
        )
    return counts


def count_votes(
    teachers: Sequence[Teacher] | TeacherGroup, X_public: Any, n_classes: int
) -> Indices:
    """Return how many teachers choose each class for each input: (inputs, classes); **private**.

    >>> from tacit.pate.teachers import ConstantTeacher
    >>> count_votes([ConstantTeacher(1), ConstantTeacher(1), ConstantTeacher(2)], [[0.0]], 3)
    array([[0, 2, 1]])
    """
    n_classes = whole(n_classes=n_classes, least=2)
    check_finite(X_public, "X_public")
    counts = np.zeros((len(X_public), n_classes), dtype=np.int64)
    rows = np.arange(len(X_public))
    for number, chosen in enumerate(_predictions(teachers, X_public)):
        if chosen.shape != rows.shape:
            raise TeacherError(
                f"teacher {number} must predict one class for each of {len(rows)} inputs, "
                f"got shape {chosen.shape}."
            )
        if not is_class_number(chosen, n_classes):
            raise TeacherError(
                f"teacher {number} must predict whole numbers from 0 to {n_classes - 1}. "
                "Number the classes, or raise n_classes."
            )
        counts[rows, chosen] += 1
    return counts


def is_class_number(values: NDArray[Any], n_classes: int) -> bool:
    """Return whether all `values` are whole numbers from 0 to `n_classes` - 1."""
    return values.dtype.kind in "iu" and not np.any((values < 0) | (values >= n_classes))


def check_finite(X: Any, name: str) -> None:
    """Raise an error, with the argument's `name`, if `X` holds NaN or infinity."""
    array = np.asarray(X)
    if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
        raise ValueError(f"{name} must be finite, but holds NaN or infinity. Impute it first.")


def teacher_error(who: str, what: str, failure: Exception) -> TeacherError:
    """Return the error for a teacher, named `who`, that failed to `what` ("train", "predict").

    It states only the type of the exception `failure`, whose message may quote private records.
    """
    return TeacherError(
        f"{who} failed to {what} ({type(failure).__name__}). Nothing was spent or released. Its "
        f"message may quote records: to see it, {what} with such a teacher on records that are not "
        "private."
    )


def _predictions(teachers: Sequence[Teacher] | TeacherGroup, X: Any) -> Iterable[NDArray[Any]]:
    if isinstance(teachers, TeacherGroup):
        try:
            predicted = teachers.predict_all(X)
        except Exception as failure:
            raise teacher_error("a teacher of the group", "predict", failure) from None
        yield from predicted
        return
    if not len(teachers):
        raise ValueError("teachers must not be empty.")
    for number, teacher in enumerate(teachers):
        try:
            predicted = np.asarray(teacher.predict(X))
        except Exception as failure:
            who = f"teacher {number} of {len(teachers)}"
            raise teacher_error(who, "predict", failure) from None
        yield predicted
