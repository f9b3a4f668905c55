"""Prices: of known runs by every accountant, and the certified bracket of 2,000 random events."""

from collections.abc import Callable
from functools import partial
from typing import Any

from golden_events import Query, query

import tacit
from tacit import accounting
from tacit import events as ev
from tacit.errors import NotCertified, UnsupportedEvent
from tacit.events import Relation, Trials

EVENTS = 2_000
# Seeds whose price takes more than half a second: so all others take two minutes together.
DEAR = frozenset((
    1, 20, 29, 33, 35, 40, 47, 80, 91, 97, 113, 143, 156, 157, 179, 190, 195, 232, 235, 263,
    279, 285, 289, 305, 310, 325, 333, 350, 359, 381, 385, 389, 402, 405, 421, 435, 438, 487,
    511, 524, 532, 535, 550, 565, 576, 589, 590, 591, 596, 633, 640, 657, 674, 675, 682, 709,
    724, 725, 731, 741, 747, 754, 760, 767, 768, 787, 837, 869, 870, 888, 896, 947, 951, 962,
    965, 1015, 1034, 1062, 1065, 1119, 1123, 1162, 1172, 1182, 1193, 1221, 1236, 1279, 1287,
    1291, 1294, 1316, 1352, 1363, 1380, 1389, 1396, 1400, 1410, 1418, 1428, 1442, 1448, 1462,
    1463, 1472, 1488, 1493, 1522, 1526, 1551, 1567, 1569, 1590, 1593, 1597, 1641, 1702, 1734,
    1737, 1752, 1758, 1759, 1773, 1800, 1813, 1814, 1822, 1837, 1876, 1890, 1895, 1911, 1915,
    1930, 1963, 1970, 1975, 1990, 1992, 1999, 2019, 2021, 2034, 2060, 2061, 2084, 2090, 2092,
    2101, 2108, 2109, 2110, 2116, 2123, 2144, 2158, 2161,
))  # fmt: skip
# Seeds whose price ends in an error that is no refusal: faults found while this was recorded.
BROKEN = frozenset((668, 1336, 1351, 1534, 1922))

ABADI = ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(4.0)), 10_000)
MNIST = ev.Repeated(ev.PoissonSampled(256 / 60_000, ev.Gaussian(1.1)), 14_062)
KNOWN: dict[str, ev.Event] = {
    "abadi": ABADI,
    "mnist": MNIST,
    "long": ev.Repeated(ev.PoissonSampled(1e-4, ev.Gaussian(0.7)), 10**6),
    "one epoch": ev.Repeated(ev.PoissonSampled(0.001, ev.Gaussian(0.5)), 1000),
    "full batches": ev.Repeated(ev.Gaussian(30.0), 500),
    "gaussian": ev.Gaussian(2.0),
    "laplace": ev.Laplace(3.0),
    "laplaces": ev.Repeated(ev.Laplace(30.0), 100),
    "sampled laplaces": ev.Repeated(ev.PoissonSampled(0.05, ev.Laplace(2.0)), 100),
    "pure": ev.Repeated(ev.PureDP(0.1), 100),
    "approximate": ev.Repeated(ev.ApproximateDP(0.1, 1e-8), 50),
    "choices": ev.Repeated(ev.Exponential(0.1), 100),
    "answers": ev.Sequence(
        (ev.Repeated(ev.Gaussian(150.0), 640), ev.Repeated(ev.Gaussian(28.0), 286))
    ),
    "randomized response": ev.Repeated(ev.RandomizedResponse(0.5, 10), 3),
    "shuffled": ev.Shuffled(ev.PureDP(1.0), 100_000),
    "discrete": ev.Repeated(ev.DiscreteGaussian(10.0, 2), 30),
    "discrete laplace": ev.Repeated(ev.DiscreteLaplace(10.0, 2), 10),
    "curve": ev.RenyiCurve((2.0, 4.0, 16.0), (0.02, 0.05, 0.3)),
    "concentrated": ev.Repeated(ev.ZeroConcentratedDP(0.001), 30),
    "users": ev.Repeated(ev.GaussianMixture.of_sample(2.0, 0.01, 5), 1000),
    "tree": ev.TreeAggregation(5.0, 10_000),
    "banded": ev.BandedGaussian(3.0, (1.0, 0.5, 0.375), 600, 3, rate=0.05),
    "fixed order": ev.BandedGaussian(8.0, (1.0, 0.5, 0.375), 60, 12),
    "fixed size": ev.Repeated(ev.FixedSizeSampled(256, 60_000, ev.Gaussian(2.0)), 1000),
    "replacement": ev.Repeated(ev.SampledWithReplacement(256, 60_000, ev.Gaussian(2.0)), 1000),
    "truncated": ev.Repeated(ev.TruncatedPoissonSampled(0.01, 120, 10_000, ev.Gaussian(1.0)), 1000),
    "allocation": ev.Repeated(ev.RandomAllocation(1000, ev.Gaussian(1.0)), 10),
    "mixture": ev.OneOf((ev.Gaussian(1.0), ev.Laplace(2.0)), (0.3, 0.7)),
    "free choice": ev.ChosenOf((ev.Gaussian(1.0), ev.Laplace(2.0))),
    "best of": ev.BestOf(MNIST, 10.0, Trials.LOGARITHMIC),
    "best of cheap": ev.BestOf(ev.Gaussian(3.0), 10.0, Trials.GEOMETRIC),
    "everything": ev.Sequence((ABADI, ev.Laplace(10.0), ev.PureDP(0.1), ev.Gaussian(9.0))),
}  # fmt: skip
ACCOUNTANTS: dict[str, Callable[[], Any]] = {
    "pld": accounting.PLD,
    "rdp": accounting.RDP,
    "gdp": accounting.GDP,
    "moments": accounting.Moments,
    "strong composition": accounting.StrongComposition,
    "central limit": accounting.CentralLimitGDP,
}
REPLACED = ("abadi", "gaussian", "laplace", "pure", "discrete", "fixed size", "users")


