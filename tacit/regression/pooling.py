"""Private transfer of a linear model between data sets, as functions.

Each data set releases noisy moments once, under its own budget. What follows (which sources are
informative, the pooled fit, the correction on the target) uses released values only, so it is
post-processing and costs nothing more.

The scheme is that of Li, Cai & Li 2022 (Trans-Lasso) and Tian & Feng 2023 (TransGLM): keep the
sources that do not raise the target's loss, fit on the pool, correct on the target. Losses are
quadratic forms in the released moments, and the noise in them has a known size.

What the target releases does not depend on its sources unless they agree with it, so a target whose
sources are all of another kind gets the very model it would have had alone.
"""

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from tacit.events import Event, Relation, Sequence
from tacit.mechanisms import GaussianMechanism, Rng
from tacit.regression import _base
from tacit.regression._base import Floats
from tacit.regression.least_squares import minimize_quadratic
from tacit.regression.statistics import Moments, PrivateRows, from_triangle, triangle

_SCREEN_SHARE = 0.3
_LIKE_MINDED = 0.5
"""Cosine of two screens from which a source has a say in the choice of features."""
_TRUSTED, _REFUSED = 0.9, 0.99
"""Quantiles of the misfit of a source like the target, between which trust falls from 1 to 0."""
_ROUNDS = 4
_WIDE = 100.0
"""Variance of a prior so wide, in scaled coefficients, that it only keeps equations solvable."""


@dataclass(frozen=True)
class DataSetPlan:
    """What one data set releases: moments of v = (1, x, scale y), after screening if there is one.

    * Screening: the sum of y z; one record adds a vector of norm |y| |z| <= `screen_norm`;
      replaced, twice that at most.
    * Moments: the sum of v v'; one record adds |v|^2 <= row_norm^2 + scale^2 in Frobenius norm;
      replaced, at most sqrt(2) times that, because v v' and w w' have an inner product >= 0.
    """

    screen: GaussianMechanism | None
    screen_norm: float
    moments: GaussianMechanism
    row_norm: float
    scale: float
    n_kept: int

    @property
    def event(self) -> Event:
        """What one data set pays."""
        if self.screen is None:
            return self.moments.event
        return Sequence((self.screen.event, self.moments.event))


class Summary(NamedTuple):
    """Released moments of one data set or of a pool, with the size of the noise in them."""

    moments: Moments
    gram_std: float
    """Standard deviation of the noise on the diagonal of the Gram matrix; 1/sqrt(2) of it off."""
    cross_std: float

    @property
    def spread(self) -> float:
        """Largest eigenvalue, about, of the noise in the Gram matrix (Wigner)."""
        return self.gram_std * math.sqrt(2.0 * len(self.moments.cross))

    def covariance(self, theta: Floats) -> Floats:
        """Covariance of cross - gram theta if theta is the truth: released noise and sampling."""
        m, identity = self.moments, np.eye(len(theta))
        # The noise matrix E has variance s^2 on and s^2 / 2 off the diagonal, so E theta has
        # covariance s^2 (|theta|^2 I + theta theta') / 2.
        released = self.gram_std**2 / 2 * (theta @ theta * identity + np.outer(theta, theta))
        released += self.cross_std**2 * identity
        rest = m.square - 2 * m.cross @ theta + theta @ m.gram @ theta
        variance = np.clip(rest / max(m.gram[0, 0], 1.0), 0.0, 4.0)  # |y| <= 1: at most 4
        return released + variance * _repaired(m.gram, 0.0, 0.0)

    def misfit(self, theta: Floats) -> float:
        """Size of cross - gram theta in units of its noise: chi-square at the truth."""
        rest = self.moments.cross - self.moments.gram @ theta
        return float(rest @ np.linalg.solve(self.covariance(theta), rest))


class Transfer(NamedTuple):
    """A fitted model and the sources it used."""

    theta: Floats
    informative: list[int]


def plan_data_set(
    n_features: int,
    *,
    row_norm: float,
    n_kept: int,
    epsilon: float,
    delta: float,
    relation: Relation,
) -> DataSetPlan:
    """Gaussian releases of one data set; it is screened if it has more than `n_kept` features."""
    screened = n_features > n_kept
    shares = (_SCREEN_SHARE, 1 - _SCREEN_SHARE) if screened else (1.0,)
    factors = (2.0, math.sqrt(2.0)) if screened else (math.sqrt(2.0),)
    *first, last = _base.gaussian_shares(
        epsilon, delta, shares=shares, replace_factors=factors, relation=relation
    )
    # A row of fewer features is shorter in proportion.
    inner = math.sqrt(1 + (row_norm**2 - 1) * min(1.0, n_kept / n_features))
    scale = inner / math.sqrt(2.0)
    return DataSetPlan(
        screen=GaussianMechanism(first[0], l2_sensitivity=row_norm) if screened else None,
        screen_norm=row_norm,
        moments=GaussianMechanism(
            last, l2_sensitivity=inner**2 + scale**2, replace_factor=math.sqrt(2.0)
        ),
        row_norm=inner,
        scale=scale,
        n_kept=min(n_kept, n_features),
    )


