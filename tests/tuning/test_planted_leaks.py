"""Ways in which a search could leak, each planted on purpose and found by a check.

Every check passes for the search as it is and fails for a copy with the leak.
"""

import os
import pickle
import subprocess
import sys
import traceback
from unittest import mock

import numpy as np
import pytest
import toy_estimator as toy

import tacit
from tacit import events as ev
from tacit.mechanisms import generator
from tacit.tuning import (
    CheapTrials,
    CoinSplit,
    EveryConfiguration,
    FixedSplit,
    PrivateSearch,
    RandomRuns,
    SearchFailed,
)
from tacit.tuning import search as search_module
from tacit.tuning.holdout import Score
from tacit.tuning.private_run import Outcome
from tacit.tuning.search import _derived
from tacit.tuning.unfinished import Unfinished

SPACE = {"level": [0.1, 0.3, 0.5, 0.7, 0.9]}
SEED = 11
EVERY = EveryConfiguration()


def fitted(search_type, X, y, **settings):
    """Return a fitted search whose coins, runs and ties are the same for every data set."""
    search = search_type(toy.Toy(), SPACE, **{"runs": EveryConfiguration(), **settings})
    fixed = mock.patch.object(PrivateSearch, "_paid_once", return_value=_Fixed())
    toy.RUNS.clear()
    with fixed:
        return search.fit(X, y)


class _Fixed:
    def __enter__(self):
        return SEED

    def __exit__(self, *_):
        return False


def runs_on(search_type, X, y, runs=EVERY):
    fitted(search_type, X, y, runs=runs)
    return list(toy.RUNS)


def two_tables():
    X, y = toy.records(600)
    return (X, y), (1 - X / 9, y * 0)


# 1. The number of runs is taken from the data.


def check_that_runs_ignore_the_records(search_type):
    first, second = two_tables()
    assert runs_on(search_type, *first) == runs_on(search_type, *second)


class RunsFromData(PrivateSearch):
    def _best(self, runs, chosen, *rest):
        return super()._best(runs, chosen[: 1 + int(runs.training.y.sum() > 0)], *rest)


# 2. The search stops at a good score.


def check_that_scores_stop_nothing(search_type):
    X, y = toy.records(600)
    assert len(runs_on(search_type, X * 0, y)) == len(SPACE["level"])


class StopsOnScore(PrivateSearch):
    def _best(self, runs, chosen, *rest):
        for index in chosen:
            outcome = runs.run(index, (None, None))
            if outcome.score > 0.8:
                return index, outcome
        return super()._best(runs, chosen, *rest)


# 3. A second model is kept.


def check_that_one_model_is_kept(search_type):
    X, y = toy.records(600)
    search = fitted(search_type, X, y)
    assert pickle.dumps(search).count(b"tag0.") == 1


class KeepsSecondBest(PrivateSearch):
    def _best(self, runs, chosen, *rest):
        self.second_ = runs.run(chosen[0], (None, None)).model
        return super()._best(runs, chosen, *rest)


# 4. Scores or counts are printed.


def check_that_output_ignores_the_records(search_type, capfd):
    lines = []
    for X, y in two_tables():
        told = []
        fitted(search_type, X, y, progress=told.append)
        lines.append((told, capfd.readouterr()))
    assert lines[0] == lines[1]


class PrintsScore(PrivateSearch):
    def _best(self, *args):
        index, outcome = super()._best(*args)
        self._say(f"best score so far {outcome.score:.3f}")
        return index, outcome


# 5. Configurations are drawn without replacement.


def check_that_draws_are_independent(law):
    """Two draws from 3 agree one time in 3: binomial(600, 1/3), false alarm below 1e-8."""
    drawn = [law.draw(3, np.random.default_rng(i)) for i in range(600)]
    assert 130 < sum(a == b for a, b in drawn) < 270


class WithoutReplacement(RandomRuns):
    def draw(self, n_configurations, rng):
        return [int(i) for i in rng.permutation(n_configurations)[:2]]


# 6. Ties are broken by the most frequent output.


class _Ties:
    """Runs that all score the same."""

    def run(self, index, _):
        return Outcome(0.5, index)


def check_that_ties_are_broken_over_runs(search_type):
    """A configuration with 2 of 10 runs wins one time in 5: binomial(300, 0.2), alarm < 1e-8."""
    search = search_type(toy.Toy(), SPACE)
    rng = np.random.default_rng(0)
    won = [
        search._best(_Ties(), [0] * 8 + [1] * 2, rng.random(10), 0, Unfinished(None, 0))[0]
        for _ in range(300)
    ]
    assert 20 < sum(won) < 105


class Plurality(PrivateSearch):
    def _best(self, runs, chosen, ranks, seed, kept):
        index = max(set(chosen), key=list(chosen).count)
        return index, runs.run(index, (None, None))


# 7. A split of fixed size is priced like coins.


