"""Rényi price of releasing only the best of a random number of runs.

Papernot & Steinke 2022 (arXiv:2110.03620): Theorem 2 for geometric and logarithmic numbers of runs
(truncated negative binomial of shape 1 and 0), Theorem 6 for a Poisson number.
"""

import math

import numpy as np

from tacit.accounting.rdp.divergence import FloatArray
from tacit.events import Trials

GRID = 1 + 2.0 ** (np.arange(-24, 81) / 4)
"""Orders at which the curve of one run is looked at, from 1 + 2^-6 to 1 + 2^20."""


def selection_divergence(
    orders: FloatArray, run: FloatArray, run_on_grid: FloatArray, *, mean: float, trials: Trials
) -> FloatArray:
    """Curve of the best of `mean` runs at `orders`, given that of one run there and on `GRID`."""
    both = np.append(orders, GRID)
    values = np.append(run, run_on_grid)
    if trials is Trials.POISSON:
        values = values + mean * _poisson_deltas(both, run_on_grid)
    else:
        values = values + _second_order_cost(run_on_grid, mean, trials)
    values = values + max(math.log(mean), 0.0) / (both - 1)
    # A divergence never falls with the order, so the best value further up holds here too.
    on_grid = np.append(np.minimum.accumulate(values[len(orders) :][::-1])[::-1], np.inf)
    return np.minimum(values[: len(orders)], on_grid[np.searchsorted(GRID, orders)])


def halting_probability(mean: float, trials: Trials) -> float:
    """Parameter gamma of the number of runs with this mean, rounded down (the safe side).

    Geometric: mean = 1 / gamma. Logarithmic: mean = (1 / gamma - 1) / log(1 / gamma).

    >>> halting_probability(10.0, Trials.GEOMETRIC)
    0.1
    """
    if trials is Trials.GEOMETRIC:
        return 1 / mean
    low, high = 0.0, 800.0  # x = log(1 / gamma); (exp(x) - 1) / x grows with x
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if _expm1_over(middle) < mean:
            low = middle
        else:
            high = middle
    return math.exp(-high)


def _second_order_cost(run_on_grid: FloatArray, mean: float, trials: Trials) -> float:
    """min over orders b of (1 + shape) ((1 - 1 / b) run(b) + log(1 / gamma) / b)."""
    shape = 1.0 if trials is Trials.GEOMETRIC else 0.0
    log_halt = -math.log(halting_probability(mean, trials))
    cost = (1 + shape) * ((1 - 1 / GRID) * run_on_grid + log_halt / GRID)
    return float(cost.min())


def _poisson_deltas(orders: FloatArray, run_on_grid: FloatArray) -> FloatArray:
    """delta of one run at epsilon = log(1 + 1 / (order - 1)), for every order."""
    epsilon = -np.log1p(-1 / orders)
    exponent = (GRID - 1) * (run_on_grid - epsilon[:, None] + np.log1p(-1 / GRID)) - np.log(
        GRID
    )  # (orders, grid)
    return np.exp(np.minimum(exponent.min(axis=1), 0.0))


def _expm1_over(x: float) -> float:
    return 1.0 if x == 0 else math.expm1(min(x, 700.0)) / x
