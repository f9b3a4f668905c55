"""Gaussian noise on a Poisson sample with its high losses cut off, for the contour integral.

`sampled_gaussian_contour` cuts smoothly, far out in the tail, and its trapezoid rule needs few
nodes. Where epsilon is so small that single steps with a large loss decide delta, the cut has to be
made at a loss close to epsilon, and sharply. The moment is then the integral up to the cut of

    F_z(y) = phi(y) exp(a L(y) + z l(y)),     z = order + i t

in the notation of `sampled_gaussian_contour`, by Gauss-Legendre quadrature on panels of half-width
d. In the ellipse with foci +-d and parameter 4, which reaches 2.125 d along the line and 1.875 d
across it, |F_z| is at most the product of its factors, each at its worst: phi where |Re y| is least
and |Im y| largest, |g(y)| at the right end, |g(-y)| at the right end times exp(r) with the largest
p (1 - p), and the angles, which grow with p, where p is largest. Then 24 nodes err by at most
64/15 d 4^-46 / (1 - 4^-2) times that (Trefethen 2013, Theorem 19.3). The bound grows with |t|, so
that one evaluation covers all lower frequencies.
"""

import math

import numpy as np
from scipy.special import ndtr

from tacit._arrays import Floats
from tacit.accounting.one_event import log_sum_exp
from tacit.accounting.pld.laplace_contour import (
    ACROSS,
    ALONG,
    LOG_GAUSS,
    POINTS,
    WEIGHT_ERROR,
    legendre,
)
from tacit.accounting.pld.loss_laws import Sampled
from tacit.accounting.pld.sampled_gaussian_contour import NormalSample
from tacit.accounting.pld.transforms import ORDERS, Cumulants, Factor, Tilt, WeightedLosses
from tacit.errors import NotCertified

_LEFT = -12.0  # P puts less than 2e-33 below
_LOG_LEFT = -75.0  # log of that mass, rounded up
_GROWTH = 20.0  # log of the largest growth of |F| from a panel to its ellipse that is aimed at
_MOST_PANELS = 3000
_GRID = 200  # points at which the width of panels is chosen
_LOWEST, _HIGHEST = 2.0**-6, 2.0**7
"""Orders whose moments are computed, in units of one over the scale of the losses."""


