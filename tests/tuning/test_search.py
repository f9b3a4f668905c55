"""A search pays once, before its first run, and releases one configuration, model and score."""

import os
import pickle
import threading

import numpy as np
import pytest
import toy_estimator as toy
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.tree import DecisionTreeClassifier

import tacit
from tacit import events as ev
from tacit.errors import BudgetExceeded
from tacit.pate import GNMax, PATEClassifier
from tacit.regression import Bounds, LinearRegression, LogisticRegression
from tacit.tuning import CheapTrials, EveryConfiguration, PrivateSearch, RandomRuns, SearchFailed
from tacit.tuning import search as search_module
from tacit.tuning.candidates import silence

LEVELS = {"level": [0.1, 0.5, 0.9]}
EVERY = EveryConfiguration()


def toy_search(space=LEVELS, **settings):
    settings = {"runs": EVERY, "random_state": 0, **settings}
    return PrivateSearch(toy.Toy(), space, **settings)


def test_the_best_configuration_is_released_within_the_budget():
    X, y = toy.records()
    ledger = tacit.Ledger(budget=tacit.Budget(epsilon=1.0, delta=1e-6))
    search = toy_search(ledger=ledger).fit(X, y)
    assert search.best_params_ == {"level": 0.9}
    assert search.best_score_ == pytest.approx(0.9, abs=0.1)
    assert [entry.event for entry in ledger.history()] == [search.event_]
    assert 0.99 < search.plan_.epsilon <= 1.0
    assert tacit.epsilon(search.event_, delta=1e-6) == search.plan_.epsilon


def test_random_stopping_costs_the_budget_and_no_more():
    X, y = toy.records()
    search = toy_search(runs=RandomRuns(mean=5.0), epsilon=2.0).fit(X, y)
    assert isinstance(search.event_, ev.OneOf)
    assert all(isinstance(part, ev.BestOf) for part in search.event_.parts)
    assert search.event_.weights == (0.8, 0.2)
    assert 1.98 < search.plan_.epsilon <= 2.0
    assert search.plan_.run_epsilon < 2.0


def test_cheap_trials_are_followed_by_one_run_on_all_records():
    X, y = toy.records()
    ledger = tacit.Ledger(budget=tacit.Budget(epsilon=1.0, delta=1e-6))
    toy.RUNS.clear()
    search = toy_search(runs=CheapTrials(), ledger=ledger).fit(X, y)
    assert toy.RUNS == [0.1, 0.5, 0.9, 0.9]
    assert search.best_params_ == {"level": 0.9}
    assert search.best_score_ == pytest.approx(0.9, abs=0.2)
    assert [entry.event for entry in ledger.history()] == [search.event_]
    plan = search.plan_
    assert 0.99 < plan.epsilon <= 1.0
    assert max(plan.run_epsilons) < 0.3 < 0.8 < min(plan.last_epsilons)
    # The released model paid for what the plan says, and the last run is part of both cases.
    last = ev.Gaussian(toy.noise_for(plan.last_epsilons[0], 0.8e-6))
    assert all(last in part.parts for part in search.event_.parts)


def test_few_records_get_no_trials():
    X, y = toy.records(60)
    toy.RUNS.clear()
    search = toy_search(runs=None).fit(X, y)
    assert toy.RUNS == [0.5]  # the level of the estimator as it is
    assert search.best_params_ == {}
    assert np.isnan(search.best_score_)
    assert search.plan_.last_epsilons == (1.0,)
    assert "no trials" in search.plan_.describe()


@pytest.mark.slow
def test_configurations_with_other_kinds_of_noise_are_a_free_choice():
    """A pure release composes differently, so it gets budgets of its own."""
    X, y = np.random.default_rng(0).random((3000, 2)), np.random.default_rng(1).random(3000)
    model = LinearRegression(bounds=Bounds(0, 1), target_bounds=Bounds(0, 1))
    space = {"method": ["gradient", "functional"]}
    search = PrivateSearch(model, space, runs=CheapTrials(), random_state=0).fit(X, y)
    (part, _) = search.event_.parts
    assert isinstance(part.parts[-1], ev.ChosenOf)
    gaussian, pure = search.plan_.last_epsilons
    assert pure < gaussian < 1
    assert 0.98 < search.plan_.epsilon <= 1


