"""Logistic coefficients without shrinking, for intervals: the root of released equations.

Gradients were released at several models. The Hessian changes between them and the solution, so one
Newton step from their mean would miss it if the model is steep or a class is rare. What is known of
the change: rows that are normal after whitening have a Hessian that is a function of the model
alone. This function is scaled to the Hessian that was released, and integrated along the way from
each model to the solution.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from tacit._arrays import Floats

_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(31)
_NODE_WEIGHTS /= _NODE_WEIGHTS.sum()
_PLACES, _PLACE_WEIGHTS = np.polynomial.legendre.leggauss(5)
_PLACES, _PLACE_WEIGHTS = (_PLACES + 1) / 2, _PLACE_WEIGHTS / 2
_LEAST = 1e-4  # least eigenvalue of an expected Hessian; the largest is 1 / 4
_ITERATIONS, _LONGEST_STEP, _TOLERANCE = 40, 1.0, 1e-4
_HIDDEN = 0.5  # relative error of a Hessian from which noise hides a direction
_LEAST_RATIO = 0.05  # of a Hessian to the expected one
_SHAPE_DOUBT = 0.4
"""How far the expected change of the Hessian may be off, relative to itself."""


class NormalRows(NamedTuple):
    """Normal rows: what the Hessian of their logistic loss is at any model."""

    gram: Floats
    mean: Floats
    clip: float
    """Residuals p - y are weighted by min(1, clip / max(p, 1 - p))."""

    def moments(self, models: Floats) -> tuple[Floats, Floats]:
        """Return (a, b, c), (3, k), and v, (k, m), of k `models`: see `hessian`."""
        center = models @ self.mean
        moved = models @ self.gram
        spread = np.sqrt(np.maximum(np.sum(moved * models, axis=1) - center**2, 1e-6))
        p = expit(center[:, None] + spread[:, None] * _NODES)
        weights = np.minimum(1.0, self.clip / np.maximum(p, 1 - p))
        bent = weights * p * (1 - p) * _NODE_WEIGHTS
        sums = bent.sum(axis=1), bent @ _NODES / spread, bent @ (_NODES**2 - 1) / spread**2
        return np.array(sums), moved - center[:, None] * self.mean

    def hessian(self, theta: Floats, least: float = _LEAST) -> Floats:
        """Return the Hessian at `theta`; eigenvalues below `least` are raised to it.

        By Stein's lemma, rows u with margins theta' u have E[h u u'] = a gram + b (mean v' +
        v mean') + c v v', where v = cov(u) theta, a = E[h], b = E[h'] and c = E[h''].
        """
        (a, b, c), (v,) = self.moments(theta[None])
        cross = np.outer(self.mean, v)
        matrix = a * self.gram + b * (cross + cross.T) + c * np.outer(v, v)
        values, vectors = np.linalg.eigh(matrix)
        return (vectors * np.clip(values, least, 0.25)) @ vectors.T

    def changes(self, models: Floats, steps: Floats, vectors: Floats) -> Floats:
        """Return the mean Hessian on the way from each of k `models`, times a vector, (k, m).

        Each model has one row of `steps`, its way, and one row of `vectors`.
        """
        count, (k, size) = len(_PLACES), models.shape
        places = models + _PLACES[:, None, None] * steps
        (a, b, c), v = self.moments(places.reshape(-1, size))
        a, b, c, v = (part.reshape(count, k, -1) for part in (a, b, c, v))
        along, inner = (vectors @ self.mean)[:, None], np.sum(v * vectors, axis=2, keepdims=True)
        parts = a * (vectors @ self.gram) + b * inner * self.mean + (b * along + c * inner) * v
        return np.asarray(np.einsum("p,pkm->km", _PLACE_WEIGHTS, parts), np.float64)


class Curvature(NamedTuple):
    """A Hessian, and how far it may be off in each direction, relative to itself."""

    hessian: Floats
    doubts: Floats
    """v' `doubts` v is the relative variance in the direction of a unit vector v."""

    def known(self) -> Floats:
        """Return orthogonal directions, as columns, in which the Hessian is known well enough."""
        values, vectors = np.linalg.eigh(self.doubts)
        return vectors[:, values <= _HIDDEN**2]

    def doubted(self, deviation: float) -> "Curvature":
        """Return the same with this relative standard deviation added in every direction."""
        return Curvature(self.hessian, self.doubts + deviation**2 * np.eye(len(self.doubts)))

    def rescaled(self, found: Floats, noise_std: float, deviation: float) -> "Curvature":
        """Return the multiple of the Hessian that a released one shows.

        Before that, the multiple is 1 with the given relative standard deviation.
        """
        square = float(np.sum(self.hessian**2))
        gain = deviation**2 / (deviation**2 + noise_std**2 / square)
        ratio = float(np.sum(found * self.hessian)) / square
        multiple = max(1 + gain * (ratio - 1), _LEAST_RATIO)
        scaled = Curvature(multiple * self.hessian, self.doubts)
        return scaled.doubted(math.sqrt(gain * noise_std**2 / square) / multiple)

    def updated(self, found: Floats, noise_std: float) -> "Curvature":
        """Combine this expectation with a released Hessian, each entry by its precision.

        Entries are compared in the directions of the eigenvectors, relative to the eigenvalues, so
        that little curvature in a direction is not drowned by noise of the same size everywhere.
        """
        values, vectors = np.linalg.eigh(self.hessian)
        size, roots = len(values), np.sqrt(values)
        share = np.where(np.eye(size, dtype=np.bool_), 1.0, 0.5)  # of a variance off the diagonal
        noise = share * noise_std**2 / np.outer(values, values)
        deviations = np.sqrt(np.diag(vectors.T @ self.doubts @ vectors))
        prior = share * np.outer(deviations, deviations)
        ratio = (vectors.T @ found @ vectors) / np.outer(roots, roots)
        gain = prior / (prior + noise)
        mixed, axes = np.linalg.eigh(np.eye(size) + gain * (ratio - np.eye(size)))
        matrix = (axes * np.maximum(mixed, _LEAST_RATIO)) @ axes.T
        half = vectors * roots
        left = np.diag(gain * noise)
        return Curvature(half @ matrix @ half.T, (vectors * left) @ vectors.T)

    def error(self, vector: Floats) -> Floats:
        """Return the covariance of the error of the Hessian times `vector`."""
        values, vectors = np.linalg.eigh(self.hessian)
        half = vectors * np.sqrt(values)
        deviations = np.sqrt(np.diag(vectors.T @ self.doubts @ vectors))
        squares = np.outer(deviations, deviations) / 2
        x = half.T @ vector
        matrix = squares * np.outer(x, x)
        matrix[np.diag_indices(len(x))] = squares @ x**2 + np.diag(squares) * x**2
        return half @ matrix @ half.T


class Root(NamedTuple):
    """Solution of the released equations, in whitened units, with the Hessian there."""

    theta: Floats
    hessian: Floats
    inverse: Floats
    """Inverse of the Hessian in the directions that are known, and 0 in others."""
    gradient: Floats
    """Mean of the gradients: what the way from their models to the solution takes off."""
    variance: float
    """Noise variance of this mean."""
    doubt: Floats
    """Standard deviation of the equations, as a vector, by which the way itself may be off."""


class LogitEquations(NamedTuple):
    """Released gradients of one output, one per model, and the noise variance of each."""

    models: Floats
    gradients: Floats
    variances: Floats
    rows: NormalRows

    def scaling(self, hessian: Floats, at: Floats) -> Floats:
        """Return the symmetric matrix k with k e k = `hessian`, e being the expected one `at`."""
        root = _power(self.rows.hessian(at), 0.5)
        inverse = np.linalg.inv(root)
        return inverse @ _power(root @ hessian @ root, 0.5) @ inverse

    def root(self, curvature: Curvature, at: Floats, start: Floats) -> Root | None:
        """Return the model at which the weighted mean of the equations is 0; None if there is none.

        Equation k says: the gradient at model k, plus its change on the way, is 0. `curvature` is
        known at the model `at`. Only directions in which it is known are solved for.
        """
        scaling, known = self.scaling(curvature.hessian, at), curvature.known()
        if not known.shape[1]:
            return None
        theta, size = start, len(start)
        for _ in range(_ITERATIONS):
            steps = theta - self.models
            changes = self.rows.changes(self.models, steps, steps @ scaling) @ scaling
            hessian = scaling @ self.rows.hessian(theta) @ scaling
            bends = _SHAPE_DOUBT * (changes - steps @ hessian)
            precisions = 1 / (self.variances + np.sum(bends**2, axis=1) / size)
            weights = precisions / precisions.sum()
            inverse = known @ np.linalg.inv(known.T @ hessian @ known) @ known.T
            step = inverse @ (weights @ (self.gradients + changes))
            length = math.sqrt(float(step @ step))
            theta = theta - step * min(1.0, _LONGEST_STEP / max(length, 1e-300))
            if length < _TOLERANCE:
                variance = float(weights**2 @ self.variances)
                return Root(
                    theta, hessian, inverse, weights @ self.gradients, variance, weights @ bends
                )
        return None


def _power(matrix: Floats, exponent: float) -> Floats:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.maximum(values, 1e-300) ** exponent) @ vectors.T
