"""The Gaussian mechanism: a vector plus independent normal noise, released on a grid."""

import math
from dataclasses import KW_ONLY, dataclass

from numpy.typing import ArrayLike

from tacit._arrays import Floats
from tacit._check import positive, whole
from tacit.events import Gaussian
from tacit.mechanisms.grid import check_reach, grid_step, raised, real_array, release_on_grid
from tacit.mechanisms.noise_laws import NORMAL
from tacit.mechanisms.rng import Seed


@dataclass(frozen=True)
class GaussianMechanism:
    """Release of a vector with normal noise of standard deviation `noise_std` on each coordinate.

    Guarantee: `event`, provided that adding or removing one record moves the vector by at most
    `l2_sensitivity` in L2 norm, and replacing one by at most `replace_factor` times that. The
    guarantee holds for the floats that are released, bit by bit (proof in `tacit.mechanisms.grid`):
    value and noise are rounded to multiples of `grid`, and the noise is raised by what rounding
    adds to the sensitivity (`noise_std_on`; a share of 4e-9 * noise_multiplier * sqrt(dimension) at
    most). For a replaced record the distance is at most replace_factor * l2_sensitivity +
    sqrt(dimension) * grid, which is at most replace_factor times that of an added record.

    >>> count = GaussianMechanism(2.0, l2_sensitivity=1.0)
    >>> count.noise_std, count.event
    (2.0, Gaussian(noise_multiplier=2.0, replace_factor=2.0))
    >>> count.release([10.0, 20.0], rng=0).round(2).tolist()
    [9.76, 21.88]
    """

    noise_multiplier: float
    _: KW_ONLY
    l2_sensitivity: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        positive(l2_sensitivity=self.l2_sensitivity)
        _ = self.event  # checks the other two
        check_reach(noise_std=self.noise_multiplier * self.l2_sensitivity)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise, in the units of the value, before it is raised."""
        return self.noise_multiplier * self.l2_sensitivity

    @property
    def grid(self) -> float:
        """Distance between neighboring outputs, a power of two."""
        return grid_step(self.noise_multiplier * self.l2_sensitivity)

    @property
    def event(self) -> Gaussian:
        """Event of one release, for the accountant."""
        return Gaussian(self.noise_multiplier, self.replace_factor)

    def noise_std_on(self, size: int) -> float:
        """Return the standard deviation of the noise on a value with `size` coordinates."""
        rounding = math.sqrt(size) * self.grid
        return raised(self.noise_multiplier, self.l2_sensitivity, rounding)

    def release(self, value: ArrayLike, rng: Seed = None) -> Floats:
        """Return `value` plus noise, in its shape; charge `event` to the privacy budget first."""
        # One record moves the rounded value by at most noise_std_on(size) / noise_multiplier.
        return release_on_grid(value, NORMAL, self.noise_std_on, self.grid, rng)


@dataclass(frozen=True)
class GridGaussianMechanism(GaussianMechanism):
    """`GaussianMechanism` for a vector of `dimension` coordinates, a number that is checked.

    `noise_std` is here the standard deviation after it was raised for this dimension.

    >>> mean = GridGaussianMechanism(1.0, l2_sensitivity=2.0, dimension=4)
    >>> mean.grid == 2.0**-27, mean.event.noise_multiplier
    (True, 1.0)
    >>> mean.release([0.1, 0.2, 0.3, 0.4], rng=0).shape
    (4,)
    """

    _: KW_ONLY
    dimension: int

    def __post_init__(self) -> None:
        whole(dimension=self.dimension, least=1)
        super().__post_init__()

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise, in the units of the value."""
        return self.noise_std_on(self.dimension)

    def release(self, value: ArrayLike, rng: Seed = None) -> Floats:
        """Return `value` plus noise, in its shape; charge `event` to the budget first."""
        exact = real_array(value)
        if exact.size != self.dimension:
            raise ValueError(f"value must have {self.dimension} coordinates, got {exact.size}.")
        return super().release(exact, rng)
