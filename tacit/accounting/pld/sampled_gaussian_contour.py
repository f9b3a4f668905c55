"""Gaussian noise on a Poisson sample, prepared for the contour integral.

In units y = x / sigma the law P has density phi(y) exp(a L(y)) and the loss is
l(y) = a L(y) - b L(-y) (see `loss_laws`). Its moment generating function is the integral over y of

    F_z(y) = phi(y) chi(y) exp(a L(y) + z l(y)),     z = order + i t,

where chi(y) = Phi((cut - y) / width) cuts the tail of high losses, without which moments explode;
the mass it removes is a closed form, so the effect on delta is known.

**Every bound below follows from one fact.** F is analytic in the strip |Im y| < pi sigma, because
g = exp(L) = 1 - q + q exp(u) only vanishes at Im u = pi. Write p(y) = q exp(u) / g(y), the chance
that the record was sampled given the output y. On the line y + i s, with angle s / sigma,

    |g(y + i s)| / g(y) = exp(r),   r = log(1 - 2 p (1 - p) (1 - cos(s / sigma))) / 2  <= 0,
    arg g(y + i s)      = w,        w = atan2(p sin(s / sigma), 1 - p + p cos(s / sigma)),

so that |F_z(y + i s)| = F_order(y) exp(s^2 / 2 + c + a (1 + order) r(y) - b order r(-y)
- t (a w(y) + b w(-y))), with exp(c) the modulus of chi relative to the real line. Hence

* decay: moving the line of integration up by s, |M(order + i t)| / M(order) <= E[exp(exponent)]
  under the tilted law. For s > 0 the bound falls as t grows: one evaluation covers all larger t;
* quadrature: the trapezoid rule of step h errs by at most 2 N(s) / (exp(2 pi s / h) - 1), N(s)
  being the larger integral of |F| over the lines +-s (Trefethen & Weideman 2014, Theorem 5.1),
  which is the same expectation with t replaced by -t.

Expectations are bounded cell by cell: p is monotone, so every term is extreme at the ends of a
cell, and the mass of a cell is known to the factor exp(+-C h^2 / 8) from the value and slope of the
log density at its middle and a bound C on its second derivative.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import expit, log_ndtr, logit

from tacit._arrays import Flags, Floats
from tacit.accounting.one_event import ROUND, Numbers, log_mixture, log_sum_exp
from tacit.accounting.pld.loss_laws import Normal, Sampled
from tacit.accounting.pld.transforms import (
    FARTHEST,
    ORDERS,
    Cumulants,
    Factor,
    Tilt,
    WeightedLosses,
)
from tacit.errors import NotCertified

_LOG_ROOT_TWO_PI = 0.5 * math.log(2 * math.pi)
_LEFT = -12.0  # phi puts less than 2e-33 below
_LOG_LEFT = float(log_ndtr(_LEFT))
_RIGHT = 10.0  # widths beyond the cut, where chi has fallen to 1e-23
_WIDE = 1.0  # width of a cut: a wide one needs few nodes
_DEPTHS: Floats = np.geomspace(0.08, 1.0, 5)
"""Heights of complex lines tried for quadrature, as shares of the greatest height."""
_STRIP: Floats = np.geomspace(0.02, 1.0, 12)
"""The same for the quadrature of moments."""
_SHALLOW: Floats = np.linspace(0.0, 1.0, 4)
"""Where further heights lie between the least useful one and a moderate one, in logarithms."""
_USEFUL = 16.0  # orders above this divided by the deviation of the total need not be sharp
_BEYOND: Floats = np.concatenate((0.25 * np.arange(40.0), 9.75 + np.geomspace(0.25, 1e6, 160)))
"""Ends of cells right of the grid, in widths of the cut."""
_GOOD = 1e-12  # relative error of a moment that needs no finer bound
_MOST_CELLS = 20_000
_MOST_NODES = 1_000_000


class NormalSample:
    """The law of the loss of normal noise on a Poisson sample, as a function of the output y."""

    def __init__(self, law: Sampled) -> None:
        assert isinstance(law.noise, Normal)
        self.law = law
        self.sigma = law.noise.sigma
        self.rate = law.rate

    def losses(self, y: Numbers) -> tuple[Numbers, Numbers]:
        """Return the log density of P at the scaled outputs y, and their losses."""
        log_p = -0.5 * y * y - _LOG_ROOT_TWO_PI
        if self.law.a == 0:
            return log_p, -self.log_ratio(-y)
        forward = self.log_ratio(y)
        return log_p + forward, forward - self.log_ratio(-y) if self.law.b else forward

    def log_ratio(self, y: Numbers) -> Numbers:
        """Return L(y) = log(1 - q + q exp(u)), u the log ratio of the shifted noise, q the rate."""
        return log_mixture(self.rate, (y - 0.5 / self.sigma) / self.sigma)

    def chance(self, y: Floats) -> Floats:
        """Return p(y), the chance that the record was sampled given the output y."""
        return expit((y - 0.5 / self.sigma) / self.sigma + logit(self.rate))

    def ratio_error(self, y: Floats, ratio: Floats) -> Floats:
        """Bound the rounding error of `log_ratio`, also on a complex line y + i s above it.

        `ratio` is `log_ratio` at y.

        An error of u enters L with the factor |q exp(u) / g| <= sqrt(2) p (see the module docstring
        for the symbols). `log_mixture` adds ten roundings of L, whose modulus is at most its real
        part plus its angle, and a few roundings of the logarithms that it may add.
        """
        u, q = (y - 0.5 / self.sigma) / self.sigma, self.rate
        adds = 4.0 * ((u > 30.0) | (q > 0.5)) * (1 - math.log(q) - math.log1p(-q))
        shaky = self.chance(y) * (8 * np.abs(u) + 4 / self.sigma**2 + 8)
        return ROUND * (shaky + 20 * np.abs(ratio) + adds)

    def weighted(
        self, y: Numbers, log_p: Numbers, loss: Numbers, spacing: Floats | float
    ) -> WeightedLosses:
        """Return the losses at nodes y with their masses and the rounding errors of both.

        The mass of a node is its density, with logarithm `log_p`, times its `spacing`.
        """
        loss_error, x = ROUND * np.abs(loss), np.real(y)
        is_known = self.law.a + self.law.b == 1 and not np.iscomplexobj(y)
        for at in [x] * self.law.a + [-x] * self.law.b:
            loss_error += self.ratio_error(at, loss if is_known else self.log_ratio(at))
        # log_p is the sum of -y^2 / 2, log chi <= 0 and a L: none exceeds log_p and the others.
        sizes = 3 + np.abs(y) ** 2 + np.abs(log_p) + np.abs(loss) - math.log1p(-self.rate)
        units = 64 if np.iscomplexobj(y) else 16
        mass_error = units * ROUND * sizes + self.law.a * loss_error
        return WeightedLosses(loss, log_p + np.log(spacing), loss_error, mass_error)


class SmoothModel(NormalSample):
    """Loss of normal noise on a Poisson sample, on a grid of outputs y, as a `LossModel`.

    High losses are cut off: an output y keeps the share Phi((cut - y) / width) of its mass.
    """

    def __init__(self, law: Sampled, cut: float, width: float) -> None:
        super().__init__(law)
        self.cut = cut
        self.width = width
        self.removed = math.exp(float(_log_removed(law, np.array(cut), width))) * (1 + 1e-12)
        self.curve = 1 + 1 / width**2  # |F| grows at most like exp(curve s^2 / 2) up a line
        # Negative powers of g (b = 1) grow away from the real line, so they need finer steps.
        self.step = _short(min((0.1 if law.b else 0.3) * min(1.0, self.sigma), 0.5 * width))
        # Cells may be coarser than nodes; whole cells cover the grid.
        self.stride = max(int(min(0.3, 0.3 * self.sigma, 0.5 * width) / self.step), 1)
        cells = int((cut + _RIGHT * width - _LEFT) / (self.stride * self.step)) + 2
        size = cells * self.stride + 1
        if size > _MOST_CELLS:
            raise NotCertified("the noise is too small for a grid.")
        self.y = _LEFT + self.step * np.arange(size, dtype=float)
        self.log_p, self.loss = self.log_density(self.y)
        self.nodes = self.weighted(self.y, self.log_p, self.loss, self.step)
        self.known_outside: Floats = np.full(len(ORDERS), math.inf)  # `_log_outside` at `ORDERS`
        mass = np.exp(self.log_p) * self.step
        self.variance = max(float(mass @ self.loss**2 - (mass @ self.loss) ** 2), 0.0)

    @staticmethod
    def cut_lightly(law: Sampled, log_removed: float, width: float = _WIDE) -> "SmoothModel":
        """Return `law` with the lowest cut (steps of 1/4) that removes at most exp(log_removed)."""
        assert isinstance(law.noise, Normal)
        if 0.3 * law.noise.sigma * _MOST_CELLS < _RIGHT - _LEFT:  # nor can the cuts be listed
            raise NotCertified("the noise is too small for a grid.")
        highest = law.a / law.noise.sigma + 2.0 * math.sqrt(1.0 - log_removed)
        cuts = 0.25 * np.arange(math.ceil(4 * highest), 0, -1, dtype=float)
        fits = int(np.searchsorted(_log_removed(law, cuts, width), log_removed))
        return _smooth_model(law, float(cuts[max(fits - 1, 0)]), width)

    def log_density(self, y: Numbers) -> tuple[Numbers, Numbers]:
        """Return the log density under P, after the cut, at the scaled output y, and its loss."""
        log_p, loss = self.losses(y)
        return log_p + log_ndtr((self.cut - y) / self.width), loss

    def moments(self, used: slice) -> Cumulants:
        found = self.nodes.cumulants(removed=self.removed, orders=used)
        orders = ORDERS[used]
        is_used = orders <= max(orders[-1] * (_USEFUL / FARTHEST), orders[0])
        log_outside = self._log_outside(orders, is_used)
        self.known_outside[used] = log_outside
        outside = np.exp(np.minimum(log_outside - found.upper[used], 200.0))
        slack = 3 * self._strip(orders, is_used) + outside
        found.upper[used] += slack
        found.error[used] += 2 * slack
        return found

    def log_outside(self, order: float) -> float:
        """Return the log of a bound on the integral outside the grid, for an order of `moments`."""
        return float(self.known_outside[np.searchsorted(ORDERS, order)])

    def _strip(self, orders: Floats, is_used: Flags) -> Floats | float:
        """Bound the error of the trapezoid sum for the moment E[exp(order * loss)], over M.

        On the line y + i s, |F| is at most F exp(curve s^2 / 2 - b order r(-y)), r as in the module
        docstring. If b = 0 its integral follows from that of F; else it is bounded cell by cell.
        """
        s = 0.97 * min(4.0, math.pi * self.sigma) * _STRIP
        flat = 0.5 * self.curve * s**2 + math.log(2) - _log_expm1(2 * math.pi * s / self.step)
        if not self.law.b:
            return math.exp(min(float(flat.min()), 200.0))
        crude = np.multiply.outer(np.log(np.cos(0.5 * s / self.sigma)), orders)
        logs = (flat[:, None] - crude).min(axis=0)
        poor = (logs > math.log(_GOOD)) & is_used
        if poor.any():
            some = slice(3, None, 2)
            lines = [self._log_line(height, orders[poor]) for height in s[some]]
            better = flat[some, None] + lines
            logs[poor] = np.minimum(logs[poor], better.min(axis=0))
        return np.exp(np.minimum(logs, 200.0))

    def _log_line(self, s: float, orders: Floats) -> Floats:
        """Bound the log of the integral of F exp(-b order r(-y)) at height `s`, over M >= 1 / 2.

        phi is largest at one end of a cell, L and the loss at its right end, and -r where p(-y) is
        closest to 1/2. Left of the cells, -r is bounded by its largest value.
        """
        edges = np.concatenate((-np.geomspace(60.0, 12.0, 80)[:-1], self.y[:: self.stride]))
        _, loss = self.log_density(edges)
        rise = self.log_ratio(edges[1:]) if self.law.a else 0.0
        nearest = np.where(edges[1:] < 0, edges[1:], np.maximum(edges[:-1], 0.0))
        p = self.chance(-edges)
        crosses = (p[1:] - 0.5) * (p[:-1] - 0.5) <= 0
        widest = np.where(crosses, 0.5, np.where(p[1:] > 0.5, p[1:], p[:-1]))
        log_size, _ = _turned(widest, np.array(s / self.sigma))
        logs = np.log(np.diff(edges)) - 0.5 * nearest**2 - _LOG_ROOT_TWO_PI + rise
        inside = log_sum_exp(logs + np.multiply.outer(orders, loss[1:] - log_size))
        left = float(log_ndtr(edges[0])) - orders * math.log(math.cos(0.5 * s / self.sigma))
        # Right of the grid, p(-y) is at most its value at the end.
        last = np.minimum(p[-1], 0.5)
        beyond = self._log_beyond(orders, np.ones(len(orders), dtype=bool))
        right = beyond - orders * _turned(last, np.array(s / self.sigma))[0]
        return np.logaddexp(np.logaddexp(inside, left), right) + math.log(2)

    def _log_outside(self, orders: Floats, is_used: Flags) -> Floats:
        """Bound the log of the moments' integral over outputs y outside the grid.

        The bound also holds for the trapezoid sum there. Left of the grid, the loss is largest at
        the end and P is at most phi.
        """
        left = orders * self.loss[0] + (_LOG_LEFT + math.log(1 + self.step * (1 - _LEFT)))
        return np.logaddexp(left, self._log_beyond(orders, is_used))

    def _log_beyond(self, orders: Floats, is_used: Flags) -> Floats:
        """Bound, like `_log_outside`, the integral right of the grid.

        The slope of log F is at most (grow p(y) + fall p(-y)) / sigma - y - (y - cut) / width^2
        there, with grow = a (1 + order), fall = b order, and p of the module docstring. p(-y)
        falls. p(y) rises, but the slope still falls if grow p (1 - p) / sigma^2 cannot exceed
        `curve`; else p is replaced by 1.
        """
        end, grow, fall = self.y[-1], self.law.a * (1 + orders), self.law.b * orders
        p, p_mirror = (float(self.chance(np.array(at))) for at in (end, -end))
        p = np.where(grow <= 4 * self.curve * self.sigma**2, p, 1.0)
        push = end + (end - self.cut) / self.width**2
        rate = push - (grow * p + fall * p_mirror) / self.sigma
        logs = np.log(self.step + 1 / np.maximum(rate, 1e-9))
        right = self.log_p[-1] + orders * self.loss[-1] + np.where(rate > 1e-9, logs, math.inf)
        steep = (rate <= 1e-9) & is_used
        if steep.any():
            right[steep] = self._log_cells_beyond(orders[steep])
        return right

    def _log_cells_beyond(self, orders: Floats) -> Floats:
        """Bound, like `_log_beyond`, the integral right of the grid by cells of growing width.

        phi and chi are largest at the left end of a cell, L and the loss at its right end. Beyond
        the last cell, the slope of log F is at most that with all p replaced by 1.
        """
        y = self.y[-1] + self.width * _BEYOND
        log_p, loss = self.log_density(y)
        rise = self.log_ratio(y) if self.law.a else np.zeros(len(y))
        logs = (log_p - rise)[:-1] + rise[1:] + np.log(np.diff(y) + self.step)
        inside = log_sum_exp(logs + np.multiply.outer(orders, loss[1:]))
        push = y[-1] + (y[-1] - self.cut) / self.width**2
        rate = push - (self.law.a * (1 + orders) + self.law.b * orders) / self.sigma
        end = log_p[-1] + orders * loss[-1]
        beyond = np.where(rate > 1.0, end + math.log(1 + self.step), math.inf)
        return np.logaddexp(inside, beyond)

    def log_moments_if_added(self, orders: Floats) -> Floats:
        """Bound the log moments of the loss if the record is added, on the grid for its removal.

        They are the logs of E_Q[g^-order], g = P / Q >= 1 - q, so g^-order is at most `most`. The
        nodes give the mean of chi (g^-order - 1). Its quadrature errs as that of `_strip`, because
        on the line y + i s, |g| is at least cos(s / (2 sigma)) times its real value. What the cut
        and the ends of the grid leave out adds at most `most` times its mass.
        """
        assert (self.law.a, self.law.b) == (1, 0)
        nodes, loss = self.nodes, self.loss
        mass = np.exp(nodes.log_mass - loss)
        growth = np.expm1(np.multiply.outer(-orders, loss))  # (orders, nodes)
        relative = nodes.mass_error + 2 * nodes.loss_error + (16 + len(loss)) * ROUND
        total = growth @ mass
        total += np.abs(growth) @ (mass * relative)
        total += orders * ((1 + growth) @ (mass * nodes.loss_error))
        log_most = -orders * math.log1p(-self.rate)
        s = 0.97 * min(4.0, math.pi * self.sigma) * _STRIP
        flat = 0.5 * self.curve * s**2 + math.log(4) - _log_expm1(2 * math.pi * s / self.step)
        lifted = flat[:, None] - np.multiply.outer(np.log(np.cos(0.5 * s / self.sigma)), orders)
        logs = np.minimum(lifted.min(axis=0) + log_most, 200.0)
        total += np.exp(logs) + (self.removed + 1e-30) * np.exp(np.minimum(log_most, 200.0))
        return np.log1p(np.maximum(total, 1e-15 - 1.0)) * (1 + 1e-12) + 1e-18

    def tilt(self, tilt: Tilt) -> "TiltedSmooth":
        return TiltedSmooth(self, tilt)


@lru_cache(maxsize=16)
def _smooth_model(law: Sampled, cut: float, width: float) -> SmoothModel:
    """Return a model that other numbers of steps may share; its moments are computed once."""
    return SmoothModel(law, cut, width)


class LineNodes(NamedTuple):
    """Trapezoid nodes k * spacing + i * height in the complex plane, first <= k < last."""

    spacing: float
    first: int
    last: int
    height: float
    error: float


class TiltedSmooth:
    """A `SmoothModel` weighted by exp(order * loss) divided by its mean (protocol `Tilted`)."""

    def __init__(self, base: SmoothModel, tilt: Tilt) -> None:
        self.base = base
        self.tilt = tilt
        order, log_m = tilt.order, tilt.log_moment
        sigma, stride = base.sigma, base.stride
        step, y, loss = stride * base.step, base.y[::stride], base.loss[::stride]
        self.step = step
        self.grow = base.law.a * (1 + order)
        self.fall = base.law.b * order
        self.edges = np.append(y - 0.5 * step, y[-1] + 0.5 * step)
        # The second derivative of log F lies between -curve - fall p (1 - p) / sigma^2, p being
        # that at -y, and grow p (1 - p) / sigma^2.
        slope = -y - _hazard((base.cut - y) / base.width) / base.width
        bend = base.curve
        if base.law.a:
            self.p = base.chance(self.edges)
            slope += base.chance(y) * (self.grow / sigma)
            bend = np.maximum(bend, _largest_spread(self.p) * (self.grow / sigma**2))
        if base.law.b:
            self.p_mirror = base.chance(-self.edges)
            slope += base.chance(-y) * (self.fall / sigma)
            drop = base.curve + _largest_spread(self.p_mirror) * (self.fall / sigma**2)
            bend = np.maximum(bend, drop)
        bend = bend * (step * step / 8)
        half = np.maximum(np.abs(slope) * (step / 2), 1e-9)
        log_peak = base.log_p[::stride] + order * loss - log_m + math.log(step) + half
        # The middle times sinh(half) / half, and that over the largest value.
        log_mass = log_peak + np.log(-np.expm1(-2 * half) / (2 * half))
        low = np.exp(log_mass - bend) * (1 - 1e-8)
        high = np.exp(np.minimum(log_mass + bend, 700.0)) * (1 + 1e-8) + 1e-300
        self.mass, self.mass_error = 0.5 * (high + low), 0.5 * (high - low)
        self.largest = np.exp(np.minimum(log_peak + bend, 700.0))
        self.outside = math.exp(min(base.log_outside(order) - log_m, 700.0))
        self.deepest = min(7.0, 0.97 * math.pi * sigma)
        self.lines: Lines | None = None
        self.nodes = LineNodes(0.0, 0, 0, 0.0, 0.0)

    def log_decay(self, t: float, count: int) -> float:
        if self.lines is None:  # the best s for a product of `count` is near count^(-1/2)
            shallow = min(1.5 / math.sqrt(count), 0.1 * self.deepest)
            further = shallow * (0.3 * self.deepest / shallow) ** _SHALLOW
            self.lines = Lines(self, np.concatenate((self.deepest * _DEPTHS, further)))
        return min(float(self.lines.log_norm(t).min()), 0.0)

    def lay_nodes(self, t: float, log_error: float) -> int:
        spacing, height = self._spacing(t, log_error)
        if height == 0.0 and spacing >= self.base.step:  # the nodes of the moments will do
            error = 2 * self.outside + math.exp(log_error)
            self.nodes = LineNodes(self.base.step, 0, len(self.base.y), 0.0, error)
            return len(self.base.y)
        low, high, pruned = self._span(log_error, height)
        if spacing * _MOST_NODES < high - low:
            self.nodes = LineNodes(1.0, 0, 1, 0.0, math.inf)  # certifies nothing
            return _MOST_NODES
        spacing = _short(spacing)
        first, last = math.ceil(low / spacing), math.floor(high / spacing) + 1
        self.nodes = LineNodes(spacing, first, last, height, pruned + math.exp(log_error))
        return last - first

    def _spacing(self, t: float, log_error: float) -> tuple[float, float]:
        """Return the spacing of nodes, and the height of the line of complex outputs they are on.

        It is the largest spacing whose error is at most exp(log_error) for frequencies up to t. For
        nodes on the real line, the error depends on the integrand |F| at height -s, which grows
        with t. For nodes at height s / 2, it depends on |F| at heights 0 and s, which does not grow
        with t, so that few nodes suffice for any t.
        """
        lines = self.lines or Lines(self, self.deepest * _DEPTHS)
        real = math.log(2) + lines.log_norm(-t)
        spacing = float((2 * math.pi * lines.s / np.logaddexp(0.0, real - log_error)).max())
        if spacing >= 0.25 * self.step:
            return min(spacing, self.step), 0.0
        lifted = math.log(2) + np.logaddexp(0.0, lines.log_norm(0.0))
        on_lifted = math.pi * lines.s / np.logaddexp(0.0, lifted - log_error)
        best = int(np.argmax(on_lifted))
        if on_lifted[best] > 2 * spacing:
            return min(float(on_lifted[best]), self.step), 0.5 * float(lines.s[best])
        return spacing, 0.0

    def _span(self, log_error: float, height: float) -> tuple[float, float, float]:
        """Return the range of outputs y that needs nodes, and a bound on the integral elsewhere.

        Cells at both ends are left out as long as they add at most about exp(log_error) together.
        """
        # On a line above, |F| is at most exp(curve s^2 / 2 - fall log cos) times its real value.
        log_lift = 0.5 * self.base.curve * height**2
        log_lift -= self.fall * math.log(math.cos(0.5 * height / self.base.sigma))
        most = math.exp(log_error - log_lift)
        first = int(np.searchsorted(np.cumsum(self.largest), most))
        first = min(first, len(self.largest) - 1)  # keep one cell if none is needed
        last = len(self.largest) - int(np.searchsorted(np.cumsum(self.largest[::-1]), most))
        # Nodes in a cell add at most (1 + spacing / step) <= 2 times `largest`.
        pruned = (4 * most + 2 * self.outside) * math.exp(min(log_lift, 700.0))
        return self.edges[first], self.edges[max(last, first + 1)], pruned

    def factor(self, step: float, size: int) -> Factor:
        return self._weighted().tilted(self.tilt, self.nodes.error).factor(step, size)

    def _weighted(self) -> WeightedLosses:
        """Return the losses at the nodes."""
        base, nodes = self.base, self.nodes
        if nodes.spacing == base.step and nodes.height == 0.0:
            return base.nodes
        x = nodes.spacing * np.arange(nodes.first, nodes.last, dtype=float)
        y = x + 1j * nodes.height if nodes.height else x
        return base.weighted(y, *base.log_density(y), nodes.spacing)

    def log_expectation(self, exponent: Floats, outside: Floats) -> Floats:
        """Bound log E[exp(exponent)] under the weighted law, given `exponent` on every cell.

        The masses sum to 1, so only E[exp(exponent) - 1] has errors. `outside` bounds what outputs
        outside the grid add.
        """
        with np.errstate(over="ignore"):
            change = np.expm1(exponent)
            total = change @ self.mass + np.abs(change) @ self.mass_error
        return np.log1p(np.maximum(total + outside, 1e-15 - 1.0))


class Lines:
    """Bounds of the integrand |F| on the complex lines y + i s, for several heights s.

    The module docstring defines F and the exponent that is bounded here on every cell of y.
    """

    def __init__(self, tilted: TiltedSmooth, s: Floats) -> None:
        self.tilted = tilted
        self.s = s
        base, law = tilted.base, tilted.base.law
        angle = (s / base.sigma)[:, None]
        exponent = _tail_growth((base.cut - tilted.edges) / base.width, s[:, None] / base.width)
        turn_low = turn_high = np.zeros((len(s), 1))
        if law.a:
            log_size, turn = _turned(tilted.p, angle)
            exponent = exponent + tilted.grow * np.maximum(log_size[:, 1:], log_size[:, :-1])
            turn_low, turn_high = turn[:, :-1], turn[:, 1:]
        if law.b:
            log_size, turn = _turned(tilted.p_mirror, angle)
            least = np.minimum(log_size[:, 1:], log_size[:, :-1])
            crosses = (tilted.p_mirror[1:] - 0.5) * (tilted.p_mirror[:-1] - 0.5) <= 0
            least = np.where(crosses, np.log(np.cos(0.5 * angle)), least)  # r is least at p = 1/2
            exponent = exponent - tilted.fall * least
            turn_low, turn_high = turn_low + turn[:, 1:], turn_high + turn[:, :-1]
        self.exponent = exponent
        self.turn_low = turn_low
        self.turn_high = turn_high
        log_cos = np.log(np.cos(0.5 * s / base.sigma))
        self.log_outside = 0.5 * (base.curve - 1) * s * s - tilted.fall * log_cos
        self.steepest = (law.a + law.b) * s / base.sigma

    def log_norm(self, t: float) -> Floats:
        """Bound the log of the integral of |F| over each line at frequency t, relative to M(order).

        For t > 0 the bound falls with t, so it holds for all larger frequencies too.
        """
        tilted = self.tilted
        exponent = self.exponent - (t * self.turn_low if t > 0 else t * self.turn_high)
        growth = np.minimum(self.log_outside - min(t, 0.0) * self.steepest, 700.0)
        outside = tilted.outside * np.exp(growth)
        return 0.5 * self.s**2 + tilted.log_expectation(exponent, outside)


def _short(step: float) -> float:
    """Return `step` rounded down to few bits, which makes every multiple of it an exact float."""
    return math.ldexp(math.floor(math.ldexp(step, 30)), -30)


def _log_removed(law: Sampled, cut: Floats, width: float) -> Floats:
    """Return the log of the P-mass that a smooth cut of outputs y above `cut` removes.

    It is the probability that y plus `width` times a standard normal number exceeds the cut.
    """
    # Under P, y is normal around 0 or, sampled, around 1 / sigma.
    assert isinstance(law.noise, Normal)
    shift, weight, spread = law.a / law.noise.sigma, law.a * law.rate, math.hypot(1.0, width)
    log_mass = math.log1p(-weight) + log_ndtr(-cut / spread)
    if weight:
        log_mass = np.logaddexp(log_mass, math.log(weight) + log_ndtr((shift - cut) / spread))
    return log_mass


def _turned(p: Floats, angle: Floats) -> tuple[Floats, Floats]:
    """Return the log modulus r and the argument w of g(y + i s) / g(y) (see the module docstring).

    `p` is the chance p(y) that the record was sampled, `angle` is s / sigma.
    """
    drop = 2 * np.sin(0.5 * angle) ** 2  # 1 - cos
    log_size = 0.5 * np.log1p(-2 * p * (1 - p) * drop)
    return log_size, np.arctan2(p * np.sin(angle), 1 - p * drop)


def _tail_growth(distance: Floats, s: Floats) -> Floats:
    """Bound log(|Phi(x + i s)| / Phi(x)) on each cell, Phi being the normal distribution function.

    `distance` has the ends x of the cells, in decreasing order. Integrating the density phi from x
    to x + i s shows that |Phi(x + i s)| is at most the norm of the vector
    (Phi(x) + k |x| s^2 / 2, k s) with k = exp(s^2 / 2) phi(x). It is also at most
    exp(s^2 / 2) Phi(x).
    """
    most = 0.5 * s * s
    k = np.exp(np.minimum(most, 300.0)) * _hazard(distance[1:])  # phi / Phi falls with x
    reach = np.maximum(np.abs(distance[1:]), np.abs(distance[:-1]))
    return np.minimum(most, (k * reach + k * k) * most)


def _log_expm1(x: Floats) -> Floats:
    """Return log(exp(x) - 1) of x > 0 without overflow."""
    return x + np.log(-np.expm1(-x))


def _hazard(x: Floats) -> Floats:
    """Return phi(x) / Phi(x), the normal density over the normal distribution function."""
    return np.exp(-0.5 * x * x - _LOG_ROOT_TWO_PI - log_ndtr(x))


def _largest_spread(p: Floats) -> Floats:
    """Return the largest p (1 - p) on each cell, given a monotone p at the ends of the cells."""
    spread = p * (1 - p)
    crosses = (p[1:] - 0.5) * (p[:-1] - 0.5) <= 0
    return np.where(crosses, 0.25, np.maximum(spread[1:], spread[:-1]))
