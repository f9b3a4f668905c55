"""The paid evaluation of a model on private records that were held out: scores with intervals."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tacit import summaries
from tacit.events import Event, from_dict
from tacit.events import Sequence as EventSequence
from tacit.experiments.facts import EVALUATION
from tacit.experiments.folder import RunFolder
from tacit.ledger import Ledger
from tacit.mechanisms import Rng

COMMONEST = "commonest class"
_LOG_ODDS = (-6.0, 6.0)  # range of scores in which the AUC is measured


class PaidScores(NamedTuple):
    """Released scores of a model, the most important one first, and the event that was paid."""

    scores: tuple[dict[str, Any], ...]
    """Each as `Statistic.to_dict` gives it. Any: JSON values."""
    event: Event

    @property
    def values(self) -> dict[str, float]:
        """The scores by name, where their intervals are finite and say something."""
        return {
            name: row["value"]
            for row in self.scores
            if (name := row["statistic"].lower()) in self.intervals
            and not says_nothing(name, self.intervals[name])
        }

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95 % intervals of the scores by name, where they are finite."""
        return {
            row["statistic"].lower(): (row["lower"], row["upper"])
            for row in self.scores
            if None not in (row["lower"], row["upper"])
        }


def says_nothing(name: str, interval: tuple[float, float]) -> bool:
    """Return whether the interval of an accuracy, AUC or share holds everything from 0 to 1."""
    return name in ("accuracy", "auc", COMMONEST) and interval[0] <= 0 and interval[1] >= 1


def pay_once(run: RunFolder, score: Callable[[], PaidScores]) -> PaidScores:
    """Return the scores that are stored in the run folder, or else pay for them and store them."""
    path = run / EVALUATION
    if not path.is_file():
        return store(run, score())
    content = json.loads(path.read_text(encoding="utf-8"))
    return PaidScores(tuple(content["scores"]), from_dict(content["event"]))


def store(run: RunFolder, found: PaidScores) -> PaidScores:
    """Write scores into the run folder, and return them."""
    stored = {"scores": found.scores, "event": found.event.to_dict()}
    run.write(EVALUATION, json.dumps(stored, indent=2, allow_nan=False) + "\n")
    return found


def score_classes(
    y: np.ndarray,
    predicted: np.ndarray,
    log_odds: np.ndarray | None,
    *,
    n_classes: int | None,
    epsilon: float,
    ledger: Ledger,
    rng: Rng | None = None,
    records_per_person: int = 1,
) -> PaidScores:
    """Return the accuracy, for two classes the AUC, and the share of the commonest class.

    That share is what a constant answer would reach. `log_odds` are the scores of the second of two
    classes; None for more classes. Half of `epsilon` pays for the accuracy, the other half for the
    rest: for two classes, the AUC's release also counts the classes.

    If a person may have several records, which are not independent, intervals are about these
    records, not about the population they are from.
    """
    terms = _terms(ledger, rng, records_per_person)
    terms["epsilon"] = epsilon / 2
    right = summaries.accuracy(y, predicted, **terms)
    if log_odds is None:
        return _paid([right, summaries.commonest_share(y, n_classes=n_classes or 2, **terms)])
    return _paid([right, *summaries.auc_and_commonest(y, log_odds, bounds=_LOG_ODDS, **terms)])


def score_numbers(
    y: np.ndarray,
    predicted: np.ndarray,
    *,
    epsilon: float,
    ledger: Ledger,
    rng: Rng | None = None,
) -> PaidScores:
    """Return R2 of predicted numbers on private records; both are scaled to [-1, 1]."""
    found = summaries.r2(
        y,
        predicted,
        bounds=(-1.0, 1.0),
        epsilon=epsilon,
        ledger=ledger,
        relation=ledger.relation,
        rng=rng,
    )
    return _paid([found])


def score_losses(
    losses: np.ndarray,
    *,
    upper: float,
    epsilon: float,
    ledger: Ledger,
    rng: Rng | None = None,
    records_per_person: int = 1,
) -> PaidScores:
    """Return the mean loss of private records, each clipped to [0, `upper`]."""
    terms = _terms(ledger, rng, records_per_person)
    found = summaries.mean(losses, bounds=(0.0, upper), epsilon=epsilon, **terms)
    scores = _paid([found])
    return scores._replace(scores=tuple(row | {"statistic": "loss"} for row in scores.scores))


def _terms(ledger: Ledger, rng: Rng | None, records_per_person: int) -> dict[str, Any]:
    """Return the options of a paid summary. Any: see `summaries.ReleaseTerms`."""
    terms: dict[str, Any] = {"ledger": ledger, "relation": ledger.relation, "rng": rng}
    if records_per_person > 1:
        terms |= {"records_per_person": records_per_person, "about": "records"}
    return terms


def _paid(scores: Sequence["summaries.Statistic"]) -> PaidScores:
    events = tuple(score.event for score in scores if score.event is not None)  # one per payment
    event = events[0] if len(events) == 1 else EventSequence(events)
    return PaidScores(tuple(score.to_dict() for score in scores), event)
