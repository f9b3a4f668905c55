"""Released normal equations of a regression, and their solution: shrunk, and with its uncertainty.

A fit releases a Gram matrix and gradients at several models. Each gradient is one more system of
equations for the same coefficients. `Solver` solves all of them together; the ridge penalty of the
solution minimizes Mallows' estimate of the error, a function of released values alone.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.linalg import eigh

from tacit._arrays import Floats
from tacit.regression.penalty import Penalty
from tacit.regression.rows import combine, shrink, triangle_noise
from tacit.regression.whitening import WhitenedRows

# Chosen on the tables of benchmarks/regression_linear.py.
_DROPPED = 0.2  # share of the gradients that is left out of the next solve: the oldest ones
_RESOLVED = 0.6
_DOUBTED, _BIASED = 2.0, 4.0
"""Standard deviations by which the mean prediction must be off so that intervals count it as a
bias, and so that the model does."""
_DAMPING = 0.5  # in units of the noise of the Gram matrix
_MARGIN = 1.1  # on variances, for what the approximations leave out
_ARBITRARY = 0.5  # squared cosine from which a hidden direction is one of undetermined models
_PENALTIES = np.append(0.0, 10.0 ** np.arange(-5, 2.1, 0.5))


class Uncertainty(NamedTuple):
    """Covariance of estimates in scaled units: noise, sampling and what noise hides."""

    covariance: Floats
    hidden: Floats
    """The part of it that is assumed rather than known, of directions that noise hides."""


class NormalEquations(NamedTuple):
    """Released equations gram (theta - model) + gradient = 0 of a fit, with their noise.

    In scaled units and per record. They also hold what the data say of directions in which a fit
    alone is mostly noise, so that the fits of several data sets can be combined.
    """

    gram: Floats
    model: Floats
    """Mean of the models at which gradients were released."""
    gradient: Floats
    """Mean of these gradients. Its noise has the covariance `gradient_variance` * `metric`."""
    metric: Floats
    gradient_variance: float
    gram_std: float
    """Standard deviation of the diagonal of the noise in the Gram matrix, in whitened units."""
    sampling: float
    """By sampling, the gradient has the covariance `sampling` * `gram`."""
    optimism: float
    """Mallows' estimate of how much lower the loss of the fit seems than it is."""
    fitted: float
    """Influence of the data on the fit, relative to that without a penalty: from 0 to 1."""


class Anchor(NamedTuple):
    """What the released mean of the targets says of the model that a solve starts from."""

    unit: Floats
    """The model that predicts 1 for every record, in whitened units."""
    variance: float
    """Noise variance of the mean. The constant model with this mean is the start."""


