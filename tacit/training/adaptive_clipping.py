"""Adaptive clipping: clip norms that follow a quantile of the gradient norms, found privately.

Andrew, Thakkar, McMahan & Ramaswamy 2021, "Differentially private learning with adaptive clipping"
(arXiv:1905.03871), Algorithm 1. Each step also releases, with noise, how many examples were within
the clip norm, and moves the norm geometrically towards the wanted quantile. The count is taken on
the same sample as the gradient and billed with it:
PoissonSampled(rate, Sequence((gradient, count))).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tacit._check import in_open_unit, positive
from tacit.events import Gaussian
from tacit.training.noise import NoisyMean

_REACH = 1e6  # the norm stays within this factor of its first value, whatever the noise does


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """Moves each clip norm so that a share `quantile` of examples is within it.

    Parameters
    ----------
    quantile
        Share of examples whose gradient should not be shortened.
    learning_rate
        Largest relative move a step, eta in the paper.
    count_noise_std
        Noise on the count, sigma_b in the paper. None is a twentieth of the expected batch, as in
        the paper: it costs little, and the count needs no more precision.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_std: float | None = None

    def __post_init__(self) -> None:
        in_open_unit(quantile=self.quantile)
        positive(learning_rate=self.learning_rate)
        if self.count_noise_std is not None:
            positive(count_noise_std=self.count_noise_std)

    def noise_std(self, expected_batch: float) -> float:
        """Return the standard deviation of the noise on each group's count."""
        return self.count_noise_std or expected_batch / 20

    def event(self, expected_batch: float, groups: int) -> Gaussian:
        """Return the event of releasing the counts of one step."""
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
        """Return the next factor on each clip norm, from noisy counts that the caller has paid for.

        The divisor is the declared batch, never the drawn size, which is private and may be zero.
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
    """Return the L2 change of the centered counts when one example is added or removed.

    The example adds 1 or 0 to `within` and 1/2 to `drawn / 2`, so +-1/2 to each centered count.
    """
    return 0.5 * math.sqrt(groups)
