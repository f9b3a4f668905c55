"""Releases on a grid: whole multiples of a public step, so that no low bit reveals the value.

A float plus a float of noise is a float whose low bits depend on both. Given a released sum, one
can list the noise values that lead to it from each of two neighboring data sets, and often only one
of the two is possible (Mironov 2012, doi:10.1145/2382196.2382264; Jin et al. 2022,
arXiv:2112.05307). Here

    released = step * (round(value / step) + round(noise / step)),

where `step` is a power of two fixed by the noise scale, which is public.

Proof. Let x be the rounded value, a vector of multiples of the step.

1. x + round(noise) = round(x + noise), because rounding commutes with shifts by multiples of the
   step. `noise_laws.rounded_noise` has exactly the law of round(noise) for real noise. So the
   release is post-processing of the mechanism with real noise, applied to x.
2. Rounding moves each coordinate of two neighboring values by at most step / 2, so it adds at most
   step * sqrt(dimension) to their L2 distance and step * dimension to their L1 distance. The noise
   is raised by the same share (`noise_std_on`, `noise_scale_on`), so the event does not change.
3. Both terms are whole numbers, held by floats without rounding error, the noise below 2^53
   (`tail_mass`). Their floating-point sum is the exact sum rounded once, so it is a function of the
   exact sum alone, for values of any size. The product with a power of two is exact.

The step is between 2^-29 and 2^-28 of the noise scale. A coarser one would raise the noise more, a
finer one would need more exact draws (`noise_laws`, step 3), and no step is safer than another.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_ndtr  # pyright: ignore[reportMissingTypeStubs]  # scipy has none

from tacit._arrays import Floats
from tacit._check import within
from tacit.mechanisms.noise_laws import NORMAL, NoiseLaw, rounded_noise
from tacit.mechanisms.rng import Rng, Seed, generator

if TYPE_CHECKING:
    from tacit.mechanisms import Mechanism

_BITS = 28
_MOST_STEPS = 2.0**45  # noise scale in steps: draws stay below 2^53 steps, see `tail_mass`
_CHUNK = 1 << 14  # coordinates treated at once, small enough for the processor's cache
_ROUNDING_UP = 1 + 2.0**-48  # covers the rounding of the few operations that give a noise scale


def grid_step(noise_scale: float) -> float:
    """Return the step of the grid for noise of this scale, a power of two.

    >>> grid_step(1.0) == grid_step(1.9) == 2.0**-28
    True
    """
    return math.ldexp(1.0, math.frexp(noise_scale)[1] - 1 - _BITS)


def raised(noise_multiplier: float, sensitivity: float, rounding: float) -> float:
    """Return the noise scale for a value whose distance to its neighbors grew by `rounding`."""
    return noise_multiplier * (sensitivity + rounding) * _ROUNDING_UP


def in_steps(value: Floats, step: float) -> Floats:
    """Round the private `value` to whole numbers of steps, exactly, in place, and return it.

    Values beyond 2^1000 steps or near the largest float are clipped, which never increases a
    distance.
    """
    limit = min(2.0**1000 * step, 2.0**1020) if step < 1 else 2.0**1020
    np.clip(value, -limit, limit, out=value)
    value /= step
    return np.rint(value, out=value)


def noise_in_steps(law: NoiseLaw, noise_scale: float, step: float, size: int, rng: Rng) -> Floats:
    """Return `size` draws of `law`, times `noise_scale`, rounded to whole numbers of steps."""
    if noise_scale / step > _MOST_STEPS:
        raise ValueError(
            "noise_multiplier must be smaller for a value of so many coordinates: rounding it to "
            "the grid would take more noise than double precision can add."
        )
    return rounded_noise(law, noise_scale / step, size, rng)


def release_on_grid(
    value: ArrayLike, law: NoiseLaw, noise_on: Callable[[int], float], step: float, rng: Seed
) -> Floats:
    """Return the private `value` plus noise on the grid; the caller has paid.

    `noise_on` maps the number of coordinates, which is public, to the scale of the noise.
    """
    exact = real_array(value)
    steps = exact.reshape(-1)
    noise = noise_in_steps(law, noise_on(steps.size), step, steps.size, generator(rng))
    for start in range(0, steps.size, _CHUNK):
        part = noise[start : start + _CHUNK]
        part += in_steps(steps[start : start + _CHUNK], step)
        part *= step
    return noise.reshape(exact.shape)


def rounded_normal(
    noise_std: float, *, step: float, size: int = 1, center: float = 0.0, rng: Seed = None
) -> Floats:
    """Return draws of center + noise_std * N(0, 1), each rounded to a multiple of `step`, exactly.

    `step` must be a power of two. The result is post-processing of the real number, also where
    `noise_std` and `center` are private. This is for algorithms that are no plain Gaussian
    mechanism; use `GaussianMechanism` where it applies.

    >>> rounded_normal(1e-9, step=0.25, size=2, center=7.3).tolist()
    [7.25, 7.25]
    """
    if math.frexp(step)[0] != 0.5:
        raise ValueError(f"step must be a power of two, got {step}.")
    return step * rounded_noise(
        NORMAL, noise_std / step, size, generator(rng), offset=center / step
    )


def tail_mass(mechanism: "Mechanism", *, size: int = 1) -> float:
    """Return a bound on the probability that the noise of one release is not what the event states.

    Noise is exact within 2^53 steps of the grid, so this is the probability that a draw among
    `size` coordinates lies beyond. It is the only part of a release on a grid that is not in the
    price; mechanisms on whole numbers and selections have none.

    >>> from tacit.mechanisms import LaplaceMechanism
    >>> tail_mass(LaplaceMechanism(1.0, l1_sensitivity=1.0), size=1000) < 1e-300
    True
    """
    from tacit.mechanisms.gaussian import GaussianMechanism
    from tacit.mechanisms.laplace import LaplaceMechanism

    if isinstance(mechanism, GaussianMechanism):
        reach = 2.0**53 * mechanism.grid / mechanism.noise_std_on(size)
        log_mass = math.log(2 * size) + float(log_ndtr(-reach))
    elif isinstance(mechanism, LaplaceMechanism):
        log_mass = math.log(size) - 2.0**53 * mechanism.grid / mechanism.noise_scale_on(size)
    else:
        return 0.0
    return min(1.0, math.exp(log_mass))


def check_reach(**named: float) -> None:
    """Raise unless the noise scale is far from the smallest and the largest float."""
    within(2.0**-900, 2.0**900, advice="Rescale the value.", **named)


def real_array(value: ArrayLike, *, ndim: int | None = None) -> Floats:
    """Return the private `value` as a new float64 array; raise if it is not real and finite.

    `ndim` is the number of dimensions required. Errors never quote a number of `value`. Its shape,
    type and finiteness are treated as public, so they may be checked. Whole numbers beyond 2^53 are
    clipped, because rounding them to floats could increase their distance.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" or array.dtype.itemsize > 8:
        raise TypeError(f"value must be real numbers of at most 64 bits, got dtype {array.dtype}.")
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"value must have {ndim} dimension(s), got {array.ndim}.")
    if array.dtype.kind != "f" and array.dtype.itemsize == 8:
        least = -(2**53) if array.dtype.kind == "i" else 0
        array = np.clip(array, array.dtype.type(least), array.dtype.type(2**53))
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError("value must be finite. Clip or fill other values before the release.")
    return array
