"""Events: values that state what was done to private data.

An event is frozen, hashable and nestable. It checks its own fields and does nothing else: its
meaning never changes, and `tacit.accounting` computes what it costs.

Noise is stated relative to what **one record contributes**: the change when that record is added
or removed. When a record is *replaced*, its old contribution leaves and a new one enters, so the
change can be up to twice as large. `replace_factor` is how many times larger it can really be: 2
unless a proof beside the mechanism gives less. So one event is priced correctly under every
neighboring relation.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import pairwise
from typing import Any, cast

from tacit._check import in_closed_unit, non_negative, positive, whole


class Relation(StrEnum):
    """Neighboring relation: the pairs of data sets whose outputs the guarantee compares."""

    ADD_REMOVE = "add_remove"
    """One data set is the other plus one record."""
    REPLACE_ONE = "replace_one"
    """Both have the same size, and one record has other values."""
    ZERO_OUT = "zero_out"
    """Both have the same size, and one record contributes nothing. Its slot is still sampled."""


@dataclass(frozen=True)
class Event:
    """Base class of all events, for annotations only."""

    def to_dict(self) -> dict[str, Any]:
        """Return this event as plain JSON values, from which `from_dict` makes an equal event."""
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {"type": type(self).__name__} | values

    def to_json(self) -> str:
        """Return this event as one line of JSON with sorted keys; equal events give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)


@dataclass(frozen=True)
class NonPrivate(Event):
    """A release without any protection; its epsilon is infinite."""

    def __str__(self) -> str:
        return "a release without noise"


@dataclass(frozen=True)
class _AdditiveNoise:
    noise_multiplier: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        _set(self, noise_multiplier=_noise(self.noise_multiplier))
        _set(self, replace_factor=_factor(self.replace_factor))


@dataclass(frozen=True)
class Gaussian(_AdditiveNoise, Event):
    """Normal noise added to a vector.

    Its standard deviation is `noise_multiplier` times the L2 norm of what one record contributes.

    >>> str(Gaussian(4.0))
    'Gaussian noise, multiplier 4'
    """

    def __str__(self) -> str:
        return f"Gaussian noise, multiplier {self.noise_multiplier:g}"


@dataclass(frozen=True)
class Laplace(_AdditiveNoise, Event):
    """Laplace noise added to a vector.

    Its scale is `noise_multiplier` times the L1 norm of what one record contributes. One such
    release is pure DP with epsilon = 1 / noise_multiplier.
    """

    def __str__(self) -> str:
        return f"Laplace noise, multiplier {self.noise_multiplier:g}"


@dataclass(frozen=True)
class _PureEpsilon:
    epsilon: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        _set(self, epsilon=_epsilon(self.epsilon))
        _set(self, replace_factor=_factor(self.replace_factor))


@dataclass(frozen=True)
class PureDP(_PureEpsilon, Event):
    """Any release proved `epsilon`-DP (delta 0) when a record is added or removed."""

    def __str__(self) -> str:
        return f"pure DP, epsilon {self.epsilon:g}"


@dataclass(frozen=True)
class Exponential(_PureEpsilon, Event):
    """One draw of an `epsilon`-DP exponential mechanism, which therefore has bounded range.

    An option has weight exp(epsilon * utility / (2 * sensitivity)). The largest utility plus Gumbel
    noise has the same law (Durfee & Rogers 2019). Many such draws cost less than as many
    `PureDP(epsilon)`, because their range is bounded by `epsilon`.
    """

    def __str__(self) -> str:
        return f"exponential mechanism, epsilon {self.epsilon:g}"


@dataclass(frozen=True)
class ApproximateDP(Event):
    """Any release proved (`epsilon`, `delta`)-DP when a record is added or removed.

    `replace_factor` is 1 if the same holds when a record is replaced, and 2 if a replacement is
    covered by group privacy only.
    """

    epsilon: float
    delta: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        _set(self, epsilon=_epsilon(self.epsilon))
        _set(self, delta=in_closed_unit(delta=self.delta))
        _set(self, replace_factor=_one_or_two(self))

    def __str__(self) -> str:
        return f"approximate DP, epsilon {self.epsilon:g}, delta {self.delta:g}"


@dataclass(frozen=True)
class RandomizedResponse(Event):
    """One record reports one of `n_options`, at random with probability `random_probability`.

    A random report is uniform over all options; any other report is the true one. Under every
    relation, neighbors may differ in that record's true option: an absent record is priced as one
    whose true option is another.
    """

    random_probability: float
    n_options: int = 2

    def __post_init__(self) -> None:
        probability = in_closed_unit(random_probability=self.random_probability)
        if probability < 1e-60:
            raise ValueError(
                f"random_probability must be at least 1e-60, got {probability}. Use NonPrivate()."
            )
        _set(self, random_probability=probability)
        _set(self, n_options=whole(n_options=self.n_options, least=2))

    def __str__(self) -> str:
        return (
            f"randomized response, {self.n_options} options, "
            f"uniform with probability {self.random_probability:g}"
        )


