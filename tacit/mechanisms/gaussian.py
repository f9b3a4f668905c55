"""The Gaussian mechanism: a vector plus independent normal noise."""

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Floats
from tacit._check import positive
from tacit.events import Gaussian
from tacit.mechanisms.rng import Seed, generator


@dataclass(frozen=True)
class GaussianMechanism:
    """Release of a vector with normal noise of standard deviation `noise_std` on each coordinate.

    Guarantee: `event`, provided that adding or removing one record moves the vector by at most
    `l2_sensitivity` in L2 norm, and replacing one by at most `replace_factor` times that. The price
    assumes exact real arithmetic. `tacit.mechanisms.GridGaussianMechanism` has the same event, and
    its floating-point output reveals nothing more.

    >>> count = GaussianMechanism(2.0, l2_sensitivity=1.0)
    >>> count.noise_std, count.event
    (2.0, Gaussian(noise_multiplier=2.0, replace_factor=2.0))
    >>> count.release([10.0, 20.0], rng=0).round(2).tolist()
    [10.25, 19.74]
    """

    noise_multiplier: float
    _: KW_ONLY
    l2_sensitivity: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        positive(l2_sensitivity=self.l2_sensitivity)
        _ = self.event  # checks the other two
        positive(noise_std=self.noise_std, advice="Rescale the value.")

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise, in the units of the value."""
        return self.noise_multiplier * self.l2_sensitivity

    @property
    def event(self) -> Gaussian:
        """Event of one release, for the accountant."""
        return Gaussian(self.noise_multiplier, self.replace_factor)

    def release(self, value: ArrayLike, rng: Seed = None) -> Floats:
        """Return `value` plus noise, in its shape; charge `event` to the privacy budget first."""
        exact = real_array(value)
        # The L2 change of one record is <= l2_sensitivity = noise_std / noise_multiplier.
        return exact + generator(rng).normal(0.0, self.noise_std, exact.shape)


def real_array(value: ArrayLike, *, ndim: int | None = None) -> Floats:
    """Return the private `value` as a float64 array; raise if it is not real and finite.

    `ndim` is the number of dimensions required. Errors never quote a number of `value`. Its shape,
    type and finiteness are treated as public, so they may be checked.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"value must be real numbers, got dtype {array.dtype}.")
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"value must have {ndim} dimension(s), got {array.ndim}.")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError("value must be finite. Clip or fill other values before the release.")
    return array
