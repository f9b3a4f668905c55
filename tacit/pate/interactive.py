"""Confident-GNMax beside a student: only what the student does not know is asked."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit._check import in_closed_unit
from tacit.ledger import Ledger
from tacit.mechanisms import Seed
from tacit.pate.gnmax import NO_ANSWER, ConfidentGNMax, _answered, _Asked, _Terms
from tacit.pate.journal import Journal
from tacit.pate.vote_analysis import ORDERS, PrivateCurve, as_votes
from tacit.pate.votes import Labels


@dataclass(frozen=True, kw_only=True)
class InteractiveGNMax(ConfidentGNMax):
    """Confident-GNMax that asks only where teachers and student disagree (2018, Alg. 2).

    The check is on the highest of (count - teachers * student's probability): small where the
    student already agrees. A query that fails it is answered by the student itself, at no further
    cost, where the student's probability is at least `confidence`.
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
    ) -> Labels:
        """Label of each query, by the teachers or by a confident student, else `NO_ANSWER`.

        `student_probabilities` (queries, classes) must come from released labels and public data
        alone. The rest as in `ConfidentGNMax.answer`.
        """
        asked, probabilities = _ask_beside_student(votes, student_probabilities)
        terms = _Terms(ledger, rng, journal, block, max_answers, strict)
        labels = self._answer(asked, terms)
        sure = (labels == NO_ANSWER) & (probabilities.max(axis=1) >= self.confidence)
        labels[sure] = probabilities[sure].argmax(axis=1)
        return labels

    def private_cost(  # type: ignore[override]  # as in answer
        self,
        votes: ArrayLike,
        student_probabilities: ArrayLike,
        labels: ArrayLike | None = None,
        *,
        orders: ArrayLike = ORDERS,
        tight: bool = False,
    ) -> PrivateCurve:
        """As in `ConfidentGNMax`; a label that the student gave is counted as the teachers'."""
        asked, _ = _ask_beside_student(votes, student_probabilities)
        return self._private_cost(
            asked, _answered(labels, asked), np.asarray(orders, float), tight=tight
        )


def _ask_beside_student(
    votes: ArrayLike, student_probabilities: ArrayLike
) -> tuple[_Asked, NDArray[np.float64]]:
    counts = as_votes(votes)
    probabilities = _as_probabilities(student_probabilities, counts.shape)
    n_teachers = counts[0].sum() if len(counts) else 0  # the same for every query, and public
    # The student's share is public, so a moved vote still changes the maximum by <= 1.
    return _Asked(counts, (counts - n_teachers * probabilities).max(axis=1)), probabilities


def _as_probabilities(values: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float64]:
    probabilities = np.asarray(values, dtype=float)
    if probabilities.shape != shape:
        raise ValueError(
            f"student_probabilities must have the shape of votes {shape}, "
            f"got {probabilities.shape}."
        )
    if not np.all((probabilities >= 0) & (probabilities <= 1 + 1e-6)):
        raise ValueError("student_probabilities must be in [0, 1].")
    return probabilities
