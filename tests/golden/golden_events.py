"""Random events that stay the same: `random.Random.random` gives the same numbers everywhere.

Every type of `tacit.events` is drawn, nested up to three deep, most of them with settings that
somebody may use and one in ten parameters at the end of its range.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from tacit import events as ev
from tacit.events import Relation, Trials

MANY = 10**12


class Query(NamedTuple):
    """A price that is asked for."""

    event: ev.Event
    delta: float
    relation: Relation


def query(seed: int) -> Query:
    """Return the random query of a seed."""
    rng = Random(f"tacit event {seed}")
    event = _event(rng, _among(rng, (0, 1, 1, 2, 2, 2, 3)))
    delta = _rare(rng, (0.0, 1e-300, 0.5), _between(rng, 1e-12, 1e-2))
    return Query(event, delta, _among(rng, (*[Relation.ADD_REMOVE] * 3, *Relation)))


def _among(rng: Random, values: Sequence[Any]) -> Any:
    return values[int(rng.random() * len(values))]


def _between(rng: Random, low: float, high: float) -> float:
    """Draw log-uniformly, with three digits: no library function's last bit matters."""
    return float(f"{low * (high / low) ** rng.random():.3g}")


def _rare(rng: Random, extremes: Sequence[Any], usual: Any) -> Any:
    """Return `usual`, or one time in ten one of `extremes`."""
    return _among(rng, extremes) if rng.random() < 0.1 else usual


def _noise(rng: Random, low: float = 0.5, high: float = 30.0) -> float:
    return _rare(rng, (1e-60, 0.01, 1e60), _between(rng, low, high))


def _size(rng: Random, low: float = 1e-3, high: float = 4.0) -> float:
    return _rare(rng, (0.0, 1e-300, 40.0, 400.0, 1e60), _between(rng, low, high))


def _mass(rng: Random) -> float:
    return _among(rng, (0.0, 0.0, 1e-300, 1e-9, 1e-7, 0.01))


def _rate(rng: Random) -> float:
    return _rare(rng, (0.0, 1e-300, 0.999999, 1.0), _between(rng, 1e-4, 0.5))


def _factor(rng: Random) -> float:
    return _among(rng, (2.0, 2.0, 1.0))


def _count(rng: Random, low: float, high: float) -> int:
    return round(_between(rng, low, high))


def _curve(rng: Random) -> ev.Event:
    first = _between(rng, 1e-3, 0.5)
    orders, values = (1.5, 2.0, 4.0, 16.0, 64.0), (1.0, 1.4, 3.0, 12.5, 60.0)
    scaled = tuple(float(f"{first * value:.3g}") for value in values)
    return ev.RenyiCurve(orders, scaled, _factor(rng))


def _banded(rng: Random) -> ev.Event:
    column = _among(rng, ((1.0,), (1.0, 0.5), (1.0, 0.5, 0.375, 0.3125)))
    steps = _count(rng, 4, 300)
    if rng.random() < 0.5:
        return ev.BandedGaussian(
            _noise(rng, 2.0), column, steps, len(column), rate=_between(rng, 0.01, 0.9)
        )
    taken = _among(rng, (None, 1, 3))
    return ev.BandedGaussian(_noise(rng, 2.0), column, steps, _among(rng, (2, 7)), taken)


