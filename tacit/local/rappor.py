"""RAPPOR: reports that can be sent again and again, because most of the noise is remembered.

Erlingsson, Pihur & Korolova 2014 (arXiv:1407.6981). A value sets h of the bits of a Bloom filter.
Each person flips these bits once and keeps the result ("permanent" noise, probability f), so that
many reports of one value reveal no more than the permanent bits. Each report then adds fresh noise
("instantaneous": a permanent 1 is sent as 1 with probability q, a permanent 0 with probability
p), which hides that two reports come from the same person.
"""

import hashlib
import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit._check import in_closed_unit, in_open_unit, whole
from tacit.events import PureDP
from tacit.local import packed_bits
from tacit.local.coins import flip, round_up, whole_numbers
from tacit.local.frequencies import Estimate, Floats, nearest_probabilities
from tacit.mechanisms import Rng, Seed, generator

_MANY_REPORTS = 1000
"""Reports from which on `worst_case_ratio` is the limit of infinitely many."""


@dataclass(frozen=True, kw_only=True)
class Rappor:
    """RAPPOR for options numbered from 0: repeated reports of one value at a bounded total cost.

    Parameters
    ----------
    n_options
        Number of possible answers.
    n_bits
        Bits of the Bloom filter. None gives each option a bit of its own ("basic RAPPOR").
    n_hashes
        Bits that each option sets (h).
    n_cohorts
        Number of groups with different hash functions. Each person belongs to one group, at random.
    permanent
        Probability f that a bit is replaced by a fair coin, once and for all.
    low, high
        Probabilities p and q that a permanent 0 and a permanent 1 are sent as 1.

    Examples
    --------
    >>> rappor = Rappor(n_options=5)
    >>> person = rappor.client(rng=1)
    >>> len(person.report(3)), round(rappor.lifetime_epsilon, 4)
    (8, 2.1972)
    """

    n_options: int
    n_bits: int | None = None
    n_hashes: int = 1
    n_cohorts: int = 1
    permanent: float = 0.5
    low: float = 0.5
    high: float = 0.75

    def __post_init__(self) -> None:
        whole(n_options=self.n_options, least=2)
        whole(n_hashes=self.n_hashes, least=1)
        whole(n_cohorts=self.n_cohorts, least=1)
        in_open_unit(permanent=self.permanent)
        in_closed_unit(low=self.low)
        in_closed_unit(high=self.high)
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}.")
        if self.n_bits is None and (self.n_hashes > 1 or self.n_cohorts > 1):
            raise ValueError("n_hashes and n_cohorts above 1 need a Bloom filter: give n_bits.")
        if self.n_bits is not None and whole(n_bits=self.n_bits, least=2) < self.n_hashes:
            raise ValueError("n_hashes must be at most n_bits.")

    @property
    def width(self) -> int:
        """Number of bits of a report."""
        return self.n_options if self.n_bits is None else self.n_bits

    @property
    def lifetime_epsilon(self) -> float:
        """Epsilon of all reports of one value, however many (Theorem 1 of the paper).

        It is 2 h ln((1 - f/2) / (f/2)), with h = `n_hashes` and f = `permanent`. A person whose
        value changes pays this epsilon once for each different value.
        """
        return _log(self.worst_case_ratio(n_reports=None))

    @property
    def event(self) -> PureDP:
        """Event of all reports that one person sends of one value, however many."""
        return PureDP(self.lifetime_epsilon, replace_factor=1.0)

    def event_of(self, n_reports: int) -> PureDP:
        """Return the event of `n_reports` reports that one person sends of one value."""
        return PureDP(_log(self.worst_case_ratio(n_reports=n_reports)), replace_factor=1.0)

    def worst_case_ratio(self, n_reports: int | None = 1) -> Fraction:
        """Return the exact largest ratio of the probabilities of the reports under two values.

        Two values differ in up to 2 h bits, h = `n_hashes`: each value sets h bits that the other
        does not. Of one bit, `n_reports` reports reveal the number of ones, whose law is a mixture
        of two binomial laws. None stands for any number of reports, which together reveal the
        permanent bits. More than 1,000 reports are treated like None, because their exact fractions
        are too long.
        """
        f = self._permanent
        stays, turns = 1 - f / 2, f / 2  # permanent bit is 1 for a true 1, and for a true 0
        if n_reports is None:
            return (stays / turns) ** (2 * self.n_hashes)
        if whole(n_reports=n_reports, least=1) > _MANY_REPORTS:
            return self.worst_case_ratio(n_reports=None)
        p, q = self._low, self._high
        ratios = []
        for ones in (0, n_reports):  # the ratio is monotone in the number of ones
            zeros = n_reports - ones
            of_one = q**ones * (1 - q) ** zeros
            of_zero = p**ones * (1 - p) ** zeros
            true_one = stays * of_one + turns * of_zero
            true_zero = turns * of_one + stays * of_zero
            ratios.append(true_one / true_zero if ones else true_zero / true_one)
        return (ratios[0] * ratios[1]) ** self.n_hashes

    def client(self, rng: Seed = None) -> "RapporClient":
        """Return the stored state of a new person, who joins a random cohort."""
        # None is passed on: each report then draws fresh entropy, also in a forked process.
        source = None if rng is None else generator(rng)
        cohort = int(generator(source).integers(0, self.n_cohorts, size=1)[0])
        return RapporClient(self, cohort, source)

    def randomize(
        self, values: ArrayLike, cohorts: ArrayLike | None = None, rng: Seed = None
    ) -> NDArray[np.uint8]:
        """Simulate the first report of each of many persons; no permanent bits are kept."""
        options = np.atleast_1d(whole_numbers(values, self.n_options))
        groups = _cohorts(cohorts, len(options), self.n_cohorts)
        source = generator(rng)
        permanent = self._permanent_bits(self._codes[groups, options], source)
        return packed_bits.pack(self._instantaneous_bits(permanent, source))

    def estimate(
        self, reports: ArrayLike, cohorts: ArrayLike | None = None, *, confidence: float = 0.95
    ) -> Estimate:
        """Return unbiased estimates of all frequencies by least squares, with intervals.

        The number of ones at each bit of each cohort is corrected for both kinds of noise
        (section 4) and regressed on the bits that each option sets. Raises `ValueError` if the bits
        of the options do not determine their frequencies: use more bits or cohorts.
        """
        packed = packed_bits.checked(reports, self.width)
        if len(packed) == 0:
            raise ValueError("reports must hold at least one report.")
        groups = _cohorts(cohorts, len(packed), self.n_cohorts)
        sizes = np.bincount(groups, minlength=self.n_cohorts)
        f, p, q = float(self._permanent), float(self._low), float(self._high)
        base, gap = p + f * (q - p) / 2, (1 - f) * (q - p)
        rates, weights = [], []
        for cohort in range(self.n_cohorts):
            counts = packed_bits.column_counts(packed[groups == cohort], self.width)
            n = max(int(sizes[cohort]), 1)
            rates.append((counts / n - base) / gap)
            weights.append(np.full(self.width, sizes[cohort] / len(packed)))
        design = self._codes.transpose(0, 2, 1).reshape(-1, self.n_options).astype(np.float64)
        weight = np.concatenate(weights)
        normal = design.T @ (weight[:, None] * design)
        if np.linalg.matrix_rank(normal) < self.n_options:
            raise ValueError("the options share bits: use more bits, hashes or cohorts.")
        solve = np.asarray(np.linalg.solve(normal, design.T * weight), dtype=np.float64)
        values = np.asarray(solve @ np.concatenate(rates), dtype=np.float64)
        errors = self._standard_errors(solve, values, sizes, base, gap)
        return Estimate(values, errors, len(packed), in_open_unit(confidence=confidence))

    def _standard_errors(
        self, solve: Floats, values: Floats, sizes: NDArray[np.int64], base: float, gap: float
    ) -> Floats:
        """Return the standard error of each estimated frequency in `values`.

        `solve` is the least-squares matrix, and `sizes` are the persons per cohort. A bit is sent
        as 1 with probability `base` if the value does not set the bit, and `base` + `gap` if it
        does.
        """
        frequency = nearest_probabilities(values)
        high, low = base + gap, base
        # Chance which persons are in which cohort; nothing for a single cohort.
        variance = -frequency * (1 - frequency) / int(sizes.sum())
        for cohort, codes in enumerate(self._codes.astype(np.float64)):
            n = max(int(sizes[cohort]), 1)
            part = solve[:, cohort * self.width : (cohort + 1) * self.width]
            true_ones = frequency @ codes
            noise = true_ones * high * (1 - high) + (1 - true_ones) * low * (1 - low)
            mix = part @ codes.T
            chance = mix**2 @ frequency - (mix @ frequency) ** 2
            variance += (part**2 @ noise / gap**2 + chance) / n
        return np.sqrt(np.maximum(variance, 0.0))

    @cached_property
    def _codes(self) -> NDArray[np.bool_]:
        """The bits of the Bloom filter that each option sets, shape (cohorts, options, bits)."""
        if self.n_bits is None:
            return np.eye(self.n_options, dtype=bool)[None]
        codes = np.zeros((self.n_cohorts, self.n_options, self.n_bits), dtype=bool)
        for cohort in range(self.n_cohorts):
            for option in range(self.n_options):
                codes[cohort, option, self._positions(cohort, option)] = True
        return codes

    def _positions(self, cohort: int, option: int) -> list[int]:
        """Return the different bits that an option sets in a cohort, by a public hash of both."""
        found: list[int] = []
        attempt = 0
        while len(found) < self.n_hashes:
            text = f"{cohort},{option},{attempt}".encode()
            digest = hashlib.blake2b(text, digest_size=8).digest()
            position = int.from_bytes(digest, "little") % self.width
            attempt += 1
            if position not in found:
                found.append(position)
        return found

    @property
    def _permanent(self) -> Fraction:
        """The probability f (`permanent`), rounded up so that coins of f / 2 are exact."""
        return 2 * round_up(Fraction(self.permanent) / 2)

    @property
    def _low(self) -> Fraction:
        return round_up(Fraction(self.low))

    @property
    def _high(self) -> Fraction:
        return round_up(Fraction(self.high))

    def _permanent_bits(self, bits: NDArray[np.bool_], rng: Rng) -> NDArray[np.bool_]:
        """Flip each bit with probability f / 2, f = `permanent` (section 2, step 2)."""
        return bits ^ flip(self._permanent / 2, rng, bits.shape)

    def _instantaneous_bits(self, bits: NDArray[np.bool_], rng: Rng) -> NDArray[np.bool_]:
        """Send each permanent 1 as 1 with probability `high`, and each 0 with `low` (step 3)."""
        return np.where(bits, flip(self._high, rng, bits.shape), flip(self._low, rng, bits.shape))


