"""Teachers, each trained on its own disjoint part of the private records.

The privacy of PATE rests on **one record reaching one teacher**. Hence the rules of this file:

- The part that a record belongs to is drawn independently of its values and of other records.
- A teacher uses only the records of its own part and randomness of its own.
- Every teacher votes on every input. A teacher without records votes for a class fixed in advance.

`train_teachers` trains any scikit-learn classifier, a `KernelTeacher` or a `TorchTeacher`, one at a
time or in parallel. `train_stacked_teachers` trains hundreds of small torch models at once: their
parameters are stacked along a leading teacher axis, every layer becomes a batched product, and one
optimizer step updates all teachers (`torch.func.vmap` over `functional_call`). The stack keeps
teachers apart: the loss of teacher i uses its own records and its own parameters, its batches come
from its own row of random numbers, and the optimizer updates each parameter by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solve

from tacit._arrays import Indices
from tacit._check import non_negative, positive, whole
from tacit._users import RecordsOfUsers
from tacit.errors import IncompatibleModel
from tacit.mechanisms import Rng, Seed, generator
from tacit.pate.votes import Teacher, TeacherError, check_finite, is_class_number, teacher_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MakeModule = Callable[[], "nn.Module"]
Progress = Callable[[int, int], None]
"""progress(teachers done, teachers in all), called after each teacher."""
Rows: TypeAlias = NDArray[np.float32]
_WIDTH_SAMPLE = 500  # records whose distances set the kernel's width


@dataclass(frozen=True)
class ConstantTeacher:
    """The teacher of a part without records or with a single class: it always predicts `label`."""

    label: int

    def fit(self, X: Any, y: Any) -> "ConstantTeacher":  # noqa: ARG002  # a teacher's signature
        """Return self: nothing is learned."""
        return self

    def predict(self, X: Any) -> Indices:
        """Return `label` for every input."""
        return np.full(len(X), self.label, dtype=np.int64)


@dataclass(kw_only=True, eq=False)
class KernelTeacher:
    """Teacher by kernel ridge regression on one-hot classes; it predicts the best-scoring class.

    `width` of the Gaussian kernel is in units of the median distance between training records.
    Training has a closed form and takes milliseconds for a few hundred records. The fitted teacher
    holds its records, so it is as private as the records: use it to vote, and never release it.
    """

    width: float = 0.85
    ridge: float = 0.03

    def fit(self, X: ArrayLike, y: ArrayLike) -> "KernelTeacher":
        """Train on rows of `X` and their class numbers."""
        rows = as_rows(X)
        self._classes, index = np.unique(np.asarray(y), return_inverse=True)
        self._gamma = kernel_gamma(rows[:_WIDTH_SAMPLE], rows, self.width)
        inner = kernel(rows, rows, self._gamma).astype(float)
        inner.flat[:: len(rows) + 1] += positive(ridge=self.ridge)
        target = np.eye(len(self._classes))[index] - 1 / len(self._classes)
        self._weights = solve(inner, target, assume_a="pos").astype(np.float32)
        self._rows = rows
        return self

    def predict(self, X: ArrayLike) -> Indices:
        """Return a class number for each row."""
        scores = kernel(as_rows(X), self._rows, self._gamma) @ self._weights
        return self._classes[scores.argmax(axis=1)]


@dataclass(frozen=True, kw_only=True)
class TeacherTraining:
    """How a torch teacher is trained: `steps` of Adam on batches drawn with replacement.

    `steps` and `batch_size` are the same for all teachers, whatever the size of their parts, so
    that the size of one part does not influence another teacher.
    """

    steps: int = 100
    batch_size: int = 64
    learning_rate: float = 1e-2
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        whole(steps=self.steps, least=1)
        whole(batch_size=self.batch_size, least=1)
        positive(learning_rate=self.learning_rate)
        non_negative(weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Stacked:
    """A request to train the torch modules of `make_module` as teachers, all at once."""

    make_module: MakeModule
    training: TeacherTraining | None = None


class TorchTeacher:
    """One torch classifier with scikit-learn's `fit` and `predict`.

    `make_module` returns an untrained module from inputs to (batch, classes) scores.
    """

    def __init__(
        self, make_module: MakeModule, *, seed: int = 0, training: TeacherTraining | None = None
    ) -> None:
        self.make_module = make_module
        self.seed = seed
        self.training = training or TeacherTraining()

    def fit(self, X: Any, y: ArrayLike) -> "TorchTeacher":
        """Train on the records of one part."""
        import torch

        random = np.random.default_rng(self.seed)
        module = _seeded(self.make_module, random)
        inputs, labels = _tensor(X), torch.as_tensor(np.asarray(y, dtype=np.int64))
        optimizer = _adam(list(module.parameters()), self.training)
        module.train()
        for _ in range(self.training.steps):
            draw = random.random(self.training.batch_size)
            batch = torch.as_tensor((draw * len(labels)).astype(np.int64))
            loss = torch.nn.functional.cross_entropy(module(inputs[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self._module = module.eval()
        return self

    def predict(self, X: Any) -> Indices:
        """Return a class number for each input."""
        import torch

        with torch.no_grad():
            return self._module(_tensor(X)).argmax(dim=1).numpy()


class StackedTeachers:
    """Many torch teachers of one architecture, trained at once; private.

    Pass it to `count_votes` in place of a list of teachers.
    """

    def __init__(
        self, module: "nn.Module", parameters: "dict[str, Tensor]", absent: Indices
    ) -> None:
        self._module = module
        self._parameters = parameters
        self._absent = absent  # fixed vote of a teacher without records, else -1

    def __len__(self) -> int:
        return len(self._absent)

    def __repr__(self) -> str:
        return f"StackedTeachers({len(self)} teachers)"

    def predict_all(self, X: Any, *, batch_size: int = 1024) -> Indices:
        """Return the class number that each teacher predicts: (teachers, inputs)."""
        import torch

        chosen = []
        with torch.no_grad():
            for start in range(0, len(X), batch_size):
                inputs = _tensor(X[start : start + batch_size])
                chosen.append(_apply(self._module, self._parameters, inputs).argmax(dim=2))
        votes = torch.cat(chosen, dim=1).numpy() if chosen else np.empty((len(self), 0), np.int64)
        return np.where(self._absent[:, None] >= 0, self._absent[:, None], votes)


def partition(
    n_records: int, n_teachers: int, rng: Seed = None, users: Any = None
) -> list[Indices]:
    """Return a random partition of the records: for each teacher, the numbers of its records.

    With `users`, the id of a user for each record, all records of a user go to one teacher: then
    "record" stands for "user" below, and a user changes one vote, however many records there are.

    Every record draws its teacher uniformly and independently, without looking at any value. If the
    records that two neighboring data sets share have the same draws, the data sets differ in the
    part of one teacher only. The draws are secret, and averaging over them costs no privacy. (Parts
    of equal size would not do: one added record would move others, so two teachers would change.)

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
    if users is None:
        teacher_of = generator(rng).integers(0, n_teachers, size=n_records)
    else:
        grouped = RecordsOfUsers.of(users, n_records)
        drawn = generator(rng).integers(0, n_teachers, size=len(grouped))
        teacher_of = drawn[grouped.user_of_record]
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
    users: Any = None,
) -> list[Teacher]:
    """Train teachers on disjoint random parts of (X, y) and return them; they are private.

    Training spends no budget. If a teacher fails, the `TeacherError` that is raised names it.

    Parameters
    ----------
    make_teacher
        Called in the worker with a seed; returns a new, untrained teacher.
    y
        Class numbers from 0 to `n_classes` - 1.
    n_jobs
        As in joblib, whose active backend does the work: `joblib.parallel_config("dask")` around
        this call spreads the work over a cluster.
    users
        The id of a user for each record, if a user is to be protected: see `partition`.
    """
    try:
        from joblib import Parallel, delayed
    except ImportError:
        raise ImportError("train_teachers needs joblib: pip install 'tacit-dp[sklearn]'.") from None

    X, labels = checked_records(X, y, n_classes=n_classes)
    random = generator(rng)
    parts = partition(len(labels), n_teachers, random, users)
    seeds = random.integers(0, 2**31, size=n_teachers)
    train = delayed(partial(_train_one, make_teacher))
    jobs = (
        train(X[part], labels[part], i % n_classes, seed, f"teacher {i} of {n_teachers}")
        for i, (part, seed) in enumerate(zip(parts, seeds.tolist(), strict=True))
    )
    teachers: list[Any] = []  # Any: joblib is untyped
    for teacher in Parallel(n_jobs=n_jobs, return_as="generator")(jobs):
        teachers.append(teacher)  # errors too: to the end, so that no worker is left behind
        if progress is not None:
            progress(len(teachers), n_teachers)
    for teacher in teachers:
        if isinstance(teacher, TeacherError):
            raise teacher
    return teachers


