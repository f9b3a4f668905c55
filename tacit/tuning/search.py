"""A search over configurations under differential privacy, as a scikit-learn estimator."""

import contextlib
import hashlib
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator

from tacit._check import in_open_unit, positive, whole
from tacit.accounting import epsilon as price_of
from tacit.errors import WeakGuarantee
from tacit.events import Event
from tacit.ledger import Ledger, is_pending, paid_once
from tacit.mechanisms import generator
from tacit.tuning.candidates import Candidates, PrivateRecords, Space
from tacit.tuning.holdout import Score, Split, score_kind, split_of
from tacit.tuning.laws import CheapTrials, EveryConfiguration, RandomRuns, Runs, choose_runs
from tacit.tuning.private_run import Outcome, PrivateRuns, SearchFailed
from tacit.tuning.search_plan import SearchPlan, plan_search, plan_trials
from tacit.tuning.unfinished import Unfinished

_PARTS = ("train", "score")
_MOST_SEED = 2**128  # as many as the keys of a fresh generator


@dataclass(eq=False, repr=False)
class PrivateSearch(BaseEstimator):
    """Choose the best of several configurations of a private estimator, and pay for the choice.

    Guarantee: what `fit` stores is (`epsilon`, `delta`)-DP, for any data: one configuration, its
    model and its score. The number of runs and all other scores and models stay private and are
    deleted. The number of runs and their configurations are drawn before the first run, and
    `event_` is paid whole before it. No setting, the space included, may depend on the private
    values. How long a search takes depends on the number of runs; do not publish it.

    Parameters
    ----------
    estimator
        A private estimator that pays from its setting `ledger`, such as those of
        `tacit.regression` and `tacit.pate`, or a pipeline that ends in one. The search sets its
        budget. An estimator without a setting `epsilon` keeps its noise, and the search is refused
        if it costs more than the budget.
    space
        A grid, {setting: [values]}, or a list of configurations {setting: value}.
    epsilon, delta
        Budget of the whole search.
    holdout
        Share of the records that score, each by its own coin; or the exact number of such records,
        and then each run pays for training and score. See `tacit.tuning.holdout`.
    scoring
        "accuracy", "probability" (of the true class), "squared_error" or "absolute_error"; the
        default follows the estimator.
    largest_error
        Error from which on a record counts as entirely wrong; default a quarter of the range that
        the estimator declares for its target.
    runs
        `RandomRuns`, `EveryConfiguration`, `CheapTrials`, or None: `choose_runs` chooses from
        public facts. If there are too few records for scores to tell configurations apart, it
        chooses no trials: the estimator is then run once, with the settings it was given.
    most_runs
        Largest number of runs if `runs` is None; the limit is part of the law that is priced.
    n_records
        Public number of records; None takes the number of rows, which is then assumed public.
    ledger
        A `tacit.Ledger` that pays, once. If it has a file, a search that was killed can be fitted
        again with the same data and settings: it continues and pays nothing more.
    n_jobs
        Number of runs at the same time, as in joblib.
    random_state
        None draws from fresh entropy. Use a seed for tests only.
    progress
        Function called with a line of text at each stage. No line has a score or a count of runs.

    Attributes
    ----------
    best_estimator_, best_params_, best_score_
        What is released. The score includes noise. After cheap trials it is that of the trial, and
        without trials it is NaN and the parameters are empty.
    plan_
        The public plan: law of the runs, cost of one run, cost of the search (`SearchPlan`).
    event_
        Event of the search, which `tacit.epsilon` prices.

    Examples
    --------
    >>> from tacit.regression import Bounds, LogisticRegression
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(0, 10, (4_000, 2))
    >>> y = X[:, 0] > X[:, 1]
    >>> model = LogisticRegression(bounds=Bounds(0, 10), method="objective")
    >>> search = PrivateSearch(model, {"method": ["gradient", "objective"]}, epsilon=2.0,
    ...                        random_state=0).fit(X, y)
    >>> search.best_score_ > 0.9, search.plan_.epsilon <= 2.0
    (True, True)
    """

    estimator: Any  # Any: estimators share methods, not a type
    space: Space
    _: KW_ONLY
    epsilon: float = 1.0
    delta: float = 1e-6
    holdout: float = 0.2
    scoring: str | None = None
    largest_error: float | None = None
    runs: RandomRuns | EveryConfiguration | CheapTrials | None = None
    most_runs: int | None = None
    n_records: int | None = None
    ledger: Ledger | None = None
    n_jobs: int | None = None
    random_state: int | None = None
    progress: Callable[[str], None] | None = None
    best_estimator_: Any = field(init=False)
    best_params_: dict[str, Any] = field(init=False)
    best_score_: float = field(init=False)
    plan_: SearchPlan = field(init=False)
    event_: Event = field(init=False)

    def fit(self, X: Any, y: ArrayLike, public: Any = None) -> Self:
        """Search on private `X` and `y`; `public` are the public inputs that PATE labels."""
        with self._searched(X, y, public) as found:
            pass
        # After the end of the search: if it is repeated, nothing was released before.
        self._release(found)
        return self

    @contextlib.contextmanager
    def fitting(self, X: Any, y: ArrayLike, public: Any = None) -> Iterator[Self]:
        """Search as `fit` does, and end the search when the block ends: store the result in it.

        If the process is killed in the block, and the ledger has a file, the same search can be
        made again: it releases the same and pays nothing more.
        """
        with self._searched(X, y, public) as found:
            self._release(found)
            yield self

    def plan(self, X: Any, y: ArrayLike, public: Any = None) -> SearchPlan:
        """Return what `fit` would pay and do; nothing is paid or released."""
        return self._prepare(X, y, public).plan

    def forget(self, X: Any, y: ArrayLike, public: Any = None) -> None:
        """Delete what a killed search on these records has left beside the ledger."""
        records = PrivateRecords.of(X, y)
        candidates = self._candidates(records, split_of(self.holdout), public)
        if self.ledger is not None and is_pending(self.ledger, *self._prints(records, candidates)):
            with self._paid_once(records, candidates) as seed:
                Unfinished(self.ledger.path, seed).delete()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the predictions of the released model."""
        return self.best_estimator_.predict(X)

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Return the probabilities of the classes by the released model."""
        return self.best_estimator_.predict_proba(X)

    def score(self, X: Any, y: ArrayLike) -> float:
        """Return the exact score of the released model on other records, such as public ones."""
        return float(self.best_estimator_.score(X, y))

    @property
    def classes_(self) -> NDArray[Any]:
        """Classes of the released model."""
        return self.best_estimator_.classes_

    def _prepare(self, X: Any, y: ArrayLike, public: Any) -> "_CheckedSearch":
        """Check and plan the search, from public facts; nothing is paid or released."""
        if self.ledger is not None:
            self.ledger.require_unit(is_user=False)
        split = split_of(self.holdout)
        records = PrivateRecords.of(X, y)
        candidates = self._candidates(records, split, public)
        runs = self._runs(candidates, split, len(records.y))
        trials, whole_data = self._for_trials(candidates, split, runs, records)
        plan = self._plan(trials, whole_data, split, runs, records)
        score = self._score(candidates, plan, len(records.y))
        return _CheckedSearch(records, trials, whole_data, plan, score)

    @contextlib.contextmanager
    def _searched(self, X: Any, y: ArrayLike, public: Any) -> Iterator["_Winner"]:
        """Pay, make all runs and yield what may be released; the search ends with the block."""
        records, candidates, whole_data, plan, score = self._prepare(X, y, public)
        n_records = self._n_records(len(records.y))
        WeakGuarantee.issue(epsilon=self.epsilon, delta=self.delta, n_records=n_records)
        self._say(f"planned: {plan.describe()}")
        failure = None
        with self._paid_once(records, candidates) as seed:
            is_scoring = plan.split.is_scoring(len(records.y), generator(_derived(seed, "split")))
            training, scoring = records.rows(~is_scoring), records.rows(is_scoring)
            chosen = plan.runs.draw(
                len(candidates.configurations), generator(_derived(seed, "runs"))
            )
            ranks = generator(_derived(seed, "ties")).random(len(chosen))
            each = plan.run_epsilons or (plan.run_epsilon,) * len(plan.training)
            meant = tuple((x, whole_data.run_delta) for x in plan.last_epsilons if each)
            if self.ledger is not None:
                self.ledger.spend(plan.event, note=f"PrivateSearch: {plan.describe()}")
            self._say("paid; the runs are under way")
            with Unfinished(None if self.ledger is None else self.ledger.path, seed) as kept:
                trials = PrivateRuns(
                    candidates, each, plan.training, kept.cache, training, scoring, score, meant
                )
                last = PrivateRuns(whole_data, plan.last_epsilons, plan.last, kept.cache, records)
                try:
                    index, best = 0, Outcome(math.nan, None)
                    if plan.training:
                        index, best = self._best(trials, chosen, np.atleast_1d(ranks), seed, kept)
                    if plan.last:
                        best = self._last(last, index, len(chosen), seed, kept).scored(best.score)
                except SearchFailed as error:
                    failure = error
                else:
                    yield _Winner(dict(whole_data.configurations[index]), best, plan)
                kept.delete()
        # Raised when the search has ended, so that another try is another search, which pays.
        if failure is not None:
            raise failure
        self._say("released")

    def _n_records(self, n_rows: int) -> int:
        return n_rows if self.n_records is None else whole(n_records=self.n_records, least=2)

    def _candidates(self, records: PrivateRecords, split: Split, public: Any) -> Candidates:
        n_records = self._n_records(len(records.y))
        return Candidates.of(
            self.estimator,
            self.space,
            labels=records.y,
            n_training=n_records - split.scoring_records(n_records),
            delta=in_open_unit(delta=self.delta),
            relation=None if self.ledger is None else self.ledger.relation,
            public=public,
        )

    def _runs(self, candidates: Candidates, split: Split, n_rows: int) -> Runs:
        """Return the law of the runs, chosen from public facts if it is not given."""
        if self.runs is not None:
            if isinstance(self.runs, CheapTrials) and not candidates.has_budget:
                raise ValueError(
                    "runs must not be CheapTrials: the noise of the estimator is given, so no "
                    "trial can be cheaper than the last run. Use RandomRuns."
                )
            return self.runs
        n_records = self._n_records(n_rows)
        n_scoring = min(split.scoring_records(n_records), n_records - 1)
        return choose_runs(
            len(candidates.configurations),
            epsilon=positive(epsilon=self.epsilon),
            delta=candidates.delta,
            most=self.most_runs,
            n_scoring=n_scoring,
            holdout=n_scoring / n_records,
            has_budget=candidates.has_budget,
            is_automatic=candidates.is_automatic,
        )

    def _for_trials(
        self, candidates: Candidates, split: Split, runs: Runs, records: PrivateRecords
    ) -> tuple[Candidates, Candidates]:
        """Return the candidates of trials and those of a last run on all records, if there is one.

        Deltas of approximate DP add up, so runs get parts of that of the search. Without trials the
        only candidate is the estimator with the settings it was given.
        """
        n_configurations, delta = len(candidates.configurations), candidates.delta
        if not isinstance(runs, CheapTrials):
            events = [
                candidates.event(i, epsilon=positive(epsilon=self.epsilon) / 2, records=records)
                for i in range(n_configurations)
            ]
            price = price_of(runs.event(events), delta=delta, relation=candidates.relation)
            if math.isinf(price):  # some runs have a delta of their own
                count = runs.mean if isinstance(runs, RandomRuns) else n_configurations
                candidates = candidates.on(candidates.n_records, 0.5 * delta / max(1.0, count))
            return candidates, candidates
        n_records = self._n_records(len(records.y))
        if runs.count == 0:
            return candidates, replace(candidates.on(n_records, delta), configurations=({},))
        each = 0.5 * runs.share * delta / runs.trials(n_configurations)
        trials = candidates.on(n_records - split.scoring_records(n_records), each)
        return trials, candidates.on(n_records, (1 - runs.share) * delta)

    def _plan(
        self,
        candidates: Candidates,
        last: Candidates,
        split: Split,
        runs: Runs,
        records: PrivateRecords,
    ) -> SearchPlan:
        """Return the plan of the search, from public facts; nothing is paid or released.

        What a run pays must not depend on the records, so all of them stand for its training part.
        """
        epsilon, n_configurations = positive(epsilon=self.epsilon), len(candidates.configurations)
        terms: dict[str, Any] = {
            "split": split,
            "epsilon": epsilon,
            "delta": candidates.delta,
            "relation": candidates.relation,
        }

        def events_at(of: Candidates) -> Callable[[float, Sequence[int]], tuple[Event, ...]]:
            of.require_public_plan(epsilon=epsilon / 2, records=records)
            return lambda x, which: tuple(of.event(i, epsilon=x, records=records) for i in which)

        if isinstance(runs, CheapTrials):
            trial_at = events_at(candidates) if runs.count != 0 else None
            return plan_trials(trial_at, events_at(last), n_configurations, runs=runs, **terms)
        return plan_search(
            events_at(candidates),
            n_configurations,
            runs=runs,
            **terms,
            is_noise_given=not candidates.has_budget,
        )

    def _score(self, candidates: Candidates, plan: SearchPlan, n_rows: int) -> Score:
        kind, largest = score_kind(
            self.estimator, self.scoring, self.largest_error, candidates.target_bounds
        )
        n_scoring = plan.split.scoring_records(self._n_records(n_rows))
        return Score(kind, plan.score_noise, n_scoring, largest)

    @contextlib.contextmanager
    def _paid_once(self, records: PrivateRecords, candidates: Candidates) -> Iterator[int]:
        """Yield the seed of the search, which is the same when a killed search is continued."""
        prints = self._prints(records, candidates)
        # A seed given by the user is bound to data and settings: equal noise on two data sets
        # would show their difference.
        given = None
        if self.random_state is not None:
            given = _derived(whole(random_state=self.random_state), *map(repr, prints))
        if self.ledger is None:
            yield secrets.randbits(256) if given is None else given
            return
        with paid_once(self.ledger, *prints) as fresh:
            yield fresh if given is None else given

    def _prints(self, records: PrivateRecords, candidates: Candidates) -> list[bytes]:
        """Return hashes of all that the result depends on; private."""
        settings = {**self.get_params(deep=False), "estimator": None, "ledger": None}
        return _fingerprints(records, candidates, settings)

    def _best(
        self,
        runs: PrivateRuns,
        chosen: Sequence[int],
        ranks: NDArray[Any],
        seed: int,
        kept: Unfinished,
    ) -> tuple[int, Outcome]:
        """Make all runs and return the configuration and outcome of the best one.

        Runs are ordered by (score, rank). The ranks are uniform and independent of everything else,
        so ties are broken uniformly over the tied runs.
        """
        best: tuple[float, float, int, Outcome] | None = None
        done = {run: outcome for run in range(len(chosen)) if (outcome := kept.read(run))}
        left = [run for run in range(len(chosen)) if run not in done]
        work = ((run, chosen[run], _seeds(seed, run)) for run in left)
        for run, outcome in chain(done.items(), _run_all(runs, work, self.n_jobs, kept)):
            found = (outcome.score, float(ranks[run]), run, outcome)
            best = found if best is None else max(best, found, key=lambda one: one[:3])
        if best is None:
            raise SearchFailed(
                "the law of the runs gave no run, so nothing is released; it stays paid for. Use a "
                "default configuration, or a law with at least one run. Do not search again "
                "without paying."
            )
        return chosen[best[2]], best[3]

    def _last(
        self, runs: PrivateRuns, index: int, number: int, seed: int, kept: Unfinished
    ) -> Outcome:
        """Make the run that follows cheap trials, on all records, and return its outcome."""
        if (outcome := kept.read(number)) is None:
            outcome = runs.run(index, _seeds(seed, number))
            kept.write(number, outcome)
        return outcome

    def _release(self, found: "_Winner") -> None:
        self.best_params_, best, self.plan_ = found
        self.best_estimator_, self.best_score_ = best.model, best.score
        self.event_ = self.plan_.event
        if hasattr(best.model, "event_"):
            best.model.event_ = self.event_  # what this model cost is the whole search

    def _say(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)


