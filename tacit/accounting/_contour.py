"""The contour engine: delta(epsilon) as an integral of moments, with a proved error.

Let M(z) = E_P[exp(z l)] be the moments of the total loss, a product over the steps. Then

    delta(epsilon) = 1/(2 pi i) * integral of M(z) exp(-z epsilon) / (z (z + 1)) dz

along Re z = order > 0. We use the trapezoid rule with step 2 pi / w. By Poisson summation it gives
*exactly* the sum over all k of exp(order k w) delta(epsilon + k w): the wanted value and aliases
that are never negative. So the sum over |t| < t_max differs from delta by

  aliases below   at most r / (1 - r), r = exp(-order w), because delta <= 1;
  aliases above   by Chernoff at a second order m > order: delta(e) <= c(m) M(m) exp(-m e) with
                  c(m) = m^m / (m + 1)^(m + 1), summed as a geometric series;
  truncation      sup |M(order + i t)| over t >= t_max, see `_smooth`, over pi t_max;
  the transform   quadrature, pruning and rounding of each M(order + i t), times the count;
  the cut         mass removed from the tail of high losses, times the count (hides some delta).

The cost is nodes in t times nodes in y: the number of steps enters as an exponent only.

**Splitting.** If few steps are taken and sampling is rare, the total loss has almost an atom where
no step sampled the record, and M hardly decays. Split the law of each step smoothly into a low and
a high part, M = A + B. The product of all A belongs to runs in which every loss is low; its own
delta(epsilon) is below any wanted error by Chernoff, so it may be left out of the integral. What is
left, prod M - prod A <= sum |B|, decays like B, whose losses are spread out.
"""

import math
from dataclasses import dataclass

import numpy as np

from tacit.accounting._bracket import Bracket
from tacit.accounting._laplace import LaplaceModel
from tacit.accounting._laws import Discrete, Law, Normal, Shifted
from tacit.accounting._models import (
    AtomicModel,
    Factor,
    Model,
    PlainModel,
    Split,
    Tilt,
)
from tacit.accounting._moments import LOG_CONSTANT, ORDERS, total
from tacit.accounting._numerics import ROUND, ComplexArray, FloatArray, expm1
from tacit.accounting._pairs import Direction
from tacit.accounting._smooth import SmoothModel, TiltedSmooth
from tacit.errors import NotCertified

_LIGHT_WORK, _MOST_WORK = 3e5, 3e7
"""Nodes in t times nodes in y that take about a millisecond, and that are worth their time."""


class Family:
    """The laws of one direction with their moments, from which contours are tuned."""

    def __init__(self, direction: Direction, *, log_removed: float) -> None:
        self.counts = [count for _, count in direction.parts]
        self.steps = direction.steps
        log_each = log_removed - math.log(self.steps)
        self.models = [_model(law, log_each) for law, _ in direction.parts]
        removed = (n * model.removed for n, model in zip(self.counts, self.models, strict=True))
        self.removed = math.fsum(removed)
        self.each = [model.moments() for model in self.models]
        self.moments = total(self.each, self.counts)

    def tune(self, epsilon: float, log_target: float) -> "Contour":
        """A contour whose errors near `epsilon` are about exp(log_target)."""
        draft = _Draft(self, epsilon, log_target, None)
        if draft.work > _LIGHT_WORK:
            low = _low_runs(self, epsilon, log_target)
            if low is not None:
                draft = min(draft, _Draft(self, epsilon, log_target, low), key=lambda d: d.work)
        if draft.work > _MOST_WORK:
            raise NotCertified("the transform of the loss decays too slowly.")
        return Contour(draft)


@dataclass(frozen=True)
class LowRuns:
    """The runs in which every loss is low, which a split contour leaves out."""

    splits: list[Split | None]
    log_m: FloatArray
    """Upper bound of their log moments at `ORDERS`."""
    log_others: float
    """log of a bound on the probability of all other runs."""

    def log_delta(self, epsilon: float) -> float:
        """Chernoff bound of what these runs add to delta(epsilon)."""
        return float(np.min(self.log_m + LOG_CONSTANT - ORDERS * epsilon))


