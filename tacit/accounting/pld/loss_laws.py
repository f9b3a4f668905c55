"""Laws of the privacy loss log(P / Q) of one release, which the tight accountant composes.

P and Q are the output distributions on two neighboring data sets. Additive noise, on all records
or on a Poisson sample, has the form

    P = (1 - a q) f(x) + a q f(x - 1),      Q = (1 - b q) f(x) + b q f(x + 1)

with f the density of the noise and q the sampling rate. If the record is in the data set of P only,
(a, b) = (1, 0); if it is in that of Q only, (0, 1); if one record is replaced by another, (1, 1).
With L(x) = log(1 - q + q f(x - 1) / f(x)) and f even, P = f exp(a L(x)), and the loss
log(P / Q) = a L(x) - b L(-x) never decreases in x. So a range of losses is a range of outputs x,
whose probabilities under P and Q are closed forms.

Every law has `largest_loss`, the supremum of its finite losses; `span(log_mass)`, the ends of a
range of losses outside which P has about exp(log_mass) or less; and `cells(edges)`, the
probabilities under P and under Q of the losses up to edges[0], between neighboring edges, and above
edges[-1].

A noise with density f has `log_above(x)`, the log of the probability that the noise exceeds x;
`between(low, high)`, the probability of (low, high] without cancellation in either tail;
`log_ratio(x)`, log(f(x - 1) / f(x)), which never falls; `where_ratio(u)` and `first_ratio(u)`, the
largest x at which it is at most u and the smallest at which it is at least u; and
`reach(log_mass)`, a distance beyond which each side has at most probability exp(log_mass).
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.special import log_ndtr, ndtr

from tacit._arrays import Floats
from tacit.accounting.brackets import Bracket
from tacit.accounting.one_event import ROUND, log_mixture_at


@dataclass(frozen=True)
class Normal:
    """Normal noise of standard deviation `sigma`; f in the module docstring is its density."""

    sigma: float

    largest_ratio = math.inf

    def log_above(self, x: Floats) -> Floats:
        return log_ndtr(-np.asarray(x) / self.sigma)

    def between(self, low: Floats, high: Floats) -> Floats:
        flip = low > 0
        left, right = np.where(flip, -high, low), np.where(flip, -low, high)
        return ndtr(right / self.sigma) - ndtr(left / self.sigma)

    def log_ratio(self, x: Floats) -> Floats:
        return (x - 0.5) / self.sigma**2

    def where_ratio(self, u: Floats) -> Floats:
        return self.sigma**2 * u + 0.5

    first_ratio = where_ratio  # the ratio rises strictly: one x has it

    def reach(self, log_mass: float) -> float:
        return self.sigma * math.sqrt(max(-2 * log_mass, 1.0))


@dataclass(frozen=True)
class DoubleExponential:
    """Laplace noise of scale 1 / `epsilon`, with f its density: one release is `epsilon`-DP."""

    epsilon: float

    @property
    def largest_ratio(self) -> float:
        return self.epsilon

    def log_above(self, x: Floats) -> Floats:
        x = self.epsilon * np.asarray(x)
        return np.where(x > 0, -math.log(2) - x, np.log1p(-0.5 * np.exp(np.minimum(x, 0.0))))

    def between(self, low: Floats, high: Floats) -> Floats:
        low, high = self.epsilon * low, self.epsilon * high
        flip = low > 0
        left, right = np.where(flip, -high, low), np.where(flip, -low, high)
        below = 0.5 * (np.exp(np.minimum(right, 0.0)) - np.exp(np.minimum(left, 0.0)))
        return below - 0.5 * np.expm1(-np.maximum(right, 0.0))

    def log_ratio(self, x: Floats) -> Floats:
        return self.epsilon * np.clip(2.0 * x - 1.0, -1.0, 1.0)

    def where_ratio(self, u: Floats) -> Floats:
        x = 0.5 * (1.0 + u / self.epsilon)
        return np.where(u < -self.epsilon, -math.inf, np.where(u >= self.epsilon, math.inf, x))

    def first_ratio(self, u: Floats) -> Floats:
        x = 0.5 * (1.0 + u / self.epsilon)
        return np.where(u <= -self.epsilon, -math.inf, np.where(u > self.epsilon, math.inf, x))

    def reach(self, log_mass: float) -> float:
        # The loss is constant beyond a distance of 1.
        return min(max(-log_mass, 1.0) / self.epsilon, 2.0)


@dataclass(frozen=True)
class Sampled:
    """Law of the loss of additive `noise` on a Poisson sample at `rate`.

    (a, b) is (1, 0) if a record is removed, (0, 1) if it is added, and (1, 1) if it is replaced.
    """

    noise: Normal | DoubleExponential
    rate: float
    a: int
    b: int

    @property
    def largest_loss(self) -> float:
        top = self.noise.largest_ratio
        return self._loss_of(top, -top)

    def loss(self, x: float) -> float:
        """Return the privacy loss log(P / Q) = a L(x) - b L(-x) of the output x."""
        return self._loss_of(*(float(self.noise.log_ratio(np.array(at))) for at in (x, -x)))

    def span(self, log_mass: float) -> tuple[float, float]:
        reach = self.noise.reach(log_mass)
        return self.loss(-reach), self.loss(reach + self.a)

    def where_loss(self, loss: Floats) -> Floats:
        """Return the largest output x of loss at most `loss`; -inf if none is, inf if all are."""
        if self.a and self.b:
            return self._where_replaced(loss)
        if self.a:
            return self.noise.where_ratio(_unmix(self.rate, loss))
        return -self.noise.first_ratio(_unmix(self.rate, -loss))  # -L(-x) <= l

    def cells(self, edges: Floats) -> tuple[Floats, Floats]:
        x = np.concatenate(([-math.inf], self.where_loss(edges), [math.inf]))
        low, high = x[:-1], x[1:]
        p, q = self.a * self.rate, self.b * self.rate
        plain = self.noise.between(low, high)
        mass_p = (1 - p) * plain + p * self.noise.between(low - 1, high - 1) if p else plain
        mass_q = (1 - q) * plain + q * self.noise.between(low + 1, high + 1) if q else plain
        return mass_p, mass_q

    def _loss_of(self, ratio: float, mirrored: float) -> float:
        """Return the loss of an output x, given the noise's log_ratio(x) and log_ratio(-x)."""
        up = log_mixture_at(self.rate, ratio) if self.a else 0.0
        return up - log_mixture_at(self.rate, mirrored) if self.b else up

    def _where_replaced(self, loss: Floats) -> Floats:
        """Return the largest output x whose loss is at most `loss`, if a record is replaced.

        The loss L(x) - L(-x) is an odd function of x, so the case loss >= 0 gives the other.
        """
        size, q = np.abs(loss), self.rate
        if isinstance(self.noise, DoubleExponential):
            # For x >= 0, L(-x) stays at its floor, so L(x) = loss + floor.
            floor = log_mixture_at(q, -self.noise.epsilon)
            # Rounding must not carry u below its own floor, from where no x is found.
            u = np.maximum(_unmix(q, size + floor), np.nextafter(-self.noise.epsilon, 0.0))
            return np.where(loss >= 0, self.noise.where_ratio(u), -self.noise.first_ratio(u))
        # With X = exp(x / sigma^2) and c = q exp(-1 / (2 sigma^2)) the equation is
        #   c X^2 + (1 - q)(1 - exp(l)) X - c exp(l) = 0;  X = exp(l / 2 + v) turns it into
        #   sinh(v) = (1 - q) / c * sinh(l / 2).
        variance = self.noise.sigma**2
        log_gain = math.log1p(-q) - math.log(q) + 0.5 / variance
        log_sinh = 0.5 * size + np.log(-np.expm1(-np.maximum(size, 1e-300))) - math.log(2)
        log_s = log_gain + log_sinh
        v = np.where(log_s > 20, log_s + math.log(2), np.arcsinh(np.exp(np.minimum(log_s, 20.0))))
        return np.sign(loss) * variance * (0.5 * size + v)


