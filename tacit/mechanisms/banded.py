"""Noise that partly cancels over time: banded strategies for running sums (matrix mechanisms).

A run releases C g + z instead of g + z, where g are the clipped sums of its steps, z is Gaussian
noise, and C is lower triangular with ones of a first column c = (c_0, c_1, ...) of b entries on its
diagonals. Whoever knows C recovers g + C^-1 z, whose running sums carry the noise A C^-1 z, with A
lower triangular and all ones. Only the columns of C enter the price, and only A C^-1 the error, so
C can be chosen such that the error is small at a given price. With b = 1 it is independent noise.

All strategies here have a first column of norm 1. The optimization follows Choquette-Choo et al.
2023 (arXiv:2306.08153); the sensitivity of several participations is Theorem 2 of Kalinin and
Lampert 2024 (arXiv:2405.13763).
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit._check import whole
from tacit._participation import participation_norm

Coefficients = NDArray[np.float64]
MOST_BANDS = 1024
"""Bands for which it is proved what rounding adds to a release (`training.noise.banded_noise`)."""
_DECIMALS = 4  # of a column with c_0 = 1: the error is flat at its least, and grows by 1e-8 or less


def optimal_bands(steps: int, bands: int) -> Coefficients:
    """Return the first column of norm 1, of `bands` entries, with the least error of running sums.

    The error is `running_error`. The problem is not convex; started from the solution for half as
    many bands it ends, for every size of the tests, where other optimizers end.

    >>> [float(round(c, 4)) for c in optimal_bands(100, 2)]
    [0.7956, 0.6058]
    """
    whole(steps=steps, least=1)
    if whole(bands=bands, least=1) > steps:
        raise ValueError(f"bands must be <= steps, got {bands} and {steps}.")
    return np.array(_optimal(steps, bands))


@lru_cache(maxsize=256)
def _optimal(steps: int, bands: int) -> tuple[float, ...]:
    column = np.ones(1)
    sizes = [bands]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    for size in sizes[-2::-1]:
        start = np.concatenate([column, np.zeros(size - len(column))])
        column = _descended(start, steps, tolerance=1e-15 if size == bands else 1e-8)
    # Kernels of linear algebra differ in their last bits, which move the end of a descent by up to
    # 3e-9. All machines need the same column, so it is rounded far above that, and divided by a
    # norm that is summed exactly.
    rounded = [round(entry, _DECIMALS) for entry in column.tolist()]
    norm = math.sqrt(math.fsum(entry * entry for entry in rounded))
    return tuple(entry / norm for entry in rounded)


def _descended(start: Coefficients, steps: int, *, tolerance: float) -> Coefficients:
    """Return the column with c_0 = 1 at which a descent from `start` ends."""
    from scipy import optimize  # loaded here: few users need it

    def objective(rest: Coefficients) -> tuple[float, Coefficients]:
        """Return the logarithm of the mean squared error for c = (1, rest), and its gradient."""
        column = np.concatenate([[1.0], rest])
        error, slope = _error_and_slope(column, steps)
        if not math.isfinite(error):  # 1 / c has overflowed: far from any minimum
            return 1e3, np.zeros_like(rest)
        norm = column @ column
        return math.log(error * norm), (slope / error + 2 * column / norm)[1:]

    options = {"maxiter": 2000, "maxfun": 4000, "ftol": tolerance, "gtol": 1e-9, "maxcor": 30}
    bounds = [(0.0, 1.0)] * (len(start) - 1)
    minimize: Any = optimize.__dict__["minimize"]  # Any: scipy has no types
    found = minimize(
        objective, start[1:], jac=True, method="L-BFGS-B", bounds=bounds, options=options
    )
    return np.concatenate([[1.0], found.x])


def square_root(steps: int) -> Coefficients:
    """Return the first column, of norm 1, of the square root of A, with `steps` bands.

    It needs no optimization, and its error for a single participation is nearly the least
    (Fichtenberger et al. 2022, arXiv:2202.11205).
    """
    k = np.arange(1, whole(steps=steps, least=1))
    column = np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])
    return column / np.linalg.norm(column)


def running_error(column: Coefficients, steps: int) -> float:
    """Return the root mean square error of all running sums, for noise of deviation 1.

    >>> round(running_error(np.array([1.0]), 256), 5)
    11.33578
    """
    return math.sqrt(_error_and_slope(np.asarray(column, np.float64), steps)[0])


def step_deviations(column: Coefficients, steps: int) -> Coefficients:
    """Return the standard deviation of C^-1 z at each step, for noise z of deviation 1.

    It is larger than 1 and grows, while the noise of running sums is small: later noise cancels
    earlier noise.

    >>> [float(round(d, 3)) for d in step_deviations(np.array([0.8, 0.6]), 3)]
    [1.25, 1.562, 1.713]
    """
    start = np.zeros(steps)
    start[0] = 1.0
    return np.sqrt(np.cumsum(_quotient(start, np.asarray(column, np.float64)) ** 2))


def tree_error(steps: int) -> float:
    """Return the root mean square error of all running sums by a binary tree, at unit sensitivity.

    For comparison with `running_error`: DP-FTRL of Kairouz et al. 2021 (arXiv:2103.00039) without
    restarts. A record is in every level of the tree, and the first t steps are covered by as many
    nodes as t has binary ones. A column of norm 1 has less error from the same price.

    >>> round(tree_error(1024), 3), round(running_error(square_root(1024), 1024), 3)
    (7.417, 3.11)
    """
    levels = whole(steps=steps, least=1).bit_length()
    nodes = sum(t.bit_count() for t in range(1, steps + 1))
    return math.sqrt(levels * nodes / steps)


def participation_sensitivity(
    column: Coefficients, steps: int, *, separation: int, participations: int
) -> float:
    """Return how far one record moves C g, for records that come back in a fixed order.

    A record takes part in at most `participations` steps, any two of them at least `separation`
    steps apart, with a contribution of norm at most 1 each time. The proof is with the event,
    `tacit.events.BandedGaussian`, which computes the same number.

    >>> float(round(participation_sensitivity(np.array([0.8, 0.6]), 8, separation=4,
    ...                                       participations=2), 12)) == round(2**0.5, 12)
    True
    """
    entries = tuple(np.asarray(column, np.float64).tolist())
    return participation_norm(entries, steps, separation, participations)


def _error_and_slope(column: Coefficients, steps: int) -> tuple[float, Coefficients]:
    """Return the mean squared error of running sums at unit noise, and its slope in `column`.

    The noise of the running sums is A C^-1 z, a Toeplitz matrix with first column w = 1 / c * 1 in
    power series. w_j occurs in steps - j rows, so the mean over rows of their squared norms is
    sum_j (steps - j) / steps * w_j^2. The slope is that of a filter, by its adjoint run backwards.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        w = _quotient(np.ones(steps), column)
        shares = np.arange(steps, 0, -1) / steps
        error = float(_product(shares, w**2))
        if not math.isfinite(error):
            return math.inf, np.zeros_like(column)
        backwards = _quotient((2 * shares * w)[::-1], column)[::-1]
    # d error / d c_k = - sum_t backwards_{t+k} w_t
    return error, -_correlation(backwards, w, len(column))


def _quotient(values: Coefficients, column: Coefficients) -> Coefficients:
    """Return the power series `values` / `column`, cut to the length of `values`."""
    from scipy import signal  # loaded here: few users need it

    lfilter: Any = signal.__dict__["lfilter"]  # Any: scipy has no types
    return np.asarray(lfilter([1.0], column, values), np.float64)


def _correlation(a: Coefficients, b: Coefficients, lags: int) -> Coefficients:
    """Return sum_t a_{t+k} b_t for k = 0 to `lags` - 1."""
    n = len(a)
    if lags <= 32:
        return np.array([_product(a[k:], b[: n - k]) for k in range(lags)])
    size = 2 ** (2 * n - 1).bit_length()
    return np.fft.irfft(np.fft.rfft(a, size) * np.fft.rfft(b, size).conj(), size)[:lags]


def _product(a: Coefficients, b: Coefficients) -> float:
    """Return sum_t a_t b_t by one thread: for long vectors `@` starts others and waits for them."""
    return np.einsum("i,i->", a, b)