@dataclass(frozen=True)
class RenyiCurve(Event):
    """Any release whose Rényi divergence of order `orders[i]` is proved to be at most `values[i]`.

    The proof must hold in both directions when a record is added or removed. `replace_factor` is 1
    if the same curve holds when a record is replaced, and 2 if nothing is known about replacement.
    """

    orders: tuple[float, ...]
    values: tuple[float, ...]
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        orders = tuple(float(order) for order in self.orders)
        values = tuple(float(value) for value in self.values)
        if len(orders) != len(values) or not orders:
            raise ValueError(
                f"orders and values must have one length >= 1, got {len(orders)} and {len(values)}."
            )
        if not all(math.isfinite(order) and order > 1 for order in orders):
            raise ValueError("orders must be finite and above 1.")
        if any(b <= a for a, b in pairwise(orders)):
            raise ValueError("orders must increase.")
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError("values must be finite and >= 0. Leave out orders without a bound.")
        _set(self, orders=orders, values=values, replace_factor=_one_or_two(self))

    def __str__(self) -> str:
        return f"Rényi curve at {len(self.orders)} orders"


@dataclass(frozen=True)
class PoissonSampled(Event):
    """`event` on a random subset that holds each record independently with probability `rate`."""

    rate: float
    event: Event

    def __post_init__(self) -> None:
        _set(self, rate=in_closed_unit(rate=self.rate))
        _nested(self.event)

    def __str__(self) -> str:
        return f"Poisson sample at rate {self.rate:g} of [{self.event}]"


@dataclass(frozen=True)
class TruncatedPoissonSampled(Event):
    """`event` on a Poisson sample of `n_records` at `rate`, cut to `max_batch` if it is larger.

    The cut keeps a uniformly random subset of size `max_batch`.
    """

    rate: float
    max_batch: int
    n_records: int
    event: Event

    def __post_init__(self) -> None:
        _set(self, rate=in_closed_unit(rate=self.rate))
        _set(self, max_batch=whole(max_batch=self.max_batch, least=1))
        _set(self, n_records=whole(n_records=self.n_records, least=1))
        _nested(self.event)

    def __str__(self) -> str:
        return (
            f"Poisson sample at rate {self.rate:g} of {self.n_records} records, "
            f"at most {self.max_batch}, of [{self.event}]"
        )


@dataclass(frozen=True)
class FixedSizeSampled(Event):
    """`event` on `batch_size` of `n_records` records, drawn without replacement each time."""

    batch_size: int
    n_records: int
    event: Event

    def __post_init__(self) -> None:
        _set(self, batch_size=whole(batch_size=self.batch_size, least=1))
        _set(self, n_records=whole(n_records=self.n_records, least=1))
        if self.batch_size > self.n_records:
            raise ValueError(
                f"batch_size must be <= n_records, got {self.batch_size} and {self.n_records}."
            )
        _nested(self.event)

    def __str__(self) -> str:
        return f"{self.batch_size} of {self.n_records} records without replacement, [{self.event}]"


@dataclass(frozen=True)
class RandomAllocation(Event):
    """One epoch of `steps` releases of `event`, each record in one of them at random.

    The step is chosen uniformly, independently for each record, and anew in every epoch. This is
    also called balls and bins.
    """

    steps: int
    event: Event

    def __post_init__(self) -> None:
        _set(self, steps=whole(steps=self.steps, least=1))
        _nested(self.event)

    def __str__(self) -> str:
        return f"random allocation to {self.steps} steps of [{self.event}]"


@dataclass(frozen=True)
class Repeated(Event):
    """`event` repeated `count` times, each time with fresh randomness.

    >>> str(Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000))
    '10,000 x [Poisson sample at rate 0.01 of [Gaussian noise, multiplier 4]]'
    """

    event: Event
    count: int

    def __post_init__(self) -> None:
        _set(self, count=whole(count=self.count))
        _nested(self.event)

    def __str__(self) -> str:
        return f"{self.count:,} x [{self.event}]"


@dataclass(frozen=True)
class Sequence(Event):
    """All of `parts` on the same data; later parts may depend on the results of earlier ones.

    Inside a sampled event, all parts use the same sample. `Sequence(())` costs nothing.
    """

    parts: tuple[Event, ...]

    def __post_init__(self) -> None:
        _set(self, parts=tuple(self.parts))
        for part in self.parts:
            _nested(part)

    def __str__(self) -> str:
        if len(self.parts) > 6:
            head = "; ".join(str(part) for part in self.parts[:4])
            return f"{head}; and {len(self.parts) - 4} more"
        return "; ".join(str(part) for part in self.parts) or "nothing"


