"""GNMax: the class with the most votes after Gaussian noise, with or without a check first.

Papernot et al. 2018 (arXiv:1802.08908, "2018"). `tacit.pate.votes` states the sensitivity of votes
and how answers are paid for.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tacit._arrays import Floats, Indices
from tacit._check import in_closed_unit, positive
from tacit.ledger import Ledger
from tacit.mechanisms import GaussianMechanism, Rng, Seed
from tacit.pate.journal import Journal
from tacit.pate.votes import NO_ANSWER, Aggregator, Pay, Queries, as_votes


@dataclass(frozen=True)
class GNMax(Aggregator):
    """Aggregator that releases the class with the most votes after adding Gaussian noise.

    `sigma` is the standard deviation of the noise on each vote count (Papernot et al. 2018,
    Sec. 4.1). Guarantee: a Gaussian mechanism, as one record changes counts by sqrt(2) in L2 norm.

    >>> str(GNMax(40.0).event(100))
    '100 x [Gaussian noise, multiplier 28.2843]'
    """

    sigma: float

    def __post_init__(self) -> None:
        positive(sigma=self.sigma)

    @property
    def _mechanism(self) -> GaussianMechanism:
        # One class loses a vote and one gains it: the L2 change is <= sqrt(2), also if replaced.
        return GaussianMechanism(
            self.sigma / math.sqrt(2), l2_sensitivity=math.sqrt(2), replace_factor=1.0
        )


@dataclass(frozen=True, kw_only=True)
class ConfidentGNMax(Aggregator):
    """GNMax that answers only where a noisy check finds a clear winner (arXiv:1802.08908, Alg. 1).

    Every query pays for the check "highest count + N(0, sigma_threshold^2) >= threshold", whose
    outcome is released. Queries that pass the check also pay for GNMax at `sigma_answer`.

    Guarantee: the highest count changes by at most 1, so a check is Gaussian with multiplier
    `sigma_threshold`; an answer is Gaussian with multiplier `sigma_answer` / sqrt(2).
    """

    threshold: float
    sigma_threshold: float
    sigma_answer: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold must be finite, got {self.threshold}.")
        positive(sigma_threshold=self.sigma_threshold)
        positive(sigma_answer=self.sigma_answer)

    @property
    def _mechanism(self) -> GaussianMechanism:
        return GNMax(self.sigma_answer)._mechanism

    @property
    def _check(self) -> GaussianMechanism:
        # The highest count (less a public offset) changes by <= 1 when one vote moves.
        return GaussianMechanism(self.sigma_threshold, l2_sensitivity=1.0, replace_factor=1.0)

    def _release(self, queries: Queries, pay: Pay, random: Rng) -> Indices:
        labels = np.full(len(queries.counts), NO_ANSWER, dtype=np.int64)
        pay(self._check.event, len(queries.counts))
        is_clear = self._check.release(queries.leads, random) >= self.threshold
        if is_clear.any():
            labels[is_clear] = super()._release(queries.at(is_clear), pay, random)
        return labels


@dataclass(frozen=True, kw_only=True)
class InteractiveGNMax(ConfidentGNMax):
    """Confident-GNMax that asks only where teachers and student disagree (1802.08908, Alg. 2).

    The check compares with the threshold the largest value, over classes, of (vote count - number
    of teachers * student's probability). That value is small where the student already agrees with
    the teachers. A query that fails the check gets the label that the student predicts, at no
    further cost, if the student's probability for that label is at least `confidence`.
    """

    confidence: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        in_closed_unit(confidence=self.confidence)

    def answer(  # type: ignore[override]  # a student's probabilities are needed
        self,
        votes: ArrayLike,
        student_probabilities: ArrayLike,
        *,
        ledger: Ledger | None = None,
        rng: Seed = None,
        journal: Journal | None = None,
        block: int = 1,
        max_answers: int | None = None,
        strict: bool = False,
        by_user: bool = False,
    ) -> Indices:
        """Return a label for each query, by the teachers or a confident student, or `NO_ANSWER`.

        `student_probabilities` (queries, classes) must be computed from released labels and public
        data alone. The other parameters are those of `ConfidentGNMax.answer`.
        """
        queries, probabilities = _compare_with_student(votes, student_probabilities)
        labels = super().answer(
            queries,
            ledger=ledger,
            rng=rng,
            journal=journal,
            block=block,
            max_answers=max_answers,
            strict=strict,
            by_user=by_user,
        )
        is_sure = (labels == NO_ANSWER) & (probabilities.max(axis=1) >= self.confidence)
        labels[is_sure] = probabilities[is_sure].argmax(axis=1)
        return labels


def _compare_with_student(votes: ArrayLike, probabilities: ArrayLike) -> tuple[Queries, Floats]:
    """Return the votes with the value that the check compares for each, and the probabilities.

    That value is the largest excess of a vote count over the count that the student expects.
    """
    counts = as_votes(votes)
    shares = np.asarray(probabilities, dtype=float)
    if shares.shape != counts.shape:
        raise ValueError(
            f"student_probabilities must have the shape of votes {counts.shape}, "
            f"got {shares.shape}."
        )
    if not np.all((shares >= 0) & (shares <= 1 + 1e-6)):
        raise ValueError("student_probabilities must be in [0, 1].")
    n_teachers = counts[0].sum() if len(counts) else 0  # the same for every query, and public
    # The student's share is public, so a moved vote still changes the maximum by <= 1.
    return Queries(counts, (counts - n_teachers * shares).max(axis=1)), shares
