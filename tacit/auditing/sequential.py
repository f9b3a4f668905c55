"""Sequential test of a bill: audit in rounds, and stop as soon as the evidence suffices.

Each round has canaries of its own and gives a p-value p for the billed event (`refute_event`). The
number 1 / (2 sqrt(p)) is an e-value: its expectation is at most 1 if the bill is correct (Vovk &
Wang 2021, arXiv:1912.06116, calibrators). The product over rounds, whose plans may depend on
earlier rounds, is then a nonnegative supermartingale. It ever reaches 1 / error with probability at
most `error` (Ville's inequality), so one may look at it after each round and stop at any time.
"""

import math

from tacit._check import in_open_unit
from tacit.auditing.event_test import refute_event
from tacit.auditing.one_run import Members, Scores
from tacit.events import Event, Relation


class SequentialTest:
    """Test of the billed `event` in rounds; valid whenever one stops.

    Guarantee: if the audited mechanism is as private as `event`, `is_refuted` ever becomes True
    with probability at most 1 - `confidence`. Scores must be independent (Dirac canaries).

    >>> import numpy as np
    >>> from tacit.events import Gaussian
    >>> test, rng = SequentialTest(Gaussian(1.0)), np.random.default_rng(0)
    >>> while not test.is_refuted and test.rounds < 20:
    ...     inside = rng.integers(0, 2, 500).astype(bool)
    ...     test.add(inside + rng.normal(0, 0.6, 500), inside)       # 0.6 of the billed noise
    >>> test.is_refuted, test.rounds < 20
    (True, True)
    """

    def __init__(
        self,
        event: Event,
        *,
        confidence: float = 0.95,
        relation: Relation = Relation.ADD_REMOVE,
    ) -> None:
        self.event = event
        self.confidence = in_open_unit(confidence=confidence)
        self.relation = Relation(relation)
        self.rounds = 0
        self._log_evidence = 0.0
        self._is_refuted = False

    def add(self, scores: Scores, is_member: Members, *, reference: Scores = ()) -> None:
        """Add the scores of one round, computed from releases of its own."""
        found = refute_event(
            scores,
            is_member,
            self.event,
            relation=self.relation,
            independent=True,
            reference=reference,
        )
        self.rounds += 1
        self._log_evidence -= math.log(2) + math.log(found.p_value) / 2
        self._is_refuted |= self._log_evidence >= -math.log(1 - self.confidence)

    @property
    def evidence(self) -> float:
        """Product of the e-values so far: large if the bill is wrong."""
        return math.exp(min(self._log_evidence, 700.0))

    @property
    def is_refuted(self) -> bool:
        """Whether the evidence was ever large enough to refute the bill."""
        return self._is_refuted
