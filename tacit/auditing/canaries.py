"""Canaries: records made to be recognized, each in or out of the training set by a fair coin.

`GradientCanaries` are for an attacker who sees every released update: the worst case that the bill
allows for. Canaries are treated like all other records: they are sampled, clipped and covered by
noise, and the guarantee of the real records is unchanged. They cost accuracy, because they take a
share of every lot (the random draw of records of one step).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Flags, Floats, Indices
from tacit._check import positive, whole
from tacit.accounting import log_mixture
from tacit.mechanisms import Seed, generator

if TYPE_CHECKING:
    import torch

Loss = Callable[..., Any]
"""loss_fn(model, batch) -> one loss for each example."""
_REFERENCES = 4  # coordinates without a canary, for each canary
_OVERSHOOT = 1e3  # gradient of a canary before clipping, in clip norms: it is always clipped


def flip_coins(n: int, rng: Seed = None) -> Flags:
    """Return a random fair coin for each of `n` canaries: True puts it into the training set."""
    return generator(rng).integers(0, 2, whole(n=n, least=1)).astype(bool)


class Planted(NamedTuple):
    """Model, data set and loss that include canaries, to pass to `tacit.make_private`."""

    model: Any
    dataset: Any
    loss_fn: Loss


class AuditedRun(Protocol):
    """The part of the object returned by `tacit.make_private` that an audit uses."""

    def __iter__(self) -> Iterator[Any]: ...

    @property
    def info(self) -> dict[str, Any]:  # Any: numbers and lists of them
        """Public numbers of the next step: noise, clip norms, divisor, number of records."""
        ...


class GradientCanaries:
    """Dirac canaries: the gradient of canary j is the j-th unit vector of extra coordinates.

    The model gets a table of `n_canaries` extra parameters that no prediction uses. The loss of
    canary j is the j-th parameter, scaled so that its gradient is clipped to exactly the clip norm.
    So each canary changes the released sum as much as a record may, in a coordinate of its own. The
    likelihood ratio of that coordinate over all releases is the worst case the bill allows for.
    Scores are independent given the coins, because each coordinate has its own noise and, under
    Poisson sampling, each canary has its own draws.

    Beside them there are `n_references` coordinates (default: four for each canary) that belong to
    no canary. They hold noise alone and show how high a score gets by chance.

    Guarantee: canaries are extra records; the real records keep their guarantee.

    Examples
    --------
    >>> import torch, tacit
    >>> x = torch.randn(200, 3)
    >>> canaries = GradientCanaries(2000, clip_norm=1.0, rng=0)
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return (model(x).squeeze(1) - y) ** 2
    >>> model, data, loss = canaries.plant(torch.nn.Linear(3, 1), (x, x.sum(1)), loss_fn)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> private = tacit.make_private(model, optimizer, data, loss, batch_size=400, steps=20,
    ...                              clip_norm=1.0, epsilon=8.0, delta=1e-5, n_records=1200,
    ...                              seed=1)
    >>> for batch in canaries.watch(private):
    ...     private.step(batch)
    >>> bill = private.epsilon(delta=1e-5)
    >>> bound = tacit.auditing.noise_bound(canaries.scores, canaries.is_member, private.event,
    ...                                    delta=1e-5, reference=canaries.reference)
    >>> 5.0 < bound.epsilon_lower < bill
    True
    """

    def __init__(
        self,
        n_canaries: int,
        *,
        clip_norm: float,
        rng: Seed = None,
        n_references: int | None = None,
    ) -> None:
        self.n_canaries = whole(n_canaries=n_canaries, least=2)
        given = _REFERENCES * n_canaries if n_references is None else n_references
        self._rows = n_canaries + whole(n_references=given, least=0)
        self.is_member = flip_coins(n_canaries, rng)
        self._strength = _OVERSHOOT * positive(clip_norm=clip_norm)
        self._table: torch.nn.Parameter | None = None
        self._sums = np.zeros(self._rows)
        self._ratios = np.zeros(self._rows)
        self._releases = 0

    def plant(self, model: Any, dataset: Any, loss_fn: Loss) -> Planted:
        """Return model, data set and loss with the canaries added.

        Build the optimizer from the returned model. `dataset` is a tensor, a tuple of tensors, a
        `TensorDataset` or any map-style data set. How many canaries are in is secret: declare
        n + n_canaries // 2 as `n_records`, where n is the number of real records.
        """
        if self._table is not None:
            raise ValueError("these canaries are planted already: make new ones for a new run.")
        planted = with_table(model, self._rows)
        self._table = planted.canaries.weight
        members = np.flatnonzero(self.is_member) + 1
        rows, unpack = _with_rows(dataset, members)
        return Planted(planted, rows, with_canaries(loss_fn, unpack, self._strength))

    def watch(self, private: AuditedRun) -> Iterator[Any]:
        """Yield the lots of the training run `private`, and add each release to canary scores.

        Take one training step with each lot. The released gradient is read after the step.
        """
        for lot in private:
            public = private.info  # before the step: the noise may be scheduled
            yield lot
            expected = float(public["expected_batch"])
            self.record(
                rate=min(1.0, expected / public["n_records"]),
                noise_multiplier=float(public["noise_multiplier"]),
                unit=float(public["clip_norms"][0]) / expected,
            )

    def record(
        self, *, rate: float = 1.0, noise_multiplier: float = 0.0, unit: float = 1.0
    ) -> None:
        """Add the latest released gradient, which a step leaves in `p.grad`, to the scores.

        `rate` is the probability that a record is in the lot. `unit` is the amount by which a
        canary in the lot changes its own coordinate of the release, without noise.
        """
        if self._table is None or self._table.grad is None:
            raise RuntimeError("nothing was released yet: plant the canaries and take a step.")
        released = self._table.grad[1:, 0].detach().double().cpu().numpy() / unit
        self._sums += released
        self._ratios += log_ratio(released, rate=rate, noise_multiplier=noise_multiplier)
        self._releases += 1

    @property
    def scores(self) -> Floats:
        """Log-likelihood ratio of each canary: in the training set against not in it.

        This is the most powerful score (Neyman & Pearson) if a member joins each lot with the same
        probability, and a good score otherwise. An audit is valid with any score.
        """
        return self._scored(self._ratios)[: self.n_canaries]

    @property
    def reference(self) -> Floats:
        """Scores of the coordinates without a canary, computed like `scores`."""
        return self._scored(self._ratios)[self.n_canaries :]

    @property
    def sums(self) -> Floats:
        """Sum over releases of each canary's coordinate, in clip norms.

        Given which lots the canary was in, the sum is normally distributed.
        """
        return self._scored(self._sums)[: self.n_canaries]

    def _scored(self, scores: Floats) -> Floats:
        if self._releases == 0:
            raise RuntimeError("no release was recorded: loop over canaries.watch(private).")
        return scores.copy()


def log_ratio(released: ArrayLike, *, rate: float, noise_multiplier: float) -> Floats:
    """Return the log-likelihood ratio of "drawn with probability `rate`" against "never drawn".

    Each value in `released` is 1 if its record was drawn and 0 if not, plus normal noise of
    standard deviation `noise_multiplier`. Without noise, `released` itself is the score.

    >>> log_ratio([0.5], rate=1.0, noise_multiplier=1.0).tolist()
    [0.0]
    """
    values = np.asarray(released, np.float64)
    if noise_multiplier == 0:
        return values
    ratio = (2 * values - 1) / (2 * noise_multiplier**2)
    return log_mixture(rate, ratio)


def with_table(model: Any, n_canaries: int) -> Any:
    """Return a module that predicts as `model` does and has one extra parameter per canary."""
    import torch

    class WithCanaries(torch.nn.Module):
        """Module that predicts as `inner` does; the table `canaries` is used by the loss only."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.canaries = torch.nn.Embedding(n_canaries + 1, 1, padding_idx=0)
            torch.nn.init.zeros_(self.canaries.weight)

        def forward(self, *args: Any, **options: Any) -> Any:
            return self.inner(*args, **options)

    planted = WithCanaries()
    planted.canaries.to(next(model.parameters()).device)
    return planted.train(model.training)


