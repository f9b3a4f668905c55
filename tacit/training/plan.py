"""The plan of a run: what it will release, fixed and priced before its first step."""

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
from tacit.training.checkpoint_file import Checkpoint
from tacit.training.clip import Clip, rule_of, scaled
from tacit.training.key import Key
from tacit.training.noisy_loss import NoisyLoss, correlation_of
from tacit.training.options import Noise
from tacit.training.schedules import ScheduledClip, factors

StepSampler = sampling.Poisson | sampling.TruncatedPoisson | sampling.FixedSize
EpochSampler = sampling.RandomAllocation | sampling.Shuffle
RunSampler = sampling.CyclicPoisson | sampling.FixedOrder | sampling.Stream
Sampler = StepSampler | EpochSampler | RunSampler
_LOTS = (
    "A sampler of tacit.sampling is possible too. Other orders and weights are refused: their "
    "price is not known to be sound."
)
_SMALL_LOT = 2**14  # records: drawing larger lots takes as long in a row as one by one
_AHEAD = 16  # lots drawn in a row


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
                    "noise must have no schedule with a sampler that is priced by the epoch."
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
    clip_norm: float | Clip | AdaptiveClip | ScheduledClip,
    *,
    batch_size: int | Sampler,
    n_records: int,
    epochs: float | None,
    steps: int | None,
    epsilon: float | None,
    delta: float | None,
    noise_multiplier: float | None,
    also: Event | Sequence[Event],
    relation: Relation,
    noise: Noise | None = None,
    records_per_user: int = 1,
    noisy_loss: NoisyLoss | None = None,
    checkpoint: Checkpoint | None = None,
) -> TrainingPlan:
    """Plan a run from the arguments of `make_private`, which explains them."""
    noise = noise or Noise()
    WeakGuarantee.issue(epsilon=epsilon, delta=delta, n_records=n_records)
    expected = expected_lot(batch_size, n_records)
    count = count_steps(epochs=epochs, steps=steps, batch_size=expected, n_records=n_records)
    lots = batch_size if isinstance(batch_size, Sampler) else int(expected)
    sampler, column, banded = lots, (1.0,), noise.correlated
    if banded is not None or isinstance(lots, RunSampler):
        _refuse_changes(clip_norm, noise)
    if banded is not None:
        budget = {"epsilon": epsilon, "delta": delta, "relation": relation}
        setting = {"batch_size": lots, "n_records": n_records, "steps": count}
        sampler, column = banded.chosen(**setting, **budget, also=_other_events(also))
    sampler = checked_sampler(sampler, n_records=n_records, steps=count)
    schedule = clip_norm.schedule if isinstance(clip_norm, ScheduledClip) else None
    plan = TrainingPlan(
        sampler=sampler,
        steps=count,
        expected_batch=expected_lot(sampler, n_records),
        n_records=n_records,
        clip=rule_of(clip_norm),
        noise_multipliers=(),
        clip_factors=factors(schedule, count),
        adaptive=clip_norm if isinstance(clip_norm, AdaptiveClip) else None,
        also=_other_events(also),
        column=column,
        restart=None if banded is None or len(column) == 1 else banded.restart,
        delta=delta,
        reserve=0
        if checkpoint is None
        else restart_reserve(count, _piece(sampler, count), every=checkpoint.every),
        records_per_user=records_per_user,
        noisy_loss=noisy_loss,
    )
    multipliers = choose_noise(
        plan,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise_multiplier,
        noise_factors=factors(noise.schedule, count),
        relation=relation,
    )
    return replace(plan, noise_multipliers=multipliers)


def _refuse_changes(clip_norm: object, noise: Noise) -> None:
    """Raise `ValueError` for options that change the clip norm or the noise during a run."""
    if isinstance(clip_norm, AdaptiveClip | ScheduledClip) or noise.schedule is not None:
        name = "clip_norm" if noise.schedule is None else "noise.schedule"
        raise ValueError(
            f"{name} must not change from step to step with correlated noise or turns of records: "
            "their price is proved for one clip norm and one noise multiplier. Give a number or a "
            "clip rule, and no schedule."
        )


