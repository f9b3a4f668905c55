"""The price of one direction of comparison, by whichever method proves the sharpest bracket."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from tacit._arrays import Floats
from tacit.accounting.brackets import Bracket, invert
from tacit.accounting.one_event import ROUND, log_mixture_at
from tacit.accounting.pld.contour import Contours, Family, bound_along
from tacit.accounting.pld.large_losses import chernoff_if_added, has_tail, mark_losses
from tacit.accounting.pld.lattice import Lattice, coarse_moments
from tacit.accounting.pld.loss_laws import (
    DoubleExponential,
    Law,
    MixedNormals,
    Mixture,
    Normal,
    OneRelease,
    Sampled,
    Shifted,
)
from tacit.accounting.pld.mixed_normals import has_mixtures, mixture_epsilon
from tacit.accounting.pld.pairs import Direction
from tacit.accounting.pld.spread import guess_epsilon
from tacit.accounting.pld.transforms import Cumulants
from tacit.errors import NotCertified

_GOOD = 1e-5  # relative width at which a bracket is returned without trying another method
_ENOUGH = 1e-4  # relative width at which no slower method is tried
_CLOSE = 1e-3  # relative width at which a large lattice is not tried
_FAIR, _FINE = 1e-4, 1e-6
"""Relative widths at which the lattice is not refined further: for many steps, and for few steps
or laws that no other method serves."""
_TINY = 1e-7  # width of a fair bracket that is not refined for few steps
_FEW_STEPS = 16  # so few steps that a lattice of moderate size is precise
_CHECK = 1e-4  # relative error of delta in a first test of which direction is the worse
_ROUGH = 1e-2
"""Relative error of delta that suffices to find out which direction is the worse, and relative
width of epsilon that suffices for mixtures of many Gaussians."""
_MANY_SHIFTS = 24  # parts of a mixture of Gaussians for which a lattice would take minutes
_SLACK = 2e-5  # relative error of delta that marked losses may add
_SMOOTHING = 2.5e-5  # relative width of epsilon that smoothing may cause
_MOST_GUESSES = 6
_COARSER = 4.0  # factor of the errors when a smoothed curve would be too costly
_MOST_CURVES = 48  # curves that are computed at most for a table of deltas
_LEAST_DELTA = 1e-300  # below it, shares of delta leave the range of floats
_COARSE = 1 << 13
_LATTICE_POINTS = (_COARSE, 1 << 16, 1 << 18)
_SHORT_POINTS = (_COARSE, 1 << 15)


class DirectionPrice:
    """The curve delta(epsilon) of one `Direction`, and its inverse epsilon(delta).

    A contour integral planned for one epsilon is kept and reused for epsilons around it, so a whole
    curve costs little more than its first point. `floor` is the price of the opposite direction: a
    price proved to be below it does not matter, so no work is spent to make it precise. `is_smooth`
    says that laws on finitely many losses stand for smooth ones.
    """

    def __init__(
        self, direction: Direction, *, tolerance: float, is_smooth: bool | None = None
    ) -> None:
        self.direction = direction
        self.tolerance = tolerance
        self.largest_loss = direction.largest_loss
        self.releases = [(OneRelease(law), count) for law, count in direction.parts]
        # The contour method serves such laws better than a lattice.
        known_as_smooth = all(
            isinstance(law, Shifted) or (isinstance(law, Sampled) and isinstance(law.noise, Normal))
            for law, _ in direction.parts
        )
        self.is_smooth = known_as_smooth if is_smooth is None else is_smooth
        self.is_laplace = all(
            isinstance(law, Sampled) and isinstance(law.noise, DoubleExponential)
            for law, _ in direction.parts
        )
        self.is_short = direction.steps <= _FEW_STEPS
        self.needs_lattice = any(isinstance(law, Mixture) for law, _ in direction.parts)
        self.curves: list[Contours | Lattice] = []
        self.family: Family | None = None
        self.may_expand = True  # whether moments may be series
        self.opposite: DirectionPrice | None = None

    def epsilon(
        self, delta: float, *, floor: float = 0.0, opposite: "DirectionPrice | None" = None
    ) -> Bracket:
        """Return bounds on the smallest epsilon at `delta`; they may be loose below `floor`.

        `opposite` is the direction whose price is `floor`.
        """
        self.opposite = opposite
        low, high = self.direction.infinite_lower, self.direction.infinite_upper
        if delta < low or low == 1.0:
            return Bracket(math.inf, math.inf)
        most = (delta - low) / (1 - low) * (1 + 4 * ROUND)
        answer = self._finite_epsilon(min(most, 1 - ROUND), floor)
        if high == 0.0:
            return answer
        if delta < high or high == 1.0:
            return Bracket(answer.lower, math.inf)
        upper = self._finite_epsilon((delta - high) / (1 - high) * (1 - 4 * ROUND), floor).upper
        return Bracket(answer.lower, upper)

    def delta(self, epsilon: float, *, floor: float = 0.0) -> Bracket:
        """Return bounds on the smallest delta at `epsilon`; they may be loose below `floor`."""
        low, high = self.direction.infinite_lower, self.direction.infinite_upper
        finite = self._finite_delta(epsilon, floor - high)
        upper = high + (1 - high) * finite.upper * (1 + 8 * ROUND)
        return Bracket(low + (1 - low) * finite.lower * (1 - 8 * ROUND), min(upper, 1.0))

    def deltas(self, epsilons: Floats, *, least: float) -> tuple[Floats, Floats]:
        """Return lower and upper bounds on delta at each of `epsilons`, which must increase.

        A curve computed for one epsilon is evaluated at others on both sides of it, for as long as
        its bounds are sharp. Deltas below `least` are not resolved further, and after a number of
        curves the rest keeps the bounds it has.
        """
        lower, upper = np.zeros(len(epsilons)), np.ones(len(epsilons))
        if self.direction.steps == 1 and isinstance(law := self.releases[0][0].law, Sampled):
            lower, upper = OneRelease.tails(law, epsilons)
        left = _MOST_CURVES if self.direction.steps > 1 else len(epsilons)
        for i in _middle_first(len(epsilons)):
            is_sharp = upper[i] - lower[i] <= _FAIR * upper[i] or upper[i] <= least
            if is_sharp or left == 0:
                continue
            left -= 1
            known = len(self.curves)
            lower[i], upper[i] = self._finite_delta(float(epsilons[i]), 0.0, quickly=True)
            for curve in self.curves[known:]:
                for way in (range(i + 1, len(epsilons)), range(i - 1, -1, -1)):
                    for j in way:
                        one, known_ends = curve.delta(float(epsilons[j])), (lower[j], upper[j])
                        lower[j], upper[j] = max(lower[j], one.lower), min(upper[j], one.upper)
                        # A curve that is nowhere sharp, of few points, may still help far away.
                        helps = upper[j] < 0.8 * known_ends[1] or lower[j] > 1.25 * known_ends[0]
                        if one.width > _FAIR * one.upper and not helps:
                            break
        low, high = self.direction.infinite_lower, self.direction.infinite_upper
        upper = np.minimum.accumulate(np.where(epsilons >= self.largest_loss, 0.0, upper))
        lower = np.maximum.accumulate(np.where(epsilons >= self.largest_loss, 0.0, lower)[::-1])
        upper = np.minimum(high + (1 - high) * upper * (1 + 8 * ROUND), 1.0)
        return low + (1 - low) * lower[::-1] * (1 - 8 * ROUND), upper

    def _finite_epsilon(self, delta: float, floor: float) -> Bracket:
        if self._total_variation() <= delta:
            return Bracket(0.0, 0.0)
        if delta <= 0.0:
            return Bracket(self.largest_loss, self.largest_loss)
        if self.direction.steps == 1:
            one = self.releases[0][0]
            if floor > 0.0 and one.delta(floor).upper <= delta:
                return Bracket(0.0, floor)
            return _epsilon_of(one, delta)
        methods = (self._contour_epsilon, self._lattice_epsilon, self._simple_epsilon)
        if self.is_short and self.is_laplace:  # few atoms: the transform does not decay
            methods = (self._lattice_epsilon, self._contour_epsilon, self._simple_epsilon)
        if delta < _LEAST_DELTA:
            methods = (self._simple_epsilon,)
        enough = _GOOD if self.is_short else _CLOSE if self.is_smooth else _ENOUGH
        if has_mixtures(self.direction) and delta >= _LEAST_DELTA:
            methods = (self._mixture_epsilon, *methods)
            enough = _GOOD if self.is_short else _CLOSE
            if has_mixtures(self.direction, of_more_than=_MANY_SHIFTS):
                enough = _ROUGH
        return _sharpest(methods, delta, floor, Bracket(0.0, self.largest_loss), enough)

    def _finite_delta(self, epsilon: float, floor: float, *, quickly: bool = False) -> Bracket:
        if epsilon >= self.largest_loss or not self.releases:
            return Bracket(0.0, 0.0)
        if self.direction.steps == 1:
            return self.releases[0][0].delta(epsilon)
        lower = max(one.delta(epsilon).lower for one, _ in self.releases)
        upper = min(self._total_variation(), _Unsampled(self.direction).delta(epsilon))
        # For many epsilons a lattice serves all of them, a smoothed curve only a few.
        coarsest = _COARSER**4 if not quickly else 1.0 if self.is_smooth else 0.0
        contour = partial(self._contour_delta, coarsest=coarsest)
        methods = (contour, self._coarse_delta if quickly else self._lattice_delta)
        enough = _GOOD if self.is_short and not quickly else _ENOUGH
        return _sharpest(methods, epsilon, floor, Bracket(lower, upper), enough)

    def _contour_epsilon(self, delta: float, floor: float, answer: Bracket) -> Bracket:
        if floor > 0.0 and self._is_cheaper(floor, delta):
            return answer.intersection(Bracket(0.0, floor))
        if floor > 0.0 and (bound := chernoff_if_added(self.direction, delta)) <= floor:
            return answer.intersection(Bracket(0.0, bound))
        family = self._family(delta)
        bound = family.moments.epsilon_bound(delta - family.removed)
        answer = answer.intersection(Bracket(0.0, bound))
        if floor > 0.0 and answer.upper > floor:  # is this the lesser direction?
            rough = self._plain(floor, delta, _ROUGH)
            found = (rough or self._smoothed(floor, delta)).delta(floor)
            if found.lower <= delta < found.upper and found.width > delta:  # nothing was proved
                with contextlib.suppress(NotCertified):
                    found = self._smoothed(floor, delta).delta(floor)
            if found.upper <= delta:
                return answer.intersection(Bracket(0.0, floor))
        guess = family.moments.guess_epsilon(delta)
        curve = self._tuned_near(guess) or self._plain(guess, delta, self.tolerance)
        while curve and answer.upper > floor:
            self.curves.append(curve)
            found = invert(curve, delta, guess=guess, ceiling=answer.upper, slope=curve.order)
            answer = answer.intersection(found)
            if _is_good(answer) or curve.order * abs(found.upper - guess) < 1.0:
                break
            guess = found.upper  # closer to the truth than the guess for which it was tuned
            curve = self._plain(guess, delta, self.tolerance)
        if answer.width > _ENOUGH * answer.upper and answer.upper > floor:
            return self._smoothed_epsilon(delta, floor, answer)
        return answer

    def _is_cheaper(self, floor: float, delta: float) -> bool:
        """Return whether delta(`floor`) is proved to be at most `delta` on the opposite's line."""
        other = None if self.opposite is None else self.opposite.curves[-1:]
        if not other or not isinstance(other[0], Contours) or other[0].is_smoothed:
            return False
        if self._is_cheaper_at_a_glance(other[0], floor, delta):
            return True
        log_target = math.log(delta) + math.log(_CHECK)
        family = Family.of(
            self.direction,
            log_removed=log_target - 3.0,
            may_expand=self.may_expand,
            used=slice(other[0].index, other[0].index + 1),
        )
        if math.exp(family.moments.log_delta_bound(floor)) + family.removed <= delta:
            return True
        curve = family.along(other[0], floor, log_target)
        return curve is not None and curve.delta(floor).upper <= delta

    def _is_cheaper_at_a_glance(self, other: Contours, floor: float, delta: float) -> bool:
        """Return whether the moments that the opposite direction has computed prove it."""
        family = None if self.opposite is None else self.opposite.family
        if family is None:
            return False
        if family.has_series:
            log_removed = math.log(delta) + math.log(self.tolerance / 8)
            return bound_along(other, self.direction, floor, log_removed=log_removed) <= delta
        if not self._adds_what_is_removed():
            return False
        return family.log_delta_if_added(floor, other.index) <= math.log(delta)

    def _adds_what_is_removed(self) -> bool:
        """Return whether this direction adds the record that the opposite one removes."""
        if self.opposite is None:
            return False
        removed = {
            replace(law, a=law.b, b=law.a) if isinstance(law, Sampled) else law: count
            for law, count in self.opposite.direction.parts
        }
        return dict(self.direction.parts) == removed

    def _mixture_epsilon(self, delta: float, floor: float, answer: Bracket) -> Bracket:
        return answer.intersection(mixture_epsilon(self.direction, delta, floor))

    def _smoothed_epsilon(self, delta: float, floor: float, answer: Bracket) -> Bracket:
        """Sharpen `answer` by smoothed curves, each centered at a better guess than the last."""
        guess, precision = answer.upper, 1.0
        if answer.width > 0.1 * answer.upper:
            most = min(answer.upper, _Unsampled(self.direction).epsilon(delta))
            answer = answer.intersection(Bracket(0.0, most))
            guess = self._likely_epsilon(delta, most)
        for _ in range(_MOST_GUESSES):
            if answer.upper <= floor:
                break
            try:
                curve = self._smoothed(guess, delta, precision)
            except NotCertified:
                if not 1.0 <= precision < _COARSER**2:
                    break
                precision *= _COARSER
                continue
            self.curves.append(curve)
            found = invert(curve, delta, guess=guess, ceiling=answer.upper, slope=curve.order)
            answer = answer.intersection(found)
            if answer.width <= _ENOUGH * answer.upper:
                break
            here, next_to = (curve.delta(x).upper for x in (guess, 0.99 * guess))
            slope = max(math.log(next_to / here) / (0.01 * guess), 1e-3 * curve.order)
            step = math.log(here / delta) / slope
            last = guess, precision
            if slope * abs(step) < 0.2:  # in the right place, and not precise enough
                precision *= min(max(0.5 * _ENOUGH * answer.upper / answer.width, 0.02), 0.5)
            guess = min(max(guess + step, 0.5 * guess, answer.lower), 2 * guess, answer.upper)
            if (guess, precision) == last:
                break
        return answer

    def _smoothed(self, epsilon: float, delta: float, precision: float = 1.0) -> Contours:
        """Return a curve for rare sampling and for few steps, where transforms hardly decay.

        Losses well above `epsilon` are marked and counted in closed form; the others are integrated
        after a small smoothing. Errors are about `precision` times as large as usual.
        """
        slack = _SLACK * precision
        log_target = math.log(delta) + math.log(slack)
        large, scale = None, epsilon
        if any(has_tail(law) for law, _ in self.direction.parts):
            large = mark_losses(self.direction, epsilon, slack * delta)
            scale = max(epsilon, large.typical_low)
        if scale == 0.0:
            raise NotCertified("the size of the losses is not known.")
        family = Family.sharp(self.direction, large, log_removed=log_target - 3.0, scale=scale)
        return family.smoothed(epsilon, log_target, large, width=_SMOOTHING * precision)

    def _likely_epsilon(self, delta: float, most: float) -> float:
        """Return an estimate of epsilon where one step in many may make all the loss."""
        if any(has_tail(law) for law, _ in self.direction.parts):
            return guess_epsilon(self.direction.parts, delta, max(most, 1e-12))
        return self._single_jump(delta)

    def _single_jump(self, delta: float) -> float:
        """Estimate epsilon as if one step made all the loss: that of one step at delta / steps."""
        return max(_epsilon_of(one, delta / count).upper for one, count in self.releases)

    def _contour_delta(
        self, epsilon: float, floor: float, answer: Bracket, *, coarsest: float
    ) -> Bracket:
        """Sharpen `answer`, a bracket of delta; smoothed curves have errors of up to `coarsest`."""
        # The smallest float stands for any delta below it.
        delta = max(math.exp(self._family(1e-12).moments.guess_log_delta(epsilon)), 1e-300)
        for attempt in range(4):
            family = self._family(delta)
            bound = math.exp(family.moments.log_delta_bound(epsilon)) + family.removed
            answer = answer.intersection(Bracket(0.0, bound))
            if answer.upper <= floor:
                break
            curve = self._tuned_near(epsilon) if attempt == 0 else None
            curve = curve or self._plain(epsilon, delta, self.tolerance)
            curve = curve or self._smoothed_delta(epsilon, delta, coarsest)
            self.curves.append(curve)
            answer = answer.intersection(curve.delta(epsilon))
            if _is_good(answer) or not 1e-300 < answer.upper < 0.5 * delta:
                break
            delta = answer.upper
        return answer

    def _smoothed_delta(self, epsilon: float, delta: float, coarsest: float) -> Contours:
        """Return the most precise smoothed curve that is not too costly."""
        precision = 1.0
        while precision <= coarsest:
            with contextlib.suppress(NotCertified):
                return self._smoothed(epsilon, delta, precision)
            precision *= _COARSER
        raise NotCertified("the transform of the losses does not decay.")

    def _plain(self, epsilon: float, delta: float, tolerance: float) -> Contours | None:
        """Return one contour integral with error about `tolerance` * `delta`; None if costly."""
        log_target = math.log(delta) + math.log(tolerance)
        if self._family(delta).has_series:
            with contextlib.suppress(NotCertified):
                if curve := self._family(delta).plain(epsilon, log_target):
                    return curve
            self.may_expand, self.family = False, None
        return self._family(delta).plain(epsilon, log_target)

    def _tuned_near(self, epsilon: float) -> Contours | None:
        """Return contour integrals computed earlier for an epsilon close to this one, or None."""
        for curve in self.curves:
            if isinstance(curve, Contours) and curve.order * abs(curve.center - epsilon) < 2.0:
                return curve
        return None

    def _lattice_epsilon(self, delta: float, floor: float, answer: Bracket) -> Bracket:
        if self.is_short and answer.width <= min(_ENOUGH * answer.upper, _TINY):
            return answer
        log_target = math.log(delta) + math.log(self.tolerance)
        moments = coarse_moments(self.direction, log_target - math.log(self.direction.steps))
        if self.is_short and answer.width <= _ENOUGH * answer.upper < math.inf:
            return self._refined(delta, answer, moments, log_target)
        guess = min(moments.guess_epsilon(delta), answer.upper)
        sizes = 2 if answer.width <= _CLOSE * answer.upper else 3
        # The price of the other direction is a lower end, too.
        width = answer.upper - max(answer.lower, floor)
        sizes = 1 if self.is_smooth and width <= 0.05 * answer.upper else sizes
        for points in _LATTICE_POINTS[:sizes]:
            for center in {guess, self._single_jump(delta)} if points == _COARSE else {guess}:
                lattice = Lattice(self.direction, moments, center, log_target, points)
                found = invert(lattice, delta, guess=center, ceiling=answer.upper)
                answer = answer.intersection(found)
            if self._is_resolved(answer, points) or answer.upper <= floor:
                break
            guess = answer.upper
        return answer

    def _refined(
        self, delta: float, answer: Bracket, moments: Cumulants, log_target: float
    ) -> Bracket:
        """Sharpen a fair `answer` for few steps, as long as a lattice is about to be precise."""
        for points in _SHORT_POINTS:
            guess = answer.upper
            lattice = Lattice(self.direction, moments, guess, log_target, points)
            found = invert(lattice, delta, guess=guess, ceiling=guess)
            answer = answer.intersection(found)
            if answer.width <= _FINE * guess or found.width > 100 * _FINE * guess:
                break
        return answer

    def _coarse_delta(self, epsilon: float, floor: float, answer: Bracket) -> Bracket:
        if self.is_smooth and any(isinstance(curve, Contours) for curve in self.curves):
            return answer
        return self._lattice_delta(epsilon, floor, answer, _LATTICE_POINTS[:1])

    def _lattice_delta(
        self,
        epsilon: float,
        floor: float,
        answer: Bracket,
        sizes: tuple[int, ...] = _LATTICE_POINTS,
    ) -> Bracket:
        moments = coarse_moments(self.direction, math.log(1e-30 * self.tolerance))
        guess = moments.guess_log_delta(epsilon)
        for points in sizes:
            log_target = max(guess, -690.0) + math.log(self.tolerance)
            lattice = Lattice(self.direction, moments, epsilon, log_target, points)
            self.curves.append(lattice)
            answer = answer.intersection(lattice.delta(epsilon))
            if self._is_resolved(answer, points) or answer.upper <= floor:
                break
            guess = min(guess, math.log(answer.upper))
        return answer

    def _is_resolved(self, answer: Bracket, points: int) -> bool:
        """Return whether no larger lattice than one of `points` needs to be tried."""
        is_fine = self.needs_lattice or (self.is_short and points == _COARSE)
        wanted = _FINE if is_fine else _FAIR
        return answer.width <= wanted * answer.upper

    def _simple_epsilon(self, delta: float, _floor: float, answer: Bracket) -> Bracket:
        """Sharpen `answer`, a bracket of epsilon, by closed forms.

        One release alone gives a lower end; all releases without sampling give an upper end.
        """
        lower = max(_epsilon_of(one, delta).lower for one, _ in self.releases)
        return answer.intersection(Bracket(lower, _Unsampled(self.direction).epsilon(delta)))

    def _total_variation(self) -> float:
        """Return an upper bound on delta(0), which is the same in both directions.

        It is the sum of delta(0) over all releases, and for Gaussian releases at most
        sqrt(D / 2), D being the sum of their divergences (Pinsker's inequality).
        """
        total, noise, squared = 0.0, 0.0, 0.0
        for one, count in self.releases:
            divergence = _divergence(one.law)
            if divergence == math.inf:
                total += count * one.delta(0.0).upper
            else:
                noise += count * _sampled_total_variation(one.law)
                squared += 0.5 * count * divergence
        return (total + min(noise, math.sqrt(squared))) * (1 + 1e-12)

    def _family(self, delta: float) -> Family:
        """Return the loss laws, high losses of negligible mass cut off."""
        if self.family is None or self.family.removed > delta * self.tolerance:
            log_removed = math.log(delta) + math.log(self.tolerance / 8)
            self.family = Family.of(
                self.direction, log_removed=log_removed, may_expand=self.may_expand
            )
        return self.family


