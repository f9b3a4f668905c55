"""Noisy aggregation of votes: labels out, what they cost paid first.

| aggregator | releases | event of one query |
|---|---|---|
| `LaplaceMax` | winner of counts + Laplace noise | `Laplace(scale / 2)` |
| `GNMax` | winner of counts + Gaussian noise | `Gaussian(sigma / sqrt(2))` |
| `ConfidentGNMax` | nothing, unless a noisy check finds a clear winner | a check, then GNMax |
| `InteractiveGNMax` | the same, where the student does not know yet | a check, then GNMax |

(the last in `tacit.pate.interactive`).

Why. One record changes one teacher (`tacit.pate.partition`), so on each query one class loses a
vote and another gains it, whether the record is added, removed or replaced: an L1 change of 2, an
L2 change of sqrt(2), and a change of the highest count by at most 1. The winner is post-processing
of the noisy counts. `replace_factor` is 1 throughout: replacing a record, too, moves one vote.

The ledger is charged with these data-independent events. How many answers follow the checks is
known only as they are released: a budget is kept by the ledger's filter, and without one the claim
to state is `event(n_queries, max_answers)`, fixed beforehand (Gaussian releases in adaptive order
are as private as their squared multipliers add up to: Smith & Thakurta 2022, arXiv:2210.17520).
What the votes at hand would have cost (`private_cost`) is smaller and private, never charged.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit._check import positive, whole
from tacit.errors import BudgetExceeded
from tacit.events import Event, Gaussian, Laplace, Repeated, Sequence
from tacit.ledger import Ledger
from tacit.mechanisms import GaussianMechanism, LaplaceMechanism, Rng, Seed, generator
from tacit.pate import exact, vote_analysis
from tacit.pate.journal import Journal
from tacit.pate.vote_analysis import ORDERS, PrivateCurve, as_votes
from tacit.pate.votes import Labels

NO_ANSWER = -1
"""Label of a query that was refused, or not asked because the budget ended."""

_Pay = Callable[[Event, int], None]


class _Asked(NamedTuple):
    """Private counts of queries, and for each the number that a check compares to its threshold."""

    counts: NDArray[np.int64]  # (queries, classes)
    leads: NDArray[np.float64]  # (queries,)

    def at(self, index: NDArray[Any]) -> "_Asked":
        return _Asked(self.counts[index], self.leads[index])


class _Terms(NamedTuple):
    """How answers are paid for and when they stop; see `answer`."""

    ledger: Ledger | None
    rng: Seed
    journal: Journal | None
    block: int
    max_answers: int | None
    strict: bool


def _ask(votes: ArrayLike) -> _Asked:
    counts = as_votes(votes)
    return _Asked(counts, counts.max(axis=1).astype(float))


class _Aggregator(ABC):
    """Pays for and releases answers, block by block."""

    def answer(
        self,
        votes: ArrayLike,
        *,
        ledger: Ledger | None = None,
        rng: Seed = None,
        journal: Journal | None = None,
        block: int = 1,
        max_answers: int | None = None,
        strict: bool = False,
    ) -> Labels:
        """Label of each query, `NO_ANSWER` where refused: (queries,).

        Parameters
        ----------
        votes
            Private counts of shape (queries, classes).
        ledger
            Pays for each block before it is released; None keeps no record. When it refuses, the
            rest of the queries go unanswered; if it refuses the very first payment, or with
            `strict`, `BudgetExceeded` is raised. The budget is never passed.
        journal
            Answers of an earlier, killed run: they are handed on as they are, and their noise is
            not drawn again, even if `rng` is the same seed.
        block
            Queries paid for at once; more is faster on a ledger file, and coarser at its end.
        max_answers
            Stop after so many answers. Then `event(n_queries, max_answers)` bounds the cost before
            the first query is asked, although the number of answers is not known.
        """
        terms = _Terms(ledger, rng, journal, block, max_answers, strict)
        return self._answer(_ask(votes), terms)

    def event(self, n_queries: int, n_answers: int | None = None) -> Event:
        """What `n_queries`, of which `n_answers` were answered (default: all), do to the data."""
        n_queries = whole(n_queries=n_queries)
        n_answers = n_queries if n_answers is None else whole(n_answers=n_answers)
        parts = [Repeated(self._answer_event, n_answers)]
        if self._check_event is not None:
            parts.insert(0, Repeated(self._check_event, n_queries))
        return Sequence(tuple(parts))

    def private_cost(
        self,
        votes: ArrayLike,
        labels: ArrayLike | None = None,
        *,
        orders: ArrayLike = ORDERS,
        tight: bool = False,
    ) -> PrivateCurve:
        """What releasing `labels` cost given these votes: **private**, never to be published.

        Without `labels` every query counts as answered. `tight` computes the divergence from all
        neighbors (`tacit.pate.exact`) instead of bounding it as the papers do.
        """
        asked = _ask(votes)
        return self._private_cost(
            asked, _answered(labels, asked), np.asarray(orders, float), tight=tight
        )

    @property
    @abstractmethod
    def _answer_event(self) -> Event: ...

    @property
    def _check_event(self) -> Event | None:
        return None

    @abstractmethod
    def _release(self, asked: _Asked, pay: _Pay, random: Rng) -> Labels:
        """Pay for and release one block."""

    @abstractmethod
    def _private_cost(
        self, asked: _Asked, answered: NDArray[np.bool_], orders: NDArray[Any], *, tight: bool
    ) -> PrivateCurve: ...

    def _answer(self, asked: _Asked, terms: _Terms) -> Labels:
        ledger = Ledger() if terms.ledger is None else terms.ledger
        random, journal = generator(terms.rng), terms.journal
        random = random if journal is None else journal.fresh(random)
        block = whole(block=terms.block, least=1)
        labels = np.full(len(asked.counts), NO_ANSWER, dtype=np.int64)
        known = [i for i in range(len(labels)) if journal is not None and i in journal]
        for i in known:
            labels[i] = journal[i]  # type: ignore[index]  # known is empty without a journal
        waiting = np.setdiff1d(np.arange(len(labels)), known)
        most = len(labels) if terms.max_answers is None else terms.max_answers
        left = whole(max_answers=most) - int(np.sum(labels != NO_ANSWER))
        note = f"PATE run {journal.run}" if journal is not None else "PATE"
        paid = bool(known)

        def pay(event: Event, count: int) -> None:
            nonlocal paid
            ledger.spend(event if count == 1 else Repeated(event, count), note=note)
            paid = True

        while len(waiting) and left > 0:
            now = waiting[: min(block, left)]  # even if all of them are answered, none too many
            try:
                released = self._release(asked.at(now), pay, random)
            except BudgetExceeded:
                if terms.strict or not paid:
                    raise
                break
            if journal is not None:
                journal.record(now.tolist(), released.tolist())
            labels[now] = released
            waiting, left = waiting[len(now) :], left - int(np.sum(released != NO_ANSWER))
        return labels


@dataclass(frozen=True)
class LaplaceMax(_Aggregator):
    """The winner of counts plus Laplace noise (Papernot et al. 2017, LNMax).

    Guarantee: one answer is 2 / `scale`-DP. The counts change by 2 in L1 norm, so the noisy counts
    are the Laplace mechanism at epsilon 2 / scale, and the winner is computed from them alone.

    >>> LaplaceMax(20.0).answer([[250, 0], [3, 247]], rng=0)
    array([0, 1])
    """

    scale: float

    def __post_init__(self) -> None:
        positive(scale=self.scale)

    @property
    def _mechanism(self) -> LaplaceMechanism:
        # One class loses a vote and one gains it: the L1 change is <= 2, also under replacement.
        return LaplaceMechanism(self.scale / 2, l1_sensitivity=2.0, replace_factor=1.0)

    @property
    def _answer_event(self) -> Laplace:
        return self._mechanism.event

    def _release(self, asked: _Asked, pay: _Pay, random: Rng) -> Labels:
        pay(self._answer_event, len(asked.counts))
        return self._mechanism.release(asked.counts, random).argmax(axis=1)

    def _private_cost(
        self, asked: _Asked, answered: NDArray[np.bool_], orders: NDArray[Any], *, tight: bool
    ) -> PrivateCurve:
        if tight:
            raise ValueError("tight must be False for LaplaceMax: it is known for Gaussian noise.")
        cost = vote_analysis.laplace_max_rdp(
            asked.counts[answered], scale=self.scale, orders=orders
        )
        return PrivateCurve(orders, cost.sum(axis=0))


@dataclass(frozen=True)
class GNMax(_Aggregator):
    """The winner of counts plus Gaussian noise of standard deviation `sigma` (2018, Sec. 4.1).

    Guarantee: post-processing of Gaussian noise on counts with an L2 change of sqrt(2).

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

    @property
    def _answer_event(self) -> Gaussian:
        return self._mechanism.event

    def _release(self, asked: _Asked, pay: _Pay, random: Rng) -> Labels:
        pay(self._answer_event, len(asked.counts))
        return self._mechanism.release(asked.counts, random).argmax(axis=1)

    def _private_cost(
        self, asked: _Asked, answered: NDArray[np.bool_], orders: NDArray[Any], *, tight: bool
    ) -> PrivateCurve:
        price = exact.gnmax_rdp_exact if tight else vote_analysis.gnmax_rdp
        cost = price(asked.counts[answered], sigma=self.sigma, orders=orders)
        return PrivateCurve(orders, cost.sum(axis=0))


