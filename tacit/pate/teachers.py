"""Small torch models as teachers: one at a time, or hundreds at once with stacked parameters.

Hundreds of small models trained one after another spend their time on overhead. Stacked, they are
one model with a leading teacher axis: every layer becomes a batched product and one optimizer step
moves all teachers (`torch.func.vmap` over `functional_call`). The stack keeps teachers apart:
teacher i's loss reads its own records and its own parameters, its batches come from its own column
of the random numbers and its own number of records, and the optimizer acts on each number alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit._check import non_negative, positive, whole
from tacit.errors import IncompatibleModel
from tacit.mechanisms import Seed, generator
from tacit.pate.votes import Labels, TeacherError, checked_records, partition

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MakeModule = Callable[[], "nn.Module"]


@dataclass(frozen=True, kw_only=True)
class TeacherTraining:
    """How a torch teacher is trained: `steps` of Adam on batches drawn with replacement.

    `steps` and `batch_size` are the same for all teachers, whatever the size of their parts, so
    that one part's size says nothing to another teacher.
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
    """Says that `make_module`'s torch modules are to be trained at once, as teachers."""

    make_module: MakeModule
    training: TeacherTraining | None = None


class TorchTeacher:
    """One torch classifier with scikit-learn's `fit` and `predict`.

    `make_module` gives an untrained module from inputs to (batch, classes) scores.
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

    def predict(self, X: Any) -> Labels:
        """Class number for each input."""
        import torch

        with torch.no_grad():
            return self._module(_tensor(X)).argmax(dim=1).numpy()


class StackedTeachers:
    """Many torch teachers of one architecture, trained at once; private.

    Give it to `count_votes` in place of a list of teachers.
    """

    def __init__(
        self, module: "nn.Module", parameters: "dict[str, Tensor]", absent: Labels
    ) -> None:
        self._module = module
        self._parameters = parameters
        self._absent = absent  # fixed vote of a teacher without records, else -1

    def __len__(self) -> int:
        return len(self._absent)

    def __repr__(self) -> str:
        return f"StackedTeachers({len(self)} teachers)"

    def predict_all(self, X: Any, *, batch_size: int = 1024) -> Labels:
        """Class number by each teacher for each input: (teachers, inputs)."""
        import torch

        chosen = []
        with torch.no_grad():
            for start in range(0, len(X), batch_size):
                scores = _apply(
                    self._module, self._parameters, _tensor(X[start : start + batch_size])
                )
                chosen.append(scores.argmax(dim=2))
        votes = torch.cat(chosen, dim=1).numpy() if chosen else np.empty((len(self), 0), np.int64)
        return np.where(self._absent[:, None] >= 0, self._absent[:, None], votes)


def train_stacked_teachers(
    make_module: MakeModule,
    X: Any,
    y: ArrayLike,
    n_teachers: int,
    *,
    n_classes: int,
    training: TeacherTraining | None = None,
    rng: Seed = None,
    parts: list[NDArray[np.int64]] | None = None,
) -> StackedTeachers:
    """Torch teachers of one architecture, trained at once on disjoint parts of (X, y); private.

    `make_module` is called once for each teacher and must give the same architecture, without
    buffers (no BatchNorm: its running averages cannot be stacked). `parts` replaces the random
    partition of `tacit.pate.partition`, for instance by one per site.
    """
    import torch

    training = training or TeacherTraining()
    X, labels = checked_records(X, y, n_classes=n_classes)
    random = generator(rng)
    parts = partition(len(labels), n_teachers, random) if parts is None else parts
    module, parameters = _stack(make_module, len(parts), random)
    inputs, targets, sizes = _padded(X, labels, parts)
    optimizer = _adam(list(parameters.values()), training)
    row = torch.arange(len(parts))[:, None]
    module.train()
    for _ in range(training.steps):
        draw = random.random((len(parts), training.batch_size))
        # Row i is scaled by part i's size alone; a part without records reads its padding.
        batch = torch.as_tensor((draw * sizes[:, None]).astype(np.int64))
        scores = _apply(module, parameters, inputs[row, batch], shared=False)
        losses = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), targets[row, batch].flatten(), reduction="none"
        )
        # A sum over teachers of each one's mean: no gradient crosses from one to another.
        loss = losses.sum() / training.batch_size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if not all(bool(torch.isfinite(p).all()) for p in parameters.values()):
        raise TeacherError("a stacked teacher diverged: lower learning_rate. Nothing was spent.")
    empty = np.array([len(part) == 0 for part in parts])
    absent = np.where(empty, np.arange(len(parts)) % n_classes, -1)
    frozen = {name: p.detach() for name, p in parameters.items()}
    return StackedTeachers(module.eval(), frozen, absent)


def _apply(
    module: "nn.Module", parameters: "dict[str, Tensor]", inputs: "Tensor", *, shared: bool = True
) -> "Tensor":
    """Scores of every teacher, on `shared` inputs or on its own: (teachers, batch, classes)."""
    from torch.func import functional_call, vmap

    def one(own: "dict[str, Tensor]", x: "Tensor") -> "Tensor":
        return functional_call(module, own, (x,))

    return vmap(one, in_dims=(0, None if shared else 0), randomness="different")(parameters, inputs)


def _stack(
    make_module: MakeModule, n_teachers: int, random: Any
) -> "tuple[nn.Module, dict[str, Tensor]]":
    """One module for its forward pass, and the parameters of all with a leading teacher axis."""
    import torch

    modules = [_seeded(make_module, random) for _ in range(n_teachers)]
    if any(True for _ in modules[0].buffers()):
        raise IncompatibleModel(
            "the module has buffers (BatchNorm's running averages?), which cannot be stacked. "
            "Use GroupNorm, or train with TorchTeacher."
        )
    named = [dict(module.named_parameters()) for module in modules]
    if any(
        {k: p.shape for k, p in other.items()} != {k: p.shape for k, p in named[0].items()}
        for other in named
    ):
        raise IncompatibleModel("make_module must give the same architecture every time.")
    stacked = {
        name: torch.stack([own[name].detach() for own in named]).requires_grad_()
        for name in named[0]
    }
    return modules[0], stacked


def _padded(
    X: Any, labels: Labels, parts: list[NDArray[np.int64]]
) -> "tuple[Tensor, Tensor, NDArray[np.int64]]":
    """Records of each part in one rectangle, padded with zeros that no batch ever reads."""
    import torch

    sizes = np.array([len(part) for part in parts])
    inputs = _tensor(X)
    width = max(int(sizes.max()), 1)
    stacked = torch.zeros((len(parts), width, *inputs.shape[1:]), dtype=inputs.dtype)
    targets = torch.zeros((len(parts), width), dtype=torch.int64)
    for i, part in enumerate(parts):
        stacked[i, : len(part)] = inputs[part]
        targets[i, : len(part)] = torch.as_tensor(labels[part])
    return stacked, targets, sizes


def _seeded(make_module: MakeModule, random: Any) -> "nn.Module":
    """A fresh module whose initial values come from `random`; torch's own stream is untouched."""
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