class _Unsampled:
    """Upper bound on the price of a composition: the price without any sampling.

    Sampling mixes a pair of laws with a pair of equal laws, which lowers every divergence (joint
    convexity). So all Gaussian releases cost at most one Gaussian release on all records, and every
    other release adds at most its largest loss.
    """

    def __init__(self, direction: Direction) -> None:
        squared, rest = 0.0, 0.0
        for law, count in direction.parts:
            if isinstance(law, Shifted):
                squared += count * law.mu**2
            elif isinstance(law, Sampled) and isinstance(law.noise, Normal):
                squared += count * ((law.a + law.b) / law.noise.sigma) ** 2
            elif isinstance(law, MixedNormals):
                squared += count * (max(law.shifts) / law.sigma) ** 2
            else:
                rest += count * law.largest_loss
        self.rest = rest * (1 + 1e-14)
        self.mu = math.sqrt(squared)
        self.noise = OneRelease(Shifted(self.mu)) if squared else None

    def epsilon(self, delta: float) -> float:
        if self.noise is None:
            return self.rest
        guess = self.mu * (0.5 * self.mu + math.sqrt(-2 * math.log(delta)))
        return self.rest + invert(self.noise, delta, guess=guess, ceiling=math.inf).upper

    def delta(self, epsilon: float) -> float:
        if epsilon < self.rest:
            return 1.0
        return self.noise.delta(epsilon - self.rest).upper if self.noise else 0.0


