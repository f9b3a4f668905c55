"""What a run will release, fixed and priced before its first step."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit import sampling
from tacit._check import positive, whole
from tacit.accounting import calibrate
from tacit.events import Event, Gaussian, NonPrivate, Relation, Repeated
from tacit.events import Sequence as EventSequence
from tacit.training.adaptive import AdaptiveClip
from tacit.training.clip import Clip
from tacit.training.noise import Key

StepSampler = sampling.Poisson | sampling.TruncatedPoisson | sampling.FixedSize
EpochSampler = sampling.RandomAllocation | sampling.Shuffle
Sampler = StepSampler | EpochSampler


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides the guarantee; speed is decided elsewhere.

    `noise_multipliers` and `clip_factors` have one entry a step. `expected_batch` is declared, and
    the divisor of every step.
    """

    sampler: Sampler
    steps: int
    expected_batch: float
    n_records: int
    clip: Clip
    noise_multipliers: tuple[float, ...]
    clip_factors: tuple[float, ...]
    adaptive: AdaptiveClip | None = None
    also: tuple[Event, ...] = ()

    @property
    def event(self) -> Event:
        """Everything that is priced together: `also`, then the training steps."""
        return self.together(self.training_event)

    @property
    def training_event(self) -> Event:
        """The training steps alone, which the run pays for itself."""
        return self.event_of(self.noise_multipliers)

    def together(self, training: Event) -> Event:
        """Return `also` and then `training` as one event."""
        return EventSequence((*self.also, training)) if self.also else training

    def event_of(self, noise_multipliers: Sequence[float]) -> Event:
        """The event of steps with these multipliers; steps of equal noise are counted together."""
        if any(multiplier == 0 for multiplier in noise_multipliers):
            return NonPrivate()
        if isinstance(self.sampler, EpochSampler):
            return self._event_of_epochs(self.sampler, noise_multipliers)
        counts = Counter(noise_multipliers)
        parts = [Repeated(self.step_event(m), count) for m, count in counts.items()]
        return parts[0] if len(parts) == 1 else EventSequence(tuple(parts))

    def step_event(self, noise_multiplier: float) -> Event:
        """What one step (one epoch, for samplers by the epoch) does to the private data."""
        return self.sampler.amplify(self._release(noise_multiplier))

    def drawer(self, key: Key, n: int) -> Callable[[int], NDArray[np.int64]]:
        """A function from the step to the indices of its lot among `n` records. Private."""
        sampler = self.sampler
        if isinstance(sampler, EpochSampler):

            @lru_cache(maxsize=1)
            def epoch(number: int) -> list[NDArray[np.int64]]:
                return sampler.indices(n, key.numpy("lot", number))

            return lambda step: epoch(step // sampler.steps)[step % sampler.steps]
        # One draw tells who is in the lot and, among several ranks, how large it is.
        return lru_cache(maxsize=1)(lambda step: sampler.indices(n, key.numpy("lot", step)))

    def fingerprint(self) -> dict[str, Any]:  # Any: JSON values
        """Public description; a checkpoint may only be loaded into a run that has the same."""
        return {
            "event": self.training_event.to_dict(),
            "expected_batch": self.expected_batch,
            "n_records": self.n_records,
            "clip": repr(self.clip),
            "clip_factors": list(self.clip_factors) if len(set(self.clip_factors)) > 1 else [],
            "noise_multipliers": _runs(self.noise_multipliers),
            "adaptive": repr(self.adaptive),
        }

    def _release(self, noise_multiplier: float) -> Event:
        """The gradient, and the adaptive counts, on one sample."""
        gradient = Gaussian(noise_multiplier)
        if self.adaptive is None:
            return gradient
        counts = self.adaptive.event(self.expected_batch, len(self.clip.clip_norms))
        return EventSequence((gradient, counts))

    def _event_of_epochs(self, sampler: EpochSampler, noise_multipliers: Sequence[float]) -> Event:
        if len(set(noise_multipliers)) > 1:
            raise ValueError(
                "noise_schedule must be constant with a sampler that is priced by the epoch."
            )
        epochs = -(-len(noise_multipliers) // sampler.steps)
        return Repeated(self.step_event(noise_multipliers[0]), epochs)


def count_steps(*, epochs: float | None, steps: int | None, batch_size: int, n_records: int) -> int:
    """The number of steps, in whole numbers: `epochs` passes, the last lot counted in full.

    Never from 1 / rate: int(1 / (1 / n)) is not n for many n.

    >>> count_steps(epochs=100, steps=None, batch_size=1, n_records=75)
    7500
    """
    if (epochs is None) == (steps is None):
        raise ValueError("give epochs or steps, one of them.")
    if steps is not None:
        return whole(steps=steps, least=1)
    # The fraction that was meant: as a float, a tenth is a little more than a tenth.
    passes = Fraction(positive(epochs=epochs)).limit_denominator(10**6)
    exact = passes * n_records / batch_size
    return -(-exact.numerator // exact.denominator)


def choose_sampler(
    sampler: object, *, batch_size: int, n_records: int, steps: int
) -> tuple[Sampler, float]:
    """The sampler and the expected batch it implies."""
    if sampler is None or sampler == "poisson":
        # The rate is a declared constant: n_records is the assumed public size.
        return sampling.Poisson(batch_size / n_records), float(batch_size)
    if isinstance(sampler, StepSampler):
        rate = getattr(sampler, "rate", None)
        if rate not in (None, batch_size / n_records):
            raise ValueError(
                f"sampler has rate {rate}, but batch_size / n_records is "
                f"{batch_size / n_records}. Leave sampler out, or give the matching batch_size."
            )
        if getattr(sampler, "n_records", n_records) != n_records:
            raise ValueError("sampler must have the n_records of the run.")
        if getattr(sampler, "batch_size", batch_size) != batch_size:
            raise ValueError("sampler must have the batch_size of the run.")
        return sampler, float(batch_size)
    if isinstance(sampler, EpochSampler):
        if steps % sampler.steps:
            raise ValueError(
                f"steps must be whole epochs of {sampler.steps} for this sampler, got {steps}."
            )
        return sampler, n_records / sampler.steps
    raise ValueError(
        f"sampler must be None (Poisson) or a sampler of tacit.sampling, got {sampler!r:.80}. "
        "Shuffled and weighted orders are refused: their amplified price is not known to be sound."
    )


def other_events(also: Event | Sequence[Event]) -> tuple[Event, ...]:
    """Return the events of `also` as a tuple, after a check of their type."""
    events = (also,) if isinstance(also, Event) else tuple(also)
    for event in events:
        if not isinstance(event, Event):
            raise TypeError(f"also must hold events of tacit.events, got {type(event).__name__}.")
    return events


def choose_noise(
    plan: Plan,
    *,
    epsilon: float | None,
    delta: float | None,
    noise_multiplier: float | None,
    noise_factors: Sequence[float],
    relation: Relation,
) -> tuple[float, ...]:
    """Noise multiplier of every step: the one given, or the least that keeps within epsilon."""
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            "give epsilon (with delta) or noise_multiplier, one of them: the other follows from it."
        )
    if epsilon is None:
        if noise_multiplier != 0:
            positive(
                noise_multiplier=noise_multiplier,
                advice="0 is allowed too, as a debugging mode without any privacy.",
            )
        return tuple(noise_multiplier * factor for factor in noise_factors)  # type: ignore[operator]
    if delta is None:
        raise ValueError("delta must be given with epsilon. Choose it well below 1 / n_records.")

    def family(multiplier: float) -> Event:
        return plan.together(plan.event_of([multiplier * factor for factor in noise_factors]))

    try:
        base = calibrate(family, epsilon=epsilon, delta=delta, relation=relation)
    except ValueError as refusal:
        if not plan.also:
            raise
        listed = "; ".join(str(event) for event in plan.also)
        raise ValueError(f"{refusal} The events in also alone are {listed}.") from None
    return tuple(base * factor for factor in noise_factors)


def _runs(values: Sequence[float]) -> list[list[float]]:
    """Values with how often each comes in a row: short for stairs."""
    runs: list[list[float]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return runs
