"""Mechanisms: objects that release a noisy value and state the event of that release.

`mechanism.event` is the event of one call of `mechanism.release(value, rng)`: pay for it first,
then release. A release is a multiple of a public step (`tacit.mechanisms.grid`) or a choice with
exact probabilities, so its low bits reveal nothing. Noise is stated relative to what one record
contributes when it is added or removed; `replace_factor` is how many times more the value can
change when a record is replaced.
"""

from typing import Any, Protocol

from tacit.events import Event
from tacit.mechanisms.banded import (
    MOST_BANDS,
    optimal_bands,
    participation_sensitivity,
    running_error,
    square_root,
    step_deviations,
    tree_error,
)
from tacit.mechanisms.discrete import DiscreteGaussianMechanism, DiscreteLaplaceMechanism
from tacit.mechanisms.exponential import ExponentialMechanism, PermuteAndFlip
from tacit.mechanisms.gaussian import GaussianMechanism, GridGaussianMechanism
from tacit.mechanisms.grid import rounded_normal, tail_mass
from tacit.mechanisms.laplace import LaplaceMechanism
from tacit.mechanisms.noisy_max import GaussianNoisyMax, LaplaceNoisyMax
from tacit.mechanisms.rng import (
    Rng,
    SecureGenerator,
    Seed,
    Size,
    StatisticalGenerator,
    generator,
    secure_generator,
)


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
    "MOST_BANDS",
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
    "StatisticalGenerator",
    "generator",
    "optimal_bands",
    "participation_sensitivity",
    "rounded_normal",
    "running_error",
    "secure_generator",
    "square_root",
    "step_deviations",
    "tail_mass",
    "tree_error",
]