class CutModel(NormalSample):
    """Loss of normal noise on a Poisson sample, without outputs above `cut`, as a `LossModel`.

    `scale` is about the size of the total loss that matters; it only chooses the orders at which
    moments are computed.
    """

    def __init__(self, law: Sampled, cut: float, scale: float) -> None:
        super().__init__(law)
        self.cut = cut
        self.scale = scale
        shift, weight = law.a / self.sigma, law.a * law.rate
        above = (1 - weight) * float(ndtr(-cut)) + weight * float(ndtr(shift - cut))
        self.removed = above * (1 + 1e-12)
        self.variance = 0.0  # `scale` is used instead
        _, loss = self.losses(np.array([_LEFT]))
        self.lowest = float(loss[0])

    def moments(self, _used: slice) -> Cumulants:
        low, high = np.searchsorted(ORDERS, np.array([_LOWEST, _HIGHEST]) / self.scale)
        low, high = min(int(low), len(ORDERS) - 2), min(max(int(high), int(low) + 2), len(ORDERS))
        orders = ORDERS[low:high]
        edges = self.panels(float(orders[-1]), 0.0)
        found = self.nodes(edges).cumulants(removed=self.removed, orders=slice(low, high))
        known = found.upper[low:high]
        slack = np.exp(np.minimum(self.log_error(edges, orders, 0.0) - known, 200.0))
        slack += math.exp(min(float(self.log_error(edges, np.zeros(1), 0.0)[0]), 200.0))
        found.upper[low:high] += slack
        found.error[low:high] += 2 * slack
        return found

    def panels(self, order: float, t: float) -> Floats:
        """Return the ends of panels that suit moments up to `order` and frequencies up to `t`."""
        y = np.linspace(_LEFT, self.cut, _GRID)
        widest = min(1.2, 0.8 * self.sigma)
        half = np.full(_GRID, 0.1 * widest)
        # Where the integrand is small, it may grow more.
        room = _GROWTH + 0.25 * (y * y + np.maximum(-order * self.losses(y)[1], 0.0))
        grow, fall = self.law.a * (1 + order), self.law.b * order
        for _ in range(2):  # the integrand grows fastest at the ends of a panel's ellipse
            p = self.chance(y + ALONG * half) * (self.law.a > 0)
            mirror = self.chance(ALONG * half - y) * (self.law.b > 0)
            steep = ALONG * (np.abs(y) + (grow * p + fall * mirror) / self.sigma)
            steep += ACROSS * t * (p + mirror) / self.sigma + 4.0
            half = np.minimum(room / steep, widest)
        number = np.concatenate(([0.0], np.cumsum(0.25 * (1 / half[1:] + 1 / half[:-1]))))
        number *= y[1] - y[0]
        last = float(number[-1])
        if not last <= _MOST_PANELS:
            raise NotCertified("the losses below the cut need too many nodes.")
        return np.interp(np.linspace(0.0, last, math.ceil(last) + 1), number, y)

    def nodes(self, edges: Floats) -> WeightedLosses:
        """Return the loss law as finitely many weighted losses, in increasing order."""
        half, middle = 0.5 * np.diff(edges), 0.5 * (edges[1:] + edges[:-1])
        at, weight = legendre(POINTS)
        y = (middle[:, None] + np.multiply.outer(half, at)).ravel()
        log_p, loss = self.losses(y)
        found = self.weighted(y, log_p, loss, np.multiply.outer(half, weight).ravel())
        return found._replace(mass_error=found.mass_error + WEIGHT_ERROR)

    def log_error(self, edges: Floats, orders: Floats, t: float) -> Floats:
        """Bound the log of the error of the nodes' moments at `orders` + i t.

        It consists of the quadrature error and of the integral left of all panels.
        """
        half, middle = 0.5 * np.diff(edges), 0.5 * (edges[1:] + edges[:-1])
        left, right, across = middle - ALONG * half, middle + ALONG * half, ACROSS * half
        angle = across / self.sigma
        if float(angle.max()) > 0.5 * math.pi:
            return np.full(len(orders), math.inf)
        nearest = np.maximum(np.maximum(left, -right), 0.0)
        fixed = np.log(half) + LOG_GAUSS + 0.5 * (across**2 - nearest**2)
        power = np.zeros((len(orders), len(half)))
        turn = np.zeros(len(half))
        if self.law.a:
            power += np.multiply.outer(1 + orders, self.log_ratio(right))
            turn += _largest_angle(self.chance(right), angle)
        if self.law.b:
            mirror = self.chance(-left)
            spread = np.where(mirror < 0.5, mirror * (1 - mirror), 0.25)
            drop = 0.5 * np.log1p(-4 * spread * np.sin(0.5 * angle) ** 2)
            power -= np.multiply.outer(orders, self.log_ratio(-right) + drop)
            turn += _largest_angle(mirror, angle)
        inside = log_sum_exp(power + (fixed + t * turn))
        return np.logaddexp(inside, _LOG_LEFT + orders * self.lowest)

    def tilt(self, tilt: Tilt) -> "TiltedCut":
        return TiltedCut(self, tilt)


class TiltedCut:
    """A `CutModel` weighted by exp(order * loss) divided by its mean (protocol `Tilted`)."""

    def __init__(self, base: CutModel, tilt: Tilt) -> None:
        self.base = base
        self.tilt = tilt
        self.edges: Floats = np.zeros(0)
        self.error = math.inf

    def log_decay(self, _t: float, _count: int) -> float:
        return 0.0  # the trivial bound: a sharp cut decays slowly

    def lay_nodes(self, t: float, _log_error: float) -> int:
        self.edges = self.base.panels(self.tilt.order, t)
        log_error = self.base.log_error(self.edges, np.array([self.tilt.order]), t)
        self.error = math.exp(min(float(log_error[0]) - self.tilt.log_moment, 700.0))
        return POINTS * (len(self.edges) - 1)

    def factor(self, step: float, size: int) -> Factor:
        return self.base.nodes(self.edges).tilted(self.tilt, self.error).factor(step, size)


def _largest_angle(p: Floats, angle: Floats) -> Floats:
    """Return the largest argument of 1 - p + p exp(i x) over |x| <= angle < pi."""
    return np.arctan2(p * np.sin(angle), 1 - p + p * np.cos(angle))
