"""What a ledger may spend, and what it has left."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from tacit._check import in_closed_unit, non_negative


@dataclass(frozen=True)
class Budget:
    """The most that all entries of a ledger together may cost: (`epsilon`, `delta`)-DP.

    `delta` 0 means pure differential privacy: only entries that have a pure epsilon are admitted.

    >>> str(Budget(epsilon=1.0, delta=1e-5))
    'epsilon 1, delta 1e-05'
    """

    epsilon: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", non_negative(epsilon=self.epsilon))
        delta = in_closed_unit(delta=self.delta)
        if delta == 1:
            raise ValueError("delta must be in [0, 1), got 1. Choose it well below 1 / records.")
        object.__setattr__(self, "delta", delta)

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g}, delta {self.delta:g}"


class Remaining(NamedTuple):
    """What one more entry, chosen in the light of all earlier releases, may cost at most.

    The fields are alternatives, not parts: any one of them can be used up, once. A first entry is
    priced more tightly than the filter does, so more than this may fit into an empty ledger.
    """

    epsilon: float
    """A pure release up to this epsilon is admitted (priced as it stands, replace factor 1)."""
    delta: float
    """Sum of deltas that `ApproximateDP` entries may still have."""
    noise_multiplier: float
    """A Gaussian release with this multiplier or more is admitted (replace factor 1)."""
    fraction: float
    """Share of the budget that is unspent, by the measure with most room."""

    def __str__(self) -> str:
        ways = []
        if self.epsilon > 0:
            ways.append(f"one pure release of epsilon {self.epsilon:.4g}")
        if self.noise_multiplier < math.inf:
            ways.append(f"one Gaussian release of noise multiplier {self.noise_multiplier:.4g}")
        if self.fraction == 0 or not ways:
            return "nothing"
        return f"{100 * self.fraction:.3g} % of the budget, {' or '.join(ways)}"


UNLIMITED = Remaining(math.inf, 1.0, 0.0, 1.0)
"""What remains of a ledger without a budget."""
