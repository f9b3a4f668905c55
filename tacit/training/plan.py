"""The plan of a run: what it will release, fixed and priced before its first step.

A schedule maps (step, steps) to a positive factor on the clip norm or on the noise multiplier. It
is evaluated for every step when the plan is made, so it can depend on nothing private and the whole
plan is priced before anything is spent. A clip schedule costs nothing: noise follows the clip norm,
so the multiplier stays. A noise schedule is priced step by step; steps of equal noise are priced
together, which is why the schedules here change in a few levels rather than at every step.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit import sampling
from tacit._check import positive, whole
from tacit.accounting import calibrate, for_group
from tacit.errors import UnsupportedEvent, WeakGuarantee
from tacit.events import Event, Gaussian, NonPrivate, Relation, Repeated
from tacit.events import Sequence as EventSequence
from tacit.ledger import restart_reserve
from tacit.training.adaptive_clipping import AdaptiveClip
from tacit.training.banded_noise import Banded, refuse_changes
from tacit.training.checkpoint_file import Checkpoint
from tacit.training.clip import Clip, scaled
from tacit.training.key import Key
from tacit.training.noisy_loss import NoisyLoss, correlation_of

StepSampler = sampling.Poisson | sampling.TruncatedPoisson | sampling.FixedSize
EpochSampler = sampling.RandomAllocation | sampling.Shuffle
RunSampler = sampling.CyclicPoisson | sampling.FixedOrder | sampling.Stream
Sampler = StepSampler | EpochSampler | RunSampler
Schedule = Callable[[int, int], float]
_SMALL_LOT = 2**14  # records: drawing larger lots takes as long in a row as one by one
_AHEAD = 16  # lots drawn in a row


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
class _Ramp:
    """Base of the schedules from `start` to `end` in `levels` constant parts of equal length."""

    start: float
    end: float
    levels: int = 8

    def __post_init__(self) -> None:
        positive(start=self.start)
        positive(end=self.end)
        whole(levels=self.levels, least=2)

    def _share(self, step: int, steps: int) -> float:
        """Return the position of a step's part in the run, from 0 (first part) to 1 (last)."""
        return (step * self.levels // steps) / (self.levels - 1)


@dataclass(frozen=True)
class Linear(_Ramp):
    """A schedule from `start` to `end` in `levels` parts, with equal differences between them."""

    def __call__(self, step: int, steps: int) -> float:
        return self.start + (self.end - self.start) * self._share(step, steps)


@dataclass(frozen=True)
class Geometric(_Ramp):
    """A schedule from `start` to `end` in `levels` parts of equal ratio (Du et al. 2021).

    >>> [round(Geometric(1.0, 0.25, levels=3)(step, 3), 3) for step in range(3)]
    [1.0, 0.5, 0.25]
    """

    def __call__(self, step: int, steps: int) -> float:
        ratio = math.log(self.end / self.start)
        return self.start * math.exp(ratio * self._share(step, steps))


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Everything that decides the guarantee of a run. Options that change its speed are elsewhere.

    Attributes
    ----------
    expected_batch
        Declared size of a lot, which divides the sum of every step.
    noise_multipliers, clip_factors
        The noise multiplier and the factor on the clip norm, one entry for each step.
    also
        Events of other releases of the same run, which are priced together with the training steps.
    column
        The strategy by which noise is correlated over time (`banded_noise`); one entry for
        independent noise.
    restart
        Correlated noise is started anew after every so many steps.
    records_per_user
        Most examples of one unit of privacy, each of which is clipped by itself (`users`).
    noisy_loss
        How the training loss is released with each step, if it is. It changes no event: gradient
        and loss together are one Gaussian release (`noisy_loss`).
    reserve
        Steps that are paid beyond those of the run, for steps that a crash loses (`checkpoint`).
    delta
        At which prices are stated, if it was given.
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
    column: tuple[float, ...] = (1.0,)
    restart: int | None = None
    records_per_user: int = 1
    noisy_loss: NoisyLoss | None = None
    reserve: int = 0
    delta: float | None = None

    @cached_property
    def event(self) -> Event:
        """The event of the whole run: the releases in `also`, then the training steps."""
        return self.together(self.training_event)

    @cached_property
    def training_event(self) -> Event:
        """The event of the training steps and their reserve; `also` is paid elsewhere."""
        return self.event_until(self.steps)

    def event_until(self, step: int) -> Event:
        """Return the event of the first steps of the plan, with the reserve."""
        first = self.noise_multipliers[:step]
        return self.event_of((*first, *self._lowest(self.reserve))) if step else EventSequence(())

    def lost_event(self, steps: int) -> Event:
        """Return the event that pays for so many lost steps, whichever they are."""
        return self.event_of(self._lowest(steps))

    def _lowest(self, steps: int) -> tuple[float, ...]:
        """Return the least noise multiplier, the dearest, for each of `steps`."""
        return (min(self.noise_multipliers),) * steps

    @cached_property
    def kept_every(self) -> int:
        """Steps between two checkpoints."""
        return self.reserve or restart_reserve(self.steps)

    @cached_property
    def piece(self) -> int:
        """Steps of the smallest part of the run that has a price of its own."""
        return _piece(self.sampler, self.steps)

    def begin_of(self, step: int) -> int:
        """Return the step with which a process that begins at `step` begins to pay.

        It draws its own epoch, if the sampler draws epochs, and pays for all of it.
        """
        return step - step % self.piece if isinstance(self.sampler, EpochSampler) else step

    def together(self, training: Event) -> Event:
        """Return one event of the run's other releases (`also`) followed by `training`."""
        return EventSequence((*self.also, training)) if self.also else training

    def event_of(self, noise_multipliers: Sequence[float]) -> Event:
        """Return the event of one step for each of `noise_multipliers`, equal steps combined."""
        if any(multiplier == 0 for multiplier in noise_multipliers):
            return NonPrivate()
        counts = Counter(noise_multipliers)
        if isinstance(self.sampler, RunSampler):
            if self.records_per_user > 1:
                raise ValueError(
                    "correlated noise and turns of records are priced for one record of each user. "
                    "Let lots be samples of users, or use Poisson sampling and independent noise."
                )
            return self.sampler.event(noise_multipliers[0], len(noise_multipliers), self.column)
        if isinstance(self.sampler, EpochSampler):
            if len(counts) > 1:
                raise ValueError(
                    "noise_schedule must be constant with a sampler that is priced by the epoch."
                )
            epochs = -(-len(noise_multipliers) // self.sampler.steps)
            return Repeated(self.step_event(noise_multipliers[0]), epochs)
        parts = [Repeated(self.step_event(m), count) for m, count in counts.items()]
        return parts[0] if len(parts) == 1 else EventSequence(tuple(parts))

    def step_event(self, noise_multiplier: float) -> Event:
        """Return the event of one step; of one epoch for a sampler that draws an epoch at once."""
        assert not isinstance(self.sampler, RunSampler)  # the run as a whole has an event
        release = Gaussian(noise_multiplier)
        if self.adaptive is not None:  # its counts are released too, from the same sample
            counts = self.adaptive.event(self.expected_batch, len(self.clip.clip_norms))
            release = EventSequence((release, counts))
        if self.records_per_user > 1 and isinstance(self.sampler, sampling.RandomAllocation):
            raise UnsupportedEvent(
                "random allocation of records has no price for users with several of them. Use "
                "Users(sampled='users'), or another sampler."
            )
        sampled = self.sampler.amplify(release)
        # A user's records move gradient and counts together, as often as they are in the lot.
        return sampled if self.records_per_user == 1 else for_group(sampled, self.records_per_user)

    def order(self) -> bytes:
        """Return a hash of the order of records that the sampler was given, if any. Private."""
        sampler = self.sampler
        has_order = isinstance(sampler, sampling.FixedOrder | sampling.Stream)
        return sampler.digest() if has_order else b""

    def drawer(self, key: Key, n: int) -> Callable[[int], NDArray[np.int64]]:
        """Return a function that maps a step to its lot's indices among `n` records. Private."""
        sampler = self.sampler
        # Who may take part in which step is decided once, by the key alone.
        of_run = sampler.lots(n, key.numpy("turns", 0)) if isinstance(sampler, RunSampler) else None

        @lru_cache(maxsize=1)  # a rank needs the draw for its share and for the size of the lot
        def draw(number: int) -> Any:  # Any: one lot, or all lots of an epoch
            rng = key.numpy("lot", number)
            if isinstance(sampler, RunSampler):
                assert of_run is not None
                return of_run(number, rng)
            return sampler.indices(n, rng)

        if isinstance(sampler, EpochSampler):
            return lambda step: draw(step // sampler.steps)[step % sampler.steps]
        if isinstance(sampler, RunSampler) or self.expected_batch > _SMALL_LOT:
            return draw
        return _drawn_ahead(lambda step: sampler.indices(n, key.numpy("lot", step)), self.steps)

    @cached_property
    def gradient_factor(self) -> float:
        """Factor on the noise of the gradient, above 1 if the loss is released with it."""
        return 1.0 if self.noisy_loss is None else self.noisy_loss.gradient_factor

    @cached_property
    def loss_correlation(self) -> float:
        """Factor on the noise of the loss if that of gradients is correlated over time."""
        independent = replace(self, column=(1.0,))
        return correlation_of(self.training_event, independent.training_event)

    @property
    def steps_per_epoch(self) -> Fraction:
        """Number of steps of one expected pass over the records, exactly."""
        if isinstance(self.sampler, EpochSampler | sampling.FixedOrder):
            return Fraction(self.sampler.steps)
        return self.n_records / Fraction(self.expected_batch)

    def noise_at(self, step: int) -> float:
        """Return the noise multiplier of `step`, or of the last step if the run has finished."""
        return self.noise_multipliers[min(step, self.steps - 1)]

    def clip_at(self, step: int, moves: Sequence[float]) -> Clip:
        """Return the clip rule of `step`; `moves` are adaptive clipping's factors. Public."""
        scheduled = self.clip_factors[min(step, self.steps - 1)]
        return scaled(self.clip, [scheduled * move for move in moves])


def _drawn_ahead(
    draw: Callable[[int], NDArray[np.int64]], steps: int
) -> Callable[[int], NDArray[np.int64]]:
    """Return `draw`, which draws several steps in a row once they are asked for in order.

    A lot is a function of the key and of its step. Drawn one after the other they take less than
    half the time of draws with the rest of a step in between, which a small step on a GPU notices.
    """
    ready: dict[int, NDArray[np.int64]] = {}
    last = -1

    def lot(step: int) -> NDArray[np.int64]:
        nonlocal last
        if step not in ready:
            ahead = _AHEAD if step == last + 1 else 1
            ready.clear()
            for number in range(step, max(step + 1, min(step + ahead, steps))):
                ready[number] = draw(number)
        last = step
        return ready[step]

    return lot


def make_plan(
    clip: Clip,
    *,
    batch_size: int,
    n_records: int,
    epochs: float | None,
    steps: int | None,
    epsilon: float | None,
    delta: float | None,
    noise_multiplier: float | None,
    clip_schedule: Schedule | None,
    noise_schedule: Schedule | None,
    adaptive: AdaptiveClip | None,
    sampler: Sampler | None,
    also: Event | Sequence[Event],
    relation: Relation,
    noise: Banded | None = None,
    records_per_user: int = 1,
    noisy_loss: NoisyLoss | None = None,
    checkpoint: Checkpoint | None = None,
) -> TrainingPlan:
    """Plan a run from the arguments of `make_private`, which explains them."""
    whole(batch_size=batch_size, least=1)
    whole(n_records=n_records, least=1)
    if batch_size > n_records:
        raise ValueError(
            f"batch_size must be <= n_records, got {batch_size} and {n_records}: "
            "a lot cannot be expected to hold more records than there are."
        )
    WeakGuarantee.issue(epsilon=epsilon, delta=delta, n_records=n_records)
    count = count_steps(epochs=epochs, steps=steps, batch_size=batch_size, n_records=n_records)
    column = (1.0,)
    if noise is not None or isinstance(sampler, RunSampler):
        refuse_changes(
            clip_schedule=clip_schedule, noise_schedule=noise_schedule, adaptive=adaptive
        )
    if noise is not None:
        budget = {"epsilon": epsilon, "delta": delta, "relation": relation}
        setting = {"batch_size": batch_size, "n_records": n_records, "steps": count}
        found = noise.chosen(**setting, **budget, sampler=sampler, also=_other_events(also))
        sampler, column = found.sampler, found.column
    sampler, expected = choose_sampler(
        sampler, batch_size=batch_size, n_records=n_records, steps=count
    )
    plan = TrainingPlan(
        sampler=sampler,
        steps=count,
        expected_batch=expected,
        n_records=n_records,
        clip=clip,
        noise_multipliers=(),
        clip_factors=factors(clip_schedule, count, name="clip_schedule"),
        adaptive=adaptive,
        also=_other_events(also),
        column=column,
        restart=None if noise is None or len(column) == 1 else noise.restart,
        delta=delta,
        reserve=0
        if checkpoint is None
        else restart_reserve(count, _piece(sampler, count), every=checkpoint.every),
        records_per_user=records_per_user,
        noisy_loss=_checked_loss(noisy_loss),
    )
    multipliers = choose_noise(
        plan,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise_multiplier,
        noise_factors=factors(noise_schedule, count, name="noise_schedule"),
        relation=relation,
    )
    return replace(plan, noise_multipliers=multipliers)


def _piece(sampler: Sampler, steps: int) -> int:
    """Return `TrainingPlan.piece` of a run of `steps` steps."""
    if isinstance(sampler, EpochSampler):
        return sampler.steps
    if isinstance(sampler, sampling.CyclicPoisson):
        return sampler.groups
    return steps if isinstance(sampler, RunSampler) else 1


def _checked_loss(loss: object) -> NoisyLoss | None:
    if loss is None or isinstance(loss, NoisyLoss):
        return loss
    raise TypeError(
        "noisy_loss must be tacit.training.NoisyLoss(upper=...) or None, got "
        f"{type(loss).__name__}."
    )


def count_steps(*, epochs: float | None, steps: int | None, batch_size: int, n_records: int) -> int:
    """Return `steps`, or the steps of `epochs` passes over the records, rounded up.

    It is computed in whole numbers, never from 1 / rate: int(1 / (1 / n)) is not n for many n.

    >>> count_steps(epochs=100, steps=None, batch_size=1, n_records=75)
    7500
    """
    if (epochs is None) == (steps is None):
        raise ValueError("give epochs or steps, one of them.")
    if steps is not None:
        return whole(steps=steps, least=1)
    # The nearest simple fraction: the float 0.1 is a little more than a tenth.
    passes = Fraction(positive(epochs=epochs)).limit_denominator(10**6)
    exact = passes * n_records / batch_size
    return -(-exact.numerator // exact.denominator)


def choose_sampler(
    sampler: object, *, batch_size: int, n_records: int, steps: int
) -> tuple[Sampler, float]:
    """Return the sampler, Poisson by default, and the expected lot size that it implies."""
    if sampler is None or sampler == "poisson":
        # The rate is a declared constant: n_records is the assumed public size.
        return sampling.Poisson(batch_size / n_records), float(batch_size)
    if isinstance(sampler, StepSampler):
        rate = batch_size / n_records
        declared = {"rate": rate, "n_records": n_records, "batch_size": batch_size}
        for name, value in declared.items():
            found = getattr(sampler, name, value)
            if found != value:
                raise ValueError(
                    f"sampler has {name} {found}, but the {name} of the run is {value}. Leave "
                    "sampler out, or give the matching batch_size and n_records."
                )
        return sampler, float(batch_size)
    if isinstance(sampler, EpochSampler):
        if steps % sampler.steps:
            raise ValueError(
                f"steps must be whole epochs of {sampler.steps} for this sampler, got {steps}."
            )
        return sampler, n_records / sampler.steps
    if isinstance(sampler, sampling.FixedOrder):
        return sampler, n_records / sampler.steps
    if isinstance(sampler, sampling.Stream) and steps > len(sampler.order):
        raise ValueError(f"order must have a lot for each of {steps} steps.")
    if isinstance(sampler, sampling.CyclicPoisson):
        rate = min(1.0, sampler.groups * batch_size / n_records)
        if sampler.rate != rate:
            raise ValueError(
                f"sampler has rate {sampler.rate}, but {sampler.groups} groups with the batch_size "
                f"and n_records of the run need {rate}. Give the matching ones, or noise=Banded()."
            )
        return sampler, min(float(batch_size), n_records / sampler.groups)
    if isinstance(sampler, RunSampler):
        return sampler, float(batch_size)
    raise ValueError(
        f"sampler must be None (Poisson) or a sampler of tacit.sampling, got {sampler!r:.80}. "
        "Shuffled and weighted orders are refused: their amplified price is not known to be sound."
    )


def choose_noise(
    plan: TrainingPlan,
    *,
    epsilon: float | None,
    delta: float | None,
    noise_multiplier: float | None,
    noise_factors: Sequence[float],
    relation: Relation,
) -> tuple[float, ...]:
    """Return each step's noise multiplier: as given, or the least that costs at most epsilon."""
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
        noise = tuple(multiplier * factor for factor in noise_factors)
        return replace(plan, noise_multipliers=noise).event

    try:
        base = calibrate(family, epsilon=epsilon, delta=delta, relation=relation)
    except ValueError as refusal:
        if not plan.also:
            raise
        listed = "; ".join(str(event) for event in plan.also)
        raise ValueError(f"{refusal} The events in also alone are {listed}.") from None
    return tuple(base * factor for factor in noise_factors)


def factors(schedule: Schedule | None, steps: int, *, name: str) -> tuple[float, ...]:
    """Return the factor of every step, checked to be valid; all 1 without a schedule."""
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


def _other_events(also: Event | Sequence[Event]) -> tuple[Event, ...]:
    """Return the events of `make_private`'s option `also` as a tuple; check their type."""
    events = (also,) if isinstance(also, Event) else tuple(also)
    for event in events:
        if not isinstance(event, Event):
            raise TypeError(f"also must hold events of tacit.events, got {type(event).__name__}.")
    return events
