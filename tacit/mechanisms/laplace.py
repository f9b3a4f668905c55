"""The Laplace mechanism: a vector plus independent Laplace noise."""

from dataclasses import KW_ONLY, dataclass

from numpy.typing import ArrayLike

from tacit._arrays import Floats
from tacit._check import positive
from tacit.events import Laplace
from tacit.mechanisms.gaussian import real_array
from tacit.mechanisms.rng import Seed, generator


@dataclass(frozen=True)
class LaplaceMechanism:
    """Release of a vector with Laplace noise of scale `noise_scale` on each coordinate.

    Guarantee: `event`, provided that adding or removing one record moves the vector by at most
    `l1_sensitivity` in L1 norm, and replacing one by at most `replace_factor` times that. One
    release is pure DP with epsilon = 1 / noise_multiplier (Dwork & Roth 2014, Theorem 3.6).

    >>> LaplaceMechanism(2.0, l1_sensitivity=3.0).noise_scale
    6.0
    """

    noise_multiplier: float
    _: KW_ONLY
    l1_sensitivity: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        positive(l1_sensitivity=self.l1_sensitivity)
        _ = self.event  # checks the other two
        positive(noise_scale=self.noise_scale, advice="Rescale the value.")

    @property
    def noise_scale(self) -> float:
        """Scale of the noise, which is its mean absolute value, in the units of the value."""
        return self.noise_multiplier * self.l1_sensitivity

    @property
    def event(self) -> Laplace:
        """Event of one release, for the accountant."""
        return Laplace(self.noise_multiplier, self.replace_factor)

    def release(self, value: ArrayLike, rng: Seed = None) -> Floats:
        """Return `value` plus noise, in its shape; charge `event` to the privacy budget first."""
        exact = real_array(value)
        # One record moves the vector by at most noise_scale / noise_multiplier in L1 norm, and the
        # log density of the noise changes by at most 1 / noise_scale per unit of each coordinate.
        return exact + generator(rng).laplace(0.0, self.noise_scale, exact.shape)
