"""Random number generators for noise: a fast one with a fresh seed, or a cryptographic one.

Every mechanism passes its `rng` argument to `generator`. numpy's generators are fast and
statistically sound, but not cryptographic: anyone who sees enough raw outputs of PCG64 can predict
the rest. `secure_generator` draws every bit from the operating system's cryptographic source, at
about a third of the speed. With either, the low bits of continuous noise in *floating point* can
reveal the value (Mironov 2012, doi:10.1145/2382196.2382264); `tacit.mechanisms.discrete` has
mechanisms without this weakness.
"""

import os
from collections.abc import Sequence
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri  # pyright: ignore[reportMissingTypeStubs]  # scipy has none

from tacit._arrays import Floats, Indices

Size: TypeAlias = int | Sequence[int] | None


class SecureGenerator:
    """A generator that draws from the system's cryptographic source of random bits.

    It has those methods of `numpy.random.Generator` that mechanisms use. Nothing is buffered
    between calls, so a forked process cannot repeat its parent's noise. Continuous laws apply the
    inverse distribution function to a 63-bit uniform and a sign bit; outcomes that cannot be
    reached this way have probability below 2^-63.
    """

    def random(self, size: Size = None) -> Floats:
        """Draw uniformly from the multiples of 2^-53 in [0, 1)."""
        return (self._words(size) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, low: int, high: int, size: Size = None) -> Indices:
        """Draw exactly uniformly from the whole numbers in [low, high)."""
        span = high - low
        if not 0 < span < 2**63:
            raise ValueError(f"high must be above low by less than 2**63, got {low} and {high}.")
        words = self._words(size)
        flat = words.reshape(-1)
        # 2^64 is no multiple of `span` in general: without the cut, small remainders are likelier.
        limit = np.uint64(2**64 - 1 - 2**64 % span)
        while (late := flat > limit).any():
            flat[late] = self._words(int(late.sum()))
        return (words % np.uint64(span)).astype(np.int64) + low

    def normal(self, loc: float = 0.0, scale: float = 1.0, size: Size = None) -> Floats:
        """Draw from the normal law with mean `loc` and standard deviation `scale`."""
        sign, uniform = self._sign_and_uniform(size)
        return loc - scale * sign * ndtri(uniform / 2)

    def laplace(self, loc: float = 0.0, scale: float = 1.0, size: Size = None) -> Floats:
        """Draw from the Laplace law with mean `loc` and scale `scale`."""
        sign, uniform = self._sign_and_uniform(size)
        return loc - scale * sign * np.log(uniform)

    def exponential(self, scale: float = 1.0, size: Size = None) -> Floats:
        """Draw from the exponential law with mean `scale`."""
        return -scale * np.log(self._sign_and_uniform(size)[1])

    def gumbel(self, loc: float = 0.0, scale: float = 1.0, size: Size = None) -> Floats:
        """Draw from the Gumbel law (of maxima) with location `loc` and scale `scale`."""
        # log1p keeps full precision for small uniforms, which give the heavy upper tail.
        uniform = np.minimum(self._sign_and_uniform(size)[1], 1 - 2.0**-53)
        return loc - scale * np.log(-np.log1p(-uniform))

    def _words(self, size: Size) -> NDArray[np.uint64]:
        shape = () if size is None else (size,) if isinstance(size, int) else tuple(size)
        words = np.frombuffer(os.urandom(8 * int(np.prod(shape, dtype=np.int64))), np.uint64)
        return words.reshape(shape).copy()

    def _sign_and_uniform(self, size: Size) -> tuple[Floats, Floats]:
        """Draw a fair sign, 1 or -1, and a uniform number: the middle of one of 2^63 cells."""
        words = self._words(size)
        sign = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
        return sign, ((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-63


Rng: TypeAlias = np.random.Generator | SecureGenerator
Seed: TypeAlias = Rng | int | None


def generator(rng: Seed = None) -> Rng:
    """Return `rng` if it is a generator; else a new one, seeded by an int or, for None, afresh.

    Use a seed for tests only: anyone who knows it can reproduce the noise and so remove it.

    >>> float(generator(7).normal()) == float(generator(7).normal())
    True
    >>> float(generator().normal()) == float(generator().normal())
    False
    """
    if isinstance(rng, np.random.Generator | SecureGenerator):
        return rng
    if rng is None:
        return np.random.default_rng()
    if isinstance(rng, bool) or not isinstance(cast("object", rng), int | np.integer):
        raise TypeError(
            f"rng must be None, an int or a numpy Generator, got {type(rng).__name__}. "
            "None draws fresh entropy from the system."
        )
    if rng < 0:
        raise ValueError(f"rng must be >= 0 as a seed, got {rng}.")
    return np.random.default_rng(int(rng))


def secure_generator() -> SecureGenerator:
    """Return a generator that takes every bit from the system's cryptographic source.

    >>> secure_generator().normal(size=3).shape
    (3,)
    """
    return SecureGenerator()
