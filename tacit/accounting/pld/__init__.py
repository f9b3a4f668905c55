"""The tight accountant: certified brackets around the exact price of a composition.

Privacy loss distributions, composed exactly (Dwork & Rothblum 2016; Koskela, Jälkö & Honkela 2020).
Each event has a dominating pair (`_pairs`); a composition has the product of the pairs; its price
is the worse of the two directions. Three ways to evaluate one direction, each with its proof:

* `_closed`: one release, or any number of plain Gaussians;
* `_contour`: an integral of moments, whose cost does not grow with the number of steps;
* `_lattice`: a tilted Fourier transform on a grid of losses, for laws with atoms.

Every error is bounded: aliasing, truncation, quadrature, discretization and rounding. Where a sharp
bracket cannot be proved, a wide one is returned; the upper end is always a guarantee.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tacit._check import in_closed_unit, in_open_unit, non_negative
from tacit.accounting.brackets import Bracket
from tacit.accounting.pld.direction import Side
from tacit.accounting.pld.pairs import directions
from tacit.events import Event, Relation

_LINES = 128
"""Points of the curve whose lines bound a trade-off."""


@dataclass(frozen=True, kw_only=True)
class PLD:
    """The tight accountant.

    `tolerance` is the relative error of delta aimed at. It changes the width of the brackets and
    the time they take, never their truth.

    >>> from tacit import events as ev
    >>> run = ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(4.0)), 10_000)
    >>> bracket = PLD().bracket(run, delta=1e-5)
    >>> f"{bracket.lower:.6f} {bracket.upper:.6f}"
    '0.946867 0.946867'
    """

    tolerance: float = 1e-7

    def __post_init__(self) -> None:
        in_open_unit(tolerance=self.tolerance)

    def bracket(
        self, event: Event, *, delta: float, relation: Relation = Relation.ADD_REMOVE
    ) -> Bracket:
        """Proved bounds on the smallest epsilon for which `event` is (epsilon, delta)-DP.

        They are those of its dominating pair. Where the pair is harder than the event can be (an
        exponential mechanism; replacement in a sample of other than additive noise of factor 2),
        only the upper end is a statement about the event; `tacit.bracket` then gives 0 as lower.
        """
        return self._price(event, relation).epsilon(in_open_unit(delta=delta))

    def epsilon(
        self, event: Event, *, delta: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """An epsilon for which `event` is proved (epsilon, delta)-DP: the end of the bracket."""
        return self.bracket(event, delta=delta, relation=relation).upper

    def delta_bracket(
        self, event: Event, *, epsilon: float, relation: Relation = Relation.ADD_REMOVE
    ) -> Bracket:
        """Proved bounds on the smallest delta for which `event` is (epsilon, delta)-DP."""
        return self._price(event, relation).delta(non_negative(epsilon=epsilon))

    def delta(
        self, event: Event, *, epsilon: float, relation: Relation = Relation.ADD_REMOVE
    ) -> float:
        """A delta for which `event` is proved (epsilon, delta)-DP: the end of the bracket."""
        return self.delta_bracket(event, epsilon=epsilon, relation=relation).upper

    def epsilons(
        self,
        event: Event,
        deltas: Iterable[float],
        *,
        relation: Relation = Relation.ADD_REMOVE,
    ) -> NDArray[np.float64]:
        """Upper ends of epsilon at all `deltas`, at little more than the cost of one."""
        price = self._price(event, relation)
        targets = [in_open_unit(delta=delta) for delta in deltas]
        found = {delta: price.epsilon(delta).upper for delta in sorted(set(targets))}
        return np.array([found[delta] for delta in targets])

    def deltas(
        self,
        event: Event,
        epsilons: Iterable[float],
        *,
        relation: Relation = Relation.ADD_REMOVE,
    ) -> NDArray[np.float64]:
        """Upper ends of delta at all `epsilons`, at little more than the cost of one."""
        price = self._price(event, relation)
        targets = [non_negative(epsilon=epsilon) for epsilon in epsilons]
        found = {epsilon: price.delta(epsilon).upper for epsilon in sorted(set(targets))[::-1]}
        return np.array([found[epsilon] for epsilon in targets])

    def tradeoff(
        self,
        event: Event,
        false_positive_rates: Iterable[float],
        *,
        relation: Relation = Relation.ADD_REMOVE,
    ) -> NDArray[np.float64]:
        """Least false negative rate of any test between neighbors, at each false positive rate.

        Each point (epsilon, delta) of the curve rules out the tests below two lines (Wasserman &
        Zhou 2010; Dong, Roth & Su 2022, Section 2). The result is the highest of many such lines,
        so it is proved and, between two of them, a little too low.
        """
        rates = np.array(
            [in_closed_unit(false_positive_rate=rate) for rate in false_positive_rates]
        )
        smallest = min((rate for rate in rates if 0 < rate < 1), default=0.5)
        price = self._price(event, relation)
        far = min(price.epsilon(1e-3 * smallest).upper, 60.0)
        epsilon = far * np.linspace(0.0, 1.0, _LINES)[::-1]
        kept = 1.0 - np.array([price.delta(point).upper for point in epsilon])
        steep = kept - np.multiply.outer(rates, np.exp(epsilon))  # (rates, lines)
        flat = (kept - rates[:, None]) * np.exp(-epsilon)
        return np.clip(np.maximum(steep, flat).max(axis=1), 0.0, 1.0 - rates)

    def _price(self, event: Event, relation: Relation) -> "_Price":
        sides = directions(event, Relation(relation))
        return _Price([Side(side, tolerance=self.tolerance) for side in sides])


class _Price:
    """The worse of the directions."""

    def __init__(self, sides: list[Side]) -> None:
        self.sides = sides

    def epsilon(self, delta: float) -> Bracket:
        worst = Bracket(0.0, 0.0)
        for side in self.sides:
            one = side.epsilon(delta, floor=worst.lower)
            worst = Bracket(max(worst.lower, one.lower), max(worst.upper, one.upper))
        return worst

    def delta(self, epsilon: float) -> Bracket:
        worst = Bracket(0.0, 0.0)
        for side in self.sides:
            one = side.delta(epsilon, floor=worst.lower)
            worst = Bracket(max(worst.lower, one.lower), max(worst.upper, one.upper))
        return worst
