"""Laplace noise, on all records or on a Poisson sample, prepared for the contour integral.

The log ratio u = log f(x - 1) / f(x) is -e below x = 0 and e above x = 1, where e is the pure
epsilon of one release, and linear between. So the loss has two atoms, and between them one segment
for each of a and b (see `loss_laws`), on which u runs through [-e, e]:

    a:  loss L(u) - b L(-e),   P-density exp(-(u + e) / 2) / 4 * exp(L(u))
    b:  loss a L(-e) - L(u),   P-density exp(-(u + e) / 2) / 4 * exp(a L(-e))

(with a = b = 1, on each segment the other ratio is constant at -e). Tilted, the density of a
segment is C exp(-u / 2) g(u)^k with g = exp(L) and k = 1 + order or -order.

* Quadrature: Gauss-Legendre with 24 nodes on panels of half-width d. In the ellipse of foci +-d and
  parameter 4, reaching 2.125 d along and 1.875 d across, the integrand is at most its factors at
  their worst, and the rule errs by 64/15 d 4^-46 / (1 - 4^-2) times that (Trefethen 2013,
  Theorem 19.3). As for normal noise, |g| lies between g(Re u) cos(Im u / 2) and g(Re u), and its
  argument is at most atan2(p sin, 1 - p + p cos) at the largest p = q exp(u) / g.
* Decay: the atoms keep their mass; a segment, integrated by parts over its losses, is at most V / t
  with V the total variation of its density in the loss, C exp(-u / 2) g^k / p, ends included.
  That is a product of monotone factors, so V is bounded cell by cell from values at the ends.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import expit, log_expit, logit

from tacit._arrays import Floats
from tacit.accounting.one_event import ROUND, log_mixture, log_mixture_at
from tacit.accounting.pld.loss_laws import DoubleExponential, Sampled
from tacit.accounting.pld.transforms import ORDERS, Cumulants, Factor, Tilt, WeightedLosses
from tacit.errors import NotCertified

POINTS = 24
ALONG, ACROSS = 2.125, 1.875
LOG_GAUSS = math.log(64 / 15) - 2 * (POINTS - 1) * math.log(4.0) - math.log1p(-1 / 16)
WEIGHT_ERROR = 1e-15 if np.finfo(np.longdouble).eps < 1e-18 else 1e-12
_CELLS = 256
_MOST_PANELS = 1 << 14
_LARGEST = 300.0


@lru_cache(maxsize=1)
def legendre(points: int) -> tuple[Floats, Floats]:
    """Return nodes and weights of the Gauss-Legendre rule on [-1, 1], by Newton's method.

    The relative error of the weights is at most `WEIGHT_ERROR`.
    """
    index = np.arange(points, 0, -1).astype(np.longdouble)
    x = np.cos(np.longdouble(math.pi) * (index - 0.25) / (points + 0.5))
    slope = x
    for _ in range(8):
        before, value = np.ones_like(x), x
        for k in range(2, points + 1):
            before, value = value, ((2 * k - 1) * x * value - (k - 1) * before) / k
        slope = points * (x * value - before) / (x * x - 1)
        x = x - value / slope
    return x.astype(float), (2 / ((1 - x * x) * slope**2)).astype(float)


class Segment(NamedTuple):
    """A continuous part of the loss of Laplace noise, over the log ratio u from -e to e.

    The loss at u is offset + sign * L(u), and the log density under P is start - u / 2 +
    rise * L(u). The module docstring defines e and L.
    """

    sign: int
    offset: float
    start: float
    rise: int


class LaplaceModel:
    """Laplace noise on a Poisson sample, as a `LossModel` of the contour method."""

    removed = variance = 0.0

    def __init__(self, law: Sampled) -> None:
        assert isinstance(law.noise, DoubleExponential)
        a, b, q, e = law.a, law.b, law.rate, law.noise.epsilon
        if e > _LARGEST:
            raise NotCertified("the noise is so small that the masses of its atoms underflow.")
        self.rate = q
        self.epsilon = e
        floor, ceiling = log_mixture_at(q, -e), log_mixture_at(q, e)
        start = -0.5 * e - math.log(4)
        segments = [Segment(-1, a * floor, start + a * floor, 0)] * b
        self.segments = segments + [Segment(1, -b * floor, start, 1)] * a
        # Mass of x <= -b, where both ratios are constant, and of x >= a.
        bottom = (1 - a * q) * math.exp(-b * e) + a * q * math.exp(-(b + 1) * e)
        top = (1 - a * q) * math.exp(-a * e) + a * q
        self.atom_loss = np.array([a * floor - b * ceiling, a * ceiling - b * floor])
        self.log_atom = np.log(0.5 * np.array([bottom, top]))

    def nodes(self, panels: int) -> WeightedLosses:
        """Return the loss law as finitely many weighted losses, in increasing order.

        They are its two atoms and the quadrature nodes of `panels` equal panels in each segment.
        """
        half = self.epsilon / panels
        u = (self._centers(panels)[:, None] + half * legendre(POINTS)[0]).ravel()
        log_g, p, q = log_mixture(self.rate, u), self.chance(u), self.rate
        logs = 1 - math.log(q) - (math.log1p(-q) if q < 1 else 0.0)
        adds = 4 * logs * ((u > 30.0) | (q > 0.5))  # where `log_mixture` adds logarithms
        g_error = ROUND * (p * 4 * np.abs(u) + 10 * np.abs(log_g) + adds)
        weights = np.tile(np.log(half * legendre(POINTS)[1]), panels)
        atoms, mass_error = self.atom_loss, np.full(2, 16 * ROUND)
        rows = [(atoms, self.log_atom, 8 * ROUND * np.abs(atoms), mass_error)]
        for segment in self.segments:
            sizes = 3 + np.abs(u) + np.abs(log_g) + np.abs(weights) + abs(segment.start)
            loss = segment.offset + segment.sign * log_g
            log_mass = weights + segment.start - 0.5 * u + segment.rise * log_g
            loss_error = g_error + 8 * ROUND * abs(segment.offset)
            rows.append((loss, log_mass, loss_error, 16 * ROUND * sizes + g_error + WEIGHT_ERROR))
        table = np.concatenate(rows, axis=1)
        return WeightedLosses(*table[:, np.argsort(table[0], kind="stable")])

    def chance(self, u: Floats) -> Floats:
        """Return the chance that the record was sampled, given the log likelihood ratio u."""
        return expit(u + logit(self.rate))

    def log_quadrature(self, panels: int, orders: Floats, t: float) -> Floats:
        """Bound the log of the quadrature error of the moment E[exp((order + i t) * loss)]."""
        half, centers = self.epsilon / panels, self._centers(panels)
        low, high = centers - ALONG * half, centers + ALONG * half
        angle = ACROSS * half
        if angle > 0.5 * math.pi:
            return np.full(len(orders), math.inf)
        log_low = log_mixture(self.rate, low) + math.log(math.cos(0.5 * angle))
        log_high, p = log_mixture(self.rate, high), self.chance(high)
        turn = np.arctan2(p * math.sin(angle), 1 - p + p * math.cos(angle))
        logs: list[Floats] = []
        for segment in self.segments:
            power = (segment.rise + segment.sign * orders)[:, None]
            worst = np.maximum(power, 0.0) * log_high + np.minimum(power, 0.0) * log_low
            fixed = (segment.start + orders * segment.offset)[:, None]
            logs.append(np.logaddexp.reduce(fixed + worst - 0.5 * low + t * turn, axis=1))
        return np.logaddexp.reduce(logs) + math.log(half) + LOG_GAUSS

    def moments(self, _used: slice) -> Cumulants:
        # M is the sum over the nodes up to its error, and at most exp(order * largest loss).
        panels = max(8, math.ceil(2 * self.epsilon))
        nodes = self.nodes(panels)
        found = nodes.cumulants()
        slack = np.exp(np.minimum(self.log_quadrature(panels, ORDERS, 0.0) - found.upper, 50.0))
        slack += np.exp(self.log_quadrature(panels, np.zeros(1), 0.0))
        upper = np.minimum(found.upper + slack, ORDERS * float(nodes.loss[-1]) * (1 + 1e-14))
        return found._replace(upper=upper, error=found.error + 2 * slack)

    def tilt(self, tilt: Tilt) -> "TiltedLaplace":
        return TiltedLaplace(self, tilt)

    def _centers(self, panels: int) -> Floats:
        return self.epsilon * ((2 * np.arange(panels) + 1) / panels - 1)


class TiltedLaplace:
    """A `LaplaceModel` weighted by exp(order * loss) divided by its mean (protocol `Tilted`)."""

    def __init__(self, base: LaplaceModel, tilt: Tilt) -> None:
        self.base = base
        self.tilt = tilt
        self.order = tilt.order
        self.log_m = tilt.log_moment
        log_atoms = base.log_atom + self.order * base.atom_loss - self.log_m
        self.atoms = np.exp(log_atoms) * (1 - 1e-12)
        self.fixed = float(self.atoms.sum()) * (1 + 1e-11)
        self.width = float(base.atom_loss[1] - base.atom_loss[0]) * (1 + 1e-12)
        self.variation = sum(self._variation(segment) for segment in base.segments)
        self.panels = 0
        self.error = math.inf

    def _variation(self, segment: Segment) -> float:
        """Bound the total variation of a segment's density, and so the decay of its transform."""
        base = self.base
        u = np.linspace(-base.epsilon, base.epsilon, _CELLS + 1)
        log_g, power = log_mixture(base.rate, u), segment.rise + segment.sign * self.order
        log_p = log_expit(u + logit(base.rate))
        rising = max(power, 0.0) * log_g
        falling = min(power, 0.0) * log_g - 0.5 * u - log_p
        # One sum of exponents: exp(fixed) alone underflows where the others overflow.
        falling += segment.start + self.order * segment.offset - self.log_m
        ends = float(np.exp(rising[[0, -1]] + falling[[0, -1]]).sum())
        change = -np.expm1(np.diff(falling)) - np.expm1(-np.diff(rising))
        return ends + float(np.exp(rising[1:] + falling[:-1]) @ change) * (1 + 1e-9)

    def log_decay(self, t: float, _count: int) -> float:
        """Return the log of a bound on |M(order + i t')| / M(order) for all t' >= t.

        Let f(t) be the square of that ratio and V the total variation of the segments' densities.
        Above t = `far`, V / t is at most half of the mass outside the atoms, which gives the bound.
        Below `far`, the bound follows from 1 - f(n t) <= n^2 (1 - f(t)) for whole n. If two
        independent losses l, l' cannot differ by more than pi / t, then 1 - f(t) =
        E[1 - cos(t (l - l'))] is at least 2 t^2 / pi^2 E[(l - l')^2]; the atoms alone give a part.
        """
        if self.fixed > 1 - 1e-12 or self.variation == math.inf:
            return 0.0  # the trivial bound
        far, turn = 2 * self.variation / (1 - self.fixed), math.pi / self.width
        if t >= far:
            return math.log(self.fixed + self.variation / t) + 1e-14
        kept = 0.25 * (1 + self.fixed) ** 2
        gap = (1 - kept) / math.ceil(far / max(t, turn)) ** 2
        if t < turn:
            gap = min(gap, 4 * float(self.atoms.prod()) * (t / turn) ** 2)
        return 0.5 * math.log1p(-gap) + 1e-14

    def lay_nodes(self, t: float, log_error: float) -> int:
        order, panels, log_found = np.array([self.order]), 1, math.inf
        while panels < _MOST_PANELS:
            log_found = float(self.base.log_quadrature(panels, order, t)[0]) - self.log_m
            if log_found <= log_error:
                break
            panels *= 2
        self.panels = panels
        self.error = math.exp(min(log_found, 700.0))
        return 2 + panels * POINTS * len(self.base.segments)

    def factor(self, step: float, size: int) -> Factor:
        atoms = self.base.nodes(self.panels).tilted(self.tilt, self.error)
        return atoms.factor(step, size)
