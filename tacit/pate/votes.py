"""Teachers on disjoint parts of the private records, and their votes on public inputs.

What the privacy of PATE rests on: **one record reaches one teacher**, so it can change one vote on
each input. Hence the rules of this file: the part a record belongs to is drawn independently of
its values and of all other records; a teacher sees its part alone and randomness of its own; every
teacher votes on every input, one without records for a class fixed in advance. Votes and teachers
are private; only `tacit.pate.gnmax` lets something out.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit._check import whole
from tacit.errors import TacitError
from tacit.mechanisms import Seed, generator

Labels = NDArray[np.int64]
Progress = Callable[[int, int], None]


class Teacher(Protocol):
    """Anything with scikit-learn's `fit` and `predict`; `predict` gives class numbers."""

    def fit(self, X: Any, y: Any) -> Any: ...  # Any: arrays, tables, tensors of the user's choice

    def predict(self, X: Any) -> Any: ...


@runtime_checkable
class TeacherGroup(Protocol):
    """Teachers that predict together, such as `StackedTeachers`."""

    def predict_all(self, X: Any) -> Labels:
        """Class number by each teacher for each input: (teachers, inputs)."""
        ...


class TeacherError(TacitError):
    """A teacher could not be trained or could not predict; nothing was spent or released.

    What the teacher itself raised may quote private records ("could not convert string to float:
    'Smith'"), so its type alone is told, and it is not chained.
    """


class ConstantTeacher:
    """The teacher of a part without records or with a single class: it always says `label`."""

    def __init__(self, label: int) -> None:
        self.label = label

    def fit(self, X: Any, y: Any) -> "ConstantTeacher":  # noqa: ARG002  # a teacher's signature
        """Nothing to learn."""
        return self

    def predict(self, X: Any) -> Labels:
        """`label`, for every input."""
        return np.full(len(X), self.label, dtype=np.int64)


def partition(n_records: int, n_teachers: int, rng: Seed = None) -> list[NDArray[np.int64]]:
    """Record numbers of each teacher: disjoint, all of them, drawn without looking at any value.

    Every record draws its teacher uniformly and on its own. So, with the same draws for the records
    that two neighboring data sets share, they differ in the part of one teacher and no other; the
    draws are secret, and a mixture over them costs no more than its worst member. (Equal parts
    would not do: with one record more, the balance is restored elsewhere, and two teachers change.)

    >>> parts = partition(1000, 10, rng=0)
    >>> sorted(np.concatenate(parts).tolist()) == list(range(1000))
    True
    """
    n_records = whole(n_records=n_records)
    n_teachers = whole(n_teachers=n_teachers, least=1)
    if n_records < n_teachers:
        raise ValueError(
            f"n_teachers must be <= the number of records, got {n_teachers} teachers "
            f"for {n_records} records. Use fewer teachers."
        )
    teacher_of = generator(rng).integers(0, n_teachers, size=n_records)
    order = np.argsort(teacher_of, kind="stable")
    return np.split(order, np.searchsorted(teacher_of[order], np.arange(1, n_teachers)))


def train_teachers(
    make_teacher: Callable[[int], Teacher],
    X: Any,
    y: ArrayLike,
    n_teachers: int,
    *,
    n_classes: int,
    rng: Seed = None,
    n_jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Teacher]:
    """Teachers trained on disjoint parts of (X, y); private.

    Parameters
    ----------
    make_teacher
        Called with a seed, gives a fresh, untrained teacher. Called in the worker.
    y
        Class numbers from 0 to `n_classes` - 1.
    n_jobs
        As in joblib, whose active backend carries the work: `joblib.parallel_config("dask")` around
        this call spreads it over a cluster.
    progress
        Called with (teachers done, teachers in all) after each; the command line draws a bar.

    Raises
    ------
    TeacherError
        If one of them raises; it says which. Nothing is spent by training.
    """
    X, labels = checked_records(X, y, n_classes=n_classes)
    random = generator(rng)
    parts = partition(len(labels), n_teachers, random)
    seeds = random.integers(0, 2**31, size=n_teachers)
    return _train_in_parallel(
        [
            (_name(i, n_teachers), make_teacher, X[part], labels[part], i % n_classes, int(seed))
            for i, (part, seed) in enumerate(zip(parts, seeds, strict=True))
        ],
        n_jobs=n_jobs,
        progress=progress,
    )


