"""Regression under differential privacy, in the manner of scikit-learn.

`LinearRegression`, `LogisticRegression`, `FrankWolfe` (sparse, over a polytope) and
`TransferRegression` (knowledge from other data sets). Bounds are declared with `Bounds`, never
learned from the data; each fit says what it cost in `event_` and pays a `ledger` if it is given
one.
"""

from typing import TYPE_CHECKING

from tacit._lazy import lazy
from tacit.regression._base import Bounds

if TYPE_CHECKING:
    from tacit.regression.frank_wolfe import FrankWolfe
    from tacit.regression.linear import LinearRegression
    from tacit.regression.logistic import LogisticRegression
    from tacit.regression.transfer import TransferRegression

_HOMES = {
    "FrankWolfe": "frank_wolfe",
    "LinearRegression": "linear",
    "LogisticRegression": "logistic",
    "TransferRegression": "transfer",
}

__all__ = [
    "Bounds",
    "FrankWolfe",
    "LinearRegression",
    "LogisticRegression",
    "TransferRegression",
]

__getattr__ = lazy(__name__, _HOMES)
