"""Frank–Wolfe over polytopes: sensitivities, price, and the rules of scikit-learn."""

import math

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.base import clone
from sklearn.linear_model import Lasso
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

import tacit
from tacit.errors import BudgetExceeded
from tacit.events import Exponential, PureDP, Relation, Repeated
from tacit.regression import Bounds, ConstantModel, FrankWolfe, frank_wolfe
from tacit.regression.sparse_gradient import LOSSES, ClippedLoss

# Tables of a few rows leave nothing but noise, and the model may be constant.
pytestmark = pytest.mark.filterwarnings("ignore:the fitted model is constant")

FALSE_ALARM = 1e-6
"""Probability that a statistical test would fail on correct code if its seed were not fixed."""
BOX = {"bounds": Bounds(-10, 10), "target_bounds": Bounds(-100, 100)}
CLASSIFIER = FrankWolfe(loss="logistic", **BOX)
REGRESSOR = FrankWolfe(**BOX)
MEMBERS = [
    CLASSIFIER,
    REGRESSOR,
    FrankWolfe(loss="logistic", analysis="published", **BOX),
    FrankWolfe(fit_intercept=False, residual_clip=5.0, **BOX),
]
RELATIONS = [Relation.ADD_REMOVE, Relation.REPLACE_ONE]


def some_data(rows=400, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-10, 10, (rows, 3))
    return X, (X[:, 0] > 0).astype(int)


# Sensitivity and price -----------------------------------------------------------------------

DOMAINS = {
    "ball": lambda rng: frank_wolfe.Ball(2.5, 4),
    "simplex": lambda rng: frank_wolfe.Hull(np.eye(4)),
    "cube": lambda rng: frank_wolfe.Hull(
        np.array(np.meshgrid(*[[0, 1]] * 4)).reshape(4, -1).T * 1.0
    ),
    "random": lambda rng: frank_wolfe.Hull(rng.normal(size=(6, 4)) + 3),
}


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_one_record_moves_scores_no_more_than_declared(loss, domain, seed):
    rng = np.random.default_rng(seed)
    domain = DOMAINS[domain](rng)
    made = ClippedLoss.make(loss, reach=domain.reach, clip=rng.choice([0.3, 1.0, 100.0]))
    x = rng.choice([-1.0, 1.0], 4) * rng.choice([1.0, rng.random()])
    theta = domain.start()
    domain.move(theta, int(rng.integers(len(domain.scores(x)))), 1.0)
    target = rng.integers(2) if loss == "logistic" else rng.uniform(-1, 1)
    change = domain.scores(made.residuals(np.array([theta @ x]), np.array([target]))[0] * x)
    assert np.ptp(change) <= made.clip * domain.diameter * (1 + 1e-12)
    assert np.abs(change).max() <= made.clip * domain.reach * (1 + 1e-12)


def test_diameters_of_known_polytopes():
    assert frank_wolfe.Ball(3.0, 5).diameter == 6
    assert frank_wolfe.Hull(np.eye(5)).diameter == pytest.approx(2)
    assert DOMAINS["cube"](None).diameter == pytest.approx(4)
    assert frank_wolfe.Hull(np.array([[5.0, 1.0], [7.0, 1.0]])).diameter == pytest.approx(2)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("analysis", frank_wolfe.ANALYSES)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_a_plan_costs_no_more_than_its_budget(epsilon, analysis, relation):
    domain = frank_wolfe.Ball(2.0, 10)
    plan = frank_wolfe.plan_frank_wolfe(
        domain, ClippedLoss.make("squared", reach=2.0), steps=50, epsilon=epsilon, delta=1e-6,
        relation=relation, analysis=analysis,
    )  # fmt: skip
    price = tacit.epsilon(plan.event, delta=1e-6, relation=relation)
    assert (0.99 if analysis == "tight" else 0.1) * epsilon <= price <= epsilon
    kind = Exponential if analysis == "tight" else PureDP
    assert isinstance(plan.event, Repeated)
    assert isinstance(plan.event.event, kind)
    assert plan.event.count == 50


def test_published_noise_is_the_papers():
    """Talwar et al. 2015, Algorithm 2, on sums: L1 ||C||_1 sqrt(8 T log(1 / delta)) / epsilon."""
    options = {"steps": 30, "epsilon": 0.5, "delta": 1e-5, "analysis": "published"}
    loss = ClippedLoss.make("squared", reach=2.0, clip=1e9)
    plan = frank_wolfe.plan_frank_wolfe(
        frank_wolfe.Ball(2.0, 10), loss, relation=Relation.ADD_REMOVE, **options
    )
    scale = 3.0 * 2.0 * math.sqrt(8 * 30 * math.log(1e5)) / 0.5
    assert plan.pick.noise_scale == pytest.approx(scale)
    replaced = frank_wolfe.plan_frank_wolfe(
        frank_wolfe.Ball(2.0, 10), loss, relation=Relation.REPLACE_ONE, **options
    )
    assert replaced.pick.noise_scale == pytest.approx(2 * scale)