def _piece(sampler: Sampler, steps: int) -> int:
    """Return `TrainingPlan.piece` of a run of `steps` steps."""
    if isinstance(sampler, EpochSampler):
        return sampler.steps
    if isinstance(sampler, sampling.CyclicPoisson):
        return sampler.groups
    return steps if isinstance(sampler, RunSampler) else 1


def count_steps(
    *, epochs: float | None, steps: int | None, batch_size: float, n_records: int
) -> int:
    """Return `steps`, or the steps of `epochs` passes over the records, rounded up.

    It is computed in whole numbers, never from 1 / rate: int(1 / (1 / n)) is not n for many n.

    >>> count_steps(epochs=100, steps=None, batch_size=1, n_records=75)
    7500
    """
    if (epochs is None) == (steps is None):
        raise ValueError("give epochs or steps, one of them.")
    if steps is not None:
        return whole(steps=steps, least=1)
    exact = _simple(positive(epochs=epochs)) * n_records / _simple(batch_size)
    return -(-exact.numerator // exact.denominator)


def _simple(value: float) -> Fraction:
    """Return the nearest simple fraction: the float 0.1 is a little more than a tenth."""
    return Fraction(value).limit_denominator(10**6)


def expected_lot(lots: int | Sampler, n_records: int) -> float:
    """Return the expected size of a lot, which divides the sum of every step. Public.

    `lots` is that size, or the sampler that draws lots among `n_records` records.

    >>> expected_lot(sampling.Poisson(0.1), 30), expected_lot(sampling.RandomAllocation(4), 30)
    (3.0, 7.5)
    """
    whole(n_records=n_records, least=1)
    if not isinstance(lots, Sampler):
        found = float(whole(batch_size=lots, least=1, advice=_LOTS))
    elif isinstance(lots, sampling.FixedSize):
        found = float(lots.batch_size)
    elif isinstance(lots, sampling.Stream):
        found = lots.expected_batch
    elif isinstance(lots, sampling.CyclicPoisson):
        found = lots.rate * n_records / lots.groups
    elif isinstance(lots, sampling.Poisson | sampling.TruncatedPoisson):
        found = lots.rate * n_records
    else:
        found = n_records / lots.steps
    if not 0 < found <= n_records:
        raise ValueError(
            f"batch_size must be <= n_records and above 0, got an expected lot of {found:g} among "
            f"{n_records} records."
        )
    return float(_simple(found)) or found


def checked_sampler(lots: int | Sampler, *, n_records: int, steps: int) -> Sampler:
    """Return the sampler, Poisson for a number; raise if it does not fit the run."""
    if not isinstance(lots, Sampler):
        # The rate is a declared constant: n_records is the assumed public size.
        return sampling.Poisson(lots / n_records)
    declared = getattr(lots, "n_records", n_records)
    if isinstance(lots, StepSampler) and declared != n_records:
        raise ValueError(
            f"batch_size is a sampler of {declared} records, but n_records is {n_records}. Give "
            "the sampler the n_records of the run."
        )
    if isinstance(lots, EpochSampler) and steps % lots.steps:
        raise ValueError(
            f"steps must be whole epochs of {lots.steps} for this sampler, got {steps}."
        )
    if isinstance(lots, sampling.Stream) and steps > len(lots.order):
        raise ValueError(f"order must have a lot for each of {steps} steps.")
    return lots


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


def _other_events(also: Event | Sequence[Event]) -> tuple[Event, ...]:
    """Return the events of `make_private`'s option `also` as a tuple; check their type."""
    events = (also,) if isinstance(also, Event) else tuple(also)
    for event in events:
        if not isinstance(event, Event):
            raise TypeError(f"also must hold events of tacit.events, got {type(event).__name__}.")
    return events
