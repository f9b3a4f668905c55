"""Schedules: public factors by step on the clip norm or on the noise multiplier.

A schedule maps (step, steps) to a positive factor. It is evaluated for every step when the plan is
made, so it can depend on nothing private and the whole plan is priced before anything is spent. A
clip schedule costs nothing: noise follows the clip norm, so the multiplier stays. A noise schedule
is priced step by step; steps of equal noise are priced together, which is why the schedules here
change in a few levels rather than at every step.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from tacit._check import positive, whole
from tacit.training.clip import Clip

Schedule = Callable[[int, int], float]


@dataclass(frozen=True)
class Stairs:
    """A schedule that splits the run into equal parts; `values[i]` is the factor in part i.

    >>> [Stairs((1.0, 0.5))(step, 4) for step in range(4)]
    [1.0, 1.0, 0.5, 0.5]
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values must hold at least one factor.")
        object.__setattr__(self, "values", tuple(positive(values=value) for value in self.values))

    def __call__(self, step: int, steps: int) -> float:
        return self.values[step * len(self.values) // steps]


@dataclass(frozen=True)
class Ramp:
    """A schedule from `start` to `end` in `levels` constant parts of equal length.

    The parts differ by equal amounts, or by equal ratios if it `is_geometric` (Du et al. 2021).

    >>> [Ramp(1.0, 0.5, levels=3)(step, 3) for step in range(3)]
    [1.0, 0.75, 0.5]
    >>> [round(Ramp(1.0, 0.25, levels=3, is_geometric=True)(step, 3), 3) for step in range(3)]
    [1.0, 0.5, 0.25]
    """

    start: float
    end: float
    _: KW_ONLY
    levels: int = 8
    is_geometric: bool = False

    def __post_init__(self) -> None:
        positive(start=self.start)
        positive(end=self.end)
        whole(levels=self.levels, least=2)

    def __call__(self, step: int, steps: int) -> float:
        share = (step * self.levels // steps) / (self.levels - 1)  # from 0 to 1
        if self.is_geometric:
            return self.start * math.exp(math.log(self.end / self.start) * share)
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True)
class ScheduledClip:
    """Clip norms that follow a schedule: `make_private(..., clip_norm=ScheduledClip(...))`.

    Parameters
    ----------
    start
        A number or a clip rule, whose clip norms are multiplied by the factor of each step.
    schedule
        `Stairs`, `Ramp`, or a function of (step, steps).

    >>> ScheduledClip(2.0, Stairs((1.0, 0.5)))
    ScheduledClip(start=2.0, schedule=Stairs(values=(1.0, 0.5)))
    """

    start: float | Clip
    schedule: Schedule


def factors(schedule: Schedule | None, steps: int) -> tuple[float, ...]:
    """Return the factor of every step, checked to be valid; all 1 without a schedule."""
    if schedule is None:
        return (1.0,) * steps
    if not callable(schedule):
        raise TypeError(
            "schedule must be Stairs, Ramp or a function of (step, steps), got "
            f"{type(schedule).__name__}."
        )
    found = tuple(schedule(step, steps) for step in range(steps))
    for factor in set(found):
        positive(schedule=factor, advice="A schedule gives positive factors.")
    return found
