"""Exact laws of randomizers: every outcome of the code itself, with its probability."""

from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from tacit.mechanisms import SecureGenerator

Law = dict[bytes, Fraction]


class _Uniform:
    """A uniform draw that is not made yet: comparing it with a number decides by the tree."""

    __array_ufunc__ = None

    def __init__(self, replay: "_Replay", shape: tuple[int, ...]):
        self._replay, self._shape = replay, shape

    def __lt__(self, bound):
        bounds = np.broadcast_to(np.asarray(bound, dtype=np.float64), self._shape)
        decided = [self._replay.decide(self._heads(b)) for b in bounds.ravel()]
        return np.array(decided, dtype=np.int64).reshape(self._shape) == 0

    @staticmethod
    def _heads(bound: float) -> list[Fraction]:
        # random() is a multiple of 2^-53, so "random() < bound" counts the multiples below.
        heads = Fraction(int(np.ceil(float(bound) * 2.0**53)), 2**53)
        heads = min(max(heads, Fraction(0)), Fraction(1))
        return [heads, 1 - heads]


class _Replay(SecureGenerator):
    """A generator that follows one path of the tree of all draws and collects its siblings."""

    def __init__(self, path: list[int]):
        self.path, self.place = path, 0
        self.probability, self.siblings = Fraction(1), []

    def decide(self, probabilities: list[Fraction]) -> int:
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        if self.place < len(self.path):
            choice = self.path[self.place]
        else:
            choice = possible[0]
            self.siblings += [[*self.path, other] for other in possible[1:]]
            self.path = [*self.path, choice]
        self.place += 1
        self.probability *= probabilities[choice]
        return choice

    def random(self, size=None):
        return _Uniform(self, _shape(size))

    def integers(self, low, high, size=None):
        shape, span = _shape(size), int(high) - int(low)
        equal = [Fraction(1, span)] * span
        drawn = [low + self.decide(equal) for _ in range(int(np.prod(shape)))]
        return np.array(drawn, dtype=np.int64).reshape(shape)


def _shape(size) -> tuple[int, ...]:
    return () if size is None else (size,) if isinstance(size, int) else tuple(size)


def exact_law(run: Callable[[SecureGenerator], np.ndarray]) -> tuple[Law, dict[bytes, np.ndarray]]:
    """Return the probability of every outcome of `run(rng)`, and the outcomes themselves."""
    law: Law = defaultdict(Fraction)
    outcomes, paths = {}, [[]]
    while paths:
        replay = _Replay(paths.pop())
        outcome = np.asarray(run(replay))
        paths += replay.siblings
        key = outcome.tobytes()
        law[key] += replay.probability
        outcomes[key] = outcome
    assert sum(law.values()) == 1
    return dict(law), outcomes


def largest_ratio(laws: list[Law]) -> Fraction | float:
    """Return the largest ratio of the probabilities of one outcome under two laws."""
    worst: Fraction | float = Fraction(1)
    for key in set().union(*laws):
        found = [law.get(key, Fraction(0)) for law in laws]
        if min(found) == 0:
            return float("inf")
        worst = max(worst, max(found) / min(found))
    return worst


def exponential(epsilon: float) -> Fraction:
    """Return e^epsilon to 50 digits."""
    with localcontext() as context:
        context.prec = 50
        return Fraction(Decimal(epsilon).exp())


@pytest.fixture(scope="session")
def enumeration():
    """The functions of this file, for tests of several files."""

    class Enumeration:
        law = staticmethod(exact_law)
        ratio = staticmethod(largest_ratio)
        exponential = staticmethod(exponential)

        @staticmethod
        def check_private(randomizer, values, *, is_tight=True):
            """Assert that no outcome of the code is more than e^epsilon times as likely."""
            laws = [exact_law(lambda rng, v=v: randomizer.randomize(v, rng))[0] for v in values]
            ratio, bound = largest_ratio(laws), exponential(randomizer.epsilon)
            assert ratio <= bound, f"ratio {float(ratio)} is above {float(bound)}"
            assert ratio <= randomizer.worst_case_ratio() <= bound
            if is_tight:
                assert ratio == randomizer.worst_case_ratio()
                assert float(1 - ratio / bound) < 1e-12

        @staticmethod
        def moments(randomizer, value, contribution):
            """Return the exact mean and variance of `contribution(report)` for one value."""
            law, outcomes = exact_law(lambda rng: randomizer.randomize(value, rng))
            values = np.array([contribution(outcomes[key]) for key in law])
            weights = np.array([float(p) for p in law.values()])
            mean = weights @ values
            return mean, weights @ (values - mean) ** 2

        @classmethod
        def check_unbiased(cls, oracle):
            """Assert that estimates have the true mean and the variance that theory states."""
            for option in range(oracle.n_options):
                mean, variance = cls.moments(
                    oracle, option, lambda report: oracle.estimate(report[None]).values
                )
                truth = np.eye(oracle.n_options)[option]
                np.testing.assert_allclose(mean, truth, atol=1e-9)
                np.testing.assert_allclose(variance, oracle.variance(truth, 1), rtol=1e-9)

    return Enumeration
