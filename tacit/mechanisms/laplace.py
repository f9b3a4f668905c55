"""The Laplace mechanism: a vector plus independent Laplace noise, released on a grid."""

from dataclasses import KW_ONLY, dataclass

from numpy.typing import ArrayLike

from tacit._arrays import Floats
from tacit._check import positive
from tacit.events import Laplace
from tacit.mechanisms.grid import check_reach, grid_step, raised, release_on_grid
from tacit.mechanisms.noise_laws import LAPLACE
from tacit.mechanisms.rng import Seed


@dataclass(frozen=True)
class LaplaceMechanism:
    """Release of a vector with Laplace noise of scale `noise_scale` on each coordinate.

    Guarantee: `event`, provided that adding or removing one record moves the vector by at most
    `l1_sensitivity` in L1 norm, and replacing one by at most `replace_factor` times that. One
    release is pure DP with epsilon = 1 / noise_multiplier (Dwork & Roth 2014, Theorem 3.6). The
    guarantee holds for the floats that are released, bit by bit (proof in `tacit.mechanisms.grid`):
    value and noise are rounded to multiples of `grid`, and the noise is raised by what rounding
    adds to the sensitivity (`noise_scale_on`; a share of 4e-9 * noise_multiplier * dimension at
    most).

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
        check_reach(noise_scale=self.noise_scale)

    @property
    def noise_scale(self) -> float:
        """Scale of the noise, its mean absolute value, in the units of the value, before raised."""
        return self.noise_multiplier * self.l1_sensitivity

    @property
    def grid(self) -> float:
        """Distance between neighboring outputs, a power of two."""
        return grid_step(self.noise_scale)

    @property
    def event(self) -> Laplace:
        """Event of one release, for the accountant."""
        return Laplace(self.noise_multiplier, self.replace_factor)

    def noise_scale_on(self, size: int) -> float:
        """Return the scale of the noise on a value with `size` coordinates."""
        return raised(self.noise_multiplier, self.l1_sensitivity, size * self.grid)

    def release(self, value: ArrayLike, rng: Seed = None) -> Floats:
        """Return `value` plus noise, in its shape; charge `event` to the privacy budget first."""
        # One record moves the rounded value by at most scale / noise_multiplier in L1 norm, where
        # scale = noise_scale_on(size), and the log density of the noise changes by at most
        # 1 / scale per unit of each coordinate.
        return release_on_grid(value, LAPLACE, self.noise_scale_on, self.grid, rng)
