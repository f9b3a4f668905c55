"""GNMax: the class with the most votes after Gaussian noise, with or without a check first.

Papernot et al. 2018 (arXiv:1802.08908, "2018"). `tacit.pate.votes` states the sensitivity of votes
and how answers are paid for.
"""

import math
from dataclasses import dataclass

import numpy as np

from tacit._arrays import Indices
from tacit._check import positive
from tacit.mechanisms import GaussianMechanism, Rng
from tacit.pate.votes import NO_ANSWER, Aggregator, Pay


@dataclass(frozen=True)
class GNMax(Aggregator):
    """Aggregator that releases the class with the most votes after adding Gaussian noise.

    `sigma` is the standard deviation of the noise on each vote count (Papernot et al. 2018,
    Sec. 4.1). Guarantee: a Gaussian mechanism, as one record changes counts by sqrt(2) in L2 norm.

    >>> str(GNMax(40.0).event(100))
    '100 x [Gaussian noise, multiplier 28.2843]'
    """

    sigma: float

    def __post_init__(self) -> None:
        positive(sigma=self.sigma)

    @property
    def _mechanism(self) -> GaussianMechanism:
        # One class loses a vote and one gains it: the L2 change is <= sqrt(2), also if replaced.
        return GaussianMechanism(
            self.sigma / math.sqrt(2), l2_sensitivity=math.sqrt(2), replace_factor=1.0
        )


@dataclass(frozen=True, kw_only=True)
class ConfidentGNMax(Aggregator):
    """GNMax that answers only where a noisy check finds a clear winner (arXiv:1802.08908, Alg. 1).

    Every query pays for the check "highest count + N(0, sigma_threshold^2) >= threshold", whose
    outcome is released. Queries that pass the check also pay for GNMax at `sigma_answer`.

    Guarantee: the highest count changes by at most 1, so a check is Gaussian with multiplier
    `sigma_threshold`; an answer is Gaussian with multiplier `sigma_answer` / sqrt(2).
    """

    threshold: float
    sigma_threshold: float
    sigma_answer: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold must be finite, got {self.threshold}.")
        positive(sigma_threshold=self.sigma_threshold)
        positive(sigma_answer=self.sigma_answer)

    @property
    def _mechanism(self) -> GaussianMechanism:
        return GNMax(self.sigma_answer)._mechanism

    @property
    def _check(self) -> GaussianMechanism:
        # The highest count changes by <= 1 when one vote moves.
        return GaussianMechanism(self.sigma_threshold, l2_sensitivity=1.0, replace_factor=1.0)

    def _release(self, counts: Indices, pay: Pay, random: Rng) -> Indices:
        labels = np.full(len(counts), NO_ANSWER, dtype=np.int64)
        pay(self._check.event, len(counts))
        highest = counts.max(axis=1).astype(float)
        is_clear = self._check.release(highest, random) >= self.threshold
        if is_clear.any():
            labels[is_clear] = super()._release(counts[is_clear], pay, random)
        return labels