def test_trials_cannot_be_cheap_if_the_noise_is_given():
    search = PrivateSearch(PATEClassifier(aggregator=GNMax(40.0)), {"n_teachers": [4]})
    search.runs = CheapTrials()
    with pytest.raises(ValueError, match="must not be CheapTrials"):
        search.fit(np.zeros((40, 2)), np.arange(40) % 2, np.zeros((3, 2)))


def test_a_fixed_number_of_scoring_records_is_composed_with_training():
    X, y = toy.records()
    search = toy_search(holdout=400).fit(X, y)
    (part, *_) = search.event_.parts
    assert isinstance(part, ev.Sequence)
    assert len(part.parts) == 2
    assert 0.99 < search.plan_.epsilon <= 1.0
    coin = toy_search(holdout=0.2).fit(X, y)
    assert search.plan_.run_epsilon < coin.plan_.run_epsilon


def test_nothing_runs_if_the_budget_is_too_small():
    X, y = toy.records()
    ledger = tacit.Ledger(budget=tacit.Budget(epsilon=0.5, delta=1e-6))
    toy.RUNS.clear()
    with pytest.raises(BudgetExceeded):
        toy_search(ledger=ledger).fit(X, y)
    assert toy.RUNS == []


def test_a_failing_run_ends_the_search_and_quotes_nothing():
    X, y = toy.records()
    X[:] = 0.123456
    search = toy_search({"level": [0.5], "fail": ["raise"]})
    with pytest.raises(SearchFailed, match=r"a run failed \(RuntimeError\)") as caught:
        search.fit(X, y)
    assert "0.12345" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert not hasattr(search, "best_estimator_")


def test_a_search_that_failed_pays_again_when_it_is_tried_again(tmp_path):
    """Otherwise a failure that depends on the records could be tried until it is gone."""
    X, y = toy.records()
    with tacit.Ledger(tmp_path / "clinic.ledger") as ledger:
        for payments in (1, 2):
            search = toy_search({"fail": ["raise"]}, ledger=ledger, random_state=None)
            with pytest.raises(SearchFailed):
                search.fit(X, y)
            assert len(ledger.history()) == payments
    assert not [name for name in os.listdir(tmp_path) if "search" in name or "pending" in name]


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
def test_other_relations_are_priced_as_such(relation):
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 1, (2000, 1))
    y = (X[:, 0] > 0.5).astype(int)
    model = LogisticRegression(bounds=Bounds(0, 1), relation=relation)
    space = {"method": ["gradient"]}
    search = PrivateSearch(model, space, runs=EVERY, random_state=0, epsilon=2.0).fit(X, y)
    price = tacit.epsilon(search.event_, delta=1e-6, relation=ev.Relation(relation))
    assert price == search.plan_.epsilon <= 2.0
    with pytest.raises(ValueError, match="must be that of the ledger"):
        search.set_params(ledger=tacit.Ledger()).fit(X, y)


def test_public_inputs_are_for_estimators_that_take_them():
    with pytest.raises(TypeError, match="takes no public inputs"):
        toy_search().fit(*toy.records(), public=np.zeros((3, 2)))


def test_a_diverged_model_counts_and_scores_lowest():
    X, y = toy.records()
    space = [{"level": 0.9, "fail": "diverge"}, {"level": 0.1}]
    toy.RUNS.clear()
    search = toy_search(space).fit(X, y)
    assert toy.RUNS == [0.9, 0.1]
    assert search.best_params_ == {"level": 0.1}
    assert toy_search(space[:1]).fit(X, y).best_score_ == -np.inf


def test_a_run_that_pays_for_more_than_planned_ends_the_search():
    with pytest.raises(SearchFailed, match="asked to pay for more"):
        toy_search({"fail": ["again"]}).fit(*toy.records())


def test_a_price_that_follows_the_records_is_refused():
    with pytest.raises(ValueError, match="depends on the records"):
        toy_search({"fail": ["price"]}).fit(*toy.records())


