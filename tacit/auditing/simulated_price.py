"""Simulation of privacy losses: does the stated price cover what an event does?

The price of an event comes from the accountants, and an audit that compares prices with prices
cannot find a fault of theirs. Here the privacy loss of the event is simulated from its definition,
by code that shares nothing with the accountants: the outputs of two neighboring data sets have the
densities P and Q, and the loss is log P / Q at an output drawn from P. An event that is
(epsilon, delta)-private has E[max(0, 1 - exp(epsilon - loss))] <= delta in both directions.
"""

import math
from typing import Any

import numpy as np
from scipy import special

from tacit._arrays import Floats
from tacit.accounting import flatten
from tacit.auditing.p_values import Finding, two_sided
from tacit.events import Event, Gaussian, Laplace, PoissonSampled, PureDP, Repeated, Sequence
from tacit.mechanisms import Rng

SIMULATED_DELTA = 0.05  # so large that a few thousand outputs estimate it well
_OUTPUTS = 20_000
_MOST_STEPS = 2_000  # longer events would take seconds


def price_p(event: Event, epsilon: float, random: Rng) -> float | None:
    """Return the p-value of the hypothesis that `event` costs `epsilon` at `SIMULATED_DELTA`.

    Neighbors differ by one added or removed record. None means that the event cannot be simulated:
    it holds something other than Gaussian, Laplace and pure releases, or Poisson samples of them.

    >>> from tacit.mechanisms import generator
    >>> price_p(Gaussian(1.0), 1.58, generator(0)) > 0.05     # the exact price is 1.569
    True
    >>> price_p(Gaussian(1.0), 1.4, generator(0)) < 1e-3
    True
    """
    if not _is_simulated(event) or sum(flatten(event).values()) > _MOST_STEPS:
        return None
    with_it = _losses(event, random, is_in=True)
    without = -_losses(event, random, is_in=False)
    return two_sided(*(_mean_p(_excess(loss, epsilon)) for loss in (with_it, without)))


def price_findings(event: Event, epsilon: float, random: Rng, *, part: str) -> list[Finding]:
    """Return the finding of `price_p` in a list, which is empty if `event` cannot be simulated."""
    p_value = price_p(event, epsilon, random)
    name = "a simulation of the releases does not refute their price"
    return [] if p_value is None else [Finding(part, name, p_value)]


def gaussian_of(event: Any) -> Any:  # Any: an event of any type
    """Return the first Gaussian release inside of `event`, that of a gradient; None without one."""
    while not (event is None or isinstance(event, Gaussian)):
        parts = getattr(event, "parts", None) or (getattr(event, "event", None),)
        event = parts[0]
    return event


def _losses(event: Event, random: Rng, *, is_in: bool) -> Floats:
    """Return log P / Q at outputs drawn from P, if the record `is_in` the data, or else from Q."""
    match event:
        case Gaussian():
            mu = 1 / event.noise_multiplier
            sign = 1 if is_in else -1
            return sign * mu**2 / 2 + mu * special.ndtri(_uniform(random))
        case Laplace():
            scale = event.noise_multiplier
            u = _uniform(random) - 0.5
            noise = -scale * np.sign(u) * np.log1p(-2 * np.abs(u))
            seen = noise + is_in
            return (np.abs(seen) - np.abs(seen - 1)) / scale
        case PureDP():  # the worst such mechanism: a coin that tells the truth with this chance
            truth = special.expit(event.epsilon)
            return np.where(
                (_uniform(random) < truth) == is_in, event.epsilon, -event.epsilon
            ).astype(np.float64)
        case PoissonSampled():
            inner = _losses(event.event, random, is_in=False)
            if is_in:
                drawn = _uniform(random) < event.rate
                inner = np.where(drawn, _losses(event.event, random, is_in=True), inner)
            return np.logaddexp(_log(1 - event.rate), _log(event.rate) + inner)
        case Repeated():
            return sum(
                (_losses(event.event, random, is_in=is_in) for _ in range(event.count)),
                np.zeros(_OUTPUTS),
            )
        case Sequence():
            parts = (_losses(part, random, is_in=is_in) for part in event.parts)
            return sum(parts, np.zeros(_OUTPUTS))
    raise AssertionError  # `_is_simulated` has refused it


def _is_simulated(event: Event) -> bool:
    match event:
        case Gaussian() | Laplace():
            return event.noise_multiplier > 0
        case PureDP():
            return True
        case PoissonSampled() | Repeated():
            return _is_simulated(event.event)
        case Sequence():
            return all(map(_is_simulated, event.parts))
    return False


def _excess(losses: Floats, epsilon: float) -> Floats:
    return -np.expm1(np.minimum(0.0, epsilon - losses))


def _mean_p(values: Floats) -> float:
    """Return a bound on the chance of such a mean of values in [0, 1] that have mean <= delta.

    Hoeffding 1963, Theorem 1: exp(-n KL(mean, delta)) for a mean above delta.
    """
    mean, delta = float(values.mean()), SIMULATED_DELTA
    if mean <= delta:
        return 1.0
    divergence = special.rel_entr(mean, delta) + special.rel_entr(1 - mean, 1 - delta)
    return math.exp(-len(values) * float(divergence))


def _uniform(random: Rng) -> Floats:
    return np.clip(random.random(_OUTPUTS), 1e-300, 1 - 2**-53)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
