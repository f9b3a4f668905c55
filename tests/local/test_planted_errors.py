"""The checks of privacy and bias find errors that are planted on purpose."""

from dataclasses import dataclass
from fractions import Fraction

import pytest

from tacit import local
from tacit.local.coins import round_down, round_up


@dataclass(frozen=True, kw_only=True)
class HashRangeTooLarge(local.LocalHashing):
    def _hash(self, functions, options):
        return (functions + options) % (self.n_values + 1)


@dataclass(frozen=True, kw_only=True)
class HashRangeTooSmall(local.LocalHashing):
    def _hash(self, functions, options):
        return super()._hash(functions, options) % (self.n_values - 1)


@dataclass(frozen=True, kw_only=True)
class ResponseForgetsOne(local.RandomizedResponse):
    @property
    def random_probability(self):
        return round_up(self.n_options / (self._most + self.n_options))


@dataclass(frozen=True, kw_only=True)
class ResponseRoundsDown(local.RandomizedResponse):
    @property
    def random_probability(self):
        return round_down(self.n_options / (self._most + self.n_options - 1)) - Fraction(1, 2**50)


@dataclass(frozen=True, kw_only=True)
class UnaryFlipsTooRarely(local.OptimizedUnary):
    @property
    def miss_probability(self):
        return round_up(1 / (2 + self._most))


@dataclass(frozen=True, kw_only=True)
class UnaryRoundsDown(local.OptimizedUnary):
    @property
    def miss_probability(self):
        return super().miss_probability - Fraction(1, 2**52)


@dataclass(frozen=True, kw_only=True)
class HadamardWithFirstRow(local.HadamardResponse):
    def _places(self, options):
        block, row = super()._places(options)
        return block, row - 1


@dataclass(frozen=True, kw_only=True)
class PiecewiseWindowTooWide(local.PiecewiseMean):
    def draw(self, t, rng):
        wide = local.PiecewiseMean(epsilon=self.epsilon * 1.5, n_levels=self.n_levels)
        return wide.draw(t, rng)


@dataclass(frozen=True, kw_only=True)
class DuchiFlipsTooRarely(local.DuchiMean):
    @property
    def true_sign_probability(self):
        return round_down(self._most / (self._most + Fraction(9, 10)))


OPTIONS = [
    HashRangeTooLarge,
    HashRangeTooSmall,
    ResponseForgetsOne,
    ResponseRoundsDown,
    UnaryFlipsTooRarely,
    UnaryRoundsDown,
    HadamardWithFirstRow,
]


def check(oracle, enumeration):
    enumeration.check_private(oracle, range(oracle.n_options))
    enumeration.check_unbiased(oracle)


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_planted_errors_of_frequency_oracles_are_found(kind, enumeration):
    correct = kind.__bases__[0](epsilon=1.0, n_options=4)
    check(correct, enumeration)
    with pytest.raises((AssertionError, ValueError)):
        check(kind(epsilon=1.0, n_options=4), enumeration)


@pytest.mark.parametrize(
    ("randomizer", "values"),
    [
        (PiecewiseWindowTooWide(epsilon=1.0, n_levels=6), (-1.0, 1.0)),
        (DuchiFlipsTooRarely(epsilon=1.0), (-1.0, 1.0)),
    ],
    ids=["piecewise", "duchi"],
)
def test_planted_errors_of_means_are_found(randomizer, values, enumeration):
    with pytest.raises(AssertionError):
        enumeration.check_private(randomizer, values)
