"""The holdout of a search: which records score the models, and the scores themselves.

**Split.** With a share, each record tosses a coin of its own: it scores with this probability and
trains otherwise. A neighbor differs in one record, hence in one part only, and the coins do not
depend on the data. So the search is one of two events at random, that of the training parts and
that of the scores (parallel composition), and neither is added to the other.

With a fixed number of scoring records, one added record can move another one across: the training
part then gains one record while a scoring record is replaced. So each run pays for both, training
and score, in sequence. Splits by the content of records are not offered: a replaced record could
change parts.

**Score.** Each scoring record has a value in [0, 1], and a score is the sum of the values plus
Gaussian noise. One record added, removed or replaced changes the sum by at most 1. The divisor is
the declared number of scoring records.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit._arrays import Floats
from tacit._check import in_open_unit, one_of, positive, whole
from tacit.events import Event, OneOf, Sequence
from tacit.mechanisms import GaussianMechanism, Rng
from tacit.tuning.laws import Runs

SCORINGS = ("accuracy", "probability", "squared_error", "absolute_error")
_QUARTER = 0.25  # default largest error, as a share of the declared range of the target


@dataclass(frozen=True)
class CoinSplit:
    """A coin for each record: it scores with probability `share`, and trains otherwise."""

    share: float

    def scoring_records(self, n_records: int) -> float:
        """Return the expected number of scoring records, which is public."""
        return self.share * n_records

    def is_scoring(self, n_rows: int, rng: Rng) -> NDArray[np.bool_]:
        """Draw for each record whether it scores."""
        return np.asarray(rng.random(n_rows)) < self.share

    def event(
        self, runs: Runs, training: tuple[Event, ...], score: Event, last: Event | None = None
    ) -> Event:
        """Return the event of the search, given those of training each configuration and a score.

        Given its coin, a record takes part in training only or in scoring only. All records take
        part in the `last` run, if there is one.
        """
        parts = (runs.event(training), runs.event((score,) * len(training)))
        return OneOf(tuple(_and_last(part, last) for part in parts), (1 - self.share, self.share))


@dataclass(frozen=True)
class FixedSplit:
    """Exactly `count` scoring records, drawn uniformly; training and score are both paid."""

    count: int

    def scoring_records(self, n_records: int) -> float:  # noqa: ARG002  # as for a coin
        """Return the number of scoring records."""
        return float(self.count)

    def is_scoring(self, n_rows: int, rng: Rng) -> NDArray[np.bool_]:
        """Draw which records score."""
        if n_rows <= self.count:
            raise ValueError(f"holdout must be less than the number of rows, got {self.count}.")
        order = np.argsort(np.asarray(rng.random(n_rows)))
        chosen = np.zeros(n_rows, dtype=bool)
        chosen[order[: self.count]] = True
        return chosen

    def event(
        self, runs: Runs, training: tuple[Event, ...], score: Event, last: Event | None = None
    ) -> Event:
        """Return the event of the search: each run trains and is scored; then comes the `last` run.

        Between neighbors, the training part gains or loses one record at most, and at most one
        scoring record is replaced, which changes the sum of values in [0, 1] by at most 1.
        """
        return _and_last(runs.event([Sequence((part, score)) for part in training]), last)


Split = CoinSplit | FixedSplit


def _and_last(event: Event, last: Event | None) -> Event:
    return event if last is None else Sequence((event, last))


def split_of(holdout: object) -> Split:
    """Return the split that the setting `holdout` asks for: a share, or a number of records."""
    if isinstance(holdout, int | np.integer) and not isinstance(holdout, bool):
        return FixedSplit(whole(holdout=int(holdout), least=1))
    return CoinSplit(in_open_unit(holdout=holdout, advice="It may also be a number of records."))


@dataclass(frozen=True)
class Score:
    """A private score of a model: a noisy sum over the scoring records, divided by `n_scoring`."""

    scoring: str
    noise_multiplier: float
    n_scoring: float
    largest_error: float = 1.0

    @property
    def mechanism(self) -> GaussianMechanism:
        """The mechanism of one score: one record changes the sum by at most 1, also if replaced."""
        return GaussianMechanism(self.noise_multiplier, l2_sensitivity=1.0, replace_factor=1.0)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in a score."""
        return self.mechanism.noise_std / self.n_scoring

    def release(self, model: Any, X: Any, y: NDArray[Any], rng: Rng) -> float:
        """Return the noisy score of `model`; its event must have been paid."""
        total = float(self.values(model, X, y).sum()) if len(y) else 0.0
        return float(self.mechanism.release(total, rng=rng)) / self.n_scoring

    def values(self, model: Any, X: Any, y: NDArray[Any]) -> Floats:
        """Return the value in [0, 1] of each record; private. What is not finite counts as 0.

        Arrays of other shapes would be broadcast, and then one record would have many values. So
        there must be exactly one target and one prediction for each record.
        """
        _require_shape("y", y, (len(y),))
        if self.scoring == "accuracy":
            found = _predictions(model, X, len(y)) == y
        elif self.scoring == "probability":
            found = _probability_of(model, X, y)
        else:
            error = np.abs(_predictions(model, X, len(y)).astype(float) - np.asarray(y, float))
            power = 2 if self.scoring == "squared_error" else 1
            found = 1 - (error / self.largest_error) ** power
        values = np.asarray(found, float)
        _require_shape("values", values, (len(y),))
        return np.clip(np.nan_to_num(values, nan=0.0), 0.0, 1.0)


def score_kind(
    estimator: Any, scoring: str | None, largest_error: float | None, target_bounds: Any
) -> tuple[str, float]:
    """Return the name of the score and the error from which on a record counts as 0.

    The default is squared error for estimators with declared bounds of the target, with a quarter
    of their range as the largest error, and else accuracy.
    """
    if scoring is None:
        from sklearn.base import is_regressor

        is_number = target_bounds is not None or (
            hasattr(estimator, "__sklearn_tags__") and is_regressor(estimator)
        )
        scoring = "squared_error" if is_number else "accuracy"
    one_of(SCORINGS, scoring=scoring)
    if not scoring.endswith("error"):
        return scoring, 1.0
    if largest_error is not None:
        return scoring, positive(largest_error=largest_error)
    if target_bounds is None:
        raise ValueError(
            f"scoring {scoring!r} needs largest_error, from which on a record counts as wrong. "
            "Pass it, or declare target_bounds of the estimator."
        )
    lower, upper = (
        target_bounds
        if isinstance(target_bounds, tuple | list)
        else (target_bounds.lower, target_bounds.upper)
    )
    return scoring, _QUARTER * float(np.max(np.asarray(upper, float) - np.asarray(lower, float)))


def _probability_of(model: Any, X: Any, y: NDArray[Any]) -> Floats:
    """Return the probability that `model` gives to the true class of each record."""
    classes = np.asarray(model.classes_)
    found = np.asarray(model.predict_proba(X))
    _require_shape("probabilities", found, (len(y), len(classes)))
    column = np.clip(np.searchsorted(classes, y), 0, len(classes) - 1)
    return np.where(classes[column] == y, found[np.arange(len(y)), column], 0.0)


def _predictions(model: Any, X: Any, n_records: int) -> NDArray[Any]:
    """Return one prediction for each record; a column of them becomes a row."""
    found = np.asarray(model.predict(X))
    if found.shape == (n_records, 1):
        found = found[:, 0]
    _require_shape("predictions", found, (n_records,))
    return found


def _require_shape(name: str, found: NDArray[Any], shape: tuple[int, ...]) -> None:
    if found.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {found.shape}.")
