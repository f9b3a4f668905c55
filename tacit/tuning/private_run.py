"""One run of a search: train with one configuration, then score; all of it is private.

A run pays from a ledger of its own, in memory, so that what it asked to pay can be compared with
what was planned for its configuration. It prints nothing. A model with weights that are not finite
scores lowest: that is read from what the run would have released. Any other failure may depend on
the records in ways that no price covers, so it ends the whole search.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tacit.accounting import flatten
from tacit.errors import TacitError
from tacit.events import Event
from tacit.ledger import Ledger
from tacit.mechanisms import generator
from tacit.tuning.candidates import Candidates, PrivateRecords, parts_of, silence
from tacit.tuning.holdout import Score


class SearchFailed(TacitError, RuntimeError):
    """A search ended without a release: a run failed, or no run was drawn. It stays paid for."""


class Outcome(NamedTuple):
    """Score and model of a run; private unless the run is the one that is released."""

    score: float  # -inf if the model is not finite, NaN if it was not scored
    model: Any  # Any: estimators share methods, not a type

    def scored(self, score: float) -> "Outcome":
        """Return this outcome with the score of its trial, unless the model is not finite."""
        return Outcome(score if math.isnan(self.score) else self.score, self.model)


@dataclass(frozen=True)
class PrivateRuns:
    """All that the runs of one search have in common."""

    candidates: Candidates
    epsilons: tuple[float | None, ...]  # None if its noise was given
    planned: tuple[Event, ...]
    cache: Path
    """A private folder for what runs compute, which is deleted with the search."""
    training: PrivateRecords
    scoring: PrivateRecords | None = None
    score: Score | None = None
    references: tuple[tuple[float, float], ...] = ()
    """The (epsilon, delta) that each configuration would have in a last run, if there is one."""

    def run(self, index: int, seeds: tuple[int, int]) -> Outcome:
        """Train and score configuration `index`, with seeds for training and score.

        Raises `SearchFailed` with no detail but the kind of error.
        """
        kind, outcome = "", None
        with silence():
            try:
                outcome = self._run(index, *seeds)
            except BaseException as error:
                kind = _kind(error)
        # Raised outside of the handler: an error that is attached may quote records.
        if kind == "KeyboardInterrupt":
            raise KeyboardInterrupt
        if kind:
            raise SearchFailed(
                f"a run failed ({kind}), which may depend on the records, so the search has ended "
                "and releases nothing. It stays paid for. Look for the cause on public data."
            )
        if outcome is None:
            raise SearchFailed(
                "a run asked to pay for more than was planned for its configuration, so the search "
                "has ended and releases nothing. The estimator must pay once, for an event that "
                "follows from public settings."
            )
        return outcome

    def _run(self, index: int, seed: int, score_seed: int) -> Outcome | None:
        """Return the outcome, or None if the run asked to pay for more than was planned."""
        candidates, ledger = self.candidates, Ledger(relation=self.candidates.relation)
        model = candidates.model(
            index,
            epsilon=self.epsilons[index],
            ledger=ledger,
            seed=seed,
            reference=self.references[index] if self.references else None,
            cache=self.cache,
        )
        public = () if candidates.public is None else (candidates.public,)
        # A copy: what a run writes into its records must not reach other runs.
        model.fit(*self.training.copied(), *public)
        if not _covers(self.planned[index], ledger.event):
            return None
        candidates.forget_run(model)
        score = math.nan
        if self.score is not None and self.scoring is not None:
            # A copy predicts: what it keeps of the scoring records is not in the released model.
            scored = copy.deepcopy(model)
            score = self.score.release(scored, *self.scoring.copied(), generator(score_seed))
        return Outcome(score if _is_finite(model) else -math.inf, model)


def _kind(error: BaseException) -> str:
    """Return the name of the built-in kind of `error`; other names may hold private values."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


def _covers(planned: Event, spent: Event) -> bool:
    """Return whether every release that was spent is among the planned ones, as often at least."""
    allowed = flatten(planned)
    return all(count <= allowed.get(event, 0) for event, count in flatten(spent).items())


def _is_finite(model: Any) -> bool:
    """Return whether all fitted numbers of the model are finite; they would be released."""
    fitted = [
        value
        for part in parts_of(model)
        for name, value in vars(part).items()
        if name.endswith("_") and not name.startswith("_")
    ]
    return all(map(_numbers_are_finite, fitted))


def _numbers_are_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_numbers_are_finite, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_numbers_are_finite, value))
    if isinstance(value, float | np.ndarray | np.floating):
        array = np.asarray(value)
        return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
    return True