def test_published_noise_is_refused_where_its_proof_ends():
    with pytest.raises(ValueError, match="epsilon must be smaller for analysis 'published'"):
        FrankWolfe(analysis="published", epsilon=30.0, delta=1e-3, steps=100, **BOX).fit(
            *some_data()
        )


def test_the_tight_analysis_needs_less_noise():
    """Standard deviations: Gumbel pi / sqrt(6) times its scale, Laplace sqrt(2) times."""
    loss, domain = ClippedLoss.make("logistic", reach=1.0), frank_wolfe.Ball(1.0, 10)
    for steps in (10, 100, 1000):
        tight, published = (
            frank_wolfe.plan_frank_wolfe(
                domain, loss, steps=steps, epsilon=1.0, delta=1e-6, analysis=analysis,
                relation=Relation.ADD_REMOVE,
            ).pick.noise_scale
            for analysis in ("tight", "published")
        )  # fmt: skip
        assert math.pi / math.sqrt(6) * tight < 0.6 * math.sqrt(2) * published


# The descent ---------------------------------------------------------------------------------


def test_without_noise_the_ball_gives_the_lasso():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (500, 8))
    y = np.clip(X @ [0.5, -0.4, 0, 0, 0, 0, 0, 0] + rng.normal(0, 0.1, 500), -1, 1)
    lasso = Lasso(alpha=0.02, fit_intercept=False).fit(X, y)
    radius = np.abs(lasso.coef_).sum()
    rows = frank_wolfe.DenseRows(X, Bounds(-1, 1).box(8), has_constant=False)
    theta = frank_wolfe.descend(
        rows, y, frank_wolfe.Ball(radius, 8), ClippedLoss.make("squared", reach=radius, clip=9.0),
        steps=2000, choose=lambda scores: int(np.argmax(scores)),
    )  # fmt: skip
    np.testing.assert_allclose(theta, lasso.coef_, atol=2e-3)


def test_a_hull_of_the_balls_vertices_is_the_ball():
    X, y = some_data()
    options = {"fit_intercept": False, "analysis": "published", "random_state": 3, **BOX}
    ball = FrankWolfe(radius=2.0, **options).fit(X, y)
    corners = 2.0 * np.vstack([np.eye(3), -np.eye(3)])
    # Only the public start differs, and the first step, of length 1, replaces it.
    hull = FrankWolfe(vertices=corners, **options).fit(X, y)
    np.testing.assert_allclose(hull.coef_, ball.coef_, rtol=1e-12)
    assert hull.intercept_ == ball.intercept_ == 0


def test_models_stay_within_the_polytope():
    X, y = some_data()
    simplex = FrankWolfe(vertices=np.eye(3), bounds=(-10, 10), target_bounds=(-10, 10)).fit(X, y)
    assert simplex.coef_.min() >= 0
    assert simplex.coef_.sum() == pytest.approx(1)
    ball = FrankWolfe(loss="logistic", radius=3.0, bounds=(-10, 10)).fit(X, y)
    assert 10 * np.abs(ball.coef_).sum() + abs(ball.intercept_[0]) <= 3 + 1e-9


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("has_constant", [True, False])
def test_dense_and_sparse_rows_give_the_same_model(loss, has_constant):
    rng = np.random.default_rng(0)
    X = sparse.random_array((200, 30), density=0.2, rng=rng).tocsr() * 5
    y = rng.integers(0, 2, 200)
    model = FrankWolfe(
        loss=loss, bounds=(-2, 3), target_bounds=(0, 1), random_state=1, analysis="published",
        fit_intercept=has_constant,
    )  # fmt: skip
    dense, thin = (clone(model).fit(table, y) for table in (X.toarray(), X))
    np.testing.assert_allclose(dense.coef_, thin.coef_, rtol=1e-9)
    np.testing.assert_allclose(dense.intercept_, thin.intercept_, rtol=1e-9)
    np.testing.assert_allclose(dense.predict(X), dense.predict(X.toarray()), atol=1e-12)


def test_entries_stored_twice_count_once():
    twice = sparse.coo_array(([0.8, 0.8, 0.5], ([0, 0, 1], [0, 0, 1])), shape=(2, 2)).tocsr()
    apart = sparse.csr_array(([0.8, 0.8, 0.5], [0, 0, 1], [0, 2, 3]), shape=(2, 2))
    for X in (twice, apart):
        rows = frank_wolfe.SparseRows(X, Bounds(-1, 1).box(2), has_constant=False)
        np.testing.assert_array_equal(rows.X.toarray(), [[1.0, 0.0], [0.0, 0.5]])