class _Draft:
    """A contour as planned: its line, its nodes in t and in y, and what they will cost."""

    def __init__(
        self, family: Family, epsilon: float, log_target: float, low: LowRuns | None
    ) -> None:
        self.family, self.low, self.center = family, low, epsilon
        ceiling = low.log_others if low else 0.0
        self.index, self.window = family.moments.choose_line(epsilon, log_target, ceiling)
        self.order, self.step = float(ORDERS[self.index]), 2 * math.pi / self.window
        self.log_gain = float(family.moments.upper[self.index]) - self.order * epsilon - log_target
        self.splits = low.splits if low else [None] * len(family.models)
        self.tilts = [
            Tilt(self.order, float(m.upper[self.index]), float(m.error[self.index]))
            for m in family.each
        ]
        self.tilted = [
            model.tilt(tilt) for model, tilt in zip(family.models, self.tilts, strict=True)
        ]
        reach, self.log_truncation = self._reach()
        self.size = math.ceil(min(reach / self.step, 1e9)) + 2
        log_error = -max(self.log_gain, 3.0) - math.log(family.steps) - 3.0
        nodes = [
            law.lay_nodes(self.size * self.step, log_error, split)
            for law, split in zip(self.tilted, self.splits, strict=True)
        ]
        self.work = self.size * float(1 + sum(nodes))

    def _reach(self) -> tuple[float, float]:
        """Smallest t (within a fifth) beyond which the integral is below target, and its log."""
        variance = float(self.family.moments.variance[self.index])
        t = 0.5 * math.sqrt(2 * max(self.log_gain, 1.0) / variance)
        for _ in range(100):
            log_tail = self._log_tail(t)
            if log_tail + self.log_gain <= 0:
                return t, log_tail
            t *= 1.2
        return math.inf, 0.0

    def _log_tail(self, t: float) -> float:
        """log of the integral beyond t: |prod M - prod A| <= sum of count |B|, other |M| <= 1."""
        whole, high = 0.0, []
        for law, count, split in zip(self.tilted, self.family.counts, self.splits, strict=True):
            if split and isinstance(law, TiltedSmooth):
                high.append(math.log(count) + law.log_high_decay(t, split))
            else:
                whole += count * law.log_decay(t, count)
        parts = float(np.logaddexp.reduce(high)) if high else 0.0
        return whole + parts - math.log(math.pi * t)


def _low_runs(family: Family, epsilon: float, log_target: float) -> LowRuns | None:
    """Split at the highest level that keeps the runs of low losses below target."""
    still = Tilt(0.0, 0.0, 0.0)
    flat = [
        model.tilt(still) if isinstance(model, SmoothModel) else None for model in family.models
    ]
    best = None
    low, high = math.log(max(epsilon, 1e-12)) - 14.0, math.log(max(epsilon, 1e-12))
    for _ in range(7):
        level = 0.5 * (low + high)
        runs = _split_at(family, flat, math.exp(level))
        if runs.log_delta(epsilon) <= log_target:
            best, low = runs, level
        else:
            high = level
    return best


def _split_at(family: Family, flat: list[TiltedSmooth | None], level: float) -> LowRuns:
    splits, log_m, others = [], np.zeros(len(ORDERS)), 0.0
    for count, law, moments in zip(family.counts, flat, family.each, strict=True):
        split = law.split_at(level) if law else None
        splits.append(split)
        log_m += count * (law.log_low_moments(split) if law else moments.upper)
        others += count * law.high_mass(split) if law else 0.0
    return LowRuns(splits, log_m, math.log(others + 1e-300))


