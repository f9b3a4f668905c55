"""Clip norms and noise that change with the step, in a way fixed before the first one.

A schedule maps (step, steps) to a positive factor on the clip norm or on the noise multiplier. It
is evaluated for every step when the run is made, so it can depend on nothing private and the whole
plan is priced before anything is spent. A clip schedule costs nothing: noise follows the clip norm,
so the multiplier stays. A noise schedule is priced step by step; steps of equal noise are priced
together, which is why the schedules here move in a few levels rather than at every step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tacit._check import positive, whole
from tacit.training.clip import Automatic, Clip, Flat, PerGroup, PerLayer

Schedule = Callable[[int, int], float]


@dataclass(frozen=True)
class Stairs:
    """`values[i]` over the i-th of equal parts of the run.

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
class Linear:
    """From `start` to `end` in `levels` equal stairs."""

    start: float
    end: float
    levels: int = 8

    def __post_init__(self) -> None:
        positive(start=self.start)
        positive(end=self.end)
        whole(levels=self.levels, least=2)

    def __call__(self, step: int, steps: int) -> float:
        return self.start + (self.end - self.start) * _stair(step, steps, self.levels)


@dataclass(frozen=True)
class Exponential:
    """From `start` to `end` in `levels` stairs of equal ratio (dynamic noise as in Du et al. 2021).

    >>> [round(Exponential(1.0, 0.25, levels=3)(step, 3), 3) for step in range(3)]
    [1.0, 0.5, 0.25]
    """

    start: float
    end: float
    levels: int = 8

    def __post_init__(self) -> None:
        positive(start=self.start)
        positive(end=self.end)
        whole(levels=self.levels, least=2)

    def __call__(self, step: int, steps: int) -> float:
        ratio = math.log(self.end / self.start)
        return self.start * math.exp(ratio * _stair(step, steps, self.levels))


def factors(schedule: Schedule | None, steps: int, *, name: str) -> tuple[float, ...]:
    """The schedule's factor for every step, checked; all 1 without a schedule."""
    if schedule is None:
        return (1.0,) * steps
    if not callable(schedule):
        raise TypeError(
            f"{name} must be a function of (step, steps), got {type(schedule).__name__}."
        )
    found = tuple(schedule(step, steps) for step in range(steps))
    for factor in set(found):
        positive(**{name: factor}, advice="A schedule gives positive factors.")
    return found


def scaled(clip: Clip, factors: Sequence[float]) -> Clip:
    """The clip rule with the norm of each group multiplied by its factor.

    >>> scaled(Flat(2.0), [0.5])
    Flat(clip_norm=1.0)
    """
    if all(factor == 1 for factor in factors):
        return clip
    if isinstance(clip, Flat | Automatic):
        return replace(clip, clip_norm=clip.clip_norm * factors[0])
    if isinstance(clip, PerGroup | PerLayer):
        pairs = zip(clip.clip_norms, factors, strict=True)
        return replace(clip, clip_norms=tuple(norm * factor for norm, factor in pairs))
    raise TypeError(f"a {type(clip).__name__} clip rule cannot follow a schedule.")


def _stair(step: int, steps: int, levels: int) -> float:
    """0 on the first of `levels` stairs, 1 on the last."""
    return (step * levels // steps) / (levels - 1)