# The estimator -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Skipping check")
@parametrize_with_checks(MEMBERS)
def test_scikit_learn_finds_no_fault(estimator, check):
    check(estimator)


def test_it_learns_from_wide_sparse_rows():
    rng = np.random.default_rng(0)
    X = sparse.random_array((4_000, 2_000), density=0.01, rng=rng).tocsr()
    X.data[:] = 1.0
    X = X + sparse.csr_array(np.eye(4, 2_000)[rng.integers(4, size=4_000)])
    y = X[:, [0, 1]].sum(axis=1) > 0
    model = FrankWolfe(loss="logistic", radius=10.0, bounds=(0, 1), epsilon=2.0, random_state=0)
    fitted = model.fit(X, y)
    assert fitted.score(X, y) > 0.9
    assert np.count_nonzero(fitted.coef_) <= fitted.event_.count


def test_regression_recovers_units():
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 50, (5_000, 3))
    y = 100 + X @ [2.0, -1.0, 0.0]
    model = FrankWolfe(
        radius=3.0, bounds=(0, 50), target_bounds=(50, 200), steps=200, epsilon=50.0,
        random_state=0,
    )  # fmt: skip
    assert model.fit(X, y).score(X, y) > 0.95


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("model", MEMBERS, ids=repr)
def test_the_event_costs_no_more_than_the_budget(model, relation):
    fitted = clone(model).set_params(relation=relation, epsilon=0.8).fit(*some_data())
    assert tacit.epsilon(fitted.event_, delta=1e-6, relation=relation) <= 0.8


def test_more_budget_and_records_allow_more_steps():
    options = {"delta": 1e-6, "relation": Relation.ADD_REMOVE}
    steps = [
        frank_wolfe.choose_steps(n, epsilon=epsilon, **options)
        for n, epsilon in [(10, 1.0), (10_000, 0.1), (10_000, 1.0), (100_000, 1.0)]
    ]
    assert steps == sorted(steps)
    assert steps[0] == 4
    replaced = frank_wolfe.choose_steps(
        10_000, epsilon=1.0, delta=1e-6, relation=Relation.REPLACE_ONE
    )
    assert replaced < steps[2]


@pytest.mark.parametrize("model", MEMBERS, ids=repr)
def test_a_fit_that_cannot_be_paid_releases_nothing(model):
    ledger = tacit.Ledger(budget=tacit.Budget(epsilon=0.01, delta=1e-9))
    poor = clone(model).set_params(ledger=ledger, epsilon=1.0)
    with pytest.raises(BudgetExceeded):
        poor.fit(*some_data())
    assert not hasattr(poor, "coef_")
    assert ledger.history() == []


def spoiled_sparse(value):
    def spoil(X, y):
        table = sparse.csr_array(X)
        table.data[0] = value
        return table, y

    return spoil