def count_votes(
    teachers: Sequence[Teacher] | TeacherGroup, X_public: Any, n_classes: int
) -> NDArray[np.int64]:
    """How many teachers choose each class for each input: (inputs, classes); **private**.

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
        if chosen.dtype.kind not in "iu" or np.any((chosen < 0) | (chosen >= n_classes)):
            raise TeacherError(
                f"teacher {number} must predict whole numbers from 0 to {n_classes - 1}. "
                "Number the classes, or raise n_classes."
            )
        counts[rows, chosen] += 1
    return counts


def checked_records(X: Any, y: ArrayLike, *, n_classes: int) -> tuple[Any, Labels]:
    """Private inputs and class numbers, checked for shape and finiteness, not for content."""
    check_finite(X, "X")
    labels = np.asarray(y)
    if labels.ndim != 1 or len(labels) != len(X):
        raise ValueError(
            f"y must hold one class for each record, got shape {labels.shape} for {len(X)} records."
        )
    if labels.dtype.kind not in "iu" or np.any((labels < 0) | (labels >= n_classes)):
        raise ValueError(f"y must hold whole numbers from 0 to {n_classes - 1}.")
    is_table = hasattr(X, "to_numpy") or not hasattr(X, "shape")  # rows are taken by number
    return np.asarray(X) if is_table else X, labels.astype(np.int64)


def check_finite(X: Any, name: str) -> None:
    """Refuse NaN and infinity: a teacher would fail on them, or learn from their place."""
    array = np.asarray(X)
    if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
        raise ValueError(f"{name} must be finite, but holds NaN or infinity. Impute it first.")


def _predictions(teachers: Sequence[Teacher] | TeacherGroup, X: Any) -> Iterable[NDArray[Any]]:
    if isinstance(teachers, TeacherGroup):
        try:
            predicted = teachers.predict_all(X)
        except Exception as failure:
            raise _failed("a teacher of the group", "predict", failure) from None
        yield from predicted
        return
    if not len(teachers):
        raise ValueError("teachers must not be empty.")
    for number, teacher in enumerate(teachers):
        try:
            predicted = np.asarray(teacher.predict(X))
        except Exception as failure:
            raise _failed(_name(number, len(teachers)), "predict", failure) from None
        yield predicted


_Job = tuple[str, Callable[[int], Teacher], Any, Labels, int, int]


def _train_one(job: _Job) -> Teacher | TeacherError:
    """One trained teacher, or why there is none (returned, so that every backend hands it on)."""
    name, make_teacher, X, y, absent_label, seed = job
    if len(y) == 0:
        return ConstantTeacher(absent_label)
    if np.all(y == y[0]):  # many classifiers refuse a single class
        return ConstantTeacher(int(y[0]))
    try:
        teacher = make_teacher(seed)
        teacher.fit(X, y)
    except Exception as failure:
        return _failed(name, "train", failure)
    return teacher


def _train_in_parallel(
    jobs: list[_Job], *, n_jobs: int | None, progress: Progress | None
) -> list[Teacher]:
    try:
        from joblib import Parallel, delayed
    except ImportError:
        raise ImportError("train_teachers needs joblib: pip install 'tacit[sklearn]'.") from None

    run: Any = Parallel(n_jobs=n_jobs, return_as="generator")  # Any: joblib is untyped
    results: Iterable[Teacher | TeacherError] = run(delayed(_train_one)(job) for job in jobs)
    teachers: list[Teacher] = []
    failure: TeacherError | None = None
    for number, result in enumerate(results):  # to the end, so no worker is left behind
        if isinstance(result, TeacherError):
            failure = failure or result
        else:
            teachers.append(result)
        if progress is not None:
            progress(number + 1, len(jobs))
    if failure is not None:
        raise failure
    return teachers


def _name(number: int, total: int) -> str:
    return f"teacher {number} of {total}"


def _failed(who: str, what: str, failure: Exception) -> TeacherError:
    return TeacherError(
        f"{who} failed to {what} ({type(failure).__name__}). Nothing was spent or released. Its "
        f"message may quote records: to see it, {what} with such a teacher on records that are not "
        "private."
    )
