"""Moments of the total loss at many orders: the bounds and guesses that both engines start from."""

import math
from typing import NamedTuple

import numpy as np

from tacit.accounting.numerics import ROUND, FloatArray

ORDERS = 2.0 ** np.arange(-14.0, 30.5, 0.5)
LOG_CONSTANT = ORDERS * np.log(ORDERS / (1 + ORDERS)) - np.log1p(ORDERS)
"""log c(order) with c = m^m / (m + 1)^(m + 1): delta(e) <= c M exp(-m e), by maximizing
(1 - exp(e - l)) / exp(m (l - e)) over the loss l."""


class Moments(NamedTuple):
    """Cumulants of a loss at `ORDERS`."""

    upper: FloatArray
    """Proved upper bound of log M, M = E_P[exp(order * loss)]."""
    error: FloatArray
    """`upper - error` is a proved lower bound."""
    mean: FloatArray
    variance: FloatArray

    def epsilon_bound(self, delta: float) -> float:
        """The moment bound: epsilon is at most this (Chernoff at each order)."""
        if delta <= 0:
            return math.inf
        logs = (self.upper + LOG_CONSTANT - math.log(delta)) / ORDERS
        return max(float(np.min(logs)), 0.0) * (1 + 1e-14)

    def log_delta_bound(self, epsilon: float) -> float:
        """The moment bound the other way round."""
        return min(float(np.min(self.upper + LOG_CONSTANT - ORDERS * epsilon)) + 1e-12, 0.0)

    def guess_epsilon(self, delta: float) -> float:
        """About where delta(epsilon) = delta."""
        epsilon, log_delta = self._saddle_points()
        guess = np.interp(math.log(delta), log_delta[::-1], epsilon[::-1])
        return float(min(max(guess, 0.0), self.epsilon_bound(delta)))

    def guess_log_delta(self, epsilon: float) -> float:
        """About log delta(epsilon)."""
        points, log_delta = self._saddle_points()
        return min(float(np.interp(epsilon, points, log_delta)), -1e-3)

    def _saddle_points(self) -> tuple[FloatArray, FloatArray]:
        """Pairs (epsilon, log delta) near the curve, by the saddle-point approximation."""
        epsilon = self.mean - 1 / ORDERS - 1 / (1 + ORDERS)
        curvature = self.variance + 1 / ORDERS**2 + 1 / (1 + ORDERS) ** 2
        log_delta = self.upper - ORDERS * epsilon - np.log(ORDERS * (1 + ORDERS))
        log_delta -= 0.5 * np.log(2 * math.pi * curvature)
        return epsilon, np.minimum.accumulate(log_delta)

    def choose_line(
        self, epsilon: float, log_target: float, log_mass: float | None = None
    ) -> tuple[int, float]:
        """Index of an order, and a window, for which aliases are below target and nodes are few.

        Aliases from below shrink like exp(-order * window) from the mass of the law, those from
        above like Chernoff at any higher order. The number of nodes grows with the window over the
        standard deviation of the tilted loss; for part of a law, whose mass is given, that says
        nothing. What is integrated should not exceed the result too much: rounding is amplified.
        """
        above = np.maximum(self.upper + LOG_CONSTANT - ORDERS * epsilon - log_target + 1, 1.0)
        gap = ORDERS[None, :] - ORDERS[:, None]
        needed = np.where(gap > 0, above / np.where(gap > 0, gap, 1.0), math.inf).min(axis=1)
        window = np.maximum(max((log_mass or 0.0) - log_target + 1, 1.0) / ORDERS, needed)
        log_gain = np.maximum(self.upper - ORDERS * epsilon - log_target, 1.0)
        spread = np.sqrt(self.variance) if log_mass is None else 1.0
        extra = np.minimum(log_gain - log_gain.min(), 400.0)
        index = int(np.argmin(window * np.sqrt(log_gain) / spread * np.exp(0.25 * extra)))
        return index, float(window[index])


def total(moments: list[Moments], counts: list[int]) -> Moments:
    """Cumulants of a sum of independent losses."""
    if len(moments) == 1:
        return Moments(*(counts[0] * column for column in moments[0]))
    columns = zip(*moments, strict=True)
    return Moments(*(np.array(counts, float) @ np.array(column) for column in columns))


def grid_moments(
    loss: FloatArray,
    log_mass: FloatArray,
    *,
    loss_error: FloatArray,
    mass_error: FloatArray,
    removed: float = 0.0,
    largest_order: float = math.inf,
) -> Moments:
    """Cumulants of atoms whose losses increase and whose masses sum to 1 - `removed`.

    M - 1 is formed from exp(order * loss) - 1, which keeps its digits where M is close to 1.
    `mass_error` is the relative error of each mass. Above `largest_order` nothing is claimed.
    """
    used = max(int(np.searchsorted(ORDERS, largest_order)), 1)
    orders = ORDERS[:used]
    fits = int(np.searchsorted(orders * loss[-1], 500.0))
    ones = np.ones(len(loss))
    columns = np.stack((ones, loss, loss * loss, loss_error), axis=1)  # (atoms, 4)
    mass, mass_error = np.exp(log_mass), mass_error + (8 + len(loss)) * ROUND
    growth = np.expm1(np.multiply.outer(orders[:fits], loss))  # (orders, atoms)
    weighted = columns * mass[:, None]
    sums = growth @ weighted  # of weight - mass, first without the masses, for their digits
    log_m, shaken = np.log1p(sums[:, 0] - removed), np.abs(growth) @ (mass * mass_error)
    sums = sums + weighted.sum(axis=0)
    if fits < used:
        logs = np.multiply.outer(orders[fits:], loss) + log_mass
        peak = logs.max(axis=1)
        weight = np.exp(logs - peak[:, None])
        far = weight @ columns
        log_m = np.concatenate((log_m, peak + np.log(far[:, 0])))
        shaken = np.concatenate((shaken, weight @ mass_error))
        sums = np.concatenate((sums, far))
    scale = sums[:, 0]
    error = (shaken + orders * sums[:, 3]) / scale + ROUND * (removed + 4 * np.abs(log_m))
    mean = sums[:, 1] / scale
    table = np.full((4, len(ORDERS)), math.inf)
    table[0, :used], table[1, :used] = log_m + error, 2 * error
    table[2], table[2, :used] = mean[-1], mean
    table[3], table[3, :used] = 1e-100, np.maximum(sums[:, 2] / scale - mean**2, 1e-100)
    return Moments(*table)
