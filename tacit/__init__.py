"""tacit: learning under differential privacy, with the bill worked out exactly.

`import tacit` is light: torch, scikit-learn and scipy's slow parts load on first use.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "epsilon": "tacit.accounting",
    "delta": "tacit.accounting",
    "bracket": "tacit.accounting",
    "calibrate": "tacit.accounting",
    "Ledger": "tacit.ledger",
    "Budget": "tacit.ledger",
    "Relation": "tacit.events",
    "make_private": "tacit.training",
}
_PARTS = (
    "accounting",
    "auditing",
    "datasets",
    "errors",
    "events",
    "experiments",
    "ledger",
    "mechanisms",
    "pate",
    "regression",
    "report",
    "sampling",
    "training",
)

__all__ = [*_LAZY, *_PARTS, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]  # names resolve lazily below


def __getattr__(name: str) -> Any:  # Any: modules, classes and functions alike
    if name in _PARTS:
        return import_module(f"tacit.{name}")
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tacit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
