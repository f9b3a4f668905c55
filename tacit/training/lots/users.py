"""Users as the unit of privacy: a person with many records is one example, or k of them.

Two ways to protect a whole user, whose prices differ:

- *User sampling*: a lot is a Poisson sample of users. The gradients of a user's records (at most k
  of them, chosen anew at random in every lot) are averaged or summed and then clipped once, so that
  a user is to DP-SGD what an example is otherwise (McMahan et al. 2018, arXiv:1710.06963, without
  local steps). Every microbatch and rank, and the traced program, treat the user as the example.
- *Record sampling*: a lot is a Poisson sample of records, each clipped by itself. A user with k
  records is j times in a lot with the binomial probability of j, and is priced as this mixture of
  Gaussians, in both directions (Charles et al. 2024, arXiv:2407.07737). Records of a user beyond k
  are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tacit._check import one_of, whole
from tacit._users import RecordsOfUsers, require_same_index
from tacit.accounting import calibrate, for_group
from tacit.errors import UnsupportedEvent
from tacit.events import Event, Gaussian, PoissonSampled, Relation, Repeated
from tacit.ledger import Ledger
from tacit.training.lots.records import Indices, Records
from tacit.training.noise.key import Key
from tacit.training.tree import Batch, LossFn, check_losses, map_rows, map_tensors, n_rows

_CLEARLY_LESS = 0.6  # noise of record sampling over that of user sampling: see `advise_sampling`
Combine = Literal["mean", "sum", "program"]


@dataclass(frozen=True, kw_only=True)
class Users:
    """Whose records they are, and how a user's records are bounded; `make_private(users=...)`.

    Parameters
    ----------
    ids
        The id of a user for each record, or the name of a column if the data set is a table; the
        column is then left out of the records.
    records_per_user
        k: most records of one user in a lot (user sampling) or in the data set (record sampling).
        More records are left out, chosen at random.
    sampled
        "users" or "records": what the Poisson sample of a lot takes independently. `batch_size`,
        `n_records` and `epochs` of `make_private` count the same.
    combine
        Whether the gradients of a user's records are averaged ("mean") or added ("sum") before
        they are clipped; for user sampling. "program": `loss_fn` gives one loss for each user. Its
        batch is then a pair of the records, tensors of shape (users, slots, ...), and a mask of
        shape (users, slots) of the slots that count; other slots repeat records of the same user.
    """

    ids: Any  # Any: a sequence or a column of any library
    records_per_user: int = 8
    sampled: Literal["users", "records"] = "users"
    combine: Combine = "mean"

    def __post_init__(self) -> None:
        whole(records_per_user=self.records_per_user, least=1)
        one_of(("users", "records"), sampled=self.sampled)
        one_of(("mean", "sum", "program"), combine=self.combine)

    def __repr__(self) -> str:
        return (
            f"Users(records_per_user={self.records_per_user}, sampled={self.sampled!r}, "
            f"combine={self.combine!r})"
        )


class Unit(NamedTuple):
    """What an example stands for: a record, or a user.

    `users` is None if the unit of privacy is a record.
    """

    users: Users | None = None

    @property
    def records_per_user(self) -> int:
        """Most examples of one unit, each clipped by itself: k for record sampling, else 1."""
        if self.users is None or self.users.sampled == "users":
            return 1
        return self.users.records_per_user

    def column(self, dataset: Any) -> tuple[Any, Any]:  # Any: a data set; ids
        """Return the data set without the column of ids, and the ids."""
        ids = None if self.users is None else self.users.ids
        if not isinstance(ids, str):
            require_same_index(dataset, ids)
            return dataset, ids
        if not hasattr(dataset, "columns") or ids not in list(dataset.columns):
            raise ValueError(
                f"users must be a column of the table or a sequence of ids, got {ids!r}, which is "
                "no column of the data set."
            )
        return dataset[[name for name in dataset.columns if name != ids]], dataset[ids]

    def grouped(self, records: Records, ids: Any) -> Records:
        """Return the records as examples of this unit: users, or records of which some are left."""
        if self.users is None:
            return records
        found = RecordsOfUsers.of(ids, len(records))
        most = min(self.users.records_per_user, len(records))
        if int(found.counts.max(initial=1)) == 1 and self.users.combine != "program":
            return records  # a user is a record: nothing to choose and nothing to combine
        if self.users.sampled == "records":
            return KeptRecords(records, found, most)
        return UserRecords(records, found, most, combine=self.users.combine)

    def program(
        self, records: Records, loss_fn: LossFn, augment: Any, views: int
    ) -> tuple[LossFn, Any]:  # Any: a function of batches, or None
        """Return loss and augmentation for batches of these records."""
        if not records.of_users:
            return loss_fn, augment
        assert self.users is not None
        by_user = loss_fn
        if self.users.combine != "program":
            by_user = partial(losses_by_user, loss_fn, self.users.combine)
        return by_user, augment and partial(augment_by_user, augment, views)

    def ledger(self, given: Ledger | None) -> Ledger:
        """Return the ledger of the run; raise if it counts another unit or relation."""
        if given is None:
            return Ledger() if self.users is None else Ledger(unit="user")
        given.require_unit(is_user=self.users is not None)
        if self.records_per_user > 1 and given.relation is Relation.REPLACE_ONE:
            raise UnsupportedEvent(
                "the price of replacing a user with several records is not proved for record "
                "sampling. Use a ledger with relation='add_remove', or Users(sampled='users')."
            )
        return given


def unit_of(users: Any) -> Unit:  # Any: None, Users, ids or the name of a column
    """Return the unit of privacy that the option `users` of `make_private` asks for."""
    return Unit(users if users is None or isinstance(users, Users) else Users(ids=users))


class _OfUsers(Records):
    """Base of records that are chosen by whose they are, out of those of `inner`."""

    def __init__(self, inner: Records, users: RecordsOfUsers, most: int) -> None:
        self._inner, self._users, self._most = inner, users, most
        self.dataset = inner.dataset
        self.device, self.guard = inner.device, inner.guard
        self.is_stored, self.is_plain = inner.is_stored, inner.is_plain
        self.collate_fn = inner.collate_fn

    @property
    def on_device(self) -> None:
        """None: a row of the data set's tensors is not what is drawn here."""

    def digest(self, salt: Key) -> bytes:
        """Return a hash of all records and of whose they are. Private."""
        return self._inner.digest(salt) + self._users.digest() + str(self._most).encode()


