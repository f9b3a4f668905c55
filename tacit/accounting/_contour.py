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
from tacit.accounting._laws import ROUND, Discrete, FloatArray, Law, Normal, Shifted
from tacit.accounting._models import AtomicLaw, ComplexArray, Factor, PlainLaw, factor
from tacit.accounting._pairs import Direction
from tacit.accounting._smooth import Nodes, SmoothLaw, Split, TiltedLaw
from tacit.errors import NotCertified

Model = SmoothLaw | PlainLaw | AtomicLaw

ORDERS = 2.0 ** np.arange(-14.0, 30.5, 0.5)
LOG_CONSTANT = ORDERS * np.log(ORDERS / (1 + ORDERS)) - np.log1p(ORDERS)
"""log c(order): delta(e) <= c M exp(-order e), attained by a loss that is constant."""

_LIGHT_WORK = 3e5
_MOST_WORK = 5e7


class Family:
    """The laws of one direction with their moments at `ORDERS`, from which contours are tuned."""

    def __init__(self, direction: Direction, *, log_removed: float) -> None:
        log_each = log_removed - math.log(max(direction.steps, 1))
        self.parts = [(_model(law, log_each), count) for law, count in direction.parts]
        self.steps = direction.steps
        self.removed = sum(count * model.removed for model, count in self.parts)
        self.moments = [model.moments(ORDERS) for model, _ in self.parts]
        counted = [(count, m) for (_, count), m in zip(self.parts, self.moments, strict=True)]
        self.log_m: FloatArray = np.sum([n * m.upper for n, m in counted], axis=0)
        self.mean: FloatArray = np.sum([n * m.mean for n, m in counted], axis=0)
        self.variance: FloatArray = np.sum([n * m.variance for n, m in counted], axis=0)

    def epsilon_bound(self, delta: float) -> float:
        """The moment bound: epsilon is at most this (Chernoff at each of `ORDERS`)."""
        if self.removed >= delta:
            return math.inf
        log_delta = math.log(delta - self.removed)
        return max(float(np.min((self.log_m + LOG_CONSTANT - log_delta) / ORDERS)), 0.0)

    def delta_bound(self, epsilon: float) -> float:
        """The moment bound the other way round."""
        logs = self.log_m + LOG_CONSTANT - ORDERS * epsilon
        return min(math.exp(min(float(np.min(logs)), 0.0)) * (1 + 1e-9) + self.removed, 1.0)

    def saddle_points(self) -> tuple[FloatArray, FloatArray]:
        """Pairs (epsilon, log delta) on the curve, by the saddle-point approximation: a guess."""
        epsilon = self.mean - 1 / ORDERS - 1 / (1 + ORDERS)
        curvature = self.variance + 1 / ORDERS**2 + 1 / (1 + ORDERS) ** 2
        log_delta = self.log_m - ORDERS * epsilon - np.log(ORDERS * (1 + ORDERS))
        log_delta -= 0.5 * np.log(2 * math.pi * curvature)
        falls = np.minimum.accumulate(np.where(np.isfinite(log_delta), log_delta, -1e300))
        return epsilon, falls

    def guess_epsilon(self, delta: float) -> float:
        """About where delta(epsilon) = delta."""
        epsilon, log_delta = self.saddle_points()
        guess = np.interp(math.log(delta), log_delta[::-1], epsilon[::-1])
        return float(min(max(guess, 0.0), self.epsilon_bound(delta)))

    def guess_log_delta(self, epsilon: float) -> float:
        """About log delta(epsilon)."""
        points, log_delta = self.saddle_points()
        return min(float(np.interp(epsilon, points, log_delta)), -1e-3)

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
        self.index, self.window = _choose_line(family, epsilon, log_target, low)
        self.order, self.step = float(ORDERS[self.index]), 2 * math.pi / self.window
        self.log_gain = float(family.log_m[self.index]) - self.order * epsilon - log_target
        self.splits = low.splits if low else [None] * len(family.parts)
        self.tilted = [
            model.tilt(self.order, float(m.upper[self.index]))
            if isinstance(model, SmoothLaw)
            else model
            for (model, _), m in zip(family.parts, family.moments, strict=True)
        ]
        reach, self.log_truncation = self._reach()
        self.size = math.ceil(min(reach / self.step, 1e9)) + 2
        log_error = -self.log_gain - math.log(family.steps) - 3.0
        self.nodes = [
            law.nodes(self.size * self.step, log_error, split)
            if isinstance(law, TiltedLaw)
            else Nodes(0.0, 0, 0, 0.0)
            for law, split in zip(self.tilted, self.splits, strict=True)
        ]
        self.work = self.size * float(1 + sum(nodes.last - nodes.first for nodes in self.nodes))

    def _reach(self) -> tuple[float, float]:
        """Smallest t (within a fifth) beyond which the integral is below target, and its log."""
        lines = [
            law.decay_lines(1 if split else count) if isinstance(law, TiltedLaw) else None
            for law, (_, count), split in zip(
                self.tilted, self.family.parts, self.splits, strict=True
            )
        ]
        t = 0.5 * math.sqrt(2 * max(self.log_gain, 1.0) / float(self.family.variance[self.index]))
        for _ in range(100):
            log_tail = self._log_tail(lines, t)
            if log_tail + self.log_gain <= 0:
                return t, log_tail
            t *= 1.2
        return math.inf, 0.0

    def _log_tail(self, lines: list, t: float) -> float:
        """log of the integral beyond t: |prod M - prod A| <= sum of count |B|, other |M| <= 1."""
        whole, high = 0.0, []
        for law, line, (_, count), split in zip(
            self.tilted, lines, self.family.parts, self.splits, strict=True
        ):
            if split:
                high.append(math.log(count) + float(line.log_norm(t, split).min()))
            elif line:
                whole += count * min(float(line.log_norm(t).min()), 0.0)
            elif isinstance(law, PlainLaw):
                whole += count * law.log_decay(t)
        parts = float(np.logaddexp.reduce(high)) if high else 0.0
        return whole + parts - math.log(math.pi * t)


