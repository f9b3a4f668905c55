"""Noise on a grid: mechanisms whose released bits cannot betray the private value.

Adding a floating-point sample to a floating-point value leaves traces of the value in the low bits
of the sum (Mironov 2012; Haney et al. 2022, arXiv:2207.10635). Here value and noise are whole
multiples of one step, their sum is exact, and every value can reach the same set of outputs.

| mechanism | value | noise | event |
|---|---|---|---|
| `DiscreteGaussianMechanism` | whole numbers | discrete Gaussian, exact | `RenyiCurve` |
| `DiscreteLaplaceMechanism` | whole numbers | discrete Laplace, exact | `PureDP` |
| `GridGaussianMechanism` | real vector | normal rounded to a grid | `Gaussian` |
"""

import math
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit._check import positive, whole
from tacit.events import Gaussian, PureDP, RenyiCurve
from tacit.mechanisms._exact import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    discrete_gaussian,
    discrete_laplace,
)
from tacit.mechanisms._vector import integer_array, real_array
from tacit.mechanisms.rng import Seed, generator

Integers = NDArray[np.int64]

# Orders of the Rényi curve: dense where epsilon is usually attained, any subset is valid.
ORDERS = (
    *(1 + k / 10 for k in range(1, 100)),
    *(float(k) for k in range(11, 64)),
    *(2.0**k * m for k in range(6, 14) for m in (1.0, 1.25, 1.5, 1.75)),
)


@dataclass(frozen=True)
class DiscreteGaussianMechanism:
    """Whole numbers plus discrete Gaussian noise, P(x) ~ exp(-x^2 / (2 noise_std^2)).

    Guarantee: Rényi divergence of order a at most a / (2 noise_multiplier^2), as of the continuous
    Gaussian (Canonne, Kamath & Steinke 2020, arXiv:2004.00010v5, Theorem 14), provided one added or
    removed record moves the vector by at most `l2_sensitivity`. The curve says nothing of replaced
    records: for them, state the L2 change of a replacement as `l2_sensitivity` and set
    `replace_factor=1`, which is then valid for every relation.

    >>> DiscreteGaussianMechanism(3.0, l2_sensitivity=1.0).release([100, 0], rng=0).tolist()
    [104, -4]
    """

    noise_multiplier: float
    _: KW_ONLY
    l2_sensitivity: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        positive(noise_multiplier=self.noise_multiplier)
        positive(l2_sensitivity=self.l2_sensitivity)
        _ = self.event  # checks replace_factor
        _within_reach(noise_std=self.noise_std)

    @property
    def noise_std(self) -> float:
        """Parameter of the noise; its true standard deviation is slightly smaller."""
        # One ulp up, so that rounding of the product cannot lower the multiplier.
        return math.nextafter(self.noise_multiplier * self.l2_sensitivity, math.inf)

    @property
    def event(self) -> RenyiCurve:
        """What one release does to the private data."""
        rho = 1 / (2 * self.noise_multiplier**2) * (1 + 2.0**-50)  # rounding only over-charges
        return RenyiCurve(ORDERS, tuple(order * rho for order in ORDERS), self.replace_factor)

    def release(self, value: ArrayLike, rng: Seed = None) -> Integers:
        """`value` plus noise, in the shape of `value`; pay for `event` first."""
        exact = integer_array(value)
        noise = discrete_gaussian(Fraction(self.noise_std) ** 2, exact.size, generator(rng))
        return exact + noise.reshape(exact.shape)