class Contour:
    """delta(epsilon) by the trapezoid rule on one line; certified everywhere, sharp near one."""

    def __init__(self, draft: _Draft) -> None:
        self.draft, self.order, self.window = draft, draft.order, draft.window
        self.center = draft.center
        self.t = draft.step * np.arange(draft.size)
        factors = [
            law.factor(draft.step, draft.size, split)
            for law, split in zip(draft.tilted, draft.splits, strict=True)
        ]
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
        tilts = list(zip(counts, draft.tilts, strict=True))
        self.log_m = math.fsum(n * tilt.log_moment for n, tilt in tilts)
        self.log_m_error = 8 * ROUND * abs(self.log_m) + math.fsum(n * t.error for n, t in tilts)

    def delta(self, epsilon: float) -> Bracket:
        """Certified bounds on delta(epsilon)."""
        exponent = self.log_m - self.order * epsilon
        if not exponent < 600.0:
            return Bracket(0.0, 1.0)
        scale = math.exp(exponent)
        angle = self.t * epsilon
        value = scale * float(self.weights.real @ np.cos(angle) + self.weights.imag @ np.sin(angle))
        relative = self.log_m_error + 8 * ROUND * (1 + abs(exponent) + self.order * epsilon)
        both = scale * (self.error + self.phase_error * epsilon)
        both += abs(value) * math.expm1(min(relative, 700.0))
        hidden, low = self.draft.family.removed, self.draft.low
        if low:
            hidden += math.exp(min(low.log_delta(epsilon), 0.0))
        upper, lower = value + both + hidden, value - both - self._aliases(epsilon)
        return Bracket.of_delta(lower, upper)

    def _aliases(self, epsilon: float) -> float:
        """Bound on the terms k != 0 of the Poisson sum."""
        low, family = self.draft.low, self.draft.family
        ratio = math.exp(-self.order * self.window)
        below = math.exp(min(low.log_others, 0.0) if low else 0.0) * ratio / (1 - ratio)
        higher = slice(self.draft.index + 1, None)
        orders = ORDERS[higher]
        shrink = (self.order - orders) * self.window
        logs = family.moments.upper[higher] + LOG_CONSTANT[higher] - orders * epsilon + shrink
        above = np.exp(np.minimum(logs, 700.0)) / -np.expm1(shrink)
        return below + float(above.min(initial=1.0))


def _product(factors: list[Factor], counts: list[int]) -> tuple[ComplexArray, FloatArray]:
    """prod M - prod A (prod M where nothing is split) relative to prod M(order), and its error."""
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
    low_growth = np.sum([n * np.log1p(f.error * _ratio(f)) for n, f in pairs], axis=0)
    low, low_error = _power(log_low, low_growth + 8 * ROUND * (1 + np.abs(log_low)))
    # d(prod M - prod A) = sum of n [ dB prod M / M + dA (prod M / M - prod A / A) ]
    product = low * expm1(rise)
    fine = np.abs(product) * (growth + low_growth + 8 * ROUND * (1 + np.abs(rise)))
    for n, f, high in highs:
        added = high.error * np.exp(-f.log.real) + 8 * ROUND * np.abs(high.log_rise)
        fine += n * (added * np.abs(whole) + f.error * np.abs(low * expm1(high.log_rise)))
    small = (np.abs(rise) < 0.5) & (growth + low_growth < 0.1)
    return np.where(small, product, whole - low), np.where(small, 2 * fine, error + low_error)


def _power(log: ComplexArray, growth: FloatArray) -> tuple[ComplexArray, FloatArray]:
    """exp(log), and its error if log is uncertain by `growth`."""
    power = np.exp(log)
    return power, np.exp(np.minimum(log.real + growth, 700.0)) - np.abs(power) * (1 - 4 * ROUND)


def _ratio(f: Factor) -> FloatArray:
    """|M / A|."""
    return np.exp((f.log - f.high.log_low).real) if f.high else np.ones(len(f.log))


def _model(law: Law, log_removed: float) -> Model:
    if isinstance(law, Shifted):
        return PlainModel(law.mu**2)
    if isinstance(law, Discrete):
        return AtomicModel(np.array(law.losses), np.array(law.p))
    if isinstance(law.noise, Normal):
        return SmoothModel(law, log_removed=log_removed)
    return LaplaceModel(law)
