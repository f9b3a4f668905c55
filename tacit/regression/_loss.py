"""Losses of a margin and a target, seen through their clipped derivatives."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from tacit.regression._base import Floats

LOSSES = ("squared", "logistic")
_LOGISTIC_DRIFT = 0.22388
"""More than the largest |d sigmoid(m) / d log m| = max |m| sigmoid(m) sigmoid(-m) = 0.223870..."""


@dataclass(frozen=True)
class Loss:
    """A loss of margin and target, through its derivative by the margin: the *residual*.

    Squared: (m - y)^2 / 2, residual m - y. Logistic: log(1 + exp(m)) - y m with y in {0, 1},
    residual sigmoid(m) - y. Residuals are clipped to [-clip, clip], which is the derivative of
    another convex loss: one that grows linearly where the first grows faster.
    """

    name: str
    clip: float

    @classmethod
    def make(cls, name: str, *, reach: float, clip: float | None = None) -> "Loss":
        """The loss for models with |theta|_1 <= `reach` and targets with |y| <= 1.

        Residuals are below 1 (logistic), or at most `reach` + 1 (squared: |<theta, x>| <= reach),
        so larger clips change nothing. None clips at the largest residual that the zero model has.
        """
        most = 1.0 if name == "logistic" else reach + 1.0
        at_zero = 0.5 if name == "logistic" else 1.0
        return cls(name, min(at_zero if clip is None else clip, most))

    def residuals(self, margins: Floats, targets: Floats) -> Floats:
        """Private clipped residuals."""
        predicted = expit(margins) if self.name == "logistic" else margins
        return np.clip(predicted - targets, -self.clip, self.clip)

    def bound_drift(self, log_ratio: float, *, reach: float) -> float:
        """The most by which a residual moves when margins, within `reach`, are scaled.

        The scale changes by a factor in exp(+-log_ratio). Clipping moves no two values apart.
        """
        if self.name == "logistic":
            return min(_LOGISTIC_DRIFT * log_ratio, 2 * self.clip)
        return min(reach * math.expm1(log_ratio), 2 * self.clip)
