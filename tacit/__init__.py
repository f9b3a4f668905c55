"""tacit: learning under differential privacy, with the bill worked out exactly.

`import tacit` is light: torch, scikit-learn and scipy's slow parts load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tacit._lazy import lazy

if TYPE_CHECKING:
    from tacit import (
        accounting,
        auditing,
        datasets,
        errors,
        events,
        experiments,
        ledger,
        local,
        mechanisms,
        pate,
        regression,
        report,
        sampling,
        summaries,
        text,
        training,
        tuning,
    )
    from tacit.accounting import bracket, calibrate, delta, epsilon
    from tacit.events import Relation
    from tacit.ledger import Budget, Ledger
    from tacit.training import make_private

__version__ = "0.2.0"

_HOMES = {
    "epsilon": "accounting",
    "delta": "accounting",
    "bracket": "accounting",
    "calibrate": "accounting",
    "Ledger": "ledger",
    "Budget": "ledger",
    "Relation": "events",
    "make_private": "training",
}

__all__ = [
    "Budget",
    "Ledger",
    "Relation",
    "__version__",
    "accounting",
    "auditing",
    "bracket",
    "calibrate",
    "datasets",
    "delta",
    "epsilon",
    "errors",
    "events",
    "experiments",
    "ledger",
    "local",
    "make_private",
    "mechanisms",
    "pate",
    "regression",
    "report",
    "sampling",
    "summaries",
    "text",
    "training",
    "tuning",
]

_load = lazy(__name__, _HOMES)


def __getattr__(name: str) -> Any:  # Any: modules, classes and functions alike
    if name in __all__ and name not in _HOMES:
        return import_module(f"tacit.{name}")
    return _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
