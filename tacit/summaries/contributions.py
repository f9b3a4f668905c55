"""Bounds on how many records one person contributes: enforced, and chosen privately on request.

A release that moves by at most 1 for a record moves by at most k for a person with k records, so
`records_per_person=k` multiplies every sensitivity by k (`payment`). `limit_records` makes this
bound true whatever the data is. A small k needs little noise and leaves records out; `choose_bound`
finds a k that few persons exceed.
"""

from typing import Any, Unpack

import numpy as np

from tacit._arrays import Indices
from tacit._check import in_open_unit, whole
from tacit._users import RecordsOfUsers
from tacit.summaries.payment import ReleaseTerms
from tacit.summaries.quantiles import quantiles


def limit_records(users: Any, most: int) -> Indices:  # Any: ids in a sequence or column
    """Return the numbers of the records to keep: at most `most` of each user. Private.

    Which of a user's records are kept is decided by the user's id and number of records alone, at
    random over ids. So a user who is added or removed changes nothing of others.

    >>> kept = limit_records(["ann", "bob", "ann", "ann"], 2)
    >>> len(kept), 1 in kept
    (3, True)
    """
    return RecordsOfUsers.of(users).kept(whole(most=most, least=1))


def choose_bound(
    users: Any,  # Any: ids in a sequence or column
    *,
    share: float = 0.9,
    highest: int = 64,
    **terms: Unpack[ReleaseTerms],
) -> int:
    """Return a bound k such that about a `share` of the users have at most k records.

    It is a noisy quantile of the number of records of a user, between 1 and `highest`. Each user is
    one value, so the price is that of a user; a ledger must count users.

    >>> users = [u for u in range(2000) for _ in range(1 + u % 3)]
    >>> choose_bound(users, epsilon=1.0, rng=0)
    3
    """
    highest = whole(highest=highest, least=2)
    counts = np.minimum(RecordsOfUsers.of(users).counts, highest)
    terms["records_per_person"] = 1  # a user has one number of records
    share = in_open_unit(share=share)
    bounds = (1.0, float(highest))
    found = quantiles(counts.astype(np.float64), [share], bounds=bounds, step=1.0, **terms)
    return int(np.clip(round(found.rows[0].value), 1, highest))
