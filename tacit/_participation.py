"""How far one record moves a run of releases that a strategy C mixes over time.

This decides the price of `tacit.events.BandedGaussian`. If records take turns at a rate, the
columns of C in which one record can take part do not overlap, so each turn is one Gaussian release
on a sample, and a turn that has begun counts in full (Choquette-Choo et al. 2023,
arXiv:2306.08153). Without sampling, the whole run is one Gaussian release of C g, even if g is
chosen adaptively (Denisov et al. 2022, arXiv:2202.08312).
"""

import math
from functools import lru_cache
from itertools import accumulate

_MOST_STEPS = 2**20  # of runs whose columns overlap: each step is computed


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
    sizes = [abs(c) for c in column[:steps]]
    if len(sizes) <= separation:
        starts = min(participations, -(-steps // separation))
        whole = min(starts, (steps - len(sizes)) // separation + 1)
        cut = [c * c for start in range(whole, starts) for c in sizes[: steps - start * separation]]
        return math.sqrt(whole * math.fsum(c * c for c in sizes) + math.fsum(cut))
    if steps > _MOST_STEPS:
        raise ValueError(f"steps must be at most {_MOST_STEPS} if columns overlap, got {steps}.")
    envelope = list(accumulate(reversed(sizes), max))[::-1] + [0.0] * (steps - len(sizes))
    sums = envelope  # at step i: of the entries i, i - separation, i - 2 separation, ...
    for i in range(separation, steps):
        sums[i] += sums[i - separation]
    late = separation * participations
    total = (sums[i] - (sums[i - late] if i >= late else 0.0) for i in range(steps))
    return math.sqrt(math.fsum(c * c for c in total))
