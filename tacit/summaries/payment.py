"""What a summary costs: the terms of a release, and its division into noisy blocks of cells.

A **block** is a vector of sums over records, one for each of its *cells*. One record contributes
numbers >= 0 to the cells of a block that add up to at most 1: a 1 in one cell of a histogram, for
example. Every statistic of `tacit.summaries` is a function of noisy blocks, so one proof covers all
of them:

- a record that is added or removed moves a block by at most 1 in L1 norm, hence also in L2 norm;
- a replaced record takes one such contribution away and brings another. In L1 norm the block moves
  by at most 2; in L2 norm by at most sqrt(2), because both contributions are >= 0, so that
  |a - b|^2 = |a|^2 + |b|^2 - 2 ab <= 2;
- a block with a single cell moves by at most 1 even then, because its cell moves from a to b with
  both in [0, 1];
- if one person has up to k records, all of these numbers are multiplied by k.

With `delta` 0 the noise is Laplace and the blocks divide epsilon. With `delta` > 0 it may also be
normal, and the blocks then divide mu^2 (Gaussian releases with mu_i = 1 / noise multiplier compose
to mu^2 = sum mu_i^2; Dong, Roth & Su 2022, Corollary 3.3). Which noise has the smaller variance
depends on public numbers only: epsilon, delta, the relation and the number of blocks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Required, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit import events as ev
from tacit._arrays import Floats, Indices
from tacit._check import in_open_unit, positive, whole
from tacit.accounting import GDP, calibrate
from tacit.errors import WeakGuarantee
from tacit.events import Event, Relation
from tacit.ledger import Ledger, agreed_relation
from tacit.mechanisms import GaussianMechanism, LaplaceMechanism, Rng, Seed, generator
from tacit.summaries.error_law import Spread

_SLACK = 1 + 1e-9  # on every noise multiplier: rounding in a sum of prices stays in the budget
UNIT = 2**30
"""Contributions are whole multiples of 1 / UNIT, so their sums are exact integers."""
_MOST_RECORDS = 2**31
_ROUNDING = 1 + 2.0**-18
"""Factor on sensitivities for the rounding of exact sums of fractions to doubles. A cell is rounded
by at most 2^-53 of its value, and all cells of a block add up to less than 2^31 records, so the
errors of two neighbors together are below 2^-21. Counts are exact."""


class ReleaseTerms(TypedDict, total=False):
    """Keyword arguments that every function of `tacit.summaries` takes.

    `epsilon` and `delta` (default 0: pure DP) are the price of the whole call; `relation` says
    which tables are neighbors; `ledger` pays before anything is released (without one, account for
    `event` of the result); `rng` is None for fresh noise, a seed for tests only; `confidence` is
    that of every interval (default 0.95); `records_per_person` is the largest number of records
    that one person has in the table, and then a ledger must count persons. Without it, the unit is
    a record. It is a declared fact that is not checked; `limit_records` makes it true.
    """

    epsilon: Required[float]
    delta: float
    relation: Relation | str
    ledger: Ledger | None
    rng: Seed
    confidence: float
    records_per_person: int


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Checked terms of a release; see `ReleaseTerms`."""

    epsilon: float
    delta: float = 0.0
    relation: Relation = Relation.ADD_REMOVE
    ledger: Ledger | None = None
    rng: Rng
    confidence: float = 0.95
    records_per_person: int = 1
    is_of_persons: bool = False  # whether `records_per_person` was declared

    @classmethod
    def check(cls, terms: ReleaseTerms) -> "Terms":
        """Return the terms that a user gave, checked and with defaults filled in."""
        ledger = terms.get("ledger")
        delta = terms.get("delta", 0.0)
        WeakGuarantee.issue(epsilon=terms["epsilon"])
        if not isinstance(delta, int | float) or delta != 0 or isinstance(delta, bool):
            delta = in_open_unit(delta=delta, advice="0 asks for pure differential privacy.")
        return cls(
            epsilon=positive(epsilon=terms["epsilon"]),
            delta=float(delta),
            relation=agreed_relation(terms.get("relation"), ledger and ledger.relation),
            ledger=ledger,
            rng=generator(terms.get("rng")),
            confidence=in_open_unit(confidence=terms.get("confidence", 0.95)),
            records_per_person=whole(
                records_per_person=terms.get("records_per_person", 1), least=1
            ),
            is_of_persons="records_per_person" in terms,
        )

    def less(self, share: float) -> "Terms":
        """Return the same terms with epsilon reduced by `share` of it."""
        return replace(self, epsilon=self.epsilon * (1 - share))

    @property
    def is_size_public(self) -> bool:
        """Whether the number of records is the same in all neighbors, and so may be used."""
        return self.relation is Relation.REPLACE_ONE and self.records_per_person == 1

    def is_gaussian(self, n_blocks: int) -> bool:
        """Return whether normal noise has the smaller variance for blocks with equal shares."""
        if self.delta == 0:
            return False
        return self.cell_variance(n_blocks, is_gaussian=True) < self.cell_variance(n_blocks)

    def cell_variance(self, n_blocks: int, *, is_gaussian: bool = False) -> float:
        """Return the variance of the noise in each cell of `n_blocks` blocks with equal shares."""
        l1, l2 = self._replace_factors(n_cells=3)
        if self.relation is not Relation.REPLACE_ONE:
            l1 = l2 = 1.0
        if is_gaussian:
            return n_blocks * (l2 * _gaussian_multiplier(self.epsilon, self.delta)) ** 2
        return 2 * (n_blocks * l1 / self.epsilon) ** 2

    def divide(self, blocks: Sequence["Block"], *, is_gaussian: bool | None = None) -> "Division":
        """Return mechanisms for all blocks that together cost the budget."""
        if is_gaussian is None:
            is_gaussian = self.is_gaussian(len(blocks))
        total = math.fsum(block.share for block in blocks)
        noises = [self._noise(block, block.share / total, is_gaussian) for block in blocks]
        return Division(tuple(noises), self)

    def release(self, block: "Block", sums: ArrayLike, note: str) -> "tuple[Event, NoisyBlock]":
        """Pay for one block, and return the event with the noisy cells of its private `sums`."""
        division = self.divide([block])
        return division.pay(note), division.noises[0].release(sums, self.rng)

    def _noise(self, block: "Block", share: float, is_gaussian: bool) -> "BlockNoise":
        l1, l2 = self._replace_factors(block.n_released)
        replaced = self.relation is Relation.REPLACE_ONE
        most = self.records_per_person * (_ROUNDING if block.is_fractional else 1.0)
        if is_gaussian:
            multiplier = _gaussian_multiplier(self.epsilon, self.delta) / math.sqrt(share)
            multiplier *= l2 if replaced else 1.0
            mechanism = GaussianMechanism(
                multiplier * _SLACK, l2_sensitivity=most, replace_factor=l2
            )
            return BlockNoise(block, mechanism, mechanism.noise_std**2, False)
        multiplier = _SLACK / (self.epsilon * share) * (l1 if replaced else 1.0)
        mechanism = LaplaceMechanism(multiplier, l1_sensitivity=most, replace_factor=l1)
        return BlockNoise(block, mechanism, 2 * mechanism.noise_scale**2, True)

    def _replace_factors(self, n_cells: int) -> tuple[float, float]:
        """Return how many times farther a replaced record moves a block, in L1 and in L2 norm."""
        return (1.0, 1.0) if n_cells == 1 else (2.0, math.sqrt(2.0))