class Solver:
    """Solution of gradient(t) = 0 from released values: noisy gradients, and a noisy Hessian.

    For least squares the Hessian is the Gram matrix. Everything is in whitened units. Each gradient
    g at a model t satisfies hessian t - cross = g up to noise, so the mean of several gradients and
    the mean of their models do so with less noise. The model is shrunk towards `start` by a ridge
    penalty on the coefficients in scaled units, without the intercept; or it has the `penalty` that
    is given.
    """

    def __init__(
        self,
        hessian: Floats,
        noise_std: float,
        records: WhitenedRows,
        start: Floats,
        penalty: Penalty | None = None,
    ) -> None:
        self._start, self._penalty = start, penalty
        self._whitening, self._expected = records.whitening, records.expected
        self._models: list[Floats] = []
        self._gradients: list[Floats] = []
        self._variances: list[float] = []
        self.clip_bias = 0.0
        """Squared bias of the mean prediction by clipped residuals, if the anchor shows one."""
        self.slack = 0.0
        """How far clipped rows may move the mean prediction of a solution from the anchor."""
        self.biases: Floats = np.zeros(0)
        """Mean squares of what each of the first gradients may be off besides its noise."""
        self.theta: Floats = start
        """Current model; it may be set to a better one before the first gradient."""
        self.anchor: Anchor | None = None
        self.caution, self._least_ridge = 2.0, 0.0
        self._optimism, self._fitted = 0.0, 1.0
        self._use(hessian, noise_std)

    def _use(self, hessian: Floats, noise_std: float) -> None:
        """Take a released Hessian, whose entries have noise of `noise_std` (see `triangle`)."""
        size = len(hessian)
        values, vectors = np.linalg.eigh(hessian)
        self._values, self._vectors = np.maximum(values, 0.0), vectors
        self.hessian: Floats = (vectors * self._values) @ vectors.T
        self.hessian_std = noise_std
        noise = triangle_noise(noise_std, size)
        self._resolved = self._values > _RESOLVED * noise
        self._damping = _DAMPING * noise
        # basis' (hessian + damping) basis = 1, and basis' penalty basis is diagonal.
        self._penalties, self._basis = eigh(
            self._whitening[1:].T @ self._whitening[1:],
            self.hessian + self._damping * np.eye(size),
        )

    def refine(self, hessian: Floats, noise_std: float, doubt: float, rise: float = 1.0) -> None:
        """Combine the Hessian with a second one, released at the last model, and solve again.

        `doubt` is the standard deviation of what the first one may be off besides its noise,
        relative to its mean eigenvalue. The first one is multiplied by `rise`.
        """
        found, std = combine(
            rise * self.hessian, rise * self.hessian_std, hessian, noise_std, doubt
        )
        self._use(*shrink(found, std, self._expected))
        self._solve()

    def add(self, gradient: Floats, noise_std: float) -> None:
        """Take one released gradient at `theta`, and solve for the next `theta`."""
        self._models.append(self.theta)
        self._gradients.append(gradient)
        self._variances.append(noise_std**2)
        self._solve()

    def released(self) -> tuple[Floats, Floats, Floats]:
        """Return models, (k, m), the gradients released at them, and their noise variances."""
        return np.array(self._models), np.array(self._gradients), np.array(self._variances)

    def _solve(self) -> None:
        self.theta = self._shrunk() if self._penalty is None else self._penalized(self._penalty)

    def _means(self) -> tuple[Floats, Floats, float]:
        """Return mean model, mean gradient and its noise variance; weights follow the precision."""
        count = len(self._models)
        first = 0 if count == 1 else max(1, int(_DROPPED * (count - 1)))
        variances = np.array(self._variances[first:])
        biases = np.pad(self.biases, (0, count - len(self.biases)))[first:]
        weights = 1 / (variances + biases)
        weights /= weights.sum()
        model = weights @ np.array(self._models[first:])
        return model, weights @ np.array(self._gradients[first:]), float(weights**2 @ variances)

    def _shrunk(self) -> Floats:
        """Return the ridge solution whose penalty minimizes Mallows' estimate of the error.

        Mallows 1973: a linear estimate A c of the solution of hessian t = c, with noise of variance
        v in c, has the error t' hessian t - 2 c' t + 2 v trace(A), up to a constant. (`caution` may
        take the place of the second 2.) v contains the
        noise of the Hessian, which acts on the distance to the mean model. The solve is damped
        towards the mean model by half of the size of this noise.
        """
        cross, pull, variance, base = self._equations()
        squares = np.sum(self._basis**2, axis=0)
        best, least = self.theta, math.inf
        for penalty in np.maximum(_PENALTIES, self._least_ridge):
            weights = 1 / (1 + penalty * np.maximum(self._penalties, 0.0))
            found = self._basis @ (weights * pull)
            total = variance + self.hessian_std**2 * float(np.sum((found - base) ** 2)) / 2
            error = (
                found @ self.hessian @ found
                - 2 * cross @ found
                + self.caution * total * (squares @ weights)
            )
            if error < least:
                best, least = self._start + found, error
                self._optimism = total * float(squares @ weights)
                self._fitted = float(squares @ weights / squares.sum())
        return best

    def ridge(self, penalty: float) -> Floats:
        """Return the solution with a given ridge penalty on the coefficients in scaled units."""
        _, pull, _, _ = self._equations()
        return self._start + self._basis @ (pull / (1 + penalty * np.maximum(self._penalties, 0.0)))

    def set_least_ridge(self, penalty: float) -> None:
        """Solve again with at least this ridge penalty, and keep to it."""
        self._least_ridge = penalty
        self._solve()

    def _equations(self) -> tuple[Floats, Floats, float, Floats]:
        """Return the right side of hessian (theta - start) = cross, and what a solve needs of it.

        These are `cross` damped towards the mean model, in the basis; its noise variance; and the
        mean model, from `start`.
        """
        model, gradient, variance = self._means()
        base = center = model - self._start
        cross = self.hessian @ base - gradient
        if self.anchor is not None:
            # The mean of the targets was released before. It says that unit' cross = 0, up to its
            # noise and to that of the Hessian. Both sources are weighted by their precision.
            unit, noise = self.anchor
            slopes = base - unit * (unit @ base) / (unit @ unit)
            noise += self.hessian_std**2 * float(slopes @ slopes) / 2
            length, gap = float(unit @ unit), float(unit @ cross)
            own = variance * length
            # A gap that neither noise nor clipped rows explain is a bias by clipped residuals.
            explained = own + noise + self.slack**2
            self.clip_bias = gap**2 if gap**2 > _DOUBTED**2 * explained else 0.0
            own += max(gap**2 - _BIASED**2 * explained, 0.0)
            weighted = own / (own + noise) * unit / length
            cross, center = cross - weighted * gap, base - weighted * (unit @ base)
        return cross, self._basis.T @ (cross + self._damping * center), variance, base

    def _penalized(self, penalty: Penalty) -> Floats:
        """Return the solution with the given penalty, damped as in `_shrunk`."""
        model, gradient, _ = self._means()
        first = int(not self._whitening[0].any())  # 1 if there is no intercept
        whitening = self._whitening[first:]
        back = np.linalg.inv(whitening)
        damped = self.hessian + self._damping * np.eye(len(model))
        hessian, cross = back.T @ damped @ back, back.T @ (damped @ model - gradient)
        found = penalty.minimize(hessian, cross, 1 - first, whitening @ self.theta)
        return back @ found

    def equations(self, sampling: float) -> NormalEquations:
        """Return what was released as equations in scaled units; `sampling`: see `covariance`."""
        model, gradient, variance = self._means()
        back = np.linalg.pinv(self._whitening)
        return NormalEquations(
            gram=back.T @ self.hessian @ back,
            model=self._whitening @ model,
            gradient=back.T @ gradient,
            metric=back.T @ back,
            gradient_variance=variance,
            gram_std=self.hessian_std,
            sampling=sampling,
            optimism=self._optimism,
            fitted=self._fitted,
        )

    def unshrunk(self) -> Floats:
        """Return the solution without penalty and damping, in the directions above the noise."""
        model, gradient, _ = self._means()
        return model - self._inverse() @ gradient

    def uncertainty(self, sampling: Floats, *, free: Floats) -> Uncertainty:
        """Return the covariance of `unshrunk` in scaled units, and its hidden part.

        The error is inverse(hessian) times the sum of gradient noise, of the noise of the Hessian
        times the distance to the mean model, and of the sampling error of the gradient, whose
        covariance is `sampling`. For the distance, the Hessian is lowered by half of its noise: if
        it is too large, the distance seems short.

        Directions in which the Hessian is not above its noise are hidden.
        """
        _, gradient, variance = self._means()
        inverse = self._inverse()
        step = self._inverse(lowered=self.hessian_std / 2) @ gradient
        length = float(np.sum(step**2))
        # A symmetric matrix of noise times v has the covariance std^2 (|v|^2 1 + v v') / 2. The
        # models were found with this matrix and depend on its noise, which about doubles that.
        noise = self.hessian_std**2
        middle = (variance + noise * length) * np.eye(len(gradient)) + sampling
        middle = middle + noise * np.outer(step, step)
        covariance = _MARGIN * inverse @ middle @ inverse
        lost = self._vectors[:, ~self._resolved]
        return uncertainty_of(self.unshrunk(), covariance, lost, self._whitening, free)

    def _inverse(self, *, lowered: float = 0.0) -> Floats:
        vectors, values = self._vectors[:, self._resolved], self._values[self._resolved]
        return (vectors / np.maximum(values - lowered, values / 2)) @ vectors.T


def uncertainty_of(
    model: Floats, covariance: Floats, lost: Floats, whitening: Floats, free: Floats
) -> Uncertainty:
    """Return the uncertainty, in scaled units, of a model that is given in whitened units.

    In each of the hidden directions `lost` the model, in scaled units, is assumed not to be longer
    than in all others together. `free` holds models, as columns, that are 0 on every record. A
    hidden direction near them is taken to be exactly one of them, so that it does not hide what
    they leave unchanged.
    """
    moved = whitening @ lost
    moved /= np.linalg.norm(moved, axis=0)
    basis, _ = np.linalg.qr(free)
    projected = basis @ (basis.T @ moved)
    moved = np.where(np.sum(projected**2, axis=0) < _ARBITRARY, moved, projected)
    hidden = float(np.sum((whitening @ model) ** 2)) * (moved @ moved.T)
    return Uncertainty(whitening @ covariance @ whitening.T + hidden, hidden)