@dataclass(frozen=True)
class Shifted:
    """Law of the loss between N(mu, 1) and N(0, 1): any number of Gaussian releases, unsampled."""

    mu: float

    largest_loss = math.inf

    def span(self, log_mass: float) -> tuple[float, float]:
        reach = self.mu * math.sqrt(max(-2 * log_mass, 1.0))
        return self.mu**2 / 2 - reach, self.mu**2 / 2 + reach

    def cells(self, edges: Floats) -> tuple[Floats, Floats]:
        # The loss is N(mu^2 / 2, mu^2) under P and N(-mu^2 / 2, mu^2) under Q.
        z = np.concatenate(([-math.inf], edges / self.mu, [math.inf]))
        unit, half = Normal(1.0), self.mu / 2
        return unit.between(z[:-1] - half, z[1:] - half), unit.between(z[:-1] + half, z[1:] + half)


@dataclass(frozen=True)
class Discrete:
    """Finitely many losses in increasing order, with their probabilities under P and Q.

    `infinite` is the probability under P of outcomes that are impossible under Q (loss +inf),
    `vanishing` the probability under Q of outcomes that are impossible under P. `blur` is the
    largest relative error of the probabilities, and absolute one of the losses, beyond a few
    roundings.
    """

    losses: tuple[float, ...]
    p: tuple[float, ...]
    q: tuple[float, ...]
    infinite: float = 0.0
    vanishing: float = 0.0
    blur: float = 0.0

    def __post_init__(self) -> None:
        if not self.losses:  # every outcome is impossible under P or under Q
            for name in ("losses", "p", "q"):
                object.__setattr__(self, name, (0.0,))

    @property
    def largest_loss(self) -> float:
        return self.losses[-1]

    def span(self, _log_mass: float) -> tuple[float, float]:
        return self.losses[0], self.losses[-1]

    def cells(self, edges: Floats) -> tuple[Floats, Floats]:
        index = np.searchsorted(edges, np.array(self.losses), side="left")
        size = len(edges) + 1
        p, q = (np.bincount(index, np.array(mass), size) for mass in (self.p, self.q))
        return p.astype(float), q.astype(float)

    def given_finite(self) -> "Discrete":
        """Return the law given that the loss is finite.

        The masses of P and Q are divided by the P-mass of finite losses, so no loss changes.
        """
        keep = 1.0 - self.infinite if self.infinite < 1 else 1.0
        p, q = (tuple(mass / keep for mass in masses) for masses in (self.p, self.q))
        return Discrete(self.losses, p, q)


