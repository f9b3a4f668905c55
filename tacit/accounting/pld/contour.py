"""The contour method: delta(epsilon) as an integral of moments, with a proved error.

Let M(z) = E_P[exp(z l)] be the moments of the total loss, a product over the steps. Then

    delta(epsilon) = 1/(2 pi i) * integral of M(z) exp(-z epsilon) / (z (z + 1)) dz

along Re z = order > 0. It is evaluated by the trapezoid rule with step 2 pi / w. By Poisson
summation, the rule gives *exactly* the sum over all k of exp(order k w) delta(epsilon + k w): the
wanted value, and aliases that are never negative. So the sum over |t| < t_max differs from delta by

  aliases below   at most r / (1 - r), r = exp(-order w), because delta <= 1;
  aliases above   by Chernoff at a second order m > order: delta(e) <= c(m) M(m) exp(-m e) with
                  c(m) = m^m / (m + 1)^(m + 1), summed as a geometric series;
  truncation      sup |M(order + i t)| over t >= t_max, divided by pi t_max;
  the transform   quadrature, pruning and rounding of each M(order + i t), times the count;
  the cut         mass removed from the tail of high losses, times the count (it lowers delta).

The cost is nodes in t times nodes in the output y: the number of steps is only an exponent.

**Smoothing.** If sampling is rare or there are few steps, M hardly decays: the total loss is almost
an atom (no step drew the record). So one Gaussian release with a small shift `eta` is added to the
composition. Its moments exp(eta^2 z (z + 1) / 2) decay, and composition never lowers delta, so the
integral is an upper bound. A loss that exceeds epsilon by x adds (1 - exp(-x))_+ to delta without
the added release, and with it

    C(x) = Phi(x / eta + eta / 2) - exp(-x) Phi(x / eta - eta / 2),

whose derivative in eta is phi(x / eta + eta / 2) (these are the price and the vega of a
Black-Scholes call). Integrating the derivative from 0 to eta,

    C(x) - (1 - exp(-x))_+  <=  eta / sqrt(2 pi) * exp(-x^2 / (2 eta^2) - x / 2).

The right side is eta^2 exp(eta^2 / 8) times the density of the added loss, N(eta^2 / 2, eta^2), at
-x. So delta is at least the integral minus eta^2 exp(eta^2 / 8) times the density of the composed
loss at epsilon, which is the same integral without 1 / (z (z + 1)); its aliases are not negative
either. Both bounds are of second order in eta. As they hold for each loss, they hold for a part of
a law, whose mass is below 1.
"""

import math
from functools import lru_cache

import numpy as np

from tacit._arrays import Floats
from tacit.accounting.brackets import Bracket
from tacit.accounting.one_event import ROUND, Complexes, dot
from tacit.accounting.pld.laplace_contour import LaplaceModel
from tacit.accounting.pld.large_losses import LargeLosses
from tacit.accounting.pld.loss_laws import Discrete, Law, Normal, Sampled, Shifted
from tacit.accounting.pld.pairs import Direction
from tacit.accounting.pld.sampled_gaussian_contour import SmoothModel
from tacit.accounting.pld.sampled_gaussian_panels import CutModel
from tacit.accounting.pld.sampled_gaussian_series import SeriesModel
from tacit.accounting.pld.transforms import (
    ALL_ORDERS,
    LOG_CONSTANT,
    ORDERS,
    AtomicModel,
    Cumulants,
    Factor,
    LossModel,
    PlainModel,
    Tilt,
    total,
    useful_orders,
)
from tacit.errors import NotCertified

_LIGHT_WORK, _MOST_WORK = 3e5, 3e7
"""Nodes in t times nodes in y: per law that is accepted at once, and in total that is allowed."""
_MOST_FREQUENCIES = 1 << 16
_NEAR = 0.12  # share of the distance from epsilon to the level of marks


