"""Only what is known to be private is searched, and no run has an object of another one."""

import numpy as np
import pytest
import toy_estimator as toy
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import AdaBoostClassifier, BaggingClassifier, StackingClassifier
from sklearn.ensemble import VotingClassifier as Voting
from sklearn.feature_selection import SelectFromModel
from sklearn.model_selection import GridSearchCV
from sklearn.multiclass import OneVsRestClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer, StandardScaler, scale

import tacit
from tacit.errors import LearningStep
from tacit.events import ApproximateDP
from tacit.regression import Bounds, LinearRegression, LogisticRegression
from tacit.tuning import CheapTrials, EveryConfiguration, PrivateSearch, RandomRuns

EVERY = EveryConfiguration()
LOGISTIC = LogisticRegression(bounds=Bounds(0, 1))
LINEAR = LinearRegression(bounds=Bounds(0, 1), target_bounds=(0, 1))
NEIGHBORS = KNeighborsClassifier(1)


def table(n=400):
    X = np.random.default_rng(0).uniform(0, 1, (n, 2))
    return X, (X[:, 0] > 0.5).astype(int)


def refused(estimator, space, error, message):
    ledger = tacit.Ledger()
    search = PrivateSearch(estimator, space, runs=EVERY, ledger=ledger, largest_error=1.0)
    with pytest.raises(error, match=message):
        search.fit(*table())
    assert ledger.history() == []
    assert not hasattr(search, "best_estimator_")


COMPOSITES = [
    (Voting([("a", LOGISTIC)]), "a__method"),
    (Voting([("a", LOGISTIC), ("knn", NEIGHBORS)]), "a__method"),
    (StackingClassifier([("a", LOGISTIC), ("knn", NEIGHBORS)]), "a__method"),
    (TransformedTargetRegressor(LINEAR, transformer=StandardScaler()), "regressor__method"),
    (OneVsRestClassifier(LOGISTIC), "estimator__method"),
    (BaggingClassifier(LOGISTIC), "estimator__method"),
    (AdaBoostClassifier(LOGISTIC), "estimator__method"),
    (CalibratedClassifierCV(LOGISTIC), "estimator__method"),
    (GridSearchCV(LOGISTIC, {"fit_intercept": [True]}), "estimator__method"),
    (make_pipeline(SelectFromModel(LOGISTIC), NEIGHBORS), "selectfrommodel__estimator__method"),
    (type("Own", (Pipeline,), {})([("a", LOGISTIC)]), "a__method"),
]


@pytest.mark.parametrize(("composite", "setting"), COMPOSITES)
@pytest.mark.parametrize("is_in_pipeline", [False, True])
def test_a_composition_whose_parts_could_learn_is_refused_by_name(
    composite, setting, is_in_pipeline
):
    name = type(composite[-1] if type(composite) is Pipeline else composite).__name__
    if is_in_pipeline:
        composite, setting = Pipeline([("last", composite)]), f"last__{setting}"
    refused(composite, {setting: ["gradient"]}, TypeError, f"must be private.*got {name}")


def test_a_composition_in_the_space_is_refused():
    pipeline = Pipeline([("clf", LOGISTIC)])
    voting = Voting([("a", LOGISTIC), ("knn", NEIGHBORS)])
    refused(pipeline, {"clf": [LOGISTIC, voting]}, TypeError, "got VotingClassifier")
    refused(pipeline, {"clf": [LOGISTIC, NEIGHBORS]}, TypeError, "got KNeighborsClassifier")


@pytest.mark.parametrize("private", [LOGISTIC, toy.Toy()])
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (StandardScaler(), "learns from the private records"),
        (FunctionTransformer(scale), "treat each record by itself"),
        (make_pipeline(Normalizer(), StandardScaler()), "learns from the private records"),
    ],
)
@pytest.mark.parametrize("place", ["base", "space", "nested"])
def test_a_step_that_learns_or_mixes_is_refused(private, step, message, place):
    first = step if place == "base" else "passthrough"
    pipeline = Pipeline([("first", first), ("last", private)])
    space = {"first": ["passthrough", step]} if place == "space" else [{}]
    if place == "nested":
        pipeline = Pipeline([("a", step), ("b", pipeline)])
    refused(pipeline, space, LearningStep, message)


