"""Tails of residuals: how far least squares has to look beyond the residuals of most records.

Newton's steps clip residuals at a few standard deviations. Where few records have a residual that
is much larger (a rare event, a skewed target), clipping them would bias the model, whatever the
budget. So the sizes of residuals are counted, with noise, at two models of a fit, and the clip is
raised to where the noise that it costs balances the mean excess that is cut off.
"""

import math

import numpy as np

from tacit._arrays import Floats
from tacit.mechanisms import GaussianMechanism, Rng
from tacit.regression.whitening import WhitenedRows

LOOKS = (2, 4)
"""Steps before which residuals are counted."""
_LEVELS = 2.0 ** np.arange(-16, 1.1, 0.5)  # up to 2, the largest distance of two targets
_CLEAR, _SEEN = 3.5, 1.5  # in standard deviations of the noise
_LARGEST_TAIL = 0.1  # share of the records
_BIAS = 3.0
"""What the mean excess of residuals counts for. Noise spreads over all directions and intervals
state it. A bias is in one direction and not stated; it is larger if the excess is in long rows."""


class ResidualTails:
    """Released histograms of the sizes of residuals, and the clip that follows from them."""

    def __init__(self, total: float) -> None:
        self._total, self._noise_std = total, 0.0
        self._looks: list[Floats] = []

    def look(
        self, records: WhitenedRows, theta: Floats, mechanism: GaussianMechanism, rng: Rng
    ) -> None:
        """Release how many residuals of the model `theta` are between each two levels.

        A record adds its weight, at most 1, to one count.
        """
        noisy = mechanism.release(_count(records, theta), rng)
        self._looks.append(noisy / self._total)
        self._noise_std = mechanism.noise_std / self._total

    def bias(self, clips: Floats) -> Floats:
        """Return what each of `clips` may bias a gradient by: _BIAS times the mean excess above it.

        Residuals are taken as uniform between two levels, and as 0 below the first. What is not
        clearly above the noise counts as 0: a tail that noise hides is assumed not to exist.
        """
        top = self._visible()
        if not top:
            return np.zeros(len(clips))
        shares, lower, upper = self._looks[-1][1:top], _LEVELS[: top - 1], _LEVELS[1:top]
        over, under = (np.maximum(ends - clips[:, None], 0.0) for ends in (upper, lower))
        excess = ((over**2 - under**2) / (2 * (upper - lower))) @ shares
        return _BIAS * np.maximum(excess, 0.0)

    def widened(self, clip: float, slope: float) -> float:
        """Return the clip, at least `clip`, of the smallest error.

        The noise of a model is `slope` times its clip.
        """
        top = self._visible()
        clips = np.append(clip, _LEVELS[:top][_LEVELS[:top] > clip])
        return float(clips[np.argmin((slope * clips) ** 2 + self.bias(clips) ** 2)])

    def _visible(self) -> int:
        """Return how many of the lowest counts hold all residuals that are seen above the noise.

        A tail must be clear in the sum of all looks, and still be there in the last one.
        """
        tails = [look[::-1].cumsum()[::-1] for look in self._looks]
        noises = self._noise_std * np.sqrt(np.arange(len(_LEVELS), 0, -1))
        is_clear = np.sum(tails, axis=0) > _CLEAR * math.sqrt(len(tails)) * noises
        found = np.flatnonzero(is_clear & (tails[-1] > _SEEN * noises))
        return int(found[-1]) + 1 if len(found) else 0


def hides_tails(noise: float, n_records: int) -> bool:
    """Return whether noise hides every tail: all that fewer than a tenth of the records have.

    `noise` is the noise multiplier of all looks together.
    """
    return _CLEAR * math.sqrt(len(LOOKS)) * noise > _LARGEST_TAIL * n_records


def _count(records: WhitenedRows, theta: Floats) -> Floats:
    """Return the private sums of weights of the records with residuals between each two levels.

    The last count is of all residuals above the last level but one.
    """
    counts = np.zeros(len(_LEVELS))

    def add(span: slice, margins: Floats) -> Floats:
        cells = np.searchsorted(_LEVELS[:-1], np.abs(margins - records.targets[span]))
        weights = None if records.weights is None else records.weights[span]
        counts[:] += np.bincount(cells, weights, minlength=len(_LEVELS))
        return np.zeros(len(margins))

    records.gradient(theta, add)
    return counts