class Family:
    """The loss laws of a composition, each with its count and moments; it plans the integrals."""

    def __init__(
        self,
        models: list[LossModel],
        counts: list[int],
        each: list[Cumulants] | None = None,
        smoothing: float = 0.0,
        used: slice | None = None,
    ) -> None:
        self.models = models
        self.counts = counts
        self.smoothing = smoothing
        self.steps = sum(counts)
        if each is None:
            if used is None:
                variance = math.fsum(n * m.variance for n, m in zip(counts, models, strict=True))
                used = useful_orders(math.sqrt(variance) + 1e-150)
            each = [_moments(model, used.start, used.stop) for model in models]
        self.each = each
        self.moments = total(self.each, counts)
        self.removed = math.fsum(n * m.removed for n, m in zip(counts, models, strict=True))

    @staticmethod
    def of(
        direction: Direction,
        *,
        log_removed: float,
        may_expand: bool = False,
        used: slice | None = None,
    ) -> "Family":
        """Return the laws of `direction`, with high losses of mass exp(log_removed) cut off.

        Moments may be expanded in series where these promise to be precise. They are computed in
        the range `used` of `ORDERS`, by default in that which helps.
        """
        log_each = log_removed - math.log(direction.steps)
        spread = _normal_spread(direction) if may_expand else 0.0
        models = [_model(law, log_each, count, spread) for law, count in direction.parts]
        return Family(models, [count for _, count in direction.parts], used=used)

    @property
    def has_series(self) -> bool:
        """Whether moments of a law are a series, which may not be precise enough."""
        return any(isinstance(model, SeriesModel) for model in self.models)

    @staticmethod
    def sharp(
        direction: Direction, large: LargeLosses | None, *, log_removed: float, scale: float
    ) -> "Family":
        """Return the laws of `direction`, cut off sharply; they are to be smoothed.

        Losses that `large` has marked are cut off; other laws lose a mass of exp(log_removed).
        `scale` is about the size of the total loss.
        """
        log_each = log_removed - math.log(direction.steps)
        marks = {} if large is None else {mark.law: mark.cut for mark in large.marks}
        models = [_sharp_model(law, log_each, marks, scale) for law, _ in direction.parts]
        family = Family(models, [count for _, count in direction.parts])
        # Marked losses are counted, not removed.
        kept = zip(direction.parts, models, strict=True)
        family.removed = math.fsum(n * m.removed for (law, n), m in kept if law not in marks)
        return family

    def plain(
        self, epsilon: float, log_target: float, *, most: float = 0.0, gain: float = 33.0
    ) -> "Contours | None":
        """Return one integral with error about exp(log_target) near `epsilon`; None if costly.

        It is costly if it takes more than `most` nodes, or a number that is always accepted. It is
        not returned either if the log of the integrand over the target is above `gain`, because
        then rounding may spoil it.
        """
        draft = _Draft(self, epsilon, log_target)
        is_precise = draft.log_gain - math.log1p(draft.order) <= gain
        is_cheap = draft.is_light or draft.work <= most
        return Contours(draft, self) if is_cheap and is_precise else None

    def along(self, other: "Contours", epsilon: float, log_target: float) -> "Contours | None":
        """Return one integral on the line of `other`, as `plain` does.

        The line suits the opposite direction of comparison, whose losses are similar. So moments
        are needed at one order only, and nothing is known of the aliases: only upper bounds are
        sharp.
        """
        if not math.isfinite(self.moments.upper[other.index]):
            return None
        draft = _Draft(self, epsilon, log_target, (other.index, other.window))
        return Contours(draft, self) if draft.is_light else None

    def log_delta_if_added(self, epsilon: float, index: int) -> float:
        """Bound log delta(epsilon) for adding the record whose removal this family describes.

        It is a Chernoff bound at orders near that with this `index`, from the grids of this family;
        0, which says nothing, if there are other laws than those of Gaussian noise.
        """
        near = slice(max(index - 2, 0), index + 5)
        orders, log_m = ORDERS[near], np.zeros(len(ORDERS[near]))
        for model, count in zip(self.models, self.counts, strict=True):
            if isinstance(model, PlainModel):
                log_m += count * model.moments(near).upper[near]
            elif isinstance(model, SmoothModel) and (model.law.a, model.law.b) == (1, 0):
                log_m += count * model.log_moments_if_added(orders)
            else:
                return 0.0
        return min(float((log_m + LOG_CONSTANT[near] - orders * epsilon).min()) + 1e-12, 0.0)

    def smoothed(
        self, epsilon: float, log_target: float, large: LargeLosses | None, *, width: float
    ) -> "Contours":
        """Return delta near `epsilon` as one smoothed integral, plus what marked losses add.

        `width` is about the relative width of a bracket of epsilon that smoothing causes.
        """
        index, _ = self.moments.choose_line(epsilon, log_target, is_smoothed=True)
        # The density at epsilon is about order^2 delta, and delta falls by order * delta.
        eta = math.sqrt(width * max(epsilon, 1e-3 / ORDERS[index]) / ORDERS[index])
        models, counts = [*self.models, PlainModel(eta**2)], [*self.counts, 1]
        each = [*self.each, models[-1].moments(ALL_ORDERS)]
        family = Family(models, counts, each, eta)
        family.removed = self.removed
        return Contours(_Draft(family, epsilon, log_target), family, large)