class UserRecords(_OfUsers):
    """Users in place of records: example i is user i, with the user's records on the second axis.

    A batch is a pair: the records, each tensor of shape (users, slots, ...), and a mask of shape
    (users, slots) of the slots that count. Others repeat records of the same user. The users of a
    batch have equally many slots: the next power of two, by each user's own number of records.

    A loop of another library sees the records of all slots as rows of one batch, and gives a loss
    for each of them, which are combined here. With `combine` "program" it sees the pair.
    """

    of_users = True

    def __init__(
        self,
        inner: Records,
        users: RecordsOfUsers,
        most: int,
        *,
        combine: Combine = "mean",
    ) -> None:
        super().__init__(inner, users, most)
        self._combine: Combine = combine

    def __len__(self) -> int:
        return len(self._users)

    def fetch_on_host(self, indices: Indices, seed: int = 0) -> Batch:
        """Return users as one batch on the device where their records are stored."""
        return self._batch(indices, seed)

    def blanks(self) -> list[Batch]:
        """Return a batch of one user for every number of slots that a user may have."""
        self._inner.blanks()  # raises if records have different shapes
        most = min(self._most, len(self._inner))
        widths = sorted({min(most, 1 << k) for k in range(most.bit_length() + 1)})
        whole = map_tensors(torch.zeros_like, self.fetch(np.zeros(1, np.int64)))
        wider = map_rows(lambda t: t[:, :1].expand(1, most, *t.shape[2:]), whole)
        return [map_rows(lambda t, n=n: t[:, :n].clone(), wider) for n in widths]

    def in_parts(self, indices: Indices) -> list[Indices]:
        """Split users into parts with equally many slots."""
        if not len(indices):
            return [indices]
        counts = np.minimum(self._users.counts[indices], self._most)
        order = np.argsort(counts, kind="stable")
        widths = 2 ** np.ceil(np.log2(counts[order])).astype(np.int64)
        ends = np.flatnonzero(np.diff(widths)) + 1
        return [np.sort(indices[part]) for part in np.split(order, ends)]

    def in_rows(self, batch: Batch) -> Batch:
        """Return the records of all slots as rows, or the batch itself with `combine` "program"."""
        return batch if self._combine == "program" else _in_rows(batch[0])

    def _batch(self, indices: Indices, seed: int) -> Batch:
        rows, counts = self._users.slots(indices, self._most, seed=seed)
        if self.is_stored:
            batch = self._inner.fetch_on_host(rows.ravel(), seed)
            split = map_rows(lambda tensor: tensor.unflatten(0, rows.shape), batch)
        else:  # the data set reads each record once, however many slots it fills
            once, places = np.unique(rows, return_inverse=True)
            batch = self._inner.fetch_on_host(once, seed)
            split = _at_places(batch, places.reshape(rows.shape))
        return split, torch.from_numpy(counts)


