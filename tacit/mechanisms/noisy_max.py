"""Noisy max: private choice of an option by its score plus Laplace or normal noise."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tacit.mechanisms.exponential import PureSelection, score_vector
from tacit.mechanisms.gaussian import GaussianMechanism
from tacit.mechanisms.grid import in_steps, noise_in_steps
from tacit.mechanisms.noise_laws import LAPLACE, NORMAL
from tacit.mechanisms.rng import Seed, generator


@dataclass(frozen=True)
class LaplaceNoisyMax(PureSelection):
    """Private choice of the index of the largest score plus Laplace noise (report noisy max).

    Guarantee: epsilon-DP (proof in `PureSelection`; Dwork & Roth 2014, Claim 3.9).
    """

    _law = LAPLACE


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
        steps = in_steps(score_vector(scores), self.grid)
        noise = noise_in_steps(
            NORMAL, self.noise_std_on(steps.size), self.grid, steps.size, generator(rng)
        )
        # Differences within 2^53 steps are exact. Larger ones decide alone, because noise does not
        # reach so far (`tail_mass`). So this is the index of the exact largest sum.
        return int(np.argmax((steps - steps.max()) + noise))