def with_canaries(loss_fn: Loss, unpack: Callable[[Any], Any], strength: float) -> Loss:
    """Return a loss that is `loss_fn`, and for canaries steep in one coordinate of the table."""
    import torch

    def loss(model: Any, batch: Any) -> Any:
        records, which = unpack(batch)
        real = loss_fn(model.inner, records)
        # Real records use row 0 of the table, which is padding: its gradient is zero.
        canary = model.canaries(which).squeeze(-1) * strength
        return torch.where(which > 0, canary.to(real.dtype), real)

    return loss


def _with_rows(dataset: Any, members: Indices) -> tuple[Any, Callable[[Any], Any]]:
    """Return the data set with the canaries in `members` appended, and a function for its batches.

    Each record gets the number of its canary, 0 for a real record. The record of a canary is all
    zeros. The function splits a batch into records and canary numbers.
    """
    import torch

    tensors = stored_tensors(dataset)
    if tensors is None:
        blank = _zeros(dataset[0])
        longer = _Joined(dataset, [blank] * len(members))
        return number_rows(longer, np.concatenate([np.zeros(len(dataset), np.int64), members]))
    blanks = [t.new_zeros((len(members), *t.shape[1:])) for t in tensors]
    numbers = np.concatenate([np.zeros(len(tensors[0]), np.int64), members])
    return number_rows(
        tuple(torch.cat(pair) for pair in zip(tensors, blanks, strict=True)), numbers
    )


