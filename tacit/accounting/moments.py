"""The moments accountant of Abadi et al. 2016, as published and with a later conversion.

Section 3.2 of "Deep Learning with Differential Privacy" (arXiv:1607.00133): for each whole order
lambda <= 32 the log moment alpha(lambda) = log max(E1, E2) of one step is integrated numerically,
log moments add over steps (Theorem 2.1), and the tail bound turns them into (epsilon, delta)
(Theorem 2.2). It is kept for comparison with published figures; `RDP` is tighter and `PLD` tight.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tacit._arrays import Floats
from tacit._check import in_open_unit, non_negative, one_of, whole
from tacit.accounting.compose import flatten
from tacit.accounting.one_event import ADD_REMOVE
from tacit.accounting.rdp import delta_from_rdp, divergence, epsilon_from_rdp
from tacit.errors import UnsupportedEvent
from tacit.events import Event, Gaussian, PoissonSampled, Relation

_LARGEST_SHIFT = 10.0


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The moments accountant, for Gaussian releases on Poisson samples or on all records.

    It turns moments into (epsilon, delta) by a conversion. `"published"` is Theorem 2.2 of Abadi et
    al. 2016; `"improved"` is that of Canonne, Kamath & Steinke 2020, which gives a smaller epsilon.
    `max_moment` is the largest order lambda of the moments that are computed.

    >>> from tacit.events import Repeated
    >>> run = Repeated(PoissonSampled(0.01, Gaussian(4.0)), 10_000)
    >>> round(Moments().epsilon(run, delta=1e-5), 2)
    1.26
    """

    conversion: Literal["published", "improved"] = "published"
    max_moment: int = 32

    def __post_init__(self) -> None:
        one_of(("published", "improved"), conversion=self.conversion)
        whole(max_moment=self.max_moment, least=1)

    def log_moments(self, event: Event, *, relation: Relation = ADD_REMOVE) -> Floats:
        """Return the log moments alpha(lambda) of all of `event`, lambda = 1, ..., `max_moment`."""
        if Relation(relation) is Relation.REPLACE_ONE:
            raise UnsupportedEvent(
                "the moments accountant is published for records added or removed. Use RDP or PLD."
            )
        total = np.zeros(self.max_moment)
        for part, count in flatten(event).items():
            total += count * _one_step(part, self._orders)
        return total * (1 + 1e-9)  # far more than rounding took away, so the price is a bound

    def epsilon(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> float:
        """Return the smallest epsilon at `delta` that any of the moments implies."""
        delta = in_open_unit(delta=delta)
        alpha, moments = self.log_moments(event, relation=relation), self._orders
        if self.conversion == "improved":
            return epsilon_from_rdp(alpha / moments, moments + 1, delta=delta)
        return float(np.min((alpha - math.log(delta)) / moments)) if alpha.any() else 0.0

    def delta(self, event: Event, *, epsilon: float, relation: Relation = ADD_REMOVE) -> float:
        """Return the smallest delta at `epsilon` that any of the moments implies."""
        epsilon = non_negative(epsilon=epsilon)
        alpha, moments = self.log_moments(event, relation=relation), self._orders
        if self.conversion == "improved":
            return delta_from_rdp(alpha / moments, moments + 1, epsilon=epsilon)
        if not alpha.any():
            return 0.0
        return math.exp(min(0.0, float(np.min(alpha - moments * epsilon))))

    @property
    def _orders(self) -> Floats:
        return np.arange(1.0, self.max_moment + 1)


def _one_step(event: Event, moments: Floats) -> Floats:
    """Return the log moments of one release, log max(E1, E2) in (3), (4) of Abadi et al. 2016."""
    if isinstance(event, Gaussian):
        return moments * (moments + 1) / (2 * event.noise_multiplier**2)
    if not (isinstance(event, PoissonSampled) and isinstance(event.event, Gaussian)):
        raise UnsupportedEvent(
            f"the moments accountant prices Gaussian steps, not {type(event).__name__}. Use RDP."
        )
    rate, shift = event.rate, 1 / event.event.noise_multiplier
    # E2, the moment of the mixture against noise alone, is the Rényi moment of order lambda + 1.
    second = moments * divergence.poisson_divergence(moments + 1, rate=rate, shift=shift)
    if shift > _LARGEST_SHIFT:  # E1 <= E2 always; the integral would only confirm it
        return second
    step = divergence.trapezoid_step(shift, negative_power=float(moments[-1]) + 1)
    tail = divergence.TAIL
    nodes = divergence.gaussian_nodes(shift, -tail, tail + shift, step)
    nodes = divergence.reverse(divergence.poisson_sampled(nodes, rate))
    return np.maximum(divergence.log_moments(nodes, moments + 1), second)