def _divergence(law: Law) -> float:
    """Bound the Kullback-Leibler divergence of Gaussian noise if a sampled record is removed.

    With q the rate, it is at most q times that of the noise, by convexity, and at most
    log(1 + chi^2), where chi^2 = q^2 (exp(1 / sigma^2) - 1). It is infinite for other laws.
    """
    if not (isinstance(law, Sampled) and isinstance(law.noise, Normal) and law.a + law.b == 1):
        return math.inf
    squared = 1 / law.noise.sigma**2
    if squared > 500:
        return 0.5 * law.rate * squared
    return min(math.log1p(law.rate**2 * math.expm1(squared)), 0.5 * law.rate * squared)


def _sampled_total_variation(law: Law) -> float:
    """Return the total variation of Gaussian noise on a sample: q (2 Phi(1 / (2 sigma)) - 1)."""
    assert isinstance(law, Sampled)
    assert isinstance(law.noise, Normal)
    return law.rate * math.erf(1 / (math.sqrt(8) * law.noise.sigma)) * (1 + 8 * ROUND)


def _sharpest(
    methods: tuple[Callable[[float, float, Bracket], Bracket], ...],
    target: float,
    floor: float,
    answer: Bracket,
    enough: float = _ENOUGH,
) -> Bracket:
    """Return the bracket `answer`, narrowed by one method after another.

    Stop when its relative width is `enough`, or if it is wholly below `floor`, where precision does
    not matter.
    """
    for method in methods:
        try:
            with np.errstate(over="ignore"):  # an infinite bound is a bound
                answer = method(target, floor, answer)
        except NotCertified:
            continue
        if answer.width <= enough * answer.upper or answer.upper <= floor:
            break
    return answer


