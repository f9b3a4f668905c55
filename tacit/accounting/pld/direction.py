"""One direction of comparison, priced by whichever engine proves most."""

import math

import numpy as np

from tacit.accounting.brackets import Bracket
from tacit.accounting.numerics import ROUND
from tacit.accounting.pld.closed_form import OneRelease, Unsampled
from tacit.accounting.pld.contour import Contours, Family
from tacit.accounting.pld.invert import invert
from tacit.accounting.pld.lattice import Lattice, coarse_moments
from tacit.accounting.pld.pairs import Direction
from tacit.accounting.pld.sampled_gaussian_contour import NARROW, WIDE
from tacit.errors import NotCertified

_GOOD = 1e-5
"""Relative width with which an engine's bracket is taken without asking another engine."""
_FAIR = 1e-4
"""Relative width with which the lattice is not refined further."""
_ROUGH = 1e-2
"""Relative error of delta with which one side is compared with the other."""
_COARSE = 1 << 13
_LATTICE_POINTS = (_COARSE, 1 << 16, 1 << 18)


class Side:
    """delta(epsilon) and its inverse for one `Direction`.

    What was tuned for one point is kept and serves the points around it, so a whole curve costs
    little more than its first point.
    """

    def __init__(self, direction: Direction, *, tolerance: float) -> None:
        self.direction, self.tolerance = direction, tolerance
        self.largest_loss = direction.largest_loss
        self.releases = [(OneRelease(law), count) for law, count in direction.parts]
        self.curves: list[Contours] = []
        self.families: dict[float, Family] = {}

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

    def delta(self, epsilon: float, *, floor: float = 0.0) -> Bracket:
        """Bounds on delta(epsilon); where `upper` is below `floor` it is not sharpened."""
        low, high = self.direction.infinite_lower, self.direction.infinite_upper
        finite = self._finite_delta(epsilon, floor - high)
        upper = high + (1 - high) * finite.upper * (1 + 8 * ROUND)
        return Bracket(low + (1 - low) * finite.lower * (1 - 8 * ROUND), min(upper, 1.0))

    def _finite_epsilon(self, delta: float, floor: float) -> Bracket:
        if self._total_variation() <= delta:
            return Bracket(0.0, 0.0)
        if delta <= 0.0:
            return Bracket(self.largest_loss, self.largest_loss)
        if self.direction.steps == 1:
            return _epsilon_on(self.releases[0][0], delta)
        answer = Bracket(0.0, self.largest_loss)
        for engine in (self._contour_epsilon, self._lattice_epsilon, self._modest_epsilon):
            try:
                with np.errstate(over="ignore"):  # an infinite bound is a bound
                    answer = engine(delta, floor, answer)
            except NotCertified:
                continue
            if _is_good(answer) or answer.upper <= floor:
                break
        return answer

    def _finite_delta(self, epsilon: float, floor: float) -> Bracket:
        if epsilon >= self.largest_loss or not self.releases:
            return Bracket(0.0, 0.0)
        if self.direction.steps == 1:
            return self.releases[0][0].delta(epsilon)
        lower = max(one.delta(epsilon).lower for one, _ in self.releases)
        upper = min(self._total_variation(), Unsampled(self.direction).delta(epsilon))
        answer = Bracket(lower, upper)
        for engine in (self._contour_delta, self._lattice_delta):
            try:
                with np.errstate(over="ignore"):
                    answer = engine(epsilon, floor, answer)
            except NotCertified:
                continue
            if _is_good(answer) or answer.upper <= floor:
                break
        return answer

    def _contour_epsilon(self, delta: float, floor: float, answer: Bracket) -> Bracket:
        family = self._family(delta)
        bound = family.moments.epsilon_bound(delta - family.removed)
        answer = _meet(answer, Bracket(0.0, bound))
        if floor > 0.0 and answer.upper > floor:  # is this side the lesser one?
            rough = family.plain(floor, math.log(delta) + math.log(_ROUGH))
            if rough and rough.delta(floor).upper <= delta:
                return _meet(answer, Bracket(0.0, floor))
        guess, log_target = (
            family.moments.guess_epsilon(delta),
            math.log(delta) + math.log(self.tolerance),
        )
        curve, plain = self._at_hand(guess) or family.plain(guess, log_target), True
        if curve is None:  # too heavy: perhaps one step in many makes all the loss
            guess = min(guess, self._single_jump(delta))
        for _ in range(6):
            if answer.upper <= floor:
                break
            if curve is None:
                plain = False
                try:
                    curve = self._family(delta, NARROW).ladder(guess, log_target)
                except NotCertified:
                    break
            self.curves.append(curve)
            found = invert(curve, delta, guess=guess, ceiling=answer.upper, slope=curve.order)
            answer = _meet(answer, found)
            near = curve.order * abs(found.upper - guess) < 1.0
            if _is_good(answer) or (near and not plain):
                break
            guess = found.upper  # closer to the truth than the guess it was tuned for
            curve = None if near or not plain else family.plain(guess, log_target)
        return answer

    def _single_jump(self, delta: float) -> float:
        """About epsilon where one step in many makes all the loss: delta = steps * one delta."""
        return max(_epsilon_on(one, delta / count).upper for one, count in self.releases)

    def _contour_delta(self, epsilon: float, floor: float, answer: Bracket) -> Bracket:
        # A delta below what a float can hold is as good as the smallest that it can.
        delta = max(math.exp(self._family(1e-12).moments.guess_log_delta(epsilon)), 1e-300)
        for attempt in range(4):
            family = self._family(delta)
            bound = math.exp(family.moments.log_delta_bound(epsilon)) + family.removed
            answer = _meet(answer, Bracket(0.0, bound))
            if answer.upper <= floor:
                break
            log_target = math.log(delta) + math.log(self.tolerance)
            curve = self._at_hand(epsilon) if attempt == 0 else None
            curve = curve or family.plain(epsilon, log_target)
            curve = curve or self._family(delta, NARROW).ladder(epsilon, log_target)
            self.curves.append(curve)
            answer = _meet(answer, curve.delta(epsilon))
            if _is_good(answer) or not 1e-300 < answer.upper < 0.5 * delta:
                break
            delta = answer.upper
        return answer

    def _at_hand(self, epsilon: float) -> Contours | None:
        """Contours that were tuned close by."""
        near = (c for c in self.curves if c.order * abs(c.center - epsilon) < 2.0)
        return next(near, None)

    def _lattice_epsilon(self, delta: float, floor: float, answer: Bracket) -> Bracket:
        log_target = math.log(delta) + math.log(self.tolerance)
        moments = coarse_moments(self.direction, log_target - math.log(self.direction.steps))
        guess = min(moments.guess_epsilon(delta), answer.upper)
        for points in _LATTICE_POINTS:
            for center in {guess, self._single_jump(delta)} if points == _COARSE else {guess}:
                lattice = Lattice(self.direction, moments, center, log_target, points)
                found = invert(lattice, delta, guess=center, ceiling=answer.upper)
                answer = _meet(answer, found)
            if answer.width <= _FAIR * answer.upper or answer.upper <= floor:
                break
            guess = answer.upper
        return answer

    def _lattice_delta(self, epsilon: float, floor: float, answer: Bracket) -> Bracket:
        moments = coarse_moments(self.direction, math.log(1e-30 * self.tolerance))
        guess = moments.guess_log_delta(epsilon)
        for points in _LATTICE_POINTS:
            log_target = max(guess, -690.0) + math.log(self.tolerance)
            lattice = Lattice(self.direction, moments, epsilon, log_target, points)
            answer = _meet(answer, lattice.delta(epsilon))
            if answer.width <= _FAIR * answer.upper or answer.upper <= floor:
                break
            guess = min(guess, math.log(answer.upper))
        return answer

    def _modest_epsilon(self, delta: float, _floor: float, answer: Bracket) -> Bracket:
        """What needs no engine: one release from below, all without sampling from above."""
        lower = max(_epsilon_on(one, delta).lower for one, _ in self.releases)
        return _meet(answer, Bracket(lower, Unsampled(self.direction).epsilon(delta)))

    def _total_variation(self) -> float:
        """Upper bound of delta(0): that of a composition is at most the sum."""
        return math.fsum(n * one.delta(0.0).upper for one, n in self.releases)

    def _family(self, delta: float, width: float = WIDE) -> Family:
        """Laws whose removed tails are negligible beside delta."""
        family = self.families.get(width)
        if family is None or family.removed > delta * self.tolerance:
            log_removed = math.log(delta) + math.log(self.tolerance / 8)
            family = Family.of(self.direction, log_removed=log_removed, width=width)
            self.families[width] = family
        return family


def _epsilon_on(one: OneRelease, delta: float) -> Bracket:
    return invert(one, delta, guess=min(1.0, one.largest_loss), ceiling=one.largest_loss)


def _is_good(answer: Bracket) -> bool:
    return answer.width <= _GOOD * answer.upper


def _meet(first: Bracket, second: Bracket) -> Bracket:
    """Both are proved, so the truth lies in both."""
    return Bracket(max(first.lower, second.lower), min(first.upper, second.upper))