def check_that_a_record_which_can_move_is_paid_twice(split):
    """Where an added record moves another one across, a run must pay for training and score."""
    moves = 0
    for seed in range(20):
        before = split.is_scoring(50, np.random.default_rng(seed))
        after = split.is_scoring(51, np.random.default_rng(seed))
        moves += int((before != after[:50]).any())
    event = split.event(EveryConfiguration(), (ev.Gaussian(2.0),), ev.Gaussian(3.0, 1.0))
    is_composed = event == ev.Sequence((ev.Sequence((ev.Gaussian(2.0), ev.Gaussian(3.0, 1.0))),))
    assert is_composed or moves == 0


class FixedPricedAsCoins(FixedSplit):
    def event(self, runs, training, score, last=None):
        return CoinSplit(0.2).event(runs, training, score, last)


# 8. Ties go to the run that ends first: how long a run takes may depend on the records.


def check_that_the_order_of_ends_breaks_no_tie(search_type):
    found = set()
    for way in (1, -1):

        def ends(_, work, __, ___, way=way):
            return [(run, Outcome(0.5, index)) for run, index, _ in list(work)[::way]]

        with mock.patch.object(search_module, "_run_all", ends):
            search = search_type(toy.Toy(), SPACE)
            ranks = np.random.default_rng(0).random(5)
            found.add(search._best(None, list(range(5)), ranks, 0, Unfinished(None, 0))[0])
    assert len(found) == 1


class FirstToEnd(PrivateSearch):
    def _best(self, runs, chosen, ranks, seed, kept):
        work = [(run, index, (None, None)) for run, index in enumerate(chosen)]
        found = search_module._run_all(runs, work, None, kept)
        run, outcome = max(found, key=lambda one: one[1].score)  # the first of equal scores
        return chosen[run], outcome


# 9. A run that failed is tried again with another seed.


def check_that_a_failed_run_is_not_repeated(search_type):
    X, y = toy.records(200)
    search = search_type(toy.Toy(fail="raise"), SPACE, runs=EveryConfiguration())
    toy.RUNS.clear()
    with pytest.raises(SearchFailed):
        search.fit(X, y)
    assert len(toy.RUNS) == 1


class TriesAgain(PrivateSearch):
    def _best(self, *args):
        try:
            return super()._best(*args)
        except SearchFailed:
            return super()._best(*args)


# 10. A search that continues draws other configurations.


def check_that_a_seed_fixes_the_runs(search_type):
    """A killed search is given its old seed; number and configurations of its runs follow."""
    X, y = toy.records(300)
    law = CheapTrials(count=8)
    first, second = (runs_on(search_type, X, y, law)[:8] for _ in range(2))
    assert first == second  # the trials; the last run follows from their noisy scores


class DrawsAgain(PrivateSearch):
    def _best(self, runs, chosen, ranks, seed, kept):
        chosen = [int(i) for i in np.random.default_rng().integers(0, 5, 40)]
        return super()._best(runs, chosen, np.random.default_rng().random(40), seed, kept)


# 11. The last run after cheap trials is not paid for.


def check_that_the_last_run_is_paid(split):
    last = ev.Gaussian(1.5)
    event = split.event(CheapTrials(), (ev.Gaussian(9.0),) * 3, ev.Gaussian(9.0, 1.0), last)
    assert tacit.epsilon(event, delta=1e-6) > tacit.epsilon(last, delta=1e-6)


class TrialsAlone(CoinSplit):
    def event(self, runs, training, score, last=None):  # the leak: `last` is ignored
        return super().event(runs, training, score)


# 12. The configuration of the last run is taken from its accuracy on all records.


def check_that_the_last_run_follows_the_scores(search_type):
    """Levels score alike on the holdout of this seed, and very differently on other records."""
    X, y = toy.records(600)
    chosen = []
    for level in (0.0, 1.0):
        is_scoring = CoinSplit(0.2).is_scoring(len(y), generator(_derived(SEED, "split")))
        moved = np.where(is_scoring[:, None], X, level)
        noiseless = mock.patch.object(Score, "release", lambda self, m, X, y, _: m.level)
        with noiseless:
            search = fitted(search_type, moved, y, runs=CheapTrials())
        chosen.append(search.best_params_)
    assert chosen[0] == chosen[1]


class LooksAtAllRecords(PrivateSearch):
    def _last(self, runs, index, *rest):
        self.best_ = index if runs.training.x[:, 0].mean() < 0.5 else 0
        return super()._last(runs, self.best_, *rest)

    def _release(self, found):
        super()._release(found._replace(parameters={"level": SPACE["level"][self.best_]}))


# 13. Estimators that would carry private values out of a run, or from one run to the next.


class Writes(toy.Toy):
    """Adds up, in the records, how often it was fitted: a warm start."""

    def fit(self, X, y):
        super().fit(X, y)
        X[0, 0] += 1
        self.coef_ = np.array([X[0, 0]])
        return self

    def predict(self, X):
        X[0, 0] += 1
        return np.ones(len(X)) * (X[0, 0] < 2)


class Leaves(toy.Toy):
    """Ends the process, with a private value as its last words."""

    def fit(self, X, y):
        super().fit(X, y)
        sys.exit(f"private {X[0, 0]}")


class Names(toy.Toy):
    """Raises an error whose kind is called by a private value."""

    def fit(self, X, y):
        super().fit(X, y)
        raise type(f"private{X[0, 0]}", (LookupError,), {})