class Trials(StrEnum):
    """Probability law of the number of runs in `BestOf`."""

    GEOMETRIC = "geometric"
    LOGARITHMIC = "logarithmic"
    POISSON = "poisson"


@dataclass(frozen=True)
class BestOf(Event):
    """A random number of runs of `event`, of which only the best is released (private selection).

    The number of runs follows the law `trials` with mean `mean`. Geometric and logarithmic laws
    give at least one run, a Poisson law may give none (Papernot & Steinke 2022, arXiv:2110.03620).
    """

    event: Event
    mean: float
    trials: Trials = Trials.LOGARITHMIC

    def __post_init__(self) -> None:
        _set(self, trials=Trials(self.trials))
        mean = positive(mean=self.mean)
        if self.trials is not Trials.POISSON and mean <= 1:
            raise ValueError(f"mean must be above 1 for {self.trials} trials, got {self.mean}.")
        _set(self, mean=mean)
        _nested(self.event)

    def __str__(self) -> str:
        return f"best of {self.mean:g} runs ({self.trials}) of [{self.event}]"


_TYPES: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        NonPrivate,
        Gaussian,
        Laplace,
        PureDP,
        Exponential,
        ApproximateDP,
        RandomizedResponse,
        RenyiCurve,
        PoissonSampled,
        TruncatedPoissonSampled,
        FixedSizeSampled,
        RandomAllocation,
        Repeated,
        Sequence,
        BestOf,
    )
}


def from_dict(data: Mapping[str, Any]) -> Event:
    """Return the event that `Event.to_dict` wrote; only the types of this module are accepted."""
    if not isinstance(cast("object", data), Mapping) or "type" not in data:
        raise ValueError("an event must be an object with a 'type'.")
    kind = _TYPES.get(data["type"]) if isinstance(data["type"], str) else None
    if kind is None:
        raise ValueError(f"event type must be one of {', '.join(_TYPES)}, got {data['type']!r}.")
    values = {name: value for name, value in data.items() if name != "type"}
    if extra := sorted(set(values) - {field.name for field in fields(kind)}):
        raise ValueError(f"{kind.__name__} has no field {', '.join(extra)}.")
    try:
        return kind(**{name: _rich(value) for name, value in values.items()})
    except TypeError as wrong:
        raise ValueError(f"{kind.__name__} cannot be read: {wrong}") from None


def from_json(text: str) -> Event:
    """Return the event that `Event.to_json` wrote.

    >>> from_json(Repeated(Gaussian(2.0), 3).to_json()) == Repeated(Gaussian(2.0), 3)
    True
    """
    try:
        return from_dict(json.loads(text))
    except RecursionError:
        raise ValueError("the event is nested too deeply to be read.") from None


def _plain(value: Any) -> Any:  # Any: JSON values have no narrower common type
    if isinstance(value, Event):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[Any, ...]", value)]
    return str(value) if isinstance(value, StrEnum) else value


def _rich(value: Any) -> Any:  # Any: the inverse of _plain
    if isinstance(value, Mapping):
        return from_dict(cast("Mapping[str, Any]", value))
    if isinstance(value, list):
        return tuple(_rich(item) for item in cast("list[Any]", value))
    return value


def _set(event: object, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(event, name, value)


def _nested(event: object) -> None:
    if not isinstance(event, Event):
        raise TypeError(f"event must be an Event, got {type(event).__name__}.")


def _noise(value: object) -> float:
    noise = positive(noise_multiplier=value)
    if not 1e-60 <= noise <= 1e60:  # outside, fourth powers leave the range of floats
        raise ValueError(f"noise_multiplier must be within 1e-60 and 1e60, got {value}.")
    return noise


def _epsilon(value: object) -> float:
    epsilon = non_negative(epsilon=value)
    if epsilon > 1e60:
        raise ValueError(f"epsilon must be at most 1e60, got {value}. Use NonPrivate().")
    return epsilon


def _factor(value: object) -> float:
    factor = positive(replace_factor=value)
    if not 1 <= factor <= 2:
        raise ValueError(f"replace_factor must be in [1, 2], got {value}.")
    return factor


def _one_or_two(event: ApproximateDP | RenyiCurve) -> float:
    factor = _factor(event.replace_factor)
    if factor not in (1.0, 2.0):
        raise ValueError(f"replace_factor must be 1 or 2 for {type(event).__name__}, got {factor}.")
    return factor
