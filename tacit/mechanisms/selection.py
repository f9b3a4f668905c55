"""Private selection: the index of a large score among a fixed list of options.

All four add noise to every score and release only which is largest; they differ in the noise, and
so in what the release costs.

| mechanism | noise | event | note |
|---|---|---|---|
| `ExponentialMechanism` | Gumbel | `Exponential` | bounded range: cheapest to compose |
| `PermuteAndFlip` | exponential | `PureDP` | never a worse choice than the exponential mechanism |
| `LaplaceNoisyMax` | Laplace | `PureDP` | report noisy max; PATE's LNMax |
| `GaussianNoisyMax` | normal | `Gaussian` | prices the whole vector's L2 change; PATE's GNMax |

For the first three, `sensitivity` is the most that one added or removed record changes any single
score. `monotonic` says that such a record moves all scores in one direction (as counts do), which
halves the noise. Ties go to the lower index.

Why the pure ones hold. Fix the noise of all options but i; i wins when its noise exceeds
t = (largest other noisy score) - (score i). A record moves t by at most 2 * sensitivity, or by
`sensitivity` if all scores move one way. The survival function of exponential and of Laplace noise
of scale b falls by at most a factor e^(s/b) over a distance s, hence epsilon with
b = 2 * sensitivity / epsilon (monotonic: sensitivity / epsilon).
"""

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import ArrayLike

from tacit._check import positive
from tacit.events import Exponential, Gaussian, PureDP
from tacit.mechanisms._vector import centered_scores
from tacit.mechanisms.gaussian import GaussianMechanism
from tacit.mechanisms.rng import Seed, generator


@dataclass(frozen=True)
class _PureSelection:
    """Settings shared by the selections whose noise is stated by their epsilon."""

    epsilon: float
    _: KW_ONLY
    sensitivity: float
    monotonic: bool = False
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon)
        positive(sensitivity=self.sensitivity)
        if not isinstance(self.monotonic, bool):
            raise TypeError(f"monotonic must be a bool, got {type(self.monotonic).__name__}.")
        PureDP(self.epsilon, self.replace_factor)  # checks replace_factor
        positive(noise_scale=self.noise_scale, advice="Rescale the scores.")

    @property
    def noise_scale(self) -> float:
        """Scale of the noise on each score."""
        return (1 if self.monotonic else 2) * self.sensitivity / self.epsilon


@dataclass(frozen=True)
class ExponentialMechanism(_PureSelection):
    """Index drawn with probability proportional to exp(score / noise_scale).

    Guarantee: epsilon-DP and epsilon-bounded range. The log probability of an index changes by
    (its score change) / noise_scale plus a constant common to all, and the score changes of one
    record span at most 2 * sensitivity, or `sensitivity` if monotonic: a range of at most epsilon
    (McSherry & Talwar 2007; Durfee & Rogers 2019, Lemma 4.2). Drawn as the largest of scores plus
    Gumbel noise, which is the same law and cannot overflow.

    >>> pick = ExponentialMechanism(1.0, sensitivity=1.0, monotonic=True)
    >>> pick.release([0.0, 100.0, 3.0], rng=0)
    1
    """

    @property
    def event(self) -> Exponential:
        """What one release does to the private data."""
        return Exponential(self.epsilon, self.replace_factor)

    def release(self, scores: ArrayLike, rng: Seed = None) -> int:
        """Index of the option chosen; pay for `event` first."""
        exact = centered_scores(scores)
        return int(np.argmax(exact + generator(rng).gumbel(0.0, self.noise_scale, exact.shape)))


@dataclass(frozen=True)
class PermuteAndFlip(_PureSelection):
    """Index of the largest score plus exponential noise.

    Guarantee: epsilon-DP (proof at the top of the file). Same law as permute-and-flip (McKenna &
    Sheldon 2020, arXiv:2010.12603; the equality is Ding et al. 2021, arXiv:2105.07260), whose
    expected score is never below the exponential mechanism's; without bounded range, though, so
    many of them cost more to compose.
    """

    @property
    def event(self) -> PureDP:
        """What one release does to the private data."""
        return PureDP(self.epsilon, self.replace_factor)

    def release(self, scores: ArrayLike, rng: Seed = None) -> int:
        """Index of the option chosen; pay for `event` first."""
        exact = centered_scores(scores)
        return int(np.argmax(exact + generator(rng).exponential(self.noise_scale, exact.shape)))


@dataclass(frozen=True)
class LaplaceNoisyMax(_PureSelection):
    """Index of the largest score plus Laplace noise (report noisy max).

    Guarantee: epsilon-DP (proof at the top of the file; Dwork & Roth 2014, Claim 3.9).
    """

    @property
    def event(self) -> PureDP:
        """What one release does to the private data."""
        return PureDP(self.epsilon, self.replace_factor)

    def release(self, scores: ArrayLike, rng: Seed = None) -> int:
        """Index of the option chosen; pay for `event` first."""
        exact = centered_scores(scores)
        return int(np.argmax(exact + generator(rng).laplace(0.0, self.noise_scale, exact.shape)))


@dataclass(frozen=True)
class GaussianNoisyMax:
    """Index of the largest score plus normal noise.

    Guarantee: post-processing of `GaussianMechanism` on the whole vector of scores, so
    `l2_sensitivity` bounds the L2 change of the vector: sqrt(2) for votes when one voter may switch
    (Papernot et al. 2018, arXiv:1802.08908, Proposition 8).

    >>> GaussianNoisyMax(40 / 2**0.5, l2_sensitivity=2**0.5, replace_factor=1.0).release([9e3, 0.0])
    0
    """

    noise_multiplier: float
    _: KW_ONLY
    l2_sensitivity: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        _ = self._mechanism  # checks all three

    @property
    def _mechanism(self) -> GaussianMechanism:
        return GaussianMechanism(
            self.noise_multiplier,
            l2_sensitivity=self.l2_sensitivity,
            replace_factor=self.replace_factor,
        )

    @property
    def event(self) -> Gaussian:
        """What one release does to the private data."""
        return self._mechanism.event

    def release(self, scores: ArrayLike, rng: Seed = None) -> int:
        """Index of the option chosen; pay for `event` first."""
        return int(np.argmax(self._mechanism.release(centered_scores(scores), rng)))