@dataclass(frozen=True, kw_only=True)
class ConfidentGNMax(_Aggregator):
    """GNMax that answers only where a noisy check finds a clear winner (2018, Alg. 1).

    Every query pays for the check "highest count + N(0, sigma_threshold^2) >= threshold", whose
    outcome is released; those that pass also pay for GNMax at `sigma_answer`.

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
    def _answering(self) -> GNMax:
        return GNMax(self.sigma_answer)

    @property
    def _check(self) -> GaussianMechanism:
        # The highest count (less a public offset) changes by <= 1 when one vote moves.
        return GaussianMechanism(self.sigma_threshold, l2_sensitivity=1.0, replace_factor=1.0)

    @property
    def _answer_event(self) -> Gaussian:
        return self._answering._answer_event

    @property
    def _check_event(self) -> Gaussian:
        return self._check.event

    def _release(self, asked: _Asked, pay: _Pay, random: Rng) -> Labels:
        labels = np.full(len(asked.counts), NO_ANSWER, dtype=np.int64)
        pay(self._check_event, len(asked.counts))
        clear = self._check.release(asked.leads, random) >= self.threshold
        if clear.any():
            labels[clear] = self._answering._release(asked.at(clear), pay, random)
        return labels

    def _private_cost(
        self, asked: _Asked, answered: NDArray[np.bool_], orders: NDArray[Any], *, tight: bool
    ) -> PrivateCurve:
        price = exact.threshold_rdp_exact if tight else vote_analysis.threshold_rdp
        checks = price(
            asked.leads, threshold=self.threshold, sigma=self.sigma_threshold, orders=orders
        )
        answers = self._answering._private_cost(asked, answered, orders, tight=tight)
        return PrivateCurve(orders, checks.sum(axis=0)) + answers


def _answered(labels: ArrayLike | None, asked: _Asked) -> NDArray[np.bool_]:
    if labels is None:
        return np.ones(len(asked.counts), dtype=bool)
    given = np.asarray(labels)
    if given.shape != asked.leads.shape:
        raise ValueError(
            f"labels must hold one label for each of {len(asked.leads)} queries, "
            f"got shape {given.shape}."
        )
    return given != NO_ANSWER
