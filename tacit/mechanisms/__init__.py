"""Mechanisms: objects that release a noisy value and state the event of that release.

`mechanism.event` is the event of one call of `mechanism.release(value, rng)`: pay for it first,
then release. Noise is stated relative to what one record contributes when it is added or removed;
`replace_factor` is how many times more the value can change when a record is replaced.
"""

from typing import Any, Protocol

from tacit.events import Event
from tacit.mechanisms.discrete import (
    DiscreteGaussianMechanism,
    DiscreteLaplaceMechanism,
    GridGaussianMechanism,
)
from tacit.mechanisms.exponential import ExponentialMechanism, PermuteAndFlip
from tacit.mechanisms.gaussian import GaussianMechanism
from tacit.mechanisms.laplace import LaplaceMechanism
from tacit.mechanisms.noisy_max import GaussianNoisyMax, LaplaceNoisyMax
from tacit.mechanisms.rng import Rng, SecureGenerator, Seed, Size, generator, secure_generator


class Mechanism(Protocol):
    """The interface common to all mechanisms, for annotations."""

    @property
    def event(self) -> Event:
        """Event of one release, for the accountant."""
        ...

    def release(self, value: Any, /, rng: Seed = None) -> Any:  # Any: vectors in, index out, ...
        """Return a noisy value; pay for `event` first."""
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
