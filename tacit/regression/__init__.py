"""Regression under differential privacy, with the interface of scikit-learn.

`LinearRegression`, `LogisticRegression`, `FrankWolfe` (sparse models over a polytope) and
`TransferRegression` (one data set with the help of others). Bounds are declared with `Bounds` and
never learned from the data. A fit pays from a `ledger`, if there is one, and has its event in
`event_`.
"""

from typing import TYPE_CHECKING

from tacit._lazy import lazy
from tacit.regression.bounds import Bounds

if TYPE_CHECKING:
    from tacit.regression.estimator import planned_event
    from tacit.regression.frank_wolfe import ConstantModel, FrankWolfe
    from tacit.regression.intervals import Inference
    from tacit.regression.linear import LinearRegression
    from tacit.regression.logistic import LogisticRegression
    from tacit.regression.per_user import PerUser, fit_for_users
    from tacit.regression.rows import SecondMoments
    from tacit.regression.transfer import TransferRegression

_HOMES = {
    "ConstantModel": "frank_wolfe",
    "FrankWolfe": "frank_wolfe",
    "Inference": "intervals",
    "LinearRegression": "linear",
    "LogisticRegression": "logistic",
    "PerUser": "per_user",
    "SecondMoments": "rows",
    "TransferRegression": "transfer",
    "fit_for_users": "per_user",
    "planned_event": "estimator",
}

__all__ = [
    "Bounds",
    "ConstantModel",
    "FrankWolfe",
    "Inference",
    "LinearRegression",
    "LogisticRegression",
    "PerUser",
    "SecondMoments",
    "TransferRegression",
    "fit_for_users",
    "planned_event",
]

__getattr__ = lazy(__name__, _HOMES)