@lru_cache(maxsize=32)
def _moments(model: LossModel, start: int, stop: int) -> Cumulants:
    """Return the moments of a model, which is kept between prices as well, in a range of orders."""
    return model.moments(slice(start, stop))


class Contours:
    """delta(epsilon) by a contour integral: proved bounds, tight near `center`.

    `large` is what marked losses add.
    """

    def __init__(self, draft: "_Draft", family: Family, large: LargeLosses | None = None) -> None:
        is_costly = draft.work > _MOST_WORK and not draft.is_light
        if is_costly or draft.size > _MOST_FREQUENCIES:
            raise NotCertified("the transform of the loss decays too slowly.")
        self.removed = family.removed
        self.large = large
        self.center = draft.center
        self.order, self.index, self.window = draft.order, draft.index, draft.window
        self.is_smoothed = family.smoothing > 0
        self.contour = Contour(draft)
        # Close to the level of the marks their share of delta is not known precisely.
        far = math.inf if large is None else self.center + _NEAR * (large.level - self.center)
        self.farthest = far

    def delta(self, epsilon: float) -> Bracket:
        """Return certified bounds on delta(epsilon)."""
        found = self._delta(epsilon)
        if epsilon > self.farthest:  # delta never rises
            found = Bracket(found.lower, min(found.upper, self._delta(self.farthest).upper))
        return found

    def _delta(self, epsilon: float) -> Bracket:
        lower, upper = self.contour.delta(epsilon)
        upper += self.removed
        if self.large:
            added = self.large.delta(epsilon)
            lower, upper = lower + added.lower, upper + added.upper
        return Bracket.of_delta(lower, upper)


class _Draft:
    """Plan of one contour integral: its line Re z = order, its nodes, and the work they cost.

    It integrates the moments of `family`. The error of delta near `epsilon` is to be about
    exp(log_target). A `line`, the index of its order and the length of its window, may be given.
    """

    def __init__(
        self,
        family: Family,
        epsilon: float,
        log_target: float,
        line: tuple[int, float] | None = None,
    ) -> None:
        self.family = family
        self.center = epsilon
        self.index, self.window = line or family.moments.choose_line(
            epsilon, log_target, is_smoothed=family.smoothing > 0
        )
        self.order = float(ORDERS[self.index])
        self.step = 2 * math.pi / self.window
        self.log_gain = float(family.moments.upper[self.index]) - self.order * epsilon - log_target
        at = self.index
        self.tilts = [Tilt(self.order, float(m.upper[at]), float(m.error[at])) for m in family.each]
        pairs = zip(family.models, self.tilts, strict=True)
        self.tilted = [model.tilt(tilt) for model, tilt in pairs]
        reach, self.log_truncation = self._reach()
        self.size = math.ceil(min(reach * self.window, 1e9) / (2 * math.pi)) + 2
        log_error = math.log1p(self.order) - max(self.log_gain, 3.0) - math.log(family.steps) - 3.0
        farthest = self.size * self.step
        nodes = [law.lay_nodes(farthest, log_error) for law in self.tilted]
        self.work = self.size * float(1 + sum(nodes))
        self.is_light = self.work <= _LIGHT_WORK * len(nodes)

    def _reach(self) -> tuple[float, float]:
        """Return a t beyond which the integral is negligible, and the log of a bound on it."""
        variance = float(self.family.moments.variance[self.index])
        t = math.sqrt(2 * max(self.log_gain, 1.0) / variance)  # that of a normal loss
        t *= 1.0 if self.family.smoothing else 1.3  # other laws decay a little more slowly
        low = 0.7 * t
        while (log_tail := self._log_tail(t)) + self.log_gain > 0:
            low, t = t, 1.5 * t
            if t * self.window > 1e10:
                return math.inf, 0.0
        while t > 1.6 * low:
            middle = math.sqrt(low * t)
            if (log_middle := self._log_tail(middle)) + self.log_gain > 0:
                low = middle
            else:
                t, log_tail = middle, log_middle
        return t, log_tail

    def _log_tail(self, t: float) -> float:
        """Return the log of a bound on the integral over |Im z| > t, relative to M(order)."""
        pairs = zip(self.tilted, self.family.counts, strict=True)
        return sum(n * law.log_decay(t, n) for law, n in pairs) - math.log(math.pi * t)