FAULTS = {
    "nan": lambda X, y: (np.where(X[0, 0] == X, np.nan, X), y),
    "inf": lambda X, y: (np.where(X[0, 0] == X, np.inf, X), y),
    "sparse nan": spoiled_sparse(np.nan),
    "sparse inf": spoiled_sparse(np.inf),
    "shape": lambda X, y: (X, y[:-1]),
    "flat": lambda X, y: (X[:, 0], y),
    "mixed": lambda X, y: (np.where(X[0, 0] == X, f"secret {X[0, 0]:.4f}", X).astype(object), y),
    "empty": lambda X, y: (X[:0], y[:0]),
}
SETTINGS = [
    {"epsilon": 0.0}, {"epsilon": np.nan}, {"delta": 0.0}, {"delta": 1.0}, {"n_records": 0.5},
    {"relation": "neighbors"}, {"analysis": "loose"}, {"loss": "hinge"},
    {"radius": 0.0}, {"radius": np.inf}, {"steps": 0}, {"steps": 1.5}, {"residual_clip": -1.0},
    {"vertices": np.eye(2)}, {"vertices": np.ones((2, 3))}, {"vertices": np.empty((0, 3))},
    {"vertices": np.full((1, 3), np.nan)}, {"vertices": [1.0, 2.0, 3.0]},
    {"bounds": None}, {"bounds": Bounds([0, 0], [1, 1])},
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("model", [CLASSIFIER, REGRESSOR], ids=["classifier", "regressor"])
def test_a_faulty_table_is_an_error_without_values_and_costs_nothing(model, fault):
    ledger = tacit.Ledger()
    X, y = FAULTS[fault](*some_data())
    with pytest.raises((ValueError, TypeError)) as error:
        clone(model).set_params(ledger=ledger).fit(X, y)
    assert f"{some_data()[0][0, 0]:.3f}" not in str(error.value)
    assert ledger.history() == []


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_wrong_setting_is_an_error_and_costs_nothing(setting):
    ledger = tacit.Ledger()
    with pytest.raises((ValueError, TypeError), match="must"):
        clone(CLASSIFIER).set_params(ledger=ledger, **setting).fit(*some_data())
    assert ledger.history() == []


def test_one_class_or_three_are_refused():
    X, y = some_data()
    with pytest.raises(ValueError, match="at least two classes"):
        clone(CLASSIFIER).fit(X, np.zeros(len(y)))
    with pytest.raises(ValueError, match="Only binary classification is supported"):
        clone(CLASSIFIER).fit(X, np.arange(len(y)) % 3)


def test_a_missing_target_bound_says_what_to_pass():
    with pytest.raises(ValueError, match="target_bounds must be declared, got None"):
        FrankWolfe(bounds=(-10, 10)).fit(*some_data())


def test_bounds_of_sparse_rows_must_include_zero():
    X, y = some_data()
    with pytest.raises(ValueError, match="bounds must include 0 for a sparse X"):
        clone(CLASSIFIER).set_params(bounds=(1, 2)).fit(sparse.csr_array(X), y)


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
@pytest.mark.parametrize("model", [CLASSIFIER, REGRESSOR], ids=["classifier", "regressor"])
def test_frames_name_the_features(model, frame):
    X, y = some_data()
    table = frame({"age": X[:, 0], "hours": X[:, 1], "years": X[:, 2]})
    fitted = clone(model).fit(table, y)
    assert fitted.feature_names_in_.tolist() == ["age", "hours", "years"]
    assert fitted.predict(table).shape == (len(X),)


def test_a_grid_search_pays_the_shared_ledger_for_every_fit():
    ledger = tacit.Ledger()
    pipeline = make_pipeline(
        FunctionTransformer(accept_sparse=True), clone(CLASSIFIER).set_params(ledger=ledger)
    )
    X, y = some_data()
    GridSearchCV(pipeline, {"frankwolfe__radius": [1.0, 3.0]}, cv=3).fit(sparse.csr_array(X), y)
    assert len(ledger.history()) == 2 * 3 + 1


def test_a_seed_repeats_the_model():
    X, y = some_data()
    for table in (X, sparse.csr_array(X)):
        one, two = (clone(CLASSIFIER).set_params(random_state=7).fit(table, y) for _ in range(2))
        np.testing.assert_array_equal(one.coef_, two.coef_)


@pytest.mark.parametrize("model", MEMBERS, ids=repr)
def test_only_released_values_are_kept(model):
    learned = {key for key in vars(clone(model).fit(*some_data())) if key.endswith("_")}
    released = {"coef_", "intercept_", "event_", "is_constant_"}  # the last follows from the first
    assert learned <= released | {"classes_", "n_features_in_"}


def test_a_regressor_has_no_probabilities():
    assert not hasattr(REGRESSOR, "predict_proba")
    fitted = clone(CLASSIFIER).fit(*some_data())
    both = fitted.predict_proba(some_data()[0])
    np.testing.assert_allclose(both.sum(axis=1), 1)
    np.testing.assert_allclose(np.exp(fitted.predict_log_proba(some_data()[0])), both)


def test_the_default_radius_follows_the_budget_and_finds_a_model():
    from tacit.regression.frank_wolfe import choose_radius

    terms = {"delta": 1e-6, "relation": Relation.ADD_REMOVE}
    radii = [
        choose_radius("logistic", 10_000, epsilon=e, **terms) for e in (0.01, 0.3, 1.0, 8.0, 1e3)
    ]
    assert radii == sorted(radii)
    assert radii[0] == 2
    assert radii[-1] <= 30
    rng = np.random.default_rng(0)
    X = (rng.random((8000, 300)) < 0.1).astype(float)
    y = (X[:, :5].sum(axis=1) - X[:, 5:10].sum(axis=1) + rng.normal(0, 0.3, 8000) > 0.5) * 1
    model = FrankWolfe(loss="logistic", bounds=(0, 1), epsilon=2.0, random_state=0).fit(X, y)
    assert model.score(X, y) > max(np.mean(y), 1 - np.mean(y)) + 0.03


@pytest.mark.parametrize(("loss", "other"), [("logistic", "Logistic"), ("squared", "Linear")])
def test_a_constant_model_is_reported(loss, other):
    rng = np.random.default_rng(0)
    X = (rng.random((2000, 5)) < 0.1).astype(float)
    y = np.arange(2000) % 10 == 0
    options = {"loss": loss, "bounds": (0, 1), "radius": 0.5, "steps": 1, "random_state": 0}
    if loss == "squared":
        options |= {"target_bounds": (0, 1), "epsilon": 100.0}  # the intercept has most influence
        y = np.ones(2000)
    model = FrankWolfe(**options)
    with pytest.warns(ConstantModel, match=f"the fitted model is constant.* or {other}Regression"):
        model.fit(X, y)
    assert model.is_constant_
