"""Elementary functions that keep their digits, and the unit in which rounding is counted."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
ComplexArray = NDArray[np.complexfloating[Any, Any]]
Array = NDArray[Any]  # real or complex, as the argument is

ROUND = 2.0**-53
"""Largest relative error of one rounding."""


def log1p(z: ComplexArray) -> ComplexArray:
    """log(1 + z) of complex z, relatively accurate for small z (numpy's is only absolutely)."""
    out = np.empty_like(z)
    near = 0.5 * np.log1p(np.maximum(z.real * (2 + z.real) + z.imag**2, -0.9))
    far = np.log(np.maximum(np.hypot(1 + z.real, z.imag), 1e-300))
    out.real = np.where(np.abs(z) < 0.5, near, far)
    out.imag = np.arctan2(z.imag, 1 + z.real)
    return out


def expm1(z: ComplexArray) -> ComplexArray:
    """exp(z) - 1 of complex z, relatively accurate for small z."""
    out = np.empty_like(z)
    growth, half = np.expm1(z.real), np.sin(0.5 * z.imag)
    out.imag = (1 + growth) * np.sin(z.imag)
    out.real = growth - (1 + growth) * (2 * half * half)
    return out


def log_mixture(rate: float, u: Array) -> Array:
    """log(1 - rate + rate exp(u)), relatively accurate near 0 and without overflow.

    For complex u the branch is the one that is continuous from the real line, |Im u| < pi.
    """
    if rate == 1.0:
        return u
    log_rate, log_rest = math.log(rate), math.log1p(-rate)
    if np.iscomplexobj(u):
        near = log1p(rate * expm1(np.minimum(np.real(u), 30.0) + 1j * np.imag(u)))
        rises = np.real(u) + log_rate > log_rest
        gap = np.where(rises, log_rest - log_rate - u, u + log_rate - log_rest)
        added = np.where(rises, u + log_rate, log_rest) + log1p(np.exp(gap))
    else:
        near = np.log1p(rate * np.expm1(np.minimum(u, 30.0)))
        if rate <= 0.5 and np.max(u, initial=-math.inf) <= 30.0:
            return near
        added = np.logaddexp(log_rest, log_rate + u)
    return added if rate > 0.5 else np.where(np.real(u) > 30.0, added, near)