@pytest.mark.parametrize(
    ("estimator", "space", "message"),
    [
        (toy.Toy(), {"epsilon": [1.0]}, "must not contain epsilon"),
        (toy.Toy(), {"ledger": [None]}, "must not contain ledger"),
        (toy.Toy(), {"level": 0.5}, "a list of values"),
        (toy.Toy(), [], "at least one configuration"),
        (DecisionTreeClassifier(), {"max_depth": [1]}, "must be private"),
        (PATEClassifier(folder="runs"), {"n_teachers": [5]}, "must not have a folder"),
    ],
)
def test_what_cannot_be_searched_is_refused(estimator, space, message):
    with pytest.raises((TypeError, ValueError), match=message):
        PrivateSearch(estimator, space).fit(*toy.records())


def test_no_run_drawn_releases_nothing(monkeypatch):
    """A Poisson number of runs is 0 at times; here the draw is replaced."""
    monkeypatch.setattr(EveryConfiguration, "draw", lambda *_: [])
    ledger = tacit.Ledger()
    search = toy_search(ledger=ledger)
    with pytest.raises(SearchFailed, match="gave no run"):
        search.fit(*toy.records())
    assert len(ledger.history()) == 1


def test_a_killed_search_continues_without_a_second_payment(tmp_path, monkeypatch):
    """Killed in the third of four runs: two runs are kept, the others are made again."""
    X, y = toy.records()
    space = {"level": [0.1, 0.2, 0.3, 0.4]}
    path = tmp_path / "clinic.ledger"
    plain = toy.Toy.fit

    def killed(self, *args):
        if self.level == 0.3 and type(self.ledger) is tacit.Ledger:
            raise KeyboardInterrupt
        return plain(self, *args)

    toy.RUNS.clear()
    monkeypatch.setattr(toy.Toy, "fit", killed)
    with tacit.Ledger(path) as ledger, pytest.raises(KeyboardInterrupt):
        toy_search(space, ledger=ledger, random_state=None).fit(X, y)
    (kept,) = tmp_path.glob(".clinic.ledger.search-*")
    assert kept.stat().st_mode & 0o777 == 0o700
    assert len(list(kept.iterdir())) == 2
    monkeypatch.setattr(toy.Toy, "fit", plain)
    with tacit.Ledger(path) as ledger:
        search = toy_search(space, ledger=ledger, random_state=None).fit(X, y)
        assert len(ledger.history()) == 1
        assert toy.RUNS == [0.1, 0.2, 0.3, 0.4]
        assert search.best_params_ == {"level": 0.4}
        toy_search(space, ledger=ledger, random_state=None).fit(X, y)
        assert len(ledger.history()) == 2  # a new search, after the first has released
    assert not [name for name in os.listdir(tmp_path) if "search" in name or "pending" in name]


def test_a_kept_outcome_that_was_changed_is_not_read(tmp_path):
    kept = search_module.Unfinished(tmp_path / "a.ledger", 5)
    kept.write(0, search_module.Outcome(1.0, "model"))
    assert kept.read(0) == (1.0, "model")
    (file,) = next(tmp_path.glob(".a.ledger.search-*")).iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert kept.read(0) is None
    kept.delete()
    assert list(tmp_path.iterdir()) == []


def test_other_data_or_settings_pay_again_and_draw_other_noise():
    X, y = toy.records()
    first = toy_search().fit(X, y)
    again = toy_search().fit(X, y)
    other = toy_search().fit(*toy.records(seed=1))
    assert first.best_score_ == again.best_score_
    assert first.best_estimator_.coef_[1] == again.best_estimator_.coef_[1]
    assert first.best_estimator_.coef_[1] != other.best_estimator_.coef_[1]


def test_the_released_model_has_no_seed_and_no_ledger():
    search = toy_search(ledger=tacit.Ledger()).fit(*toy.records())
    assert search.best_estimator_.random_state is None
    assert search.best_estimator_.ledger is None
    search.ledger = None
    assert pickle.loads(pickle.dumps(search)).best_params_ == {"level": 0.9}
    assert clone(search).space == LEVELS


@pytest.mark.slow  # starts processes
def test_parallel_runs_give_the_same_result():
    X, y = toy.records(400)
    one, two = (toy_search(n_jobs=n).fit(X, y) for n in (1, 2))
    assert one.best_score_ == two.best_score_


