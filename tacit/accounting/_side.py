"""One direction of comparison, priced by whichever engine proves most."""

import math

from tacit.accounting._bracket import Bracket
from tacit.accounting._closed import OneRelease, Unsampled
from tacit.accounting._contour import Contour, Family
from tacit.accounting._laws import ROUND
from tacit.accounting._pairs import Direction
from tacit.accounting._solve import invert
from tacit.errors import NotCertified

_GOOD = 1e-5
"""Relative width with which an engine's bracket is taken without asking another engine."""


class Side:
    """delta(epsilon) and its inverse for one `Direction`.

    What was tuned for one point is kept and serves the points around it, so a whole curve costs
    little more than its first point.
    """

    def __init__(self, direction: Direction, *, tolerance: float) -> None:
        self.direction, self.tolerance = direction, tolerance
        self.largest_loss = direction.largest_loss
        self.releases = [(OneRelease(law), count) for law, count in direction.parts]
        self.contours: list[Contour] = []
        self.family: Family | None = None

    def epsilon(self, delta: float, *, floor: float = 0.0) -> Bracket:
        """Bounds on the smallest epsilon; where `upper` is below `floor` it is not sharpened."""
        low, high = self.direction.infinite_lower, self.direction.infinite_upper
        if delta < low or low == 1.0:
            return Bracket(math.inf, math.inf)
        answer = self._finite_epsilon((delta - low) / (1 - low) * (1 + 4 * ROUND), floor)
        if high == 0.0:
            return answer
        if delta < high or high == 1.0:
            return Bracket(answer.lower, math.inf)
        upper = self._finite_epsilon((delta - high) / (1 - high) * (1 - 4 * ROUND), floor).upper
        return Bracket(answer.lower, upper)

    def delta(self, epsilon: float) -> Bracket:
        """Bounds on delta(epsilon)."""
        low, high = self.direction.infinite_lower, self.direction.infinite_upper
        finite = self._finite_delta(epsilon)
        upper = high + (1 - high) * finite.upper * (1 + 8 * ROUND)
        return Bracket(low + (1 - low) * finite.lower * (1 - 8 * ROUND), min(upper, 1.0))

    def _finite_epsilon(self, delta: float, floor: float) -> Bracket:
        if self._total_variation() <= delta:
            return Bracket(0.0, 0.0)
        if delta <= 0.0:
            return Bracket(self.largest_loss, self.largest_loss)
        if self.direction.steps == 1:
            return _epsilon_on(self.releases[0][0], delta)
        try:
            family = self._family(delta)
        except NotCertified:
            return self._modest_epsilon(delta)
        ceiling = min(self.largest_loss, family.epsilon_bound(delta))
        if ceiling <= floor:
            return Bracket(0.0, ceiling)
        answer = self._contour_epsilon(family, delta, ceiling)
        return answer if _is_good(answer) else _meet(answer, self._modest_epsilon(delta))

    def _contour_epsilon(self, family: Family, delta: float, ceiling: float) -> Bracket:
        answer, guess = Bracket(0.0, ceiling), family.guess_epsilon(delta)
        for attempt in range(4):
            try:
                contour = self._contour(family, guess, delta, fresh=attempt > 0)
            except NotCertified:
                break
            found = invert(contour, delta, guess=guess, ceiling=ceiling)
            answer = _meet(answer, found)
            if _is_good(answer) or (attempt > 0 and contour.order * abs(found.upper - guess) < 1.0):
                break
            guess = found.upper  # closer to the truth than the guess for which it was tuned
        return answer

    def _finite_delta(self, epsilon: float) -> Bracket:
        if epsilon >= self.largest_loss or not self.releases:
            return Bracket(0.0, 0.0)
        if self.direction.steps == 1:
            return self.releases[0][0].delta(epsilon)
        lower = max(one.delta(epsilon).lower for one, _ in self.releases)
        upper = min(self._total_variation(), Unsampled(self.direction).delta(epsilon))
        answer, delta = Bracket(lower, upper), 1e-12
        for attempt in range(4):
            try:
                family = self._family(delta)
                delta = math.exp(family.guess_log_delta(epsilon)) if attempt == 0 else delta
                family = self._family(delta)
                contour = self._contour(family, epsilon, delta, fresh=attempt > 0)
            except NotCertified:
                break
            found = contour.delta(epsilon)
            answer = _meet(answer, found)
            answer = _meet(answer, Bracket(0.0, family.delta_bound(epsilon)))
            if _is_good(answer) or not found.upper < 0.5 * delta:
                break
            delta = found.upper
        return answer

    def _total_variation(self) -> float:
        """Upper bound of delta(0): that of a composition is at most the sum."""
        return math.fsum(n * one.delta(0.0).upper for one, n in self.releases)

    def _modest_epsilon(self, delta: float) -> Bracket:
        """What needs no engine: one release from below, all without sampling from above."""
        lower = max(_epsilon_on(one, delta).lower for one, _ in self.releases)
        return Bracket(lower, min(Unsampled(self.direction).epsilon(delta), self.largest_loss))

    def _family(self, delta: float) -> Family:
        """Laws whose removed tails are negligible beside delta."""
        if self.family is None or self.family.removed > delta * self.tolerance:
            log_removed = math.log(delta) + math.log(self.tolerance / 8)
            self.family = Family(self.direction, log_removed=log_removed)
        return self.family

    def _contour(self, family: Family, epsilon: float, delta: float, *, fresh: bool) -> Contour:
        """A contour tuned near `epsilon`: one at hand, or a new one."""
        if not fresh:
            for contour in self.contours:
                if contour.order * abs(contour.center - epsilon) < 2.0:
                    return contour
        contour = family.tune(epsilon, math.log(delta) + math.log(self.tolerance))
        self.contours.append(contour)
        return contour


def _epsilon_on(one: OneRelease, delta: float) -> Bracket:
    return invert(one, delta, guess=min(1.0, one.largest_loss), ceiling=one.largest_loss)


def _is_good(answer: Bracket) -> bool:
    return answer.width <= _GOOD * answer.upper


def _meet(first: Bracket, second: Bracket) -> Bracket:
    """Both are proved, so the truth lies in both."""
    return Bracket(max(first.lower, second.lower), min(first.upper, second.upper))
