"""The tight accountant: certified brackets around the exact price of a composition.

Privacy loss distributions (PLD), composed exactly (Dwork & Rothblum 2016; Koskela, Jälkö & Honkela
2020). Each event has a dominating pair (`pairs`); a composition has the product of the pairs; its
price is the worse of the two directions of comparison (`direction`). There are three ways to
evaluate one direction, each with its proof:

* `loss_laws.OneRelease`: a closed form, for one release or any number of unsampled Gaussians;
* `contour`: an integral of moments, whose cost does not grow with the number of steps;
* `lattice`: a tilted Fourier transform on a grid of losses, for laws with atoms.

Every error is bounded: aliasing, truncation, quadrature, discretization and rounding. Where a sharp
bracket cannot be proved, a wide one is returned; the upper end is always a guarantee.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tacit._arrays import Floats
from tacit._check import in_open_unit, non_negative
from tacit.accounting.brackets import Bracket
from tacit.accounting.one_event import ADD_REMOVE
from tacit.accounting.pld.direction import DirectionPrice
from tacit.accounting.pld.pairs import PairRule, both_orders, directions, neighbors, pair
from tacit.events import Event, Relation

_NEGLIGIBLE = 1e-10  # deltas of a profile below this are not resolved further


@dataclass(frozen=True, kw_only=True)
class PLD:
    """Accountant that composes privacy loss distributions: a certified bracket of the exact price.

    `tolerance` is the relative error of delta to aim at. It changes the width of the brackets and
    the time they take; the brackets are valid for every tolerance. `pair_of` gives the dominating
    pair of one event: two output laws at least as easy to distinguish as those of any neighbors. If
    its pairs only bound an event from above, the lower ends of the brackets prove nothing.

    >>> from tacit import events as ev
    >>> run = ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(4.0)), 10_000)
    >>> bracket = PLD().bracket(run, delta=1e-5)
    >>> f"{bracket.lower:.6f} {bracket.upper:.6f}"
    '0.946867 0.946867'
    """

    tolerance: float = 1e-7
    pair_of: PairRule = field(default=pair, repr=False)

    def __post_init__(self) -> None:
        in_open_unit(tolerance=self.tolerance)

    def bracket(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> Bracket:
        """Return proved bounds on the smallest epsilon for which `event` is (epsilon, delta)-DP.

        They are bounds on the price of the event's dominating pair. For some events this pair costs
        more than the event (an exponential mechanism; replacement in a sample, except for additive
        noise with replace_factor 2). Then only the upper end holds for the event, and
        `tacit.bracket` returns 0 as lower end.
        """
        return self._price(event, relation).epsilon(in_open_unit(delta=delta))

    def epsilon(self, event: Event, *, delta: float, relation: Relation = ADD_REMOVE) -> float:
        """Return an epsilon for which `event` is proved (epsilon, delta)-DP."""
        return self.bracket(event, delta=delta, relation=relation).upper

    def delta_bracket(
        self, event: Event, *, epsilon: float, relation: Relation = ADD_REMOVE
    ) -> Bracket:
        """Return proved bounds on the smallest delta for which `event` is (epsilon, delta)-DP."""
        return self._price(event, relation).delta(non_negative(epsilon=epsilon))

    def delta(self, event: Event, *, epsilon: float, relation: Relation = ADD_REMOVE) -> float:
        """Return a delta for which `event` is proved (epsilon, delta)-DP."""
        return self.delta_bracket(event, epsilon=epsilon, relation=relation).upper

    def epsilons(
        self, event: Event, deltas: Iterable[float], *, relation: Relation = ADD_REMOVE
    ) -> Floats:
        """Return an epsilon for each of `deltas`, in little more time than one of them takes."""
        price = self._price(event, relation)
        targets = [in_open_unit(delta=delta) for delta in deltas]
        found = {delta: price.epsilon(delta).upper for delta in sorted(set(targets))}
        return np.array([found[delta] for delta in targets])

    def deltas(
        self, event: Event, epsilons: Iterable[float], *, relation: Relation = ADD_REMOVE
    ) -> Floats:
        """Return a delta for each of `epsilons`, in little more time than one of them takes."""
        price = self._price(event, relation)
        targets = [non_negative(epsilon=epsilon) for epsilon in epsilons]
        found = {epsilon: price.delta(epsilon).upper for epsilon in sorted(set(targets))[::-1]}
        return np.array([found[epsilon] for epsilon in targets])

    def profiles(
        self, event: Event, epsilons: Iterable[float], *, relation: Relation = ADD_REMOVE
    ) -> tuple[Floats, Floats]:
        """Return a delta for each of the increasing `epsilons`, once for each order of comparison.

        The first order compares a data set with the same set without one record: the output of the
        former is at most e^epsilon times as likely, up to delta. The second order is the reverse.
        """
        points = np.array([non_negative(epsilon=epsilon) for epsilon in epsilons])
        first, second = np.zeros(len(points)), np.zeros(len(points))
        for one in neighbors(event, Relation(relation)):
            orders = both_orders(one, Relation(relation), self.pair_of)
            prices = [DirectionPrice(order, tolerance=self.tolerance) for order in orders]
            found = [price.deltas(points, least=_NEGLIGIBLE)[1] for price in prices]
            first, second = np.maximum(first, found[0]), np.maximum(second, found[-1])
        return first, second

    def _price(self, event: Event, relation: Relation) -> "_WorstDirection":
        found = directions(event, Relation(relation), self.pair_of)
        return _WorstDirection([DirectionPrice(one, tolerance=self.tolerance) for one in found])


class _WorstDirection(NamedTuple):
    """The larger price of several `directions` (P against Q, and Q against P).

    No time is spent on a precise price of a direction that is proved to be the cheaper one.
    """

    directions: list[DirectionPrice]

    def epsilon(self, delta: float) -> Bracket:
        worst = Bracket(0.0, 0.0)
        opposite = None
        for one in self.directions:
            worst = worst.worse(one.epsilon(delta, floor=worst.lower, opposite=opposite))
            opposite = one
        return worst

    def delta(self, epsilon: float) -> Bracket:
        worst = Bracket(0.0, 0.0)
        for one in self.directions:
            worst = worst.worse(one.delta(epsilon, floor=worst.lower))
        return worst