def _choose_line(
    family: Family, epsilon: float, log_target: float, low: LowRuns | None
) -> tuple[int, float]:
    """Index of the order, and window, for which aliases are below target and nodes are few."""
    below = (low.log_others if low else 0.0) - log_target + 1.0
    above = np.maximum(family.log_m + LOG_CONSTANT - ORDERS * epsilon - log_target + 1.0, 1.0)
    gap = ORDERS[None, :] - ORDERS[:, None]
    ratio = np.where(gap > 0, above / np.where(gap > 0, gap, 1.0), math.inf)
    window = np.maximum(max(below, 1.0) / ORDERS, ratio.min(axis=1))
    log_gain = np.maximum(family.log_m - ORDERS * epsilon - log_target, 1.0)
    index = int(np.argmin(window * np.sqrt(log_gain / family.variance)))
    return index, float(window[index])


def _low_runs(family: Family, epsilon: float, log_target: float) -> LowRuns | None:
    """Split at the highest level that keeps the runs of low losses below target."""
    flat = [
        model.tilt(0.0, 0.0) if isinstance(model, SmoothLaw) else None for model, _ in family.parts
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


def _split_at(family: Family, flat: list[TiltedLaw | None], level: float) -> LowRuns:
    splits, log_m, others = [], np.zeros(len(ORDERS)), 0.0
    for (_, count), law, moments in zip(family.parts, flat, family.moments, strict=True):
        split = law.split_at(level) if law else None
        splits.append(split)
        log_m += count * (law.log_low_moments(ORDERS, split) if law else moments.upper)
        others += count * law.high_mass(split) if law else 0.0
    return LowRuns(splits, log_m, math.log(others + 1e-300))


class Contour:
    """delta(epsilon) by the trapezoid rule on one line; certified everywhere, sharp near one."""

    def __init__(self, draft: _Draft) -> None:
        self.draft, self.order, self.window = draft, draft.order, draft.window
        self.center = draft.center
        self.t = draft.step * np.arange(draft.size)
        factors = [
            _factor_of(law, nodes, split, draft)
            for law, nodes, split in zip(draft.tilted, draft.nodes, draft.splits, strict=True)
        ]
        counts = [count for _, count in draft.family.parts]
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
        self.log_m = math.fsum(n * f.log_moment for n, f in zip(counts, factors, strict=True))
        self.log_m_error = 8 * ROUND * abs(self.log_m) + math.fsum(
            n * f.log_moment_error for n, f in zip(counts, factors, strict=True)
        )

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
        return Bracket(min(max(lower, 0.0), 1.0), min(max(upper, 0.0), 1.0))

    def _aliases(self, epsilon: float) -> float:
        """Bound on the terms k != 0 of the Poisson sum."""
        low, family = self.draft.low, self.draft.family
        ratio = math.exp(-self.order * self.window)
        below = math.exp(min(low.log_others, 0.0) if low else 0.0) * ratio / (1 - ratio)
        higher = slice(self.draft.index + 1, None)
        orders = ORDERS[higher]
        shrink = (self.order - orders) * self.window
        logs = family.log_m[higher] + LOG_CONSTANT[higher] - orders * epsilon + shrink
        above = np.exp(np.minimum(logs, 700.0)) / -np.expm1(shrink)
        return below + float(above.min(initial=1.0))


def _factor_of(law, nodes, split, draft: _Draft) -> Factor:
    """The transform of one law at the nodes of the draft."""
    if isinstance(law, PlainLaw):
        return law.factor(draft.order, draft.step, draft.size)
    if isinstance(law, AtomicLaw):
        return factor(law.atoms(draft.order), None, draft.step, draft.size)
    y, atoms = law.atoms(nodes)
    share = np.exp(split.log_high(y)) if split else None
    return factor(atoms, share, draft.step, draft.size)


def _product(factors: list[Factor], counts: list[int]) -> tuple[ComplexArray, FloatArray]:
    """prod M - prod A (prod M where nothing is split) relative to prod M(order), and its error."""
    log = np.sum([n * f.log for n, f in zip(counts, factors, strict=True)], axis=0)
    relative = np.sum([n * f.error for n, f in zip(counts, factors, strict=True)], axis=0)
    relative += 8 * ROUND * (1 + np.abs(log))
    whole = np.exp(log)
    highs = [(n, f, f.high) for n, f in zip(counts, factors, strict=True) if f.high]
    if not highs:
        return whole, np.abs(whole) * np.expm1(np.minimum(relative, 700.0))
    rise = np.sum([n * high.log_rise for n, _, high in highs], axis=0)
    low = np.exp(log - rise)
    product = low * _expm1(rise)
    # d(prod M - prod A) = sum of n [ dB prod M / M + dA (prod M / M - prod A / A) ]
    error = np.abs(product) * (relative + 8 * ROUND * np.abs(rise))
    for n, f, high in highs:
        size = np.exp(-f.log.real)  # M(order) / |M|
        error += n * (high.error * size + 8 * ROUND * np.abs(high.log_rise)) * np.abs(whole)
        error += n * f.error * np.abs(low * _expm1(high.log_rise))
    return product, error * np.exp(np.minimum(2 * relative, 700.0))


def _expm1(z: ComplexArray) -> ComplexArray:
    """exp(z) - 1 without cancellation."""
    return (
        np.expm1(z.real) * np.exp(1j * z.imag) - 2 * np.sin(0.5 * z.imag) ** 2 + 1j * np.sin(z.imag)
    )


def _model(law: Law, log_removed: float) -> Model:
    if isinstance(law, Shifted):
        return PlainLaw(law)
    if isinstance(law, Discrete):
        return AtomicLaw(law)
    if isinstance(law.noise, Normal):
        return SmoothLaw(law, log_removed=log_removed)
    raise NotCertified("no contour for this law.")
