"""Private least squares as others do it, on records z = (1, x) scaled to [-1, 1], with |y| <= 1.

Each function takes features X, targets y, epsilon, delta and a generator, and returns coefficients
with the intercept first. Noise is floating-point: these are for comparison, not for use.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from tacit.regression.estimator import gaussian_noise_multiplier

Floats = NDArray[np.float64]


def shrunk(X: Floats) -> tuple[Floats, Floats, float]:
    """Return rows (1, x) shrunk to the norm that tacit uses, their factors, and that norm."""
    Z = np.column_stack([np.ones(len(X)), X])
    norm = math.sqrt(1 + 0.4 * X.shape[1])
    factors = np.minimum(1.0, norm / np.linalg.norm(Z, axis=1))
    return Z * factors[:, None], factors, norm


def symmetric(size: int, std: float, rng: np.random.Generator) -> Floats:
    """Return noise for a Gram matrix of sensitivity 1, in Frobenius norm, and multiplier `std`."""
    noise = rng.normal(0, std, (size, size))
    upper = np.triu(noise, 1) / math.sqrt(2)
    return np.diag(np.diag(noise)) + upper + upper.T


def boosted_adassp(
    X: Floats, y: Floats, epsilon: float, delta: float, rng: np.random.Generator, rounds: int
) -> Floats:
    """BoostedAdaSSP (Tang et al. 2023, arXiv:2303.03451), with noise for all of its releases.

    A third of the budget pays for the Gram matrix, a twentieth of that for its smallest eigenvalue.
    """
    Z, factors, norm = shrunk(X)
    noise, size = gaussian_noise_multiplier(epsilon, delta), X.shape[1] + 1
    gram_std = norm**2 * noise / math.sqrt(0.95 / 3)
    least_std = norm**2 * noise / math.sqrt(0.05 / 3)
    step_std = norm * noise * math.sqrt(1.5 * rounds)
    gram = Z.T @ Z
    least = np.linalg.eigvalsh(gram)[0] + rng.normal(0, least_std) - 1.645 * least_std
    gram = gram + symmetric(size, gram_std, rng)
    ridge = max(0.0, gram_std * math.sqrt(2 * size) - max(least, 0.0))
    theta = np.zeros(size)
    for _ in range(rounds):
        residuals = np.clip(factors * y - Z @ theta, -1, 1)
        pull = Z.T @ residuals + rng.normal(0, step_std, size)
        theta = theta + np.linalg.solve(gram + (ridge + 1e-9) * np.eye(size), pull)
    return theta


def plain_descent(
    X: Floats, y: Floats, epsilon: float, delta: float, rng: np.random.Generator
) -> Floats:
    """DP-GD: 30 steps, residuals clipped at 1/2, momentum 0.9, mean of the second half."""
    Z, factors, norm = shrunk(X)
    steps, clip, n = 30, 0.5, len(y)
    std = norm * clip * gaussian_noise_multiplier(epsilon, delta) * math.sqrt(steps) / n
    theta = velocity = average = np.zeros(Z.shape[1])
    for step in range(steps):
        residuals = np.clip(Z @ theta - factors * y, -clip, clip)
        gradient = Z.T @ residuals / n + rng.normal(0, std, len(theta))
        velocity = 0.9 * velocity + gradient
        theta = theta - velocity / norm**2
        average = average + theta * (step >= steps // 2) / (steps - steps // 2)
    return average


def objective_perturbation(
    X: Floats, y: Floats, epsilon: float, delta: float, rng: np.random.Generator
) -> Floats:
    """Minimum of Huber's loss plus ridge plus a random linear term (Kifer et al. 2012).

    Residuals are clipped at 1. A tenth of epsilon pays for the change of the Hessian.
    """
    Z, factors, norm = shrunk(X)
    ridge = norm**2 / math.expm1(0.1 * epsilon)
    b = rng.normal(0, norm * gaussian_noise_multiplier(0.9 * epsilon, delta), Z.shape[1])

    def loss(theta: Floats) -> tuple[float, Floats]:
        residuals = Z @ theta - factors * y
        clipped = np.clip(residuals, -1, 1)
        value = clipped @ residuals - clipped @ clipped / 2 + ridge * theta @ theta / 2 + b @ theta
        return float(value), Z.T @ clipped + ridge * theta + b

    return minimize(loss, np.zeros(Z.shape[1]), jac=True, method="L-BFGS-B").x
