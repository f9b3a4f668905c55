"""DP-SGD for any PyTorch model.

    private = tacit.make_private(model, optimizer, dataset, loss_fn, batch_size=256, epochs=20,
                                 clip_norm=1.0, epsilon=3.0, delta=1e-5)
    for batch in private:
        private.step(batch)

Torch loads when a name of this package is first used.
"""

from typing import TYPE_CHECKING

from tacit._lazy import lazy

if TYPE_CHECKING:
    from tacit.training.adam import AdamBC
    from tacit.training.adaptive import AdaptiveClip
    from tacit.training.clip import Automatic, Flat, PerGroup, PerLayer
    from tacit.training.clipping import clipped_sum
    from tacit.training.compatible import fix
    from tacit.training.ema import EMA
    from tacit.training.make import make_private
    from tacit.training.noise import Key
    from tacit.training.plan import count_steps
    from tacit.training.private import Private
    from tacit.training.schedules import Exponential, Linear, Stairs
    from tacit.training.sums import ClippedSum

_HOMES = {
    "AdamBC": "adam",
    "AdaptiveClip": "adaptive",
    "Automatic": "clip",
    "ClippedSum": "sums",
    "EMA": "ema",
    "Exponential": "schedules",
    "Flat": "clip",
    "Key": "noise",
    "Linear": "schedules",
    "PerGroup": "clip",
    "PerLayer": "clip",
    "Private": "private",
    "Stairs": "schedules",
    "clipped_sum": "clipping",
    "count_steps": "plan",
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
    "Key",
    "Linear",
    "PerGroup",
    "PerLayer",
    "Private",
    "Stairs",
    "clipped_sum",
    "count_steps",
    "fix",
    "make_private",
]

__getattr__ = lazy(__name__, _HOMES)