@dataclass(frozen=True)
class MixedNormals:
    """Law of the loss between a mixture of N(shift, sigma^2) and N(0, sigma^2).

    With `sign` 1, P is the mixture and Q the single normal law; with -1 they are exchanged. With
    L(x) = log of the mean of exp((shift x - shift^2 / 2) / sigma^2), which rises with x, the loss
    is sign * L(x).
    """

    sigma: float
    shifts: tuple[float, ...]
    weights: tuple[float, ...]
    sign: int

    @property
    def largest_loss(self) -> float:
        if self.sign == 1:
            return math.inf if max(self.shifts) > 0 else 0.0
        none = math.fsum(w for s, w in zip(self.shifts, self.weights, strict=True) if s == 0)
        return -math.log(none) if none > 0 else math.inf

    def log_ratio(self, x: Floats) -> Floats:
        """Return L(x) of the class docstring."""
        s, w = np.array(self.shifts), np.array(self.weights)
        logs = (np.multiply.outer(x, s) - 0.5 * s * s) / self.sigma**2
        top = logs.max(axis=-1)
        # Around the largest term; near 0 the mean of exp(.) - 1 keeps its digits.
        near = np.log1p(np.maximum(np.expm1(np.minimum(logs, 1.0)) @ w, -0.9))
        far = top + np.log(np.exp(logs - top[..., None]) @ w)
        return np.where((top < 0.5) & (near > -0.5), near, far)

    def span(self, log_mass: float) -> tuple[float, float]:
        reach = self.sigma * math.sqrt(max(-2 * log_mass, 1.0))
        ends = self.log_ratio(np.array([-reach, reach + (self.sign == 1) * max(self.shifts)]))
        low, high = sorted((self.sign * ends).tolist())
        return low, high

    def cells(self, edges: Floats) -> tuple[Floats, Floats]:
        at = self._where(self.sign * edges)
        return self.masses(at if self.sign == 1 else at[::-1])

    def masses(self, ends: Floats) -> tuple[Floats, Floats]:
        """Return the P- and Q-mass between outputs, in increasing order of the loss."""
        x = np.concatenate(([-math.inf], ends, [math.inf]))
        unit = Normal(self.sigma)
        plain = unit.between(x[:-1], x[1:])
        mixed = np.zeros(len(plain))
        for shift, weight in zip(self.shifts, self.weights, strict=True):
            mixed += weight * unit.between(x[:-1] - shift, x[1:] - shift)
        return (mixed, plain) if self.sign == 1 else (plain[::-1], mixed[::-1])

    def _where(self, level: Floats) -> Floats:
        """Return the x with L(x) = level; -inf below all values of L."""
        s, w = np.array(self.shifts), np.array(self.weights)
        none = float(w[s == 0].sum())
        least = math.log(none) if none > 0 else -math.inf
        safe = np.where(level > least, level, max(least, -1e3) + 1.0)
        near, far = 16 * self.sigma, 1e3 * self.sigma
        far, end = far + 4 * float(s.max()), near + float(s.max())
        points = min(200 + 4 * len(level), 4000)  # Newton's method needs few for few levels
        middle = np.linspace(-near, end, points)
        x = np.concatenate(
            (
                np.linspace(-far, -near, points // 8)[:-1],
                middle,
                np.linspace(end, far, points // 8)[1:],
            )
        )
        known = self.log_ratio(x)
        i = np.clip(np.searchsorted(known, safe), 1, len(x) - 1)
        low, high = x[i - 1], x[i]
        most = np.abs(safe) * self.sigma**2 / max(float(s.max()), 1e-300) + float(s.max())
        high = np.where(safe > known[-1], np.maximum(most, far), high)
        low = np.where(safe < known[0], -1e300, low)
        at = np.interp(safe, known, x)
        for attempt in range(80):  # Newton steps inside an interval that shrinks
            value = self.log_ratio(at) - safe
            low, high = np.where(value < 0, at, low), np.where(value < 0, high, at)
            if np.all(high - low <= 4 * ROUND * np.abs(high)) or (
                attempt > 3 and np.all(np.abs(value) <= 4 * ROUND * (1 + np.abs(safe)))
            ):
                break
            step = at - value / self._slope(at)
            inside = (step > low) & (step < high) & (attempt < 12)
            at = np.where(inside, step, 0.5 * (low + high))
        return np.where(level > least, at, -math.inf)

    def _slope(self, x: Floats) -> Floats:
        s, w = np.array(self.shifts), np.array(self.weights)
        logs = (np.multiply.outer(x, s) - 0.5 * s * s) / self.sigma**2
        share = np.exp(logs - logs.max(axis=-1)[..., None]) * w
        return np.maximum(share @ s / share.sum(axis=-1) / self.sigma**2, 1e-300)


@dataclass(frozen=True)
class Folded:
    """Law with the positive losses of `half` and, with P and Q exchanged, their mirror images.

    The remaining mass has loss 0. `half` must have no atoms.
    """

    half: Sampled

    @property
    def largest_loss(self) -> float:
        return self.half.largest_loss

    def span(self, log_mass: float) -> tuple[float, float]:
        high = self.half.span(log_mass)[1]
        return -high, high

    def cells(self, edges: Floats) -> tuple[Floats, Floats]:
        size = len(edges)
        ends = np.unique(np.append(np.abs(edges), 0.0))
        p, q = (mass[1:] for mass in self.half.cells(ends))  # from ends[i] on
        up = np.searchsorted(edges, ends, side="right")
        down = np.searchsorted(edges, -ends, side="left")
        mass_p = (np.bincount(up, p, size + 1) + np.bincount(down, q, size + 1)).astype(float)
        mass_q = (np.bincount(up, q, size + 1) + np.bincount(down, p, size + 1)).astype(float)
        rest = max(1.0 - float(p.sum()) - float(q.sum()), 0.0)
        zero = int(np.searchsorted(edges, 0.0))
        mass_p[zero] += rest
        mass_q[zero] += rest
        return mass_p, mass_q


@dataclass(frozen=True)
class Mixture:
    """Law of the loss of a release whose kind is drawn, with public probabilities, and released."""

    laws: "tuple[Law, ...]"
    weights: tuple[float, ...]

    @property
    def largest_loss(self) -> float:
        return max(law.largest_loss for law in self.laws)

    def span(self, log_mass: float) -> tuple[float, float]:
        spans = [law.span(log_mass) for law in self.laws]
        return min(low for low, _ in spans), max(high for _, high in spans)

    def cells(self, edges: Floats) -> tuple[Floats, Floats]:
        mass_p, mass_q = np.zeros(len(edges) + 1), np.zeros(len(edges) + 1)
        for law, weight in zip(self.laws, self.weights, strict=True):
            p, q = law.cells(edges)
            mass_p += weight * p
            mass_q += weight * q
        return mass_p, mass_q


Law: TypeAlias = Sampled | Shifted | Discrete | MixedNormals | Folded | Mixture


class OneRelease:
    """Closed form of delta(epsilon) for a single release with a given law of the loss l.

    delta(epsilon) = P(l > epsilon) - exp(epsilon) Q(l > epsilon). For additive noise the losses
    above epsilon are the outputs above some x, and delta is a sum of three tail probabilities of
    the noise. For Gaussian noise on all records, see Balle & Wang 2018 (arXiv:1805.06530), Thm. 8.
    """

    def __init__(self, law: Law) -> None:
        if isinstance(law, Shifted):
            law = Sampled(Normal(1 / law.mu), 1.0, 1, 0)
        self.law = law
        self.largest_loss = law.largest_loss

    def delta(self, epsilon: float) -> Bracket:
        """Return certified bounds on delta(epsilon), as close together as rounding allows."""
        if epsilon >= self.largest_loss:
            return Bracket(0.0, 0.0)
        if isinstance(self.law, Discrete):
            return self._discrete(self.law, epsilon)
        if isinstance(self.law, Sampled):
            lower, upper = self.tails(self.law, np.array([epsilon]))
            return Bracket(float(lower[0]), float(upper[0]))
        p, q = (float(mass[-1]) for mass in self.law.cells(np.array([epsilon])))
        other = math.exp(min(epsilon, 700.0)) * q
        error = 64 * ROUND * (1 + epsilon) * (p + other)
        return Bracket.of_delta(p - other - error, p - other + error)

    @staticmethod
    def _discrete(law: Discrete, epsilon: float) -> Bracket:
        loss, p = np.array(law.losses), np.array(law.p)
        value = float(p @ -np.expm1(np.minimum(epsilon - loss, 0.0)))
        high = loss > epsilon * (1 - 8 * ROUND)
        digits = 8 * ROUND * (1 + np.abs(loss[high]) + epsilon) + law.blur
        error = float(p[high] @ digits)
        return Bracket.of_delta(value - error, value + error)

    @staticmethod
    def tails(law: Sampled, epsilon: Floats) -> tuple[Floats, Floats]:
        """Return lower and upper bounds on delta of additive noise at each of `epsilon`."""
        x = law.where_loss(epsilon)
        p, q = law.a * law.rate, law.b * law.rate
        # With F(x) the probability that the noise exceeds x,
        #   delta = p F(x - 1) + ((1 - p) - exp(epsilon) (1 - q)) F(x) - exp(epsilon) q F(x + 1).
        # It is largest at this x, so an error of x matters to second order only.
        gain, loss = (q - p) * np.exp(-epsilon), np.expm1(-epsilon) * (1 - q)
        middle = gain + loss  # they nearly cancel close to the largest loss
        size = np.stack((np.full(x.shape, p), middle, np.full(x.shape, -q)))
        tail = law.noise.log_above(np.stack((x - 1, x, x + 1)))
        with np.errstate(divide="ignore"):
            log = np.log(np.abs(size))
        log[1:] += epsilon
        total = log + tail
        top = np.maximum(total.max(axis=0), -1e300)  # finite, also if all terms are 0
        term = np.sign(size) * np.exp(total - top)
        digits = np.where(term == 0, 0.0, np.abs(log) + np.abs(tail))
        digits[1] += np.abs(gain - loss) / np.maximum(np.abs(middle), 1e-300)
        value = term.sum(axis=0)
        error = (32 * ROUND * (2 + digits + epsilon) * np.abs(term)).sum(axis=0)
        scale = np.exp(np.minimum(top, 0.0))
        slack = 0.0 if isinstance(law.noise, Normal) else 8 * ROUND * (1 + epsilon)
        upper = scale * (value + error) + slack + 1e-322  # the smallest floats round
        none = ~np.isfinite(total).any(axis=0)
        lower = np.clip(np.nan_to_num(scale * (value - error) - 1e-322, nan=0.0), 0.0, 1.0)
        return lower, np.where(none, 0.0, np.clip(np.nan_to_num(upper, nan=1.0), 0.0, 1.0))


def _unmix(rate: float, level: Floats) -> Floats:
    """Return the u with log(1 - rate + rate exp(u)) = level, or -inf if `level` is too low."""
    with np.errstate(divide="ignore"):
        near = np.log(np.maximum(np.expm1(np.minimum(level, 40.0)) + rate, 0.0))
    far = level + np.log1p((rate - 1.0) * np.exp(-np.maximum(level, 40.0)))
    return np.where(level > 40.0, far, near) - math.log(rate)
