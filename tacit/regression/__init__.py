"""Regression under differential privacy, in the manner of scikit-learn.

`LinearRegression`, `LogisticRegression`, `FrankWolfe` (sparse, over a polytope) and
`TransferRegression` (knowledge from other data sets). Bounds are declared with `Bounds`, never
learned from the data; each fit says what it cost in `event_` and pays a `ledger` if it is given
one.
"""

from importlib import import_module
from typing import Any

from tacit.regression._base import Bounds

_LAZY = {
    "FrankWolfe": "tacit.regression.frank_wolfe",
    "LinearRegression": "tacit.regression.linear",
    "LogisticRegression": "tacit.regression.logistic",
    "TransferRegression": "tacit.regression.transfer",
}

__all__ = ["Bounds", *_LAZY]  # pyright: ignore[reportUnsupportedDunderAll]  # names resolve lazily below


def __getattr__(name: str) -> Any:  # Any: estimator classes of several types
    if name not in _LAZY:
        raise AttributeError(f"module 'tacit.regression' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
