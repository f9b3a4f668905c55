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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import pairwise
from numbers import Real
from typing import Any, ClassVar, NoReturn, cast

from tacit._check import in_closed_unit, non_negative, positive, whole, within
from tacit._participation import participation_norm


class Relation(StrEnum):
    """Neighboring relation: the pairs of data sets whose outputs the guarantee compares."""

    ADD_REMOVE = "add_remove"
    """One data set is the other plus one record."""
    REPLACE_ONE = "replace_one"
    """Both have the same size, and one record has other values."""
    ZERO_OUT = "zero_out"
    """Both have the same size, and one record contributes nothing. Its slot is still sampled."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(f"relation must be one of {', '.join(cls)}, got {value!r}.")


@dataclass(frozen=True)
class Event:
    """Base class of all events: statements of what was done to private data.

    It has no instances of its own. Every field of an event is checked by the rule that `_RULES` has
    for its name. `str(event)` is the template `_text` with the fields filled in.
    """

    _text: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if name in _RULES:
                object.__setattr__(self, name, _RULES[name](getattr(self, name)))

    def __str__(self) -> str:
        return self._text.format(**vars(self))

    def to_dict(self) -> dict[str, Any]:
        """Return this event as plain JSON values, from which `from_dict` makes an equal event.

        Fields that are None are left out.
        """
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        given = {name: value for name, value in values.items() if value is not None}
        return {"type": type(self).__name__} | given

    def to_json(self) -> str:
        """Return this event as one line of JSON with sorted keys; equal events give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)


@dataclass(frozen=True)
class NonPrivate(Event):
    """A release without any protection; its epsilon is infinite."""

    _text = "a release without noise"


@dataclass(frozen=True)
class Gaussian(Event):
    """Normal noise added to a vector.

    The standard deviation of the noise is `noise_multiplier` times the largest L2 norm of what one
    record contributes.

    >>> str(Gaussian(4.0))
    'Gaussian noise, multiplier 4'
    """

    noise_multiplier: float
    replace_factor: float = 2.0
    _text = "Gaussian noise, multiplier {noise_multiplier:g}"


@dataclass(frozen=True)
class Laplace(Event):
    """Laplace noise added to a vector.

    The scale of the noise is `noise_multiplier` times the largest L1 norm of what one record
    contributes. One such release is pure DP with epsilon = 1 / noise_multiplier.
    """

    noise_multiplier: float
    replace_factor: float = 2.0
    _text = "Laplace noise, multiplier {noise_multiplier:g}"


@dataclass(frozen=True)
class PureDP(Event):
    """Any release proved `epsilon`-DP (delta 0) when a record is added or removed."""

    epsilon: float
    replace_factor: float = 2.0
    _text = "pure DP, epsilon {epsilon:g}"


@dataclass(frozen=True)
class ApproximateDP(Event):
    """Any release proved (`epsilon`, `delta`)-DP when a record is added or removed.

    `replace_factor` is 1 if (`epsilon`, `delta`) also holds when a record is replaced. It is 2 if a
    replacement has to be priced as a removal and an addition, by group privacy.
    """

    epsilon: float
    delta: float
    replace_factor: float = 2.0
    _text = "approximate DP, epsilon {epsilon:g}, delta {delta:g}"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_one_or_two(self)


@dataclass(frozen=True)
class Exponential(Event):
    """One draw of an `epsilon`-DP exponential mechanism, which therefore has bounded range.

    An option is drawn with weight exp(epsilon * utility / (2 * sensitivity)). The option of the
    largest utility plus Gumbel noise has the same law (Durfee & Rogers 2019). The privacy losses of
    all options span at most `epsilon` (bounded range), so many draws cost less in composition than
    as many `PureDP(epsilon)`.
    """

    epsilon: float
    replace_factor: float = 2.0
    _text = "exponential mechanism, epsilon {epsilon:g}"


@dataclass(frozen=True)
class RandomizedResponse(Event):
    """One record reports one of `n_options`, at random with probability `random_probability`.

    A random report is uniform over all options; otherwise the true option is reported. Under every
    relation, neighbors may differ in the true option of one record. Adding or removing a record is
    priced like a change of its true option.
    """

    random_probability: float
    n_options: int = 2
    _text = (
        "randomized response, {n_options} options, uniform with probability {random_probability:g}"
    )


