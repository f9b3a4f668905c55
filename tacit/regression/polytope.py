"""Noisy Frank–Wolfe over a polytope as functions: losses, vertices, plans and the plain descent.

As in `least_squares`, a *plan* is made from public facts alone and holds the mechanism, so that the
event paid and the noise drawn come from one object. Features are scaled to |x_j| <= 1.

Each step scores every vertex s by -<s, gradient>, where the gradient is the sum over records of
(residual) x, and releases which vertex a private selection picks; the model moves towards it:
theta <- (1 - mu) theta + mu s, mu = 2 / (t + 2). All else is post-processing of the vertices.

Sensitivity. A record changes the gradient by r x with |r| <= clip, so the score of s by -r <s, x>:
by at most clip * |s|_1, and the changes of two scores differ by at most clip * |s - s'|_1. These
are the residual's bound L1 and ||C||_1 of Talwar, Thakurta & Zhang 2015, Algorithm 2, and what a
bounded range needs. A replaced record changes the gradient by r x - r' x': twice as much.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack

from tacit.accounting import RDP, calibrate
from tacit.accounting import epsilon as epsilon_of
from tacit.events import Event, Exponential, Relation, Repeated
from tacit.mechanisms import ExponentialMechanism, LaplaceNoisyMax, Rng
from tacit.regression import _base
from tacit.regression._base import Box, Floats
from tacit.regression._lazy_gradient import LazyGradient
from tacit.regression._loss import Loss
from tacit.regression.statistics import PrivateRows

ANALYSES = ("tight", "published")
_SIGNAL_PER_STEP, _FEWEST_STEPS = 25, 4


class Rows(Protocol):
    """Private rows z, dense or sparse."""

    def pull(self, weights: Floats, push: Callable[[slice, Floats], Floats]) -> Floats:
        """Private sum over records of push(weights' z) z."""
        ...


@dataclass(frozen=True)
class Ball:
    """The l1 ball: vertices +-radius e_j, plus signs first."""

    radius: float
    n_features: int

    @property
    def reach(self) -> float:
        """Largest l1 norm of a vertex, hence of a model."""
        return self.radius

    @property
    def diameter(self) -> float:
        """Largest l1 distance of two vertices."""
        return 2 * self.radius

    def start(self) -> Floats:
        """A public model to begin with."""
        return np.zeros(self.n_features)

    def scores(self, gradient: Floats) -> Floats:
        """-<s, gradient> for each vertex s."""
        return self.radius * np.concatenate([-gradient, gradient])

    def move(self, theta: Floats, vertex: int, mu: float) -> None:
        """theta <- (1 - mu) theta + mu s, in place."""
        theta *= 1 - mu
        sign = 1 if vertex < self.n_features else -1
        theta[vertex % self.n_features] += mu * sign * self.radius


@dataclass(frozen=True, eq=False)
class Hull:
    """The convex hull of given vertices, one a row: public."""

    vertices: Floats

    @property
    def reach(self) -> float:
        """Largest l1 norm of a vertex, hence of a model."""
        return float(np.abs(self.vertices).sum(axis=1).max())

    @property
    def diameter(self) -> float:
        """A bound on the l1 distance of two vertices: the best of three.

        Twice the distance from the origin or from the mean, and the edges of the box around.
        """
        from_mean = np.abs(self.vertices - self.vertices.mean(axis=0)).sum(axis=1).max()
        return min(2 * self.reach, 2 * float(from_mean), float(np.ptp(self.vertices, axis=0).sum()))

    def start(self) -> Floats:
        """A public model to begin with."""
        return self.vertices.mean(axis=0)

    def scores(self, gradient: Floats) -> Floats:
        """-<s, gradient> for each vertex s."""
        return -(self.vertices @ gradient)

    def move(self, theta: Floats, vertex: int, mu: float) -> None:
        """theta <- (1 - mu) theta + mu s, in place."""
        theta *= 1 - mu
        theta += mu * self.vertices[vertex]


Domain: TypeAlias = Ball | Hull
Pick: TypeAlias = ExponentialMechanism | LaplaceNoisyMax


@dataclass(frozen=True)
class Plan:
    """`steps` private selections by `pick` among the vertices of `domain`."""

    domain: Domain
    loss: Loss
    pick: Pick
    steps: int

    @property
    def event(self) -> Event:
        """What one fit costs."""
        return Repeated(self.pick.event, self.steps)


def choose_steps(n_records: int, *, epsilon: float, delta: float, relation: Relation) -> int:
    """Steps that suit the budget, from public facts: n mu / 25, at least 4.

    mu is that of the Gaussian mechanism with this budget (n mu: how far a record's own worth lies
    below what all of them hold). Fewer steps underfit, more drown each choice in noise; the factor
    was read off validation rows of two text collections, see benchmarks/frank_wolfe.py.
    """
    (noise,) = _base.gaussian_shares(
        epsilon, delta, shares=(1.0,), replace_factors=(2.0,), relation=relation
    )
    return max(_FEWEST_STEPS, int(n_records / noise / _SIGNAL_PER_STEP))


def plan_descent(
    domain: Domain,
    loss: Loss,
    *,
    steps: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    analysis: str = "tight",
) -> Plan:
    """Selections that cost (`epsilon`, `delta`) in all.

    `"tight"` draws from the exponential mechanism, whose bounded range composes cheaply, with the
    noise that the accountant allows. `"published"` adds Laplace noise to every score as Talwar,
    Thakurta & Zhang 2015 do, of scale L1 ||C||_1 sqrt(8 T log(1 / delta)) / epsilon on the sums,
    that is over n on means. Each choice is then pure DP with twice the ratio of sensitivity to
    scale, and the event says so. For replaced records the noise doubles.
    """
    if domain.diameter == 0:
        raise ValueError("vertices must not all be equal. Pass a polytope with a choice.")
    pick: Pick
    if analysis == "tight":
        epsilon_step = _epsilon_of_each(steps, epsilon, delta, relation)
        pick = ExponentialMechanism(epsilon_step, sensitivity=loss.clip * domain.diameter / 2)
        return Plan(domain, loss, pick, steps)
    replaced = 2 if relation is Relation.REPLACE_ONE else 1
    epsilon_step = 2 * epsilon / math.sqrt(8 * steps * math.log(1 / delta)) / replaced
    pick = LaplaceNoisyMax(epsilon_step, sensitivity=loss.clip * domain.reach)
    found = Plan(domain, loss, pick, steps)
    if epsilon_of(found.event, delta=delta, relation=relation) > epsilon:
        raise ValueError(
            f"epsilon must be smaller for analysis 'published' with delta {delta}, got {epsilon}: "
            "its noise is proved for small epsilon only. Use analysis='tight'."
        )
    return found


@lru_cache
def _epsilon_of_each(steps: int, epsilon: float, delta: float, relation: Relation) -> float:
    """Epsilon of each of `steps` exponential mechanisms that cost (`epsilon`, `delta`) in all.

    The tightest accountant would say the same, more slowly: bounded range is a Rényi rule.
    """
    return calibrate(
        lambda each: Repeated(Exponential(each), steps),
        epsilon=epsilon,
        delta=delta,
        accountant=RDP(),
        relation=relation,
    )


def descend(
    rows: Rows,
    targets: Floats,
    domain: Domain,
    loss: Loss,
    *,
    steps: int,
    choose: Callable[[Floats], int],
) -> Floats:
    """theta after `steps` steps towards the vertex that `choose` takes from all scores.

    With `numpy.argmax` this is Frank–Wolfe without privacy.
    """
    theta = domain.start()

    def push(span: slice, margins: Floats) -> Floats:
        return loss.residuals(margins, targets[span])

    for step in range(steps):
        gradient = rows.pull(theta, push)
        # One record moves scores apart by at most clip * diameter, and one by clip * reach.
        domain.move(theta, choose(domain.scores(gradient)), 2 / (step + 2))
    return theta


def fit(rows: Rows, targets: Floats, plan: Plan, *, rng: Rng) -> Floats:
    """theta, released; pay for `plan.event` first.

    Sparse rows, the l1 ball and the exponential mechanism take the fast path of
    `_lazy_gradient`: same law, other work.
    """
    if (
        isinstance(rows, SparseRows)
        and isinstance(plan.domain, Ball)
        and isinstance(plan.pick, ExponentialMechanism)
    ):
        return fit_lazily(rows, targets, plan, rng=rng)
    return descend(
        rows,
        targets,
        plan.domain,
        plan.loss,
        steps=plan.steps,
        choose=lambda scores: plan.pick.release(scores, rng),
    )


class DenseRows:
    """Private dense rows, clipped and scaled on the fly, with or without a constant in front."""

    def __init__(self, X: NDArray[np.floating], box: Box, *, has_constant: bool) -> None:
        self._rows = PrivateRows(X, box)
        self._has_constant = has_constant

    def pull(self, weights: Floats, push: Callable[[slice, Floats], Floats]) -> Floats:
        """Private sum over records of push(weights' z) z: work by all entries of all rows."""
        if self._has_constant:
            return self._rows.pull(weights, push)
        return self._rows.pull(np.append(0.0, weights), push)[1:]


class SparseRows:
    """Private sparse rows, clipped and scaled, with or without a constant in front."""

    def __init__(self, X: Any, box: Box, *, has_constant: bool) -> None:  # Any: scipy's sparse rows
        scaled = csr_array(X, dtype=np.float64, copy=True)
        # Entries stored twice add up, so they must be one before they are clipped.
        scaled.sum_duplicates()
        if not np.isfinite(scaled.data).all():
            raise ValueError("X must be finite where entries stored twice are added up.")
        if (box.lower > 0).any() or (box.upper < 0).any():
            raise ValueError("bounds must include 0 for a sparse X, where most entries are 0.")
        features = scaled.indices
        np.clip(scaled.data, box.lower[features], box.upper[features], out=scaled.data)
        scaled.data /= box.half[features]
        scaled.eliminate_zeros()
        ones = csr_array(np.ones((X.shape[0], 1)))
        self.X: Any = csr_array(hstack([ones, scaled], "csr")) if has_constant else scaled

    def pull(self, weights: Floats, push: Callable[[slice, Floats], Floats]) -> Floats:
        """Private sum over records of push(weights' z) z: work by the non-zeros of all rows."""
        return push(slice(None), self.X @ weights) @ self.X


def fit_lazily(rows: SparseRows, targets: Floats, plan: Plan, *, rng: Rng) -> Floats:
    """theta by the fast path, over the l1 ball; pay for `plan.event` first."""
    radius = plan.domain.reach
    state = LazyGradient(
        rows.X, targets, plan.loss, slope=radius / plan.pick.noise_scale, radius=radius
    )
    scale = 1.0  # any: the sums are zero
    for step in range(plan.steps):
        feature, sign = state.draw(scale, rng)
        scale = 2 / ((step + 1) * (step + 2))
        state.add(feature, (step + 1) * sign * radius, scale)
    return scale * state.sums
