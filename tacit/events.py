"""Events: values that say what was done to private data.

An event is frozen, hashable, nestable and carries no behavior beyond checking itself: what it means
never changes, and what it costs is the accountants' business. Standard library only.

Noise is stated relative to what **one record contributes**: the change when that record is added
or removed. When a record is *replaced*, its old contribution leaves and a new one enters, so the
change can be up to twice as large; `replace_factor` says how much larger it really is (2 unless a
proof beside the mechanism gives less), so that one event is priced correctly under every relation.

Past 400 lines on purpose: the closed list of events, with its one way to and from JSON, is one idea
and is read from top to bottom.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import pairwise
from typing import Any

from tacit._check import (
    in_closed_unit,
    non_negative,
    positive,
    whole,
)


class Relation(StrEnum):
    """Which pairs of data sets are neighbors: the guarantee compares their outputs."""

    ADD_REMOVE = "add_remove"
    """One data set is the other plus one record."""
    REPLACE_ONE = "replace_one"
    """Same size, one record has other values."""
    ZERO_OUT = "zero_out"
    """Same size, one record contributes nothing (its slot stays and is sampled as before)."""


class Event:
    """Base of all events; use it in annotations, never on its own."""

    def to_dict(self) -> dict[str, Any]:
        """This event as plain JSON values; `from_dict` gives an equal event back."""
        return {"type": type(self).__name__} | {
            f.name: _plain(getattr(self, f.name))
            for f in fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        }

    def to_json(self) -> str:
        """This event as one line of JSON, keys sorted: equal events give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)


@dataclass(frozen=True, repr=True)
class NonPrivate(Event):
    """A release without protection: it costs infinitely much."""

    def __str__(self) -> str:
        return "a release without noise"


@dataclass(frozen=True)
class Gaussian(Event):
    """Normal noise on a vector; std is `noise_multiplier` times one record's L2 contribution.

    >>> str(Gaussian(4.0))
    'Gaussian noise, multiplier 4'
    """

    noise_multiplier: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        _set(self, noise_multiplier=_noise(self.noise_multiplier))
        _set(self, replace_factor=_factor(self.replace_factor))

    def __str__(self) -> str:
        return f"Gaussian noise, multiplier {self.noise_multiplier:g}"


@dataclass(frozen=True)
class Laplace(Event):
    """Laplace noise on a vector; scale is `noise_multiplier` times one record's L1 contribution.

    Alone it is pure DP with epsilon = 1 / noise_multiplier.
    """

    noise_multiplier: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        _set(self, noise_multiplier=_noise(self.noise_multiplier))
        _set(self, replace_factor=_factor(self.replace_factor))

    def __str__(self) -> str:
        return f"Laplace noise, multiplier {self.noise_multiplier:g}"


@dataclass(frozen=True)
class PureDP(Event):
    """Anything proved `epsilon`-DP (delta 0) when a record is added or removed."""

    epsilon: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        _set(self, epsilon=_epsilon(self.epsilon))
        _set(self, replace_factor=_factor(self.replace_factor))

    def __str__(self) -> str:
        return f"pure DP, epsilon {self.epsilon:g}"


@dataclass(frozen=True)
class ApproximateDP(Event):
    """Anything proved (`epsilon`, `delta`)-DP when a record is added or removed.

    `replace_factor` is 1 if the same holds when a record is replaced, 2 if only group privacy does.
    """

    epsilon: float
    delta: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        _set(self, epsilon=_epsilon(self.epsilon))
        _set(self, delta=in_closed_unit(delta=self.delta))
        _set(self, replace_factor=_factor(self.replace_factor))
        if self.replace_factor not in (1.0, 2.0):
            raise ValueError(
                f"replace_factor must be 1 or 2 for ApproximateDP, got {self.replace_factor}."
            )

    def __str__(self) -> str:
        return f"approximate DP, epsilon {self.epsilon:g}, delta {self.delta:g}"


@dataclass(frozen=True)
class Exponential(Event):
    """One draw of the exponential mechanism that is `epsilon`-DP, hence `epsilon`-bounded-range.

    Weights exp(epsilon * utility / (2 * sensitivity)); Gumbel noisy max is the same mechanism
    (Durfee & Rogers 2019). Bounded range makes it cheaper to compose than `PureDP(epsilon)`.
    """

    epsilon: float
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        _set(self, epsilon=_epsilon(self.epsilon))
        _set(self, replace_factor=_factor(self.replace_factor))

    def __str__(self) -> str:
        return f"exponential mechanism, epsilon {self.epsilon:g}"


