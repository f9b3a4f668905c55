"""Which records belong to which user (person), and at most k of them, chosen at random.

Everything here treats one user at a time: what is chosen of one user's records depends on that
user's id and number of records alone. So a user who is added or removed changes nothing of others.
"""

import hashlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any
from uuid import UUID

import numpy as np

from tacit._arrays import Flags, Indices

_MISSING = (
    "users has a missing id (None, NaN or empty text). Leave such records out, or give each record "
    "an id: a missing one could be anybody's."
)


@dataclass(frozen=True, repr=False)
class RecordsOfUsers:
    """The records of every user, by number. Private.

    User u has the records `order[starts[u] : starts[u] + counts[u]]`, in the order of the data.

    >>> users = RecordsOfUsers.of(["ann", "bob", "ann"], 3)
    >>> len(users), users.counts.tolist(), users.records(0).tolist()
    (2, [2, 1], [0, 2])
    """

    order: Indices
    starts: Indices
    counts: Indices
    hashes: Indices  # of the ids
    user_of_record: Indices

    @classmethod
    def of(cls, ids: Any, n_records: int | None = None) -> "RecordsOfUsers":  # Any: ids or a column
        """Sort records by their user's id; raise unless `ids` has one id for each record.

        An id is missing if it is None, NaN, another value that does not equal itself, or empty
        text. Missing ids are refused: each of them could be anybody.
        """
        given = _plain_ids(ids)
        if n_records is not None and len(given) != n_records:
            raise ValueError(
                "users must hold one id for each record, but its length is not the number of "
                "records."
            )
        names = [_bytes_of(one) for one in given]
        numbers: dict[bytes, int] = {}
        user = np.fromiter((numbers.setdefault(n, len(numbers)) for n in names), np.int64)
        counts = np.bincount(user, minlength=len(numbers)).astype(np.int64)
        hashes = np.array([_hash(name) for name in numbers], np.int64)
        starts = np.cumsum(counts) - counts
        return cls(np.argsort(user, kind="stable"), starts, counts, hashes, user)

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return "RecordsOfUsers(private)"

    def records(self, user: int) -> Indices:
        """Return the numbers of one user's records. Private."""
        start = int(self.starts[user])
        return self.order[start : start + int(self.counts[user])]

    def slots(self, users: Indices, most: int, *, seed: int = 0) -> tuple[Indices, Flags]:
        """Return records in equally many slots for each of `users`, and which slots count. Private.

        A user with more than `most` records has `most` of them, chosen at random by `seed` and the
        user's own id. Slots beyond a user's records repeat records of the same user and do not
        count. There are as many as the least power of two that holds everyone, at most `most`.
        """
        counts = np.minimum(self.counts[users], most)
        width = min(most, 1 << int(counts.max(initial=1) - 1).bit_length())
        slot = np.arange(width)
        rows = self.starts[users][:, None] + slot % counts[:, None]
        for i in np.flatnonzero(self.counts[users] > most):
            user = users[i]
            rng = np.random.default_rng([seed, int(self.hashes[user])])
            chosen = rng.choice(int(self.counts[user]), most, replace=False)
            rows[i] = self.starts[user] + np.sort(chosen)
        return self.order[rows], slot < counts[:, None]

    def kept(self, most: int) -> Indices:
        """Return all records, but of each user at most `most`, in the order of the data. Private.

        Which ones is decided by the user's id and number of records, at random over ids.
        """
        rows, counts = self.slots(np.arange(len(self)), most)
        return np.sort(rows[counts])

    def digest(self) -> bytes:
        """Return a hash of which record belongs to whom. Private."""
        return hashlib.sha256(self.user_of_record.tobytes() + self.hashes.tobytes()).digest()


def require_same_index(table: Any, ids: Any) -> None:  # Any: a table of any library; ids
    """Raise `ValueError` if a table and a column of ids of pandas name their rows differently."""
    own: Any = getattr(table, "index", None)
    other: Any = getattr(ids, "index", None)
    if hasattr(own, "equals") and hasattr(other, "equals") and not own.equals(other):
        raise ValueError(
            "users has another index than the table, so its ids are not those of the rows. Give "
            "the ids in the order of the rows, with the same index."
        )


def _plain_ids(ids: Any) -> list[Any]:
    if isinstance(ids, str | bytes | Mapping | Set) or not hasattr(ids, "__len__"):
        raise TypeError("users must be a sequence with the id of a user for each record, in order.")
    array = ids.detach().cpu().numpy() if hasattr(ids, "detach") else ids
    if getattr(array, "ndim", 1) != 1:
        raise ValueError("users must have one axis: the id of a user for each record.")
    found = array.tolist() if hasattr(array, "tolist") else list(array)
    found = [one.item() if isinstance(one, np.generic) else one for one in found]
    if any(map(_is_missing, found)):
        raise ValueError(_MISSING)
    kinds = {float if isinstance(one, bool | int | float) else type(one) for one in found}
    if len(kinds) > 1:
        raise TypeError("users must be ids of one type: is the text '1' the person 1, or another?")
    return found


def _is_missing(one: Any) -> bool:
    try:
        return one is None or one in ("", b"") or not bool(one == one)
    except (TypeError, ValueError):  # pandas.NA is neither equal nor different
        return True


def _bytes_of(one: Any) -> bytes:
    """Return the bytes by which ids are compared: of the text, of the number, or of the tuple."""
    if _is_missing(one):  # a part of a tuple
        raise ValueError(_MISSING)
    if isinstance(one, bool | int | float):
        whole = int(one) if one == one // 1 and abs(one) != float("inf") else one
        return repr(whole).encode()
    if isinstance(one, str):
        return one.encode("utf-8", "surrogatepass")
    if isinstance(one, bytes):
        return one
    if isinstance(one, tuple):
        return repr([_bytes_of(part) for part in one]).encode()
    if isinstance(one, UUID | date | datetime):
        return str(one).encode()
    raise TypeError(
        f"users must be texts, whole numbers, dates or tuples of them, got {type(one).__name__}."
    )


def _hash(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=7).digest())
