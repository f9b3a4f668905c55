"""Samplers: `indices` draws batches, and `amplify` returns the event of a release on such a batch.

One object does both, so the code that loads data and the accountant cannot disagree.

| sampler | one draw | `amplify(event)` covers |
|---|---|---|
| `Poisson` | each record independently with probability `rate` | one step |
| `TruncatedPoisson` | the same, cut at random to `max_batch` if it is larger | one step |
| `FixedSize` | `batch_size` of `n_records`, without replacement | one step |
| `RandomAllocation` | each record independently to one of `steps` batches | one epoch |
| `Shuffle` | a random order cut into `steps` batches | one epoch, unamplified, or an error |

Three samplers decide for a whole run who may take part in which step: `lots` draws that once and
returns a function from steps to lots, and `event` returns the event of the run, whose noise may be
correlated over time.

| sampler | a record takes part |
|---|---|
| `CyclicPoisson` | with probability `rate` whenever its group has its turn |
| `FixedOrder` | once in every `steps` steps, always in the same place |
| `Stream` | when the user's order says so, if that is seldom enough |

Which records were drawn, and how many, is private: divide by the expected batch size, never by the
drawn one. `rng` is a numpy Generator, a seed, or None for fresh entropy from the system.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from tacit import events as ev
from tacit._arrays import Flags, Indices
from tacit._check import boolean, in_closed_unit, positive, whole
from tacit.errors import UnsupportedEvent

__all__ = [
    "CyclicPoisson",
    "FixedOrder",
    "FixedSize",
    "Poisson",
    "RandomAllocation",
    "Shuffle",
    "Stream",
    "TruncatedPoisson",
]

Seed: TypeAlias = np.random.Generator | int | None
Column: TypeAlias = Sequence[float]
Draw: TypeAlias = Callable[[int, np.random.Generator], Indices]
"""Returns the lot of a step, from the step's number and the step's own generator. Private."""


@dataclass(frozen=True)
class Poisson:
    """Sampler that takes each record independently with probability `rate` at every draw.

    >>> Poisson(0.01).amplify(ev.Gaussian(4.0))
    PoissonSampled(rate=0.01, event=Gaussian(noise_multiplier=4.0, replace_factor=2.0))
    >>> Poisson(1.0).indices(3).tolist()
    [0, 1, 2]
    """

    rate: float

    def __post_init__(self) -> None:
        in_closed_unit(rate=self.rate)

    def indices(self, n: int, rng: Seed = None) -> Indices:
        """Return the private indices of one draw among `n` records, in increasing order.

        First the size of the draw is drawn from its binomial law, then a uniformly random set of
        that size. So time and memory are proportional to the size and not to `n`.
        """
        source = np.random.default_rng(rng)
        n = whole(n=n)
        return _distinct(n, int(source.binomial(n, self.rate)), source)

    def amplify(self, event: ev.Event) -> ev.Event:
        """Return the event, for an accountant, of a release `event` on the records of one draw."""
        return ev.PoissonSampled(self.rate, event)

    def amplify_user(self, event: ev.Gaussian, records: int) -> ev.Event:
        """Return the event of one draw if the unit of privacy is a user with `records` records.

        No user has more than `records` records: a public bound, or one that is enforced. Each
        record contributes at most once the clip norm, and records are drawn independently.

        >>> Poisson(0.01).amplify_user(ev.Gaussian(4.0), 1).weights
        (0.99, 0.01)
        """
        records = whole(records=records, least=1)
        return ev.GaussianMixture.of_sample(event.noise_multiplier, self.rate, records)


@dataclass(frozen=True)
class TruncatedPoisson:
    """Poisson sampling that keeps a random subset of `max_batch` records if it draws more.

    It suits hardware that needs a fixed largest batch. The price depends on the number of records,
    which is declared as `n_records` and public; `indices` accepts no other number.
    """

    rate: float
    max_batch: int
    n_records: int

    def __post_init__(self) -> None:
        _ = self.amplify(ev.NonPrivate())  # the event checks all three

    def indices(self, n: int, rng: Seed = None) -> Indices:
        """Return the private indices of one draw among `n` = `n_records` records, increasing."""
        source = np.random.default_rng(rng)
        n = _declared(n, self.n_records)
        # A uniformly random subset of a uniformly random set is uniformly random for its size.
        count = min(int(source.binomial(n, self.rate)), self.max_batch)
        return _distinct(n, count, source)

    def amplify(self, event: ev.Event) -> ev.Event:
        """Return the event, for an accountant, of a release `event` on the records of one draw."""
        return ev.TruncatedPoissonSampled(self.rate, self.max_batch, self.n_records, event)


@dataclass(frozen=True)
class FixedSize:
    """Sampler that takes `batch_size` of `n_records` records without replacement at every draw.

    >>> FixedSize(2, n_records=5).indices(5, rng=0).tolist()
    [3, 4]
    """

    batch_size: int
    n_records: int

    def __post_init__(self) -> None:
        _ = self.amplify(ev.NonPrivate())  # the event checks both

    def indices(self, n: int, rng: Seed = None) -> Indices:
        """Return the private indices of one draw among `n` = `n_records` records, increasing."""
        n = _declared(n, self.n_records)
        return _distinct(n, self.batch_size, np.random.default_rng(rng))

    def amplify(self, event: ev.Event) -> ev.Event:
        """Return the event, for an accountant, of a release `event` on the records of one draw."""
        return ev.FixedSizeSampled(self.batch_size, self.n_records, event)


@dataclass(frozen=True)
class RandomAllocation:
    """Sampler that puts each record independently into one of `steps` batches in every epoch.

    It is also called balls and bins. Every record is used once an epoch, as with shuffling, yet the
    price is proved (Chua et al. 2025, arXiv:2412.16802; Feldman & Shenfeld 2025, arXiv:2502.08202).

    >>> [len(batch) for batch in RandomAllocation(3).indices(9, rng=0)]
    [6, 2, 1]
    """

    steps: int

    def __post_init__(self) -> None:
        whole(steps=self.steps, least=1)

    def indices(self, n: int, rng: Seed = None) -> list[Indices]:
        """Return the private batches of one epoch over `n` records, as increasing indices."""
        step_of_record = np.random.default_rng(rng).integers(0, self.steps, size=whole(n=n))
        return _batches(step_of_record, self.steps)

    def amplify(self, event: ev.Event) -> ev.Event:
        """Return the event of one epoch: `steps` releases of `event`, one on each batch."""
        return ev.RandomAllocation(self.steps, event)


@dataclass(frozen=True)
class Shuffle:
    """Sampler that, each epoch, shuffles `n_records` places and cuts them into `steps` batches.

    No sound amplified price is known. The usual price, which treats the batches as Poisson samples,
    is too low: with noise multiplier 0.4 and 10,000 steps, Poisson sampling has delta 1.2e-5 at
    epsilon 4, but shuffling has at least 0.22 (Chua et al. 2024, arXiv:2403.17673; also Lebeda et
    al. 2024, arXiv:2405.20769). So `amplify` raises an error unless `unamplified=True`; then one
    epoch costs one full price of `event`. That is sound: an added, removed or replaced record
    leaves all other records in their places, so it changes only one of the batches.

    `n_records` is declared and public. If there are fewer records, some places stay empty.
    """

    steps: int
    n_records: int
    unamplified: bool = False

    def __post_init__(self) -> None:
        whole(steps=self.steps, least=1)
        whole(n_records=self.n_records, least=1)
        boolean(unamplified=self.unamplified)

    def indices(self, n: int, rng: Seed = None) -> list[Indices]:
        """Return the private batches of one epoch over `n` records, as increasing indices."""
        if whole(n=n) > self.n_records:
            raise ValueError(f"n must be <= n_records, got {n} and {self.n_records}.")
        place = np.random.default_rng(rng).permutation(self.n_records)[:n]
        return _batches(place * self.steps // self.n_records, self.steps)

    def amplify(self, event: ev.Event) -> ev.Event:
        """Return `event`, the price of one epoch; raise an error unless `unamplified` is True."""
        if not self.unamplified:
            raise UnsupportedEvent(
                "shuffled batches have no proved amplification, and the Poisson price is too low "
                "for them (Chua et al. 2024, arXiv:2403.17673). Use Poisson or RandomAllocation, "
                "or Shuffle(..., unamplified=True) to pay the full price once an epoch."
            )
        return event


@dataclass(frozen=True)
class CyclicPoisson:
    """Sampler that draws step t from group t mod `groups`, each record with probability `rate`.

    Each record belongs to one group for the whole run, chosen by a fair coin of its own, so a
    record that is added or removed moves no other. So two steps of one record are at least `groups`
    steps apart, as correlated noise with `groups` bands requires (Choquette-Choo et al. 2023,
    arXiv:2306.08153). The lots have rate / groups * n records on average.

    >>> draw = CyclicPoisson(1.0, groups=2).lots(6, rng=0)
    >>> generator = np.random.default_rng(1)
    >>> [draw(step, generator).tolist() for step in range(4)]
    [[3, 4, 5], [0, 1, 2], [3, 4, 5], [0, 1, 2]]
    """

    rate: float
    groups: int

    def __post_init__(self) -> None:
        in_closed_unit(rate=self.rate)
        whole(groups=self.groups, least=1)

    def lots(self, n: int, rng: Seed = None) -> Draw:
        """Assign `n` records to groups; return the function that draws the lot of a step."""
        members = _batches(_coins(n, self.groups, rng), self.groups)
        poisson = Poisson(self.rate)

        def draw(step: int, rng: np.random.Generator) -> Indices:
            group = members[step % self.groups]
            return group[poisson.indices(len(group), rng)]

        return draw

    def event(
        self, noise_multiplier: float, steps: int, column: Column = (1.0,)
    ) -> ev.BandedGaussian:
        """Return the event of `steps` steps whose noise is correlated by `column`."""
        return ev.BandedGaussian(
            noise_multiplier, tuple(column), steps, self.groups, rate=self.rate
        )


@dataclass(frozen=True)
class FixedOrder:
    """Sampler without chance: each record takes part once in every `steps` steps.

    `places` states for each record in which of the steps 0 to `steps` - 1 of a pass that is, such
    as the day on which a record arrived. It is part of the record: adding or removing a record must
    leave the places of all others as they are. By default places are fair coins, drawn once.

    >>> draw = FixedOrder(2, places=(0, 1, 0)).lots(3)
    >>> [draw(step, np.random.default_rng()).tolist() for step in range(3)]
    [[0, 2], [1], [0, 2]]
    """

    steps: int
    places: Sequence[int] | Indices | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        whole(steps=self.steps, least=1)
        if self.places is not None:  # a copy: the order of a run does not change
            object.__setattr__(self, "places", _frozen(self.places))

    def digest(self) -> bytes:
        """Return a hash of the places, as which records are in which steps. Private."""
        return b"" if self.places is None else _hashed([np.asarray(self.places)])

    def lots(self, n: int, rng: Seed = None) -> Draw:
        """Return the function from steps to their lots of `n` records."""
        if self.places is None:
            places = _coins(n, self.steps, rng)
        else:
            places = np.asarray(self.places)
            if places.shape != (n,):
                raise ValueError("places must hold one whole number for each record.")
            # A place outside of the pass is moved into it: which records those are is private.
            places = places % self.steps
        members = _batches(places, self.steps)
        return lambda step, _: members[step % self.steps]

    def event(
        self, noise_multiplier: float, steps: int, column: Column = (1.0,)
    ) -> ev.BandedGaussian:
        """Return the event of `steps` steps whose noise is correlated by `column`."""
        return ev.BandedGaussian(noise_multiplier, tuple(column), steps, self.steps)


@dataclass(frozen=True)
class Stream:
    """Sampler that follows an order of the user's, and enforces how often a record takes part.

    `order` holds the indices of the records of each step. A record is left out of a step that comes
    less than `separation` steps after its last one, and of all steps after its first
    `participations`. So the price holds for any order in which the steps of a record depend on that
    record alone; an order that was made by sorting or balancing records has no guarantee.
    `expected_batch` is the declared size of a lot, by which sums are divided: the sizes of the lots
    in `order` are private.

    >>> stream = Stream([[0, 1], [1, 2], [0, 1]], separation=2, expected_batch=2)
    >>> draw = stream.lots(3)
    >>> [draw(step, np.random.default_rng()).tolist() for step in range(3)]
    [[0, 1], [2], []]
    """

    order: Sequence[Sequence[int] | Indices] = field(repr=False, compare=False)
    separation: int
    participations: int = 1
    expected_batch: float = field(kw_only=True)

    def __post_init__(self) -> None:
        whole(separation=self.separation, least=1)
        whole(participations=self.participations, least=1)
        positive(expected_batch=self.expected_batch)
        # A copy: the order of a run does not change.
        object.__setattr__(self, "order", tuple(map(_frozen, self.order)))

    def digest(self) -> bytes:
        """Return a hash of the order, as which records are in which steps. Private."""
        return _hashed([np.asarray(lot) for lot in self.order])

    def lots(self, n: int, _rng: Seed = None) -> Draw:
        """Return the function from steps to their lots of `n` records."""
        last = np.full(n, -self.separation, np.int64)
        used = np.zeros(n, np.int64)
        found: list[Indices] = []
        for step, wanted in enumerate(self.order):
            indices = np.unique(np.asarray(wanted))
            indices = indices[(indices >= 0) & (indices < n)]
            is_late = step - last[indices] >= self.separation
            kept = indices[is_late & (used[indices] < self.participations)]
            last[kept], used[kept] = step, used[kept] + 1
            found.append(kept)

        def draw(step: int, _: np.random.Generator) -> Indices:
            if step >= len(found):
                raise ValueError(f"order must have a lot for each step, got {len(found)} lots.")
            return found[step]

        return draw

    def event(
        self, noise_multiplier: float, steps: int, column: Column = (1.0,)
    ) -> ev.BandedGaussian:
        """Return the event of `steps` steps whose noise is correlated by `column`."""
        if steps > len(self.order):
            raise ValueError(f"order must have a lot for each of {steps} steps.")
        return ev.BandedGaussian(
            noise_multiplier, tuple(column), steps, self.separation, self.participations
        )


def _coins(n: int, sides: int, rng: Seed) -> Indices:
    """Return a fair coin of so many sides for each record; later records do not change it."""
    return np.random.default_rng(rng).integers(0, sides, size=whole(n=n))


def _frozen(values: Sequence[int] | Indices) -> Indices:
    """Return a copy of whole numbers that cannot be changed."""
    found = np.asarray(values, np.int64).copy()
    found.flags.writeable = False
    return found


def _hashed(parts: Sequence[Indices]) -> bytes:
    """Return a hash of arrays, one after the other, with their sizes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(b"%d;" % part.size + part.tobytes())
    return found.digest()


