"""Accountants: pure functions from an event to its price.

`epsilon`, `delta` and `bracket` use the tightest accountant by default; `calibrate` inverts them.
Every accountant has `.epsilon(event, *, delta, relation)` and `.delta(event, *, epsilon, relation)`
and returns an upper bound or raises `UnsupportedEvent`. The exception is `CentralLimitGDP`, which
is an approximation and no guarantee.
"""

import math

from tacit._check import in_closed_unit, non_negative
from tacit.accounting.brackets import Bracket
from tacit.accounting.calibrate import calibrate, calibrate_count
from tacit.accounting.compose import flatten
from tacit.accounting.composition import BasicComposition, StrongComposition, asymptotic_noise
from tacit.accounting.gdp import GDP, CentralLimitGDP, gaussian_delta, gaussian_epsilon
from tacit.accounting.groups import GroupPrice, for_group, group_epsilon, group_price
from tacit.accounting.moments import Moments
from tacit.accounting.one_event import (
    ADD_REMOVE,
    epsilon_and_delta,
    exact,
    gdp_mu_squared,
    log_mixture,
    pure_epsilon,
    round_up,
)
from tacit.accounting.pld import PLD
from tacit.accounting.rdp import RDP, Charge, delta_from_rdp, epsilon_from_rdp
from tacit.accounting.shuffle import shuffled_delta, shuffled_epsilon
from tacit.accounting.tightest import Accountant, Tightest
from tacit.accounting.trials import RunLaw, run_law
from tacit.events import Event, Relation

__all__ = [
    "GDP",
    "PLD",
    "RDP",
    "Accountant",
    "BasicComposition",
    "Bracket",
    "CentralLimitGDP",
    "Charge",
    "GroupPrice",
    "Moments",
    "RunLaw",
    "StrongComposition",
    "asymptotic_noise",
    "bracket",
    "calibrate",
    "calibrate_count",
    "delta",
    "delta_from_rdp",
    "epsilon",
    "epsilon_and_delta",
    "epsilon_from_rdp",
    "exact",
    "flatten",
    "for_group",
    "gaussian_delta",
    "gaussian_epsilon",
    "gdp_mu_squared",
    "group_epsilon",
    "group_price",
    "log_mixture",
    "pure_epsilon",
    "round_up",
    "run_law",
    "shuffled_delta",
    "shuffled_epsilon",
]


def epsilon(
    event: Event,
    *,
    delta: float,
    accountant: Accountant | None = None,
    relation: Relation = ADD_REMOVE,
) -> float:
    """Return a certified upper bound on the epsilon of `event` at `delta`.

    Without an `accountant`, the tightest one that can price the event is used. At delta 0 the
    result is a pure epsilon, or infinity if none is known; at delta 1 it is 0.

    >>> from tacit.events import Gaussian, PoissonSampled, Repeated
    >>> run = Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000)
    >>> round(epsilon(run, delta=1e-5), 4)
    0.9469
    """
    delta, relation = in_closed_unit(delta=delta), Relation(relation)
    if delta in (0.0, 1.0):
        return Tightest().bracket(event, delta=delta, relation=relation).upper
    return (accountant or Tightest()).epsilon(event, delta=delta, relation=relation)


def delta(
    event: Event,
    *,
    epsilon: float,
    accountant: Accountant | None = None,
    relation: Relation = ADD_REMOVE,
) -> float:
    """Return a certified upper bound on the delta of `event` at `epsilon`; see `epsilon`.

    At epsilon infinity it is the probability that nothing is guaranteed, such as that of
    `ApproximateDP`.

    >>> from tacit.events import Gaussian
    >>> round(delta(Gaussian(1.0), epsilon=1.0), 6)
    0.126937
    """
    relation = Relation(relation)
    if epsilon == math.inf:
        return Tightest().delta_at_infinity(event, relation=relation)
    epsilon = non_negative(epsilon=epsilon)
    return (accountant or Tightest()).delta(event, epsilon=epsilon, relation=relation)


def bracket(event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> Bracket:
    """Return proved lower and upper bounds on the smallest epsilon of `event` at `delta`.

    For an event that `PLD` cannot price exactly, only the upper bound is computed; the lower is 0.

    >>> from tacit.events import Gaussian
    >>> found = bracket(Gaussian(1.0), delta=1e-5)
    >>> round(found.lower, 4), round(found.upper, 4)
    (4.3772, 4.3772)
    """
    delta, relation = in_closed_unit(delta=delta), Relation(relation)
    return Tightest().bracket(event, delta=delta, relation=relation)