class Claims(toy.Toy):
    """Raises the error of a search, with a private value in its text."""

    def fit(self, X, y):
        super().fit(X, y)
        raise SearchFailed(f"private {X[0, 0]}")


class Shouts(toy.Toy):
    """Writes to the outputs of the process, as compiled libraries and child processes do."""

    def fit(self, X, y):
        super().fit(X, y)
        os.write(1, f"private {X[0, 0]}\n".encode())
        os.write(2, f"private {X[0, 0]}\n".encode())
        print("private", X[0, 0], file=sys.__stdout__, flush=True)
        subprocess.run([sys.executable, "-c", "print('private')"], check=True)
        return self


@pytest.mark.parametrize("holdout", [0.2, 100])
@pytest.mark.parametrize("runs", [EveryConfiguration(), CheapTrials()])
def test_no_run_sees_what_another_wrote_into_the_records(runs, holdout):
    X, y = toy.records(400)
    first = X[0, 0]
    search = PrivateSearch(Writes(), SPACE, runs=runs, holdout=holdout, epsilon=50.0).fit(X, y)
    assert search.best_estimator_.coef_[0] < 2  # 1 + a number below 1: fitted once
    assert X[0, 0] == first


@pytest.mark.parametrize("estimator", [Leaves, Names, Claims])
@pytest.mark.parametrize("n_jobs", [None, 2])
def test_the_end_of_a_run_quotes_nothing(estimator, n_jobs, capfd):
    X, y = toy.records(200)
    search = PrivateSearch(estimator(), SPACE, runs=EveryConfiguration(), n_jobs=n_jobs)
    with pytest.raises(SearchFailed) as found:
        search.fit(X, y)
    text = "".join(traceback.format_exception(found.value))
    assert "private " not in text
    assert "private0" not in text
    assert "private" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("n_jobs", [None, 2])
def test_nothing_is_written_past_python(n_jobs, capfd):
    X, y = toy.records(200)
    PrivateSearch(Shouts(), SPACE, runs=EveryConfiguration(), n_jobs=n_jobs).fit(X, y)
    print("after")
    assert capfd.readouterr() == ("after\n", "")


def test_an_interrupt_is_one_and_quotes_nothing():
    class Interrupted(toy.Toy):
        def fit(self, X, y):
            super().fit(X, y)
            raise KeyboardInterrupt(f"private {X[0, 0]}")

    with pytest.raises(KeyboardInterrupt) as found:
        PrivateSearch(Interrupted(), SPACE, runs=EveryConfiguration()).fit(*toy.records(200))
    assert not found.value.args
    assert found.value.__context__ is None


@pytest.mark.parametrize(
    ("check", "honest", "leaky"),
    [
        (check_that_runs_ignore_the_records, PrivateSearch, RunsFromData),
        (check_that_scores_stop_nothing, PrivateSearch, StopsOnScore),
        (check_that_one_model_is_kept, PrivateSearch, KeepsSecondBest),
        (
            check_that_draws_are_independent,
            RandomRuns(mean=2, trials="fixed"),
            WithoutReplacement(mean=2, trials="fixed"),
        ),
        (check_that_ties_are_broken_over_runs, PrivateSearch, Plurality),
        (check_that_a_record_which_can_move_is_paid_twice, FixedSplit(10), FixedPricedAsCoins(10)),
        (check_that_the_order_of_ends_breaks_no_tie, PrivateSearch, FirstToEnd),
        (check_that_a_failed_run_is_not_repeated, PrivateSearch, TriesAgain),
        (check_that_a_seed_fixes_the_runs, PrivateSearch, DrawsAgain),
        (check_that_the_last_run_is_paid, CoinSplit(0.2), TrialsAlone(0.2)),
        (check_that_the_last_run_follows_the_scores, PrivateSearch, LooksAtAllRecords),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_planted_leak_is_found(check, honest, leaky):
    check(honest)
    with pytest.raises(AssertionError):
        check(leaky)


def test_a_printed_score_is_found(capfd):
    check_that_output_ignores_the_records(PrivateSearch, capfd)
    with pytest.raises(AssertionError):
        check_that_output_ignores_the_records(PrintsScore, capfd)


def test_coins_move_no_other_record():
    check_that_a_record_which_can_move_is_paid_twice(CoinSplit(0.2))


def test_a_wrong_price_of_a_fixed_split_would_be_beaten():
    """An exact attack: pricing a fixed-size split as coins states less than the truth.

    One added record changes training and score together. Both are Gaussian releases that move by
    their full sensitivity, so the pair is at distance sqrt(mu_1^2 + mu_2^2).
    """
    from tacit.accounting import epsilon, gaussian_epsilon

    one, two = ev.Gaussian(2.0), ev.Gaussian(2.0, 1.0)
    truth = gaussian_epsilon(np.sqrt(0.25 + 0.25), 1e-6)
    every = EveryConfiguration()
    assert epsilon(CoinSplit(0.5).event(every, (one,), two), delta=1e-6) < truth
    assert epsilon(FixedSplit(10).event(every, (one,), two), delta=1e-6) >= truth * (1 - 1e-9)
