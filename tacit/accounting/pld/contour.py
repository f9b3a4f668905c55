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

**Rungs.** If sampling is rare, the total loss is almost an atom (no step sampled the record) with
a tail on a much larger scale: M hardly decays, and no order suits both. So every law is cut at
lower and lower levels, P >= A_1 >= A_2 ..., and the composition is written as a telescoping sum,

    prod P = (prod P - prod A_1) + (prod A_1 - prod A_2) + ... + prod A_k.

Each difference is a positive measure and decays like A_j - A_(j+1), whose losses are spread out on
one scale, so each gets a contour of its own (|prod A - prod B| <= sum |A - B|). The last term is
computed by a plain contour, or has losses so low that a Chernoff bound of it is negligible.
"""

import math

import numpy as np
from scipy.special import ndtr

from tacit._arrays import Floats
from tacit.accounting.brackets import Bracket
from tacit.accounting.one_event import ROUND, Complexes, expm1
from tacit.accounting.pld.laplace_contour import LaplaceModel
from tacit.accounting.pld.large_losses import LargeLosses
from tacit.accounting.pld.loss_laws import Discrete, Law, Normal, Sampled, Shifted
from tacit.accounting.pld.pairs import Direction
from tacit.accounting.pld.sampled_gaussian_contour import WIDE, SmoothModel, TiltedSmooth
from tacit.accounting.pld.transforms import (
    LOG_CONSTANT,
    ORDERS,
    AtomicModel,
    Factor,
    LossModel,
    PlainModel,
    Split,
    Tilt,
    total,
)
from tacit.errors import NotCertified

_LIGHT_WORK, _MARKED_WORK, _MOST_WORK = 3e5, 5e6, 1e8
"""Nodes in t times nodes in y: per law that is accepted at once, in total with marked losses, and
in total that is allowed."""
_TINY_MASS = 1e-290  # above any sum of masses that underflow
_MOST_RUNGS = 16
_LITTLE_GAIN = 28.0  # log of integrand over target up to which rounding has no effect


class Family:
    """The loss laws of a composition, each with its count and moments; it plans the integrals."""

    def __init__(self, models: list[LossModel], counts: list[int]) -> None:
        self.models = models
        self.counts = counts
        self.steps = sum(counts)
        self.each = [model.moments(self.steps) for model in models]
        self.moments = total(self.each, counts)
        self.removed = math.fsum(n * m.removed for n, m in zip(counts, models, strict=True))

    @staticmethod
    def of(direction: Direction, *, log_removed: float, width: float = WIDE) -> "Family":
        """Return the laws of `direction`, with high losses of mass exp(log_removed) cut off.

        `width` is the distance of outputs over which the cut goes smoothly from 1 to 0.
        """
        log_each = log_removed - math.log(direction.steps)
        models = [_model(law, log_each, width) for law, _ in direction.parts]
        return Family(models, [count for _, count in direction.parts])

    @staticmethod
    def unmarked(direction: Direction, large: LargeLosses, *, log_removed: float) -> "Family":
        """Return the laws of `direction` without the losses that `large` has marked."""
        log_each = log_removed - math.log(direction.steps)
        known = large.models()
        models = [
            known[law] if isinstance(law, Sampled) and law in known else _model(law, log_each, WIDE)
            for law, _ in direction.parts
        ]
        family = Family(models, [count for _, count in direction.parts])
        # Marked losses are counted, not removed.
        kept = zip(family.models, family.counts, strict=True)
        others = [n * m.removed for m, n in kept if m not in known.values()]
        family.removed = math.fsum(others)
        return family

    def lower(self, epsilon: float) -> "Family | None":
        """Return the same laws cut off at lower losses; None if only negligible ones would stay."""
        smooth = [model for model in self.models if isinstance(model, SmoothModel)]
        if not smooth:
            return None
        steepest = max(smooth, key=lambda model: float(np.interp(model.cut, model.y, model.loss)))
        below = steepest.cut - max(1.2, 2.5 * steepest.sigma)
        level = float(np.interp(below, steepest.y, steepest.loss))
        if level <= 1e-6 * epsilon:
            return None
        scale = max(level, epsilon)
        models = [m.cut_at(level, scale) if isinstance(m, SmoothModel) else m for m in self.models]
        return Family(models, self.counts)

    def plain(
        self, epsilon: float, log_target: float, *, most: float = 0.0, gain: float = 33.0
    ) -> "Contours | None":
        """Return one integral with error about exp(log_target) near `epsilon`; None if costly.

        It is costly if it takes more than `most` nodes, or a number that is always accepted. It is
        not returned either if the log of the integrand over the target is above `gain`, because
        then rounding may spoil it.
        """
        draft = _Draft(self, epsilon, log_target, None)
        is_precise = draft.log_gain <= gain
        is_cheap = draft.is_light or draft.work <= most
        return Contours([draft], self, None) if is_cheap and is_precise else None

    def marked(self, epsilon: float, log_target: float, large: LargeLosses) -> "Contours":
        """Return delta near `epsilon` as one integral, plus what the marked losses add."""
        draft = _Draft(self, epsilon, log_target, None)
        if draft.work > _MARKED_WORK:
            raise NotCertified("the transform of the loss decays too slowly.")
        return Contours([draft], self, None, large)

    def ladder(self, epsilon: float, log_target: float) -> "Contours":
        """Return delta near `epsilon` as a sum of integrals, one for each range of losses."""
        drafts: list[_Draft] = []
        top = self
        for _ in range(_MOST_RUNGS):
            low = top.lower(epsilon)
            if low is None:
                break
            drafts.append(_Draft(top, epsilon, log_target, low))
            rest = _LowRuns(low)
            if rest.log_delta(epsilon) <= log_target:
                return Contours(drafts, self, rest)
            bottom = _Draft(low, epsilon, log_target, None)
            if bottom.is_light and bottom.log_gain <= _LITTLE_GAIN:
                return Contours([*drafts, bottom], self, None)
            top = low
        raise NotCertified("the transform of the loss decays too slowly.")


class _LowRuns:
    """The last term of the sum over rungs in the module docstring: no step has a high loss."""

    def __init__(self, family: Family) -> None:
        self.log_m = np.zeros(len(ORDERS))
        self.leak = 0.0
        for model, n, moments in zip(family.models, family.counts, family.each, strict=True):
            cut = model.bounded() if isinstance(model, SmoothModel) else (moments.upper, 0.0)
            self.log_m += n * cut[0]
            self.leak += n * cut[1]

    def log_delta(self, epsilon: float) -> float:
        """Return the log of an upper bound on what this term adds to delta(epsilon)."""
        logs = self.log_m + LOG_CONSTANT - ORDERS * epsilon
        return float(np.logaddexp(np.min(logs), math.log(self.leak + 1e-300)))


class Contours:
    """delta(epsilon) as a sum of contour integrals: proved bounds, tight near `center`."""

    def __init__(
        self,
        drafts: list["_Draft"],
        family: Family,
        rest: _LowRuns | None,
        large: LargeLosses | None = None,
    ) -> None:
        """Evaluate the planned integrals `drafts`.

        `rest` is a low-loss term, only bounded; `large` what marked losses add.
        """
        if sum(draft.work for draft in drafts) > _MOST_WORK:
            raise NotCertified("the transform of the loss decays too slowly.")
        self.removed = family.removed
        self.rest = rest
        self.large = large
        self.center = drafts[0].center
        self.order = max(draft.order for draft in drafts)
        self.overlap = math.fsum(draft.overlap for draft in drafts)
        self.contours = [Contour(draft) for draft in drafts]

    def delta(self, epsilon: float) -> Bracket:
        """Return certified bounds on delta(epsilon)."""
        parts = [contour.delta(epsilon) for contour in self.contours]
        lower = math.fsum(part.lower for part in parts) - self.overlap
        upper = math.fsum(part.upper for part in parts) + self.removed
        if self.rest:
            upper += math.exp(min(self.rest.log_delta(epsilon), 0.0))
        if self.large:
            added = self.large.delta(epsilon)
            lower, upper = lower + added.lower, upper + added.upper
        return Bracket.of_delta(lower, upper)


class _Draft:
    """Plan of one contour integral: its line Re z = order, its nodes, and the work they cost.

    It integrates the moments of `family`, or their difference from those of `low`, the same laws
    cut at lower losses. The error of delta near `epsilon` is to be about exp(log_target).
    """

    def __init__(
        self, family: Family, epsilon: float, log_target: float, low: Family | None
    ) -> None:
        self.family = family
        self.center = epsilon
        self.splits, self.log_mass, self.overlap = _difference(family, low)
        self.index, self.window = family.moments.choose_line(epsilon, log_target, self.log_mass)
        self.order = float(ORDERS[self.index])
        self.step = 2 * math.pi / self.window
        self.log_gain = float(family.moments.upper[self.index]) - self.order * epsilon - log_target
        at = self.index
        self.tilts = [Tilt(self.order, float(m.upper[at]), float(m.error[at])) for m in family.each]
        pairs = zip(family.models, self.tilts, strict=True)
        self.tilted = [model.tilt(tilt) for model, tilt in pairs]
        reach, self.log_truncation = self._reach()
        self.size = math.ceil(min(reach * self.window, 1e9) / (2 * math.pi)) + 2
        log_error = -max(self.log_gain, 3.0) - math.log(family.steps) - 3.0
        pairs = zip(self.tilted, self.splits, strict=True)
        farthest = self.size * self.step
        nodes = [law.lay_nodes(farthest, log_error, split) for law, split in pairs]
        self.work = self.size * float(1 + sum(nodes))
        self.is_light = self.work <= _LIGHT_WORK * len(nodes)

    def _reach(self) -> tuple[float, float]:
        """Return a t beyond which the integral is negligible, and the log of a bound on it."""
        variance = float(self.family.moments.variance[self.index])
        low = t = 0.5 * math.sqrt(2 * max(self.log_gain, 1.0) / variance)
        while (log_tail := self._log_tail(t)) + self.log_gain > 0:
            low, t = t, 2 * t
            if t > 1e30 * low or t * self.window > 1e10:
                return math.inf, 0.0
        while t > 1.2 * low:  # until t is within a fifth of the smallest one
            middle = math.sqrt(low * t)
            if (log_middle := self._log_tail(middle)) + self.log_gain > 0:
                low = middle
            else:
                t, log_tail = middle, log_middle
        return t, log_tail

    def _log_tail(self, t: float) -> float:
        """Return the log of a bound on the integral over |Im z| > t, relative to M(order)."""
        # |prod M - prod A| is at most the sum of count * |B|, since all other |M| <= 1.
        whole = 0.0
        high: list[float] = []
        for law, count, split in zip(self.tilted, self.family.counts, self.splits, strict=True):
            if split and isinstance(law, TiltedSmooth):
                high.append(math.log(count) + law.log_high_decay(t, split))
            else:
                whole += count * law.log_decay(t, count)
        parts = float(np.logaddexp.reduce(high)) if high else 0.0
        return whole + parts - math.log(math.pi * t)


def _difference(
    family: Family, low: Family | None
) -> tuple[list[Split | None], float | None, float]:
    """Return where each law is split, the log mass of `family` minus `low`, and the overlap.

    `low` has the same laws as `family`, cut at lower losses. Cutting an output y at both places is
    a little less than cutting it at the lower place only. The overlap bounds by how much: with Z
    and Z' normal and w, w' the widths of the cuts `low` and `top`, it is at most
    P(y + w Z < low, y + w' Z' > top) <= P(w' Z' - w Z > top - low), or the mass that `top` removes.
    """
    splits: list[Split | None] = [None] * len(family.models)
    if low is None:
        return splits, None, 0.0
    mass = overlap = 0.0
    pairs = zip(family.counts, family.models, low.models, strict=True)
    for i, (n, top, bottom) in enumerate(pairs):
        if isinstance(top, SmoothModel) and isinstance(bottom, SmoothModel) and top is not bottom:
            splits[i] = Split(bottom.cut, bottom.width)
            mass += n * bottom.removed
            apart = (top.cut - bottom.cut) / math.hypot(top.width, bottom.width)
            overlap += n * min(float(ndtr(-apart)), top.removed)
    return splits, math.log(min(max(mass, _TINY_MASS), 1.0)), overlap  # the mass may underflow


class Contour:
    """One contour integral, by the trapezoid rule on the line Re z = order.

    Its bounds on delta(epsilon) are proved everywhere, and tight near the epsilon of its plan.
    """

    def __init__(self, draft: _Draft) -> None:
        self.order = draft.order
        self.t = draft.step * np.arange(draft.size)
        pairs = zip(draft.tilted, draft.splits, strict=True)
        factors = [law.factor(draft.step, draft.size, split) for law, split in pairs]
        counts = draft.family.counts
        product, error = _product(factors, counts)
        z = self.order + 1j * self.t
        self.weights = product * (draft.step / math.pi) / (z * (z + 1))
        self.weights[0] *= 0.5
        sizes = np.abs(self.weights)
        with np.errstate(divide="ignore", invalid="ignore"):
            absolute = error * (draft.step / math.pi) / np.abs(z * (z + 1))
        self.error = float(np.sum(absolute)) + math.exp(draft.log_truncation)
        self.error += float(sizes.sum()) * (8 + len(sizes)) * ROUND
        self.phase_error = 2 * ROUND * float(sizes @ self.t)
        # Aliases, the terms k != 0 of the Poisson sum, come from below and from above.
        ratio = math.exp(-self.order * draft.window)
        self.below = math.exp(draft.log_mass or 0.0) * ratio / (1 - ratio)
        upper = draft.family.moments.upper
        higher = np.flatnonzero(np.isfinite(upper))
        higher = higher[higher > draft.index]
        self.higher = ORDERS[higher]
        shrink = (self.order - self.higher) * draft.window
        self.log_above = upper[higher] + LOG_CONSTANT[higher] + shrink - np.log(-np.expm1(shrink))
        tilts = list(zip(counts, draft.tilts, strict=True))
        self.log_m = math.fsum(n * tilt.log_moment for n, tilt in tilts)
        self.log_m_error = 8 * ROUND * abs(self.log_m) + math.fsum(n * t.error for n, t in tilts)

    def delta(self, epsilon: float) -> Bracket:
        exponent = self.log_m - self.order * epsilon
        if not exponent < 600.0:
            return Bracket(0.0, 1.0)
        scale = math.exp(exponent)
        angle = self.t * epsilon
        value = scale * float(self.weights.real @ np.cos(angle) + self.weights.imag @ np.sin(angle))
        relative = self.log_m_error + 8 * ROUND * (1 + abs(exponent) + self.order * epsilon)
        both = scale * (self.error + self.phase_error * epsilon)
        both += abs(value) * math.expm1(min(relative, 700.0))
        logs = self.log_above - self.higher * epsilon
        aliases = self.below + math.exp(min(float(logs.min(initial=700.0)), 700.0))
        return Bracket.of_delta(value - both - aliases, value + both)


def _product(factors: list[Factor], counts: list[int]) -> tuple[Complexes, Floats]:
    """Return the integrand (prod M - prod A) / prod M(order) at all nodes, and its error.

    M is the transform of one step and A its low part; a factor is raised to its count. If no factor
    is split into low and high parts, prod A is left out.
    """
    pairs = list(zip(counts, factors, strict=True))
    log = np.sum([n * f.log for n, f in pairs], axis=0)
    # (|M| + error)^n - |M|^n, multiplied out over the steps
    growth = np.sum([n * np.log1p(f.error) for n, f in pairs], axis=0) + 8 * ROUND * np.abs(log)
    whole, error = _power(log, growth + 8 * ROUND)
    highs = [(n, f, f.high) for n, f in pairs if f.high]
    if not highs:
        return whole, error
    rise = np.sum([n * high.log_rise for n, _, high in highs], axis=0)
    log_low = np.sum([n * (f.high.log_low if f.high else f.log) for n, f in pairs], axis=0)
    # The error of A is that of M times |M / A|.
    ratios = [np.exp((f.log - f.high.log_low).real) if f.high else 1.0 for f in factors]
    relative = zip(counts, factors, ratios, strict=True)
    low_growth = np.sum([n * np.log1p(f.error * ratio) for n, f, ratio in relative], axis=0)
    low, low_error = _power(log_low, low_growth + 8 * ROUND * (1 + np.abs(log_low)))
    small = (np.abs(rise) < 0.5) & (growth + low_growth < 0.1)
    # d(prod M - prod A) = sum of n [ dB prod M / M + dA (prod M / M - prod A / A) ]
    product = low * expm1(np.where(small, rise, 0.0))
    fine = np.abs(product) * (growth + low_growth + 8 * ROUND * (1 + np.abs(rise)))
    for n, f, high in highs:
        added = high.error * np.exp(-f.log.real) + 8 * ROUND * np.abs(high.log_rise)
        step = expm1(np.where(small, high.log_rise, 0.0))
        fine += n * (added * np.abs(whole) + f.error * np.abs(low * step))
    return np.where(small, product, whole - low), np.where(small, 2 * fine, error + low_error)


def _power(log: Complexes, growth: Floats) -> tuple[Complexes, Floats]:
    """Return exp(log), and a bound on its error if `log` may be wrong by `growth`."""
    power = np.exp(log)
    return power, np.exp(np.minimum(log.real + growth, 700.0)) - np.abs(power) * (1 - 4 * ROUND)


def _model(law: Law, log_removed: float, width: float) -> LossModel:
    if isinstance(law, Shifted):
        return PlainModel(law.mu**2)
    if isinstance(law, Discrete):
        return AtomicModel(np.array(law.losses), np.array(law.p))
    if not isinstance(law, Sampled):
        raise NotCertified("the law has no transform in closed form.")
    if isinstance(law.noise, Normal):
        return SmoothModel.cut_lightly(law, log_removed, width)
    return LaplaceModel(law)