class Contour:
    """One contour integral, by the trapezoid rule on the line Re z = order.

    Its bounds on delta(epsilon) are proved everywhere, and tight near the epsilon of its plan.
    """

    def __init__(self, draft: _Draft) -> None:
        self.order = draft.order
        self.t: Floats = draft.step * np.arange(draft.size, dtype=float)
        factors = [law.factor(draft.step, draft.size) for law in draft.tilted]
        counts = draft.family.counts
        product, error = _product(factors, counts)
        self.z = np.empty(draft.size, np.complex128)
        self.z.real, self.z.imag = self.order, self.t
        product[0] *= 0.5
        product *= draft.step / math.pi
        self.poles = poles = self.z * (self.z + 1)
        weights = product / poles
        self.weights = np.stack((weights.real, weights.imag))  # of cos(t epsilon), sin(t epsilon)
        sizes = np.abs(weights)
        self.pole_sizes = np.abs(poles)
        self.error = float((error / self.pole_sizes).sum()) * (draft.step / math.pi)
        self.error += math.exp(draft.log_truncation)
        self.error += float(sizes.sum()) * (8 + len(sizes)) * ROUND
        self.phase_error = 2 * ROUND * dot(sizes, self.t)
        self.smoothing = draft.family.smoothing
        if self.smoothing:
            self.density = np.stack((product.real, product.imag))
            far = float(self.t[-1])
            # The integral of exp(-eta^2 t^2 / 2) from `far` on; other factors are at most 1.
            tail = math.exp(-0.5 * (self.smoothing * far) ** 2) / (self.smoothing**2 * far)
            self.density_error = float(np.sum(error)) * draft.step / math.pi + tail
            self.density_error += float(np.abs(product).sum()) * (8 + len(sizes)) * ROUND
            self.density_phase = 2 * ROUND * dot(np.abs(product), self.t)
        # Aliases, the terms k != 0 of the Poisson sum, come from below and from above.
        ratio = math.exp(-self.order * draft.window)
        self.below = ratio / (1 - ratio)
        higher = slice(draft.index + 1, None)
        upper = draft.family.moments.upper[higher]  # infinite where it is not known
        self.higher = ORDERS[higher]
        shrink = (self.order - self.higher) * draft.window
        self.log_above = upper + LOG_CONSTANT[higher] + shrink - np.log(-np.expm1(shrink))
        tilts = list(zip(counts, draft.tilts, strict=True))
        self.log_m = math.fsum(n * tilt.log_moment for n, tilt in tilts)
        self.log_m_error = 8 * ROUND * abs(self.log_m) + math.fsum(n * t.error for n, t in tilts)

    def delta(self, epsilon: float) -> Bracket:
        exponent = self.log_m - self.order * epsilon
        if not exponent < 600.0:
            return Bracket(0.0, 1.0)
        scale = math.exp(exponent)
        angle = self.t * epsilon
        cos, sin = np.cos(angle), np.sin(angle)
        value = scale * (dot(self.weights[0], cos) + dot(self.weights[1], sin))
        relative = self.log_m_error + 8 * ROUND * (1 + abs(exponent) + self.order * epsilon)
        relative = math.expm1(min(relative, 700.0))
        both = scale * (self.error + self.phase_error * epsilon) + abs(value) * relative
        logs = self.log_above - self.higher * epsilon
        aliases = self.below + math.exp(min(float(logs.min(initial=700.0)), 700.0))
        lower = value - both - aliases
        if self.smoothing:
            density = dot(self.density[0], cos) + dot(self.density[1], sin)
            density += self.density_error + self.density_phase * epsilon
            eta = self.smoothing
            if not eta**2 / 8 < 600.0:
                return Bracket.of_delta(0.0, value + both)
            lower -= eta**2 * math.exp(eta**2 / 8) * scale * max(density, 0.0) * (1 + relative)
        return Bracket.of_delta(lower, value + both)


