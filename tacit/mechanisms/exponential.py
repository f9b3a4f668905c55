"""The exponential mechanism and permute-and-flip: private choice of an option with a large score.

Every private selection here and in `noisy_max` adds noise to each score of a fixed list of options
and releases only the index of the largest. The noise decides what the release costs. Scores plus
noise are compared as real numbers (`noise_laws.largest_noisy_score`), so the probabilities are
exactly those of the proofs, whatever the rounding of floats; `GaussianNoisyMax` compares scores and
noise on a grid, as post-processing of `GaussianMechanism`.

| mechanism | noise | event | note |
|---|---|---|---|
| `ExponentialMechanism` | Gumbel | `Exponential` | bounded range: cheapest to compose |
| `PermuteAndFlip` | exponential | `PureDP` | never a worse choice than the exponential mechanism |
| `LaplaceNoisyMax` | Laplace | `PureDP` | report noisy max; PATE's LNMax |
| `GaussianNoisyMax` | normal | `Gaussian` | prices the L2 change of all scores; PATE's GNMax |
"""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from numpy.typing import ArrayLike

from tacit._arrays import Floats
from tacit._check import boolean, positive
from tacit.events import Exponential, PureDP
from tacit.mechanisms.grid import check_reach, real_array
from tacit.mechanisms.noise_laws import EXPONENTIAL, GUMBEL, NoiseLaw, largest_noisy_score
from tacit.mechanisms.rng import Seed, generator


@dataclass(frozen=True)
class PureSelection:
    """Base class of the selections that are `epsilon`-DP; subclasses choose the noise.

    `sensitivity` is the most that one added or removed record changes any single score. With
    `monotonic`, such a record moves all scores in one direction, as it does for counts; this halves
    the noise.

    Proof for exponential and Laplace noise. Fix the noise of all options except i. Option i wins
    when its noise exceeds t = (largest other noisy score) - (score of i). A record moves t by at
    most 2 * sensitivity, or by `sensitivity` if all scores move in one direction. The probability
    that noise of scale b exceeds t changes by a factor of at most e^(s/b) when t moves by s. This
    gives epsilon for b = 2 * sensitivity / epsilon, or sensitivity / epsilon if monotonic.
    """

    _law: ClassVar[NoiseLaw]

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
        check_reach(noise_scale=self.noise_scale)

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
        exact = score_vector(scores)
        return largest_noisy_score(self._law, self.noise_scale, exact, generator(rng))


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

    _law = GUMBEL

    @property
    def event(self) -> Exponential:
        """Event of one release, for the accountant."""
        return Exponential(self.epsilon, self.replace_factor)


@dataclass(frozen=True)
class PermuteAndFlip(PureSelection):
    """Private choice of the index of the largest score plus exponential noise.

    Guarantee: epsilon-DP (proof in `PureSelection`). It has the law of permute-and-flip (McKenna &
    Sheldon 2020, arXiv:2010.12603; Ding et al. 2021, arXiv:2105.07260, prove the equality). Its
    expected score is never below that of the exponential mechanism, but its range is not bounded,
    so many releases cost more in composition.
    """

    _law = EXPONENTIAL


def score_vector(scores: ArrayLike) -> Floats:
    """Return the private `scores` as a vector of floats; raise if there are none."""
    array = real_array(scores, ndim=1)
    if not array.size:
        raise ValueError("scores must hold at least one option, got none.")
    return array
