"""Ridge and lasso penalties of private models.

A penalty is a public setting, and it is applied to released values, so it costs nothing.
"""

import math
from typing import NamedTuple

import numpy as np

from tacit._arrays import Floats
from tacit._check import non_negative


class Penalty(NamedTuple):
    """Public penalty l2 |b|^2 / 2 + l1 |b|_1 on the coefficients b in scaled units."""

    l2: float = 0.0
    l1: float = 0.0

    def minimize(self, hessian: Floats, cross: Floats, first: int, start: Floats) -> Floats:
        """Return the b that minimizes b' `hessian` b / 2 - `cross`' b + penalty.

        Coordinates before `first` are not penalized. Coordinate descent (Friedman et al. 2010)
        starts at `start`, and stops after 1,000 rounds at the latest.
        """
        found = start.copy()
        slopes = cross - hessian @ found
        diagonal = np.diag(hessian)
        for _ in range(1000):
            largest = 0.0
            for k in range(len(found)):
                l2, l1 = (self.l2, self.l1) if k >= first else (0.0, 0.0)
                pull = slopes[k] + diagonal[k] * found[k]
                shrunk = math.copysign(max(abs(pull) - l1, 0.0), pull)
                new = shrunk / (diagonal[k] + l2) if diagonal[k] + l2 > 0 else 0.0
                change = new - found[k]
                if change:
                    found[k] = new
                    slopes -= change * hessian[:, k]
                    largest = max(largest, abs(change))
            if largest <= 1e-9:
                break
        return found


def public_penalty(l2: float | None, l1: float | None) -> Penalty | None:
    """Return the penalty that the user asks for; None leaves shrinking to the method."""
    if l2 is None and l1 is None:
        return None
    return Penalty(
        0.0 if l2 is None else non_negative(l2=l2), 0.0 if l1 is None else non_negative(l1=l1)
    )