def test_a_pipeline_is_searched_through_its_private_step():
    X, y = toy.records()
    search = PrivateSearch(
        make_pipeline(FunctionTransformer(), toy.Toy()),
        {"toy__level": [0.2, 0.8]},
        runs=EVERY,
        random_state=0,
    ).fit(X, y)
    assert search.best_params_ == {"toy__level": 0.8}
    assert search.best_estimator_[-1].random_state is None


def test_regressors_are_scored_by_their_errors():
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 1, (5000, 2))
    y = X @ [1.0, -1.0]
    model = LinearRegression(delta=1e-6, bounds=Bounds(0, 1), target_bounds=Bounds(-1, 1))
    space = {"method": ["adassp", "gradient"]}
    search = PrivateSearch(model, space, runs=EVERY, random_state=0).fit(X, y)
    assert search.score(X, y) > 0.8
    assert search.best_score_ > 0.9
    assert search.best_estimator_.event_ == search.event_  # what this model cost


def test_classes_that_only_one_part_holds_are_known_to_all_runs():
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 1, (3000, 1))
    y = (X[:, 0] > 0.5).astype(int)
    y[0] = 2
    model = LogisticRegression(bounds=Bounds(0, 1))
    search = PrivateSearch(model, {"method": ["gradient"]}, runs=EVERY, random_state=0).fit(X, y)
    assert search.classes_.tolist() == [0, 1, 2]


def test_pate_is_searched_with_the_noise_it_was_given():
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 1, (1200, 2))
    y = (X[:, 0] > 0.5).astype(int)
    model = PATEClassifier(
        DecisionTreeClassifier(max_depth=2), aggregator=GNMax(30.0), n_queries=8, n_teachers=20
    )
    space = {"n_teachers": [10, 20]}
    search = PrivateSearch(model, space, epsilon=5.0, runs=EVERY, random_state=0)
    public = rng.uniform(0, 1, (200, 2))
    search.fit(X, y, public)
    assert search.plan_.run_epsilon is None
    assert search.plan_.epsilon <= 5.0
    assert search.best_estimator_.ledger_ is None
    with pytest.raises(ValueError, match=r"above epsilon = 0\.1"):
        search.set_params(epsilon=0.1).fit(X, y, public)


class _Remembers(toy.Toy):
    """Keeps the inputs of its last prediction, as a cache would."""

    def predict(self, X):
        self.seen_ = X
        return super().predict(X)


def test_the_released_model_holds_no_scoring_record():
    search = PrivateSearch(_Remembers(), LEVELS, runs=EVERY).fit(*toy.records())
    assert not hasattr(search.best_estimator_, "seen_")


def test_another_estimator_with_the_same_settings_is_another_search(tmp_path, monkeypatch):
    X, y = toy.records()
    path = tmp_path / "clinic.ledger"

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, tacit.Ledger(path) as ledger:
        patch.setattr(search_module.PrivateRuns, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            toy_search(ledger=ledger).fit(X, y)
    with tacit.Ledger(path) as ledger:
        search = PrivateSearch(_Remembers(), LEVELS, runs=EVERY, random_state=0, ledger=ledger)
        search.fit(X, y)
        assert len(ledger.history()) == 2


def test_threads_share_one_silence(capsys):
    """The block that began first ends first, while the other one still prints."""
    both, first_ended = threading.Barrier(2), threading.Event()

    def first():
        with silence():
            both.wait(10)
        first_ended.set()

    def second():
        with silence():
            both.wait(10)
            assert first_ended.wait(10)
            print("private")

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("public")
    assert capsys.readouterr().out == "public\n"


def test_outcomes_that_cannot_be_deleted_are_named(tmp_path, monkeypatch):
    kept = search_module.Unfinished(tmp_path / "a.ledger", 5)
    kept.write(0, search_module.Outcome(1.0, "model"))
    with monkeypatch.context() as patch:
        patch.setattr("tacit.tuning.unfinished.shutil.rmtree", lambda *_, **__: None)
        with pytest.warns(UserWarning, match="Delete it"):
            kept.delete()
    kept.delete()


def test_a_search_on_records_is_not_paid_for_by_a_ledger_of_users():
    X, y = toy.records()
    ledger = tacit.Ledger(unit="user")
    with pytest.raises(ValueError, match="one user, but this release protects one record"):
        toy_search(ledger=ledger).fit(X, y)
    assert ledger.history() == []