@dataclass(frozen=True)
class RenyiCurve(Event):
    """Any release whose Rényi divergence of order `orders[i]` is proved to be at most `values[i]`.

    The bound must hold both when a record is added and when one is removed. `replace_factor` is 1
    if it also holds when a record is replaced, and 2 if nothing is known about replacement.
    """

    orders: tuple[float, ...]
    values: tuple[float, ...]
    replace_factor: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        orders, values = self.orders, self.values
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
        _check_one_or_two(self)

    def __str__(self) -> str:
        return f"Rényi curve at {len(self.orders)} orders"


@dataclass(frozen=True)
class GaussianMixture(Event):
    """Normal noise, where what one unit contributes has one of the sizes `shifts`, at random.

    A unit, such as a user, contributes at most `shifts[i]` times a clip norm with probability
    `weights[i]`; the standard deviation of the noise is `noise_multiplier` times that clip norm.
    This is a step of DP-SGD that draws records, of which a user may have several
    (`tacit.sampling.Poisson.amplify_user`; Charles et al. 2024, arXiv:2407.07737).
    """

    noise_multiplier: float
    shifts: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shifts) != len(self.weights) or not self.shifts:
            raise ValueError(
                f"shifts and weights must have one length >= 1, got {len(self.shifts)} and "
                f"{len(self.weights)}."
            )
        if not all(0 <= shift < math.inf for shift in self.shifts):
            raise ValueError("shifts must be finite and >= 0.")
        _check_weights(self.weights)

    @classmethod
    def of_sample(cls, noise_multiplier: float, rate: float, records: int) -> "GaussianMixture":
        """Return the event of one Poisson sample for a unit that has `records` records."""
        counts = range(records + 1)
        weights = [math.comb(records, k) * rate**k * (1 - rate) ** (records - k) for k in counts]
        return cls(noise_multiplier, tuple(map(float, counts)), tuple(weights))

    def __str__(self) -> str:
        most = max(self.shifts)
        return f"Gaussian noise, multiplier {self.noise_multiplier:g}, up to {most:g} contributions"


@dataclass(frozen=True)
class DiscreteGaussian(Event):
    """Discrete Gaussian noise on one whole number: probability proportional to exp(-k^2 / (2 s^2)).

    `noise_std` is s. One record changes the number by at most `sensitivity`, a whole number. Under
    replacement it changes by at most `replace_factor`, 1 or 2, times as much. Canonne, Kamath &
    Steinke 2020 (arXiv:2004.00010).
    """

    noise_std: float
    sensitivity: int = 1
    replace_factor: float = 2.0
    _text = "discrete Gaussian noise {noise_std:g}, sensitivity {sensitivity}"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_one_or_two(self)


@dataclass(frozen=True)
class DiscreteLaplace(Event):
    """Discrete Laplace noise on one whole number: probability proportional to exp(-|k| / scale).

    `noise_scale` is the scale. The other fields are those of `DiscreteGaussian`.
    """

    noise_scale: float
    sensitivity: int = 1
    replace_factor: float = 2.0
    _text = "discrete Laplace noise {noise_scale:g}, sensitivity {sensitivity}"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_one_or_two(self)


@dataclass(frozen=True)
class ZeroConcentratedDP(Event):
    """Any release proved to be `delta`-approximate `rho`-zCDP when a record is added or removed.

    Its Rényi divergence of every order is at most `rho` times the order, except with probability
    `delta` (Bun & Steinke 2016, arXiv:1605.02065). `replace_factor` is as in `RenyiCurve`.
    """

    rho: float
    delta: float = 0.0
    replace_factor: float = 2.0
    _text = "zCDP, rho {rho:g}, delta {delta:g}"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_one_or_two(self)


@dataclass(frozen=True)
class TreeAggregation(Event):
    """All prefix sums of `steps` contributions by a binary tree, each record in one of them.

    Every node of the tree gets Gaussian noise of `noise_multiplier` times what one record
    contributes. A record is in at most floor(log2(steps)) + 1 nodes (Kairouz et al. 2021,
    arXiv:2103.00039).
    """

    noise_multiplier: float
    steps: int
    replace_factor: float = 2.0
    _text = "tree of {steps} steps, Gaussian noise, multiplier {noise_multiplier:g}"