@dataclass
class RapporClient:
    """What the device of one person stores: permanent bits of every value reported so far.

    Keep this object on the device. Reports of a value seen before reuse its permanent bits, so all
    reports of one value together cost `Rappor.lifetime_epsilon`.

    *Not* protected is which reports have the same value. An observer of many reports can find out
    when the value changes and when it returns to an earlier one, but not what the values are.
    """

    rappor: Rappor
    cohort: int
    rng: Seed = None
    _memory: dict[int, NDArray[np.bool_]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # One stream for all reports: the same seed for each would repeat the noise.
        self.rng = None if self.rng is None else generator(self.rng)
        whole_numbers(self.cohort, self.rappor.n_cohorts)

    def report(self, value: int) -> NDArray[np.uint8]:
        """Return a new report of `value`; its permanent bits are drawn once and then reused."""
        option = int(whole_numbers(value, self.rappor.n_options))
        source = generator(self.rng)
        if option not in self._memory:
            code = self.rappor._codes[self.cohort, option]
            self._memory[option] = self.rappor._permanent_bits(code, source)
        bits = self.rappor._instantaneous_bits(self._memory[option], source)
        return packed_bits.pack(bits[None])[0]

    @property
    def spent(self) -> PureDP:
        """Event of all reports so far: the lifetime epsilon once for each different value.

        It compares the values with any others that change at the same times (see the class).
        """
        return PureDP(len(self._memory) * self.rappor.lifetime_epsilon, replace_factor=1.0)


def _cohorts(cohorts: ArrayLike | None, n_reports: int, n_cohorts: int) -> NDArray[np.int64]:
    if cohorts is None:
        if n_cohorts > 1:
            raise ValueError("cohorts must list the cohort of each report.")
        return np.zeros(n_reports, dtype=np.int64)
    found = whole_numbers(cohorts, n_cohorts)
    if found.shape != (n_reports,):
        raise ValueError("cohorts must list one cohort for each report.")
    return found


def _log(ratio: Fraction) -> float:
    """Return the natural logarithm of `ratio` as a float, rounded up to stay a valid epsilon."""
    # As 2^shift times a number near 1: terms of the size of the numerator would cancel badly.
    shift = ratio.numerator.bit_length() - ratio.denominator.bit_length()
    near = shift * math.log(2) + math.log(ratio / Fraction(2) ** shift)
    return near + (abs(near) + 1) * 2.0**-50
