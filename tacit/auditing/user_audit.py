"""Audit with user canaries: what all records of one user change, and which users take part.

The data sets compared here differ in one user, whose records are copies of one record: they push in
one direction, so that clipping each of them alone, a user in two slots of one lot, or more records
than the price covers move a release by more than a user is billed for. The records of different
users alternate: ids that are out of line with their records change the sums of others too. Some
users have different records, more than the bound: which of them are used must not depend on others.
"""

from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Floats, Indices
from tacit._users import RecordsOfUsers
from tacit.auditing.canaries import stored_tensors
from tacit.auditing.draws import random_places
from tacit.mechanisms import Rng

_ALIKE = 8  # users with one record each, beside one who has many


class UserNeighbors(NamedTuple):
    """Two data sets, one of which has a user more, each with the option `users` for it."""

    with_user: tuple[Any, Any]
    without: tuple[Any, Any]
    size: int  # of the first, in what is sampled


def user_sets(dataset: Any, users: Any) -> Iterator[UserNeighbors]:
    """Yield data sets of a few users, each beside the same without one of the users."""
    most = getattr(users, "records_per_user", 8)
    tensors = stored_tensors(dataset)
    n = len(dataset) if tensors is None else len(tensors[0])
    varied = [2 * most + 1] * 2
    counts = [1, 2, most, 2 * most + 1, 3, *varied]
    turn, owner = _alternating(counts)
    records = np.linspace(0, n - 1, len(counts)).astype(int)
    rows = (records[owner] + turn * (owner >= len(counts) - len(varied))) % n
    for left_out in range(len(counts)):
        yield _neighbors(dataset, tensors, users, rows, owner, left_out)
    _, owner = _alternating([*[1] * _ALIKE, most])  # what others add must not depend on the widest
    yield _neighbors(dataset, tensors, users, np.zeros_like(owner), owner, _ALIKE)


def _alternating(counts: list[int]) -> tuple[Indices, Indices]:
    """Return for each record its number among those of its user, and the user; users alternate."""
    places = [(turn, u) for turn in range(max(counts)) for u, c in enumerate(counts) if turn < c]
    turn, owner = np.array(places).T
    return turn, owner


def _neighbors(
    dataset: Any, tensors: Any, users: Any, rows: Indices, owner: Indices, left_out: int
) -> UserNeighbors:
    kept = owner != left_out
    pair = [
        (_taken(dataset, tensors, rows[some]), _with_ids(users, owner[some]))
        for some in (np.ones_like(kept), kept)
    ]
    is_by_records = getattr(users, "sampled", "users") == "records"
    return UserNeighbors(pair[0], pair[1], len(owner) if is_by_records else int(owner.max()) + 1)


def numbers_of_canaries(
    users: Any, n_records: int, most: int, random: Rng
) -> tuple[Indices, Indices]:
    """Return the number of a canary for each record, 0 for none, and the places of the canaries.

    All records of a user have the number of one canary, if users are sampled. If records of users
    are sampled, a canary is one record, of a user of whom no record is left out.
    """
    numbers = np.zeros(n_records, np.int64)
    found = None if users is None else RecordsOfUsers.of(getattr(users, "ids", users), n_records)
    if found is None or getattr(users, "sampled", "users") == "records":
        whole = np.arange(n_records)
        if found is not None:
            whole = np.flatnonzero(found.counts[found.user_of_record] <= users.records_per_user)
        places = whole[random_places(len(whole), most, random)]
        numbers[places] = np.arange(1, len(places) + 1)
        return numbers, places
    places = random_places(len(found), most, random)
    number_of_user = np.zeros(len(found), np.int64)
    number_of_user[places] = np.arange(1, len(places) + 1)
    return number_of_user[found.user_of_record], places


def scores_by_user(scores: ArrayLike, users: Any) -> tuple[Floats, list[int]]:
    """Return the mean score of each user's records, and a record of each user, in that order.

    A membership attack on users compares the users' scores: whether a user was a member is known
    from any record. Pass both to `lira`, `one_run` or another attack in place of those of records.

    >>> scores_by_user([1.0, 5.0, 3.0], ["ann", "bob", "ann"])[0].tolist()
    [2.0, 5.0]
    """
    values = np.asarray(scores, np.float64)
    found = RecordsOfUsers.of(users, len(values))
    total = np.bincount(found.user_of_record, values, minlength=len(found))
    return total / found.counts, found.order[found.starts].tolist()


def _with_ids(users: Any, owner: Indices) -> Any:
    """Return the option `users` with the ids of these records; texts, as ids often are."""
    ids = [f"user {number}" for number in owner]
    return replace(users, ids=ids) if is_dataclass(users) else ids  # type: ignore[type-var]


def _taken(dataset: Any, tensors: Any, rows: Indices) -> Any:
    if tensors is None:
        return [dataset[int(row)] for row in rows]
    few = tuple(tensor[rows].clone() for tensor in tensors)
    is_one = not isinstance(dataset, tuple | list) and hasattr(dataset, "shape")
    return few[0] if is_one and len(few) == 1 else few
