"""The exponential mechanism and permute-and-flip: private choice of an option with a large score.

Every private selection here and in `noisy_max` adds noise to each score of a fixed list of options
and releases only the index of the largest. The noise decides what the release costs.

| mechanism | noise | event | note |
|---|---|---|---|
| `ExponentialMechanism` | Gumbel | `Exponential` | bounded range: cheapest to compose |
| `PermuteAndFlip` | exponential | `PureDP` | never a worse choice than the exponential mechanism |
| `LaplaceNoisyMax` | Laplace | `PureDP` | report noisy max; PATE's LNMax |
| `GaussianNoisyMax` | normal | `Gaussian` | prices the L2 change of all scores; PATE's GNMax |
"""

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Floats
from tacit._check import boolean, positive
from tacit.events import Exponential, PureDP
from tacit.mechanisms.gaussian import real_array
from tacit.mechanisms.rng import Rng, Seed, generator


@dataclass(frozen=True)
class PureSelection:
    """Base class of the selections that are `epsilon`-DP; subclasses choose the noise.

    `sensitivity` is the most that one added or removed record changes any single score. With
    `monotonic`, such a record moves all scores in one direction, as it does for counts; this halves
    the noise. Ties go to the lower index.

    Proof for exponential and Laplace noise. Fix the noise of all options except i. Option i wins
    when its noise exceeds t = (largest other noisy score) - (score of i). A record moves t by at
    most 2 * sensitivity, or by `sensitivity` if all scores move in one direction. The probability
    that noise of scale b exceeds t changes by a factor of at most e^(s/b) when t moves by s. This
    gives epsilon for b = 2 * sensitivity / epsilon, or sensitivity / epsilon if monotonic.
    """

    epsilon: float
    _: KW_ONLY
    sensitivity: float
    monotonic: bool = False
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon)
        positive(sensitivity=self.sensitivity)
        boolean(monotonic=self.monotonic)
        _ = self.event  # checks replace_factor
        positive(noise_scale=self.noise_scale, advice="Rescale the scores.")

    @property
    def noise_scale(self) -> float:
        """Scale of the noise on each score."""
        return (1 if self.monotonic else 2) * self.sensitivity / self.epsilon

    @property
    def event(self) -> PureDP | Exponential:
        """Event of one release, for the accountant."""
        return PureDP(self.epsilon, self.replace_factor)

    def release(self, scores: ArrayLike, rng: Seed = None) -> int:
        """Return the index of the chosen option; charge `event` to the privacy budget first."""
        exact = centered_scores(scores)
        return int(np.argmax(exact + self._noise(generator(rng), exact.shape)))

    def _noise(self, rng: Rng, shape: tuple[int, ...]) -> Floats:
        raise NotImplementedError


@dataclass(frozen=True)
class ExponentialMechanism(PureSelection):
    """Private choice of an index with probability proportional to exp(score / noise_scale).

    Guarantee: epsilon-DP and epsilon-bounded range. The log probability of an index changes by
    (its score change) / noise_scale plus a constant common to all indices. The score changes of one
    record span at most 2 * sensitivity, or `sensitivity` if monotonic, so the changes of the log
    probabilities span at most epsilon (McSherry & Talwar 2007; Durfee & Rogers 2019, Lemma 4.2).
    The index is drawn as the largest score plus Gumbel noise: the same law, without overflow.

    >>> pick = ExponentialMechanism(1.0, sensitivity=1.0, monotonic=True)
    >>> pick.release([0.0, 100.0, 3.0], rng=0)
    1
    """

    @property
    def event(self) -> Exponential:
        """Event of one release, for the accountant."""
        return Exponential(self.epsilon, self.replace_factor)

    def _noise(self, rng: Rng, shape: tuple[int, ...]) -> Floats:
        return rng.gumbel(0.0, self.noise_scale, shape)


@dataclass(frozen=True)
class PermuteAndFlip(PureSelection):
    """Private choice of the index of the largest score plus exponential noise.

    Guarantee: epsilon-DP (proof in `PureSelection`). It has the law of permute-and-flip (McKenna &
    Sheldon 2020, arXiv:2010.12603; Ding et al. 2021, arXiv:2105.07260, prove the equality). Its
    expected score is never below that of the exponential mechanism, but its range is not bounded,
    so many releases cost more in composition.
    """

    def _noise(self, rng: Rng, shape: tuple[int, ...]) -> Floats:
        return rng.exponential(self.noise_scale, shape)


def centered_scores(scores: ArrayLike) -> Floats:
    """Return the private `scores` as a vector, minus their maximum; raise if there are none.

    Subtracting the same number from all scores does not change the choice. It makes the scores
    small, so that adding noise to them loses less of the noise to rounding.
    """
    array = real_array(scores, ndim=1)
    if not array.size:
        raise ValueError("scores must hold at least one option, got none.")
    with np.errstate(over="ignore"):
        return np.maximum(array - array.max(), -np.finfo(np.float64).max)