def _or_refusal(price: Callable[[], Any]) -> tuple[float, ...] | str:
    """Return the numbers of a price, or the type of the exception that refuses it."""
    try:
        found = price()
    except (UnsupportedEvent, NotCertified) as refusal:
        return type(refusal).__name__
    return (float(found.lower), float(found.upper)) if hasattr(found, "upper") else (float(found),)


def _bracket(asked: Query) -> tuple[float, ...] | str:
    return _or_refusal(
        lambda: tacit.bracket(asked.event, delta=asked.delta, relation=asked.relation)
    )


def fuzzed(seed: int) -> tuple[float, ...] | str:
    """Return the bracket of the random event of a seed."""
    return _bracket(query(seed))


def _accounted(name: str, event: ev.Event) -> tuple[float, ...] | str:
    return _or_refusal(lambda: ACCOUNTANTS[name]().epsilon(event, delta=1e-5))


def _delta(event: ev.Event, epsilon: float) -> tuple[float, ...] | str:
    return _or_refusal(lambda: tacit.delta(event, epsilon=epsilon))


def _calibrated(make: Callable[[float], ev.Event], epsilon: float) -> tuple[float, ...]:
    return (float(tacit.calibrate(make, epsilon=epsilon, delta=1e-5)),)


def _sampled(noise: float) -> ev.Event:
    return ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(noise)), 1000)


def seeds() -> list[int]:
    """Return the seeds of the random events, in order."""
    found, seed = list[int](), 0
    while len(found) < EVENTS:
        found += [] if seed in DEAR | BROKEN else [seed]
        seed += 1
    return found


FUZZED = {f"prices/random/{seed}": partial(fuzzed, seed) for seed in seeds()}
KNOWN_PRICES = {
    f"prices/{name}/delta {delta:g}": partial(_bracket, Query(event, delta, Relation.ADD_REMOVE))
    for name, event in KNOWN.items()
    for delta in (1e-5, 1e-9)
}
KNOWN_PRICES |= {
    f"prices/{name}/replaced": partial(_bracket, Query(KNOWN[name], 1e-5, Relation.REPLACE_ONE))
    for name in REPLACED
}
KNOWN_PRICES |= {
    f"prices/{name}/{accountant}": partial(_accounted, accountant, event)
    for name, event in KNOWN.items()
    for accountant in ACCOUNTANTS
}
KNOWN_PRICES |= {
    f"prices/{name}/epsilon {epsilon:g}": partial(_delta, event, epsilon)
    for name, event in KNOWN.items()
    for epsilon in (0.5, 2.0)
}
KNOWN_PRICES |= {
    f"prices/calibrated/{name}/{epsilon:g}": partial(_calibrated, make, epsilon)
    for name, make in (("gaussian", ev.Gaussian), ("laplace", ev.Laplace), ("sampled", _sampled))
    for epsilon in (0.5, 1.0, 8.0)
}
CASES = KNOWN_PRICES | FUZZED