class _CheckedSearch(NamedTuple):
    """What a search needs before it pays: all of it is checked, and nothing is released."""

    records: PrivateRecords
    candidates: Candidates
    whole_data: Candidates  # of the last run, on all records
    plan: SearchPlan
    score: Score


class _Winner(NamedTuple):
    """What a search may release."""

    parameters: dict[str, Any]  # Any: values of settings
    outcome: Outcome
    plan: SearchPlan


def _run_all(
    runs: PrivateRuns, work: Any, n_jobs: int | None, kept: Unfinished
) -> Iterator[tuple[int, Outcome]]:
    """Yield (number, outcome) of every run, in the order in which runs end."""
    from joblib import Parallel, delayed

    pool = Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    for found in pool(delayed(_run_one)(runs, *item) for item in work):
        assert found is not None  # joblib's types allow for tasks without a result
        run, outcome = found
        kept.write(run, outcome)
        yield run, outcome


def _run_one(
    runs: PrivateRuns, run: int, index: int, seeds: tuple[int, int]
) -> tuple[int, Outcome]:
    return run, runs.run(index, seeds)


def _seeds(seed: int, run: int) -> tuple[int, int]:
    """Return the seeds of training and of the score of a run.

    They follow from the seed that is stored with the payment, so that a run which is repeated, for
    the same payment, has the same noise.
    """
    train, score = (_derived(seed, f"{part} {run}") % _MOST_SEED for part in _PARTS)
    return train, score


def _derived(seed: int, *names: str) -> int:
    """Return a seed for one purpose; seeds for different purposes are unrelated."""
    text = "\n".join((f"{seed:x}", *names)).encode()
    return int.from_bytes(hashlib.sha256(text).digest())


def _fingerprints(
    records: PrivateRecords, candidates: Candidates, settings: dict[str, Any]
) -> list[bytes]:
    """Return hashes of all that the result depends on; private, as they may confirm guesses.

    Settings that cannot be pickled get random bytes: such a search cannot be recognized, and
    starts anew after it was killed.
    """
    import pickle

    from joblib import hash as digest

    ignored = ("n_jobs", "progress")
    plain = {key: value for key, value in settings.items() if key not in ignored}
    try:
        own = {k: v for k, v in candidates.estimator.get_params().items() if "ledger" not in k}
        kind = type(candidates.estimator)
        program = kind.__module__, kind.__qualname__
        parts = (tuple(records), candidates.public, candidates.configurations, plain, own, program)
        return [str(digest(part)).encode() for part in parts]
    except (pickle.PicklingError, TypeError, AttributeError):
        return [secrets.token_bytes(32)]