@dataclass(frozen=True)
class DiscreteLaplaceMechanism:
    """Whole numbers plus discrete Laplace noise, P(x) ~ exp(-|x| / noise_scale).

    Guarantee: `epsilon`-DP, provided one added or removed record moves the vector by at most
    `l1_sensitivity` in L1 norm: the log probability of each coordinate's noise is
    1/noise_scale-Lipschitz, and epsilon = l1_sensitivity / noise_scale. Its event is `PureDP`, not
    `Laplace`: on a grid the two extreme losses carry more mass (with sensitivity 1 they carry all
    of it), so the continuous price would be too low. Also called the geometric mechanism (Ghosh,
    Roughgarden & Sundararajan 2009).

    >>> DiscreteLaplaceMechanism(0.5, l1_sensitivity=1.0).release([100, 0], rng=0).tolist()
    [97, -2]
    """

    epsilon: float
    _: KW_ONLY
    l1_sensitivity: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon)
        positive(l1_sensitivity=self.l1_sensitivity)
        _ = self.event  # checks replace_factor
        _within_reach(noise_scale=self.noise_scale)

    @property
    def noise_scale(self) -> float:
        """l1_sensitivity / epsilon, rounded up to 20 bits so that the exact sampler stays fast."""
        needed = Fraction(self.l1_sensitivity) / Fraction(self.epsilon)
        unit = Fraction(2) ** (math.frexp(needed)[1] - 20)
        return float(math.ceil(needed / unit) * unit)

    @property
    def event(self) -> PureDP:
        """What one release does to the private data."""
        return PureDP(self.epsilon, self.replace_factor)

    def release(self, value: ArrayLike, rng: Seed = None) -> Integers:
        """`value` plus noise, in the shape of `value`; pay for `event` first."""
        exact = integer_array(value)
        noise = discrete_laplace(Fraction(self.noise_scale), exact.size, generator(rng))
        return exact + noise.reshape(exact.shape)


@dataclass(frozen=True)
class GridGaussianMechanism:
    """A real vector of `dimension` coordinates, rounded to a grid, plus normal noise on that grid.

    Guarantee: `event`, the same as of `GaussianMechanism`. Rounding moves each of two neighboring
    vectors by at most grid / 2 a coordinate, so they lie within l2_sensitivity + sqrt(dimension) *
    grid afterwards, and `noise_std` is `noise_multiplier` times that. For x on the grid,
    x + round(noise) = round(x + noise): the release is post-processing of the continuous mechanism.
    Replaced records: replace_factor * l2_sensitivity + sqrt(dimension) * grid is at most
    replace_factor times the above.

    The sum is of whole numbers and exact, and the set of outputs does not depend on the value. The
    noise itself is a rounded double, so its law (not its support) is exact only to a double's
    precision; `DiscreteGaussianMechanism` has an exact law and a Rényi price.

    `grid` is the largest power of two that raises the noise by less than a millionth.

    >>> mean = GridGaussianMechanism(1.0, l2_sensitivity=2.0, dimension=4)
    >>> mean.grid == 2.0**-20, mean.event.noise_multiplier
    (True, 1.0)
    >>> mean.release([0.1, 0.2, 0.3, 0.4], rng=0).shape
    (4,)
    """

    noise_multiplier: float
    _: KW_ONLY
    l2_sensitivity: float
    dimension: int
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        positive(l2_sensitivity=self.l2_sensitivity)
        whole(dimension=self.dimension, least=1)
        _ = self.event  # checks the other two
        positive(grid=self.grid, advice="Rescale the value.")
        positive(largest_output=self.grid * 2.0**53, advice="Rescale the value.")
        _within_reach(noise_std_in_grid_steps=self.noise_std / self.grid)

    @property
    def grid(self) -> float:
        """Distance between neighboring outputs, a power of two."""
        step = self.l2_sensitivity / math.sqrt(self.dimension) * 1e-6
        return math.ldexp(1.0, math.frexp(step)[1] - 1)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in the units of the value."""
        rounded_sensitivity = self.l2_sensitivity + math.sqrt(self.dimension) * self.grid
        return self.noise_multiplier * rounded_sensitivity

    @property
    def event(self) -> Gaussian:
        """What one release does to the private data."""
        return Gaussian(self.noise_multiplier, self.replace_factor)

    def release(self, value: ArrayLike, rng: Seed = None) -> NDArray[np.float64]:
        """`value` rounded plus noise, in the shape of `value`; pay for `event` first."""
        exact = real_array(value)
        if exact.size != self.dimension:
            raise ValueError(f"value must have {self.dimension} coordinates, got {exact.size}.")
        # Clipping moves no two values apart, and keeps value and noise below 2^53 steps together.
        with np.errstate(over="ignore"):
            steps = np.rint(np.clip(exact / self.grid, -(2.0**52), 2.0**52))
        noise = np.rint(generator(rng).normal(0.0, self.noise_std / self.grid, exact.shape))
        return (steps + noise) * self.grid


def _within_reach(**named: float) -> None:
    ((name, value),) = named.items()
    if not SMALLEST_SCALE <= value <= LARGEST_SCALE:
        raise ValueError(
            f"{name} must be within 2**-20 and 2**45, got {value:g}. Rescale the value."
        )