def bound_along(
    other: Contours, direction: Direction, epsilon: float, *, log_removed: float
) -> float:
    """Return an upper bound on delta(epsilon) of `direction` from the line and nodes of `other`.

    As aliases are not negative, the trapezoid sum is itself an upper bound, up to rounding and
    truncation. So no moments are needed elsewhere. The bound is 1 unless all moments are series.
    """
    t, z, poles = other.contour.t, other.contour.z, other.contour.poles
    far, spread = float(t[-1]), _normal_spread(direction)
    log_each = log_removed - math.log(direction.steps)
    log, log_tail, removed = np.zeros(len(z), np.complex128), -math.log(math.pi * far), 0.0
    growth = 8 * ROUND * (1 + t * epsilon)
    for law, count in direction.parts:
        model = _model(law, log_each, count, spread)
        if isinstance(model, PlainModel):
            one, error = 0.5 * model.square * poles, np.array(0.0)
            log_tail -= 0.5 * count * model.square * far * far
        elif isinstance(model, SeriesModel):
            one, error = model.along(z)
            if not error[0] < 0.5:
                return 1.0
            moment = Tilt(other.order, float(one[0].real + error[0]), 2 * float(error[0]))
            log_tail += count * model.tilt(moment).log_decay(far, count)
        else:
            return 1.0
        log += count * one
        growth += count * (np.log1p(error) + 8 * ROUND * np.abs(one))
        removed += count * model.removed
    shift = float(log[0].real)
    exponent = shift - other.order * epsilon
    if not exponent < 600.0:
        return 1.0
    log.real -= shift
    log.imag -= t * epsilon
    weights = np.exp(log) / poles
    weights[0] *= 0.5
    sizes = np.abs(weights)
    found = float(weights.real.sum()) + dot(sizes, np.expm1(np.minimum(growth, 700.0)))
    found += float(sizes.sum()) * (8 + len(sizes)) * ROUND
    found = 2 / other.window * found + math.exp(log_tail + float(growth[0]))
    relative = 8 * ROUND * (2 + abs(shift) + other.order * epsilon)
    return math.exp(exponent) * max(found, 0.0) * (1 + relative) + removed


def _product(factors: list[Factor], counts: list[int]) -> tuple[Complexes, Floats]:
    """Return the integrand prod M / prod M(order) at all nodes, and its error.

    M is the transform of one step; a factor is raised to its count.
    """
    log, growth = 0.0j, 8 * ROUND
    for factor, n in zip(factors, counts, strict=True):
        log = log + n * factor.log
        growth = growth + n * np.log1p(factor.error)  # (|M| + error)^n - |M|^n, multiplied out
    power, size = np.exp(log), np.abs(log)
    wrong = np.exp(np.minimum(np.real(log) + growth + 8 * ROUND * size, 700.0))
    return power, wrong - np.abs(power) * (1 - 4 * ROUND)


def _normal_spread(direction: Direction) -> float:
    """Return about the standard deviation of a total loss of normal noise; 0 if not known."""
    squared = 0.0
    for law, count in direction.parts:
        if isinstance(law, Shifted):
            squared += count * law.mu**2
        elif isinstance(law, Sampled) and isinstance(law.noise, Normal) and law.noise.sigma > 0.1:
            squared += count * law.rate**2 * math.expm1(1 / law.noise.sigma**2)
        else:
            return 0.0
    return math.sqrt(squared)


def _model(law: Law, log_removed: float, count: int = 1, spread: float = 0.0) -> LossModel:
    """Return the model of a law that occurs `count` times in a total loss of deviation `spread`.

    A spread of 0 stands for one that is not known.
    """
    if isinstance(law, Shifted):
        return PlainModel(law.mu**2)
    if isinstance(law, Discrete):
        return AtomicModel(np.array(law.losses), np.array(law.p))
    if not isinstance(law, Sampled):
        raise NotCertified("the law has no transform in closed form.")
    if isinstance(law.noise, Normal):
        series = SeriesModel.fitting(law, spread=spread, steps=count, log_removed=log_removed)
        return series or SmoothModel.cut_lightly(law, log_removed)
    return LaplaceModel(law)


def _sharp_model(
    law: Law, log_removed: float, marks: dict[Sampled, float], scale: float
) -> LossModel:
    if not isinstance(law, Sampled) or not isinstance(law.noise, Normal):
        return _model(law, log_removed)
    far = law.a / law.noise.sigma + math.sqrt(2 * max(-log_removed, 1.0))
    return CutModel(law, marks.get(law, far), scale)