@dataclass(frozen=True)
class BandedGaussian(Event):
    """A run of `steps` Gaussian releases C g + z: noise that is correlated over time.

    z has deviation `noise_multiplier` times what a record contributes to a sum, C is `column` from
    the diagonal down. A record takes part in at most `participations` steps (None: all that fit),
    `separation` apart; for a `rate` below 1, at that rate, in turns of `separation` groups.
    """

    noise_multiplier: float
    column: tuple[float, ...]
    steps: int
    separation: int
    participations: int | None = None
    rate: float = 1.0
    replace_factor: float = 2.0
    _text = "{steps:,} steps of correlated Gaussian noise, multiplier {noise_multiplier:g}; records at rate {rate:g}, {separation} steps apart"  # noqa: E501  # a template

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (all(abs(c) < 1e100 for c in self.column) and abs([*self.column, 0][0]) > 1e-100):
            raise ValueError("column must hold numbers below 1e100, the first above 1e-100.")
        if self.rate < 1 and (len(self.column) > self.separation or self.participations):
            raise ValueError("a rate below 1 needs len(column) <= separation, no participations.")

    @property
    def equivalent(self) -> Event:
        """Independent releases of the same price; `tacit._participation` has the sources."""
        turns = -(-self.steps // self.separation)
        joint = min(turns, self.participations or turns) if self.rate == 1 else 1
        moved = participation_norm(self.column, self.steps, self.separation, joint)
        release = Gaussian(self.noise_multiplier / (moved * (1 + 1e-12)), self.replace_factor)
        return release if self.rate == 1 else Repeated(PoissonSampled(self.rate, release), turns)


@dataclass(frozen=True)
class PoissonSampled(Event):
    """`event` on a random subset that holds each record independently with probability `rate`."""

    rate: float
    event: Event
    _text = "Poisson sample at rate {rate:g} of [{event}]"


@dataclass(frozen=True)
class TruncatedPoissonSampled(Event):
    """`event` on a Poisson sample of `n_records` records at `rate`, of at most `max_batch` records.

    If more are drawn, a uniformly random subset of size `max_batch` is kept.
    """

    rate: float
    max_batch: int
    n_records: int
    event: Event
    _text = (
        "Poisson sample at rate {rate:g} of {n_records} records, at most {max_batch}, of [{event}]"
    )


@dataclass(frozen=True)
class FixedSizeSampled(Event):
    """`event` on a uniformly random subset of exactly `batch_size` of the `n_records` records."""

    batch_size: int
    n_records: int
    event: Event
    _text = "{batch_size} of {n_records} records without replacement, [{event}]"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size > self.n_records:
            raise ValueError(
                f"batch_size must be <= n_records, got {self.batch_size} and {self.n_records}."
            )


@dataclass(frozen=True)
class SampledWithReplacement(Event):
    """`event` on `batch_size` draws, each uniform over all `n_records` records.

    A record may be drawn several times; then it contributes several times.
    """

    batch_size: int
    n_records: int
    event: Event
    _text = "{batch_size} of {n_records} records with replacement, [{event}]"


@dataclass(frozen=True)
class RandomAllocation(Event):
    """One epoch of `steps` releases of `event`, where each record takes part in only one of them.

    The step of a record is chosen uniformly at random, independently of other records, and anew in
    every epoch. This is also called balls and bins.
    """

    steps: int
    event: Event
    _text = "random allocation to {steps} steps of [{event}]"


@dataclass(frozen=True)
class Repeated(Event):
    """`event` repeated `count` times, each time with fresh randomness.

    >>> str(Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000))
    '10,000 x [Poisson sample at rate 0.01 of [Gaussian noise, multiplier 4]]'
    """

    event: Event
    count: int
    _text = "{count:,} x [{event}]"


@dataclass(frozen=True)
class Sequence(Event):
    """All of the events `parts` on the same data; a part may depend on results of earlier parts.

    Inside a sampled event, all parts use the same random sample. `Sequence(())` costs nothing.
    """

    parts: tuple[Event, ...]

    def __str__(self) -> str:
        if len(self.parts) > 6:
            head = "; ".join(str(part) for part in self.parts[:4])
            return f"{head}; and {len(self.parts) - 4} more"
        return "; ".join(str(part) for part in self.parts) or "nothing"


@dataclass(frozen=True)
class Shuffled(Event):
    """`n_reports` persons each send one report of `event`, and their order is hidden.

    `event` is local: one report protects one person's value. A shuffler removes who sent which
    report before anyone sees the reports. Under every relation, neighbors may differ in one
    person's value. Adding or removing a person is priced like a change of that person's value.
    """

    event: Event
    n_reports: int
    _text = "{n_reports:,} shuffled reports of [{event}]"


@dataclass(frozen=True)
class OneOf(Event):
    """One of the events `parts`, chosen at random with the public probabilities `weights`.

    The choice does not depend on the data and may be released. `weights` must sum to 1.

    >>> str(OneOf((Gaussian(2.0), Gaussian(4.0)), (0.25, 0.75)))
    '25% [Gaussian noise, multiplier 2]; 75% [Gaussian noise, multiplier 4]'
    """

    parts: tuple[Event, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.parts) != len(self.weights) or not self.parts:
            raise ValueError(
                f"parts and weights must have one length >= 1, got {len(self.parts)} and "
                f"{len(self.weights)}."
            )
        _check_weights(self.weights)

    def __str__(self) -> str:
        shown = [f"{100 * w:.3g}% [{e}]" for w, e in zip(self.weights, self.parts, strict=True)]
        return "; ".join(shown if len(shown) <= 6 else [*shown[:4], f"and {len(shown) - 4} more"])


@dataclass(frozen=True)
class ChosenOf(Event):
    """One of the events `parts`, chosen with any knowledge of what was released before.

    It is priced as if the part that costs most were chosen, whatever was released before: by the
    largest of the deltas of all parts at each epsilon.

    >>> str(ChosenOf((Gaussian(2.0), PureDP(0.1))))
    'one, chosen freely, of [Gaussian noise, multiplier 2], [pure DP, epsilon 0.1]'
    """

    parts: tuple[Event, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.parts:
            raise ValueError("parts must have at least one event.")

    def __str__(self) -> str:
        shown = [f"[{part}]" for part in self.parts]
        kept = shown if len(shown) <= 6 else [*shown[:4], f"and {len(shown) - 4} more"]
        return f"one, chosen freely, of {', '.join(kept)}"


class Trials(StrEnum):
    """Probability law of the number of runs in `BestOf`."""

    GEOMETRIC = "geometric"
    LOGARITHMIC = "logarithmic"
    NEGATIVE_BINOMIAL = "negative_binomial"
    """Negative binomial of any shape > -1, given at least one run."""
    POISSON = "poisson"
    BINOMIAL = "binomial"
    FIXED = "fixed"


@dataclass(frozen=True)
class BestOf(Event):
    """A number of runs of `event`, of which only the best is released (private selection).

    The number of runs follows the law `trials` with mean `mean`. Poisson and binomial laws may give
    no run, and then nothing is released; the other laws give at least one (Papernot & Steinke 2022,
    arXiv:2110.03620). `shape` is that of a negative binomial law. `most` is the number of tries of
    a binomial law. For other laws it truncates: the number of runs is drawn from the law of mean
    `mean` given that it is at most `most`. A fixed number of runs is `mean` itself.

    The number of runs is drawn once, independently of the data. The score of a run is a function of
    the run's own output, and ties are broken uniformly over the tied runs.
    """

    event: Event
    mean: float
    trials: Trials = Trials.LOGARITHMIC
    shape: float | None = None
    most: int | None = None
    _text = "best of {mean:g} runs ({trials}) of [{event}]"

    def __post_init__(self) -> None:
        super().__post_init__()
        mean, trials = self.mean, self.trials
        may_be_low = trials in (Trials.POISSON, Trials.BINOMIAL, Trials.FIXED)
        if not may_be_low and mean <= 1:
            raise ValueError(f"mean must be above 1 for {trials} trials, got {mean}.")
        if (trials is Trials.NEGATIVE_BINOMIAL) != (self.shape is not None):
            raise ValueError("shape must be given for negative_binomial trials, and only for them.")
        if trials is Trials.FIXED and (mean != round(mean) or self.most is not None):
            raise ValueError(f"mean must be whole and most None for fixed trials, got {mean}.")
        if trials is Trials.BINOMIAL and (self.most is None or self.most < mean):
            raise ValueError(
                f"most must be the number of tries for binomial trials, at least mean = {mean:g}, "
                f"got {self.most}."
            )

    def __str__(self) -> str:
        text = super().__str__()
        if self.shape is not None:
            text = text.replace("binomial)", f"binomial of shape {self.shape:g})", 1)
        if self.most is not None:
            text = text.replace(")", f", at most {self.most:,})", 1)
        return text


_TYPES = {kind.__name__: kind for kind in Event.__subclasses__()}  # those above: a closed list


def from_dict(data: Mapping[str, Any]) -> Event:
    """Return the event that `Event.to_dict` turned into `data`; raise for any unknown type."""
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
    """Return the event that `Event.to_json` turned into `text`.

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


def _numbers(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _nested(event: object) -> Event:
    if not isinstance(event, Event):
        raise TypeError(f"event must be an Event, got {type(event).__name__}.")
    return event


def _shape(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"shape must be a number above -1, got {type(value).__name__}.")
    shape = float(value)
    if not -1 < shape <= 1000:
        raise ValueError(f"shape must be above -1 and at most 1000, got {value}.")
    return shape


def _check_weights(weights: tuple[float, ...]) -> None:
    if not all(0 <= weight <= 1 for weight in weights):
        raise ValueError("weights must be in [0, 1].")
    if abs(math.fsum(weights) - 1) > 1e-9:
        raise ValueError(f"weights must sum to 1, got a sum of {math.fsum(weights)}.")


def _check_one_or_two(
    event: ApproximateDP | RenyiCurve | DiscreteGaussian | DiscreteLaplace | ZeroConcentratedDP,
) -> None:
    if event.replace_factor not in (1.0, 2.0):
        kind, factor = type(event).__name__, event.replace_factor
        raise ValueError(f"replace_factor must be 1 or 2 for {kind}, got {factor}.")


_RULES: dict[str, Callable[[Any], object]] = {  # Any: a field may be given any value
    "noise_multiplier": lambda value: within(  # outside, fourth powers leave the range of floats
        1e-60, 1e60, noise_multiplier=positive(noise_multiplier=value)
    ),
    "replace_factor": lambda value: within(1, 2, replace_factor=value),
    "epsilon": lambda value: within(
        0, 1e60, advice="Use NonPrivate().", epsilon=non_negative(epsilon=value)
    ),
    "delta": lambda value: in_closed_unit(delta=value),
    "random_probability": lambda value: within(
        1e-60,
        1,
        advice="Use NonPrivate().",
        random_probability=in_closed_unit(random_probability=value),
    ),
    "n_options": lambda value: whole(n_options=value, least=2),
    "orders": _numbers,
    "values": _numbers,
    "rate": lambda value: in_closed_unit(rate=value),
    "max_batch": lambda value: whole(max_batch=value, least=1),
    "batch_size": lambda value: whole(batch_size=value, least=1),
    "n_records": lambda value: whole(n_records=value, least=1),
    "n_reports": lambda value: whole(n_reports=value, least=1),
    "steps": lambda value: whole(steps=value, least=1),
    "column": _numbers,
    "separation": lambda value: whole(separation=value, least=1),
    "participations": lambda n: n if n is None else whole(participations=n, least=1),
    "count": lambda value: whole(count=value),
    "mean": lambda value: positive(mean=value),
    "shape": _shape,
    "most": lambda value: None if value is None else whole(most=value, least=1),
    "weights": _numbers,
    "shifts": _numbers,
    "noise_std": lambda value: positive(noise_std=value),
    "noise_scale": lambda value: positive(noise_scale=value),
    "sensitivity": lambda value: whole(sensitivity=value, least=1),
    "rho": lambda value: non_negative(rho=value),
    "trials": Trials,
    "event": _nested,
    "parts": lambda value: tuple(_nested(part) for part in value),
}
"""For each field name, the rule that every event applies to a field of that name."""