def release_screen(rows: PrivateRows, y: Floats, plan: DataSetPlan, rng: Rng) -> Floats:
    """Noisy sum of y z in units of its noise, features only; rows shrunk to `screen_norm`."""
    assert plan.screen is not None  # asked only where there is one
    private = rows.pull(np.zeros(rows.n_features + 1), lambda span, _: rows.factors[span] * y[span])
    return plan.screen.release(private, rng)[1:] / plan.screen.noise_std


def choose_features(screens: Many[Floats], n_kept: int) -> NDArray[np.intp]:
    """Features with the largest scores: half by the target, the rest with like-minded sources.

    A source is like-minded if its scores of the target's half point the way of the target's.
    """
    target, *sources = screens
    first = np.argsort(-np.abs(target), kind="stable")[: (n_kept + 1) // 2]
    like = [s for s in sources if _cosine(s[first], target[first]) >= _LIKE_MINDED]
    pooled = np.abs(np.sum([target, *like], axis=0))
    pooled[first] = np.inf
    return np.sort(np.argsort(-pooled, kind="stable")[:n_kept])


def release_moments(rows: PrivateRows, y: Floats, plan: DataSetPlan, rng: Rng) -> Summary:
    """Noisy moments of rows shrunk to `plan.row_norm`."""
    private = rows.moments(y)
    size = rows.n_features + 1
    whole = np.empty((size + 1, size + 1))
    whole[:size, :size] = private.gram
    whole[size, :size] = whole[:size, size] = plan.scale * private.cross
    whole[size, size] = plan.scale**2 * private.square
    # One record adds v v' with |v|^2 <= row_norm^2 + scale^2, its Frobenius norm.
    noisy = from_triangle(plan.moments.release(triangle(whole), rng), size + 1)
    moments = Moments(
        noisy[:size, :size],
        noisy[:size, size] / plan.scale,
        float(noisy[size, size]) / plan.scale**2,
    )
    std = plan.moments.noise_std
    return Summary(moments, std, std / (math.sqrt(2.0) * plan.scale))


def pool(summaries: Many[Summary]) -> Summary:
    """Moments of the union; independent noises add in squares."""
    return Summary(
        Moments(
            np.sum([s.moments.gram for s in summaries], axis=0),
            np.sum([s.moments.cross for s in summaries], axis=0),
            math.fsum(s.moments.square for s in summaries),
        ),
        math.hypot(*(s.gram_std for s in summaries)),
        math.hypot(*(s.cross_std for s in summaries)),
    )


def transfer(
    target: Summary, sources: Many[Summary], *, q: int = 2, allowance: float = 0.0
) -> Transfer:
    """The target's model with the help of its informative sources: select, pool, correct.

    `allowance` is the squared distance, in scaled coefficients, that a source may be off by. The
    answer lies between the target's own fit and that with help, as far as the source most like the
    target is trusted; with no informative source it is the target's own fit. So a source near the
    limit of what can be seen is not let in whole or not at all.
    """
    alone = minimize(target, q=q)
    trusts = select(target, sources, allowance=allowance)
    if not trusts:
        return Transfer(alone, [])
    pooled = minimize(pool([target, *(sources[k] for k in trusts)]), q=q)
    helped = pooled + correct(target, pooled, q=q)
    return Transfer(alone + max(trusts.values()) * (helped - alone), sorted(trusts))


def select(target: Summary, sources: Many[Summary], *, allowance: float = 0.0) -> dict[int, float]:
    """Informative sources, by number, and how far each is trusted, above 0 and at most 1.

    Sources most like the target come first. Each must agree with the target, and with the target
    pooled with those let in before: what they know together shows differences that the target's
    noise hides. Trust falls from 1 to 0 between the 0.9 and the 0.99 quantile of a misfit's law.
    """
    least, most = chi2.ppf((_TRUSTED, _REFUSED), len(target.moments.cross)).tolist()
    misfits = [misfit_of_both(target, source, allowance=allowance) for source in sources]
    known, trusts = target, {}
    for k in np.argsort(misfits, kind="stable").tolist():
        worse = max(misfits[k], misfit_of_both(known, sources[k], allowance=allowance))
        if worse < most:
            trusts[k] = min(1.0, (most - worse) / (most - least))
            known = pool([known, sources[k]])
    return trusts


def misfit_of_both(one: Summary, other: Summary, *, allowance: float = 0.0) -> float:
    """How badly one linear model explains two data sets, in units of their noise.

    At the common truth theta, what is left of the cross moments, cross - gram theta, is noise of
    known covariance C, so J = sum over both of rest' C^-1 rest, at its minimum over theta, is
    chi-square with 2 (d + 1) - (d + 1) degrees of freedom (Hansen's test of overidentifying
    restrictions, 1982). `allowance` takes off what an `other` that far away may add.
    """
    theta: Floats = np.zeros(len(one.moments.cross))
    for _ in range(_ROUNDS):  # the covariance depends on theta
        weights = [np.linalg.inv(s.covariance(theta)) for s in (one, other)]
        normal, pull = np.eye(len(theta)) / _WIDE, np.zeros_like(theta)
        for s, weight in zip((one, other), weights, strict=True):
            normal += s.moments.gram @ weight @ s.moments.gram
            pull += s.moments.gram @ weight @ s.moments.cross
        theta = np.asarray(np.linalg.solve(normal, pull), np.float64)
    weight = np.linalg.inv(other.covariance(theta))
    reach = np.linalg.eigvalsh(other.moments.gram @ weight @ other.moments.gram)[-1]
    return one.misfit(theta) + other.misfit(theta) - float(reach) * allowance


def correct(target: Summary, pooled: Floats, *, q: int = 2) -> Floats:
    """What to add to the pooled model so that it suits the target, as far as noise lets one tell.

    For q = 2 the posterior mean under a normal prior on the difference, whose variance is read off
    the target's own misfit; it moves only in directions that the target's moments determine. For
    q = 1 the lasso on the same whitened equations, at sqrt(2 log d) standard deviations.
    """
    gram = target.moments.gram
    rest = target.moments.cross - gram @ pooled
    covariance = target.covariance(pooled)
    weight = np.linalg.inv(covariance)
    normal, pull = gram @ weight @ gram, gram @ weight @ rest
    if q == 1:
        scale = np.sqrt(np.maximum(np.diag(normal), 1e-12))
        lam = math.sqrt(2 * math.log(max(len(rest), 2))) * scale
        return _lasso(normal, pull, lam, start=np.zeros_like(rest))
    excess = float(rest @ rest) - float(np.trace(covariance))
    variance = excess / float(np.trace(gram @ gram))
    if variance <= 0:
        return np.zeros_like(rest)
    step = np.linalg.solve(normal + np.eye(len(rest)) / variance, pull)
    return np.asarray(step, np.float64)


def minimize(summary: Summary, *, q: int = 2) -> Floats:
    """theta that minimizes the noisy loss with the penalty lambda |features|_q^q.

    lambda comes from the known noise: for q = 2 what AdaSSP would add, the eigenvalue bound read
    off the released matrix itself; for q = 1 sqrt(2 log d) standard deviations of a cross moment,
    on top of the repair that makes the problem convex.
    """
    theta = minimize_quadratic(summary.moments, noise=summary.spread)
    if q == 2:
        return theta
    smallest = float(np.linalg.eigvalsh(summary.moments.gram)[0])
    floor = max(0.0, smallest - summary.spread)
    ridge = max(0.0, summary.spread - floor)
    n_features = len(theta) - 1
    lam = summary.cross_std * math.sqrt(2 * math.log(max(n_features, 2)))
    gram = _repaired(summary.moments.gram, ridge, floor)
    penalties = np.full(len(theta), lam)
    penalties[0] = 0.0
    return _lasso(gram, summary.moments.cross, penalties, start=theta)


def _cosine(one: Floats, other: Floats) -> float:
    """Of two non-zero vectors."""
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))


def _repaired(gram: Floats, ridge: float, floor: float) -> Floats:
    """A positive definite matrix near `gram`: eigenvalues raised to `floor`, then by `ridge`."""
    values, vectors = np.linalg.eigh(gram)
    least = 1e-9 * max(float(values[-1]), 1.0)
    raised = np.maximum(np.maximum(values, floor) + ridge, least)
    return (vectors * raised) @ vectors.T


def _lasso(gram: Floats, cross: Floats, penalties: Floats, *, start: Floats) -> Floats:
    """Minimum of theta' G theta / 2 - cross' theta + penalties' |theta|, by coordinate descent."""
    theta = start.copy()
    for _ in range(1000):
        largest = 0.0
        for j in range(len(theta)):
            pull = cross[j] - gram[j] @ theta + gram[j, j] * theta[j]
            new = math.copysign(max(abs(pull) - penalties[j], 0.0), pull) / gram[j, j]
            largest = max(largest, abs(new - theta[j]))
            theta[j] = new
        if largest <= 1e-10:
            break
    return theta