@dataclass(frozen=True)
class RandomizedResponse(Event):
    """One record answers among `n_options`; with `random_probability` the answer is uniform.

    Neighbors may differ in that record's true answer, under every relation: a record that is not
    there is charged as one that answers otherwise.
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
    """Anything with a proved Rényi curve: divergence of order `orders[i]` at most `values[i]`.

    Proved for records added or removed, in both directions; `replace_factor` 1 says that the same
    curve holds when a record is replaced, 2 that nothing is known of replacement.
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
            raise ValueError("values must be finite and >= 0; leave out orders without a bound.")
        _set(self, orders=orders, values=values)
        _set(self, replace_factor=_factor(self.replace_factor))
        if self.replace_factor not in (1.0, 2.0):
            raise ValueError(
                f"replace_factor must be 1 or 2 for RenyiCurve, got {self.replace_factor}."
            )

    def __str__(self) -> str:
        return f"Rényi curve at {len(self.orders)} orders"


@dataclass(frozen=True)
class PoissonSampled(Event):
    """`event` on a random subset: each record takes part with probability `rate`, on its own."""

    rate: float
    event: Event

    def __post_init__(self) -> None:
        _set(self, rate=in_closed_unit(rate=self.rate))
        _nested(self.event)

    def __str__(self) -> str:
        return f"Poisson sample at rate {self.rate:g} of [{self.event}]"


@dataclass(frozen=True)
class TruncatedPoissonSampled(Event):
    """Poisson sampling of `n_records` at `rate`, then a random `max_batch` of them if more came."""

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
    """`event` on `batch_size` of `n_records` records drawn without replacement, fresh each time."""

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
    """One epoch of `steps` releases of `event`; each record takes part in one, chosen uniformly.

    The choice is independent across records and redrawn each epoch (balls into bins).
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
    """`event`, `count` times, each with fresh randomness.

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
    """All of `parts`, on the same data; later ones may depend on the results of earlier ones.

    Inside a sampled event the parts see the same sample. `Sequence(())` costs nothing.
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


@dataclass(frozen=True)
class Shuffled(Event):
    """`n_reports` persons each send one report of `event`, and the order of reports is hidden.

    `event` is local: it protects one person's value. A shuffler removes who sent which report
    before anyone sees them. Neighbors may differ in one person's value, under every relation: a
    person who is not there is charged as one with another value.
    """

    event: Event
    n_reports: int

    def __post_init__(self) -> None:
        _set(self, n_reports=whole(n_reports=self.n_reports, least=1))
        _nested(self.event)

    def __str__(self) -> str:
        return f"{self.n_reports:,} shuffled reports of [{self.event}]"


class Trials(StrEnum):
    """Law of the random number of runs in `BestOf`."""

    GEOMETRIC = "geometric"
    LOGARITHMIC = "logarithmic"
    POISSON = "poisson"


@dataclass(frozen=True)
class BestOf(Event):
    """Only the best of a random number of runs of `event` is released (private selection).

    The number of runs follows `trials` with mean `mean`; geometric and logarithmic laws give at
    least one run, a Poisson law may give none. Papernot & Steinke 2022 (arXiv:2110.03620).
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
        ApproximateDP,
        Exponential,
        RandomizedResponse,
        RenyiCurve,
        PoissonSampled,
        TruncatedPoissonSampled,
        FixedSizeSampled,
        RandomAllocation,
        Repeated,
        Sequence,
        Shuffled,
        BestOf,
    )
}


def from_dict(data: Mapping[str, Any]) -> Event:
    """The event that `Event.to_dict` wrote; only the types of this module can come out."""
    if not isinstance(data, Mapping) or "type" not in data:
        raise ValueError("an event must be an object with a 'type'.")
    kind = _TYPES.get(data["type"]) if isinstance(data["type"], str) else None
    if kind is None:
        raise ValueError(f"event type must be one of {', '.join(_TYPES)}, got {data['type']!r}.")
    given = {name: value for name, value in data.items() if name != "type"}
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]  # every member is a dataclass
    if extra := sorted(set(given) - known):
        raise ValueError(f"{kind.__name__} has no field {', '.join(extra)}.")
    try:
        return kind(**{name: _rich(value) for name, value in given.items()})
    except TypeError as wrong:
        raise ValueError(f"{kind.__name__} cannot be read: {wrong}") from None


def from_json(text: str) -> Event:
    """The event that `Event.to_json` wrote.

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
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else value


def _rich(value: Any) -> Any:  # Any: the inverse of _plain
    if isinstance(value, Mapping):
        return from_dict(value)
    if isinstance(value, list):
        return tuple(_rich(item) for item in value)
    return value


def _set(event: Event, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(event, name, value)


def _nested(event: object) -> None:
    if not isinstance(event, Event):
        raise TypeError(f"event must be an Event, got {type(event).__name__}.")


def _noise(value: object) -> float:
    noise = positive(noise_multiplier=value)
    if not 1e-60 <= noise <= 1e60:  # beyond, fourth powers leave the range of floats
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
