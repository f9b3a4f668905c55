"""DP-SGD for any PyTorch model.

    private = tacit.make_private(model, optimizer, dataset, loss_fn, batch_size=256, epochs=20,
                                 clip_norm=1.0, epsilon=3.0, delta=1e-5)
    for batch in private:
        private.step(batch)

Torch loads when a name of this package is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.training.adam import AdamBC
    from tacit.training.adaptive import AdaptiveClip
    from tacit.training.clip_rules import Automatic, Flat, PerGroup, PerLayer
    from tacit.training.clipping import clipped_sum
    from tacit.training.compatible import fix
    from tacit.training.ema import EMA
    from tacit.training.make import make_private
    from tacit.training.private import Private
    from tacit.training.schedules import Exponential, Linear, Stairs
    from tacit.training.sums import ClippedSum

_HOMES = {
    "AdamBC": "adam",
    "AdaptiveClip": "adaptive",
    "Automatic": "clip_rules",
    "ClippedSum": "sums",
    "EMA": "ema",
    "Exponential": "schedules",
    "Flat": "clip_rules",
    "Linear": "schedules",
    "PerGroup": "clip_rules",
    "PerLayer": "clip_rules",
    "Private": "private",
    "Stairs": "schedules",
    "clipped_sum": "clipping",
    "fix": "compatible",
    "make_private": "make",
}

__all__ = [
    "EMA",
    "AdamBC",
    "AdaptiveClip",
    "Automatic",
    "ClippedSum",
    "Exponential",
    "Flat",
    "Linear",
    "PerGroup",
    "PerLayer",
    "Private",
    "Stairs",
    "clipped_sum",
    "fix",
    "make_private",
]


def __getattr__(name: str) -> Any:  # Any: classes and functions alike
    if name in _HOMES:
        value = getattr(import_module(f"tacit.training.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tacit.training' has no attribute {name!r}")
