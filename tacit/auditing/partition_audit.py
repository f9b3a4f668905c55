"""Audit of a partition of records among teachers: each record teaches exactly one teacher.

A record that teaches two teachers can move two votes, and the price of PATE covers one. A record's
teacher must not depend on other records either, which is tested by counts: each record has any
teacher with equal chance, and the teachers of neighbors are independent.
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from tacit._arrays import Indices
from tacit._check import whole
from tacit.auditing.p_values import Finding, MechanismAudit, deterministic
from tacit.mechanisms import Seed, generator

Partition = Callable[..., Sequence[Indices]]
"""partition(n_records, n_teachers, rng) -> the records of each teacher."""
_DRAWS = 40


def audit_partition(
    partition: Partition,
    *,
    n_records: int,
    n_teachers: int,
    confidence: float = 0.95,
    rng: Seed = None,
) -> MechanismAudit:
    """Test that a partition gives each record to one teacher, at random and independently."""
    random = generator(rng)
    n, k = whole(n_records=n_records, least=2), whole(n_teachers=n_teachers, least=1)
    drawn = [partition(n, k, random) for _ in range(_DRAWS)]
    once = all(np.array_equal(np.sort(np.concatenate(parts)), np.arange(n)) for parts in drawn)
    findings = [Finding("partition", "a record teaches one teacher", deterministic(once))]
    if once and k > 1:
        teachers = np.array([_teacher_of(parts, n) for parts in drawn])  # (draws, records)
        findings += [
            Finding("partition", "teachers are equally likely", _uniform(teachers.ravel(), k)),
            Finding(
                "partition",
                "neighbors have independent teachers",
                _same(teachers[:, :-1] == teachers[:, 1:], k),
            ),
            Finding(
                "partition",
                "a record's teacher differs from draw to draw",
                _same(teachers[:-1] == teachers[1:], k),
            ),
        ]
    return MechanismAudit(findings=tuple(findings), confidence=confidence)


def _teacher_of(parts: Sequence[Indices], n: int) -> Indices:
    found = np.empty(n, np.int64)
    for number, part in enumerate(parts):
        found[part] = number
    return found


def _uniform(teachers: Indices, k: int) -> float:
    # Too even is not a fault: some partitions have parts of equal size.
    return float(stats.chisquare(np.bincount(teachers, minlength=k)).pvalue)


def _same(is_same: np.ndarray, k: int) -> float:
    """Return the chance of so many pairs with the same teacher if teachers are independent."""
    return float(stats.binom.sf(int(is_same.sum()) - 1, is_same.size, 1 / k))