def test_a_pipeline_keeps_no_records(tmp_path):
    pipeline = Pipeline([("a", Normalizer()), ("b", LOGISTIC)], memory=str(tmp_path / "kept"))
    refused(pipeline, [{}], ValueError, "must not have a memory")
    refused(Pipeline([("c", pipeline)]), [{}], ValueError, "must not have a memory")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "pipeline",
    [
        make_pipeline(Normalizer(), toy.Toy()),
        make_pipeline("passthrough", FunctionTransformer(), make_pipeline(Normalizer(), toy.Toy())),
    ],
)
def test_a_pipeline_of_safe_steps_is_searched(pipeline):
    search = PrivateSearch(pipeline, [{}], runs=EVERY, random_state=0).fit(*toy.records(200))
    last = search.best_estimator_
    while hasattr(last, "steps"):
        last = last[-1]
    assert last.random_state is None
    assert last.ledger is None


LAWS = [EVERY, RandomRuns(mean=3.0, trials="fixed"), CheapTrials()]


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_no_run_touches_the_objects_of_the_space(law):
    first, second = toy.Toy(level=0.2), toy.Toy(level=0.8)
    before = [dict(vars(one)) for one in (first, second)]
    pipeline = Pipeline([("clf", toy.Toy())])
    search = PrivateSearch(pipeline, {"clf": [first, second]}, runs=law, random_state=0)
    search.fit(*toy.records(400))
    assert [vars(one) for one in (first, second)] == before
    chosen = search.best_params_["clf"]
    assert chosen is first or chosen is second
    assert search.best_estimator_["clf"] is not chosen
    assert search.best_estimator_["clf"].level == chosen.level


def test_runs_of_one_configuration_share_no_object():
    seen = []

    class Marks(toy.Toy):
        def fit(self, X, y):
            super().fit(X, y)
            assert not hasattr(self.level, "used")
            self.level.used = True
            seen.append(self.level)
            return self

        def predict(self, X):
            return np.ones(len(X), int)

    law = RandomRuns(mean=4.0, trials="fixed")
    value = Level(0.5)
    PrivateSearch(Marks(), {"level": [value]}, runs=law).fit(*toy.records(200))
    assert len(set(map(id, seen))) == len(seen) == 4
    assert not hasattr(value, "used")


class Level(float):
    """A number that can carry marks."""


def test_a_private_step_of_the_space_gets_the_public_facts_of_the_search():
    X, y = table(2000)
    own = [
        LogisticRegression(bounds=Bounds(0, 1), method=method, delta=1e-8, epsilon=50.0)
        for method in ("gradient", "objective")
    ]
    pipeline = Pipeline([("clf", clone(LOGISTIC))])
    by_step, by_name = (
        PrivateSearch(pipeline, space, runs=EVERY, random_state=0).fit(X, y)
        for space in ({"clf": own}, {"clf__method": ["gradient", "objective"]})
    )
    assert by_step.plan_.training == by_name.plan_.training
    assert by_step.plan_.epsilon == by_name.plan_.epsilon <= 1.0
    assert by_step.best_estimator_["clf"].n_records == 1600
    assert by_step.classes_.tolist() == [0, 1]


def test_a_private_step_of_the_space_has_the_relation_of_the_search():
    other = LogisticRegression(bounds=Bounds(0, 1), relation="replace_one")
    pipeline = Pipeline([("clf", LOGISTIC)])
    refused(pipeline, {"clf": [LOGISTIC, other]}, ValueError, "must be that of the ledger")


class Approximate(toy.Toy):
    """Its price has a delta of its own, which adds up over runs."""

    def event(self, n_rows):  # as for the toy
        return ApproximateDP(self.epsilon, self.delta)


@pytest.mark.parametrize(
    "law", [EVERY, RandomRuns(mean=3.0), RandomRuns(mean=3.0, trials="poisson"), CheapTrials()]
)
def test_deltas_of_runs_fit_into_that_of_the_search(law):
    pipeline = Pipeline([("clf", Approximate())])
    search = PrivateSearch(pipeline, {"clf": [Approximate(0.2), Approximate(0.8)]}, runs=law)
    plan = search.plan(*toy.records(400))
    assert 0.5 < plan.epsilon <= 1.0
    assert tacit.epsilon(plan.event, delta=1e-6) == plan.epsilon


def test_a_price_that_cannot_be_met_is_refused_in_one_sentence():
    class Dear(toy.Toy):
        def event(self, n_rows):  # as for the toy
            return ApproximateDP(self.epsilon, 1e-3)

    with pytest.raises(ValueError, match="no run is cheap enough"):
        PrivateSearch(Dear(), [{}], runs=RandomRuns(mean=3.0)).plan(*toy.records(400))
