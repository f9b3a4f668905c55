"""Automatic clipping (AUTO-S): every gradient is normalized, so no clip norm needs tuning."""

from dataclasses import dataclass

from torch import Tensor

from tacit._check import positive
from tacit.training.clipping.clip import FLOAT32_ROUNDING, TINY, OneBound


@dataclass(frozen=True)
class Automatic(OneBound):
    """A clip rule that multiplies each gradient by C / (norm + stability), C the clip norm.

    AUTO-S of Bu et al. 2023 (arXiv:2206.07136, section 4.2). Every example contributes a vector
    shorter than C, so the sensitivity is C, as with `Flat`. Only C times the learning rate affects
    training, so C needs no tuning.
    """

    clip_norm: float = 1.0
    stability: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(stability=self.stability, advice="Zero would divide by a zero norm.")

    def factors(self, squared_norms: Tensor, *, rounding: float = FLOAT32_ROUNDING) -> Tensor:
        norms = (squared_norms.clamp_min(0) + TINY).sqrt() * (1 + rounding)
        return (self.clip_norm / (norms + self.stability)).nan_to_num(nan=0.0)
