"""DP-SGD for any PyTorch model.

    private = tacit.make_private(model, optimizer, dataset, loss_fn, batch_size=256, epochs=20,
                                 clip_norm=1.0, epsilon=3.0, delta=1e-5)
    for batch in private:
        private.step(batch)

Torch is imported when a name of this package is first used.
"""

from typing import TYPE_CHECKING

from tacit._lazy import lazy

if TYPE_CHECKING:
    from tacit.training.adam import AdamBC
    from tacit.training.adaptive_clipping import AdaptiveClip
    from tacit.training.automatic_clipping import Automatic
    from tacit.training.banded_noise import Banded, price_bands
    from tacit.training.batch_norm import fix
    from tacit.training.callbacks import (
        MLflow,
        ReleasedStep,
        RichProgress,
        TensorBoard,
        WandB,
    )
    from tacit.training.checkpoint import load_replay, replay_state
    from tacit.training.checkpoint_file import Checkpoint
    from tacit.training.clip import Flat, PerGroup, PerLayer
    from tacit.training.distributed import Ranks
    from tacit.training.ema import EMA
    from tacit.training.examples import Views
    from tacit.training.key import Key
    from tacit.training.lot_sum import clipped_sum
    from tacit.training.make import make_private
    from tacit.training.noisy_loss import NoisyLoss
    from tacit.training.options import Noise, Reports, Speed
    from tacit.training.plan import count_steps
    from tacit.training.private import Private
    from tacit.training.program.pad_to import PadTo
    from tacit.training.schedules import Ramp, ScheduledClip, Stairs
    from tacit.training.users import Users, advise_sampling

_HOMES = {
    "AdamBC": "adam",
    "AdaptiveClip": "adaptive_clipping",
    "Automatic": "automatic_clipping",
    "Banded": "banded_noise",
    "Checkpoint": "checkpoint_file",
    "EMA": "ema",
    "Flat": "clip",
    "Key": "key",
    "MLflow": "callbacks",
    "Noise": "options",
    "NoisyLoss": "noisy_loss",
    "PadTo": "program.pad_to",
    "PerGroup": "clip",
    "PerLayer": "clip",
    "Private": "private",
    "Ramp": "schedules",
    "Ranks": "distributed",
    "ReleasedStep": "callbacks",
    "Reports": "options",
    "RichProgress": "callbacks",
    "ScheduledClip": "schedules",
    "Speed": "options",
    "Stairs": "schedules",
    "TensorBoard": "callbacks",
    "Users": "users",
    "Views": "examples",
    "WandB": "callbacks",
    "advise_sampling": "users",
    "clipped_sum": "lot_sum",
    "count_steps": "plan",
    "fix": "batch_norm",
    "load_replay": "checkpoint",
    "make_private": "make",
    "price_bands": "banded_noise",
    "replay_state": "checkpoint",
}

__all__ = [
    "EMA",
    "AdamBC",
    "AdaptiveClip",
    "Automatic",
    "Banded",
    "Checkpoint",
    "Flat",
    "Key",
    "MLflow",
    "Noise",
    "NoisyLoss",
    "PadTo",
    "PerGroup",
    "PerLayer",
    "Private",
    "Ramp",
    "Ranks",
    "ReleasedStep",
    "Reports",
    "RichProgress",
    "ScheduledClip",
    "Speed",
    "Stairs",
    "TensorBoard",
    "Users",
    "Views",
    "WandB",
    "advise_sampling",
    "clipped_sum",
    "count_steps",
    "fix",
    "load_replay",
    "make_private",
    "price_bands",
    "replay_state",
]

__getattr__ = lazy(__name__, _HOMES)
