"""Samplers: `indices` draws batches, `amplify` says what the draw does to an event's price.

One object does both, so the loader and the accountant cannot disagree.

| sampler | one draw | `amplify(event)` is |
|---|---|---|
| `Poisson` | each record on its own, with probability `rate` | one step |
| `TruncatedPoisson` | the same, then a random `max_batch` of them if more came | one step |
| `FixedSize` | `batch_size` of `n_records`, without replacement | one step |
| `RandomAllocation` | each record to one of `steps` batches, on its own | one epoch |
| `Shuffle` | a random order cut into `steps` batches | refused, or one epoch unamplified |

Which records were drawn, and how many, is private: divide by the expected batch size, never by the
drawn one. `rng` is None for fresh entropy from the system, a seed, or a numpy Generator.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tacit import events as ev
from tacit._check import in_closed_unit, whole
from tacit.errors import UnsupportedEvent

__all__ = ["FixedSize", "Poisson", "RandomAllocation", "Shuffle", "TruncatedPoisson"]

Indices: TypeAlias = NDArray[np.int64]
Seed: TypeAlias = np.random.Generator | int | None


@dataclass(frozen=True)
class Poisson:
    """Each record takes part with probability `rate`, independently, anew at every draw.

    >>> Poisson(0.01).amplify(ev.Gaussian(4.0))
    PoissonSampled(rate=0.01, event=Gaussian(noise_multiplier=4.0, replace_factor=2.0))
    >>> Poisson(1.0).indices(3).tolist()
    [0, 1, 2]
    """

    rate: float

    def __post_init__(self) -> None:
        in_closed_unit(rate=self.rate)

    def indices(self, n: int, rng: Seed = None) -> Indices:
        """Private: the records of one draw out of `n`, in increasing order.

        The number of records that take part is binomial, and given that number all sets of that
        size are equally likely: so time and memory follow the draw, not `n`.
        """
        source = np.random.default_rng(rng)
        n = whole(n=n)
        return _distinct(n, int(source.binomial(n, self.rate)), source)

    def amplify(self, event: ev.Event) -> ev.Event:
        """What `event` on one draw does to the private data."""
        return ev.PoissonSampled(self.rate, event)


@dataclass(frozen=True)
class TruncatedPoisson:
    """Poisson sampling with a cap: of a draw above `max_batch`, a random `max_batch` remain.

    Fits hardware that needs a fixed largest batch. The price depends on `n_records`, which is
    declared and public; `indices` takes no other number.
    """

    rate: float
    max_batch: int
    n_records: int

    def __post_init__(self) -> None:
        _ = self.amplify(ev.NonPrivate())  # the event checks all three

    def indices(self, n: int, rng: Seed = None) -> Indices:
        """Private: the records of one draw out of `n`, at most `max_batch`, in increasing order."""
        source = np.random.default_rng(rng)
        n = _declared(n, self.n_records)
        # A random part of a random set is a random set of its size.
        count = min(int(source.binomial(n, self.rate)), self.max_batch)
        return _distinct(n, count, source)

    def amplify(self, event: ev.Event) -> ev.Event:
        """What `event` on one draw does to the private data."""
        return ev.TruncatedPoissonSampled(self.rate, self.max_batch, self.n_records, event)


@dataclass(frozen=True)
class FixedSize:
    """`batch_size` of `n_records` records without replacement, anew at every draw.

    >>> FixedSize(2, n_records=5).indices(5, rng=0).tolist()
    [3, 4]
    """

    batch_size: int
    n_records: int

    def __post_init__(self) -> None:
        _ = self.amplify(ev.NonPrivate())  # the event checks both

    def indices(self, n: int, rng: Seed = None) -> Indices:
        """Private: the records of one draw out of `n`, in increasing order."""
        n = _declared(n, self.n_records)
        return _distinct(n, self.batch_size, np.random.default_rng(rng))

    def amplify(self, event: ev.Event) -> ev.Event:
        """What `event` on one draw does to the private data."""
        return ev.FixedSizeSampled(self.batch_size, self.n_records, event)


@dataclass(frozen=True)
class RandomAllocation:
    """Each record goes to one of `steps` batches, uniformly and independently, anew each epoch.

    Also called balls and bins: every record is seen once an epoch, as with shuffling, yet the price
    is provable (Chua et al. 2025, arXiv:2412.16802; Feldman & Shenfeld 2025, arXiv:2502.08202).

    >>> [len(batch) for batch in RandomAllocation(3).indices(9, rng=0)]
    [6, 2, 1]
    """

    steps: int

    def __post_init__(self) -> None:
        whole(steps=self.steps, least=1)

    def indices(self, n: int, rng: Seed = None) -> list[Indices]:
        """Private: the batches of one epoch over `n` records, each in increasing order."""
        step_of_record = np.random.default_rng(rng).integers(0, self.steps, size=whole(n=n))
        return _batches(step_of_record, self.steps)

    def amplify(self, event: ev.Event) -> ev.Event:
        """What one epoch, `steps` releases of `event`, does to the private data."""
        return ev.RandomAllocation(self.steps, event)


@dataclass(frozen=True)
class Shuffle:
    """A random order of `n_records` places cut into `steps` blocks of equal size, anew each epoch.

    No sound amplified price is known, and the usual one, as if batches were Poisson, is too low:
    with noise multiplier 0.4 and 10,000 steps, Poisson sampling has delta 1.2e-5 at epsilon 4 where
    shuffling has at least 0.22 (Chua et al. 2024, arXiv:2403.17673; also Lebeda et al. 2024,
    arXiv:2405.20769). So `amplify` refuses, unless `unamplified=True` asks for one full price of
    `event` an epoch: an added, removed or replaced record leaves all other places as they are, and
    so changes one of the batches.

    `n_records` is declared and public; fewer records leave places empty.
    """

    steps: int
    n_records: int
    unamplified: bool = False

    def __post_init__(self) -> None:
        whole(steps=self.steps, least=1)
        whole(n_records=self.n_records, least=1)
        if not isinstance(self.unamplified, bool):
            raise TypeError(f"unamplified must be a bool, got {type(self.unamplified).__name__}.")

    def indices(self, n: int, rng: Seed = None) -> list[Indices]:
        """Private: the batches of one epoch over `n` records, each in increasing order."""
        if whole(n=n) > self.n_records:
            raise ValueError(f"n must be <= n_records, got {n} and {self.n_records}.")
        place = np.random.default_rng(rng).permutation(self.n_records)[:n]
        return _batches(place * self.steps // self.n_records, self.steps)

    def amplify(self, event: ev.Event) -> ev.Event:
        """What one epoch of `event` does to the private data; refused unless `unamplified`."""
        if not self.unamplified:
            raise UnsupportedEvent(
                "shuffled batches have no proved amplification, and the Poisson price is too low "
                "for them (Chua et al. 2024, arXiv:2403.17673). Use Poisson or RandomAllocation, "
                "or Shuffle(..., unamplified=True) to pay the full price once an epoch."
            )
        return event


def _declared(n: int, n_records: int) -> int:
    if whole(n=n) != n_records:
        raise ValueError(f"n must be the declared n_records = {n_records}, got {n}.")
    return n


def _distinct(n: int, count: int, rng: np.random.Generator) -> Indices:
    """A uniformly random set of `count` whole numbers below `n`, in increasing order.

    Draws are added until `count` differ. Relabeling the records changes nothing in this process, so
    every set of `count` is equally likely.
    """
    if 64 * count > n:
        return np.flatnonzero(_distinct_mask(n, count, rng))
    chosen = np.zeros(0, np.int64)
    while chosen.size < count:
        more = rng.integers(0, n, size=count - chosen.size)
        chosen = np.sort(np.concatenate([chosen, more]))
        chosen = chosen[np.diff(chosen, prepend=-1) > 0]
    return chosen


def _distinct_mask(n: int, count: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """The same set as marks among `n`: a byte a record, at most eight times the draw."""
    chosen = np.zeros(n, np.bool_)
    if 8 * count > n:  # in one go; it holds 8 bytes a record for a moment
        chosen[rng.choice(n, count, replace=False, shuffle=False)] = True
    while missing := count - int(np.count_nonzero(chosen)):
        chosen[rng.integers(0, n, size=missing)] = True
    return chosen


def _batches(step_of_record: NDArray[np.int64], steps: int) -> list[Indices]:
    order = np.argsort(step_of_record, kind="stable")
    ends = np.searchsorted(step_of_record[order], np.arange(1, steps))
    return np.split(order, ends)