def _middle_first(size: int) -> list[int]:
    """Return all indices below `size`, such that every first part of the list is spread out.

    >>> _middle_first(7)
    [0, 4, 2, 6, 1, 3, 5]
    """
    bits = max(size - 1, 1).bit_length()
    return sorted(range(size), key=lambda i: (-(i & -i) if i else -(1 << bits), i))


def _epsilon_of(one: OneRelease, delta: float) -> Bracket:
    return invert(one, delta, guess=_guess_of_one(one, delta), ceiling=one.largest_loss)


def _guess_of_one(one: OneRelease, delta: float) -> float:
    """Return an estimate of the epsilon of one release at `delta`, without proof.

    Gaussian noise on a sample, a record removed, has delta(log(1 - q + q exp(t))) = q delta'(t),
    where q is the rate and delta' is that of the noise alone. If it is added, epsilon is similar.
    """
    law = one.law
    if isinstance(law, Sampled) and isinstance(law.noise, Normal) and delta < law.rate:
        mu = (law.a + law.b) / law.noise.sigma
        alone = OneRelease(Shifted(mu))
        start = mu * (0.5 * mu + math.sqrt(-2 * math.log(delta / law.rate)))
        t = invert(alone, delta / law.rate, guess=start, ceiling=math.inf).upper
        return min(log_mixture_at(law.rate, t), one.largest_loss)
    return min(1.0, one.largest_loss)


def _is_good(answer: Bracket) -> bool:
    return answer.width <= _GOOD * answer.upper
