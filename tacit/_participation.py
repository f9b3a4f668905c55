"""How far one record moves a run of releases that a strategy C mixes over time."""

import math
from functools import lru_cache
from itertools import accumulate


@lru_cache(maxsize=64)
def participation_norm(
    column: tuple[float, ...], steps: int, separation: int, participations: int
) -> float:
    """Return the largest norm of what one record adds to C g, for contributions of norm 1.

    C is `steps` by `steps`, lower triangular, with `column` from the diagonal down. The record adds
    to at most `participations` of the sums g, any two at least `separation` steps apart.

    Contributions to columns that do not overlap are orthogonal, so the earliest columns, which are
    cut the least, are the worst case. If columns overlap, the worst case is participations exactly
    `separation` apart from the first step on, provided that the column is non-negative and does not
    increase (Kalinin & Lampert 2024, arXiv:2405.13763, Theorem 2); any other column is replaced by
    the non-increasing envelope of its absolute values, which bounds the result from above.

    >>> participation_norm((3.0, 4.0), 10, 2, 4)
    10.0
    >>> participation_norm((3.0, 4.0), 10, 1, 2)  # the envelope is (4, 4): 4, 8, 4
    9.797958971132712
    """
    envelope = [abs(c) for c in column[:steps]]
    if len(envelope) > separation:
        envelope = list(accumulate(reversed(envelope), max))[::-1]
    total = [0.0] * steps
    for start in range(0, min(steps, separation * participations), separation):
        for i, c in enumerate(envelope[: steps - start], start):
            total[i] += c
    return math.sqrt(math.fsum(c * c for c in total))
