"""Mechanisms: each releases a noisy value and carries the event it implies.

`mechanism.event` is what one call of `mechanism.release(value, rng)` does to the private data: pay
for it first, then release. Noise is stated relative to what one record contributes when it is added
or removed; `replace_factor` says how much more a replaced record can change.
"""

from typing import Any, Protocol

from tacit.events import Event
from tacit.mechanisms.discrete import (
    DiscreteGaussianMechanism,
    DiscreteLaplaceMechanism,
    GridGaussianMechanism,
)
from tacit.mechanisms.gaussian import GaussianMechanism
from tacit.mechanisms.laplace import LaplaceMechanism
from tacit.mechanisms.rng import Rng, SecureGenerator, Seed, Size, generator, secure_generator
from tacit.mechanisms.selection import (
    ExponentialMechanism,
    GaussianNoisyMax,
    LaplaceNoisyMax,
    PermuteAndFlip,
)


class Mechanism(Protocol):
    """What all mechanisms have in common; use it in annotations."""

    @property
    def event(self) -> Event:
        """What one release does to the private data."""
        ...

    def release(self, value: Any, /, rng: Seed = None) -> Any:  # Any: vectors in, index out, ...
        """A noisy value; pay for `event` first."""
        ...


__all__ = [
    "DiscreteGaussianMechanism",
    "DiscreteLaplaceMechanism",
    "ExponentialMechanism",
    "GaussianMechanism",
    "GaussianNoisyMax",
    "GridGaussianMechanism",
    "LaplaceMechanism",
    "LaplaceNoisyMax",
    "Mechanism",
    "PermuteAndFlip",
    "Rng",
    "SecureGenerator",
    "Seed",
    "Size",
    "generator",
    "secure_generator",
]
