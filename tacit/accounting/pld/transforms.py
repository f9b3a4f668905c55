"""What the contour engine asks of a law, and the laws that answer in closed form.

A `Model` gives its cumulants and, tilted to one order, how fast its transform decays and what the
transform is at equally spaced t (`Factor`). A law that is no closed form becomes `Atoms` first:
finitely many losses whose transform is right up to proved errors.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from scipy.special import log_ndtr

from tacit.accounting.numerics import ROUND, Array, ComplexArray, FloatArray, expm1, log1p
from tacit.accounting.pld.cumulants import ORDERS, Moments, grid_moments


class Split(NamedTuple):
    """A smooth partition of outputs y: psi(y) = Phi((y - at) / width) belongs to the high part."""

    at: float
    width: float

    def log_high(self, y: Array) -> Array:
        """log psi."""
        return log_ndtr((y - self.at) / self.width)


class Tilt(NamedTuple):
    """The weight exp(order * loss) / M(order)."""

    order: float
    log_moment: float
    """log M(order), right up to `error`."""
    error: float


class HighPart(NamedTuple):
    """Of a step that is split, M = A + B with A the low and B the high part."""

    log_low: ComplexArray
    """log of A(order + i t) / M(order)."""
    log_rise: ComplexArray
    """log(M / A) = log(1 + B / A), relatively accurate where B is small."""
    error: FloatArray
    """Error of B(order + i t) / M(order)."""


class Factor(NamedTuple):
    """The transform of one step at the nodes in t, relative to M(order)."""

    log: ComplexArray
    """log of M(order + i t) / M(order)."""
    error: FloatArray
    """Relative error of that ratio."""
    high: HighPart | None = None


class Tilted(Protocol):
    """A law weighted by exp(order * loss) / M(order)."""

    def log_decay(self, t: float, count: int, /) -> float:
        """Bound of log |M(order + i t')| / M(order) for all t' >= t; sharp for `count` steps."""
        ...

    def lay_nodes(self, t: float, log_error: float, split: Split | None, /) -> int:
        """Choose nodes good for all frequencies up to t; returns how many."""
        ...

    def factor(self, step: float, size: int, split: Split | None, /) -> Factor:
        """The transform at t = 0, step, ..., (size - 1) step."""
        ...


class Model(Protocol):
    """A law as the contour engine sees it."""

    removed: float
    """Mass cut from its tail of high losses."""

    def moments(self, steps: int, /) -> Moments:
        """Cumulants at `ORDERS`, as far as they help where `steps` such losses are added."""
        ...

    def tilt(self, tilt: Tilt, /) -> Tilted:
        """The law, tilted."""
        ...


class Atoms(NamedTuple):
    """A tilted law as finitely many atoms; losses and weights are complex off the real line."""

    loss: Array
    loss_error: FloatArray
    weight: Array
    """Tilted masses, summing to 1 up to `error`."""
    weight_error: FloatArray
    """Relative error of each weight by rounding."""
    error: float
    """Largest error of the transform relative to M(order), from all but rounding."""

    def factor(self, share: Array | None, step: float, size: int) -> Factor:
        """Their transform; `share` of each atom belongs to the high part."""
        t = step * np.arange(size)
        if share is None:
            excess, high = _transform(self.loss, self.weight, step, size), None
        else:
            weight = self.weight * share
            sizes, mass = np.abs(weight), complex(weight.sum())
            low = _transform(self.loss, self.weight - weight, step, size) - mass
            added = _transform(self.loss, weight, step, size) + mass
            excess = low + added
            shares = 2 - np.log(np.maximum(np.abs(share), 1e-300))
            relative = self.weight_error + ROUND * (128 * shares + 16 + 3 * len(weight))
            error = self.error + float(sizes @ relative) + t * float(sizes @ self.loss_error)
            log_low = log1p(low)
            high = HighPart(log_low, log1p(added * np.exp(-log_low)), error)
        log = log1p(excess)
        # |exp(i t l) - 1| is at most t |l|, and the errors of its sum over atoms are in proportion.
        summing = self.weight_error + (8 + 3 * len(self.loss)) * ROUND
        blur = float(np.abs(self.weight) @ (self.loss_error + summing * np.abs(self.loss)))
        absolute = self.error + t * blur + 8 * ROUND * (t > 0) + (high.error if high else 0.0)
        error = absolute * np.exp(-log.real) + 4 * ROUND * np.abs(log)
        return Factor(log, error, high)


def _transform(loss: Array, weight: Array, step: float, size: int) -> ComplexArray:
    """Sum of weight * (exp(i t loss) - 1) at t = 0, step, ..., (size - 1) step.

    exp(i t l) - 1 is formed without cancellation at few t, and with exp(i (t + s) l) - 1 =
    x y + x + y all others follow from one matrix product; so rounding is relative to t |loss|.
    """
    inner = math.isqrt(size - 1) + 1
    fine = _turns(step * np.arange(inner), loss)  # (inner, atoms)
    coarse = _turns(step * inner * np.arange(-(-size // inner)), loss) * weight
    both = coarse @ fine.T + coarse.sum(axis=1)[:, None] + fine @ weight
    return both.ravel()[:size]


def _turns(t: FloatArray, loss: Array) -> ComplexArray:
    """exp(i t loss) - 1."""
    if np.iscomplexobj(loss):
        return expm1(np.multiply.outer(1j * t, loss))
    angle = np.multiply.outer(t, loss)
    turns = np.empty(angle.shape, np.complex128)
    turns.real = -2 * np.sin(0.5 * angle) ** 2
    turns.imag = np.sin(angle)
    return turns


@dataclass(frozen=True)
class PlainModel:
    """Plain Gaussian releases: log M(z) = mu^2 z (z + 1) / 2, `square` being mu^2."""

    square: float
    order: float = 0.0

    removed = 0.0

    def moments(self, _steps: int) -> Moments:
        """Exact cumulants."""
        log_m = 0.5 * self.square * ORDERS * (ORDERS + 1) * (1 + 8 * ROUND)
        variance = np.full(len(ORDERS), self.square)
        return Moments(log_m, 16 * ROUND * log_m, self.square * (ORDERS + 0.5), variance)

    def tilt(self, tilt: Tilt) -> "PlainModel":
        """This law at one order."""
        return replace(self, order=tilt.order)

    def log_decay(self, t: float, _count: int) -> float:
        """As `Tilted.log_decay`: here it is exact."""
        return -0.5 * self.square * t * t

    def lay_nodes(self, _t: float, _log_error: float, _split: Split | None) -> int:
        """A closed form needs no nodes."""
        return 0

    def factor(self, step: float, size: int, _split: Split | None) -> Factor:
        """The exact transform."""
        t = step * np.arange(size)
        log = self.square * (t * (1j * (self.order + 0.5) - 0.5 * t))
        return Factor(log, 8 * ROUND * np.abs(log))


class AtomicModel:
    """Finitely many losses as they are, increasing; their transform need not decay at all."""

    removed = 0.0

    def __init__(self, loss: FloatArray, mass: FloatArray) -> None:
        self.loss, self.loss_error = loss, 4 * ROUND * np.abs(loss)
        self.log_mass = np.log(mass)
        self.mass_error = 8 * ROUND * (1 + np.abs(self.log_mass))

    def moments(self, _steps: int) -> Moments:
        """Cumulants of the finite sum."""
        return grid_moments(
            self.loss, self.log_mass, loss_error=self.loss_error, mass_error=self.mass_error
        )

    def tilt(self, tilt: Tilt) -> "TiltedAtoms":
        """This law, tilted."""
        return TiltedAtoms(self, tilt)


class TiltedAtoms:
    """An `AtomicModel` at one order."""

    def __init__(self, base: AtomicModel, tilt: Tilt) -> None:
        self.atoms = tilted_atoms(
            base.loss, base.loss_error, base.log_mass, base.mass_error, tilt, 0.0
        )

    def log_decay(self, _t: float, _count: int) -> float:
        """As `Tilted.log_decay`: nothing can be said."""
        return 0.0

    def lay_nodes(self, _t: float, _log_error: float, _split: Split | None) -> int:
        """The atoms are the nodes."""
        return len(self.atoms.loss)

    def factor(self, step: float, size: int, _split: Split | None) -> Factor:
        """The transform of the atoms."""
        return self.atoms.factor(None, step, size)


def tilted_atoms(
    loss: Array,
    loss_error: FloatArray,
    log_mass: Array,
    mass_error: FloatArray,
    tilt: Tilt,
    error: float,
) -> Atoms:
    """Atoms weighted by exp(order * loss) / M(order); `error` is that of their quadrature.

    The transform minus 1 is a difference of two sums, so it errs twice by quadrature; an error of
    M(order) scales it, as if all weights were wrong together.
    """
    exponent = tilt.order * loss
    weight = np.exp(log_mass + exponent - tilt.log_moment)
    sizes = 2 + np.abs(log_mass) + np.abs(exponent) + abs(tilt.log_moment)
    weight_error = mass_error + 4 * ROUND * sizes + tilt.order * loss_error + tilt.error
    return Atoms(loss, loss_error, weight, weight_error, 2 * error)