_LEAVES: tuple[Callable[[Random], ev.Event], ...] = (
    lambda rng: ev.Gaussian(_noise(rng)),
    lambda rng: ev.Gaussian(_noise(rng), _among(rng, (1.0, 1.5, 2.0))),
    lambda rng: ev.Laplace(_noise(rng), _among(rng, (1.0, 2.0))),
    lambda rng: ev.PureDP(_size(rng), _among(rng, (1.0, 1.3, 2.0))),
    lambda rng: ev.ApproximateDP(_size(rng), _mass(rng), _factor(rng)),
    lambda rng: ev.Exponential(_size(rng), _among(rng, (1.0, 2.0))),
    lambda rng: ev.RandomizedResponse(_between(rng, 0.01, 1.0), _count(rng, 2, 1000)),
    _curve,
    lambda rng: ev.GaussianMixture(_noise(rng, 2.0), (0.0, 1.0, 3.0), (0.9, 0.075, 0.025)),
    lambda rng: ev.GaussianMixture.of_sample(_noise(rng, 2.0), _between(rng, 1e-3, 0.1), 3),
    lambda rng: ev.DiscreteGaussian(_between(rng, 0.5, 50.0), _among(rng, (1, 1, 4)), _factor(rng)),
    lambda rng: ev.DiscreteLaplace(_between(rng, 0.5, 50.0), _among(rng, (1, 1, 4)), _factor(rng)),
    lambda rng: ev.ZeroConcentratedDP(_size(rng, 1e-4, 1.0), _mass(rng), _factor(rng)),
    lambda rng: ev.TreeAggregation(_noise(rng, 2.0), _count(rng, 1, 10_000)),
    _banded,
    lambda rng: ev.Shuffled(ev.PureDP(_size(rng, 0.01)), _count(rng, 1, 100_000)),
    lambda rng: _rare(rng, (ev.NonPrivate(),), ev.Gaussian(_between(rng, 1.0, 4.0))),
    lambda rng: _rare(rng, (ev.Sequence(()),), ev.Gaussian(_between(rng, 1.0, 4.0))),
)

_LAWS: tuple[dict[str, Any], ...] = (
    {"trials": Trials.GEOMETRIC},
    {"trials": Trials.GEOMETRIC, "most": 20},
    {"trials": Trials.LOGARITHMIC},
    {"trials": Trials.POISSON},
    {"trials": Trials.POISSON, "most": 20},
    {"trials": Trials.BINOMIAL, "most": 30},
    {"trials": Trials.NEGATIVE_BINOMIAL, "shape": 0.5},
    {"trials": Trials.NEGATIVE_BINOMIAL, "shape": -0.9},
    {"trials": Trials.FIXED},
)


def _best_of(rng: Random, event: ev.Event) -> ev.Event:
    law = _among(rng, _LAWS)
    return ev.BestOf(event, _among(rng, (2, 4, 10)), **law)


def _mixed(rng: Random, a: ev.Event, b: ev.Event) -> ev.Event:
    return ev.OneOf((a, b), _among(rng, ((0.5, 0.5), (0.9, 0.1), (0.0, 1.0))))


def _part(rng: Random) -> tuple[int, int]:
    n = _count(rng, 10, 100_000)
    return max(1, n // _count(rng, 2, 1000)), n


_WRAPS: tuple[Callable[[Random, ev.Event, ev.Event], ev.Event], ...] = (
    lambda rng, a, b: ev.PoissonSampled(_rate(rng), a),
    lambda rng, a, b: ev.Repeated(ev.PoissonSampled(_rate(rng), a), _count(rng, 1, 10_000)),
    lambda rng, a, b: ev.FixedSizeSampled(*_part(rng), a),
    lambda rng, a, b: ev.SampledWithReplacement(*_part(rng), a),
    lambda rng, a, b: ev.TruncatedPoissonSampled(_rate(rng), *_part(rng), a),
    lambda rng, a, b: ev.RandomAllocation(_count(rng, 1, 100), a),
    lambda rng, a, b: ev.Repeated(a, _rare(rng, (0, MANY), _count(rng, 1, 1000))),
    lambda rng, a, b: ev.Sequence((a, b)),
    lambda rng, a, b: ev.Sequence((a, b, a)),
    _mixed,
    lambda rng, a, b: ev.ChosenOf((a, b)),
    lambda rng, a, b: _best_of(rng, a),
)


def _event(rng: Random, depth: int) -> ev.Event:
    if depth == 0:
        return _among(rng, _LEAVES)(rng)
    inner, other = _event(rng, depth - 1), _event(rng, int(rng.random() * depth))
    return _among(rng, _WRAPS)(rng, inner, other)


def types(event: ev.Event) -> set[type]:
    """Return the types of an event and all events within."""
    inner = [part for part in vars(event).values() if isinstance(part, ev.Event)]
    inner += [part for part in vars(event).get("parts", ()) if isinstance(part, ev.Event)]
    return {type(event)}.union(*map(types, inner))
