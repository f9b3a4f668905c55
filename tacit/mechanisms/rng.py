"""Random number generators for noise: a statistical one by default, or a cryptographic one.

Every mechanism passes its `rng` argument to `generator`.

| argument | generator | kind |
|---|---|---|
| None | Philox4x64-10, 128-bit key from the operating system | statistical |
| `secure_generator()` | the operating system's source of random bits | cryptographic |
| a whole number | numpy's default generator, seeded with it | for tests: the seed is no secret |
| a numpy `Generator` | the user's own | the user's choice |

The guarantee of differential privacy assumes random bits, so it holds against everyone who cannot
tell the generator's output from random bits. *Statistical*: Philox (Salmon et al. 2011) passes
statistical tests and its key is too long to be searched, but it was not designed to withstand
attacks. *Cryptographic*: it was. Use `secure_generator()` where adversaries are capable; it takes
about three times as long.

A generator made here refuses to work in a forked process and refuses to be copied or pickled:
a copy would repeat the noise of the original, and the difference of two releases with equal noise
shows the private values. Generators and seeds passed by the user are the user's responsibility.
"""

import os
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from tacit._arrays import Floats, Indices

Size: TypeAlias = int | Sequence[int] | None


class _Uncopied:
    """Base of what cannot be copied or pickled: a copy would repeat noise."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # Any: the protocol of pickle or copy
        raise TypeError(
            "a generator cannot be copied or pickled: the copy would repeat its noise. Pass "
            "rng=None to draw from a new one."
        )

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(4)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce_ex__(4)


class _FreshPhilox(_Uncopied, np.random.Philox):
    """Philox4x64-10 with key and counter from the operating system."""

    def __init__(self) -> None:
        key, counter = (int.from_bytes(os.urandom(n), "little") for n in (16, 32))
        super().__init__(key=key, counter=counter)


class StatisticalGenerator(_Uncopied, np.random.Generator):
    """A numpy generator that belongs to one process and cannot be copied: Philox4x64-10.

    Its 128-bit key and its 256-bit counter come from the operating system.

    >>> import pickle
    >>> pickle.dumps(StatisticalGenerator())
    Traceback (most recent call last):
    TypeError: a generator cannot be copied or pickled: ... Pass rng=None to draw from a new one.
    """

    def __init__(self) -> None:
        super().__init__(_FreshPhilox())
        self._process = os.getpid()

    def spawn(self, n_children: int) -> list[np.random.Generator]:
        """Return new generators, each with its own key from the operating system."""
        return [StatisticalGenerator() for _ in range(n_children)]

    def __getattribute__(self, name: str) -> Any:  # Any: whatever the attribute is
        if not name.startswith("_") and self._process != os.getpid():
            raise RuntimeError(
                "a generator cannot be used in a forked process: it would repeat the noise of the "
                "process that made it. Pass rng=None to draw from a new one."
            )
        return super().__getattribute__(name)


class SecureGenerator:
    """A generator that draws from the system's cryptographic source of random bits.

    Nothing is buffered between calls, so neither a forked process nor a copy can repeat noise.
    Mechanisms use `words` only.
    """

    def words(self, size: Size = None) -> NDArray[np.uint64]:
        """Draw 64-bit words of uniform bits."""
        shape = () if size is None else (size,) if isinstance(size, int) else tuple(size)
        words = np.frombuffer(os.urandom(8 * int(np.prod(shape, dtype=np.int64))), np.uint64)
        return words.reshape(shape).copy()

    def random(self, size: Size = None) -> Floats:
        """Draw uniformly from the multiples of 2^-53 in [0, 1)."""
        return (self.words(size) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, low: int, high: int, size: Size = None) -> Indices:
        """Draw exactly uniformly from the whole numbers in [low, high)."""
        span = high - low
        if not 0 < span < 2**63:
            raise ValueError(f"high must be above low by less than 2**63, got {low} and {high}.")
        words = self.words(size)
        flat = words.reshape(-1)
        # 2^64 is no multiple of `span` in general: without the cut, small remainders are likelier.
        limit = np.uint64(2**64 - 1 - 2**64 % span)
        while (late := flat > limit).any():
            flat[late] = self.words(int(late.sum()))
        return (words % np.uint64(span)).astype(np.int64) + low


Rng: TypeAlias = np.random.Generator | SecureGenerator
Seed: TypeAlias = Rng | int | None


def generator(rng: Seed = None) -> Rng:
    """Return `rng` if it is a generator; else a new one, seeded by an int or, for None, afresh.

    Use a seed for tests only: anyone who knows it can reproduce the noise and so remove it.

    >>> float(generator(7).random()) == float(generator(7).random())
    True
    >>> float(generator().random()) == float(generator().random())
    False
    """
    if isinstance(rng, np.random.Generator | SecureGenerator):
        return rng
    if rng is None:
        return StatisticalGenerator()
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

    >>> secure_generator().random(3).shape
    (3,)
    """
    return SecureGenerator()


def random_words(rng: Rng, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    """Return independent uniform 64-bit words from either kind of generator."""
    if isinstance(rng, SecureGenerator):
        return rng.words(shape)
    return rng.integers(0, 2**64 - 1, shape, np.uint64, endpoint=True)