class Block(NamedTuple):
    """Public shape of a block: its number of cells and its share of the budget.

    `total` is the public sum of all cells, where it is known: under REPLACE_ONE, if every record
    contributes exactly 1. A block of two cells then releases the first; the second follows.
    """

    n_cells: int
    share: float = 1.0
    is_fractional: bool = False
    total: int | None = None

    @property
    def n_released(self) -> int:
        """Number of cells that receive noise."""
        return 1 if self.total is not None and self.n_cells == 2 else self.n_cells


@dataclass(frozen=True)
class BlockNoise:
    """The mechanism of one block, with the variance of its noise."""

    block: Block
    mechanism: GaussianMechanism | LaplaceMechanism
    variance: float
    is_laplace: bool

    def release(self, sums: ArrayLike, rng: Rng) -> "NoisyBlock":
        """Return the noisy cells of private `sums`; the division must have been paid."""
        exact = np.asarray(sums, np.float64)
        assert exact.shape == (self.block.n_cells,)
        noisy = self.mechanism.release(exact[: self.block.n_released], rng)
        total = self.block.total
        if total is not None and self.block.n_cells == 2:
            noisy = np.array([noisy[0], total - noisy[0]])
        elif total is not None:  # least squares under the known total
            noisy = noisy + (total - noisy.sum()) / noisy.size
        return NoisyBlock(noisy, self)


