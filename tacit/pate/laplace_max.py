"""Laplace noisy max: the class with the most votes after Laplace noise on every count."""

from dataclasses import dataclass

from tacit._check import positive
from tacit.mechanisms import LaplaceMechanism
from tacit.pate.votes import Aggregator


@dataclass(frozen=True)
class LaplaceMax(Aggregator):
    """Aggregator that releases the class with the most votes after adding Laplace noise of `scale`.

    This is LNMax of Papernot et al. 2017. Guarantee: one answer is epsilon-DP with epsilon
    2 / `scale`. One record changes the counts by 2 in L1 norm, so adding the noise is a Laplace
    mechanism with this epsilon, and the winner is computed from the noisy counts alone.

    >>> LaplaceMax(20.0).answer([[250, 0], [3, 247]], rng=0)
    array([0, 1])
    """

    scale: float

    def __post_init__(self) -> None:
        positive(scale=self.scale)

    @property
    def _mechanism(self) -> LaplaceMechanism:
        # One class loses a vote and one gains it: the L1 change is <= 2, also under replacement.
        return LaplaceMechanism(self.scale / 2, l1_sensitivity=2.0, replace_factor=1.0)
