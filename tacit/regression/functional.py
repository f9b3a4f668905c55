"""The functional mechanism: linear regression with Laplace noise on its objective (pure DP).

The objective J = theta' A theta + b' theta + c of least squares is released with noise on its
coefficients and then minimized (Zhang et al. 2012, VLDB 5(11)). A record is z = (1, x), with
features x and target y scaled to [-1, 1].
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tacit._arrays import Floats
from tacit.events import Event, Relation, Sequence
from tacit.mechanisms import LaplaceMechanism, Rng
from tacit.regression.estimator import SLACK
from tacit.regression.rows import SecondMoments, solve_moments


@dataclass(frozen=True)
class FunctionalPlan:
    """Plan of one fit: Laplace noise for the coefficients A and b of the objective J.

    The loss of theta is J = theta' A theta + b' theta + c, with A = sum z z' and b = -2 sum y z.
    The constant c is not needed and not released. Below are the largest L1 norms that one record
    adds to A and to b, for d features, by the `analysis` "tight" or "published". A replaced record
    changes at most twice as much; for A in the tight analysis less.

    * Tight, A: d + d/2 + d(d-1)/2 = d(d+2)/2, the bound on the sum of |x_j| + |x_j^2 - 1/2| over j
      and of |x_i x_j| over i < j. Only one triangle is released, because A is symmetric. The entry
      x_0 x_0 is the public number of records. x_j^2 lies in [0, 1], so it is released minus 1/2.
    * Tight, A, with x replaced by w: (d+2)/(d+1) times that. Let u = |x - w| and v = |x + w|, for
      which u_j + v_j <= 2, and let S and T be the sums of u_j and of v_j. The change of x_j is u_j,
      that of x_j^2 is u_j v_j, and that of x_i x_j is at most (u_i v_j + v_i u_j) / 2. The sum of
      all is at most S + S T / 2 + (sum of u_j v_j) / 2. It is largest at v = 2 - u; with
      (sum of u_j^2) >= S^2 / d it is at most (d+2) S - S^2 (d+1) / 2d, and the maximum over S is
      d (d+2)^2 / 2(d+1).
    * Tight, b: 2 |y| (1 + sum of |x_j|) <= 2(d+1).
    * Published (Zhang et al. 2012, section 4.2): (d+1)^2 for A and 2(d+1) for b. This counts every
      entry of A twice, and also the constant one.
    """

    quadratic: LaplaceMechanism
    linear: LaplaceMechanism
    analysis: str
    row_norm: float = math.inf
    method: ClassVar[str] = "functional"

    @property
    def event(self) -> Event:
        """Event of one fit, for the accountant; it is pure DP."""
        return Sequence((self.quadratic.event, self.linear.event))


def plan_functional(
    n_features: int,
    *,
    epsilon: float,
    relation: Relation,
    analysis: str = "tight",
    split: float | None = None,
) -> FunctionalPlan:
    """Return a plan that costs `epsilon`; the share `split` of it pays for the quadratic terms A.

    The rest of epsilon pays for the linear terms b. If `split` is None, the share minimizes the
    total variance of the noise: m coefficients of sensitivity S with budget e have the variance
    2 m S^2 / e^2, so e should be proportional to (m S^2)^(1/3).
    """
    d = n_features
    if analysis == "tight":
        size_a, sensitivity_a, factor_a = d + d * (d + 1) // 2, d * (d + 2) / 2, (d + 2) / (d + 1)
    else:
        size_a, sensitivity_a, factor_a = (d + 1) * (d + 2) // 2, float((d + 1) ** 2), 2.0
    size_b, sensitivity_b, factor_b = d + 1, 2.0 * (d + 1), 2.0
    moves_a, moves_b = (factor_a, factor_b) if relation is Relation.REPLACE_ONE else (1.0, 1.0)
    weight_a = (size_a * (moves_a * sensitivity_a) ** 2) ** (1 / 3)
    weight_b = (size_b * (moves_b * sensitivity_b) ** 2) ** (1 / 3)
    share = weight_a / (weight_a + weight_b) if split is None else split
    return FunctionalPlan(
        quadratic=LaplaceMechanism(
            SLACK * moves_a / (epsilon * share),
            l1_sensitivity=sensitivity_a,
            replace_factor=factor_a,
        ),
        linear=LaplaceMechanism(
            SLACK * moves_b / (epsilon * (1 - share)),
            l1_sensitivity=sensitivity_b,
            replace_factor=factor_b,
        ),
        analysis=analysis,
    )


def fit_functional(
    private: SecondMoments, plan: FunctionalPlan, *, n_records: int, rng: Rng
) -> Floats:
    """Release the noisy objective and return its minimizer; no row may be shrunk (weighted)."""
    released = release_functional(private, plan, n_records=n_records, rng=rng)
    size = len(private.cross)
    noise_std = math.sqrt(2.0) * plan.quadratic.noise_scale
    # The largest eigenvalue of a symmetric noise matrix is about 2 std sqrt(size) (Wigner).
    return solve_moments(released, noise=2 * noise_std * math.sqrt(size))


def release_functional(
    private: SecondMoments, plan: FunctionalPlan, *, n_records: int, rng: Rng
) -> SecondMoments:
    """Return noisy second moments: the sum of z z' (A) and the sum of y z (-b/2).

    Every coefficient gets noise. In the tight analysis the number of records, A_00, does not: it is
    replaced by the public `n_records`.
    """
    size = len(private.cross)
    upper = np.triu_indices(size)
    exact = private.gram[upper]
    if plan.analysis == "tight":
        diagonal = (upper[0] == upper[1]).astype(np.float64)
        # Sums of x_j, x_j^2 - 1/2 and x_i x_j: one record contributes at most d(d+2)/2. The true
        # number of records A_00 is private, so the declared number takes its place.
        centered = exact - diagonal * private.gram[0, 0] / 2
        noisy = np.append(n_records / 2, plan.quadratic.release(centered[1:], rng))
        noisy += diagonal * n_records / 2
    else:
        noisy = plan.quadratic.release(exact, rng)  # one record contributes at most (d+1)^2
    gram = np.empty((size, size))
    gram[upper] = noisy
    gram.T[upper] = noisy
    b = plan.linear.release(-2 * private.cross, rng)  # one record contributes at most 2(d+1)
    return SecondMoments(gram, -b / 2)