class KeptRecords(_OfUsers):
    """The records of a data set, at most `most` of each user; the others are left out."""

    def __init__(self, inner: Records, users: RecordsOfUsers, most: int) -> None:
        super().__init__(inner, users, most)
        self._kept = users.kept(most)

    def __len__(self) -> int:
        return len(self._kept)

    def fetch_on_host(self, indices: Indices, seed: int = 0) -> Batch:
        """Return records as one batch on the device where they are stored."""
        return self._inner.fetch_on_host(self._kept[indices], seed)


def losses_by_user(loss_fn: LossFn, combine: Combine, model: nn.Module, batch: Batch) -> Tensor:
    """Return one loss for each user of a batch: the mean or sum over the user's records."""
    records, counts = batch
    return _combined(loss_fn(model, _in_rows(records)), counts, combine)


def _in_rows(records: Batch) -> Batch:
    """Return records of shape (users, slots, ...) as rows, one for each slot."""
    return map_rows(lambda tensor: tensor.flatten(0, 1), records)


def _combined(losses: Tensor, counts: Tensor, combine: Combine) -> Tensor:
    """Return the mean or sum of the losses of each user's slots, of those that count."""
    check_losses(losses, counts.numel())
    counts = counts.to(losses)
    total = (losses.view(counts.shape) * counts).sum(1)
    return total if combine == "sum" else total / counts.sum(1).clamp_min(1)


def in_segments(batch: Batch, segments: Tensor, loss_fn: LossFn) -> tuple[Batch, LossFn]:
    """Return a batch of segments and its loss; rows with the same number are one segment."""
    found = RecordsOfUsers.of(segments, n_rows(batch))
    rows, counts = found.slots(np.arange(len(found)), int(found.counts.max(initial=1)))
    mask = torch.from_numpy(counts).to(segments.device)
    return (_at_places(batch, rows), mask), partial(losses_by_user, loss_fn, "mean")


def _at_places(batch: Batch, rows: Indices) -> Batch:
    """Return the rows of a batch whose numbers are in `rows`, in the shape of `rows`."""
    numbers = torch.from_numpy(rows.ravel())

    def taken(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, numbers.to(tensor.device)).unflatten(0, rows.shape)

    return map_rows(taken, batch)


def augment_by_user(augment: Callable[[Batch], Batch], views: int, batch: Batch) -> Batch:
    """Apply `augment` to the views of each record, which come in consecutive rows.

    The rows of `batch` are the views of each user: a user's view has a view of each record.
    """
    records, counts = batch
    users, width = counts.shape[0] // views, counts.shape[1]

    def by_record(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (users, views)).transpose(1, 2).flatten(0, 2)

    def by_user(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (users, width, views)).transpose(1, 2).flatten(0, 1)

    return map_rows(by_user, augment(map_rows(by_record, records))), counts


class SamplingAdvice(NamedTuple):
    """Which sampling is advised, and how much noise each adds to the mean gradient of a step."""

    sampled: Literal["users", "records"]
    noise_by_users: float  # standard deviation in clip norms
    noise_by_records: float


def advise_sampling(
    *,
    n_users: int,
    n_records: int,
    records_per_user: int,
    rate: float,
    steps: int,
    epsilon: float,
    delta: float,
) -> SamplingAdvice:
    """Compare user and record sampling at the same guarantee for a user, from public facts alone.

    The noise on the mean gradient has standard deviation sigma C / (rate n), where n counts what is
    sampled and sigma is the noise multiplier that costs (`epsilon`, `delta`) for a user. User
    sampling needs a smaller sigma and has a smaller n. `n_records` counts at most
    `records_per_user` records of each user. Record sampling is advised only if its noise is below
    0.6 times that of user sampling: the mean of a user's gradients is shorter than each of them, so
    that it is clipped less, and was more accurate at nearly equal noise (benchmarks/users.py).

    >>> advise_sampling(n_users=2500, n_records=10_000, records_per_user=8, rate=0.01, steps=300,
    ...                 epsilon=1.0, delta=1e-5).sampled
    'users'
    """
    whole(n_users=n_users, least=1)
    whole(n_records=n_records, least=n_users)

    def noise(records: int, n: int) -> float:
        def run(sigma: float) -> Event:
            step = PoissonSampled(rate, Gaussian(sigma))
            return Repeated(step if records == 1 else for_group(step, records), steps)

        return calibrate(run, epsilon=epsilon, delta=delta) / (rate * n)

    by_users, by_records = noise(1, n_users), noise(records_per_user, n_records)
    is_clear = by_records < _CLEARLY_LESS * by_users
    return SamplingAdvice("records" if is_clear else "users", by_users, by_records)
