"""What the contour engine asks of a law, and the laws that answer in closed form.

A model gives cumulants at all orders (`moments`), the mass it removed from the tail (`removed`),
and, tilted to one order, how fast its transform decays and its transform at equally spaced t
(`Factor`). Laws that are not closed forms become `Atoms`, which all share one transform.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tacit.accounting._laws import ROUND, Discrete, FloatArray, Shifted

ComplexArray = NDArray[np.complex128]


class Moments(NamedTuple):
    """Cumulants of one loss at several orders."""

    upper: FloatArray
    """Proved upper bound of log M."""
    mean: FloatArray
    variance: FloatArray


class Atoms(NamedTuple):
    """A tilted law as finitely many atoms, whose transform is right up to proved errors."""

    loss: FloatArray
    loss_error: FloatArray
    weight: FloatArray
    """Tilted masses, summing to 1 up to `error`."""
    weight_error: FloatArray
    """Relative error of each weight by rounding."""
    log_moment: float
    """log M(order), right up to `log_moment_error`."""
    log_moment_error: float
    error: float
    """Largest error of the transform relative to M(order), from quadrature and pruning."""


class Factor(NamedTuple):
    """The transform of one step at the nodes in t, relative to M(order)."""

    log: ComplexArray
    """log of M(order + i t) / M(order)."""
    error: FloatArray
    """Relative error of that ratio."""
    log_moment: float
    log_moment_error: float
    high: "HighPart | None" = None


class HighPart(NamedTuple):
    """Of a step that is split, M = A + B."""

    log_rise: ComplexArray
    """log(M / A) = log(1 + B / A), relatively accurate where B is small."""
    error: FloatArray
    """Error of B(order + i t) / M(order)."""


def factor(atoms: Atoms, share: FloatArray | None, step: float, size: int) -> Factor:
    """The transform of `atoms` at t = 0, step, ...; `share` of each belongs to the high part."""
    t = step * np.arange(size)
    if share is None:
        excess, high = _transform(atoms.loss, atoms.weight, step, size), None
    else:
        weight = atoms.weight * share
        mass = float(weight.sum())
        low = _transform(atoms.loss, atoms.weight - weight, step, size) - mass
        added = _transform(atoms.loss, weight, step, size) + mass
        excess = low + added
        relative = atoms.weight_error + 16 * ROUND * (2 - np.log(np.maximum(share, 1e-300)))
        fixed = float(weight @ relative) + (16 + 3 * len(weight)) * ROUND * mass + atoms.error
        high = HighPart(_log1p(added / (1.0 + low)), fixed + t * float(weight @ atoms.loss_error))
    log = _log1p(excess)
    # exp(i t l) - 1 is at most t |l|, and so are the errors of its sum over the atoms.
    summing = atoms.weight_error + (8 + 3 * len(atoms.loss)) * ROUND
    blur = float(atoms.weight @ (atoms.loss_error + summing * np.abs(atoms.loss)))
    absolute = atoms.error + t * blur + 8 * ROUND * (t > 0) + (high.error if high else 0.0)
    error = absolute * np.exp(-log.real) + 4 * ROUND * np.abs(log)
    return Factor(log, error, atoms.log_moment, atoms.log_moment_error, high)


def _transform(loss: FloatArray, weight: FloatArray, step: float, size: int) -> ComplexArray:
    """Sum of weight * (exp(i t loss) - 1) at t = 0, step, ..., (size - 1) step.

    exp(i t l) - 1 is formed without cancellation at few t, and with exp(i (t + s) l) - 1 =
    x y + x + y all others follow from one matrix product; so the rounding error is relative to
    t |loss| and not to 1.
    """
    inner = math.isqrt(size - 1) + 1
    fine = _turns(step * np.arange(inner), loss)  # (inner, atoms)
    coarse = _turns(step * inner * np.arange(-(-size // inner)), loss) * weight
    both = coarse @ fine.T + coarse.sum(axis=1)[:, None] + fine @ weight
    return both.ravel()[:size]


def _turns(t: FloatArray, loss: FloatArray) -> ComplexArray:
    """exp(i t loss) - 1."""
    angle = np.multiply.outer(t, loss)
    turns = np.empty(angle.shape, np.complex128)
    turns.real = -2 * np.sin(0.5 * angle) ** 2
    turns.imag = np.sin(angle)
    return turns


def _log1p(z: ComplexArray) -> ComplexArray:
    """log(1 + z), relatively accurate for small z (numpy's is only absolutely)."""
    out = np.empty_like(z)
    out.real = 0.5 * np.log1p(np.maximum(z.real * (2 + z.real) + z.imag**2, 4 * ROUND - 1))
    out.imag = np.arctan2(z.imag, 1 + z.real)
    return out


class PlainLaw:
    """Plain Gaussian releases: log M(z) = mu^2 z (z + 1) / 2."""

    removed = 0.0

    def __init__(self, law: Shifted) -> None:
        self.square = law.mu**2

    def moments(self, orders: FloatArray) -> Moments:
        """Exact cumulants."""
        log_m = 0.5 * self.square * orders * (orders + 1)
        return Moments(
            log_m * (1 + 8 * ROUND),
            self.square * (orders + 0.5),
            np.full(len(orders), self.square),
        )

    def log_decay(self, t: float) -> float:
        """log |M(order + i t)| / M(order), which falls with t."""
        return -0.5 * self.square * t * t

    def factor(self, order: float, step: float, size: int) -> Factor:
        """The exact transform."""
        t = step * np.arange(size)
        log = self.square * (t * (1j * (order + 0.5) - 0.5 * t))
        log_m = 0.5 * self.square * order * (order + 1)
        return Factor(log, 8 * ROUND * np.abs(log), log_m, 8 * ROUND * log_m)


class AtomicLaw:
    """Finitely many losses. Their transform need not decay at all."""

    removed = 0.0

    def __init__(self, law: Discrete) -> None:
        self.loss, self.mass = np.array(law.losses), np.array(law.p)

    def moments(self, orders: FloatArray) -> Moments:
        """Cumulants of the finite sum."""
        exponent = np.multiply.outer(orders, self.loss)
        peak = np.maximum(exponent[:, -1] - 500.0, 0.0)
        weight = np.exp(exponent - peak[:, None]) * self.mass
        total = weight.sum(axis=1)
        log_m = peak + np.log(total)
        fits = peak == 0
        log_m[fits] = np.log1p(np.expm1(exponent[fits]) @ self.mass)
        mean = weight @ self.loss / total
        variance = np.maximum(weight @ self.loss**2 / total - mean**2, 1e-100)
        return Moments(log_m + 1e-14 * (np.abs(log_m) + self.error(orders)), mean, variance)

    def error(self, orders: FloatArray | float) -> FloatArray | float:
        """Size of the terms of log M, in units of which it is rounded."""
        return np.minimum(orders * float(np.abs(self.loss).max()), 1.0)

    def atoms(self, order: float) -> Atoms:
        """These atoms, tilted."""
        exponent = order * self.loss
        if exponent[-1] < 500.0:
            log_m = math.log1p(float(np.expm1(exponent) @ self.mass))
        else:
            log_m = float(exponent[-1] + np.log(np.exp(exponent - exponent[-1]) @ self.mass))
        weight = np.exp(exponent - log_m) * self.mass
        error = 8 * ROUND * (2 + np.abs(exponent) + abs(log_m))
        slack = 2 * float(weight @ (np.minimum(np.abs(exponent), 1.0) * error))
        return Atoms(
            self.loss,
            4 * ROUND * np.abs(self.loss),
            weight,
            error,
            log_m,
            slack + 1e-15 * abs(log_m),
            0.0,
        )