def stored_tensors(dataset: Any) -> "tuple[torch.Tensor, ...] | None":
    """Return the tensors of a data set that is made of tensors or numpy arrays, else None."""
    import torch

    if isinstance(dataset, torch.utils.data.TensorDataset):
        dataset = dataset.tensors
    parts = (dataset,) if isinstance(dataset, torch.Tensor | np.ndarray) else dataset
    if isinstance(parts, tuple) and all(isinstance(t, torch.Tensor | np.ndarray) for t in parts):
        return tuple(torch.as_tensor(part) for part in parts)
    return None


def number_rows(dataset: Any, numbers: Indices) -> tuple[Any, Callable[[Any], Any]]:
    """Return the data set with a number for each record, and a function that splits its batches.

    The function returns the records of a batch, in the form that `dataset` has by itself, and their
    numbers. Tensors stay tensors, from which batches are drawn fast.
    """
    import torch

    tensors = stored_tensors(dataset)
    if tensors is None:
        return _Numbered(dataset, numbers), lambda batch: (batch[0], batch[1])
    which = torch.tensor(numbers).to(tensors[0].device)
    if isinstance(dataset, torch.Tensor | np.ndarray):
        return (*tensors, which), lambda batch: (batch[0], batch[1])
    return (*tensors, which), lambda batch: (batch[:-1], batch[-1])


class _Joined:
    """A map-style data set followed by the records in a list."""

    def __init__(self, dataset: Any, more: list[Any]) -> None:
        self._dataset = dataset
        self._more = more

    def __len__(self) -> int:
        return len(self._dataset) + len(self._more)

    def __getitem__(self, i: int) -> Any:  # Any: a record of the user
        n = len(self._dataset)
        return self._dataset[i] if i < n else self._more[i - n]


class _Numbered:
    """A map-style data set whose items are pairs of a record and its number."""

    def __init__(self, dataset: Any, numbers: Indices) -> None:
        self._dataset = dataset
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, i: int) -> Any:  # Any: a record of the user, and a number
        return self._dataset[i], int(self._numbers[i])


def _zeros(record: Any) -> Any:  # Any: tensors, arrays and numbers in tuples, lists and mappings
    if isinstance(record, Mapping):
        return {name: _zeros(value) for name, value in record.items()}
    if isinstance(record, tuple | list):
        return type(record)(_zeros(value) for value in record)
    return record * 0