def _declared(n: int, n_records: int) -> int:
    if whole(n=n) != n_records:
        raise ValueError(f"n must be the declared n_records = {n_records}, got {n}.")
    return n


def _distinct(n: int, count: int, rng: np.random.Generator) -> Indices:
    """Return a uniformly random set of `count` whole numbers below `n`, in increasing order.

    Numbers are drawn until there are `count` different ones. All numbers are treated alike, so
    every set of that size is equally likely.
    """
    if 64 * count > n:
        return _distinct_mask(n, count, rng).nonzero()[0]
    chosen = np.zeros(0, np.int64)
    while chosen.size < count:
        more = rng.integers(0, n, size=count - chosen.size)
        chosen = np.sort(np.concatenate([chosen, more]))
        chosen = chosen[np.diff(chosen, prepend=-1) > 0]
    return chosen


def _distinct_mask(n: int, count: int, rng: np.random.Generator) -> Flags:
    """Return `n` flags, of which a uniformly random set of `count` is True; for large draws."""
    chosen = np.zeros(n, np.bool_)
    if 8 * count > n:  # one call, which briefly holds 8 bytes per record
        chosen[rng.choice(n, count, replace=False, shuffle=False)] = True
    while missing := count - int(np.count_nonzero(chosen)):
        chosen[rng.integers(0, n, size=missing)] = True
    return chosen


def _batches(step_of_record: Indices, steps: int) -> list[Indices]:
    order = np.argsort(step_of_record, kind="stable")
    ends = np.searchsorted(step_of_record[order], np.arange(1, steps))
    return np.split(order, ends)
