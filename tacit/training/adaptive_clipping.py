"""Adaptive clipping: clip norms that follow a quantile of the gradient norms, found privately.

Andrew, Thakkar, McMahan & Ramaswamy 2021, "Differentially private learning with adaptive clipping"
(arXiv:1905.03871), Algorithm 1. Each step also releases, with noise, how many examples were within
the clip norm, and moves the norm geometrically towards the wanted quantile. The count is taken on
the same sample as the gradient and billed with it:
PoissonSampled(rate, Sequence((gradient, count))).
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from tacit._check import in_open_unit, positive
from tacit.events import Gaussian
from tacit.training.clip import Clip
from tacit.training.noise import NoisyMean

_REACH = 1e6  # the norm stays within this factor of its first value, whatever the noise does


@dataclass(frozen=True)
class AdaptiveClip:
    """Clip norms that follow a private quantile: `make_private(..., clip_norm=AdaptiveClip(1.0))`.

    Each norm is adjusted until a fraction `quantile` of the gradient norms is below it.

    Parameters
    ----------
    start
        The clip norms of the first step: a number or a clip rule.
    quantile
        Fraction of examples whose gradient should be short enough not to be clipped.
    learning_rate
        Largest relative change of a clip norm in one step, eta in the paper.
    count_noise_std
        Standard deviation of the noise on the count of examples within the clip norm, sigma_b in
        the paper. None means a twentieth of the expected batch, as in the paper: this costs little.
    """

    start: float | Clip
    _: KW_ONLY
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_std: float | None = None

    def __post_init__(self) -> None:
        in_open_unit(quantile=self.quantile)
        positive(learning_rate=self.learning_rate)
        if self.count_noise_std is not None:
            positive(count_noise_std=self.count_noise_std)

    def noise_std(self, expected_batch: float) -> float:
        """Return the noise's standard deviation on each group's count of unclipped examples."""
        return self.count_noise_std or expected_batch / 20

    def event(self, expected_batch: float, groups: int) -> Gaussian:
        """Return the event of releasing one step's noisy counts, one for each clip group."""
        return Gaussian(self.noise_std(expected_batch) / count_sensitivity(groups))

    def release(
        self,
        factors: Sequence[float],
        within: Sequence[float],
        drawn: float,
        *,
        noise: NoisyMean,
        step: int,
        expected_batch: float,
    ) -> tuple[float, ...]:
        """Return the factors that multiply the initial clip norms in the next step, one per group.

        `within` counts the examples of the lot below each clip norm and `drawn` counts all of its
        examples. The caller has paid for releasing noisy counts. Counts are divided by the declared
        `expected_batch`, never by `drawn`, which is private and may be zero.
        """
        noisy = noise.release_counts(
            [count - drawn / 2 for count in within],
            step=step,
            noise_multiplier=self.event(expected_batch, len(within)).noise_multiplier,
            sensitivity=count_sensitivity(len(within)),
        )
        return tuple(
            min(_REACH, max(1 / _REACH, factor * self._move(count / expected_batch + 0.5)))
            for factor, count in zip(factors, noisy, strict=True)
        )

    def _move(self, share: float) -> float:
        within_reach = min(1.0, max(0.0, share))
        return math.exp(-self.learning_rate * (within_reach - self.quantile))


def count_sensitivity(groups: int) -> float:
    """Return the largest L2 change of the centered counts when one example is added or removed.

    A centered count is within - drawn / 2: the examples of the lot below the clip norm, less half
    of all its examples. One example changes it by +1/2 or -1/2 in each group.
    """
    return 0.5 * math.sqrt(groups)
