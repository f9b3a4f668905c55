"""The laws of privacy loss that the tight accountant composes.

Four are enough. All noise, sampled or plain, has the form

    P = (1 - a q) f(x) + a q f(x - 1),      Q = (1 - b q) f(x) + b q f(x + 1)

with f the noise around 0 and q the rate: (a, b) = (1, 0) if P has the record and Q has not, (0, 1)
the other way round, (1, 1) if both have one. With L(x) = log(1 - q + q f(x - 1) / f(x)) and f even,
P = f exp(a L(x)), and the loss log(P / Q) = a L(x) - b L(-x) never decreases in x. So a range of
losses is a range of x, and its masses under P and Q are closed forms (`cells`).
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtr

from tacit.accounting.numerics import FloatArray, log_mixture


@dataclass(frozen=True)
class Normal:
    """Noise of standard deviation `sigma`."""

    sigma: float

    largest_ratio = math.inf

    def log_above(self, x: FloatArray) -> FloatArray:
        """log of the mass above x."""
        return log_ndtr(-np.asarray(x) / self.sigma)

    def between(self, low: FloatArray, high: FloatArray) -> FloatArray:
        """Mass of (low, high], without cancellation in either tail."""
        flip = low > 0
        left, right = np.where(flip, -high, low), np.where(flip, -low, high)
        return ndtr(right / self.sigma) - ndtr(left / self.sigma)

    def log_ratio(self, x: FloatArray) -> FloatArray:
        """log f(x - 1) / f(x)."""
        return (x - 0.5) / self.sigma**2

    def where_ratio(self, u: FloatArray) -> FloatArray:
        """The x at which `log_ratio` is u."""
        return self.sigma**2 * u + 0.5

    first_ratio = where_ratio

    def reach(self, log_mass: float) -> float:
        """Distance beyond which at most exp(log_mass) lies on either side."""
        return self.sigma * math.sqrt(max(-2 * log_mass, 1.0))


@dataclass(frozen=True)
class DoubleExponential:
    """Laplace noise of scale 1 / `epsilon`: one release is `epsilon`-DP."""

    epsilon: float

    @property
    def largest_ratio(self) -> float:
        """Largest `log_ratio`; the smallest is its negative."""
        return self.epsilon

    def log_above(self, x: FloatArray) -> FloatArray:
        """log of the mass above x."""
        x = self.epsilon * np.asarray(x)
        return np.where(x > 0, -math.log(2) - x, np.log1p(-0.5 * np.exp(np.minimum(x, 0.0))))

    def between(self, low: FloatArray, high: FloatArray) -> FloatArray:
        """Mass of (low, high], without cancellation in either tail."""
        low, high = self.epsilon * low, self.epsilon * high
        flip = low > 0
        left, right = np.where(flip, -high, low), np.where(flip, -low, high)
        below = 0.5 * (np.exp(np.minimum(right, 0.0)) - np.exp(np.minimum(left, 0.0)))
        return below - 0.5 * np.expm1(-np.maximum(right, 0.0))

    def log_ratio(self, x: FloatArray) -> FloatArray:
        """log f(x - 1) / f(x)."""
        return self.epsilon * np.clip(2.0 * x - 1.0, -1.0, 1.0)

    def where_ratio(self, u: FloatArray) -> FloatArray:
        """The largest x at which `log_ratio` is at most u."""
        x = 0.5 * (1.0 + u / self.epsilon)
        return np.where(u < -self.epsilon, -math.inf, np.where(u >= self.epsilon, math.inf, x))

    def reach(self, log_mass: float) -> float:
        """Distance beyond which at most exp(log_mass) lies; the loss is constant beyond 1."""
        return min(max(-log_mass, 1.0) / self.epsilon, 2.0)

    def first_ratio(self, u: FloatArray) -> FloatArray:
        """The smallest x at which `log_ratio` is at least u."""
        x = 0.5 * (1.0 + u / self.epsilon)
        return np.where(u <= -self.epsilon, -math.inf, np.where(u > self.epsilon, math.inf, x))


@dataclass(frozen=True)
class Sampled:
    """The pair of the module docstring: `noise` at `rate`, with (a, b) as there."""

    noise: Normal | DoubleExponential
    rate: float
    a: int
    b: int

    @property
    def largest_loss(self) -> float:
        """Supremum of the loss."""
        top = self.noise.largest_ratio
        high, low = (float(log_mixture(self.rate, np.array(u))) for u in (top, -top))
        return (high if self.a else 0.0) - (low if self.b else 0.0)

    def loss(self, x: float) -> float:
        """a L(x) - b L(-x)."""
        up, down = (
            float(log_mixture(self.rate, self.noise.log_ratio(np.array(at)))) for at in (x, -x)
        )
        return (up if self.a else 0.0) - (down if self.b else 0.0)

    def span(self, log_mass: float) -> tuple[float, float]:
        """Losses outside which P has about exp(log_mass) or less, in the order of size."""
        reach = self.noise.reach(log_mass)
        return self.loss(-reach), self.loss(reach + self.a)

    def where_loss(self, loss: FloatArray) -> FloatArray:
        """The largest x whose loss is at most `loss` (-inf if none is, inf if all are)."""
        if self.a and self.b:
            return self._where_replaced(loss)
        if self.a:
            return self.noise.where_ratio(_unmix(self.rate, loss))
        return -self.noise.first_ratio(_unmix(self.rate, -loss))  # -L(-x) <= l

    def cells(self, edges: FloatArray) -> tuple[FloatArray, FloatArray]:
        """P- and Q-mass of the losses up to edges[0], between neighbors, and above edges[-1]."""
        x = np.concatenate(([-math.inf], self.where_loss(edges), [math.inf]))
        low, high = x[:-1], x[1:]
        p, q = self.a * self.rate, self.b * self.rate
        plain = self.noise.between(low, high)
        mass_p = (1 - p) * plain + p * self.noise.between(low - 1, high - 1) if p else plain
        mass_q = (1 - q) * plain + q * self.noise.between(low + 1, high + 1) if q else plain
        return mass_p, mass_q

    def _where_replaced(self, loss: FloatArray) -> FloatArray:
        """The largest x with L(x) - L(-x) <= loss; both sides are odd."""
        size, q = np.abs(loss), self.rate
        if isinstance(self.noise, DoubleExponential):
            # For x >= 0, L(-x) stays at its floor, so L(x) = loss + floor.
            floor = log_mixture(q, np.array(-self.noise.epsilon))
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
    """A plain Gaussian release, or any number of them: N(mu, 1) against N(0, 1)."""

    mu: float

    largest_loss = math.inf

    def span(self, log_mass: float) -> tuple[float, float]:
        """As `Sampled.span`."""
        reach = self.mu * math.sqrt(max(-2 * log_mass, 1.0))
        return self.mu**2 / 2 - reach, self.mu**2 / 2 + reach

    def cells(self, edges: FloatArray) -> tuple[FloatArray, FloatArray]:
        """As `Sampled.cells`: the loss is N(+-mu^2 / 2, mu^2) under P and Q."""
        z = np.concatenate(([-math.inf], edges / self.mu, [math.inf]))
        unit, half = Normal(1.0), self.mu / 2
        return unit.between(z[:-1] - half, z[1:] - half), unit.between(z[:-1] + half, z[1:] + half)


@dataclass(frozen=True)
class Discrete:
    """Finitely many losses, increasing, with their masses under P and Q.

    `infinite` is the P-mass of outcomes that Q never gives (loss +inf), `vanishing` the Q-mass of
    outcomes that P never gives.
    """

    losses: tuple[float, ...]
    p: tuple[float, ...]
    q: tuple[float, ...]
    infinite: float = 0.0
    vanishing: float = 0.0

    @property
    def largest_loss(self) -> float:
        """Largest finite loss."""
        return self.losses[-1]

    def span(self, _log_mass: float) -> tuple[float, float]:
        """All finite losses."""
        return self.losses[0], self.losses[-1]

    def cells(self, edges: FloatArray) -> tuple[FloatArray, FloatArray]:
        """As `Sampled.cells`, of the finite losses."""
        index = np.searchsorted(edges, np.array(self.losses), side="left")
        size = len(edges) + 1
        p, q = (np.bincount(index, np.array(mass), size) for mass in (self.p, self.q))
        return p.astype(float), q.astype(float)

    def given_finite(self) -> "Discrete":
        """What P is given that the loss is finite; Q is scaled along, so that losses stay."""
        keep = 1.0 - self.infinite
        if not self.infinite or keep <= 0:
            return Discrete(self.losses, self.p, self.q)
        p, q = (tuple(mass / keep for mass in masses) for masses in (self.p, self.q))
        return Discrete(self.losses, p, q)


Law = Sampled | Shifted | Discrete


def _unmix(rate: float, level: FloatArray) -> FloatArray:
    """The u with log(1 - rate + rate exp(u)) = level; -inf below the smallest level."""
    with np.errstate(divide="ignore"):
        near = np.log(np.maximum(np.expm1(np.minimum(level, 40.0)) + rate, 0.0))
    far = level + np.log1p((rate - 1.0) * np.exp(-np.maximum(level, 40.0)))
    return np.where(level > 40.0, far, near) - math.log(rate)