def train_stacked_teachers(
    make_module: MakeModule,
    X: Any,
    y: ArrayLike,
    n_teachers: int,
    *,
    n_classes: int,
    training: TeacherTraining | None = None,
    rng: Seed = None,
    parts: list[Indices] | None = None,
    users: Any = None,
) -> StackedTeachers:
    """Train torch teachers of one architecture at once on disjoint parts of (X, y).

    The result is private. `make_module` is called once for each teacher. It must return the same
    architecture each time, without buffers (no BatchNorm: its running averages cannot be stacked).
    `parts` lists the records of each teacher in place of the random `partition`, for instance one
    part for each hospital. For `users` see `partition`.
    """
    import torch

    training = training or TeacherTraining()
    X, labels = checked_records(X, y, n_classes=n_classes)
    random = generator(rng)
    parts = partition(len(labels), n_teachers, random, users) if parts is None else parts
    module, parameters = _stack(make_module, len(parts), random)
    inputs, targets, sizes = _padded(X, labels, parts)
    optimizer = _adam(list(parameters.values()), training)
    row = torch.arange(len(parts))[:, None]
    module.train()
    for _ in range(training.steps):
        draw = random.random((len(parts), training.batch_size))
        # Row i is scaled by the size of part i alone; a part without records reads its padding.
        batch = torch.as_tensor((draw * sizes[:, None]).astype(np.int64))
        scores = _apply(module, parameters, inputs[row, batch], shared=False)
        losses = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), targets[row, batch].flatten(), reduction="none"
        )
        # The sum over teachers of each teacher's mean: no gradient crosses between teachers.
        loss = losses.sum() / training.batch_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if not all(bool(torch.isfinite(p).all()) for p in parameters.values()):
        raise TeacherError("a stacked teacher diverged: lower learning_rate. Nothing was spent.")
    is_empty = np.array([len(part) == 0 for part in parts])
    absent = np.where(is_empty, np.arange(len(parts)) % n_classes, -1)
    frozen = {name: p.detach() for name, p in parameters.items()}
    return StackedTeachers(module.eval(), frozen, absent)