class NoisyBlock(NamedTuple):
    """Released cells of a block: no longer private."""

    cells: Floats
    noise: BlockNoise

    def total(self, coefficients: ArrayLike) -> Floats:
        """Return the sum of the cells, weighted by the last axis of `coefficients`."""
        return np.asarray(coefficients, np.float64) @ self.cells

    def spread(self, coefficients: ArrayLike) -> Spread:
        """Return the spread of the noise in `total(coefficients)`."""
        c = np.asarray(coefficients, np.float64)
        if self.noise.block.total is not None:
            # Only deviations from the mean coefficient matter: the weighted total is known.
            c = c[..., :1] - c[..., 1:] if c.shape[-1] == 2 else c - c.mean(axis=-1, keepdims=True)
        return Spread.of_noise(c, variance=self.noise.variance, is_laplace=self.noise.is_laplace)


@dataclass(frozen=True)
class Division:
    """Mechanisms of all blocks of one call, and the payment for them."""

    noises: tuple[BlockNoise, ...]
    terms: Terms

    @property
    def event(self) -> Event:
        """Event of all blocks together."""
        events = [noise.mechanism.event for noise in self.noises]
        return events[0] if len(events) == 1 else ev.Sequence(tuple(events))

    def pay(self, note: str) -> Event:
        """Spend the event on the ledger, if there is one, and return it; then release."""
        return pay(self.event, note, self.terms)


def pay(event: Event, note: str, terms: Terms) -> Event:
    """Spend `event` on the ledger of the terms, if there is one, and return the event."""
    if terms.ledger is not None:
        terms.ledger.require_unit(is_user=terms.is_of_persons)
        terms.ledger.spend(event, note=note)
    return event


def cell_counts(
    codes: NDArray[np.integer], n_cells: int, repeats: Indices | None = None
) -> Indices:
    """Return how often each of the cells 0, 1, ... occurs; a code below 0 is no cell. Private.

    `repeats` says how many records have each code; default 1.
    """
    _require_few(len(codes) if repeats is None else int(repeats.sum()))
    is_cell = codes >= 0
    weights = None if repeats is None else repeats[is_cell]  # sums below 2^53 are exact
    return np.bincount(codes[is_cell], weights, minlength=n_cells)[:n_cells].astype(np.int64)


def fractional_sums(
    parts: Callable[[slice], Floats],
    n_records: int,
    n_cells: int,
    repeats: Indices | None = None,
) -> Floats:
    """Return the sums of fractional contributions, exact multiples of 1 / UNIT. Private.

    `parts(rows)` returns the contributions of some records, (rows, cells), each >= 0 and each row
    with a sum of at most 1. All but the last cell are rounded down to a multiple of 1 / UNIT. What
    rounding removed goes to the last cell, up to a row sum of 1, so rows sum to at most 1 exactly.
    `repeats` says how many records have each contribution; default 1.
    """
    _require_few(n_records if repeats is None else int(repeats.sum()))
    times = np.ones(n_records, np.int64) if repeats is None else repeats
    total = np.zeros(n_cells, np.int64)
    for start in range(0, n_records, 65_536):
        rows = parts(slice(start, min(start + 65_536, n_records)))
        row_sums = np.minimum(np.rint(rows.sum(axis=1) * UNIT).astype(np.int64), UNIT)
        whole_parts = np.clip(rows[:, :-1] * UNIT, 0, UNIT).astype(np.int64)
        # Rounding in floating point could push the first cells above the row sum by a few units.
        excess = np.maximum(whole_parts.sum(axis=1) - row_sums, 0)
        if whole_parts.shape[1]:
            largest = whole_parts.argmax(axis=1)
            whole_parts[np.arange(len(rows)), largest] -= excess
        count = times[start : start + 65_536]
        total[:-1] += count @ whole_parts
        total[-1] += count @ (row_sums - whole_parts.sum(axis=1))
    return total / UNIT


@lru_cache(maxsize=256)
def _gaussian_multiplier(epsilon: float, delta: float) -> float:
    return calibrate(ev.Gaussian, epsilon=epsilon, delta=delta, accountant=GDP(), relative=1e-9)


def _require_few(n_records: int) -> None:
    if n_records >= _MOST_RECORDS:
        raise ValueError(f"a summary takes fewer than {_MOST_RECORDS:,} records.")
