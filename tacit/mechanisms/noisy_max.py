"""Noisy max: private choice of an option by its score plus Laplace or normal noise."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Floats
from tacit.mechanisms.exponential import PureSelection, centered_scores
from tacit.mechanisms.gaussian import GaussianMechanism
from tacit.mechanisms.rng import Rng, Seed


@dataclass(frozen=True)
class LaplaceNoisyMax(PureSelection):
    """Private choice of the index of the largest score plus Laplace noise (report noisy max).

    Guarantee: epsilon-DP (proof in `PureSelection`; Dwork & Roth 2014, Claim 3.9).
    """

    def _noise(self, rng: Rng, shape: tuple[int, ...]) -> Floats:
        return rng.laplace(0.0, self.noise_scale, shape)


@dataclass(frozen=True)
class GaussianNoisyMax(GaussianMechanism):
    """Private choice of the index of the largest score plus normal noise.

    Guarantee: post-processing of `GaussianMechanism` on the whole vector of scores, so
    `l2_sensitivity` bounds the L2 change of that vector. For votes it is sqrt(2) if one voter may
    switch (Papernot et al. 2018, arXiv:1802.08908, Proposition 8).

    >>> GaussianNoisyMax(40 / 2**0.5, l2_sensitivity=2**0.5, replace_factor=1.0).release([9e3, 0.0])
    0
    """

    def release(  # type: ignore[override]  # the index alone, not the noisy scores
        self, scores: ArrayLike, rng: Seed = None
    ) -> int:
        """Return the index of the chosen option; charge `event` to the privacy budget first."""
        return int(np.argmax(super().release(centered_scores(scores), rng)))