def checked_records(X: Any, y: ArrayLike, *, n_classes: int) -> tuple[Any, Indices]:
    """Return private inputs and class numbers after checks of shape, finiteness and range."""
    check_finite(X, "X")
    labels = np.asarray(y)
    if labels.ndim != 1 or len(labels) != len(X):
        raise ValueError(
            f"y must hold one class for each record, got shape {labels.shape} for {len(X)} records."
        )
    if not is_class_number(labels, n_classes):
        raise ValueError(f"y must hold whole numbers from 0 to {n_classes - 1}.")
    is_table = hasattr(X, "to_numpy") or not hasattr(X, "shape")  # rows are taken by number
    return np.asarray(X) if is_table else X, labels.astype(np.int64)


def as_rows(X: ArrayLike) -> Rows:
    """Return each input as one flat row of floats."""
    array = np.asarray(X, dtype=np.float32)
    return array.reshape(len(array), -1)


def squared_distances(a: Rows, b: Rows) -> Rows:
    """Return the squared distance of every row of `a` from every row of `b`."""
    squares = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)[None, :] - 2 * a @ b.T
    return np.maximum(squares, 0.0)


def kernel(a: Rows, b: Rows, gamma: float) -> Rows:
    """Return the Gaussian kernel exp(-gamma * squared distance) of all pairs of rows."""
    return np.exp(-gamma * squared_distances(a, b))


def kernel_gamma(a: Rows, b: Rows, width: float) -> float:
    """Return gamma of the Gaussian kernel exp(-gamma * squared distance) of a given width.

    The kernel's standard deviation is `width` times the median distance of rows of `a` from `b`.
    """
    median = float(np.median(squared_distances(a, b)))
    return 1 / (2 * positive(width=width) ** 2 * max(median, 1e-12))


def _train_one(
    make_teacher: Callable[[int], Teacher],
    X: Any,
    y: Indices,
    absent_label: int,
    seed: int,
    name: str,
) -> Teacher | TeacherError:
    """Return a teacher trained on one part (X, y), or the error that training raised.

    The error is returned, not raised, so that every joblib backend passes it on. A teacher without
    records always predicts `absent_label`. `name` identifies the teacher in the error.
    """
    if len(y) == 0:
        return ConstantTeacher(absent_label)
    if np.all(y == y[0]):  # many classifiers refuse a single class
        return ConstantTeacher(int(y[0]))
    try:
        teacher = make_teacher(seed)
        teacher.fit(X, y)
    except Exception as failure:
        return teacher_error(name, "train", failure)
    return teacher


def _apply(
    module: "nn.Module", parameters: "dict[str, Tensor]", inputs: "Tensor", *, shared: bool = True
) -> "Tensor":
    """Return the class scores by every stacked teacher: (teachers, batch, classes).

    If `shared`, all teachers read the same inputs. Otherwise teacher i reads `inputs[i]`.
    """
    from torch.func import functional_call, vmap

    def one(own: "dict[str, Tensor]", x: "Tensor") -> "Tensor":
        return functional_call(module, own, (x,))

    return vmap(one, in_dims=(0, None if shared else 0), randomness="different")(parameters, inputs)


def _stack(
    make_module: MakeModule, n_teachers: int, random: Rng
) -> "tuple[nn.Module, dict[str, Tensor]]":
    """Make one module per teacher; return the first, and all parameters stacked by teacher.

    The first module defines the forward pass, which is the same for all.
    """
    import torch

    modules = [_seeded(make_module, random) for _ in range(n_teachers)]
    if any(True for _ in modules[0].buffers()):
        raise IncompatibleModel(
            "the module has buffers (BatchNorm's running averages?), which cannot be stacked. "
            "Use GroupNorm, or train with TorchTeacher."
        )
    named = [dict(module.named_parameters()) for module in modules]
    shapes = [{name: p.shape for name, p in own.items()} for own in named]
    if any(other != shapes[0] for other in shapes):
        raise IncompatibleModel("make_module must give the same architecture every time.")
    stacked, _ = torch.func.stack_module_state(modules)
    return modules[0], stacked


def _padded(X: Any, labels: Indices, parts: list[Indices]) -> "tuple[Tensor, Tensor, Indices]":
    """Return inputs and labels of all parts, padded to equal length, and the size of each part.

    The padding is zeros. It is never read for a part that has records.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    inputs, targets = _tensor(X), torch.as_tensor(labels)
    stacked = pad_sequence([inputs[part] for part in parts], batch_first=True)
    numbers = pad_sequence([targets[part] for part in parts], batch_first=True)
    return stacked, numbers, np.array([len(part) for part in parts])


def _seeded(make_module: MakeModule, random: Rng) -> "nn.Module":
    """Return a new module initialized from `random`; torch's global generator is left unchanged."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(random.integers(0, 2**31)))
        return make_module()


def _adam(parameters: "list[Tensor]", training: TeacherTraining) -> "torch.optim.Optimizer":
    import torch

    return torch.optim.AdamW(
        parameters, lr=training.learning_rate, weight_decay=training.weight_decay
    )


def _tensor(X: Any) -> "Tensor":
    import torch

    return torch.as_tensor(np.asarray(X), dtype=torch.float32)
